"""The next trial: which batch size and learning rate, for how many steps, and whether it continues a stopped one.

A decision is one draw of the posterior (Thompson sampling): the best candidate of this draw, for
its cost, is run. It is first given a share of its expected cost, then continued from its checkpoint
as long as draws still prefer it.

B_crit of a draw is where the slope of its frontier, log S*(B) over log B, its small-batch term left
out, is -1/2: for S_min (1 + B_crit/B) that is B_crit itself, and where the law does not hold, it is
what a dense sweep over batch sizes would show, while the model's own parameter leans on the batch
sizes that were tried most.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bstune.core.curve import SLOPE_RATIO, CurveBand, half_slope
from bstune.core.errors import ConfigError
from bstune.search.horizon import least_cost, log_met
from bstune.search.observations import (
    Observation,
    Point,
    Posterior,
    StepWeight,
    objective_so_far,
    objective_weight,
    smoothed,
)
from bstune.search.posterior import (
    NOISE,
    OTHER,
    LikelihoodData,
    Points,
    Prior,
    frontier,
    log_small_batch_term,
    log_steps,
    optimum,
)

Array = NDArray[np.float64]
# Log2 B, log2 lr and resumed_from of the trials that run now.
Pending = Sequence[tuple[float, float, int | None]]

# Of any trial: a shorter one costs more to set up than to train.
MIN_STEPS = 10.0
# Times its parent's steps, that a trial which continues another has at least.
LEAST_GROWTH = 1.3
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
# Reached trials around which a third of the candidates lie, and their deviation from it in octaves.
CENTRES = 4
AROUND_CENTRE = 0.5
# Batch sizes of new candidates for which one draw of the posterior gives the best rate.
SIZES_A_DRAW = 8
# Deviations of a candidate's other hyper-parameters, each in [0, 1], from a draw's best ones or a
# centre's.
AROUND_OTHER = 0.1
# Among the new candidates, the one that a random decision moves; the first two are the ends of the
# batch sizes.
RANDOM_PLACE = 2
# Octaves below a batch size that ran out of memory.
MEMORY_ROOM = 0.1
# Octaves of batch size and of rate: a candidate as near to a running trial is that one ...
NEAR_PENDING = 0.3
# ... and is worse by so much, in log of the objective.
NEAR_PENDING_PENALTY = 0.3
# The incumbent counts for at most so many times the least result of a single run.
MAX_LUCK = 1.5
# Of the cost at which a trial is given up: one that comes as near to it is not continued.
CONTINUED_BELOW = 0.95
# Of the first probe: a trial that has run so much of it has had it.
PROBED = 0.75
# Of its steps, that a stopped trial is continued by at least before one has reached the target.
LEAST_CONTINUED = 0.4
# A score's worth of cost to go, in incumbent's costs, at most.
MOST_COST_TO_GO = 10.0
# For the objective steps, once one has reached the target: the power of the examples in what is
# to go, beside that of the steps. The incumbent takes 1.04 and 1.03 times the fewest steps after
# 20 and 40 times their cost (five tables, 4 seeds, geometric mean); with 1 it took 1.08 (2 seeds).
# With 0 from the first trial on, a study of a law whose frontier is flat met nothing within 40
# times.
COST_POWER = 0.1
# Added to the score of what its longest horizon cannot bring to the target: it comes after all
# else.
OUT_OF_REACH = 1e3

# Of a frontier's draw: batch sizes an octave, and the octaves beyond those of the study within
# which B_crit is sought.
FRONTIER_SIZES_AN_OCTAVE = 4
B_CRIT_REACH = 7
# What a trial costs beside its steps, over the cheapest one's cost: few trials rather than many.
SETUP = 0.2
# Of what was spent, that a look at a regime where nothing has reached the target may cost, ...
LOOK_SHARE = 0.5
# ... this many times the incumbent's cost left out where the objective is not the curve.
LOOK_AFTER = 12.0
# Octaves: a look lies so far within a regime, as its edge moves, or so near to the end of the
# range.
REGIME_EDGE = 0.25
# Standard deviations of a normal distribution that hold 90% of it.
NORMAL_WIDTH = 3.29
# Runs of a study whose schedules end with the trial: one spends its budget to no end.
MISSES_EVERY = 30
# Of the budget, from which on a run has spent it.
WHOLE_BUDGET = 0.95
# Octaves, at least, between the batch sizes of trials that are named together.
APART = 1.0
# Octaves of batch size and of rate around a running trial, and what a candidate there still tells
# of B_crit.
ALIKE_FOR_CURVE = 0.5
LEFT_TO_TELL = 0.3
# Times the steps that are expected of a trial: where it ends.
GIVEN_UP_AT = 1.6
# In log S: what one more trial at a place still misses of the frontier there.
FRONTIER_MISFIT = 0.14


@dataclass(frozen=True)
class Policy:
    """How the search spends; the defaults stand in ``conf/sampler/frontier.yaml``."""

    # Draws of the posterior, at least 10.
    particles: int
    # Metropolis steps of its sampler at each temperature.
    moves: int
    # Points that a decision chooses from, at least 10.
    candidates: int
    # Of the budget's steps, given to the first trial.
    initial_fraction: float
    # Before the target is reached, the most that continuing a trial adds, over what has been spent.
    max_growth: float
    # The same for a new trial.
    max_first_growth: float
    # Of stop_factor times the incumbent's cost, given to a new trial first ...
    probe_fraction: float
    # ... but at most this fraction of the predicted steps to target.
    max_predicted_fraction: float
    # A trial ends once it costs this many times the incumbent.
    stop_factor: float
    # Of the remaining cost in the score (log T per incumbent cost).
    cost_weight: float
    # Of the decisions, made at random in case the model is wrong everywhere.
    random_fraction: float
    # Once this many times the incumbent's cost has been spent, whatever the objective ...
    curve_after: float
    # ... at most this fraction of the decisions is made as for the objective ``curve``, ...
    curve_share: float
    # ... and this fraction of what is spent goes into them, ...
    curve_cost: float
    # ... less once the interval of B_crit is narrower: upper over lower end.
    curve_width: float

    # Of the objective ``loss``, see :mod:`bstune.search.fixed_budget`; costs count in full trials.

    # Of the budget, to which a trial runs first.
    loss_first_share: float
    # Deviations of the law, over that of such a trial, below which it goes on.
    loss_sure: float
    # Until so much is spent, expected improvement for its cost decides.
    loss_early: float
    # Of the cost to go in the score: log share of the budget, a full trial.
    loss_cost_weight: float
    # For each so much that is spent, one more fresh seed of the best.
    loss_fresh_after: float
    # Of ``behind`` until the budget's end, over sqrt(-log share).
    loss_drift: float
    # Of ``behind`` of a trial that stopped, beside the drift.
    loss_spread: float
    # Of the curves at the budget's end, over that of the last tenfold.
    loss_least_slope: float

    def __post_init__(self) -> None:
        least = {"particles": 10, "moves": 1, "candidates": 10}
        least |= dict.fromkeys(("cost_weight", "random_fraction", "curve_after", "curve_share"), 0)
        least |= dict.fromkeys(("loss_sure", "loss_early", "loss_cost_weight"), 0)
        # The others are fractions and widths, above 0.
        above = {"stop_factor": 1, "curve_width": 1}
        shares = ("random_fraction", "curve_share", "loss_first_share")
        for name, value in vars(self).items():
            if name in least:
                if not value >= least[name]:
                    raise ConfigError(
                        f"sampler.policy.{name} must be at least {least[name]}, but got {value}"
                    )
            elif not above.get(name, 0) < value < math.inf:
                raise ConfigError(
                    f"sampler.policy.{name} must be a number above {above.get(name, 0)}, but got "
                    f"{value}"
                )
            if name in shares and value > 1:
                raise ConfigError(f"sampler.policy.{name} must be at most 1, but got {value}")


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


@dataclass(frozen=True)
class Situation:
    """What a decision rests on beside the posterior.

    Args:
        pending: the trials that run now.
        domain: where the search may go.
        budget: the steps over batch size at which a trial ends in any case.
        resumable: whether a stopped trial can be continued, by number; None: none can.
        policy: how to spend.
        weight: what steps are multiplied with to give the objective.
        incumbent: the best objective so far; None before a trial has reached the target.
    """

    pending: Pending
    domain: Domain
    budget: Callable[[float], float]
    resumable: Callable[[int], bool] | None
    policy: Policy
    weight: StepWeight
    incumbent: float | None


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
    """Choose the next trial for the objective ``time``, ``steps`` or ``curve``.

    ``budget``: the steps over batch size at which a trial ends in any case.
    """
    weight = objective_weight(objective, posterior.tau)
    ranked = smoothed(posterior, objective)
    incumbent: float | None = None
    fastest: Observation | None = None
    if ranked:
        least, fastest = min(ranked, key=lambda pair: pair[0])
        luckiest = min(objective_so_far(trial, weight) for _, trial in ranked)
        incumbent = min(least, MAX_LUCK * luckiest)
    situation = Situation(
        pending=pending,
        domain=domain,
        budget=budget,
        resumable=resumable,
        policy=policy,
        weight=weight,
        incumbent=incumbent,
    )
    # Before one has reached the target, the objective ``curve`` too looks for what is fast.
    if fastest is not None:
        suggestion = _suggest_for_curve(posterior, situation, objective, fastest, rng)
        if suggestion is not None:
            return suggestion
    options = _candidates(posterior, situation, rng)
    row = int(rng.integers(len(posterior.theta)))
    draw = posterior.theta[row]
    if posterior.observations and rng.random() < policy.random_fraction:
        chosen = len(options.stopped) + RANDOM_PLACE
        predicted = math.inf
        x, z = anywhere(posterior.theta, posterior.prior, domain, posterior.too_large, rng)
        options.x[chosen] = x
        options.z[chosen] = z
    else:
        drawn_weight = posterior.drawn_weight(row)
        cost_power = 1.0
        if objective == "steps":
            drawn_weight = weight
            # What is dear waits until something has reached the target. Then the cost hardly
            # counts, as it is no part of the objective: the fewest steps are at the largest batch
            # sizes, whose trials take the most examples.
            if posterior.reached:
                cost_power = COST_POWER
        longest = _longest_horizon(posterior, budget)
        chosen, predicted = thompson_sample(
            posterior, options, draw, drawn_weight, cost_power, pending, policy, longest
        )
    if posterior.prior.horizon:
        max_steps = _horizon_of(posterior, situation, options, chosen, draw)
    else:
        max_steps = _limit_of(posterior, situation, options, chosen, predicted)
    return options.suggestion(chosen, max_steps)


def _longest_horizon(
    posterior: Posterior, budget: Callable[[float], float]
) -> Callable[[float], float] | None:
    """Give the longest horizon over batch size, where schedules end with the trial."""
    return budget if posterior.prior.horizon else None


def _most_before_target(
    posterior: Posterior, situation: Situation, size: float, growth: float
) -> float:
    """Give the steps that a trial may add before any has reached the target, by what has been spent."""
    first = max(situation.policy.initial_fraction * situation.budget(size), MIN_STEPS)
    by_spent = growth * posterior.spent / float(posterior.tau(np.array(size)))
    return max(by_spent, first)


def _horizon_of(
    posterior: Posterior, situation: Situation, options: Candidates, chosen: int, draw: Array
) -> float:
    """Give the steps after which the chosen candidate's schedule is to end."""
    size = float(np.exp2(options.x[chosen]))
    longest = situation.budget(size)
    best = math.inf
    if situation.incumbent is None:
        growth = situation.policy.max_growth
        longest = min(_most_before_target(posterior, situation, size, growth), longest)
    else:
        best = situation.incumbent / float(situation.weight(options.x[chosen]))
    return choose_horizon(posterior, options, chosen, draw, longest, best)


