"""The critical batch size now: how large a batch may be before a branch of a run begins to lose.

From a checkpoint, training goes on at several batch sizes for the same number of examples. Batch
size B loses ``value(B) - value(B_0)`` of the metric against the run's own B_0. The largest batch
size that loses nothing is where the loss first exceeds a tolerance (Merrill et al. 2025, arXiv
2505.23971: branched training, with a tolerance of the loss, the rate following B). Both have seen
the same examples in the same order, so that losses are paired by seed.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from scipy.stats import t

# Deviations of two seeds tell no interval: Student's t with one degree of freedom is 6.3 at 90%.
LEAST_SEEDS = 3
# Within a rise of so many tolerances a straight line between two batch sizes tells where it
# passes one. A loss that rises by more may have passed it anywhere between them.
STRAIGHT_RISE = 4.0


@dataclass(frozen=True)
class Crossing:
    """Where the loss of one seed first exceeds the tolerance."""

    batch_size: float
    """By a straight line over log B, or the geometric middle of both sizes where it jumps."""
    below: int
    """The largest batch size until which nothing was lost."""
    above: int
    """The next one, which lost more than the tolerance."""
    jumps: bool
    """Whether the loss rises too much from the one to the other for a line between them."""


@dataclass(frozen=True)
class LargestBatch:
    """The largest batch size that loses at most the tolerance, over seeds."""

    batch_size: float
    """Geometric mean; of a seed that lost nothing anywhere, its largest batch size counts."""
    low: float | None
    """End of the interval over seeds; None with fewer than ``LEAST_SEEDS``."""
    high: float | None
    """Likewise; None also where a seed lost nothing at its largest size: no end was seen."""
    unbounded: int
    """How many seeds lost nothing anywhere."""
    between: tuple[int, int] | None = None
    """Where the loss of a seed jumps: the batch sizes around all jumps; within them it is not
    known."""


@dataclass(frozen=True)
class Branch:
    """One branch, as it ended."""

    batch_size: int
    seed: int
    steps: int
    status: str
    value: float | None
    """Of the target's metric; None where it was not finite, or where the batch did not fit."""
    message: str | None


@dataclass(frozen=True)
class Branches:
    """All branches of a checkpoint, and what they come to."""

    checkpoint: str
    metric: str
    start: float | None
    """The metric at the checkpoint."""
    batch_size: int
    """The run's own."""
    examples: int
    """That each branch trained on."""
    tolerance: float
    lr_exponent: float
    branches: tuple[Branch, ...]
    largest: LargestBatch
    examples_seen: float | None = None
    """That the run had trained on at the checkpoint; None where its steps do not tell."""
    tokens: int | None = None
    """Of an example; None where it has none."""


def crossing(losses: Mapping[int, float], tolerance: float) -> Crossing | None:
    """Find where the loss first exceeds the tolerance; None where it never does.

    Args:
        losses: by batch size, the run's own with 0 the smallest; a branch that diverged lost
            infinity.
        tolerance: of the loss, in units of the metric.
    """
    for below, above in pairwise(sorted(losses)):
        if losses[above] <= tolerance:
            continue
        rise = losses[above] - losses[below]
        jumps = rise > STRAIGHT_RISE * tolerance
        share = 0.5 if jumps else (tolerance - losses[below]) / rise
        batch_size = below * (above / below) ** share
        return Crossing(batch_size=batch_size, below=below, above=above, jumps=jumps)
    return None


def largest_batch(
    losses_by_seed: Sequence[Mapping[int, float]], tolerance: float, level: float
) -> LargestBatch:
    """Find the largest batch size that loses nothing, with Student's interval of the mean of log B.

    Args:
        losses_by_seed: of each seed its losses by batch size, as :func:`crossing` takes them.
        tolerance: of the loss.
        level: of the interval.
    """
    logs = list[float]()
    jumps = list[Crossing]()
    unbounded = 0
    for losses in losses_by_seed:
        passed = crossing(losses, tolerance)
        if passed is None:
            unbounded += 1
            logs.append(math.log(max(losses)))
            continue
        logs.append(math.log(passed.batch_size))
        if passed.jumps:
            jumps.append(passed)

    mean = statistics.fmean(logs)
    low: float | None = None
    high: float | None = None
    if len(logs) >= LEAST_SEEDS:
        quantile = float(t.ppf((1.0 + level) / 2.0, len(logs) - 1))
        half_width = quantile * statistics.stdev(logs) / math.sqrt(len(logs))
        low = math.exp(mean - half_width)
        high = None if unbounded else math.exp(mean + half_width)

    between: tuple[int, int] | None = None
    if jumps:
        between = (min(jump.below for jump in jumps), max(jump.above for jump in jumps))
        # Seeds that jump between the same two sizes agree on nothing narrower than these.
        if low is not None:
            low = min(low, between[0])
        if high is not None:
            high = max(high, between[1])
    return LargestBatch(
        batch_size=math.exp(mean), low=low, high=high, unbounded=unbounded, between=between
    )
