"""Several studies side by side: critical batch sizes, how well one law fits all, times to target.

**Collapse.** If S(B) = S_min (1 + B_crit/B) holds, then the curves of all studies are one: S/S_min
over B/B_crit. Their distance from it is the root mean square of log(S*(B)/S_min) - log(1 +
B_crit/B). It is taken over the batch sizes that reached the target, evenly in log B, and each study
counts alike. S*(B) is the posterior's, at the best learning rate: the law, and a smooth curve that
may be added to it. Where trials are few the posterior lies near the law by itself. So a second
number stands beside the distance: the share of the batch sizes at which the law lies in the study's
own interval of S*(B). Far below the interval's level the trials speak against the law.

**Whether two critical batch sizes differ.** The studies are independent. The posterior of log
B_crit is taken to be normal on either side of its median, as wide as the interval says. So the
ratio of two has an interval, from the halves that face each other, and they differ where it leaves
out 1. Of several pairs each gets its share of the error (Bonferroni): all the intervals hold
together at the stated level. Where an interval is open two studies are said to differ only if the
intervals do not overlap.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from bstune.core.errors import StudyError
from bstune.report.lines import at_budget
from bstune.report.lines.at_budget import budget_words
from bstune.report.lines.cautions import warnings
from bstune.report.lines.gain import has_few_configurations, is_of_baseline
from bstune.report.schema import read_result
from bstune.report.spelling import with_options_as_called
from bstune.report.study_folder import StudyFolder, each_study, read_study
from bstune.report.words import (
    critical_text,
    device_text,
    expected_text,
    name_and_threads,
    trials_text,
)
from bstune.result import AtBudget, Gain, StudyResult
from bstune.system.console import format_count, format_number, format_seconds, plural

if TYPE_CHECKING:
    from bstune.report.picture import Picture

# The level at which the intervals of all ratios hold together.
RATIO_LEVEL = 0.9
# The chance of an error is a sum of floats, which may lie this much above what it is compared with.
ERROR_ROUNDING = 1e-9
Array = NDArray[np.float64]


@dataclass(frozen=True)
class ComparedPoint:
    """A batch size of the frontier, and what it took to the target."""

    batch_size: float
    """Examples of a step."""
    steps: float
    """Optimizer steps."""
    seconds: float | None
    """Seconds of training; None where the trial was not timed."""


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
    seconds: Array
    """T(B) = S*(B) tau(B), shape (n,); empty where tau(B) is not known."""
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
class Collapse:
    """How well the curves of several studies lie on the law S/S_min = 1 + B_crit/B."""

    deviation: float
    """Root mean square of the studies' deviations, as a share: 0.1 is 10%."""
    by_study: Mapping[str, float]
    """The deviation of each study from the law, as a share, by the study's name."""
    inside: float
    """Share of the batch sizes at which the law lies in a study's interval of S*(B)."""
    level: float
    """The level of these intervals."""
    smallest: float
    """The least B/B_crit at which the law is judged."""
    largest: float
    """The largest B/B_crit at which the law is judged."""

    def __str__(self) -> str:
        """Say how far the curves lie from the law, and how often their intervals hold it."""
        span = f"{format_number(self.smallest, 2)} to {format_number(self.largest, 2)}"
        text = f"S*(B) lies within {self.deviation:.0%} of it (root mean square, B/B_crit = {span}"
        # A single study's deviation is the one that was just said.
        if len(self.by_study) > 1:
            deviation_of = self.by_study.__getitem__
            best = min(self.by_study, key=deviation_of)
            worst = max(self.by_study, key=deviation_of)
            text += f"; {deviation_of(best):.0%} for {best}, {deviation_of(worst):.0%} for {worst}"
        inside = f"{self.level:.0%} intervals of S*(B) hold it at {self.inside:.0%}"
        return f"{text}); {inside} of the batch sizes"


