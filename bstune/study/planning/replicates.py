"""Winners run again on fresh seeds before they are reported: the best of many noisy runs is a lucky one.

A trial is ranked by what a fresh seed is predicted to give of the merit (time or steps to target):
the posterior of all trials says how many steps, replicates included, which are trials like any
other (:func:`bstune.search.observations.fresh_steps`). The best point is run again on fresh seeds
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from bstune.core.objectives import SOUGHT, Objective
from bstune.core.records import Merit, TrialResult
from bstune.core.step_time_law import MEDIAN_ERROR
from bstune.result import INTERVAL_QUANTILE, Confirmed, Reaching, finite
from bstune.search.observations import FAILURE_FACTOR
from bstune.study.planning.plan import is_baseline_replicate

FreshRuns = Mapping[int, tuple[TrialResult, ...]]
"""Runs on fresh seeds, by the number of the trial that they repeat."""
Predicted = Mapping[int, float]
"""Steps that a fresh seed is predicted to take, by a trial's number."""
# Trials of the best single runs, which may win: their checkpoints are kept.
CANDIDATES = 8
# A point without fresh seeds is to be better by so much than one with them: what was measured is
# worth more than what is predicted.
WORTH_A_CHANGE = 0.1
# Octaves: closer than this in both batch size and learning rate, two trials are at one point.
SAME_POINT = 0.2


@dataclass(frozen=True)
class Winner:
    """The best point's trial, the steps predicted of a fresh seed, and its replicates in order of their numbers.

    A replicate that was stopped and continued stands here once.
    """

    trial: TrialResult
    steps: float
    runs: tuple[TrialResult, ...] = ()
    predicted_horizon: int | None = None
    """With which ``steps`` are predicted, where schedules end with the trial."""
    reaching: Reaching | None = None

    @property
    def horizon(self) -> int | None:
        """That of its runs on fresh seeds.

        Without any the predicted one, as the trial's own may have been lucky.
        """
        if self.runs:
            return self.runs[0].horizon
        return self.predicted_horizon or self.trial.horizon

    @property
    def advised_horizon(self) -> int | None:
        """The horizon to train with: the trial's own where it is longer and most runs on fresh seeds missed the target.

        Where one trial alone has reached the target, little is known of how short a schedule may
        be.
        """
        horizon_of_trial = self.trial.horizon
        horizon = self.horizon
        if horizon_of_trial is None or horizon is None or not _most_missed(self.runs):
            return horizon
        return max(horizon_of_trial, horizon)


def next_replicate(
    trials: Sequence[TrialResult],
    predicted: Predicted,
    objective: Objective,
    replicates: int,
    max_candidates: int,
) -> tuple[Winner, int] | None:
    """Give the point to run again, and which of its ``replicates`` is due, from 0.

    None when all is done.
    """
    for merit in SOUGHT[objective].merits:
        best = find_best(trials, predicted, merit, objective, replicates, max_candidates)
        if best is not None and len(best.runs) < replicates:
            return best, len(best.runs)
    return None


