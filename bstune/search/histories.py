"""A trial's history as an estimate of its steps to the target, with its error.

Metrics fall about as a power of the steps, ``log excess = -rate log(step/S)``. The excess is the
metric's distance from its best possible value over the target's distance from that: 1 at the
target.

The rate over the rest of a trial is its own recent one times a slowdown. It is shrunk towards the
rates of the trials that reached the target, taken from the same excess on. The slowdown belongs to
a workload: it is what these trials would have shown, had they been stopped on the way.

That is an estimate with a wide error, never a bound: a trial that flattens out above the target has
a rate near 0.
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
    """A curve, (log step, log excess) of each evaluation, whose hash is worked out once.

    Caches look it up again and again.
    """

    __hash = 0

    def __hash__(self) -> int:
        """Hash as a tuple does."""
        # 0 is the class's value: the hash is not known yet.
        if self.__hash == 0:
            self.__hash = tuple.__hash__(self)
        return self.__hash


class Slowdown(NamedTuple):
    """What is known of log(rate over the rest of a trial / its recent rate)."""

    log_mean: float
    """Its mean: below 0 histories fall more slowly as training goes on."""
    log_spread: float
    """Its standard deviation."""


class RecentLine(NamedTuple):
    """A line through the last evaluations of a curve."""

    rate: float
    """Fall of the log excess for each log step."""
    error: float
    """Standard deviation of the rate."""
    level: float
    """Log excess at the curve's end, by the line."""


class LogFactor(NamedTuple):
    """An extrapolated log(steps to target/steps)."""

    mean: float
    spread: float
    """Its standard deviation."""


# Histories, and pairs of two, that each cache holds: every decision reads them all, most of them
# once more. A study of 1,000 trials that were stopped has 8,000 pairs.
CACHED = 32_768
# The least distance that gaps are divided by.
LEAST_SCALE = 1e-300
# The least excess: at the ideal value it is 0, which has no logarithm.
LEAST_EXCESS = 1e-3
# The largest excess: what is farther off is not told apart.
MOST_EXCESS = 1e30
# Where the ideal value is not known, the first evaluation's gap counts as so many times the
# target's distance from it.
FIRST_GAP = 4.0
# Fall of the log excess for each log step, before any trial has reached the target.
USUAL_RATE = 0.4
# Standard deviation of its logarithm.
RATE_SPREAD = 0.6
# Least standard deviation of the logarithms of rates between trials.
SIMILARITY = 0.2
# So many trials that reached the target have a say, at most, in how alike rates are.
MOST_ALIKE = 6
# A trial's own rate is taken over its last steps within this factor.
RECENT_FACTOR = 3.0
# Rates fall as training goes on; that is what is known before any trial has shown by how much ...
USUAL_SLOWDOWN = Slowdown(math.log(0.9), 0.3)
# ... and it counts as so many trials.
USUAL_TRIALS = 2.0
# Shares of its steps to the target at which a trial that reached it is read as if stopped there.
LOOKED_AT_SHARES = (0.25, 0.5)
# Standard deviation of the log excess from one evaluation to the next.
EVALUATION_SCATTER = 0.04
# Rates are kept within these.
SLOWEST_RATE = 0.02
FASTEST_RATE = 3.0
# Log(steps to target/steps) from which on a trial counts as flat.
FLAT_LOG_FACTOR = 2.0
# Least log excess of a trial that has not reached the target.
LEAST_LOG_EXCESS = 0.02
# Least log steps that are left of a trial, or lie between two evaluations.
LEAST_LOG_STEPS = 0.02
# Least standard deviation of an extrapolated log S.
LEAST_SPREAD = 0.15
# Least variance of a log rate: no rate is known to better than 10%.
LEAST_RATE_VARIANCE = 0.01


