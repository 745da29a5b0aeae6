"""A study's result, built once: of its trials, what was asked and what their posterior says.

result = summarize(trials, asked, analysis)
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from bstune.core.curve import FrontierPoint, frontier_points
from bstune.core.noise_scale import MIN_BLOCKS
from bstune.core.objectives import SOUGHT, Objective
from bstune.core.records import STATUSES, Budget, Merit, Target, TrialResult
from bstune.report.rows import curve_point, last_part_of_each
from bstune.result import (
    DIMINISHING_RETURNS,
    MAXIMAL_DATA_PARALLELISM,
    PERFECT_SCALING,
    SCHEMA_NUMBER,
    WINNERS,
    AsGood,
    AtBudget,
    BaselineResult,
    CriticalAtTarget,
    CriticalBatchSize,
    Curve,
    CurvePoint,
    DevicePlan,
    Gain,
    Growth,
    LearningRateLaw,
    MeasuredNoiseScale,
    NotRunAgain,
    Reference,
    Regime,
    SearchPlan,
    SeedScatter,
    SingleRun,
    SoFar,
    Spend,
    StepTiming,
    StudyResult,
    Unreached,
    UntoldOthers,
    WinnerName,
    WinnerResult,
    WorkloadSize,
    finite,
)
from bstune.search.noise_scale_prior import measured_noise_scale
from bstune.study.analysis.unreached import LEAST_EVALUATIONS, failures_of, unreached_because
from bstune.study.planning.plan import count_points, reruns
from bstune.study.planning.replicates import Winner, seed_changes_nothing, summary_of_runs


@dataclass(frozen=True)
class Asked:
    """What a study was asked for, as it is known before any trial."""

    study: str
    """The study's name."""
    workload: str
    """The workload's name."""
    tokens: int | None
    """How many an example has; None where examples are no text."""
    objective: Objective
    """What the search seeks."""
    target: Target
    """What its trials are to meet."""
    budget: Budget
    """Of one trial."""
    search: SearchPlan
    """The search's own budget."""
    reference: Reference
    """The pair that the scaling rule goes through."""
    question: str | None = None
    """What the objective loss asks, in words; None where a target is asked for."""
    size: WorkloadSize | None = None
    """How large data and module are; None where nothing is trained."""
    overrides_lr: bool = False
    """Whether the rate was set in the optimizer that the module had built."""
    in_python: bool = False
    """Whether Python objects gave it, whose options are arguments of ``bstune.Study``."""
    in_hydra: bool = False
    """Whether its trials are jobs of a sweep, whose options are keys of ``hydra.sweeper``."""


@dataclass(frozen=True)
class Analysis:
    """What the posterior of all trials says. A part is None or empty where it says nothing."""

    critical: CriticalBatchSize | None = None
    """The critical batch size that the study reports."""
    best: Mapping[Merit, Winner] = field(default_factory=dict)
    """The winner by time, and the one by steps."""
    lr_exponent: LearningRateLaw | None = None
    curve: Curve | None = None
    seed_scatter: SeedScatter | None = None
    timing: StepTiming | None = None
    baseline: BaselineResult | None = None
    so_far: SoFar | None = None
    gain: Gain | None = None
    gain_in_seconds: Gain | None = None
    as_good: AsGood | None = None
    not_run_again: NotRunAgain | None = None
    untold_others: UntoldOthers | None = None
    at_budget: AtBudget | None = None
    scale_out: tuple[DevicePlan, ...] = ()


@dataclass(frozen=True)
class OverTarget:
    """The critical batch size at easier targets than the study's, and how it grows."""

    rows: Sequence[CriticalAtTarget] = ()
    note: str | None = None
    """Why there are none."""
    growth: Growth | None = None


