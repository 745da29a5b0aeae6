"""Further hyper-parameters of a study: numbers of the config that are searched beside batch size and learning rate.

A workload lists under ``tunable`` what may be searched, each by the config key that it sets; ``search.tune`` names
those that a study does search. A schedule's horizon is one of them, as the budget that the schedule ends with.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf

from bstune.errors import ConfigError

MODULE, BUDGET = "workload.module.", "budget."
TAKEN = ("batch_size", "lr", "delta")  # names of a study's own parameters


@dataclass(frozen=True)
class Tunable:
    """A number of the config that is searched.

    Args:
        name: in the study, the records and the report.
        key: the config key that it sets, dotted, as on the command line; below ``workload.module`` or ``budget``.
        low, high: smallest and largest value.
        log: whether it is searched on a log scale.
        integer: whether it is a whole number.

    Raises:
        ConfigError: for a name that is taken, another place in the config, or an impossible range.
    """

    name: str
    key: str
    low: float
    high: float
    log: bool
    integer: bool

    def __post_init__(self) -> None:
        if self.name in TAKEN:
            raise ConfigError(f"workload.tunable.{self.name}: a study has a {self.name} already: choose another name")
        if not self.key.startswith((MODULE, BUDGET)):
            raise ConfigError(
                f"workload.tunable.{self.name}.key must lie below workload.module or budget, which are made anew for "
                f"each trial, but got {self.key!r}"
            )
        ends = f"low={self.low:g} and high={self.high:g}"
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise ConfigError(f"workload.tunable.{self.name} needs two numbers with low < high, but got {ends}")
        if self.log and not self.low > 0:
            raise ConfigError(f"workload.tunable.{self.name} is searched on a log scale: low must be over 0, in {ends}")
        if self.integer and not (self.low == round(self.low) and self.high == round(self.high)):
            raise ConfigError(f"workload.tunable.{self.name} is a whole number, but got {ends}")

    def value(self, value: float) -> float:
        """Return a value as the config takes it: an integer where it is one."""
        return round(value) if self.integer else value


def tuned(config: DictConfig) -> tuple[Tunable, ...]:
    """Return what ``search.tune`` names, in its order.

    Raises:
        ConfigError: for a name that the workload does not list or that is there twice, for a key that the config does
            not have or that holds no number, or for one that cannot be searched.
    """
    if not config.search.tune:
        return ()
    listed = config.workload.tunable
    found: list[Tunable] = []
    for name in config.search.tune:
        if name not in listed:
            known = f"it lists {', '.join(listed)}" if listed else "it lists nothing"
            raise ConfigError(
                f"search.tune names {name!r}, but the workload {config.workload.name} does not: {known} under "
                "workload.tunable"
            )
        if name in (one.name for one in found):
            raise ConfigError(f"search.tune names {name!r} twice")
        own = listed[name]
        one = Tunable(name, own.key, own.low, own.high, own.log, own.integer)
        value = OmegaConf.select(config, one.key, default="nothing")
        if value is not None and (not isinstance(value, int | float) or isinstance(value, bool)):
            raise ConfigError(
                f"workload.tunable.{name}.key={one.key} must name a number of the config (or null, where it is off), "
                f"but got {value} there"
            )
        found.append(one)
    return tuple(found)


def with_settings(config: DictConfig, settings: Mapping[str, float]) -> DictConfig:
    """Return a copy of the config in which each setting, by its name, stands at its tunable's key."""
    own = config.copy()
    for name, value in settings.items():
        OmegaConf.update(own, config.workload.tunable[name].key, value)
    return own


def overrides(config: DictConfig, settings: Mapping[str, float]) -> list[str]:
    """Return the arguments of the command line that give the settings."""
    return [f"{config.workload.tunable[name].key}={value!r}" for name, value in settings.items()]


def corners(tunables: tuple[Tunable, ...]) -> list[dict[str, float]]:
    """Return all at their smallest values, and all at their largest; nothing where nothing is searched."""
    if not tunables:
        return []
    return [{one.name: one.value(getattr(one, end)) for one in tunables} for end in ("low", "high")]
