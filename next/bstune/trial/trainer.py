"""A quiet Trainer of either Lightning package, with the user's own arguments.

``lightning.pytorch`` and ``pytorch_lightning`` are the same code with different classes: a Trainer
of one does not take modules of the other.
"""

import logging
import math
import warnings
from collections.abc import Callable, Sequence, Sized
from importlib import import_module
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from bstune.recipe.recipe import Recipe, TrialSettings, resolve_device

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
# Call-backs that print, that write files, or that stop a training by another rule than the trial's.
LEFT_OUT = ("ProgressBar", "ModelSummary", "Checkpoint", "EarlyStopping")


class EpochLimit(Callback):
    """Tells a module the epochs of its budget, as ``trainer.max_epochs``.

    Args:
        batches: gives the training loader, once the data is set up.
        total_steps: of the budget.
    """

    def __init__(self, batches: Callable[[], Sized], total_steps: int) -> None:
        self._batches = batches
        self._total_steps = total_steps

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Set the limit before optimizers and schedules are configured."""
        epochs = math.ceil(self._total_steps / len(self._batches()))
        trainer.fit_loop.max_epochs = epochs


def make_trainer(
    recipe: Recipe, trial: TrialSettings, module: LightningModule, callbacks: Sequence[Callback]
) -> Trainer:
    """Make the Trainer of a trial, of the package that the module's class is of.

    Args:
        recipe: whose arguments of the Trainer are kept, where bstune does not set them.
        trial: that is trained.
        module: that is trained.
        callbacks: of bstune's own, which come last.
    """
    package = import_module(_package_of(module))
    for name in PACKAGES:
        logging.getLogger(name).setLevel(logging.WARNING)
    arguments = recipe.trainer(trial)
    left_out = tuple(getattr(package.callbacks, kind) for kind in LEFT_OUT)
    users = arguments.get("callbacks") or []
    users = users if isinstance(users, list | tuple) else [users]
    kept = [callback for callback in users if not isinstance(callback, left_out)]
    ours: dict[str, Any] = {
        "accelerator": resolve_device(recipe.device),
        "devices": 1,
        "precision": recipe.precision,
        "callbacks": [*kept, *callbacks],
        # It takes whatever a module's hooks do with self.logger.experiment, and keeps nothing.
        "logger": package.loggers.logger.DummyLogger(),
        # What a module reads of its length; the call-back ends the trial.
        "max_steps": trial.total_steps,
        "max_epochs": -1,
        "min_steps": None,
        "min_epochs": None,
        "max_time": None,
        "accumulate_grad_batches": 1,
        "num_sanity_val_steps": 0,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer: Trainer = package.Trainer(**{**arguments, **ours})
    return trainer


class quiet(warnings.catch_warnings):  # noqa: N801 (it is used as a function)
    """Leave out Lightning's advice on a training, such as on the number of a loader's workers."""

    def __enter__(self) -> None:
        super().__enter__()
        for package in ("lightning", "pytorch_lightning"):
            warnings.filterwarnings("ignore", module=package)


def _package_of(module: LightningModule) -> str:
    """Name the Lightning package that a module's class is of."""
    for base in type(module).__mro__:
        for package in PACKAGES:
            if base.__module__.startswith(f"{package}."):
                return package
    return PACKAGES[0]
