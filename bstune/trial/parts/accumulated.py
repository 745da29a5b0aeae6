"""Metrics that an epoch has accumulated so far, which Lightning's checkpoints leave out.

A schedule may look at an epoch's mean of the training loss, so a trial that goes on in the middle
of an epoch needs what its first part has logged.
"""

from collections.abc import Mapping
from typing import Any

from torchmetrics import Metric

from bstune.trial.lightning.installed import LightningModule, Trainer
from bstune.trial.lightning.internals import (
    restore_states,
    restored_entry,
    results_of_training,
    saved_entry,
    states_of_metric,
)
from bstune.trial.lightning.packages import package_of


def accumulated_metrics(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    """Give the metrics that an epoch has accumulated so far, as plain data.

    They are logged values, and the states of the module's own metrics.
    """
    logged = {key: saved_entry(entry) for key, entry in results_of_training(trainer).items()}
    metrics = dict[str, dict[str, Any]]()
    for name, part in module.named_modules():
        if isinstance(part, Metric):
            metrics[name] = states_of_metric(part)
    return {"logged": logged, "metrics": metrics}


def restore_metrics(trainer: Trainer, module: LightningModule, state: Mapping[str, Any]) -> None:
    """Put back the metrics that :func:`accumulated_metrics` gave, before the epoch goes on."""
    parts = dict(module.named_modules())
    for name, states in state["metrics"].items():
        if name in parts:
            restore_states(parts[name], states, module.device)
    package = package_of(module)
    results: dict[str, Any] = results_of_training(trainer)
    for key, saved in state["logged"].items():
        entry = restored_entry(package, saved, trainer, module)
        if entry is not None:
            results[key] = entry
