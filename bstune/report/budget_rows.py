"""What the pictures of the objective loss draw: the metric at the budget's end over batch size.

It is prepared once: the page (:mod:`bstune.report.charts.at_budget`) and ``curve.png``
(:mod:`bstune.report.budget_figure`) draw these rows.
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
# Metrics farther from the best than so many times the span of three quarters of what is near leave
# the others no room.
ROOM_FOR_WORSE = 1.5


@dataclass(frozen=True)
class Dot:
    """A trial that ran to its budget's end.

    Args:
        batch_size: examples of a step.
        lr: its learning rate.
        value: the best value of its metric.
        words: what it is, for people.
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
        title: of the picture.
        batch_sizes: of the curve, rising.
        values: the best metric there.
        low: lower ends of their intervals.
        high: upper ends.
        lrs: the best learning rates there.
        dots: trials that ran to their budget's end.
        use: the point to use.
        baseline: the user's own; None where it did not run to its budget's end.
        shown: the least and the greatest value that a picture shows.
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
    """Prepare what is drawn; None before a trial has run to its budget's end."""
    at_budget = result.at_budget
    if at_budget is None:
        return None
    dots = list[Dot]()
    for trial in trials:
        value = trial.best_value(result.mode)
        if value is not None and _is_full(trial, at_budget):
            dots.append(_dot(trial, value, result.metric))
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
        shown=_shown(result, at_budget, dots),
    )


def budget_steps_of(at_budget: AtBudget, trial: TrialResult) -> float:
    """Give the step at which a trial's budget is spent, as the result has it."""
    if at_budget.steps is not None:
        return float(at_budget.steps)
    if at_budget.examples is not None:
        return at_budget.examples / trial.batch_size
    if not at_budget.times:
        return float(at_budget.winner.steps)
    times = [(step_time.batch_size, step_time.seconds) for step_time in at_budget.times]
    return (at_budget.seconds or 0.0) / seconds_between(times, trial.batch_size)


def _is_full(trial: TrialResult, at_budget: AtBudget) -> bool:
    """Say whether a trial ran to its budget's end, which is a whole step."""
    ended = trial.status in ("stopped", "reached")
    is_whole = trial.steps >= math.floor(budget_steps_of(at_budget, trial))
    return ended and is_whole


def _dot(trial: TrialResult, value: float, metric: str) -> Dot:
    point = f"B = {format_count(trial.batch_size)}, lr = {format_number(trial.lr)}"
    outcome = f"{metric} {format_number(value)} in {plural(trial.steps, 'step')}"
    words = f"trial {trial.number}: {point}, {outcome}"
    return Dot(batch_size=trial.batch_size, lr=trial.lr, value=value, words=words)


def _point_dot(point: PointAtBudget, name: str) -> Dot:
    return Dot(
        batch_size=point.batch_size,
        lr=point.lr,
        value=point.expected,
        words=f"{name}: {point_words(point)}",
    )


def _shown(result: StudyResult, at_budget: AtBudget, dots: Sequence[Dot]) -> tuple[float, float]:
    """Give the values that a picture shows: around the trials' and the best of the curve."""
    near = [dot.value for dot in dots]
    near.append(at_budget.winner.expected)
    as_good = at_budget.as_good
    for point in at_budget.curve:
        if as_good.low <= point.batch_size <= as_good.high:
            near.append(point.value)
    is_least_best = result.mode == "min"
    best = min(near) if is_least_best else max(near)
    distances = sorted(abs(value - best) for value in near)
    # Three quarters of what is near, and room above it.
    span = ROOM_FOR_WORSE * distances[round(0.75 * (len(distances) - 1))]
    # Where all have one value, an axis around it.
    pad = 0.08 * span or 0.05 * abs(best) or 1.0
    if is_least_best:
        return best - pad, best + span + pad
    return best - span - pad, best + pad
