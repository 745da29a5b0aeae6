"""A quiet Trainer of either Lightning package, with the user's own arguments.

``lightning.pytorch`` and ``pytorch_lightning`` are the same code with different classes: a Trainer
of one does not take modules of the other.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from bstune.core.errors import InputError
from bstune.recipe.recipe import (
    OF_TRAINER,
    PACKAGES,
    Recipe,
    TrialSettings,
    resolve_device,
    resolve_precision,
)
from bstune.trial.batches import AnyLoader

# Where torch's optimizers and schedules keep rates.
RATES_OF_GROUP = {"lr", "initial_lr", "max_lr", "min_lr"}
RATES_OF_SCHEDULE = {"base_lrs", "max_lrs", "_last_lr"}
# Call-backs that choose a training's length, its batch size or its rate, which the trial has.
CHOOSING = (
    *("EarlyStopping", "Timer"),
    *("BatchSizeFinder", "GradientAccumulationScheduler", "LearningRateFinder"),
)
# Those that print or write files.
WRITING = ("ProgressBar", "ModelSummary", "Checkpoint")
# Arguments of the Trainer that let it print and write.
QUIET = ("enable_checkpointing", "enable_progress_bar", "enable_model_summary")


class EpochLimit(Callback):
    """Tells a module the epochs of its budget, as ``trainer.max_epochs``.

    Args:
        loader: gives the training loader, once the data is set up; with one of a stream that does
            not tell its length the module sees the user's own limit.
        total_steps: of the budget.
    """

    def __init__(self, loader: Callable[[], AnyLoader], total_steps: int) -> None:
        self._loader = loader
        self._total_steps = total_steps

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Set the limit before optimizers and schedules are configured."""
        steps = self._loader().epoch.steps
        if steps is not None:
            trainer.fit_loop.max_epochs = math.ceil(self._total_steps / steps)
        # Larger batches are fewer.
        if steps is not None and isinstance(trainer.val_check_interval, int):
            batches = steps * trainer.accumulate_grad_batches
            trainer.val_check_interval = min(trainer.val_check_interval, batches)
        # Each call-back costs a hundredth of a step of half a millisecond; this one is done.
        trainer.callbacks = [one for one in trainer.callbacks if one is not self]


class RateOverride(Callback):
    """Puts a rate into the optimizers' groups and schedules; the rates keep their ratios.

    Args:
        lr: of the first group, before a schedule changes it.
    """

    def __init__(self, lr: float) -> None:
        self._lr = lr

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Multiply all rates, before a checkpoint is read."""
        factor = self._lr / base_rates(trainer.optimizers[0])[0]
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                for name in RATES_OF_GROUP & group.keys():
                    group[name] *= factor
        schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
        for schedule in schedules:
            for name in RATES_OF_SCHEDULE & vars(schedule).keys():
                setattr(schedule, name, [factor * rate for rate in getattr(schedule, name)])
            # Those that one after another moves.
            schedules.extend(getattr(schedule, "_schedulers", ()))


def base_rates(optimizer: Any) -> list[float]:
    """The rates of an optimizer's groups, the highest of OneCycleLR, without other schedules."""
    groups = optimizer.param_groups
    return [float(one.get("max_lr", one.get("initial_lr", one["lr"]))) for one in groups]


