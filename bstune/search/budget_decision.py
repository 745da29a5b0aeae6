"""The next trial of a fixed budget: which batch size and learning rate, and how far it runs.

Until a few full trials' cost is spent, the trial of the largest expected improvement over the best
one for the cost still to go is run: what is cheap to finish goes first. After that it is the best
one in one draw of the posterior (Thompson sampling), which keeps on looking elsewhere. A new trial
runs to a share of its budget first and waits; chosen again it goes on to the budget's end, and
never past it. Where nothing can be continued, all trials run to the end at once.

Later on a trial runs to the end at once where the law is surer of it than its first share would be.

Of a stopped trial the seed is drawn already: its own estimate and the law's are joined by their
precisions. Of a new one the law alone is compared, without noise from seed to seed: the least of
hundreds of draws of that would be a new trial's always.

Now and then the best trial is run again on a fresh seed. One lucky seed near where training breaks
would else be the answer.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bstune.search.acquisition import Policy
from bstune.search.budget_runs import BudgetRun, last_whole_step
from bstune.search.candidates import (
    CENTRES,
    NEAR_PENDING,
    NEAR_PENDING_PENALTY,
    RANDOM_PLACE,
    Array,
    Domain,
    Pending,
    Suggestion,
    are_near,
    joined_with_histories,
    log_size_range,
    new_points,
    random_point,
)
from bstune.search.drift import stopped_spread
from bstune.search.fixed_budget import BudgetPosterior, rank_full_trials
from bstune.search.frontier_law import log_steps
from bstune.search.ruler import Ruler


@dataclass(frozen=True)
class BudgetCandidates:
    """Points to choose from; the first ``len(waiting)`` are stopped trials that may go on."""

    waiting: tuple[int, ...]
    """Places of these trials among the posterior's runs."""
    x: Array
    """Log2 of the batch sizes, (n,)."""
    z: Array
    """Log2 of the learning rates, (n,)."""
    other: Array
    """The other hyper-parameters, each in [0, 1], (n, k)."""
    done: Array
    """Share of its budget that each has run already, (n,); 0 for a new trial."""


def suggest_within_budget(
    posterior: BudgetPosterior,
    pending: Pending,
    *,
    domain: Domain,
    resumable: Callable[[int], bool] | None,
    policy: Policy,
    rng: np.random.Generator,
) -> Suggestion:
    """Choose the next trial for the objective ``loss``.

    Args:
        posterior: of the trials so far.
        pending: the trials that run now.
        domain: where the search may go.
        resumable: whether a stopped trial can be continued, by number; None: none can.
        policy: how to spend.
        rng: the source of chance.
    """
    # No trial has run to its budget's end yet, by whose curve others could be compared.
    if posterior.ruler is None:
        return _suggest_before_ruler(posterior, pending, domain, policy, rng)
    # Now and then the best trial runs again, so that one lucky seed is not the answer. Where
    # several processes search, only one of them does that.
    repeated = fresh_seed_due(posterior, policy)
    if repeated is not None and not _is_running(repeated, pending):
        return Suggestion(
            x=repeated.x,
            z=repeated.z,
            other=repeated.other,
            max_steps=last_whole_step(posterior.budget(2.0**repeated.x)),
            resumed_from=None,
            repeats=repeated.number,
        )
    candidates = _budget_candidates(posterior, pending, domain, resumable, policy, rng)
    # In case the model is wrong everywhere, a random decision moves one of the new points, which
    # stand behind the waiting trials, anywhere, and chooses it.
    if rng.random() < policy.random_fraction:
        chosen = len(candidates.waiting) + RANDOM_PLACE
        x, z = random_point(posterior.theta, posterior.prior, domain, posterior.too_large, rng)
        candidates.x[chosen] = x
        candidates.z[chosen] = z
    else:
        chosen = _choose_candidate(posterior, candidates, pending, policy, rng)
    last_step = last_whole_step(posterior.budget(float(np.exp2(candidates.x[chosen]))))
    max_steps = last_step
    # A new trial that can be continued stops at a first share of its budget, if that may tell
    # anything. One that has stopped there before goes on to the end.
    if candidates.done[chosen] == 0.0 and resumable is not None:
        first_stop = first_share_steps(last_step, posterior.ruler, policy)
        if _is_first_share_useful(posterior, candidates, chosen, first_stop / last_step, policy):
            max_steps = first_stop
    resumed_from: int | None = None
    if chosen < len(candidates.waiting):
        resumed_from = posterior.runs[candidates.waiting[chosen]].number
    return Suggestion(
        x=float(candidates.x[chosen]),
        z=float(candidates.z[chosen]),
        other=tuple(candidates.other[chosen].tolist()),
        max_steps=max_steps,
        resumed_from=resumed_from,
    )


