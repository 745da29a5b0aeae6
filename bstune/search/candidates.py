"""What a decision chooses from: stopped trials that may go on, and new points near the posterior's optima.

A stopped trial's steps to the target are known by its own history as well as by the law.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import numpy as np
from numpy.typing import NDArray

from bstune.search.observations import Observation, Point, Posterior
from bstune.search.posterior import NOISE, OTHER, LikelihoodData, Points, Prior, log_steps, optimum

Array = NDArray[np.float64]
# Log2 B, log2 lr and resumed_from of the trials that run now.
Pending = Sequence[tuple[float, float, int | None]]

# Log S of a draw is cut here: exp of it stays far from a float's end.
MOST_LOG_STEPS = 50.0
# Of the steps that are expected of a stopped trial, those that are left at least: they are not
# known any better.
LEAST_LEFT = 0.1

# Octaves around the rule within which trials lie ...
NEAR_RULE = math.log2(30.0)
# ... unless this central part of the posterior of the best rate, and ...
CENTRAL_QUANTILES = (0.25, 0.75)
# ... so many octaves about it, lies beyond.
BEYOND_CENTRAL = 1.0
# Reached trials around which a third of the candidates lie.
CENTRES = 4
# Deviation, in octaves, of a candidate from the reached trial that it lies around.
AROUND_CENTRE = 0.5
# Batch sizes of new candidates for which one draw of the posterior gives the best rate.
SIZES_A_DRAW = 8
# Deviations of a candidate's other hyper-parameters, each in [0, 1], from a draw's best ones or a
# centre's.
AROUND_OTHER = 0.1
# Octaves below a batch size that ran out of memory.
MEMORY_ROOM = 0.1
# Among the new candidates, the one that a random decision moves; the first two are the ends of the
# batch sizes.
RANDOM_PLACE = 2
# Octaves of batch size and of rate: a candidate as near to a running trial is that one ...
NEAR_PENDING = 0.3
# ... and is worse by so much, in log of the objective.
NEAR_PENDING_PENALTY = 0.3


@dataclass(frozen=True)
class Domain:
    """Where the search may go: batch sizes, learning rates, and columns of other hyper-parameters, each in [0, 1]."""

    low: int
    high: int
    # To the batch size that a trial uses.
    snap: Callable[[float], int]
    # Lowest and highest log2 learning rate over log2 batch sizes (n,).
    lrs: Callable[[Array], tuple[Array, Array]]
    others: int


@dataclass(frozen=True)
class Suggestion:
    """What to run: for steps up to ``max_steps``, from the start or on from the stopped trial ``resumed_from``."""

    # Log2 of the batch size, log2 of the learning rate, and further hyper-parameters in [0, 1].
    x: float
    z: float
    other: tuple[float, ...]
    max_steps: int
    resumed_from: int | None
    # The trial that it runs again, on a fresh seed.
    repeats: int | None = None


@dataclass(frozen=True)
class Candidates:
    """Points to choose from; the first ``len(stopped)`` of them are trials to be continued.

    Args:
        stopped: these trials.
        x: log2 of the batch sizes, (m,).
        z: log2 of the learning rates, (m,).
        other: further hyper-parameters, each in [0, 1], (m, k).
        done: steps that each has, 0 for a new trial, (m,).
    """

    stopped: tuple[Observation, ...]
    x: Array
    z: Array
    other: Array
    done: Array

    def points(self, posterior: Posterior) -> Points:
        """Give them as the model takes them."""
        return posterior.prior.at(self.x, self.z, self.other)

    def some(self, rows: NDArray[np.intp]) -> "Candidates":
        """Give those in these rows, which rise."""
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
        """Suggest one of them; it is given one step more than it has, at least."""
        resumed_from: int | None = None
        if chosen < len(self.stopped):
            resumed_from = self.stopped[chosen].number
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
    """Name the stopped trial that is predicted to reach the target soonest, and the steps predicted of it.

    Those come first that are predicted to reach it within their budget; one whose budget is spent
    never comes.
    """
    stopped = list[Observation]()
    for trial in posterior.stopped:
        has_budget = trial.steps < budget(2.0**trial.x)
        if has_budget and not trial.stuck and resumable(trial.number):
            stopped.append(trial)
    if not stopped:
        return None
    options = to_be_continued(stopped, posterior.prior)
    steps = _median_steps(posterior, options)
    steps_to_go = np.maximum(steps - options.done, LEAST_LEFT * steps)
    to_go = steps_to_go * posterior.tau(np.exp2(options.x))
    last_steps = np.array([budget(float(size)) for size in np.exp2(options.x)])
    order = np.lexsort((to_go, steps > last_steps))
    chosen = int(order[0])
    return stopped[chosen].number, float(steps[chosen])


def predicted_steps(posterior: Posterior, number: int) -> float | None:
    """Predict the steps at which a stopped trial reaches the target: the posterior's median.

    None where its own history says nothing of that: it is too short, or has become flat.
    """
    for trial in posterior.stopped:
        if trial.number == number and trial.log_factor is not None and not trial.flat:
            return float(_median_steps(posterior, to_be_continued([trial], posterior.prior))[0])
    return None


def to_be_continued(stopped: Sequence[Observation], prior: Prior) -> Candidates:
    """Give stopped trials alone as what there is to choose from."""
    return Candidates(
        stopped=tuple(stopped),
        x=np.array([trial.x for trial in stopped]),
        z=np.array([trial.z for trial in stopped]),
        other=np.array([trial.other for trial in stopped]).reshape(len(stopped), prior.others),
        done=np.array([float(trial.steps) for trial in stopped]),
    )


def _median_steps(posterior: Posterior, candidates: Candidates) -> Array:
    """Give the median over all draws of the candidates' steps to the target, (m,)."""
    return expected_steps(candidate_log_steps(posterior, candidates, posterior.theta))


