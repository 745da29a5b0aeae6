"""From records to the typed result: each value is computed once, here."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from bstune import __version__
from bstune.core.records import Record, StepTime
from bstune.core.step_time import StepTimeLaw
from bstune.search.findings import (
    CurvePoint,
    curve,
    curve_sizes,
    lr_exponent_quantiles,
    near_optimal,
    share_reaching,
)
from bstune.search.posterior import Posterior, sample_posterior
from bstune.study.advice import closest_trial, easier_target, missing, remedy, warnings_of
from bstune.study.confirm import (
    Run,
    best_confirmed,
    median_run,
    pooled_deviation,
    speedup_of,
    verdict_of,
)
from bstune.study.critical import critical_batch_size
from bstune.study.plan import (
    Plan,
    candidates_of,
    count_configurations,
    least_steps,
    new_seeds_of,
    step_time_of,
)
from bstune.study.result import Confirmed, Interval, LrAlone, Speedup, Spent, StudyResult, Verdict

# Draws and moves of the posterior that the answer stands on.
DRAWS = 600
MOVES = 6


@dataclass(frozen=True)
class Study:
    """What the result says of a study beside its records.

    Args:
        plan: that it followed.
        workload, name: of the workload and of the study.
        device, threads: that trained.
        command: what runs the workload with further options, as a command or a call.
        train: what trains a batch size, a rate and, where it is chosen, a schedule's length.
    """

    plan: Plan
    workload: str
    name: str
    device: str
    threads: int
    command: Callable[[Mapping[str, object]], str]
    train: Callable[[int, float, int | None], str]


def analyse(study: Study, records: Sequence[Record]) -> StudyResult:
    """Compute a study's result from its records."""
    if any(record.reached for record in records):
        return _result_if_reached(study, records)
    return _result_if_not_reached(study, records)


def _common_fields(study: Study, records: Sequence[Record]) -> dict[str, Any]:
    """The fields that every result has."""
    question = study.plan.question
    return {
        "bstune": __version__,
        "workload": study.workload,
        "study": study.name,
        "objective": question.objective,
        "target": question.target,
        "device": study.device,
        "threads": study.threads,
        "seeds": study.plan.seeds,
        "configurations": count_configurations(records),
        "trials": len(records),
        "spent": Spent(
            training=sum(record.train_seconds for record in records),
            other=sum(record.other_seconds for record in records),
        ),
    }


def _result_if_not_reached(study: Study, records: Sequence[Record]) -> StudyResult:
    """The result where nothing reached the target: the closest, and what may help.

    Another target, budget or range of rates makes another study.
    """
    plan = study.plan
    closest = closest_trial(plan.question.target, records)
    fields = _common_fields(study, records) | {"verdict": "not yet", "reached": False}
    messages = [record.message for record in records if not record.history]
    if closest is None:
        return StudyResult(**fields, missing=messages[-1])
    if closest.trend == "failed":
        fields["missing"] = messages[-1]
    easier = easier_target(plan.question.target, records)
    options = remedy(plan, closest.trend, records)
    record = next(record for record in records if record.number == closest.number)
    return StudyResult(
        **fields,
        best=_confirmed(records, record, step_time_of(plan, records)),
        closest=closest,
        easier_goal=easier.goal,
        easier=study.command({"target": str(easier), "study": f"{study.name}-easier"}),
        next=study.command({**options, "study": f"{study.name}-2"}) if options else None,
    )


def _result_if_reached(study: Study, records: Sequence[Record]) -> StudyResult:
    """The result where a trial reached the target."""
    plan = study.plan
    step_time = step_time_of(plan, records)
    posterior = sample_posterior(
        plan.question,
        plan.space,
        records,
        seed=plan.seed,
        misfit=True,
        draws=DRAWS,
        moves=MOVES,
    )
    other, baseline, noise = _challenger_and_baseline(plan, records, step_time)
    other, baseline = _with_share(other, posterior), _with_share(baseline, posterior)
    speedup = None
    if other is not None and baseline is not None and other.runs and baseline.runs:
        speedup = _speedup(other, baseline, noise)
    verdict: Verdict = "not yet"
    if other is not None and other.runs:
        verdict = verdict_of(speedup, plan.baseline is not None, other.is_bound)
    best = _best(verdict, other, baseline, speedup)

    points = curve(posterior, step_time, curve_sizes(plan.space))
    critical = critical_batch_size(posterior, records, plan.seed)

    fields = _common_fields(study, records)
    if verdict == "not yet":
        what, options = missing(plan, speedup, other, baseline)
        fields |= {"missing": what, "next": study.command(options)}
    if best is not None and verdict in ("switch", "use"):
        fields["train"] = study.train(best.batch_size, best.lr, best.schedule_steps)
    if best is not None and best is baseline:
        fields["other"] = other
    return StudyResult(
        **fields,
        verdict=verdict,
        reached=True,
        best=best,
        baseline=baseline,
        baseline_limit=_baseline_limit(baseline),
        speedup=speedup,
        near_optimal=_near_optimal(points, plan, step_time, best),
        lr_alone=_rate_alone(verdict, posterior, step_time, best, baseline, speedup),
        critical=critical,
        lr_exponent=_lr_exponent(posterior),
        curve=points,
        warnings=warnings_of(best, critical, points, plan.space),
    )