def first_share_steps(last_step: int, ruler: Ruler, policy: Policy) -> int:
    """Choose the step to which a new trial runs first, where its budget ends at ``last_step``.

    The share of the budget is the policy's, or a larger one: that at which the best full trial, the
    ruler, was first evaluated. A trial that stops before that cannot be compared with it.
    """
    first_evaluation = math.exp(float(ruler.log_shares[0]))
    share = max(policy.loss_first_share, first_evaluation)
    # Rounding in the logarithm must not add a step to a share that is a whole number of them.
    return min(math.ceil(share * last_step - 1e-6), last_step)


def _is_first_share_useful(
    posterior: BudgetPosterior,
    candidates: BudgetCandidates,
    chosen: int,
    share: float,
    policy: Policy,
) -> bool:
    """Whether a new trial that stops at ``share`` of its budget may change what is expected of it.

    It cannot where the law predicts the trial with a smaller error than its curve up to that stop
    would: then the trial runs to the end at once. While little is spent, the answer is always yes,
    so that many short trials come first.
    """
    if posterior.spent < policy.loss_early:
        return True
    drawn = _behind_of_candidates(posterior, candidates, posterior.theta)[:, chosen]
    return float(drawn.std()) > policy.loss_sure * stopped_spread(-math.log(share), policy)


def fresh_seed_due(posterior: BudgetPosterior, policy: Policy) -> BudgetRun | None:
    """Find the trial that is to run again on a fresh seed now; None where none is due.

    It is the full trial, one that has run to its budget's end, which is predicted to be best,
    unless that has run more than once already. One is due each time ``loss_fresh_after`` full
    trials' cost has been spent.
    """
    expected = rank_full_trials(posterior)
    points = [run.point for run in posterior.runs if run.full or run.diverged]
    # All runs at a point but the first one.
    repeats = len(points) - len(set(points))
    if not expected or posterior.spent < policy.loss_fresh_after * (repeats + 1):
        return None
    best = expected[0].run
    if points.count(best.point) > 1:
        return None
    return best


def _is_running(run: BudgetRun, pending: Pending) -> bool:
    """Whether a run at the same point, begun afresh, is among the trials that run now."""
    # Both are logs that were computed from the same values: they may differ by rounding.
    for log_size, log_rate, resumed_from in pending:
        same_size = abs(log_size - run.x) < 1e-9
        same_rate = abs(log_rate - run.z) < 1e-9
        if resumed_from is None and same_size and same_rate:
            return True
    return False


def _suggest_before_ruler(
    posterior: BudgetPosterior,
    pending: Pending,
    domain: Domain,
    policy: Policy,
    rng: np.random.Generator,
) -> Suggestion:
    """Suggest a trial that runs to its budget's end, before any trial has reached that end.

    The curve of the best such trial becomes the ruler, by which others are compared before their
    end. The first trial is in the middle of the batch sizes. Later ones are the best candidates in
    a draw of the posterior, which trials that diverged have moved.
    """
    if posterior.runs or pending:
        candidates = _budget_candidates(
            posterior, pending, domain, resumable=None, policy=policy, rng=rng
        )
        row = int(rng.integers(len(posterior.theta)))
        # How many log steps late each would have the best metric; without a ruler, ranks alone.
        behind = _behind_of_candidates(posterior, candidates, posterior.theta[[row]])
        chosen = int((behind[0] + _penalty_near_pending(candidates, pending)).argmin())
        x = float(candidates.x[chosen])
        z = float(candidates.z[chosen])
        other = tuple(candidates.other[chosen].tolist())
    else:
        # The very first trial: the geometric middle of the batch sizes, at the rule's rate.
        low, high = log_size_range(domain, posterior.too_large)
        x = math.log2(domain.snap(2.0 ** (0.5 * (low + high))))
        middle = np.array([x])
        bottom, top = domain.log_rate_bounds(middle)
        z = float(np.clip(posterior.prior.rule(middle), bottom, top)[0])
        other = (0.5,) * domain.others
    last_step = last_whole_step(posterior.budget(2.0**x))
    return Suggestion(x=x, z=z, other=other, max_steps=last_step, resumed_from=None)


