"""A workload of Python objects, as :func:`bstune.tune` takes it, in place of one that a config names.

The config of such a study is like any other, but its nodes ``workload.data``, ``.module`` and ``.trainer`` call the
functions at the end of this file, which look up the study's objects in this process. A process that trains for another
one is sent them: they are pickled by cloudpickle, so that lambdas and what is defined in ``__main__`` can be.
"""

import copy
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import cloudpickle
import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset

from bstune.core.errors import ConfigError

RATES = ("lr", "learning_rate")  # names of a module's argument that takes the learning rate
LOADERS = ("train", "val", "test")
BuildModule = Callable[["Trial"], Any]  # a function that returns a new module for a trial
_OBJECTS: "dict[str, Objects]" = {}  # of the studies that run in this process, or that it trains for, by name


class Trial:
    """The values of one trial, from which its module is built; further hyper-parameters are attributes too.

    Args:
        values: by name: ``batch_size``, ``lr``, ``seed``, ``total_steps`` and what the study searches besides.
    """

    batch_size: int
    lr: float
    seed: int
    total_steps: int  # after which a schedule that ends with the trial is to end

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
        """Return whether a value was asked for."""
        return name in self._read


@dataclass(frozen=True)
class Objects:
    """What a study is given: its module as a function of the trial, its data module, arguments of the Trainer."""

    module: BuildModule
    data: LightningDataModule
    trainer: Mapping[str, Any]
    _built: "dict[int, weakref.ref[Any]]" = field(
        default_factory=dict, compare=False
    )  # for trials before, by id

    def build_module(self, trial: Trial) -> Any:
        """Return a trial's module, which must be a new one, with weights of its own."""
        module = self.module(trial)
        if not hasattr(module, "training_step"):
            raise ConfigError(
                f"module must return a LightningModule, but returned {type(module).__name__}"
            )
        trained = {
            name: weight for name, weight in module.named_parameters() if weight.requires_grad
        }
        for name, thing in {
            f"the same {type(module).__name__} as before": module,
            **trained,
        }.items():
            before = self._built.get(id(thing))
            if before is not None and before() is thing:
                what = (
                    f"returned {name}"
                    if thing is module
                    else f"returned {name} with the weights of another trial"
                )
                raise ConfigError(
                    f"module {what}, but each trial starts from weights of its own: build all of it in the function, "
                    "as in module=lambda trial: LitModel(lr=trial.lr)"
                )
            self._built[id(thing)] = weakref.ref(thing)
        return module

    @cached_property
    def pickled(self) -> bytes:
        """The objects as bytes; what cannot be pickled raises whatever its ``__reduce__`` does."""
        pickled: bytes = cloudpickle.dumps((self.module, self.data, self.trainer))
        return pickled

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (self.pickled,)


def _unpickle(pickled: bytes) -> Objects:
    return Objects(*cloudpickle.loads(pickled))


@contextmanager
def given(study: str, objects: Objects) -> Iterator[None]:
    """Let the objects be those of a study for a while."""
    give(study, objects)
    try:
        yield
    finally:
        del _OBJECTS[study]


def give(study: str, objects: Objects | None) -> None:
    """Let the objects be those of a study from now on, in a process that trains for another; None: it has none."""
    if objects is not None:
        _OBJECTS[study] = objects


def objects_of(study: str) -> Objects | None:
    """Return the objects of a study; None for one whose config names what it trains."""
    return _OBJECTS.get(study)


def module_builder(module: Any, tunables: Sequence[str] = ()) -> BuildModule:
    """Return a function that builds a module from a trial: ``module`` itself, or a class by its arguments' names."""
    function = module.func if isinstance(module, partial) else module
    if not callable(module) or (
        hasattr(module, "training_step") and not isinstance(function, type)
    ):
        raise ConfigError(
            "module must be a class, or a function of a trial that returns a new module, as in "
            f"module=lambda trial: LitModel(lr=trial.lr), but got an instance of {type(module).__name__}"
        )
    if not isinstance(function, type):
        _check_takes_one(module, "module", "a trial")
        return module  # type: ignore[no-any-return]
    if not hasattr(function, "training_step"):
        raise ConfigError(
            f"module must be a class of LightningModules, but got {function.__name__}"
        )
    return partial(_build_by_names, module, _argument_names(module, function.__name__, tunables))


def _argument_names(module: Any, name: str, tunables: Sequence[str]) -> dict[str, str]:
    """Return which attribute of a trial each argument of a module's class takes."""
    arguments = inspect.signature(module).parameters
    bound = set(module.keywords) if isinstance(module, partial) else set()
    free = [one for one in arguments if one not in bound]
    rates = [one for one in RATES if one in free]
    instead = f"give module=lambda trial: {name}(...) instead"
    if len(rates) != 1:
        found = " and ".join(rates) or ", ".join(free) or "none"
        raise ConfigError(
            f"{name} needs one argument lr or learning_rate, but its arguments are {found}: {instead}"
        )
    missing = [one for one in tunables if one not in free]
    if missing:
        raise ConfigError(
            f"{name} has no argument {', '.join(missing)}, which is to be searched: {instead}"
        )
    taken = {
        one: one for one in ("batch_size", "seed", "total_steps", *tunables) if one in free
    } | {rates[0]: "lr"}
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [
        one
        for one, argument in arguments.items()
        if argument.default is argument.empty
        and argument.kind not in kinds
        and one not in (*taken, *bound)
    ]
    if required:
        raise ConfigError(f"{name} needs {', '.join(required)} besides what a trial has: {instead}")
    return taken


