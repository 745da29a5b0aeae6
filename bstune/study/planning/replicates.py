"""Winners run on fresh seeds before they are reported: the best of many noisy runs was lucky.

A trial is ranked by what a fresh seed is predicted to give of the merit (time or steps to target):
the posterior of all trials says how many steps, replicates included, which are trials like any
other (:func:`bstune.search.predictions.fresh_steps`). The best point is run again on fresh seeds
until it has all its replicates, and then ranks by these alone: by the geometric mean of their
merits. It ends when no other point is predicted to beat the best point that has them all, and none
was seen twice to. What reached the target in less than half of its fresh runs comes last. All of it
is a function of the trials: a study that is continued asks for what is still due.

No replicates are spread over the batch sizes for the scatter over seeds alone, as they change
nothing: on made laws (10 and 30% noise, 20 studies of 40 times the best trial's cost) two of them
on average, for 6% of the spending, left the coverage of B_crit's interval at 95%, its mean width at
2.44 (2.50 without) and the scatter at 0.131 (0.132); nine, for 55% of the spending, gave 95%, 2.39
and 0.131.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from bstune.core.objectives import SOUGHT, Objective
from bstune.core.records import REPLAY_DEVICE, Merit, TrialResult
from bstune.core.search_space import are_near
from bstune.core.step_timings import MEDIAN_ERROR
from bstune.result import INTERVAL_QUANTILE, Confirmed, Reaching, finite
from bstune.search.predictions import FAILURE_FACTOR
from bstune.study.planning.plan import is_baseline_replicate

FreshRuns = Mapping[int, tuple[TrialResult, ...]]
"""Runs on fresh seeds, by the number of the trial that they repeat."""
Predicted = Mapping[int, float]
"""Steps that a fresh seed is predicted to take, by a trial's number."""
# How many of the best single runs may win: their checkpoints are kept.
CANDIDATES = 8
# A point without fresh seeds takes the place of one with them only if it is predicted to be better
# by this share: what was measured is worth more than a prediction.
WORTH_A_CHANGE = 0.1
# The bootstrap that says how lucky a winner's runs are: its pairs of draws, and its seed, so that a
# study always says the same.
LUCK_DRAWS = 1000
LUCK_SEED = 0
# Runs on two seeds have the same metric if it is equal at so many common evaluations, and differs
# at none.
LEAST_EQUAL = 3


@dataclass(frozen=True)
class Winner:
    """The best point, or another one that runs again: its trial and its runs on fresh seeds."""

    trial: TrialResult
    """The point's trial in the search."""
    steps: float
    """Steps to the target that a fresh seed is predicted to take."""
    runs: tuple[TrialResult, ...] = ()
    """Its runs on fresh seeds in order of their numbers.

    Of a run that was continued only the last part is there.
    """
    predicted_horizon: int | None = None
    """The horizon for which ``steps`` are predicted.

    None where schedules do not end with the trial.
    """
    reaching: Reaching | None = None
    """How likely further seeds reach the target, where schedules end with the trial."""

    @property
    def horizon(self) -> int | None:
        """The step at which the learning-rate schedule of its runs on fresh seeds ends.

        Without such runs it is the predicted step, as the trial's own may have been lucky. None
        where schedules do not end with the trial.
        """
        if self.runs:
            return self.runs[0].horizon
        return self.predicted_horizon or self.trial.horizon

    @property
    def advised_horizon(self) -> int | None:
        """The steps of the schedule to train with; None where schedules do not end with the trial.

        They are those of its runs on fresh seeds. Where most of these missed the target, they are
        no fewer than the trial's own: little is known then of how short a schedule may be.
        """
        horizon_of_trial = self.trial.horizon
        horizon = self.horizon
        if horizon_of_trial is None or horizon is None or not _most_missed(self.runs):
            return horizon
        return max(horizon_of_trial, horizon)

    @property
    def run_to_train(self) -> TrialResult:
        """The run whose seed to train with, by :func:`run_to_train`."""
        return run_to_train(self.trial, self.runs, self.advised_horizon)


