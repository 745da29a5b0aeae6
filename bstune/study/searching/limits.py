"""Limits the trials of a search to what the study has left, and keeps time for what follows it.

How much wall time is left is known to :mod:`bstune.study.planning.wall`. This module knows the
study: its objective, its baseline, and whether its trials can be stopped.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from bstune.core.records import TrialResult, TrialSpec
from bstune.search.acquisition import MIN_STEPS
from bstune.study.analysis.step_times import step_time_of
from bstune.study.at_budget import is_full
from bstune.study.planning.baseline import (
    Baseline,
    baseline_runs,
    count_fresh_seeds,
    steps_of_first_run,
)
from bstune.study.planning.next_command import NextCommand
from bstune.study.planning.plan import (
    MEANS_SHARE,
    RESCUE_SHARE,
    SearchEnd,
    count_points,
    trials_of_search,
)
from bstune.study.planning.replicates import fresh_runs
from bstune.study.planning.survey_time import survey_seconds
from bstune.study.planning.wall import OTHERS_SHARE, TrialCost, WallTime, fit_cost
from bstune.study.prepared import PreparedStudy
from bstune.study.storage.telling import within_steps
from bstune.trial.backend import chooses_horizons, stops_trials


def is_for_loss(prepared: PreparedStudy) -> bool:
    """Whether a study seeks the best metric at its budget's end, in place of a target."""
    return prepared.budget.objective == "loss"


def trial_cost(prepared: PreparedStudy, trials: Sequence[TrialResult]) -> TrialCost:
    """Fit what a trial takes in wall seconds to those that have ended."""
    tau = step_time_of(prepared, trials)
    return fit_cost(trials, tau, prepared.backend.evaluation_share)


def full_run_seconds(
    prepared: PreparedStudy, wall: WallTime, batch_size: float, cost: TrialCost
) -> float:
    """Predict the wall seconds of a run on a fresh seed to its budget's end."""
    last_step = prepared.last_step(batch_size)
    return wall.replicate_seconds(last_step, batch_size, cost)


def reserved_seconds(
    prepared: PreparedStudy,
    wall: WallTime,
    stops: bool,
    trials: Sequence[TrialResult],
    cost: TrialCost,
) -> float:
    """Give the wall seconds to keep for what follows the search.

    They are 0 before the first trial has ended, without which there is no answer.

    Args:
        prepared: the study.
        wall: what is left of its wall time.
        stops: whether the search stops trials early, and goes on with promising ones later.
        trials: that have ended.
        cost: of a trial.
    """
    if not trials_of_search(trials):
        return 0.0
    if is_for_loss(prepared):
        # Without a full trial there is no winner to run again.
        if not any(is_full(trial, prepared.last_step) for trial in trials):
            return 0.0
        reserve = _reserved_at_budget(prepared, wall, trials, cost)
        # A second configuration comes before the fresh seeds of the only one so far.
        return wall.reserve_beside_second(trials, cost, reserve)
    # Until a trial has reached the target, seconds are kept only to continue a stopped one.
    has_reached = any(trial.reached for trial in trials)
    if not stops and not has_reached:
        return 0.0
    # A trial that has spent its budget cannot go on: the next configuration needs the time more.
    if not has_reached and not _some_may_go_on(prepared, trials):
        return 0.0
    reserve = wall.reserve(trials, cost, _baseline_to_repeat(prepared, trials))
    if not has_reached:
        return reserve
    # From here on seconds are kept for fresh seeds. A second configuration comes before them.
    return wall.reserve_beside_second(trials, cost, reserve)


def _some_may_go_on(prepared: PreparedStudy, trials: Sequence[TrialResult]) -> bool:
    """Whether any stopped trial has steps of its budget left, and was not continued already."""
    continued = {trial.resumed_from for trial in trials}
    for trial in trials:
        has_steps_left = trial.steps < prepared.last_step(trial.batch_size)
        if trial.status == "stopped" and has_steps_left and trial.number not in continued:
            return True
    return False


def _baseline_to_repeat(
    prepared: PreparedStudy, trials: Sequence[TrialResult]
) -> TrialResult | None:
    """Give the baseline's first run, if runs of it on fresh seeds are still to come; else None."""
    runs = baseline_runs(trials, prepared.baseline)
    if runs is None:
        return None
    last_step = prepared.last_step(runs.first.batch_size)
    planned = count_fresh_seeds(runs, last_step, prepared.budget.replicates)
    return runs.first if planned > len(runs.again) else None


