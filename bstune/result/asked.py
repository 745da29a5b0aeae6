"""What a study was asked and allowed, of what size its workload is, and what it took."""

from bstune.result.values import Count, FromOne, NotNegative, Part, Positive, Text


class Spend(Part, frozen=True):
    """What the trials took."""

    trials: Count
    """Trials, those in several parts counted once."""
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


class Reference(Part, frozen=True):
    """The pair of batch size and learning rate that the scaling rule goes through."""

    batch_size: Positive
    """Examples of a step."""
    lr: Positive
    """The learning rate."""
    rule: Text
    """The rule's name."""


class WorkloadSize(Part, frozen=True):
    """How large what was trained is: the scales over which studies are compared."""

    examples: FromOne
    """Of the training data."""
    parameters: FromOne
    """Of the module that are trained."""
