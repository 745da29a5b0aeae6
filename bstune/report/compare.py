"""Several studies side by side: their critical batch sizes, how well one law fits all, and their times to target.

**Collapse.** If S(B) = S_min (1 + B_crit/B) holds, then the curves of all studies are one, S/S_min over B/B_crit. How
well they are is the root mean square of log(S*(B)/S_min) - log(1 + B_crit/B) over the batch sizes that reached the
target, evenly in log B, each study counting alike. S*(B) is the posterior's, at the best learning rate, with what a
smooth curve may add to the law; where trials are few it is drawn to the law. So beside it stands at which share of the
batch sizes the law lies in the study's own interval of S*(B): far below the interval's level, the trials speak against
the law.

**Whether two critical batch sizes differ.** The studies are independent, and the posterior of log B_crit is taken to be
normal on either side of its median, as wide as the interval says. So the ratio of two has an interval, from the halves
that face each other; they differ where it leaves out 1. Of several pairs each gets its share of the error (Bonferroni),
so that all the intervals hold together at the stated level. Where an interval is open two studies are said to differ
only if the intervals do not overlap.
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
from bstune.report import budget_answer
from bstune.report.answer import critical_text, device_text, expected_text, warnings
from bstune.report.budget_answer import budget_words
from bstune.report.schema import read_result
from bstune.report.study_folder import StudyFolder, each_study, read_study
from bstune.result import AtBudget, Gain, StudyResult
from bstune.system.console import format_count, format_number, format_seconds, plural

if TYPE_CHECKING:
    from bstune.report.picture import Picture

LEVEL = 0.9  # of the intervals of the ratios, all of them together
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Point:
    """A batch size of the frontier, in examples, and the steps and seconds that it took to the target."""

    batch_size: float
    steps: float
    seconds: float | None


@dataclass(frozen=True)
class Use:
    """What a study says to use; seconds and their range are those of fresh seeds, None where they are not known."""

    batch_size: float
    lr: float
    hyperparameters: Mapping[str, float | None]  # further ones that the study searches, by name
    seconds: float | None  # median, or predicted
    low: float | None
    high: float | None
    reached: int  # of the runs on fresh seeds
    runs: int
    text: str  # what it takes, in words

    @property
    def reliable(self) -> bool:
        """Whether there were fresh seeds, and each of them reached the target."""
        return 0 < self.runs == self.reached

    @property
    def further(self) -> str:
        """The further hyper-parameters in words; empty where the study searches none."""
        parts = [f"{name} = {format_number(value)}" for name, value in self.hyperparameters.items()]
        return ", ".join(parts)

    @property
    def fresh(self) -> str:
        """How many fresh seeds reached the target, and their range of seconds, in words."""
        if not self.runs:
            return "none ran"
        text = f"{self.reached} of {self.runs}"
        if self.low is None:
            return text
        if self.high is None:
            return f"{text}, {format_seconds(self.low)} and more"
        return f"{text}, {format_seconds(self.low)} to {format_seconds(self.high)}"

    def __str__(self) -> str:
        text = f"B = {format_count(self.batch_size)}, lr = {format_number(self.lr)}"
        return f"{text}, {self.further}" if self.further else text


@dataclass(frozen=True)
class Compared:
    """A study as a comparison has it; None where the study does not say."""

    name: str  # unique in the comparison
    source: str  # the folder or run that it was read from
    workload: str
    target: str
    device: str
    points: tuple[Point, ...]  # that reached the target, in order of batch sizes
    batch_size: Array  # of the fitted curve, shape (n,) ...
    steps: Array  # ... S*(B) there, and its interval: all empty where there is none
    steps_low: Array
    steps_high: Array
    seconds: Array  # T(B) = S*(B) tau(B); empty where tau(B) is not known
    b_crit: float | None
    b_crit_low: float | None
    b_crit_high: float | None
    level: float  # of that interval
    critical: str  # the same, in words
    s_min: float | None
    exponent: float | None  # of lr*(B), if it is identified
    exponent_text: str
    spend_seconds: float | None
    spend: str
    use: Use | None
    gain: float | None  # how many times as fast what it says to use is as the baseline
    gain_text: str  # the same with its interval, in words
    notes: tuple[str, ...]  # such as that nothing reached the target

    @property
    def mark(self) -> tuple[float, float] | None:
        """Where B_crit lies on the curve, (B, S); None where there is no B_crit or no curve."""
        if self.b_crit is None or not self.batch_size.size:
            return None
        log_steps = np.interp(math.log(self.b_crit), np.log(self.batch_size), np.log(self.steps))
        return self.b_crit, float(np.exp(log_steps))


@dataclass(frozen=True)
class Collapse:
    """How well the curves of several studies lie on 1 + B_crit/B, as shares: 0.1 is 10%."""

    deviation: float  # root mean square over the studies
    by_study: Mapping[str, float]  # of each study
    inside: float  # share of the batch sizes at which the law lies in a study's interval ...
    level: float  # ... of this level
    smallest: float  # B/B_crit
    largest: float

    def __str__(self) -> str:
        span = f"{format_number(self.smallest, 2)} to {format_number(self.largest, 2)}"
        text = f"S*(B) lies within {self.deviation:.0%} of it (root mean square, B/B_crit = {span}"
        if len(self.by_study) > 1:
            best, worst = (
                pick(self.by_study, key=self.by_study.__getitem__) for pick in (min, max)
            )
            text += (
                f"; {self.by_study[best]:.0%} for {best}, {self.by_study[worst]:.0%} for {worst}"
            )
        return f"{text}); {self.level:.0%} intervals of S*(B) hold it at {self.inside:.0%} of the batch sizes"


@dataclass(frozen=True)
class Pair:
    """Two studies' critical batch sizes, the larger first; None where an end is open."""

    larger: str
    smaller: str
    ratio: float | None
    low: float | None
    high: float | None
    differ: bool | None  # None: not known

    @property
    def interval(self) -> str:
        """The interval of the ratio, in words."""
        low, high = (
            format_number(end, 3) for end in (self.low, self.high)
        )  # three digits: 1.04 differs from 1
        if self.low is None or self.high is None:
            return (
                "open"
                if self.low is self.high
                else f"above {low}"
                if self.high is None
                else f"below {high}"
            )
        return f"{low} to {high}"

    @property
    def verdict(self) -> str:
        """Whether they differ, in words."""
        return {True: "differ", False: "not shown to differ", None: "not known"}[self.differ]

    def __str__(self) -> str:
        what = f"{self.larger} over {self.smaller}"
        if self.ratio is not None:
            return f"{what}: {format_number(self.ratio, 2)} times ({self.interval}), {self.verdict}"
        return f"{what}: {self.verdict if self.low is None else f'{self.interval} times, {self.verdict}'}"


