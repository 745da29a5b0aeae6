"""Every option: its type, its bounds, its cross-checks. The defaults are in ``conf/``, none is here.

A config is composed by Hydra and stays an OmegaConf ``DictConfig``, whose references resolve when they are read;
:func:`validate` checks its resolved values against the pydantic tree below and lists all mistakes at once.
"""

import argparse
import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra.errors import HydraException, InstantiationException, MissingConfigException
from hydra.utils import instantiate as hydra_instantiate
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError
from yaml import YAMLError

from bstune.core.errors import BstuneError, ConfigError
from bstune.core.records import Budget, CompileMode, Objective, Target
from bstune.core.search_space import BUDGET, MODULE, Tunable

CONFIG_MODULE, CONFIG_NAME, HYDRA_VERSION = "bstune.conf", "config", "1.3"
MAX_OCTAVES = 100  # 2^octaves stays a number with room to spare
RENAMED = {
    "search.confirmations": "search.replicates",
    "search.finalists": "search.candidates",
    "protocol.near": "protocol.close_to_target",
    "scaling.sigma": "scaling.lr_octaves_sigma",
    "scaling.octaves": "scaling.lr_octaves",
    "scaling.level_sigma": "prior.level_sigma",
    "scaling.exponent_sigma": "prior.exponent_sigma",
    "hardware.step_time.least_steps": "hardware.step_time.min_steps",
    "hardware.step_time.most_steps": "hardware.step_time.max_steps",
    "sampler.policy.first": "sampler.policy.initial_fraction",
    "sampler.policy.share": "sampler.policy.max_growth",
    "sampler.policy.look_share": "sampler.policy.max_first_growth",
    "sampler.policy.look": "sampler.policy.probe_fraction",
    "sampler.policy.half": "sampler.policy.max_predicted_fraction",
    "sampler.policy.margin": "sampler.policy.stop_factor",
    "sampler.policy.saving": "sampler.policy.cost_weight",
    "sampler.policy.strays": "sampler.policy.random_fraction",
}


def _no_bool(value: object) -> object:
    if isinstance(value, bool):  # pydantic takes true for 1
        raise PydanticCustomError("number_type", "Input should be a number")
    return value


