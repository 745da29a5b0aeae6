"""A trial's history as an estimate of its steps to the target, with its error.

Metrics fall about as a power of the steps, ``log excess = -rate log(step/S)``, where the excess is
the distance from the best possible value over the target's own distance from it: 1 at the target.
The rate over the rest is the trial's own recent one times a slowdown, shrunk towards those of the
trials that reached the target, taken from the same excess on. The slowdown is what those trials
show, had they been stopped on the way: it belongs to a workload. That is an estimate with a wide
error, never a bound: a trial that flattens out above the target has a rate near 0.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bstune.core.records import Target

Array = NDArray[np.float64]
# (log step, log excess) of a trial's evaluations.
LogCurve = Sequence[tuple[float, float]]
Evaluations = Sequence[tuple[int, float | None]]


class History(tuple[tuple[float, float], ...]):
    """A curve that is looked up by again and again: its hash is worked out once."""

    __hash = 0

    def __hash__(self) -> int:
        """Give a tuple's hash."""
        if self.__hash == 0:
            self.__hash = tuple.__hash__(self)
        return self.__hash


class Slowdown(NamedTuple):
    """Log of the rate over the rest of a trial, over its recent rate."""

    mean: float
    spread: float


class RecentLine(NamedTuple):
    """A line through the last evaluations of a curve."""

    # Fall of the log excess for each log step, and its standard deviation.
    rate: float
    error: float
    # Log excess at the curve's end, by the line.
    level: float


class LogFactor(NamedTuple):
    """An extrapolated log(steps to target/steps)."""

    mean: float
    spread: float


# Histories, and pairs of two: every decision reads them all, most of them once more. A study of
# 1,000 trials that were stopped has 8,000 pairs.
CACHED = 32_768
# Of a distance that others are divided by.
LEAST_SCALE = 1e-300
MOST_EXCESS = 1e30
# Of the goal's distance from an ideal value that is not known: the first evaluation's gap has so
# many.
FIRST_GAP = 4.0
# Log excess of error for each log step, where nothing has reached the target yet.
USUAL_RATE = 0.4
# Standard deviation of its logarithm.
RATE_SPREAD = 0.6
# Standard deviation of the logarithms of rates between trials, at least.
SIMILARITY = 0.2
# Of trials that reached the target, at most so many say how alike rates are.
MOST_ALIKE = 6
# A trial's own rate is taken over its last steps within this factor.
RECENT_FACTOR = 3.0
# Rates fall as training goes on; that is what is known before any trial has shown by how much ...
USUAL_SLOWDOWN = Slowdown(math.log(0.9), 0.3)
# ... and it counts as so many trials.
USUAL_TRIALS = 2.0
# Of its steps to target, at which a trial that reached it is looked at.
LOOKED_AT_SHARES = (0.25, 0.5)
# Of the log excess from one evaluation to the next.
EVALUATION_SCATTER = 0.04
# Rates are kept within these.
SLOWEST_RATE = 0.02
FASTEST_RATE = 3.0
# Log of steps to target over steps, from which on a trial is flat.
FLAT_LOG_FACTOR = 2.0
# In the logarithm, of a trial that has not reached the target.
LEAST_EXCESS = 0.02
# Log steps: what is left of a trial, or lies between two evaluations, at least.
LEAST_LOG_STEPS = 0.02
# Standard deviation of any extrapolated log S, at least.
LEAST_SPREAD = 0.15


def ideal_value(target: Target, bounds: Sequence[float] | None) -> float | None:
    """Give the best value that the metric can take; None where there is none, or none is known.

    It is one of its bounds, or 0 for a metric that falls to a positive goal.
    """
    if bounds is not None and len(bounds) == 2:
        best = target.best_bound(bounds)
        if math.isfinite(best) and target.gap(best) < 0:
            return best
    falls_to_positive = target.mode == "min" and target.value > 0
    return 0.0 if falls_to_positive else None


def log_excess(
    history: Evaluations, target: Target, ideal: float | None
) -> list[tuple[float, float]]:
    """Give (log step, log excess) of the finite evaluations; the excess is 1 at the target.

    Without an ideal value, the distance from goal to ideal is taken as a quarter of the first gap.
    """
    gaps = list[tuple[int, float]]()
    for step, value in history:
        if step <= 0 or value is None:
            continue
        gap = target.gap(value)
        if math.isfinite(gap):
            gaps.append((step, gap))
    if not gaps:
        return []
    if ideal is None:
        _, first_gap = gaps[0]
        scale = max(first_gap, 1e-12) / FIRST_GAP
    else:
        scale = abs(target.value - ideal)
    curve = list[tuple[float, float]]()
    for step, gap in gaps:
        # A target next to the ideal value has an excess that no float holds: it is beyond any other
        # anyway.
        excess = min(1.0 + gap / max(scale, LEAST_SCALE), MOST_EXCESS)
        curve.append((math.log(step), math.log(max(excess, 1e-3))))
    return curve


