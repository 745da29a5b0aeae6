"""``workload.target.value=auto``: the target is what the user's own configuration comes to.

Trial 0 runs the baseline alone, to the end of its budget. What its metric has come to there is the
study's target, made easier by what chance is worth: the same quality as today, sooner. It is stored
with the study before the trial's record is, and stays; the trial's record is that of a trial which
ended where it met the target.

What chance is worth is the largest of three: the scatter of the last evaluations; how much the
metric gains while the steps grow by a factor of ``e^SEED_SCATTER``. By so much the steps to one
value differ from seed to seed (two standard deviations of the prior's middle), so that a fresh seed
of the same configuration comes to the target within the budget, too; and, where a schedule ends
with the trial and the metric's ideal value is known, a share of the distance from that: such a
metric flattens out, and seeds differ all the same. (The slope there is no worth of steps, as fewer
steps are another schedule. It tells by how much the metric still moves.)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import optuna

from bstune.core.errors import StudyError
from bstune.core.records import Mode, Target, TrialResult, sign_of
from bstune.options import with_option
from bstune.search.ruler import choose_scale
from bstune.study.prepared import OwnGoal, PreparedStudy
from bstune.study.storage.attributes import GOAL

# The share of a trial's steps from which on its evaluations say what it comes to.
LAST_SHARE = 0.5
# The fewest evaluations that say it: two would always lie on a line.
FEWEST = 3
# Standard deviation of log steps to one value, from seed to seed.
SEED_SCATTER = 0.25
# How far one seed's last value may lie from another's where a schedule ends with the trial, as a
# share of the distance from the ideal value: 3 to 5% in the middle, on two projects and two
# recorded tables.
ANNEALED_SCATTER = 0.05
# Significant digits of a goal, which is read and typed.
DIGITS = 4


@dataclass(frozen=True)
class OwnResult:
    """What a trial came to at the end of its budget.

    Args:
        value: of the metric, by a line in log steps through the last evaluations.
        scatter: standard deviation of these evaluations about the line.
        goal: ``value``, made easier by what chance is worth. An evaluation of the trial met it.
    """

    value: float
    scatter: float
    goal: float


def own_result(
    history: Sequence[tuple[int, float | None]],
    mode: Mode,
    *,
    anneals: bool = False,
    ideal: float | None = None,
) -> OwnResult | None:
    """Estimate what a history comes to at its end; None for one without a finite value.

    A line ``value = a + b log(step)`` is fitted by least squares to the evaluations in the last
    half of the steps, or to the last three where that has fewer. With fewer than three in all, the
    value and the goal are the best one seen.

    Args:
        history: step and value of the evaluations.
        mode: which way is better.
        anneals: whether the trial's schedule ended with it.
        ideal: the metric's best value; None: 0 for one that falls and is positive throughout.
    """
    seen = [(step, value) for step, value in history if step > 0 and value is not None]
    if not seen:
        return None
    last_step = seen[-1][0]
    last = [pair for pair in seen if pair[0] >= LAST_SHARE * last_step]
    if len(last) < FEWEST:
        last = seen[-FEWEST:]
    values = np.array([value for _, value in last])
    # +1 where a larger value is worse, else -1.
    sign = sign_of(mode)
    best = float(sign * np.min(sign * np.array([value for _, value in seen])))
    if len(last) < FEWEST:
        return OwnResult(value=best, scatter=0.0, goal=_rounded(best, sign))
    log_steps = np.log([step / last_step for step, _ in last])
    slope, end = np.polyfit(log_steps, values, 1)
    residuals = values - (end + slope * log_steps)
    scatter = math.sqrt(float(residuals @ residuals) / (len(last) - 2))
    # Seeds take different numbers of steps to one value: this is what the metric gains while the
    # steps grow by a factor of e^SEED_SCATTER. Where it gets worse at its end, it gains nothing.
    gained = max(0.0, -sign * float(slope) * SEED_SCATTER)
    # Where a schedule has flattened the metric, it gains little, and seeds differ all the same.
    seed_difference = 0.0
    ideal = choose_scale([history], mode, ideal).ideal
    if anneals and ideal is not None:
        seed_difference = ANNEALED_SCATTER * abs(float(end) - ideal)
    # The goal is easier than the end by the largest of three measures of chance.
    easier = float(end) + sign * max(scatter, gained, seed_difference)
    # The line may end at a value that a noisy trial never had: the goal is no better than its best.
    goal = sign * max(sign * easier, sign * best)
    return OwnResult(value=float(end), scatter=scatter, goal=_rounded(goal, sign))


def _rounded(goal: float, sign: float) -> float:
    """Round a goal to ``DIGITS`` digits, to the side that is easier to reach.

    ``sign``: +1 where a larger value is worse, else -1.
    """
    if goal == 0.0:
        return goal
    unit = 10.0 ** (math.floor(math.log10(abs(goal))) + 1 - DIGITS)
    # A goal of so many digits stays as it is, though the quotient may be rounded upwards.
    whole = math.ceil(sign * goal / unit - 1e-9)
    return sign * float(f"{whole * unit:.{DIGITS}g}")


def goal_of(record: TrialResult, target: Target, bounds: Sequence[float] | None = None) -> float:
    """Give the target's value that the baseline's run sets; StudyError where it came to no value.

    ``bounds``: the least and the greatest value that the metric can have; None where not known.
    """
    ideal: float | None = None
    if bounds is not None:
        ideal = target.best_bound(bounds)
    # A run with a horizon has a schedule that ends with it.
    anneals = record.horizon is not None
    outcome = own_result(record.history, target.mode, anneals=anneals, ideal=ideal)
    how_else = "give the target a value, target=VALUE, or another reference, scaling.lr=LR"
    if record.status not in ("stopped", "reached"):
        because = ""
        if record.message is not None:
            because = f": {record.message}"
        raise StudyError(
            "the target is to be what your own configuration comes to, but its run at batch size "
            f"{record.batch_size} and learning rate {record.lr:g} ended as "
            f"{record.status}{because}; {how_else}"
        )
    if outcome is None:
        raise StudyError(
            "the target is to be what your own configuration comes to, but its run was not "
            f"evaluated in {record.steps} steps; {how_else}"
        )
    return outcome.goal


def stored_goal(study: optuna.Study) -> float | None:
    """Read the target's value that the study's first trial has set; None before it has."""
    goal: float | None = study.user_attrs.get(GOAL)
    return goal


def with_goal(prepared: PreparedStudy, value: float, first: TrialResult | None) -> PreparedStudy:
    """Give the study with the target's ``value`` that its first trial has set.

    ``first``: the record of that trial; None where it is not at hand.
    """
    # The record ends where the trial met the goal; its history goes on to the budget's end.
    steps = 0
    if first is not None and first.history:
        steps = first.history[-1][0]
    seconds: float | None = None
    if first is not None and first.seconds_per_step is not None:
        seconds = steps * first.seconds_per_step
    target = replace(prepared.protocol.target, value=value)
    return replace(
        prepared,
        goal=OwnGoal(value, steps, seconds),
        protocol=replace(prepared.protocol, target=target),
        options=with_option(prepared.options, "workload.target.value", value),
    )
