"""The critical batch size now: the largest one at which a branch of a run loses nothing against its own batch size.

From a checkpoint, training goes on at several batch sizes for the same number of examples. Batch size B loses
``value(B) - value(B_0)`` of the metric against the run's own B_0; the largest batch size that loses nothing is where
the loss first exceeds a tolerance (Merrill et al. 2025, arXiv 2505.23971: branched training, with a tolerance of the
loss, the rate following B). Both have seen the same examples in the same order, so that losses are paired by seed.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from scipy.stats import t


@dataclass(frozen=True)
class LargestBatch:
    """The largest batch size that loses at most the tolerance.

    Args:
        batch_size: geometric mean over seeds; of seeds that lost nothing anywhere, their largest size is taken.
        low: end of the interval over seeds; None with fewer than two.
        high: likewise; None where a seed lost nothing at its largest size, so that the end was not seen.
        unbounded: how many seeds lost nothing anywhere.
    """

    batch_size: float
    low: float | None
    high: float | None
    unbounded: int


def crossing(losses: Mapping[int, float], tolerance: float) -> float | None:
    """Return where the loss, on straight lines over log B, first exceeds the tolerance; None where it never does.

    ``losses`` are by batch size, the run's own with 0 the smallest; a branch that diverged lost infinity.
    """
    sizes = sorted(losses)
    for smaller, larger in pairwise(sizes):
        before, after = losses[smaller], losses[larger]
        if after > tolerance:
            share = (tolerance - before) / (after - before) if math.isfinite(after) else 0.0
            return float(smaller * (larger / smaller) ** share)
    return None


def largest_batch(
    by_seed: Sequence[Mapping[int, float]], tolerance: float, level: float
) -> LargestBatch:
    """Return the largest batch size that loses nothing, of each seed's losses by batch size, with its interval.

    The interval is Student's, of the mean of log B over seeds.
    """
    found = [crossing(losses, tolerance) for losses in by_seed]
    logs = [
        math.log(max(losses) if one is None else one)
        for one, losses in zip(found, by_seed, strict=True)
    ]
    mean, unbounded = statistics.fmean(logs), sum(one is None for one in found)
    if len(logs) < 2:
        return LargestBatch(math.exp(mean), None, None, unbounded)
    half = (
        float(t.ppf((1.0 + level) / 2.0, len(logs) - 1))
        * statistics.stdev(logs)
        / math.sqrt(len(logs))
    )
    high = None if unbounded else math.exp(mean + half)
    return LargestBatch(math.exp(mean), math.exp(mean - half), high, unbounded)