def expected_steps(drawn_log_steps: Array) -> Array:
    """Give the median of n log S in m draws, (m, n), as steps (n,)."""
    return np.exp(np.minimum(np.median(drawn_log_steps, axis=0), MOST_LOG_STEPS))


def new_points(
    theta: Array,
    prior: Prior,
    domain: Domain,
    ends: tuple[float, float],
    centres: Sequence[Point],
    count: int,
    rng: np.random.Generator,
) -> tuple[Array, Array, Array]:
    """Draw points to choose from, a third of them around the best trials.

    The others lie along the posterior's optima, and at both ends of the batch sizes.

    Args:
        theta: draws of the posterior.
        prior: its prior.
        domain: where the search may go.
        ends: log2 of the least and of the largest batch size.
        centres: log2 B, log2 lr and the other hyper-parameters of the best trials; may be none.
        count: of the points.
        rng: the source of chance.

    Returns:
        log2 B (n,), log2 lr (n,) and the other hyper-parameters (n, k).
    """
    low, high = ends
    x = rng.uniform(low, high, count)
    x[:2] = low, high
    draws = theta[rng.integers(len(theta), size=math.ceil(count / SIZES_A_DRAW))]
    best = list[Array]()
    for i, draw in enumerate(draws):
        sizes = x[SIZES_A_DRAW * i : SIZES_A_DRAW * (i + 1)]
        best.append(optimum(draw[None], prior.at(sizes), prior)[0])
    z = np.concatenate(best)[:count] + rng.normal(0.0, 0.5, count)
    other = rng.random((count, domain.others))
    for j in range(domain.others):
        preferred = theta[rng.integers(len(theta), size=count), OTHER + 3 * j]
        preferred = preferred + rng.normal(0.0, AROUND_OTHER, count)
        other[::2, j] = np.clip(preferred[::2], 0.0, 1.0)
    for i, (log_size, log_rate, others) in enumerate(islice(cycle(centres), count // 3)):
        place = count - 1 - i
        x[place] = log_size + rng.normal(0.0, AROUND_CENTRE)
        z[place] = log_rate + rng.normal(0.0, AROUND_CENTRE)
        moved = np.array(others) + rng.normal(0.0, AROUND_OTHER, domain.others)
        other[place] = np.clip(moved, 0.0, 1.0)
    x = np.array([math.log2(domain.snap(2.0**log_size)) for log_size in np.clip(x, low, high)])
    bottom, top = rates_near_rule(theta, prior, domain, x)
    return x, np.clip(z, bottom, top), other


def anywhere(
    theta: Array, prior: Prior, domain: Domain, too_large: float, rng: np.random.Generator
) -> tuple[float, float]:
    """Draw log2 B and log2 lr of a point at random, in case the model is wrong everywhere."""
    low, high = log_sizes(domain, too_large)
    x = math.log2(domain.snap(2.0 ** rng.uniform(low, high)))
    bottom, top = rates_near_rule(theta, prior, domain, np.array([x]))
    return x, rng.uniform(bottom[0], top[0])


def rates_near_rule(theta: Array, prior: Prior, domain: Domain, x: Array) -> tuple[Array, Array]:
    """Give the lowest and the highest log2 rate of new trials at log2 batch sizes (n,).

    What is tried first lies where the user's own rate and the rule say; trials that diverge or
    crawl there move the posterior, and the range with it.
    """
    bottom, top = domain.lrs(x)
    points = prior.at(x)
    drawn = optimum(theta, points, prior)
    low, high = np.quantile(drawn, CENTRAL_QUANTILES, axis=0)
    lowest = np.minimum(points.rule - NEAR_RULE, low - BEYOND_CENTRAL)
    highest = np.maximum(points.rule + NEAR_RULE, high + BEYOND_CENTRAL)
    return np.clip(lowest, bottom, top), np.clip(highest, bottom, top)


def log_sizes(domain: Domain, too_large: float) -> tuple[float, float]:
    """Give log2 of the least and the largest batch size to try: below one that ran out of memory, if it can be."""
    low = math.log2(domain.low)
    high = max(low, min(math.log2(domain.high), too_large - MEMORY_ROOM))
    # A snapped batch size may be the very one that did not fit.
    while high > low and domain.snap(2.0**high) >= 2.0**too_large:
        high = max(low, high - MEMORY_ROOM)
    return low, high


def candidate_log_steps(posterior: Posterior, candidates: Candidates, theta: Array) -> Array:
    """Give log S of n candidates in each of m draws, (m, n): of a stopped trial by its own history as well."""
    by_law = log_steps(theta, candidates.points(posterior), posterior.prior)
    places = {trial.number: place for place, trial in enumerate(posterior.observations)}
    stopped = [places[trial.number] for trial in candidates.stopped]
    return joined_with_histories(by_law, theta, posterior.data, stopped)


def joined_with_histories(
    by_law: Array, theta: Array, data: LikelihoodData, stopped: Sequence[int]
) -> Array:
    """Give log S of candidates, (m, n), of which the first are stopped trials, with what these have shown.

    Args:
        by_law: log S of n candidates by the law, in m draws.
        theta: these draws.
        data: of all trials.
        stopped: places of the candidates that are stopped trials among these.
    """
    count = len(stopped)
    rows = np.array(stopped, dtype=np.intp)
    law = by_law[:, :count]
    history = data.y[rows]
    # A stopped trial's seed is drawn already. Of a normal draw and a normal estimate: the mean by
    # their precisions.
    noise = np.exp(2.0 * theta[:, NOISE, None])
    estimated = law + noise / (noise + data.spread[rows] ** 2) * (history - law)
    joined = by_law.copy()
    joined[:, :count] = np.where(data.bound[rows], np.maximum(law, history), estimated)
    return joined


def are_near(
    x: Array, z: Array, log_size: float, log_rate: float, octaves: float
) -> NDArray[np.bool_]:
    """Tell which points (n,) lie within so many octaves of a batch size and of a learning rate."""
    return np.asarray((np.abs(x - log_size) < octaves) & (np.abs(z - log_rate) < octaves))


def log_over_sizes(steps: Callable[[float], float], x: Array) -> Array:
    """Give the log of steps that are a function of the batch size, at log2 batch sizes (n,)."""
    return np.log([steps(float(size)) for size in np.exp2(x)])
