"""A workload built from its config: its data once a study, its module once a trial.

Any LightningDataModule and LightningModule will do. What bstune asks them for beside Lightning's own methods is
optional:

A data module may have

* ``train_batches(batch_size, micro_batch_size, seed)``: returns a trial's endless stream of batches, each of exactly
  ``batch_size`` examples, in micro-batches of at most ``micro_batch_size`` (None: in one piece). A stream with an
  attribute ``stream``, a :class:`bstune.trial.batches.IndexStream`, lets trials be stopped and continued. Such a data
  module has ``train_size`` and ``validation_size``, numbers of examples; ``train_size`` is known once
  ``prepare_data()`` has run, and ``setup()`` is put off until the data are used, so that they may stay off the device.
  Without this method bstune reads the DataLoader of ``train_dataloader()`` in other batches, see
  :func:`bstune.trial.batches.rebatch`.
* ``validates_on_test``: True if the target is measured on the published test set.
* ``first_images(count)``: returns the first training images as batches have them, without augmentation.

A module may have

* ``initial_images`` and ``initialise_from(images)``: how many of these images it starts from (0: none), and what takes
  them; no random number may be drawn there. What it changes in the module's state is used by later trials of the same
  hyperparameters too.
* ``check_batch(batch_size, micro_batch_size)``: raises a ConfigError for sizes that it cannot be trained with. Any
  module inside it, such as a normalisation layer, may have one.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf import DictConfig
from torch import Tensor
from torch.utils.data import DataLoader

from bstune.config import budget_of, build, with_settings
from bstune.core.errors import ConfigError
from bstune.core.records import TrialProtocol, TrialSpec
from bstune.trial.batches import rebatch
from bstune.trial.loop import Workload, make_trainer, serving

BATCH_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def load_data(config: DictConfig) -> LightningDataModule:
    """Build ``config.workload.data`` and read what it reads; what hands out its own batches is not yet set up."""
    data = build(config.workload.data, "workload.data")
    if not isinstance(data, LightningDataModule):
        raise ConfigError(f"workload.data must build a LightningDataModule, but got {type(data).__name__}")
    data.prepare_data()
    if not _hands_out_batches(data):
        data.setup("fit")
        data.setup("test")
    return data


def _hands_out_batches(data: LightningDataModule) -> bool:
    return hasattr(data, "train_batches")


def train_examples(data: Any) -> int:
    """Return how many examples there are to train on."""
    return int(data.train_size) if _hands_out_batches(data) else _examples(data.train_dataloader())


def build_workload(config: DictConfig, data: Any = None) -> Workload:
    """Put the data of ``config.workload`` where they are used and return what trials need.

    Args:
        config: the composed and checked config.
        data: from :func:`load_data`; None reads them now.
    """
    data = load_data(config) if data is None else data
    micro_batch_size = config.protocol.micro_batch_size
    own_batches = _hands_out_batches(data)
    if own_batches:
        data.setup("fit")
        data.setup("test")
    validation = data.val_dataloader()
    test = data.test_dataloader() if is_overridden("test_dataloader", data) else None
    loader = None if own_batches else data.train_dataloader()
    if not own_batches:
        rebatch(loader, 1, None, 0)  # refuses what cannot be read in other batches, before the first trial

    def train_batches(spec: TrialSpec) -> Iterable[Any]:
        if own_batches:
            batches: Iterable[Any] = data.train_batches(spec.batch_size, micro_batch_size, spec.seed)
            return batches
        return rebatch(loader, spec.batch_size, micro_batch_size, spec.seed)

    images = _InitialImages(data)
    return Workload(
        build_module=lambda spec: images.give(build_module(config, spec), spec.hyperparameters),
        train_batches=train_batches,
        validation_batches=validation,
        validation_examples=data.validation_size if own_batches else _examples(validation),
        test_batches=None if sized_len(test) == 0 else test,
        train_examples=train_examples(data),
        validates_on_test=getattr(data, "validates_on_test", False),
        # Without hooks on batches it is left out: Lightning looks for them at each batch.
        data_module=None if own_batches and not any(is_overridden(hook, data) for hook in BATCH_HOOKS) else data,
    )


def build_module(config: DictConfig, spec: TrialSpec) -> LightningModule:
    """Return the Lightning module of ``config.workload`` at one batch size and learning rate, before it sees any data.

    ``${trial.batch_size}``, ``${trial.lr}``, ``${trial.seed}`` and ``${trial.total_steps}`` in it are the trial's, and
    the spec's hyperparameters stand at their keys.
    """
    own = with_settings(config, spec.hyperparameters)
    own.trial.batch_size, own.trial.lr, own.trial.seed = spec.batch_size, spec.lr, spec.seed
    own.trial.total_steps = budget_of(own).last_step(spec.batch_size)
    module = build(own.workload.module, "workload.module")
    if not isinstance(module, LightningModule):
        raise ConfigError(f"workload.module must build a LightningModule, but got {type(module).__name__}")
    for part in module.modules():
        if hasattr(part, "check_batch"):
            part.check_batch(spec.batch_size, config.protocol.micro_batch_size)  # type: ignore[operator]
    return module


class _InitialImages:
    """Hands each trial's module the training images that it starts from, and keeps the state that came of them."""

    def __init__(self, data: LightningDataModule) -> None:
        self._data = data
        self._hyperparameters: Mapping[str, float] | None = None  # of the trial that the state is from
        self._state: dict[str, Tensor] = {}

    def give(self, module: LightningModule, hyperparameters: Mapping[str, float]) -> LightningModule:
        wanted = getattr(module, "initial_images", 0) if hasattr(module, "initialise_from") else 0
        if not wanted:
            return module
        if not hasattr(self._data, "first_images"):
            raise ConfigError(
                f"the module starts from {wanted} training images, for its whitening say, but workload.data is "
                f"{type(self._data).__name__}, which has no first_images(count): set "
                "workload.module.model.whitening=null, or use bstune.workloads.images.ImageData"
            )
        if hyperparameters == self._hyperparameters:
            module.load_state_dict(self._state, strict=False)
            return module
        before = {name: value.clone() for name, value in module.state_dict().items()}
        module.initialise_from(self._data.first_images(wanted))  # type: ignore[operator]
        after = module.state_dict()
        self._state = {name: v.clone() for name, v in after.items() if not torch.equal(v, before[name])}
        self._hyperparameters = hyperparameters  # the last ones alone: a search has many
        return module


