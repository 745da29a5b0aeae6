"""Builds what the nodes of a composed config name, by Hydra: data, modules, samplers, rules.

References such as ``${trial.lr}`` resolve anew for each trial. No other module resolves them.
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hydra.errors import InstantiationException
from hydra.utils import get_object
from hydra.utils import instantiate as hydra_instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from bstune.core.errors import BstuneError, ConfigError
from bstune.core.search_space import OVERRIDE_LR
from bstune.hydra_versions import ALLOW_ALL_TARGETS
from bstune.options import Node
from bstune.recipe import HOW_IN_YAML, TrialValues
from bstune.system.arguments import hint_on
from bstune.system.sources import missing_target, no_module_text, no_name_text, written_arguments

if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule, LightningModule

# The keys of a node that LightningCLI instantiates.
CLASS_KEYS = {"class_path", "init_args", "dict_kwargs"}
# Names of a module's argument that takes the learning rate.
RATE_ARGUMENTS = ("lr", "learning_rate", "learningrate", "base_lr", "max_lr")
# Two values of a trial that differ. A part that is built from the value differs between them.
_TWO_VALUES: dict[str, tuple[float, float]] = {"lr": (1.0, 2.0), "total_steps": (1, 2)}


def mappings_in(node: object) -> Iterator[Mapping[Any, Any]]:
    """Find the mappings in a node of a config, itself among them, at any depth."""
    if isinstance(node, list | tuple):
        for value in node:
            yield from mappings_in(value)
    if isinstance(node, Mapping):
        yield node
        for value in node.values():
            yield from mappings_in(value)


def _rates_in(node: object, key: str) -> Iterator[str]:
    """Find the numbers in a config's node that are called a learning rate, by their dotted keys.

    ``key``: the node's own.
    """
    if not isinstance(node, dict):
        return
    for name, value in node.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and name in RATE_ARGUMENTS:
            yield f"{key}.{name}"
        yield from _rates_in(value, f"{key}.{name}")


@dataclass(frozen=True)
class HydraRecipe:
    """A recipe of the nodes ``workload.data``, ``.module`` and ``.trainer``, and ``trainer``.

    Args:
        values: the composed config as plain values, with references as they are written.
        keys: the dotted key that each of the workload's tunables sets, by the tunable's name.
    """

    values: Mapping[str, Any]
    keys: Mapping[str, str]

    @classmethod
    def of(cls, config: DictConfig, keys: Mapping[str, str]) -> "HydraRecipe":
        """Make a recipe of a composed config, which the caller must not change from then on."""
        values: Any = OmegaConf.to_container(config, resolve=False)
        recipe = cls(values, keys)
        # Hydra's config refuses new keys. The recipe's must take them, as one made from plain
        # values would.
        OmegaConf.set_struct(config, None)
        # This fills the cache of _config: making it from the values takes a third of the time of a
        # composition.
        vars(recipe)["_config"] = config
        return recipe

    def __reduce__(self) -> tuple[Any, ...]:
        # The configs that are made of the values are left out.
        return HydraRecipe, (dict(self.values), dict(self.keys))

    @cached_property
    def _config(self) -> DictConfig:
        return OmegaConf.create(dict(self.values))

    @cached_property
    def _config_of_trials(self) -> DictConfig:
        """A copy that takes the values of each trial in turn.

        A new copy for each trial takes longer than a small module.
        """
        return self._config.copy()

    @property
    def data_name(self) -> str:
        """The target of the data's node."""
        return target_of(self._config.workload.data)

    @property
    def module_name(self) -> str:
        """The target of the module's node."""
        return target_of(self._config.workload.module)

    def data(self) -> "LightningDataModule":
        """Instantiate the data's node, at the reference's batch size where it refers to one."""
        if self._has_data_for_each_batch_size:
            return self._data_for(self._own_batch_size)
        data = self._config.workload.data
        return instantiate(data, "workload.data")  # type: ignore[no-any-return]

    @property
    def how_to_give_data(self) -> str:
        """How the data's node lets the data be built for each batch size."""
        return HOW_IN_YAML

    @property
    def data_at(self) -> "Callable[[int], LightningDataModule] | None":
        """The function that builds the data for a batch size, where the node refers to it.

        It does by ``${trial.batch_size}``. None: the node builds the same data at each one.
        """
        return self._data_for if self._has_data_for_each_batch_size else None

    def _data_for(self, batch_size: int) -> "LightningDataModule":
        """Instantiate the data's node for a batch size."""
        data = self._config_for(batch_size).workload.data
        return instantiate(data, "workload.data")  # type: ignore[no-any-return]

    def _config_for(self, batch_size: int) -> DictConfig:
        """Give a copy of the config in which a trial has this batch size."""
        config = self._config.copy()
        config.trial.batch_size = batch_size
        return config

    @property
    def _own_batch_size(self) -> int:
        """The user's own batch size, the reference's, at which the data are looked at first."""
        batch_size = OmegaConf.select(self._config, "scaling.batch_size")
        if batch_size is None:
            batch_size = self._config.workload.reference.batch_size
        return round(float(batch_size))

    @cached_property
    def _has_data_for_each_batch_size(self) -> bool:
        """Whether the data's node resolves differently for two batch sizes."""
        resolved = list[object]()
        for batch_size in (1, 2):
            data = self._config_for(batch_size).workload.data
            try:
                resolved.append(OmegaConf.to_container(data, resolve=True))
            # A reference that leads nowhere is named when the node is instantiated.
            except OmegaConfBaseException:
                return False
        return resolved[0] != resolved[1]

    def module(self, values: TrialValues) -> "LightningModule":
        """Instantiate the module's node, with a trial's values where it refers to them."""
        # One config serves all trials, as each sets the same four values in it. Hyper-parameters
        # would stay in it for later trials, so they are set in a copy.
        config = self._config_of_trials
        if values.hyperparameters:
            config = self._config.copy()
            for name, value in values.hyperparameters.items():
                OmegaConf.update(config, self.keys[name], value)
        config.trial.batch_size = values.batch_size
        config.trial.lr = values.lr
        config.trial.seed = values.seed
        config.trial.total_steps = values.total_steps
        return instantiate(config.workload.module, "workload.module")  # type: ignore[no-any-return]

    def trainer(self) -> dict[str, object]:
        """Instantiate the Trainer's arguments: those of the config, then the workload's own."""
        arguments: dict[str, object] = {}
        for key in ("trainer", "workload.trainer"):
            node = OmegaConf.select(self._config, key)
            if node:
                arguments |= instantiate(node, key)
        return arguments

    def takes(self, name: str) -> bool:
        """Whether the workload depends on a value of the trial: ``lr`` or ``total_steps``.

        It does if it resolves differently for two such values.
        """
        resolved = []
        for value in _TWO_VALUES[name]:
            trial = {"batch_size": 1, "lr": 1.0, "total_steps": 1, name: value}
            config = OmegaConf.merge(self._config, {"trial": trial})
            resolved.append(OmegaConf.to_container(config.workload, resolve=True))
        return resolved[0] != resolved[1]

    @property
    def notes(self) -> tuple[str, ...]:
        """No lines: the config's arguments are taken whole, or refused."""
        return ()

    @property
    def override(self) -> str:
        """The option that sets the learning rate in the optimizer."""
        return f"{OVERRIDE_LR}=true"

    def check_targets(self) -> None:
        """Raise a ConfigError for a class or function of the workload that is not there.

        Only sources are read, as an import takes seconds: one that may be there passes.
        """
        for key in ("data", "module"):
            node = self._config.workload[key]
            for mapping in mappings_in(OmegaConf.to_container(node, resolve=False)):
                # An empty name, and one that refers to another key, may be there.
                missing = missing_target(target_of(mapping))
                if missing is not None:
                    raise ConfigError(f"workload.{key} cannot be built: {missing}")

    def advice_on_rate(self) -> str:
        """Say which argument of the module should get ``${trial.lr}``.

        A number in the module's nodes that is called a learning rate comes first. Next is an
        argument of the module's class by its source: importing it would take seconds.
        """
        node = OmegaConf.to_container(self._config.workload.module, resolve=False)
        written = next(_rates_in(node, "workload.module"), None)
        if written is not None:
            return f"set {written}='${{trial.lr}}'"
        module = self._config.workload.module
        inner = "init_args." if "class_path" in module else ""
        named = written_arguments(self.module_name)
        for argument in RATE_ARGUMENTS:
            if argument in named:
                return f"set workload.module.{inner}{argument}='${{trial.lr}}'"
        return (
            f"pass ${{trial.lr}} in workload.module to whatever of {self.module_name} takes the "
            "learning rate"
        )

    def on(self, device: str, precision: str) -> "HydraRecipe":
        """Give the recipe whose references to the device and the precision have these values."""
        config = self._config.copy()
        config.device = device
        config.precision = precision
        return HydraRecipe.of(config, self.keys)


