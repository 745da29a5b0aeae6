"""Gate *claims*: what a study says of a project, beside 20 plain Trainer runs of it.

    python claims.py PROJECT STUDY_SEED --rows rows/claims.jsonl

runs one study through ``bstune.tune``, then the best and the baseline in plain Lightning Trainer
runs on 20 further seeds, evaluated at every second step, and appends one row. Run nothing else.
"""

import argparse
import json
import logging
import math
import statistics
import sys
import tempfile
import time
import warnings
from itertools import pairwise
from pathlib import Path

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[1] / "projects"))

import bstune

RUNS = 20
EVALUATE_EVERY = 2


def projects(name):
    """Module class, data class and the arguments of ``tune``."""
    if name == "tutorial":
        from tutorial import Classifier, Digits

        arguments = {"target": "val_loss <= 0.2", "baseline": (64, 0.1), "batch_size": (8, 512)}
        return (
            Classifier,
            Digits,
            {**arguments, "budget": bstune.Budget(steps=400, examples=200_000)},
        )
    if name == "own_collate":
        from own_collate import DictData, DictModel

        arguments = {"target": "valid/loss <= 0.3", "baseline": (16, 0.001), "batch_size": (2, 64)}
        return (
            DictModel,
            DictData,
            {**arguments, "budget": bstune.Budget(steps=400, examples=20_000)},
        )
    from lazy_layers import ConvNet, DigitsData

    arguments = {"target": "val_loss <= 0.2", "baseline": (32, 0.01), "batch_size": (8, 256)}
    return ConvNet, DigitsData, {**arguments, "budget": bstune.Budget(steps=400, examples=60_000)}


class UntilTarget(Callback):
    """Ends a plain fit at the target, and keeps the step."""

    def __init__(self, target):
        self.target = target
        self.steps = None

    def on_validation_end(self, trainer, module):
        value = float(trainer.callback_metrics[self.target.metric])
        if self.steps is None and self.target.reached(value):
            self.steps = trainer.global_step
            trainer.should_stop = True


def trainer(**arguments):
    return Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, **arguments,
    )  # fmt: skip


def rebatched(data, batch_size):
    """The project's own data, its training loader at another batch size, drop_last as S(B) asks."""
    loader = data.train_dataloader

    def train_dataloader():
        own = loader()
        return DataLoader(
            own.dataset,
            batch_size=batch_size,
            shuffle=True,
            drop_last=True,
            collate_fn=own.collate_fn,
        )

    data.train_dataloader = train_dataloader
    return data


def steps_to_target(module_class, data_class, batch_size, lr, seed, target, most):
    seed_everything(seed, verbose=False)
    until = UntilTarget(target)
    plain = trainer(
        max_steps=most,
        val_check_interval=EVALUATE_EVERY,
        check_val_every_n_epoch=None,
        callbacks=[until],
    )
    plain.fit(module_class(lr=lr), datamodule=rebatched(data_class(), batch_size))
    return until.steps


def step_seconds(module_class, data_class, batch_size, lr, steps=200):
    """Seconds of a step of a plain fit without evaluations, the first 20 steps left out."""
    times = []

    class Stamp(Callback):
        def on_train_batch_end(self, *arguments):
            times.append(time.perf_counter())

    seed_everything(0, verbose=False)
    never = {"val_check_interval": 10**9, "check_val_every_n_epoch": None}
    plain = trainer(max_steps=steps, **never, callbacks=[Stamp()])
    plain.fit(module_class(lr=lr), datamodule=rebatched(data_class(), batch_size))
    apart = [later - earlier for earlier, later in pairwise(times[20:])]
    return statistics.median(apart)


def measure(module_class, data_class, found, target, most):
    steps = [
        steps_to_target(
            module_class, data_class, found.batch_size, found.lr, 10_000 + seed, target, most
        )
        for seed in range(RUNS)
    ]
    tau = step_seconds(module_class, data_class, found.batch_size, found.lr)
    known = sorted(math.inf if one is None else one for one in steps)
    median = (known[(RUNS - 1) // 2] + known[RUNS // 2]) / 2
    return {"steps": median, "reached": sum(one is not None for one in steps), "step_seconds": tau,
            "seconds": median * tau}  # fmt: skip


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("project")
    parser.add_argument("seed", type=int)
    parser.add_argument("--rows", type=Path, required=True)
    given = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    module_class, data_class, arguments = projects(given.project)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        result = bstune.tune(
            module_class, data_class, **arguments, name=given.project, seed=given.seed, threads=1,
            trials=32,
            output=f"{folder}/out", storage=f"sqlite:///{folder}/study.db", device="cpu",
        )  # fmt: skip
        took = time.monotonic() - began
    budget = arguments["budget"]
    other = result.other or result.best
    plain = {
        name: measure(
            module_class, data_class, found, result.target, budget.last_step(found.batch_size)
        )
        for name, found in (("other", other), ("baseline", result.baseline))
    }
    row = {
        "project": given.project,
        "seed": given.seed,
        "bstune": [bstune.__file__, bstune.__version__],
        "seconds": took,
        "verdict": result.verdict,
        "pair": [other.batch_size, other.lr],
        "speedup": result.speedup.model_dump() if result.speedup else None,
        "steps": [other.steps, result.baseline.steps],
        "step_seconds": [other.step_seconds, result.baseline.step_seconds],
        "plain": plain,
        "plain_speedup": plain["baseline"]["seconds"] / plain["other"]["seconds"],
    }
    given.rows.parent.mkdir(parents=True, exist_ok=True)
    with given.rows.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(result, json.dumps(row, indent=1), sep="\n")


if __name__ == "__main__":
    main()
