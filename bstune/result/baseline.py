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
    """The number of its first run, or of the last one that continued it."""
    batch_size: BatchSize
    """Examples of a step."""
    lr: Positive
    """The learning rate."""
    hyperparameters: Hyperparameters
    """The values that the config itself has of what else is searched."""
    status: Status
    """How that run ended."""
    steps: Count
    """Steps to its end."""
    seconds: NotNegative | None
    """Seconds of training to its end."""
    value: Real | None
    """The metric's last value."""
    telling_target: Real | None
    """A harder target, where it met the study's at its first evaluation."""
    runs: Count
    """Its runs on the winner's fresh seeds."""
    reached: Count
    """Those of them that reached the target."""


class Gain(Part, frozen=True):
    """How many times as fast the winner is as the baseline, by the study's merit."""

    ratio: Positive
    """The baseline's seconds, or steps, over the winner's."""
    low: Positive | None
    """Lower end of its interval."""
    high: Positive | None
    """Upper end of its interval."""
    level: Level
    """Nominal coverage of the interval."""
    merit: Merit
    """Whether it is of seconds or of steps."""
    seeds: Count
    """Fresh seeds on which both ran, by which they are compared; 0: each stands on its own runs."""
    baseline_seeds: Count | None = None
    """Fresh seeds of the baseline that it stands on; 0: its single search trial; None in an older file."""
    winner_seeds: Count | None = None
    """Fresh seeds of the winner that it stands on; 0: what is predicted of one; None in an older file."""
    at_least: bool
    """The baseline was stopped before the target: the ratio is the least that it can be."""