def summarize(
    trials: Iterable[TrialResult],
    asked: Asked,
    analysis: Analysis,
    *,
    stop_reason: str | None = None,
    ran_for_target: bool = True,
    over_target: OverTarget = OverTarget(),
    test: Mapping[WinnerName, Mapping[str, float | None]] | None = None,
    arguments: Sequence[str] | None = None,
    train: str | None = None,
    few_passed: str | None = None,
    run_for_target: str | None = None,
    notes: Sequence[str] = (),
) -> StudyResult:
    """Build a study's result of its parts.

    Args:
        trials: all that ended, in any order.
        asked: what the study was asked for.
        analysis: what the posterior of these trials says.
        stop_reason: what ended the search; None while it has not ended.
        ran_for_target: whether the trials were run for this target. Where they were run for another
            one it is not known why they were stopped.
        over_target: the critical batch size at easier targets.
        test: the winners' metrics on the test set.
        arguments: those of the command line that begin the study again; None: it had none.
        train: the command that trains the winner; None without one.
        few_passed: why trials that were run for another target tell little of this one; None where
            they tell enough, or were run for it.
        run_for_target: what runs a study for this target; None where there is no need.
        notes: further lines for the reader.
    """
    # Ties are broken by number.
    trials = sorted(trials, key=lambda trial: trial.number)
    points = frontier_points(trials)
    # What was cut short with its process is asked again, and counts then.
    ran = [trial for trial in trials if not trial.was_cut_short]
    # A trial that was stopped and continued is one configuration: its last part has all of it.
    runs = last_part_of_each(ran)
    # So is one that ran once more from its first step: its last run stands for all.
    replaced = set(reruns(ran).values())
    whole_trials = [trial for trial in runs if trial.number not in replaced]
    tested = {name: dict(metrics) for name, metrics in (test or {}).items()}
    study_arguments: tuple[str, ...] | None = None
    if arguments is not None:
        study_arguments = tuple(arguments)
    return StudyResult(
        schema_number=SCHEMA_NUMBER,
        study=asked.study,
        workload=asked.workload,
        tokens=asked.tokens,
        overrides_lr=asked.overrides_lr,
        in_python=asked.in_python,
        in_hydra=asked.in_hydra,
        size=asked.size,
        objective=asked.objective,
        target=asked.question or str(asked.target),
        metric=asked.target.metric,
        target_value=_target_value(asked.target),
        mode=asked.target.mode,
        devices=_devices(trials),
        training_loops=_training_loops(trials),
        stop_reason=stop_reason,
        trials=len(whole_trials),
        configurations=count_points(trials),
        continued=len(ran) - len(whole_trials),
        spend=_spend(trials, runs),
        statuses=_statuses(whole_trials),
        failures=failures_of(whole_trials),
        unreached=_unreached(trials, whole_trials, asked, ran_for_target),
        points=tuple(_curve_point(point, trials) for point in points),
        critical_batch_size=analysis.critical,
        regimes=regimes(analysis.critical),
        noise_scale=noise_scale(trials),
        lr_exponent=analysis.lr_exponent,
        best_by_time=_winner(analysis, "time"),
        best_by_steps=_winner(analysis, "steps"),
        use=winner_to_use(asked.objective, analysis.best),
        confirmed=_is_confirmed(asked.objective, analysis),
        train=train,
        arguments=study_arguments,
        search=asked.search,
        reference=asked.reference,
        curve=analysis.curve,
        timing=analysis.timing,
        seed_scatter=analysis.seed_scatter,
        baseline=analysis.baseline,
        so_far=analysis.so_far,
        gain=analysis.gain,
        gain_in_seconds=analysis.gain_in_seconds,
        as_good=analysis.as_good,
        smallest_out_of_memory=_smallest_out_of_memory(whole_trials),
        not_run_again=analysis.not_run_again,
        untold_others=analysis.untold_others,
        at_budget=analysis.at_budget,
        only_value=_only_value(trials),
        seed_is_unused=seed_changes_nothing(trials),
        over_target=tuple(over_target.rows),
        over_target_note=over_target.note,
        over_target_growth=over_target.growth,
        test=tested,
        scale_out=analysis.scale_out,
        few_passed=few_passed,
        run_for_target=run_for_target,
        notes=tuple(notes),
    )


def _target_value(target: Target) -> float | None:
    """Give the target's value; None for the objective loss, and before a first trial has set it."""
    if target.is_open:
        return None
    return target.value