def ideal_value(target: Target, bounds: Sequence[float] | None) -> float | None:
    """Choose the best value that the metric can take; None where there is none, or none is known.

    It is the better one of its ``bounds`` (lowest, highest), if that is finite and better than the
    target. Else it is 0 for a metric that falls to a positive target.
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
    """Convert the finite evaluations to (log step, log excess); the excess is 1 at the target.

    The excess is the metric's distance from its ideal value over the target's distance from that.
    Where the ideal value is None, the latter is taken as a quarter of the first evaluation's gap to
    the target.
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
        # A first evaluation that met the target has a gap of 0 or less.
        scale = max(first_gap, 1e-12) / FIRST_GAP
    else:
        scale = abs(target.value - ideal)
    curve = list[tuple[float, float]]()
    for step, gap in gaps:
        # A target next to the ideal value has an excess that no float holds: it is beyond any other
        # anyway.
        excess = min(1.0 + gap / max(scale, LEAST_SCALE), MOST_EXCESS)
        curve.append((math.log(step), math.log(max(excess, LEAST_EXCESS))))
    return curve


@lru_cache(maxsize=CACHED)
def read_history(
    evaluations: tuple[tuple[int, float | None], ...], target: Target, ideal: float | None
) -> History:
    """Read a trial's evaluations as :func:`log_excess` does, once for all decisions."""
    return History(log_excess(evaluations, target, ideal))


@lru_cache(maxsize=CACHED)
def recent_line(curve: LogCurve) -> RecentLine | None:
    """Fit a line to the curve's last evaluations, those within a factor ``RECENT_FACTOR`` of steps.

    The line is of log excess over log steps: its fall is the rate, its end the level. None for
    fewer than three evaluations, or where all of them are of one step.
    """
    if not curve:
        return None
    log_since = curve[-1][0] - math.log(RECENT_FACTOR)
    recent = [point for point in curve if point[0] >= log_since]
    if len(recent) < 3 or recent[-1][0] == recent[0][0]:
        return None
    columns = list(zip(*recent, strict=True))
    log_steps = np.array(columns[0])
    log_excesses = np.array(columns[1])
    centred = log_steps - log_steps.mean()
    square = float(centred @ centred)
    slope = float(centred @ log_excesses) / square
    residual = log_excesses - log_excesses.mean() - slope * centred
    # Two degrees of freedom go to the line.
    unexplained = math.sqrt(float(residual @ residual) / (len(log_excesses) - 2))
    scatter = math.hypot(EVALUATION_SCATTER, unexplained)
    level = max(float(log_excesses.mean() + slope * centred[-1]), LEAST_LOG_EXCESS)
    return RecentLine(rate=-slope, error=scatter / math.sqrt(square), level=level)


def is_flat(curve: LogCurve) -> bool:
    """Whether a trial has become flat: it would take many times its steps to reach the target.

    It would take them even at its fastest likely rate, two standard deviations above the recent
    one. False where the curve is too short for a rate.
    """
    recent = recent_line(curve)
    if recent is None:
        return False
    fastest = recent.rate + 2.0 * recent.error
    # At this rate level/fastest more log steps are left. A trial that gets worse, whose rate is
    # below 0, counts as flat.
    return recent.level > FLAT_LOG_FACTOR * fastest


@lru_cache(maxsize=CACHED)
def reached_rate(curve: LogCurve, log_steps: float, level: float) -> float | None:
    """Compute the rate at which a trial reached the target: the log excess lost for each log step.

    Args:
        curve: (log step, log excess) of its evaluations; only each new least one counts.
        log_steps: log of the step at which it reached the target, where the log excess is 0.
        level: the log excess, above 0, at which the line to the target begins.

    Returns:
        The rate. None for a trial whose first evaluation is below ``level`` already, or whose
        evaluations never come down to it.
    """
    least = math.inf
    above: tuple[float, float] | None = None
    for log_step, value in curve:
        if value >= least:
            continue
        least = value
        if value > level:
            above = log_step, value
            continue
        if above is None:
            return None
        # It had this excess between two evaluations, on the line that joins them. The bounds are
        # against rounding: the excess before was above the level, and this one is not.
        log_step_before, value_before = above
        share = (value_before - level) / max(value_before - value, 1e-9)
        start_log_step = log_step_before + min(max(share, 0.0), 1.0) * (log_step - log_step_before)
        # Fewer log steps than these are not told apart: the rate stays finite.
        return level / max(log_steps - start_log_step, LEAST_LOG_STEPS)
    return None


