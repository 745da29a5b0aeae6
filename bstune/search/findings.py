"""What the posterior says: predictions of new seeds, the curve, B_crit and the rate's exponent."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bstune.core.question import Question
from bstune.core.records import Frozen, Record, StepTime
from bstune.core.space import Space
from bstune.search.law import B_CRIT, NOISE
from bstune.search.posterior import Posterior
from bstune.search.schedule_length import Length, least_cost, length_of

Array = NDArray[np.float64]

# Standard deviation, in log steps, of a configuration's own distance from the law, which new seeds
# share; the rest of what a trial is off is its seed's. On shipped tables the choice hardly depends
# on it: with 0.05 to 0.3 the chosen one takes 1.070 to 1.081 times the best cell's time, by the law
# alone 1.087, and the luckiest trial's 1.103 (after 40 times the best trial's cost).
OWN_DEVIATION = 0.14
# The same in log budgets, where the best metric counts: near its end a curve is flat.
OWN_IN_BUDGETS = 0.5
# A length of a schedule is kept that this share of the seeds is predicted to reach the target with.
SURE = 0.9
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
    length: Length | None = None
    """Of the schedule, where it ends with the trial; the value is that of all runs until one
    reaches the target."""


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

    The search, the choice of the best and the answer use it. A trial was lucky, or its
    configuration is better than the law says: the prediction lies between the law and the trial,
    nearer to the trial where seeds differ little.
    """
    if question.schedule_ends:
        return _predictions_by_length(posterior, question, step_time)
    rows = posterior.rows
    of_law = posterior.log_steps_of_rows()
    own_deviation = OWN_IN_BUDGETS if question.seeks_metric else OWN_DEVIATION
    share_of_trial = own_deviation**2 / (own_deviation**2 + posterior.noise**2)
    own_variance = share_of_trial * posterior.noise**2
    predicted = []
    for row, chain in enumerate(posterior.chains):
        if not chain.reached or chain.role == "new seed":
            continue
        law_mean = float(of_law[:, row].mean())
        log_steps = law_mean + share_of_trial * (float(rows.log_steps[row]) - law_mean)
        from_law = (1.0 - share_of_trial) ** 2 * float(of_law[:, row].var())
        per_step = question.value(1.0, chain.batch_size, step_time)
        predicted.append(
            Prediction(
                record=chain,
                log_value=log_steps + math.log(per_step),
                deviation=math.sqrt(own_variance + from_law),
            )
        )
    return predicted


def _predictions_by_length(
    posterior: Posterior, question: Question, step_time: StepTime
) -> list[Prediction]:
    """Predict as :func:`predictions` does, where schedules end with their trials.

    A trial keeps its schedule's length if 9 of 10 seeds are predicted to reach the target with it.
    """
    means, deviations = _predicted_new_seeds(posterior)
    predicted = []
    for row, chain in enumerate(posterior.chains):
        if not chain.reached or chain.role == "new seed":
            continue
        of_seeds = float(means[row]), math.hypot(deviations[row], posterior.noise)
        length = length_of(posterior.theta, *of_seeds, chain.schedule_steps or chain.steps)
        if length.share < SURE:
            longest = question.last_step(chain.batch_size)
            length = least_cost(posterior.theta, *of_seeds, longest, reliable=True)
        value = question.value(length.cost, chain.batch_size, step_time)
        predicted.append(Prediction(chain, math.log(value), float(deviations[row]), length))
    return predicted


def share_reaching(posterior: Posterior, number: int, steps: int) -> float:
    """The share of seeds predicted to reach the target with a schedule of so many steps.

    Args:
        posterior: of a question whose schedules end with their trials.
        number: of the trial of that configuration, the last one of its chain.
        steps: of the schedule.
    """
    place = [chain.number for chain in posterior.chains].index(number)
    means, deviations = _predicted_new_seeds(posterior)
    deviation = math.hypot(deviations[place], posterior.noise)
    return length_of(posterior.theta, float(means[place]), deviation, steps).share


def _predicted_new_seeds(posterior: Posterior) -> tuple[Array, Array]:
    """log S at each chain's configuration, and its standard deviation without the noise, (n,).

    Each draw reads a trial by its own law of schedules that end, and the prediction lies the nearer
    to the trial, the more exactly it is read.
    """
    rows = posterior.rows
    of_law = posterior.log_steps_of_rows()
    seen, variance, _ = rows.seen(posterior.law, posterior.theta)
    noise = np.exp(2.0 * posterior.theta[:, NOISE, None])
    share_of_trial = OWN_DEVIATION**2 / (OWN_DEVIATION**2 + noise + variance)
    drawn = of_law + share_of_trial * (seen - of_law)
    own_variance = (1.0 - share_of_trial).mean(axis=0) * OWN_DEVIATION**2
    return drawn.mean(axis=0), np.sqrt(own_variance + drawn.var(axis=0))


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
    for size, of_steps, of_rates in zip(sizes, steps.T.tolist(), rates.T.tolist(), strict=True):
        steps_low, median, steps_high = of_steps
        lr_low, lr, lr_high = of_rates
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
    return tuple((np.exp(quantiles) * 2.0**posterior.law.middle).tolist())


def lr_exponent_quantiles(
    posterior: Posterior, shares: Sequence[float] = SHARES
) -> tuple[float, ...]:
    """Quantiles of the power of B as which lr*(B) grows: its slope over the batch sizes.

    Of one batch size alone it is that of the octave above.
    """
    law = posterior.law
    ends = np.array([law.low, law.high if law.high > law.low else law.low + 1.0])
    at_low, at_high = law.best_rate(posterior.theta, ends).T
    return tuple(np.quantile((at_high - at_low) / (ends[1] - ends[0]), shares).tolist())
