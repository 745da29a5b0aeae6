"""Every option: its type, its bounds, its cross-checks. The defaults are in ``conf/``, none is here.

A config is composed by Hydra and stays an OmegaConf ``DictConfig``, whose references resolve when they are read;
:func:`validate` checks its resolved values against the pydantic tree below and lists all mistakes at once.
"""

import argparse
import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra.errors import HydraException, InstantiationException
from hydra.utils import instantiate as hydra_instantiate
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import InterpolationToMissingValueError, MissingMandatoryValue, OmegaConfBaseException
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model
from pydantic_core import PydanticCustomError
from yaml import YAMLError, safe_load

from bstune.core.errors import BstuneError, ConfigError
from bstune.core.records import Budget, CompileMode, Objective, Target
from bstune.core.search_space import BUDGET, MODULE
from bstune.core.secrets import remember

CONFIG_MODULE, CONFIG_NAME, HYDRA_VERSION = "bstune.conf", "config", "1.3"


def _not_bool(value: object) -> object:
    if isinstance(value, bool):  # pydantic takes true for 1
        raise PydanticCustomError("number_type", "Input should be a number")
    return value


_NUMBER = BeforeValidator(_not_bool)
Whole = Annotated[int, _NUMBER]
Count = Annotated[int, Field(ge=0), _NUMBER]
Positive = Annotated[int, Field(ge=1), _NUMBER]
Number = Annotated[float, _NUMBER]  # inf is one, and switches a limit off
Limit = Annotated[float, Field(gt=0), _NUMBER]
Finite = Annotated[float, Field(allow_inf_nan=False), _NUMBER]
PositiveFinite = Annotated[float, Field(gt=0, allow_inf_nan=False), _NUMBER]
OverOne = Annotated[float, Field(gt=1, allow_inf_nan=False), _NUMBER]
Share = Annotated[float, Field(ge=0, le=1), _NUMBER]
PositiveShare = Annotated[float, Field(gt=0, le=1), _NUMBER]
BelowOne = Annotated[float, Field(ge=0, lt=1), _NUMBER]
AtLeastZero = Annotated[float, Field(ge=0), _NUMBER]
Precision = Literal["auto", "32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true"]
Text = Annotated[str, Field(min_length=1)]
Node = dict[str, Any]  # instantiated by Hydra: takes what its target takes


class Section(BaseModel):
    """A group of options; unknown ones are mistakes."""

    model_config = ConfigDict(extra="forbid", coerce_numbers_to_str=True)


def _section(base: Any = Section, **types: Any) -> Any:
    """Return the model of a group: the type of each option, with a default where the YAML may leave it out."""
    fields = {name: kind if isinstance(kind, tuple) else (kind, ...) for name, kind in types.items()}
    return create_model("Options", __base__=base, **fields)  # type: ignore[call-overload]


def _checked(section: Any, check: Callable[..., list[tuple[Any, str]]]) -> Any:
    """Return a section with a check of its valid options together: conditions that must not hold, and what to say."""

    def run(options: Any) -> Any:
        for wrong, line in check(options):
            if wrong:
                raise ValueError(line)
        return options

    return Annotated[section, AfterValidator(run)]


def _check_range(options: Any) -> list[tuple[Any, str]]:
    ends = f"low={options.low:g} and high={options.high:g}"
    return [(options.low > options.high, f"low must be at most high, but got {ends}")]


def _check_target(options: Any) -> list[tuple[Any, str]]:
    bounds, target = options.bounds, Target(options.metric, options.value, options.mode)
    if bounds is None:
        return []
    if len(bounds) != 2 or not bounds[0] < bounds[1]:
        return [(True, f"bounds must be two increasing numbers, but got {bounds}")]
    best, worst = bounds if options.mode == "min" else bounds[::-1]
    return [
        (target.gap(best) > 0, f"the target {target} cannot be reached: {target.metric} lies in {bounds}"),
        (target.gap(worst) <= 0, f"the target {target} is met by every value in {bounds}: check mode and value"),
    ]


def _check_tunable(options: Any) -> list[tuple[Any, str]]:
    whole = options.low.is_integer() and options.high.is_integer()
    ends = f"low={options.low:g} and high={options.high:g}"
    below = options.key.startswith((MODULE, BUDGET))  # these are made anew for each trial
    return [
        (not below, f"key must lie below workload.module or budget, but got {options.key!r}"),
        (not options.low < options.high, f"low must be less than high, but got {ends}"),
        (options.log and not options.low > 0, f"low must be over 0 on a log scale, but got {ends}"),
        (options.integer and not whole, f"low and high of a whole number must be whole, but got {ends}"),
    ]


