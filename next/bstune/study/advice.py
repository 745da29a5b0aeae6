"""What to do next where a study has settled nothing, and what could change its answer."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from bstune.core.records import Record, Target, ends
from bstune.core.space import Configuration, Space
from bstune.search.findings import CurvePoint
from bstune.study.confirm import NOT_WORTH
from bstune.study.plan import Plan
from bstune.study.result import Closest, Confirmed, Critical, ResultWarning, Speedup

Trend = Literal["still falling", "flat", "diverged", "failed"]
Options = dict[str, object]

# Step times that are known worse than this, relatively, are a warning.
STEP_TIME_WARNING = 0.15
# The steps-to-target curve is far from its law, S_min (1 + B_crit/B), where both differ by so many
# times at the batch size nearest to B_crit.
FAR_FROM_LAW = 1.3
# A metric that improved by less than this share over the second half of a run is flat.
FLAT_SHARE = 0.02
# The goal that this share of the trials met is offered where nothing reached the target.
EASIER_SHARE = 0.25
# A budget that was too small is offered so many times as large.
LARGER_BUDGET = 4
# New seeds that are asked for where there are none yet, and the most that are asked for.
FURTHER_SEEDS = 3
MOST_SEEDS = 20
# The least distance, in log speedup, that new seeds are counted to settle.
LEAST_ROOM = 1e-3


def closest_trial(target: Target, records: Sequence[Record]) -> Closest | None:
    """The trial that came closest to the target, and what most did; None without a metric."""
    chains = ends(list(records))
    tried = [chain for chain in chains if chain.finite_history]
    if not tried:
        return None
    record = min(tried, key=lambda chain: target.gap(_best_value(target, chain)))
    trends = Counter(_trend(target, chain) for chain in chains)
    return Closest(
        configuration=Configuration(
            batch_size=record.batch_size, lr=record.lr, values=record.values
        ),
        number=record.number,
        value=_best_value(target, record),
        trend=trends.most_common(1)[0][0],
    )


def _best_value(target: Target, record: Record) -> float:
    return min((value for _, value in record.finite_history), key=target.gap)


def _trend(target: Target, record: Record) -> Trend:
    """What a trial did at its end."""
    if record.status == "diverged":
        return "diverged"
    history = record.finite_history
    if not history:
        return "failed"
    until_half = [value for step, value in history if step <= record.steps / 2]
    before = min(until_half or [history[0][1]], key=target.gap)
    improved = target.gap(before) - target.gap(_best_value(target, record))
    if improved > FLAT_SHARE * abs(target.gap(before)):
        return "still falling"
    return "flat"


def easier_target(target: Target, records: Sequence[Record]) -> Target:
    """The target that a quarter of the trials met; its goal has two digits.

    Args:
        target: that nothing reached.
        records: of which one at least has a metric.
    """
    chains = ends(list(records))
    values = [_best_value(target, chain) for chain in chains if chain.finite_history]
    ranked = sorted(values, key=target.gap)
    goal = ranked[math.ceil(EASIER_SHARE * len(ranked)) - 1]
    unit = 10.0 ** (math.floor(math.log10(abs(goal) or 1.0)) - 1)
    # The second digit is rounded towards the easier side.
    rounding = math.ceil if target.mode == "min" else math.floor
    return Target(target.metric, float(f"{rounding(goal / unit) * unit:.6g}"), target.mode)


def remedy(plan: Plan, trend: Trend, records: Sequence[Record]) -> Options:
    """The options that may help where nothing reached the target; other ones make another study."""
    if trend == "diverged":
        lowest = float(f"{min(record.lr for record in records if record.status == 'diverged'):.2g}")
        is_allowed = plan.baseline is None or plan.baseline.lr < lowest
        return {"lr.high": lowest} if is_allowed else {}
    if trend == "still falling":
        budget = plan.question.budget
        return {
            "budget.steps": LARGER_BUDGET * budget.steps,
            "budget.examples": LARGER_BUDGET * budget.examples,
        }
    return {}


def missing(
    plan: Plan, speedup: Speedup | None, other: Confirmed | None, baseline: Confirmed | None
) -> tuple[str, Options]:
    """Under not yet, where the target was reached: what is missing, and the options that get it.

    Args:
        plan: of the study.
        speedup: of ``other`` over ``baseline``; None where it is not known.
        other: the best configuration but the baseline.
        baseline: None where there is none.
    """
    more_trials: Options = {"trials": 2 * plan.trials}
    if other is None:
        return "another configuration that reaches the target", more_trials
    if other.runs == plan.seeds and other.is_bound:
        return "a configuration that reaches the target on new seeds", more_trials
    runs = other.runs if baseline is None else min(other.runs, baseline.runs)
    if plan.deadline is not None and runs < plan.seeds:
        return "time for new seeds", {"wall_seconds": round(2 * plan.deadline.seconds)}
    if speedup is None:
        return "new seeds", {"seeds": plan.seeds + FURTHER_SEEDS}
    seeds = seeds_to_settle(speedup, plan.seeds)
    if seeds > MOST_SEEDS:
        return "more trials", more_trials
    return "more new seeds", {"seeds": seeds}


def seeds_to_settle(speedup: Speedup, seeds: int) -> int:
    """How many new seeds may narrow the interval to one side of 1 or of 1.25.

    Its half-width falls as the root of their number.
    """
    half_width = math.log(speedup.value / speedup.low)
    above_1 = math.log(speedup.value)
    below_not_worth = math.log(NOT_WORTH / speedup.value)
    room = max(above_1, below_not_worth, LEAST_ROOM)
    return max(seeds + 1, math.ceil(seeds * (half_width / room) ** 2))


def warnings_of(
    best: Confirmed | None, critical: Critical | None, points: Sequence[CurvePoint], space: Space
) -> tuple[ResultWarning, ...]:
    """Warnings about the result, the most important first."""
    found = []
    if best is not None and best.step_seconds_error > STEP_TIME_WARNING:
        found.append(
            ResultWarning(
                kind="step times",
                fix="rerun on an idle machine",
                state=f"step times are uncertain to {100 * best.step_seconds_error:.0f}%",
            )
        )
    if critical is None or critical.interval.value is None or critical.s_min is None:
        return tuple(found)
    value = critical.interval.value
    nearest = min(points, key=lambda point: abs(math.log(point.batch_size / value)))
    law_steps = critical.s_min * (1.0 + value / nearest.batch_size)
    ratio = max(nearest.steps / law_steps, law_steps / nearest.steps)
    if ratio > FAR_FROM_LAW:
        below = space.snap(value / 2)
        above = space.snap(value * 2)
        found.append(
            ResultWarning(
                kind="far from the law",
                fix=f"add trials near batch sizes {below} and {above}",
                state=f"the curve is {ratio:.1f}x off its law at the critical batch size",
            )
        )
    return tuple(found)
