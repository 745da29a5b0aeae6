"""Several studies side by side: their critical batch sizes, how well one law fits all, and their times to target.

**Collapse.** If S(B) = S_min (1 + B_crit/B) holds, then the points of every study lie on one curve, S/S_min over
B/B_crit. How well they do is the root mean square of log(S/S_min) - log(1 + B_crit/B) over the frontier's points that
reached the target, as a percentage. Beside it stands how far runs scatter that differ in their seed alone: a deviation
of that size is noise, a larger one is the law's.

**Whether two critical batch sizes differ.** The studies are independent, and the posterior of log B_crit is taken to be
normal on either side of its median, as wide as the interval says. So the ratio of two has an interval, from the halves
that face each other; they differ where it leaves out 1. Of several pairs each gets its share of the error (Bonferroni),
so that all the intervals hold together at the stated level. Where an interval is open two studies are said to differ
only if the intervals do not overlap.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import NormalDist
from typing import Any

from bstune.core.console import format_number, format_seconds, plural
from bstune.report.answer import critical_text, expected_text
from bstune.report.rows import Row

LEVEL = 0.9  # of the intervals of the ratios, all of them together
LONGEST = 40  # characters of a study's name in a figure


@dataclass(frozen=True)
class Point:
    """A point of the frontier: steps to target or, where it was not reached, the last step known to miss it."""

    batch_size: float
    steps: float
    seconds: float | None  # to the target
    reached: bool


@dataclass(frozen=True)
class Use:
    """What a study says to use: seconds and steps are the median over fresh seeds, or predicted; None if unknown."""

    batch_size: float
    lr: float
    seconds: float | None
    low: float | None  # seconds, of the fresh seeds
    high: float | None
    reached: int  # of the runs on fresh seeds; 0 of 0 if none ran
    runs: int
    time: str  # the same in words
    steps: str

    @property
    def reliable(self) -> bool:
        """Whether every fresh seed reached the target."""
        return self.reached == self.runs


@dataclass(frozen=True)
class Compared:
    """A study as a comparison has it; None where the study does not say."""

    name: str  # unique in the comparison
    source: str  # the folder, file or run that it was read from
    workload: str
    target: str
    device: str
    points: tuple[Point, ...]  # in order of batch sizes
    curve: tuple[tuple[float, float], ...]  # batch sizes and S*(B)
    b_crit: float | None
    b_crit_low: float | None
    b_crit_high: float | None
    level: float
    s_min: float | None
    seed_scatter: float | None  # standard deviation of log S over seeds
    exponent: str  # of lr*(B)
    spend: str
    use: Use | None
    notes: tuple[str, ...]  # what is to be said of it, such as that nothing reached the target

    @property
    def reached(self) -> tuple[Point, ...]:
        """The points that reached the target."""
        return tuple(point for point in self.points if point.reached)

    @property
    def critical(self) -> str:
        """B_crit and its interval, in words."""
        if self.b_crit is None and self.b_crit_low is None and self.b_crit_high is None:
            return "not known"
        ends = {"b_crit": self.b_crit, "b_crit_low": self.b_crit_low, "b_crit_high": self.b_crit_high}
        return critical_text({**ends, "level": self.level})


@dataclass(frozen=True)
class Collapse:
    """How well the points of several studies lie on 1 + B_crit/B, as shares: 0.1 is 10%."""

    deviation: float  # root mean square over all points
    by_study: Mapping[str, float]  # the same of each study's points
    seeds: float | None  # how far steps scatter over seeds, root mean square over the studies that say so
    points: int
    smallest: float  # B/B_crit
    largest: float

    def __str__(self) -> str:
        where = f"B/B_crit from {format_number(self.smallest, 2)} to {format_number(self.largest, 2)}"
        several = len(self.by_study) > 1
        of = f" of {plural(len(self.by_study), 'study').replace('studys', 'studies')}" if several else ""
        text = f"{plural(self.points, 'point')}{of} lie within {self.deviation:.0%} (root mean square) of the law, {where}"
        if several:
            best, worst = (pick(self.by_study, key=self.by_study.__getitem__) for pick in (min, max))
            text += f": {self.by_study[best]:.0%} for {best}, {self.by_study[worst]:.0%} for {worst}"
        if self.seeds is None:
            return text
        verdict = "no more than seeds do" if self.deviation <= self.seeds else "more than seeds do"
        return f"{text}; runs that differ in the seed alone scatter by {self.seeds:.0%}: {verdict}"


@dataclass(frozen=True)
class Pair:
    """Two studies' critical batch sizes, the larger first; None where an end is open."""

    larger: str
    smaller: str
    ratio: float | None
    low: float | None
    high: float | None
    differ: bool | None  # None: not known

    def __str__(self) -> str:
        verdict = {True: "differ", False: "not shown to differ", None: "not known"}[self.differ]
        ends = [format_number(end, 2) for end in (self.ratio, self.low, self.high)]
        what = f"{self.larger} over {self.smaller}"
        if self.ratio is None:
            return f"{what}: {f'more than {ends[1]} times, ' if self.low is not None else ''}{verdict}"
        between = f"{ends[1]} to {ends[2]}" if self.low is not None else "open"
        return f"{what}: {ends[0]} times ({between}), {verdict}"


