"""Whether powers of two are faster batch sizes than their neighbours.

A round times steps at each batch size, in shuffled order and in a process of its own. What slows a
machine down for a while, and how a process lies in memory, is the same for all of a round.
"""

import math
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from pandas import DataFrame, Series
from pydantic import Field, PositiveInt
from scipy import stats

from bstune.config import compose
from bstune.core.errors import InputError
from bstune.hardware.timing import time_sizes
from bstune.report.figure import GREY, VERMILION
from bstune.study.machine import STEPS
from bstune.study.once import survey_once
from bstune.sweeps.rows import Unit, measure_units
from bstune.trial.worker import Worker, call, value_of

# Seconds that the survey may take, and that a process may say nothing for.
PATIENCE = 600.0


class Comparison(NamedTuple):
    """Batch sizes, and those that they are compared with."""

    sizes: Sequence[int]
    others: Sequence[int]
    against: str


def run(
    output: Path,
    *,
    workload: str,
    options: list[str],
    memory_limit: PositiveInt,
    batch_sizes: list[PositiveInt],
    pairs: list[tuple[int, int]],
    rounds: Annotated[int, Field(ge=2)],
    confidence: Annotated[float, Field(gt=0.0, lt=1.0)],
    seed: int,
) -> tuple[DataFrame, Figure]:
    """Time steps at batch sizes, among them the largest that fits into memory.

    Args:
        output: folder of the rows.
        workload: that is trained.
        options: further ones, such as ``precision=16-mixed``.
        memory_limit: bytes that a process may take, by which the largest batch size is found.
        batch_sizes: of which one that has both of its neighbours here is compared with them.
        pairs: of batch sizes that are compared with each other, beside the largest that fits with
            the next lower power of two.
        rounds: each times every batch size once.
        confidence: of the intervals.
        seed: of the order.

    Returns:
        As of :func:`summary`.

    Raises:
        InputError: the workload does not take a batch size.
    """
    own = [f"survey_seconds={PATIENCE:g}", "batch_size.multiple=1"]
    command = [f"+workload={workload}", *own, *options]
    settings = {"command": command}
    composed = compose([*command, f"memory_limit={memory_limit}"])
    project = composed.workload()

    def find_largest(unit: Unit) -> dict[str, Any]:
        survey, _ = survey_once(composed.options, project)
        return {"largest_fit": survey.largest_fit, "threads": survey.threads}

    rows = output / "rows.jsonl"
    found = measure_units(rows, settings, [{"memory_limit": memory_limit}], find_largest).iloc[0]
    largest = int(found.largest_fit)
    pairs = [*pairs, (largest, 2 ** ((largest - 1).bit_length() - 1))]
    sizes = sorted({*batch_sizes, *chain(*pairs)})
    assert project.recipe is not None  # noqa: S101 (survey_once refuses recorded runs)
    recipe = replace(project.recipe, threads=int(found.threads))
    lr = composed.options.baseline.lr

    with Worker(output / "worker.log") as worker:

        def step_time(unit: Unit) -> dict[str, float]:
            # Each round has a process of its own.
            if unit["place"] == 0:
                call(worker, os._exit, 0, limit=PATIENCE)
            size = unit["batch_size"]
            arguments = recipe, [size], (size, lr), STEPS, math.inf
            timed = value_of(call(worker, time_sizes, *arguments, limit=PATIENCE))
            if size in timed.refused:
                raise InputError(f"batch size {size}: {timed.refused[size]}")
            return {"seconds": median(timed.visits[size])}

        table = measure_units(rows, settings, visits(sizes, rounds, seed), step_time)
    by_round = table.pivot(index="round", columns="batch_size", values="seconds")
    compared = with_neighbours(batch_sizes)
    compared += [Comparison([one], [other], str(other)) for one, other in pairs]
    results = summary(by_round, compared, confidence)
    return results, draw(results, ", ".join([workload, *options, f"{rounds} rounds"]))


def visits(sizes: Sequence[int], rounds: int, seed: int) -> Iterator[Unit]:
    """All batch sizes of each round, in an order of its own."""
    for number in range(rounds):
        order = random.Random(f"{seed}/{number}").sample(sizes, len(sizes))  # noqa: S311
        for place, size in enumerate(order):
            yield {"round": number, "place": place, "batch_size": size}


def with_neighbours(sizes: Sequence[int]) -> list[Comparison]:
    """Each batch size whose neighbours are there, then all such powers of two together."""
    groups = [[size] for size in sizes if {size - 1, size + 1} <= {*sizes}]
    powers = [size for (size,) in groups if size.bit_count() == 1]
    if len(powers) > 1:
        groups.append(powers)
    compared = []
    for group in groups:
        others = [size + side for size in group for side in (-1, 1)]
        compared.append(Comparison(group, others, "neighbours"))
    return compared


def summary(seconds: DataFrame, compared: Sequence[Comparison], confidence: float) -> DataFrame:
    """Microseconds an example, then by how many percent more some batch sizes take than others.

    What counts are logarithms: the mean over batch sizes less that over the others, in the same
    round. Intervals are by Student's t over rounds.

    Args:
        seconds: of a step, a row a round, a column a batch size.
        compared: what is compared.
        confidence: of each interval of a time, and of all those of percents together, by
            Bonferroni's correction.
    """
    logs = np.log(1e6 * seconds / seconds.columns)
    results = []
    for size in logs:
        results.append((str(size), "", "us", *np.exp(_mean_with_interval(logs[size], confidence))))
    each = 1.0 - (1.0 - confidence) / len(compared)
    for sizes, others, against in compared:
        more = logs[sizes].mean(axis=1) - logs[others].mean(axis=1)
        name = ", ".join(map(str, sizes))
        results.append((name, against, "%", *100.0 * np.expm1(_mean_with_interval(more, each))))
    return DataFrame(results, columns=["batch_size", "against", "unit", "value", "low", "high"])


def _mean_with_interval(values: Series, confidence: float) -> NDArray[np.float64]:
    """The mean, and the ends of its interval."""
    interval = stats.ttest_1samp(values, 0.0).confidence_interval(confidence)
    return np.array([values.mean(), interval.low, interval.high])


def draw(results: DataFrame, title: str) -> Figure:
    """Draw times and differences with their intervals; powers of two are coloured."""
    figure = Figure(figsize=(12.0, 4.8), layout="constrained")
    figure.suptitle(title)
    left, right = figure.subplots(1, 2, width_ratios=[2, 1])
    for axes, unit in ((left, "us"), (right, "%")):
        rows = results[results.unit == unit]
        for place, row in enumerate(rows.itertuples()):
            is_power = all(int(size).bit_count() == 1 for size in row.batch_size.split(","))
            reach = [[row.value - row.low], [row.high - row.value]]
            colour = VERMILION if is_power else GREY
            axes.errorbar(place, row.value, reach, fmt="o", color=colour, capsize=3)
        names = rows.batch_size.str.cat(rows.against, sep="\n")
        axes.set_xticks(range(len(rows)), names, rotation=90)
    left.set(xlabel="batch size", ylabel="microseconds an example")
    right.axhline(0.0, color="black", linewidth=0.8)
    right.set(xlabel="batch size and what it is compared with", ylabel="percent more an example")
    return figure
