"""What a decision chooses from: stopped trials that may go on, and new points near the optima.

A stopped trial's steps to the target are known by its own history as well as by the law.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import numpy as np
from numpy.typing import NDArray

from bstune.search.frontier_law import NOISE, Points, Prior, log_steps, optimum, other_places
from bstune.search.likelihood import LikelihoodData
from bstune.search.observations import Observation, Point
from bstune.search.posterior import Posterior

Array = NDArray[np.float64]
# The trials that run now: log2 of the batch size, log2 of the learning rate, and the number of the
# trial that each continues (None: it began afresh).
Pending = Sequence[tuple[float, float, int | None]]

# The largest log S of a draw: its exponential stays far from the largest float.
MOST_LOG_STEPS = 50.0
# Least share of a stopped trial's expected steps that counts as still to go: they are not known any
# better.
LEAST_LEFT = 0.1

# Octaves around the scaling rule within which new trials' learning rates lie: a factor of 30.
NEAR_RULE = math.log2(30.0)
# The range is widened to these quantiles of the posterior's best rate ...
CENTRAL_QUANTILES = (0.25, 0.75)
# ... and so many octaves beyond them.
BEYOND_CENTRAL = 1.0
# Best trials around which a third of the new points lie.
CENTRES = 4
# Deviation of these points' batch sizes and learning rates from the trial's, in octaves.
AROUND_CENTRE = 0.5
# New points whose best learning rates come from the same draw of the posterior.
SIZES_PER_DRAW = 8
# Deviation of a new point's learning rate from a draw's best one, in octaves.
AROUND_BEST_RATE = 0.5
# Deviation of a new point's other hyper-parameters, each in [0, 1], from a draw's best values or
# from the trial's that it lies around.
AROUND_OTHER = 0.1
# New batch sizes stay so many octaves below one that ran out of memory.
MEMORY_ROOM = 0.1
# Place, among the new points, of the one that a random decision moves; the first two are at the
# ends of the batch sizes.
RANDOM_PLACE = 2
# A candidate within so many octaves of a running trial, in batch size and in rate, would repeat it
# ...
NEAR_PENDING = 0.3
# ... and counts as worse by so much, in log of the objective.
NEAR_PENDING_PENALTY = 0.3


@dataclass(frozen=True)
class Domain:
    """Where the search may go."""

    low: int
    """The smallest batch size."""
    high: int
    """The largest."""
    snap: Callable[[float], int]
    """The nearest batch size that a trial may use."""
    log_rate_bounds: Callable[[Array], tuple[Array, Array]]
    """Lowest and highest log2 learning rate at log2 batch sizes (n,)."""
    others: int
    """How many other hyper-parameters there are, each in [0, 1]."""


@dataclass(frozen=True)
class Suggestion:
    """The next trial."""

    x: float
    """Log2 of the batch size."""
    z: float
    """Log2 of the learning rate."""
    other: tuple[float, ...]
    """The other hyper-parameters, each in [0, 1]."""
    max_steps: int
    """The step up to which it is trained."""
    resumed_from: int | None
    """Number of the stopped trial that it continues; None: it begins afresh."""
    repeats: int | None = None
    """Number of the trial that it runs again on a fresh seed; None: it repeats none."""


@dataclass(frozen=True)
class Candidates:
    """Points to choose from; the first ``len(stopped)`` of them are trials to be continued.

    Args:
        stopped: these trials.
        x: log2 of the batch sizes, (n,).
        z: log2 of the learning rates, (n,).
        other: the other hyper-parameters, each in [0, 1], (n, k).
        done: the steps that each has run already, (n,); 0 for a new trial.
    """

    stopped: tuple[Observation, ...]
    x: Array
    z: Array
    other: Array
    done: Array

    def points(self, posterior: Posterior) -> Points:
        """Give the candidates as the posterior's model takes them."""
        return posterior.prior.points_at(self.x, self.z, self.other)

    def take(self, rows: NDArray[np.intp]) -> "Candidates":
        """Keep the candidates in these rows, which must be ascending."""
        # The stopped trials stand before the new points.
        count = len(self.stopped)
        stopped = tuple(self.stopped[row] for row in rows.tolist() if row < count)
        return Candidates(
            stopped=stopped,
            x=self.x[rows],
            z=self.z[rows],
            other=self.other[rows],
            done=self.done[rows],
        )

    def suggestion(self, chosen: int, max_steps: float) -> Suggestion:
        """Suggest the candidate at place ``chosen``, trained up to ``max_steps``.

        It gets at least one step more than it has run already.
        """
        resumed_from: int | None = None
        if chosen < len(self.stopped):
            resumed_from = self.stopped[chosen].number
        # An infinite limit becomes a number that no trial has.
        return Suggestion(
            x=float(self.x[chosen]),
            z=float(self.z[chosen]),
            other=tuple(float(value) for value in self.other[chosen]),
            max_steps=max(math.ceil(min(max_steps, 1e15)), int(self.done[chosen]) + 1),
            resumed_from=resumed_from,
        )


