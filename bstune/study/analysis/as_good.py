"""Which other batch sizes are as good as the best one: the range that a user may choose from."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bstune.core.records import Merit, TrialResult
from bstune.core.search_space import Space
from bstune.result import AsGood

# By how much more time, or how many more steps, than the least a batch size is as good.
AS_GOOD_WITHIN = 0.1
# The least probability that it takes no more than that. On made laws the ends of the range took
# 1.10 of the least time with 0.5, and 1.15 with 0.25 (medians of 48 ends).
AS_GOOD_CHANCE = 0.5
# An end of the range that differs by less than this share from the winner's batch size is told as
# the winner: two rates at about one batch size would contradict each other.
AT_WINNER = 0.05
# A batch size whose best learning rate by the posterior lies farther than this from all rates that
# have reached the target, in octaves beside the scaling rule, is not told: no trial speaks for it.
NEAR_OCTAVES = 1.0


@dataclass(frozen=True)
class KnownRates:
    """The best learning rates over batch size, as far as trials that reached the target show them.

    Args:
        rates: at each batch size, cut to the range of those that have reached the target.
        is_near: whether the posterior's own rate lies in that range, or within ``NEAR_OCTAVES``.
    """

    rates: tuple[float, ...]
    is_near: NDArray[np.bool_]


def known_rates(
    batch_sizes: Sequence[float],
    rates: Sequence[float],
    reached: Sequence[TrialResult],
    space: Space,
) -> KnownRates:
    """Cut the posterior's best learning rates to those that have reached the target.

    Rates at several batch sizes are compared by their delta, log2(lr / rule(B)).

    Args:
        batch_sizes: of the curve.
        rates: the posterior's best learning rate at each of them.
        reached: the trials that reached the target, at least one.
        space: has the scaling rule.
    """
    deltas = [space.delta(trial.batch_size, trial.lr) for trial in reached]
    lowest, highest = min(deltas), max(deltas)
    cut_rates = list[float]()
    is_near = list[bool]()
    for batch_size, rate in zip(batch_sizes, rates, strict=True):
        delta = space.delta(round(batch_size), rate)
        cut_delta = min(max(delta, lowest), highest)
        cut_rates.append(rate * 2.0 ** (cut_delta - delta))
        is_near.append(abs(cut_delta - delta) <= NEAR_OCTAVES)
    return KnownRates(tuple(cut_rates), np.array(is_near))


def sizes_as_good(
    batch_sizes: Sequence[float],
    known: KnownRates,
    log_merits: NDArray[np.float64],
    winner: TrialResult,
    merit: Merit,
) -> AsGood:
    """Find the batch sizes around the best that probably take at most a tenth more than it.

    A batch size belongs to them if the chance of that is at least ``AS_GOOD_CHANCE``, and if its
    best rate is near those that have reached the target. They have no gap among the curve's batch
    sizes. The winner, which fresh seeds have chosen, is always in their range, which is stretched
    to it where it lies outside. At its batch size the rate is its own.

    Args:
        batch_sizes: those of the curve, rising.
        known: the best learning rate at each of them.
        log_merits: draws of the log of the seconds or steps that each takes at that rate, of shape
            (draws, batch sizes). They vary by what the trials and the timings leave open.
        winner: the trial to use.
        merit: whether seconds or steps count.
    """
    rates = known.rates
    medians = np.median(log_merits, axis=0)
    # Among the sizes that trials speak for; the winner's own is one of these.
    nearest_to_winner = int(np.abs(np.log(np.array(batch_sizes) / winner.batch_size)).argmin())
    is_near = known.is_near.copy()
    is_near[nearest_to_winner] = True
    best = int(np.where(is_near, medians, np.inf).argmin())
    # How likely each takes at most so much more than the best.
    log_over_best = log_merits - log_merits[:, [best]]
    chance = (log_over_best <= math.log1p(AS_GOOD_WITHIN)).mean(axis=0)
    first, last = _neighbours((chance >= AS_GOOD_CHANCE) & is_near, best)
    # The winner's own pair is one that ran; elsewhere the rate is the law's. It stands for an end
    # that it lies beyond, or that is about the same batch size.
    of_winner = (winner.batch_size, winner.lr)
    low, lr_low = (round(batch_sizes[first]), rates[first])
    if low > winner.batch_size or _is_near(low, winner.batch_size):
        low, lr_low = of_winner
    high, lr_high = (round(batch_sizes[last]), rates[last])
    if high < winner.batch_size or _is_near(high, winner.batch_size):
        high, lr_high = of_winner
    # The middle is the winner or, if that is an end, the size half way. Where no size lies between
    # the ends, it is the lower one.
    half_way = (first + last) // 2
    of_half_way = (round(batch_sizes[half_way]), rates[half_way])
    middle, lr_middle = (low, lr_low)
    if low < winner.batch_size < high:
        middle, lr_middle = of_winner
    elif low < of_half_way[0] < high:
        middle, lr_middle = of_half_way
    return AsGood(
        merit=merit,
        within=AS_GOOD_WITHIN,
        low=low,
        middle=middle,
        high=high,
        lr_low=lr_low,
        lr_middle=lr_middle,
        lr_high=lr_high,
        is_low_open=first == 0 or not is_near[first - 1],
        is_high_open=last == len(batch_sizes) - 1 or not is_near[last + 1],
    )


def _is_near(batch_size: float, of_winner: float) -> bool:
    """Whether a batch size is about the winner's."""
    return abs(batch_size / of_winner - 1.0) < AT_WINNER


def _neighbours(is_as_good: NDArray[np.bool_], best: int) -> tuple[int, int]:
    """Give the first and the last place of the unbroken run of good ones about the best place."""
    first = best
    while first > 0 and is_as_good[first - 1]:
        first -= 1
    last = best
    while last < len(is_as_good) - 1 and is_as_good[last + 1]:
        last += 1
    return first, last