@lru_cache(maxsize=CACHED)
def _log_slowdowns(curve: LogCurve, log_steps: float) -> tuple[float, ...]:
    """Compute by how much a trial that reached the target slowed down, as if it had been stopped.

    It is read as stopped at each of ``LOOKED_AT_SHARES`` of its steps. The result is the log of
    (the rate from there to the target / the recent rate there), below 0 where it slowed down. A
    share up to which the curve has too few evaluations, or made no progress, is left out.
    ``log_steps`` is the log of the steps to the target.
    """
    logs = list[float]()
    for share in LOOKED_AT_SHARES:
        log_stop = log_steps + math.log(share)
        beginning = tuple(point for point in curve if point[0] <= log_stop)
        recent = recent_line(beginning)
        if recent is not None and recent.rate > SLOWEST_RATE:
            # The log excess has ``level`` left to fall to the target, where it is 0.
            rate_of_rest = recent.level / (log_steps - beginning[-1][0])
            logs.append(math.log(rate_of_rest / recent.rate))
    return tuple(logs)


def fit_slowdown(reached: Sequence[tuple[LogCurve, float]]) -> Slowdown:
    """Fit how much a workload's metric falls more slowly over the rest of a trial than recently.

    This slowdown is the mean and deviation of log(rate over the rest / recent rate), of trials that
    reached the target, had they been stopped on the way. ``reached`` are their curves and the logs
    of their steps to the target. The slowdown is shrunk towards ``USUAL_SLOWDOWN``, as if
    ``USUAL_TRIALS`` more trials had shown that.
    """
    log_slowdowns = list[Array]()
    for curve, log_steps in reached:
        logs = _log_slowdowns(_hashed(curve), log_steps)
        if logs:
            log_slowdowns.append(np.array(logs))
    usual = USUAL_SLOWDOWN
    count = USUAL_TRIALS + len(log_slowdowns)
    summed = sum(float(logs.mean()) for logs in log_slowdowns)
    mean = (USUAL_TRIALS * usual.log_mean + summed) / count
    squares = sum(float(((logs - mean) ** 2).mean()) for logs in log_slowdowns)
    return Slowdown(mean, math.sqrt((USUAL_TRIALS * usual.log_spread**2 + squares) / count))


def extrapolate_history(
    curve: LogCurve,
    steps: int,
    reached: Sequence[tuple[LogCurve, float]],
    slowdown: Slowdown = USUAL_SLOWDOWN,
) -> LogFactor:
    """Extrapolate the log of (steps to the target / steps) of a trial that was stopped.

    Args:
        curve: the trial's, with an evaluation at least.
        steps: the steps that it has run.
        reached: the curves of trials that reached the target, and the logs of their steps to it,
            the most similar trial first.
        slowdown: by how much the workload's curves fall more slowly over the rest than recently.
    """
    others = tuple((_hashed(other), log_steps) for other, log_steps in reached)
    return _extrapolated(_hashed(curve), steps, others, slowdown)


def _hashed(curve: LogCurve) -> History:
    """Make a curve a :class:`History`, whose hash is computed once: caches then look it up fast."""
    return curve if isinstance(curve, History) else History(curve)


@lru_cache(maxsize=CACHED)
def _extrapolated(
    curve: History, steps: int, reached: tuple[tuple[History, float], ...], slowdown: Slowdown
) -> LogFactor:
    """Extrapolate a trial, as :func:`extrapolate_history` does.

    The excess is the metric's distance from its best value over the target's distance from that.
    Its log falls along a line in log steps, to 0 at the target: from a level, at a rate r, it takes
    level / r more log steps. The rate is the trial's own recent one, slowed down as trials of this
    workload slow down, combined with the rates of others from the same excess on.
    """
    recent = recent_line(curve)
    if recent is None:
        # There are too few evaluations for a line: the best of the last ones is the level.
        level = max(min(value for _, value in curve[-3:]), LEAST_LOG_EXCESS)
        log_rate, spread = _rate_of_others(reached, level)
    else:
        level = recent.level
        log_rate, spread = _rate_of_others(reached, level)
        # A trial that gets worse counts as flat. Its negative rate would fit the wide spread of the
        # fast rates best, and so make it look fast.
        own_rate = max(recent.rate, 0.0) * math.exp(slowdown.log_mean)
        log_rate, spread = _updated_rate(
            log_rate,
            spread,
            own_rate=own_rate,
            error=recent.error,
            relative_error=slowdown.log_spread,
        )
    rate = min(max(math.exp(log_rate), SLOWEST_RATE), FASTEST_RATE)
    log_steps_left = level / rate
    # The line starts at the last evaluation; the steps since then count as done.
    log_factor = max(curve[-1][0] + log_steps_left - math.log(steps), LEAST_LOG_STEPS)
    error = math.hypot(EVALUATION_SCATTER / rate, log_steps_left * spread)
    return LogFactor(log_factor, math.hypot(LEAST_SPREAD, error))


