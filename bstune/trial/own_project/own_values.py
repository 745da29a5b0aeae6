"""Reads values from a user's project that a study assumes where none are given.

They are its batch size, learning rate, validation metrics and length. To find them a data module is
set up, and a module is built, takes one step and validates a few batches.
"""

import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from bstune.core.errors import BstuneError, ConfigError
from bstune.core.metric_names import choose_loss, mode_of
from bstune.core.records import Mode
from bstune.core.search_space import SizeLimits
from bstune.recipe import RATES, how_in_python, looks_like_rate
from bstune.system.failures import described, place_of
from bstune.system.interruption import temporary_folder
from bstune.trial.backend import OWNED, refuse_rate_and_batch_size_finders
from bstune.trial.batches.epochs import epoch_length
from bstune.trial.batches.given_batches import examples_of
from bstune.trial.batches.loader import not_rebatchable
from bstune.trial.checks.start import check_hooks, how_to_log
from bstune.trial.lightning.installed import (
    Callback,
    LightningDataModule,
    LightningModule,
    Trainer,
)
from bstune.trial.lightning.trainer import as_list, make_trainer
from bstune.trial.own_project.override_rate import own_rate_of

# The epochs after which a trial gives up, where nothing but the study's time limits it.
MOST_EPOCHS = 100
# The arguments of a study in words.
REFERENCE = "reference=(batch size, learning rate)"
OF_NO_EPOCH = "batch_sizes and budget (no loader tells how long an epoch is)"
# The number of batches that are validated to see which metrics a module logs.
VALIDATED_BATCHES = 2


@dataclass(frozen=True)
class OwnBatches:
    """The batches that a project itself trains on.

    Args:
        batch_size: examples of one; None: the loader does not say.
        examples: of an epoch; None: it has no end, or its length is not known.
        problem: why they cannot be read in batches of another size, in words; None if they can.
    """

    batch_size: int | None
    examples: int | None
    problem: str | None = None


@contextmanager
def _named_failure(unknown: str, advice: str) -> Iterator[None]:
    """Within the context, an error of the user's code becomes a ConfigError with advice.

    The code runs here without the Trainer that it is written for, so it may fail here alone.

    Args:
        unknown: the value that is then not known, and the code that should tell it, in words.
        advice: how the user can give the value.
    """
    try:
        yield
    except BstuneError:
        raise
    except Exception as error:
        raise ConfigError(f"{unknown} failed with {described(error)[0]}: {advice}") from error


def own_batches(data: LightningDataModule, name: str, batch_size: int | None = None) -> OwnBatches:
    """Set a data module up and read its training loader.

    Args:
        data: which may be set up here.
        name: of it, for messages.
        batch_size: for which a function has made it; None: it is the project's own.

    Raises:
        ConfigError: for a loader that cannot be had without a Trainer.
    """
    how = f"give {REFERENCE}, batch_sizes and budget"
    with _named_failure(f"the batches of {name} are not known, as its train_dataloader()", how):
        data.prepare_data()
        data.setup("fit")
        loader = data.train_dataloader()
        problem = not_rebatchable(loader)
        if batch_size is None:
            batch_size = _batch_size_of(loader)
        # A loader that can be read in batches of another size has a sampler, which tells how many
        # examples an epoch draws. Of any other loader they are estimated.
        if problem is None:
            return OwnBatches(batch_size, epoch_length(loader))
        return OwnBatches(batch_size, examples_of(loader, batch_size), problem)


def _batch_size_of(loader: object) -> int | None:
    """Give the batch size of a loader, or of its sampler of batches. None where neither tells."""
    sizes = [getattr(loader, "batch_size", None)]
    sizes.append(getattr(getattr(loader, "batch_sampler", None), "batch_size", None))
    for size in sizes:
        if isinstance(size, int) and size > 0:
            return size
    return None


def refusal(
    name: str, batches: OwnBatches, needed: Sequence[str], default: int | None = None
) -> ConfigError:
    """Make the error for batches that cannot be read in another size.

    Args:
        name: of the data.
        batches: the project's own.
        needed: further arguments of the study, in words, that a function of the batch size needs.
        default: the user's own batch size, where the function's default is to say it.
    """
    also = ""
    # Loaders have no class of the user's.
    how = how_in_python(name if name.isidentifier() else None, default)
    if needed:
        also = f"; there give {', '.join(needed)}, too"
    return ConfigError(
        f"{name}.train_dataloader() cannot be read in batches of another size: {batches.problem}; "
        f"{how}{also}"
    )


