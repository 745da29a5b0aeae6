"""What to do next where a study has settled nothing, and what could change its answer."""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from bstune.core.question import Question
from bstune.core.records import Record, Records, Target, last_of_chains
from bstune.core.space import Space
from bstune.recipe.found import eased
from bstune.search.findings import CurvePoint
from bstune.study.critical import is_narrow
from bstune.study.deadline import least_limit
from bstune.study.plan import Plan
from bstune.study.result import (
    Confirmed,
    Critical,
    Improvement,
    ResultWarning,
    Searched,
    Speedup,
    StudyResult,
    Trend,
)
from bstune.study.trials import count_configurations, took_seconds
from bstune.system.console import seconds
from bstune.system.console import sizes as written_sizes

FurtherOptions = dict[str, int | float | str]

# Step times that are known worse than this, relatively, are a warning.
STEP_TIME_WARNING = 0.15
# Steps to the target that evaluations leave this uncertain, relatively, are a warning: where they
# lie 5% apart, they leave 1.5%.
EVALUATION_WARNING = 0.15
# The steps-to-target curve is far from its law, S_min (1 + B_crit/B), where both differ by so many
# times at the batch size nearest to B_crit.
FAR_FROM_LAW = 1.3
# A metric that improved by less than this share over the second half of a run is flat.
FLAT_SHARE = 0.02
# A trial tells what its budget is worth where it ran this share of it; a shorter one was stopped by
# the search, or its schedule ended there.
NEAR_BUDGET = 0.5
# The goal that this share of the trials met is offered where nothing reached the target.
EASIER_SHARE = 0.25
# A budget that was too small is offered so many times as large.
LARGER_BUDGET = 4
# New seeds that are asked for where there are none yet, and the most that are asked for.
FURTHER_SEEDS = 3
MOST_SEEDS = 20
# A range of batch sizes that leaves B_crit open is offered so many times as wide.
WIDER = 4
# The least distance, in log speedup, that new seeds are counted to settle.
LEAST_ROOM = 1e-3


def closest_trial(target: Target, records: Records) -> Record | None:
    """The trial that came closest to the target; None without a metric."""
    tried = [chain for chain in last_of_chains(records) if chain.finite_history]
    return min(tried, key=lambda chain: target.gap(target.best(chain.finite_values)), default=None)


def trend_of_most(question: Question, records: Records) -> Trend:
    """What most trials did; a budget that none of them has come near to was not tried."""
    counts: Counter[Trend] = Counter()
    near_budget = set()
    for chain in last_of_chains(records):
        trend = _trend(question.target, chain)
        counts[trend] += 1
        if chain.steps >= NEAR_BUDGET * question.last_step(chain.batch_size):
            near_budget.add(trend)
    ((most, _),) = counts.most_common(1)
    if most in ("still falling", "flat") and most not in near_budget:
        return "stopped early"
    return most


def _trend(target: Target, record: Record) -> Trend:
    """What a trial did at its end."""
    if record.status == "diverged":
        return "diverged"
    history = record.finite_history
    if not history:
        return "failed"
    until_half = [value for step, value in history if step <= record.steps / 2]
    before = min(until_half or [history[0][1]], key=target.gap)
    improved = target.gap(before) - target.gap(target.best(record.finite_values))
    if improved > FLAT_SHARE * abs(target.gap(before)):
        return "still falling"
    return "flat"


def easier_target(target: Target, records: Records) -> Target:
    """The target that a quarter of the trials met, as :func:`bstune.recipe.found.eased` writes it.

    Args:
        target: that nothing reached.
        records: of which one at least has a metric.
    """
    values = [
        target.best(chain.finite_values)
        for chain in last_of_chains(records)
        if chain.finite_history
    ]
    ranked = sorted(values, key=target.gap)
    goal = ranked[math.ceil(EASIER_SHARE * len(ranked)) - 1]
    return replace(target, goal=eased(goal, target.mode))


def more_time(plan: Plan, records: Records) -> tuple[str, FurtherOptions] | None:
    """What a time limit left out, and the option that gets it.

    None where all trials have run, or without a limit. A limit that was too short for two trials is
    told what two take.
    """
    tried = count_configurations(records)
    if plan.deadline is None or tried >= plan.trials:
        return None
    limit = 2 * plan.deadline.seconds
    if tried > 0:
        return "time for more trials", {"wall_seconds": math.ceil(limit)}
    # The second trial is taken to cost what the baseline did.
    took = [took_seconds(record, records) for record in records]
    least = least_limit(plan.deadline.start, took * 2)
    what = f"time for two trials, which take {seconds(least)} with the start"
    return what, {"wall_seconds": math.ceil(max(limit, least))}


