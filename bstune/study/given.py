"""What a study of Python objects is given, checked: its workload's options, and its recipe."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, TypeGuard

import numpy as np

from bstune.config import read_yaml
from bstune.core.errors import ConfigError
from bstune.core.records import Budget, Target
from bstune.core.search_space import MODULE, Tunable
from bstune.hydra_recipe import target_of
from bstune.options import Node, StudyOptions, option_at
from bstune.system.console import listing
from bstune.trial.backend import LEFT_OUT, OWNED, owned_in_words
from bstune.trial.lightning.installed import LightningDataModule, LightningModule, Trainer
from bstune.trial.lightning.trainer import check_arguments
from bstune.trial.own_project.cli_file import check_lengths
from bstune.trial.own_project.own_values import own_defaults
from bstune.trial.own_project.python_recipe import PythonRecipe, Trial, data_of, module_builder

Module = Callable[[Trial], LightningModule] | type[LightningModule]
Data = LightningDataModule | Sequence[Any] | Mapping[str, Any] | Callable[[int], Any]
# Keys of a hyper-parameter's range.
TUNABLE = {"low", "high", "log", "integer", "complement", "own"}
# Arguments of the Trainer that are objects, of which a study's options hold the classes' names.
OBJECTS_OF_TRAINER = {"callbacks", "logger", "plugins", "profiler", "strategy"}
# The name of the module and of the data where the user's own loop trains.
NO_MODULE = "a loop of yours"
PAIR_NEEDED = "a study needs module and data, or neither of them"


@dataclass(frozen=True)
class GivenObjects:
    """The arguments of a study of Python objects that its workload and its recipe are made of.

    Args:
        target: the validation metric to reach.
        batch_sizes: the smallest and the largest one to search, in examples.
        reference: a batch size and a learning rate that go together.
        budget: after which a trial gives up.
        module: a class, or a function of a trial; None: the user's own loop trains.
        data: as :class:`bstune.Study` takes it; None with ``module``.
        trainer: further arguments of the Lightning Trainer.
        tunable: further hyper-parameters to search.
        seed: of the study.
        overrides_lr: whether bstune sets the rate in the module's optimizers. Then the module need
            not take one.
        assumed_epoch: examples of an epoch, where the budget was assumed; None: it was given.
    """

    target: Target
    batch_sizes: tuple[int, int]
    reference: tuple[int, float]
    budget: Budget
    module: Module | None = None
    data: Data | None = None
    trainer: Mapping[str, Any] | None = None
    tunable: Mapping[str, Any] | None = None
    seed: int | None = None
    overrides_lr: bool = False
    assumed_epoch: int | None = None

    def __post_init__(self) -> None:
        _check_kind("target", self.target, Target, 'a text such as "val_loss<=0.1"')
        _check_kind("budget", self.budget, Budget)
        # The default of both limits is one, which a trial meets at its first step.
        if self.budget == Budget():
            raise ConfigError(
                "budget ends a trial after one step: give bstune.Budget(examples=...) or steps=..."
            )
        if (self.module is None) != (self.data is None):
            raise ConfigError(PAIR_NEEDED)
        if self.trainer is not None and self.module is None:
            raise ConfigError(
                "trainer holds arguments of Lightning's Trainer, which a study without module has "
                "none of: leave it out"
            )


def given_study(given: GivenObjects) -> tuple[Node, PythonRecipe | None]:
    """Make the workload's options, and the recipe that builds module and data.

    The recipe is None where the user's own loop trains.

    Raises:
        ConfigError: for an argument that cannot be used.
    """
    low, high = _pair("batch_sizes", given.batch_sizes, "(smallest, largest)")
    batch_size, lr = checked_reference(given.reference)
    ranges = _ranges_of(given.tunable, given.module)
    recipe = _recipe(given, batch_size, lr, ranges)
    module_name = NO_MODULE
    data_name = NO_MODULE
    trainer: Mapping[str, object] = {}
    if recipe is not None:
        module_name = recipe.module_name
        data_name = recipe.data_name
        trainer = recipe.trainer_arguments
    # The first trial sets the target that the user has left open.
    target_value: str | float = given.target.value
    if given.target.is_open:
        target_value = "auto"
    workload = read_yaml("python.yaml")
    workload |= {
        "name": module_name,
        "reference": {"batch_size": batch_size, "lr": lr},
        "batch_size": {"low": low, "high": high},
        "budget": {
            "steps": given.budget.steps,
            "examples": given.budget.examples,
            # The examples of an epoch, where the budget was not given but assumed.
            "assumed_epoch": given.assumed_epoch,
        },
        "target": {
            "metric": given.target.metric,
            "value": target_value,
            "mode": given.target.mode,
        },
        "tunable": ranges,
        "given_data": data_name,
        "given_module": module_name,
        "given_trainer": {name: _in_words(value) for name, value in trainer.items()},
    }
    return workload, recipe


def checked_reference(reference: object) -> tuple[Any, Any]:
    """Give the reference's batch size and learning rate; ConfigError unless it is such a pair."""
    batch_size, lr = _pair("reference", reference, "(batch size, learning rate)")
    # NaN is refused, too, as it is not above anything.
    if not batch_size >= 1 or not lr > 0:
        raise ConfigError(
            "reference must be a batch size of at least 1 and a learning rate over 0, but got "
            f"{reference!r}"
        )
    return batch_size, lr