def _limit_of(
    posterior: Posterior,
    situation: Situation,
    options: Candidates,
    chosen: int,
    predicted: float,
) -> float:
    """Give the steps up to which the chosen candidate is trained.

    ``predicted`` are those to the target.
    """
    policy = situation.policy
    done = float(options.done[chosen])
    size = float(np.exp2(options.x[chosen]))
    last_step = situation.budget(size)
    if situation.incumbent is None:
        growth = policy.max_growth if done else policy.max_first_growth
        most = _most_before_target(posterior, situation, size, growth)
        return min(done + max(most, LEAST_CONTINUED * done), last_step)
    cap = policy.stop_factor * situation.incumbent / float(situation.weight(options.x[chosen]))
    probe = min(policy.probe_fraction * cap, policy.max_predicted_fraction * predicted)
    limit = cap
    # A second stage: where nothing can be continued, the first probe is the last.
    if situation.resumable is not None and done < PROBED * probe:
        limit = probe
    return min(max(limit, LEAST_GROWTH * done, MIN_STEPS), last_step)


def _suggest_for_curve(
    posterior: Posterior,
    situation: Situation,
    objective: str,
    fastest: Observation,
    rng: np.random.Generator,
) -> Suggestion | None:
    """Suggest the trial that tells most of B_crit for its cost.

    None where it is not the curve's turn.
    """
    policy = situation.policy
    maps = objective == "curve"
    cost = 0.0
    if not maps:
        cost = fastest.steps * float(posterior.tau(np.exp2(fastest.x)))
        if posterior.spent <= policy.curve_after * cost or rng.random() >= policy.curve_share:
            return None
    options = _candidates(posterior, situation, rng, for_curve=True)
    allowed = LOOK_SHARE * (posterior.spent - LOOK_AFTER * cost)
    suggestion = _most_telling_of(posterior, situation, options, allowed)
    if maps or rng.random() < _chance_for_curve(posterior, suggestion, options, policy):
        return suggestion
    return None