def _known_device(value: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
        raise PydanticCustomError("device", "Input should be auto, cpu, cuda or cuda:N")
    return value


Whole = Annotated[int, BeforeValidator(_no_bool)]
Count = Annotated[Whole, Field(ge=0)]
Positive = Annotated[Whole, Field(ge=1)]
Number = Annotated[float, BeforeValidator(_no_bool), Field(allow_inf_nan=False)]
PositiveNumber = Annotated[Number, Field(gt=0)]
Limit = Annotated[float, BeforeValidator(_no_bool), Field(gt=0)]  # .inf: no limit
OverOne = Annotated[Number, Field(gt=1)]
Share = Annotated[Number, Field(ge=0, le=1)]
PositiveShare = Annotated[Number, Field(gt=0, le=1)]
Precision = Literal["auto", "32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true"]
Node = dict[str, Any]  # instantiated by Hydra: takes what its target takes


class Section(BaseModel):
    """A group of options."""

    model_config = ConfigDict(extra="forbid", coerce_numbers_to_str=True)


class TargetOptions(Section):
    """A goal for a validation metric; ``bounds`` are the values that the metric can take."""

    metric: Annotated[str, Field(min_length=1)]
    value: Number
    mode: Literal["min", "max"]
    bounds: list[float] | None = None

    @model_validator(mode="after")
    def _check(self) -> "TargetOptions":
        if self.bounds is None:
            return self
        if len(self.bounds) != 2 or not self.bounds[0] < self.bounds[1]:
            raise ValueError(f"bounds must be two increasing numbers, but got {self.bounds}")
        target = Target(self.metric, self.value, self.mode)
        best, worst = self.bounds if self.mode == "min" else self.bounds[::-1]
        if target.gap(best) > 0:
            raise ValueError(f"the target {target} cannot be reached: {self.metric} lies in {self.bounds}")
        if target.gap(worst) <= 0:
            raise ValueError(f"the target {target} is met by every value in {self.bounds}: check mode and value")
        return self


class BudgetOptions(Section):
    """A trial ends once both are spent."""

    steps: Positive
    examples: Positive


class ReferenceOptions(Section):
    """A batch size and a learning rate that go together."""

    batch_size: PositiveNumber
    lr: PositiveNumber


class RangeOptions(Section):
    """Smallest and largest batch size."""

    low: Positive
    high: Positive

    @model_validator(mode="after")
    def _check(self) -> "RangeOptions":
        if self.low > self.high:
            raise ValueError(f"low must be at most high, but got low={self.low} and high={self.high}")
        return self


class TunableOptions(Section):
    """A number of the config that ``search.tune`` may name: its key, its range and its scale."""

    key: str
    low: Number
    high: Number
    log: bool = False
    integer: bool = False

    @model_validator(mode="after")
    def _check(self) -> "TunableOptions":
        ends = f"low={self.low:g} and high={self.high:g}"
        if not self.key.startswith((MODULE, BUDGET)):
            raise ValueError(
                "key must lie below workload.module or budget, which are made anew for each trial, but got "
                f"{self.key!r}"
            )
        if not self.low < self.high:
            raise ValueError(f"low must be less than high, but got {ends}")
        if self.log and not self.low > 0:
            raise ValueError(f"low must be over 0 on a log scale, but got {ends}")
        if self.integer and not (self.low.is_integer() and self.high.is_integer()):
            raise ValueError(f"low and high of a whole number must be whole, but got {ends}")
        return self


class WorkloadOptions(Section):
    """One file of ``conf/workload/``; ``tunable`` lists by name what may be searched besides."""

    name: str
    precision: Precision
    trials: Positive
    reference: ReferenceOptions
    batch_size: RangeOptions
    budget: BudgetOptions
    target: TargetOptions
    tunable: dict[str, TunableOptions] = {}

    @field_validator("tunable")
    @classmethod
    def _check_names(cls, tunable: dict[str, TunableOptions]) -> dict[str, TunableOptions]:
        taken = {"batch_size", "lr", "delta"} & tunable.keys()
        if taken:
            raise ValueError(f"a study has a {min(taken)} already: choose another name")
        return tunable


class TrainedWorkload(WorkloadOptions):
    """A workload that is trained."""

    data: Node
    module: Node


class ReplayedWorkload(WorkloadOptions):
    """A workload that is answered from a table of recorded runs."""

    table: str


class SearchRange(RangeOptions):
    """The batch sizes of a search."""

    multiple: Positive | None


class SearchOptions(Section):
    """What a study searches, and for how long."""

    objective: Objective
    trials: Positive
    seconds: Limit | None
    wall_seconds: Limit | None
    precision: Annotated[float, Field(gt=1)] | None
    replicates: Count
    candidates: Positive
    tune: list[str]
    workers: Positive
    stratified: Share
    batch_size: SearchRange


class ScalingOptions(Section):
    """The scaling rule and the range around it."""

    batch_size: PositiveNumber
    lr: PositiveNumber
    noise_scale: PositiveNumber | None
    lr_octaves_sigma: PositiveNumber
    lr_octaves: Annotated[Number, Field(gt=0, le=MAX_OCTAVES)]
    rule: Node


class PriorOptions(Section):
    """What bstune's posterior expects of the best learning rate before any trial."""

    level_sigma: PositiveNumber
    exponent_sigma: PositiveNumber


class ProtocolOptions(Section):
    """What stays fixed in every trial."""

    evaluation_ratio: OverOne
    evaluation_share: PositiveShare
    evaluation_cost: PositiveNumber
    close_to_target: OverOne
    micro_batch_size: Positive | None
    warmup_steps: Count
    divergence: Limit
    noise_scale_every: Positive | None


class TrialOptions(Section):
    """One trial's own values; what a workload's ``${trial.lr}`` refers to."""

    batch_size: Positive | None
    lr: PositiveNumber | None
    seed: Count
    total_steps: Whole | None

    @model_validator(mode="after")
    def _check(self) -> "TrialOptions":
        if (self.batch_size is None) != (self.lr is None):
            raise ValueError(
                "to train one trial, give both trial.batch_size and trial.lr, but got "
                f"batch_size={_text(self.batch_size)} and lr={_text(self.lr)}"
            )
        return self


class DataOptions(Section):
    """Where data sets are kept."""

    root: str


class MemoryOptions(Section):
    """How the memory ceiling is searched."""

    limit: Positive | None
    free_share: PositiveShare
    relative: dict[str, Annotated[Number, Field(ge=0, lt=1)]]
    steps: Positive
    verify: Count
    probe_seconds: PositiveNumber

    @field_validator("relative")
    @classmethod
    def _check(cls, relative: dict[str, float]) -> dict[str, float]:
        if not {"cpu", "cuda"} <= relative.keys():
            raise ValueError(f"it must have a share for cpu and for cuda, but got {relative}")
        return relative


class StepTimeOptions(Section):
    """How steps are timed over batch size."""

    rungs: Annotated[Whole, Field(ge=2)]
    repeats: Positive
    visit_seconds: PositiveNumber
    min_steps: Positive
    max_steps: Positive
    warmup_steps: Count


class CeilingsOptions(Section):
    """How the device's own ceilings are measured."""

    seconds: PositiveNumber
    matrix_sizes: list[Positive]
    copy_bytes: list[Positive]
    traced_batch_sizes: list[Positive]


class AllReduceOptions(Section):
    """What an all-reduce of the gradients takes."""

    bytes_per_second: PositiveNumber | None
    latency: Annotated[Number, Field(ge=0)]
    seconds: dict[Positive, PositiveNumber] | None
    overlap: Annotated[float, Field(ge=1)]

    @model_validator(mode="after")
    def _check(self) -> "AllReduceOptions":
        if self.bytes_per_second is not None and self.seconds is not None:
            raise ValueError("give bytes_per_second or seconds, not both")
        if self.seconds is not None and max(self.seconds, default=0) < 2:
            raise ValueError(f"seconds must be given for 2 devices or more, but got {self.seconds}")
        return self


class ScaleOutOptions(Section):
    """The plan for several devices."""

    devices: Annotated[list[Positive], Field(min_length=1)]
    candidate_ratio: OverOne
    all_reduce: AllReduceOptions


class HardwareOptions(Section):
    """The survey of the hardware."""

    enabled: bool
    seconds: PositiveNumber
    refresh: bool
    cache: str
    memory: MemoryOptions
    step_time: StepTimeOptions
    ceilings: CeilingsOptions
    scale_out: ScaleOutOptions


class MlflowOptions(Section):
    """Tracking."""

    enabled: bool
    experiment: str
    uri: str | None
    seconds: Annotated[float, Field(ge=0)]
    study_seconds: Annotated[float, Field(ge=0)]
    request_seconds: Positive
    retries: Count


class Options(Section):
    """All options."""

    study: str
    seed: Count
    output: str
    storage: str
    device: Annotated[str, AfterValidator(_known_device)]
    precision: Precision
    compile: CompileMode | None
    debug: bool
    workload: TrainedWorkload | ReplayedWorkload
    budget: BudgetOptions
    scaling: ScalingOptions
    prior: PriorOptions
    protocol: ProtocolOptions
    trial: TrialOptions
    data: DataOptions
    trainer: Node
    hardware: HardwareOptions
    mlflow: MlflowOptions
    sampler: Node
    search: SearchOptions  # last: its check reads others

    @field_validator("search")
    @classmethod
    def _check_search(cls, search: SearchOptions, info: ValidationInfo) -> SearchOptions:
        """Check what ``search.tune`` and ``search.workers`` need of other options, where those are valid."""
        workload, trial, hardware = (info.data.get(name) for name in ("workload", "trial", "hardware"))
        if workload is not None:
            _check_tune(search.tune, workload, info.context)
        if search.workers == 1 or None in (workload, trial, hardware) or trial.batch_size is not None:
            return search
        if isinstance(workload, ReplayedWorkload):
            raise ValueError(
                f"search.workers={search.workers}: workload {workload.name} is answered from recorded runs, so there "
                "is nothing to train side by side; use search.workers=1"
            )
        if not hardware.enabled:
            raise ValueError(
                f"search.workers={search.workers} needs hardware.enabled=true: trials slow each other down, so their "
                "seconds per step are those that the survey timed alone; use that or search.workers=1"
            )
        return search


def _check_tune(names: list[str], workload: WorkloadOptions, config: DictConfig) -> None:
    for name in names:
        if name not in workload.tunable:
            listed = ", ".join(workload.tunable) or "nothing"
            raise ValueError(
                f"search.tune names {name!r}, but the workload {workload.name} lists {listed} under workload.tunable"
            )
        if names.count(name) > 1:
            raise ValueError(f"search.tune names {name!r} twice")
        key = workload.tunable[name].key
        value = OmegaConf.select(config, key, default="nothing")
        if value is not None and (not isinstance(value, int | float) or isinstance(value, bool)):
            raise ValueError(
                f"workload.tunable.{name}.key={key} must name a number of the config (or null, where it is off), but "
                f"got {value} there"
            )


class _TrainedOptions(Options):
    workload: TrainedWorkload


class _ReplayedOptions(Options):
    device: str
    workload: ReplayedWorkload


def is_replayed(config: DictConfig) -> bool:
    """Return whether the workload is answered from a table (which may still be missing), rather than trained."""
    workload = config.get("workload")
    return isinstance(workload, DictConfig) and "table" in set(workload.keys())


Complete = Callable[[DictConfig], DictConfig]  # fills in what a replayed workload takes from its table


def compose(arguments: Sequence[str], complete: Complete | None = None) -> DictConfig:
    """Return the config of a command line, composed and validated, or raise a ConfigError with all its mistakes."""
    parsed = parse(arguments)
    overrides = without_plus(parsed.overrides)
    if parsed.config_dir:
        if not Path(parsed.config_dir).is_dir():
            raise ConfigError(f"--config-dir {parsed.config_dir} is not a folder")
        overrides.append(f"hydra.searchpath=[file://{Path(parsed.config_dir).absolute()}]")
    config, mistakes = compose_overrides(CONFIG_MODULE, parsed.config_name, overrides)
    return validate(config, complete, mistakes)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the ``config_dir``, ``config_name`` and ``overrides`` of a command line."""
    parser = argparse.ArgumentParser(prog="bstune", add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--config-name", "-cn", default=CONFIG_NAME)
    parser.add_argument("overrides", nargs="*", metavar="OPTION=VALUE")
    return parser.parse_intermixed_args(list(arguments))


def without_plus(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with ``workload=NAME`` for ``+workload=NAME``."""
    return [re.sub(r"^\++workload=", "workload=", argument) for argument in arguments]


def compose_overrides(module: str, name: str, overrides: Sequence[str]) -> tuple[DictConfig, list[str]]:
    """Return a config composed of the overrides that Hydra knows, and a line for each that it does not know."""
    left, mistakes = list(overrides), list[str]()
    with initialize_config_module(module, version_base=HYDRA_VERSION):
        while True:
            try:
                return hydra_compose(name, left), mistakes
            except MissingConfigException as error:
                raise ConfigError(plain_error(error)) from error
            except (HydraException, OmegaConfBaseException) as error:
                unknown = re.match(r"Could not override '([^']+)'", str(error))
                rest = [one for one in left if unknown is None or one.split("=")[0].lstrip("+~") != unknown[1]]
                if unknown is None or rest == left:
                    raise ConfigError(plain_error(error)) from error
                mistakes.append(_unknown(unknown[1]))
                left = rest
            except YAMLError as error:
                raise ConfigError(f"a config file is not YAML: {' '.join(str(error).split())}") from error


def plain_error(error: Exception) -> str:
    """Return Hydra's message without its search path, its workloads on one line."""
    message = str(error) or str(error.__cause__)
    lines = [line.strip() for line in message.split("Config search path")[0].splitlines() if line.strip()]
    workload = re.search(r"You must specify 'workload'|Could not find 'workload/(.*)'", lines[0])
    if not workload:
        return "\n".join(lines)
    problem = "no workload was given" if workload[1] is None else f"there is no workload {workload[1]!r}"
    return f"{problem}\nworkloads: {', '.join(lines[2:])}\nrun one with: python -m bstune +workload=NAME"


def validate(config: DictConfig, complete: Complete | None = None, mistakes: Sequence[str] = ()) -> DictConfig:
    """Return a copy of the config with every value checked and of its type; references stay references.

    A chosen schedule takes the place of the workload's own; ``complete`` fills in what a replayed workload leaves open.
    ConfigError lists all mistakes, a line each; ``mistakes`` are those that were found before.
    """
    config, found = _with_schedule(config.copy()), list(mistakes)
    options, more = _parse(config)
    if is_replayed(config) and complete is not None:
        _refuse([*found, *(line for line in more if " is missing: " not in line)])
        config = complete(config)
        options, more = _parse(config)
    _refuse([*found, *more])
    assert options is not None  # as there are no mistakes
    with open_dict(config):
        _write_types(config, options)
    return config


def _refuse(mistakes: Sequence[str]) -> None:
    if mistakes:
        raise ConfigError("\n".join(dict.fromkeys(mistakes)))


def _parse(config: DictConfig) -> tuple[Options | None, list[str]]:
    """Return the options of a config, None if there are mistakes, and a line for each mistake."""
    mistakes: dict[str, str] = {}
    values = _resolve(config, "", mistakes)
    options = None
    try:
        options = (_ReplayedOptions if is_replayed(config) else _TrainedOptions).model_validate(values, context=config)
    except ValidationError as error:
        for one in error.errors():
            name = ".".join(str(part) for part in one["loc"])
            mistakes.setdefault(name, _line(name, one))
    raw = flatten(OmegaConf.to_container(config))
    copies = {name for name in mistakes if str(raw.get(name))[2:-1] in mistakes} if mistakes else set()
    return options, [line for name, line in mistakes.items() if name not in copies]


def _resolve(node: Any, name: str, mistakes: dict[str, str]) -> Any:
    """Return a config node as plain values, with a line in ``mistakes`` for each that is missing or cannot be read."""
    if not isinstance(node, DictConfig | ListConfig):
        return node
    values = {}
    for key in node.keys() if isinstance(node, DictConfig) else range(len(node)):
        option = f"{name}{key}"
        try:
            if OmegaConf.is_missing(node, key):
                mistakes[option] = _missing(option)
            else:
                values[key] = _resolve(node[key], f"{option}.", mistakes)
        except InterpolationToMissingValueError:
            mistakes[option] = _missing(option)
        except OmegaConfBaseException as error:
            mistakes[option] = f"{option}: {str(error).splitlines()[0]}"
    return values if isinstance(node, DictConfig) else list(values.values())


def _line(name: str, error: Any) -> str:
    """Return one of pydantic's errors as a line: the option, what is allowed and what was received."""
    message = re.sub(r", (unable|got) .*", "", error["msg"]).replace("Input should be", "must be")
    message = message.replace("greater than or equal to", "at least").replace("less than or equal to", "at most")
    match error["type"]:
        case "missing":
            return _missing(name)
        case "extra_forbidden":
            return _unknown(name)
        case "value_error":
            message = message.removeprefix("Value error, ")
            return message if message.startswith(f"{name}.") else f"{name}: {message}"
    return f"{name} {message}{_or_null(name)}, but got {_text(error['input'])}"


def _missing(name: str) -> str:
    return f"{name} is missing: give it a value, {name}=..."


def _text(value: object) -> str:
    return "null" if value is None else repr(value)


def _or_null(name: str) -> str:
    return " (or null)" if type(None) in get_args(option_types().get(name)) else ""


def _unknown(name: str) -> str:
    """Return the line for an option that there is not: its new name, or the nearest that there is."""
    if name in RENAMED:
        return f"unknown option {name}: it is called {RENAMED[name]} now"
    if name in ("workload.data", "workload.module"):
        return (
            f"{name}: a workload is trained (workload.data and workload.module) or replayed (workload.table), not both"
        )
    near = difflib.get_close_matches(name, option_types(), n=1)
    return f"unknown option {name}{f': did you mean {near[0]}?' if near else ''}; --help lists the options"


def option_types(section: type[BaseModel] = _TrainedOptions, prefix: str = "") -> dict[str, Any]:
    """Return the type of every option by its dotted name, in the order of the tree."""
    types: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            types.update(option_types(kind, f"{prefix}{name}."))
        else:
            types[f"{prefix}{name}"] = kind
    return types


def _write_types(node: DictConfig, section: BaseModel) -> None:
    """Write the values of a validated section into its node, but for references: an int becomes a float, say."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            _write_types(node[name], value)
        elif name == "tunable":
            node.setdefault(name, {})
            for key, tunable in value.items():
                _write_types(node[name][key], tunable)
        elif type(section).model_fields[name].annotation != Node and not OmegaConf.is_interpolation(node, name):
            node[name] = value


def _with_schedule(config: DictConfig) -> DictConfig:
    """Put the chosen schedule into the workload's module, where all that reads it finds it.

    Hydra would merge a schedule with the workload's own, the arguments of both.
    """
    if config.get("schedule") is None:
        with open_dict(config):
            config.pop("schedule", None)
        return config
    if is_replayed(config):
        raise ConfigError("a replayed workload is not trained, so it has no schedule: leave out schedule=...")
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


def instantiate(node: DictConfig, what: str) -> Any:
    """Instantiate a config node; ConfigError is raised if the target cannot be found or does not take its arguments."""
    try:
        return hydra_instantiate(node, _convert_="all")
    except InstantiationException as error:
        if isinstance(error.__cause__, BstuneError):
            raise error.__cause__ from error
        raise ConfigError(f"{what} cannot be built: {' '.join(str(error).split())}") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{what} cannot be built: {str(error).splitlines()[0]}") from error


def to_dict(config: DictConfig) -> dict[str, Any]:
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
    """Return what ``search.tune`` names, in its order."""
    return tuple(Tunable(name, **to_dict(config.workload.tunable[name])) for name in config.search.tune)


def with_hyperparameters(config: DictConfig, values: Mapping[str, float]) -> DictConfig:
    """Return a copy of the config in which each value, by its tunable's name, stands at the tunable's key."""
    config = config.copy()
    for name, value in values.items():
        OmegaConf.update(config, config.workload.tunable[name].key, value)
    return config


def overrides(config: DictConfig, values: Mapping[str, float]) -> list[str]:
    """Return the arguments of the command line that give tunables their values."""
    return [f"{config.workload.tunable[name].key}={value!r}" for name, value in values.items()]


def budget_of(config: DictConfig) -> Budget:
    """Return the budget that a config states."""
    return Budget(config.budget.steps, config.budget.examples)


check_settings, plain, build, with_settings = (
    validate,
    to_dict,
    instantiate,
    with_hyperparameters,
)  # until all have moved
