"""Config nodes turned into objects and into plain values."""

from collections.abc import Mapping
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from bstune.errors import BstuneError, ConfigError


def build(target: DictConfig, what: str) -> Any:
    """Instantiate a config node, with Hydra's wrapping of the first error taken off.

    Raises:
        ConfigError: if the target cannot be found or does not take its arguments.
    """
    try:
        return instantiate(target, _convert_="all")
    except InstantiationException as error:
        if isinstance(error.__cause__, BstuneError):
            raise error.__cause__ from error
        raise ConfigError(f"{what} cannot be built: {' '.join(str(error).split())}") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{what} cannot be built: {str(error).splitlines()[0]}") from error


def plain(config: DictConfig) -> dict[str, Any]:
    """Return a config node with every reference resolved, as plain values."""
    values = OmegaConf.to_container(config, resolve=True)
    return {str(key): value for key, value in values.items()} if isinstance(values, dict) else {}


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one, its keys joined by dots."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        flat.update(flatten(value, f"{name}.") if isinstance(value, Mapping) else {name: value})
    return flat