def _budget_candidates(
    posterior: BudgetPosterior,
    pending: Pending,
    domain: Domain,
    resumable: Callable[[int], bool] | None,
    policy: Policy,
    rng: np.random.Generator,
) -> BudgetCandidates:
    """List what there is to choose from: the stopped trials that may go on, then new points.

    New points lie along the posterior's optima and around the best full trials.

    Args:
        posterior: of the trials so far.
        pending: the trials that run now.
        domain: where the search may go.
        resumable: whether a stopped trial can be continued, by number; None: none can.
        policy: how many new points there are.
        rng: the source of chance.
    """
    # The numbers of the stopped trials that are going on now.
    running = {resumed_from for _, _, resumed_from in pending}
    # Places among the posterior's runs.
    waiting = list[int]()
    for place, run in enumerate(posterior.runs):
        may_go_on = run.stopped and run.number not in running
        if may_go_on and resumable is not None and resumable(run.number):
            waiting.append(place)
    x, z, other = new_points(
        posterior.theta,
        posterior.prior,
        domain,
        size_range=log_size_range(domain, posterior.too_large),
        centres=[run.point for run in posterior.full[:CENTRES]],
        count=policy.candidates,
        rng=rng,
    )
    runs = [posterior.runs[place] for place in waiting]
    # Without a waiting trial the array has no rows, but its columns all the same.
    others = np.array([run.other for run in runs]).reshape(len(runs), domain.others)
    return BudgetCandidates(
        waiting=tuple(waiting),
        x=np.concatenate([[run.x for run in runs], x]),
        z=np.concatenate([[run.z for run in runs], z]),
        other=np.concatenate([others, other]),
        done=np.concatenate([[run.share for run in runs], np.zeros(len(x))]),
    )


def _choose_candidate(
    posterior: BudgetPosterior,
    candidates: BudgetCandidates,
    pending: Pending,
    policy: Policy,
    rng: np.random.Generator,
) -> int:
    """Choose the candidate to run next, and give its place.

    While little is spent it is the one of the largest expected improvement for its cost, after that
    the best one in a draw of the posterior. What is compared is how many log steps each lags the
    best trial that has run to its budget's end: there has to be one.
    """
    near_penalty = _penalty_near_pending(candidates, pending)
    # The share of its budget that each still has to run: 1 is the cost of a full trial.
    cost_to_go = 1.0 - candidates.done
    if posterior.spent < policy.loss_early:
        behind = _behind_of_candidates(posterior, candidates, posterior.theta) + near_penalty
        best = rank_full_trials(posterior)[0].behind
        gain = np.maximum(best - behind, 0.0).mean(axis=0)
        # If no candidate is better in any draw, all gains are 0 and choose nothing: the draw below
        # does.
        if gain.max() > 0.0:
            # Without the weight that is added to each cost, a trial with next to nothing left to
            # run would be chosen for any improvement at all.
            cost = cost_to_go + policy.loss_cost_weight
            return int((gain / cost).argmax())
    row = int(rng.integers(len(posterior.theta)))
    drawn = _behind_of_candidates(posterior, candidates, posterior.theta[[row]])[0]
    cost_in_log_steps = policy.loss_cost_weight * cost_to_go
    return int((drawn + near_penalty + cost_in_log_steps).argmin())


def _behind_of_candidates(
    posterior: BudgetPosterior, candidates: BudgetCandidates, theta: Array
) -> Array:
    """Compute how far n candidates are behind the best full trial in m draws ``theta``: (m, n).

    It is log(S / steps of their budget). S is the steps that they need for the best metric of that
    trial, whose curve is called the ruler. Before any trial has run to its budget's end no metric
    is fixed: the numbers then only rank the candidates.
    """
    # The law gives log S at log2 of batch sizes and rates and at the other hyper-parameters, for a
    # seed like any other. A stopped trial has a seed of its own already: its history, which shows
    # how that one does, counts beside the law.
    points = posterior.prior.points_at(candidates.x, candidates.z, candidates.other)
    log_s_by_law = log_steps(theta, points, posterior.prior)
    log_s = joined_with_histories(log_s_by_law, theta, posterior.data, candidates.waiting)
    return np.asarray(log_s - posterior.log_budget(candidates.x))


def _penalty_near_pending(candidates: BudgetCandidates, pending: Pending) -> Array:
    """Compute by how much n candidates are to count as farther behind, in log steps: (n,).

    A candidate near a running trial would repeat it; for all others it is 0.
    """
    worse = np.zeros(len(candidates.x))
    for log_size, log_rate, _ in pending:
        is_near = are_near(candidates.x, candidates.z, log_size, log_rate, NEAR_PENDING)
        worse[is_near] += NEAR_PENDING_PENALTY
    return worse
