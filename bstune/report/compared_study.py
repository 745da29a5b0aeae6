"""What a comparison shows of a study, taken from its result."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bstune.report.lines import at_budget
from bstune.report.lines.at_budget import budget_words
from bstune.report.lines.cautions import warnings
from bstune.report.lines.gain import has_few_configurations, is_not_compared, is_of_baseline
from bstune.report.spelling import with_options_as_called
from bstune.report.words import (
    critical_text,
    device_text,
    expected_text,
    name_and_threads,
    trials_text,
)
from bstune.result import INTERVAL_LEVEL, AtBudget, Gain, StudyResult
from bstune.system.console import format_count, format_number, format_seconds

Array = NDArray[np.float64]


@dataclass(frozen=True)
class ComparedPoint:
    """A batch size of the frontier, and what it took to the target."""

    batch_size: float
    """Examples of a step."""
    steps: float
    """Optimizer steps."""


@dataclass(frozen=True)
class Use:
    """What a study says to use."""

    batch_size: float
    """Examples of a step."""
    lr: float
    """The learning rate."""
    hyperparameters: Mapping[str, float | None]
    """Further ones that the study searches, by name."""
    seconds: float | None
    """Seconds of training to the target: the median over fresh seeds, else predicted.

    None where they are not known.
    """
    low: float | None
    """Lower end of the interval of ``seconds`` over fresh seeds; None where it is not known."""
    high: float | None
    """Upper end of that interval; None where it is not known, or fresh seeds missed the target."""
    reached: int
    """How many of the runs on fresh seeds reached the target."""
    runs: int
    """How many runs on fresh seeds there were."""
    text: str
    """How long it takes to the target, in words."""

    @property
    def reliable(self) -> bool:
        """Whether it ran on fresh seeds, and each of these runs reached the target."""
        return 0 < self.runs == self.reached

    @property
    def hyperparameters_text(self) -> str:
        """The further hyper-parameters in words; empty where the study searches none."""
        parts = [f"{name} = {format_number(value)}" for name, value in self.hyperparameters.items()]
        return ", ".join(parts)

    @property
    def fresh_seeds_text(self) -> str:
        """How many fresh seeds reached the target, and the interval of their seconds, in words."""
        if not self.runs:
            return "none ran"
        text = f"{self.reached} of {self.runs}"
        if self.low is None:
            return text
        # One that missed the target took longer than any that is known.
        if self.high is None:
            return f"{text}, {format_seconds(self.low)} and more"
        return f"{text}, {format_seconds(self.low)} to {format_seconds(self.high)}"

    def __str__(self) -> str:
        """Write ``B = 204, lr = 1.13``, and further hyper-parameters."""
        text = f"B = {format_count(self.batch_size)}, lr = {format_number(self.lr)}"
        if self.hyperparameters_text:
            text += f", {self.hyperparameters_text}"
        return text


@dataclass(frozen=True)
class Compared:
    """What a comparison shows of a study. None stands for what the study leaves open."""

    name: str
    """Unique in the comparison."""
    source: str
    """The folder or run that it was read from."""
    workload: str
    """The workload's name."""
    target: str
    """The metric and its value, in words."""
    tokens: int | None
    """Tokens of an example; None where examples have no tokens."""
    reference: tuple[float, float]
    """The user's own batch size and learning rate, which the gain is over."""
    device: str
    """The devices that trained, in words."""
    device_names: tuple[str, ...]
    """Their names, without threads; empty where none has trained."""
    threads: int | None
    """Threads of the device, where one device alone trained and its threads are known."""
    points: tuple[ComparedPoint, ...]
    """The frontier's points that reached the target, in order of batch sizes."""
    batch_size: Array
    """Batch sizes of the curve, shape (n,); n is 0 where there is no curve."""
    steps: Array
    """S*(B) at these batch sizes, shape (n,)."""
    steps_low: Array
    """Lower end of its interval, shape (n,)."""
    steps_high: Array
    """Upper end of its interval, shape (n,)."""
    b_crit: float | None
    """The critical batch size, in examples."""
    b_crit_low: float | None
    """Lower end of its interval; None where that is open."""
    b_crit_high: float | None
    """Upper end of its interval; None where that is open."""
    level: float
    """The level of that interval."""
    critical: str
    """The critical batch size and its interval, in words."""
    s_min: float | None
    """The least steps at any batch size."""
    exponent: float | None
    """Exponent of the best learning rate over the batch size, if the trials identify it."""
    exponent_text: str
    """That exponent with its interval, in words."""
    spend_seconds: float | None
    """Seconds of training that the study took."""
    spend: str
    """These seconds, and the number of configurations and fresh seeds, in words."""
    use: Use | None
    """What the study says to use; None where nothing reached the target."""
    gain: float | None
    """How many times as fast its ``use`` is as the baseline."""
    gain_text: str
    """The gain with its interval, in words."""
    notes: tuple[str, ...]
    """Sentences that a reader has to know, such as that nothing reached the target."""

    @property
    def b_crit_on_curve(self) -> tuple[float, float] | None:
        """The point of the curve at B_crit: the batch size, and the steps to the target there.

        None where there is no B_crit or no curve.
        """
        if self.b_crit is None or not self.batch_size.size:
            return None
        # Between the curve's batch sizes the law is nearly straight on logarithmic axes.
        log_steps = np.interp(math.log(self.b_crit), np.log(self.batch_size), np.log(self.steps))
        return self.b_crit, float(np.exp(log_steps))


