"""Studies that differ in one factor: what moves the critical batch size, and the law they share.

Shallue et al. 2018 (arXiv 1811.03600) measured steps to target over batch size for models, training
algorithms and data sets. Every workload showed the same three regimes (their figure 1): perfect
scaling, diminishing returns and maximal data parallelism; where they lie differed.
"""

import math
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from matplotlib.figure import Figure
from pandas import DataFrame, Series
from pydantic import Field, NonNegativeInt
from scipy.stats import ttest_ind

from bstune.core.curve import REGIME_RATIO
from bstune.core.records import last_of_chains
from bstune.report.compare_page import STEPS
from bstune.report.figure import draw_legend, scale_axes
from bstune.result import Result, load
from bstune.search.findings import NEAR_OPTIMAL
from bstune.sweeps.studies import study

INCHES = (11.0, 4.8)
SHARE = 0.9
# The law is drawn over so many times B_crit, on both sides.
REACH = 100.0
# A rate within this factor of the predicted best is well tuned.
NEAR = 1.4


def compare(
    output: Path,
    *,
    factor: str,
    seeds: Annotated[list[NonNegativeInt], Field(min_length=1)],
    common: list[str],
    studies: dict[str, list[str]],
    folders: list[Path],
    options: list[str],
) -> tuple[DataFrame, Figure]:
    """Compare the critical batch sizes of studies that differ in one factor.

    Args:
        output: gets a folder a study and seed.
        factor: what they differ in.
        seeds: of the studies; each study is run with each of them.
        common: arguments of all studies, as on the command line.
        studies: further arguments of each study, by its name. Ratios are over the first one.
        folders: of further studies, which are there.
        options: arguments of all studies, after all others.

    Returns:
        A row a study and seed, as of :func:`row`, with ``ratio_mean``: how many times as large
        the study's B_crit is as the first one's, by the geometric mean over seeds, and the ends of
        its 90% interval by Welch's t of the logs.
    """
    found = []
    for name, seed in product(studies, seeds):
        arguments = [*common, *studies[name], *options, f"seed={seed}"]
        found.append((name, study(f"{name}-{seed}", output, arguments)))
    found += [(folder.name, load(folder)) for folder in folders]
    table = DataFrame([{factor: name, "study": one.study} | row(one) for name, one in found])
    ratios = np.exp(over_first(np.log(table["b_crit"]), table[factor])).add_prefix("ratio_")
    table = table.merge(ratios, how="left", left_on=factor, right_index=True)
    return table.dropna(axis="columns", how="all"), figure(found)


def row(result: Result) -> dict[str, Any]:
    """What a study says of its curve.

    Returns:
        How many trials reached the target, of how many; B_crit, NaN where it is not known, with
        its 90% interval. With B_crit: S_min; ``off_law`` as of :func:`off_law`; whether a batch
        size of perfect scaling, and one of maximal data parallelism, reached the target. Where a
        trial did: the slopes of log S* over log B at the smallest and the largest batch size that
        reached it (-1 is perfect scaling, 0 no gain); ``useful``, the largest useful batch size:
        the smallest one whose predicted steps are at most 1.1 times the fewest, and its best rate.
        Where the study sought a best pair: it, its seconds and the near-optimal batch sizes.
    """
    records = last_of_chains(result.records)
    count = sum(record.reached for record in records)
    values: dict[str, Any] = {"reached": count, "trials": len(records), "b_crit": math.nan}
    critical = result.critical
    if critical is None:
        return values
    b_crit, s_min = critical.interval.value, critical.s_min
    values |= {"low": critical.interval.low, "high": critical.interval.high}
    if b_crit is not None and s_min is not None:
        values |= {"b_crit": b_crit, "s_min": s_min}
        values["off_law"] = off_law(well_tuned_points(result), b_crit, s_min)
        values["perfect"] = critical.smallest <= b_crit / REGIME_RATIO
        values["maximal"] = critical.largest >= b_crit * REGIME_RATIO
    sizes, steps = np.array([(point.batch_size, point.steps) for point in result.curve]).T
    slope = np.gradient(np.log(steps), np.log(sizes))
    values["slope_small"], values["slope_large"] = np.interp(
        [critical.smallest, critical.largest], sizes, slope
    )
    within = [point for point in result.curve if point.batch_size <= critical.largest]
    limit = NEAR_OPTIMAL * min(point.steps for point in within)
    useful = next(point for point in within if point.steps <= limit)
    values |= {"useful": useful.batch_size, "useful_lr": useful.lr}
    if result.best is not None:
        values |= result.best.model_dump(include={"batch_size", "lr", "seconds"})
        values["near_optimal"] = result.near_optimal
    return values


