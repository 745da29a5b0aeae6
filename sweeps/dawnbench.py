"""David Page's ladder: tricks of training turned on one after another, each a training of its own.

(2019, How to Train Your ResNet 8: Bag of Tricks.)
"""

import math
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

from matplotlib.figure import Figure
from pandas import DataFrame
from pydantic import Field, PositiveFloat, PositiveInt

from bstune.sweeps.rows import Unit, measure_units
from bstune.sweeps.studies import train
from bstune.system.ticker import say

BATCH_SIZE = 512
EXAMPLES = 50_000
# The error to which seconds are counted.
GOAL = 0.06


@dataclass(frozen=True, eq=False)
class Rung:
    """A version of the training.

    Args:
        name: of what is new.
        epochs, lr: of the version; ``lr`` is the peak of its schedule.
        seconds, accuracy: the source's.
        set: options of the workload, as on the command line, on top of those of all rungs before.
    """

    name: str
    epochs: PositiveFloat
    lr: PositiveFloat
    seconds: float
    accuracy: float
    set: list[str]


def run(
    output: Path,
    *,
    rungs: list[Rung],
    seeds: PositiveInt,
    width: PositiveInt,
    epochs: PositiveFloat | None,
    train_examples: Annotated[int, Field(ge=BATCH_SIZE)] | None,
    options: list[str],
) -> tuple[DataFrame, Figure]:
    """Train each rung on each seed, as a study trains its trials.

    A training that fails ends the sweep; once it is mended, the same command goes on from there.

    Args:
        output: folder of the rows.
        rungs: from the first to the last.
        seeds: trainings of a rung.
        width: of the network's first layer, 64 in the source.
        epochs: of all rungs; None: each has its own.
        train_examples: of the training images; None: all.
        options: further ones of the command line, such as ``precision=16-mixed``.

    Returns:
        A row a version: how many of its seeds diverged; of the others the mean accuracy at the end,
        as a share, and the mean seconds of training, both NaN where all seeds diverged, as seconds
        are in runs too short to be timed; and the median over all seeds of the seconds to the first
        evaluation at 94%, infinite where half of them miss it.

    Raises:
        BstuneError: as by :func:`bstune.sweeps.studies.train`.
    """
    examples = train_examples or EXAMPLES
    options_up_to = dict(zip(rungs, accumulate(rung.set for rung in rungs), strict=True))

    def trained(unit: Unit) -> dict[str, Any]:
        rung = next(rung for rung in rungs if rung.name == unit["rung"])
        steps = math.ceil((epochs or rung.epochs) * examples / BATCH_SIZE)
        say(f"{rung.name}, seed {unit['seed']}: {steps} steps")
        arguments = [
            "+workload=resnet_cifar",
            f"module.model.width={width}",
            f"data.train_examples={examples}",
            f"trial.batch_size={BATCH_SIZE}",
            f"trial.lr={rung.lr}",
            f"trial.steps={steps}",
            f"trial.seed={unit['seed']}",
            *options_up_to[rung],
            *options,
        ]
        record = train(arguments)
        step_time = math.nan if record.seconds_per_step is None else record.seconds_per_step
        has_ended = record.status == "finished"
        hits = [step for step, error in record.finite_history if error <= GOAL]
        return {
            "steps": steps,
            # NaN: it diverged.
            "accuracy": 1.0 - record.finite_values[-1] if has_ended else math.nan,
            "seconds": step_time * steps if has_ended else math.nan,
            "to_94": step_time * hits[0] if hits else math.inf,
        }

    # All rungs on one seed, then on the next: what slows the machine down slows all.
    units: list[Unit] = [
        {"rung": rung.name, "seed": seed} for seed in range(seeds) for rung in rungs
    ]
    settings = {
        "width": width,
        "epochs": epochs,
        "examples": examples,
        "options": options,
        "versions": [[rung.name, rung.epochs, rung.lr, *rung.set] for rung in rungs],
    }
    rows = measure_units(output / "rows.jsonl", settings, units, trained)
    by_rung = rows.groupby("rung", sort=False)
    table = by_rung[["steps", "accuracy", "seconds"]].mean()
    table["diverged"] = seeds - by_rung["accuracy"].count()
    table["to_94"] = by_rung["to_94"].median()
    table["source_accuracy"] = [rung.accuracy for rung in rungs]
    table["source_seconds"] = [rung.seconds for rung in rungs]
    figure = Figure(figsize=(11.0, 5.0), layout="constrained")
    for axes, measure in zip(
        figure.subplots(1, 2, sharey=True), ("accuracy", "seconds"), strict=True
    ):
        axes.plot(table[f"source_{measure}"], table.index, "ks", label="source")
        axes.plot(rows[measure], rows.rung, "o", label="seeds here")
        axes.set_xlabel(measure)
    axes.legend()
    axes.invert_yaxis()
    return table.reset_index(), figure
