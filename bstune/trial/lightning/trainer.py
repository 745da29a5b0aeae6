"""Lightning Trainers for trials and evaluations: quiet, with the user's own arguments, of the package that fits.

What a module finds in a trial:

* **Numbers.** ``max_steps`` is where the trial's budget or horizon ends, ``max_epochs`` the epochs that takes,
  ``estimated_stepping_batches`` counts optimizer steps. A trial that the search stops early has the same numbers.
  Under manual optimization ``max_steps`` is -1, and a step is a batch.
* **Epochs** have n // B batches of the training DataLoader's n examples; what is left over begins the next one.
  Data modules with ``train_batches``, and streams without a length, have one endless epoch.
* **Evaluations** come at bstune's cadence, and at each epoch's end where something looks at it:
  ``ReduceLROnPlateau``, or ``on_train_epoch_end`` of the module or a call-back. One that does not log the target's
  metric tells nothing.
* **``logger``** swallows what it gets (:class:`NullLogger`), unless ``trainer.logger`` has your own.
  ``datamodule`` is a copy that serves the trial's batches.
* **Call-backs, loggers and plug-ins** are copied for each trial. EarlyStopping ends a trial as stopped.
  ModelCheckpoint without ``dirpath`` writes to a folder that is gone afterwards.
* **Checkpoints** of bstune's own hold weights and plain data (:mod:`bstune.trial.parts.checkpoint`). What
  ``on_save_checkpoint`` adds must be numbers, texts, tensors, lists and dicts.
"""

import copy
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
# Call-backs that print, where trials are quiet.
PRINTING = ("ProgressBar", "ModelSummary")


class NoProfiler(PassThroughProfiler):
    """Profiles nothing, in one context for all: Lightning's own makes a new one some 30 times a step."""

    _nothing = nullcontext()

    def profile(self, action_name: str) -> nullcontext[None]:  # type: ignore[override]
        """Return a context that does nothing."""
        return self._nothing


class _Nothing:
    """Swallows whatever is called on it, as on a logger's experiment: ``x.config.update(...)``, ``x["a"] = b``."""

    def __getattr__(self, name: str) -> "_Nothing":
        if name.startswith("__"):  # protocols, such as copying
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **options: Any) -> "_Nothing":
        return self

    def __getitem__(self, key: Any) -> "_Nothing":
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __contains__(self, key: Any) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:  # by __getitem__ it would have no end
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
        """What swallows all calls."""
        return _Nothing()

    @property
    def save_dir(self) -> str | None:
        """A trial's temporary folder."""
        return self._folder

    log_dir = root_dir = save_dir


def check_types(options: Mapping[str, Any]) -> None:
    """Refuse plain values of types that the Trainer's annotations do not have; ConfigError names the option.

    Objects are left to the Trainer, as is a name that it does not know. None leaves an option out.
    """
    hints = get_type_hints(Trainer.__init__)
    for name, value in options.items():
        if name not in hints or value is None or not _is_plain(value):
            continue
        adapter: TypeAdapter[Any] = TypeAdapter(hints[name], config=ANY_CLASS)
        try:
            # A number may stand for another kind of number, as 1 for true and 1e2 for 100.
            adapter.validate_python(value, strict=not isinstance(value, int | float))
            # Iterable[Logger] is not looked into.
            fits = name != "logger" or all(isinstance(one, bool) for one in listed(value))
        except ValidationError:
            fits = False
        if not fits:
            raise ConfigError(
                f"trainer.{name} must be {_type_text(hints[name])}, but got {value!r:.100}"
            )


def _is_plain(value: Any) -> bool:
    """Tell whether a value is YAML's, with no object in it."""
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int | float)


def _type_text(hint: Any) -> str:
    """Show a type without the modules of its classes: ``list[Callback] | Callback | None``."""
    text = hint.__name__ if isinstance(hint, type) else str(hint)
    return re.sub(r"\w+\.", "", text)


def make_trainer(
    options: Mapping[str, Any],
    module: LightningModule | None = None,
    callbacks: Sequence[Callback] = (),
    folder: str | None = None,
    **arguments: Any,
) -> Trainer:
    """Return a Trainer for a module, with copies of the user's call-backs, loggers and plug-ins, which hold state.

    It writes nothing but what those write, what has no folder of its own to ``folder``.
    """
    users = [_copied(callback) for callback in listed(options.get("callbacks"))]
    loggers = [
        _copied(logger) for logger in listed(options.get("logger")) if not isinstance(logger, bool)
    ]
    plugins = [_copied(plugin) for plugin in listed(options.get("plugins"))]
    package = package_of(module, *users, *plugins)
    printing = tuple(of_package(package, f"callbacks.{name}") for name in PRINTING)
    users = [callback for callback in users if not isinstance(callback, printing)]
    checkpoints = [
        callback
        for callback in users
        if isinstance(callback, of_package(package, "callbacks.Checkpoint"))
    ]
    for checkpoint in checkpoints:
        if folder is not None and getattr(checkpoint, "dirpath", "") is None:
            checkpoint.dirpath = str(Path(folder, "checkpoints"))
    defaults = {
        "max_epochs": 1,
        "num_sanity_val_steps": -1,
        "profiler": NoProfiler(),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": bool(checkpoints),
        "enable_autolog_hparams": False,  # a data module's batch size is not the trial's
        "default_root_dir": folder,
    }
    # One that is imported later is as quiet as bstune's own.
    level = logging.getLogger(installed_lightning()).level
    for name in (package, PACKAGES[package]):
        logging.getLogger(name).setLevel(level)
    options = distributed.trainer_options(options, partial(_ddp, package))
    fixed = {
        "callbacks": [*users, *callbacks],
        "logger": loggers or NullLogger(folder),
        "plugins": plugins,
    }
    trainer: Trainer = of_package(package, "Trainer")(
        **{**defaults, **options, **fixed, **arguments}
    )
    return trainer