def left_out(
    trials: Sequence[TrialResult],
    predicted: Predicted,
    objective: Objective,
    replicates: int,
    max_candidates: int,
) -> Winner | None:
    """Give the point that would run again next but for ``max_candidates``.

    None if that ended no replicates.
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
    """Find the best point by a merit.

    No new one once ``max_candidates`` ran again since the search last went on.
    """
    runs = _replicates(trials)
    points = _points(candidates(trials, (merit,)), merit, predicted, runs)
    if merit in SOUGHT[objective].merits:
        begun = _begun_since_search(trials, points, runs)
        for_merit = sum(_sought(trial, trials, objective) == merit for trial in begun)
        if for_merit >= max_candidates:
            points = [trial for trial in points if trial.number in runs]

    def rank(trial: TrialResult) -> tuple[bool, float]:
        """Sort points whose fresh seeds mostly missed behind all others, then by their merit."""
        fresh = runs.get(trial.number, ())
        if len(fresh) < max(replicates, 1):
            expected = _predicted_merit(trial, merit, predicted)
            return False, math.log(min(expected, _seen_merit(trial, trials, merit)))
        return _most_missed(fresh), _confirmed_merit(trial, fresh, merit)

    best = min(points, key=rank, default=None)
    if best is None:
        return None
    return Winner(best, predicted.get(best.number, float(best.steps)), runs.get(best.number, ()))


def _begun_since_search(
    trials: Sequence[TrialResult], points: Sequence[TrialResult], runs: FreshRuns
) -> list[TrialResult]:
    """Give the points that the study chose to run again since its search last went on.

    The baseline runs on a winner's seeds whatever is predicted of it: nobody has chosen it.
    """
    of_search = [trial.number for trial in trials if trial.replicate_of is None]
    last = max(of_search, default=0)
    begun = list[TrialResult]()
    for trial in points:
        fresh = runs.get(trial.number)
        if fresh is None or fresh[-1].number <= last:
            continue
        if not is_baseline_replicate(fresh[0].trial_index):
            begun.append(trial)
    return begun


def _most_missed(runs: Sequence[TrialResult]) -> bool:
    """Say whether less than half of the runs reached the target; of none this is no."""
    return 2 * sum(run.reached for run in runs) < len(runs)


def winners(
    trials: Sequence[TrialResult],
    predicted: Predicted,
    objective: Objective,
    replicates: int,
    max_candidates: int,
) -> dict[Merit, Winner]:
    """Find the best point by each merit, if any trial has it."""
    merits: tuple[Merit, ...] = ("time", "steps")
    by_merit = dict[Merit, Winner]()
    for merit in merits:
        winner = find_best(trials, predicted, merit, objective, replicates, max_candidates)
        if winner is not None:
            by_merit[merit] = winner
    return by_merit


@dataclass(frozen=True)
class Kept:
    """A winner with all its fresh seeds, in place of one that got none.

    Args:
        winner: which ran on fresh seeds.
        passed_over: which did not, and is predicted to be a little better.
    """

    winner: Winner
    passed_over: Winner


def kept_instead(
    winner: Winner,
    trials: Sequence[TrialResult],
    predicted: Predicted,
    merit: Merit,
    objective: Objective,
    replicates: int,
) -> Kept | None:
    """Give the best point with all its fresh seeds where the winner has none, as time ran out.

    None elsewhere.

    It is kept as far as it takes ``WORTH_A_CHANGE`` more than what is predicted of the winner at
    most: what was measured is worth more than that.
    """
    if not replicates or winner.runs:
        return None
    # With no further candidate only points that have run again are left.
    known = find_best(trials, predicted, merit, objective, replicates, 0)
    if known is None or len(known.runs) < replicates:
        return None
    if _most_missed(known.runs):
        return None
    measured = _confirmed_merit(known.trial, known.runs, merit)
    expected = math.log(_predicted_merit(winner.trial, merit, predicted))
    if measured > expected + math.log1p(WORTH_A_CHANGE):
        return None
    return Kept(known, winner)


def confirmed_points(trials: Sequence[TrialResult], replicates: int) -> list[Winner]:
    """Give the points that have all their replicates."""
    by_number = {trial.number: trial for trial in trials}
    points = list[Winner]()
    for number, fresh in _replicates(trials).items():
        trial = by_number.get(number)
        is_of_baseline = is_baseline_replicate(fresh[0].trial_index)
        if trial is not None and len(fresh) >= max(replicates, 1) and not is_of_baseline:
            points.append(Winner(trial, float(trial.steps), fresh))
    return points


def candidates(
    trials: Sequence[TrialResult], merits: Sequence[Merit] = ("time", "steps")
) -> list[TrialResult]:
    """Give the trials that may win: the best single runs by each merit, and those that ran again."""
    runs = _replicates(trials)
    by_number: dict[int, TrialResult] = {}
    for merit in merits:
        for place, trial in enumerate(ranked(trials, merit)):
            if place < CANDIDATES or trial.number in runs:
                by_number[trial.number] = trial
    return list(by_number.values())


def confirmed(
    runs: Sequence[TrialResult], scatter: float = 0.0, time_error: float = 0.0
) -> Confirmed | None:
    """How many replicates reached the target, their median and its interval; None of none.

    A run that did not reach it takes longer than any that did: then the upper end is None, and
    maybe the median.

    Args:
        runs: the replicates.
        scatter: standard deviation of log steps from seed to seed, by all trials.
        time_error: of the log of a step's seconds.
    """
    if not runs:
        return None
    steps = _median_of_runs(runs, [float(run.steps) for run in runs], scatter, 0.0)
    seconds = [run.steps * (run.seconds_per_step or math.nan) for run in runs]
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
        untold=sum(run.reached and run.steps_low == 0 for run in runs),
    )


def time_order(trial: TrialResult) -> tuple[float, int, int]:
    """Sort trials by time to target: of equals fewer steps, then the lower number come first."""
    return _merit(trial, "time"), trial.steps, trial.number


def _steps_order(trial: TrialResult) -> tuple[int, float, int]:
    """Sort trials by steps to target: of equals less time, then the lower number come first."""
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
    """Sort the trials that can be candidates, best first: reached, and no replicates themselves."""
    reached = [trial for trial in trials if trial.reached and trial.replicate_of is None]
    if merit == "steps":
        return sorted(reached, key=_steps_order)
    timed = [trial for trial in reached if trial.time_to_target is not None]
    return sorted(timed, key=time_order)


def _points(
    trials: Sequence[TrialResult], merit: Merit, predicted: Predicted, runs: FreshRuns
) -> list[TrialResult]:
    """Choose the best trial of each point; beside one that has replicates there is no other."""
    ran_again = [trial for trial in trials if trial.number in runs]
    ran_again.sort(key=lambda trial: (-len(runs[trial.number]), trial.number))
    by_prediction = sorted(trials, key=lambda trial: _predicted_merit(trial, merit, predicted))
    points: list[TrialResult] = []
    # Those that ran again come first: each stands for its point, whatever is predicted beside it.
    for trial in (*ran_again, *by_prediction):
        if not any(same_point(trial, other) for other in points):
            points.append(trial)
    return points


def _sought(trial: TrialResult, trials: Sequence[TrialResult], objective: Objective) -> Merit:
    """Find the merit for which a trial was run again: that of the objective's by which its own run stands higher."""
    merits = [merit for merit in SOUGHT[objective].merits if math.isfinite(_merit(trial, merit))]
    return min(merits, key=lambda merit: ranked(trials, merit).index(trial))


