"""What a posterior predicts of a fresh seed at the points of the trials that reached the target."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import ndtr

from bstune.core.step_time import StepTimes
from bstune.search.frontier_law import NOISE, log_steps, noise_variance
from bstune.search.horizon import OUTLIERS, RELIABLE, least_cost, log_met
from bstune.search.likelihood import log_steps_seen, variance_seen
from bstune.search.observations import Observation, Point
from bstune.search.posterior import Posterior, StepWeight

# Standard deviation, in log S, of what the model misses at one point. The trial predicted to be
# best takes 1.075 times the best cell (three shipped tables, time and steps, 8 seeds, 40 times the
# best trial's cost); with 0.05 to 0.3 it is 1.070 to 1.081, by the posterior mean alone 1.087, and
# the luckiest trial takes 1.103.
POINT_MISFIT = 0.1
# A run that diverged where others reached the target counts as so many times the expected steps.
FAILURE_FACTOR = 4.0


def objective_weight(objective: str, tau: StepTimes) -> StepWeight:
    """Choose the factor from steps to the objective: seconds per step, or 1 for ``steps``."""
    if objective == "steps":
        return np.ones_like
    return lambda x: tau(np.exp2(x))


def objective_so_far(observation: Observation, weight: StepWeight) -> float:
    """Compute the objective of a trial as far as it has run: its steps, or their seconds."""
    return observation.steps * float(weight(np.array(observation.x)))


def fresh_steps(posterior: Posterior) -> dict[int, float]:
    """Predict the steps that a fresh seed takes at each reached observation's point, by its number.

    A point is a batch size, a learning rate and other hyper-parameters. The prediction lies between
    the posterior mean of log S, which all trials inform, and the runs at the very point. These
    count the more, the smaller their noise from seed to seed is compared with what the model misses
    at one point. A stopped run counts as its estimate or bound, one that diverged as far slower
    than expected.

    Where schedules end with the trial, the steps are those of all runs at :func:`fresh_horizons`
    until one reaches the target, those that miss it included.
    """
    if posterior.prior.horizon:
        return {number: cost.steps for number, cost in _least_costs(posterior).items()}
    steps = dict[int, float]()
    for place, log_s in _fresh_log_steps(posterior).items():
        steps[posterior.observations[place].number] = math.exp(log_s)
    return steps


def fresh_horizons(posterior: Posterior) -> dict[int, int]:
    """Choose the horizon, in steps, with which each reached observation would cost least.

    A horizon is the length of a schedule that ends with its trial. The result is by the
    observation's number; empty where schedules do not end with the trial. The trial's own horizon
    was chosen before its S was seen: a longer one may miss the target less often, a shorter one may
    cost less. Only those with which nine of ten runs are predicted to reach the target are
    considered: what needs several seeds is no answer to a search.
    """
    if not posterior.prior.horizon:
        return {}
    return {number: round(cost.horizon) for number, cost in _least_costs(posterior).items()}


def chance_of_reaching(posterior: Posterior, number: int, horizon: float) -> float:
    """Compute the chance that a fresh seed at an observation's point meets the target in a horizon.

    It is ``(1 - outliers) Phi((log horizon - E[log S])/sd)``, with sd the deviation of log S over
    the posterior and from seed to seed. ``number`` is that of an observation that reached the
    target, ``horizon`` is in steps.
    """
    at_reached = _fresh_at_horizons(posterior)
    numbers = [trial.number for trial in posterior.observations]
    log_s, deviation = at_reached[numbers.index(number)]
    return (1.0 - OUTLIERS) * float(ndtr((math.log(horizon) - log_s) / deviation))


class LeastCost(NamedTuple):
    """The horizon with which a point costs least."""

    steps: float
    """The steps that its runs take until one reaches the target."""
    horizon: float
    """The steps after which such a run's schedule ends."""


def _least_costs(posterior: Posterior) -> dict[int, LeastCost]:
    """Find the horizon of least cost at each reached observation's point, by its number.

    The cost of a horizon is the steps that its runs take until one of them reaches the target.
    """
    # The log of (the step at which a run of each horizon meets the target / S), with S the shortest
    # horizon that meets it. Horizons and costs are relative to S here, too.
    log_met_over_s = log_met(posterior.theta[:, posterior.prior.horizon_law])
    costs = dict[int, LeastCost]()
    for place, (log_s, deviation) in _fresh_at_horizons(posterior).items():
        trial = posterior.observations[place]
        log_longest = math.inf
        if posterior.budget is not None:
            log_longest = math.log(posterior.budget(2.0**trial.x)) - log_s
        # A horizon so far above S (in deviations) that nine of ten runs reach the target: an answer
        # is not to need several seeds.
        log_horizon, cost = least_cost(log_met_over_s, deviation, log_longest, shortest=RELIABLE)
        costs[trial.number] = LeastCost(
            steps=cost * math.exp(log_s), horizon=math.exp(log_s + log_horizon)
        )
    return costs