def _rate_of_others(reached: Sequence[tuple[History, float]], level: float) -> tuple[float, float]:
    """Estimate how fast a trial nears the target from others that reached it.

    It gives the mean and the deviation of the log of the trial's rate. The rate is the fall of the
    log excess (the metric's distance from its best value over the target's distance from that) for
    each log step. The mean of the others' log rates is shrunk towards the usual rate, as by a
    normal prior of deviation ``RATE_SPREAD``: the less, the more trials there are.

    Args:
        reached: history and log steps to the target of each trial, the most similar first.
        level: the trial's own log excess. Each other trial's rate is that from there to the target.
    """
    rates = list[float]()
    for other, log_steps in reached:
        rate = reached_rate(other, log_steps, level)
        if rate is not None:
            rates.append(rate)
    log_usual_rate = math.log(USUAL_RATE)
    if not rates:
        return log_usual_rate, RATE_SPREAD
    # A rate beyond these bounds counts as the bound: where evaluations are few, one may come out
    # far too high or too low.
    logs = np.log(np.clip(rates, SLOWEST_RATE, FASTEST_RATE))
    # The most similar one counts most; the fourth counts half as much.
    weight = 1.0 / (1.0 + np.arange(len(logs)) / 3.0)
    mean = float(weight @ logs / weight.sum())
    between_trials = float(weight @ (logs - mean) ** 2 / weight.sum())
    # The posterior variance of the workload's log rate, from which each trial's differs by
    # SIMILARITY, and the weight that is left to the prior. The least similar trials, past
    # MOST_ALIKE, are in the mean with a smaller weight, but make it no surer.
    sure_trials = min(len(logs), MOST_ALIKE)
    variance = 1.0 / (1.0 / RATE_SPREAD**2 + sure_trials / SIMILARITY**2)
    prior_weight = variance / RATE_SPREAD**2
    log_rate = prior_weight * log_usual_rate + (1.0 - prior_weight) * mean
    return log_rate, math.sqrt(variance + between_trials + SIMILARITY**2)


def _updated_rate(
    log_rate: float, spread: float, *, own_rate: float, error: float, relative_error: float
) -> tuple[float, float]:
    """Update a normal prior of a log rate by the trial's own rate: posterior mean and deviation.

    The rate is the fall of the log excess (the metric's distance from its best value) for each log
    step.

    Args:
        log_rate: the prior's mean.
        spread: the prior's standard deviation.
        own_rate: the trial's own rate as it was measured, normal around the true rate.
        error: the measurement's standard deviation.
        relative_error: a further standard deviation, as a share of the true rate.
    """
    # The measurement's error depends on the rate, so that the posterior has no closed form: it is
    # summed over a grid.
    grid = np.linspace(math.log(SLOWEST_RATE), math.log(FASTEST_RATE), 60)
    rate = np.exp(grid)
    sigma = np.hypot(error, relative_error * rate)
    log_density = (
        -0.5 * ((grid - log_rate) / spread) ** 2
        - 0.5 * ((own_rate - rate) / sigma) ** 2
        - np.log(sigma)
    )
    weight = np.exp(log_density - log_density.max())
    weight /= weight.sum()
    mean = float(weight @ grid)
    variance = float(weight @ (grid - mean) ** 2)
    return mean, math.sqrt(max(variance, LEAST_RATE_VARIANCE))
