"""The critical batch size: at the study's target and at others, its regimes, the noise scale."""

from typing import Literal

from bstune.core.interval import INTERVAL_LEVEL
from bstune.result.values import (
    BatchSize,
    Count,
    Items,
    Level,
    NotNegative,
    Part,
    Positive,
    Real,
    Text,
)


class NextTrial(Part, frozen=True):
    """A trial that would narrow the interval of the critical batch size."""

    batch_size: BatchSize
    """Examples of a step."""
    lr: Positive
    """The learning rate."""
    steps: NotNegative
    """Steps to the target that the posterior expects."""
    seconds: NotNegative | None
    """Seconds of training to the target that it expects. None where nothing was timed."""


class CriticalInterval(Part, frozen=True):
    """A critical batch size with its interval, in examples. The trials leave open what is None."""

    value: Positive | None = None
    """Median over the posterior."""
    low: Positive | None = None
    """Lower end of the interval."""
    high: Positive | None = None
    """Upper end of the interval."""


class CriticalBatchSize(CriticalInterval, frozen=True):
    """The study's critical batch size by all trials, and what goes with it."""

    level: Level
    """Nominal coverage of the intervals."""
    s_min: Positive | None
    """Fewest steps to the target, at unlimited batch size."""
    e_min: Positive | None
    """Fewest examples to the target."""
    b_opt: Positive | None
    """Batch size with the fewest examples. None where the trials do not need a small-batch term."""
    b_opt_low: Positive | None
    """Lower end of the interval of ``b_opt``."""
    b_opt_high: Positive | None
    """Upper end of the interval of ``b_opt``."""
    perfect_scaling_below: Positive | None
    """Batch size at which the slope of log S* is -0.9: B_crit/9 without a small-batch term."""
    maximal_data_parallelism_above: Positive | None
    """Batch size at which that slope is -0.1: 9 B_crit."""
    smallest: BatchSize
    """Smallest batch size that reached the target."""
    largest: BatchSize
    """Largest batch size that reached the target."""
    next_trials: Items[NextTrial]
    """Trials that would narrow a wide interval. Empty where it is narrow."""
    note: Text | None
    """What no trial of this search would show. None where there is no such thing."""

    @property
    def is_of_one_size(self) -> bool:
        """Whether one batch size alone reached the target. Then nothing is known of the others."""
        return self.smallest == self.largest

    @property
    def is_open(self) -> bool:
        """Whether the trials leave at least one end of the interval open."""
        return self.low is None or self.high is None

    @property
    def is_beyond_search(self) -> bool:
        """Whether only batch sizes beyond those of the search would close an open interval.

        For any other one that is open, trials are named.
        """
        return self.is_open and self.note is not None and not self.next_trials


class CriticalAtTarget(CriticalInterval, frozen=True):
    """The critical batch size at another target than the study's."""

    target: Real
    """The metric's value that is the goal."""
    passed: Count
    """Trials that met this target."""

    @property
    def level(self) -> float:
        """Nominal coverage of the interval."""
        return INTERVAL_LEVEL


class Growth(Part, frozen=True):
    """The exponent of the critical batch size over the target's distance from the ideal value."""

    exponent: Real
    """Below 0 where the critical batch size grows as the target gets harder."""
    low: Real
    """Lower end of the exponent's interval."""
    high: Real
    """Upper end of the exponent's interval."""
    level: Level
    """Nominal coverage of the interval."""
    ideal: Real
    """The best value that the metric can have."""
    start: Real
    """The easiest target."""
    end: Real
    """The hardest target."""


RegimeName = Literal["perfect scaling", "diminishing returns", "maximal data parallelism"]
PERFECT_SCALING: RegimeName = "perfect scaling"
DIMINISHING_RETURNS: RegimeName = "diminishing returns"
MAXIMAL_DATA_PARALLELISM: RegimeName = "maximal data parallelism"


class Regime(Part, frozen=True):
    """A range of batch sizes over which more data parallelism gains about as much."""

    name: RegimeName
    """By the slope of log S* over log B (Shallue et al. 2018)."""
    start: Positive
    """Smallest batch size of the range, in examples."""
    end: Positive
    """Largest batch size of the range, in examples."""


class MeasuredNoiseScale(Part, frozen=True):
    """The gradient noise scale that the trials measured, in examples."""

    noise_scale: Positive | None
    """tr(Sigma)/|G|^2. None where the measurements do not determine it."""
    low: Real | None
    """Lower end of its interval."""
    high: Real | None
    """Upper end of its interval."""
    level: Level
    """Nominal coverage of the interval."""
    trials: Count
    """Trials in which it was measured."""
    steps: Count
    """Steps at which it was measured, over these trials."""
    undetermined: Text | None
    """Why there is no value. None where there is one."""