def well_tuned_points(result: Result) -> DataFrame:
    """Batch size and steps to target of well-tuned trials, their geometric means in each octave.

    These are the trials that reached the target with a rate within ``NEAR`` of the predicted best.
    The fewest steps of an octave would show its luckiest seed.
    """
    log_sizes, log_rates = np.log([(one.batch_size, one.lr) for one in result.curve]).T
    points = []
    for record in last_of_chains(result.records):
        best = np.interp(math.log(record.batch_size), log_sizes, log_rates)
        if record.reached and abs(math.log(record.lr) - best) <= math.log(NEAR):
            points.append((record.batch_size, record.steps_to_target))
    logs = np.log(DataFrame(points, columns=["batch_size", "steps"]))
    return np.exp(logs.groupby(np.floor(logs["batch_size"] / math.log(2.0))).mean())


def off_law(points: DataFrame, b_crit: float, s_min: float) -> float:
    """The root mean square of log(S/(S_min (1 + B_crit/B))) over points."""
    distances = np.log(points["steps"] / (s_min * (1.0 + b_crit / points["batch_size"])))
    return float(np.sqrt(np.mean(distances**2)))


def over_first(values: Series, groups: Series) -> DataFrame:
    """How much larger the mean of each group is than the first one's.

    Args:
        values: NaN is left out.
        groups: of each value its group.

    Returns:
        A row a group but the first, by its name: the difference, and the ends of its 90% interval
        by Welch's t, NaN where either group has fewer than two values.
    """
    samples = {name: sample.dropna() for name, sample in values.groupby(groups, sort=False)}
    first, *others = samples
    rows = {}
    for name in others:
        interval = math.nan, math.nan
        if min(len(samples[first]), len(samples[name])) > 1:
            test = ttest_ind(samples[name], samples[first], equal_var=False)
            interval = test.confidence_interval(SHARE)
        rows[name] = (samples[name].mean() - samples[first].mean(), *interval)
    return DataFrame.from_dict(rows, orient="index", columns=["mean", "low", "high"])


def figure(found: list[tuple[str, Result]]) -> Figure:
    """Draw steps to target over batch size, with B_crit dotted, and all of them on one law.

    A line is a study's predicted median at the best rate, a point the mean of an octave's
    well-tuned trials.

    Args:
        found: studies with their names; those that differ in the seed alone share one.
    """
    drawn = Figure(figsize=INCHES, layout="constrained")
    steps_axes, law_axes = drawn.subplots(1, 2)
    names = [name for name, _ in found]
    colours = {name: f"C{place}" for place, name in enumerate(dict.fromkeys(names))}
    for name, result in found:
        line: dict[str, Any] = {"color": colours[name], "linewidth": 1.2}
        curve = [(point.batch_size, point.steps) for point in result.curve]
        steps_axes.plot(*np.array(curve).reshape(-1, 2).T, label=name, **line)
        critical = result.critical
        if critical is None or critical.interval.value is None:
            continue
        steps_axes.axvline(critical.interval.value, linestyle=":", **line)
        points = well_tuned_points(result)
        dots = {"color": colours[name], "s": 14}
        steps_axes.scatter(points["batch_size"], points["steps"], **dots)
        points = points / [critical.interval.value, critical.s_min]
        law_axes.scatter(points["batch_size"], points["steps"], **dots)
    scale_axes(steps_axes, STEPS)
    sizes = np.geomspace(1.0 / REACH, REACH)
    law_axes.plot(sizes, 1.0 + 1.0 / sizes, color="black", linestyle="--", label="1 + B_crit/B")
    law_axes.axvspan(1.0 / REGIME_RATIO, REGIME_RATIO, color="0.95", zorder=0)
    steps_axes.set(ylabel="steps to target")
    law_axes.set(xscale="log", yscale="log", xlabel="batch size / B_crit", ylabel="steps / S_min")
    regimes = "perfect scaling   |   diminishing returns   |   maximal data parallelism"
    law_axes.set_title(regimes, fontsize=9)
    draw_legend(drawn, (steps_axes, law_axes))
    return drawn