def most_promising(
    posterior: Posterior,
    budget: Callable[[float], float],
    resumable: Callable[[int], bool],
) -> tuple[int, float] | None:
    """Find the stopped trial that is predicted to reach the target at the least cost still to go.

    Trials that are predicted to reach it within their budget go before the others. One whose budget
    is spent, or that cannot be continued, is never chosen.

    Args:
        posterior: of the trials so far.
        budget: gives the step at which a trial ends in any case, at a batch size.
        resumable: whether a stopped trial, by its number, can be continued.

    Returns:
        The trial's number and the steps at which it is predicted to reach the target; None if no
        stopped trial may go on.
    """
    stopped = list[Observation]()
    for trial in posterior.stopped:
        has_budget = trial.steps < budget(2.0**trial.x)
        # A stuck trial was continued before, and got no further.
        if has_budget and not trial.stuck and resumable(trial.number):
            stopped.append(trial)
    if not stopped:
        return None
    candidates = stopped_candidates(stopped, posterior.prior)
    steps = _predicted_steps(posterior, candidates)
    to_go = cost_to_go(posterior, candidates, steps)
    last_steps = np.array([budget(float(size)) for size in np.exp2(candidates.x)])
    # The last key counts first: trials within their budget, then the cheapest.
    order = np.lexsort((to_go, steps > last_steps))
    chosen = int(order[0])
    return stopped[chosen].number, float(steps[chosen])


def predicted_steps(posterior: Posterior, number: int) -> float | None:
    """Predict the steps at which a stopped trial, given by its number, reaches the target.

    They are the posterior's median. None where the trial's own history says nothing of them: it is
    too short, or has become flat.
    """
    for trial in posterior.stopped:
        if trial.number == number and trial.log_factor is not None and not trial.flat:
            candidates = stopped_candidates([trial], posterior.prior)
            return float(_predicted_steps(posterior, candidates)[0])
    return None


def stopped_candidates(stopped: Sequence[Observation], prior: Prior) -> Candidates:
    """Make candidates of stopped trials alone."""
    return Candidates(
        stopped=tuple(stopped),
        x=np.array([trial.x for trial in stopped]),
        z=np.array([trial.z for trial in stopped]),
        other=np.array([trial.other for trial in stopped]).reshape(len(stopped), prior.others),
        done=np.array([float(trial.steps) for trial in stopped]),
    )


def _predicted_steps(posterior: Posterior, candidates: Candidates) -> Array:
    """Predict the steps of n candidates to the target, by the posterior's median: (n,)."""
    return expected_steps(candidate_log_steps(posterior, candidates, posterior.theta))


def expected_steps(drawn_log_steps: Array) -> Array:
    """Take the median over m draws of n candidates' steps, (n,), from their log S, (m, n)."""
    # A median over MOST_LOG_STEPS counts as that: e^50 steps are more than any trial takes, and
    # they are finite, where the exponential of a far larger log would not be.
    return np.exp(np.minimum(np.median(drawn_log_steps, axis=0), MOST_LOG_STEPS))


