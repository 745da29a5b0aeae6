"""The baseline: the configuration that the user runs today, which is a study's trial 0, and the gain over it.

The gain is the ratio of what the baseline takes to the target to what the winner takes, in the merit of the study's
objective. Both run on the same fresh seeds where the study's means allow it. With d_i the difference of the log merits
at seed i, the gain is exp(mean of d) and its interval

    exp(mean of d -+ t s / sqrt(n)),  s^2 = ((n - 1) s_d^2 + n_0 2 s_0^2) / (n - 1 + n_0),

with s_d the standard deviation of the d_i, s_0 the scatter of log S from seed to seed that the posterior of all trials
has, which counts for ``n_0`` degrees of freedom, and t Student's quantile at n - 1 + n_0 of them. Three seeds alone
would give an interval of chance's width.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance

from scipy.special import stdtrit

from bstune.core.records import Merit, Target, TrialResult, TrialSpec
from bstune.core.search_space import Space, Tunable
from bstune.options import StudyOptions, option_at
from bstune.result import INTERVAL_LEVEL, BaselineResult, Gain, finite
from bstune.study.planning.plan import MEANS_SHARE, SearchBudget, is_baseline_replicate
from bstune.study.planning.replicates import Winner, same_point
from bstune.trial.backend import chooses_batch_sizes

# Degrees of freedom that the posterior's scatter from seed to seed counts for.
POSTERIOR_DEGREES = 8
# Of the steps of a run that met the target at its first evaluation: those that are taken to have
# missed it.
MISSED_SHARE = 0.5


@dataclass(frozen=True)
class Baseline:
    """The reference pair, and the values that the config itself has of what else is searched."""

    batch_size: int
    lr: float
    hyperparameters: Mapping[str, int | float]


@dataclass(frozen=True)
class BaselineRuns:
    """The baseline's first run, as far as it was continued, and its runs on the winner's fresh seeds."""

    first: TrialResult
    again: tuple[TrialResult, ...] = ()


def baseline_of(
    options: StudyOptions, space: Space, largest: int | None
) -> tuple[Baseline | None, str | None]:
    """Give the baseline of a study, and why there is none as a line of the plan.

    ``largest``: the batch size that the data or the memory allow; None: not known.
    """
    if not options.search.baseline or chooses_batch_sizes(options):
        return None, None
    batch_size = int(options.scaling.batch_size)
    if largest is not None and batch_size > largest:
        return None, (
            f"your own batch size, {batch_size}, does not fit: {largest} is the largest one that "
            "does, so there is no comparison to it"
        )
    values = {tunable.name: _own_value(options, tunable) for tunable in space.tunables}
    return Baseline(batch_size, options.scaling.lr, values), None


def _own_value(options: StudyOptions, tunable: Tunable) -> int | float:
    """Give the value without a search; the range's middle where there is none."""
    stated = option_at(options, tunable.key)
    if isinstance(stated, int | float) and not isinstance(stated, bool):
        return tunable.value(stated)
    return tunable.middle


def is_baseline(trial: TrialResult, baseline: Baseline | None) -> bool:
    """Say whether a trial is the baseline's first run: of a study that began without one, trial 0 is another."""
    return (
        baseline is not None
        and trial.trial_index == 0
        and trial.resumed_from is None
        and trial.batch_size == baseline.batch_size
        and math.isclose(trial.lr, baseline.lr, rel_tol=1e-9)
    )


def baseline_runs(trials: Sequence[TrialResult], baseline: Baseline | None) -> BaselineRuns | None:
    """Find the baseline's runs among a study's trials; None where it has none that ended by itself."""
    usable = [trial for trial in trials if trial.status != "failed"]
    first = next((trial for trial in usable if is_baseline(trial, baseline)), None)
    if first is None:
        return None
    # The first run may have been stopped and continued: its last part has all of it.
    by_parent = {trial.resumed_from: trial for trial in usable}
    chain = {first.number}
    while first.number in by_parent:
        first = by_parent[first.number]
        chain.add(first.number)
    again = list[TrialResult]()
    for trial in usable:
        # Where the baseline is a winner, too, it has further runs as that.
        if trial.replicate_of in chain and is_baseline_replicate(trial.trial_index):
            again.append(trial)
    return BaselineRuns(first, tuple(sorted(again, key=lambda trial: trial.number)))


def first_steps(
    baseline: Baseline,
    budget: SearchBudget,
    last_step: int,
    seconds_per_step: float,
    wall_share: float,
) -> int:
    """Give the steps of the baseline's first run: to its budget, or to an eighth of the study's seconds.

    Args:
        baseline: that runs.
        budget: of the study.
        last_step: of a trial of its budget.
        seconds_per_step: of training.
        wall_share: the wall time of a step over its training time, as far as that is known before
            the first trial.
    """
    limits = [math.inf]
    if budget.seconds is not None:
        limits.append(budget.seconds)
    if budget.wall_seconds is not None:
        limits.append(budget.wall_seconds / wall_share)
    affordable = MEANS_SHARE * min(limits) / seconds_per_step
    return max(1, math.floor(min(last_step, affordable)))


