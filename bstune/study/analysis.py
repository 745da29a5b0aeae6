"""From records to the typed result: each value is computed once, here."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bstune import __version__
from bstune.core.question import Question
from bstune.core.records import Record, Records, StepTime, Target
from bstune.core.rules import allowed_rules
from bstune.core.space import Configuration, Space
from bstune.core.step_time import StepTimeModel
from bstune.search.findings import (
    NEAR_OPTIMAL,
    CurvePoint,
    curve,
    curve_sizes,
    lr_exponent_quantiles,
    near_optimal,
    predictions,
    share_reaching,
)
from bstune.search.fit import sizes_that_fit
from bstune.search.grid import best_of_grid
from bstune.search.posterior import Posterior
from bstune.study.advice import (
    FurtherOptions,
    closest_trial,
    easier_target,
    more_time,
    remedy,
    searched_range,
    trend_of_most,
    warnings_of,
    what_is_missing,
    what_narrows_b_crit,
)
from bstune.study.commands import Commands, report_command
from bstune.study.confirm import (
    Run,
    SeedDeviation,
    best_confirmed,
    improvement_of,
    median_interval,
    median_run,
    metric_half_width,
    pooled_deviation,
    predicted_share,
    speedup_of,
    verdict_of,
)
from bstune.study.critical import critical_batch_size, noise_scale
from bstune.study.estimates import answer_posterior, step_time_of
from bstune.study.field import Field, field_of, place_of
from bstune.study.machine import Machine
from bstune.study.plan import Plan
from bstune.study.prepare import OfProject
from bstune.study.result import (
    Closest,
    Confirmed,
    Faster,
    FewestSteps,
    Improvement,
    Interval,
    LrAlone,
    Measured,
    Speedup,
    Spent,
    StudyResult,
    Verdict,
)
from bstune.study.retarget import critical_over_targets
from bstune.study.trials import (
    baseline_of,
    count_configurations,
    least_steps,
    new_seeds_of,
    record_numbered,
)

# The best rate at the baseline's own batch size is told from this gain on, and where a trial within
# so many octaves, by the rule, has reached the target.
LEAST_GAIN = 1.05
OCTAVES_OFF = 1.0
# Standard deviations of a step time that no repetition shows: seconds that a step of a trial takes
# more than one of the project's own Trainer, by its call-back and the cold caches after evaluations
# (tests/benchmarks/README.md), and how far one hour of a machine is off another, relatively. A
# quotient is free of them.
LOOP_SECONDS = 5e-5
HOUR_ERROR = 0.03


@dataclass(frozen=True)
class StudyFacts:
    """What the result says of a study beside its records.

    Args:
        plan: that it followed.
        workload, name: of the workload and of the study.
        machine: that trained.
        project: what it told.
        commands: that run the study again, and train its best.
        folder: of the study.
        ran_for: the target, or the budget, that its trials were run for, where another is asked.
    """

    plan: Plan
    workload: str
    name: str
    machine: Machine
    project: OfProject
    commands: Commands
    folder: Path
    ran_for: str | None = None


def analyse(facts: StudyFacts, records: Records) -> StudyResult:
    """Compute a study's result from its records, at its end, or so far, or for another question."""
    reached = any(record.reached for record in records)
    fields = _fields_if_reached if reached else _fields_if_not_reached
    question = facts.plan.question
    return StudyResult(
        bstune=__version__,
        workload=facts.workload,
        study=facts.name,
        objective=question.objective,
        target=question.target,
        budget=question.budget,
        ran_for=facts.ran_for,
        device=facts.machine.device,
        threads=facts.machine.threads,
        parameters=facts.project.parameters,
        examples=facts.project.examples,
        seeds=facts.plan.seeds,
        configurations=count_configurations(records),
        trials=len(records),
        noise_scale=noise_scale(facts.plan, records),
        spent=Spent(
            training=sum(record.train_seconds for record in records),
            other=sum(record.other_seconds for record in records),
        ),
        reached=reached,
        **{"warnings": facts.project.warnings} | fields(facts, records),
    )


