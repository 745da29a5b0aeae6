"""Makes Lightning Trainers for trials and evaluations.

They are quiet, have the user's own arguments, and are of the package of Lightning that the module
is of. A module finds in its Trainer:

* **Numbers.** ``max_steps`` is the step at which the trial's budget or horizon ends, ``max_epochs``
  the number of epochs that this takes. ``estimated_stepping_batches`` counts optimizer steps. A
  trial that the search stops early has the same numbers. Under manual optimization ``max_steps`` is
  -1, and a step is a batch.
* **Epochs** have n // B batches of the training DataLoader's n examples; the examples left over
  begin the next epoch. Data modules with ``train_batches``, and streams without a length, have one
  endless epoch.
* **Evaluations** come at bstune's cadence, and at each epoch's end where something looks at it:
  ``ReduceLROnPlateau``, or ``on_train_epoch_end`` of the module or a call-back. An evaluation that
  does not log the target's metric tells nothing.
* **``logger``** swallows what it gets (:class:`NullLogger`), unless ``trainer.logger`` has your
  own. ``datamodule`` is a copy that serves the trial's batches.
* **Call-backs, loggers and plug-ins** are copied for each trial. EarlyStopping is left out where a
  target ends trials; elsewhere it ends a trial as stopped. ModelCheckpoint without ``dirpath``
  writes to a folder that is gone afterwards. In a trial that goes on, it knows those files and
  scores alone whose files are left.
* **Checkpoints** of bstune's own hold weights and plain data
  (:mod:`bstune.trial.parts.checkpoint`). ``on_save_checkpoint`` may add numbers, texts, tensors,
  lists and dicts.
"""

import copy
import inspect
import logging
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from bstune.core.errors import ConfigError
from bstune.system.arguments import hint_on
from bstune.system.lightning_package import installed_lightning
from bstune.trial.devices import distributed
from bstune.trial.lightning.installed import (
    Callback,
    DummyLogger,
    LightningDataModule,
    LightningModule,
    PassThroughProfiler,
    Trainer,
    sized_len,
)
from bstune.trial.lightning.internals import copy_hyper_parameters
from bstune.trial.lightning.packages import PACKAGES, is_overridden, of_package, package_of

ANY_CLASS = ConfigDict(arbitrary_types_allowed=True)
# Hooks of a module or data module on batches, in the order in which a Trainer calls them.
BATCH_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
# Call-backs that print, where trials are quiet.
PRINTING = ("ProgressBar", "ModelSummary")


class NoProfiler(PassThroughProfiler):
    """Profiles nothing, with one context for all calls; Lightning's makes some 30 in each step."""

    _nothing = nullcontext()

    def profile(self, action_name: str) -> nullcontext[None]:  # type: ignore[override]
        """Give a context that does nothing."""
        return self._nothing


class _Nothing:
    """Takes any call and assignment and does nothing, in place of a logger's experiment.

    Examples are ``x.config.update(...)`` and ``x["a"] = b``.
    """

    def __getattr__(self, name: str) -> "_Nothing":
        # Python's protocols, such as copying, must not find methods here.
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: object, **options: object) -> "_Nothing":
        return self

    def __getitem__(self, key: object) -> "_Nothing":
        return self

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def __contains__(self, key: object) -> bool:
        return False

    # Python would iterate by __getitem__, without an end.
    def __iter__(self) -> Iterator[object]:
        return iter(())

    def __enter__(self) -> "_Nothing":
        return self

    def __exit__(self, *error: object) -> None:
        pass


class NullLogger(DummyLogger):
    """Takes what a module logs, or does with ``self.logger.experiment``, and keeps none of it."""

    def __init__(self, folder: str | None = None) -> None:
        super().__init__()
        self._folder = folder

    @property
    def experiment(self) -> Any:
        """An object that takes all calls and does nothing."""
        return _Nothing()

    @property
    def save_dir(self) -> str | None:
        """A trial's temporary folder; None outside of a trial."""
        return self._folder

    log_dir = root_dir = save_dir


