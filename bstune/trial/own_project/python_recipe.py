"""A recipe of Python objects, as :func:`bstune.tune` takes them.

They are a module's class or function, and data.

A process that trains is sent the recipe whole, by cloudpickle, so that lambdas and what is defined
in ``__main__`` can be in it.
"""

import copy
import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeGuard

import cloudpickle
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from bstune.core.errors import ConfigError
from bstune.recipe import RATES, TrialValues
from bstune.system.failures import place_of
from bstune.trial.lightning.installed import LightningDataModule, LightningModule

LOADERS = ("train", "val", "test")
# The argument of a study that sets the rate in the optimizer.
OVERRIDE = "override_lr=True"
# A function that returns a new module for a trial.
BuildModule = Callable[["Trial"], LightningModule]


class Trial:
    """The values of one trial, from which its module is built.

    Further hyper-parameters are attributes too.

    Args:
        values: by name: ``batch_size``, ``lr``, ``seed``, ``total_steps`` and what the study
            searches besides.
    """

    batch_size: int
    lr: float
    seed: int
    # After which a schedule that ends with the trial is to end.
    total_steps: int

    def __init__(self, values: Mapping[str, float]) -> None:
        self._values = dict(values)
        self._read: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in self._values:
            raise AttributeError(f"a trial has {', '.join(self._values)}, but not {name}")
        self._read.add(name)
        return self._values[name]

    def __repr__(self) -> str:
        return f"Trial({', '.join(f'{name}={value!r}' for name, value in self._values.items())})"

    def has_read(self, name: str) -> bool:
        """Say whether a value was asked for."""
        return name in self._read


@dataclass(frozen=True)
class PythonRecipe:
    """A recipe of what a study is given.

    Args:
        build_module: builds a module from a trial.
        data_module: which all trials read, or what makes it.
        trainer_arguments: of Lightning's Trainer.
        module_name: the module's class.
        ends_with_trial: whether a module depends on the steps of its trial.
        own_values: of what is searched, by name, in a trial that states none.
    """

    build_module: BuildModule
    data_module: "LightningDataModule | DataAt"
    trainer_arguments: Mapping[str, Any]
    module_name: str = "module"
    ends_with_trial: bool = False
    own_values: Mapping[str, float] = field(default_factory=dict)
    # Of the trials before, by the identity of the module or the weight.
    _built: "dict[int, weakref.ref[Any]]" = field(default_factory=dict, compare=False)

    @property
    def data_name(self) -> str:
        """The data module's class."""
        if isinstance(self.data_module, DataAt):
            return self.data_module.name
        return type(self.data_module).__name__

    def data(self) -> LightningDataModule:
        """Give the data module of the study, or make that of the reference's batch size."""
        if isinstance(self.data_module, DataAt):
            return self.data_module(self.data_module.batch_size)
        return self.data_module

    @property
    def data_at(self) -> "DataAt | None":
        """Makes the data of a batch size, where they were given as a function of it."""
        return self.data_module if isinstance(self.data_module, DataAt) else None

    def module(self, values: TrialValues) -> LightningModule:
        """Build a trial's module, which must be a new one, with weights of its own."""
        stated = {
            "batch_size": values.batch_size,
            "lr": values.lr,
            "seed": values.seed,
            "total_steps": values.total_steps,
        }
        return self.module_of(Trial({**stated, **self.own_values, **values.hyperparameters}))

    def module_of(self, trial: "Trial") -> LightningModule:
        """Build the module of a trial that notes which of its values are read."""
        module = self.build_module(trial)
        if not hasattr(module, "training_step"):
            raise ConfigError(
                f"module must return a LightningModule, but returned {type(module).__name__}"
            )
        self._refuse_built(module, f"returned the same {type(module).__name__} as before")
        for name, weight in module.named_parameters():
            if weight.requires_grad:
                problem = f"returned {name} with the weights of another trial"
                self._refuse_built(weight, problem)
        return module

    def _refuse_built(self, thing: object, problem: str) -> None:
        """Refuse what an earlier trial's module had; remember it otherwise."""
        # An id may be that of another thing by now, as the former one is gone.
        known = self._built.get(id(thing))
        if known is not None and known() is thing:
            raise ConfigError(
                f"module {problem}, but each trial starts from weights of its own: build all of it "
                "in the function, as in module=lambda trial: LitModel(lr=trial.lr)"
            )
        self._built[id(thing)] = weakref.ref(thing)

    def trainer(self) -> dict[str, object]:
        """Give the arguments of the Trainer."""
        return dict(self.trainer_arguments)

    def with_trainer(self, arguments: Mapping[str, Any]) -> "PythonRecipe":
        """Give the recipe with arguments of the Trainer below its own, which stand over them."""
        return replace(self, trainer_arguments={**arguments, **self.trainer_arguments})

    def takes(self, name: str) -> bool:
        """Say whether a module depends on a value of the trial; of the rate a few steps tell it."""
        if name == "total_steps":
            return self.ends_with_trial
        return True

    @property
    def override(self) -> str:
        """The argument that sets the rate in the optimizer."""
        return OVERRIDE

    def advice_on_rate(self) -> str:
        """Say how a module takes the rate."""
        return "give module=lambda trial: LitModel(lr=trial.lr)"

    def on(self, device: str, precision: str) -> "PythonRecipe":
        """Give itself: objects do not refer to the device or the precision."""
        return self

    @cached_property
    def pickled(self) -> bytes:
        """The objects as bytes; what cannot be pickled raises whatever its ``__reduce__`` does."""
        parts = (
            self.build_module,
            self.data_module,
            self.trainer_arguments,
            self.module_name,
            self.ends_with_trial,
            self.own_values,
        )
        pickled: bytes = cloudpickle.dumps(parts)
        return pickled

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (self.pickled,)


