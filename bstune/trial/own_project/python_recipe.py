"""A recipe of Python objects, as :func:`bstune.tune` takes them: a module's class, and data.

A recipe builds the module, the data and the Trainer's arguments of a study. A process that trains
is sent the whole recipe by cloudpickle, so that lambdas and definitions of ``__main__`` can be in
it.
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
from bstune.recipe import RATES, TrialValues, how_in_python, left_to_bstune, looks_like_rate
from bstune.system.failures import place_of
from bstune.trial.lightning.installed import LightningDataModule, LightningModule

# The keys of loaders that are given in a dict.
LOADERS = ("train", "val", "test")
# The argument of a study that lets bstune set the learning rate in the optimizer.
OVERRIDE = "override_lr=True"
# A function that returns a new module for a trial.
BuildModule = Callable[["Trial"], LightningModule]


class Trial:
    """The values of one trial, from which its module is built. It notes which of them are read.

    Further hyper-parameters are attributes too.

    Args:
        values: by name: ``batch_size``, ``lr``, ``seed``, ``total_steps`` and the further
            hyper-parameters that the study searches.
    """

    batch_size: int
    lr: float
    seed: int
    # The steps after which a schedule that ends with the trial should end.
    total_steps: int

    def __init__(self, values: Mapping[str, float]) -> None:
        self._values = dict(values)
        self._read: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        # copy and pickle ask for private methods, before there are any values.
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in self._values:
            raise AttributeError(f"a trial has {', '.join(self._values)}, but not {name}")
        self._read.add(name)
        return self._values[name]

    def __repr__(self) -> str:
        texts = [f"{name}={value!r}" for name, value in self._values.items()]
        return f"Trial({', '.join(texts)})"

    def has_read(self, name: str) -> bool:
        """Whether the value of this name was read."""
        return name in self._read


@dataclass(frozen=True)
class PythonRecipe:
    """A recipe of the Python objects that a study is given.

    Args:
        build_module: builds a module from a trial.
        data_module: the data module that all trials read, or a maker of it for each batch size.
        trainer_arguments: arguments of Lightning's Trainer, by name.
        module_name: the name of the module's class.
        ends_with_trial: whether a module's schedule depends on the steps of its trial.
        own_values: the user's own value of each hyper-parameter that is searched, by name; a trial
            that does not state one gets it.
        left_out: names of the user's arguments of the Trainer in whose place bstune has its own.
    """

    build_module: BuildModule
    data_module: "LightningDataModule | DataAt"
    trainer_arguments: Mapping[str, Any]
    module_name: str = "module"
    ends_with_trial: bool = False
    own_values: Mapping[str, float] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    # Modules and weights of earlier trials, by their identity.
    _built: "dict[int, weakref.ref[Any]]" = field(default_factory=dict, compare=False)

    @property
    def data_name(self) -> str:
        """The name of the data module's class."""
        if isinstance(self.data_module, DataAt):
            return self.data_module.name
        return type(self.data_module).__name__

    def data(self) -> LightningDataModule:
        """Give the study's data module, or make one for the reference's batch size."""
        if isinstance(self.data_module, DataAt):
            return self.data_module(self.data_module.batch_size)
        return self.data_module

    @property
    def how_to_give_data(self) -> str:
        """How a function makes the data for each batch size."""
        name = None if isinstance(self.data_module, Loaders) else self.data_name
        return how_in_python(name)

    @property
    def data_at(self) -> "DataAt | None":
        """The maker of data for each batch size; None where one data module serves all."""
        return self.data_module if isinstance(self.data_module, DataAt) else None

    def module(self, values: TrialValues) -> LightningModule:
        """Build a trial's module from the trial's values."""
        stated = {
            "batch_size": values.batch_size,
            "lr": values.lr,
            "seed": values.seed,
            "total_steps": values.total_steps,
        }
        # A hyper-parameter whose value the trial does not state has the user's own value.
        return self.module_of(Trial({**stated, **self.own_values, **values.hyperparameters}))

    def module_of(self, trial: "Trial") -> LightningModule:
        """Build the module of a trial.

        A ConfigError refuses an object that is no module, and a module or weights of an earlier
        trial.
        """
        module = self.build_module(trial)
        if not hasattr(module, "training_step"):
            raise ConfigError(
                f"module must return a LightningModule, but returned {type(module).__name__}"
            )
        self._refuse_of_earlier_trial(
            module, f"returned the same {type(module).__name__} as before"
        )
        for name, weight in module.named_parameters():
            # Trials may share frozen weights, which none of them changes.
            if weight.requires_grad:
                problem = f"returned {name} with the weights of another trial"
                self._refuse_of_earlier_trial(weight, problem)
        return module

    def _refuse_of_earlier_trial(self, built: object, problem: str) -> None:
        """Raise a ConfigError for a module or weight of an earlier trial; remember a new one.

        ``problem`` says in the message what the user's function did.
        """
        # Once an object is gone, another one may have its id.
        known = self._built.get(id(built))
        if known is not None and known() is built:
            raise ConfigError(
                f"module {problem}, but each trial starts from weights of its own: build all of it "
                "in the function, as in module=lambda trial: LitModel(lr=trial.lr)"
            )
        self._built[id(built)] = weakref.ref(built)

    def trainer(self) -> dict[str, object]:
        """Give the arguments of the Trainer, by name."""
        return dict(self.trainer_arguments)

    def with_trainer(self, arguments: Mapping[str, Any]) -> "PythonRecipe":
        """Give the recipe with further arguments of the Trainer, which do not replace its own."""
        return replace(self, trainer_arguments={**arguments, **self.trainer_arguments})

    @property
    def notes(self) -> tuple[str, ...]:
        """A line that names the arguments of the Trainer that are left out, if there are any."""
        if not self.left_out:
            return ()
        return (left_to_bstune(f"trainer.{name}" for name in self.left_out),)

    def takes(self, name: str) -> bool:
        """Whether a module may depend on a value of the trial, such as ``total_steps``.

        Whether it depends on the learning rate is seen later, in a few steps of training.
        """
        if name == "total_steps":
            return self.ends_with_trial
        return True

    @property
    def override(self) -> str:
        """The study's argument that lets bstune set the learning rate in the optimizer."""
        return OVERRIDE

    def advice_on_rate(self) -> str:
        """Give the advice for a user whose module does not take the learning rate."""
        return "give module=lambda trial: LitModel(lr=trial.lr)"

    def on(self, device: str, precision: str) -> "PythonRecipe":
        """Give the recipe itself: its objects do not refer to the device or the precision."""
        return self

    @cached_property
    def pickled(self) -> bytes:
        """The recipe's objects as bytes; an object that cannot be pickled raises its own error."""
        parts = (
            self.build_module,
            self.data_module,
            self.trainer_arguments,
            self.module_name,
            self.ends_with_trial,
            self.own_values,
            self.left_out,
        )
        pickled: bytes = cloudpickle.dumps(parts)
        return pickled

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (self.pickled,)