def cost_to_go(posterior: Posterior, candidates: Candidates, expected: Array) -> Array:
    """Compute what n candidates still cost until their expected steps: (n,).

    It is in the unit of the posterior's ``tau``, the cost of a step: seconds or examples. It is at
    least a share ``LEAST_LEFT`` of their whole cost, as the expected steps are not known better.
    """
    steps_to_go = np.maximum(expected - candidates.done, LEAST_LEFT * expected)
    # ``tau`` is a function of the batch size, ``x`` the log2 of that.
    return np.asarray(steps_to_go * posterior.tau(np.exp2(candidates.x)))


def new_points(
    theta: Array,
    prior: Prior,
    domain: Domain,
    *,
    size_range: tuple[float, float],
    centres: Sequence[Point],
    count: int,
    rng: np.random.Generator,
) -> tuple[Array, Array, Array]:
    """Draw new points to choose from, a third of them around the best trials.

    The others lie along the posterior's best learning rates; two of them have the smallest and the
    largest batch size.

    Args:
        theta: draws of the posterior.
        prior: its prior.
        domain: where the search may go.
        size_range: log2 of the smallest and of the largest batch size.
        centres: the best trials' points; there may be none.
        count: how many points to draw.
        rng: the source of chance.

    Returns:
        log2 B (n,), log2 lr (n,) and the other hyper-parameters (n, k).
    """
    low, high = size_range
    x = rng.uniform(low, high, count)
    x[:2] = low, high
    draws = theta[rng.integers(len(theta), size=math.ceil(count / SIZES_PER_DRAW))]
    # Each draw gives the best rates of a few of the batch sizes.
    best = list[Array]()
    for i, draw in enumerate(draws):
        sizes = x[SIZES_PER_DRAW * i : SIZES_PER_DRAW * (i + 1)]
        best.append(optimum(draw[None], prior.points_at(sizes), prior)[0])
    z = np.concatenate(best)[:count] + rng.normal(0.0, AROUND_BEST_RATE, count)
    # Every second point has other hyper-parameters near a draw's best ones, the rest any.
    other = rng.random((count, domain.others))
    for j in range(domain.others):
        preferred = theta[rng.integers(len(theta), size=count), other_places(j).best]
        preferred = preferred + rng.normal(0.0, AROUND_OTHER, count)
        other[::2, j] = np.clip(preferred[::2], 0.0, 1.0)
    # The last third of the points is moved to around the best trials, each of these in turn.
    for i, (log_size, log_rate, others) in enumerate(islice(cycle(centres), count // 3)):
        place = count - 1 - i
        x[place] = log_size + rng.normal(0.0, AROUND_CENTRE)
        z[place] = log_rate + rng.normal(0.0, AROUND_CENTRE)
        moved = np.array(others) + rng.normal(0.0, AROUND_OTHER, domain.others)
        other[place] = np.clip(moved, 0.0, 1.0)
    x = np.array([math.log2(domain.snap(2.0**log_size)) for log_size in np.clip(x, low, high)])
    bottom, top = rates_near_rule(theta, prior, domain, x)
    return x, np.clip(z, bottom, top), other


def random_point(
    theta: Array, prior: Prior, domain: Domain, too_large: float, rng: np.random.Generator
) -> tuple[float, float]:
    """Draw log2 B and log2 lr of a point uniformly, for when the model is wrong everywhere.

    ``too_large`` is log2 of the smallest batch size that ran out of memory, infinite if none did.
    """
    low, high = log_size_range(domain, too_large)
    x = math.log2(domain.snap(2.0 ** rng.uniform(low, high)))
    bottom, top = rates_near_rule(theta, prior, domain, np.array([x]))
    return x, rng.uniform(bottom[0], top[0])


def rates_near_rule(theta: Array, prior: Prior, domain: Domain, x: Array) -> tuple[Array, Array]:
    """Choose the range of new trials' log2 learning rates at log2 batch sizes (n,): its two ends.

    The range lies around the user's own rate, scaled by the rule, and around the posterior's best
    rates. Trials that diverge or crawl near the rule move the posterior, and the range with it.
    """
    bottom, top = domain.log_rate_bounds(x)
    points = prior.points_at(x)
    drawn = optimum(theta, points, prior)
    low, high = np.quantile(drawn, CENTRAL_QUANTILES, axis=0)
    lowest = np.minimum(points.rule - NEAR_RULE, low - BEYOND_CENTRAL)
    highest = np.maximum(points.rule + NEAR_RULE, high + BEYOND_CENTRAL)
    return np.clip(lowest, bottom, top), np.clip(highest, bottom, top)


def log_size_range(domain: Domain, too_large: float) -> tuple[float, float]:
    """Compute log2 of the smallest and of the largest batch size to try.

    The largest one stays below ``too_large``, log2 of the smallest batch size that ran out of
    memory, unless that leaves none.
    """
    log_low = math.log2(domain.low)
    log_high = max(log_low, min(math.log2(domain.high), too_large - MEMORY_ROOM))
    # A snapped batch size may be the very one that did not fit.
    while log_high > log_low and domain.snap(2.0**log_high) >= 2.0**too_large:
        log_high = max(log_low, log_high - MEMORY_ROOM)
    return log_low, log_high


def candidate_log_steps(posterior: Posterior, candidates: Candidates, theta: Array) -> Array:
    """Compute log S, the log of the steps to the target, of n candidates in m draws ``theta``.

    The result is (m, n). For a stopped trial its own history counts as well as the law.
    """
    log_s_by_law = log_steps(theta, candidates.points(posterior), posterior.prior)
    places = {trial.number: place for place, trial in enumerate(posterior.observations)}
    stopped = [places[trial.number] for trial in candidates.stopped]
    return joined_with_histories(log_s_by_law, theta, posterior.data, stopped)


def joined_with_histories(
    log_s_by_law: Array, theta: Array, data: LikelihoodData, stopped: Sequence[int]
) -> Array:
    """Correct the law's log S of stopped trials by what their own histories have shown: (m, n).

    Args:
        log_s_by_law: log S, the log of the steps to the target, of n candidates by the law in m
            draws, (m, n). The first ones are the stopped trials.
        theta: these draws of the parameters, (m, p).
        data: what all trials of the study say.
        stopped: the place of each stopped trial in ``data``.
    """
    count = len(stopped)
    rows = np.array(stopped, dtype=np.intp)
    law = log_s_by_law[:, :count]
    history = data.y[rows]
    # A stopped trial's seed is drawn already: the law scatters around its log S by the noise from
    # seed to seed, the history by its own error. Both are normal, so the joint estimate is their
    # mean, weighed by the precisions.
    noise = np.exp(2.0 * theta[:, NOISE, None])
    estimated = law + noise / (noise + data.spread[rows] ** 2) * (history - law)
    joined = log_s_by_law.copy()
    # Where its history gives only a lower bound, log S is the law's, but no less than the bound.
    joined[:, :count] = np.where(data.bound[rows], np.maximum(law, history), estimated)
    return joined


def are_near(
    x: Array, z: Array, log_size: float, log_rate: float, octaves: float
) -> NDArray[np.bool_]:
    """Whether each of n points lies within so many octaves of a batch size and of a rate: (n,).

    All four are log2 of batch sizes (``x``, ``log_size``) and of rates (``z``, ``log_rate``).
    """
    return np.asarray((np.abs(x - log_size) < octaves) & (np.abs(z - log_rate) < octaves))


def log_over_sizes(steps: Callable[[float], float], x: Array) -> Array:
    """Compute the log of ``steps``, a function of the batch size, at log2 batch sizes (n,)."""
    return np.log([steps(float(size)) for size in np.exp2(x)])