def _fields_if_not_reached(facts: StudyFacts, records: Records) -> dict[str, Any]:
    """The fields where nothing reached the target: the closest, and what may help."""
    plan = facts.plan
    target = plan.question.target
    fields: dict[str, Any] = {"verdict": "not yet"}
    record = closest_trial(target, records)
    if record is None:
        # Under a time limit that start-up takes up there is no trial at all.
        message = records[-1].message if records else "no trial was run in the time limit"
        return fields | {"missing": message}
    trend = trend_of_most(plan.question, records)
    options = remedy(plan, facts.name, trend, records)
    of_time = more_time(plan, records)
    if trend == "failed":
        messages = [one.message for one in records if not one.finite_history]
        fields["missing"] = messages[-1]
    if of_time is not None and trend == "stopped early":
        what, options = of_time
        # Otherwise the row says it already: to run more trials.
        if not count_configurations(records):
            fields["missing"] = what
    if not plan.question.seeks_metric:
        easier = easier_target(target, records)
        again = report_command(facts.folder, easier)
        if plan.question.schedule_ends:
            again = facts.commands.study({"target": str(easier), "study": f"{facts.name}-easier"})
        fields |= {"easier_goal": easier.goal, "easier": again}
    field = field_of(plan, records)
    configuration = Configuration(batch_size=record.batch_size, lr=record.lr, values=record.values)
    value = target.best(record.finite_values)
    return fields | {
        "best": _with_runs(plan, records, field, record, (), field.deviation_of_law),
        "closest": Closest(configuration=configuration, value=value, trend=trend),
        "next": facts.commands.study(options) if options else None,
        "next_options": options,
    }


def _fields_if_reached(facts: StudyFacts, records: Records) -> dict[str, Any]:
    """The fields where a trial reached the target."""
    plan = facts.plan
    posterior = answer_posterior(plan, records)
    fitting = sizes_that_fit(plan.space, records, plan.fits)
    points = curve(posterior, step_time_of(plan, records), curve_sizes(fitting))
    if plan.question.seeks_metric:
        return _fields_of_best(facts, records, posterior, points)
    searched = searched_range(fitting, records)
    critical = critical_batch_size(posterior, records)
    fields: dict[str, Any] = {
        "critical": critical,
        "over_targets": critical_over_targets(plan, records),
        "searched": searched,
        "curve": points,
    }
    if plan.sampler == "grid":
        fields["measured"] = [
            Measured(batch_size=one.batch_size, lr=one.lr, steps=one.steps_to_target)
            for one in best_of_grid(plan.space, records, plan.fits)
        ]
    # One batch size shows no rule.
    sizes = plan.space.low, plan.space.high
    if sizes[0] < sizes[1]:
        low, exponent, high = lr_exponent_quantiles(posterior)
        fields["lr_exponent"] = Interval(value=exponent, low=low, high=high)
        fields["allowed_rules"] = allowed_rules(
            low, high, sizes, plan.space.anchor[0], critical.interval.value
        )
    if plan.question.seeks_best:
        fields |= _fields_of_best(facts, records, posterior, points)
    else:
        fields["verdict"] = None
        fields |= _fields_of_missing(
            facts, what_narrows_b_crit(plan, facts.name, critical, searched, records)
        )
    warnings = warnings_of(plan, fields.get("best"), critical, points, searched, records)
    return fields | {"warnings": (*facts.project.warnings, *warnings)}


def _fields_of_missing(
    facts: StudyFacts, lacking: tuple[str, FurtherOptions] | None
) -> dict[str, Any]:
    """The fields of what is missing, and of the command that gets it."""
    if lacking is None:
        return {}
    what, options = lacking
    return {"missing": what, "next": facts.commands.study(options), "next_options": options}


Compared = tuple[Confirmed | None, Confirmed | None, Speedup | Improvement | None]
"""The best other configuration and the baseline on the same new seeds, and how much better it is;
None where that is not known."""


def _fields_of_best(
    facts: StudyFacts, records: Records, posterior: Posterior, points: Sequence[CurvePoint]
) -> dict[str, Any]:
    """The fields of the verdict and of the best: what trains it, or what is missing."""
    plan = facts.plan
    step_time = step_time_of(plan, records)
    compared = _compare_metrics if plan.question.seeks_metric else _compare_times
    other, baseline, comparison = compared(plan, records)
    other, baseline = (
        _with_predicted_share(other, posterior),
        _with_predicted_share(baseline, posterior),
    )
    verdict: Verdict = "not yet"
    if other is not None and other.runs:
        verdict = verdict_of(comparison, plan.baseline is not None, other.is_bound)
    best = _best_by_medians(verdict, other, baseline, comparison)
    fields: dict[str, Any] = {
        "verdict": verdict,
        "best": best,
        "baseline": baseline,
        "baseline_limit": _baseline_limit(baseline),
        "near_optimal": _near_optimal(points, plan, step_time, best),
        "fewest_steps": _fewest_steps(plan.question, points, records, best),
        "faster": _faster_in_seconds(facts, posterior, step_time, best, baseline),
    }
    if isinstance(comparison, Speedup):
        fields["speedup"] = comparison
        if verdict != "keep" and other is not None and baseline is not None:
            fields["lr_alone"] = _rate_alone(plan, records, posterior, other, baseline, comparison)
    else:
        fields["improvement"] = comparison
    if best is not None and verdict in ("switch", "use"):
        fields["train_command"] = facts.commands.train(best.batch_size, best.lr, best.train_steps)
    if best is not None and best is baseline:
        fields["other"] = other
    if verdict == "not yet":
        fields |= _fields_of_missing(
            facts, what_is_missing(plan, comparison, other, baseline, records)
        )
    return fields


