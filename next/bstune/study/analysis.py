"""From records to the typed result: each value is computed once, here."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from bstune import __version__
from bstune.core.records import Record, StepTime, Target, ends
from bstune.core.space import Configuration
from bstune.core.step_time import StepTimeLaw
from bstune.search.findings import (
    CurvePoint,
    curve,
    curve_sizes,
    lr_exponent_quantiles,
    near_optimal,
)
from bstune.search.posterior import Posterior, sample_posterior
from bstune.study.confirm import (
    Run,
    confirmation_leader,
    median_run,
    pooled_deviation,
    speedup_of,
    verdict_of,
)
from bstune.study.critical import critical_batch_size
from bstune.study.plan import Plan, candidates_of, new_seeds_of, step_time_of
from bstune.study.result import (
    Closest,
    Confirmed,
    Critical,
    Doubt,
    Interval,
    RateAlone,
    Speedup,
    Spent,
    StudyResult,
    Verdict,
)

# Draws and moves of the posterior that the answer stands on.
DRAWS = 600
MOVES = 6
# Step times that are known worse than this, relatively, are a warning.
STEP_TIME_WARNING = 0.15
# The curve is far from the law where both differ by so many times at B_crit.
FAR_FROM_LAW = 1.3
# A metric that improved by less than this share over the second half of a run is flat.
FLAT_SHARE = 0.02
# The goal that this share of the trials met is offered where nothing reached the target.
EASIER_SHARE = 0.25
# The most new seeds that are asked for to settle a verdict.
MOST_SEEDS = 20
# Speedups that a verdict has to tell apart: switch above 1, keep below 1.25.
SWITCH_ABOVE = 1.0
KEEP_BELOW = 1.25


@dataclass(frozen=True)
class Study:
    """What the result says of a study beside its records.

    Args:
        plan: that it followed.
        workload, name: of the workload and of the study.
        device, threads: that trained.
        command: what runs the workload with further options, as a command or a call.
        train: what trains a batch size and a rate.
    """

    plan: Plan
    workload: str
    name: str
    device: str
    threads: int
    command: Callable[[Mapping[str, object]], str]
    train: Callable[[int, float], str]


def analyse(study: Study, records: Sequence[Record]) -> StudyResult:
    """Compute a study's result from its records."""
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
    candidates, runs_of, noise = candidates_of(plan, records)
    leader = confirmation_leader(candidates, runs_of, noise)
    by_number = {record.number: record for record in records}
    other = None if leader is None else _confirmed(records, by_number[leader], step_time)
    of_baseline = next((record for record in records if record.role == "baseline"), None)
    baseline = None if of_baseline is None else _confirmed(records, of_baseline, step_time)
    speedup = None
    if other is not None and baseline is not None and other.runs and baseline.runs:
        speedup = _speedup(other, baseline, noise)
    reached = any(record.reached for record in records)
    closest = None if reached else _closest(plan.question.target, records)
    verdict: Verdict = "not yet"
    if other is not None and other.runs:
        verdict = verdict_of(speedup, plan.baseline is not None, other.is_bound)
    best = _best(verdict, other, baseline, speedup)
    if closest is not None:
        best = _confirmed(records, by_number[closest.number], step_time)
    points = curve(posterior, step_time, curve_sizes(plan.space)) if reached else ()
    critical = critical_batch_size(posterior, records, plan.seed)
    missing: str | None = None
    options: dict[str, object] = {}
    if verdict == "not yet" and reached:
        missing, options = _missing(speedup, best, plan, records)
    easier_goal = None
    if closest is not None:
        easier_goal = _easier_goal(plan.question.target, records)
        missing, options = _remedy(study, closest, records)
    return StudyResult(
        bstune=__version__,
        workload=study.workload,
        study=study.name,
        objective=plan.question.objective,
        target=plan.question.target,
        device=study.device,
        threads=study.threads,
        seeds=plan.seeds,
        configurations=sum(
            record.role == "search" and record.resumed_from is None for record in records
        ),
        trials=len(records),
        verdict=verdict,
        reached=reached,
        best=best,
        other=other if best is not None and best is baseline else None,
        baseline=baseline,
        baseline_limit=_baseline_limit(plan, baseline),
        speedup=speedup,
        near_optimal=_near_optimal(points, plan, step_time, best),
        rate_alone=_rate_alone(verdict, posterior, step_time, best, baseline, speedup),
        critical=critical,
        lr_exponent=_lr_exponent(posterior) if reached else None,
        curve=points,
        closest=closest,
        easier_goal=easier_goal,
        easier=None if easier_goal is None else _easier(study, easier_goal),
        missing=missing,
        next=study.command(options) if options else None,
        warnings=_warnings(best, critical, points, plan),
        spent=Spent(
            training=sum(record.train_seconds for record in records),
            other=sum(record.other_seconds for record in records),
        ),
        train=_train(study, verdict, best),
    )


