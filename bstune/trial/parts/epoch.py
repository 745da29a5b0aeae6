"""What Lightning's checkpoints leave out of an epoch that is not at its end: metrics that are still being accumulated.

A schedule may look at an epoch's mean of the training loss, so a trial that goes on in the middle of an epoch needs
what its first part has logged. Both functions speak to Lightning's own collection, which has no interface for it.
"""

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torchmetrics import Metric

from bstune.trial.trainer import of_package, package_of

META = (
    *(
        "fx",
        "name",
        "prog_bar",
        "logger",
        "on_step",
        "on_epoch",
        "enable_graph",
        "add_dataloader_idx",
    ),
    *("dataloader_idx", "metric_attribute"),
)
SYNC = ("_should", "rank_zero_only", "_op")


def accumulated(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    """Return what an epoch has accumulated so far, as plain data."""
    logged = {}
    for key, one in trainer.fit_loop.epoch_loop._results.items():
        logged[key] = {
            "meta": {name: getattr(one.meta, name) for name in META},
            "reduce": one.meta.reduce_fx.__name__,
            "sync": {name: getattr(one.meta.sync, name) for name in SYNC},
            "has_reset": one.has_reset,
            "states": _states(one) if one.is_tensor else None,  # else: the module's own metric
        }
    metrics = {name: part for name, part in module.named_modules() if isinstance(part, Metric)}
    return {
        "logged": logged,
        "metrics": {name: _states(metric) for name, metric in metrics.items()},
    }


def accumulate_on(trainer: Trainer, module: LightningModule, state: Mapping[str, Any]) -> None:
    """Put back what :func:`accumulated` returned, before the epoch goes on."""
    package = package_of(module)
    place = "trainer.connectors.logger_connector.result"
    result, metadata, sync = (
        of_package(package, f"{place}.{name}") for name in ("_ResultMetric", "_Metadata", "_Sync")
    )
    parts = dict(module.named_modules())
    for name, states in state["metrics"].items():
        if name in parts:
            _set_states(parts[name], states, module.device)
    results: dict[str, Any] = trainer.fit_loop.epoch_loop._results
    for key, saved in state["logged"].items():
        meta = metadata(**saved["meta"], reduce_fx=getattr(torch, saved["reduce"]))
        meta.sync = sync(fn=trainer.strategy.reduce, **saved["sync"])
        one = result(meta, saved["states"] is not None)
        if saved["states"] is not None:
            _set_states(one, saved["states"], module.device)
        elif saved["meta"]["metric_attribute"] in parts:
            one.value = parts[saved["meta"]["metric_attribute"]]
        else:
            continue
        one.has_reset, one._update_count = saved["has_reset"], 1
        results[key] = one


def _states(metric: Any) -> dict[str, Any]:
    states = {name: getattr(metric, name) for name in metric._defaults}
    return {
        "count": metric._update_count,
        "states": {name: _moved(value, "cpu") for name, value in states.items()},
    }


def _set_states(metric: Any, saved: Mapping[str, Any], device: torch.device) -> None:
    for name, value in saved["states"].items():
        setattr(metric, name, _moved(value, device))
    metric._update_count, metric._computed = saved["count"], None


def _moved(value: Any, device: torch.device | str) -> Any:
    return (
        value.detach().to(device, copy=True)
        if isinstance(value, Tensor)
        else [_moved(v, device) for v in value]
    )
