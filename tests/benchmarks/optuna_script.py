"""What bench_projects.py compares bstune with: Optuna's TPE over batch size and learning rate, as users write it.

    python optuna_script.py WORKLOAD.yaml SECONDS SEED

The reference is tried first. A trial ends at the target, after 1.3 times as long as the fastest one that reached it,
or with its budget. The last line is the batch size and the learning rate of the fastest one, as JSON; null for none.
"""

import importlib
import json
import math
import sys
import time
from pathlib import Path

import optuna
import yaml
from torch.utils.data import DataLoader

# The search goes so far from the reference, to either side.
LR_FACTOR = 30.0
# A trial is stopped at so many times the fastest one's time.
STOP_FACTOR = 1.3

start = time.monotonic()
workload = yaml.safe_load(Path(sys.argv[1]).read_text())
seconds = float(sys.argv[2])
seed = int(sys.argv[3])
target = workload["target"]
budget = workload["budget"]
sizes = workload["batch_size"]
reference = workload["reference"]
sign = 1.0 if target["mode"] == "min" else -1.0


def resolved(name):
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


data_node = workload["data"]
module_node = workload["module"]
rate_name = next(name for name, value in module_node.items() if value == "${trial.lr}")
load = resolved(data_node["_target_"])


def build(lr):
    return resolved(module_node["_target_"])(**{rate_name: lr})


# A module of one package is refused by the other's Trainer.
is_older = any(one.__module__.startswith("pytorch_lightning") for one in type(build(1e-3)).__mro__)
pl = importlib.import_module("pytorch_lightning" if is_older else "lightning.pytorch")
best = math.inf
chosen = None


class StopAtTarget(pl.Callback):
    def on_fit_start(self, trainer, module):
        self.began = time.monotonic()
        self.reached = False
        self.took = math.inf

    def on_validation_end(self, trainer, module):
        value = float(trainer.callback_metrics[target["metric"]])
        self.reached = not trainer.sanity_checking and sign * value <= sign * target["value"]
        self.took = time.monotonic() - self.began
        # No trial goes on in the last second.
        is_late = self.took > STOP_FACTOR * best or time.monotonic() - start > seconds - 1
        trainer.should_stop |= self.reached or is_late


study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
study.enqueue_trial({"batch_size": reference["batch_size"], "lr": reference["lr"]})
# No trial begins in the last three seconds.
while time.monotonic() - start < seconds - 3:
    trial = study.ask()
    size = trial.suggest_int("batch_size", sizes["low"], sizes["high"], log=True)
    low = reference["lr"] / LR_FACTOR
    high = reference["lr"] * LR_FACTOR
    lr = trial.suggest_float("lr", low, high, log=True)
    stop = StopAtTarget()
    batches = load()
    loader = batches.train_dataloader
    batches.train_dataloader = lambda own=loader, size=size: DataLoader(
        own().dataset, size, shuffle=True, collate_fn=own().collate_fn
    )
    batches.prepare_data()
    batches.setup("fit")
    batches_per_epoch = math.ceil(len(loader().dataset) / size)
    run = pl.Trainer(
        accelerator="cpu",
        max_steps=max(budget["steps"], math.ceil(budget["examples"] / size)),
        max_epochs=-1,
        callbacks=[stop],
        # Lightning takes no interval beyond an epoch's batches.
        val_check_interval=min(10, batches_per_epoch),
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        gradient_clip_val=workload.get("trainer", {}).get("gradient_clip_val"),
    )
    run.fit(build(lr), batches)
    # TPE ranks what missed the target behind all that reached it.
    study.tell(trial, stop.took if stop.reached else 4 * min(best, seconds))
    if stop.reached and stop.took < best:
        best = stop.took
        chosen = {"batch_size": size, "lr": lr}
print(json.dumps(chosen))
