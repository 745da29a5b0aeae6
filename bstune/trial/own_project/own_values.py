"""What a project itself says of its training, to be assumed.

These are its batch size, learning rate, validation metrics and length. A data module is set up, a
module is built, and takes one step before a few batches are validated.
"""

import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from bstune.core.errors import BstuneError, ConfigError
from bstune.core.metric_names import choose_loss, mode_of
from bstune.core.records import Mode
from bstune.recipe import RATES
from bstune.system.failures import described, place_of
from bstune.system.interruption import temporary_folder
from bstune.trial.backend import OWNED, refuse_finders
from bstune.trial.batches.epochs import epoch_length
from bstune.trial.batches.given_batches import examples_of
from bstune.trial.batches.loader import HOW_TO_GIVE, not_rebatchable
from bstune.trial.checks.start import check_hooks, how_to_log
from bstune.trial.lightning.installed import (
    Callback,
    LightningDataModule,
    LightningModule,
    Trainer,
)
from bstune.trial.lightning.trainer import as_list, make_trainer
from bstune.trial.own_project.override_rate import own_rate_of

# Epochs after which a trial gives up, where the study's time is what limits it.
MOST_EPOCHS = 100
# Options that end a study by its seconds.
TIMED = ("search.seconds=", "search.wall_seconds=", "quick=true")
# The arguments of a study in words.
REFERENCE = "reference=(batch size, learning rate)"
OF_NO_EPOCH = "batch_sizes and budget (no loader tells how long an epoch is)"
# Batches on which a module shows which metrics it logs.
VALIDATED_BATCHES = 2


@dataclass(frozen=True)
class OwnBatches:
    """The batches that a project trains on.

    Args:
        batch_size: examples of one; None: the loader does not say.
        examples: of an epoch; None: it has no end, or its length is not known.
        problem: why they cannot be read in batches of another size, in words; None if they can.
    """

    batch_size: int | None
    examples: int | None
    problem: str | None = None


@contextmanager
def _named_failure(what: str, how: str) -> Iterator[None]:
    """Let an error of the user's code say what is not known, and what to give instead.

    The code runs here without the Trainer that it is written for; the study will run it with one.

    Args:
        what: is not known, and whose code tells it.
        how: the user gives it.
    """
    try:
        yield
    except BstuneError:
        raise
    except Exception as error:
        raise ConfigError(f"{what} failed with {described(error)[0]}: {how}") from error


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


def refusal(name: str, batches: OwnBatches, needed: Sequence[str]) -> ConfigError:
    """Make the error for batches that cannot be read in another size.

    Args:
        name: of the data.
        batches: the project's own.
        needed: arguments, in words, without which a function of the batch size is not enough.
    """
    also = ""
    if needed:
        also = f"; there give {', '.join(needed)}, too"
    return ConfigError(
        f"{name}.train_dataloader() cannot be read in batches of another size: {batches.problem}; "
        f"{HOW_TO_GIVE}{also}"
    )


def rebatchable(batches: OwnBatches, name: str) -> tuple[int, int]:
    """Give the batch size and the examples of an epoch of batches that can be read in other sizes.

    Raises:
        ConfigError: for other batches; it says all that a study of them needs.
    """
    if batches.problem is None and batches.batch_size is not None and batches.examples is not None:
        return batches.batch_size, batches.examples
    needed = [REFERENCE]
    if batches.examples is None:
        needed.append(OF_NO_EPOCH)
    raise refusal(name, batches, needed)


def own_rate(module: Callable[..., object]) -> float | None:
    """Give the learning rate that a module's class has as a default, or a partial of it.

    None where it has none.
    """
    function = module.func if isinstance(module, partial) else module
    if not isinstance(function, type):
        return None
    arguments = inspect.signature(module).parameters
    rates = list[float]()
    for name in RATES:
        rate = arguments[name].default if name in arguments else None
        if isinstance(rate, int | float) and rate > 0:
            rates.append(float(rate))
    # Of two rates none is known to be the optimizer's.
    return rates[0] if len(rates) == 1 else None