@dataclass(frozen=True)
class Pair:
    """The critical batch sizes of two studies, and whether they differ."""

    larger: str
    """Name of the study with the larger critical batch size."""
    smaller: str
    """Name of the study with the smaller one."""
    ratio: float | None
    """The larger over the smaller; None where one of them is not known."""
    low: float | None
    """Lower end of the ratio's interval; None where it is open."""
    high: float | None
    """Upper end of the ratio's interval; None where it is open."""
    differ: bool | None
    """Whether they differ; None where it is not known."""
    unlike: tuple[str, ...] = ()
    """What else differs that a critical batch size depends on: ``workload``, ``target``."""

    @property
    def interval(self) -> str:
        """The interval of the ratio, in words."""
        if self.low is None and self.high is None:
            return "open"
        # Three digits tell a ratio of 1.04 from 1.
        low = format_number(self.low, 3)
        high = format_number(self.high, 3)
        if self.high is None:
            return f"above {low}"
        if self.low is None:
            return f"below {high}"
        return f"{low} to {high}"

    @property
    def verdict(self) -> str:
        """Whether the two critical batch sizes differ, in words."""
        if self.differ is None:
            return "not known"
        if self.differ:
            return "differ"
        return "not shown to differ"

    def __str__(self) -> str:
        """Write ``a over b: 2.9 times (1.6 to 5.1), differ``."""
        studies = f"{self.larger} over {self.smaller}"
        verdict = self.verdict
        if self.unlike:
            verdict += f" (another {' and another '.join(self.unlike)})"
        if self.ratio is not None:
            ratio = format_number(self.ratio, 2)
            return f"{studies}: {ratio} times ({self.interval}), {verdict}"
        if self.low is not None:
            return f"{studies}: {self.interval} times, {verdict}"
        return f"{studies}: {verdict}"


@dataclass(frozen=True, repr=False)
class Comparison:
    """Several studies side by side, and which of their critical batch sizes differ."""

    studies: tuple[Compared, ...]
    """The studies, at least one."""
    collapse: Collapse | None
    """How well one law fits all of them; None where no study has a critical batch size."""
    pairs: tuple[Pair, ...]
    """Each two studies, in the order of ``studies``."""
    notes: tuple[str, ...]
    """Sentences that say how the studies differ, and which ones were left out."""

    def plot(self) -> "Picture":
        """Draw ``comparison.png`` as a figure that a notebook shows as a cell's value."""
        # That module imports this one. Only what draws needs it.
        from bstune.report.compare_figure import comparison_figure

        return comparison_figure(self)

    def _repr_html_(self) -> str:
        """Give what a notebook shows: a row for each study, the pairs, the notes, the picture."""
        # That module imports this one, too.
        from bstune.report.notebook import comparison_html

        return comparison_html(self)

    def __repr__(self) -> str:
        return f"Comparison({self.title})"

    @property
    def title(self) -> str:
        """How many studies there are, and of how many workloads, targets and devices."""
        count = len(self.studies)
        studies = f"{count} studies"
        if count == 1:
            studies = "1 study"
        workloads = {study.workload for study in self.studies}
        targets = {study.target for study in self.studies}
        devices = _known_devices(self.studies)
        parts = [
            studies,
            plural(len(workloads), "workload"),
            plural(len(targets), "target"),
            plural(len(devices), "device"),
        ]
        return " · ".join(parts)

    @property
    def judged(self) -> str:
        """The rule by which pairs were judged to differ or not, in words."""
        interval = f"the {RATIO_LEVEL:.0%} interval of their ratio"
        if len(self.pairs) > 1:
            interval += f", of all {len(self.pairs)} pairs together (Bonferroni),"
        return (
            f"Two critical batch sizes differ where {interval} leaves out 1: studies are "
            "independent, and log B_crit is normal on either side of its median, as wide as its "
            "interval says. Where an interval is open, two differ if the intervals do not overlap."
        )


def compare(studies: Sequence[Compared], left_out: Sequence[str] = ()) -> Comparison:
    """Compare studies: how well one law fits them, and which critical batch sizes differ.

    ``left_out`` are lines on studies that could not be read, which become notes. Where no study is
    left, these lines are the text of a StudyError.
    """
    if not studies:
        raise StudyError("\n".join(["there is no study to compare", *left_out]))
    named = _with_unique_names(studies)
    return Comparison(
        studies=tuple(named),
        collapse=collapse(named),
        pairs=tuple(compared_pairs(named)),
        notes=(*_differences(named), *left_out),
    )