def _check_names(tunable: Any) -> list[tuple[Any, str]]:
    taken = sorted({"batch_size", "lr", "delta"} & tunable.keys())
    return [(taken, f"a study has {', '.join(taken)} already: choose another name")]


def _check_trial(options: Any) -> list[tuple[Any, str]]:
    pair = f"batch_size={_text(options.batch_size)} and lr={_text(options.lr)}"
    one = (options.batch_size is None) != (options.lr is None)
    return [(one, f"to train one trial, give both trial.batch_size and trial.lr, but got {pair}")]


def _check_all_reduce(options: Any) -> list[tuple[Any, str]]:
    link, seconds = options.bytes_per_second, options.seconds
    few = seconds is not None and max(seconds, default=0) < 2
    return [
        (seconds is not None and link is not None, "give bytes_per_second or seconds, not both"),
        (few, f"seconds must be given for 2 devices or more, but got {seconds}"),
    ]


def _check_search(search: Any, info: Any) -> Any:
    """Check what ``search`` needs of other options, where those are valid."""
    workload, trial, hardware = (info.data.get(name) for name in ("workload", "trial", "hardware"))
    for name in search.tune if workload else ():
        named = f"search.tune names {name!r}"
        if name not in workload.tunable:
            listed = ", ".join(workload.tunable) or "nothing"
            raise ValueError(f"{named}, but the workload {workload.name} lists {listed} under workload.tunable")
        if search.tune.count(name) > 1:
            raise ValueError(f"{named} twice")
        key = workload.tunable[name].key
        value = OmegaConf.select(info.context, key, default="nothing")
        if type(value) not in (int, float, type(None)):  # null: it is off
            key = f"workload.tunable.{name}.key={key}"
            raise ValueError(f"{key} must name a number of the config, or null, but got {value} there")
    if search.workers > 1 and workload and hardware and trial and trial.batch_size is None:
        reason = None
        if hasattr(workload, "table"):
            reason = f"workload {workload.name} is answered from recorded runs, which need no training"
        elif not hardware.enabled:  # trials slow each other down
            reason = "seconds per step are the survey's, measured alone: it needs hardware.enabled=true"
        if reason:
            raise ValueError(f"search.workers={search.workers}: {reason}; or use search.workers=1")
    return search


_Budget = _section(steps=Positive, examples=Positive)
_Target = _section(metric=Text, value=Finite, mode=Literal["min", "max"], bounds=(list[Number] | None, None))
_Tunable = _section(key=str, low=Finite, high=Finite, log=(bool, False), integer=(bool, False))
_Tunables: Any = dict[str, _checked(_Tunable, _check_tunable)]  # type: ignore[misc]
_Range = _section(low=Positive, high=Positive)
_Workload = _section(
    name=Text,
    precision=Precision,
    trials=Positive,
    reference=_section(batch_size=PositiveFinite, lr=PositiveFinite),
    batch_size=_checked(_Range, _check_range),
    budget=_Budget,
    target=_checked(_Target, _check_target),
    tunable=(_checked(_Tunables, _check_names), {}),
)
_Search = _section(
    objective=Objective,
    trials=Positive,
    seconds=Limit | None,
    wall_seconds=Limit | None,
    precision=Annotated[float, Field(gt=1), _NUMBER] | None,
    replicates=Count,
    candidates=Positive,
    tune=list[str],
    workers=Count,
    lease_seconds=PositiveFinite,
    stratified=Share,
    batch_size=_checked(_section(_Range, multiple=Positive | None), _check_range),
)
_Trial = _section(batch_size=Positive | None, lr=PositiveFinite | None, seed=Count, total_steps=Whole | None)
_Protocol = _section(
    evaluation_ratio=OverOne,
    evaluation_share=PositiveShare,
    evaluation_cost=PositiveFinite,
    close_to_target=OverOne,
    micro_batch_size=Positive | None,
    warmup_steps=Count,
    trial_seconds=PositiveFinite | None,
    divergence=Limit,
    noise_scale_every=Positive | None,
)
_Memory = _section(
    limit=Positive | None,
    free_share=PositiveShare,
    relative=_section(cpu=BelowOne, cuda=BelowOne),
    steps=Positive,
    verify=Count,
    probe_seconds=PositiveFinite,
)
_StepTime = _section(
    rungs=Annotated[int, Field(ge=2), _NUMBER],
    repeats=Positive,
    visit_seconds=PositiveFinite,
    min_steps=Positive,
    max_steps=Positive,
    warmup_steps=Count,
)
_Ceilings = _section(
    seconds=PositiveFinite, matrix_sizes=list[Positive], copy_bytes=list[Positive], traced_batch_sizes=list[Positive]
)
_AllReduce = _section(
    bytes_per_second=PositiveFinite | None,
    latency=Annotated[float, Field(ge=0, allow_inf_nan=False), _NUMBER],
    seconds=dict[Positive, PositiveFinite] | None,
    overlap=Annotated[float, Field(ge=1), _NUMBER],
)
_ScaleOut = _section(
    devices=Annotated[list[Positive], Field(min_length=1)],
    candidate_ratio=OverOne,
    all_reduce=_checked(_AllReduce, _check_all_reduce),
)
_OPTIONS: dict[str, Any] = {
    "study": Text,
    "seed": Count,
    "output": Text,
    "storage": Text,
    "device": Text,
    "precision": Precision,
    "compile": CompileMode | None,
    "debug": bool,
    "workload": _section(_Workload, data=Node, module=Node),
    "budget": _Budget,
    "scaling": _section(
        batch_size=PositiveFinite,
        lr=PositiveFinite,
        noise_scale=PositiveFinite | None,
        lr_octaves_sigma=PositiveFinite,
        lr_octaves=Annotated[float, Field(gt=0, le=100), _NUMBER],  # 2^100 is a number with room to spare
        rule=Node,
    ),
    "prior": _section(level_sigma=PositiveFinite, exponent_sigma=PositiveFinite),
    "protocol": _Protocol,
    "trial": _checked(_Trial, _check_trial),
    "data": _section(root=Text),
    "trainer": Node,
    "hardware": _section(
        enabled=bool,
        seconds=PositiveFinite,
        refresh=bool,
        cache=Text,
        memory=_Memory,
        step_time=_StepTime,
        ceilings=_Ceilings,
        scale_out=_ScaleOut,
    ),
    "mlflow": _section(
        enabled=bool,
        experiment=Text,
        uri=str | None,
        seconds=AtLeastZero,
        study_seconds=AtLeastZero,
        request_seconds=Positive,
        retries=Count,
    ),
    "sampler": Node,
    "search": Annotated[_Search, AfterValidator(_check_search)],  # after what its check reads
}
TrainedOptions: type[Section] = _section(**_OPTIONS)
ReplayedOptions: type[Section] = _section(**{**_OPTIONS, "workload": _section(_Workload, table=Text)})
Complete = Callable[[DictConfig], DictConfig]  # fills in what a replayed workload takes from its table