def _reserved_at_budget(
    prepared: PreparedStudy, wall: WallTime, trials: Sequence[TrialResult], cost: TrialCost
) -> float:
    """Give the wall seconds to keep for the fresh seeds of winner and baseline that are to come.

    They are at most ``RESCUE_SHARE`` of the seconds that the search has.
    """
    # Which point wins is open until the search ends: all runs count as at the reference.
    reference = prepared.options.scaling.batch_size
    points = 1 if prepared.baseline is None else 2
    ended = sum(len(runs) for runs in fresh_runs(trials).values())
    runs_left = max(prepared.budget.replicates * points - ended, 0)
    seconds = runs_left * full_run_seconds(prepared, wall, reference, cost)
    return min(seconds, RESCUE_SHARE * wall.shared_seconds)


def advised_limit(
    prepared: PreparedStudy,
    wall: WallTime,
    stops: bool,
    trials: Sequence[TrialResult],
    cost: TrialCost,
    reserve: float,
) -> int | None:
    """Advise a ``search.wall_seconds`` that lets the next command finish two points of the search.

    Where these have ended and this command had no time for any trial, it lets the next one finish
    another point. None where two have ended and this command has begun a trial. What a trial takes
    and what is kept both depend on the limit, so that the next command is planned as a function of
    it.

    Args:
        prepared: the study.
        wall: what is left of its wall time.
        stops: whether the search stops trials early, and goes on with promising ones later.
        trials: that have ended.
        cost: the wall seconds of a trial.
        reserve: seconds that this command keeps for what follows its search.
    """
    ended = trials_of_search(trials)
    points = count_points(ended)
    trials_to_come = 2 - points
    if points >= 2:
        if wall.has_begun_trial:
            return None
        trials_to_come = 1
    reference = prepared.options.scaling.batch_size
    # A trial that may be stopped early is worth its time from so many steps on. Any other one takes
    # all of them.
    fewest_steps: float = prepared.last_step(reference)
    if stops and not is_for_loss(prepared):
        fewest_steps = MIN_STEPS
    shortest = cost.seconds(fewest_steps, reference)
    longest = max((trial.wall_seconds for trial in ended), default=0.0)

    def trial_seconds(limit: float) -> float:
        """Give the wall seconds that a trial may take in a command with this limit."""
        # Before a trial has ended it is not known what it takes besides its steps: the baseline's
        # whole share is planned for it.
        share = 0.0 if ended else MEANS_SHARE * limit
        return max(longest, shortest, share)

    # With two points this command goes on to their fresh seeds, if there is time for any.
    charged = wall.charged(reserve, runs_follow=points >= 2 and reserve > 0.0)
    following = NextCommand(
        charged=charged,
        start=wall.start_seconds - prepared.survey_seconds,
        survey=partial(survey_seconds, prepared.options),
        trials=trials_to_come,
        decision=wall.decision_seconds,
        trial=trial_seconds,
        kept=partial(_kept_after_first_trial, prepared, wall, stops, trials, cost),
        report=wall.report_seconds,
    )
    return following.least_limit(wall.limit)


def _kept_after_first_trial(
    prepared: PreparedStudy,
    wall: WallTime,
    stops: bool,
    trials: Sequence[TrialResult],
    cost: TrialCost,
    limit: float,
) -> float:
    """Predict the seconds that a command with this limit keeps once a first trial has ended.

    The other arguments are those of :func:`reserved_seconds`.
    """
    if trials_of_search(trials):
        return reserved_seconds(prepared, wall.within(limit), stops, trials, cost)
    if is_for_loss(prepared):
        return _reserved_at_budget(prepared, wall.within(limit), (), cost)
    # If the first trial reaches the target within its share, its fresh seeds take about as much
    # as would be kept to continue it.
    if stops:
        return RESCUE_SHARE * limit
    reference = prepared.options.scaling.batch_size
    whole_run = cost.seconds(prepared.last_step(reference), reference)
    return prepared.budget.replicates * whole_run + OTHERS_SHARE * limit


