"""What a project tells of itself, by building it once, in the worker; no step is trained."""

import copy
import inspect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils._pytree import tree_leaves

from bstune.core.errors import BstuneError, InputError
from bstune.core.records import Mode
from bstune.core.rules import DEFAULT_RULE
from bstune.options import RATES
from bstune.recipe.found import Found, chosen_metric
from bstune.recipe.recipe import Recipe, TrialSettings, settings_of
from bstune.trial.batches import AnyLoader, count_examples, own_batch_size
from bstune.trial.lightning import fit
from bstune.trial.trainer import base_rates, callbacks_of
from bstune.trial.trial import may_be_of_size
from bstune.trial.worker import tell_progress

# The Trainer's arguments that a training's length follows from.
LENGTHS = ("max_epochs", "max_steps", "limit_train_batches", "overfit_batches")
# A trial's length where nothing depends on it.
STEPS = 1000
# Batch size and rate of a project that cannot be built without; neither is taken for its own.
GUESS = (1, 1e-3)


@dataclass
class Looked:
    """What was seen of a training that was set up, and stopped before its first step."""

    trainer: Trainer
    metrics: dict[str, float]
    """Of the untrained weights, by the names that validation logs."""


class _Look(Callback):
    """Evaluates the untrained weights, and ends the fit before its first step.

    Args:
        batches: of the evaluation; -1: all.
    """

    def __init__(self, batches: int) -> None:
        self._batches = batches
        self.metrics: dict[str, float] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        trainer.num_sanity_val_steps = math.inf if self._batches else 0
        if self._batches > 0:
            trainer.limit_val_batches = self._batches

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # A check keeps no metric of several loaders, and some modules log none in it.
        trainer.validating = True

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.fit_loop.epoch_loop.max_steps = 0

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *arguments: Any
    ) -> None:
        tell_progress()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}


def look(recipe: Recipe, trial: TrialSettings, batches: int = 0) -> Looked:
    """Set a training up without a step of it.

    Args:
        recipe, trial: what is built, and for which trial.
        batches: of an evaluation of the untrained weights; -1: all, 0: none.

    Raises:
        InputError: there is nothing to evaluate on.
        Exception: whatever the user's code raises.
    """
    callback = _Look(batches)
    # A fit changes the data that it is given; trials get a copy each, too.
    trainer = fit(copy.deepcopy(recipe), trial, [callback])
    if batches and trainer.val_dataloaders is None:
        raise InputError(
            f"there is no validation: {type(trainer.lightning_module).__name__} needs a "
            f"validation_step that logs the metric, and the data module a val_dataloader, or give "
            f"data=(train_loader, val_loader)"
        )
    return Looked(trainer, callback.metrics)


def train_loader_of(trainer: Trainer) -> AnyLoader:
    """The training loader of a Trainer that :func:`look`, or a fit, has set up."""
    loader = trainer.train_dataloader
    assert isinstance(loader, AnyLoader)  # noqa: S101 (fit gives no other)
    return loader


def look_up(recipe: Recipe, batch_size: int | None = None, lr: float | None = None) -> Found:
    """Look up batch size, rate, length, metric and its direction in a project.

    Module and data are built with their arguments' own defaults; where that raises, with values
    that are given for them.

    Args:
        recipe: of the project.
        batch_size, lr: of the baseline, where they are given.

    Raises:
        InputError: the data cannot be used.
        Exception: whatever the user's code raises.
    """
    own = settings_of(batch_size, lr, STEPS)
    given = settings_of(batch_size or GUESS[0], lr or GUESS[1], STEPS)
    for of_module, of_data in itertools.product((own, given), repeat=2):
        try:
            return _look_up(copy.deepcopy(recipe), of_module, of_data, own)
        except BstuneError:
            raise
        # A part may need what is left out; the last try has all.
        except Exception:
            if of_module is of_data is given:
                raise
    raise AssertionError


