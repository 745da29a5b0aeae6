"""One contestant of a race, as its user runs it.

    python contestants.py NAME PROJECT SECONDS SEED

It runs in a folder and a home of its own. The last line that it prints is JSON: the pair that it
picks, its verdict, and the trials that it ran, with their begin and end in seconds since 1970.
"""

import json
import logging
import sys
import time
import warnings

import optuna
import torch
from lightning.pytorch import Callback
from projects import PROJECTS, plain_trainer

import bstune
from bstune.core.records import Target

# Steps between two evaluations of the script's trials.
EVALUATE_EVERY = 10


def tpe(project, seconds, seed):
    """Optuna's TPE with MedianPruner on the project's own Trainer, as users write it."""
    end = time.monotonic() + seconds

    target = Target.parse(project.target)

    class Reported(Callback):
        seconds = None

        def on_fit_start(self, trainer, module):
            self.began = time.monotonic()

        def on_validation_end(self, trainer, module):
            # The pruner takes the least for the best, as the study minimises seconds.
            value = float(trainer.callback_metrics[target.metric])
            self.trial.report(value if target.mode == "min" else -value, trainer.global_step)
            if target.reached(value):
                self.seconds = time.monotonic() - self.began
            is_late = time.monotonic() > end
            trainer.should_stop |= bool(self.seconds or is_late or self.trial.should_prune())

    def objective(trial):
        size = trial.suggest_int("batch_size", *project.batch_size, log=True)
        lr = trial.suggest_float("lr", *project.lr, log=True)
        reported = Reported()
        reported.trial = trial
        trainer = plain_trainer(project, project.last_step(size), EVALUATE_EVERY, reported)
        trainer.fit(*project.build(size, lr))
        if reported.seconds is None:
            raise optuna.TrialPruned
        return reported.seconds

    sampler = optuna.samplers.TPESampler(seed=seed)
    study = optuna.create_study(sampler=sampler, pruner=optuna.pruners.MedianPruner())
    study.enqueue_trial(dict(zip(("batch_size", "lr"), project.baseline, strict=True)))
    study.optimize(objective, timeout=seconds)
    reached = [trial for trial in study.trials if trial.value is not None]
    best = min(reached, key=lambda trial: trial.value, default=None)
    pick = [best.params["batch_size"], best.params["lr"]] if best else None
    return {"pick": pick, "verdict": None, "trials": timed(study, {0: "baseline"})}


def tuned(project, seconds, seed):
    """The package."""
    result = bstune.tune(
        *project.classes, target=project.target, baseline=project.baseline, name="race", seed=seed,
        batch_size=project.batch_size, lr=project.lr, wall_seconds=seconds, trainer=project.trainer,
        budget={"steps": project.steps, "examples": project.examples},
        threads=1, device="cpu", mlflow={"uri": None}, output="out", storage="sqlite:///study.db",
    )  # fmt: skip
    study = optuna.load_study(study_name="race", storage="sqlite:///study.db")
    roles = {record.number: record.role for record in result.records}
    pick = [result.best.batch_size, result.best.lr] if result.best and result.reached else None
    print(result)
    return {"pick": pick, "verdict": result.verdict, "trials": timed(study, roles)}


def timed(study, roles):
    """Role, begin and end of each trial."""
    trials = []
    for trial in study.trials:
        if trial.datetime_start is None or trial.datetime_complete is None:
            continue
        times = (trial.datetime_start.timestamp(), trial.datetime_complete.timestamp())
        trials.append([roles.get(trial.number, "search"), *times])
    return trials


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    name, project, seconds, seed = sys.argv[1:]
    contestant = {"bstune": tuned, "tpe": tpe}[name]
    print(json.dumps(contestant(PROJECTS[project], float(seconds), int(seed))))