def _ddp(package: str) -> Any:
    environment = of_package(package, "fabric.plugins.environments.lightning.LightningEnvironment")
    return of_package(package, "strategies.DDPStrategy")(cluster_environment=environment())


def lengths(batches: Iterable[Any], parts: int, steps: int, automatic: bool) -> dict[str, Any]:
    """Return a Trainer's arguments for a trial of at most ``steps`` steps, of ``parts`` batches each.

    Where the batches have a length, an epoch is as long, and the Trainer's numbers are those of ``trainer.fit``; of a
    stream of the user's ``max_steps`` is. Under manual optimization Lightning counts the steps of each optimizer, so
    that its limit is in epochs alone.
    """
    length = sized_len(batches)
    if length is None:
        # One endless epoch, evaluated where asked for.
        endless = {"max_epochs": 1, "val_check_interval": 1, "check_val_every_n_epoch": None}
        if automatic and getattr(batches, "ends_by_steps", False):
            endless["max_steps"] = steps
        return endless
    epochs = math.ceil(steps / max(1, length // parts))
    return {"max_epochs": epochs, "max_steps": steps if automatic else -1}


def looks_at_epochs(trainer: Trainer, module: LightningModule) -> bool:
    """Return whether something takes the metrics of validation at an epoch's end, as ``trainer.fit`` has them there."""
    users = [c for c in trainer.callbacks if not type(c).__module__.startswith("bstune.")]  # type: ignore[attr-defined]
    return (
        any(config.reduce_on_plateau for config in trainer.lr_scheduler_configs)
        or is_overridden("on_train_epoch_end", module)
        or any(is_overridden("on_train_epoch_end", callback) for callback in users)
    )


def builds_layers_later(module: LightningModule, weights: Collection[str]) -> bool:
    """Return whether a module lacks some of these weights, and may build their layers once it has a Trainer."""
    own = module.state_dict()
    return any(name not in own for name in weights) and any(
        is_overridden(name, module) for name in ("setup", "configure_model")
    )


def without_monitors(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a Trainer's options without what records a trial or stops it, for one that is only a try."""
    callbacks = listed(options.get("callbacks"))
    left_out = tuple(
        of_package(package_of(*callbacks), f"callbacks.{name}")
        for name in ("Checkpoint", "EarlyStopping")
    )
    kept = [callback for callback in callbacks if not isinstance(callback, left_out)]
    others = {name: value for name, value in options.items() if name not in ("callbacks", "logger")}
    return {**others, "callbacks": kept} if kept else others


def serving(
    data_module: LightningDataModule, micro_batch_size: int | None = None, **batches: Iterable[Any]
) -> LightningDataModule:
    """Return a shallow copy of a data module that is set up and serves these ``train``, ``val`` or ``test`` batches.

    Where it has a ``batch_size``, that is what a loader hands out at once: the training batches' ``micro_batch_size``.
    """
    served = copy.copy(data_module)
    if micro_batch_size is not None and "batch_size" in vars(served):
        served.batch_size = micro_batch_size  # type: ignore[attr-defined]
    if micro_batch_size is not None and "batch_size" in served.hparams:
        copy_hyper_parameters(served)
        served.hparams["batch_size"] = micro_batch_size
    served.prepare_data = lambda: None  # type: ignore[method-assign]
    served.setup = lambda stage: None  # type: ignore[method-assign]
    served.teardown = lambda stage: None  # type: ignore[method-assign]  # later trials read what it would close
    for stage, iterable in batches.items():
        setattr(served, f"{stage}_dataloader", lambda iterable=iterable: iterable)
    return served


def listed(value: Any) -> list[Any]:
    """Return what an argument of the Trainer holds, which may be one thing, several or None, as a list."""
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _copied(thing: Any) -> Any:
    try:
        return copy.deepcopy(thing)
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise ConfigError(
            f"trainer: each trial takes a copy of {type(thing).__name__}, which cannot be copied ({error}): build it in"
            " the module's configure_callbacks"
        ) from error