OfRuns = tuple[Record | None, list[Record]]
"""A configuration's trial of the search, and its runs on new seeds."""


def _runs_on_common_seeds(records: Records, field: Field) -> tuple[OfRuns, OfRuns]:
    """The best other configuration and the baseline, with their runs on the same new seeds.

    Where they have none in common it is all of each.
    """
    leader = best_confirmed(field.candidates, field.runs, field.noise)
    of_other = None
    other_runs = []
    if leader is not None:
        of_other = record_numbered(records, leader)
        other_runs = new_seeds_of(records, leader)
    of_baseline = baseline_of(records)
    baseline_runs = []
    if of_baseline is not None:
        baseline_runs = new_seeds_of(records, of_baseline.number)
    common = {run.seed for run in other_runs} & {run.seed for run in baseline_runs}
    if common:
        other_runs = [run for run in other_runs if run.seed in common]
        baseline_runs = [run for run in baseline_runs if run.seed in common]
    return (of_other, other_runs), (of_baseline, baseline_runs)


def _share_seeds(runs: Records, others: Records) -> bool:
    """Whether a seed is of both, so that they can be compared in pairs."""
    return not {run.seed for run in runs}.isdisjoint(run.seed for run in others)


def _compare_times(plan: Plan, records: Records) -> Compared:
    """Compare by steps or seconds; a median of the other one that is a bound tells no speedup."""
    field = field_of(plan, records)
    (of_other, other_runs), (of_baseline, baseline_runs) = _runs_on_common_seeds(records, field)
    log_steps_by_configuration = []
    for runs in (other_runs, baseline_runs):
        log_steps_by_configuration.append(
            [math.log(least_steps(run)) for run in runs if run.reached]
        )
    deviation = pooled_deviation(log_steps_by_configuration, field.noise)
    other = _with_runs(plan, records, field, of_other, other_runs, deviation)
    baseline = _with_runs(plan, records, field, of_baseline, baseline_runs, deviation)
    if other is None or baseline is None or other.is_bound:
        return other, baseline, None
    if not _share_seeds(other_runs, baseline_runs):
        return other, baseline, None
    value = plan.question.value
    step_time = step_time_of(plan, records)
    step_time_error = 0.0
    if plan.question.counts_seconds and other.batch_size != baseline.batch_size:
        step_time_error = math.hypot(other.step_seconds_error, baseline.step_seconds_error)
    speedup = speedup_of(
        _runs_in_steps(other_runs, value(1.0, other.batch_size, step_time)),
        _runs_in_steps(baseline_runs, value(1.0, baseline.batch_size, step_time)),
        deviation,
        step_time_error,
    )
    return other, baseline, speedup


def _compare_metrics(plan: Plan, records: Records) -> Compared:
    """Compare by the best metric of each run; there is no improvement where one has no median."""
    target = plan.question.target
    field = field_of(plan, records)
    # A run that a time limit stopped tells nothing of its budget's end.
    whole = [one for one in records if one.role != "new seed" or one.status != "pruned"]
    (of_other, other_runs), (of_baseline, baseline_runs) = _runs_on_common_seeds(whole, field)
    other_metrics = _runs_by_metric(other_runs, target)
    baseline_metrics = _runs_by_metric(baseline_runs, target)
    values_by_configuration = [
        [run.value for run in metrics if run.reached]
        for metrics in (other_metrics, baseline_metrics)
    ]
    deviation = pooled_deviation(values_by_configuration, expected=0.0, degrees=0)
    other = _with_metric(plan, records, field, of_other, other_runs, deviation)
    baseline = _with_metric(plan, records, field, of_baseline, baseline_runs, deviation)
    improvement = None
    if other_metrics and baseline_metrics and _share_seeds(other_runs, baseline_runs):
        improvement = improvement_of(other_metrics, baseline_metrics, deviation)
    return other, baseline, improvement


def _runs_in_steps(records: Records, per_step: float = 1.0) -> list[Run]:
    """Runs on new seeds, in steps or in what a step counts."""
    return [Run(least_steps(run) * per_step, run.reached, run.steps_error) for run in records]


