"""Several studies beside each other: a table, ratios with intervals, a power law over size."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np

from bstune.core.errors import InputError
from bstune.core.records import Frozen
from bstune.report.answer import brackets, critical_text, where
from bstune.study.result import Confirmed, Interval, StudyResult
from bstune.system import console

# What a power law can be over, without values of one's own.
Over = Literal["parameters", "examples"]
LEAST_STUDIES = 3
# No power law is read further beyond its largest study.
FURTHEST = 4.0
LABELS = {
    "critical batch size": "Critical",
    "time to target": "Time",
    "steps to target": "Steps",
}
# Of a two-sided 90% interval.
QUANTILE = 0.95


class Ratio(Frozen):
    """How many times as large a value of a study is as that of the first one."""

    of: Literal["critical batch size", "time to target", "steps to target"]
    study: str
    first: str
    ratio: Interval
    """Of 90%, by the method of variance estimates recovery on the logs (Zou and Donner 2008, Stat.
    Med. 27, 1693): the distances of the two intervals' ends, squared, are added."""


class PowerLaw(Frozen):
    """B_crit = c N^b over a size N, by least squares on the logs of studies whose B_crit is known.

    Its intervals of 90% are by Student's t with two degrees of freedom fewer than there are
    studies: they know how far the studies lie off the law, not how uncertain each B_crit is.
    """

    over: str
    values: dict[str, float]
    """N of each study that has a critical batch size."""
    exponent: Interval
    furthest: float
    """Four times the largest N; the law says nothing beyond."""
    at_furthest: Interval
    """B_crit there."""


class Comparison(Frozen):
    """What studies say beside each other; ``print()`` shows it."""

    schema_number: Literal[1] = 1
    studies: dict[str, StudyResult]
    """By the names of the table."""
    differences: dict[str, tuple[str, ...]]
    """Of all studies, in their order, where they are not the same: target, device, ..."""
    ratios: tuple[Ratio, ...]
    law: PowerLaw | None = None

    def __str__(self) -> str:
        return render(self)


def compare_results(
    results: Mapping[str, StudyResult],
    over: str | None = None,
    values: Mapping[str, float] | None = None,
) -> Comparison:
    """Compare studies.

    Args:
        results: two or more, by their names.
        over: what a power law of B_crit is over: ``parameters`` or ``examples`` of each study, or a
            name for ``values``.
        values: the size of each study, by its name, where its result does not have it.

    Raises:
        InputError: they are too few, of two metrics, of objectives in different units, or have no
            sizes.
    """
    if len(results) < 2:
        raise InputError(f"compare takes two studies or more, but got {len(results)}")
    metrics = {result.target.metric: name for name, result in results.items()}
    if len(metrics) > 1:
        named = " and ".join(f"{metric} ({name})" for metric, name in metrics.items())
        raise InputError(f"compare takes studies of one metric, but got {named}")
    seek_metric = [name for name, result in results.items() if result.seeks_metric]
    if 0 < len(seek_metric) < len(results):
        raise InputError(
            f"compare takes studies that all have objective=metric, or none, but got it of "
            f"{', '.join(seek_metric)} alone"
        )
    first, *others = results
    pairs = [(first, name) for name in others]
    ratios = [_ratio(of, results, *pair) for of in QUANTITIES for pair in pairs]
    law = None
    if over is not None or values is not None:
        law = power_law(results, over or "size", values or {})
    return Comparison(
        studies=dict(results),
        differences=_differences(list(results.values())),
        ratios=tuple(one for one in ratios if one is not None),
        law=law,
    )


def critical_of(result: StudyResult) -> Interval | None:
    """Give the critical batch size of a study, if it has one."""
    return None if result.critical is None else result.critical.interval


def _value_of_best(read: Callable[[Confirmed], Interval], result: StudyResult) -> Interval | None:
    """A value of the best that was run on new seeds; a bound has no ratio."""
    best = result.best
    is_known = best is not None and best.runs and not best.is_bound and not result.seeks_metric
    return read(best) if best is not None and is_known else None