def _build_by_names(module: Callable[..., Any], names: Mapping[str, str], trial: Trial) -> Any:
    return module(**{argument: getattr(trial, name) for argument, name in names.items()})


def _check_takes_one(function: Callable[..., Any], option: str, what: str) -> None:
    """Refuse a function that cannot be called with one argument."""
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        text = f"{option} must be a function of {what} alone, but got {_name(function)}{inspect.signature(function)}"
        raise ConfigError(text) from error
    except ValueError:  # a built-in that does not say
        return


def _name(value: Any) -> str:
    return getattr(value, "__name__", type(value).__name__)


class Loaders(LightningDataModule):
    """A data module of plain DataLoaders; ``at`` returns those of a batch size, None: they are the same at each."""

    def __init__(
        self, train: Any, val: Any, test: Any = None, at: Callable[[int], "Loaders"] | None = None
    ) -> None:
        super().__init__()
        self._loaders, self._at = {"train": train, "val": val, "test": test}, at

    def train_loader(self, batch_size: int) -> Any:
        """Return the loader of a batch size, which is read in batches of exactly so many examples."""
        return (
            self.train_dataloader() if self._at is None else self._at(batch_size).train_dataloader()
        )

    def train_dataloader(self) -> Any:
        """Return the loader to train on."""
        return self._loaders["train"]

    def val_dataloader(self) -> Any:
        """Return the loader on which the target is measured, at every batch size."""
        return self._loaders["val"]

    def test_dataloader(self) -> Any:
        """Return the loader of the test set; None if there is none."""
        return self._loaders["test"]


def data_module(data: Any, batch_size: int) -> Any:
    """Return a data module of what the user gives: one of theirs, loaders, or a function of a batch size."""
    if isinstance(data, type):
        name = data.__name__
        raise ConfigError(
            f"data must be an instance, but got the class {name}: give data={name}(...)"
        )
    if hasattr(data, "train_dataloader"):
        return _copied(data)
    if callable(data):
        _check_takes_one(data, "data", "a batch size")
        found = data(batch_size)
        return (
            _copied(found)
            if hasattr(found, "train_dataloader")
            else _loaders(found, partial(_loaders_at, data))
        )
    return _loaders(data)


def _loaders(data: Any, at: Callable[[int], Loaders] | None = None) -> Loaders:
    if isinstance(data, DataLoader):
        raise ConfigError(
            "data needs loaders to train and to validate on, but got one: give data=(train, val)"
        )
    if isinstance(data, Mapping):
        if not {"train", "val"} <= data.keys() <= set(LOADERS):
            names = ", ".join(map(str, data)) or "none"
            raise ConfigError(f"data must have train, val and perhaps test, but got {names}")
        return Loaders(data["train"], data["val"], data.get("test"), at)
    if isinstance(data, tuple | list):
        if len(data) not in (2, 3):
            raise ConfigError(
                f"data must be (train, val) or (train, val, test), but got {len(data)} of them"
            )
        return Loaders(data[0], data[1], data[2] if len(data) == 3 else None, at)
    kinds = "a LightningDataModule, DataLoaders (train, val[, test]), or a function of a batch size that returns them"
    raise ConfigError(f"data must be {kinds}, but got {type(data).__name__}")


def _loaders_at(function: Callable[[int], Any], batch_size: int) -> Loaders:
    return _loaders(function(batch_size))


def _copied(data: Any) -> Any:
    """Return a copy of a data module, which ``setup`` may change; its tensors, arrays and data sets are shared."""
    values = list(vars(data).values())
    values += [value.dataset for value in values if isinstance(value, DataLoader)]
    shared: dict[int, Any] = {
        id(one): one for one in values if isinstance(one, torch.Tensor | np.ndarray | Dataset)
    }
    if getattr(data, "trainer", None) is not None:
        shared[id(data.trainer)] = None  # of an earlier fit, with its module
    try:
        return copy.deepcopy(data, shared)
    except (
        TypeError,
        AttributeError,
        NotImplementedError,
        RuntimeError,
    ):  # of what cannot be copied, such as a lock
        return copy.copy(data)


def load_data(study: str, of: str) -> LightningDataModule:
    """Return the data module of a study of Python objects, whose name in messages is ``of``."""
    return _registered(study, of).data


def build_module(study: str, of: str, **values: float) -> Any:
    """Return a new module of a study of Python objects, from a trial's values."""
    return _registered(study, of).build_module(Trial(values))


def trainer_arguments(study: str, of: Any) -> dict[str, Any]:
    """Return the user's arguments of the Trainer of a study of Python objects."""
    return dict(_registered(study, "its Trainer's arguments").trainer)


def _registered(study: str, of: str) -> Objects:
    if study not in _OBJECTS:
        raise ConfigError(
            f"the study {study!r} trains {of}, a Python object that bstune.tune() was given: continue it by the same "
            "call of bstune.tune() in Python, as no command line has the object"
        )
    return _OBJECTS[study]