def same_point(a: TrialResult, b: TrialResult) -> bool:
    """Say whether two trials are at one place, as far as a study tells places apart."""
    octaves_of_size = abs(math.log2(a.batch_size / b.batch_size))
    octaves_of_rate = abs(math.log2(a.lr / b.lr))
    octaves = max(octaves_of_size, octaves_of_rate)
    return octaves < SAME_POINT and a.hyperparameters == b.hyperparameters


def _replicates(trials: Sequence[TrialResult]) -> FreshRuns:
    """Collect the finished replicates of each candidate, by its number.

    Of one that was continued the last part.
    """
    runs = list[TrialResult]()
    for trial in trials:
        if trial.replicate_of is not None and trial.status != "failed":
            runs.append(trial)
    continued = {trial.resumed_from for trial in runs}
    replicates: dict[int, tuple[TrialResult, ...]] = {}
    for trial in sorted(runs, key=lambda trial: trial.number):
        if trial.number not in continued and trial.replicate_of is not None:
            replicates[trial.replicate_of] = (*replicates.get(trial.replicate_of, ()), trial)
    return replicates


def _predicted_merit(trial: TrialResult, merit: Merit, predicted: Predicted) -> float:
    steps = predicted.get(trial.number, float(trial.steps))
    return steps * _merit(trial, merit) / trial.steps


