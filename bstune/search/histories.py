"""A pruned trial's history as an estimate of its steps to the target, with its error.

Metrics fall about as a power of the steps: ``log excess = -rate log(step/S)``. The excess is 1 at
the target and 0 at the best value that the metric could have. The rate over the rest of a trial is
that of its last evaluations, shrunk towards the rates of the trials that reached the target, each
taken from the same excess on.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from bstune.core.records import Record, Records, Target

Array = NDArray[np.float64]

# Where the best value is not known, the largest first gap counts as so many times the target's
# distance from it.
FIRST_GAP = 4.0
LEAST_EXCESS = 1e-3
# A trial's own rate is taken over its last steps within this factor.
RECENT_FACTOR = 3.0
# Evaluations that a line needs; of a shorter curve the best of so many last ones is its level.
LEAST_EVALUATIONS = 3
# Standard deviation of the log excess from one evaluation to the next.
EVALUATION_DEVIATION = 0.04
# Least log excess of a trial that has not reached the target, and least log steps left.
LEAST_LEFT = 0.02
# Fall of the log excess for each log step before any trial has reached the target, and the standard
# deviation of its log; all rates lie between the last two.
USUAL_RATE = 0.4
USUAL_RATE_DEVIATION = 0.6
SLOWEST_RATE = 0.02
FASTEST_RATE = 3.0
# Least standard deviation of log rates between trials, and how many trials are compared.
RATE_DEVIATION = 0.2
MOST_COMPARED = 6
# Rates fall as training goes on: what is left of the recent one, and the deviation of its log.
SLOWDOWN = 0.9
SLOWDOWN_DEVIATION = 0.3
# Least standard deviation of an extrapolated log S, and of a log rate.
LEAST_DEVIATION = 0.15
LEAST_RATE_DEVIATION = 0.1


@dataclass(frozen=True)
class Extrapolation:
    """log S of a pruned trial, and its standard deviation."""

    log_steps: float
    deviation: float


@dataclass(frozen=True)
class Line:
    """A straight line through the last evaluations of a curve."""

    rate: float
    """Fall of the log excess for each log step."""
    deviation: float
    """Of the rate."""
    level: float
    """Log excess at the curve's end."""


def excess_scale(target: Target, records: Records) -> float:
    """The target's distance from the best value that the metric could have.

    It is the goal itself where the metric falls to a positive one, as errors and losses do.
    """
    goal = target.goal or 0.0
    if target.mode == "min" and goal > 0.0:
        return goal
    gaps = [0.0]
    for record in records:
        for _, value in record.finite_history[:1]:
            gaps.append(target.gap(value) / FIRST_GAP)
    return max(gaps) or 1.0


def log_curve(record: Record, target: Target, scale: float) -> Array:
    """(log step, log excess) of each evaluation with a finite metric, (n, 2)."""
    rows = []
    for step, value in record.finite_history:
        if step > 0:
            excess = max(1.0 + target.gap(value) / scale, LEAST_EXCESS)
            rows.append((math.log(step), math.log(excess)))
    return np.array(rows, dtype=float).reshape(-1, 2)


def recent_line(curve: Array) -> Line | None:
    """The least-squares line through a curve's last evaluations; None for too few."""
    if not len(curve):
        return None
    recent = curve[curve[:, 0] >= curve[-1, 0] - math.log(RECENT_FACTOR)]
    if len(recent) < LEAST_EVALUATIONS:
        return None
    centred = recent[:, 0] - recent[:, 0].mean()
    squares = float(centred @ centred)
    slope = float(centred @ recent[:, 1]) / squares
    residuals = recent[:, 1] - recent[:, 1].mean() - slope * centred
    scatter = math.sqrt(float(residuals @ residuals) / (len(recent) - 2))
    return Line(
        rate=-slope,
        deviation=math.hypot(EVALUATION_DEVIATION, scatter) / math.sqrt(squares),
        level=max(float(recent[:, 1].mean() + slope * centred[-1]), LEAST_LEFT),
    )


def rate_from(level: float, curve: Array) -> float | None:
    """The rate at which a trial that reached the target fell there from a log excess.

    Its last evaluation is where it reached. None for a trial that never was as far off.
    """
    above = curve[curve[:, 1] > level]
    if not len(above):
        return None
    log_steps_left = max(float(curve[-1, 0] - above[-1, 0]), LEAST_LEFT)
    return min(max(level / log_steps_left, SLOWEST_RATE), FASTEST_RATE)


def extrapolate(curve: Array, reached: Sequence[Array]) -> Extrapolation | None:
    """Estimate log S from a curve; None for a curve without evaluations.

    Args:
        curve: of the pruned trial, from :func:`log_curve`.
        reached: curves of the trials that reached the target, the latest last.
    """
    if not len(curve):
        return None
    line = recent_line(curve)
    level = line.level if line else max(float(curve[-LEAST_EVALUATIONS:, 1].min()), LEAST_LEFT)
    mean, variance = _others_log_rate(level, reached)
    if line is not None:
        own = SLOWDOWN * max(line.rate, SLOWEST_RATE)
        own_variance = (line.deviation / own) ** 2 + SLOWDOWN_DEVIATION**2
        precision = 1.0 / variance + 1.0 / own_variance
        mean = (mean / variance + math.log(own) / own_variance) / precision
        variance = 1.0 / precision
    rate = min(max(math.exp(mean), SLOWEST_RATE), FASTEST_RATE)
    from_level = EVALUATION_DEVIATION / rate
    from_rate = level / rate * max(math.sqrt(variance), LEAST_RATE_DEVIATION)
    return Extrapolation(
        log_steps=float(curve[-1, 0]) + level / rate,
        deviation=math.hypot(LEAST_DEVIATION, from_level, from_rate),
    )


def _others_log_rate(level: float, reached: Sequence[Array]) -> tuple[float, float]:
    """Mean and variance of a trial's log rate, by the trials that reached the target."""
    rates = (rate_from(level, curve) for curve in reversed(reached))
    known = (math.log(rate) for rate in rates if rate is not None)
    log_rates = list(islice(known, MOST_COMPARED))
    prior_precision = 1.0 / USUAL_RATE_DEVIATION**2
    if not log_rates:
        return math.log(USUAL_RATE), 1.0 / prior_precision
    precision = prior_precision + len(log_rates) / RATE_DEVIATION**2
    share_of_prior = prior_precision / precision
    mean = share_of_prior * math.log(USUAL_RATE) + (1.0 - share_of_prior) * np.mean(log_rates)
    variance = 1.0 / precision + RATE_DEVIATION**2 + np.var(log_rates)
    return float(mean), float(variance)