def _unpickle(pickled: bytes) -> PythonRecipe:
    return PythonRecipe(*cloudpickle.loads(pickled))


def module_builder(
    module: Any, tunables: Sequence[str] = (), *, overrides_lr: bool = False
) -> BuildModule:
    """Give a function that builds a module from a trial.

    That is ``module`` itself, or builds one of a class by its arguments' names. A class needs an
    argument for the rate, unless that is set in the optimizer.
    """
    function = module.func if isinstance(module, partial) else module
    is_built = hasattr(module, "training_step") and not isinstance(function, type)
    if not callable(module) or is_built:
        raise ConfigError(
            "module must be a class, or a function of a trial that returns a new module, as in "
            "module=lambda trial: LitModel(lr=trial.lr), but got an instance of "
            f"{type(module).__name__}"
        )
    if not isinstance(function, type):
        _check_takes_one(module, "module", "a trial")
        return module  # type: ignore[no-any-return]
    if not hasattr(function, "training_step"):
        raise ConfigError(
            f"module must be a class of LightningModules, but got {function.__name__}"
        )
    names = _argument_names(module, function, tunables, overrides_lr)
    return partial(_build_by_names, module, names)


def _argument_names(
    module: Callable[..., object], function: type, tunables: Sequence[str], overrides_lr: bool
) -> dict[str, str]:
    """Tell which attribute of a trial each argument of a module's class takes."""
    class_name = function.__name__
    arguments = inspect.signature(module).parameters
    bound = set(module.keywords) if isinstance(module, partial) else set()
    free = [name for name in arguments if name not in bound]
    rates = [name for name in RATES if name in free]
    instead = f"give module=lambda trial: {class_name}(...) instead"
    needs_none = overrides_lr and not rates
    if len(rates) != 1 and not needs_none:
        found = " and ".join(rates) or ", ".join(free) or "none"
        raise ConfigError(
            f"{class_name}{place_of(function)} needs one argument lr or learning_rate, but its "
            f"arguments are {found}: {instead}, or {OVERRIDE}, which sets the rate in its optimizer"
        )
    missing = [name for name in tunables if name not in free]
    if missing:
        raise ConfigError(
            f"{class_name} has no argument {', '.join(missing)}, which is to be searched: {instead}"
        )
    taken = dict[str, str]()
    for name in ("batch_size", "seed", "total_steps", *tunables):
        if name in free:
            taken[name] = name
    taken |= dict.fromkeys(rates, "lr")
    required = list[str]()
    for name, argument in arguments.items():
        if name in taken or name in bound or argument.default is not argument.empty:
            continue
        # *args and **kwargs need not be given.
        if argument.kind not in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD):
            required.append(name)
    if required:
        raise ConfigError(
            f"{class_name} needs {', '.join(required)} besides what a trial has: {instead}"
        )
    return taken


def _build_by_names(
    module: Callable[..., LightningModule], names: Mapping[str, str], trial: Trial
) -> LightningModule:
    return module(**{argument: getattr(trial, name) for argument, name in names.items()})


def _check_takes_one(function: Callable[..., object], option: str, what: str) -> None:
    """Refuse a function that cannot be called with one argument."""
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        text = (
            f"{option} must be a function of {what} alone, but got "
            f"{_name(function)}{inspect.signature(function)}"
        )
        raise ConfigError(text) from error
    # A built-in that does not say.
    except ValueError:
        return