@dataclass(frozen=True, repr=False)
class Comparison:
    """What is shown of several studies."""

    studies: tuple[Compared, ...]
    collapse: Collapse | None  # None: no study has a critical batch size
    pairs: tuple[Pair, ...]
    notes: tuple[str, ...]  # what differs between the studies, and what was left out

    def plot(self) -> "Picture":
        """Draw ``comparison.png`` as a matplotlib figure, which a notebook shows as a cell's value."""
        # It needs this module, and a comparison's numbers do not need it.
        from bstune.report.compare_figure import comparison_figure

        return comparison_figure(self)

    def _repr_html_(self) -> str:
        """Show a row for each study, what there is to know, and the picture in a notebook."""
        # as above
        from bstune.report.notebook import comparison_html

        return comparison_html(self)

    def __repr__(self) -> str:
        return f"Comparison({self.title})"

    @property
    def title(self) -> str:
        """How many studies of what, on what."""
        counts = {
            name: len({getattr(one, name) for one in self.studies})
            for name in ("workload", "target", "device")
        }
        count = len(self.studies)
        return " · ".join(
            [
                f"{count} {'study' if count == 1 else 'studies'}",
                *(plural(n, one) for one, n in counts.items()),
            ]
        )

    @property
    def judged(self) -> str:
        """How the pairs were judged, in words."""
        together = (
            f", of all {len(self.pairs)} pairs together (Bonferroni),"
            if len(self.pairs) > 1
            else ""
        )
        return (
            f"Two critical batch sizes differ where the {LEVEL:.0%} interval of their ratio{together} leaves out 1: "
            "studies are independent, and log B_crit is normal on either side of its median, as wide as its interval "
            "says. Where an interval is open, two differ if the intervals do not overlap."
        )


def compare(studies: Sequence[Compared], left_out: Sequence[str] = ()) -> Comparison:
    """Return the comparison of at least one study; StudyError of none, with a line for each that was left out."""
    if not studies:
        raise StudyError("\n".join(["there is no study to compare", *left_out]))
    named = _with_unique_names(studies)
    return Comparison(
        tuple(named), collapse(named), tuple(pairs(named)), (*_differences(named), *left_out)
    )


def read_studies(
    paths: Sequence[str], read: Callable[[str], StudyFolder] = read_study
) -> tuple[list[Compared], list[str]]:
    """Return the studies in folders, or ``curve.json`` files, and a line for each that cannot be read.

    A folder that is given twice counts once; StudyError for one that is not there, as its name may be mistyped.
    ``read`` gives a study of its path: as it found, or at another target.
    """
    left_out = list[str]()
    studies = [compared(study.result, path) for path, study in each_study(paths, left_out, read)]
    return studies, left_out