def _most_telling_of(
    posterior: Posterior, situation: Situation, options: Candidates, allowed: float
) -> Suggestion:
    """Suggest what tells most of B_crit for its cost.

    ``allowed`` as for :func:`choose_for_curve`.
    """
    policy = situation.policy
    longest = _longest_horizon(posterior, situation.budget)
    chosen, predicted = choose_for_curve(posterior, options, situation.pending, allowed, longest)
    done = float(options.done[chosen])
    last_step = situation.budget(float(np.exp2(options.x[chosen])))
    if posterior.prior.horizon:
        horizon = choose_horizon(posterior, options, chosen, None, last_step, math.inf)
        return options.suggestion(chosen, horizon)
    max_steps = policy.probe_fraction * predicted
    if done >= max_steps:
        max_steps = GIVEN_UP_AT * predicted
    least = max(LEAST_GROWTH * done, MIN_STEPS)
    return options.suggestion(chosen, min(max(max_steps, least), last_step))


def _chance_for_curve(
    posterior: Posterior, suggestion: Suggestion, options: Candidates, policy: Policy
) -> float:
    """Give the chance with which a decision for the curve is run beside another objective.

    It is such that these decisions cost ``curve_cost`` of what is spent, on average: a dear one is
    run seldom. Once the interval of B_crit is narrow they cost less, in proportion to the variance
    that is left.
    """
    done = 0.0
    for trial in options.stopped:
        if trial.number == suggestion.resumed_from:
            done = float(trial.steps)
    tau = float(posterior.tau(np.array(2.0**suggestion.x)))
    cost = (suggestion.max_steps - done) * tau
    usual_cost = posterior.spent / max(posterior.trials, 1)
    # A share ``curve_share`` of the decisions comes here: this chance lets them cost, over all
    # decisions, ``curve_cost`` times as much as a usual one.
    by_cost = policy.curve_cost * usual_cost / (policy.curve_share * cost)
    variance = float(log_b_crit(posterior.theta, posterior.prior).var())
    narrow = (math.log(policy.curve_width) / NORMAL_WIDTH) ** 2
    chance: float = min(1.0, by_cost) * min(1.0, variance / narrow)
    return chance


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
    options = _to_be_continued(stopped, posterior.prior)
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
            return float(_median_steps(posterior, _to_be_continued([trial], posterior.prior))[0])
    return None