def run_to_train(
    trial: TrialResult, runs: Sequence[TrialResult], horizon: int | None
) -> TrialResult:
    """Choose the run of a point whose seed to train with: one that had the schedule to train with.

    It is the trial of the search, if its schedule was as long as ``horizon``, or if schedules do
    not end with their trials. Else it is the first run on a fresh seed that reached the target
    under such a schedule: under another length the trial's own seed has shown nothing. Without such
    a run it is the trial.

    Args:
        trial: the point's trial in the search.
        runs: those on fresh seeds.
        horizon: the steps of the schedule to train with; None where none ends with the trial.
    """
    if trial.horizon == horizon:
        return trial
    for run in sorted(runs, key=lambda run: run.number):
        if run.reached and run.horizon == horizon:
            return run
    return trial


def next_replicate(
    trials: Sequence[TrialResult],
    predicted: Predicted,
    objective: Objective,
    replicates: int,
    max_candidates: int,
) -> tuple[Winner, int] | None:
    """Give the point that runs again next, and how many runs on fresh seeds it has had.

    None when no point is to run again any more.

    Args:
        trials: all that ended.
        predicted: steps that a fresh seed is predicted to take, by a trial's number.
        objective: of the study; it says whether steps or seconds count.
        replicates: runs on fresh seeds that a point is to have.
        max_candidates: points that may run again.
    """
    for merit in SOUGHT[objective].merits:
        best = find_best(trials, predicted, merit, objective, replicates, max_candidates)
        if best is not None and len(best.runs) < replicates:
            return best, len(best.runs)
    return None


def next_beyond_limit(
    trials: Sequence[TrialResult],
    predicted: Predicted,
    objective: Objective,
    replicates: int,
    max_candidates: int,
) -> Winner | None:
    """Give the point that would run again next, were it not for ``max_candidates``.

    None where that limit keeps no point from its fresh seeds.

    Args:
        trials: all that ended.
        predicted: steps that a fresh seed is predicted to take, by a trial's number.
        objective: of the study; it says whether steps or seconds count.
        replicates: runs on fresh seeds that a point is to have.
        max_candidates: points that may run again.
    """
    if next_replicate(trials, predicted, objective, replicates, max_candidates) is not None:
        return None
    # With as many candidates as trials the option leaves none out.
    due = next_replicate(trials, predicted, objective, replicates, len(trials))
    if due is None:
        return None
    return due[0]


def find_best(
    trials: Sequence[TrialResult],
    predicted: Predicted,
    merit: Merit,
    objective: Objective,
    replicates: int,
    max_candidates: int,
) -> Winner | None:
    """Find the best point by a merit; None where no trial reached the target.

    A point with all its runs on fresh seeds is ranked by these, any other one by its prediction.
    One that missed the target in most of these runs comes last.

    Args:
        trials: all that ended.
        predicted: steps that a fresh seed is predicted to take, by a trial's number.
        merit: time or steps to the target.
        objective: of the study, whose merits limit what runs again.
        replicates: runs on fresh seeds that a point is to have.
        max_candidates: points that may run again for a merit of the objective. Once so many have
            begun to after the search's last trial, only points that ran again can be the best.
    """
    runs = fresh_runs(trials)
    points = _points(candidates(trials, (merit,)), merit, predicted, runs)
    if merit in SOUGHT[objective].merits:
        begun = 0
        for trial in _begun_since_search(trials, points, runs):
            begun += _merit_run_again_for(trial, trials, objective) == merit
        if begun >= max_candidates:
            points = [trial for trial in points if trial.number in runs]

    def rank(trial: TrialResult) -> tuple[bool, float]:
        """Sort by the log of the merit; points that mostly missed the target come last."""
        fresh = runs.get(trial.number, ())
        if len(fresh) < max(replicates, 1):
            expected = _predicted_merit(trial, merit, predicted)
            # Where two of the search's trials have reached the target at this point, and took less
            # than is predicted, their mean counts: the point is to run again.
            return False, math.log(min(expected, _seen_merit(trial, trials, merit)))
        return _most_missed(fresh), _mean_log_merit(trial, fresh, merit)

    best = min(points, key=rank, default=None)
    if best is None:
        return None
    steps = predicted.get(best.number, float(best.steps))
    return Winner(trial=best, steps=steps, runs=runs.get(best.number, ()))


