"""Gate *claims*: what a study says of a project, beside 20 plain Trainer runs of it.

    python claims.py PROJECT STUDY_SEED --rows rows/claims.jsonl [--wall-seconds 30] [--lr 0.01]

runs one study through ``bstune.tune``, then the best other configuration and the baseline in plain
Lightning Trainer runs on 20 further seeds, evaluated at every second step, and appends one row with
which of the stated intervals hold the plain runs' values. Under a time limit the baseline's new
seeds are stopped at 4 times the best's time; ``--lr`` makes it slower. Run nothing else.
"""

import argparse
import json
import logging
import math
import statistics
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path

import torch
from plain_runs import first_evaluation, plain_run
from projects import PROJECTS, step_seconds

import bstune

RUNS = 20
FIRST_SEED = 10_000
EVALUATE_EVERY = 2


def measure(project, one, result):
    pair = one.batch_size, one.lr
    build = partial(project.build, *pair)
    size, most = pair[0], project.last_step(pair[0])
    to_target = (build, result.target, size, most)
    first = first_evaluation(result.records, one.number)
    runs = [
        plain_run(*to_target, FIRST_SEED + run, EVALUATE_EVERY, first, **project.trainer)
        for run in range(RUNS)
    ]
    tau = step_seconds(build, **project.trainer)
    first = [run.first_steps for run in runs]
    seen = [run.steps for run in runs]
    return {
        "steps": statistics.median(seen),
        "first_steps": statistics.median(first),
        "reached": sum(map(math.isfinite, seen)),
        "first_reached": sum(map(math.isfinite, first)),
        "step_seconds": tau,
        "seconds": statistics.median(seen) * tau,
        "first_seconds": statistics.median(first) * tau,
    }


def check(result, found, plain):
    """What is stated of two configurations, and whether the plain runs' medians lie within.

    ``holds`` is whether the interval holds the value that bstune's evaluations see in the plain
    runs, and the first that any evaluation saw.
    """
    claims = {}
    for name, one in found.items():
        reached = [plain[name][key] / RUNS for key in ("reached", "first_reached")]
        claims[name] = {"share": [one.reached, one.runs, one.predicted_share, *reached]}
        for unit in ("steps", "seconds"):
            stated = [getattr(one, f"{unit}{end}") for end in ("_low", "", "_high")]
            values = [plain[name][unit], plain[name][f"first_{unit}"]]
            claims[name][unit] = claim(*stated, values)
    if result.speedup is not None:
        quotients = [
            plain["baseline"][key] / plain["other"][key] for key in ("seconds", "first_seconds")
        ]
        speedup = result.speedup
        claims["speedup"] = claim(speedup.low, speedup.value, speedup.high, quotients)
        claims["speedup"]["at_least"] = speedup.at_least
    return claims


def claim(low, value, high, values):
    """An interval as stated, beside values; an end that is open or not stated is None."""
    holds = [(low is None or low <= one) and (high is None or one <= high) for one in values]
    return {"stated": [low, value, high], "plain": values, "holds": holds}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("project")
    parser.add_argument("seed", type=int)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--wall-seconds", type=float)
    parser.add_argument("--lr", type=float, help="of the baseline")
    given = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    project = PROJECTS[given.project]
    baseline = (project.baseline[0], given.lr or project.baseline[1])
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        result = bstune.tune(
            *project.classes, target=project.target, baseline=baseline, trials=32, seed=given.seed,
            batch_size=project.batch_size, trainer=project.trainer, wall_seconds=given.wall_seconds,
            budget={"steps": project.steps, "examples": project.examples}, name=given.project,
            output=f"{folder}/out", storage=f"sqlite:///{folder}/study.db", device="cpu", threads=1,
            mlflow={"uri": None},
        )  # fmt: skip
        took = time.monotonic() - began
        other = result.other or result.best
        found = {"other": other, "baseline": result.baseline}
        plain = {name: measure(project, one, result) for name, one in found.items()}
    row = {
        "project": given.project,
        "seed": given.seed,
        "bstune": [bstune.__file__, bstune.__version__],
        "seconds": took,
        "verdict": result.verdict,
        "pair": [other.batch_size, other.lr],
        "baseline": [result.baseline.batch_size, result.baseline.lr],
        "claims": check(result, found, plain),
        "lr_alone": result.lr_alone.model_dump() if result.lr_alone else None,
        "step_seconds": [other.step_seconds, result.baseline.step_seconds],
        "plain": plain,
    }
    given.rows.parent.mkdir(parents=True, exist_ok=True)
    with given.rows.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(result, json.dumps(row, indent=1), sep="\n")


if __name__ == "__main__":
    main()
