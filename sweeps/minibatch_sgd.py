"""Loss over examples and over seconds of gradient descent, SGD and mini-batches.

Zhang et al., Dive into Deep Learning, 12.5.4. Each run is one of bstune's own trainings of one
configuration of the workload ``airfoil``. Its seconds are steps times tau(B), timed as a survey
times it: the step after an evaluation, of which there are many here, takes longer.
"""

import math
import statistics
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from pandas import DataFrame, Series
from pydantic import PositiveFloat, PositiveInt
from torch.utils.data import DataLoader, TensorDataset

from bstune.config import compose
from bstune.core.records import Frozen
from bstune.hardware.timing import time_sizes
from bstune.sweeps.rows import Unit, measure_units
from bstune.sweeps.studies import train
from bstune.sweeps.timed import in_rounds
from bstune.workloads.airfoil import AirfoilData


class Run(Frozen):
    """A line of the figure."""

    batch_size: PositiveInt
    lr: PositiveFloat
    steps: PositiveInt


def loaders(row_by_row: bool, **arguments: Any) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Load rows to train on, and all in one to validate on.

    As an evaluation is of one example then, there are many.

    Args:
        row_by_row: whether training takes its rows one by one, as in the book.
        arguments: of :class:`AirfoilData`.
    """
    data = AirfoilData(**arguments)
    train = data.train_dataloader()
    if row_by_row:
        train = DataLoader(TensorDataset(*data.rows.tensors), data.batch_size, shuffle=True)
    whole: Any = [data.rows.tensors]
    return train, DataLoader(whole, batch_size=None)


def run(
    output: Path, *, runs: list[Run], row_by_row: bool, level: float, seeds: PositiveInt
) -> tuple[DataFrame, Figure]:
    """Train each run on each seed, in shuffled order: medians over seeds.

    Args:
        output: the sweep's folder.
        runs: of different batch sizes.
        row_by_row: as of :func:`loaders`.
        level: a loss, the seconds to which are compared.
        seeds: their number.
    """
    units: list[Unit] = [run.model_dump() for run in runs]
    loader = [f"data._target_={__name__}.loaders", f"+data.row_by_row={row_by_row}"]
    trained = measure_units(
        output / "rows.jsonl",
        {"row_by_row": row_by_row},
        in_rounds(units, seeds),
        partial(_train_unit, loader),
    )
    table = []
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for run in runs:
        rows = trained[trained["batch_size"] == run.batch_size]
        # A row a seed, and a column a step: all seeds are evaluated at the same ones.
        losses = DataFrame(map(dict, rows["history"]))
        tau = rows["step_seconds"].median()
        # A seed that does not come to the loss takes longer than any other.
        steps = losses[losses <= level].apply(Series.first_valid_index, axis=1).fillna(math.inf)
        row = {**run.model_dump(), "seeds": seeds, "ms a step": 1e3 * tau}
        row["last loss"] = losses.iloc[:, -1].median()
        row[f"steps to {level}"] = steps.median()
        row[f"seconds to {level}"] = steps.median() * tau
        table.append(row)
        low, middle, high = losses.quantile([0.25, 0.5, 0.75]).to_numpy()
        for axes, each in zip(panels, (run.batch_size, tau), strict=True):
            axes.plot(losses.columns * each, middle, label=f"B = {run.batch_size}, lr {run.lr:g}")
            axes.fill_between(losses.columns * each, low, high, alpha=0.2)
    for axes, label in zip(panels, ("examples", "seconds of training"), strict=True):
        axes.axhline(level, color="black", linestyle="--")
        axes.set(xscale="log", xlabel=label, ylabel="loss on the training data")
        axes.legend(frameon=False)
    return DataFrame(table), figure


def _train_unit(loader: list[str], unit: Unit) -> dict[str, Any]:
    """Train a run on one seed: its losses by step, and the seconds of a step."""
    command = ["+workload=airfoil", *loader, f"trial.seed={unit['round']}"]
    command += [f"trial.{name}={unit[name]}" for name in ("batch_size", "lr", "steps")]
    record = train(command)
    recipe = compose(command).recipe
    assert recipe is not None  # noqa: S101 (airfoil is no table)
    size, lr = record.batch_size, record.lr
    timed = time_sizes(recipe, [size], (size, lr), record.steps, math.inf)
    return {"history": record.history, "step_seconds": statistics.median(timed.visits[size])}