def is_replayed(config: DictConfig) -> bool:
    """Return whether the workload is answered from a table (which may still be missing), rather than trained."""
    workload = config.get("workload")
    return isinstance(workload, DictConfig) and "table" in set(workload.keys())


def compose(arguments: Sequence[str], complete: Complete | None = None) -> DictConfig:
    """Return the config of a command line, composed and validated, or raise a ConfigError with all its mistakes."""
    parsed = parse(arguments)
    options = without_plus(parsed.overrides)
    if parsed.config_dir:
        if not Path(parsed.config_dir).is_dir():
            raise ConfigError(f"--config-dir {parsed.config_dir} is not a folder")
        options.append(f"hydra.searchpath=[file://{Path(parsed.config_dir).absolute()}]")
    return validate(*compose_known(CONFIG_MODULE, parsed.config_name, options), complete)


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


def compose_known(module: str, name: str, options: Sequence[str]) -> tuple[DictConfig, list[str]]:
    """Return a config composed of the options that Hydra knows, and the names of those that it does not know."""
    unknown: list[str] = []
    with initialize_config_module(module, version_base=HYDRA_VERSION):
        while True:
            known = [option for option in options if option.split("=")[0].lstrip("+~") not in unknown]
            try:
                return hydra_compose(name, known), unknown
            except (HydraException, OmegaConfBaseException) as error:
                refused = re.match(r"Could not override '([^']+)'", str(error))
                if refused is None or refused[1] in unknown:
                    raise ConfigError(plain_error(error)) from error
                unknown.append(refused[1])
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


def validate(config: DictConfig, unknown: Sequence[str] = (), complete: Complete | None = None) -> DictConfig:
    """Return a copy of the config with every value checked and of its type; references stay references.

    ConfigError lists all mistakes, a line each, with those options that were already found to be unknown.
    """
    config = _with_schedule(config.copy())
    if is_replayed(config) and complete is not None:
        _parse(config, unknown, incomplete=True)
        config = complete(config)
    with open_dict(config):
        _write_types(config, _parse(config, unknown))
    return config