def _unpickle(pickled: bytes) -> PythonRecipe:
    """Make a recipe from the bytes of its objects."""
    return PythonRecipe(*cloudpickle.loads(pickled))


def module_builder(
    module: Any, tunables: Sequence[str] = (), *, overrides_lr: bool = False
) -> BuildModule:
    """Give a function that builds a module from a trial.

    Args:
        module: such a function, which is given back; or a class, perhaps with some arguments bound
            by ``functools.partial``. A class gets the trial's values by its arguments' names.
        tunables: names of the further hyper-parameters, which a class must take.
        overrides_lr: whether bstune sets the learning rate in the optimizer, so that a class needs
            no argument for it.

    Raises:
        ConfigError: for anything else.
    """
    class_or_function = module.func if isinstance(module, partial) else module
    # A class of modules has a training_step, and so has a module that is built already.
    is_built = hasattr(module, "training_step") and not isinstance(class_or_function, type)
    if not callable(module) or is_built:
        raise ConfigError(
            "module must be a class, or a function of a trial that returns a new module, as in "
            "module=lambda trial: LitModel(lr=trial.lr), but got an instance of "
            f"{type(module).__name__}"
        )
    if not isinstance(class_or_function, type):
        _check_takes_one(module, "module", "a trial")
        return module  # type: ignore[no-any-return]
    if not hasattr(class_or_function, "training_step"):
        raise ConfigError(
            f"module must be a class of LightningModules, but got {class_or_function.__name__}"
        )
    names = _argument_names(module, class_or_function, tunables, overrides_lr)
    return partial(_build_by_names, module, names)