def _confirmed(records: Sequence[Record], record: Record, step_time: StepTime) -> Confirmed:
    """A configuration with its runs on new seeds; before the first, its steps are the trial's."""
    runs = new_seeds_of(records, record.number)
    tau = step_time(record.batch_size)
    error = step_time.error(record.batch_size) if isinstance(step_time, StepTimeLaw) else 0.0
    measured = [Run(float(_steps(run)), run.reached) for run in runs or [record]]
    steps, is_bound = median_run(measured)
    return Confirmed(
        batch_size=record.batch_size,
        lr=record.lr,
        values=record.values,
        number=record.number,
        seeds=tuple(run.seed for run in runs),
        runs_steps=tuple(_steps(run) for run in runs),
        runs_status=tuple(run.status for run in runs),
        steps=steps,
        seconds=steps * tau,
        is_bound=is_bound,
        step_seconds=tau,
        step_seconds_error=error,
    )


def _steps(run: Record) -> int:
    """Steps to the target, or those that a run was seen not to reach it in.

    A run that diverged would not have reached it in all that it was allowed.
    """
    return run.max_steps if run.status == "diverged" else run.steps


def _runs(confirmed: Confirmed) -> list[Run]:
    pairs = zip(confirmed.runs_steps, confirmed.runs_status, strict=True)
    return [Run(steps * confirmed.step_seconds, status == "reached") for steps, status in pairs]


def _speedup(other: Confirmed, baseline: Confirmed, noise: float) -> Speedup:
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
    if verdict == "not yet" and speedup is not None and speedup.value < 1.0:
        return baseline
    return other


def _baseline_limit(plan: Plan, baseline: Confirmed | None) -> Literal["budget", "stopped"] | None:
    """Why the baseline's runs ended that missed the target."""
    if baseline is None or baseline.reached == baseline.runs:
        return None
    missed = "missed" in baseline.runs_status
    return "budget" if missed else "stopped"


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
) -> RateAlone | None:
    """What the best rate at the baseline's own batch size is predicted to gain.

    None where the best is there, or gains no more.
    """
    if verdict != "switch" or best is None or baseline is None or speedup is None:
        return None
    (there,) = curve(posterior, step_time, [baseline.batch_size])
    gain = baseline.steps / there.steps
    if best.batch_size == baseline.batch_size or not 1.0 < gain < speedup.value:
        return None
    return RateAlone(lr=float(f"{there.lr:.3g}"), speedup=gain)


def _lr_exponent(posterior: Posterior) -> Interval:
    low, value, high = lr_exponent_quantiles(posterior)
    return Interval(value=value, low=low, high=high)


def _closest(target: Target, records: Sequence[Record]) -> Closest | None:
    """The trial that came closest to the target, and what most trials did."""
    chains = ends(list(records))
    tried = [record for record in chains if record.finite_history]
    trends = Counter(_trend(target, record) for record in chains)
    if not tried or not trends:
        return None
    value_of = {record.number: _best_value(target, record) for record in tried}
    record = min(tried, key=lambda one: target.gap(value_of[one.number]))
    return Closest(
        configuration=Configuration(
            batch_size=record.batch_size, lr=record.lr, values=record.values
        ),
        number=record.number,
        value=value_of[record.number],
        trend=trends.most_common(1)[0][0],
    )


def _best_value(target: Target, record: Record) -> float:
    return min((value for _, value in record.finite_history), key=target.gap)


def _trend(
    target: Target, record: Record
) -> Literal["still falling", "flat", "diverged", "failed"]:
    """What a trial did at its end."""
    if record.status == "diverged":
        return "diverged"
    history = record.finite_history
    if not history:
        return "failed"
    half = [value for step, value in history if step <= record.steps / 2]
    before = min(half or [history[0][1]], key=target.gap)
    improved = target.gap(before) - target.gap(_best_value(target, record))
    return "still falling" if improved > FLAT_SHARE * abs(target.gap(before)) else "flat"