def _runs_by_metric(records: Records, target: Target) -> list[Run]:
    """Runs by their best metric, as its gap; one that did not train to its end is the worst."""
    runs = []
    for record in records:
        is_whole = record.status == "finished"
        gap = target.gap(target.best(record.finite_values)) if is_whole else math.inf
        runs.append(Run(gap, is_whole))
    return runs


def _with_metric(
    plan: Plan,
    records: Records,
    field: Field,
    record: Record | None,
    runs: Records,
    deviation: SeedDeviation,
) -> Confirmed | None:
    """A configuration with the metric of its runs; before the first one, of its trial."""
    confirmed = _with_runs(plan, records, field, record, runs, field.deviation_of_law)
    if confirmed is None or record is None:
        return None
    target = plan.question.target
    gap, is_bound = median_run(_runs_by_metric(runs or [record], target))
    if is_bound:
        return confirmed
    # Without a goal the gap of a gap is the metric.
    metric = target.gap(gap)
    half = metric_half_width(confirmed.reached, deviation) if runs else None
    ends_of_metric = {}
    if half is not None:
        ends_of_metric = {"metric_low": metric - half, "metric_high": metric + half}
    return confirmed.model_copy(update={"metric": metric, **ends_of_metric})


def _with_runs(
    plan: Plan,
    records: Records,
    field: Field,
    record: Record | None,
    runs: Records,
    deviation: SeedDeviation,
) -> Confirmed | None:
    """A configuration with its runs on new seeds; before the first, its steps are the trial's."""
    if record is None:
        return None
    tau, error, of_loop = _step_seconds(step_time_of(plan, records), record.batch_size)
    question = plan.question
    schedule_steps = (runs or [record])[0].schedule_steps
    train_steps = schedule_steps
    if question.seeks_metric or question.budget.seconds is not None:
        train_steps = schedule_steps or question.last_step(record.batch_size)
    steps, is_bound = median_run(_runs_in_steps(runs or [record]))
    steps_ends: tuple[float | None, float | None] = (None, None)
    seconds_ends = steps_ends
    # A budget whose best metric is sought ends at the same step on every seed.
    if runs and not question.seeks_metric:
        steps_ends = median_interval(_runs_in_steps(runs), deviation)
        seconds_ends = median_interval(
            _runs_in_steps(runs, tau), deviation, math.hypot(error, of_loop)
        )
    return Confirmed(
        batch_size=record.batch_size,
        lr=record.lr,
        values=record.values,
        number=record.number,
        seeds=tuple(run.seed for run in runs),
        runs_steps=tuple(map(least_steps, runs)),
        runs_status=tuple(run.status for run in runs),
        schedule_steps=schedule_steps,
        train_steps=train_steps,
        steps=steps,
        steps_low=steps_ends[0],
        steps_high=steps_ends[1],
        seconds=steps * tau,
        seconds_low=seconds_ends[0],
        seconds_high=seconds_ends[1],
        is_bound=is_bound,
        predicted_share=predicted_share(
            *place_of(plan.space, record),
            [outcome for outcome in field.outcomes if not outcome.is_of_search],
        ),
        step_seconds=tau,
        step_seconds_error=error,
    )


def _step_seconds(step_time: StepTime, batch_size: int) -> tuple[float, float, float]:
    """Seconds of a step, and relative deviations: its own, and what no repetition shows."""
    tau = step_time(batch_size)
    if isinstance(step_time, StepTimeModel):
        return tau, step_time.error(batch_size), math.hypot(LOOP_SECONDS / tau, HOUR_ERROR)
    # Recorded runs tell their step times exactly.
    return tau, 0.0, 0.0


def _with_predicted_share(confirmed: Confirmed | None, posterior: Posterior) -> Confirmed | None:
    """Predict the share of seeds that reach, where a schedule's length decides on it."""
    told = [chain.number for chain in posterior.chains]
    if confirmed is None or confirmed.schedule_steps is None or confirmed.number not in told:
        return confirmed
    share = share_reaching(posterior, confirmed.number, confirmed.schedule_steps)
    return confirmed.model_copy(update={"predicted_share": share})


def _best_by_medians(
    verdict: Verdict,
    other: Confirmed | None,
    baseline: Confirmed | None,
    comparison: Speedup | Improvement | None,
) -> Confirmed | None:
    """What the first line names: the better one by medians; under keep the baseline."""
    if verdict == "keep" or other is None:
        return baseline
    is_worse = comparison is not None and comparison.is_worse
    misses = other.runs > 0 and other.is_bound and baseline is not None and not baseline.is_bound
    return baseline if is_worse or misses else other