def _argument_names(
    module: Callable[..., object], module_class: type, tunables: Sequence[str], overrides_lr: bool
) -> dict[str, str]:
    """Map the name of each argument of a module's class to that of the trial's attribute it takes.

    Args:
        module: the class, or a partial of it.
        module_class: the class itself.
        tunables: names of the further hyper-parameters, which the class must take.
        overrides_lr: whether bstune sets the learning rate in the optimizer, so that the class
            needs no argument for it.

    Raises:
        ConfigError: says why the class cannot be built from a trial.
    """
    class_name = module_class.__name__
    arguments = inspect.signature(module).parameters
    # The names that a partial has given values already.
    bound = set(module.keywords) if isinstance(module, partial) else set()
    free = {name: argument for name, argument in arguments.items() if name not in bound}
    rates = [name for name in RATES if name in free]
    instead = f"give module=lambda trial: {class_name}({_with_rate(free)}...) instead"
    needs_no_rate = overrides_lr and not rates
    if len(rates) != 1 and not needs_no_rate:
        found = " and ".join(rates) or ", ".join(free) or "none"
        raise ConfigError(
            f"{class_name}{place_of(module_class)} needs one argument lr or learning_rate, but its "
            f"arguments are {found}: {instead}, or {OVERRIDE}, which sets the rate in its optimizer"
        )
    missing = [name for name in tunables if name not in free]
    if missing:
        raise ConfigError(
            f"{class_name} has no argument {', '.join(missing)}, which is to be searched: {instead}"
        )
    # Of these values of a trial the class gets those that are arguments of it.
    attribute_of = dict[str, str]()
    for name in ("batch_size", "seed", "total_steps", *tunables):
        if name in free:
            attribute_of[name] = name
    attribute_of |= dict.fromkeys(rates, "lr")
    required = [name for name in free if name not in attribute_of and _is_required(free[name])]
    if required:
        raise ConfigError(
            f"{class_name} needs {', '.join(required)} besides what a trial has: {instead}"
        )
    return attribute_of


def _with_rate(arguments: Mapping[str, inspect.Parameter]) -> str:
    """Write how a trial's rate is given to the argument of a class that looks like a learning rate.

    Such as ``base_lr=trial.lr, ``. Empty where no argument does, or several: of these it is not
    known which one is the trial's.
    """
    alike = list[str]()
    for name, argument in arguments.items():
        # A switch is no rate, such as use_lr_schedule.
        if looks_like_rate(name) and not isinstance(argument.default, bool):
            alike.append(name)
    return f"{alike[0]}=trial.lr, " if len(alike) == 1 else ""


def _is_required(argument: inspect.Parameter) -> bool:
    """Whether a call has to give an argument: it has no default, and is no *args or **kwargs."""
    is_open = argument.kind in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD)
    return argument.default is argument.empty and not is_open


def _build_by_names(
    module: Callable[..., LightningModule], attribute_of: Mapping[str, str], trial: Trial
) -> LightningModule:
    """Build a module from a trial, each argument from an attribute (:func:`_argument_names`)."""
    arguments = {argument: getattr(trial, name) for argument, name in attribute_of.items()}
    return module(**arguments)


