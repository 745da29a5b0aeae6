"""A trained module from a folder with its study's config, its trial and its checkpoint, as MLflow keeps a winner."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from omegaconf import OmegaConf

from bstune.config import check
from bstune.core.records import TrialSpec
from bstune.trial.trainer import builds_layers_later
from bstune.trial.workload import build_module, evaluate, load

CONFIG, TRIAL = "config.yaml", "trial.json"  # beside the checkpoint, whose name the latter has


class Restored:
    """A module with a checkpoint's weights, in evaluation mode on the CPU."""

    def __init__(self, module: LightningModule) -> None:
        self.module = module.eval()

    def predict(self, inputs: Any, params: Any = None) -> np.ndarray:
        """Return what the module's ``forward`` makes of an array as its own data give it, such as normalised images."""
        batch = torch.as_tensor(np.asarray(inputs))
        batch = batch.to(self.module.dtype) if batch.is_floating_point() else batch
        with torch.no_grad():
            outputs: torch.Tensor = self.module(batch)
        return outputs.float().numpy()


def _load_pyfunc(path: str) -> Restored:
    """Return what is in a folder that :mod:`bstune.tracking.model` wrote; MLflow's pyfunc flavour calls this."""
    folder = Path(path)
    written: dict[str, Any] = json.loads((folder / TRIAL).read_text(encoding="utf-8"))
    config = OmegaConf.load(folder / CONFIG)
    config.device, config.devices, config.precision = "cpu", 1, "32-true"
    composed = check(config)  # type: ignore[arg-type]  # a mapping, as it was composed
    options, recipe = composed.options, composed.trained
    module = build_module(options, recipe, TrialSpec(**written["spec"]))
    weights = folder / written["checkpoint"]
    checkpoint = torch.load(weights, map_location="cpu", weights_only=True)
    if builds_layers_later(module, checkpoint["state_dict"]):
        # Its layers may depend on the data, so that it takes a Trainer, which loads the weights as well.
        workload, protocol = load(options, recipe)
        quick = replace(protocol, trainer={**protocol.trainer, "limit_val_batches": 1})
        evaluate(workload, module, quick, weights, val=workload.validation_batches)
        return Restored(module)
    module.on_load_checkpoint(checkpoint)
    module.load_state_dict(checkpoint["state_dict"])
    return Restored(module)