def _to_be_continued(stopped: Sequence[Observation], prior: Prior) -> Candidates:
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
    return _expected_steps(candidate_log_steps(posterior, candidates, posterior.theta))


def _expected_steps(drawn_log_steps: Array) -> Array:
    """Give the median of n log S in m draws, (m, n), as steps (n,)."""
    return np.exp(np.minimum(np.median(drawn_log_steps, axis=0), MOST_LOG_STEPS))


def _candidates(
    posterior: Posterior,
    situation: Situation,
    rng: np.random.Generator,
    for_curve: bool = False,
) -> Candidates:
    """Give the trials to be continued, and new points along the posterior's optima and around the best trials."""
    domain = situation.domain
    stopped = _may_go_on(posterior, situation, for_curve)
    reached = sorted(posterior.reached, key=lambda trial: objective_so_far(trial, situation.weight))
    x, z, other = new_points(
        posterior.theta,
        posterior.prior,
        domain,
        log_sizes(domain, posterior.too_large),
        [trial.point for trial in reached[:CENTRES]],
        situation.policy.candidates,
        rng,
    )
    begun = _to_be_continued(stopped, posterior.prior)
    return Candidates(
        stopped=begun.stopped,
        x=np.concatenate([begun.x, x]),
        z=np.concatenate([begun.z, z]),
        other=np.concatenate([begun.other, other]),
        done=np.concatenate([begun.done, np.zeros(len(x))]),
    )


