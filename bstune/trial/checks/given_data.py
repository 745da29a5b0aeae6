"""Checks and a note for data that are made for each batch size: their batches are taken as is."""

import torch

from bstune.core.errors import ConfigError
from bstune.core.records import TrialSpec
from bstune.options import StudyOptions
from bstune.system.console import listing
from bstune.system.failures import place_of
from bstune.system.watchdog import waiting_for
from bstune.trial.batches.given_batches import GivenBatches, length_of, shapes_in
from bstune.trial.lightning.installed import LightningModule, Trainer
from bstune.trial.loop import Workload


def refuse_options_that_cut_batches(options: StudyOptions) -> None:
    """Raise a ConfigError for options that need batches of other sizes than the loaders give."""
    size = options.protocol.micro_batch_size
    if size is not None:
        raise ConfigError(
            f"protocol.micro_batch_size={size} cuts batches, but those of data that are made for "
            "each batch size are taken as they come: leave it out"
        )
    if options.devices > 1:
        raise ConfigError(
            f"devices={options.devices} share each batch, but those of data that are made for each "
            "batch size are taken as they come: leave it out"
        )


def note_on_given_batches(loaders: object) -> str:
    """Give the line that tells the user that batches are taken as the loaders give them."""
    epochs = "" if length_of(loaders) is not None else ", without epochs, as there is no length"
    return (
        "assumed: batches are those that the data made for each batch size give, as they "
        f"come{epochs}; a stopped trial that goes on opens them anew and skips those that it has "
        "seen"
    )


def check_batches(workload: Workload, small: int, large: int) -> None:
    """Refuse a user's function of the batch size whose batches do not follow it.

    Its batches are taken as they come. A ConfigError says that they have the same shapes at the two
    batch sizes ``small`` and ``large``.
    """
    if small == large:
        return
    shapes = list[tuple[torch.Size, ...]]()
    for batch_size in (small, large):
        # Nothing is trained, so that any learning rate does.
        spec = TrialSpec(number=0, trial_index=0, batch_size=batch_size, lr=1.0, delta=None, seed=0)
        batches = workload.train_batches(spec)
        if not isinstance(batches, GivenBatches):
            return
        with waiting_for(f"the first batch of the data for batch size {batch_size}"):
            shapes.append(shapes_in(batches.stream.draw()))
    if shapes[0] and shapes[0] == shapes[1]:
        shown = listing([str(tuple(shape)) for shape in shapes[0]])
        raise ConfigError(
            f"the data made for batch sizes {small} and {large} both give batches of the shape "
            f"{shown}: let their loaders have the batch size that they are made for"
        )


def check_epoch_schedules(trainer: Trainer, module: LightningModule) -> None:
    """Raise a ConfigError for a schedule that steps at epochs' ends, where epochs have no end."""
    # A module that steps its optimizers itself also decides itself when to step its schedules.
    if trainer.num_training_batches != float("inf") or not module.automatic_optimization:
        return
    for config in trainer.lr_scheduler_configs:
        if config.interval == "epoch":
            name = type(config.scheduler).__name__
            raise ConfigError(
                f"{name} of {type(module).__name__}{place_of(module.configure_optimizers)} is "
                "stepped at the end of an epoch, and data without a length have none: return "
                "{'optimizer': optimizer, 'lr_scheduler': {'scheduler': scheduler, 'interval': "
                "'step'}} from configure_optimizers"
            )
