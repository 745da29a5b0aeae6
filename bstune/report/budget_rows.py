"""What the pictures of the objective loss draw: the metric at the budget's end over batch size, prepared once.

The page (:mod:`bstune.report.budget_charts`) and ``curve.png`` (:mod:`bstune.report.budget_figure`) draw these rows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bstune.core.records import TrialResult
from bstune.core.step_time import seconds_between
from bstune.report.budget_answer import budget_words, point_words
from bstune.report.rows import YOURS
from bstune.result import AtBudget, PointAtBudget, StudyResult
from bstune.system.console import format_count, format_number, plural

USE = "USE"
# Metrics farther from the best than so many times the curve's own span leave the others no room.
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
    found = result.at_budget
    if found is None:
        return None
    dots = list[Dot]()
    for trial in trials:
        value = trial.best_value(result.mode)
        if value is not None and _is_full(trial, found):
            dots.append(_dot(trial, value, result.metric))
    use = _point_dot(found.winner, USE)
    baseline = None if found.baseline is None else _point_dot(found.baseline, YOURS)
    return BudgetRows(
        metric=result.metric,
        title=f"{result.metric} after {budget_words(found)}",
        batch_sizes=tuple(one.batch_size for one in found.curve),
        values=tuple(one.value for one in found.curve),
        low=tuple(one.low for one in found.curve),
        high=tuple(one.high for one in found.curve),
        lrs=tuple(one.lr for one in found.curve),
        dots=tuple(dots),
        use=use,
        baseline=baseline,
        shown=_shown(result, found, dots),
    )


def last_step_of(found: AtBudget, trial: TrialResult) -> float:
    """Give the step at which a trial's budget is spent, as the result has it."""
    if found.steps is not None:
        return float(found.steps)
    if found.examples is not None:
        return found.examples / trial.batch_size
    if not found.times:
        return float(found.winner.steps)
    times = [(one.batch_size, one.seconds) for one in found.times]
    return (found.seconds or 0.0) / seconds_between(times, trial.batch_size)


def _is_full(trial: TrialResult, found: AtBudget) -> bool:
    """Say whether a trial ran to its budget's end, which is a whole step."""
    ended = trial.status in ("stopped", "reached")
    is_whole = trial.steps >= math.floor(last_step_of(found, trial))
    return ended and is_whole


def _dot(trial: TrialResult, value: float, metric: str) -> Dot:
    words = (
        f"trial {trial.number}: B = {format_count(trial.batch_size)}, lr = {format_number(trial.lr)}, "
        f"{metric} {format_number(value)} in {plural(trial.steps, 'step')}"
    )
    return Dot(trial.batch_size, trial.lr, value, words)


def _point_dot(point: PointAtBudget, name: str) -> Dot:
    return Dot(point.batch_size, point.lr, point.expected, f"{name}: {point_words(point)}")


def _shown(result: StudyResult, found: AtBudget, dots: Sequence[Dot]) -> tuple[float, float]:
    """Give the values that a picture shows: around those of the trials and the best of the curve."""
    near = [dot.value for dot in dots] + [found.winner.expected]
    as_good = found.as_good
    for one in found.curve:
        if as_good.low <= one.batch_size <= as_good.high:
            near.append(one.value)
    best = min(near) if result.mode == "min" else max(near)
    distances = sorted(abs(value - best) for value in near)
    # Three quarters of what is near, and room above it.
    span = ROOM_FOR_WORSE * distances[round(0.75 * (len(distances) - 1))]
    pad = 0.08 * span or 0.05 * abs(best) or 1.0
    if result.mode == "min":
        return best - pad, best + span + pad
    return best - span - pad, best + pad