def _may_go_on(posterior: Posterior, situation: Situation, for_curve: bool) -> list[Observation]:
    """Give the stopped trials that more steps can bring to something."""
    if situation.resumable is None:
        return []
    taken = {resumed_from for _, _, resumed_from in situation.pending}
    most = math.inf
    if situation.incumbent is not None and not for_curve:
        most = CONTINUED_BELOW * situation.policy.stop_factor * situation.incumbent
    stopped = list[Observation]()
    for trial in posterior.stopped:
        if trial.stuck or trial.number in taken or (for_curve and trial.flat):
            continue
        if trial.steps >= situation.budget(2.0**trial.x):
            continue
        cheap_enough = objective_so_far(trial, situation.weight) < most
        if cheap_enough and situation.resumable(trial.number):
            stopped.append(trial)
    return stopped


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


def thompson_sample(
    posterior: Posterior,
    candidates: Candidates,
    draw: Array,
    weight: StepWeight,
    cost_power: float,
    pending: Pending,
    policy: Policy,
    longest: Callable[[float], float] | None,
) -> tuple[int, float]:
    """Choose the candidate with the least objective in one draw, in cost too if nearly equal.

    Give its steps there.

    ``cost_power`` is that of a step's cost in what is to go: with 0 steps alone count.

    ``longest`` is the longest horizon at a batch size, where schedules end with it: what takes
    longer never reaches the target, so that it comes last, the least of them first.
    """
    drawn = candidate_log_steps(posterior, candidates, draw[None])[0]
    drawn = np.minimum(drawn, MOST_LOG_STEPS)
    score = drawn + np.log(weight(candidates.x))
    cost = np.exp(drawn) * posterior.tau(np.exp2(candidates.x)) ** cost_power
    to_go = cost * np.maximum(1.0 - candidates.done / np.exp(drawn), 0.0)
    best_cost = cost[int(score.argmin())]
    score += policy.cost_weight * np.minimum(to_go / best_cost, MOST_COST_TO_GO)
    for x, z, _ in pending:
        is_near = are_near(candidates.x, candidates.z, x, z, NEAR_PENDING)
        score[is_near] += NEAR_PENDING_PENALTY
    if longest is not None:
        over = drawn - _log_over_sizes(longest, candidates.x)
        score = np.where(over > 0.0, OUT_OF_REACH + over, score)
    chosen = int(score.argmin())
    return chosen, float(np.exp(drawn[chosen]))


def are_near(
    x: Array, z: Array, log_size: float, log_rate: float, octaves: float
) -> NDArray[np.bool_]:
    """Tell which points (n,) lie within so many octaves of a batch size and of a learning rate."""
    return np.asarray((np.abs(x - log_size) < octaves) & (np.abs(z - log_rate) < octaves))


