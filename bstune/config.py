"""The types of the options in ``conf/``: no defaults here, the YAML owns them.

Merging a composed config into this schema finds values of the wrong type and keys that nobody reads. Nodes that Hydra
instantiates (``Any``) take whatever their target takes.

Config nodes turned into objects and into plain values.

Further hyper-parameters of a study: numbers of the config that are searched beside batch size and learning rate.

A workload lists under ``tunable`` what may be searched, each by the config key that it sets; ``search.tune`` names
those that a study does search. A schedule's horizon is one of them, as the budget that the schedule ends with.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException, ValidationError

from bstune.core.errors import BstuneError, ConfigError
from bstune.core.records import Budget
from bstune.core.search_space import Tunable


@dataclass
class TargetSettings:
    """A goal for a validation metric; ``bounds`` are the values that the metric can take, where they are known."""

    metric: str
    value: float
    mode: str
    bounds: list[float] | None = None


@dataclass
class BudgetSettings:
    """A trial ends once both are spent."""

    steps: int
    examples: int


@dataclass
class ReferenceSettings:
    """A batch size and a learning rate that go together; the scaling rule passes through them."""

    batch_size: float
    lr: float


@dataclass
class RangeSettings:
    """Smallest and largest batch size."""

    low: int
    high: int


@dataclass
class TunableSettings:
    """A number of the config that ``search.tune`` may name: its key, its range and its scale."""

    key: str
    low: float
    high: float
    log: bool = False
    integer: bool = False


@dataclass
class WorkloadSettings:
    """One file of ``conf/workload/``: what both kinds of workload have; ``tunable`` by name."""

    name: str
    precision: str
    trials: int
    reference: ReferenceSettings
    batch_size: RangeSettings
    budget: BudgetSettings
    target: TargetSettings
    tunable: dict[str, TunableSettings] = field(default_factory=dict, kw_only=True)


@dataclass
class TrainedSettings(WorkloadSettings):
    """A workload that is trained."""

    data: Any
    module: Any


@dataclass
class ReplayedSettings(WorkloadSettings):
    """A workload that is answered from a table of recorded runs."""

    table: str


@dataclass
class BatchSizeSettings:
    """The batch sizes of a search."""

    low: int
    high: int
    multiple: int | None


@dataclass
class SearchSettings:
    """What a study searches, and for how long."""

    objective: str
    trials: int
    seconds: float | None
    wall_seconds: float | None
    stratified: float
    precision: float | None
    confirmations: int
    finalists: int
    tune: list[str]
    workers: int
    batch_size: BatchSizeSettings


@dataclass
class ScalingSettings:
    """The scaling rule and the spread around it."""

    batch_size: float
    lr: float
    noise_scale: float | None
    sigma: float
    octaves: float
    level_sigma: float
    exponent_sigma: float
    rule: Any


@dataclass
class ProtocolSettings:
    """What stays fixed in every trial."""

    evaluation_ratio: float
    evaluation_share: float
    evaluation_cost: float
    near: float
    micro_batch_size: int | None
    warmup_steps: int
    divergence: float
    noise_scale_every: int | None


@dataclass
class TrialSettings:
    """One trial's own values; what a workload's ``${trial.lr}`` refers to."""

    batch_size: int | None
    lr: float | None
    seed: int
    total_steps: int | None


@dataclass
class DataSettings:
    """Where data sets are kept."""

    root: str


@dataclass
class MemorySettings:
    """How the memory ceiling is looked for."""

    limit: int | None
    free_share: float
    relative: dict[str, float]
    steps: int
    verify: int
    probe_seconds: float


@dataclass
class StepTimeSettings:
    """How steps are timed over batch size."""

    rungs: int
    repeats: int
    visit_seconds: float
    min_steps: int
    max_steps: int
    warmup_steps: int


@dataclass
class CeilingsSettings:
    """How the device's own ceilings are measured."""

    seconds: float
    matrix_sizes: list[int]
    copy_bytes: list[int]
    traced_batch_sizes: list[int]


@dataclass
class AllReduceSettings:
    """What an all-reduce of the gradients takes."""

    bytes_per_second: float | None
    latency: float
    seconds: dict[int, float] | None
    overlap: float


@dataclass
class ScaleOutSettings:
    """The plan for several devices."""

    devices: list[int]
    candidate_ratio: float
    all_reduce: AllReduceSettings


