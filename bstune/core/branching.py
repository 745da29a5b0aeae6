"""The critical batch size now: how large a batch may be before a branch of a run begins to lose.

From a checkpoint, training goes on in branches: at several batch sizes, for the same number of
examples. Batch size B loses ``value(B) - value(B_0)`` of the metric against the run's own B_0. The
largest batch size that loses nothing is where the loss first exceeds a tolerance (Merrill et al.
2025, arXiv 2505.23971: branched training, with a tolerance of the loss, the rate following B). Both
have seen the same examples in the same order, so that losses are paired by seed.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from scipy.stats import t

# Deviations of two seeds tell no interval: Student's t with one degree of freedom is 6.3 at 90%.
LEAST_SEEDS = 3
# Where the loss rises by at most so many tolerances from one batch size to the next, a straight
# line between them tells where it passes the tolerance. One that rises by more may pass it
# anywhere.
STRAIGHT_RISE = 4.0


@dataclass(frozen=True)
class Crossing:
    """Where the loss of one seed first exceeds the tolerance."""

    batch_size: float
    """Where a straight line over log B passes it, or the middle of both sizes where it jumps."""
    below: int
    """The largest batch size up to which no more than the tolerance was lost."""
    above: int
    """The next one, which lost more."""
    jumps: bool
    """Whether the loss rises too much from the one to the other for a line between them."""


@dataclass(frozen=True)
class LargestBatch:
    """The largest batch size that loses at most the tolerance, over seeds."""

    batch_size: float
    """Geometric mean over seeds. A seed that lost nothing counts with its largest batch size."""
    low: float | None
    """Lower end of the interval over seeds; None with fewer than ``LEAST_SEEDS``."""
    high: float | None
    """Upper end; None also where a seed lost nothing at its largest size: no end was seen."""
    unbounded: int
    """How many seeds lost nothing anywhere."""
    between: tuple[int, int] | None = None
    """Where the loss of a seed jumps: the batch sizes around all jumps, between which the answer is
    not known. None: no loss jumps."""


@dataclass(frozen=True)
class Branch:
    """One branch, as it ended."""

    batch_size: int
    seed: int
    steps: int
    status: str
    value: float | None
    """The target's metric; None where it was not finite, or where the batch did not fit."""
    message: str | None
    """Why the branch failed, if it did."""


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
    """The examples that each branch trained on."""
    tolerance: float
    """The loss of the metric up to which a batch size counts as losing nothing."""
    lr_exponent: float
    """The learning rate followed this power of the batch size."""
    branches: tuple[Branch, ...]
    largest: LargestBatch
    examples_seen: float | None = None
    """The examples that the run had trained on at the checkpoint; None where that is not known."""
    tokens: int | None = None
    """Tokens of an example; None where it has none."""


def crossing(losses: Mapping[int, float], tolerance: float) -> Crossing | None:
    """Find where the loss first exceeds the tolerance; None where it never does.

    Args:
        losses: by how much each batch size makes the metric worse than the run's own does. The
            smallest is the run's own, whose loss is 0. A branch that diverged lost infinity.
        tolerance: of the loss, in units of the metric.
    """
    for below, above in pairwise(sorted(losses)):
        if losses[above] <= tolerance:
            continue
        rise = losses[above] - losses[below]
        jumps = rise > STRAIGHT_RISE * tolerance
        # A straight line over log B tells where the loss passes the tolerance. A jump may be
        # anywhere between the two sizes: then the middle stands in.
        fraction = 0.5 if jumps else (tolerance - losses[below]) / rise
        batch_size = below * (above / below) ** fraction
        return Crossing(batch_size=batch_size, below=below, above=above, jumps=jumps)
    return None


def largest_batch(
    losses_by_seed: Sequence[Mapping[int, float]], tolerance: float, level: float
) -> LargestBatch:
    """Find the largest batch size that loses nothing, with Student's interval of the mean of log B.

    Each seed has a batch size of its own at which its loss first exceeds the tolerance. A seed
    whose loss never does counts with its largest batch size, and leaves the upper end open (None).
    With fewer than ``LEAST_SEEDS`` seeds both ends are None.

    Args:
        losses_by_seed: for each seed, by how much each batch size makes the metric worse than the
            run's own does, which is the smallest.
        tolerance: of the loss, in units of the metric.
        level: nominal coverage of the interval.
    """
    log_sizes = list[float]()
    # Crossings at which the loss rises so much between two sizes that it may pass the tolerance
    # anywhere between them.
    jumps = list[Crossing]()
    seeds_without_loss = 0
    for losses in losses_by_seed:
        passed = crossing(losses, tolerance)
        if passed is None:
            seeds_without_loss += 1
            log_sizes.append(math.log(max(losses)))
            continue
        log_sizes.append(math.log(passed.batch_size))
        if passed.jumps:
            jumps.append(passed)

    mean = statistics.fmean(log_sizes)
    low: float | None = None
    high: float | None = None
    seeds = len(log_sizes)
    if seeds >= LEAST_SEEDS:
        quantile = float(t.ppf((1.0 + level) / 2.0, seeds - 1))
        half_width = quantile * statistics.stdev(log_sizes) / math.sqrt(seeds)
        low = math.exp(mean - half_width)
        high = None if seeds_without_loss else math.exp(mean + half_width)

    between: tuple[int, int] | None = None
    if jumps:
        between = (min(jump.below for jump in jumps), max(jump.above for jump in jumps))
        # Seeds that jump between the same two sizes agree on nothing narrower than these.
        if low is not None:
            low = min(low, between[0])
        if high is not None:
            high = max(high, between[1])
    return LargestBatch(
        batch_size=math.exp(mean),
        low=low,
        high=high,
        unbounded=seeds_without_loss,
        between=between,
    )