def _check_takes_one(function: Callable[..., object], option: str, argument: str) -> None:
    """Raise a ConfigError for a function that cannot be called with one argument.

    ``option`` and ``argument`` name the function and its argument in the message.
    """
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        text = (
            f"{option} must be a function of {argument} alone, but got "
            f"{_name(function)}{inspect.signature(function)}"
        )
        raise ConfigError(text) from error
    # The signature of a built-in function may not be known.
    except ValueError:
        return


def _name(value: object) -> str:
    """Give the name of a function or class; of any other object, that of its class."""
    return getattr(value, "__name__", type(value).__name__)


class Loaders(LightningDataModule):
    """A data module of loaders that the user gave without a data module."""

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
    """Makes the data module for a batch size, by a function of the user's.

    Args:
        function: takes a batch size, and returns a data module or loaders.
        batch_size: the reference's, at which the data are made that a study looks at first, and
            that trials are evaluated on.
        name: the name of the data module's class.
    """

    function: Callable[[int], object]
    batch_size: int
    name: str

    def __call__(self, batch_size: int) -> LightningDataModule:
        """Make the data module for a batch size."""
        return _as_data_module(self.function(batch_size))


def _as_data_module(data: object) -> LightningDataModule:
    """Copy a data module, or make one of loaders."""
    if _is_data_module(data):
        return _copied(data)
    return _loaders(data)


def _is_data_module(data: object) -> TypeGuard[LightningDataModule]:
    """Whether it is a data module, of either of Lightning's packages."""
    return hasattr(data, "train_dataloader")


def data_of(data: object, batch_size: int) -> "LightningDataModule | DataAt":
    """Make a data module from the user's data, or a maker of data modules from a function.

    Args:
        data: a data module, loaders, or a function of the batch size that returns either.
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
    """Whether the data are given as a function of the batch size.

    A class can be called too, and so may a data module; neither is such a function.
    """
    return callable(data) and not isinstance(data, type) and not _is_data_module(data)


def default_batch_size(function: Callable[[int], object]) -> int | None:
    """Give the default of a function of the batch size: the batch size that the user runs today.

    None where its argument has no default that is a batch size.
    """
    try:
        arguments = list(inspect.signature(function).parameters.values())
    # The signature of a built-in function may not be known.
    except (TypeError, ValueError):
        return None
    default = arguments[0].default if arguments else None
    is_batch_size = isinstance(default, int) and not isinstance(default, bool) and default > 0
    return default if is_batch_size else None


def data_module(data: object, batch_size: int) -> "LightningDataModule | DataAt":
    """Make the data module that the user's function gives at a batch size.

    Data that are no function are taken as :func:`data_of` takes them.
    """
    if not is_function(data):
        return data_of(data, batch_size)
    _check_takes_one(data, "data", "a batch size")
    return _as_data_module(data(batch_size))


def _loaders(data: object) -> Loaders:
    """Make a data module of loaders: ``(train, val[, test])``, or a dict with these names.

    A ConfigError refuses anything else.
    """
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
    """Copy a data module, as ``setup`` may change it.

    The copy shares tensors, arrays and data sets with it. Where an attribute cannot be copied
    deeply, all attributes are shared.
    """
    values = list(vars(data).values())
    values += [value.dataset for value in values if isinstance(value, DataLoader)]
    # deepcopy takes an object whose id it finds here as its own copy.
    shared = dict[int, Any]()
    for value in values:
        if isinstance(value, torch.Tensor | np.ndarray | Dataset):
            shared[id(value)] = value
    # The Trainer of an earlier fit, with its module, is left out.
    if getattr(data, "trainer", None) is not None:
        shared[id(data.trainer)] = None
    try:
        return copy.deepcopy(data, shared)
    # These are errors of an attribute that cannot be copied, such as a lock.
    except (TypeError, AttributeError, NotImplementedError, RuntimeError):
        return copy.copy(data)