def _look_up(
    recipe: Recipe, of_module: TrialSettings, of_data: TrialSettings, own: TrialSettings
) -> Found:
    """Look up what the project tells when module and data are built for a trial each.

    Args:
        recipe: of the project.
        of_module, of_data: what they are built for.
        own: that of these by which a part shows its own values.
    """
    loaders = []
    data = []
    of_size = of_module

    def build_data(_: TrialSettings) -> Any:
        built = recipe.data(of_data)
        data.append(built)
        make_loader = getattr(built, "train_dataloader", None)
        if make_loader is None:
            if not isinstance(built, tuple | list):
                raise InputError(
                    f"data must build a LightningDataModule, or a train and a validation loader, "
                    f"but got {built!r:.100}"
                )
            loaders.append(built[0])
            return built

        def train_dataloader() -> Any:
            loaders.append(make_loader())
            return loaders[-1]

        built.train_dataloader = train_dataloader
        return built

    arguments = recipe.trainer(of_module)
    watched = replace(
        recipe,
        module=lambda _: recipe.module(of_size),
        data=build_data,
        trainer=lambda _: arguments,
        # The project's own rate is sought.
        override_lr=False,
    )
    try:
        looked = look(watched, settings_of(GUESS[0] * recipe.devices, GUESS[1], STEPS), batches=1)
    except Exception as error:
        # A network, a stream or a sampler of batches may take a few sizes alone: the project's own
        # is one.
        if not (loaders and may_be_of_size(error)):
            raise
        size, _ = _find_batch_size(data[-1], loaders[-1], holds_own_values=True)
        of_size = settings_of(size or of_data.batch_size, of_module.lr, STEPS)
        looked = look(watched, settings_of(of_size.batch_size, GUESS[1], STEPS), batches=1)
    trainer = looked.trainer
    module = trainer.lightning_module
    optimizers = trainer.optimizers
    sources = {}
    names = () if recipe.override_lr else RATES
    holds_own_values = of_module is own or recipe.override_lr
    rate, sources["lr"] = _find_rate(module, optimizers, names, holds_own_values=holds_own_values)
    values = recipe.own_values()
    if "lr" in values:
        rate, sources["lr"] = values.pop("lr"), "the file's"
    size, sources["batch_size"] = _find_batch_size(
        data[-1], loaders[-1], holds_own_values=of_data is own
    )
    accumulated = _positive_int(arguments.get("accumulate_grad_batches")) or 1
    if size is not None and accumulated > 1:
        size *= accumulated
        sources["batch_size"] += f", times the Trainer's accumulate_grad_batches={accumulated}"
    epochs = _positive_int(arguments.get("max_epochs"))
    steps = _positive_int(arguments.get("max_steps"))
    given = " and ".join(f"{name}={arguments[name]}" for name in LENGTHS if arguments.get(name))
    sources["steps"] = f"the Trainer's {given}"
    epoch = train_loader_of(trainer).epoch
    metrics = tuple(sorted(looked.metrics))
    metric, mode, sources["metric"] = chosen_metric(metrics, _monitors(trainer, arguments))
    return Found(
        batch_size=size,
        lr=rate,
        examples=epoch.examples,
        epochs=epochs,
        steps=steps,
        limit_train_batches=epoch.limit,
        metrics=metrics,
        metric=metric,
        untrained=looked.metrics.get(metric or ""),
        mode=mode,
        rule="linear" if is_sgd(optimizers) else DEFAULT_RULE,
        parameters=sum(one.numel() for one in module.parameters() if one.requires_grad),
        values=values,
        sources=sources,
    )


def _positive_int(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


def _positive_number(value: Any) -> float | None:
    """A rate or a size that is told; None for anything else, True too."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and value > 0 else None


def _told_value(part: Any, name: str, *, holds_own_values: bool) -> tuple[float, str] | None:
    """A value that a module or data have as an attribute, in ``hparams``, or as a default.

    ``holds_own_values``: what they hold is the project's own, not what they were built with for a
    trial; else a default alone counts.
    """
    kind = type(part).__name__
    parameter = inspect.signature(type(part).__init__).parameters.get(name)
    ways = [(parameter and parameter.default, f"the default of {kind}'s argument {name}")]
    if holds_own_values:
        hparams = getattr(part, "hparams", {})
        ways.insert(0, (hparams.get(name), f"{kind}.hparams.{name}"))
        ways.insert(0, (getattr(part, name, None), f"{kind}.{name}"))
    for value, source in ways:
        number = _positive_number(value)
        if number is not None:
            return number, source
    return None


def _find_rate(
    module: LightningModule, optimizers: list[Any], names: Sequence[str], *, holds_own_values: bool
) -> tuple[float | None, str]:
    """The rate that a module has, and where it was found, or what was sought in vain."""
    for name in names:
        told = _told_value(module, name, holds_own_values=holds_own_values)
        if told is not None:
            return told
    kind = type(module).__name__
    for optimizer in optimizers if holds_own_values else []:
        rate = _positive_number(float(base_rates(optimizer)[0]))
        if rate is not None:
            return rate, f"the optimizer of {kind}"
    return None, f"{kind} is found (its argument lr has no default)"


def _find_batch_size(data: Any, loader: Any, *, holds_own_values: bool) -> tuple[int | None, str]:
    """The batch size that data have, and where it was found; or None, and what was sought in vain.

    Args as of :func:`_told_value`.
    """
    if hasattr(data, "train_dataloader"):
        told = _told_value(data, "batch_size", holds_own_values=holds_own_values)
        if told is not None:
            return int(told[0]), told[1]
    if holds_own_values:
        # The first of several counts.
        first = next(iter(tree_leaves(getattr(loader, "iterables", loader))))
        size = own_batch_size(first) or count_examples(next(iter(first), None))
        if size is not None:
            return size, "of the training loader"
    return None, "the data is found (an attribute batch_size, or a DataLoader's)"


def _monitors(trainer: Trainer, arguments: dict[str, Any]) -> dict[str, Mode]:
    """The metrics that call-backs and schedules read, and their directions."""
    monitors: dict[str, Mode] = {}
    # Those that the module itself configures are among the Trainer's.
    of_trainer: list[Any] = getattr(trainer, "callbacks", [])
    for callback in [*callbacks_of(arguments), *of_trainer]:
        name = getattr(callback, "monitor", None)
        if isinstance(name, str):
            monitors[name] = "max" if getattr(callback, "mode", "min") == "max" else "min"
    for config in trainer.lr_scheduler_configs:
        if config.reduce_on_plateau and config.monitor:
            monitors.setdefault(config.monitor, getattr(config.scheduler, "mode", "min"))
    return monitors


def is_sgd(optimizers: list[Any]) -> bool:
    """Whether all optimizers are SGD or of its kind, by the names of their classes."""
    names = [" ".join(base.__name__ for base in type(one).__mro__) for one in optimizers]
    return bool(names) and all("sgd" in name.lower() for name in names)