def read_studies(
    paths: Sequence[str], read: Callable[[str], StudyFolder] = read_study
) -> tuple[list[Compared], list[str]]:
    """Read the studies in folders or ``curve.json`` files.

    Args:
        paths: folders and files. One that is given twice counts once.
        read: gives the study of a path, as it ended or at another target.

    Returns:
        The studies, and a line for each path that holds none.

    Raises:
        StudyError: for a path that is not there, as its name may be mistyped.
    """
    left_out = list[str]()
    studies = [
        compared_study(study.result, path) for path, study in each_study(paths, left_out, read)
    ]
    return studies, left_out


@dataclass(frozen=True)
class LoggedCurve:
    """The ``curve.json`` of a study's run in MLflow, or why it has none."""

    run: str
    """The run's name."""
    text: str | None
    """The content of ``curve.json``. None where there is none, or it cannot be read."""
    missing: str = ""
    """Why there is no text. Empty where there is one."""


def logged_studies(
    logged: Sequence[LoggedCurve],
) -> tuple[list[Compared], list[str]]:
    """Read the studies of MLflow's runs.

    Returns:
        The studies, and a line for each run without a result.
    """
    studies = list[Compared]()
    left_out = list[str]()
    # A run without a result does not keep the others from being compared.
    for curve in logged:
        if curve.text is None:
            left_out.append(f"left out: {curve.run}: {curve.missing}")
            continue
        try:
            studies.append(compared_study(read_result(curve.text, "its curve.json"), curve.run))
        except StudyError as error:
            left_out.append(f"left out: {curve.run}: {error}")
    return studies, left_out


@dataclass(frozen=True)
class _Curve:
    """The fields of a :class:`Compared` that a study's curve fills, under the same names."""

    batch_size: Array
    steps: Array
    steps_low: Array
    steps_high: Array
    seconds: Array


def _curve_of(result: StudyResult) -> _Curve:
    """Give a result's curve as arrays, which are empty where there is no curve."""
    empty = np.empty(0)
    curve = result.curve
    if curve is None:
        return _Curve(
            batch_size=empty, steps=empty, steps_low=empty, steps_high=empty, seconds=empty
        )
    seconds = empty
    if curve.seconds_per_step is not None:
        seconds = np.array(curve.steps) * np.array(curve.seconds_per_step)
    return _Curve(
        batch_size=np.array(curve.batch_size),
        steps=np.array(curve.steps),
        steps_low=np.array(curve.low),
        steps_high=np.array(curve.high),
        seconds=seconds,
    )