def recipe_of(module: Module, data: Data, options: StudyOptions) -> PythonRecipe:
    """Make the recipe that trains one configuration of a study with this module and these data.

    The study's options hold the arguments of its Trainer, but the objects among these as the names
    of their classes alone: such arguments are left out, and what trains has to be given them anew.
    """
    reference = options.workload.reference
    searched = options.workload.tunable
    # A tunable that a trial gives no value takes the user's own, or the middle of its range.
    own_values = dict[str, float]()
    for name in options.search.tune:
        own_values[name] = Tunable(name, **searched[name].model_dump()).usual
    return PythonRecipe(
        module_builder(module, list(own_values), overrides_lr=options.scaling.override_lr),
        data_of(data, round(reference.batch_size)),
        _stored_trainer_arguments(options),
        own_values=own_values,
    )


def _stored_trainer_arguments(options: StudyOptions) -> dict[str, object]:
    """Collect the arguments of the Trainer that a study's options hold as plain values."""
    stored = dict[str, object]()
    for name, value in _trainer_arguments(options).items():
        if not _is_object(name, value):
            stored[name] = value
    return stored


def line_on_lacking_objects(options: StudyOptions, given: Collection[str]) -> str | None:
    """Name the study's objects of the Trainer that a training anew lacks; None where it has all.

    Such are call-backs and loggers, of which a study's options hold the classes alone.

    Args:
        options: of the study.
        given: names of the arguments of the Trainer that the training is given anew.
    """
    lacking = list[str]()
    arguments = list[str]()
    for name, value in _trainer_arguments(options).items():
        classes = _classes_in(value)
        if name in given or not classes or not _is_object(name, value):
            continue
        lacking.append(f"{name} ({listing(classes)})")
        arguments.append(f"{name}=[...]" if isinstance(value, list | tuple) else f"{name}=...")
    if not lacking:
        return None
    return (
        f"this training lacks the study's {listing(lacking)}, which are objects and not stored: "
        f"train(module=..., data=..., {', '.join(arguments)}) has them"
    )


def _trainer_arguments(options: StudyOptions) -> dict[str, object]:
    """Collect the Trainer's arguments that a study's options hold, objects as their classes."""
    collected = dict[str, object]()
    sections = ("trainer", "workload.trainer", "workload.given_trainer")
    for section in sections:
        arguments = option_at(options, section)
        # A study has some of these sections alone.
        if isinstance(arguments, Mapping):
            collected |= arguments
    return collected


def _is_object(name: str, value: object) -> bool:
    """Whether a stored argument of the Trainer stands for an object, or may stand for one."""
    return name in OBJECTS_OF_TRAINER or isinstance(value, Mapping)


def _classes_in(value: object) -> list[str]:
    """List the classes of the objects that a stored argument of the Trainer stands for.

    Each is the name itself, or a node that builds the object. None and switches are no objects.
    """
    values = value if isinstance(value, list | tuple) else [value]
    classes = list[str]()
    for one in values:
        path = target_of(one) if isinstance(one, Mapping) else one
        if isinstance(path, str) and path:
            classes.append(path.rpartition(".")[2])
    return classes


def middles_of(tunable: Mapping[str, Any] | None) -> dict[str, float]:
    """Give the middle of each further hyper-parameter's range, by name."""
    ranges = _ranges_of(tunable, module=None)
    return {name: Tunable(name, **node).middle for name, node in ranges.items()}


def without_own_value(tunable: Mapping[str, Any] | None, module: Module | None) -> dict[str, float]:
    """Give the further hyper-parameters whose own value nobody states, each with its middle.

    The middle of the range then stands for it. A module's class states it as a default.
    """
    unknown = dict[str, float]()
    for name, node in _ranges_of(tunable, module).items():
        if node.get("own") is None:
            unknown[name] = Tunable(name, **node).middle
    return unknown


def _ranges_of(tunable: Mapping[str, Any] | None, module: Module | None) -> dict[str, Node]:
    """Check the ranges of further hyper-parameters, and give them as a config has them.

    Each gets the user's own value: the default of the module's class, where it lies in the range.
    """
    if not tunable:
        return {}
    ranges = dict[str, Node]()
    defaults = {} if module is None else own_defaults(module)
    for name, value in tunable.items():
        node = _range_of(name, value)
        default = defaults.get(name)
        if default is not None and node["low"] <= default <= node["high"]:
            node = {"own": default, **node}
        ranges[name] = node
    return ranges


