"""What a study of Python objects is given, checked: its workload's options, and its recipe."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import numpy as np

from bstune.config import read_yaml
from bstune.core.errors import ConfigError
from bstune.core.records import Budget, Target
from bstune.core.search_space import MODULE, Tunable
from bstune.options import Node, StudyOptions
from bstune.trial.backend import OWNED
from bstune.trial.lightning.installed import LightningDataModule, LightningModule
from bstune.trial.own_project.python_recipe import PythonRecipe, Trial, data_of, module_builder

Module = Callable[[Trial], LightningModule] | type[LightningModule]
Data = LightningDataModule | Sequence[Any] | Mapping[str, Any] | Callable[[int], Any]
TUNABLE = {"low", "high", "log", "integer", "complement"}
# Of a study whose loop its user writes.
NO_MODULE = "a loop of yours"


@dataclass(frozen=True)
class GivenObjects:
    """A study of Python objects, as it is given.

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
        overrides_lr: whether a rate is set in the module's optimizers, so that it needs not take one.
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

    def __post_init__(self) -> None:
        _check_kind("target", self.target, Target)
        _check_kind("budget", self.budget, Budget)
        if self.budget == Budget():
            raise ConfigError(
                "budget ends a trial after one step: give bstune.Budget(examples=...) or steps=..."
            )
        if (self.module is None) != (self.data is None):
            raise ConfigError("a study needs module and data, or neither of them")
        if self.trainer is not None and self.module is None:
            raise ConfigError(
                "trainer holds arguments of Lightning's Trainer, which a study without module has "
                "none of: leave it out"
            )


def given_study(given: GivenObjects) -> tuple[Node, PythonRecipe | None]:
    """Return the workload as options have it, and the recipe of its objects (None: it has none).

    ConfigError for what cannot be used.
    """
    low, high = _pair("batch_sizes", given.batch_sizes, "(smallest, largest)")
    batch_size, lr = _pair("reference", given.reference, "(batch size, learning rate)")
    tunable = {name: _tunable(name, value) for name, value in (given.tunable or {}).items()}
    recipe = _recipe(given, batch_size, lr, tunable)
    trainer = {} if recipe is None else recipe.trainer_arguments
    workload = read_yaml("python.yaml")
    workload |= {
        "name": NO_MODULE if recipe is None else recipe.module_name,
        "reference": {"batch_size": batch_size, "lr": lr},
        "batch_size": {"low": low, "high": high},
        "budget": {"steps": given.budget.steps, "examples": given.budget.examples},
        "target": {
            "metric": given.target.metric,
            "value": "auto" if given.target.is_open else given.target.value,
            "mode": given.target.mode,
        },
        "tunable": tunable,
        "given_data": NO_MODULE if recipe is None else recipe.data_name,
        "given_module": NO_MODULE if recipe is None else recipe.module_name,
        "given_trainer": {name: _in_words(value) for name, value in trainer.items()},
    }
    return workload, recipe


def recipe_of(module: Module, data: Data, options: StudyOptions) -> PythonRecipe:
    """Return a recipe of objects that train what a study's options state."""
    reference = options.workload.reference
    searched = options.workload.tunable
    own_values = {
        name: Tunable(name, **searched[name].model_dump()).middle for name in options.search.tune
    }
    return PythonRecipe(
        module_builder(module, list(own_values), overrides_lr=options.scaling.override_lr),
        data_of(data, int(reference.batch_size)),
        {},
        own_values=own_values,
    )


def middles_of(tunable: Mapping[str, Any] | None) -> dict[str, float]:
    """Give each further hyper-parameter the middle of its range, where a trial states none."""
    checked = {name: _tunable(name, value) for name, value in (tunable or {}).items()}
    return {name: Tunable(name, **searched).middle for name, searched in checked.items()}


def _recipe(
    given: GivenObjects, batch_size: Any, lr: Any, tunable: Mapping[str, Node]
) -> PythonRecipe | None:
    """Return the recipe; one module is built, which shows its class and whether it takes its steps."""
    if given.module is None:
        return None
    values: dict[str, float] = {"batch_size": batch_size, "lr": lr, "seed": given.seed or 0}
    values["total_steps"] = given.budget.last_step(batch_size)
    middles = {name: Tunable(name, **searched).middle for name, searched in tunable.items()}
    recipe = PythonRecipe(
        module_builder(given.module, list(tunable), overrides_lr=given.overrides_lr),
        data_of(given.data, batch_size),
        _trainer(given.trainer),
    )
    first = Trial({**values, **middles})
    module = recipe.module_of(first)
    # With what was built, so that a module that is built twice is found.
    return replace(
        recipe,
        module_name=type(module).__name__,
        ends_with_trial=first.has_read("total_steps"),
        own_values=middles,
    )


def _trainer(given: Any) -> dict[str, Any]:
    """Return the user's arguments of the Trainer; those that would change what a trial is are refused."""
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(
            f"trainer must be a dict of the Trainer's arguments, but got {type(given).__name__}"
        )
    for one in given or ():
        if one in OWNED:
            raise ConfigError(f"trainer: {one} is bstune's own: {OWNED[one]}")
    return dict(given or {})


def _in_words(value: object) -> object:
    """Return a value as options have it: an object by its class."""
    if isinstance(value, tuple | list):
        return [_in_words(item) for item in value]
    return value if isinstance(value, str | int | float | None) else type(value).__name__


def _check_kind(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise ConfigError(f"{name} must be a bstune.{kind.__name__}, but got {value!r}")


def _pair(name: str, value: Any, what: str) -> tuple[Any, Any]:
    """Return two numbers; those of numpy as Python's own."""
    numbers = isinstance(value, tuple | list) and all(_is_number(one) for one in value)
    if not numbers or len(value) != 2:
        raise ConfigError(f"{name} must be two numbers {what}, but got {value!r}")
    first, second = (one.item() if isinstance(one, np.generic) else one for one in value)
    return first, second


def _tunable(name: str, value: Any) -> dict[str, Any]:
    """Return a further hyper-parameter as a config has it."""
    if isinstance(value, Mapping) and {"low", "high"} <= value.keys() <= TUNABLE:
        return {"log": False, "integer": False, **value, "key": f"{MODULE}{name}"}
    if (
        isinstance(value, tuple | list)
        and len(value) == 2
        and all(_is_number(one) for one in value)
    ):
        whole = all(isinstance(one, int) for one in value)
        return {
            "low": value[0],
            "high": value[1],
            "log": False,
            "integer": whole,
            "key": f"{MODULE}{name}",
        }
    raise ConfigError(
        f"tunable[{name!r}] must be (low, high) or a dict of {', '.join(sorted(TUNABLE))}, but got {value!r}"
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