def _begun_since_search(
    trials: Sequence[TrialResult], points: Sequence[TrialResult], runs: FreshRuns
) -> list[TrialResult]:
    """Select the points that the study chose to run again after the search's last trial.

    The baseline is not selected: it runs on a winner's seeds, whatever is predicted of it.
    """
    numbers_of_search = [trial.number for trial in trials if trial.replicate_of is None]
    last_of_search = max(numbers_of_search, default=0)
    begun = list[TrialResult]()
    for trial in points:
        fresh = runs.get(trial.number)
        if fresh is None or fresh[-1].number <= last_of_search:
            continue
        if not is_baseline_replicate(fresh[0].trial_index):
            begun.append(trial)
    return begun


def _most_missed(runs: Sequence[TrialResult]) -> bool:
    """Whether less than half of the runs reached the target; False without runs."""
    return 2 * sum(run.reached for run in runs) < len(runs)


def winners(
    trials: Sequence[TrialResult],
    predicted: Predicted,
    objective: Objective,
    replicates: int,
    max_candidates: int,
) -> dict[Merit, Winner]:
    """Find the best point by time to the target and by steps to it.

    Where no trial is ranked by one of these, as its seconds are not known, that one is left out.

    Args:
        trials: all that ended.
        predicted: steps that a fresh seed is predicted to take, by a trial's number.
        objective: of the study, whose merits, steps or seconds, limit what may run again.
        replicates: runs on fresh seeds that a point is to have.
        max_candidates: points that may run again.
    """
    merits: tuple[Merit, ...] = ("time", "steps")
    by_merit = dict[Merit, Winner]()
    for merit in merits:
        winner = find_best(trials, predicted, merit, objective, replicates, max_candidates)
        if winner is not None:
            by_merit[merit] = winner
    return by_merit


@dataclass(frozen=True)
class StandIn:
    """A winner with fresh seeds, in place of one that lacks some of its own.

    Args:
        winner: the point that ran on fresh seeds.
        passed_over: the point in whose place it stands, where that may be better all the same; None
            where its own runs on fresh seeds took no less.
    """

    winner: Winner
    passed_over: Winner | None


def stand_in_for(
    winner: Winner,
    trials: Sequence[TrialResult],
    predicted: Predicted,
    merit: Merit,
    replicates: int,
) -> StandIn | None:
    """Name a point that ran on fresh seeds in place of a winner that lacks some, as time ran out.

    A point with all of them stands in if what it took is at most ``WORTH_A_CHANGE`` more than what
    the winner is expected to: the prediction or, if that is more, what the winner's own runs took.
    One with fewer, but as many as the winner, stands in if it took less than the winner's runs. So
    the answer never names a point that was seen to be slower than another one that ran as often.

    None where there is no such point, or the winner has all its runs.

    Args:
        winner: the best point by ``merit``.
        trials: all that ended.
        predicted: steps that a fresh seed is predicted to take, by a trial's number.
        merit: whether time or steps to the target count.
        replicates: runs on fresh seeds that a point is to have.
    """
    if len(winner.runs) >= replicates:
        return None
    expected = math.log(_predicted_merit(winner.trial, merit, predicted))
    measured: float | None = None
    if winner.runs:
        measured = _mean_log_merit(winner.trial, winner.runs, merit)
        expected = max(expected, measured)
    # A winner that has not run again gives way only to a point with all its runs.
    least_runs = len(winner.runs) or replicates
    best: Winner | None = None
    # What the best of the points took, as a logarithm, like all that is compared here.
    least = math.inf
    for other in _points_with_runs(trials, merit, predicted, least_runs):
        if other.trial.number == winner.trial.number:
            continue
        took = _mean_log_merit(other.trial, other.runs, merit)
        has_all = len(other.runs) >= replicates
        is_as_good = has_all and took <= expected + math.log1p(WORTH_A_CHANGE)
        was_faster = measured is not None and took < measured
        if (is_as_good or was_faster) and took < least:
            best = other
            least = took
    if best is None:
        return None
    passed_over: Winner | None = None
    if not winner.runs or expected < least:
        passed_over = winner
    return StandIn(best, passed_over)