@dataclass
class HardwareSettings:
    """The survey of the hardware."""

    enabled: bool
    seconds: float
    refresh: bool
    cache: str
    memory: MemorySettings
    step_time: StepTimeSettings
    ceilings: CeilingsSettings
    scale_out: ScaleOutSettings


@dataclass
class MlflowSettings:
    """Tracking."""

    enabled: bool
    experiment: str
    uri: str | None
    seconds: float
    study_seconds: float
    request_seconds: int
    retries: int


@dataclass
class Settings:
    """All options."""

    study: str
    seed: int
    output: str
    storage: str
    device: str
    precision: str
    compile: str | None
    debug: bool
    search: SearchSettings
    budget: BudgetSettings
    scaling: ScalingSettings
    protocol: ProtocolSettings
    trial: TrialSettings
    data: DataSettings
    hardware: HardwareSettings
    trainer: dict[str, Any]
    mlflow: MlflowSettings
    sampler: Any
    workload: WorkloadSettings


def is_replayed(config: DictConfig) -> bool:
    """Return whether the workload is answered from a table (which may still be missing), rather than trained."""
    workload = config.get("workload")
    return isinstance(workload, DictConfig) and "table" in set(workload.keys())


def check_settings(config: DictConfig) -> DictConfig:
    """Return ``config`` with every value checked against the schema and every reference resolvable.

    A schedule that is chosen takes the place of the workload's own. What a replayed workload leaves open is taken from
    its table.

    Raises:
        ConfigError: for an unknown key, a value of the wrong type, or a value that is missing; or for a schedule of a
            workload that is replayed.
        TableError: if the table cannot be read.
    """
    config = _with_schedule(config)
    try:
        checked = OmegaConf.merge(_schema(config), config)
        assert isinstance(checked, DictConfig)  # a mapping merged into a mapping
        if is_replayed(checked):
            from bstune.trial.replay import complete

            checked = complete(checked)
        missing = OmegaConf.missing_keys(checked)
        if missing:
            raise ConfigError(f"the configuration gives no value for {', '.join(sorted(missing))}")
        OmegaConf.to_container(checked, resolve=True)
    except ConfigKeyError as error:
        raise ConfigError(f"unknown option {error.full_key}: {_first_line(error)}; --help lists the options") from error
    except ValidationError as error:
        raise ConfigError(f"{error.full_key}: {_first_line(error)}") from error
    except OmegaConfBaseException as error:
        raise ConfigError(_first_line(error)) from error
    return checked


def _with_schedule(config: DictConfig) -> DictConfig:
    """Return ``config`` with the chosen schedule in the workload's module, where all that reads it finds it.

    Hydra composes ``+workload=...`` after the groups that are in the defaults list, and it would merge a schedule with
    the workload's own, the arguments of both.
    """
    if config.get("schedule") is None:
        return config
    if is_replayed(config):
        raise ConfigError("a replayed workload is not trained, so it has no schedule: leave out schedule=...")
    config = config.copy()
    with open_dict(config):
        chosen = config.pop("schedule")
        keys = {str(key) for key in chosen} if isinstance(chosen, DictConfig) else {str(chosen)}
        if keys != {"rate", "average"}:
            wrong = min(keys ^ {"rate", "average"})
            raise ConfigError(f"a schedule has the two keys rate and average, but {wrong!r} is not in both")
        if isinstance(config.get("workload"), DictConfig) and isinstance(config.workload.get("module"), DictConfig):
            config.workload.module["schedule"] = chosen.rate
            config.workload.module["average"] = chosen.average
    return config


def _schema(config: DictConfig) -> DictConfig:
    schema: DictConfig = OmegaConf.structured(Settings)
    replayed = is_replayed(config)
    if replayed and not {"data", "module"}.isdisjoint(config.workload.keys()):
        raise ConfigError(
            "a workload is trained (workload.data and workload.module) or replayed (workload.table), "
            "but this one has both: leave out the one or the other"
        )
    schema.workload = OmegaConf.structured(ReplayedSettings if replayed else TrainedSettings)
    return schema


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


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


def budget_of(config: DictConfig) -> Budget:
    """Return the budget that a config states.

    Raises:
        ConfigError: for an impossible one.
    """
    return Budget(config.budget.steps, config.budget.examples)
