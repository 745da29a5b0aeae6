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

from bstune.search.acquisition import (
    CENTRES,
    Array,
    Domain,
    Pending,
    Policy,
    Suggestion,
    log_sizes,
    new_points,
    rates_near_rule,
)
from bstune.search.fixed_budget import (
    BudgetPosterior,
    BudgetRun,
    last_step_of,
    rank_full_trials,
    stopped_spread,
)
from bstune.search.posterior import NOISE, log_steps
from bstune.search.ruler import Ruler

NEAR = 0.3  # octaves of batch size and of rate: a candidate as near to a running trial is that one
NEAR_PENALTY = 0.3  # in ``behind``, of such a candidate
RANDOM_PLACE = 2  # among the new candidates; the first two are the ends of the batch sizes


@dataclass(frozen=True)
class BudgetCandidates:
    """What there is to choose from; the first ``len(waiting)`` are stopped trials to go on with."""

    waiting: tuple[int, ...]  # places among the posterior's runs
    x: Array
    z: Array
    other: Array
    done: Array  # share of the budget


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
        pending: log2 B, log2 lr and what is continued, of the trials that run now.
        domain: where the search may go.
        resumable: whether a stopped trial can be continued, by number; None: none can.
        policy: how to spend.
        rng: the source of chance.
    """
    if posterior.ruler is None:
        return _before_any_is_full(posterior, pending, domain, policy, rng)
    again = fresh_seed_due(posterior, policy)
    if again is not None and not _runs_now(again, pending):
        return Suggestion(
            x=again.x,
            z=again.z,
            other=again.other,
            max_steps=last_step_of(posterior.budget(2.0**again.x)),
            resumed_from=None,
            repeats=again.number,
        )
    options = _candidates(posterior, pending, domain, resumable, policy, rng)
    if rng.random() < policy.random_fraction:
        chosen = len(options.waiting) + RANDOM_PLACE
        _move_anywhere(options, chosen, posterior, domain, rng)
    else:
        chosen = _choose(posterior, options, pending, policy, rng)
    last_step = last_step_of(posterior.budget(float(np.exp2(options.x[chosen]))))
    steps = last_step
    if options.done[chosen] == 0.0 and resumable is not None:
        first = first_steps(last_step, posterior.ruler, policy)
        if _tells_something(posterior, options, chosen, first / last_step, policy):
            steps = first
    waiting = chosen < len(options.waiting)
    return Suggestion(
        x=float(options.x[chosen]),
        z=float(options.z[chosen]),
        other=tuple(options.other[chosen].tolist()),
        max_steps=steps,
        resumed_from=posterior.runs[options.waiting[chosen]].number if waiting else None,
    )


def first_steps(last_step: int, ruler: Ruler, policy: Policy) -> int:
    """Give the steps to which a trial runs first, of a budget that ends at ``last_step``.

    It is at least where the ruler was first evaluated: a trial that stops before says nothing.
    """
    first_evaluation = math.exp(float(ruler.log_shares[0]))
    share = max(policy.loss_first_share, first_evaluation)
    return min(math.ceil(share * last_step - 1e-6), last_step)


def _tells_something(
    posterior: BudgetPosterior, options: BudgetCandidates, chosen: int, share: float, policy: Policy
) -> bool:
    """Say whether a new trial's first share may change what is expected of it.

    It does not where the law is surer than a trial is after that share, near the best ones: the
    trial would wait for no news, so it runs to the end at once. While little is spent, many short
    looks come first.
    """
    if posterior.spent < policy.loss_early:
        return True
    drawn = _log_behind(posterior, options, posterior.theta)[:, chosen]
    return float(drawn.std()) > policy.loss_sure * stopped_spread(-math.log(share), policy)


def fresh_seed_due(posterior: BudgetPosterior, policy: Policy) -> BudgetRun | None:
    """Name the trial that is to run again on a fresh seed now; None where none is due.

    It is the one predicted to be best, where it has run only once, and once for each
    ``loss_fresh_after`` full trials' cost that is spent.
    """
    expected = rank_full_trials(posterior)
    ended = [run.place for run in posterior.runs if run.full or run.diverged]
    repeats = len(ended) - len(set(ended))
    if not expected or posterior.spent < policy.loss_fresh_after * (repeats + 1):
        return None
    best = expected[0].run
    return best if ended.count(best.place) == 1 else None


def _runs_now(run: BudgetRun, pending: Pending) -> bool:
    return any(
        resumed_from is None and abs(x - run.x) < 1e-9 and abs(z - run.z) < 1e-9
        for x, z, resumed_from in pending
    )


def _before_any_is_full(
    posterior: BudgetPosterior,
    pending: Pending,
    domain: Domain,
    policy: Policy,
    rng: np.random.Generator,
) -> Suggestion:
    """Run a trial to its budget's end: the middle first, then the best of a draw of the posterior.

    Nothing can be compared before there is a ruler. What diverged has moved the posterior.
    """
    low, high = log_sizes(domain, posterior.too_large)
    if posterior.runs or pending:
        options = _candidates(posterior, pending, domain, None, policy, rng)
        behind = _log_behind(
            posterior, options, posterior.theta[[rng.integers(len(posterior.theta))]]
        )
        chosen = int((behind[0] + _near_pending(options, pending)).argmin())
        x, z = float(options.x[chosen]), float(options.z[chosen])
        other = tuple(options.other[chosen].tolist())
    else:
        x = math.log2(domain.snap(2.0 ** (0.5 * (low + high))))
        at = np.array([x])
        bottom, top = domain.lrs(at)
        z = float(np.clip(posterior.prior.rule(at), bottom, top)[0])
        other = (0.5,) * domain.others
    last_step = last_step_of(posterior.budget(2.0**x))
    return Suggestion(x=x, z=z, other=other, max_steps=last_step, resumed_from=None)


def _candidates(
    posterior: BudgetPosterior,
    pending: Pending,
    domain: Domain,
    resumable: Callable[[int], bool] | None,
    policy: Policy,
    rng: np.random.Generator,
) -> BudgetCandidates:
    """Give the trials to go on with, and new points along the optima and around the best trials."""
    taken = {resumed_from for _, _, resumed_from in pending}
    waiting = list[int]()
    for place, run in enumerate(posterior.runs):
        may_go_on = run.stopped and run.number not in taken
        if may_go_on and resumable is not None and resumable(run.number):
            waiting.append(place)
    ends = log_sizes(domain, posterior.too_large)
    centres = [run.place for run in posterior.full[:CENTRES]]
    count = policy.candidates
    x, z, other = new_points(posterior.theta, posterior.prior, domain, ends, centres, count, rng)
    runs = [posterior.runs[place] for place in waiting]
    others = np.array([run.other for run in runs]).reshape(len(runs), domain.others)
    return BudgetCandidates(
        waiting=tuple(waiting),
        x=np.concatenate([[run.x for run in runs], x]),
        z=np.concatenate([[run.z for run in runs], z]),
        other=np.concatenate([others, other]),
        done=np.concatenate([[run.share for run in runs], np.zeros(count)]),
    )


def _move_anywhere(
    options: BudgetCandidates,
    chosen: int,
    posterior: BudgetPosterior,
    domain: Domain,
    rng: np.random.Generator,
) -> None:
    """Put one of the new candidates at a random place, in case the model is wrong everywhere."""
    x = math.log2(domain.snap(2.0 ** rng.uniform(*log_sizes(domain, posterior.too_large))))
    bottom, top = rates_near_rule(posterior.theta, posterior.prior, domain, np.array([x]))
    options.x[chosen], options.z[chosen] = x, rng.uniform(bottom[0], top[0])


def _choose(
    posterior: BudgetPosterior,
    options: BudgetCandidates,
    pending: Pending,
    policy: Policy,
    rng: np.random.Generator,
) -> int:
    """Choose by expected improvement for its cost while little is spent, then by one draw."""
    near = _near_pending(options, pending)
    to_go = 1.0 - options.done
    if posterior.spent < policy.loss_early:
        behind = _log_behind(posterior, options, posterior.theta) + near
        best = rank_full_trials(posterior)[0].behind
        gain = np.maximum(best - behind, 0.0).mean(axis=0)
        if gain.max() > 0.0:
            return int((gain / (to_go + policy.loss_cost_weight)).argmax())
    row = int(rng.integers(len(posterior.theta)))
    drawn = _log_behind(posterior, options, posterior.theta[[row]])[0]
    return int((drawn + near + policy.loss_cost_weight * to_go).argmin())


def _log_behind(posterior: BudgetPosterior, options: BudgetCandidates, theta: Array) -> Array:
    """Draw how far behind the candidates are at their budget's end: (m, n)."""
    points = posterior.prior.at(options.x, options.z, options.other)
    steps = log_steps(theta, points, posterior.prior)
    rows, count = np.array(options.waiting, dtype=np.intp), len(options.waiting)
    data = posterior.data
    noise = np.exp(2.0 * theta[:, NOISE, None])
    by_law, by_history = steps[:, :count], data.y[rows]
    estimated = by_law + noise / (noise + data.spread[rows] ** 2) * (by_history - by_law)
    steps[:, :count] = np.where(data.bound[rows], np.maximum(by_law, by_history), estimated)
    return np.asarray(steps - posterior.log_budget(options.x))


def _near_pending(options: BudgetCandidates, pending: Pending) -> Array:
    """Give what candidates near a running trial are worse by."""
    worse = np.zeros(len(options.x))
    for x, z, _ in pending:
        is_near = (np.abs(options.x - x) < NEAR) & (np.abs(options.z - z) < NEAR)
        worse[is_near] += NEAR_PENALTY
    return worse
