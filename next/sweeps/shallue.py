"""Studies that differ in one factor: what moves the critical batch size, and the law they share.

Shallue et al. 2018 (arXiv 1811.03600) measured steps to target over batch size for models, training
algorithms and data sets. Every workload showed the same three regimes (their figure 1): perfect
scaling, diminishing returns and maximal data parallelism; where they lie differed.
"""

import math
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas import DataFrame, Series
from pydantic import Field, NonNegativeInt
from scipy.stats import ttest_ind

from bstune.core.curve import REGIME_RATIO
from bstune.core.records import ends
from bstune.report.compare_page import STEPS
from bstune.report.figure import draw_legend, scale
from bstune.result import Result, load
from bstune.search.findings import NEAR_OPTIMAL
from bstune.study.result import Critical
from bstune.sweeps.studies import study

INCHES = (11.0, 4.8)
SHARE = 0.9
# The law is drawn over so many times B_crit, on both sides.
REACH = 64.0

Seeds = Annotated[list[NonNegativeInt], Field(min_length=1)]
Arguments = list[str]


def compare(
    output: Path,
    *,
    factor: str,
    seeds: Seeds,
    common: Arguments,
    studies: dict[str, Arguments],
    options: Arguments,
) -> tuple[DataFrame, Figure]:
    """Run studies that differ in one factor, and compare their critical batch sizes.

    Args:
        output: gets a folder a study and seed.
        factor: what they differ in.
        seeds: of the studies; each study is run with each of them.
        common: arguments of all studies, as on the command line.
        studies: further arguments of each study, by its name. Ratios are over the first one.
        options: arguments of all studies, after all others.

    Returns:
        A row a study and seed, as of :func:`row`, with ``ratio``: how many times as large the
        study's B_crit is as the first one's, by the geometric mean over seeds, and the ends of its
        90% interval by Welch's t of the logs.
    """
    results = {}
    for name, seed in product(studies, seeds):
        arguments = [*common, *studies[name], *options, f"seed={seed}"]
        results[name, seed] = study(f"{name}-{seed}", output, arguments)
    table = table_of(factor, results)
    logs = np.log(table["b_crit"]).groupby(table[factor], sort=False)
    samples = {str(name): sample.dropna() for name, sample in logs}
    first, *others = samples
    ratios = {name: np.exp(difference(samples[name], samples[first])) for name in others}
    for place, column in enumerate(("ratio", "ratio_low", "ratio_high")):
        table[column] = [ratios[name][place] if name in ratios else None for name in table[factor]]
    return table.dropna(axis="columns", how="all"), figure(factor, results, table)


def panel(
    output: Path, *, folders: list[Path], tables: list[str], options: Arguments
) -> tuple[DataFrame, Figure]:
    """Put workloads on one law: batch sizes over B_crit, steps over S_min.

    Args:
        output: gets a folder a table.
        folders: of studies.
        tables: of recorded runs, which are studied here.
        options: arguments of these studies.

    Returns:
        A row a workload, as of :func:`row`.
    """
    results = {(folder.name, 0): load(folder) for folder in folders}
    for name in tables:
        results[name, 0] = study(name, output, ["+workload=replay", f"table={name}", *options])
    table = table_of("workload", results)
    return table, figure("workload", results, table)


Results = Mapping[tuple[str, int], Result]
"""By the study's name and seed."""


def table_of(factor: str, results: Results) -> DataFrame:
    """A row a study."""
    rows = []
    for (name, seed), result in results.items():
        rows.append({factor: name, "seed": seed} | row(result))
    return DataFrame(rows)


def row(result: Result) -> dict[str, Any]:
    """What a study says of its curve.

    Returns:
        How many trials reached the target, of how many; with one that did B_crit, its 90% interval
        and S_min (NaN where they are not known); the slopes of log S* over log B at the smallest
        and the largest batch size that reached it (-1 is perfect scaling, 0 no gain); ``useful``,
        the smallest batch size whose predicted steps are at most 1.1 times the fewest, and its best
        rate; the best pair with its seconds, where the study sought one; ``off_law`` as of
        :func:`off_law`; and whether a batch size in either outer regime reached the target.
    """
    points = reached(result)
    values: dict[str, Any] = {"reached": len(points), "trials": result.configurations}
    critical = result.critical
    if critical is None:
        return values
    sizes, steps = np.array([(point.batch_size, point.steps) for point in result.curve]).T
    slope = np.gradient(np.log(steps), np.log(sizes))
    small, large = np.interp([critical.smallest, critical.largest], sizes, slope)
    within = [point for point in result.curve if point.batch_size <= critical.largest]
    limit = NEAR_OPTIMAL * min(point.steps for point in within)
    useful = next(point for point in within if point.steps <= limit)
    values |= {
        "b_crit": critical.interval.value,
        "low": critical.interval.low,
        "high": critical.interval.high,
        "s_min": critical.s_min,
        "slope_small": small,
        "slope_large": large,
        "useful": useful.batch_size,
        "useful_lr": useful.lr,
    }
    if result.best is not None:
        best = result.best
        values |= {"best": best.batch_size, "best_lr": best.lr, "seconds": best.seconds}
    if critical.interval.value is not None:
        b_crit = critical.interval.value
        values["off_law"] = off_law(tuned(points, b_crit), b_crit, critical.s_min or math.nan)
        values["perfect"] = critical.smallest <= b_crit / REGIME_RATIO
        values["maximal"] = critical.largest >= b_crit * REGIME_RATIO
    return values