@lru_cache(maxsize=CACHED)
def history_of(
    evaluations: tuple[tuple[int, float | None], ...], target: Target, ideal: float | None
) -> History:
    """Read a trial's evaluations as :func:`log_excess` does, once for all decisions."""
    return History(log_excess(evaluations, target, ideal))


@lru_cache(maxsize=CACHED)
def recent_line(curve: LogCurve) -> RecentLine | None:
    """Fit a line to the curve's last steps, within ``RECENT_FACTOR``.

    None for fewer than three evaluations.
    """
    if not curve:
        return None
    since = curve[-1][0] - math.log(RECENT_FACTOR)
    recent = [point for point in curve if point[0] >= since]
    if len(recent) < 3 or recent[-1][0] == recent[0][0]:
        return None
    columns = list(zip(*recent, strict=True))
    log_steps = np.array(columns[0])
    excess = np.array(columns[1])
    away = log_steps - log_steps.mean()
    square = float(away @ away)
    slope = float(away @ excess) / square
    residual = excess - excess.mean() - slope * away
    unexplained = math.sqrt(float(residual @ residual) / (len(excess) - 2))
    scatter = math.hypot(EVALUATION_SCATTER, unexplained)
    level = max(float(excess.mean() + slope * away[-1]), LEAST_EXCESS)
    return RecentLine(rate=-slope, error=scatter / math.sqrt(square), level=level)


def is_flat(curve: LogCurve) -> bool:
    """Tell whether a trial would take many times its steps even at the most that its recent rate may be."""
    recent = recent_line(curve)
    if recent is None:
        return False
    most = recent.rate + 2.0 * recent.error
    return recent.level > FLAT_LOG_FACTOR * most


@lru_cache(maxsize=CACHED)
def reached_rate(curve: LogCurve, log_steps: float, excess: float) -> float | None:
    """Give the rate of a trial that reached the target: log excess lost a log step, from an excess on.

    Args:
        curve: (log step, log excess) of its evaluations; of these, each new least one counts.
        log_steps: when it reached the target, where the log excess is 0.
        excess: log excess from which on the rate is taken.

    Returns:
        None for a trial whose first evaluation is below ``excess`` already, or whose evaluations
        never come down to it.
    """
    least = math.inf
    before: tuple[float, float] | None = None
    for log_step, value in curve:
        if value >= least:
            continue
        least = value
        if value > excess:
            before = log_step, value
            continue
        if before is None:
            return None
        # It had this excess between two evaluations, on the line that joins them.
        step_before, value_before = before
        share = (value_before - excess) / max(value_before - value, 1e-9)
        start = step_before + min(max(share, 0.0), 1.0) * (log_step - step_before)
        return excess / max(log_steps - start, LEAST_LOG_STEPS)
    return None


@lru_cache(maxsize=CACHED)
def _log_slowdowns(curve: LogCurve, end: float) -> tuple[float, ...]:
    """Give by how much a trial slowed down from each of ``LOOKED_AT_SHARES`` on, in log.

    ``end`` is the log of the steps after which it reached the target.
    """
    logs = list[float]()
    for share in LOOKED_AT_SHARES:
        stop = end + math.log(share)
        beginning = tuple(point for point in curve if point[0] <= stop)
        recent = recent_line(beginning)
        if recent is not None and recent.rate > SLOWEST_RATE:
            rate_of_rest = recent.level / (end - beginning[-1][0])
            logs.append(math.log(rate_of_rest / recent.rate))
    return tuple(logs)


def fit_slowdown(reached: Sequence[tuple[LogCurve, float]]) -> Slowdown:
    """Fit the slowdown of trials that reached the target, given as curve and log steps.

    It is shrunk towards ``USUAL_SLOWDOWN``, and is that where no trial shows any.
    """
    seen = list[Array]()
    for curve, end in reached:
        logs = _log_slowdowns(_hashed(curve), end)
        if logs:
            seen.append(np.array(logs))
    usual = USUAL_SLOWDOWN
    count = USUAL_TRIALS + len(seen)
    mean = (USUAL_TRIALS * usual.mean + sum(float(logs.mean()) for logs in seen)) / count
    squares = sum(float(((logs - mean) ** 2).mean()) for logs in seen)
    return Slowdown(mean, math.sqrt((USUAL_TRIALS * usual.spread**2 + squares) / count))


