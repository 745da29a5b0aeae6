"""The baseline is the configuration that the user runs today, a study's trial 0; and the gain.

The gain is the ratio of what the baseline takes to the target to what the winner takes, in the
merit of the study's objective. Both run on the same fresh seeds where the study's means allow it.
With d_i the difference of the log merits at seed i, the gain is exp(mean of d) and its interval

    exp(mean of d -+ t s / sqrt(n)),  s^2 = ((n - 1) s_d^2 + n_0 2 s_0^2) / (n - 1 + n_0),

with s_d the standard deviation of the d_i, s_0 the scatter of log S from seed to seed that the
posterior of all trials has, which counts for ``n_0`` degrees of freedom, and t Student's quantile
at n - 1 + n_0 of them. Three seeds alone would give an interval of chance's width. Two further
doubts widen it: how well the seconds of a step are known at one batch size over those at the other,
and the step at which a run met the target, where that was at its first evaluation. The winner was
chosen for its runs on these seeds, among others: its expected luck is taken off the mean of d.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, variance

from scipy.special import stdtrit

from bstune.core.errors import ConfigError
from bstune.core.records import Merit, Target, TrialResult, TrialSpec
from bstune.core.search_space import SizeLimits, Space, Tunable
from bstune.options import StudyOptions, option_at
from bstune.result import INTERVAL_LEVEL, INTERVAL_QUANTILE, BaselineResult, Gain, finite
from bstune.study.planning.plan import MEANS_SHARE, SearchBudget, reruns
from bstune.study.planning.replicates import Winner, same_point
from bstune.trial.backend import chooses_batch_sizes

# Degrees of freedom that the posterior's scatter from seed to seed counts for.
POSTERIOR_DEGREES = 8
# So many common seeds tell the ratio of the runs' own seconds: fewer have one run's luck.
FEWEST_OWN_PAIRS = 3
# The share of its steps that is taken to have missed the target in a run that met it at its first
# evaluation.
MISSED_SHARE = 0.5
NO_OWN_RUN = (
    "workload.target.value=auto takes the target from a run of your own configuration, the "
    "reference: {because}; give target=VALUE"
)
SMALLER_REFERENCE = (
    "a smaller one and the learning rate that goes with it, scaling.batch_size and scaling.lr"
)


@dataclass(frozen=True)
class Baseline:
    """The user's own configuration: the reference pair, and the config's own values of tunables."""

    batch_size: int
    lr: float
    hyperparameters: Mapping[str, int | float]


@dataclass(frozen=True)
class BaselineRuns:
    """The runs of a study's baseline."""

    first: TrialResult
    """The first run; of one that was stopped and continued, or run once more, the last part."""
    again: tuple[TrialResult, ...] = ()
    """The runs on fresh seeds, as the winner itself or beside another one."""


def baseline_of(options: StudyOptions, space: Space, limits: SizeLimits) -> Baseline | None:
    """Give the baseline of a study.

    It is None where its batch size is too large, and where the options or the sampler leave it out.

    ``limits``: of batch sizes here.
    """
    if not has_baseline(options):
        return None
    batch_size = options.scaling.whole_batch_size
    if limits.excess(batch_size) is not None:
        return None
    values = {tunable.name: _own_value(options, tunable) for tunable in space.tunables}
    return Baseline(batch_size, options.scaling.lr, values)


def has_baseline(options: StudyOptions) -> bool:
    """Whether a study runs its user's own configuration, if that can be run."""
    # A sampler that goes through the batch sizes does so by the trial's index, with as many trials
    # at each: a baseline, which takes index 0, would leave the first batch size one short.
    return options.search.baseline and not chooses_batch_sizes(options)


def text_on_excess(options: StudyOptions, limits: SizeLimits) -> str | None:
    """Say that the user's own batch size is too large for a baseline, and what to give instead.

    None where a baseline runs, or is left out.

    Raises:
        ConfigError: where the target is to be what the baseline comes to.
    """
    if not has_baseline(options):
        return None
    why = limits.excess(options.scaling.whole_batch_size)
    if why is None:
        return None
    if options.search.objective != "loss" and options.workload.target.target.is_open:
        raise ConfigError(f"{NO_OWN_RUN.format(because=why)}, or {SMALLER_REFERENCE}")
    return f"{why}, so there is no comparison to it: give {SMALLER_REFERENCE}"