def _points_with_runs(
    trials: Sequence[TrialResult], merit: Merit, predicted: Predicted, least_runs: int
) -> list[Winner]:
    """Select the points with so many runs on fresh seeds that did not mostly miss the target."""
    runs = fresh_runs(trials)
    points = list[Winner]()
    for trial in candidates(trials, (merit,)):
        fresh = runs.get(trial.number, ())
        if fresh and len(fresh) >= least_runs and not _most_missed(fresh):
            steps = predicted.get(trial.number, float(trial.steps))
            points.append(Winner(trial=trial, steps=steps, runs=fresh))
    return points


def confirmed_points(trials: Sequence[TrialResult], replicates: int) -> list[Winner]:
    """Select the points that have all their runs on fresh seeds, but for the baseline."""
    by_number = {trial.number: trial for trial in trials}
    points = list[Winner]()
    for number, fresh in fresh_runs(trials).items():
        trial = by_number.get(number)
        is_of_baseline = is_baseline_replicate(fresh[0].trial_index)
        if trial is not None and len(fresh) >= replicates and not is_of_baseline:
            points.append(Winner(trial=trial, steps=float(trial.steps), runs=fresh))
    return points


def selection_luck(
    winner: Winner, confirmed_winners: Sequence[Winner], merit: Merit, scatter: float
) -> float:
    """Estimate how much too good the winner's runs look, as they made it the winner.

    The least of several noisy means lies below its own expectation. The bootstrap's estimate of
    bias says by how much (Efron and Tibshirani 1993, chapter 10). The means of all points that ran
    on fresh seeds are taken as the truth, and noise is drawn around them. The drawn least is
    compared with the truth of the point that has it.

    Args:
        winner: of the study.
        confirmed_winners: the points that ran on all their fresh seeds.
        merit: whether steps or seconds rank them.
        scatter: of log S from seed to seed, one standard deviation.

    Returns:
        The mean of this difference, in log steps or log seconds, at least 0. It is 0 where the
        winner ran on no fresh seed or no other point did.
    """
    others = list[Winner]()
    for point in confirmed_winners:
        is_winner = point.trial.number == winner.trial.number
        if not is_winner and point.runs and not _most_missed(point.runs):
            others.append(point)
    if not winner.runs or not others:
        return 0.0
    points = [winner, *others]
    means = np.array([_mean_log_merit(point.trial, point.runs, merit) for point in points])
    errors = np.array([scatter / math.sqrt(len(point.runs)) for point in points])
    drawn = np.random.default_rng(LUCK_SEED).standard_normal((LUCK_DRAWS, len(points)))
    # Each draw is taken with its negative, so that their noise has the mean 0: a winner far ahead
    # then has no luck at all.
    noise = errors * np.concatenate([drawn, -drawn])
    chosen = (means + noise).argmin(axis=1)
    luck = -float(noise[np.arange(len(noise)), chosen].mean())
    return max(luck, 0.0)


def candidates(
    trials: Sequence[TrialResult], merits: Sequence[Merit] = ("time", "steps")
) -> list[TrialResult]:
    """Select the trials that may win: the best by each merit, and those that ran again."""
    runs = fresh_runs(trials)
    by_number: dict[int, TrialResult] = {}
    for merit in merits:
        for place, trial in enumerate(ranked(trials, merit)):
            if place < CANDIDATES or trial.number in runs:
                by_number[trial.number] = trial
    return list(by_number.values())


