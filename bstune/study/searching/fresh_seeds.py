"""Which run on a fresh seed is due after a search: of a winner, or of the baseline on its seeds."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bstune.core.objectives import SOUGHT
from bstune.core.records import TrialResult
from bstune.search.fixed_budget import BudgetPosterior, rank_full_trials
from bstune.study.at_budget import due_run, known_best
from bstune.study.planning.baseline import BaselineRuns, baseline_runs, due_seed
from bstune.study.planning.plan import MEANS_SHARE
from bstune.study.planning.replicates import Winner, winners
from bstune.study.planning.wall import WallTime
from bstune.study.prepare import PreparedStudy
from bstune.study.searching.means import full_run_seconds, trial_cost


@dataclass(frozen=True)
class DueReplicate:
    """A run on a fresh seed that is due, as :func:`bstune.study.storage.asking.ask_replicate` takes it.

    Args:
        winner: the point that runs again.
        replicate: how many runs it has had.
        horizon: to run with, where the study chooses horizons.
        seed_of: the winner's run on whose seed it runs, where the point is the baseline.
        last_step: to which it runs in any case.
    """

    winner: Winner
    replicate: int
    horizon: int | None = None
    seed_of: TrialResult | None = None
    last_step: int | None = None


def has_time_for(
    prepared: PreparedStudy,
    wall: WallTime,
    trials: Sequence[TrialResult],
    winner: Winner,
    replicate: int,
) -> bool:
    """Say whether a replicate may begin; of another winner than the first, all of its replicates."""
    is_another = replicate == 0 and any(trial.replicate_of is not None for trial in trials)
    count = prepared.budget.replicates if is_another else 1
    seconds = wall.replicate_seconds(
        max(winner.steps, winner.trial.steps),
        prepared.backend.step_time(winner.trial.batch_size),
        trial_cost(prepared, trials),
    )
    return wall.left > count * seconds


def due_of_baseline(
    prepared: PreparedStudy,
    wall: WallTime,
    trials: Sequence[TrialResult],
    predicted: Mapping[int, float],
) -> DueReplicate | None:
    """Give the baseline's run on the next of the winner's fresh seeds.

    Args:
        prepared: the study.
        wall: what is left of its wall time.
        trials: that have ended.
        predicted: steps that a fresh seed takes, by a trial's number.

    Returns:
        None if there is none, or no time for it.
    """
    budget = prepared.budget
    merit = SOUGHT[budget.objective].merits[0]
    by_merit = winners(trials, predicted, budget.objective, budget.replicates, budget.candidates)
    runs = baseline_runs(trials, prepared.baseline)
    seed_of = due_seed(runs, by_merit.get(merit), _baseline_seconds(prepared, runs))
    if seed_of is None or runs is None:
        return None
    first = runs.first
    seconds = wall.replicate_seconds(
        first.steps, prepared.backend.step_time(first.batch_size), trial_cost(prepared, trials)
    )
    if seconds > wall.left:
        return None
    # It may have run on an earlier winner's seeds, whose indices are taken.
    replicate = len(runs.again)
    return DueReplicate(Winner(first, float(first.steps)), replicate, seed_of=seed_of)


def _baseline_seconds(prepared: PreparedStudy, runs: BaselineRuns | None) -> float:
    """Give the seconds of training that are left for the baseline's runs on fresh seeds."""
    budget = prepared.budget
    limits = [limit for limit in (budget.seconds, budget.wall_seconds) if limit is not None]
    if runs is None or not limits:
        return math.inf
    spent = sum(run.wall_seconds for run in runs.again)
    return MEANS_SHARE * min(limits) - spent


def due_at_budget(
    prepared: PreparedStudy,
    wall: WallTime,
    trials: Sequence[TrialResult],
    posterior: BudgetPosterior,
) -> DueReplicate | None:
    """Give the next run of the point whose fresh seed is predicted to be best, or of the baseline.

    None if there is none, or no time for it.
    """
    expected = rank_full_trials(posterior)
    if not expected:
        return None
    budget = prepared.budget
    by_number = {trial.number: trial for trial in trials}
    ranked = [by_number[full_trial.run.number] for full_trial in expected]
    runs = baseline_runs(trials, prepared.baseline)
    due = due_run(trials, ranked[0], runs, budget.replicates, budget.candidates)
    if due is None:
        # The baseline runs on the seeds of the point that the answer names.
        best = known_best(trials, ranked, budget.replicates)
        due = due_run(trials, best, runs, budget.replicates, budget.candidates)
    if due is None:
        return None
    batch_size = due.trial.batch_size
    cost = trial_cost(prepared, trials)
    if wall.left <= full_run_seconds(prepared, wall, batch_size, cost):
        return None
    last_step = prepared.last_step(batch_size)
    winner = Winner(due.trial, float(last_step))
    return DueReplicate(winner, due.replicate, seed_of=due.seed_of, last_step=last_step)