def may_run_again(first: TrialResult, last_step: int) -> bool:
    """Say whether the baseline's first run is worth fresh seeds.

    It is where it met the target, and where it missed it in all of its budget: that may have been
    an unlucky seed. One that the study's means cut short would be cut short again.
    """
    return first.reached or (first.status == "stopped" and first.steps >= last_step)


def fresh_seeds_of(runs: BaselineRuns, last_step: int, replicates: int) -> int:
    """Count the fresh seeds that the baseline is to have in all, by the rule of :func:`due_seed`."""
    if not may_run_again(runs.first, last_step):
        return 0
    if runs.first.reached:
        return replicates
    if all(run.reached for run in runs.again):
        # What the next one comes to is not known.
        return min(len(runs.again) + 1, replicates)
    return len(runs.again)


def due_seed(
    runs: BaselineRuns | None, winner: Winner | None, last_step: int, seconds_left: float
) -> TrialResult | None:
    """Find the winner's run on whose fresh seed the baseline is due; None if there is none.

    A first run that missed the target is repeated until a second one misses it.

    Args:
        runs: the baseline's, if any.
        winner: of the study, if any.
        last_step: of a run of the baseline's budget.
        seconds_left: of training, that are left for it.
    """
    if runs is None or winner is None or not may_run_again(runs.first, last_step):
        return None
    # At one point both would be the same run.
    if same_point(runs.first, winner.trial):
        return None
    # Each costs as much as the first: two that missed the target bound the gain well enough.
    if not runs.first.reached and not all(run.reached for run in runs.again):
        return None
    seconds = training_seconds(runs.first)
    if seconds is not None and seconds > seconds_left:
        return None
    taken = {run.seed for run in runs.again}
    for run in winner.runs:
        if run.reached and run.seed not in taken:
            return run
    return None


def training_seconds(run: TrialResult) -> float | None:
    """Give the seconds of training to where a run ended, at its target or before; None: not known."""
    if run.seconds_per_step is None:
        return None
    return run.steps * run.seconds_per_step


def runs_beside(runs: BaselineRuns | None, winner: Winner | None) -> int:
    """Count the winner's fresh seeds on which the baseline ran, too."""
    if runs is None or winner is None:
        return 0
    return len({run.seed for run in runs.again} & {run.seed for run in winner.runs})


def gain_of(
    runs: BaselineRuns | None, winner: Winner | None, merit: Merit, scatter: float
) -> Gain | None:
    """How many times as fast the winner is as the baseline, with its interval.

    ``at_least``: all of the baseline's runs were stopped before the target, so that the gain is no
    less than the ratio. Without a common seed that reached the target each stands on the fresh
    seeds it has; without any the baseline stands on its single search trial, the winner on what is
    predicted of a fresh seed. None where the two cannot be compared: one of them has no run that
    tells, or they are the same point.
    """
    if runs is None or winner is None or same_point(runs.first, winner.trial):
        return None
    reached = [run for run in winner.runs if run.reached]
    # A winner that mostly misses the target has no time to compare.
    if 2 * len(reached) < len(winner.runs):
        return None
    differences = _paired_differences(runs, reached, merit)
    if differences:
        count = len(differences)
        return _interval(differences, scatter, merit, _GainRuns(count, count, count))
    again = [run for run in runs.again if run.reached]
    of_baseline = _mean_log_merit(again or [runs.first], merit)
    of_winner = _expected_log_merit(winner, reached, merit)
    if of_baseline is None or of_winner is None:
        return None
    if runs.first.reached or again:
        stands_on = _GainRuns(0, len(again), len(reached))
        return _interval([of_baseline - of_winner], scatter, merit, stands_on)
    # The steps of such a run bound nothing.
    if runs.first.status in ("diverged", "out of memory"):
        return None
    # What has missed the target after so much takes longer than that.
    ratio = math.exp(of_baseline - of_winner)
    if ratio <= 1.0:
        return None
    return Gain(
        ratio=ratio,
        low=None,
        high=None,
        level=INTERVAL_LEVEL,
        merit=merit,
        seeds=0,
        baseline_seeds=0,
        winner_seeds=len(reached),
        at_least=True,
    )


def telling_target(first: TrialResult, target: Target, ideal: float | None) -> float | None:
    """Return a target that would tell, where the baseline met the study's at its first look; None elsewhere.

    What is met at the first evaluation was met at some step before, and every batch size that
    meets it there looks alike. A schedule that ends with the trial is often looked at once, at its
    end. The value returned lies half as far from the ideal one as what that evaluation saw; where
    there is no ideal value, as far beyond what it saw as this lies beyond the target.
    """
    values = [value for step, value in first.history if step > 0 and value is not None]
    if not first.reached or first.horizon is not None or len(values) != 1:
        return None
    value = values[0]
    if ideal is None:
        return value + (value - target.value)
    return (value + ideal) / 2.0