def summary_of_runs(
    runs: Sequence[TrialResult], scatter: float = 0.0, time_error: float = 0.0
) -> Confirmed | None:
    """Summarize a point's runs on fresh seeds: how many reached the target, median and interval.

    It is None without runs. A run that missed the target counts as longer than any that reached it:
    then the upper end is None, and the median, too, where half of the runs missed it.

    Args:
        runs: the point's runs on fresh seeds.
        scatter: standard deviation of log steps from seed to seed, by all trials.
        time_error: standard deviation of the log of a step's seconds.
    """
    if not runs:
        return None
    # Steps are counted, so that they have no error.
    steps = _median_of_runs(runs, [float(run.steps) for run in runs], scatter, error=0.0)
    seconds = [run.steps * (run.seconds_per_step or math.nan) for run in runs]
    # Without the seconds of all runs nothing is known of time.
    times = _MedianOfRuns(middle=None, low=None, high=None)
    if not any(math.isnan(value) for value in seconds):
        times = _median_of_runs(runs, seconds, scatter, time_error)
    return Confirmed(
        seeds=tuple(run.seed for run in runs),
        reached=sum(run.reached for run in runs),
        runs=len(runs),
        time_median=times.middle,
        time_low=times.low,
        time_high=times.high,
        steps_median=steps.middle,
        steps_low=steps.low,
        steps_high=steps.high,
        # These met the target at their first evaluation, or at an unknown step before.
        untold=sum(run.reached and run.steps_low == 0 for run in runs),
        diverged=sum(run.status == "diverged" for run in runs),
    )


def _time_order(trial: TrialResult) -> tuple[float, int, int]:
    """Key that sorts trials by time to target, then by fewer steps, then by number."""
    return _merit(trial, "time"), trial.steps, trial.number


def _steps_order(trial: TrialResult) -> tuple[int, float, int]:
    """Key that sorts trials by steps to target, then by less time, then by number."""
    return trial.steps, _merit(trial, "time"), trial.number


def _merit(trial: TrialResult, merit: Merit) -> float:
    """Give a trial's steps or seconds to the target; infinite seconds where they are not known."""
    if merit == "steps":
        return float(trial.steps)
    seconds = trial.time_to_target
    if seconds is None:
        return math.inf
    return seconds


def ranked(trials: Sequence[TrialResult], merit: Merit) -> list[TrialResult]:
    """Sort the trials of the search that reached the target, fewest steps or seconds first.

    By time, trials whose seconds are not known are left out.
    """
    reached = [trial for trial in trials if trial.reached and trial.replicate_of is None]
    if merit == "steps":
        return sorted(reached, key=_steps_order)
    timed = [trial for trial in reached if trial.time_to_target is not None]
    return sorted(timed, key=_time_order)


def _points(
    trials: Sequence[TrialResult], merit: Merit, predicted: Predicted, runs: FreshRuns
) -> list[TrialResult]:
    """Choose one trial of each point, as several trials may be at the same one.

    It is a trial that ran again, if there is one, else the trial with the best prediction.

    Args:
        trials: of which some may be at one point.
        merit: whether time or steps are predicted.
        predicted: steps that a fresh seed is predicted to take, by a trial's number.
        runs: those on fresh seeds, by the number of the trial that they repeat.
    """
    ran_again = [trial for trial in trials if trial.number in runs]
    ran_again.sort(key=lambda trial: (-len(runs[trial.number]), trial.number))
    by_prediction = sorted(trials, key=lambda trial: _predicted_merit(trial, merit, predicted))
    points: list[TrialResult] = []
    # Those that ran again come first: each stands for its point, whatever is predicted beside it.
    for trial in (*ran_again, *by_prediction):
        if not any(same_point(trial, other) for other in points):
            points.append(trial)
    return points


def _merit_run_again_for(
    trial: TrialResult, trials: Sequence[TrialResult], objective: Objective
) -> Merit:
    """Tell whether a trial was run again for its steps or for its seconds to the target.

    It is the merit by which the trial ranks higher among the study's trials.
    """
    merits = [merit for merit in SOUGHT[objective].merits if math.isfinite(_merit(trial, merit))]
    return min(merits, key=lambda merit: ranked(trials, merit).index(trial))