def instantiate(node: Node | DictConfig, what: str) -> Any:
    """Call the target that a node names with the node's arguments.

    Args:
        node: written as Hydra does, with a ``_target_``, or as LightningCLI does, with a
            ``class_path``.
        what: its name in messages.

    Raises:
        ConfigError: if a target cannot be found or does not take its arguments.
    """
    try:
        return hydra_instantiate(_with_targets(node), _convert_="all", **ALLOW_ALL_TARGETS)
    # Hydra raises a TypeError for a wrong value of a key of its own, such as _partial_.
    except (InstantiationException, OmegaConfBaseException, TypeError) as error:
        if isinstance(error.__cause__, BstuneError):
            # The new error must not be the cause of its own cause.
            raise error.__cause__ from None
        reason = _not_found(error) or _raised(error, node, what) or " ".join(str(error).split())
        raise ConfigError(f"{what} cannot be built: {reason}") from error


def instantiate_partial(node: Node, what: str) -> Any:
    """Give the target of a node as a ``functools.partial`` that has the node's arguments."""
    return instantiate({**node, "_partial_": True}, what)


def named_target(node: Node, what: str) -> object:
    """Give the class or function that a node names; None if it names none.

    Raises:
        ConfigError: if it cannot be imported.
    """
    module, _, name = target_of(node).rpartition(".")
    target: object = getattr(sys.modules.get(module), name, None)
    if target is None:
        # Its module is not imported yet. Hydra imports it, or raises an error that says what is
        # missing; func is the target of the functools.partial.
        target = getattr(instantiate_partial(node, what), "func", None)
    return target


