"""The next trial: which batch size and learning rate, for how many steps, and whether it continues a stopped one.

A decision is one draw of the posterior (Thompson sampling): the best candidate of this draw, for its cost, is run. It
is first given a share of its expected cost, then continued from its checkpoint as long as draws still prefer it.

B_crit of a draw is where the slope of its frontier, log S*(B) over log B, its small-batch term left out, is -1/2: for
S_min (1 + B_crit/B) that is B_crit itself, and where the law does not hold, it is what a dense sweep over batch sizes
would show, while the model's own parameter leans on the batch sizes that were tried most.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bstune.core.curve import SLOPE_RATIO, CurveBand, half_slope
from bstune.core.errors import ConfigError
from bstune.search import observations
from bstune.search.horizon import least_cost, log_met
from bstune.search.observations import Observation, Posterior, Weight, objective_so_far, smoothed
from bstune.search.posterior import (
    NOISE,
    OTHER,
    Points,
    Prior,
    frontier,
    log_small_batch_term,
    log_steps,
    optimum,
)

Array = NDArray[np.float64]
Pending = Sequence[
    tuple[float, float, int | None]
]  # log2 B, log2 lr and resumed_from of the trials that run now
MIN_STEPS = 10.0  # of any trial: a shorter one costs more to set up than to train
LEAST_GROWTH = 1.3  # times its parent's steps, that a trial which continues another has at least
NEAR_RULE = math.log2(30.0)  # octaves around the rule within which trials lie ...
CENTRAL = (0.25, 0.75)  # ... unless this central part of the posterior of the best rate, and ...
BEYOND = 1.0  # ... so many octaves about it, lies beyond
CENTRES = 4  # reached trials around which a third of the candidates lie
ROOM = 0.1  # octaves below a batch size that ran out of memory
MAX_LUCK = 1.5  # the incumbent counts for at most so many times the least result of a single run

# Of a frontier's draw, and of the choice for the objective curve.
PER_OCTAVE = 4  # batch sizes at which a frontier is drawn
REACH = 7  # octaves beyond the batch sizes within which B_crit is sought
SETUP = 0.2  # what a trial costs beside its steps, over the cheapest one's cost: few trials rather than many
LOOK_SHARE = 0.5  # of what was spent, that a look at a regime where nothing has reached the target may cost, ...
LOOK_AFTER = (
    12.0  # ... this many times the incumbent's cost left out where the objective is not the curve
)
EDGE = 0.25  # octaves: a look lies so far within a regime, as its edge moves, or so near to the end of the range
NORMAL_WIDTH = 3.29  # standard deviations of a normal distribution that hold 90% of it
MISSES_EVERY = (
    30  # runs of a study whose schedules end with the trial: one spends its budget to no end
)
WHOLE_BUDGET = 0.95  # of it, from which on a run has spent it
APART = 1.0  # octaves, at least, between the batch sizes of trials that are named together
GIVEN_UP_AT = 1.6  # times the steps that are expected of a trial: where it ends
FRONTIER_MISFIT = (
    0.14  # in log S: what one more trial at a place still misses of the frontier there
)


@dataclass(frozen=True)
class Policy:
    """How the search spends; the defaults stand in ``conf/sampler/frontier.yaml``."""

    particles: int  # draws of the posterior, at least 10
    moves: int  # Metropolis steps of its sampler at each temperature
    candidates: int  # points that a decision chooses from, at least 10
    initial_fraction: float  # of the budget's steps, given to the first trial
    max_growth: float  # before the target is reached, the most that continuing a trial adds, over what has been spent
    max_first_growth: float  # likewise for a new trial
    probe_fraction: float  # of the incumbent's cost, given to a new trial first ...
    max_predicted_fraction: float  # ... but at most this fraction of the predicted steps to target
    stop_factor: float  # a trial ends once it costs this many times the incumbent
    cost_weight: float  # of the remaining cost in the score (log T per incumbent cost)
    random_fraction: float  # of the decisions, made at random in case the model is wrong everywhere
    curve_after: float  # once this many times the incumbent's cost has been spent, whatever the objective ...
    curve_share: float  # ... at most this fraction of the decisions is made as for the objective ``curve``, ...
    curve_cost: float  # ... and this fraction of what is spent goes into them, ...
    curve_width: float  # ... less once the interval of B_crit is narrower: upper over lower end
    # Of the objective ``loss``, see :mod:`bstune.search.fixed_budget`; costs count in full trials.
    loss_first_share: float  # of the budget, to which a trial runs first
    loss_sure: float  # deviations of the law, over that of such a trial, below which it goes on
    loss_early: float  # until so much is spent, expected improvement for its cost decides
    loss_cost_weight: float  # of the cost to go in the score: log share of the budget, a full trial
    loss_fresh_after: float  # for each so much that is spent, one more fresh seed of the best
    loss_drift: float  # of ``behind`` until the budget's end, over sqrt(-log share)
    loss_spread: float  # of ``behind`` of a trial that stopped, beside the drift
    loss_least_slope: float  # of the curves at the budget's end, over that of the last tenfold

    def __post_init__(self) -> None:
        least = {"particles": 10, "moves": 1, "candidates": 10}
        least |= dict.fromkeys(("cost_weight", "random_fraction", "curve_after", "curve_share"), 0)
        least |= dict.fromkeys(("loss_sure", "loss_early", "loss_cost_weight"), 0)
        above = {"stop_factor": 1, "curve_width": 1}  # the other fractions: above 0
        for name, value in vars(self).items():
            if name in least and not value >= least[name]:
                raise ConfigError(
                    f"sampler.policy.{name} must be at least {least[name]}, but got {value}"
                )
            if name not in least and not above.get(name, 0) < value < math.inf:
                raise ConfigError(
                    f"sampler.policy.{name} must be a number above {above.get(name, 0)}, but got {value}"
                )
            if name in ("random_fraction", "curve_share", "loss_first_share") and value > 1:
                raise ConfigError(f"sampler.policy.{name} must be at most 1, but got {value}")


@dataclass(frozen=True)
class Domain:
    """Where the search may go: batch sizes, learning rates, and columns of other hyper-parameters, each in [0, 1]."""

    low: int
    high: int
    snap: Callable[[float], int]  # to the batch size that a trial uses
    lrs: Callable[
        [Array], tuple[Array, Array]
    ]  # lowest and highest log2 learning rate over log2 batch sizes (n,)
    others: int


@dataclass(frozen=True)
class Suggestion:
    """What to run: for steps up to ``max_steps``, from the start or on from the stopped trial ``resumed_from``."""

    x: float
    z: float
    other: tuple[float, ...]
    max_steps: int
    resumed_from: int | None
    repeats: int | None = None  # the trial that it runs again, on a fresh seed


@dataclass(frozen=True)
class Candidates:
    """Points (m,), (m,), (m, k) to choose from; the first ``len(stopped)`` of them are trials to be continued."""

    stopped: tuple[Observation, ...]
    x: Array
    z: Array
    other: Array
    done: Array

    def points(self, posterior: Posterior) -> Points:
        """Return them as the model takes them."""
        return posterior.prior.at(self.x, self.z, self.other)

    def some(self, rows: NDArray[np.intp]) -> "Candidates":
        """Return those in these rows, which rise."""
        count = len(self.stopped)
        stopped = tuple(self.stopped[row] for row in rows.tolist() if row < count)
        return Candidates(stopped, self.x[rows], self.z[rows], self.other[rows], self.done[rows])

    def suggestion(self, chosen: int, max_steps: float) -> Suggestion:
        """Return one of them; it is given one step more than it has, at least."""
        return Suggestion(
            x=float(self.x[chosen]),
            z=float(self.z[chosen]),
            other=tuple(float(value) for value in self.other[chosen]),
            max_steps=max(math.ceil(min(max_steps, 1e15)), int(self.done[chosen]) + 1),
            resumed_from=self.stopped[chosen].number if chosen < len(self.stopped) else None,
        )


def suggest(
    posterior: Posterior,
    pending: Pending,
    *,
    objective: str,
    domain: Domain,
    budget: Callable[[float], float],
    resumable: Callable[[int], bool] | None,
    policy: Policy,
    rng: np.random.Generator,
) -> Suggestion:
    """Return the next trial for the objective ``time``, ``steps`` or ``curve``.

    ``budget``: the steps over batch size at which a trial ends in any case.
    """
    weight = observations.objective_weight(objective, posterior.tau)
    ranked = smoothed(posterior, objective)
    incumbent: float | None = None
    # Before one has reached the target, the objective ``curve`` too looks for what is fast.
    maps = False
    if ranked:
        least, fastest = min(ranked, key=lambda pair: pair[0])
        incumbent = min(least, MAX_LUCK * min(objective_so_far(one, weight) for _, one in ranked))
        maps = objective == "curve"
        cost = 0.0 if maps else fastest.steps * float(posterior.tau(np.exp2(fastest.x)))
        is_turn = maps
        if not maps and posterior.spent > policy.curve_after * cost:
            is_turn = rng.random() < policy.curve_share
        if is_turn:
            options = _candidates(
                posterior, pending, domain, incumbent, True, weight, resumable, budget, policy, rng
            )
            allowed = LOOK_SHARE * (posterior.spent - LOOK_AFTER * cost)
            suggestion = _suggest_for_curve(posterior, options, pending, allowed, budget, policy)
            if maps or rng.random() < _worth(posterior, suggestion, options, policy):
                return suggestion
    options = _candidates(
        posterior, pending, domain, incumbent, False, weight, resumable, budget, policy, rng
    )
    row = int(rng.integers(len(posterior.theta)))
    draw = posterior.theta[row]
    if posterior.observations and rng.random() < policy.random_fraction:
        chosen, predicted = len(options.stopped) + 2, math.inf
        x = math.log2(domain.snap(2.0 ** rng.uniform(*log_sizes(domain, posterior.too_large))))
        bottom, top = rates_near_rule(posterior.theta, posterior.prior, domain, np.array([x]))
        options.x[chosen], options.z[chosen] = x, rng.uniform(bottom[0], top[0])
    else:
        longest_at = budget if posterior.prior.horizon else None
        drawn_weight = weight if objective == "steps" else posterior.drawn_weight(row)
        chosen, predicted = thompson_sample(
            posterior, options, draw, drawn_weight, pending, policy, longest_at
        )
    done, size = float(options.done[chosen]), float(np.exp2(options.x[chosen]))
    last_step = budget(size)  # where the trial's budget is spent
    growth = policy.max_growth if done or posterior.prior.horizon else policy.max_first_growth
    first = max(policy.initial_fraction * budget(size), MIN_STEPS)
    most = max(
        growth * posterior.spent / float(posterior.tau(np.array(size))), first
    )  # before one reaches the target
    if posterior.prior.horizon:
        longest = last_step if incumbent is not None else min(most, last_step)
        best = math.inf if incumbent is None else incumbent / float(weight(options.x[chosen]))
        return options.suggestion(
            chosen, choose_horizon(posterior, options, chosen, draw, longest, best)
        )
    if incumbent is None:
        return options.suggestion(chosen, min(done + max(most, 0.4 * done), last_step))
    cap = policy.stop_factor * incumbent / float(weight(options.x[chosen]))
    # A second stage: where nothing can be continued, the first probe is the last.
    probe = min(policy.probe_fraction * cap, policy.max_predicted_fraction * predicted)
    limit = probe if resumable is not None and done < 0.75 * probe else cap
    return options.suggestion(chosen, min(max(limit, LEAST_GROWTH * done, MIN_STEPS), last_step))


def _suggest_for_curve(
    posterior: Posterior,
    options: Candidates,
    pending: Pending,
    allowed: float,
    budget: Callable[[float], float],
    policy: Policy,
) -> Suggestion:
    """Return the trial that tells most of B_crit for its cost; ``allowed`` as for :func:`choose_for_curve`."""
    longest_at = budget if posterior.prior.horizon else None
    chosen, predicted = choose_for_curve(posterior, options, pending, allowed, longest_at)
    done = float(options.done[chosen])
    last_step = budget(float(np.exp2(options.x[chosen])))
    if posterior.prior.horizon:
        horizon = choose_horizon(posterior, options, chosen, None, last_step, math.inf)
        return options.suggestion(chosen, horizon)
    probe = policy.probe_fraction * predicted
    max_steps = GIVEN_UP_AT * predicted if done >= probe else probe
    least = max(LEAST_GROWTH * done, MIN_STEPS)
    return options.suggestion(chosen, min(max(max_steps, least), last_step))


def _worth(
    posterior: Posterior, suggestion: Suggestion, options: Candidates, policy: Policy
) -> float:
    """Return the chance with which a decision for the curve is run beside another objective.

    It is such that these decisions cost ``curve_cost`` of what is spent, on average: a dear one is run seldom. Once the
    interval of B_crit is narrow they cost less, in proportion to the variance that is left.
    """
    done = 0.0
    for one in options.stopped:
        if one.number == suggestion.resumed_from:
            done = float(one.steps)
    tau = float(posterior.tau(np.array(2.0**suggestion.x)))
    cost = (suggestion.max_steps - done) * tau
    a_decision = posterior.spent / max(posterior.trials, 1)
    by_cost = policy.curve_cost * a_decision / (policy.curve_share * cost)
    variance = float(log_b_crit(posterior.theta, posterior.prior).var())
    narrow = (math.log(policy.curve_width) / NORMAL_WIDTH) ** 2
    chance: float = min(1.0, by_cost) * min(1.0, variance / narrow)
    return chance


def most_promising(
    posterior: Posterior,
    budget: Callable[[float], float],
    resumable: Callable[[int], bool],
) -> tuple[int, float] | None:
    """Return the stopped trial that is predicted to reach the target soonest, and the steps predicted of it.

    Those come first that are predicted to reach it within their budget; one whose budget is spent never comes.
    """
    stopped = tuple(
        one
        for one in posterior.observations
        if one.status == "stopped"
        and not one.stuck
        and one.steps < budget(2.0**one.x)
        and resumable(one.number)
    )
    if not stopped:
        return None
    options = _to_be_continued(stopped)
    steps = _median_steps(posterior, options)
    to_go = np.maximum(steps - options.done, 0.1 * steps) * posterior.tau(np.exp2(options.x))
    last_steps = np.array([budget(float(size)) for size in np.exp2(options.x)])
    order = np.lexsort((to_go, steps > last_steps))
    chosen = int(order[0])
    return stopped[chosen].number, float(steps[chosen])


def predicted_steps(posterior: Posterior, number: int) -> float | None:
    """Return the steps at which a stopped trial is predicted to reach the target: the posterior's median.

    None where its own history says nothing of that: it is too short, or has become flat.
    """
    found = next((one for one in posterior.observations if one.number == number), None)
    if found is None or found.status != "stopped" or found.log_factor is None or found.flat:
        return None
    return float(_median_steps(posterior, _to_be_continued((found,)))[0])


def _to_be_continued(stopped: tuple[Observation, ...]) -> Candidates:
    """Return stopped trials alone as what there is to choose from."""
    return Candidates(
        stopped=stopped,
        x=np.array([one.x for one in stopped]),
        z=np.array([one.z for one in stopped]),
        other=np.array([one.other for one in stopped]).reshape(len(stopped), -1),
        done=np.array([float(one.steps) for one in stopped]),
    )


def _median_steps(posterior: Posterior, candidates: Candidates) -> Array:
    """Return the median over all draws of the candidates' steps to the target, (m,)."""
    log_drawn = candidate_log_steps(posterior, candidates, posterior.theta)
    return np.exp(np.minimum(np.median(log_drawn, axis=0), 50.0))