@dataclass(frozen=True)
class _Curve:
    """The fields of a :class:`Compared` that a study's curve fills, under the same names."""

    batch_size: Array
    steps: Array
    steps_low: Array
    steps_high: Array


def _curve_of(result: StudyResult) -> _Curve:
    """Give a result's curve as arrays, which are empty where there is no curve."""
    empty = np.empty(0)
    curve = result.curve
    if curve is None:
        return _Curve(batch_size=empty, steps=empty, steps_low=empty, steps_high=empty)
    return _Curve(
        batch_size=np.array(curve.batch_size),
        steps=np.array(curve.steps),
        steps_low=np.array(curve.low),
        steps_high=np.array(curve.high),
    )


@dataclass(frozen=True)
class _Critical:
    """The fields of a :class:`Compared` that a study's critical batch size fills."""

    value: float | None = None
    low: float | None = None
    high: float | None = None
    level: float = INTERVAL_LEVEL
    text: str = "not known"
    s_min: float | None = None


def _critical_of(result: StudyResult) -> _Critical:
    """Give a result's critical batch size. Without one all is None, and the text "not known"."""
    critical = result.critical_batch_size
    if critical is None:
        return _Critical()
    text = "not known"
    # An interval that is open at both ends says nothing.
    if critical.low or critical.value or critical.high:
        text = critical_text(critical)
    return _Critical(
        value=critical.value,
        low=critical.low,
        high=critical.high,
        level=critical.level,
        text=text,
        s_min=critical.s_min,
    )


def compared_study(result: StudyResult, source: str) -> Compared:
    """Give the part of a study's result that a comparison shows.

    ``source``: the folder that the result was read from.
    """
    # The frontier holds stopped trials, too, as bounds: these did not reach the target.
    points = list[ComparedPoint]()
    for point in result.points:
        if point.steps:
            points.append(ComparedPoint(point.batch_size, point.steps))
    points.sort(key=lambda point: point.batch_size)
    curve = _curve_of(result)
    critical = _critical_of(result)
    exponent: float | None = None
    exponent_text = "not known"
    law = result.lr_exponent
    if law is not None and law.identified:
        exponent = law.exponent
        exponent_text = f"{law.exponent:z.2f} ({law.low:z.2f} to {law.high:z.2f})"
    gain: float | None = None
    if result.gain is not None:
        gain = result.gain.ratio
    stated = [name_and_threads(device) for device in result.devices]
    device_names = {name for name, _ in stated}
    threads = {count for _, count in stated if count is not None}
    spend = f"{trials_text(result)}, {format_seconds(result.spend.seconds)}"
    return Compared(
        name=result.study,
        source=source,
        workload=result.workload,
        target=result.target,
        tokens=result.tokens,
        reference=(result.reference.batch_size, result.reference.lr),
        device=", ".join(map(device_text, result.devices)) or "-",
        device_names=tuple(sorted(device_names)),
        threads=threads.pop() if len(threads) == 1 else None,
        points=tuple(points),
        batch_size=curve.batch_size,
        steps=curve.steps,
        steps_low=curve.steps_low,
        steps_high=curve.steps_high,
        b_crit=critical.value,
        b_crit_low=critical.low,
        b_crit_high=critical.high,
        level=critical.level,
        critical=critical.text,
        s_min=critical.s_min,
        exponent=exponent,
        exponent_text=exponent_text,
        spend_seconds=result.spend.seconds,
        spend=spend,
        use=_use_of(result),
        gain=gain,
        gain_text=_gain_text_of(result),
        notes=tuple(_notes_of(result, points)),
    )