def text_on_outside(baseline: Baseline, low: int, high: int) -> str | None:
    """Say that the baseline's batch size lies outside the range; None where it lies within.

    ``low``, ``high``: the smallest and the largest batch size that were asked for.
    """
    if low <= baseline.batch_size <= high:
        return None
    return (
        f"your own batch size, {baseline.batch_size}, lies outside {low} to {high}, which is "
        "searched: it is run all the same, as what others are compared with "
        "(search.baseline=false leaves it out)"
    )


def _own_value(options: StudyOptions, tunable: Tunable) -> int | float:
    """Give the value of a tunable that the user trains with today.

    It is stated, or the one that the config has at the tunable's key. Without either it is the
    range's middle.
    """
    if tunable.own is not None:
        return tunable.usual
    at_key = option_at(options, tunable.key)
    if isinstance(at_key, int | float) and not isinstance(at_key, bool):
        return tunable.for_config(at_key)
    return tunable.usual


def is_baseline(trial: TrialResult, baseline: Baseline | None) -> bool:
    """Whether a trial is the baseline's first run, and does not continue it."""
    return trial.resumed_from is None and is_at_baseline(trial, baseline)


def is_at_baseline(trial: TrialResult, baseline: Baseline | None) -> bool:
    """Whether a trial is the baseline's first run, or continues it.

    Trial 0 is another one in a study that began without a baseline.
    """
    return (
        baseline is not None
        and trial.trial_index == 0
        and trial.batch_size == baseline.batch_size
        and math.isclose(trial.lr, baseline.lr, rel_tol=1e-9)
    )


def baseline_runs(trials: Sequence[TrialResult], baseline: Baseline | None) -> BaselineRuns | None:
    """Find the baseline's runs among a study's trials.

    It is None before its first run, or if that failed.
    """
    usable = [trial for trial in trials if trial.status != "failed"]
    first_part = next((trial for trial in usable if is_baseline(trial, baseline)), None)
    if first_part is None:
        return None
    # The first run may have been stopped and continued: its last part has all of it. One whose
    # state was lost ran once more from its first step: that run counts in its place.
    by_parent = {trial.resumed_from: trial for trial in usable}
    by_number = {trial.number: trial for trial in usable}
    for number, earlier in reruns(usable).items():
        by_parent[earlier] = by_number[number]
    # The numbers of all its parts: a run on a fresh seed may name any of them.
    last_part = first_part
    chain = {last_part.number}
    while last_part.number in by_parent:
        last_part = by_parent[last_part.number]
        chain.add(last_part.number)
    again = [trial for trial in usable if trial.replicate_of in chain]
    return BaselineRuns(last_part, tuple(sorted(again, key=lambda trial: trial.number)))


def steps_of_first_run(
    budget: SearchBudget,
    last_step: int,
    seconds_per_step: float,
    wall_share: float,
) -> int:
    """Give the steps of the baseline's first run.

    They are those of a trial's budget, or fewer: as many as ``MEANS_SHARE`` of the study's seconds
    allow.

    Args:
        budget: of the study.
        last_step: at which a trial's budget is spent at the baseline's batch size.
        seconds_per_step: of training there.
        wall_share: the wall seconds of a step over its training seconds, as far as that is known
            before the first trial.
    """
    limits = [math.inf]
    if budget.seconds is not None:
        limits.append(budget.seconds)
    if budget.wall_seconds is not None:
        limits.append(budget.wall_seconds / wall_share)
    affordable = MEANS_SHARE * min(limits) / seconds_per_step
    return max(1, math.floor(min(last_step, affordable)))


def may_run_again(first: TrialResult, last_step: int) -> bool:
    """Whether the baseline is to run again on fresh seeds after its first run.

    It is, if the first run met the target, or missed it although it had its whole budget: the seed
    may have been unlucky. A run that the study's time cut short would be cut short again.
    """
    return first.reached or (first.status == "stopped" and first.steps >= last_step)


def count_fresh_seeds(runs: BaselineRuns, last_step: int, replicates: int) -> int:
    """Count the fresh seeds on which the baseline is to run in all, its past runs included.

    The rules are those of :func:`due_seed`.
    """
    if not may_run_again(runs.first, last_step):
        return 0
    if runs.first.reached:
        return replicates
    # After a first run that missed the target, the baseline runs until one more run misses it.
    if all(run.reached for run in runs.again):
        # Whether a further one follows the next one depends on what that comes to.
        return min(len(runs.again) + 1, replicates)
    return len(runs.again)


