"""How well seconds and steps are known: the timing of steps, the scatter over seeds."""

from typing import Literal

from bstune.result.values import BatchSize, Count, Items, Level, NotNegative, Part


class StepTiming(Part, frozen=True):
    """What the seconds of a step are, and how well they are known."""

    seconds_of: Literal["trainer", "lean"]
    """Whose steps were timed: ``Trainer.fit``'s, or the lean loop's."""
    surveyed: bool
    """Whether a survey timed them, else the trials themselves."""
    relative_error: NotNegative
    """Standard deviation of log tau(B) at the winner; 0.1 is about 10%."""
    waited: NotNegative
    """Share of the survey's seconds for which it waited for a processor, which is in no timing."""
    threads: Count | None
    """Of torch, that trained; None where a CPU does not train."""
    not_told_apart: Items[BatchSize] = ()
    """Batch sizes that ran on fresh seeds, too, and whose times the timing does not tell from the
    winner's."""


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
