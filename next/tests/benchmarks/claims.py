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
from lightning.pytorch import Callback, seed_everything
from projects import PROJECTS, plain_trainer, step_seconds

import bstune
from bstune.core.evaluation_schedule import next_evaluation
from bstune.core.records import Record

RUNS = 20
EVALUATE_EVERY = 2


class UntilTarget(Callback):
    """Ends a plain fit once an evaluation of bstune's schedule has met the target.

    The fit is evaluated more often than that: ``first`` is the first step at which any evaluation
    met the target, ``record`` is how bstune would have recorded the run. Where the metric dips
    under the target and rises again, the two are not the same.
    """

    def __init__(self, target, batch_size, examples):
        self.target = target
        self.of_schedule = (target, batch_size, examples)
        self.history = []
        self.first = None
        self.record = None

    def on_validation_end(self, trainer, module):
        step = trainer.global_step
        value = float(trainer.callback_metrics[self.target.metric])
        reached = self.target.reached(value)
        if reached and self.first is None:
            self.first = step
        if step < next_evaluation(self.history, *self.of_schedule):
            return
        missed = max([0, *(earlier for earlier, _ in self.history)])
        self.history.append((step, value))
        if reached:
            self.record = Record(
                number=0, place="seed/0/0", role="new seed", batch_size=1, lr=1, seed=0,
                max_steps=step, status="reached", steps=step, steps_low=missed,
            )  # fmt: skip
            trainer.should_stop = True


def steps_to_target(project, pair, seed, target):
    seed_everything(seed, verbose=False)
    module, data = project.build(*pair)
    data.setup("fit")
    until = UntilTarget(target, pair[0], len(data.val_dataloader().dataset))
    plain = plain_trainer(
        max_steps=project.last_step(pair[0]),
        val_check_interval=EVALUATE_EVERY,
        check_val_every_n_epoch=None,
        callbacks=[until],
        **project.trainer,
    )
    plain.fit(module, datamodule=data)
    return until


def measure(project, pair, target):
    runs = [steps_to_target(project, pair, 10_000 + seed, target) for seed in range(RUNS)]
    tau = step_seconds(partial(project.build, *pair), **project.trainer)
    # The target was reached at one of the steps since the last evaluation.
    late = (EVALUATE_EVERY - 1) / 2
    first = [math.inf if run.first is None else run.first - late for run in runs]
    seen = [math.inf if run.record is None else run.record.steps_to_target for run in runs]
    return {
        "steps": statistics.median(seen),
        "first_steps": statistics.median(first),
        "reached": sum(run.record is not None for run in runs),
        "first_reached": sum(run.first is not None for run in runs),
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
        )  # fmt: skip
        took = time.monotonic() - began
    other = result.other or result.best
    found = {"other": other, "baseline": result.baseline}
    plain = {
        name: measure(project, (one.batch_size, one.lr), result.target)
        for name, one in found.items()
    }
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