def target_of(node: Mapping[Any, Any]) -> str:
    """Give the path of the class or function that a node names; empty if it names none."""
    return str(node.get("_target_") or node.get("class_path") or "")


def _with_targets(node: Node | DictConfig) -> Node | DictConfig:
    """Rewrite a node that LightningCLI instantiates, by ``class_path``, for Hydra: ``_target_``.

    A node without ``class_path`` at any depth stays as it is.
    """
    config = node if isinstance(node, DictConfig) else OmegaConf.create(node)
    if "class_path" not in str(OmegaConf.to_container(config, resolve=False)):
        return config
    converted: DictConfig = OmegaConf.create(_targets(OmegaConf.to_container(config, resolve=True)))
    return converted


def _targets(value: Any) -> Any:
    """Write ``class_path`` as ``_target_`` with its arguments beside it, at each depth."""
    if isinstance(value, list):
        return [_targets(item) for item in value]
    # With _recursive_: false the target gets the nodes inside uninstantiated, as they are written.
    if not isinstance(value, dict) or value.get("_recursive_") is False:
        return value
    if "class_path" in value and value.keys() <= CLASS_KEYS:
        value = {
            "_target_": value["class_path"],
            **(value.get("init_args") or {}),
            **(value.get("dict_kwargs") or {}),
        }
    return {key: _targets(item) for key, item in value.items()}


def _raised(error: Exception, node: Node | DictConfig, what: str) -> str | None:
    """Say what a target raised when it was called, with a guess at an argument that it lacks.

    None if the error is another one.

    Args:
        error: that Hydra raised.
        node: that was built.
        what: the node's name.
    """
    called = re.match(r"Error in call to target '([^']*)'", str(error))
    cause = error.__cause__
    if called is None or cause is None:
        return None
    target = called[1]
    text = f"{target} raised {type(cause).__name__}: {' '.join(str(cause).split())}"
    # Hydra names the key of a node within the one that was to be built.
    key = re.search(r"full_key: (\S+)$", str(error))
    if key is not None and key[1] != what:
        text += f" (at {key[1]})"
    unknown = re.search(r"unexpected keyword argument '(\w+)'", str(cause))
    # A target that is no class or function of Python's, or has been made on the fly, has none.
    with suppress(ValueError, TypeError, ImportError):
        parameters = inspect.signature(get_object(target)).parameters
        # It may hand arguments on to a function whose own are not known here.
        kinds = {parameter.kind for parameter in parameters.values()}
        hands_on = inspect.Parameter.VAR_KEYWORD in kinds
        is_lacking = unknown is not None and unknown[1] not in parameters and not hands_on
        # What the target calls by itself may lack an argument, too: the config cannot mend that.
        if unknown is not None and is_lacking and _gives(node, unknown[1]):
            text += f": {hint_on(unknown[1], list(parameters))}"
    return text


def _gives(node: object, argument: str) -> bool:
    """Whether a node, or one at any depth in it, gives the argument to its target."""
    if isinstance(node, DictConfig):
        node = OmegaConf.to_container(node, resolve=False)
    for mapping in mappings_in(node):
        arguments = mapping.get("init_args") if "class_path" in mapping else mapping
        if target_of(mapping) and isinstance(arguments, Mapping) and argument in arguments:
            return True
    return False


def _not_found(error: Exception) -> str | None:
    """Say which module, or which name of a module, was missing when a target was imported.

    None if the error is another one.
    """
    located = re.match(r"Error locating target '([^']*)'", str(error))
    if located is None or error.__cause__ is None:
        return None
    # Hydra raises its error from one of its own ("Error loading ..."), and that one from the error
    # of the import, where there was such an error.
    cause = error.__cause__.__cause__ or error.__cause__
    target = located[1]
    if not isinstance(cause, ModuleNotFoundError) or cause.name is None:
        return f"importing {target} fails: {cause!r}"
    parent, _, name = cause.name.rpartition(".")
    # What is missing is the target's own module or package, or one that these import.
    is_part_of_target = target == cause.name or target.startswith(f"{cause.name}.")
    if not is_part_of_target:
        return f"importing {target} needs the module {cause.name}, which is not installed"
    if parent:
        return no_name_text(parent, name, target)
    return no_module_text(name, target)