def _examples(loader: Any) -> int:
    if isinstance(loader, DataLoader) and hasattr(loader.dataset, "__len__"):
        return len(loader.dataset)
    raise ConfigError(
        f"the data module must return a torch DataLoader over a data set with a length, but got {type(loader).__name__}"
    )


def on_device(workload: Workload, module: LightningModule, batch: Any, device: torch.device) -> Any:
    """Return a batch as a Trainer would hand it to the module: moved, and through the hooks on batches."""
    owners = [owner for owner in (workload.data_module, module) if owner is not None]
    for name, more in zip(BATCH_HOOKS, ((), (device,), ()), strict=True):
        owner = next((owner for owner in owners if is_overridden(name, owner)), module)
        batch = getattr(owner, name)(batch, *more, 0)
    return batch


def evaluate(workload: Workload, module: LightningModule, protocol: TrialProtocol, **batches: Iterable[Any]) -> Trainer:
    """Evaluate a module on ``val`` or ``test`` batches once, and return the Trainer with its metrics."""
    trainer = make_trainer(protocol.trainer)
    ((stage, iterable),) = batches.items()
    run = trainer.validate if stage == "val" else trainer.test
    if workload.data_module is None:
        run(module, iterable, verbose=False)
    else:
        run(module, datamodule=serving(workload.data_module, **batches), verbose=False)
    return trainer
