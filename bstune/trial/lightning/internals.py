"""Lightning's private members: this is the only file of the package that touches them.

Each function does one thing for which Lightning has no public name. They serve the lean loop, a
trial that goes on where it was stopped, and a checkpoint's hyper-parameters and call-backs. They
are right for the versions in ``TRIED``. tests/test_lightning_internals.py lists the functions of
Lightning whose work the lean loop does, and names those that have changed. With another version
Lightning's own loop takes the steps (:mod:`bstune.trial.fast.reasons`).
"""

import copy
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from bstune.trial.lightning.installed import LightningDataModule, LightningModule, Trainer
from bstune.trial.lightning.packages import of_package

# Versions of either package. Between the two nothing has changed that the lean loop does in
# Lightning's place.
TRIED = ("2.6.0", "2.6.6")

# The fields that describe a logged value; the functions that reduce it are saved apart.
ENTRY_FIELDS = (
    "fx",
    "name",
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "enable_graph",
    "add_dataloader_idx",
    "dataloader_idx",
    "metric_attribute",
)
SYNC_FIELDS = ("_should", "rank_zero_only", "_op")


def version_not_tried(package: str) -> str | None:
    """Say that a package's version was not tried, in words; None where it was."""
    version = import_module(package).__version__
    if version in TRIED:
        return None
    return (
        f"{package} {version} is not one of the versions that it was compared with, "
        f"{' and '.join(TRIED)}"
    )


# The lean loop: fetching a batch, and moving it to the device.


def fetches_batches(package: str, fetcher: object) -> bool:
    """Whether a fetcher hands a batch to each step, and not the iterator of the data."""
    return type(fetcher) is of_package(package, "loops.fetchers._PrefetchDataFetcher")


def mode_of_loaders(loaders: object) -> Any:
    """Give the mode in which several loaders are combined, such as ``min_size``.

    A CombinedLoader has its own; for other collections it is Lightning's mode in training.
    """
    return getattr(loaders, "_mode", "max_size_cycle")


def iterators_of(fetcher: Any) -> list[Iterator[object]]:
    """Give the iterators that a fetcher takes batches from, one for each loader."""
    iterators: list[Iterator[object]] = fetcher.iterator._iterator.iterators
    return iterators


def leave_out_profiler(epoch_loop: Any, fetcher: Any) -> None:
    """Spare each fetch the calls of a profiler that profiles nothing."""
    epoch_loop._on_before_fetch = _nothing
    epoch_loop._on_after_fetch = _nothing
    fetcher._start_profiler = _nothing
    fetcher._stop_profiler = _nothing


def _nothing() -> None:
    """Do nothing."""


def transferred_by_hooks(strategy: Any, module: LightningModule, batch: object) -> object:
    """Move a batch to the device by the module's or its data module's hooks, and return it."""
    batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
    return strategy.batch_to_device(batch, dataloader_idx=0)


# The lean loop: what is logged.


def results_of_training(trainer: Trainer) -> Any:
    """Give the collection of values that the epoch's training steps have logged so far."""
    return trainer.fit_loop.epoch_loop._results


def connector_of_loggers(trainer: Trainer) -> Any:
    """Give the object that hands logged values on to the loggers and the call-backs."""
    return trainer._logger_connector


def begin_batch(connector: Any, results: Any, batch: object) -> None:
    """File later logged values under a new batch, as the connector's ``on_batch_start`` does."""
    # The mark is None before an epoch's first batch, True at it and False after it.
    connector._first_loop_iter = connector._first_loop_iter is None
    results.batch = batch
    results.batch_size = None
    results.dataloader_idx = None


def count_step_for_loggers(epoch_loop: Any) -> None:
    """Count a step in the counter by which loggers number logged values."""
    epoch_loop._batches_that_stepped += 1


class CurrentHook:
    """Sets in which hook a module is, as Lightning does around each hook that it calls.

    ``self.log`` files a value under the hook, and refuses to log in some.

    Args:
        module: whose attributes are written directly, as ``Module.__setattr__`` takes longer.
    """

    def __init__(self, module: LightningModule) -> None:
        self._attributes = vars(module)

    def enter(self, hook: str | None) -> None:
        """Take the module to be in the hook of this name; None: in no hook."""
        self._attributes["_current_fx_name"] = hook


# What a step asks of the Trainer.


def trainer_within(part: object) -> Any:
    """Give the Trainer that a module, or a module in it, has; None where it has none."""
    return getattr(part, "_trainer", None)


def put_trainer_within(part: Any, trainer: object) -> None:
    """Give a module, or one in it, a Trainer or a stand-in for it, without Lightning's checks."""
    part._trainer = trainer


