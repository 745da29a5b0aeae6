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
from bstune.options import Options
from bstune.recipe.recipe import RATES, Recipe, TrialSettings, resolve_device, settings_of

# What Hydra instantiates.
NODES = ("data", "module", "trainer")
# What a node may refer to as ${trial.NAME}.
TRIAL_VALUES = ("batch_size", "lr", "seed", "max_steps", "total_steps")
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
    for key in ("data", "module"):
        if parts.get(key) is None:
            raise InputError(f"{key} is missing: name what builds it, as {key}._target_=PATH")
    modules = []
    for lr in (1.0, 2.0):
        modules.append(resolved(parts, settings_of(1, lr, steps=1), "cpu")["module"])
    # Where the config does not say which argument is the rate, its name does.
    rates = RATES if modules[0] == modules[1] else ()
    return Recipe(
        module=partial(build, parts, "module", rates),
        data=partial(build, parts, "data", ()),
        trainer=partial(build, parts, "trainer", ()),
        device=options.device,
        precision=options.precision,
        threads=options.threads,
        compile=options.compile,
        micro_batch_size=options.given_micro_batch_size,
        devices=options.devices,
        noise_scale=options.noise_scale,
    )


def resolved(parts: Mapping[str, Any], trial: TrialSettings, device: str) -> dict[str, Any]:
    """Resolve the nodes for a trial, as plain containers by their keys.

    An argument whose value of the trial is None is left out: its own default stands. InputError for
    a reference that leads nowhere.
    """
    values = {name: getattr(trial, name) for name in TRIAL_VALUES}
    values = {name: LEFT_OUT if value is None else value for name, value in values.items()}
    config = OmegaConf.create({**parts, "trial": values, "device": device})
    try:
        nodes: Any = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise InputError(f"{error.full_key}: {str(error).splitlines()[0]}") from error
    return {key: _without_left_out(nodes[key]) for key in NODES}


def _without_left_out(node: Any) -> Any:
    """Leave out the arguments whose value the trial does not have."""
    if isinstance(node, dict):
        kept = {key: value for key, value in node.items() if value != LEFT_OUT}
        return {key: _without_left_out(value) for key, value in kept.items()}
    if isinstance(node, list):
        return [_without_left_out(value) for value in node]
    return node


def build(parts: Mapping[str, Any], key: str, rates: Sequence[str], trial: TrialSettings) -> Any:
    """Instantiate a node for a trial; ``device`` is cpu or cuda by then.

    Args:
        parts: the config.
        key: of the node.
        rates: names, of which one has to be an argument and gets the trial's rate; none: the config
            says where it goes.
        trial: whose values are given.

    Raises:
        InputError: if a target cannot be imported. What a target raises is raised as it is.
    """
    node = resolved(parts, trial, resolve_device(parts["device"]))[key] or {}
    try:
        if rates and trial.lr is not None:
            partly = {**node, "_partial_": True}
            function = hydra.utils.instantiate(partly, _convert_="all", **ALLOWED).func
            node[_rate_argument(function, rates)] = trial.lr
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
            f"{' or '.join(rates)}: give it to the argument that is, as module.NAME='${{trial.lr}}'"
        )
    return name