def due_seed(
    runs: BaselineRuns | None, winner: Winner | None, last_step: int, seconds_left: float
) -> TrialResult | None:
    """Find the winner's run on whose fresh seed the baseline runs next; None if none is due.

    Where the first run missed the target, the baseline runs again until a second run misses it.

    Args:
        runs: the baseline's, if any.
        winner: of the study, if any.
        last_step: at which the baseline's budget is spent.
        seconds_left: of training, that the baseline may still take.
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
    return next_run_beside(runs, [run for run in winner.runs if run.reached])


def training_seconds(run: TrialResult) -> float | None:
    """Give the seconds of training that a run took until it ended.

    It is None where they are not known.
    """
    if run.seconds_per_step is None:
        return None
    return run.steps * run.seconds_per_step


def has_run_beside(runs: BaselineRuns, winners_runs: Sequence[TrialResult]) -> bool:
    """Whether the baseline ran on the fresh seed of any of the winner's runs."""
    return not {run.seed for run in runs.again}.isdisjoint(run.seed for run in winners_runs)


def next_run_beside(runs: BaselineRuns, winners_runs: Sequence[TrialResult]) -> TrialResult | None:
    """Find the first of the winner's runs on whose seed the baseline has not run.

    It is None where the baseline has run on all of them.
    """
    taken = {run.seed for run in runs.again}
    for run in winners_runs:
        if run.seed not in taken:
            return run
    return None


def gain_of(
    runs: BaselineRuns | None,
    winner: Winner | None,
    merit: Merit,
    scatter: float,
    timing_error: float = 0.0,
    luck: float = 0.0,
) -> Gain | None:
    """How many times as fast the winner is as the baseline, with an interval.

    Both are compared on their common fresh seeds that reached the target. Without any, each counts
    by the fresh seeds that it has. Without those, the baseline counts by its first run and the
    winner by its prediction for a fresh seed. Where all of the baseline's runs were stopped before
    the target the gain is ``at_least`` the ratio.

    It is None where the two are the same point, where more than half of the winner's fresh seeds
    missed the target, where seconds are compared and not known, and where a baseline that missed
    the target does not bound the gain.

    Args:
        runs: the baseline's, if any.
        winner: of the study, if any.
        merit: whether seconds or steps are compared.
        scatter: of log S from seed to seed, one standard deviation.
        timing_error: of log tau at the one batch size over that at the other, one standard
            deviation; it counts for seconds alone.
        luck: by so much the winner's runs look too good, in log steps or log seconds
            (:func:`bstune.study.planning.replicates.selection_luck`).
    """
    if runs is None or winner is None or same_point(runs.first, winner.trial):
        return None
    reached = [run for run in winner.runs if run.reached]
    # A winner that mostly misses the target has no time to compare.
    if len(reached) < len(winner.runs) / 2:
        return None
    again = [run for run in runs.again if run.reached]
    baseline_stands_on = again or [runs.first]
    winner_stands_on = reached or [winner.trial]
    # Steps are counted, not timed.
    if merit == "steps":
        timing_error = 0.0
    doubt = _doubt(baseline_stands_on, winner_stands_on, timing_error)
    differences = [gained - luck for gained in _paired_differences(runs, reached, merit)]
    if differences:
        pairs = len(differences)
        stands_on = _GainRuns(of_both=pairs, of_baseline=pairs, of_winner=pairs)
        gain = _interval(differences, scatter, doubt, merit, stands_on)
        own_ratio: float | None = None
        if merit == "time":
            own_ratio = _ratio_of_own_seconds(runs, reached, pairs, luck)
        return gain.model_copy(update={"by_own_seconds": own_ratio})
    of_baseline = _mean_log_merit(baseline_stands_on, merit)
    of_winner = _expected_log_merit(winner, reached, merit)
    if of_baseline is None or of_winner is None:
        return None
    # Without its luck the winner takes longer. A winner that counts by its prediction was chosen
    # for that, and so has luck, too.
    of_winner += luck
    gained = of_baseline - of_winner
    if runs.first.reached or again:
        stands_on = _GainRuns(of_both=0, of_baseline=len(again), of_winner=len(reached))
        return _interval([gained], scatter, doubt, merit, stands_on)
    return _bound_of_gain(runs.first, gained, merit, winner_seeds=len(reached))


