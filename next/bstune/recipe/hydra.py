"""A recipe of a config's nodes, whose references such as ``${trial.lr}`` each trial resolves."""

from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import hydra.utils
from hydra.errors import InstantiationException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from bstune.core.errors import InputError
from bstune.options import Options
from bstune.recipe.recipe import Recipe, TrialSettings, resolve_device

# What Hydra instantiates.
NODES = ("data", "module", "trainer")
# What a node may refer to as ${trial.NAME}.
TRIAL_VALUES = ("batch_size", "lr", "seed", "max_steps", "total_steps")
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
        InputError: if a node is missing, a reference leads nowhere, or the trial's rate does not
            reach the module.
    """
    for key in ("data", "module"):
        if parts.get(key) is None:
            raise InputError(f"{key} is missing: name what builds it, as {key}._target_=PATH")
    modules = []
    for lr in (1.0, 2.0):
        trial: Any = SimpleNamespace(batch_size=1, lr=lr, seed=0, max_steps=1, total_steps=1)
        modules.append(resolved(parts, trial, "cpu")["module"])
    if modules[0] == modules[1]:
        raise InputError(
            "module must get the trial's rate, but has no ${trial.lr}: give it to the argument "
            "that is the learning rate, as module.lr='${trial.lr}'"
        )
    return Recipe(
        module=partial(build, parts, "module"),
        data=partial(build, parts, "data"),
        trainer=partial(build, parts, "trainer"),
        device=options.device,
        precision=options.precision,
        threads=options.threads,
        compile=options.compile,
        micro_batch_size=options.micro_batch_size,
        devices=options.devices,
    )


def resolved(parts: Mapping[str, Any], trial: TrialSettings, device: str) -> dict[str, Any]:
    """Resolve the nodes for a trial, as plain containers by their keys.

    InputError for a reference that leads nowhere.
    """
    values = {name: getattr(trial, name) for name in TRIAL_VALUES}
    config = OmegaConf.create({**parts, "trial": values, "device": device})
    try:
        nodes: Any = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise InputError(f"{error.full_key}: {str(error).splitlines()[0]}") from error
    return {key: nodes[key] for key in NODES}


def build(parts: Mapping[str, Any], key: str, trial: TrialSettings) -> Any:
    """Instantiate a node for a trial; ``device`` is cpu or cuda by then.

    Raises:
        InputError: if a target cannot be imported. What a target raises is raised as it is.
    """
    node = resolved(parts, trial, resolve_device(parts["device"]))[key]
    try:
        return hydra.utils.instantiate(node or {}, _convert_="all", **ALLOWED)
    except InstantiationException as error:
        cause = error.__cause__
        if cause is None or "Error locating target" in str(error):
            reason = " ".join(str(cause or error).split())
            raise InputError(f"{key} cannot be built: {reason}") from error
        raise cause from None