def check_arguments(options: Mapping[str, Any]) -> None:
    """Raise a ConfigError for an argument that the Trainer does not have, or not of this type.

    Of a plain value its type must be one that the Trainer's annotation allows. Objects are left to
    the Trainer. None leaves an option out.

    Args:
        options: the Trainer's arguments, by name.
    """
    known = inspect.signature(Trainer).parameters
    for name in options:
        if name not in known:
            hint = hint_on(str(name), known)
            raise ConfigError(f"trainer.{name} is no argument of Trainer; {hint}")
    hints = get_type_hints(Trainer.__init__)
    for name, value in options.items():
        if name not in hints or value is None or not _is_plain(value):
            continue
        adapter: TypeAdapter[Any] = TypeAdapter(hints[name], config=ANY_CLASS)
        try:
            # A number may stand for another kind of number, as 1 for true and 1e2 for 100.
            adapter.validate_python(value, strict=not isinstance(value, int | float))
            # The check does not look into an Iterable[Logger]. Of plain values only true and false
            # are loggers.
            fits = name != "logger" or all(isinstance(logger, bool) for logger in as_list(value))
        except ValidationError:
            fits = False
        if not fits:
            raise ConfigError(
                f"trainer.{name} must be {_type_text(hints[name])}, but got {value!r:.100}"
            )


def _is_plain(value: object) -> bool:
    """Whether a value could stand in YAML: it has no object in it."""
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int | float)


def _type_text(hint: object) -> str:
    """Write a type without the modules of its classes: ``list[Callback] | Callback | None``."""
    text = hint.__name__ if isinstance(hint, type) else str(hint)
    return re.sub(r"\w+\.", "", text)


def make_trainer(
    options: Mapping[str, Any],
    module: LightningModule | None = None,
    callbacks: Sequence[Callback] = (),
    folder: str | None = None,
    **arguments: Any,
) -> Trainer:
    """Make a Trainer for a module, with the user's arguments.

    The user's call-backs, loggers and plug-ins are copied, as they hold state. Nothing else writes
    files.

    Args:
        options: the user's arguments, by name.
        module: that is to be trained or evaluated; None: the Trainer is only tried.
        callbacks: of bstune's own, which come last.
        folder: gets the files of call-backs that have no folder; None: the working directory does.
        arguments: of bstune's own, which replace the user's.
    """
    callbacks_given = [_copied(callback) for callback in as_list(options.get("callbacks"))]
    loggers = list[Any]()
    for logger in as_list(options.get("logger")):
        # True asks for Lightning's own logger and False for none; trials have neither.
        if not isinstance(logger, bool):
            loggers.append(_copied(logger))
    plugins = [_copied(plugin) for plugin in as_list(options.get("plugins"))]
    package = package_of(module, *callbacks_given, *plugins)
    # Trials print nothing.
    printing = tuple(of_package(package, f"callbacks.{name}") for name in PRINTING)
    users_callbacks = [
        callback for callback in callbacks_given if not isinstance(callback, printing)
    ]
    checkpoint_class = of_package(package, "callbacks.Checkpoint")
    has_checkpoints = False
    for callback in users_callbacks:
        if isinstance(callback, checkpoint_class):
            has_checkpoints = True
            if folder is not None and getattr(callback, "dirpath", "") is None:
                callback.dirpath = str(Path(folder, "checkpoints"))
    defaults = {
        # A trial's own number of epochs takes its place.
        "max_epochs": 1,
        # All of the validation before the first step: a history may begin with step 0.
        "num_sanity_val_steps": -1,
        "profiler": NoProfiler(),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": has_checkpoints,
        # A data module's batch size is not the trial's.
        "enable_autolog_hparams": False,
        "default_root_dir": folder,
    }
    # A package that is imported only now is made as quiet as the installed one.
    level = logging.getLogger(installed_lightning()).level
    for name in (package, PACKAGES[package]):
        logging.getLogger(name).setLevel(level)
    options = distributed.trainer_options(options, partial(_ddp, package))
    fixed = {
        "callbacks": [*users_callbacks, *callbacks],
        "logger": loggers or NullLogger(folder),
        "plugins": plugins,
    }
    # Later dicts replace values of earlier ones.
    stated = {**defaults, **options, **fixed, **arguments}
    trainer: Trainer = of_package(package, "Trainer")(**stated)
    return trainer


def _ddp(package: str) -> object:
    """Make Lightning's strategy for several processes that are already running."""
    environment = of_package(package, "fabric.plugins.environments.lightning.LightningEnvironment")
    return of_package(package, "strategies.DDPStrategy")(cluster_environment=environment())