def _name(value: object) -> str:
    return getattr(value, "__name__", type(value).__name__)


class Loaders(LightningDataModule):
    """A data module of plain loaders."""

    def __init__(self, train: object, val: object, test: object = None) -> None:
        super().__init__()
        self._loaders = {"train": train, "val": val, "test": test}

    def train_dataloader(self) -> object:
        """Give the loader to train on."""
        return self._loaders["train"]

    def val_dataloader(self) -> object:
        """Give the loader on which the target is measured, at every batch size."""
        return self._loaders["val"]

    def test_dataloader(self) -> object:
        """Give the loader of the test set; None if there is none."""
        return self._loaders["test"]


@dataclass(frozen=True)
class DataAt:
    """The data modules that a function of the user's gives at each batch size.

    Args:
        function: of a batch size; returns a data module of the user's, or loaders.
        batch_size: of the data that are evaluated, and that a study looks at first.
        name: the class of the data module.
    """

    function: Callable[[int], object]
    batch_size: int
    name: str

    def __call__(self, batch_size: int) -> LightningDataModule:
        """Make the data module of a batch size."""
        return _made(self.function(batch_size))


def _made(data: object) -> LightningDataModule:
    if _is_data_module(data):
        return _copied(data)
    return _loaders(data)


def _is_data_module(data: object) -> TypeGuard[LightningDataModule]:
    return hasattr(data, "train_dataloader")


def data_of(data: object, batch_size: int) -> "LightningDataModule | DataAt":
    """Make a data module of what the user gives: one of theirs, loaders, or a function of theirs.

    Args:
        data: as :class:`bstune.Study` takes it.
        batch_size: at which a function is called, to see that it gives data.

    Raises:
        ConfigError: for anything else.
    """
    if isinstance(data, type):
        name = data.__name__
        raise ConfigError(
            f"data must be an instance, but got the class {name}: give data={name}(...)"
        )
    if _is_data_module(data):
        return _copied(data)
    if callable(data):
        return DataAt(data, batch_size, type(data_module(data, batch_size)).__name__)
    return _loaders(data)


def is_function(data: object) -> TypeGuard[Callable[[int], object]]:
    """Say whether data are given as a function of the batch size."""
    return callable(data) and not isinstance(data, type) and not _is_data_module(data)


def data_module(data: object, batch_size: int) -> "LightningDataModule | DataAt":
    """Make the data module that a function gives at this batch size.

    Of data that are no function it is as :func:`data_of`.
    """
    if not is_function(data):
        return data_of(data, batch_size)
    _check_takes_one(data, "data", "a batch size")
    return _made(data(batch_size))


def _loaders(data: object) -> Loaders:
    if isinstance(data, DataLoader):
        raise ConfigError(
            "data needs loaders to train and to validate on, but got one: give data=(train, val)"
        )
    if isinstance(data, Mapping):
        if not {"train", "val"} <= data.keys() <= set(LOADERS):
            names = ", ".join(map(str, data)) or "none"
            raise ConfigError(f"data must have train, val and perhaps test, but got {names}")
        return Loaders(data["train"], data["val"], data.get("test"))
    if isinstance(data, tuple | list):
        if len(data) not in (2, 3):
            raise ConfigError(
                f"data must be (train, val) or (train, val, test), but got {len(data)} of them"
            )
        return Loaders(*data)
    kinds = (
        "a LightningDataModule, DataLoaders (train, val[, test]), or a function of a batch size "
        "that returns them"
    )
    raise ConfigError(f"data must be {kinds}, but got {type(data).__name__}")


def _copied(data: LightningDataModule) -> LightningDataModule:
    """Copy a data module, which ``setup`` may change.

    Its tensors, arrays and data sets are shared.
    """
    values = list(vars(data).values())
    values += [value.dataset for value in values if isinstance(value, DataLoader)]
    # What deepcopy finds here by its id it takes as it is.
    shared = dict[int, Any]()
    for value in values:
        if isinstance(value, torch.Tensor | np.ndarray | Dataset):
            shared[id(value)] = value
    # That of an earlier fit, with its module, is left out.
    if getattr(data, "trainer", None) is not None:
        shared[id(data.trainer)] = None
    try:
        return copy.deepcopy(data, shared)
    # Of what cannot be copied, such as a lock.
    except (TypeError, AttributeError, NotImplementedError, RuntimeError):
        return copy.copy(data)
