"""How far a run's metric is behind the best run's, as a log factor of the budget.

A run is behind by the log of the share of the budget that it has run, less the log of the share at
which the best run had the same metric. On the law of the steps (:mod:`bstune.search.law`) it takes
so many times its budget to the best run's final metric.

A pruned run is read as the finished ones were where they had run the same share: which of them fell
behind, or made it up, hangs on batch size and rate (a Bayesian linear regression).
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bstune.core.question import Question
from bstune.core.records import Mode, Record, Records
from bstune.search.law import LEVEL, LEVEL_BELOW_BUDGET, MISFIT_SIZE, Law

Array = NDArray[np.float64]

# No run is behind by more e-folds of the budget, either way.
MOST_BEHIND = 4.0
# The best run's metric falls on beyond its end as over its last decade, times this: it flattens.
DECADE = math.log(10.0)
SLOWDOWN = 0.7
# Its curve falls, for each e-fold of the budget, by at least this share of what the median finished
# run is off: a flat end, or a metric that was best at its first evaluation, tells no slope.
LEAST_FALL = 0.5
# Standard deviation of what a finished run is behind: of the curve, and for each e-fold behind.
CURVE_DEVIATION = 0.02
BEHIND_DEVIATION = 0.15
# A pruned run changes, to its end, by these before any run has told: on average, for each octave of
# batch size and of rate from the best run, and for each e-fold that it is behind; and the rest.
# They are for an eighth of the budget, and smaller in proportion to the root of the e-folds left.
CHANGES = np.array([0.2, 0.15, 0.1, 0.3])
CHANGE_DEVIATION = 0.25
LEFT = math.log(8.0)
MOST_CHANGE = 2.0


# The prior: at the middle batch size and its best rate a run takes so many budgets, in logs, to the
# best run's metric, with this standard deviation; and of the misfit at a knot, the log of its size.
# On grids whose metric has a U over the batch size, which the law has not, searches were 38, 3 and
# 0.8 standard deviations over seeds above the best after 20 full trials without a misfit, with one
# of 0.3, and of 1, which costs a little where there is none.
LOG_BUDGETS = 0.5
LOG_BUDGETS_SPREAD = 1.5
MISFIT = math.log(0.3)


@dataclass(frozen=True)
class Behind:
    """What a run is behind the best one at the budget's end, and its standard deviation."""

    log_factor: float
    deviation: float


def law_of_metric(law: Law) -> Law:
    """A law with the prior of runs that are behind the best one by some budgets.

    Args:
        law: with a misfit, whose level's mean is below the budget of the middle batch size.
    """
    mean, spread = law.mean.copy(), law.spread.copy()
    mean[LEVEL] += LEVEL_BELOW_BUDGET + LOG_BUDGETS
    spread[LEVEL] = LOG_BUDGETS_SPREAD
    mean[MISFIT_SIZE] = MISFIT
    return replace(law, mean=mean, spread=spread)


def behind_best(chains: Records, question: Question) -> list[Behind | None]:
    """What each run is behind the best finished one; None where nothing tells.

    Args:
        chains: the last records of all runs.
        question: of the metric, with its budget.
    """
    mode = question.target.mode
    curves = []
    for chain in chains:
        curves.append(best_so_far(chain, mode, question.last_step(chain.batch_size)))
    finished = []
    for place, chain in enumerate(chains):
        # New seeds are read by what the search has found, as its own trials are.
        if chain.status == "finished" and chain.role != "new seed":
            finished.append(place)
    if not finished:
        return [None] * len(chains)
    best = min(finished, key=lambda place: float(curves[place][-1, 1]))
    reading = _Reading.of(curves[best], [float(curves[place][-1, 1]) for place in finished])
    coordinates = np.log2([(chain.batch_size, chain.lr) for chain in chains])
    off_best = coordinates - coordinates[best]
    found: list[Behind | None] = []
    for place, curve in enumerate(curves):
        if not len(curve):
            found.append(None)
            continue
        is_finished = chains[place].status == "finished"
        if reading.slope == 0.0:
            # All finished runs are equal, and none of them tells what a difference means.
            found.append(Behind(0.0, CURVE_DEVIATION) if is_finished else None)
            continue
        now = reading.behind(*curve[-1])
        change, deviation = 0.0, CURVE_DEVIATION
        if not is_finished:
            # The best run is behind itself by nothing at any share: it tells of no other.
            others = [other for other in finished if other != best]
            then = [reading.behind_at(curves[other], float(curve[-1, 0])) for other in others]
            ends = [reading.behind(*curves[other][-1]) for other in others]
            change, deviation = _predicted_change(
                now, off_best[place], -float(curve[-1, 0]), then, off_best[others], ends
            )
        log_factor = now + change
        deviation += BEHIND_DEVIATION * max(log_factor, 0.0)
        found.append(Behind(log_factor, deviation))
    return found


