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
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[1] / "projects"))

import bstune
from bstune.core.clock import TrainingClock
from bstune.core.evaluation_schedule import next_evaluation
from bstune.core.records import Record

RUNS = 20
EVALUATE_EVERY = 2
UNTIMED = 20


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
    data = rebatched(data_class(), batch_size)
    data.setup("fit")
    until = UntilTarget(target, batch_size, len(data.val_dataloader().dataset))
    plain = trainer(
        max_steps=most,
        val_check_interval=EVALUATE_EVERY,
        check_val_every_n_epoch=None,
        callbacks=[until],
    )
    plain.fit(module_class(lr=lr), datamodule=data)
    return until


def step_seconds(module_class, data_class, batch_size, lr, steps=200):
    """Seconds of a step of a plain fit without evaluations, after 20 that are not timed.

    They are a mean, as what an epoch's start costs is a part of the training, without the waits for
    a processor.
    """
    clock = TrainingClock()

    class Timed(Callback):
        def on_train_batch_end(self, trainer, *arguments):
            if trainer.global_step == UNTIMED:
                clock.start()
            elif trainer.global_step == steps:
                clock.stop(steps - UNTIMED)

    seed_everything(0, verbose=False)
    never = {"val_check_interval": 10**9, "check_val_every_n_epoch": None}
    plain = trainer(max_steps=steps, **never, callbacks=[Timed()])
    plain.fit(module_class(lr=lr), datamodule=rebatched(data_class(), batch_size))
    return clock.seconds / (steps - UNTIMED)


def measure(module_class, data_class, found, target, most):
    runs = [
        steps_to_target(
            module_class, data_class, found.batch_size, found.lr, 10_000 + seed, target, most
        )
        for seed in range(RUNS)
    ]
    tau = step_seconds(module_class, data_class, found.batch_size, found.lr)
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
    module_class, data_class, arguments = projects(given.project)
    if given.lr is not None:
        arguments["baseline"] = (arguments["baseline"][0], given.lr)
    if given.wall_seconds is not None:
        arguments["wall_seconds"] = given.wall_seconds
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
    found = {"other": other, "baseline": result.baseline}
    plain = {
        name: measure(
            module_class, data_class, one, result.target, budget.last_step(one.batch_size)
        )
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