def _log_over_sizes(steps: Callable[[float], float], x: Array) -> Array:
    """Give the log of steps that are a function of the batch size, at log2 batch sizes (n,)."""
    return np.log([steps(float(size)) for size in np.exp2(x)])


def choose_horizon(
    posterior: Posterior,
    candidates: Candidates,
    chosen: int,
    draw: Array | None,
    longest: float,
    best: float,
) -> float:
    """Choose the steps after which a candidate's schedule is to end: those of least cost, at most ``longest``.

    They are for S of a draw, or of the posterior's mean. A draw of few steps is so put to the test
    at a horizon that few runs have shown to be too short; the target is to be met after ``best``
    steps, the incumbent's, at most.
    """
    prior = posterior.prior
    row = [chosen]
    at = prior.at(candidates.x[row], candidates.z[row], candidates.other[row])
    steps = log_steps(posterior.theta, at, prior)[:, 0]
    log_s = float(steps.mean())
    if draw is not None:
        log_s = float(log_steps(draw[None], at, prior)[0, 0])
    spread = math.sqrt(float(steps.var()) + _noise_variance(posterior))
    met = log_met(posterior.theta[:, prior.horizon_law])
    above, _ = least_cost(met, spread, math.log(longest) - log_s, math.log(best) - log_s)
    horizon = math.exp(min(log_s + above, MOST_LOG_STEPS))
    return min(max(horizon, MIN_STEPS), longest)


def _noise_variance(posterior: Posterior) -> float:
    """Give the mean variance of log S from seed to seed."""
    return float(np.mean(np.exp(2.0 * posterior.theta[:, NOISE])))


def log_b_crit(theta: Array, prior: Prior) -> Array:
    """Give log B_crit, B in examples, of each draw of the parameters: (m, p) gives (m,)."""
    low = prior.log_low - B_CRIT_REACH
    high = prior.log_high + B_CRIT_REACH
    x = np.arange(low, high, 1.0 / FRONTIER_SIZES_AN_OCTAVE)
    points = prior.at(x)
    log_s = frontier(theta, points, prior) - log_small_batch_term(theta, points, prior)
    return half_slope(x * math.log(2.0), log_s)


def choose_for_curve(
    posterior: Posterior,
    candidates: Candidates,
    pending: Pending,
    allowed: float,
    longest: Callable[[float], float] | None = None,
) -> tuple[int, float]:
    """Choose the candidate that tells most of B_crit for its cost; give its expected steps, too.

    A regime where nothing has reached the target comes first, where a look at it costs at most
    ``allowed``. ``longest`` is the longest horizon at a batch size, where schedules end with it:
    what is expected to take longer would spend all of it and miss the target, which is left to one
    run in ``MISSES_EVERY``.
    """
    steps = candidate_log_steps(posterior, candidates, posterior.theta)
    if longest is not None and not _one_more_may_miss(posterior, longest):
        over = np.median(steps, axis=0) - _log_over_sizes(longest, candidates.x)
        within = np.flatnonzero(over <= 0.0)
        if not within.size:
            nearest = int(over.argmin())
            return nearest, float(_expected_steps(steps)[nearest])
        chosen, expected = choose_for_curve(posterior, candidates.some(within), pending, allowed)
        return int(within[chosen]), expected
    b_crit = log_b_crit(posterior.theta, posterior.prior)
    look = unseen_regime(posterior, candidates, pending, steps, b_crit, allowed)
    return look or max_variance_reduction(posterior, candidates, pending, steps, b_crit)


def _one_more_may_miss(posterior: Posterior, longest: Callable[[float], float]) -> bool:
    """Say whether one more run may spend its whole budget where it is expected to miss the target."""
    missed = 0
    for trial in posterior.stopped:
        if trial.steps >= WHOLE_BUDGET * longest(2.0**trial.x):
            missed += 1
    return missed < len(posterior.observations) // MISSES_EVERY