def _bound_of_gain(
    missed: TrialResult, gained: float, merit: Merit, winner_seeds: int
) -> Gain | None:
    """Bound the gain over a baseline whose first run, ``missed``, missed the target.

    The baseline takes longer than that run did, so the gain is at least as large. None for a run
    that diverged or ran out of memory, whose end says nothing of a longer one, and where the bound
    is below 1.

    ``gained``: the log of the ratio, with the baseline at the end of that run.
    """
    if missed.status in ("diverged", "out of memory"):
        return None
    ratio = math.exp(gained)
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
        winner_seeds=winner_seeds,
        at_least=True,
    )


def telling_target(first: TrialResult, target: Target, ideal: float | None) -> float | None:
    """Propose a harder target where the baseline met the study's at its first evaluation.

    A target that is met at the first evaluation was met at some unknown step before, and all batch
    sizes that meet it there look alike. The proposed value lies half as far from the ideal one as
    the value of that evaluation. Without an ideal value, it lies as far beyond that value as that
    value lies beyond the target. None where the baseline did not meet the target so, and where its
    schedule ends with the trial: such a trial is often evaluated once, at its end.
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
    """Describe the baseline's runs for the result; None without them.

    ``ideal``: the best value that the metric can have; None where it has no bound.
    """
    if runs is None:
        return None
    first = runs.first
    # The gain compares the runs on fresh seeds, where there are any: their schedule is reported.
    compared_run = first
    if runs.again:
        compared_run = runs.again[-1]
    last_value: float | None = None
    for _, value in first.history:
        if value is not None:
            last_value = value
    return BaselineResult(
        number=first.number,
        batch_size=first.batch_size,
        lr=first.lr,
        hyperparameters=dict(first.hyperparameters),
        status=first.status,
        steps=first.steps,
        seconds=training_seconds(first),
        value=finite(last_value),
        telling_target=finite(telling_target(first, target, ideal)),
        runs=len(runs.again),
        reached=sum(run.reached for run in runs.again),
        horizon=compared_run.horizon,
    )


def _paired_differences(
    runs: BaselineRuns, reached: Sequence[TrialResult], merit: Merit
) -> list[float]:
    """Compare both at each fresh seed on which both reached the target.

    Each difference is the log of the baseline's merit, steps or seconds, minus that of the
    winner's.

    ``reached``: the winner's runs that reached it.
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


def _ratio_of_own_seconds(
    runs: BaselineRuns, reached: Sequence[TrialResult], pairs: int, luck: float
) -> float | None:
    """Compare both by the seconds that their runs took themselves: the geometric mean over seeds.

    None where fewer than ``FEWEST_OWN_PAIRS`` seeds have both, and where a run was not timed.

    Args:
        runs: the baseline's.
        reached: the winner's runs that reached the target.
        pairs: on how many seeds both reached it.
        luck: as in :func:`gain_of`.
    """
    of_baseline = tuple(_with_own_seconds(run) for run in runs.again)
    of_winner = [_with_own_seconds(run) for run in reached]
    differences = _paired_differences(replace(runs, again=of_baseline), of_winner, "time")
    if pairs < FEWEST_OWN_PAIRS or len(differences) < pairs:
        return None
    return math.exp(fmean(differences) - luck)


def _with_own_seconds(run: TrialResult) -> TrialResult:
    """Give a run's record with the seconds of a step that the run itself took; None: unknown."""
    return replace(run, seconds_per_step=run.measured_seconds_per_step)


def _log_merit(run: TrialResult, merit: Merit) -> float | None:
    """Give the log of a run's steps or seconds to the target; None where seconds are not known.

    It is taken in the middle, on the log scale, of the two evaluations between which the run met
    the target. A run that missed it counts to its end.
    """
    log_steps = math.log(max(run.steps, 1))
    if run.reached:
        # A run that met the target at its first evaluation has no step that is known to have missed
        # it: a share of its steps stands for that one.
        last_miss = max(run.steps_low, MISSED_SHARE * run.steps)
        log_steps -= 0.5 * math.log(run.steps / last_miss)
    if merit == "steps":
        return log_steps
    if run.seconds_per_step is None:
        return None
    return log_steps + math.log(run.seconds_per_step)