class MicroBatchWeights(Callback):
    """Weights the loss of micro-batch i by n_i/B: gradients add up to those of the whole batch.

    It is exact where a loss is a mean over examples that do not see each other; layers such as
    BatchNorm see a micro-batch alone.

    Args:
        sizes: n_i, examples, of the micro-batches of a batch on this device.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        # Lightning has divided each of the k losses by k.
        self._weights = [len(sizes) * size / sum(sizes) for size in sizes]

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor
    ) -> None:
        """Weight the loss in place: it is Lightning's own tensor, the module's divided by k."""
        loss.mul_(self._weights[trainer.fit_loop.batch_idx % len(self._weights)])


def make_trainer(
    recipe: Recipe,
    trial: TrialSettings,
    module: LightningModule,
    callbacks: Sequence[Callback],
    micro_batch_sizes: Sequence[int],
    *,
    quiet: bool,
) -> Trainer:
    """Make the Trainer of a fit, of the package that the module's class is of.

    Args:
        recipe: whose arguments of the Trainer are kept, where bstune does not set them.
        trial: that is trained.
        module: that is trained.
        callbacks: of bstune's own, which come last.
        micro_batch_sizes: examples of each micro-batch of a batch on this device.
        quiet: nothing is printed, logged or written; else as the user's Trainer does it.

    Raises:
        InputError: the device cannot do the recipe's precision, an option contradicts the Trainer's
            arguments, or the module steps its optimizers itself where batches are to be
            accumulated.
    """
    count = len(micro_batch_sizes)
    if count > 1 and not module.automatic_optimization:
        raise InputError(
            f"{type(module).__name__} steps its optimizers itself (manual optimization), so that "
            f"its batches cannot be accumulated: leave out micro_batch_size"
        )
    package = import_module(package_of(module))
    arguments = recipe.trainer(trial)
    kinds = CHOOSING + WRITING if quiet else CHOOSING
    left_out = tuple(getattr(package.callbacks, kind) for kind in kinds)
    kept = [one for one in callbacks_of(arguments) if not isinstance(one, left_out)]
    weights = [MicroBatchWeights(micro_batch_sizes)] if count > 1 else []
    device = resolve_device(recipe.device)
    ours: dict[str, Any] = {
        "accelerator": device,
        "devices": recipe.devices,
        "precision": resolve_precision(recipe.precision, device),
        # Each device takes its share of the training batches, and all of the validation data.
        "use_distributed_sampler": False,
        "callbacks": kept,
        # What a module reads of its length; the call-back ends the trial.
        "max_steps": trial.total_steps,
        "max_epochs": arguments.get("max_epochs") or -1,
        "min_steps": None,
        "min_epochs": None,
        "max_time": None,
        "accumulate_grad_batches": count,
        # What is for a try alone.
        "fast_dev_run": False,
        "barebones": False,
        "limit_val_batches": arguments.get("limit_val_batches") or None,
    }
    if quiet:
        for name in PACKAGES:
            logging.getLogger(name).setLevel(logging.WARNING)
        # It takes whatever a module's hooks do with self.logger.experiment, and keeps nothing.
        ours["logger"] = package.loggers.logger.DummyLogger()
        ours |= dict.fromkeys(QUIET, False) | {"num_sanity_val_steps": 0}
    for name, option in OF_TRAINER.items():
        given = arguments.get(name, "auto")
        if given not in ("auto", ours[name]):
            raise InputError(
                f"trainer.{name}={given} is the option {option} here: give that, in place of "
                f"trainer.{name}"
            )
    trainer: Trainer = package.Trainer(**{**arguments, **ours})
    # Older Trainers of the other package refuse them as arguments.
    trainer.callbacks.extend([*weights, *callbacks])  # type: ignore[attr-defined]
    if isinstance(trainer.limit_train_batches, int):
        # The user's batches, of which so many make one here.
        accumulated = arguments.get("accumulate_grad_batches") or 1
        trainer.limit_train_batches = math.ceil(trainer.limit_train_batches / accumulated)
    return trainer


def callbacks_of(arguments: Mapping[str, Any]) -> list[Any]:
    """The call-backs among the Trainer's arguments, which may be one alone."""
    given = arguments.get("callbacks") or []
    return [*given] if isinstance(given, list | tuple) else [given]


def package_of(module: LightningModule) -> str:
    """Name the Lightning package that a module's class is of."""
    for base in type(module).__mro__:
        for package in PACKAGES:
            if base.__module__.startswith(f"{package}."):
                return package
    return PACKAGES[0]