def compared(summary: Mapping[str, Any], source: str) -> Compared:
    """Return a study from the content of its ``curve.json``, of this version or an older one, whatever it lacks."""
    critical, name = _mapping(summary, "critical"), _text(summary, "study")
    fitted, scatter = _mapping(summary, "curve"), _positive(_mapping(summary, "seed_scatter"), "scatter")
    points = sorted(_points(summary), key=lambda point: point.batch_size)
    devices = summary.get("devices")
    curve = zip(*(_list(fitted, field) for field in ("batch_size", "steps")), strict=False)
    return Compared(
        name=name,
        source=source,
        workload=_text(summary, "workload"),
        target=_text(summary, "target"),
        device=", ".join(map(str, devices)) if isinstance(devices, list) and devices else "-",
        points=tuple(points),
        curve=tuple((size, steps) for size, steps in curve if size is not None and steps is not None),
        b_crit=_positive(critical, "b_crit"),
        b_crit_low=_positive(critical, "b_crit_low"),
        b_crit_high=_positive(critical, "b_crit_high"),
        level=_positive(critical, "level") or LEVEL,
        s_min=_positive(critical, "s_min"),
        seed_scatter=scatter,
        exponent=_exponent(_mapping(summary, "lr_exponent")),
        spend=_spend(_mapping(summary, "spend")),
        use=_use(summary),
        notes=tuple(_notes(summary, points)),
    )


def _mapping(row: Row, name: str) -> Row:
    value = row.get(name)
    return value if isinstance(value, Mapping) else {}


def _text(row: Row, name: str) -> str:
    value = row.get(name)
    return str(value) if value else "-"


def _number(value: object) -> float | None:
    usable = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if usable else None  # type: ignore[arg-type]


def _positive(row: Row, name: str) -> float | None:
    value = _number(row.get(name))
    return value if value is not None and value > 0.0 else None


def _list(row: Row, name: str) -> list[float | None]:
    values = row.get(name)
    return [_positive({name: value}, name) for value in values] if isinstance(values, list) else []


def _points(summary: Row) -> Iterable[Point]:
    rows = summary.get("points")
    for row in rows if isinstance(rows, list) else ():
        if isinstance(row, Mapping):
            reached = _positive(row, "steps")
            size, steps = _positive(row, "batch_size"), reached or _positive(row, "steps_low")
            if size is not None and steps is not None:
                yield Point(size, steps, _positive(row, "time_to_target"), reached is not None)


def _use(summary: Row) -> Use | None:
    """Return the winner by time or, of a study without seconds, by steps."""
    for name in ("best_by_time", "best_by_steps"):
        row = _mapping(summary, name)
        batch_size, lr = _positive(row, "batch_size"), _positive(row, "lr")
        if batch_size is None or lr is None:
            continue
        fresh = _mapping(row, "confirmed")
        reached, runs = (round(_positive(fresh, field) or 0.0) for field in ("reached", "runs"))
        ends = {f"{what}_{end}": _positive(fresh, f"{what}_{end}") for what in ("time", "steps") for end in ("low", "high")}
        expected = {field: _positive(row, field) for field in ("steps", "time_to_target")}
        worded = {**expected, "confirmed": ends if runs else None}
        return Use(
            batch_size=batch_size,
            lr=lr,
            seconds=expected["time_to_target"],
            low=ends["time_low"],
            high=ends["time_high"],
            reached=reached,
            runs=runs,
            time=expected_text("time", worded),
            steps=expected_text("steps", worded),
        )
    return None


def _exponent(row: Row) -> str:
    values = [_number(row.get(name)) for name in ("exponent", "low", "high")]
    if None in values:
        return "-"
    middle, low, high = (f"{value:z.2f}" for value in values)
    return f"{middle} ({low} to {high})" if row.get("identified") else "not identified"


def _spend(row: Row) -> str:
    runs, seconds = _positive(row, "runs"), _positive(row, "seconds")
    parts = [None if runs is None else plural(round(runs), "run"), None if seconds is None else format_seconds(seconds)]
    return ", ".join(part for part in parts if part) or "-"


def _notes(summary: Row, points: Sequence[Point]) -> Iterable[str]:
    """Yield what a reader has to know of a study, in its own words where it has them."""
    reached = {point.batch_size for point in points if point.reached}
    if not reached:
        yield str(summary.get("note") or "no trial reached the target")
    elif len(reached) == 1:
        yield "the target was reached at one batch size: there is no curve"
    warnings = summary.get("warnings")
    yield from (str(line) for line in (warnings if isinstance(warnings, list) else ()))
    if "critical" not in summary:
        yield "of an older version of bstune: run the same command again for its critical batch size"