def best_so_far(record: Record, mode: Mode, last_step: int) -> Array:
    """(log share of the budget, best metric so far) of each evaluation, (n, 2); it falls."""
    rows = []
    for step, value in record.finite_history:
        if step > 0:
            rows.append((math.log(step / last_step), value if mode == "min" else -value))
    curve = np.array(rows, dtype=float).reshape(-1, 2)
    curve[:, 1] = np.minimum.accumulate(curve[:, 1])
    return curve


@dataclass(frozen=True)
class _Reading:
    """The best run's curve, by which others are read."""

    log_shares: Array
    values: Array
    slope: float
    """Fall of the metric for each e-fold of the budget, beyond the curve's ends."""

    @classmethod
    def of(cls, curve: Array, ends: Sequence[float]) -> "_Reading":
        """Read by the best curve, and by the last values of all finished ones."""
        log_shares, values = curve.T
        least = LEAST_FALL * (statistics.median_high(ends) - min(ends))
        falling = values.copy()
        for place in reversed(range(len(values) - 1)):
            distance = log_shares[place + 1] - log_shares[place]
            falling[place] = max(values[place], falling[place + 1] + least * distance)
        decade_before = np.interp(log_shares[-1] - DECADE, log_shares, falling)
        fall = SLOWDOWN * float(decade_before - falling[-1]) / DECADE
        return cls(log_shares, falling, max(fall, least))

    def behind(self, log_share: float, value: float) -> float:
        """How far a run is behind that has this metric at a share of the budget."""
        first, last = float(self.values[0]), float(self.values[-1])
        if value > first:
            when = float(self.log_shares[0]) - (value - first) / self.slope
        elif value < last:
            when = float(self.log_shares[-1]) + (last - value) / self.slope
        else:
            when = float(np.interp(-value, -self.values, self.log_shares))
        return min(max(log_share - when, -MOST_BEHIND), MOST_BEHIND)

    def behind_at(self, curve: Array, log_share: float) -> float:
        """How far a run was behind at a share; before its first evaluation that counts."""
        place = max(int(np.searchsorted(curve[:, 0], log_share, side="right")) - 1, 0)
        return self.behind(log_share, float(curve[place, 1]))


def _predicted_change(
    now: float,
    off_best: Array,
    left: float,
    then: Sequence[float],
    others_off_best: Array,
    ends: Sequence[float],
) -> tuple[float, float]:
    """What a pruned run's distance changes by to the budget's end, and its standard deviation.

    Args:
        now: how far it is behind.
        off_best: octaves of batch size and rate from the best run, (2,).
        left: e-folds of the budget that are left.
        then: how far the other finished runs were behind, at the same share.
        others_off_best: as ``off_best``, (n, 2).
        ends: how far they are behind at their end.
    """
    scale = math.sqrt(left / LEFT)
    at = np.array([1.0, *off_best, now])
    rows = np.column_stack([np.ones(len(then)), others_off_best, then])
    changes = np.subtract(ends, then)
    noise = (scale * CHANGE_DEVIATION) ** 2 + (BEHIND_DEVIATION * np.maximum(ends, 0.0)) ** 2
    precision = np.diag((scale * CHANGES) ** -2.0) + (rows.T / noise) @ rows
    mean = np.linalg.solve(precision, (rows.T / noise) @ changes)
    variance = at @ np.linalg.solve(precision, at) + (scale * CHANGE_DEVIATION) ** 2
    change = float(np.clip(at @ mean, -MOST_CHANGE, MOST_CHANGE))
    return change, math.sqrt(float(variance))