@dataclass(frozen=True)
class _Critical:
    """The fields of a :class:`Compared` that a study's critical batch size fills."""

    value: float | None = None
    low: float | None = None
    high: float | None = None
    level: float = RATIO_LEVEL
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

    ``source``: the folder or run that the result was read from.
    """
    # The frontier holds stopped trials, too, as bounds: these did not reach the target.
    points = list[ComparedPoint]()
    for point in result.points:
        if point.steps:
            points.append(ComparedPoint(point.batch_size, point.steps, point.time_to_target))
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
        seconds=curve.seconds,
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
    if result.gain is not None or winner is None or baseline is None:
        return gain_text(result.gain)
    # Enough other configurations were tried, and the baseline is the best.
    if is_of_baseline(winner, baseline) and not has_few_configurations(result):
        return "none"
    return gain_text(None)


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
    text = f"{format_number(gain.ratio)} times"
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


def _with_unique_names(studies: Sequence[Compared]) -> list[Compared]:
    """Give the studies under names of their own.

    Studies that share a name get the folder or run that they were read from behind it.
    """
    # A comparison's lines tell the studies apart by their names alone.
    count = Counter(study.name for study in studies)
    named = list[Compared]()
    for study in studies:
        if count[study.name] == 1:
            named.append(study)
        else:
            named.append(replace(study, name=f"{study.name} ({study.source})"))
    return named


def _known_devices(studies: Sequence[Compared]) -> set[tuple[str, ...]]:
    """Collect the devices that trained the studies, by their names.

    A study that has trained nothing has no other device, and threads make none.
    """
    return {study.device_names for study in studies if study.device_names}


def _differences(studies: Sequence[Compared]) -> list[str]:
    """Give a sentence for each way in which the studies differ, and what that means for numbers."""
    lines = list[str]()
    workloads = sorted({study.workload for study in studies})
    targets = {study.target for study in studies}
    # The reference is the pair of batch size and learning rate that gains are over.
    references = {study.reference for study in studies}
    tokens = sorted({study.tokens for study in studies if study.tokens is not None})
    if len(workloads) > 1:
        lines.append(
            f"the workloads differ ({', '.join(workloads)}): what is compared are critical batch "
            "sizes, in examples of a step; seconds, steps and gains are each workload's own, and "
            "rank none of them"
        )
        if len(targets) > 1:
            lines.append("the targets differ: each stands beside its study")
    elif len(targets) > 1:
        lines.append(
            "the targets differ: each stands beside its study, and a critical batch size may be "
            "larger for its harder target alone"
        )
    if len(tokens) > 1:
        counts = ", ".join(map(format_count, tokens))
        lines.append(
            f"an example has not the same number of tokens in all studies ({counts}): critical "
            "batch sizes are compared in examples, and their ratio in tokens is another one"
        )
    if len(references) > 1 and len(workloads) == 1:
        lines.append("the references differ: each gain is over its own study's")
    devices = _known_devices(studies)
    threads = sorted({study.threads for study in studies if study.threads is not None})
    if len(devices) > 1:
        lines.append(
            "the devices differ: seconds are each device's own, steps and B_crit do not depend on "
            "it"
        )
    elif len(threads) > 1:
        counts = ", ".join(map(str, threads))
        lines.append(
            f"the threads differ ({counts}): seconds are of each study's own number, steps and "
            "B_crit do not depend on it"
        )
    return lines


def collapse(studies: Sequence[Compared]) -> Collapse | None:
    """Measure how well the studies' curves lie on the law S = S_min (1 + B_crit/B).

    Studies without a curve, B_crit or S_min are left out. None where no study remains.
    """
    squares: dict[str, float] = {}
    inside = list[float]()
    spans = list[float]()
    levels = list[float]()
    for study in studies:
        if study.b_crit is None or study.s_min is None or not study.steps.size:
            continue
        # The law is not fitted to the curve: both are of one posterior, so that only the curve's
        # shape is judged.
        law = study.s_min * (1.0 + study.b_crit / study.batch_size)
        squares[study.name] = float(np.mean(np.log(study.steps / law) ** 2))
        is_inside = (study.steps_low <= law) & (law <= study.steps_high)
        inside.append(float(np.mean(is_inside)))
        spans.append(float(study.batch_size[0]) / study.b_crit)
        spans.append(float(study.batch_size[-1]) / study.b_crit)
        levels.append(study.level)
    if not squares:
        return None
    return Collapse(
        deviation=_typical_deviation(sum(squares.values()) / len(squares)),
        by_study={name: _typical_deviation(square) for name, square in squares.items()},
        inside=sum(inside) / len(inside),
        # The level that the intervals of every study have at least.
        level=min(levels),
        smallest=min(spans),
        largest=max(spans),
    )


def points_over_law(study: Compared) -> tuple[Array, Array] | None:
    """Give a study's points in units of its law: B/B_crit and S/S_min, each of shape (n,).

    None where the study has no B_crit, no S_min or no points.
    """
    if study.b_crit is None or study.s_min is None or not study.points:
        return None
    batch_size = np.array([point.batch_size for point in study.points])
    steps = np.array([point.steps for point in study.points])
    return batch_size / study.b_crit, steps / study.s_min


def _typical_deviation(mean_square: float) -> float:
    """Turn a mean square of log ratios into a typical deviation: 0.1 for ratios of 1.1."""
    return math.expm1(math.sqrt(mean_square))


def compared_pairs(studies: Sequence[Compared], level: float = RATIO_LEVEL) -> list[Pair]:
    """Compare the critical batch sizes of each two studies: their ratio, with its interval.

    ``level`` is the chance that all the intervals hold the truth together.
    """
    both = list(combinations(studies, 2))
    # Bonferroni: each pair gets its share of the error.
    return [_compared_pair(first, second, (1.0 - level) / len(both)) for first, second in both]


def _compared_pair(first: Compared, second: Compared, error: float) -> Pair:
    """Compare the critical batch sizes of two studies, the larger one first.

    ``error`` is the chance that the interval of their ratio leaves out the truth.
    """
    large, small = sorted((first, second), key=_known_size, reverse=True)
    ratio: float | None = None
    high: float | None = None
    if large.b_crit is None or small.b_crit is None:
        low = _least_ratio(large, small, error)
        # Only intervals that do not overlap have a least ratio: then the two differ.
        differ = None if low is None else True
    else:
        ratio = large.b_crit / small.b_crit
        low, high = _ratio_interval(large, small, ratio, error)
        differ = None if low is None else low > 1.0
    return Pair(
        larger=large.name,
        smaller=small.name,
        ratio=ratio,
        low=low,
        high=high,
        differ=differ,
        unlike=_unlike(large, small),
    )


def _ratio_interval(
    large: Compared, small: Compared, ratio: float, error: float
) -> tuple[float | None, float | None]:
    """Give the ends of the interval of ``ratio``, that of two critical batch sizes.

    None for an end that an open end of the studies' own intervals leaves open. ``error``: the
    chance that the interval leaves out the truth.
    """
    # The ratio is least with the larger size at the low end of its interval and the smaller size at
    # its high end. Deviations are of the logarithm.
    deviation_below = _joint_deviation(
        _log_deviation(large.b_crit_low, large.b_crit, large.level),
        _log_deviation(small.b_crit, small.b_crit_high, small.level),
    )
    deviation_above = _joint_deviation(
        _log_deviation(large.b_crit, large.b_crit_high, large.level),
        _log_deviation(small.b_crit_low, small.b_crit, small.level),
    )
    low: float | None = None
    if deviation_below is not None:
        low = ratio * math.exp(-_normal_quantile(error) * deviation_below)
    high: float | None = None
    if deviation_above is not None:
        high = ratio * math.exp(_normal_quantile(error) * deviation_above)
    return low, high


def _unlike(one: Compared, other: Compared) -> tuple[str, ...]:
    """Name the differences of two studies by which critical batch sizes may differ, too.

    These are the workload and the target. A critical batch size does not depend on the device.
    """
    unlike = list[str]()
    if one.workload != other.workload:
        unlike.append("workload")
    if one.target != other.target:
        unlike.append("target")
    return tuple(unlike)


def _least_ratio(large: Compared, small: Compared, error: float) -> float | None:
    """Give the least ratio of two critical batch sizes whose intervals do not overlap.

    It is the lower end of the larger one over the upper end of the smaller one. None where the
    intervals overlap, one of these ends is open, or the chance that either end misses the truth is
    larger than ``error``.
    """
    low_end = large.b_crit_low
    high_end = small.b_crit_high
    # An interval misses the truth at either of its ends with chance (1 - level)/2: this is the sum
    # for two ends.
    missed = 1.0 - (large.level + small.level) / 2.0
    if low_end is None or high_end is None or missed > error + ERROR_ROUNDING:
        return None
    if low_end <= high_end:
        return None
    return low_end / high_end


def _known_size(study: Compared) -> float:
    """Give B_crit or, where it is not known, an end of its interval. 0 where both ends are open."""
    return study.b_crit or study.b_crit_low or study.b_crit_high or 0.0


def _log_deviation(low: float | None, high: float | None, level: float) -> float | None:
    """Give the standard deviation of log B_crit on one side of its median.

    ``low`` and ``high`` are the median and the interval's end on that side, the smaller one first.
    None where that end is open.
    """
    if low is None or high is None:
        return None
    # Each side is taken as half of a normal posterior of log B_crit.
    return math.log(high / low) / _normal_quantile(1.0 - level)


def _joint_deviation(first: float | None, second: float | None) -> float | None:
    """Give the standard deviation of the difference of two independent values, from their own.

    None where one of these is not known.
    """
    if first is None or second is None:
        return None
    return math.hypot(first, second)


def _normal_quantile(error: float) -> float:
    """Give the half width of an interval around the median of a normal distribution.

    It is in standard deviations. The interval misses the truth with the chance ``error``.
    """
    return NormalDist().inv_cdf(1.0 - error / 2.0)