def _seconds_interval(best: Confirmed) -> Interval:
    return Interval(value=best.seconds, low=best.seconds_low, high=best.seconds_high)


def _steps_interval(best: Confirmed) -> Interval:
    return Interval(value=best.steps, low=best.steps_low, high=best.steps_high)


QUANTITIES: dict[Any, Callable[[StudyResult], Interval | None]] = {
    "critical batch size": critical_of,
    "time to target": partial(_value_of_best, _seconds_interval),
    "steps to target": partial(_value_of_best, _steps_interval),
}


def _ratio(of: Any, results: Mapping[str, StudyResult], first: str, study: str) -> Ratio | None:
    """A quantity of a study over the first one's; None where one of them does not have it."""
    below, above = (QUANTITIES[of](results[name]) for name in (first, study))
    if below is None or above is None or below.value is None or above.value is None:
        return None
    interval = quotient(above, below)
    return Ratio(of=of, study=study, first=first, ratio=interval)


def quotient(above: Interval, below: Interval) -> Interval:
    """The quotient of two independent positive values, with an interval as of :class:`Ratio`."""
    value = _log_or_infinite(above.value) - _log_or_infinite(below.value)
    down = math.hypot(
        _log_or_infinite(above.value) - _log_or_infinite(above.low),
        _log_or_infinite(below.high) - _log_or_infinite(below.value),
    )
    up = math.hypot(
        _log_or_infinite(above.high) - _log_or_infinite(above.value),
        _log_or_infinite(below.value) - _log_or_infinite(below.low),
    )
    low, high = (None if math.isinf(end) else math.exp(end) for end in (value - down, value + up))
    return Interval(value=math.exp(value), low=low, high=high)


def _log_or_infinite(value: float | None) -> float:
    """An open end is infinitely far away, on whichever side it is."""
    return math.inf if not value else math.log(value)


def _differences(results: Sequence[StudyResult]) -> dict[str, tuple[str, ...]]:
    """What the studies do not share, by its name."""
    seen = {
        "workload": [result.workload for result in results],
        "target": [str(result.target) for result in results],
        "objective": [str(result.objective) for result in results],
        "device": [where(result) for result in results],
        "parameters": [f"{result.parameters:,}" if result.parameters else "" for result in results],
        "examples": [f"{result.examples:,}" if result.examples else "" for result in results],
        "bstune": [result.bstune for result in results],
    }
    return {name: tuple(texts) for name, texts in seen.items() if len(set(texts)) > 1}


def power_law(
    results: Mapping[str, StudyResult], over: str, given: Mapping[str, float]
) -> PowerLaw:
    """Fit B_crit = c N^b to the studies that have a B_crit.

    Args:
        results: by name.
        over: as of :func:`compare_results`.
        given: sizes N by name, in place of the results' own.

    Raises:
        InputError: a study has no size, or fewer than three have a B_crit.
    """
    unknown = set(given) - set(results)
    if unknown:
        raise InputError(f"there is no study {min(unknown)}: compare has {', '.join(results)}")
    sizes: dict[str, float] = {}
    for name, result in results.items():
        critical = critical_of(result)
        if critical is None or critical.value is None:
            continue
        size = given.get(name, getattr(result, over, None))
        if not size or size <= 0.0:
            raise InputError(f"{name} does not tell its {over}: give it by values, {name}=SIZE")
        sizes[name] = float(size)
    if len(sizes) < LEAST_STUDIES or len(set(sizes.values())) < LEAST_STUDIES:
        raise InputError(
            f"a power law takes {LEAST_STUDIES} studies of different sizes with a critical batch "
            f"size, but got {len(set(sizes.values()))}"
        )
    x = np.log(list(sizes.values()))
    y = np.log([_known_b_crit(results[name]) for name in sizes])
    # It takes a second to import.
    from scipy.stats import linregress
    from scipy.stats import t as student

    # Around the mean the errors of slope and intercept are independent.
    fit = linregress(x - x.mean(), y)
    quantile = float(student.ppf(QUANTILE, len(x) - 2))
    slope = float(fit.slope)
    of_slope = quantile * float(fit.stderr)
    furthest = FURTHEST * max(sizes.values())
    beyond = math.log(furthest) - float(x.mean())
    middle = float(fit.intercept) + slope * beyond
    error = math.hypot(quantile * float(fit.intercept_stderr), of_slope * beyond)
    return PowerLaw(
        over=over,
        values=sizes,
        exponent=Interval(value=slope, low=slope - of_slope, high=slope + of_slope),
        furthest=furthest,
        at_furthest=Interval(
            value=math.exp(middle), low=math.exp(middle - error), high=math.exp(middle + error)
        ),
    )