def check_trained_size(batch_size: int, examples: int, given: str | None = None) -> None:
    """Refuse a batch size of more examples than the training data have: no step has so many.

    Args:
        batch_size: with which the project trains.
        examples: of an epoch.
        given: the argument that states the batch size; None: the data do.

    Raises:
        ConfigError: for a larger batch size than the data.
    """
    why = SizeLimits(examples).excess(batch_size)
    if why is None:
        return
    # The batches that a Trainer accumulates count as one.
    how = f"let it be at most {examples} in the data, accumulated batches included"
    if given is not None:
        why = f"{given}: {why}"
        how = f"give at most {examples}"
    raise ConfigError(
        f"{why}, so that no step trains on so many: {how}, with the learning rate that goes with it"
    )


def own_rate(module: Callable[..., object]) -> float | None:
    """Give the default learning rate of a module's class, or the one that a partial of it binds.

    None for a function, and where there is no such rate, or several.
    """
    defaults = _positive_defaults(module)
    rates = [defaults[name] for name in RATES if name in defaults]
    # Which of two rates is the optimizer's is not known.
    return rates[0] if len(rates) == 1 else None


def rates_by_other_names(module: Callable[..., object]) -> dict[str, float]:
    """Give the defaults of a module's class whose names speak of a learning rate, as base_lr does.

    Those whose names are ``RATES`` are left out.
    """
    defaults = _positive_defaults(module)
    others = dict[str, float]()
    for name, value in defaults.items():
        if looks_like_rate(name) and name not in RATES:
            others[name] = value
    return others


def own_defaults(module: Callable[..., object]) -> dict[str, int | float]:
    """Give the numbers that a module's class, or a partial of it, has as defaults, by name.

    There are none for a function.
    """
    class_or_function = module.func if isinstance(module, partial) else module
    if not isinstance(class_or_function, type):
        return {}
    defaults = dict[str, int | float]()
    # The values that a partial binds by name are defaults in its signature.
    for name, argument in inspect.signature(module).parameters.items():
        value = argument.default
        if isinstance(value, int | float) and not isinstance(value, bool):
            defaults[name] = value
    return defaults


def _positive_defaults(module: Callable[..., object]) -> dict[str, float]:
    """Give those of :func:`own_defaults` that may be learning rates."""
    return {name: float(value) for name, value in own_defaults(module).items() if value > 0}


def rate_of_optimizers(module: LightningModule) -> float:
    """Give the learning rate that a module's ``configure_optimizers`` itself sets.

    Raises:
        ConfigError: where it cannot be called without a Trainer, or sets no rate.
    """
    name = type(module).__name__
    place = place_of(type(module).configure_optimizers)
    how = "give reference=(batch size, learning rate)"
    unknown = f"the rate in {name}.configure_optimizers{place} is not known, as it"
    with _named_failure(unknown, how):
        rate = own_rate_of(module.configure_optimizers())
    if rate is None:
        raise ConfigError(f"{name}.configure_optimizers{place} sets no learning rate: {how}")
    return rate


def own_examples(
    trainer: Mapping[str, Any], batch_size: int, examples: int, default: int | None = None
) -> int | None:
    """Give the number of examples that a project's Trainer trains on in all.

    Args:
        trainer: its arguments, by name. ``max_epochs`` and ``max_steps`` set the limit; -1 and None
            set none.
        batch_size: examples of a step.
        examples: of an epoch.
        default: is given where there is no limit.
    """
    epochs = trainer.get("max_epochs") or -1
    steps = trainer.get("max_steps") or -1
    limits = [limit for limit in (epochs * examples, steps * batch_size) if limit > 0]
    if not limits:
        return default
    return math.ceil(min(limits))


@dataclass(frozen=True)
class OwnMetric:
    """The metric by which a project is judged.

    Args:
        name: as it is logged in validation.
        mode: whether it should fall (``min``) or rise (``max``).
        others: names of the other metrics that are logged in validation.
        why: the reason for which it was chosen, in words.
    """

    name: str
    mode: Mode
    others: tuple[str, ...]
    why: str


