"""The objective loss: which trials ran to their budget's end, and which run on fresh seeds.

The search itself is :mod:`bstune.search.fixed_budget`. Once it has ended, the point whose fresh
seed is predicted to be best runs again on ``search.replicates`` fresh seeds, and then the baseline
on the same ones. Each run moves what is
predicted: where another point is best then, it runs again as well, up to ``search.candidates`` of
    them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bstune.core.records import Target, TrialResult
from bstune.options import StudyOptions
from bstune.study.planning.baseline import BaselineRuns, has_run_beside, next_run_beside
from bstune.study.planning.duration import Runs
from bstune.study.planning.plan import is_baseline_replicate
from bstune.study.planning.replicates import runs_on_fresh_seeds, same_point
from bstune.system.console import format_seconds, plural


@dataclass(frozen=True)
class FreshRun:
    """A run on a fresh seed that is due.

    Args:
        trial: the one that runs again.
        replicate: how many runs on fresh seeds it has had.
        seed_of: where the baseline runs again, the winner's run whose seed it takes; else None.
    """

    trial: TrialResult
    replicate: int
    seed_of: TrialResult | None = None


def is_full(trial: TrialResult, last_step: Callable[[float], int]) -> bool:
    """Whether a trial ran to its budget's end and has a metric.

    ``last_step`` gives the step at which the budget is spent, by batch size.
    """
    has_metric = any(value is not None for _, value in trial.history)
    return (
        trial.status in ("stopped", "reached")
        and trial.steps >= last_step(trial.batch_size)
        and has_metric
    )


def best_full(
    trials: Sequence[TrialResult], last_step: Callable[[float], int], target: Target
) -> TrialResult | None:
    """Find the best trial of the search among those that ran to their budget's end.

    The best has the best metric of all its evaluations. Runs on fresh seeds are left out. None
    before any trial got to its budget's end with a metric.

    ``last_step`` gives the step at which the budget is spent, by batch size.
    """
    best: TrialResult | None = None
    least = math.inf
    for trial in trials:
        value = trial.best_value(target.mode)
        if value is None or trial.replicate_of is not None or not is_full(trial, last_step):
            continue
        # With the sign a smaller one is better, whichever way the metric is to go.
        if best is None or target.sign * value < least:
            best = trial
            least = target.sign * value
    return best


def fresh_runs_of(trials: Sequence[TrialResult], number: int) -> tuple[TrialResult, ...]:
    """Select the runs on fresh seeds of the trial ``number``; failed ones are left out."""
    return tuple(run for run in runs_on_fresh_seeds(trials) if run.replicate_of == number)


def known_best(
    trials: Sequence[TrialResult], ranked: Sequence[TrialResult], replicates: int
) -> TrialResult:
    """Choose the point to use; what comes back is the search's own trial of it.

    It is the highest in rank that ran on all its fresh seeds: what was measured counts for more
    than a prediction. Where none did, it is the highest of all.

    Args:
        trials: all that ended.
        ranked: those that ran to their budgets' ends, the best prediction for a fresh seed first.
        replicates: runs on fresh seeds that a point is to have.
    """
    # Without fresh seeds there are predictions alone.
    if replicates:
        for trial in ranked:
            original = _original(trials, trial)
            if len(fresh_runs_of(trials, original.number)) >= replicates:
                return original
    return _original(trials, ranked[0])


def held_to_end(trial: TrialResult, last_step: int) -> TrialResult:
    """Extend the record of a trial that ended by itself, as by EarlyStopping, to its budget's end.

    Its last value is held until ``last_step``. The best value within the budget is what counts, so
    that a trial which went on would have come to that at least. Its seconds stay those it took.
    """
    values = [value for step, value in trial.history if step > 0 and value is not None]
    if not values or trial.steps >= last_step:
        return trial
    # The record is as if the trial had been evaluated once more at the budget's end, and had come
    # to the same value; fields_after() gives its steps and examples there.
    return replace(
        trial,
        **trial.fields_after(last_step),
        steps_low=last_step,
        history=(*trial.history, (last_step, values[-1])),
    )


def due_run(
    trials: Sequence[TrialResult],
    best: TrialResult,
    baseline: BaselineRuns | None,
    replicates: int,
    candidates: int,
) -> FreshRun | None:
    """Choose the run on a fresh seed that comes next; None where all have run.

    Args:
        trials: all that ended.
        best: the trial, or any run of its point, whose fresh seed is predicted to be best.
        baseline: the runs of the user's own configuration; None without them.
        replicates: runs on fresh seeds that a point is to have.
        candidates: points that may run again, the baseline not counted.
    """
    if not replicates:
        return None
    original = _original(trials, best)
    runs = fresh_runs_of(trials, original.number)
    # The points that have runs on fresh seeds, by the number of their first trial.
    begun = {run.replicate_of for run in runs_on_fresh_seeds(trials)}
    # The baseline runs on a winner's seeds, not as a candidate.
    if baseline is not None:
        begun.discard(baseline.first.number)
    may_begin = bool(runs) or len(begun) < candidates
    if len(runs) < replicates and may_begin:
        return FreshRun(original, len(runs))
    return _baseline_run_beside(original, runs, baseline)


def first_beside(
    trials: Sequence[TrialResult], best: TrialResult, baseline: BaselineRuns | None
) -> FreshRun | None:
    """Give the run of the baseline that is to be its first one on a seed of the best point's runs.

    Both then have run on one fresh seed, which makes a gain. It is None where the baseline has run
    on such a seed before, where the best point has run on none, and where the baseline cannot run
    again: without a first run, or after one that diverged or ran out of memory.
    """
    original = _original(trials, best)
    runs = fresh_runs_of(trials, original.number)
    if baseline is None or has_run_beside(baseline, runs):
        return None
    return _baseline_run_beside(original, runs, baseline)


def runs_to_come(
    trials: Sequence[TrialResult],
    winner: TrialResult | None,
    baseline: BaselineRuns | None,
    replicates: int,
    seconds: Callable[[int], float],
) -> tuple[Runs, ...]:
    """Count the runs on fresh seeds that are still to come, if the winner stays what it is now.

    Args:
        trials: all that ended.
        winner: the best trial that ran to its budget's end; None before one did.
        baseline: the runs of the user's own configuration; None without them.
        replicates: runs on fresh seeds that a point is to have.
        seconds: gives the wall seconds of a run at a batch size.

    Returns:
        The winner's runs, then the baseline's, if it is to run again.
    """
    if winner is None:
        return ()
    again = runs_on_fresh_seeds(trials)
    of_baseline = sum(is_baseline_replicate(trial.trial_index) for trial in again)
    is_winner_baseline = baseline is not None and same_point(baseline.first, winner)
    # Those of an earlier winner do not count: a study that has gone on may have another one.
    of_winner = len(fresh_runs_of(trials, _original(trials, winner).number))
    count = max(0, replicates - of_winner)
    to_come = [Runs(count, seconds(winner.batch_size))]
    # One that diverged or failed is not run again. "Stopped" is how a trial ends at its budget.
    if baseline is not None and not is_winner_baseline and baseline.first.status == "stopped":
        left = max(0, replicates - of_baseline)
        to_come.append(Runs(left, seconds(baseline.first.batch_size)))
    return tuple(to_come)


def _baseline_run_beside(
    winner: TrialResult, runs: Sequence[TrialResult], baseline: BaselineRuns | None
) -> FreshRun | None:
    """Give the baseline's run on the next of the winner's seeds.

    None where it has run on all of them, is the winner itself, or diverged or ran out of memory in
    its first run.

    ``runs``: the winner's on fresh seeds.
    """
    if baseline is None or same_point(baseline.first, winner):
        return None
    if baseline.first.status in ("diverged", "out of memory"):
        return None
    beside = next_run_beside(baseline, runs)
    if beside is None:
        return None
    return FreshRun(trial=baseline.first, replicate=len(baseline.again), seed_of=beside)


def _original(trials: Sequence[TrialResult], run: TrialResult) -> TrialResult:
    """Find the search's own trial that a run on a fresh seed repeats.

    For a trial of the search it is that trial itself.
    """
    by_number = {trial.number: trial for trial in trials}
    # A trial that ran again may itself repeat one: the first of them is the search's.
    original = run
    while original.replicate_of is not None and original.replicate_of in by_number:
        original = by_number[original.replicate_of]
    return original


def spending_text(options: StudyOptions) -> str:
    """Say in words what a trial of the objective loss may spend."""
    budget = options.budget
    if budget.seconds is not None:
        return f"{format_seconds(budget.seconds)} of training"
    if budget.counts_examples:
        return plural(budget.examples, "example")
    return plural(budget.steps, "step")


def question_of(options: StudyOptions) -> str:
    """Say in words what a study of the objective loss asks."""
    target = options.workload.target
    extreme = "least" if target.mode == "min" else "most"
    return f"{extreme} {target.metric} within {spending_text(options)}"