def _easier_goal(target: Target, records: Sequence[Record]) -> float | None:
    """A goal that a quarter of the trials met, in two digits."""
    values = [
        _best_value(target, record) for record in ends(list(records)) if record.finite_history
    ]
    if not values:
        return None
    ranked = sorted(values, key=target.gap)
    goal = ranked[math.ceil(EASIER_SHARE * len(ranked)) - 1]
    # The second digit is rounded towards the easier side.
    unit = 10.0 ** (math.floor(math.log10(abs(goal) or 1.0)) - 1)
    rounding = math.ceil if target.mode == "min" else math.floor
    return float(f"{rounding(goal / unit) * unit:.6g}")


def _easier(study: Study, goal: float) -> str:
    """The command for an easier target, which is another study."""
    target = replace(study.plan.question.target, goal=goal)
    return study.command({"target": str(target), "study": f"{study.name}-2"})


def _remedy(
    study: Study, closest: Closest, records: Sequence[Record]
) -> tuple[str | None, dict[str, object]]:
    """Where nothing reached the target: the error, or the options that may help.

    Other rates and budgets make another study.
    """
    other = {"study": f"{study.name}-2"}
    budget = study.plan.question.budget
    if closest.trend == "diverged":
        diverged = [record.lr for record in records if record.status == "diverged"]
        return None, {"lr.high": float(f"{min(diverged):.2g}"), **other}
    if closest.trend == "still falling":
        larger = {"budget.steps": 4 * budget.steps, "budget.examples": 4 * budget.examples}
        return None, {**larger, **other}
    if closest.trend == "failed":
        messages = [record.message for record in records if record.message]
        return messages[-1] if messages else None, {}
    return None, {}


def _missing(
    speedup: Speedup | None, best: Confirmed | None, plan: Plan, records: Sequence[Record]
) -> tuple[str, dict[str, object]]:
    """Under not yet, where the target was reached: what is missing, and the options that get it."""
    more_trials: dict[str, object] = {"trials": 2 * plan.trials}
    others = any(record.reached and record.role == "search" for record in records)
    if speedup is None and not others:
        return "another configuration that reaches the target", more_trials
    if plan.deadline is not None and speedup is None:
        return "time for new seeds", {"wall_seconds": round(2 * plan.deadline.seconds)}
    if best is not None and best.is_bound:
        return "a configuration that reaches the target on new seeds", more_trials
    seeds = plan.seeds + 3 if speedup is None else _seeds_to_settle(speedup, plan.seeds)
    if seeds <= MOST_SEEDS:
        return "more new seeds", {"seeds": seeds}
    return "more trials", more_trials


def _seeds_to_settle(speedup: Speedup, seeds: int) -> int:
    """How many new seeds narrow the interval to one side of 1 or of 1.25."""
    end = speedup.high if speedup.low is None else speedup.low
    if end is None or speedup.value <= 0.0:
        return 2 * seeds
    half_width = abs(math.log(end / speedup.value))
    room = max(math.log(speedup.value / SWITCH_ABOVE), math.log(KEEP_BELOW / speedup.value), 1e-3)
    return max(seeds + 1, math.ceil(seeds * (half_width / room) ** 2))


def _warnings(
    best: Confirmed | None, critical: Critical | None, points: Sequence[CurvePoint], plan: Plan
) -> tuple[Doubt, ...]:
    """What could change the answer, the most important first."""
    found = []
    if best is not None and best.step_seconds_error > STEP_TIME_WARNING:
        share = f"{100 * best.step_seconds_error:.0f}%"
        found.append(
            Doubt(
                kind="step times",
                fix="rerun on an idle machine",
                state=f"step times are uncertain to {share}",
            )
        )
    if critical is None or critical.interval.value is None or critical.s_min is None:
        return tuple(found)
    value = critical.interval.value
    nearest = min(points, key=lambda point: abs(math.log(point.batch_size / value)))
    of_law = critical.s_min * (1.0 + value / nearest.batch_size)
    off = max(nearest.steps / of_law, of_law / nearest.steps)
    if off > FAR_FROM_LAW:
        below, above = plan.space.snap(value / 2), plan.space.snap(value * 2)
        found.append(
            Doubt(
                kind="far from the law",
                fix=f"add trials near batch sizes {below} and {above}: trials={2 * plan.trials}",
                state=f"the curve is {off:.1f}x off its law at the critical batch size",
            )
        )
    return tuple(found)


def _train(study: Study, verdict: Verdict, best: Confirmed | None) -> str | None:
    """What trains the best; nothing to train under keep, or where nothing is shown."""
    if best is None or verdict not in ("switch", "use"):
        return None
    return study.train(best.batch_size, best.lr)