def _candidates(
    posterior: Posterior,
    pending: Pending,
    domain: Domain,
    incumbent: float | None,
    maps: bool,
    weight: Weight,
    resumable: Callable[[int], bool] | None,
    budget: Callable[[float], float],
    policy: Policy,
    rng: np.random.Generator,
) -> Candidates:
    """Return the trials to be continued, and new points along the posterior's optima and around the best trials."""
    taken = {resumed_from for _, _, resumed_from in pending}
    most = math.inf if incumbent is None or maps else 0.95 * policy.stop_factor * incumbent
    stopped = [one for one in posterior.observations if one.status == "stopped" and not one.stuck]
    stopped = [one for one in stopped if not (maps and one.flat)]
    stopped = [one for one in stopped if one.steps < budget(2.0**one.x)]
    stopped = [
        one for one in stopped if one.number not in taken and objective_so_far(one, weight) < most
    ]
    stopped = [one for one in stopped if resumable is not None and resumable(one.number)]
    reached = [one for one in posterior.observations if one.status == "reached"]
    reached = sorted(reached, key=lambda one: objective_so_far(one, weight))
    centres = [(one.x, one.z, one.other) for one in reached[:CENTRES]]
    x, z, other = new_points(
        posterior.theta,
        posterior.prior,
        domain,
        log_sizes(domain, posterior.too_large),
        centres,
        policy.candidates,
        rng,
    )
    count = len(x)
    return Candidates(
        stopped=tuple(stopped),
        x=np.concatenate([[one.x for one in stopped], x]),
        z=np.concatenate([[one.z for one in stopped], z]),
        other=np.concatenate(
            [np.array([one.other for one in stopped]).reshape(len(stopped), domain.others), other]
        ),
        done=np.concatenate([[float(one.steps) for one in stopped], np.zeros(count)]),
    )


