"""What a study was asked and allowed, how large its workload is, and what its trials took."""

from bstune.result.values import Count, FromOne, NotNegative, Part, Positive, Text


class Spend(Part, frozen=True):
    """What the trials took."""

    trials: Count
    """Trials. One in several parts counts once."""
    seconds: NotNegative
    """Seconds of training, evaluation and start-up."""
    examples: Count
    """Examples trained on."""


class SearchPlan(Part, frozen=True):
    """The search's budget."""

    trials: Count
    """``search.trials``: points that may be tried."""
    replicates: Count
    """``search.replicates``: runs of the winner on fresh seeds."""
    limit: Text | None
    """The option that ended the search before its trials were through."""
    limit_value: Positive | None = None
    """The value of that option. None without one, and where it is no number of seconds."""
    least_limit: Positive | None = None
    """The least value of it with which two configurations, or another one, can be tried.

    None where the search has had time for such.
    """


class Reference(Part, frozen=True):
    """The pair of batch size and learning rate that the scaling rule goes through."""

    batch_size: Positive
    """Examples of a step."""
    lr: Positive
    """The learning rate."""
    rule: Text
    """The rule's name."""


class WorkloadSize(Part, frozen=True):
    """How large the data and the module are: the scales over which studies are compared."""

    examples: FromOne
    """Examples of the training data."""
    parameters: FromOne
    """Parameters of the module that are trained."""