def _seen_merit(trial: TrialResult, trials: Sequence[TrialResult], merit: Merit) -> float:
    """Give the geometric mean of the merits at a trial's point, where two of the search's trials met the target there.

    What was seen twice runs on fresh seeds, whatever is predicted. Infinite below two; trials of
    one history are one recorded run.
    """
    merits = dict[object, float]()
    for other in trials:
        if other.reached and other.replicate_of is None and same_point(other, trial):
            merits[other.history] = _merit(other, merit)
    if len(merits) < 2:
        return math.inf
    return math.exp(sum(map(math.log, merits.values())) / len(merits))


def _confirmed_merit(candidate: TrialResult, runs: Sequence[TrialResult], merit: Merit) -> float:
    """Average the log merit over a candidate's replicates."""
    logs = [math.log(_replicate_merit(run, candidate, merit)) for run in runs]
    return sum(logs) / len(logs)


def _replicate_merit(run: TrialResult, candidate: TrialResult, merit: Merit) -> float:
    """Give a replicate's merit, or what it counts as where it did not reach the target."""
    first = _merit(candidate, merit)
    missed_its_horizon = run.horizon is not None and not run.reached
    # The steps of such a run bound nothing: after its horizon's end there is no going on.
    if run.status in ("diverged", "out of memory") or missed_its_horizon:
        return FAILURE_FACTOR * first
    seconds_per_step = run.seconds_per_step or candidate.seconds_per_step
    cost = float(run.steps)
    if merit == "time" and seconds_per_step is not None:
        cost = run.steps * seconds_per_step
    if run.reached:
        return cost
    # A stopped run is a bound, and no less than the candidate's merit: stopped early, it must not
    # look fast.
    return max(cost, first)


@dataclass(frozen=True)
class _MedianOfRuns:
    """A median over runs and its interval; None for what lies beyond all that was run."""

    middle: float | None
    low: float | None
    high: float | None


def _median_of_runs(
    runs: Sequence[TrialResult], values: Sequence[float], scatter: float, error: float
) -> _MedianOfRuns:
    """Give the median of runs, and the 90% interval of what it is over many seeds.

    A run's target was met after its last evaluation that missed it: the interval begins there. It
    is no narrower than the standard error of a median of so many runs, 1.2533 scatter/sqrt(n), and
    ``error`` of each value adds to it.
    """
    met_at = list[float]()
    missed_until = list[float]()
    for run, value in zip(runs, values, strict=True):
        # A run that missed the target comes after any that met it.
        if not run.reached:
            met_at.append(math.inf)
            continue
        met_at.append(value)
        per_step = value / run.steps if run.steps else 0.0
        missed_until.append((run.steps_low + 1.0) * per_step)
    if not missed_until:
        return _MedianOfRuns(middle=None, low=None, high=None)
    # Half widths of intervals of logs: of each value, and of a median of so many.
    half_of_value = INTERVAL_QUANTILE * error
    half_of_median = INTERVAL_QUANTILE * MEDIAN_ERROR * scatter / math.sqrt(len(runs))
    earliest = min(missed_until)
    middle = finite(median(met_at))
    if middle is None:
        low = earliest * math.exp(-half_of_value)
        return _MedianOfRuns(middle=None, low=low, high=None)
    below = max(math.log(middle / earliest), half_of_median)
    low = middle * math.exp(-math.hypot(below, half_of_value))
    latest = finite(max(met_at))
    if latest is None:
        return _MedianOfRuns(middle, low, None)
    above = max(math.log(latest / middle), half_of_median)
    high = middle * math.exp(math.hypot(above, half_of_value))
    return _MedianOfRuns(middle, low, high)
