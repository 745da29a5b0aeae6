"""Which run on a fresh seed is due after a search: of a winner, or of the baseline on its seeds.

Where the wall time runs out, what the answer names comes first: one run of the winner, then one of
the baseline on the same seed, without which the gain would stand on its single search trial.
Further runs take what is left. All points share their seeds: the baseline may be a finalist itself,
and may run before the winner does.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bstune.core.objectives import SOUGHT
from bstune.core.records import TrialResult
from bstune.search.fixed_budget import BudgetPosterior, rank_full_trials
from bstune.study.at_budget import FreshRun, due_run, first_beside, known_best
from bstune.study.planning.baseline import BaselineRuns, baseline_runs, due_seed, has_run_beside
from bstune.study.planning.plan import MEANS_SHARE, compares
from bstune.study.planning.replicates import (
    Winner,
    find_best,
    next_replicate,
    shared_seed,
    stand_in_for,
    winners,
)
from bstune.study.planning.wall import WallTime
from bstune.study.prepared import PreparedStudy
from bstune.study.searching.limits import full_run_seconds, trial_cost


@dataclass(frozen=True)
class DueReplicate:
    """A run on a fresh seed that is due, as ``storage.asking.ask_replicate`` takes it.

    Args:
        winner: the point that runs again; the baseline may be one.
        replicate: how many runs on fresh seeds it has had.
        horizon: to run with, where the study chooses horizons; else None.
        seed_of: another point's run whose seed it takes; None: a new seed.
        is_baseline: whether the point is the baseline.
        last_step: to which it runs in any case; None: :func:`ask_replicate` limits it.
    """

    winner: Winner
    replicate: int
    horizon: int | None = None
    seed_of: TrialResult | None = None
    is_baseline: bool = False
    last_step: int | None = None


def due_to_target(
    prepared: PreparedStudy,
    wall: WallTime,
    trials: Sequence[TrialResult],
    predicted: Mapping[int, float],
    horizons: Mapping[int, int],
) -> DueReplicate | None:
    """Choose the next run on a fresh seed of a study with a target.

    It is one of a winner, or else one of the baseline on a seed of the winner. None if none is
    due, there is no time for it, or nothing is there to compare it with.

    Args:
        prepared: the study.
        wall: what is left of its wall time.
        trials: that have ended.
        predicted: steps that a fresh seed is predicted to take, by a trial's number.
        horizons: the steps of the schedule to run with, by a trial's number, where the study
            chooses them.
    """
    budget = prepared.budget
    # Fresh seeds of a single configuration would be compared with nothing.
    if not compares(budget, trials):
        return None
    of_baseline = _due_baseline_to_target(prepared, wall, trials, predicted)
    # A machine that becomes slower takes what is kept for later: so this run is not kept for later.
    has_limit = budget.wall_seconds is not None
    if of_baseline is not None and has_limit and _lacks_run_beside(prepared, trials, predicted):
        return of_baseline
    due = next_replicate(trials, predicted, budget.objective, budget.replicates, budget.candidates)
    if due is None or not _has_time_for(prepared, wall, trials, predicted, *due):
        return of_baseline
    winner, replicate = due
    number = winner.trial.number
    runs = baseline_runs(trials, prepared.baseline)
    is_baseline = runs is not None and number == runs.first.number
    horizon = horizons.get(number)
    # The baseline may run as a winner and beside another one: all these runs are counted together,
    # and have the user's own schedule.
    if runs is not None and is_baseline:
        replicate = len(runs.again)
        horizon = None
    return DueReplicate(
        winner,
        replicate,
        horizon=horizon,
        seed_of=shared_seed(trials, number),
        is_baseline=is_baseline,
    )


def _lacks_run_beside(
    prepared: PreparedStudy, trials: Sequence[TrialResult], predicted: Mapping[int, float]
) -> bool:
    """Whether the winner has run on fresh seeds, and the baseline on none of these."""
    runs = baseline_runs(trials, prepared.baseline)
    winner = _named_winner(prepared, trials, predicted)
    if runs is None or winner is None or not winner.runs:
        return False
    return not has_run_beside(runs, winner.runs)


def _has_time_for(
    prepared: PreparedStudy,
    wall: WallTime,
    trials: Sequence[TrialResult],
    predicted: Mapping[int, float],
    winner: Winner,
    replicate: int,
) -> bool:
    """Whether there is wall time for a winner's next run on a fresh seed.

    ``replicate``: how many runs on fresh seeds the winner has had.
    """
    runs_to_fit = 1
    # Another point is the answer unless the winner gets all of its runs: a part of them would be of
    # no use.
    if _has_stand_in(prepared, trials, predicted, winner):
        runs_to_fit = prepared.budget.replicates - replicate
    seconds = wall.replicate_seconds(
        # A fresh seed may take as long as the point's own trial did, though less is predicted.
        max(winner.steps, winner.trial.steps),
        winner.trial.batch_size,
        trial_cost(prepared, trials),
    )
    return wall.seconds_left > runs_to_fit * seconds


def _has_stand_in(
    prepared: PreparedStudy,
    trials: Sequence[TrialResult],
    predicted: Mapping[int, float],
    winner: Winner,
) -> bool:
    """Whether the answer would now name another point in the winner's place.

    Such a point has run on all of its fresh seeds, and the winner has not.
    """
    budget = prepared.budget
    for merit in SOUGHT[budget.objective].merits:
        best = find_best(
            trials, predicted, merit, budget.objective, budget.replicates, budget.candidates
        )
        # Another point stands in for this winner only by the merit, time or steps, by which it won.
        if best is None or best.trial.number != winner.trial.number:
            continue
        stand_in = stand_in_for(winner, trials, predicted, merit, budget.replicates)
        if stand_in is not None and len(stand_in.winner.runs) >= budget.replicates:
            return True
    return False


def _wall_seconds_of_baseline(
    prepared: PreparedStudy, wall: WallTime, trials: Sequence[TrialResult], runs: BaselineRuns
) -> float:
    """Predict the wall seconds of a run of the baseline on a fresh seed."""
    first = runs.first
    cost = trial_cost(prepared, trials)
    return wall.replicate_seconds(first.steps, first.batch_size, cost)


def _named_winner(
    prepared: PreparedStudy, trials: Sequence[TrialResult], predicted: Mapping[int, float]
) -> Winner | None:
    """Find the winner that the answer would name now; None before a trial reached the target."""
    budget = prepared.budget
    merit = SOUGHT[budget.objective].merits[0]
    by_merit = winners(trials, predicted, budget.objective, budget.replicates, budget.candidates)
    winner = by_merit.get(merit)
    if winner is None:
        return None
    stand_in = stand_in_for(winner, trials, predicted, merit, budget.replicates)
    return winner if stand_in is None else stand_in.winner


def _due_baseline_to_target(
    prepared: PreparedStudy,
    wall: WallTime,
    trials: Sequence[TrialResult],
    predicted: Mapping[int, float],
) -> DueReplicate | None:
    """Choose the baseline's run on the next of the winner's fresh seeds.

    None if none is due, or there is no time for it.

    Args:
        prepared: the study.
        wall: what is left of its wall time.
        trials: that have ended.
        predicted: steps that a fresh seed is predicted to take, by a trial's number.
    """
    runs = baseline_runs(trials, prepared.baseline)
    if runs is None:
        return None
    seed_of = _due_seed(prepared, runs, _named_winner(prepared, trials, predicted))
    if seed_of is None:
        return None
    if _wall_seconds_of_baseline(prepared, wall, trials, runs) > wall.seconds_left:
        return None
    first = runs.first
    last_step: int | None = None
    # A first run that missed the target does not tell how many steps it takes: this run gets as
    # many as that one had.
    if not first.reached and prepared.backend.stops:
        last_step = first.steps
    # Any point that runs again is passed as a Winner.
    point = Winner(trial=first, steps=float(first.steps))
    return DueReplicate(
        point,
        # The baseline may have runs beside an earlier winner: the new one is numbered after them.
        replicate=len(runs.again),
        seed_of=seed_of,
        is_baseline=True,
        last_step=last_step,
    )


def _due_seed(
    prepared: PreparedStudy, runs: BaselineRuns, winner: Winner | None
) -> TrialResult | None:
    """Find the winner's run on whose fresh seed the baseline is to run next.

    None if no such run is due.
    """
    last_step = prepared.last_step(runs.first.batch_size)
    return due_seed(runs, winner, last_step, _baseline_seconds(prepared, runs))


def _baseline_seconds(prepared: PreparedStudy, runs: BaselineRuns) -> float:
    """Give the seconds that the baseline's runs on fresh seeds may still take.

    Together they may take ``MEANS_SHARE`` of ``search.seconds``; inf without that limit. The wall
    time that is left when they are due has nothing else to go to.
    """
    limit = prepared.budget.seconds
    if limit is None:
        return math.inf
    spent = sum(run.wall_seconds for run in runs.again)
    return MEANS_SHARE * limit - spent


def due_at_budget(
    prepared: PreparedStudy,
    wall: WallTime,
    trials: Sequence[TrialResult],
    posterior: BudgetPosterior,
) -> DueReplicate | None:
    """Choose the next run on a fresh seed of a study for the objective loss.

    It is one of the point whose fresh seed is predicted to be best, or of the baseline. None if
    none is due, there is no time for it, or nothing is there to compare it with.
    """
    expected = rank_full_trials(posterior)
    # Fresh seeds of a single configuration would be compared with nothing.
    if not expected or not compares(prepared.budget, trials):
        return None
    by_number = {trial.number: trial for trial in trials}
    ranked = [by_number[full_trial.run.number] for full_trial in expected]
    runs = baseline_runs(trials, prepared.baseline)
    due = _due_run_in_time(prepared, wall, trials, ranked, runs)
    if due is None:
        return None
    last_step = prepared.last_step(due.trial.batch_size)
    number = due.trial.number
    is_baseline = runs is not None and number == runs.first.number
    return DueReplicate(
        # Any point that runs again is passed as a Winner.
        Winner(trial=due.trial, steps=float(last_step)),
        due.replicate,
        seed_of=due.seed_of or shared_seed(trials, number),
        is_baseline=is_baseline,
        last_step=last_step,
    )


def _due_run_in_time(
    prepared: PreparedStudy,
    wall: WallTime,
    trials: Sequence[TrialResult],
    ranked: Sequence[TrialResult],
    runs: BaselineRuns | None,
) -> FreshRun | None:
    """Choose the run on a fresh seed that comes next; None if none is due, or no time is left.

    Args:
        prepared: the study.
        wall: what is left of its wall time.
        trials: that have ended.
        ranked: those that ran to their budgets' ends, the best prediction for a fresh seed first.
        runs: the baseline's; None without them.
    """
    budget = prepared.budget
    due = due_run(trials, ranked[0], runs, budget.replicates, budget.candidates)
    # Where the point predicted to be best has no run due, the baseline may lack one beside the
    # point that the answer names: that may be another one, which has all its fresh seeds.
    named = known_best(trials, ranked, budget.replicates)
    if due is None:
        due = due_run(trials, named, runs, budget.replicates, budget.candidates)
    if due is None:
        return None
    cost = trial_cost(prepared, trials)

    def seconds(run: FreshRun) -> float:
        return full_run_seconds(prepared, wall, run.trial.batch_size, cost)

    beside = first_beside(trials, named, runs)
    # Where time is left for one of them, the baseline's first run tells more.
    if beside is not None and wall.seconds_left <= seconds(due) + seconds(beside):
        due = beside
    return due if seconds(due) < wall.seconds_left else None