def reached(result: Result) -> DataFrame:
    """Batch size and steps to target of the trials of the search that reached it."""
    points = []
    for record in ends(result.records):
        if record.reached and record.role != "new seed":
            points.append((record.batch_size, record.steps_to_target))
    return DataFrame(points, columns=["batch_size", "steps"])


def tuned(points: DataFrame, b_crit: float) -> DataFrame:
    """Of each octave of batch sizes the point that lies lowest over the law: its rate is good."""
    over_law = points["steps"] / (1.0 + b_crit / points["batch_size"])
    octave = np.floor(np.log2(points["batch_size"]))
    return points.loc[over_law.groupby(octave).idxmin()]


def off_law(points: DataFrame, b_crit: float, s_min: float) -> float:
    """The root mean square of log(S/(S_min (1 + B_crit/B))) over points."""
    distances = np.log(points["steps"] / (s_min * (1.0 + b_crit / points["batch_size"])))
    return float(np.sqrt(np.mean(distances**2)))


def difference(values: Series, others: Series) -> tuple[float, float, float]:
    """The difference of two means, and the ends of its 90% interval by Welch's t.

    The ends are NaN where either has fewer than two values.
    """
    mean = float(values.mean() - others.mean())
    if min(len(values), len(others)) < 2:
        return mean, math.nan, math.nan
    interval = ttest_ind(values, others, equal_var=False).confidence_interval(SHARE)
    return mean, float(interval.low), float(interval.high)


def figure(factor: str, results: Results, table: DataFrame) -> Figure:
    """Draw steps to target over batch size, and all of them on one law.

    A line is a study's predicted median at the best rate, a point the best trial of an octave.

    Args:
        factor: what the studies differ in.
        results: of the studies.
        table: of them.
    """
    drawn = Figure(figsize=INCHES, layout="constrained")
    steps_axes, law_axes = drawn.subplots(1, 2)
    names = list(dict.fromkeys(name for name, _ in results))
    for (name, _), result in results.items():
        if result.critical is not None:
            colour = colormaps["tab10"](names.index(name) % 10)
            draw_study(steps_axes, law_axes, result, result.critical, name, colour)
    steps_axes.set(ylabel="steps to target", title=f"by {factor}")
    scale(steps_axes, STEPS)
    distance = np.sqrt(np.mean(table["off_law"] ** 2)) if "off_law" in table else math.nan
    draw_law(law_axes, f"on one law, within {distance:.0%} (root mean square)")
    draw_legend(drawn, (steps_axes, law_axes))
    return drawn


def draw_study(
    steps_axes: Axes, law_axes: Axes, result: Result, critical: Critical, name: str, colour: Any
) -> None:
    """Draw a study's curve as far as trials reached the target, and its points; B_crit dotted."""
    sizes, steps = np.array([(point.batch_size, point.steps) for point in result.curve]).T
    is_within = (sizes >= critical.smallest) & (sizes <= critical.largest)
    sizes, steps = sizes[is_within], steps[is_within]
    steps_axes.plot(sizes, steps, color=colour, linewidth=1.2, label=name)
    b_crit, s_min = critical.interval.value, critical.s_min
    if b_crit is None or s_min is None:
        return
    steps_axes.axvline(b_crit, color=colour, linestyle=":", linewidth=0.9)
    points = tuned(reached(result), b_crit)
    steps_axes.scatter(points["batch_size"], points["steps"], color=colour, s=14)
    law_axes.plot(sizes / b_crit, steps / s_min, color=colour, linewidth=0.8, alpha=0.6)
    law_axes.scatter(points["batch_size"] / b_crit, points["steps"] / s_min, color=colour, s=14)


def draw_law(axes: Axes, title: str) -> None:
    """Draw the law in units of B_crit and S_min, and its regimes."""
    sizes = np.geomspace(1.0 / REACH, REACH, 100)
    style: dict[str, Any] = {"color": "black", "linestyle": "--", "linewidth": 1.0, "zorder": 4}
    axes.plot(sizes, 1.0 + 1.0 / sizes, label="1 + B_crit/B", **style)
    axes.axvspan(1.0 / REGIME_RATIO, REGIME_RATIO, color="0.95", zorder=0)
    middle = math.sqrt(REACH * REGIME_RATIO)
    regimes = {1.0 / middle: "perfect\nscaling", 1.0: "diminishing\nreturns"}
    regimes[middle] = "maximal data\nparallelism"
    for place, name in regimes.items():
        axes.text(
            place,
            0.99,
            name,
            transform=axes.get_xaxis_transform(),
            ha="center",
            va="top",
            fontsize=8,
        )
    axes.set(xscale="log", yscale="log", xlabel="B / B_crit", ylabel="steps / S_min", title=title)
    axes.grid(alpha=0.15)
