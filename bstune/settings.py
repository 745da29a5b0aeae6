"""The types of the options in ``conf/``: no defaults here, the YAML owns them.

Merging a composed config into this schema finds values of the wrong type and keys that nobody reads. Nodes that Hydra
instantiates (``Any``) take whatever their target takes.
"""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException, ValidationError

from bstune.errors import ConfigError
from bstune.replaying import complete


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
    least_steps: int
    most_steps: int
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
        assert isinstance(checked, DictConfig)  # noqa: S101  # a mapping merged into a mapping
        if is_replayed(checked):
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
