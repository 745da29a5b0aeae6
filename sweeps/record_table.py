"""The recorder of tables of runs, which answer trials in place of training."""

import json
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from pandas import DataFrame
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from bstune.sweeps.rows import Unit, measure_units
from bstune.sweeps.studies import train
from bstune.system.files import write_text


def run(
    output: Path,
    *,
    workload: str,
    options: list[str],
    batch_sizes: list[PositiveInt],
    lrs: list[PositiveFloat],
    seeds: list[NonNegativeInt],
) -> tuple[DataFrame, Figure]:
    """Train a grid of batch sizes, rates and seeds to the target, and write ``table.jsonl``.

    ``+workload=replay table=FILE target=...`` answers studies by it, of this target and easier
    ones. Evaluations lie as in a study: every few percent of the steps near the target.

    Args:
        output: the sweep's folder.
        workload: as of ``+workload=``.
        options: of the command line, such as ``target=val/loss <= 0.1``.
        batch_sizes, lrs, seeds: of the runs.
    """
    units: list[Unit] = []
    for seed, lr, batch_size in product(seeds, lrs, batch_sizes):
        units.append({"batch_size": batch_size, "lr": lr, "seed": seed})
    command = [f"+workload={workload}", *options]
    rows = measure_units(
        output / "rows.jsonl", {"command": command}, units, partial(_train_unit, command)
    )
    # The seconds of a step are those of its batch size, whatever slowed a single run.
    of_size = rows.groupby("batch_size")["seconds_per_step"]
    rows["seconds_per_step"] = of_size.transform("median")
    lines = [json.dumps(row) + "\n" for row in rows.to_dict("records")]
    write_text(output / "table.jsonl", "".join(lines))
    rows["steps"] = [steps[-1] if steps else 0 for steps in rows["steps"]]
    figure = Figure(layout="tight")
    axes = figure.subplots()
    reached = rows[rows["status"] == "reached"]
    points = axes.scatter(reached["batch_size"], reached["steps"], c=reached["lr"], norm="log")
    figure.colorbar(points, label="learning rate")
    axes.set(xscale="log", yscale="log", xlabel="batch size", ylabel="steps to target")
    return rows.drop(columns="metric"), figure


def _train_unit(command: Sequence[str], unit: Unit) -> dict[str, Any]:
    """Train one run."""
    record = train([*command, *(f"trial.{name}={value}" for name, value in unit.items())])
    return {
        "steps": [step for step, _ in record.finite_history],
        "metric": record.finite_values,
        "seconds_per_step": record.seconds_per_step,
        "status": record.status,
    }
