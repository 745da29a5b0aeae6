"""A trained module from a folder with its study's config, its trial and its checkpoint, as MLflow keeps a winner."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from lightning.pytorch import LightningModule

from bstune.core.records import TrialSpec
from bstune.hydra_recipe import HydraRecipe
from bstune.options import PlainLookup, TrainedOptions
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
    values: dict[str, Any] = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
    values |= {"device": "cpu", "devices": 1, "precision": "32-true"}
    options = TrainedOptions.model_validate(values, context=PlainLookup(values))
    keys = {name: tunable.key for name, tunable in options.workload.tunable.items()}
    recipe = HydraRecipe(values, keys)
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
