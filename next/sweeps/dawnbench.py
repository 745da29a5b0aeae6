"""David Page's ladder: tricks of training turned on one after another, each a training of its own.

(2019, How to Train Your ResNet 8: Bag of Tricks.)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

from matplotlib.figure import Figure
from pandas import DataFrame
from pydantic import Field, PositiveFloat, PositiveInt

from bstune.api import workload_from_config
from bstune.config import compose
from bstune.core.records import Record
from bstune.study.once import train_once
from bstune.sweeps.rows import Unit, measured
from bstune.system.ticker import say

BATCH_SIZE = 512
EXAMPLES = 50_000


@dataclass(frozen=True)
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
    rungs: Annotated[list[Rung], Field(min_length=1)],
    seeds: PositiveInt,
    level: float,
    width: PositiveInt,
    epochs: PositiveFloat | None,
    train_examples: Annotated[int, Field(ge=BATCH_SIZE)] | None,
    device: str,
) -> tuple[DataFrame, Figure]:
    """Train each rung on each seed, as a study trains its trials.

    Args:
        output: folder of the rows.
        rungs: from the first to the last.
        seeds: trainings of a rung.
        level: the accuracy to which seconds are counted.
        width: of the network's first layer, 64 in the source.
        epochs: of all rungs; None: each has its own.
        train_examples: of the training images; None: all.
        device: as the option.

    Returns:
        A row a rung, with means over seeds: accuracy at the end, seconds of training, and those to
        the first evaluation at that level, where a seed came to it.
    """
    examples = train_examples or EXAMPLES
    common = [
        "+workload=resnet_cifar",
        f"module.model.width={width}",
        f"data.train_examples={examples}",
        f"device={device}",
        f"trial.batch_size={BATCH_SIZE}",
    ]

    def trained(unit: Unit) -> dict[str, Any]:
        place = next(i for i, rung in enumerate(rungs) if rung.name == unit["rung"])
        rung = rungs[place]
        steps = math.ceil((epochs or rung.epochs) * examples / BATCH_SIZE)
        of_ladder = [option for one in rungs[: place + 1] for option in one.set]
        of_trial = [f"trial.lr={rung.lr}", f"trial.steps={steps}", f"trial.seed={unit['seed']}"]
        say(f"{rung.name}, seed {unit['seed']}: {steps} steps")
        record = _record([*common, *of_ladder, *of_trial])
        seconds = steps * (record.seconds_per_step or 0.0)
        at_level = [step for step, error in record.finite_history if 1.0 - error >= level]
        return {
            "steps": steps,
            "accuracy": 1.0 - record.finite_values[-1],
            "seconds": seconds,
            "to_level": seconds * at_level[0] / steps if at_level else None,
        }

    # All rungs on one seed, then on the next: whatever slows the machine down slows all.
    units: list[Unit] = [
        {"rung": rung.name, "seed": seed} for seed in range(seeds) for rung in rungs
    ]
    settings = {"width": width, "epochs": epochs, "examples": examples, "level": level}
    rows = measured(output / "rows.jsonl", {**settings, "device": device}, units, trained)
    rows = rows.astype({"to_level": float})
    of_rung = rows.groupby("rung", sort=False)
    table = of_rung[["steps", "accuracy", "seconds", "to_level"]].mean()
    table.insert(2, "sd", of_rung.accuracy.std())
    table["source_accuracy"] = [rung.accuracy for rung in rungs]
    table["source_seconds"] = [rung.seconds for rung in rungs]
    return table.reset_index(), _figure(rows, rungs, level)


def _record(arguments: Sequence[str]) -> Record:
    """Train one configuration, of which nothing but the record is kept."""
    with TemporaryDirectory() as folder:
        command = [*arguments, f"output={folder}/out", f"storage=sqlite:///{folder}/study.db"]
        composed = compose(command)
        return train_once(composed.options, workload_from_config(composed, command))


def _figure(rows: DataFrame, rungs: Sequence[Rung], level: float) -> Figure:
    """Draw each rung's accuracies and seconds, the first on top."""
    figure = Figure(figsize=(11.0, 0.6 + 0.4 * len(rungs)), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    names = [rung.name for rung in rungs]
    for axes, measure in zip(panels, ("accuracy", "seconds"), strict=True):
        of_source = [getattr(rung, measure) for rung in rungs]
        axes.plot(of_source, names, "s", color="black", markerfacecolor="none", label="source")
        axes.plot(rows[measure], rows.rung, "o", alpha=0.6, label="a seed here")
        axes.set_xlabel(measure)
        axes.legend()
    panels[0].axvline(level, color="grey", linestyle="--")
    panels[0].invert_yaxis()
    panels[1].set_xscale("log")
    return figure