def baseline_result(
    runs: BaselineRuns | None, target: Target, ideal: float | None
) -> BaselineResult | None:
    """Tell what the baseline came to; ``ideal``: the best value of the metric, if any."""
    if runs is None:
        return None
    first = runs.first
    last: float | None = None
    for _, value in first.history:
        if value is not None:
            last = value
    return BaselineResult(
        number=first.number,
        batch_size=first.batch_size,
        lr=first.lr,
        hyperparameters=dict(first.hyperparameters),
        status=first.status,
        steps=first.steps,
        seconds=training_seconds(first),
        value=finite(last),
        telling_target=finite(telling_target(first, target, ideal)),
        runs=len(runs.again),
        reached=sum(run.reached for run in runs.again),
    )


def _paired_differences(
    runs: BaselineRuns, reached: Sequence[TrialResult], merit: Merit
) -> list[float]:
    """Give the log merit of the baseline less the winner's at each seed on which both reached the target.

    ``reached``: the winner's runs that did.
    """
    by_seed = {run.seed: run for run in runs.again if run.reached}
    differences = list[float]()
    for run in reached:
        if run.seed not in by_seed:
            continue
        of_baseline = _log_merit(by_seed[run.seed], merit)
        of_winner = _log_merit(run, merit)
        if of_baseline is not None and of_winner is not None:
            differences.append(of_baseline - of_winner)
    return differences


def _log_merit(run: TrialResult, merit: Merit) -> float | None:
    """Take the log of a run's steps or seconds, in the middle of where it met the target, or to where it ended."""
    log_steps = math.log(max(run.steps, 1))
    # It was met somewhere between the last evaluation that missed it and the first that met it.
    if run.reached:
        missed = max(run.steps_low, MISSED_SHARE * run.steps)
        log_steps -= 0.5 * math.log(run.steps / missed)
    if merit == "steps":
        return log_steps
    if run.seconds_per_step is None:
        return None
    return log_steps + math.log(run.seconds_per_step)


def _mean_log_merit(runs: Sequence[TrialResult], merit: Merit) -> float | None:
    """Take the mean over the runs that have the merit; None where none has."""
    logs = [_log_merit(run, merit) for run in runs]
    known = [log for log in logs if log is not None]
    if not known:
        return None
    return fmean(known)


def _expected_log_merit(
    winner: Winner, reached: Sequence[TrialResult], merit: Merit
) -> float | None:
    """Take the mean over the winner's fresh seeds that reached the target; without any what is predicted of one."""
    known = _mean_log_merit(reached, merit)
    if known is not None:
        return known
    if merit == "steps":
        return math.log(winner.steps)
    seconds = winner.trial.seconds_per_step
    if seconds is None:
        return None
    return math.log(winner.steps * seconds)


@dataclass(frozen=True)
class _GainRuns:
    """On how many fresh seeds a gain stands: of both, of the baseline, of the winner."""

    of_both: int
    of_baseline: int
    of_winner: int


def _interval(
    differences: Sequence[float], scatter: float, merit: Merit, stands_on: _GainRuns
) -> Gain:
    """Give the gain of these differences of log merits, as the module's docstring has it.

    ``scatter``: of log S from seed to seed.
    """
    count = len(differences)
    squares = 0.0
    if count > 1:
        squares = variance(differences) * (count - 1)
    degrees = count - 1 + POSTERIOR_DEGREES
    pooled = (squares + POSTERIOR_DEGREES * 2.0 * scatter**2) / degrees
    # Student's quantile: scipy.stats, whose own it is, takes half a second to import.
    quantile = float(stdtrit(degrees, 0.5 + 0.5 * INTERVAL_LEVEL))
    half = quantile * math.sqrt(pooled / count)
    middle = fmean(differences)
    return Gain(
        ratio=math.exp(middle),
        low=math.exp(middle - half),
        high=math.exp(middle + half),
        level=INTERVAL_LEVEL,
        merit=merit,
        seeds=stands_on.of_both,
        baseline_seeds=stands_on.of_baseline,
        winner_seeds=stands_on.of_winner,
        at_least=False,
    )


def baseline_spec(
    baseline: Baseline, number: int, space: Space, seed: int, max_steps: int | None
) -> TrialSpec:
    """Make the baseline a trial; its batch size need not lie within the range that is searched."""
    return TrialSpec(
        number=number,
        trial_index=0,
        batch_size=baseline.batch_size,
        lr=baseline.lr,
        delta=space.delta(baseline.batch_size, baseline.lr),
        seed=seed,
        max_steps=max_steps,
        hyperparameters=baseline.hyperparameters,
    )