def extrapolate_history(
    curve: LogCurve,
    steps: int,
    reached: Sequence[tuple[LogCurve, float]],
    slowdown: Slowdown = USUAL_SLOWDOWN,
) -> LogFactor:
    """Extrapolate a trial that was stopped after ``steps``.

    Args:
        curve: of the trial; with an evaluation at least.
        steps: that it has run.
        reached: curve and log steps of trials that reached the target, the most similar first.
        slowdown: of the workload.
    """
    others = tuple((_hashed(other), log_steps) for other, log_steps in reached)
    return _extrapolated(_hashed(curve), steps, others, slowdown)


def _hashed(curve: LogCurve) -> History:
    return curve if isinstance(curve, History) else History(curve)


@lru_cache(maxsize=CACHED)
def _extrapolated(
    curve: History, steps: int, reached: tuple[tuple[History, float], ...], slowdown: Slowdown
) -> LogFactor:
    """Give the steps to the target over ``steps``, in log, with its standard deviation.

    The log excess falls along a line in log steps: at a rate r, what is left of it takes level / r
    more log steps. The rate is the trial's own recent one, slowed down as trials of this workload
    slow down, combined with the rates of others from the same excess on.
    """
    recent = recent_line(curve)
    if recent is None:
        level = max(min(excess for _, excess in curve[-3:]), LEAST_EXCESS)
        log_rate, spread = _rate_of_others(reached, level)
    else:
        level = recent.level
        log_rate, spread = _rate_of_others(reached, level)
        # A trial that gets worse counts as flat. Its negative rate would fit the wide spread of the
        # fast rates best, and so make it look fast.
        own_rate = max(recent.rate, 0.0) * math.exp(slowdown.mean)
        log_rate, spread = _combine(log_rate, spread, own_rate, recent.error, slowdown.spread)
    rate = min(max(math.exp(log_rate), SLOWEST_RATE), FASTEST_RATE)
    log_steps_left = level / rate
    # From the last evaluation; the steps since then count as done.
    log_factor = max(curve[-1][0] + log_steps_left - math.log(steps), LEAST_LOG_STEPS)
    error = math.hypot(EVALUATION_SCATTER / rate, log_steps_left * spread)
    return LogFactor(log_factor, math.hypot(LEAST_SPREAD, error))


def _rate_of_others(reached: Sequence[tuple[History, float]], level: float) -> tuple[float, float]:
    """Give mean and deviation of the log rate from an excess on, by trials that reached the target.

    The mean of their log rates is shrunk towards the usual rate, as by a normal prior of deviation
    ``RATE_SPREAD``: the less, the more trials there are.

    Args:
        reached: history and log steps to the target of each trial, the most similar first.
        level: the log excess.
    """
    rates = list[float]()
    for other, log_steps in reached:
        rate = reached_rate(other, log_steps, level)
        if rate is not None:
            rates.append(rate)
    usual = math.log(USUAL_RATE)
    if not rates:
        return usual, RATE_SPREAD
    logs = np.log(np.clip(rates, SLOWEST_RATE, FASTEST_RATE))
    # The most similar one counts most; the fourth counts half as much.
    weight = 1.0 / (1.0 + np.arange(len(logs)) / 3.0)
    mean = float(weight @ logs / weight.sum())
    within = float(weight @ (logs - mean) ** 2 / weight.sum())
    alike = min(len(logs), MOST_ALIKE)
    # The variance that is left of the prior's after so many trials, and its share of the prior's.
    between = 1.0 / (1.0 / RATE_SPREAD**2 + alike / SIMILARITY**2)
    share = between / RATE_SPREAD**2
    log_rate = share * usual + (1.0 - share) * mean
    return log_rate, math.sqrt(between + within + SIMILARITY**2)


def _combine(
    log_rate: float, spread: float, slope: float, error: float, relative: float
) -> tuple[float, float]:
    """Give the posterior mean and deviation of the log rate.

    The prior is normal in the log rate; the slope is normal around the rate, with an error that has
    a part in proportion to the rate, ``relative``.
    """
    grid = np.linspace(math.log(SLOWEST_RATE), math.log(FASTEST_RATE), 60)
    rate = np.exp(grid)
    sigma = np.hypot(error, relative * rate)
    density = (
        -0.5 * ((grid - log_rate) / spread) ** 2
        - 0.5 * ((slope - rate) / sigma) ** 2
        - np.log(sigma)
    )
    weight = np.exp(density - density.max())
    weight /= weight.sum()
    mean = float(weight @ grid)
    variance = float(weight @ (grid - mean) ** 2)
    return mean, math.sqrt(max(variance, 0.01))
