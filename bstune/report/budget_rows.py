"""The rows that pictures of the objective loss draw: the metric at the budget's end.

They are prepared once: the page (:mod:`bstune.report.charts.at_budget`) and ``curve.png``
(:mod:`bstune.report.budget_figure`) draw the same rows over batch size.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bstune.core.records import TrialResult
from bstune.core.step_time import seconds_between
from bstune.report.lines.at_budget import budget_words, point_words
from bstune.report.rows import YOURS
from bstune.result import AtBudget, PointAtBudget, StudyResult
from bstune.system.console import format_count, format_number, plural

USE_NAME = "USE"
# A picture shows metrics up to this many times as far from the best as the third quartile is. Those
# farther away would leave the others no room.
ROOM_FOR_WORSE = 1.5
# Room at both ends of what a picture shows: a share of its span or, without a span, of its value.
PAD_OF_SPAN = 0.08
PAD_OF_VALUE = 0.05


@dataclass(frozen=True)
class Dot:
    """A mark of a picture: a trial that ran to its budget's end, or the point to use.

    Args:
        batch_size: examples of a step.
        lr: its learning rate.
        value: the metric at which it is drawn.
        words: what a reader who points at it is told.
    """

    batch_size: int
    lr: float
    value: float
    words: str


@dataclass(frozen=True)
class BudgetRows:
    """The metric at the budget's end over batch size.

    Args:
        metric: its name.
        title: the picture's title.
        batch_sizes: batch sizes of the curve, rising.
        values: the best metric at each of these batch sizes.
        low: lower ends of the intervals of these metrics.
        high: upper ends of these intervals.
        lrs: the best learning rate at each of these batch sizes.
        dots: trials that ran to their budget's end.
        use: the point to use.
        baseline: the user's own point. None where it did not run to its budget's end.
        shown: the least and the greatest metric that a picture shows.
    """

    metric: str
    title: str
    batch_sizes: tuple[int, ...]
    values: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    lrs: tuple[float, ...]
    dots: tuple[Dot, ...]
    use: Dot
    baseline: Dot | None
    shown: tuple[float, float]


def budget_rows(trials: Sequence[TrialResult], result: StudyResult) -> BudgetRows | None:
    """Prepare the rows of a picture. None before a trial has run to its budget's end."""
    at_budget = result.at_budget
    if at_budget is None:
        return None
    dots = list[Dot]()
    for trial in trials:
        value = trial.best_value(result.mode)
        if value is not None and _ran_to_budget_end(trial, at_budget):
            dots.append(_trial_dot(trial, value, result.metric))
    baseline: Dot | None = None
    if at_budget.baseline is not None:
        baseline = _point_dot(at_budget.baseline, YOURS)
    batch_sizes = list[int]()
    values = list[float]()
    low = list[float]()
    high = list[float]()
    lrs = list[float]()
    for point in at_budget.curve:
        batch_sizes.append(point.batch_size)
        values.append(point.value)
        low.append(point.low)
        high.append(point.high)
        lrs.append(point.lr)
    return BudgetRows(
        metric=result.metric,
        title=f"{result.metric} after {budget_words(at_budget)}",
        batch_sizes=tuple(batch_sizes),
        values=tuple(values),
        low=tuple(low),
        high=tuple(high),
        lrs=tuple(lrs),
        dots=tuple(dots),
        use=_point_dot(at_budget.winner, USE_NAME),
        baseline=baseline,
        shown=_shown_range(result, at_budget, dots),
    )


def budget_steps_of(at_budget: AtBudget, trial: TrialResult) -> float:
    """Give the steps after which a trial's budget is spent. They need not be a whole number.

    A budget of examples or of seconds is converted at the trial's batch size.
    """
    if at_budget.steps is not None:
        return float(at_budget.steps)
    if at_budget.examples is not None:
        return at_budget.examples / trial.batch_size
    # The budget is in seconds. Without the seconds of a step, only the winner's steps are known.
    if not at_budget.times:
        return float(at_budget.winner.steps)
    times = [(step_time.batch_size, step_time.seconds) for step_time in at_budget.times]
    return (at_budget.seconds or 0.0) / seconds_between(times, trial.batch_size)


def _ran_to_budget_end(trial: TrialResult, at_budget: AtBudget) -> bool:
    """Whether a trial ran to its budget's end: to the last whole step within it."""
    ended = trial.status in ("stopped", "reached")
    is_whole = trial.steps >= math.floor(budget_steps_of(at_budget, trial))
    return ended and is_whole


def _trial_dot(trial: TrialResult, value: float, metric: str) -> Dot:
    """Give the mark of a trial, whose best metric is ``value``."""
    point = f"B = {format_count(trial.batch_size)}, lr = {format_number(trial.lr)}"
    outcome = f"{metric} {format_number(value)} in {plural(trial.steps, 'step')}"
    words = f"trial {trial.number}: {point}, {outcome}"
    return Dot(batch_size=trial.batch_size, lr=trial.lr, value=value, words=words)


def _point_dot(point: PointAtBudget, name: str) -> Dot:
    """Give the mark of the point to use or of the baseline, at the metric to expect of it."""
    return Dot(
        batch_size=point.batch_size,
        lr=point.lr,
        value=point.expected,
        words=f"{name}: {point_words(point)}",
    )


def _shown_range(
    result: StudyResult, at_budget: AtBudget, dots: Sequence[Dot]
) -> tuple[float, float]:
    """Give the least and the greatest metric that a picture shows.

    The range begins at the best metric, so that a few bad trials leave the others room. Its length
    is ``ROOM_FOR_WORSE`` times the distance of the third quartile from the best. On both sides
    there is a little room.
    """
    values = [dot.value for dot in dots]
    values.append(at_budget.winner.expected)
    # Of the curve only the batch sizes count that are not shown to be worse than the best one.
    as_good = at_budget.as_good
    for point in at_budget.curve:
        if as_good.low <= point.batch_size <= as_good.high:
            values.append(point.value)
    is_least_best = result.mode == "min"
    best = min(values) if is_least_best else max(values)
    distances = sorted(abs(value - best) for value in values)
    span = ROOM_FOR_WORSE * distances[round(0.75 * (len(distances) - 1))]
    # Where all have the same value there is no span, and the axis goes around that value.
    pad = PAD_OF_SPAN * span or PAD_OF_VALUE * abs(best) or 1.0
    if is_least_best:
        return best - pad, best + span + pad
    return best - span - pad, best + pad
