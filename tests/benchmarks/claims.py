"""Gate *claims*: what a study says of a project, beside 20 plain Trainer runs of it.

    python tests/benchmarks/claims.py [--projects tutorial] [--seeds 4] [--walls 30] [--lrs 0.01]

A row is one study through ``bstune.tune``, then the best other configuration and the baseline in
plain Lightning Trainer runs on 20 further seeds, evaluated at every second step, with which of the
stated intervals hold the plain runs' values. Under a time limit the baseline's new seeds are
stopped at 4 times the best's time; a rate of the baseline makes it slower. Run nothing else.
"""

import logging
import math
import statistics
import tempfile
import time
import warnings

import torch
from common import run_gate
from projects import PROJECTS, plain_run, step_seconds

import bstune

NAMES = ("tutorial", "lazy_layers", "own_collate", "fashion_cnn", "airfoil_mlp")
RUNS = 20
FIRST_SEED = 10_000
EVALUATE_EVERY = 2


def plain_runs(project, one, result):
    """Plain runs of a configuration, by bstune's evaluations and, ``first``, by all."""
    pair = one.batch_size, one.lr
    # The step by which new seeds of its trial were first evaluated.
    of_trial = [run.first_evaluation for run in result.records if run.repeats == one.number]
    first = next(iter(of_trial), None)
    runs = [
        plain_run(project, pair, FIRST_SEED + run, EVALUATE_EVERY, first) for run in range(RUNS)
    ]
    tau = step_seconds(project, pair)
    measured = {"step_seconds": tau}
    for kind, field in (("", "steps"), ("first_", "first_steps")):
        steps = [getattr(run, field) for run in runs]
        median = statistics.median(steps)
        measured[f"{kind}steps"] = median
        measured[f"{kind}seconds"] = median * tau
    return measured


def check(result, found, plain):
    """What is stated of two configurations, and whether the plain runs' medians lie within.

    ``holds`` is whether the interval holds the value that bstune's evaluations see in the plain
    runs, and the first that any evaluation saw.
    """
    claims = {}
    keys = ("seconds", "first_seconds")
    for name, one in found.items():
        stated = [one.seconds_low, one.seconds, one.seconds_high]
        claims[name] = {"seconds": claim(stated, [plain[name][key] for key in keys])}
    speedup = result.speedup
    if speedup is not None:
        quotients = [plain["baseline"][key] / plain["other"][key] for key in keys]
        claims["speedup"] = claim([speedup.low, speedup.value, speedup.high], quotients)
    return claims


def claim(stated, values):
    """An interval as stated, beside values; an end that is open or not stated is None."""
    low, _, high = stated
    holds = [(low or 0.0) <= one <= (high or math.inf) for one in values]
    return {"stated": stated, "plain": values, "holds": holds}


def measure(project, wall_seconds, lr, seed):
    """One study, and its plain runs."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    of = PROJECTS[project]
    baseline = (of.baseline[0], lr or of.baseline[1])
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        result = bstune.tune(
            *of.classes, target=of.target, baseline=baseline, trials=32, seed=seed,
            batch_size=of.batch_size, trainer=of.trainer, wall_seconds=wall_seconds,
            budget={"steps": of.steps, "examples": of.examples}, name=project,
            output=f"{folder}/out", storage=f"sqlite:///{folder}/study.db", device="cpu", threads=1,
            mlflow={"uri": None},
        )  # fmt: skip
        took = time.monotonic() - began
        found = {"other": result.other or result.best, "baseline": result.baseline}
        plain = {name: plain_runs(of, one, result) for name, one in found.items()}
    other, baseline = found.values()
    return {
        "seconds": took,
        "verdict": result.verdict,
        "pair": [other.batch_size, other.lr],
        "baseline": [baseline.batch_size, baseline.lr],
        "claims": check(result, found, plain),
        "plain": plain,
    }


def summary(rows):
    """What the speedups say, and whether they hold."""
    for row in rows:
        yield f"{row['project']}, seed {row['seed']}: {row['claims'].get('speedup')}"


if __name__ == "__main__":
    run_gate(
        __doc__,
        "claims.jsonl",
        measure,
        summary,
        seeds=4,
        projects=("project", NAMES),
        walls=("wall_seconds", (None,)),
        lrs=("lr", (None,)),
    )