def _mean_log_merit(runs: Sequence[TrialResult], merit: Merit) -> float | None:
    """Average the log steps or log seconds (``merit``) of runs; None where no seconds are known."""
    logs = [_log_merit(run, merit) for run in runs]
    known = [log for log in logs if log is not None]
    if not known:
        return None
    return fmean(known)


def _expected_log_merit(
    winner: Winner, reached: Sequence[TrialResult], merit: Merit
) -> float | None:
    """Average the log steps or seconds (``merit``) of the winner's fresh seeds that reached it.

    Without such runs it is the log of what a fresh seed is predicted to take. None where seconds
    are asked for and not known.
    """
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
    """On how many fresh seeds a gain stands."""

    of_both: int
    """On which both ran."""
    of_baseline: int
    of_winner: int


@dataclass(frozen=True)
class _GainDoubt:
    """What is not known of the log of a gain, beside the scatter from seed to seed."""

    timing_error: float
    """One standard deviation."""
    below: float
    """So far it may lie below its mean, as the step of a first evaluation is not known."""
    above: float
    """So far it may lie above."""


def _doubt(
    baseline_runs: Sequence[TrialResult], winner_runs: Sequence[TrialResult], timing_error: float
) -> _GainDoubt:
    """Collect what is not known of a gain that stands on these runs of both."""
    winner_earlier, winner_later = _untold(winner_runs)
    baseline_earlier, baseline_later = _untold(baseline_runs)
    # The gain is larger where the winner met the target earlier, or the baseline later.
    return _GainDoubt(
        timing_error=timing_error,
        below=winner_later + baseline_earlier,
        above=winner_earlier + baseline_later,
    )


def _untold(runs: Sequence[TrialResult]) -> tuple[float, float]:
    """Give by how much earlier and later than assumed the runs may have met the target.

    Both are means over the runs, in log steps. A run that met it at its first evaluation did so at
    any of its steps. For other runs both are 0: between two evaluations the middle is certain
    enough.
    """
    earlier = list[float]()
    later = list[float]()
    for run in runs:
        # A schedule that ends with its run takes all of it, whenever the target was met.
        if not run.reached or run.steps_low > 0 or run.horizon is not None:
            earlier.append(0.0)
            later.append(0.0)
            continue
        # The gain takes the log of this step as that at which the run met the target. It may have
        # done so at any step from the first, whose log is 0, to its last.
        assumed = _log_merit(run, "steps") or 0.0
        earlier.append(max(assumed, 0.0))
        later.append(math.log(max(run.steps, 1)) - assumed)
    if not runs:
        return 0.0, 0.0
    return fmean(earlier), fmean(later)


def _interval(
    differences: Sequence[float],
    scatter: float,
    doubt: _GainDoubt,
    merit: Merit,
    stands_on: _GainRuns,
) -> Gain:
    """Make the gain, the exponential of the mean difference of log steps or seconds.

    Its interval is Student's. The differences' own variance is pooled with 2 scatter^2, that of a
    difference of two runs, which counts for ``POSTERIOR_DEGREES`` degrees of freedom.

    Args:
        differences: of log steps or log seconds, baseline minus winner.
        scatter: of log S from seed to seed, one standard deviation.
        doubt: the timing's error, and the open step of a first evaluation, which widen it.
        merit: whether steps or seconds are compared.
        stands_on: on how many fresh seeds.
    """
    count = len(differences)
    squares = 0.0
    if count > 1:
        squares = variance(differences) * (count - 1)
    degrees = count - 1 + POSTERIOR_DEGREES
    pooled = (squares + POSTERIOR_DEGREES * 2.0 * scatter**2) / degrees
    # This is Student's quantile; scipy.stats, which has it too, takes half a second to import.
    quantile = float(stdtrit(degrees, 0.5 + 0.5 * INTERVAL_LEVEL))
    half = math.hypot(quantile * math.sqrt(pooled / count), INTERVAL_QUANTILE * doubt.timing_error)
    middle = fmean(differences)
    return Gain(
        ratio=math.exp(middle),
        low=math.exp(middle - half - doubt.below),
        high=math.exp(middle + half + doubt.above),
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
    """Make the baseline's first trial.

    Its batch size may lie outside of the range that is searched.

    ``max_steps``: None where its budget alone ends it.
    """
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
