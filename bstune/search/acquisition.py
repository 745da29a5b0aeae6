"""The next trial: which batch size and learning rate, for how many steps, and whether it continues a stopped one.

A decision is one draw of the posterior (Thompson sampling): the best candidate of this draw, for
its cost, is run. It is first given a share of its expected cost, then continued from its checkpoint
as long as draws still prefer it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bstune.core.errors import ConfigError
from bstune.search.candidates import (
    CENTRES,
    MOST_LOG_STEPS,
    NEAR_PENDING,
    NEAR_PENDING_PENALTY,
    RANDOM_PLACE,
    Candidates,
    Domain,
    Pending,
    Suggestion,
    anywhere,
    are_near,
    candidate_log_steps,
    log_over_sizes,
    log_sizes,
    new_points,
    to_be_continued,
)
from bstune.search.curve_decision import GIVEN_UP_AT, choose_for_curve
from bstune.search.frontier_findings import log_b_crit, noise_variance
from bstune.search.horizon import least_cost, log_met
from bstune.search.observations import (
    Observation,
    Posterior,
    StepWeight,
    objective_so_far,
    objective_weight,
    smoothed,
)
from bstune.search.posterior import log_steps

Array = NDArray[np.float64]

# Of any trial: a shorter one costs more to set up than to train.
MIN_STEPS = 10.0
# Times its parent's steps, that a trial which continues another has at least.
LEAST_GROWTH = 1.3

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
# Added to the score of what its longest horizon cannot bring to the target: it comes after all
# else.
OUT_OF_REACH = 1e3
# Of what was spent, that a look at a regime where nothing has reached the target may cost, ...
LOOK_SHARE = 0.5
# ... this many times the incumbent's cost left out where the objective is not the curve.
LOOK_AFTER = 12.0
# Standard deviations of a normal distribution that hold 90% of it.
NORMAL_WIDTH = 3.29


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
    # Under the objective ``steps``, once one has reached the target: the power of a step's cost in
    # what remains of a trial.
    steps_cost_power: float
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
        # The least that these may be. The others are fractions and widths: above 0, or above this.
        least = {"particles": 10, "moves": 1, "candidates": 10}
        least |= dict.fromkeys(("cost_weight", "steps_cost_power", "random_fraction"), 0)
        least |= dict.fromkeys(("curve_after", "curve_share"), 0)
        least |= dict.fromkeys(("loss_sure", "loss_early", "loss_cost_weight"), 0)
        above = {"stop_factor": 1, "curve_width": 1}
        at_most_1 = ("steps_cost_power", "random_fraction", "curve_share", "loss_first_share")
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
            if name in at_most_1 and value > 1:
                raise ConfigError(f"sampler.policy.{name} must be at most 1, but got {value}")


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
                cost_power = policy.steps_cost_power
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
    begun = to_be_continued(stopped, posterior.prior)
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
        over = drawn - log_over_sizes(longest, candidates.x)
        score = np.where(over > 0.0, OUT_OF_REACH + over, score)
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
    spread = math.sqrt(float(steps.var()) + noise_variance(posterior))
    met = log_met(posterior.theta[:, prior.horizon_law])
    above, _ = least_cost(met, spread, math.log(longest) - log_s, math.log(best) - log_s)
    horizon = math.exp(min(log_s + above, MOST_LOG_STEPS))
    return min(max(horizon, MIN_STEPS), longest)
