"""``workload.target.value=auto``: the target is what the user's own configuration comes to.

Trial 0 runs the baseline alone, to the end of its budget. What its metric has come to there is the
study's target, made easier by what chance is worth: the same quality as today, sooner. It is stored
with the study before the trial's record is, and stays; the trial's record is that of a trial which
ended where it met the target.

A run that the study's wall time cut to next to nothing sets no target, nor does one that came to
what untrained weights meet. Trial 0 then counts as cut short, and is asked again. A loop of the
user's tells the metric of untrained weights only where it reports step 0.

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
from bstune.search.acquisition import MIN_STEPS
from bstune.search.ruler import choose_scale
from bstune.study.prepared import OwnGoal, PreparedStudy
from bstune.study.storage.attributes import GOAL
from bstune.system.console import plural

TO_BE_OWN = "the target is to be what your own configuration comes to, but"
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
# A limit of wall time is advised if it is at least this many times the present one.
LEAST_LIMIT_RAISE = 1.2
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


@dataclass(frozen=True)
class OwnRun:
    """How long the run that sets the target was to be, and what would make it longer.

    Args:
        planned_steps: of the run, had the study had the time for it.
        wall_seconds: the study's limit of wall time; None: it has none.
        advised_seconds: the limit with which the run and another trial have time; None: not known.
        last_step: at which the run's budget is spent; None: the plan is of the whole budget.
    """

    planned_steps: int
    wall_seconds: float | None = None
    advised_seconds: int | None = None
    last_step: int | None = None

    def was_cut(self, record: TrialResult) -> bool:
        """Whether the study's wall time ended the run, before its plan did."""
        # Anything else that ends a run leaves a message.
        by_itself = record.status == "stopped" and record.end_message is None
        has_limit = self.wall_seconds is not None
        return has_limit and by_itself and record.steps < self.planned_steps

    def lacked_time(self, record: TrialResult) -> bool:
        """Whether the run would have been longer, had the study more wall time."""
        is_planned_short = self.last_step is not None and self.planned_steps < self.last_step
        has_limit = self.wall_seconds is not None
        return self.was_cut(record) or (has_limit and is_planned_short)

    @property
    def more_time(self) -> str:
        """The option that gives the run more time, in words."""
        limit = self.wall_seconds or 0.0
        # A limit that is hardly more than the present one would not mend it.
        if self.advised_seconds is None or self.advised_seconds < LEAST_LIMIT_RAISE * limit:
            return f"a multiple of search.wall_seconds={limit:g}"
        return f"search.wall_seconds={self.advised_seconds}"


def goal_of(
    record: TrialResult,
    target: Target,
    bounds: Sequence[float] | None = None,
    run: OwnRun | None = None,
) -> float:
    """Give the target's value that the baseline's run sets.

    Args:
        record: of the run. Its history may begin with the metric before training, at step 0.
        target: whose value is open.
        bounds: the least and the greatest value that the metric can have; None where not known.
        run: its plan; None: the study's time did not end it.

    Raises:
        StudyError: where the run came to no value, was cut to next to nothing by the study's time,
            or came to a value that untrained weights meet.
    """
    history = without_start(record).history
    ideal: float | None = None
    if bounds is not None:
        ideal = target.best_bound(bounds)
    # A run with a horizon has a schedule that ends with it.
    anneals = record.horizon is not None
    outcome = own_result(history, target.mode, anneals=anneals, ideal=ideal)
    how_else = "give the target a value, target=VALUE, or another reference, scaling.lr=LR"
    if record.status not in ("stopped", "reached"):
        because = ""
        if record.end_message is not None:
            because = f": {record.end_message}"
        raise StudyError(
            f"{TO_BE_OWN} its run at batch size "
            f"{record.batch_size} and learning rate {record.lr:g} ended as "
            f"{record.status}{because}; {how_else}"
        )
    # The plan of a run that the study's time has cut short; None: it was not cut.
    cut_run = run if run is not None and run.was_cut(record) else None
    if cut_run is not None and record.steps < MIN_STEPS:
        raise StudyError(
            f"{TO_BE_OWN} search.wall_seconds={cut_run.wall_seconds:g} left time for "
            f"{plural(record.steps, 'step')} of its {cut_run.planned_steps}: give "
            f"{cut_run.more_time}"
        )
    if outcome is None:
        raise StudyError(
            f"{TO_BE_OWN} its run was not evaluated in {record.steps} steps; {how_else}"
        )
    start = start_of(record)
    if start is not None and replace(target, value=outcome.goal).reached(start):
        after = plural(record.steps, "step")
        advice = "target=VALUE or a larger budget, with another study=NAME"
        if run is not None and run.lacked_time(record):
            advice = f"more time, {run.more_time}, or target=VALUE with another study=NAME"
        if cut_run is not None:
            after += f" of {cut_run.planned_steps}"
        raise StudyError(
            f"{TO_BE_OWN} after {after} that is {target.metric}={outcome.goal:g}, which "
            f"untrained weights meet ({target.metric} starts at {start:.4g}): give {advice}"
        )
    return outcome.goal


def start_of(record: TrialResult) -> float | None:
    """Give the metric before training, with which a record may begin; None where it does not."""
    if record.history and record.history[0][0] == 0:
        return record.history[0][1]
    return None


def without_start(record: TrialResult) -> TrialResult:
    """Give a record whose history begins after the first step, as every other one does."""
    history = tuple(pair for pair in record.history if pair[0] > 0)
    return replace(record, history=history)


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