@dataclass(frozen=True)
class LoggedCurve:
    """What a run of MLflow holds of a study: the text of its ``curve.json``, or why there is none."""

    run: str
    text: str | None
    missing: str = ""


def logged_studies(
    logged: Sequence[LoggedCurve],
) -> tuple[list[Compared], list[str]]:
    """Return the studies that MLflow has, and a line for each run without a result."""
    studies = list[Compared]()
    left_out = list[str]()
    for one in logged:
        if one.text is None:
            left_out.append(f"left out: {one.run}: {one.missing}")
            continue
        try:
            studies.append(compared(read_result(one.text, "its curve.json"), one.run))
        except StudyError as error:
            left_out.append(f"left out: {one.run}: {error}")
    return studies, left_out


def compared(result: StudyResult, source: str) -> Compared:
    """Take of a study's result what a comparison shows; ``source``: the folder or run that it was read from."""
    critical, law, curve = result.critical_batch_size, result.lr_exponent, result.curve
    points = [
        Point(point.batch_size, point.steps, point.time_to_target)
        for point in result.points
        if point.steps
    ]
    points.sort(key=lambda point: point.batch_size)
    none = np.empty(0)
    seconds = none
    if curve is not None and curve.seconds_per_step is not None:
        seconds = np.array(curve.steps) * np.array(curve.seconds_per_step)
    has_critical = critical is not None and any((critical.low, critical.value, critical.high))
    is_identified = law is not None and law.identified
    exponent_text = "not known"
    if law is not None and law.identified:
        exponent_text = f"{law.exponent:z.2f} ({law.low:z.2f} to {law.high:z.2f})"
    spend = f"{plural(result.spend.trials, 'trial')}, {format_seconds(result.spend.seconds)}"
    return Compared(
        name=result.study,
        source=source,
        workload=result.workload,
        target=result.target,
        device=", ".join(map(device_text, result.devices)) or "-",
        points=tuple(points),
        batch_size=none if curve is None else np.array(curve.batch_size),
        steps=none if curve is None else np.array(curve.steps),
        steps_low=none if curve is None else np.array(curve.low),
        steps_high=none if curve is None else np.array(curve.high),
        seconds=seconds,
        b_crit=None if critical is None else critical.value,
        b_crit_low=None if critical is None else critical.low,
        b_crit_high=None if critical is None else critical.high,
        level=LEVEL if critical is None else critical.level,
        critical=critical_text(critical) if critical and has_critical else "not known",
        s_min=None if critical is None else critical.s_min,
        exponent=law.exponent if law and is_identified else None,
        exponent_text=exponent_text,
        spend_seconds=result.spend.seconds,
        spend=spend,
        use=_use(result),
        gain=None if result.gain is None else result.gain.ratio,
        gain_text=_gain_text(result),
        notes=tuple(_notes(result, points)),
    )


def _gain_text(result: StudyResult) -> str:
    if result.at_budget is None:
        return gain_text(result.gain)
    told = result.at_budget.gain
    if told is None:
        return "not known" if result.at_budget.baseline is None else "none"
    return f"{result.metric} by {format_number(told.difference, 2)}"


def gain_text(gain: Gain | None) -> str:
    """Write ``1.45 times (1.3 to 1.7)``, or ``at least 2.4 times`` where the baseline was stopped."""
    if gain is None:
        return "not known"
    of = ", in steps" if gain.merit == "steps" else ""
    ratio = f"{format_number(gain.ratio)} times"
    if gain.at_least or gain.low is None:
        return f"at least {ratio}{of}"
    return f"{ratio} ({format_number(gain.low, 2)} to {format_number(gain.high, 2)}){of}"


def _use(result: StudyResult) -> Use | None:
    """Tell what a study says to use; None where nothing reached the target."""
    if result.at_budget is not None:
        return _use_at_budget(result.metric, result.at_budget)
    winner = result.winner
    if winner is None:
        return None
    fresh = winner.confirmed
    low, high = (None, None) if fresh is None else fresh.ends("time")
    return Use(
        batch_size=winner.batch_size,
        lr=winner.lr,
        hyperparameters=winner.hyperparameters,
        seconds=winner.time_to_target,
        low=low,
        high=high,
        reached=0 if fresh is None else fresh.reached,
        runs=0 if fresh is None else fresh.runs,
        text=expected_text(winner),
    )


def _use_at_budget(metric: str, found: AtBudget) -> Use:
    """Tell what a study of the objective loss says to use."""
    point = found.winner
    runs = 0 if point.fresh is None else len(point.fresh.values)
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
        text=f"{metric} {value} after {budget_words(found)}",
    )


def _notes(result: StudyResult, points: Sequence[Point]) -> list[str]:
    """Return what a reader has to know of a study."""
    if result.objective == "loss":
        return [line for line in budget_answer.cautions(result) if line is not None]
    lines = list(warnings(result))
    if points and points[0].batch_size == points[-1].batch_size:
        lines.append("the target was reached at one batch size, so there is no curve")
    return lines