def _known_b_crit(result: StudyResult) -> float:
    """B_crit of a result that has one."""
    critical = critical_of(result)
    assert critical is not None and critical.value is not None  # noqa: PT018, S101
    return critical.value


def render(comparison: Comparison) -> str:
    """Write the table, the ratios, the law and what differs, in 80 columns."""
    rows = table(comparison)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    lines.append("")
    lines += [console.wrap(*row) for row in statements(comparison)]
    return console.plain("\n".join(lines))


def table(comparison: Comparison) -> list[tuple[str, ...]]:
    """A line of names, then a study a line: its best, what that takes, its critical batch size."""
    first = next(iter(comparison.studies.values()))
    takes = first.target.metric if first.seeks_metric else "to target"
    rows: list[tuple[str, ...]] = [("study", "batch size", "lr", takes, "critical batch size")]
    for name, result in comparison.studies.items():
        critical = ""
        if result.critical is not None:
            # Why it has an open end stands in the study's own answer.
            critical = critical_text(result.critical).partition(":")[0]
        rows.append((name, *_cells_of_best(result), critical.removeprefix("batch size ")))
    return rows


def _cells_of_best(result: StudyResult) -> tuple[str, str, str]:
    """Its batch size, its rate, and its metric or seconds to target; empty where there is none."""
    best = result.best
    if best is None:
        return "", "", ""
    if result.seeks_metric:
        takes = "" if best.metric is None else console.number(best.metric, 4)
    elif best.is_bound:
        takes = f"above {console.seconds(best.seconds)}"
    else:
        takes = console.seconds(best.seconds)
    return f"{best.batch_size:,}", console.number(best.lr), takes


def statements(comparison: Comparison) -> list[tuple[str, str]]:
    """The rows below the table: labels and texts."""
    write = partial(console.number, digits=2)
    rows = []
    for of, label in LABELS.items():
        texts = []
        for one in comparison.ratios:
            if one.of == of:
                ends = brackets(one.ratio.low, one.ratio.high, write)
                texts.append(f"{one.study} {console.speedup(one.ratio.value or 0.0)}{ends}")
        if texts:
            first = next(iter(comparison.studies))
            rows.append((label, f"{of} over {first}'s: {', '.join(texts)}"))
    law = comparison.law
    if law is not None and law.exponent.value is not None and law.at_furthest.value is not None:
        power = brackets(law.exponent.low, law.exponent.high, "{:.2f}".format)
        ends = brackets(law.at_furthest.low, law.at_furthest.high, write)
        text = (
            f"the critical batch size of {len(law.values)} studies grows as "
            f"{law.over}^{law.exponent.value:.2f}{power}; {write(law.at_furthest.value)}{ends} at "
            f"{console.number(law.furthest)}, four times the largest"
        )
        rows.append(("Law", text))
    for name, values in comparison.differences.items():
        parts = [
            f"{study} {value}" for study, value in zip(comparison.studies, values, strict=True)
        ]
        rows.append(("Differ", f"{name}: {'; '.join(parts)}"))
    return rows
