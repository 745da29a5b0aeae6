"""What bench_projects.py compares bstune with: Optuna's TPE over batch size and learning rate, as users write it.

    python optuna_script.py MODULE DATA METRIC TARGET LOW HIGH LR_LOW LR_HIGH STEPS EXAMPLES SECONDS SEED [TRAINER]

A trial ends at the target, after as long as three times the fastest one that reached it, or with its budget. The last
line is the batch size and the learning rate of the fastest one, as JSON.
"""

import importlib
import json
import math
import sys
import time

import optuna
from torch.utils.data import DataLoader

start = time.monotonic()
module, data, metric, target, *numbers, trainer = sys.argv[1:]
low, high, lr_low, lr_high, steps, examples, seconds, seed = map(float, numbers)
pl = importlib.import_module(
    "pytorch_lightning" if module.startswith("pl_") else "lightning.pytorch"
)
build, load = (
    getattr(importlib.import_module(name.rpartition(".")[0]), name.rpartition(".")[2])
    for name in (module, data)
)
best, chosen = math.inf, None


class StopAtTarget(pl.Callback):
    def on_fit_start(self, trainer, module):
        self.began, self.reached, self.took = time.monotonic(), False, math.inf

    def on_validation_end(self, trainer, module):
        self.reached = not trainer.sanity_checking and float(
            trainer.callback_metrics[metric]
        ) <= float(target)
        self.took = time.monotonic() - self.began
        trainer.should_stop |= (
            self.reached or self.took > 3 * best or time.monotonic() - start > seconds - 1
        )


study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=int(seed)))
while time.monotonic() - start < seconds - 3:
    trial = study.ask()
    size = trial.suggest_int("batch_size", int(low), int(high), log=True)
    lr = trial.suggest_float("lr", lr_low, lr_high, log=True)
    stop = StopAtTarget()
    most = max(int(steps), math.ceil(examples / size))
    options = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    run = pl.Trainer(
        accelerator="cpu", max_steps=most, max_epochs=-1, callbacks=[stop], val_check_interval=10, log_every_n_steps=1,
        check_val_every_n_epoch=None, num_sanity_val_steps=0, **options, **json.loads(trainer)
    )  # fmt: skip
    batches = load()
    loader = batches.train_dataloader
    batches.train_dataloader = lambda own=loader, size=size: DataLoader(
        own().dataset, size, shuffle=True
    )
    run.fit(build(lr=lr), batches)
    study.tell(trial, stop.took if stop.reached else 4 * min(best, seconds))
    if stop.reached and stop.took < best:
        best, chosen = stop.took, {"batch_size": size, "lr": lr}
print(json.dumps(chosen))
