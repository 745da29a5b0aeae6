"""A recipe of a config's nodes, whose references such as ``${trial.lr}`` each trial resolves."""

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import hydra.utils
from hydra.errors import InstantiationException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from bstune.core.errors import InputError
from bstune.options import RATES, TRIAL_VALUES, Options
from bstune.recipe.recipe import (
    Recipe,
    TrialSettings,
    resolve_device,
    settings_of,
    value_of_today,
)

# What Hydra instantiates.
NODES = ("data", "module", "trainer", "algorithm", "schedule")
# Those that need an argument more: parameters, or an optimizer.
PARTIAL = ("algorithm", "schedule")
# Stands for a value that the trial does not have.
LEFT_OUT = "<the argument's default>"
# Hydra 1.4 warns of a target that nobody has allowed; a config is trusted here as code is.
ALLOWED: dict[str, Any] = {}
if hasattr(hydra.utils, "UNSAFE_DISABLE_EXECUTION_CHECKS"):
    ALLOWED = {"_execution_whitelist_": hydra.utils.UNSAFE_DISABLE_EXECUTION_CHECKS}


def recipe_of(parts: dict[str, Any], options: Options) -> Recipe:
    """Make the recipe of a config; nothing that it names is imported here.

    Args:
        parts: the config as plain containers, with references as they are written.
        options: its options.

    Raises:
        InputError: if a node is missing, or a reference leads nowhere.
    """
    for key in ("data", "module", *(key for key in PARTIAL if parts.get(key))):
        if "_target_" not in (parts.get(key) or ()):
            raise InputError(f"{key} does not name what builds it: give {key}._target_=PATH")
    tuned = [tunable.name for tunable in options.tunables]
    names = [*tuned, *(options.trial.values or {}), *(parts.get("tunable") or {})]
    keys = {name: _key_of(parts, name) for name in names}
    nodes, at_other_lr, at_other_size = (
        resolve_nodes(parts, keys, settings_of(size, lr, steps=1), "cpu")
        for size, lr in ((1, 1.0), (1, 2.0), (2, 1.0))
    )
    # Where the config does not say which argument is the rate, its name does.
    is_said = nodes["module"] != at_other_lr["module"] or options.override_lr
    rates = () if is_said else RATES
    return Recipe(
        module=partial(build, parts, keys, "module", rates),
        data=partial(build, parts, keys, "data", ()),
        trainer=partial(build, parts, keys, "trainer", ()),
        data_follows=nodes["data"] != at_other_size["data"],
        own_values=partial(own_values, parts, keys, tuned),
        **recipe_arguments(options, parts, keys),
    )


def recipe_arguments(
    options: Options, parts: dict[str, Any] | None = None, keys: "Keys | None" = None
) -> dict[str, Any]:
    """The arguments of a :class:`Recipe` that options alone decide.

    Args:
        options: of the study.
        parts, keys: as of :func:`build`, where the nodes are those of a config.
    """
    parts = parts or options.model_dump(include={*PARTIAL, "device"})
    given = [key for key in PARTIAL if parts.get(key)]
    return {key: partial(build, parts, keys or {}, key, ()) for key in given} | {
        "device": options.device,
        "precision": options.precision,
        "threads": options.threads,
        "compile": options.compile,
        "micro_batch_size": options.given_micro_batch_size,
        "devices": options.devices,
        "noise_scale": options.noise_scale,
        "override_lr": options.override_lr,
        "validation_batch_size": options.validation_batch_size,
    }


Keys = Mapping[str, str | None]
"""The key of the config that each further value sets; None: nodes refer to it as ${trial.NAME}."""


def _key_of(parts: Mapping[str, Any], name: str) -> str | None:
    """The key that a further value sets: the algorithm's, the workload's own, or the module's."""
    if name in (parts.get("algorithm") or {}):
        return f"algorithm.{name}"
    tunable = (parts.get("tunable") or {}).get(name) or {}
    is_referred_to = f"${{trial.{name}}}" in str(parts)
    key: str | None = tunable.get("key", None if is_referred_to else f"module.{name}")
    return key


