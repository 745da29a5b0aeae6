"""What the posterior says: predictions of new seeds, the curve, B_crit and the rate's exponent."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bstune.core.question import Question
from bstune.core.records import Frozen, Record, StepTime
from bstune.core.space import Space
from bstune.search.law import B_CRIT
from bstune.search.posterior import Posterior

Array = NDArray[np.float64]

# Standard deviation, in log steps, of a configuration's own distance from the law, which new seeds
# share; the rest of what a trial is off is its seed's. On shipped tables the choice hardly depends
# on it: with 0.05 to 0.3 the chosen one takes 1.070 to 1.081 times the best cell's time, by the law
# alone 1.087, and the luckiest trial's 1.103 (old search, 40 times the best trial's cost).
OWN_DEVIATION = 0.14
# Ends and middle of a 90% interval.
SHARES = (0.05, 0.5, 0.95)
# The near-optimal range: so many times the best's predicted median.
NEAR_OPTIMAL = 1.1
# Batch sizes at which the curve is told.
CURVE_SIZES = 97


@dataclass(frozen=True)
class Prediction:
    """What a new seed of a configuration that reached the target is expected to take."""

    record: Record
    log_value: float
    """Log of the predicted median over seeds, in what the question minimises."""
    deviation: float
    """Standard deviation of ``log_value``."""


class CurvePoint(Frozen):
    """The steps-to-target curve at one batch size and its best rate: median and 90% band."""

    batch_size: float
    steps: float
    steps_low: float
    steps_high: float
    lr: float
    lr_low: float
    lr_high: float
    step_seconds: float


def predictions(posterior: Posterior, question: Question, step_time: StepTime) -> list[Prediction]:
    """Predict a new seed of each chain that reached the target, those of new seeds left out.

    A trial was lucky, or its configuration is better than the law says: the prediction lies between
    the law and the trial, nearer to the trial where seeds differ little.
    """
    rows = posterior.rows
    of_law = posterior.law.log_steps(posterior.theta, rows.x, rows.z)
    share_of_trial = OWN_DEVIATION**2 / (OWN_DEVIATION**2 + posterior.noise**2)
    own_variance = share_of_trial * posterior.noise**2
    predicted = []
    for place, chain in enumerate(posterior.chains):
        if not chain.reached or chain.role == "new seed":
            continue
        law_mean = float(of_law[:, place].mean())
        log_steps = law_mean + share_of_trial * (float(rows.log_steps[place]) - law_mean)
        from_law = (1.0 - share_of_trial) ** 2 * float(of_law[:, place].var())
        per_step = question.value(1.0, chain.batch_size, step_time)
        predicted.append(
            Prediction(
                record=chain,
                log_value=log_steps + math.log(per_step),
                deviation=math.sqrt(own_variance + from_law),
            )
        )
    return predicted


def curve_sizes(space: Space) -> list[int]:
    """The batch sizes at which the curve is told, evenly spaced in log B."""
    sizes = np.geomspace(space.low, space.high, CURVE_SIZES)
    return sorted({space.snap(size) for size in sizes})


def curve(
    posterior: Posterior, step_time: StepTime, sizes: Sequence[float]
) -> tuple[CurvePoint, ...]:
    """The steps-to-target curve and its best rates at some batch sizes."""
    x = np.log2(np.array(sizes, dtype=float))
    steps = np.exp(np.quantile(posterior.law.curve(posterior.theta, x), SHARES, axis=0))
    rates = 2.0 ** np.quantile(posterior.law.best_rate(posterior.theta, x), SHARES, axis=0)
    points = []
    for place, size in enumerate(sizes):
        steps_low, median, steps_high = map(float, steps[:, place])
        lr_low, lr, lr_high = map(float, rates[:, place])
        points.append(
            CurvePoint(
                batch_size=size,
                steps=median,
                steps_low=steps_low,
                steps_high=steps_high,
                lr=lr,
                lr_low=lr_low,
                lr_high=lr_high,
                step_seconds=step_time(size),
            )
        )
    return tuple(points)


def near_optimal(
    points: Sequence[CurvePoint], question: Question, step_time: StepTime
) -> tuple[float, float]:
    """The batch sizes around the best one whose predicted median is at most 1.1 times as large.

    Args:
        points: of the curve, ascending in batch size.
        question: that says what is minimised.
        step_time: tau(B).
    """
    values = [question.value(point.steps, point.batch_size, step_time) for point in points]
    best = values.index(min(values))
    limit = NEAR_OPTIMAL * values[best]
    low = best
    while low > 0 and values[low - 1] <= limit:
        low -= 1
    high = best
    while high < len(values) - 1 and values[high + 1] <= limit:
        high += 1
    return points[low].batch_size, points[high].batch_size


def b_crit_quantiles(posterior: Posterior, shares: Sequence[float] = SHARES) -> tuple[float, ...]:
    """Quantiles of B_crit, in examples, by the law's parameter."""
    quantiles = np.quantile(posterior.theta[:, B_CRIT], shares)
    return _floats(np.exp(quantiles) * 2.0**posterior.law.middle)


def lr_exponent_quantiles(
    posterior: Posterior, shares: Sequence[float] = SHARES
) -> tuple[float, ...]:
    """Quantiles of the power of B as which lr*(B) grows: its slope over the batch sizes.

    Of one batch size alone it is that of the octave above.
    """
    law = posterior.law
    ends = np.array([law.low, law.high if law.high > law.low else law.low + 1.0])
    at_low, at_high = law.best_rate(posterior.theta, ends).T
    return _floats(np.quantile((at_high - at_low) / (ends[1] - ends[0]), shares))


def _floats(values: Array) -> tuple[float, ...]:
    return tuple(float(value) for value in values)