def new_points(
    theta: Array,
    prior: Prior,
    domain: Domain,
    ends: tuple[float, float],
    centres: Sequence[tuple[float, float, tuple[float, ...]]],
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
    rows = theta[rng.integers(len(theta), size=-(-count // 8))]
    best = [
        optimum(row[None], prior.at(x[8 * i : 8 * i + 8]), prior)[0] for i, row in enumerate(rows)
    ]
    z = np.concatenate(best)[:count] + rng.normal(0.0, 0.5, count)
    other = rng.random((count, domain.others))
    for j in range(domain.others):
        preferred = theta[rng.integers(len(theta), size=count), OTHER + 3 * j]
        preferred = preferred + rng.normal(0.0, 0.1, count)
        other[::2, j] = np.clip(preferred[::2], 0.0, 1.0)
    around = (list(centres) * count)[: count // 3]
    for i, (log_size, log_rate, others) in enumerate(around):
        x[count - 1 - i] = log_size + rng.normal(0.0, 0.5)
        z[count - 1 - i] = log_rate + rng.normal(0.0, 0.5)
        moved = np.array(others) + rng.normal(0.0, 0.1, domain.others)
        other[count - 1 - i] = np.clip(moved, 0.0, 1.0)
    x = np.array([math.log2(domain.snap(2.0 ** min(max(value, low), high))) for value in x])
    bottom, top = rates_near_rule(theta, prior, domain, x)
    return x, np.clip(z, bottom, top), other


def rates_near_rule(theta: Array, prior: Prior, domain: Domain, x: Array) -> tuple[Array, Array]:
    """Return the lowest and the highest log2 rate of new trials at log2 batch sizes (n,).

    What is tried first lies where the user's own rate and the rule say; trials that diverge or crawl there move the
    posterior, and the range with it.
    """
    bottom, top = domain.lrs(x)
    points = prior.at(x)
    drawn = optimum(theta, points, prior)
    low, high = np.quantile(drawn, CENTRAL, axis=0)
    lowest = np.minimum(points.rule - NEAR_RULE, low - BEYOND)
    highest = np.maximum(points.rule + NEAR_RULE, high + BEYOND)
    return np.clip(lowest, bottom, top), np.clip(highest, bottom, top)


def log_sizes(domain: Domain, too_large: float) -> tuple[float, float]:
    """Return log2 of the least and the largest batch size to try: below one that ran out of memory, if it can be."""
    low = math.log2(domain.low)
    high = max(low, min(math.log2(domain.high), too_large - ROOM))
    while high > low and domain.snap(2.0**high) >= 2.0**too_large:
        high = max(low, high - ROOM)
    return low, high


def candidate_log_steps(posterior: Posterior, candidates: Candidates, theta: Array) -> Array:
    """Return log S of n candidates in each of m draws, (m, n): of a stopped trial by its own history as well."""
    steps = log_steps(theta, candidates.points(posterior), posterior.prior)
    data, count = posterior.data, len(candidates.stopped)
    places = {one.number: i for i, one in enumerate(posterior.observations)}
    rows = [places[one.number] for one in candidates.stopped]
    # Its seed is drawn already. Of a normal draw and a normal estimate: the mean by their precisions.
    noise = np.exp(2.0 * theta[:, NOISE, None])
    by_law, by_history = steps[:, :count], data.y[rows]
    estimated = by_law + noise / (noise + data.spread[rows] ** 2) * (by_history - by_law)
    steps[:, :count] = np.where(data.bound[rows], np.maximum(by_law, by_history), estimated)
    return steps


def thompson_sample(
    posterior: Posterior,
    candidates: Candidates,
    draw: Array,
    weight: Weight,
    pending: Pending,
    policy: Policy,
    longest: Callable[[float], float] | None,
) -> tuple[int, float]:
    """Return the candidate with the least objective in one draw, in cost too if nearly equal, and its steps there.

    ``longest`` is the longest horizon at a batch size, where schedules end with it: what takes longer never reaches the
    target, so that it comes last, the least of them first.
    """
    drawn = np.minimum(candidate_log_steps(posterior, candidates, draw[None])[0], 50.0)
    score = drawn + np.log(weight(candidates.x))
    cost = np.exp(drawn) * posterior.tau(np.exp2(candidates.x))
    to_go = cost * np.maximum(1.0 - candidates.done / np.exp(drawn), 0.0)
    score += policy.cost_weight * np.minimum(to_go / cost[int(score.argmin())], 10.0)
    for x, z, _ in pending:
        score[(np.abs(candidates.x - x) < 0.3) & (np.abs(candidates.z - z) < 0.3)] += 0.3
    if longest is not None:
        over = drawn - np.log([longest(float(size)) for size in np.exp2(candidates.x)])
        score = np.where(over > 0.0, 1e3 + over, score)
    chosen = int(score.argmin())
    return chosen, float(np.exp(drawn[chosen]))


def choose_horizon(
    posterior: Posterior,
    candidates: Candidates,
    chosen: int,
    draw: Array | None,
    longest: float,
    best: float,
) -> float:
    """Return the steps after which a candidate's schedule is to end: those of least cost, at most ``longest``.

    They are for S of a draw, or of the posterior's mean. A draw of few steps is so put to the test at a horizon that
    few runs have shown to be too short; the target is to be met after ``best`` steps, the incumbent's, at most.
    """
    prior = posterior.prior
    at = prior.at(candidates.x[[chosen]], candidates.z[[chosen]], candidates.other[[chosen]])
    steps = log_steps(posterior.theta, at, prior)[:, 0]
    log_s = float(steps.mean() if draw is None else log_steps(draw[None], at, prior)[0, 0])
    spread = math.sqrt(float(steps.var()) + float(np.mean(np.exp(2.0 * posterior.theta[:, NOISE]))))
    met = log_met(posterior.theta[:, prior.horizon_law])
    above, _ = least_cost(met, spread, math.log(longest) - log_s, math.log(best) - log_s)
    return min(max(math.exp(min(log_s + above, 50.0)), MIN_STEPS), longest)


def log_b_crit(theta: Array, prior: Prior) -> Array:
    """Return log B_crit, B in examples, of each draw of the parameters: (m, p) gives (m,)."""
    x = np.arange(prior.log_low - REACH, prior.log_high + REACH, 1.0 / PER_OCTAVE)
    points = prior.at(x)
    return half_slope(
        x * math.log(2.0),
        frontier(theta, points, prior) - log_small_batch_term(theta, points, prior),
    )


def choose_for_curve(
    posterior: Posterior,
    candidates: Candidates,
    pending: Pending,
    allowed: float,
    longest: Callable[[float], float] | None = None,
) -> tuple[int, float]:
    """Return the candidate that tells most of B_crit for its cost, and its expected steps.

    A regime where nothing has reached the target comes first, where a look at it costs at most ``allowed``.
    ``longest`` is the longest horizon at a batch size, where schedules end with it: what is expected to take longer
    would spend all of it and miss the target, which is left to one run in ``MISSES_EVERY``.
    """
    steps = candidate_log_steps(posterior, candidates, posterior.theta)
    if longest is not None and not _may_miss(posterior, longest):
        budget = np.log([longest(float(size)) for size in np.exp2(candidates.x)])
        over = np.median(steps, axis=0) - budget
        within = np.flatnonzero(over <= 0.0)
        if not within.size:
            nearest = int(over.argmin())
            return nearest, float(np.exp(min(np.median(steps[:, nearest]), 50.0)))
        chosen, expected = choose_for_curve(posterior, candidates.some(within), pending, allowed)
        return int(within[chosen]), expected
    b_crit = log_b_crit(posterior.theta, posterior.prior)
    look = unseen_regime(posterior, candidates, pending, steps, b_crit, allowed)
    return look or max_variance_reduction(posterior, candidates, pending, steps, b_crit)


def _may_miss(posterior: Posterior, longest: Callable[[float], float]) -> bool:
    """Say whether one more run may spend its whole budget where it is expected to miss the target."""
    missed = 0
    for one in posterior.observations:
        spent_all = one.steps >= WHOLE_BUDGET * longest(2.0**one.x)
        missed += one.status == "stopped" and spent_all
    return missed < len(posterior.observations) // MISSES_EVERY


def max_variance_reduction(
    posterior: Posterior, candidates: Candidates, pending: Pending, steps: Array, b_crit: Array
) -> tuple[int, float]:
    """Return the candidate with the largest reduction of Var[log B_crit] per unit cost, and its expected steps.

    ``steps`` is log S of n candidates in m draws, (m, n), and ``b_crit`` log B_crit in these, (m,).
    """
    x, z, done = candidates.x, candidates.z, candidates.done
    expected, centred, b_crit, noise = _jointly(posterior, steps, b_crit)
    gain = _gain(centred, b_crit, noise)
    whole = expected * posterior.tau(np.exp2(x))
    to_go = whole * np.maximum(1.0 - done / expected, 0.1) + SETUP * whole.min()
    # A stopped trial past its expected steps shows that the model is wrong there: more steps of it add nothing.
    gain[done >= GIVEN_UP_AT * expected] = 0.0
    for log_size, log_rate, _ in pending:
        gain[(np.abs(x - log_size) < 0.5) & (np.abs(z - log_rate) < 0.5)] *= 0.3
    chosen = int((gain / to_go).argmax())
    return chosen, float(expected[chosen])


def unseen_regime(
    posterior: Posterior,
    candidates: Candidates,
    pending: Pending,
    steps: Array,
    b_crit: Array,
    allowed: float,
) -> tuple[int, float] | None:
    """Return the cheapest candidate in a regime where nothing has reached the target, and its expected steps.

    The law says what S is there; that it holds there is seen by looking. None where both ends are seen, or where looks
    there would come to cost more than ``allowed``. ``steps`` and ``b_crit`` as for :func:`max_variance_reduction`.
    """
    prior, x = posterior.prior, candidates.x
    middle = float(np.median(b_crit)) / math.log(2.0)
    bottom, top = prior.log_low, min(prior.log_high, posterior.too_large - ROOM)
    low, high = middle - math.log2(SLOPE_RATIO), middle + math.log2(SLOPE_RATIO)
    looked = [one.x for one in posterior.observations if one.status == "reached"] + [
        size for size, _, _ in pending
    ]
    expected = np.exp(np.minimum(np.median(steps, axis=0), 50.0))
    to_go = np.maximum(expected - candidates.done, 0.1 * expected) * posterior.tau(np.exp2(x))
    to_go[candidates.done >= GIVEN_UP_AT * expected] = np.inf
    stopped = [one for one in posterior.observations if one.status == "stopped"]
    sizes = np.array([one.x for one in stopped])
    costs = np.array([one.steps for one in stopped]) * posterior.tau(np.exp2(sizes))
    cost = np.full(
        x.size, np.inf
    )  # of looks at a regime, those before that have not reached the target among them
    if min(looked) > max(low, bottom + EDGE):
        edge = max(low - EDGE, bottom + EDGE)
        cost[x <= edge] = to_go[x <= edge] + costs[sizes <= edge].sum()
    if max(looked) < min(high, top - EDGE):
        edge = min(high + EDGE, top - EDGE)
        cost[x >= edge] = to_go[x >= edge] + costs[sizes >= edge].sum()
    chosen = int(cost.argmin())
    return (chosen, float(expected[chosen])) if cost[chosen] <= allowed else None


def _jointly(
    posterior: Posterior, steps: Array, b_crit: Array
) -> tuple[Array, Array, Array, float]:
    """Return expected steps of n log S (m, n); these and log B_crit (m,), each less its mean; the noise's variance."""
    # What lies beyond the end of a trial is not seen.
    middle = np.median(steps, axis=0)
    steps = np.minimum(steps, middle + math.log(GIVEN_UP_AT))
    noise = float(np.mean(np.exp(2.0 * posterior.theta[:, NOISE]))) + FRONTIER_MISFIT**2
    return (
        np.exp(np.minimum(middle, 50.0)),
        steps - steps.mean(axis=0),
        b_crit - b_crit.mean(),
        noise,
    )


def _gain(centred: Array, b_crit: Array, noise: float) -> Array:
    """Return by how much one log S reduces Var[log B_crit], were they jointly normal: cov^2 / (var + noise), (n,)."""
    return np.asarray((centred.T @ b_crit / len(b_crit)) ** 2 / (centred.var(axis=0) + noise))


def most_telling(posterior: Posterior, count: int) -> list[tuple[float, float, float]]:
    """Return log2 B, log2 lr and expected steps of the trials that together tell most of B_crit for their cost."""
    prior = posterior.prior
    x = np.arange(prior.log_low, prior.log_high + 1e-9, 1.0 / PER_OCTAVE)
    x = x[np.round(np.exp2(x)) <= 2.0 ** (posterior.too_large - ROOM)]
    if x.size == 0:
        return []
    z = np.median(optimum(posterior.theta, prior.at(x), prior), axis=0)
    steps = log_steps(posterior.theta, prior.at(x, z, np.full((x.size, prior.others), 0.5)), prior)
    expected, centred, b_crit, noise = _jointly(
        posterior, steps, log_b_crit(posterior.theta, prior)
    )
    cost = expected * posterior.tau(np.exp2(x))
    chosen: list[int] = []
    while len(chosen) < count:
        gain = _gain(centred, b_crit, noise) / (cost + SETUP * cost.min())
        gain[(np.abs(x[:, None] - x[chosen]) < APART).any(axis=1)] = 0.0
        best = int(gain.argmax())
        if gain[best] == 0.0:  # no room for more
            break
        chosen.append(best)
        # What the others still tell once this one has run, by regression on it.
        seen = centred[:, best] / (centred[:, best].var() + noise)
        b_crit = b_crit - seen * float(centred[:, best] @ b_crit) / len(b_crit)
        centred = centred - np.outer(seen, centred[:, best] @ centred / len(b_crit))
    return [(float(x[i]), float(z[i]), float(expected[i])) for i in sorted(chosen)]


def b_crit_quantiles(posterior: Posterior, shares: Collection[float]) -> Array:
    """Return quantiles of B_crit over the posterior, in examples."""
    return np.asarray(
        np.exp(np.quantile(log_b_crit(posterior.theta, posterior.prior), list(shares)))
    )


def steps_band(
    posterior: Posterior, batch_sizes: Sequence[int], interval: tuple[float, float]
) -> CurveBand:
    """Return the median of S*(B) and two quantiles over the posterior."""
    sizes = np.array(batch_sizes, dtype=np.float64)
    drawn = frontier(posterior.theta, posterior.prior.at(np.log2(sizes)), posterior.prior)
    low, middle, high = np.exp(np.quantile(drawn, (interval[0], 0.5, interval[1]), axis=0))
    return CurveBand(sizes, middle, low, high)


def best_learning_rate(posterior: Posterior, batch_size: float) -> float:
    """Return the posterior's median of the best learning rate at a batch size, other hyper-parameters in the middle."""
    at = posterior.prior.at(np.array([math.log2(batch_size)]))
    return float(np.median(np.exp2(optimum(posterior.theta, at, posterior.prior))))


def best_learning_rates(
    posterior: Posterior, batch_sizes: Array, interval: tuple[float, float]
) -> tuple[Array, Array, Array]:
    """Return the low quantile, the median and the high one of the best learning rate at each batch size (n,)."""
    drawn = np.exp2(
        optimum(posterior.theta, posterior.prior.at(np.log2(batch_sizes)), posterior.prior)
    )
    low, middle, high = np.quantile(drawn, (interval[0], 0.5, interval[1]), axis=0)
    return low, middle, high