def rate_of_optimizers(module: LightningModule) -> float:
    """Give the learning rate that stands in a module's ``configure_optimizers``.

    Raises:
        ConfigError: where it cannot be called without a Trainer, or sets none.
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


def are_timed(options: Iterable[str]) -> bool:
    """Say whether some options, as on the command line, end a study by its seconds."""
    return any(str(option).lstrip("+").startswith(TIMED) for option in options)


def own_examples(
    trainer: Mapping[str, Any], batch_size: int, examples: int, default: int | None = None
) -> int | None:
    """Give how many examples a project's Trainer trains on, by its max_epochs and max_steps.

    Args:
        trainer: its arguments; -1 and None set no limit.
        batch_size: examples of a step.
        examples: of an epoch.
        default: without either.
    """
    epochs = trainer.get("max_epochs") or -1
    steps = trainer.get("max_steps") or -1
    limits = [limit for limit in (epochs * examples, steps * batch_size) if limit > 0]
    if not limits:
        return default
    return math.ceil(min(limits))


@dataclass(frozen=True)
class OwnMetric:
    """The metric that a project is judged by.

    Args:
        name: as it is logged in validation.
        mode: which way is better.
        others: that are logged in validation, too.
        why: it is this one, in words.
    """

    name: str
    mode: Mode
    others: tuple[str, ...]
    why: str


def own_metric(
    module: LightningModule, data: LightningDataModule, trainer: Mapping[str, Any], accelerator: str
) -> OwnMetric:
    """Validate a module on a few batches, and choose among the metrics that it logs.

    What a call-back of the Trainer monitors comes first, then the only metric, then the one that
    is a loss by its name. ConfigError where none of this tells, with the metrics.
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
    return tuple(name for name in names if name != left_out)


def _monitored(trainer: Mapping[str, Any], logged: list[str]) -> OwnMetric | None:
    """Give the metric that a call-back of the Trainer monitors.

    The call-back says which way is better.
    """
    for callback in as_list(trainer.get("callbacks")):
        name = getattr(callback, "monitor", None)
        mode = getattr(callback, "mode", None)
        if name in logged and mode in ("min", "max"):
            why = f"{type(callback).__name__} monitors it"
            return OwnMetric(name=name, mode=mode, others=_without(logged, name), why=why)
    return None


class _ValidationMetrics(Callback):
    """Keeps the metrics that come with a validation.

    Those of the training step before it are left out.
    """

    def __init__(self) -> None:
        self._before: dict[str, float] = {}
        self.names: set[str] = set()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # Those of the module's own, too.
        refuse_finders(trainer.callbacks)  # type: ignore[attr-defined]

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._before = _values_of(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # What the step before logged under the same name has another value.
        for name, value in _values_of(trainer).items():
            if self._before.get(name) != value:
                self.names.add(name)


def _values_of(trainer: Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def _logged_in_validation(
    module: LightningModule, data: LightningDataModule, trainer: Mapping[str, Any], accelerator: str
) -> set[str]:
    """Take one step and validate a few batches.

    Some modules need what their hooks prepare for a step.
    """
    seen = _ValidationMetrics()
    arguments: dict[str, Any] = {
        "max_steps": 1,
        # An epoch keeps its length, which modules read.
        "val_check_interval": 1,
        "limit_val_batches": VALIDATED_BATCHES,
        "num_sanity_val_steps": 0,
        "accelerator": accelerator,
        "devices": 1,
    }
    # Whatever Lightning advises here is said of the first trial, too.
    options = {name: value for name, value in trainer.items() if name not in OWNED}
    with temporary_folder() as folder, warnings.catch_warnings(action="ignore"):
        try:
            fitting = make_trainer(options, module, [seen], folder, **arguments)
            fitting.fit(module, datamodule=data)
        except BstuneError:
            raise
        # Of the user's code, which a trial may spare.
        except Exception as error:
            if seen.names:
                return seen.names
            raise ConfigError(
                f"the metrics that {type(module).__name__} logs are not known, as one step of it "
                f"and a validation failed with {described(error)[0]}: give "
                "target=bstune.Target('METRIC', VALUE, mode='min')"
            ) from error
    return seen.names
