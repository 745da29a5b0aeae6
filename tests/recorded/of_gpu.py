"""The figures of sweeps/README.md that were measured on a GPU."""

import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch
from recorded.figure import Values, rounded_text, row_text, rows_of
from recorded.of_sweeps import RECORDED, figure

from bstune.hardware.known_devices import predictions
from bstune.hardware.roofline import step_cost, training_loss
from bstune.recipe import TrialValues
from bstune.study.prepare import compose_checked

# A step on another device.


LARGE_BATCH_SIZE = 2048
H200_DAY = f"{RECORDED}/h200/day.jsonl"
H200_TABLE = f"{RECORDED}/h200/airbench_table.runs"


def step_on_h200(path: Path) -> Values:
    """Give the ms of a step of airbench_cifar at B = 2,048 on an H200.

    The least follows from its shapes; the median of a captured step was measured.
    """
    composed = compose_checked(["workload=airbench_cifar"])
    assert composed.trained_recipe is not None
    module: Any = composed.trained_recipe.module(TrialValues(2048, lr=1.0, seed=0, total_steps=100))
    # Of the shapes alone: any images do.
    module.initialise_from(torch.randn(module.initial_images, 3, 32, 32))

    def batch_of(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(size, 3, 32, 32), torch.zeros(size, dtype=torch.long)

    cost = step_cost(module, batch_of, training_loss, "bf16")
    predicted = predictions(cost, "bf16", LARGE_BATCH_SIZE)
    by_device = {(row.device, row.dtype): row for row in predicted}
    captured = list[float]()
    for row in rows_of(path):
        if row["batch_size"] == LARGE_BATCH_SIZE:
            captured.append(row["seconds_per_step"])
    return {
        "least": 1000.0 * by_device["H200", "bf16"].least_seconds,
        "captured": 1000.0 * statistics.median(captured),
    }


ROOFLINE = [
    figure(
        "roofline",
        "By its maker's peaks an H200 takes at least {least:.1f} ms for `airbench_cifar` at B = "
        "2,048 in bf16. Its captured step took {captured:.1f} ms",
        step_on_h200,
        H200_TABLE,
    ),
]

# 94% of CIFAR-10, on an H200.

LEVEL = 0.94


def ended_on_h200(path: Path, workload: str, pair: str) -> list[dict[str, Any]]:
    """Give a recipe's runs to their end, a row a seed; ``pair``: source or winner."""
    runs = list[dict[str, Any]]()
    for row in rows_of(path):
        if row.get("workload") == workload and "seed" in row and row.get("pair", pair) == pair:
            runs.append(row)
    return runs


def recipe_row(workload: str, source: str, path: Path) -> Values:
    runs = ended_on_h200(path, workload, "source")
    accuracies = [run["accuracy"] for run in runs]
    return {
        "row": row_text(
            [
                f"`{workload}`",
                str(len(runs)),
                f"{statistics.fmean(accuracies):.2%}, {100.0 * statistics.stdev(accuracies):.2f}",
                rounded_text(statistics.median(run["training_seconds"] for run in runs), 3),
                source,
            ]
        )
    }


def script_on_h200(path: Path) -> Values:
    """Give the mean accuracy and the median seconds of the source's own script, uncompiled."""
    runs = [row for row in rows_of(path) if row["section"] == "sources" and row["run"] != "warmup"]
    return {
        "accuracy": statistics.fmean(run["accuracy"] for run in runs),
        "seconds": statistics.median(run["training_seconds"] for run in runs),
    }


def airbench_row(path: Path) -> Values:
    script = script_on_h200(path)
    source = f"{script['accuracy']:.2%}, {script['seconds']:.2f} s, the same H200, not compiled"
    return recipe_row("airbench_cifar", source, path)


def study_on_h200(workload: str, path: Path) -> Values:
    """Give what a study answered, and its winner and the source's pair on further seeds."""
    (study,) = [
        row for row in rows_of(path) if row.get("workload") == workload and "configurations" in row
    ]
    values: dict[str, object] = {
        "configurations": study["configurations"],
    }
    if study["gain"] is not None:
        values |= {name: study["gain"][name] for name in ("ratio", "low", "high")}
    for pair in ("winner", "source"):
        runs = ended_on_h200(path, workload, pair)
        values[f"{pair}_seconds"] = statistics.median(run["training_seconds"] for run in runs)
        values[f"{pair}_at_level"] = sum(run["accuracy"] >= LEVEL for run in runs)
        values[f"{pair}_runs"] = len(runs)
    return values


RECIPES = [
    figure(
        "recipes",
        "{row}",
        partial(recipe_row, "speedrun_cifar", "94.01%, 2.015 s, A100"),
        H200_DAY,
    ),
    figure(
        "recipes",
        "{row}",
        partial(recipe_row, "airbench_muon", "94.01%, 2.59 s, A100, compiled"),
        H200_DAY,
    ),
    figure("recipes", "{row}", airbench_row, H200_DAY),
    figure(
        "recipes",
        "{row}",
        partial(recipe_row, "resnet_cifar_fast", "94.6%, 34 s, V100"),
        H200_DAY,
    ),
    figure(
        "recipes",
        "Of `airbench_cifar` none of {configurations} configurations was faster",
        partial(study_on_h200, "airbench_cifar"),
        H200_DAY,
    ),
    figure(
        "recipes",
        "Of `airbench_cifar` {winner_at_level} of {winner_runs} further seeds reached it after "
        "{winner_seconds:.2f} s, with the source's pair {source_at_level} of {source_runs} after "
        "{source_seconds:.2f} s",
        partial(study_on_h200, "airbench_cifar"),
        H200_DAY,
    ),
    figure(
        "recipes",
        "of `speedrun_cifar` the best of {configurations} was {ratio:.2f} times as fast "
        "({low:.2f} to {high:.2f})",
        partial(study_on_h200, "speedrun_cifar"),
        H200_DAY,
    ),
    figure(
        "recipes",
        "of `speedrun_cifar` {winner_at_level} of {winner_runs} after {winner_seconds:.2f} s and "
        "{source_at_level} of {source_runs} after {source_seconds:.2f} s",
        partial(study_on_h200, "speedrun_cifar"),
        H200_DAY,
    ),
]

FIGURES = [*ROOFLINE, *RECIPES]
