"""What the user's own configuration came to, and what the winner gains on it."""

from bstune.core.records import Merit, Status
from bstune.result.values import (
    BatchSize,
    Count,
    Hyperparameters,
    Level,
    NotNegative,
    Part,
    Positive,
    Real,
)


class BaselineResult(Part, frozen=True):
    """What the configuration that the user runs today came to."""

    number: Count
    """The number of its trial. Of one that was continued, the number of its last part."""
    batch_size: BatchSize
    """Examples of a step."""
    lr: Positive
    """The learning rate."""
    hyperparameters: Hyperparameters
    """The config's own values of the further hyper-parameters that the study searches, by name."""
    status: Status
    """How that trial ended."""
    steps: Count
    """Steps to its end."""
    seconds: NotNegative | None
    """Seconds of training to its end. None where no step was timed."""
    value: Real | None
    """The metric's last value."""
    telling_target: Real | None
    """A harder target to ask for, where the trial met the study's at its first evaluation."""
    runs: Count
    """How often it ran on the winner's fresh seeds."""
    reached: Count
    """How many of these runs reached the target."""
    horizon: Count | None = None
    """The steps of the schedule of these runs, else of its trial. None where it has no end."""


class Gain(Part, frozen=True):
    """How many times as fast the winner is as the baseline, in seconds or in steps."""

    ratio: Positive
    """The baseline's seconds, or steps, over the winner's, less the winner's expected luck."""
    low: Positive | None
    """Lower end of its interval."""
    high: Positive | None
    """Upper end of its interval."""
    level: Level
    """Nominal coverage of the interval."""
    merit: Merit
    """Whether it is of seconds or of steps."""
    seeds: Count
    """Fresh seeds on which both ran, and by which they are compared. 0: they share no seed."""
    baseline_seeds: Count | None = None
    """Fresh seeds of the baseline that the ratio uses.

    0: the ratio uses the baseline's single trial of the search. None: an older file does not say.
    """
    winner_seeds: Count | None = None
    """Fresh seeds of the winner that the ratio uses.

    0: the ratio uses the prediction for a fresh seed. None: an older file does not say.
    """
    at_least: bool
    """Whether the ratio is a lower bound, as the baseline was stopped before the target."""
    by_own_seconds: Positive | None = None
    """The same ratio by the seconds that the compared runs took themselves.

    ``ratio`` has the seconds of a step from all trials together. None: it is of steps, or fewer
    than three seeds are common to both, or runs were not timed.
    """