def _with_unique_names(studies: Sequence[Compared]) -> list[Compared]:
    """Return the studies, those that share a name with where they were read from in it."""
    count = Counter(study.name for study in studies)
    return [
        study if count[study.name] == 1 else replace(study, name=f"{study.name} ({study.source})")
        for study in studies
    ]


def _differences(studies: Sequence[Compared]) -> list[str]:
    """Return a line for each thing, beside the workload, in which the studies differ, and what that means."""
    lines = []
    if len({study.target for study in studies}) > 1:
        lines.append("the targets differ: each stands beside its study")
    if len({study.device for study in studies}) > 1:
        lines.append(
            "the devices differ: seconds are each device's own, steps and B_crit do not depend on it"
        )
    return lines


def collapse(studies: Sequence[Compared]) -> Collapse | None:
    """Return how well the studies' curves lie on the law; None where no study has a curve, B_crit and S_min."""
    squares: dict[str, float] = {}
    inside, ends, levels = list[float](), list[float](), set[float]()
    for study in studies:
        if study.b_crit is None or study.s_min is None or not study.steps.size:
            continue
        law = study.s_min * (1.0 + study.b_crit / study.batch_size)
        squares[study.name] = float(np.mean(np.log(study.steps / law) ** 2))
        inside.append(float(np.mean((study.steps_low <= law) & (law <= study.steps_high))))
        ends += [float(end) / study.b_crit for end in (study.batch_size[0], study.batch_size[-1])]
        levels.add(study.level)
    if not squares:
        return None
    return Collapse(
        deviation=_share(sum(squares.values()) / len(squares)),
        by_study={name: _share(square) for name, square in squares.items()},
        inside=sum(inside) / len(inside),
        level=min(levels),
        smallest=min(ends),
        largest=max(ends),
    )


def collapsed(study: Compared) -> tuple[Array, Array] | None:
    """Return B/B_crit and S/S_min of a study's points, shape (n,); None where either scale or a point is missing."""
    if study.b_crit is None or study.s_min is None or not study.points:
        return None
    size, steps = (
        np.array([getattr(one, name) for one in study.points]) for name in ("batch_size", "steps")
    )
    return size / study.b_crit, steps / study.s_min


def _share(square: float) -> float:
    """Return a mean square of logarithms as a share."""
    return math.expm1(math.sqrt(square))


def pairs(studies: Sequence[Compared], level: float = LEVEL) -> list[Pair]:
    """Return each two studies' critical batch sizes as a ratio with its interval, all of them at one joint level."""
    both = list(combinations(studies, 2))
    return [_pair(one, other, (1.0 - level) / len(both)) for one, other in both]


def _pair(one: Compared, other: Compared, error: float) -> Pair:
    """Return the two in order; ``error`` is the chance that the interval of their ratio leaves out the truth."""
    large, small = sorted((one, other), key=_order, reverse=True)
    if large.b_crit is None or small.b_crit is None:
        low, missed = (
            None,
            1.0 - (large.level + small.level) / 2.0,
        )  # the chance that either end misses the truth
        if (
            large.b_crit_low is not None
            and small.b_crit_high is not None
            and missed <= error + 1e-9
        ):
            low = (
                large.b_crit_low / small.b_crit_high
                if large.b_crit_low > small.b_crit_high
                else None
            )
        return Pair(large.name, small.name, None, low, None, None if low is None else True)
    ratio, high = large.b_crit / small.b_crit, None
    falls = (
        _width(large.b_crit_low, large.b_crit, large.level),
        _width(small.b_crit, small.b_crit_high, small.level),
    )
    rises = (
        _width(large.b_crit, large.b_crit_high, large.level),
        _width(small.b_crit_low, small.b_crit, small.level),
    )
    low, high = (
        None
        if None in widths
        else ratio * math.exp(sign * _deviations(error) * math.hypot(*widths))  # type: ignore[arg-type]
        for sign, widths in ((-1.0, falls), (1.0, rises))
    )
    return Pair(large.name, small.name, ratio, low, high, None if low is None else low > 1.0)


def _order(study: Compared) -> float:
    """Return what orders a study by B_crit: an end of its interval where that is all there is."""
    return study.b_crit or study.b_crit_low or study.b_crit_high or 0.0


def _width(low: float | None, high: float | None, level: float) -> float | None:
    """Return the standard deviation of log B_crit on one side of its median, from the interval's half; None if open."""
    return None if low is None or high is None else math.log(high / low) / _deviations(1.0 - level)


def _deviations(error: float) -> float:
    """Return how many standard deviations a two-sided interval of that error reaches from the median."""
    return NormalDist().inv_cdf(1.0 - error / 2.0)
