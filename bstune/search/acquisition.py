"""The next trial: its batch size, its learning rate, its steps, and which trial it continues.

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
    are_near,
    candidate_log_steps,
    log_over_sizes,
    log_size_range,
    new_points,
    random_point,
    stopped_candidates,
)
from bstune.search.curve_decision import GIVEN_UP_AT, choose_for_curve
from bstune.search.frontier_findings import log_b_crit
from bstune.search.frontier_law import log_steps, noise_variance
from bstune.search.horizon import least_cost, log_met
from bstune.search.observations import Observation
from bstune.search.posterior import Posterior, StepWeight
from bstune.search.predictions import objective_so_far, objective_weight, predict_objectives

Array = NDArray[np.float64]

# Steps that every trial gets at least: a shorter one costs more to set up than to train.
MIN_STEPS = 10.0
# A trial that continues another has at least so many times that one's steps.
LEAST_GROWTH = 1.3

# The incumbent's objective counts as at most so many times the least one of a single run.
MAX_LUCK = 1.5
# Share of the cost at which trials are given up: one that has cost as much is not continued.
CONTINUED_BELOW = 0.95
# Share of its first probe from which on a trial counts as probed.
PROBED = 0.75
# Share of its own steps that a stopped trial gets at least when it is continued before any has
# reached the target.
LEAST_CONTINUED = 0.4
# The most that a candidate's remaining cost counts in its score, in costs of the best candidate.
MOST_COST_TO_GO = 10.0
# What is added to the score of a candidate that its longest horizon cannot bring to the target: it
# comes after all others.
OUT_OF_REACH = 1e3
# Share of what was spent that a look at a regime where nothing has reached the target may cost.
LOOK_SHARE = 0.5
# What was spent is first reduced by so many times the incumbent's cost, unless the objective is
# the curve.
LOOK_AFTER = 12.0
# Standard deviations between the ends of the interval that holds 90% of a normal distribution.
NORMAL_WIDTH = 3.29


@dataclass(frozen=True)
class Policy:
    """How the search spends; the defaults stand in ``conf/sampler/frontier.yaml``."""

    particles: int
    """Draws of the posterior, at least 10."""
    moves: int
    """Metropolis steps of the posterior's sampler at each temperature."""
    candidates: int
    """New points that a decision chooses from, at least 10."""
    initial_fraction: float
    """Share of the budget's steps that the first trial gets."""
    max_growth: float
    """The most that continuing a trial costs before the target is reached, over what was spent."""
    max_first_growth: float
    """The same for a new trial."""
    max_horizon_growth: float
    """The same for a trial whose schedule ends with it, and which cannot be continued."""
    probe_fraction: float
    """A new trial first gets this share of ``stop_factor`` times the incumbent's cost ..."""
    max_predicted_fraction: float
    """... but at most this share of the steps to the target that are predicted of it."""
    stop_factor: float
    """A trial ends for good once it costs this many times the incumbent."""
    cost_weight: float
    """What a remaining cost of one incumbent adds to a candidate's score, in log T."""
    steps_cost_power: float
    """Power of a step's examples in the remaining cost under the objective ``steps``, once the
    target has been reached; with 0 a step costs the same at every batch size."""
    random_fraction: float
    """Share of the decisions that are made at random, in case the model is wrong everywhere."""
    curve_after: float
    """Once this many times the incumbent's cost has been spent, some decisions serve the curve
    whatever the objective is ..."""
    curve_share: float
    """... at most this share of them, ..."""
    curve_cost: float
    """... at this share of what is spent, ..."""
    curve_width: float
    """... and fewer once B_crit's interval is narrower than this (upper end over lower end)."""

    # For the objective ``loss``, see :mod:`bstune.search.fixed_budget`. Its costs are counted in
    # full trials.

    loss_first_share: float
    """Share of its budget to which a trial runs first."""
    loss_sure: float
    """A trial runs to the end at once where the law's deviation is below this many times that of a
    trial which has run to its first share."""
    loss_early: float
    """Until this cost is spent, the largest expected improvement for its cost decides."""
    loss_cost_weight: float
    """What a full trial's remaining cost adds to a candidate's score, in log of the budget. Where
    the improvement for its cost decides, each cost counts as so many full trials more."""
    loss_fresh_after: float
    """Each time this cost has been spent, the best trial runs once more on a fresh seed."""
    loss_drift: float
    """Deviation of ``behind`` from a trial's stop to its budget's end, over sqrt(-log share)."""
    loss_spread: float
    """Deviation of ``behind`` that a stopped trial has beside that drift."""
    loss_least_slope: float
    """Least slope of the curves at the budget's end, over that of their last tenfold."""

    def __post_init__(self) -> None:
        # The least values that these may have.
        least = {
            "particles": 10,
            "moves": 1,
            "candidates": 10,
            "cost_weight": 0,
            "steps_cost_power": 0,
            "random_fraction": 0,
            "curve_after": 0,
            "curve_share": 0,
            "loss_sure": 0,
            "loss_early": 0,
            "loss_cost_weight": 0,
        }
        # All others lie above 0, and these above 1.
        above = {"stop_factor": 1, "curve_width": 1}
        at_most_1 = ("steps_cost_power", "random_fraction", "curve_share", "loss_first_share")
        for name, value in vars(self).items():
            if name in least:
                # NaN is refused, too.
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
        budget: gives the step at which a trial ends in any case, at a batch size.
        resumable: whether a stopped trial can be continued, by number; None: none can.
        policy: how to spend.
        weight: the factor that turns steps into the objective, over log2 batch size.
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

    Args:
        posterior: of the trials so far.
        pending: the trials that run now.
        objective: what is to be least, or ``curve``: B_crit is to be known best.
        domain: where the search may go.
        budget: gives the step at which a trial ends in any case, at a batch size.
        resumable: whether a stopped trial can be continued, by number; None: none can.
        policy: how to spend.
        rng: the source of chance.
    """
    weight = objective_weight(objective, posterior.tau)
    fastest, incumbent = _incumbent(posterior, objective, weight)
    situation = Situation(
        pending=pending,
        domain=domain,
        budget=budget,
        resumable=resumable,
        policy=policy,
        weight=weight,
        incumbent=incumbent,
    )
    # Before a trial has reached the target, the objective ``curve``, too, searches what is fastest.
    if fastest is not None:
        suggestion = _suggest_for_curve(posterior, situation, objective, fastest, rng)
        if suggestion is not None:
            return suggestion
    candidates = _candidates(posterior, situation, rng)
    # One draw of the posterior decides (Thompson sampling), so that uncertain points are tried.
    row = int(rng.integers(len(posterior.theta)))
    # In case the model is wrong everywhere, a random decision moves one of the new points, which
    # stand behind the stopped trials, anywhere, and chooses it. Nothing is predicted of it.
    if posterior.observations and rng.random() < policy.random_fraction:
        chosen = len(candidates.stopped) + RANDOM_PLACE
        predicted = math.inf
        x, z = random_point(posterior.theta, posterior.prior, domain, posterior.too_large, rng)
        candidates.x[chosen] = x
        candidates.z[chosen] = z
    else:
        chosen, predicted = _best_in_draw(posterior, situation, candidates, objective, row)
    if posterior.prior.horizon:
        max_steps = _horizon_of(posterior, situation, candidates, chosen, posterior.theta[row])
    else:
        max_steps = _last_step_of(posterior, situation, candidates, chosen, predicted)
    return candidates.suggestion(chosen, max_steps)


def _incumbent(
    posterior: Posterior, objective: str, weight: StepWeight
) -> tuple[Observation | None, float | None]:
    """Find the reached trial whose fresh seeds are predicted to be best, and the objective to beat.

    Both are None before a trial has reached the target. The objective to beat is the least that is
    predicted of a fresh seed, but at most ``MAX_LUCK`` times the least that a run has had: a far
    larger prediction is wrong rather than the run lucky.
    """
    predictions = predict_objectives(posterior, objective)
    if not predictions:
        return None, None
    least_predicted, fastest = min(predictions, key=lambda pair: pair[0])
    luckiest = min(objective_so_far(trial, weight) for _, trial in predictions)
    return fastest, min(least_predicted, MAX_LUCK * luckiest)


def _best_in_draw(
    posterior: Posterior, situation: Situation, candidates: Candidates, objective: str, row: int
) -> tuple[int, float]:
    """Choose the candidate that is best in one draw of the posterior.

    Gives its place, and its steps to the target in that draw. ``row`` is the draw's place in
    ``posterior.theta``.
    """
    # The seconds of a step in this draw. The objective ``steps`` counts each step as 1.
    weight = posterior.drawn_weight(row)
    cost_power = 1.0
    if objective == "steps":
        weight = situation.weight
        # Until something has reached the target, candidates with costly steps have to wait. Then
        # the cost of a step counts little, as it is no part of the objective: the fewest steps are
        # at the largest batch sizes, whose trials take the most examples.
        if posterior.reached:
            cost_power = situation.policy.steps_cost_power
    return thompson_sample(
        posterior,
        candidates,
        posterior.theta[row],
        weight=weight,
        cost_power=cost_power,
        cost_weight=situation.policy.cost_weight,
        pending=situation.pending,
        longest=_longest_horizon(posterior, situation.budget),
    )


def _longest_horizon(
    posterior: Posterior, budget: Callable[[float], float]
) -> Callable[[float], float] | None:
    """Give the longest horizon as a function of batch size; None if schedules do not end so.

    A horizon is the steps after which a schedule ends with its trial: the budget limits it.
    """
    return budget if posterior.prior.horizon else None


def _most_before_target(
    posterior: Posterior, situation: Situation, batch_size: float, growth: float
) -> float:
    """Limit the steps that a trial may add while none has reached the target.

    They cost ``growth`` times what was spent so far, and are at least those of a first trial.
    """
    first_trial = max(situation.policy.initial_fraction * situation.budget(batch_size), MIN_STEPS)
    by_spent = growth * posterior.spent / float(posterior.tau(np.array(batch_size)))
    return max(by_spent, first_trial)


def _horizon_of(
    posterior: Posterior, situation: Situation, candidates: Candidates, chosen: int, draw: Array
) -> float:
    """Choose the steps after which the schedule of the candidate at place ``chosen`` is to end.

    ``draw`` is the draw of the posterior's parameters, (p,), in which it was chosen. The incumbent
    of the ``situation`` is the objective to beat, in seconds or steps; None before a trial has
    reached the target.
    """
    batch_size = float(np.exp2(candidates.x[chosen]))
    longest = situation.budget(batch_size)
    latest = math.inf
    # Before anything has reached the target, a trial may cost only a multiple of what was spent.
    if situation.incumbent is None:
        growth = situation.policy.max_horizon_growth
        longest = min(_most_before_target(posterior, situation, batch_size, growth), longest)
    else:
        # A candidate that takes more steps than these to the target is worse than the incumbent.
        latest = situation.incumbent / float(situation.weight(candidates.x[chosen]))
    return choose_horizon(posterior, candidates, chosen, draw, longest=longest, latest=latest)


def _last_step_of(
    posterior: Posterior,
    situation: Situation,
    candidates: Candidates,
    chosen: int,
    predicted: float,
) -> float:
    """Choose the step up to which the candidate at place ``chosen`` is trained.

    ``predicted`` are its steps to the target. The incumbent of the ``situation`` is the objective
    to beat, in seconds or steps; None before a trial has reached the target.
    """
    policy = situation.policy
    steps_done = float(candidates.done[chosen])
    batch_size = float(np.exp2(candidates.x[chosen]))
    last_step = situation.budget(batch_size)
    # Before anything has reached the target, a trial may cost only a multiple of what was spent.
    if situation.incumbent is None:
        growth = policy.max_growth if steps_done else policy.max_first_growth
        most = _most_before_target(posterior, situation, batch_size, growth)
        # A trial that is continued gets a share of its own steps at least: few more show nothing.
        return min(steps_done + max(most, LEAST_CONTINUED * steps_done), last_step)
    weight = float(situation.weight(candidates.x[chosen]))
    # The step at which the trial costs so much more than the incumbent that it ends for good.
    given_up_at = policy.stop_factor * situation.incumbent / weight
    # A bad trial is to be known by few steps, before it has cost as much as that.
    probe = min(policy.probe_fraction * given_up_at, policy.max_predicted_fraction * predicted)
    limit = given_up_at
    # A trial that can be continued first runs to a probe, a part of its steps. The probe's length
    # changes with the incumbent: a trial that has run most of it counts as probed. A trial that
    # cannot be continued gets all of its steps at once.
    if situation.resumable is not None and steps_done < PROBED * probe:
        limit = probe
    # Setting up a trial, or a continuation, costs time: a few steps more would not be worth it.
    return min(max(limit, LEAST_GROWTH * steps_done, MIN_STEPS), last_step)


def _suggest_for_curve(
    posterior: Posterior,
    situation: Situation,
    objective: str,
    fastest: Observation,
    rng: np.random.Generator,
) -> Suggestion | None:
    """Suggest the trial that tells most of B_crit for its cost.

    None where this decision is to serve the objective itself. Another objective than ``curve``
    gives no decision to B_crit while little is spent, and later a few, by chance. ``fastest`` is
    the incumbent: the reached trial that is predicted to be best.
    """
    policy = situation.policy
    always = objective == "curve"
    incumbent_cost = 0.0
    if not always:
        incumbent_cost = fastest.steps * float(posterior.tau(np.exp2(fastest.x)))
        too_early = posterior.spent <= policy.curve_after * incumbent_cost
        if too_early or rng.random() >= policy.curve_share:
            return None
    candidates = _candidates(posterior, situation, rng, for_curve=True)
    # The most that trials far below or far above B_crit, where nothing has reached the target, may
    # cost: a share of what was spent, without a multiple of the incumbent's cost that is for the
    # objective itself.
    allowed = LOOK_SHARE * (posterior.spent - LOOK_AFTER * incumbent_cost)
    suggestion = _most_telling_suggestion(posterior, situation, candidates, allowed)
    if always or rng.random() < _chance_for_curve(posterior, suggestion, candidates, policy):
        return suggestion
    return None


def _most_telling_suggestion(
    posterior: Posterior, situation: Situation, candidates: Candidates, allowed: float
) -> Suggestion:
    """Suggest the candidate that tells most of B_crit for its cost, and up to which step it runs.

    ``allowed`` is the most that trials far below or far above B_crit, where nothing has reached the
    target, may cost, in units of the posterior's ``tau``, the cost of a step.
    """
    policy = situation.policy
    longest = _longest_horizon(posterior, situation.budget)
    chosen, predicted = choose_for_curve(posterior, candidates, situation.pending, allowed, longest)
    steps_done = float(candidates.done[chosen])
    last_step = situation.budget(float(np.exp2(candidates.x[chosen])))
    if posterior.prior.horizon:
        horizon = choose_horizon(
            posterior, candidates, chosen, draw=None, longest=last_step, latest=math.inf
        )
        return candidates.suggestion(chosen, horizon)
    max_steps = policy.probe_fraction * predicted
    # A trial first runs to a probe, a part of its predicted steps. If it is chosen again after
    # that, it runs until it is given up.
    if steps_done >= max_steps:
        max_steps = GIVEN_UP_AT * predicted
    least = max(LEAST_GROWTH * steps_done, MIN_STEPS)
    return candidates.suggestion(chosen, min(max(max_steps, least), last_step))


def _chance_for_curve(
    posterior: Posterior, suggestion: Suggestion, candidates: Candidates, policy: Policy
) -> float:
    """Compute the chance with which a suggestion for the curve is run under another objective.

    It makes these suggestions cost a share ``curve_cost`` of what is spent, on average: one that
    costs much is run seldom. Once the interval of B_crit is narrower than ``curve_width``, they
    cost less, in proportion to the variance of log B_crit.
    """
    steps_done = 0.0
    for trial in candidates.stopped:
        if trial.number == suggestion.resumed_from:
            steps_done = float(trial.steps)
    tau = float(posterior.tau(np.array(2.0**suggestion.x)))
    cost = (suggestion.max_steps - steps_done) * tau
    usual_cost = posterior.spent / max(posterior.trials, 1)
    # Only a share ``curve_share`` of the decisions comes here. With this chance for each, their
    # mean cost over all decisions is ``curve_cost`` times that of a usual trial.
    by_cost = policy.curve_cost * usual_cost / (policy.curve_share * cost)
    variance = float(log_b_crit(posterior.theta, posterior.prior).var())
    # The variance with which B_crit's 90% interval is as narrow as ``curve_width``.
    narrow_variance = (math.log(policy.curve_width) / NORMAL_WIDTH) ** 2
    chance: float = min(1.0, by_cost) * min(1.0, variance / narrow_variance)
    return chance


def _candidates(
    posterior: Posterior,
    situation: Situation,
    rng: np.random.Generator,
    for_curve: bool = False,
) -> Candidates:
    """List what there is to choose from: the stopped trials that may go on, then new points.

    New points lie along the posterior's optima and around the best trials. ``for_curve``: the
    decision is for B_crit rather than for the objective.
    """
    domain = situation.domain
    stopped = _may_go_on(posterior, situation, for_curve)
    reached = sorted(posterior.reached, key=lambda trial: objective_so_far(trial, situation.weight))
    x, z, other = new_points(
        posterior.theta,
        posterior.prior,
        domain,
        size_range=log_size_range(domain, posterior.too_large),
        centres=[trial.point for trial in reached[:CENTRES]],
        count=situation.policy.candidates,
        rng=rng,
    )
    stopped_part = stopped_candidates(stopped, posterior.prior)
    return Candidates(
        stopped=stopped_part.stopped,
        x=np.concatenate([stopped_part.x, x]),
        z=np.concatenate([stopped_part.z, z]),
        other=np.concatenate([stopped_part.other, other]),
        done=np.concatenate([stopped_part.done, np.zeros(len(x))]),
    )


def _may_go_on(posterior: Posterior, situation: Situation, for_curve: bool) -> list[Observation]:
    """List the stopped trials that may be continued, and whose further steps can change the answer.

    One that runs now, has spent its budget, or can add no steps is left out. For B_crit
    (``for_curve``), one that would take many times its steps, a flat one, is left out as well; for
    any other objective, one that has cost too much to beat the incumbent.
    """
    # No trial can be continued at all.
    if situation.resumable is None:
        return []
    running = {resumed_from for _, _, resumed_from in situation.pending}
    most_cost = math.inf
    if situation.incumbent is not None and not for_curve:
        most_cost = CONTINUED_BELOW * situation.policy.stop_factor * situation.incumbent
    stopped = list[Observation]()
    for trial in posterior.stopped:
        if trial.stuck or trial.number in running or (for_curve and trial.flat):
            continue
        if trial.steps >= situation.budget(2.0**trial.x):
            continue
        cheap_enough = objective_so_far(trial, situation.weight) < most_cost
        if cheap_enough and situation.resumable(trial.number):
            stopped.append(trial)
    return stopped


def thompson_sample(
    posterior: Posterior,
    candidates: Candidates,
    draw: Array,
    *,
    weight: StepWeight,
    cost_power: float,
    cost_weight: float,
    pending: Pending,
    longest: Callable[[float], float] | None,
) -> tuple[int, float]:
    """Choose the candidate of least objective in one draw; of nearly equal ones, the cheapest.

    Args:
        posterior: of the trials so far.
        candidates: to choose from.
        draw: a draw of the posterior's parameters, (p,).
        weight: the factor that turns steps into the objective, over log2 batch size.
        cost_power: the power to which the cost of a step is raised where a candidate's remaining
            cost is counted; with 0 its remaining steps count alone.
        cost_weight: what is added to the log of a candidate's objective if its remaining cost is
            the whole cost of the best candidate; others add in proportion, up to
            ``MOST_COST_TO_GO`` times as much.
        pending: the trials that run now; candidates near them count as worse.
        longest: the longest horizon at a batch size, where schedules end with the trial. What takes
            longer never reaches the target: it comes last, the nearest to its horizon first.

    Returns:
        The candidate's place, and its steps to the target in that draw.
    """
    log_s = candidate_log_steps(posterior, candidates, draw[None])[0]
    log_s = np.minimum(log_s, MOST_LOG_STEPS)
    # The least score is chosen: the log of the objective, and more for what counts against a
    # candidate.
    log_score = log_s + np.log(weight(candidates.x))
    cost = np.exp(log_s) * posterior.tau(np.exp2(candidates.x)) ** cost_power
    to_go = cost * np.maximum(1.0 - candidates.done / np.exp(log_s), 0.0)
    best_cost = cost[int(log_score.argmin())]
    log_score += cost_weight * np.minimum(to_go / best_cost, MOST_COST_TO_GO)
    for log_size, log_rate, _ in pending:
        is_near = are_near(candidates.x, candidates.z, log_size, log_rate, NEAR_PENDING)
        log_score[is_near] += NEAR_PENDING_PENALTY
    if longest is not None:
        log_over = log_s - log_over_sizes(longest, candidates.x)
        log_score = np.where(log_over > 0.0, OUT_OF_REACH + log_over, log_score)
    chosen = int(log_score.argmin())
    return chosen, float(np.exp(log_s[chosen]))


def choose_horizon(
    posterior: Posterior,
    candidates: Candidates,
    chosen: int,
    draw: Array | None,
    *,
    longest: float,
    latest: float,
) -> float:
    """Choose the steps after which a candidate's schedule is to end: those of least expected cost.

    S, the steps that reach the target, is taken from one draw of the posterior, if that is given: a
    draw that predicts few steps is put to the test by a short schedule.

    Args:
        posterior: of the trials so far.
        candidates: all that the decision chose from.
        chosen: the candidate's place among them.
        draw: the draw of the posterior's parameters that its S is taken from, (p,); None for the
            posterior's mean.
        longest: the most steps that the horizon may have.
        latest: the step by which the target is to be met, as after it the incumbent is better.
    """
    prior = posterior.prior
    row = [chosen]
    point = prior.points_at(candidates.x[row], candidates.z[row], candidates.other[row])
    drawn_log_s = log_steps(posterior.theta, point, prior)[:, 0]
    log_s = float(drawn_log_s.mean())
    if draw is not None:
        log_s = float(log_steps(draw[None], point, prior)[0, 0])
    spread = math.sqrt(float(drawn_log_s.var()) + noise_variance(posterior.theta))
    log_met_over_s = log_met(posterior.theta[:, prior.horizon_law])
    log_horizon_over_s, _expected_cost = least_cost(
        log_met_over_s, spread, math.log(longest) - log_s, math.log(latest) - log_s
    )
    # The exponential of a far larger log S would overflow.
    horizon = math.exp(min(log_s + log_horizon_over_s, MOST_LOG_STEPS))
    return min(max(horizon, MIN_STEPS), longest)