def plan_with_more_seeds(plan: Plan, result: StudyResult, now: float) -> Plan | None:
    """Under a time limit, the plan that runs the seeds that an open answer asks for, or None.

    So a limit is used up before an answer is left open: ``seeds`` are the least then.
    """
    seeds = (result.next_options or {}).get("seeds")
    if plan.deadline is None or now > plan.deadline.end or seeds is None:
        return None
    return replace(plan, seeds=int(seeds))


def remedy(plan: Plan, name: str, trend: Trend, records: Records) -> FurtherOptions:
    """The options that may help where nothing reached the target; none where none would.

    Another budget or range of rates makes another study than the one of this name. Where the trend
    is diverged, one record at least has that status.
    """
    if trend == "stopped early":
        return {"trials": 2 * plan.trials}
    another = f"{name}-2"
    if trend == "diverged":
        lowest = min(record.lr for record in records if record.status == "diverged")
        # Below it by more than two digits are off.
        high = float(f"{0.9 * lowest:.2g}")
        lr_that_stays = plan.baseline.lr if plan.baseline else plan.space.lr_low
        if lr_that_stays < high:
            return {"lr.high": high, "study": another}
    if trend == "still falling":
        budget = plan.question.budget
        if budget.seconds is not None:
            return {"budget.seconds": LARGER_BUDGET * budget.seconds, "study": another}
        larger: FurtherOptions = {"budget.steps": LARGER_BUDGET * budget.steps}
        # One example is the default, which ends no trial.
        if budget.examples > 1:
            larger["budget.examples"] = LARGER_BUDGET * budget.examples
        return {**larger, "study": another}
    return {}


def what_is_missing(
    plan: Plan,
    comparison: Speedup | Improvement | None,
    other: Confirmed | None,
    baseline: Confirmed | None,
    records: Records,
) -> tuple[str, FurtherOptions]:
    """Under not yet, where a trial has reached the end: what is missing, and the options for it.

    Args:
        plan: of the study.
        comparison: of ``other`` with ``baseline``; None where it is not known.
        other: the best configuration but the baseline.
        baseline: None where there is none.
        records: of all trials.
    """
    of_time = more_time(plan, records)
    more_trials: FurtherOptions = {"trials": 2 * plan.trials}
    if of_time is not None:
        _, more_trials = of_time
    that_ends = plan.question.that_ends
    if other is None:
        return of_time or (f"another configuration {that_ends}", more_trials)
    if other.runs >= plan.seeds and other.is_bound:
        return f"a configuration {that_ends} on new seeds", more_trials
    runs = other.runs
    if baseline is not None:
        runs = min(runs, baseline.runs)
    if runs < plan.seeds:
        # A time limit left them out, the study still runs, or it was asked another question.
        if plan.deadline is None:
            return "new seeds", {"seeds": plan.seeds}
        return "time for new seeds", {"wall_seconds": math.ceil(2 * plan.deadline.seconds)}
    if comparison is None:
        return "new seeds", {"seeds": plan.seeds + FURTHER_SEEDS}
    seeds = seeds_to_settle(comparison, runs)
    if seeds > MOST_SEEDS:
        return "more trials", more_trials
    return "more new seeds", {"seeds": seeds}


def seeds_to_settle(comparison: Speedup | Improvement, seeds: int) -> int:
    """How many new seeds may narrow the interval to one side of what decides the verdict.

    Its half-width falls as the root of their number.
    """
    half_width, distance = comparison.margins
    # All runs may be equal.
    room = max(distance, LEAST_ROOM * half_width) or math.inf
    return max(seeds + 1, math.ceil(seeds * (half_width / room) ** 2))


def searched_range(space: Space, records: Records) -> Searched:
    """The batch sizes that may be tried, in octaves, and which of these no trial tells of.

    An octave is a factor of two, or what is nearest to it in a whole number of equal parts.
    """
    low, high = math.log2(space.low), math.log2(space.high)
    count = max(1, round(high - low))
    width = (high - low) / count or 1.0
    filled = set()
    for record in records:
        if record.reached:
            octave = int((math.log2(record.batch_size) - low) / width)
            filled.add(min(octave, count - 1))
    middles = []
    for octave in range(count):
        if octave not in filled:
            middles.append(space.snap(2.0 ** (low + (octave + 0.5) * width)))
    return Searched(
        low=space.low, high=space.high, octaves=count, reached=len(filled), unreached=tuple(middles)
    )