def limit_reached(
    prepared: PreparedStudy, wall: WallTime, stops: bool, trials: Sequence[TrialResult]
) -> SearchEnd | None:
    """Give the end of a search that has no seconds for another point; None if it has.

    Args:
        prepared: the study.
        wall: what is left of its wall time.
        stops: whether the search stops trials early, and goes on with promising ones later.
        trials: that have ended.
    """
    # A share is kept to continue a trial to its target; the objective loss has no target.
    keeps_share_to_continue = (
        stops and not is_for_loss(prepared) and _some_may_go_on(prepared, trials)
    )
    spent = prepared.budget.end_if_spent(trials, continues=keeps_share_to_continue)
    if spent is not None or not math.isfinite(wall.limit):
        return spent
    cost = trial_cost(prepared, trials)
    reserve = reserved_seconds(prepared, wall, stops, trials, cost)
    if not wall.is_spent(trials, cost, reserve):
        return None
    return _end_by_wall_time(prepared, wall, stops, trials, cost, reserve)


def within_time(
    prepared: PreparedStudy,
    wall: WallTime,
    stops: bool,
    trials: Sequence[TrialResult],
    spec: TrialSpec,
) -> TrialSpec | SearchEnd:
    """Limit a suggested trial so that time is left for what follows the search.

    Args:
        prepared: the study.
        wall: what is left of its wall time.
        stops: whether the search stops trials early, and goes on with promising ones later.
        trials: that have ended.
        spec: the trial as it was suggested.

    Returns:
        The trial with its last step, or the end of the search where it would be too short.
    """
    if is_for_loss(prepared):
        # Only bstune's own samplers say how far a trial is to run.
        spec = within_steps(spec, prepared.last_step(spec.batch_size))
    # Where trials are not stopped early, each runs to the end that its schedule or its budget has.
    if not stops:
        return spec
    # Not every workload can restore the state of a stopped trial. A sampler may ask for it all the
    # same: the trial then starts afresh.
    if not prepared.backend.continues:
        spec = replace(spec, resumed_from=None)
    cost = trial_cost(prepared, trials)
    reserve = reserved_seconds(prepared, wall, stops, trials, cost)
    max_steps = wall.max_steps(trials, spec, cost, reserve)
    if max_steps is None:
        return _end_by_wall_time(prepared, wall, stops, trials, cost, reserve)
    return within_steps(spec, max_steps)


def _end_by_wall_time(
    prepared: PreparedStudy,
    wall: WallTime,
    stops: bool,
    trials: Sequence[TrialResult],
    cost: TrialCost,
    reserve: float,
) -> SearchEnd:
    """Make the end of a search without time for another point, and advise a larger limit.

    ``reserve``: the seconds that are kept; for the other arguments see :func:`advised_limit`.
    """
    advised = advised_limit(prepared, wall, stops, trials, cost, reserve)
    return wall.search_end(trials, reserve, advised)


def limited_baseline(prepared: PreparedStudy, stops: bool) -> tuple[Baseline, int | None] | None:
    """Give the baseline that trial 0 runs, and the step at which it ends.

    It is None where the search itself chooses trial 0. The step is None where the trial's budget
    alone ends it.

    ``stops``: whether the search stops trials early, and goes on with promising ones later.
    """
    baseline = prepared.baseline
    if baseline is None:
        return None
    backend = prepared.backend
    last_step = prepared.last_step(baseline.batch_size)
    if is_for_loss(prepared):
        return baseline, last_step
    if not stops:
        # A sampler chooses the schedule's length for its own trials, not for the baseline: that
        # takes the whole budget.
        if backend.horizon and chooses_horizons(prepared.options):
            return baseline, last_step
        return baseline, None
    steps = steps_of_first_run(
        prepared.budget,
        last_step,
        seconds_per_step=backend.step_time(baseline.batch_size),
        wall_share=1.0 + backend.evaluation_share,
    )
    return baseline, steps


def planned_baseline_steps(prepared: PreparedStudy) -> int:
    """Give the steps that the baseline's first run takes where the wall time does not end it."""
    stops = prepared.backend.stops and stops_trials(prepared.options)
    planned = limited_baseline(prepared, stops)
    if planned is None or planned[1] is None:
        return prepared.last_step(prepared.options.scaling.whole_batch_size)
    return planned[1]


def advised_for_baseline(prepared: PreparedStudy, wall: WallTime) -> int | None:
    """Advise the wall seconds with which the baseline and another trial have time.

    None where the study has no such limit.
    """
    if not math.isfinite(wall.limit):
        return None
    stops = prepared.backend.stops and stops_trials(prepared.options)
    cost = trial_cost(prepared, ())
    return advised_limit(prepared, wall, stops, (), cost, reserve=0.0)