def _gain_text_of(result: StudyResult) -> str:
    """Write a study's gain. Under the objective loss it is the gain of the metric."""
    if result.at_budget is not None:
        return _gain_text_at_budget(result, result.at_budget)
    winner = result.winner
    baseline = result.baseline
    # The baseline itself is known to be the best: there is nothing to gain over it.
    if (
        result.gain is None
        and winner is not None
        and baseline is not None
        and is_of_baseline(winner, baseline)
        and not is_not_compared(result)
    ):
        return "none"
    return gain_text(result.gain)


def _gain_text_at_budget(result: StudyResult, at_budget: AtBudget) -> str:
    """Write the gain of a study of the objective loss: a difference of the metric."""
    if at_budget.gain is not None:
        return f"{result.metric} by {format_number(at_budget.gain.difference, 2)}"
    if at_budget.baseline is None or has_few_configurations(result):
        return "not known"
    # The baseline itself is the best that was found.
    return "none"


def gain_text(gain: Gain | None) -> str:
    """Write ``1.45 times (1.3 to 1.7)``, or ``at least 2.4 times`` for a stopped baseline."""
    if gain is None:
        return "not known"
    text = f"{format_number(gain.ratio, 2)} times"
    # The gain over a baseline that was stopped before the target is a bound without an interval.
    if gain.at_least or gain.low is None:
        text = f"at least {text}"
    else:
        text += f" ({format_number(gain.low, 2)} to {format_number(gain.high, 2)})"
    if gain.merit == "steps":
        text += ", in steps"
    if gain.baseline_seeds == 0 and not gain.at_least:
        text += ", over a single run"
    return text


def _use_of(result: StudyResult) -> Use | None:
    """Give what a study says to use. None where nothing reached the target."""
    if result.at_budget is not None:
        return _use_at_budget(result.metric, result.at_budget)
    winner = result.winner
    if winner is None:
        return None
    low: float | None = None
    high: float | None = None
    reached = 0
    runs = 0
    fresh = winner.confirmed
    if fresh is not None:
        low, high = fresh.interval_by("time")
        reached = fresh.reached
        runs = fresh.runs
    return Use(
        batch_size=winner.batch_size,
        lr=winner.lr,
        hyperparameters=winner.hyperparameters,
        seconds=winner.time_to_target,
        low=low,
        high=high,
        reached=reached,
        runs=runs,
        text=expected_text(winner),
    )


def _use_at_budget(metric: str, at_budget: AtBudget) -> Use:
    """Give what a study of the objective loss says to use: it has no seconds to a target."""
    point = at_budget.winner
    # Runs on fresh seeds have no target to miss here: all of them count as having reached it.
    runs = 0
    if point.fresh is not None:
        runs = len(point.fresh.values)
    value = format_number(point.expected, 3)
    return Use(
        batch_size=point.batch_size,
        lr=point.lr,
        hyperparameters=point.hyperparameters,
        seconds=None,
        low=None,
        high=None,
        reached=runs,
        runs=runs,
        text=f"{metric} {value} after {budget_words(at_budget)}",
    )


def _notes_of(result: StudyResult, points: Sequence[ComparedPoint]) -> list[str]:
    """Give the warnings that stand beside a study, a sentence each.

    ``points`` are the study's points in order of batch sizes.
    """
    # The objective loss has cautions of its own: there is no target that could be missed.
    if result.objective == "loss":
        cautions = [line for line in at_budget.cautions(result) if line is not None]
        return [with_options_as_called(result, line) for line in cautions]
    lines = [with_options_as_called(result, line) for line in warnings(result)]
    if points and points[0].batch_size == points[-1].batch_size:
        lines.append("the target was reached at one batch size, so there is no curve")
    return lines