def what_narrows_b_crit(
    plan: Plan, name: str, critical: Critical, searched: Searched, records: Records
) -> tuple[str, FurtherOptions] | None:
    """Under ``curve``: what narrows B_crit's interval, and its options; None where it is narrow.

    An end that is open at the last octave of the range asks for a larger range, which makes another
    study; not where larger sizes do not fit.
    """
    ends_of_critical = critical.interval
    low, high = searched.low, searched.high
    is_capped = plan.fits[1] is not None or any(record.is_unfit for record in records)
    if ends_of_critical.high is None and critical.largest * 2 > high and not is_capped:
        high *= WIDER
    if ends_of_critical.low is None and critical.smallest < 2 * low:
        low = max(low // WIDER // plan.space.multiple, 1) * plan.space.multiple
    if (low, high) != (searched.low, searched.high):
        options: FurtherOptions = {"batch_size.low": low, "batch_size.high": high}
        return f"batch sizes {low:,} to {high:,}", {**options, "study": f"{name}-2"}
    if is_narrow(ends_of_critical):
        return None
    trials = 2 * plan.trials
    return more_time(plan, records) or (f"more trials, {trials} in all", {"trials": trials})


def warnings_of(
    plan: Plan,
    best: Confirmed | None,
    critical: Critical,
    points: Sequence[CurvePoint],
    searched: Searched,
    records: Records,
) -> tuple[ResultWarning, ...]:
    """Warnings about the result, the most important first.

    An octave without a trial that reached the target matters where B_crit lies in it. Elsewhere
    ``time`` and ``steps`` leave octaves out rightly, and ``curve`` says so in its rows.
    """
    found = list(_warnings_of_measurements(plan, best, records))
    if critical.interval.value is not None:
        found += _warnings_of_b_crit(
            plan.space, critical, critical.interval.value, points, searched
        )
    return tuple(found)


def _warnings_of_measurements(
    plan: Plan, best: Confirmed | None, records: Records
) -> Iterator[ResultWarning]:
    """Warnings of steps and step times that are not known well."""
    error = _evaluation_error(best, records)
    if error > EVALUATION_WARNING:
        yield ResultWarning(
            kind="evaluations",
            fix="validate on fewer examples, or choose a harder target",
            state=f"evaluations lie far apart, and steps are uncertain to {100 * error:.0f}%",
        )
    if best is None or not plan.question.counts_seconds:
        return
    if best.step_seconds_error > STEP_TIME_WARNING:
        yield ResultWarning(
            kind="step times",
            fix="rerun on an idle machine",
            state=f"step times are uncertain to {100 * best.step_seconds_error:.0f}%",
        )


def _warnings_of_b_crit(
    space: Space, critical: Critical, value: float, points: Sequence[CurvePoint], searched: Searched
) -> Iterator[ResultWarning]:
    """Warnings of a B_crit that has a value."""
    ratio = off_law(critical, points)
    if ratio > FAR_FROM_LAW:
        sizes = sorted({space.snap(value / 2), space.snap(value * 2)})
        yield ResultWarning(
            kind="far from the law",
            fix=f"try {written_sizes(sizes)}",
            state=f"the curve is {ratio:.1f}x off its law at the critical batch size",
        )
    half_octave = math.sqrt(2.0)
    sizes = [it for it in searched.unreached if it / half_octave < value < it * half_octave]
    if sizes:
        yield ResultWarning(
            kind="octave without a trial",
            fix=f"try {written_sizes(sizes)}",
            state="the critical batch size is less sure, as no trial near it reached the target",
        )


def _evaluation_error(best: Confirmed | None, records: Records) -> float:
    """Relative standard deviation of steps that evaluations leave: the largest median.

    It is that of the search's trials, or of the best's or the baseline's new seeds; 0 where none of
    these has reached the target.
    """
    counted = {record.number for record in records if record.role == "baseline"}
    if best is not None:
        counted.add(best.number)
    groups = defaultdict(list)
    for record in records:
        if record.reached and (record.repeats is None or record.repeats in counted):
            groups[record.repeats].append(record.steps_error)
    return max(map(statistics.median, groups.values()), default=0.0)


def off_law(critical: Critical, points: Sequence[CurvePoint]) -> float:
    """How many times the curve is off its law at B_crit, either way; at least 1.

    Args:
        critical: with a value.
        points: of the curve; the nearest to B_crit counts.
    """
    value = critical.interval.value
    if value is None or critical.s_min is None:
        raise ValueError("B_crit has no value")
    nearest = min(points, key=lambda point: abs(math.log(point.batch_size / value)))
    law_steps = critical.s_min * (1.0 + value / nearest.batch_size)
    return max(nearest.steps / law_steps, law_steps / nearest.steps)