def _devices(trials: Sequence[TrialResult]) -> tuple[str, ...]:
    """Collect the names of the devices that trained, sorted."""
    # A trial that failed before it trained has none.
    names = {trial.device for trial in trials if trial.device}
    return tuple(sorted(names))


def _unreached(
    trials: Sequence[TrialResult],
    whole_trials: Sequence[TrialResult],
    asked: Asked,
    ran_for_target: bool,
) -> Unreached | None:
    """Collect what tells why no trial reached the target; None where one did, or there is none.

    Args:
        trials: all parts of all trials.
        whole_trials: the trials, with only the last part of one that was continued.
        asked: what the study was asked for.
        ran_for_target: whether the trials were run for this target.
    """
    # The objective loss has no target to miss.
    if asked.objective == "loss":
        return None
    return unreached_because(trials, whole_trials, asked.target, asked.budget, ran_for_target)


def _is_confirmed(objective: Objective, analysis: Analysis) -> bool:
    """Whether all fresh seeds of the winner reached the target, and timing tells it from others.

    For the objective loss: whether the winner has run on fresh seeds.
    """
    if analysis.at_budget is not None:
        return analysis.at_budget.winner.fresh is not None
    use = winner_to_use(objective, analysis.best)
    if use is None:
        return False
    fresh = summary_of_runs(analysis.best[WINNERS[use].merit].runs)
    if fresh is None or not fresh.all_reached:
        return False
    return analysis.timing is None or not analysis.timing.not_told_apart


def _only_value(trials: Sequence[TrialResult]) -> float | None:
    """Give the metric that all evaluations of all trials have; None where some differ.

    It is None for less than ``LEAST_EVALUATIONS``, too.
    """
    values = list[float]()
    for trial in trials:
        values += [value for _, value in trial.history if value is not None]
    if len(values) < LEAST_EVALUATIONS or len(set(values)) > 1:
        return None
    return finite(values[0])


def winner_to_use(objective: Objective, best: Mapping[Merit, Winner]) -> WinnerName | None:
    """Name the winner to use: by what the objective seeks, time or steps, else by the other one.

    None without a winner.
    """
    sought = SOUGHT[objective].merits
    # Sorting is stable: those that are sought come first.
    for name in sorted(WINNERS, key=lambda name: WINNERS[name].merit not in sought):
        if WINNERS[name].merit in best:
            return name
    return None


def winner_result(winner: Winner, scatter: float = 0.0, time_error: float = 0.0) -> WinnerResult:
    """Describe a winner for the result.

    ``steps`` and ``time_to_target`` are what to expect of a fresh seed. They are the median over
    the winner's runs on fresh seeds, None where half of these missed the target. Without such runs
    they are predicted. The trial's own, which may be lucky, are its ``single_run``.

    Args:
        winner: the point, and its runs on fresh seeds.
        scatter: of log steps from seed to seed, one standard deviation.
        time_error: of the log of a step's seconds, one standard deviation.
    """
    trial = winner.trial
    # The best of many noisy runs is a lucky one: its own steps are not what to expect.
    fresh = summary_of_runs(winner.runs, scatter, time_error)
    steps: float | None = winner.steps
    seconds = None
    if trial.seconds_per_step is not None:
        seconds = winner.steps * trial.seconds_per_step
    if fresh is not None:
        steps = fresh.steps_median
        seconds = fresh.time_median
    return WinnerResult(
        number=trial.number,
        seed=trial.seed,
        batch_size=trial.batch_size,
        lr=trial.lr,
        hyperparameters=dict(trial.hyperparameters),
        horizon=winner.advised_horizon,
        steps=steps,
        seconds_per_step=trial.seconds_per_step,
        time_to_target=seconds,
        confirmed=fresh,
        single_run=SingleRun(steps=trial.steps, time_to_target=trial.time_to_target),
        reaching=winner.reaching,
    )