def _baseline_limit(baseline: Confirmed | None) -> Literal["budget", "stopped", "failed"] | None:
    """Why the baseline's runs ended that missed the target."""
    if baseline is None or baseline.reached == baseline.runs:
        return None
    if "missed" in baseline.runs_status:
        return "budget"
    if "pruned" in baseline.runs_status:
        return "stopped"
    return "failed"


def _near_optimal(
    points: Sequence[CurvePoint], plan: Plan, step_time: StepTime, best: Confirmed | None
) -> tuple[int, int] | None:
    """The near-optimal range; what is named as best belongs to it."""
    if not points or best is None or best.is_bound:
        return None
    low, high = near_optimal(points, plan.question, step_time)
    return min(round(low), best.batch_size), max(round(high), best.batch_size)


def is_near_trials(space: Space, batch_size: float, lr: float, records: Records) -> bool:
    """Whether a rate lies among those that reached the target, or an octave off, by the rule."""
    octaves = math.log2(lr / space.rule_lr(batch_size))
    of_trials = [place_of(space, record)[1] for record in records if record.reached]
    return min(of_trials) - OCTAVES_OFF <= octaves <= max(of_trials) + OCTAVES_OFF


def _rate_alone(
    plan: Plan,
    records: Records,
    posterior: Posterior,
    other: Confirmed,
    baseline: Confirmed,
    speedup: Speedup,
) -> LrAlone | None:
    """What the best rate at the baseline's own batch size is predicted to gain.

    None where the best is there, where that is not predicted to gain less than the best, where no
    trial speaks for the rate: all that reached the target are an octave off it by the rule; and
    where the curve is that of further values which the baseline has not.
    """
    if other.batch_size == baseline.batch_size or plan.space.tunables:
        return None
    (there,) = curve(posterior, step_time_of(plan, records), [baseline.batch_size])
    gain = baseline.steps / there.steps
    if not LEAST_GAIN < gain < speedup.value:
        return None
    if not is_near_trials(plan.space, baseline.batch_size, there.lr, records):
        return None
    return LrAlone(lr=float(f"{there.lr:.3g}"), speedup=gain)


def _fewest_steps(
    question: Question,
    points: Sequence[CurvePoint],
    records: Sequence[Record],
    best: Confirmed | None,
) -> FewestSteps | None:
    """The batch size of the fewest predicted steps, up to the largest that reached the target.

    None where the best, or a smaller one, takes as few, and where time is not the question.
    """
    if question.counts_steps or question.seeks_metric:
        return None
    largest = max(record.batch_size for record in records if record.reached)
    within = [point for point in points if point.batch_size <= largest]
    if best is None or not within:
        return None
    limit = NEAR_OPTIMAL * min(point.steps for point in within)
    point = next(point for point in within if point.steps <= limit)
    if point.batch_size <= best.batch_size:
        return None
    return FewestSteps(
        batch_size=round(point.batch_size),
        lr=float(f"{point.lr:.3g}"),
        steps=point.steps,
        steps_low=point.steps_low,
        steps_high=point.steps_high,
    )


def _faster_in_seconds(
    facts: StudyFacts,
    posterior: Posterior,
    step_time: StepTime,
    best: Confirmed | None,
    baseline: Confirmed | None,
) -> Faster | None:
    """The configuration that is predicted to be clearly faster than the best, in seconds.

    Under ``steps`` there may be one, and where the trials were run for another question: those that
    are best for this one had no new seeds then.
    """
    question = facts.plan.question
    is_expected = question.counts_steps or facts.ran_for is not None
    if not is_expected or question.seeks_metric or best is None:
        return None
    # Predicted seconds, with the record that they are of.
    by_number = {}
    for prediction in predictions(posterior, question, step_time):
        record = prediction.record
        value_of_step = question.value(1.0, record.batch_size, step_time)
        steps = math.exp(prediction.log_value) / value_of_step
        by_number[record.number] = question.cost(steps, record.batch_size, step_time), record
    if best.number not in by_number:
        return None
    least, record = min(by_number.values(), key=lambda pair: pair[0])
    speedup = by_number[best.number][0] / least
    if speedup <= NEAR_OPTIMAL or record.role == "baseline":
        return None
    # The baseline's seconds are measured, and stand beside the best's.
    if baseline is not None and not baseline.is_bound and baseline.seconds <= least:
        return None
    return Faster(
        batch_size=record.batch_size,
        lr=record.lr,
        values=record.values,
        seconds=least,
        speedup=speedup,
    )
