"""Which stopped trial goes on after a search, past the steps that the search gave it.

Where no trial has reached the target, the most promising one goes on: past the steps that are
predicted of it, to its budget at most and within what is left of the study's seconds. Where points
alone are counted, so many trials are brought to the end of their budgets. Where no trial can be
continued, it starts afresh.

Where one has reached it, the baseline goes on in the seconds that fresh seeds leave, if the study's
time had cut its first run short: how much faster the winner is than it is not known otherwise.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from bstune.core.records import TrialResult, TrialSpec
from bstune.search.acquisition import LEAST_GROWTH, MIN_STEPS
from bstune.search.candidates import most_promising
from bstune.search.curve_decision import GIVEN_UP_AT
from bstune.study.analysis.model import study_posterior
from bstune.study.planning.baseline import baseline_runs
from bstune.study.planning.plan import reruns, trials_of_search
from bstune.study.planning.replicates import same_point
from bstune.study.planning.wall import WallTime
from bstune.study.prepared import PreparedStudy
from bstune.study.searching.early_end import LOOK_PARTICLES
from bstune.study.searching.limits import is_for_loss, trial_cost

# Without a limit of time, so many trials go to the end of their budgets where none reaches the
# target.
MAX_RESCUED = 3


@dataclass(frozen=True)
class Rescue:
    """A stopped trial that is to go on, and the step up to which it does."""

    stopped: TrialResult
    max_steps: int


def needs_rescue(prepared: PreparedStudy, trials: Sequence[TrialResult]) -> bool:
    """Whether no trial has reached the target, and the study's budget allows one more try.

    A limit of time ends the tries by itself. Without one there are tries until ``MAX_RESCUED``
    trials have spent their budgets.
    """
    # The objective loss has no target that a trial could miss.
    if is_for_loss(prepared) or any(trial.reached for trial in trials):
        return False
    budget = prepared.budget
    is_timed = budget.seconds is not None or budget.wall_seconds is not None
    ran_to_the_end = [
        trial
        for trial in trials_of_search(trials)
        if trial.status == "stopped"
        and trial.steps >= prepared.protocol.last_step(trial.batch_size)
    ]
    return is_timed or len(ran_to_the_end) < MAX_RESCUED


def choose_rescue(
    prepared: PreparedStudy,
    wall: WallTime,
    trials: Sequence[TrialResult],
    ended_below_limit: Collection[int],
) -> Rescue | None:
    """Choose the stopped trial that is predicted to reach the target soonest.

    It is None where no trial can go on, or too few seconds are left.

    Args:
        prepared: the study.
        wall: what is left of its wall time.
        trials: that have ended.
        ended_below_limit: numbers of the trials that ended before their own limit of steps, and so
            can go no further, such as where the run in a recorded table ends.
    """
    posterior = study_posterior(prepared, trials, LOOK_PARTICLES)
    exhausted = _exhausted(trials, ended_below_limit)
    chosen = most_promising(
        posterior,
        lambda batch_size: float(prepared.protocol.last_step(round(batch_size))),
        lambda number: number not in exhausted and _can_train_further(prepared, number),
    )
    if chosen is None:
        return None
    number, predicted = chosen
    stopped = next(trial for trial in trials if trial.number == number)
    max_steps = _rescue_steps(prepared, wall, trials, stopped, predicted)
    if max_steps is None:
        return None
    return Rescue(stopped, max_steps)


def _exhausted(
    trials: Sequence[TrialResult], ended_below_limit: Collection[int]
) -> Collection[int]:
    """Find the stopped trials that are not run once more, where none can be continued.

    A later run of the same configuration and seed stands in the place of the earlier ones. It runs
    again in its turn, below its limit or not, as long as it has come further than they did.
    """
    earlier = reruns(trials)
    steps = {trial.number: trial.steps for trial in trials}
    came_further = {later for later, former in earlier.items() if steps[later] > steps[former]}
    return (set(ended_below_limit) - came_further) | set(earlier.values())


def baseline_to_finish(
    prepared: PreparedStudy,
    wall: WallTime,
    trials: Sequence[TrialResult],
    ended_below_limit: Collection[int],
) -> Rescue | None:
    """Give the baseline's first run, if the study's time cut it short and now has room for more.

    It is None if that run ended by itself, cannot go on, or would go on for few steps only. A run
    whose schedule ended with it has nothing to go on to.

    Args:
        prepared: the study.
        wall: what is left of its wall time.
        trials: that have ended.
        ended_below_limit: numbers of the trials that ended before their own limit of steps, and so
            can go no further, such as where the run in a recorded table ends.
    """
    runs = baseline_runs(trials, prepared.baseline)
    if runs is None:
        return None
    first = runs.first
    last_step = prepared.last_step(first.batch_size)
    was_cut_short = first.status == "stopped" and first.steps < last_step
    if not was_cut_short or first.horizon is not None:
        return None
    if first.number in ended_below_limit or not _can_train_further(prepared, first.number):
        return None
    # The study has its answer without this run: one that failed is not asked again.
    if any(trial.status == "failed" and _goes_on_from(trial, first) for trial in trials):
        return None
    # The run is to go on to its budget's end, whatever is predicted of it, as far as time allows.
    max_steps = _rescue_steps(prepared, wall, trials, first, predicted=float(last_step))
    if max_steps is None or max_steps < LEAST_GROWTH * first.steps:
        return None
    return Rescue(first, max_steps)


def _goes_on_from(trial: TrialResult, first: TrialResult) -> bool:
    """Whether a trial continues ``first``, or runs it once more from its first step."""
    if trial.resumed_from is not None:
        return trial.resumed_from == first.number
    is_later = trial.number > first.number and trial.replicate_of is None
    return is_later and trial.seed == first.seed and same_point(trial, first)


def _can_train_further(prepared: PreparedStudy, number: int) -> bool:
    """Whether a stopped trial can be given further steps."""
    backend = prepared.backend
    # Such trials start afresh and train for longer: they need no state of the stopped one.
    if not backend.continues:
        return True
    return backend.resumable(number, prepared.files)


def _rescue_steps(
    prepared: PreparedStudy,
    wall: WallTime,
    trials: Sequence[TrialResult],
    stopped: TrialResult,
    predicted: float,
) -> int | None:
    """Give the step up to which a stopped trial goes on.

    It is None if too few seconds are left for any further step.

    ``predicted``: the step at which it is predicted to reach the target.
    """
    backend = prepared.backend
    steps_before = stopped.steps
    # The prediction may be too low: before it is given up the trial gets more further steps.
    given_up_at = steps_before + GIVEN_UP_AT * (predicted - steps_before)
    wanted = max(given_up_at, LEAST_GROWTH * steps_before, MIN_STEPS)
    limits = [float(prepared.protocol.last_step(stopped.batch_size)), wanted]
    # A trial whose state cannot be restored starts afresh: it takes all of its steps once more.
    resumed_from = stopped.number if backend.continues else None
    spec = TrialSpec(
        number=stopped.number,
        trial_index=stopped.trial_index,
        batch_size=stopped.batch_size,
        lr=stopped.lr,
        delta=stopped.delta,
        seed=stopped.seed,
        resumed_from=resumed_from,
    )
    cost = trial_cost(prepared, trials)
    # The share that was kept for this trial may be spent whole, so that none is reserved.
    within_wall_time = wall.max_steps(trials, spec, cost, reserve=0.0)
    if within_wall_time is None:
        return None
    limits.append(float(within_wall_time))
    if prepared.budget.seconds is not None:
        seconds_left = prepared.budget.seconds - sum(trial.train_seconds for trial in trials)
        steps_to_pay = seconds_left / cost.tau(stopped.batch_size)
        # The steps before the stop are paid for, unless they are taken once more.
        steps_paid = steps_before if backend.continues else 0
        limits.append(steps_paid + steps_to_pay)
    max_steps = math.floor(min(limits))
    if max_steps <= steps_before:
        return None
    return max_steps