def max_variance_reduction(
    posterior: Posterior, candidates: Candidates, pending: Pending, steps: Array, b_crit: Array
) -> tuple[int, float]:
    """Choose the candidate with the largest reduction of Var[log B_crit] per unit cost.

    Give its expected steps.

    ``steps`` is log S of n candidates in m draws, (m, n), and ``b_crit`` log B_crit in these, (m,).
    """
    joint = _jointly(posterior, steps, b_crit)
    gain = _variance_reduction(joint.log_steps, joint.log_b_crit, joint.noise)
    whole = joint.expected * posterior.tau(np.exp2(candidates.x))
    left = np.maximum(1.0 - candidates.done / joint.expected, LEAST_LEFT)
    to_go = whole * left + SETUP * whole.min()
    # A stopped trial past its expected steps shows that the model is wrong there: more steps of it
    # add nothing.
    gain[candidates.done >= GIVEN_UP_AT * joint.expected] = 0.0
    for x, z, _ in pending:
        gain[are_near(candidates.x, candidates.z, x, z, ALIKE_FOR_CURVE)] *= LEFT_TO_TELL
    chosen = int((gain / to_go).argmax())
    return chosen, float(joint.expected[chosen])


def unseen_regime(
    posterior: Posterior,
    candidates: Candidates,
    pending: Pending,
    steps: Array,
    b_crit: Array,
    allowed: float,
) -> tuple[int, float] | None:
    """Choose the cheapest candidate in a regime where nothing has reached the target.

    Give its expected steps, too.

    The law says what S is there; that it holds there is seen by looking. None where both ends are
    seen, or where looks there would come to cost more than ``allowed``. ``steps`` and ``b_crit`` as
    for :func:`max_variance_reduction`.
    """
    x = candidates.x
    middle = float(np.median(b_crit)) / math.log(2.0)
    bottom = posterior.prior.log_low
    top = min(posterior.prior.log_high, posterior.too_large - MEMORY_ROOM)
    low = middle - math.log2(SLOPE_RATIO)
    high = middle + math.log2(SLOPE_RATIO)
    looked = [trial.x for trial in posterior.reached]
    looked += [log_size for log_size, _, _ in pending]
    expected = _expected_steps(steps)
    steps_to_go = np.maximum(expected - candidates.done, LEAST_LEFT * expected)
    to_go = steps_to_go * posterior.tau(np.exp2(x))
    to_go[candidates.done >= GIVEN_UP_AT * expected] = np.inf
    stopped_x = np.array([trial.x for trial in posterior.stopped])
    stopped_steps = np.array([trial.steps for trial in posterior.stopped])
    paid = stopped_steps * posterior.tau(np.exp2(stopped_x))
    # Of looks at a regime, those before that have not reached the target among them.
    cost = np.full(x.size, np.inf)
    if min(looked) > max(low, bottom + REGIME_EDGE):
        edge = max(low - REGIME_EDGE, bottom + REGIME_EDGE)
        cost[x <= edge] = to_go[x <= edge] + paid[stopped_x <= edge].sum()
    if max(looked) < min(high, top - REGIME_EDGE):
        edge = min(high + REGIME_EDGE, top - REGIME_EDGE)
        cost[x >= edge] = to_go[x >= edge] + paid[stopped_x >= edge].sum()
    chosen = int(cost.argmin())
    if cost[chosen] > allowed:
        return None
    return chosen, float(expected[chosen])


class Joint(NamedTuple):
    """Draws of the trials' log S and of log B_crit, side by side.

    Args:
        expected: steps of n trials.
        log_steps: log S of these in m draws, less its mean, (m, n).
        log_b_crit: log B_crit in these, less its mean, (m,).
        noise: variance of what a trial shows of log S around that.
    """

    expected: Array
    log_steps: Array
    log_b_crit: Array
    noise: float


def _jointly(posterior: Posterior, steps: Array, b_crit: Array) -> Joint:
    """Put log S of n trials, (m, n), and log B_crit, (m,), side by side."""
    # What lies beyond the end of a trial is not seen.
    middle = np.median(steps, axis=0)
    seen = np.minimum(steps, middle + math.log(GIVEN_UP_AT))
    return Joint(
        expected=np.exp(np.minimum(middle, MOST_LOG_STEPS)),
        log_steps=seen - seen.mean(axis=0),
        log_b_crit=b_crit - b_crit.mean(),
        noise=_noise_variance(posterior) + FRONTIER_MISFIT**2,
    )