def own_metric(
    module: LightningModule, data: LightningDataModule, trainer: Mapping[str, Any], accelerator: str
) -> OwnMetric:
    """Validate a module on a few batches, and choose one of the metrics that it logs.

    A metric that a call-back of the Trainer monitors comes first, then the only one, then the only
    one that is a loss by its name. A ConfigError lists the metrics where none of this tells.

    Args:
        module: that is trained for a step and validated.
        data: the data module.
        trainer: arguments of the Trainer, by name.
        accelerator: of the Trainer, ``cpu`` or ``cuda``.
    """
    check_hooks(module)
    logged = sorted(_logged_in_validation(module, data, trainer, accelerator))
    if not logged:
        place = place_of(type(module).validation_step)
        raise ConfigError(
            f"{type(module).__name__}{place} logs no metric in validation: {how_to_log('val_loss')}"
        )
    how = "give target=bstune.Target('METRIC', VALUE, mode='min'), or target='METRIC<=VALUE'"
    monitored = _monitored(trainer, logged)
    if monitored is not None:
        return monitored
    name_of_loss = choose_loss(logged)
    if name_of_loss is None:
        raise ConfigError(
            f"{type(module).__name__} logs {', '.join(logged)} in validation, and none is a loss "
            f"by its name: {how}"
        )
    mode = mode_of(name_of_loss)
    if mode is None:
        raise ConfigError(
            f"{name_of_loss}, which {type(module).__name__} logs in validation, does not say by "
            f"its name which way is better: {how}"
        )
    why = "it alone is logged in validation" if len(logged) == 1 else "it is the loss by its name"
    return OwnMetric(name=name_of_loss, mode=mode, others=_without(logged, name_of_loss), why=why)


def _without(names: list[str], left_out: str) -> tuple[str, ...]:
    """Give all names but one."""
    return tuple(name for name in names if name != left_out)


def _monitored(trainer: Mapping[str, Any], logged: list[str]) -> OwnMetric | None:
    """Give the logged metric that a call-back of the Trainer monitors; None if none does.

    The call-back also says whether it should fall or rise.
    """
    for callback in as_list(trainer.get("callbacks")):
        name = getattr(callback, "monitor", None)
        mode = getattr(callback, "mode", None)
        if name in logged and mode in ("min", "max"):
            why = f"{type(callback).__name__} monitors it"
            return OwnMetric(name=name, mode=mode, others=_without(logged, name), why=why)
    return None


class _ValidationMetrics(Callback):
    """Records the names of the metrics that a validation logs.

    Metrics of the training step before it are left out.
    """

    def __init__(self) -> None:
        # The values of metrics when the validation began, by name.
        self._before: dict[str, float] = {}
        self.names: set[str] = set()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise a ConfigError for a call-back that sets a value of bstune's."""
        # The Trainer now also has the module's own call-backs.
        refuse_rate_and_batch_size_finders(trainer.callbacks)  # type: ignore[attr-defined]

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remember the metrics that were logged before the validation."""
        self._before = _values_of(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the names of the metrics that the validation has logged."""
        # A value that is the same as before the validation was logged by the training step.
        for name, value in _values_of(trainer).items():
            if self._before.get(name) != value:
                self.names.add(name)


def _values_of(trainer: Trainer) -> dict[str, float]:
    """Give the values of a Trainer's logged metrics, by name."""
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def _logged_in_validation(
    module: LightningModule, data: LightningDataModule, trainer: Mapping[str, Any], accelerator: str
) -> set[str]:
    """Train a module for one step, validate a few batches, and name the metrics that these log.

    The step is taken as some modules prepare their validation in hooks of the training. ``trainer``
    has arguments of the Trainer, by name; ``accelerator`` is ``cpu`` or ``cuda``.
    """
    logged = _ValidationMetrics()
    arguments: dict[str, Any] = {
        "max_steps": 1,
        # This validates after the first step. An epoch is not shortened, as modules read its
        # length.
        "val_check_interval": 1,
        "limit_val_batches": VALIDATED_BATCHES,
        "num_sanity_val_steps": 0,
        "accelerator": accelerator,
        "devices": 1,
    }
    # Those arguments are left out that bstune sets in a trial, too.
    options = {name: value for name, value in trainer.items() if name not in OWNED}
    # Lightning's warnings are dropped, as the first trial gives them again.
    with temporary_folder() as folder, warnings.catch_warnings(action="ignore"):
        try:
            fitting = make_trainer(options, module, [logged], folder, **arguments)
            fitting.fit(module, datamodule=data)
        except BstuneError:
            raise
        # An error of the user's code need not come up in a trial, so the names are enough.
        except Exception as error:
            if logged.names:
                return logged.names
            raise ConfigError(
                f"the metrics that {type(module).__name__} logs are not known, as one step of it "
                f"and a validation failed with {described(error)[0]}: give "
                "target=bstune.Target('METRIC', VALUE, mode='min')"
            ) from error
    return logged.names