def _challenger_and_baseline(
    plan: Plan, records: Sequence[Record], step_time: StepTime
) -> tuple[Confirmed | None, Confirmed | None, float]:
    """The best other configuration, the baseline, and the deviation from seed to seed."""
    candidates, runs, noise = candidates_of(plan, records)
    leader = best_confirmed(candidates, runs, noise)
    other = None
    baseline = None
    for record in records:
        if record.number == leader:
            other = _confirmed(records, record, step_time)
        if record.role == "baseline":
            baseline = _confirmed(records, record, step_time)
    if other is not None and baseline is not None:
        # What is compared ran on the same new seeds.
        common = set(other.seeds) & set(baseline.seeds)
        if common:
            shared = [
                record for record in records if record.repeats is None or record.seed in common
            ]
            by_number = {record.number: record for record in records}
            other = _confirmed(shared, by_number[other.number], step_time)
            baseline = _confirmed(shared, by_number[baseline.number], step_time)
    return other, baseline, noise


def _confirmed(records: Sequence[Record], record: Record, step_time: StepTime) -> Confirmed:
    """A configuration with its runs on new seeds; before the first, its steps are the trial's."""
    runs = new_seeds_of(records, record.number)
    tau = step_time(record.batch_size)
    # Recorded runs tell their step times exactly.
    error = 0.0
    if isinstance(step_time, StepTimeLaw):
        error = step_time.error(record.batch_size)
    measured = [Run(float(least_steps(run)), run.reached) for run in runs or [record]]
    steps, is_bound = median_run(measured)
    return Confirmed(
        batch_size=record.batch_size,
        lr=record.lr,
        values=record.values,
        number=record.number,
        seeds=tuple(run.seed for run in runs),
        runs_steps=tuple(least_steps(run) for run in runs),
        runs_status=tuple(run.status for run in runs),
        schedule_steps=(runs or [record])[0].schedule_steps,
        steps=steps,
        seconds=steps * tau,
        is_bound=is_bound,
        step_seconds=tau,
        step_seconds_error=error,
    )


def _with_share(confirmed: Confirmed | None, posterior: Posterior) -> Confirmed | None:
    """Add the predicted share of seeds where a schedule's length decides on it."""
    told = [chain.number for chain in posterior.chains]
    if confirmed is None or confirmed.schedule_steps is None or confirmed.number not in told:
        return confirmed
    share = share_reaching(posterior, confirmed.number, confirmed.schedule_steps)
    return confirmed.model_copy(update={"predicted_share": share})


def _runs(confirmed: Confirmed) -> list[Run]:
    pairs = zip(confirmed.runs_steps, confirmed.runs_status, strict=True)
    return [Run(steps * confirmed.step_seconds, status == "reached") for steps, status in pairs]


def _speedup(other: Confirmed, baseline: Confirmed, noise: float) -> Speedup | None:
    """The speedup on new seeds; None for two bounds, neither of which is known to be the faster."""
    if other.is_bound and baseline.is_bound:
        return None
    groups = []
    for confirmed in (other, baseline):
        runs = zip(confirmed.runs_steps, confirmed.runs_status, strict=True)
        groups.append([math.log(steps) for steps, status in runs if status == "reached"])
    error = 0.0
    if other.batch_size != baseline.batch_size:
        error = math.hypot(other.step_seconds_error, baseline.step_seconds_error)
    return speedup_of(_runs(other), _runs(baseline), pooled_deviation(groups, noise), error)


def _best(
    verdict: Verdict, other: Confirmed | None, baseline: Confirmed | None, speedup: Speedup | None
) -> Confirmed | None:
    """What the first line names: the faster one by medians; under keep the baseline."""
    if verdict == "keep" or other is None:
        return baseline
    is_slower = speedup is not None and speedup.value < 1.0 and not speedup.at_least
    if verdict == "not yet" and is_slower:
        return baseline
    return other


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


def _rate_alone(
    verdict: Verdict,
    posterior: Posterior,
    step_time: StepTime,
    best: Confirmed | None,
    baseline: Confirmed | None,
    speedup: Speedup | None,
) -> LrAlone | None:
    """What the best rate at the baseline's own batch size is predicted to gain.

    None where the best is there, or gains no more.
    """
    if verdict != "switch" or best is None or baseline is None or speedup is None:
        return None
    (there,) = curve(posterior, step_time, [baseline.batch_size])
    gain = baseline.steps / there.steps
    if best.batch_size == baseline.batch_size or not 1.0 < gain < speedup.value:
        return None
    return LrAlone(lr=float(f"{there.lr:.3g}"), speedup=gain)


def _lr_exponent(posterior: Posterior) -> Interval:
    low, value, high = lr_exponent_quantiles(posterior)
    return Interval(value=value, low=low, high=high)