def _fresh_at_horizons(posterior: Posterior) -> dict[int, tuple[float, float]]:
    """Predict a fresh seed's log S where schedules end with the trial: mean and deviation.

    S is the shortest horizon (length of the schedule) that meets the target. Each reached
    observation has a pair, by its place among all. The prediction by the model is moved towards the
    runs at the same point, the same hyper-parameters, in each draw of the posterior by itself: what
    a run says of S depends on the law of the metric over horizons, which differs from draw to draw.
    A run counts the less, the larger its noise from seed to seed and the error of that law are. One
    that met the target early in a long horizon says little of how short the horizon could be.
    """
    data = posterior.data
    theta = posterior.theta
    expected_log_s = log_steps(theta, data.points, posterior.prior)
    log_s_seen = log_steps_seen(theta, data, posterior.prior)
    variance_of_law = variance_seen(theta, data, posterior.prior)
    # How far each run is above the model. A run that diverged has no S, and counts as far above.
    log_gap = np.where(data.diverged, math.log(FAILURE_FACTOR), log_s_seen - expected_log_s)
    noise = np.exp(2.0 * theta[:, NOISE, None])
    fresh = dict[int, tuple[float, float]]()
    for runs in _runs_at_points(posterior.observations):
        # What the model misses at the point is normal with the deviation POINT_MISFIT. After these
        # runs, this is its variance, and then its mean.
        precision = 1.0 / (noise + variance_of_law[..., runs])
        variance_left = 1.0 / (POINT_MISFIT**-2 + precision.sum(axis=1))
        misses = variance_left * (precision * log_gap[:, runs]).sum(axis=1)
        for place in runs:
            if posterior.observations[place].status == "reached":
                log_drawn = expected_log_s[:, place] + misses
                variance = float(log_drawn.var() + variance_left.mean() + noise.mean())
                fresh[place] = float(log_drawn.mean()), math.sqrt(variance)
    return fresh


def _fresh_log_steps(posterior: Posterior) -> dict[int, float]:
    """Predict a fresh seed's log S where no schedule ends with the trial.

    Gives a prediction for each observation that reached the target, by its place among all. The
    model's mean is moved towards the runs at the observation's point, which are those with the same
    hyper-parameters (:func:`fresh_steps`).
    """
    data = posterior.data
    expected_log_s = log_steps(posterior.theta, data.points, posterior.prior).mean(axis=0)
    # How far each run is above the model. A run that diverged has no S, and counts as far above.
    log_gap = np.where(data.diverged, math.log(FAILURE_FACTOR), data.y - expected_log_s)
    noise = noise_variance(posterior.theta)
    fresh = dict[int, float]()
    for runs in _runs_at_points(posterior.observations):
        # The share of the runs' mean gap that belongs to the point, and is not the seeds' luck.
        own_variance = POINT_MISFIT**2
        misses = float(log_gap[runs].mean()) * own_variance / (own_variance + noise / len(runs))
        for place in runs:
            if posterior.observations[place].status == "reached":
                fresh[place] = float(expected_log_s[place]) + misses
    return fresh


def _runs_at_points(observations: Sequence[Observation]) -> list[list[int]]:
    """Group the places of the observations by their point."""
    places = dict[Point, list[int]]()
    for place, trial in enumerate(observations):
        places.setdefault(trial.point, []).append(place)
    return list(places.values())


def predict_objectives(posterior: Posterior, objective: str) -> list[tuple[float, Observation]]:
    """Predict the objective of a fresh seed at each reached observation's point.

    Gives pairs of the prediction, in steps or in their cost, and the observation.
    """
    steps = fresh_steps(posterior)
    weight = objective_weight(objective, posterior.tau)
    predictions = list[tuple[float, Observation]]()
    for trial in posterior.reached:
        predictions.append((steps[trial.number] * float(weight(np.array(trial.x))), trial))
    return predictions