def _variance_reduction(centred: Array, b_crit: Array, noise: float) -> Array:
    """Give by how much one log S reduces Var[log B_crit], were they jointly normal: cov^2 / (var + noise), (n,)."""
    covariance = centred.T @ b_crit / len(b_crit)
    return np.asarray(covariance**2 / (centred.var(axis=0) + noise))


def most_telling(posterior: Posterior, count: int) -> list[tuple[float, float, float]]:
    """Give log2 B, log2 lr and expected steps of the trials that together tell most of B_crit for their cost."""
    prior = posterior.prior
    x = np.arange(prior.log_low, prior.log_high + 1e-9, 1.0 / FRONTIER_SIZES_AN_OCTAVE)
    x = x[np.round(np.exp2(x)) <= 2.0 ** (posterior.too_large - MEMORY_ROOM)]
    if x.size == 0:
        return []
    z = np.median(optimum(posterior.theta, prior.at(x), prior), axis=0)
    middle = np.full((x.size, prior.others), 0.5)
    steps = log_steps(posterior.theta, prior.at(x, z, middle), prior)
    joint = _jointly(posterior, steps, log_b_crit(posterior.theta, prior))
    centred = joint.log_steps
    b_crit = joint.log_b_crit
    cost = joint.expected * posterior.tau(np.exp2(x))
    chosen = list[int]()
    while len(chosen) < count:
        reduction = _variance_reduction(centred, b_crit, joint.noise)
        gain = reduction / (cost + SETUP * cost.min())
        gain[(np.abs(x[:, None] - x[chosen]) < APART).any(axis=1)] = 0.0
        best = int(gain.argmax())
        # There is no room for more.
        if gain[best] == 0.0:
            break
        chosen.append(best)
        # What the others still tell once this one has run, by regression on it.
        seen = centred[:, best] / (centred[:, best].var() + joint.noise)
        b_crit = b_crit - seen * float(centred[:, best] @ b_crit) / len(b_crit)
        centred = centred - np.outer(seen, centred[:, best] @ centred / len(b_crit))
    return [(float(x[i]), float(z[i]), float(joint.expected[i])) for i in sorted(chosen)]


def b_crit_quantiles(posterior: Posterior, shares: Collection[float]) -> Array:
    """Give quantiles of B_crit over the posterior, in examples."""
    drawn = log_b_crit(posterior.theta, posterior.prior)
    return np.asarray(np.exp(np.quantile(drawn, list(shares))))


def steps_band(
    posterior: Posterior, batch_sizes: Sequence[int], interval: tuple[float, float]
) -> CurveBand:
    """Give the median of S*(B) and two quantiles over the posterior."""
    sizes = np.array(batch_sizes, dtype=np.float64)
    drawn = frontier(posterior.theta, posterior.prior.at(np.log2(sizes)), posterior.prior)
    low, middle, high = np.exp(np.quantile(drawn, (interval[0], 0.5, interval[1]), axis=0))
    return CurveBand(batch_size=sizes, steps=middle, low=low, high=high)


def best_learning_rate(posterior: Posterior, batch_size: float) -> float:
    """Give the posterior's median of the best learning rate at a batch size, other hyper-parameters in the middle."""
    at = posterior.prior.at(np.array([math.log2(batch_size)]))
    return float(np.median(np.exp2(optimum(posterior.theta, at, posterior.prior))))


def best_learning_rates(
    posterior: Posterior, batch_sizes: Array, interval: tuple[float, float]
) -> tuple[Array, Array, Array]:
    """Give the low quantile, the median and the high one of the best learning rate at each batch size (n,)."""
    at = posterior.prior.at(np.log2(batch_sizes))
    drawn = np.exp2(optimum(posterior.theta, at, posterior.prior))
    low, middle, high = np.quantile(drawn, (interval[0], 0.5, interval[1]), axis=0)
    return low, middle, high
