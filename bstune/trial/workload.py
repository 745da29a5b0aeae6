"""A workload built from its config: its data once a study, its module once a trial."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.memory import garbage_collection_cuda
from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf import DictConfig
from torch import Tensor
from torch.utils.data import DataLoader

from bstune.config import budget_of, instantiate, with_hyperparameters
from bstune.core.clock import TrialClock
from bstune.core.errors import ConfigError
from bstune.core.records import TrialProtocol, TrialResult, TrialSpec
from bstune.trial.batches import rebatch
from bstune.trial.checkpoint import Stopped
from bstune.trial.loop import make_trainer, run_trial, serving
from bstune.workloads.images import ImageData
from bstune.workloads.layers import largest_ghost_size


@dataclass(frozen=True)
class Workload:
    """What trials need of a workload.

    Args:
        build_module: builds the Lightning module of one trial, ready to be trained.
        train_batches: an endless stream of batches for one trial.
        validation_batches: the same at every batch size.
        test_batches: None where there is no test set apart from the validation data.
        train_examples, validation_examples: sizes.
        validates_on_test: whether the target is measured on the published test set.
        data_module: the project's own, whose hooks on batches are called; None where bstune's own serves them.
    """

    build_module: Callable[[TrialSpec], LightningModule]
    train_batches: Callable[[TrialSpec], Iterable[Any]]
    validation_batches: Iterable[Any]
    test_batches: Iterable[Any] | None
    train_examples: int
    validation_examples: int
    validates_on_test: bool
    data_module: LightningDataModule | None


def load_data(config: DictConfig) -> LightningDataModule:
    """Build ``config.workload.data`` and read what it reads: bstune's own data stay on the host until they are used.

    Raises:
        DataError: if the data cannot be had.
        ConfigError: if the data module cannot be built from the config, or is none.
    """
    data = instantiate(config.workload.data, "workload.data")
    if not isinstance(data, LightningDataModule):
        raise ConfigError(f"workload.data must build a LightningDataModule, but got {type(data).__name__}")
    if isinstance(data, ImageData):
        data.check()
    data.prepare_data()
    if not isinstance(data, ImageData):
        data.setup("fit")
        data.setup("test")
    return data


def train_examples(data: LightningDataModule) -> int:
    """Return how many examples there are to train on.

    Raises:
        ConfigError: if the data module's own DataLoader does not tell.
    """
    return data.train_size if isinstance(data, ImageData) else _examples(data.train_dataloader())


def build_workload(config: DictConfig, data: LightningDataModule | None = None) -> Workload:
    """Put the data of ``config.workload`` where they are used and return what trials need.

    A data module of bstune's own hands each trial a stream that lives on the device. Any other LightningDataModule is
    prepared and set up once; the DataLoader that it trains on is read in batches of exactly B examples instead.

    Args:
        config: the composed and checked config.
        data: from :func:`load_data`; None: they are read now.

    Raises:
        DataError: if the data cannot be had.
        ConfigError: if data or module cannot be built from the config, or batches not taken from the data.
    """
    data = load_data(config) if data is None else data
    micro_batch_size = config.protocol.micro_batch_size
    if isinstance(data, ImageData):
        data.setup("fit")
    validation = data.val_dataloader()
    test = data.test_dataloader() if _has_test_data(data) else None

    if isinstance(data, ImageData):
        own = data

        def train_batches(spec: TrialSpec) -> Iterable[Any]:
            return own.train_batches(spec.batch_size, micro_batch_size, spec.seed)

        validation_examples = data.validation_size
    else:
        loader = data.train_dataloader()
        rebatch(loader, 1, None, 0)  # refuses what cannot be read in other batches, before the first trial

        def train_batches(spec: TrialSpec) -> Iterable[Any]:
            return rebatch(loader, spec.batch_size, micro_batch_size, spec.seed)

        validation_examples = _examples(validation)

    images = InitialImages(data)
    return Workload(
        build_module=lambda spec: images.give(build_module(config, spec), spec.hyperparameters),
        train_batches=train_batches,
        validation_batches=validation,
        test_batches=test,
        train_examples=train_examples(data),
        validation_examples=validation_examples,
        validates_on_test=isinstance(data, ImageData) and data.validates_on_test,
        data_module=None if isinstance(data, ImageData) else data,
    )


def build_module(config: DictConfig, spec: TrialSpec) -> LightningModule:
    """Return the Lightning module of ``config.workload`` at one batch size and learning rate, before it sees any data.

    ``${trial.batch_size}``, ``${trial.lr}``, ``${trial.seed}`` and ``${trial.total_steps}`` in it are the trial's, and
    the spec's settings stand at their keys.

    Raises:
        ConfigError: if it cannot be built, is no LightningModule, or normalises in groups over the micro-batch size.
    """
    own = with_hyperparameters(config, spec.hyperparameters)
    own.trial.batch_size, own.trial.lr, own.trial.seed = spec.batch_size, spec.lr, spec.seed
    own.trial.total_steps = budget_of(own).last_step(spec.batch_size)
    module = instantiate(own.workload.module, "workload.module")
    if not isinstance(module, LightningModule):
        raise ConfigError(f"workload.module must build a LightningModule, but got {type(module).__name__}")
    _check_micro_batches(module, spec.batch_size, config.protocol.micro_batch_size)
    return module


def _check_micro_batches(module: LightningModule, batch_size: int, micro_batch_size: int | None) -> None:
    size = largest_ghost_size(module)
    if micro_batch_size is not None and micro_batch_size < min(size, batch_size):
        raise ConfigError(
            f"ghost size {size} is over the micro-batch size {micro_batch_size}: lower "
            "workload.module.model.norm.ghost_size, or raise protocol.micro_batch_size"
        )


class InitialImages:
    """Hands each trial's module the training images that it starts from, if it wants any.

    A module says how many it wants in ``initial_images`` and takes them in ``initialise_from``. They are normalised as
    in batches, the first of the training data; no random number may be drawn from them. What a module changes in its
    state because of them is kept, and the next ones of the same settings get that.

    Args:
        data: of the workload.
    """

    def __init__(self, data: LightningDataModule) -> None:
        self._data = data
        self._settings: Mapping[str, float] | None = None  # of the trial that what is kept comes from
        self._kept: dict[str, Tensor] = {}

    def give(self, module: LightningModule, settings: Mapping[str, float]) -> LightningModule:
        """Return the module, which has what it wanted.

        Args:
            module: of a trial.
            settings: of the trial: where they differ, so may what comes of the images.

        Raises:
            ConfigError: if it wants images and the data are not bstune's own, or it cannot use them.
        """
        wanted = getattr(module, "initial_images", 0) if hasattr(module, "initialise_from") else 0
        if not wanted:
            return module
        if not isinstance(self._data, ImageData):
            raise ConfigError(
                "whitening takes its statistics from images of bstune.workloads.images.ImageData, but workload.data is "
                f"{type(self._data).__name__}: set workload.module.model.whitening=null, or use ImageData"
            )
        if settings == self._settings:
            module.load_state_dict(self._kept, strict=False)
            return module
        before = {name: value.clone() for name, value in module.state_dict().items()}
        module.initialise_from(self._data.first_images(wanted))  # type: ignore[operator]
        after = module.state_dict()
        self._kept = {name: v.clone() for name, v in after.items() if not torch.equal(v, before[name])}
        self._settings = settings  # the last ones alone: a search has many
        return module


def _has_test_data(data: LightningDataModule) -> bool:
    if isinstance(data, ImageData):
        return data.test_size > 0
    return type(data).test_dataloader is not LightningDataModule.test_dataloader


def _examples(loader: Any) -> int:
    if isinstance(loader, DataLoader) and hasattr(loader.dataset, "__len__"):
        return len(loader.dataset)
    raise ConfigError(
        f"the data module must return a torch DataLoader over a data set with a length, but got {type(loader).__name__}"
    )


def on_device(workload: Workload, module: LightningModule, batch: Any, device: torch.device) -> Any:
    """Return a batch as a Trainer would hand it to the module: moved, and through the hooks on batches."""
    owners = [owner for owner in (workload.data_module, module) if owner is not None]
    for name, more in (
        ("on_before_batch_transfer", ()),
        ("transfer_batch_to_device", (device,)),
        ("on_after_batch_transfer", ()),
    ):
        owner = next((owner for owner in owners if is_overridden(name, owner)), module)
        batch = getattr(owner, name)(batch, *more, 0)
    return batch


def evaluate(workload: Workload, module: LightningModule, protocol: TrialProtocol, **batches: Iterable[Any]) -> Trainer:
    """Evaluate a module once and return the Trainer with its metrics.

    Args:
        workload: whose data module's hooks are called, if it has one of its own.
        module: as it is.
        protocol: for the Trainer's options.
        batches: ``val`` or ``test``, and what to read for it.
    """
    trainer = make_trainer(protocol.trainer)
    ((stage, iterable),) = batches.items()
    run = trainer.validate if stage == "val" else trainer.test
    if workload.data_module is None:
        run(module, iterable, verbose=False)
    else:
        run(module, datamodule=serving(workload.data_module, **batches), verbose=False)
    return trainer


def train(
    workload: Workload,
    spec: TrialSpec,
    protocol: TrialProtocol,
    checkpoint: Path | None = None,
    *,
    clock: TrialClock | None = None,
    state: Path | None = None,
    resume: Stopped | None = None,
) -> TrialResult:
    """Run one trial of the workload; see :func:`bstune.trial.loop.run_trial`."""
    result = run_trial(
        spec,
        workload.build_module,
        workload.train_batches,
        workload.validation_batches,
        workload.validation_examples,
        protocol,
        checkpoint,
        clock,
        data_module=workload.data_module,
        state=state,
        resume=resume,
    )
    # A Trainer and its module refer to each other: the device's memory would wait for Python's collector.
    if result.status == "oom" or torch.cuda.is_available():
        garbage_collection_cuda()
    return result