def noise_scale(trials: Iterable[TrialResult]) -> MeasuredNoiseScale | None:
    """Give the noise scale that trials measured; None where none was measured."""
    measured = measured_noise_scale(trials)
    if measured is None:
        return None
    estimate, steps = measured
    undetermined = None
    # Either the gradients do not tell it, or too few trials have measured them.
    if estimate.noise_scale is None:
        undetermined = "|G|^2 does not differ from 0"
        if estimate.measurements < MIN_BLOCKS:
            undetermined = f"{MIN_BLOCKS} trials that reach the target are needed"
    return MeasuredNoiseScale(
        noise_scale=estimate.noise_scale,
        low=estimate.low,
        high=estimate.high,
        level=estimate.level,
        trials=estimate.measurements,
        steps=steps,
        undetermined=undetermined,
    )


def regimes(critical: CriticalBatchSize | None) -> tuple[Regime, ...]:
    """Divide the batch sizes that reached the target into regimes, from the smallest on.

    It is empty where the critical batch size does not bound the regimes.
    """
    if critical is None:
        return ()
    low = critical.perfect_scaling_below
    high = critical.maximal_data_parallelism_above
    if low is None or high is None:
        return ()
    smallest = float(critical.smallest)
    largest = float(critical.largest)
    bounds = (
        (PERFECT_SCALING, smallest, low),
        (DIMINISHING_RETURNS, max(smallest, low), min(largest, high)),
        (MAXIMAL_DATA_PARALLELISM, high, largest),
    )
    # A regime outside of these batch sizes was not seen.
    seen = list[Regime]()
    for name, start, end in bounds:
        if start < end:
            seen.append(Regime(name=name, start=start, end=end))
    return tuple(seen)


def _training_loops(trials: Sequence[TrialResult]) -> dict[str, int]:
    """Count the trials by the loop that took their steps."""
    counts = Counter(trial.training_loop for trial in trials if trial.training_loop)
    return dict(sorted(counts.items()))


def _spend(trials: Sequence[TrialResult], runs: Sequence[TrialResult]) -> Spend:
    """Add up what the trials took.

    ``runs``: the trials, with only the last part of one that was continued, which counts the
    examples of all its parts.
    """
    seconds = sum(
        trial.train_seconds + trial.eval_seconds + trial.startup_seconds for trial in trials
    )
    examples = sum(trial.examples for trial in runs)
    return Spend(trials=len(runs), seconds=seconds, examples=examples)


def _smallest_out_of_memory(whole_trials: Sequence[TrialResult]) -> int | None:
    """Find the smallest batch size whose trial ran out of memory; None where none did."""
    sizes = [trial.batch_size for trial in whole_trials if trial.status == "out of memory"]
    return min(sizes, default=None)


def _statuses(whole_trials: Sequence[TrialResult]) -> dict[str, int]:
    """Count the trials by status; a status that no trial has counts 0."""
    counts = Counter[str](trial.status for trial in whole_trials)
    # Each status is there, always in the same order.
    return {status: counts[status] for status in STATUSES}


def _winner(analysis: Analysis, merit: Merit) -> WinnerResult | None:
    """Describe the winner by time or by steps (``merit``) for the result; None without one."""
    winner = analysis.best.get(merit)
    if winner is None:
        return None
    # Where these two errors are not known, the fresh seeds' own scatter alone makes the interval.
    scatter = 0.0
    if analysis.seed_scatter is not None:
        scatter = analysis.seed_scatter.scatter
    time_error = 0.0
    if analysis.timing is not None:
        time_error = analysis.timing.relative_error
    return winner_result(winner, scatter, time_error)


def _curve_point(point: FrontierPoint, trials: Sequence[TrialResult]) -> CurvePoint:
    """Give a point of the frontier with all that the record of its trial has."""
    status = "reached"
    if point.stopped:
        status = "stopped"
    # The trials are in order of their numbers, as the frontier breaks ties. A point that stopped
    # stands at the last step that is known to have missed the target.
    for trial in trials:
        steps = trial.steps
        if point.stopped:
            steps = trial.steps_low
        if (trial.batch_size, trial.status, steps) == (point.batch_size, status, point.steps):
            return curve_point(trial)
    raise LookupError(f"no trial is at the frontier's point {point}")