def same_point(a: TrialResult, b: TrialResult) -> bool:
    """Whether two trials count as the same configuration.

    They do where batch size and learning rate are near each other, and further hyper-parameters do
    not differ.
    """
    is_near = are_near(a.batch_size, a.lr, b.batch_size, b.lr)
    return is_near and a.hyperparameters == b.hyperparameters


def runs_on_fresh_seeds(trials: Iterable[TrialResult]) -> list[TrialResult]:
    """Select the runs on fresh seeds. Those that failed are left out, as they are asked again."""
    return [run for run in trials if run.replicate_of is not None and run.status != "failed"]


def fresh_runs(trials: Sequence[TrialResult]) -> FreshRuns:
    """Collect the runs on fresh seeds that did not fail, by the number of the trial they repeat.

    A run that was continued counts once: its last part has the steps of the earlier ones.
    """
    runs = runs_on_fresh_seeds(trials)
    continued = {trial.resumed_from for trial in runs}
    replicates: dict[int, tuple[TrialResult, ...]] = {}
    for trial in sorted(runs, key=lambda trial: trial.number):
        if trial.number not in continued and trial.replicate_of is not None:
            replicates[trial.replicate_of] = (*replicates.get(trial.replicate_of, ()), trial)
    return replicates


def seed_changes_nothing(trials: Sequence[TrialResult]) -> bool:
    """Whether runs of a point on different seeds have the same metric, to the last bit.

    The code that trains then has a seed of its own. It is False where the runs of some point
    differ, and where too few evaluations have a step in common. Recorded runs say nothing of it:
    one of them may stand for several seeds.

    ``trials``: all that ended.
    """
    by_number = {trial.number: trial for trial in trials}
    has_same = False
    for number, runs in fresh_runs(trials).items():
        first, *others = runs
        # The point's own trial may have another schedule: only a single run is compared with it.
        if not others and number in by_number:
            others = [by_number[number]]
        for other in others:
            if first.seed == other.seed or first.device == REPLAY_DEVICE:
                continue
            values = _common_values(first, other)
            if any(value != other_value for value, other_value in values):
                return False
            # A metric that does not change, as one of few levels, may be equal by chance.
            has_changed = len(set(values)) > 1
            has_same = has_same or (len(values) >= LEAST_EQUAL and has_changed)
    return has_same


def _common_values(run: TrialResult, other: TrialResult) -> list[tuple[float | None, float | None]]:
    """Pair the metrics of two runs at the steps at which both were evaluated."""
    of_run = dict(run.history)
    pairs = list[tuple[float | None, float | None]]()
    for step, value in other.history:
        if step in of_run:
            pairs.append((of_run[step], value))
    return pairs


def shared_seed(trials: Sequence[TrialResult], number: int) -> TrialResult | None:
    """Find the first run of another point whose fresh seed a point has not had, to take that seed.

    So all points that run again share their seeds, and whichever wins is paired with the baseline.
    None where the point has had them all: its next seed is a new one.

    Args:
        trials: all that ended.
        number: of the point's trial in the search.
    """
    by_point = fresh_runs(trials)
    taken = {run.seed for run in by_point.get(number, ())}
    runs = [run for fresh in by_point.values() for run in fresh if run.seed not in taken]
    return min(runs, key=lambda run: run.number, default=None)


def _predicted_merit(trial: TrialResult, merit: Merit, predicted: Predicted) -> float:
    """Give the steps or seconds that a fresh seed of a trial is predicted to take to the target."""
    steps = predicted.get(trial.number, float(trial.steps))
    # A step counts 1 by steps, and the trial's seconds of a step by time.
    return steps * _merit(trial, merit) / trial.steps


