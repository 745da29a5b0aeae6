"""Calls that do the same work, timed in shuffled rounds: a disturbance hits all of them alike."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from pandas import DataFrame
from torch.utils.benchmark import Timer

from bstune.study.machine import Machine
from bstune.sweeps.rows import Unit, measure_units

Ways = dict[tuple[str, str], tuple[float, Callable[[], object]]]
"""Work, in billions, and the call that does it, by group and name.

A group has the unit of its rates, as ``product, GFLOP/s``. Rows that are kept are found
by both names, which therefore tell all that seconds depend on.
"""


def in_rounds(units: Sequence[Unit], rounds: int) -> Iterator[Unit]:
    """Yield each unit once a round, with the round's number, in an order of the round's own."""
    for number in range(rounds):
        for place in np.random.default_rng(number).permutation(len(units)):
            yield {**units[place], "round": number}


def timed(
    output: Path, machine: Machine, ways: Ways, rounds: int, seconds: float
) -> tuple[DataFrame, Figure]:
    """Time each way: medians and quartiles of its seconds over rounds, and a bar for its rate.

    Args:
        output: the sweep's folder.
        machine: that does the work.
        ways: to do it.
        rounds: each times every way once.
        seconds: that a way is timed for in a round, after a first call.
    """
    units: list[Unit] = [{"group": group, "way": way} for group, way in ways]

    def measure(unit: Unit) -> dict[str, float]:
        _, call = ways[str(unit["group"]), str(unit["way"])]
        timer = Timer("call()", globals={"call": call}, num_threads=machine.threads)
        return {"seconds": timer.blocked_autorange(min_run_time=seconds).median}

    settings = machine.model_dump(include={"device", "threads"})
    rows = measure_units(output / "rows.jsonl", settings, in_rounds(units, rounds), measure)
    quartiles = rows.groupby(["group", "way"])["seconds"].describe()[["25%", "50%", "75%"]]
    quartiles.columns = ["low", "seconds", "high"]
    table = DataFrame(units).join(quartiles, on=["group", "way"])
    table["rate"] = [work for work, _ in ways.values()] / table["seconds"]
    groups = table.groupby("group", sort=False)
    table["times the fastest"] = groups["rate"].transform("max") / table["rate"]
    figure = Figure(figsize=(4.5 * len(groups), 4.2), layout="constrained")
    panels = figure.subplots(1, len(groups), squeeze=False)[0]
    for axes, (group, of_group) in zip(panels, groups, strict=True):
        axes.bar_label(axes.barh(of_group["way"], of_group["rate"]), fmt="{:.4g}", padding=3)
        axes.set_title(group)
        axes.margins(x=0.2)
        axes.invert_yaxis()
    return table, figure