def with_unique_names(studies: Sequence[Compared]) -> list[Compared]:
    """Return the studies, those that share a name with where they were read from in it."""
    count = Counter(study.name for study in studies)
    return [
        study if count[study.name] == 1 else replace(study, name=f"{study.name} ({study.source})") for study in studies
    ]


def collapse(studies: Sequence[Compared]) -> Collapse | None:
    """Return how well the studies' points lie on the law; None where no study has both B_crit and S_min."""
    squares: dict[str, list[float]] = {}
    places: list[float] = []
    for study in studies:
        if study.b_crit is not None and study.s_min is not None and study.reached:
            x = [point.batch_size / study.b_crit for point in study.reached]
            y = [point.steps / study.s_min for point in study.reached]
            squares[study.name] = [math.log(steps / (1.0 + 1.0 / size)) ** 2 for size, steps in zip(x, y, strict=True)]
            places += x
    if not squares:
        return None
    scatter = [study.seed_scatter**2 for study in studies if study.name in squares and study.seed_scatter is not None]
    return Collapse(
        deviation=_share([value for values in squares.values() for value in values]),
        by_study={name: _share(values) for name, values in squares.items()},
        seeds=_share(scatter) if scatter else None,
        points=len(places),
        smallest=min(places),
        largest=max(places),
    )


def _share(squares: Sequence[float]) -> float:
    """Return the root mean square of logarithms, as a share."""
    return math.expm1(math.sqrt(sum(squares) / len(squares)))


def pairs(studies: Sequence[Compared], level: float = LEVEL) -> list[Pair]:
    """Return each two studies' critical batch sizes as a ratio with its interval, all of them at one joint level."""
    both = list(combinations(studies, 2))
    return [_pair(one, other, (1.0 - level) / len(both)) for one, other in both]


def _pair(one: Compared, other: Compared, error: float) -> Pair:
    """Return the two in order; ``error`` is the chance that the interval of their ratio may leave the truth out."""
    large, small = sorted((one, other), key=_middle, reverse=True)
    if large.b_crit is None or small.b_crit is None:
        apart = [
            (above.name, below.name, above.b_crit_low / below.b_crit_high)
            for above, below in ((large, small), (small, large))
            if above.b_crit_low is not None and below.b_crit_high is not None and above.b_crit_low > below.b_crit_high
        ]
        for above, below, ratio in apart:
            return Pair(above, below, None, ratio, None, True)
        return Pair(large.name, small.name, None, None, None, None)
    log_ratio = math.log(large.b_crit / small.b_crit)
    down, up = (_width(large, small, error), _width(small, large, error))
    low = None if down is None else math.exp(log_ratio - down)
    high = None if up is None else math.exp(log_ratio + up)
    return Pair(large.name, small.name, math.exp(log_ratio), low, high, None if low is None else low > 1.0)


def _middle(study: Compared) -> float:
    """Return what orders a study by B_crit: an end of the interval where that is all there is."""
    return study.b_crit or study.b_crit_low or study.b_crit_high or 0.0


def _width(upper: Compared, lower: Compared, error: float) -> float | None:
    """Return how far log(upper/lower) may fall: of the one below its median, of the other above it; None if open."""
    if None in (upper.b_crit, upper.b_crit_low, lower.b_crit, lower.b_crit_high):
        return None
    falls = math.log(upper.b_crit / upper.b_crit_low) / _quantile(1.0 - upper.level)  # type: ignore[operator]
    rises = math.log(lower.b_crit_high / lower.b_crit) / _quantile(1.0 - lower.level)  # type: ignore[operator]
    return _quantile(error) * math.hypot(falls, rises)


def _quantile(error: float) -> float:
    """Return how many standard deviations a two-sided interval of that error reaches from the median."""
    return NormalDist().inv_cdf(1.0 - error / 2.0)


def judged(count: int) -> str:
    """Return how ``count`` pairs were judged, in words."""
    together = "" if count == 1 else f", for all {count} pairs together (Bonferroni)"
    return (
        f"two critical batch sizes differ where the {LEVEL:.0%} interval of their ratio leaves out 1{together}: studies are "
        "independent, and log B_crit is normal on either side of its median, as wide as its interval; where an interval "
        "is open, only if the two do not overlap"
    )


def differences(studies: Sequence[Compared]) -> list[str]:
    """Return a line for each thing, beside the workload, in which the studies differ, and what that means."""
    lines = []
    if len({study.target for study in studies}) > 1:
        lines.append("the targets differ: they stand beside each study; B_crit grows as a target gets harder")
    if len({study.device for study in studies}) > 1:
        lines.append("the devices differ: seconds are each device's own; steps and B_crit do not depend on it")
    return lines