def own_values(
    parts: Mapping[str, Any], keys: Keys, tuned: Sequence[str]
) -> dict[str, int | float | None]:
    """The further values that the config has, or the defaults of the module's arguments.

    It imports the module. InputError for a value that its class or function does not take.
    """
    if not tuned:
        return {}
    config = OmegaConf.create(dict(parts))
    function = hydra.utils.get_object(OmegaConf.select(config, "module._target_"))
    arguments = inspect.signature(function).parameters
    takes_any = any(one.kind is one.VAR_KEYWORD for one in arguments.values())
    own = {}
    for name in tuned:
        of_module = f"module.{name}"
        key = keys[name] or of_module
        value = OmegaConf.select(config, key, throw_on_resolution_failure=False)
        argument = key.removeprefix("module.")
        if value is None and argument in arguments:
            value = arguments[argument].default
        elif value is None and key != of_module:
            raise InputError(f"tunable.{name}.key must be that of a number, but got {key}")
        elif value is None and keys[name] is not None and not takes_any:
            raise InputError(
                f"module={function.__name__} does not take {name}: it takes {', '.join(arguments)}"
            )
        own[name] = value_of_today(name, value)
    return own


def resolve_nodes(
    parts: Mapping[str, Any], keys: Keys, trial: TrialSettings, device: str
) -> dict[str, Any]:
    """Resolve the nodes for a trial, as plain containers by their keys.

    An argument whose value of the trial is None is left out: its own default stands. InputError for
    a reference that leads nowhere.
    """
    values = {name: getattr(trial, name) for name in TRIAL_VALUES}
    values |= {name: trial.values.get(name) for name in keys}
    values = {name: LEFT_OUT if value is None else value for name, value in values.items()}
    config = OmegaConf.create({**parts, "trial": values, "device": device})
    for name, key in keys.items():
        if key is not None and name in trial.values:
            OmegaConf.update(config, key, trial.values[name])
    try:
        nodes: Any = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        message = str(error).splitlines()[0]
        if "'trial." in message:
            message += f"; a trial has {', '.join(values)}"
        raise InputError(f"{error.full_key}: {message}") from error
    return {key: _without_left_out(nodes.get(key)) for key in NODES}


def _without_left_out(node: Any) -> Any:
    """Leave out the arguments whose value the trial does not have."""
    if isinstance(node, dict):
        kept = {key: value for key, value in node.items() if value != LEFT_OUT}
        return {key: _without_left_out(value) for key, value in kept.items()}
    if isinstance(node, list):
        return [_without_left_out(value) for value in node]
    return node


def build(
    parts: Mapping[str, Any], keys: Keys, key: str, rate_names: Sequence[str], trial: TrialSettings
) -> Any:
    """Instantiate a node for a trial; ``device`` is cpu or cuda by then.

    The functions of a :class:`Recipe` are partials of it, which the worker calls.

    Args:
        parts: the config.
        keys: of further values.
        key: of the node.
        rate_names: one has to be an argument, and gets the trial's rate; none: the config says
            where the rate goes.
        trial: whose values are given.

    Raises:
        InputError: if a target cannot be imported. What a target raises is raised as it is.
    """
    node = resolve_nodes(parts, keys, trial, resolve_device(parts["device"]))[key] or {}
    if key in PARTIAL:
        node["_partial_"] = True
    try:
        if rate_names and trial.lr is not None:
            partly = {**node, "_partial_": True}
            alone = {"_recursive_": False, **ALLOWED}
            function = hydra.utils.instantiate(partly, **alone).func
            node[_rate_argument(function, rate_names)] = trial.lr
        return hydra.utils.instantiate(node, _convert_="all", **ALLOWED)
    except InstantiationException as error:
        cause = error.__cause__
        if cause is None or "Error locating target" in str(error):
            reason = " ".join(str(cause or error).split())
            raise InputError(f"{key} cannot be built: {reason}") from error
        raise cause from None


def _rate_argument(function: Any, rates: Sequence[str]) -> str:
    """The argument of a module's class or function that is the learning rate."""
    arguments = inspect.signature(function).parameters
    name = next((rate for rate in rates if rate in arguments), None)
    if name is None:
        raise InputError(
            f"module must get the trial's rate, but {function.__name__} has no argument "
            f"{' or '.join(rates)}: give it to the argument that is, as module.NAME="
            f"'${{trial.lr}}', or override_lr=true, which puts it into the optimizer"
        )
    return name