def length_arguments(
    batches: Iterable[object], parts: int, steps: int, automatic: bool
) -> dict[str, Any]:
    """Give the Trainer's arguments that say how long it trains.

    Batches with a length are an epoch, and so many epochs are given as the steps need. Other
    batches are one endless epoch, which the trial's call-back ends. Of these, batches with
    ``ends_by_steps``, a stream of the user's, also get ``max_steps``, which the module may read.

    Args:
        batches: of the training.
        parts: micro-batches of a step.
        steps: the most steps that the trial takes.
        automatic: whether Lightning steps the optimizers. Under manual optimization it would count
            the steps of each optimizer, so that its limit is in epochs alone.
    """
    length = sized_len(batches)
    if length is None:
        # There is one endless epoch, in which the trial's call-back sets the steps to evaluate at.
        endless = {"max_epochs": 1, "val_check_interval": 1, "check_val_every_n_epoch": None}
        if automatic and getattr(batches, "ends_by_steps", False):
            endless["max_steps"] = steps
        return endless
    steps_of_epoch = max(1, length // parts)
    epochs = math.ceil(steps / steps_of_epoch)
    return {"max_epochs": epochs, "max_steps": steps if automatic else -1}


def uses_epoch_metrics(trainer: Trainer, module: LightningModule) -> bool:
    """Whether a schedule, the module or a call-back may use validation metrics at an epoch's end.

    A ``Trainer.fit`` of the user's would have validated there.
    """
    if any(config.reduce_on_plateau for config in trainer.lr_scheduler_configs):
        return True
    if is_overridden("on_train_epoch_end", module):
        return True
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        is_users = not type(callback).__module__.startswith("bstune.")
        if is_users and is_overridden("on_train_epoch_end", callback):
            return True
    return False


def builds_layers_later(module: LightningModule, weights: Collection[str]) -> bool:
    """Whether a module lacks some of these weights, and may build their layers in a later hook.

    ``weights`` are their names.
    """
    weights_now = module.state_dict()
    if all(name in weights_now for name in weights):
        return False
    return any(is_overridden(name, module) for name in ("setup", "configure_model"))


def without_recording_or_stopping(options: Mapping[str, Any]) -> dict[str, Any]:
    """Give a Trainer's options without loggers and call-backs that record a training or stop it.

    They serve a short try, which is no trial.
    """
    callbacks = as_list(options.get("callbacks"))
    package = package_of(*callbacks)
    monitors = (
        of_package(package, "callbacks.Checkpoint"),
        of_package(package, "callbacks.EarlyStopping"),
    )
    kept = [callback for callback in callbacks if not isinstance(callback, monitors)]
    others = {name: value for name, value in options.items() if name not in ("callbacks", "logger")}
    if kept:
        others["callbacks"] = kept
    return others


def serving(
    data_module: LightningDataModule, micro_batch_size: int | None = None, **batches: Iterable[Any]
) -> LightningDataModule:
    """Make a shallow copy of a data module that serves given batches.

    Args:
        data_module: that is set up.
        micro_batch_size: of the training batches. The copy's ``batch_size``, where it has one, is
            set to it, as it is the number of examples that a loader hands out at once. None: it is
            left alone.
        batches: to be served, by stage: ``train``, ``val`` or ``test``.
    """
    served = copy.copy(data_module)
    if micro_batch_size is not None and "batch_size" in vars(served):
        served.batch_size = micro_batch_size  # type: ignore[attr-defined]
    if micro_batch_size is not None and "batch_size" in served.hparams:
        copy_hyper_parameters(served)
        served.hparams["batch_size"] = micro_batch_size
    # It is set up already.
    served.prepare_data = lambda: None  # type: ignore[method-assign]
    served.setup = lambda stage: None  # type: ignore[method-assign]
    # The user's teardown would close data that later trials read.
    served.teardown = lambda stage: None  # type: ignore[method-assign]
    for stage, iterable in batches.items():
        # As a default argument it is this stage's iterable; else each lambda would give the last.
        setattr(served, f"{stage}_dataloader", lambda iterable=iterable: iterable)
    return served


def as_list(value: object) -> list[Any]:
    """List the objects in an argument of the Trainer, which may be one, several or None."""
    if value is None:
        return []
    if isinstance(value, list | tuple):
        return list(value)
    return [value]


def _copied(users_object: Any) -> Any:
    """Copy a call-back, logger or plug-in of the user's; a ConfigError where that is impossible."""
    try:
        return copy.deepcopy(users_object)
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        kind = type(users_object).__name__
        raise ConfigError(
            f"trainer: each trial takes a copy of {kind}, which cannot be copied "
            f"({error}): build it in the module's configure_callbacks"
        ) from error
