"""How well seconds and steps are known: the timing of steps, the scatter over seeds."""

from typing import Literal

from bstune.result.values import BatchSize, Count, Items, Level, NotNegative, Part, Positive


class StepTiming(Part, frozen=True):
    """How the seconds of a step were timed, and how well they are known."""

    seconds_of: Literal["trainer", "lean"]
    """Whose steps were timed: ``Trainer.fit``'s, or the lean loop's."""
    surveyed: bool
    """Whether a survey timed them. Else the trials themselves did."""
    relative_error: NotNegative
    """Standard deviation of log tau(B) at the winner; 0.1 is about 10%."""
    waited: NotNegative
    """Share of its seconds for which the survey waited for a processor. No timing holds them."""
    threads: Count | None
    """Torch's threads that trained. None where no CPU trained."""
    not_told_apart: Items[BatchSize] = ()
    """Further batch sizes that ran on fresh seeds, with about the winner's seconds to the target.

    They lie nearer to the winner's than steps are timed.
    """
    own_over_timed: Positive | None = None
    """Seconds of a step in the winner's own runs over those that were timed: the geometric mean.

    The runs are those on fresh seeds, else its trial. None: there is no winner or no survey, or the
    runs had another loop than the survey or ran beside others.
    """


class SeedScatter(Part, frozen=True):
    """The scatter of log steps from seed to seed, one standard deviation."""

    scatter: NotNegative
    """Median over the posterior; 0.1 is about 10%."""
    low: NotNegative
    """Lower end of its interval."""
    high: NotNegative
    """Upper end of its interval."""
    level: Level
    """Nominal coverage of the interval."""