def _parse(config: DictConfig, unknown: Sequence[str], incomplete: bool = False) -> Section | None:
    """Return the options of a config; ConfigError for all mistakes, without missing values if it is ``incomplete``."""
    names = flatten(OmegaConf.to_container(config))  # type: ignore[arg-type]  # of a mapping
    mistakes, options = {name: _unknown(name, names) for name in unknown}, None
    values = _resolve(config, "", mistakes)
    remember(values)
    try:
        options = (ReplayedOptions if is_replayed(config) else TrainedOptions).model_validate(values, context=config)
    except ValidationError as error:
        for one in error.errors():
            name = ".".join(str(part) for part in one["loc"])
            mistakes.setdefault(name, _unknown(name, names) if one["type"] == "extra_forbidden" else _line(name, one))
    lines = [line for name, line in mistakes.items() if str(names.get(name))[2:-1] not in mistakes]  # ${copied} option
    lines = [line for line in lines if not (incomplete and " is missing: " in line)]
    if lines:
        raise ConfigError("\n".join(lines))
    return options


def _resolve(node: Any, name: str, mistakes: dict[str, str]) -> Any:
    """Return a config node as plain values, with a line in ``mistakes`` for each that is missing or cannot be read."""
    if not isinstance(node, DictConfig | ListConfig):
        return node
    values: dict[Any, Any] = {}
    keys: Any = node.keys() if isinstance(node, DictConfig) else range(len(node))
    for key in keys:
        option = f"{name}{key!s}"
        try:
            values[key] = _resolve(node[key], f"{option}.", mistakes)
        except (MissingMandatoryValue, InterpolationToMissingValueError):
            mistakes[option] = _line(option, {"type": "missing"})
        except OmegaConfBaseException as error:
            mistakes[option] = f"{option}: {str(error).splitlines()[0]}"
    return values if isinstance(node, DictConfig) else list(values.values())


def _line(name: str, error: Mapping[str, Any]) -> str:
    """Return one of pydantic's errors as a line: the option, what is allowed and what was received."""
    if error["type"] == "missing":
        return f"{name} is missing: give it a value, {name}=..."
    message = re.sub(r", (unable|got) .*| after validation.*", "", error["msg"])
    message = re.sub(r"^(Input|List|String) should", "must", message)
    if error["type"] == "value_error":
        message = message.removeprefix("Value error, ")
        return message if message.startswith(f"{name}.") else f"{name}: {message}"
    message = message.replace("greater than or equal to", "at least").replace("less than or equal to", "at most")
    return f"{name} {message}, but got {_text(error['input'])}"


def _text(value: object) -> str:
    return "null" if value is None else repr(value)


def _unknown(name: str, names: Mapping[str, Any]) -> str:
    """Return the line for an option that there is not: its new name, or the nearest that there is."""
    renamed = safe_load(files(CONFIG_MODULE).joinpath("renamed.yaml").read_text(encoding="utf-8"))
    if name in renamed:
        return f"unknown option {name}: it is called {renamed[name]} now"
    if name in ("workload.data", "workload.module"):
        return f"{name}: a workload is trained (data and module) or replayed (table), but this one has both"
    near = difflib.get_close_matches(name, [one for one in names if not f"{one}.".startswith(f"{name}.")], n=1)
    return f"unknown option {name}{f': did you mean {near[0]}?' if near else ''}; --help lists the options"


def _write_types(node: DictConfig, section: Any) -> None:
    """Write a section's validated values into its node, but for references: an int becomes a float, say."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            _write_types(node[name], value)
        elif name == "tunable":
            node.setdefault(name, {})
            for key, tunable in value.items():
                _write_types(node[name][key], tunable)
        elif field.annotation != Node and not OmegaConf.is_interpolation(node, name):
            node[name] = value


def _with_schedule(config: DictConfig) -> DictConfig:
    """Put the chosen schedule into the workload's module; Hydra would merge it with the workload's own."""
    with open_dict(config):
        chosen = config.pop("schedule", None)
        if chosen is None:
            return config
        if is_replayed(config):
            raise ConfigError("a replayed workload is not trained, so it has no schedule: leave out schedule=...")
        if not isinstance(chosen, DictConfig) or set(chosen) != {"rate", "average"}:
            raise ConfigError(f"a schedule has the two keys rate and average, but got {chosen}")
        if OmegaConf.select(config, "workload.module") is not None:
            config.workload.module.update(schedule=chosen.rate, average=chosen.average)
    return config


def instantiate(node: DictConfig, what: str) -> Any:
    """Instantiate a config node; ConfigError is raised if the target cannot be found or does not take its arguments."""
    try:
        return hydra_instantiate(node, _convert_="all")
    except (InstantiationException, OmegaConfBaseException) as error:
        if isinstance(error.__cause__, BstuneError):
            raise error.__cause__ from error
        raise ConfigError(f"{what} cannot be built: {' '.join(str(error).split())}") from error


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
