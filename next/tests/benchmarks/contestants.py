"""One contestant of a race, as its user runs it.

    python contestants.py NAME PROJECT SECONDS SEED

It runs in a folder and a home of its own; ``old`` is the package 38d319c7, in its environment. The
last line that it prints is JSON: the pair that it picks, its verdict, and the trials that it ran,
with their begin and end in seconds since 1970.
"""

import json
import logging
import math
import sys
import time
import warnings
from typing import Any

import numpy as np
import optuna
import torch
from projects import LR_FACTOR, PROJECTS, UntilTarget, plain_trainer

Row = dict[str, Any]
# Steps between two evaluations of the script's trials.
EVALUATE_EVERY = 10


def tpe(project, seconds, seed):
    """Optuna's TPE with MedianPruner on the project's own Trainer, as users write it."""
    end = time.monotonic() + seconds

    class Reported(UntilTarget):
        def on_fit_start(self, trainer, module):
            self.began = time.monotonic()

        def on_validation_end(self, trainer, module):
            super().on_validation_end(trainer, module)
            self.seconds = time.monotonic() - self.began
            # The pruner takes the least for the best, as the study minimises seconds.
            value = float(trainer.callback_metrics[self.metric])
            self.trial.report(value if self.is_least else -value, trainer.global_step)
            is_late = time.monotonic() > end
            trainer.should_stop |= self.step is None and (is_late or self.trial.should_prune())

    def objective(trial):
        size = trial.suggest_int("batch_size", *project.batch_size, log=True)
        lr = trial.suggest_float("lr", *project.lr, log=True)
        until = Reported(project.target)
        until.trial = trial
        trainer = plain_trainer(
            max_steps=project.last_step(size), max_epochs=-1, callbacks=[until],
            val_check_interval=EVALUATE_EVERY, check_val_every_n_epoch=None, **project.trainer,
        )  # fmt: skip
        trainer.fit(*project.build(size, lr))
        if until.step is None:
            raise optuna.TrialPruned
        return until.seconds

    sampler = optuna.samplers.TPESampler(seed=seed)
    study = optuna.create_study(sampler=sampler, pruner=optuna.pruners.MedianPruner())
    study.enqueue_trial(dict(zip(("batch_size", "lr"), project.baseline, strict=True)))
    study.optimize(objective, timeout=seconds)
    reached = [trial for trial in study.trials if trial.value is not None]
    best = min(reached, key=lambda trial: trial.value, default=None)
    pick = [best.params["batch_size"], best.params["lr"]] if best else None
    return {"pick": pick, "verdict": None, "trials": timed(study, project)}


def bstune(project, seconds, seed):
    """The new package."""
    import bstune

    module, data = project.classes
    result = bstune.tune(
        module, data, target=project.target, baseline=project.baseline, name="race", seed=seed,
        batch_size=project.batch_size, lr=project.lr, wall_seconds=seconds, trainer=project.trainer,
        budget={"steps": project.steps, "examples": project.examples},
        threads=1, device="cpu", mlflow={"uri": None}, output="out", storage="sqlite:///study.db",
    )  # fmt: skip
    study = optuna.load_study(study_name="race", storage="sqlite:///study.db")
    roles = {record.number: record.role for record in result.records}
    pick = [result.best.batch_size, result.best.lr] if result.best and result.reached else None
    print(result)
    return {"pick": pick, "verdict": result.verdict, "trials": timed(study, project, roles)}


def old(project, seconds, seed):
    """The old package."""
    import bstune

    module, data = project.classes
    result = bstune.tune(
        module, data(), target=project.target, reference=project.baseline, name="race", seed=seed,
        batch_sizes=project.batch_size, wall_seconds=seconds, trainer=dict(project.trainer),
        budget=bstune.Budget(steps=project.steps, examples=project.examples), device="cpu",
        mlflow=False, output="out", storage="sqlite:///study.db",
        options=[f"scaling.lr_octaves={math.log2(LR_FACTOR):.3f}"],
    )  # fmt: skip
    study = optuna.load_study(study_name="race", storage="sqlite:///study.db")
    best = result.best
    pick = [int(best.batch_size), float(best.lr)] if best is not None else None
    print(result.summary)
    return {"pick": pick, "verdict": None, "trials": timed(study, project)}


def timed(study, project, roles=None):
    """Role, begin and end of each trial; without roles by its configuration.

    A configuration's later trials are repeats, whether they resume an earlier one or are new seeds.
    """
    trials = []
    seen = set()
    for trial in study.trials:
        if trial.datetime_start is None or trial.datetime_complete is None:
            continue
        # The old package keeps the rate beside Optuna's parameters.
        given = trial.user_attrs | trial.params
        pair = (given["batch_size"], float(given["lr"]))
        is_baseline = np.allclose(pair, project.baseline, atol=0.0)
        kind = "repeat" if pair in seen else "baseline" if is_baseline else "search"
        seen.add(pair)
        times = (trial.datetime_start.timestamp(), trial.datetime_complete.timestamp())
        trials.append([(roles or {}).get(trial.number, kind), *times])
    return trials


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for package in ("lightning.pytorch", "optuna"):
        logging.getLogger(package).setLevel(logging.ERROR)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    torch.set_num_threads(1)
    name, project, seconds, seed = sys.argv[1:]
    contestant = {"bstune": bstune, "old": old, "tpe": tpe}[name]
    row = contestant(PROJECTS[project], float(seconds), int(seed))
    print(json.dumps(row))
