"""How long the rest of a running study is predicted to take: points, fresh seeds and report."""

from collections.abc import Mapping, Sequence

from bstune.core.records import TrialResult
from bstune.study.at_budget import best_full, runs_to_come
from bstune.study.planning.baseline import baseline_runs, count_fresh_seeds
from bstune.study.planning.duration import Pace, Runs, pace_of, seconds_to_go
from bstune.study.planning.plan import SearchBudget, count_points, is_baseline_replicate
from bstune.study.planning.replicates import fresh_runs, next_replicate, runs_on_fresh_seeds
from bstune.study.planning.wall import REPORT_SECONDS, WallTime, leaders
from bstune.study.prepared import PreparedStudy
from bstune.study.searching.limits import full_run_seconds, is_for_loss, trial_cost


class PointEnds:
    """The times at which the points of a search ended in this command."""

    def __init__(self) -> None:
        # Points that had ended before this command; None: it has not looked yet.
        self._points_before: int | None = None
        # The seconds at which this command looked first, and at which each of its points ended.
        self._ends: list[float] = []

    def note(self, points: int, elapsed: float) -> None:
        """Note how many points have ended by now.

        Args:
            points: how many points of the study have ended.
            elapsed: seconds since this command began.
        """
        if self._points_before is None:
            self._points_before = points
            self._ends.append(elapsed)
        # The list begins with the time of the first look, which is no point's end.
        noted = self._points_before + len(self._ends) - 1
        # Points that ended since the last call are taken to end now.
        self._ends += [elapsed] * (points - noted)

    def pace(self) -> Pace | None:
        """Give the pace of the points that have ended here; None before two have."""
        if self._points_before is None:
            return None
        return pace_of(self._ends, self._points_before)


def study_seconds_to_go(
    prepared: PreparedStudy,
    wall: WallTime,
    trials: Sequence[TrialResult],
    pace: Pace,
    search_has_ended: bool,
    predicted: Mapping[int, float] | None = None,
) -> float:
    """Predict the wall seconds until the study's answer.

    Args:
        prepared: the study.
        wall: what is left of its wall time.
        trials: that have ended.
        pace: of its search.
        search_has_ended: whether only runs on fresh seeds follow.
        predicted: steps that a fresh seed is predicted to take, by a trial's number, as when such a
            run was chosen last; None before one was.
    """
    points = count_points(trials)
    points_left = 0.0
    if not search_has_ended:
        points_left = points_to_come(prepared.budget, trials)
    report = REPORT_SECONDS + wall.fine_decision_seconds
    runs = _fresh_runs_to_come(prepared, wall, trials, predicted)
    # The seconds left are those until the report.
    limit = wall.seconds_left + report
    return seconds_to_go(pace, points, points_left, runs, report, limit)


def points_to_come(budget: SearchBudget, trials: Sequence[TrialResult]) -> float:
    """Count the points that the trials and the seconds of training allow a search to try still.

    Each is taken to train as long as those so far did on average.
    """
    points = count_points(trials)
    left = float(max(0, budget.trials - points))
    trained = budget.trained_seconds(trials)
    if budget.seconds is None or points == 0 or trained <= 0:
        return left
    seconds_left = max(0.0, budget.seconds - trained)
    return min(left, seconds_left * points / trained)


def _fresh_runs_to_come(
    prepared: PreparedStudy,
    wall: WallTime,
    trials: Sequence[TrialResult],
    predicted: Mapping[int, float] | None,
) -> tuple[Runs, ...]:
    """Count the runs on fresh seeds that are still to come, if the winners stay the same.

    The arguments are those of :func:`study_seconds_to_go`.
    """
    if is_for_loss(prepared):
        return _fresh_runs_at_budget(prepared, wall, trials)
    budget = prepared.budget
    winners = leaders(trials, budget)
    if not winners:
        return ()
    cost = trial_cost(prepared, trials)

    def seconds(trial: TrialResult) -> float:
        return wall.replicate_seconds(trial.steps, trial.batch_size, cost)

    again = runs_on_fresh_seeds(trials)
    of_winners = [run for run in again if not is_baseline_replicate(run.trial_index)]
    of_baseline = len(again) - len(of_winners)
    left_of_winners = 0
    if predicted is not None:
        due = next_replicate(
            trials, predicted, budget.objective, budget.replicates, budget.candidates
        )
        if due is not None:
            next_winner, ran = due
            winners = [next_winner.trial]
            left_of_winners = budget.replicates - ran
    elif _has_tried_since(trials, of_winners):
        runs_of = fresh_runs(trials)
        for winner in winners:
            left_of_winners += max(0, budget.replicates - len(runs_of.get(winner.number, ())))
    elif budget.replicates:
        # Only the rest of the point that runs is certain: so many are missing to whole points.
        left_of_winners = -len(of_winners) % budget.replicates
    # The runs left count as runs of the winner that takes longest.
    longest = max(seconds(winner) for winner in winners)
    to_come = [Runs(left_of_winners, longest)]
    runs = baseline_runs(trials, prepared.baseline)
    if runs is not None and runs.first not in winners:
        last_step = prepared.last_step(runs.first.batch_size)
        planned = count_fresh_seeds(runs, last_step, budget.replicates)
        left_of_baseline = max(0, planned - of_baseline)
        to_come.append(Runs(left_of_baseline, seconds(runs.first)))
    return tuple(to_come)


def _has_tried_since(trials: Sequence[TrialResult], again: Sequence[TrialResult]) -> bool:
    """Whether points have been tried since the last run on a fresh seed, or none has run yet.

    A study that has gone on so begins its runs on fresh seeds anew.

    Args:
        trials: that have ended.
        again: those of them that ran on fresh seeds.
    """
    last_run = max((run.number for run in again), default=-1)
    return any(trial.number > last_run for trial in trials if trial.replicate_of is None)


def _fresh_runs_at_budget(
    prepared: PreparedStudy, wall: WallTime, trials: Sequence[TrialResult]
) -> tuple[Runs, ...]:
    """Count the runs on fresh seeds still to come of a study for the objective loss.

    They are those of the best trial at the budget's end so far, and those of the baseline.
    """
    cost = trial_cost(prepared, trials)

    def seconds(batch_size: int) -> float:
        return full_run_seconds(prepared, wall, batch_size, cost)

    return runs_to_come(
        trials,
        best_full(trials, prepared.last_step, prepared.protocol.target),
        baseline_runs(trials, prepared.baseline),
        prepared.budget.replicates,
        seconds,
    )