# A trial that goes on where it was stopped.


def repeat_validation(trainer: Trainer) -> None:
    """Let a fit that goes on begin with the validation in which it was stopped."""
    validation = trainer.fit_loop.epoch_loop.val_loop
    validation.restarting = False
    validation._restart_stage = "restarted_mid_evaluation"


def go_on_amid_epoch(trainer: Trainer) -> None:
    """Let Lightning take the next batch as one amid an epoch: at a first one it resets metrics."""
    trainer._logger_connector._first_loop_iter = False


def count_epoch_as_whole(trainer: Trainer) -> None:
    """Let Lightning take the epoch that ends as one that was trained as a whole."""
    # Only at the end of a whole epoch does Lightning step schedules by a metric.
    trainer.fit_loop._restarting = False


# Values that were logged in an epoch before the stop, which Lightning's checkpoints leave out.


def saved_entry(entry: Any) -> dict[str, Any]:
    """Describe a logged value, with its state, as plain data.

    The state of a metric object of the module's own is left out here.
    """
    meta = entry.meta
    return {
        "meta": {name: getattr(meta, name) for name in ENTRY_FIELDS},
        "reduce": meta.reduce_fx.__name__,
        "sync": {name: getattr(meta.sync, name) for name in SYNC_FIELDS},
        "has_reset": entry.has_reset,
        "states": states_of_metric(entry) if entry.is_tensor else None,
    }


def restored_entry(
    package: str, saved: Mapping[str, Any], trainer: Trainer, module: LightningModule
) -> Any:
    """Make a value that ``self.log`` has logged from its description by :func:`saved_entry`.

    Lightning keeps such a value, with how it is reduced over batches, in an object of a private
    class. None where it is a metric object of the module's, and the module has none of that name.
    """
    place = "trainer.connectors.logger_connector.result"
    new_metadata = of_package(package, f"{place}._Metadata")
    new_sync = of_package(package, f"{place}._Sync")
    new_entry = of_package(package, f"{place}._ResultMetric")
    meta = new_metadata(**saved["meta"], reduce_fx=getattr(torch, saved["reduce"]))
    meta.sync = new_sync(fn=trainer.strategy.reduce, **saved["sync"])
    is_tensor = saved["states"] is not None
    entry = new_entry(meta, is_tensor)
    if is_tensor:
        restore_states(entry, saved["states"], module.device)
    else:
        modules = dict(module.named_modules())
        name = saved["meta"]["metric_attribute"]
        if name not in modules:
            return None
        entry.value = modules[name]
    entry.has_reset = saved["has_reset"]
    # torchmetrics warns of a value that is read before any update: this one was updated.
    entry._update_count = 1
    return entry


def states_of_metric(metric: Metric) -> dict[str, Any]:
    """Copy the accumulated states of a torchmetrics metric to the CPU, as plain data."""
    states = {name: _moved(getattr(metric, name), "cpu") for name in metric._defaults}
    return {"count": metric._update_count, "states": states}


def restore_states(metric: Metric, saved: Mapping[str, Any], device: torch.device) -> None:
    """Set the states of a torchmetrics metric to those that :func:`states_of_metric` copied."""
    for name, value in saved["states"].items():
        setattr(metric, name, _moved(value, device))
    metric._update_count = saved["count"]
    # A value that was computed from other states is forgotten.
    metric._computed = None


def _moved(value: Any, device: torch.device | str) -> Any:
    """Copy a tensor, or a list of them, to a device."""
    if isinstance(value, Tensor):
        return value.detach().to(device, copy=True)
    return [_moved(part, device) for part in value]


# Hyper-parameters and call-backs, as checkpoints have them.


def copy_hyper_parameters(data_module: LightningDataModule) -> None:
    """Give a shallow copy of a data module hyper-parameters of its own."""
    data_module._hparams = copy.copy(data_module._hparams)


def argument_of_hyper_parameters(owner: Any) -> dict[str, Any]:
    """Give the checkpoint's entry for a module that takes all hyper-parameters as one argument.

    The entry has the name of that argument. It is empty for any other module or data module.
    """
    if not hasattr(owner, "_hparams_name"):
        return {}
    return {owner.CHECKPOINT_HYPER_PARAMS_NAME: owner._hparams_name}


def load_callbacks(package: str, trainer: Trainer, checkpoint: Mapping[str, Any]) -> None:
    """Load the states of a Trainer's call-backs from a checkpoint, as a fit that goes on does."""
    for name in ("on_load_checkpoint", "load_state_dict"):
        call = of_package(package, f"trainer.call._call_callbacks_{name}")
        call(trainer, checkpoint)