def _seen_merit(trial: TrialResult, trials: Sequence[TrialResult], merit: Merit) -> float:
    """Give the mean steps or seconds (``merit``) of the search's own trials at a trial's point.

    The mean is geometric. It is infinite where fewer than two reached the target there. A point
    that two trials have shown to be good runs on fresh seeds, whatever is predicted of it. Trials
    with one history are one recorded run.
    """
    merits = dict[object, float]()
    for other in trials:
        if other.reached and other.replicate_of is None and same_point(other, trial):
            merits[other.history] = _merit(other, merit)
    if len(merits) < 2:
        return math.inf
    return math.exp(sum(map(math.log, merits.values())) / len(merits))


def _mean_log_merit(candidate: TrialResult, runs: Sequence[TrialResult], merit: Merit) -> float:
    """Average the log of the steps or seconds (``merit``) of a candidate's runs on fresh seeds."""
    logs = [math.log(_replicate_merit(run, candidate, merit)) for run in runs]
    return sum(logs) / len(logs)


def _replicate_merit(run: TrialResult, candidate: TrialResult, merit: Merit) -> float:
    """Give the steps or seconds that a run on a fresh seed counts for.

    They are those to the target, if it reached that. A stopped run counts for what it took, and for
    no less than the candidate's own run took. A run that diverged or ran out of memory, or missed
    the target at the end of its schedule, counts for ``FAILURE_FACTOR`` times what the candidate's
    own run took.
    """
    of_candidate = _merit(candidate, merit)
    missed_its_horizon = run.horizon is not None and not run.reached
    # A run that cannot go on says nothing of how long one that reaches the target takes.
    if run.status in ("diverged", "out of memory") or missed_its_horizon:
        return FAILURE_FACTOR * of_candidate
    seconds_per_step = run.seconds_per_step or candidate.seconds_per_step
    cost = float(run.steps)
    if merit == "time" and seconds_per_step is not None:
        cost = run.steps * seconds_per_step
    if run.reached:
        return cost
    # A run that was stopped early must not look fast.
    return max(cost, of_candidate)


@dataclass(frozen=True)
class _MedianOfRuns:
    """A median over runs and its interval.

    A part is None where runs that missed the target decide it.
    """

    middle: float | None
    low: float | None
    high: float | None


def _median_of_runs(
    runs: Sequence[TrialResult], values: Sequence[float], scatter: float, error: float
) -> _MedianOfRuns:
    """Give the median of runs, with a 90% interval for the median over many seeds.

    The interval begins at the earliest step at which a run may have met the target, right after an
    evaluation that missed it. It is no narrower than the standard error of a median of n runs,
    1.2533 scatter/sqrt(n), allows.

    Args:
        runs: at least one.
        values: what each run took, in steps or seconds.
        scatter: standard deviation of log steps from seed to seed.
        error: standard deviation of the log of each value, which widens the interval.
    """
    met_at = list[float]()
    # What each run had taken right after its last evaluation that missed the target.
    after_last_miss = list[float]()
    for run, value in zip(runs, values, strict=True):
        # A run that missed the target comes after any that met it.
        if not run.reached:
            met_at.append(math.inf)
            continue
        met_at.append(value)
        per_step = value / run.steps if run.steps else 0.0
        after_last_miss.append((run.steps_low + 1.0) * per_step)
    if not after_last_miss:
        return _MedianOfRuns(middle=None, low=None, high=None)
    # Half the widths of the logs' intervals: that of each value, and that of the median.
    half_of_value = INTERVAL_QUANTILE * error
    half_of_median = INTERVAL_QUANTILE * MEDIAN_ERROR * scatter / math.sqrt(len(runs))
    earliest = min(after_last_miss)
    middle = finite(median(met_at))
    if middle is None:
        low = earliest * math.exp(-half_of_value)
        return _MedianOfRuns(middle=None, low=low, high=None)
    below = max(math.log(middle / earliest), half_of_median)
    low = middle * math.exp(-math.hypot(below, half_of_value))
    latest = finite(max(met_at))
    if latest is None:
        return _MedianOfRuns(middle=middle, low=low, high=None)
    above = max(math.log(latest / middle), half_of_median)
    high = middle * math.exp(math.hypot(above, half_of_value))
    return _MedianOfRuns(middle=middle, low=low, high=high)