def _recipe(
    given: GivenObjects, batch_size: Any, lr: Any, ranges: Mapping[str, Node]
) -> PythonRecipe | None:
    """Make the recipe that builds module and data; None where the user's own loop trains.

    One module is built, to see its class and whether it reads ``total_steps``: its schedule then
    ends with the trial.
    """
    if given.module is None:
        return None
    values: dict[str, float] = {"batch_size": batch_size, "lr": lr, "seed": given.seed or 0}
    values["total_steps"] = given.budget.last_step(batch_size)
    own_values = {name: Tunable(name, **node).usual for name, node in ranges.items()}
    trainer, left_out = sorted_trainer(given.trainer)
    recipe = PythonRecipe(
        module_builder(given.module, list(ranges), overrides_lr=given.overrides_lr),
        data_of(given.data, batch_size),
        trainer,
        left_out=left_out,
    )
    first = Trial({**values, **own_values})
    module = recipe.module_of(first)
    # The copy keeps the recipe's record of the modules that it has built, by which a function that
    # gives one of them again is refused.
    return replace(
        recipe,
        module_name=type(module).__name__,
        ends_with_trial=first.has_read("total_steps"),
        own_values=own_values,
    )


def sorted_trainer(
    given: object, taken: Collection[str] = ()
) -> tuple[dict[str, object], tuple[str, ...]]:
    """Sort the user's arguments of the Trainer, which are none for None.

    Args:
        given: the arguments, by name.
        taken: names of those that the study takes over as its own, such as the budget.

    Returns:
        Those that trials take over, and the names of those that are left out (``LEFT_OUT``). One
        that bstune sets, and that has Lightning's default, says nothing and is in neither.

    Raises:
        ConfigError: for one that the Trainer does not have, or not with such a value; or names
            all others that bstune sets.
    """
    if given is None:
        return {}, ()
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"trainer must be a dict of the Trainer's arguments, but got {type(given).__name__}"
        )
    check_arguments({name: value for name, value in given.items() if name != "_target_"})
    check_lengths({name: given[name] for name in taken if name in given})
    defaults = inspect.signature(Trainer).parameters
    kept = dict[str, object]()
    left_out = list[str]()
    refused = dict[str, str]()
    for name, value in given.items():
        is_default = name in defaults and value == defaults[name].default
        if name not in OWNED:
            kept[name] = value
        elif is_default or name in taken:
            continue
        elif name in LEFT_OUT:
            left_out.append(name)
        else:
            refused[name] = OWNED[name]
    if refused:
        raise ConfigError(f"trainer: {owned_in_words(refused)}")
    return kept, tuple(left_out)


def _in_words(value: object) -> object:
    """Give a value as options can hold it: an object becomes the name of its class."""
    if isinstance(value, tuple | list):
        return [_in_words(item) for item in value]
    if isinstance(value, str | int | float | None):
        return value
    return type(value).__name__


def _check_kind(name: str, value: object, kind: type, other: str | None = None) -> None:
    """Raise ConfigError where an argument is no instance of ``kind``.

    ``other``: what may be given in its place, in words; None: nothing else.
    """
    if isinstance(value, kind):
        return
    wanted = f"a bstune.{kind.__name__}"
    if other is not None:
        wanted += f" or {other}"
    raise ConfigError(f"{name} must be {wanted}, but got {value!r}")


def _pair(name: str, value: object, meaning: str) -> tuple[Any, Any]:
    """Check that an argument is two numbers, and give them; numpy's become Python's own.

    ``meaning``: what the two are, for the message.
    """
    if not _is_pair(value):
        raise ConfigError(f"{name} must be two numbers {meaning}, but got {value!r}")
    return _plain(value[0]), _plain(value[1])


def _plain(number: Any) -> Any:
    """Turn a number of numpy into Python's own, which options can hold."""
    if isinstance(number, np.generic):
        return number.item()
    return number


def _range_of(name: str, value: object) -> Node:
    """Check the range of a further hyper-parameter, and give it as a config has it."""
    # The option of the module that the value sets.
    key = f"{MODULE}{name}"
    if isinstance(value, Mapping) and {"low", "high"} <= value.keys() <= TUNABLE:
        return {"log": False, "integer": False, **value, "key": key}
    if not _is_pair(value):
        known = ", ".join(sorted(TUNABLE))
        raise ConfigError(
            f"tunable[{name!r}] must be (low, high) or a dict of {known}, but got {value!r}"
        )
    low, high = value
    # Two whole numbers are the ends of a range of whole numbers, as two layers to eight are.
    is_whole = isinstance(low, int) and isinstance(high, int)
    return {"low": low, "high": high, "log": False, "integer": is_whole, "key": key}


def _is_pair(value: object) -> TypeGuard[Sequence[Any]]:
    """Whether a value is a tuple or list of two numbers."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        return False
    return all(_is_number(number) for number in value)


def _is_number(value: object) -> bool:
    """Whether a value is a real number; True and False are none."""
    return isinstance(value, Real) and not isinstance(value, bool)
