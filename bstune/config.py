"""Every option: its type, its bounds, its cross-checks. The defaults are in ``conf/``, none is here.

A config is composed by Hydra and stays an OmegaConf ``DictConfig``, whose references resolve when they are read;
:func:`validate` checks its resolved values against the pydantic tree below and lists all mistakes at once.
"""

import argparse
import difflib
import re
import unicodedata
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Sweep
from hydra.errors import HydraException, InstantiationException
from hydra.utils import instantiate as hydra_instantiate
from hydra.version import VersionBase
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import InterpolationToMissingValueError, MissingMandatoryValue, OmegaConfBaseException
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model
from pydantic_core import PydanticCustomError
from yaml import YAMLError, safe_load

from bstune.core.errors import BstuneError, ConfigError
from bstune.core.files import expand_home
from bstune.core.records import Budget, CompileMode, Objective, Target
from bstune.core.search_space import BUDGET, MODULE
from bstune.core.secrets import remember

CONFIG_MODULE, CONFIG_NAME, HYDRA_VERSION = "bstune.conf", "config", "1.3"
CLASS_KEYS = {"class_path", "init_args", "dict_kwargs"}  # of what LightningCLI instantiates
GROUPS = ("workload", "scaling", "sampler", "schedule")


def _not_bool(value: object) -> object:
    if isinstance(value, bool):  # pydantic takes true for 1
        raise PydanticCustomError("number_type", "Input should be a number")
    return value


_NUMBER = BeforeValidator(_not_bool)


def _whole(low: int, high: int) -> Any:
    """Return the type of the integers from ``low`` to ``high``."""
    return Annotated[int, Field(ge=low, le=high), _NUMBER]


def _real(low: float, high: float) -> Any:
    """Return the type of the numbers from ``low`` to ``high``; infinity and NaN are not among them."""
    return Annotated[float, Field(ge=low, le=high, allow_inf_nan=False), _NUMBER]


# Every number has a range. Its ends are far from what one needs; beyond them arithmetic or memory ends.
Number = Annotated[float, _NUMBER]  # the one without: an end of a metric's range, which may be infinite
Count = _whole(0, 10**15)  # of examples or steps; a float holds every one
Positive = _whole(1, 10**15)
Few = _whole(0, 10**6)
PositiveFew = _whole(1, 10**6)
Bytes = _whole(1, 2**60)
Seed = _whole(0, 2**32 - 1)  # as numpy and Lightning take it
Finite = _real(-1e15, 1e15)
PositiveFinite = _real(1e-15, 1e15)
Seconds = _real(0.0, 1e9)
PositiveSeconds = _real(1e-6, 1e9)
Sigma = _real(0.01, 100.0)
OverOne = Annotated[float, Field(gt=1, le=1e6, allow_inf_nan=False), _NUMBER]
Share = _real(0.0, 1.0)
PositiveShare = _real(1e-6, 1.0)
BelowOne = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False), _NUMBER]
Precision = Literal["auto", "32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true"]


def _is_text(value: str) -> str:
    """Refuse what no file name, database or terminal takes."""
    if not value.strip():
        raise PydanticCustomError("text", "must not be empty")
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in value):  # NUL is one; undecodable bytes
        raise PydanticCustomError("text", "must not contain control characters")
    return value


def _is_name(value: str) -> str:
    """Refuse a name that, as a path below a folder, leaves it or is no path."""
    parts = value.split("/")
    if any(part.strip() in ("", ".", "..") or len(part.encode()) > 200 for part in parts):
        raise PydanticCustomError("text", "must be a name, or names with / between, of at most 200 bytes each")
    return value


def _is_one_name(value: str) -> str:
    if "/" in _is_name(value):
        raise PydanticCustomError("text", "must be a name without /")
    return value


def _is_uri(value: str) -> str:
    try:
        urlsplit(value).port  # noqa: B018  # raises for what is no address
    except ValueError as error:
        raise PydanticCustomError("text", "must be a URL: {reason}", {"reason": str(error)}) from error
    return value


Text = Annotated[str, Field(max_length=4000), AfterValidator(_is_text)]
Name = Annotated[str, Field(max_length=400), AfterValidator(_is_text), AfterValidator(_is_name)]
OneName = Annotated[str, Field(max_length=200), AfterValidator(_is_text), AfterValidator(_is_one_name)]
HomePath = Annotated[Text, AfterValidator(expand_home)]  # a path, or a SQLite URL, with ~ for the home directory
Uri = Annotated[str, Field(max_length=4000), AfterValidator(_is_uri), AfterValidator(expand_home)]  # empty: none
Node = dict[str, Any]  # instantiated by Hydra: takes what its target takes


class Section(BaseModel):
    """A group of options; unknown ones are mistakes."""

    model_config = ConfigDict(extra="forbid", coerce_numbers_to_str=True)


def _listed(kind: Any) -> Any:
    """Return the type of a list of some."""
    return Annotated[list[kind], Field(min_length=1, max_length=1000)]


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
    names = ("workload", "trial", "hardware", "protocol")
    workload, trial, hardware, protocol = (info.data.get(name) for name in names)
    if search.workers == 0 and protocol and protocol.trial_seconds is not None:
        raise ValueError(
            f"search.workers=0 runs trials in this process, which cannot end one after protocol.trial_seconds="
            f"{protocol.trial_seconds:g}: use search.workers=1, or protocol.trial_seconds=null"
        )
    for name in search.tune if workload else ():
        named = f"search.tune names {name!r}"
        if name not in workload.tunable:
            listed = ", ".join(workload.tunable) or "nothing"
            instead = "; the search chooses each trial's horizon without it" * (name == "horizon")
            raise ValueError(
                f"{named}, but the workload {workload.name} lists {listed} under workload.tunable{instead}"
            )
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


class _Open(Section):
    """Arguments of a node's target: those that are named here have a type."""

    model_config = ConfigDict(extra="allow")


_Sampler = _section(  # the numbers of conf/sampler/
    _Open,
    sigma=(Sigma | None, None),
    exponent_sigma=(Sigma | None, None),
    noise_scale=(PositiveFinite | None, None),
    n_startup_trials=(Few, 0),
    policy=(
        _section(
            _Open,
            particles=(_whole(10, 10_000), 10),
            moves=(_whole(1, 1000), 1),
            candidates=(_whole(10, 2000), 10),
            **dict.fromkeys(
                ("initial_fraction", "max_growth", "max_first_growth", "probe_fraction"), (_real(1e-6, 1e6), 1)
            ),
            max_predicted_fraction=(_real(1e-6, 1e6), 1),
            stop_factor=(OverOne, 2),
            cost_weight=(_real(0.0, 1e6), 0),
            random_fraction=(Share, 0),
            curve_after=(_real(0.0, 1e6), 0),
            curve_share=(Share, 0),
        ),
        None,
    ),
)


def _check_sampler(sampler: Node, info: Any) -> Node:
    """Check the numbers of a sampler that ships."""
    if not str(sampler.get("_target_")).startswith(("bstune.search.", "optuna.samplers.")):
        return sampler
    try:
        _Sampler.model_validate(sampler)
    except ValidationError as error:
        for one in error.errors():
            if not OmegaConf.is_interpolation(info.context.sampler, str(one["loc"][0])):  # checked where it stands
                raise ValueError(_line(".".join(["sampler", *map(str, one["loc"])]), one)) from error
    return sampler


_Budget = _section(steps=Positive, examples=Positive)
_Target = _section(metric=Text, value=Finite, mode=Literal["min", "max"], bounds=(list[Number] | None, None))
_Tunable = _section(key=Text, low=Finite, high=Finite, log=(bool, False), integer=(bool, False))
_Tunables: Any = dict[str, _checked(_Tunable, _check_tunable)]  # type: ignore[misc]
_Range = _section(low=Positive, high=Positive)
_Workload = _section(
    name=OneName,
    precision=Precision,
    trials=PositiveFew,
    reference=_section(batch_size=PositiveFinite, lr=PositiveFinite),
    batch_size=_checked(_Range, _check_range),
    budget=_Budget,
    target=_checked(_Target, _check_target),
    trainer=(Node, {}),
    tunable=(_checked(_Tunables, _check_names), {}),
)
_Search = _section(
    objective=Objective,
    trials=PositiveFew,
    seconds=PositiveSeconds | None,
    wall_seconds=PositiveSeconds | None,
    precision=OverOne | None,
    replicates=_whole(0, 1000),
    candidates=_whole(1, 1000),
    tune=list[Text],
    workers=_whole(0, 1000),
    lease_seconds=_real(0.1, 1e6),
    stratified=Share,
    batch_size=_checked(_section(_Range, multiple=Positive | None), _check_range),
)
_Trial = _section(batch_size=Positive | None, lr=PositiveFinite | None, seed=Seed, total_steps=Count | None)
_Protocol = _section(
    evaluation_ratio=OverOne,
    evaluation_share=PositiveShare,
    evaluation_cost=PositiveFinite,
    close_to_target=OverOne,
    micro_batch_size=Positive | None,
    warmup_steps=Count,
    trial_seconds=PositiveSeconds | None,
    divergence=PositiveFinite,
    noise_scale_every=Positive | None,
)
_Memory = _section(
    limit=Bytes | None,
    free_share=PositiveShare,
    relative=_section(cpu=BelowOne, cuda=BelowOne),
    steps=PositiveFew,
    verify=_whole(0, 1000),
    probe_seconds=PositiveSeconds,
)
_StepTime = _section(
    rungs=_whole(2, 1000),
    repeats=_whole(1, 1000),
    visit_seconds=PositiveSeconds,
    min_steps=PositiveFew,
    max_steps=PositiveFew,
    warmup_steps=Few,
)
_Ceilings = _section(
    seconds=PositiveSeconds,
    matrix_sizes=_listed(_whole(1, 2**15)),
    copy_bytes=_listed(_whole(1, 2**36)),
    traced_batch_sizes=_listed(PositiveFew),
)
_AllReduce = _section(
    bytes_per_second=PositiveFinite | None,
    latency=Seconds,
    seconds=dict[PositiveFew, PositiveSeconds] | None,  # type: ignore[valid-type]
    overlap=_real(1.0, 1e6),
)
_ScaleOut = _section(
    devices=_listed(PositiveFew),
    candidate_ratio=_real(1.001, 1e6),
    all_reduce=_checked(_AllReduce, _check_all_reduce),
)
_OPTIONS: dict[str, Any] = {
    "study": Name,
    "seed": Seed,
    "output": HomePath,
    "storage": HomePath,
    "device": Text,
    "devices": _whole(1, 1024),
    "precision": Precision,
    "compile": CompileMode | None,
    "debug": bool,
    "workload": _section(_Workload, data=Node, module=Node),
    "budget": _Budget,
    "scaling": _section(
        batch_size=PositiveFinite,
        lr=PositiveFinite,
        noise_scale=PositiveFinite | None,
        lr_octaves_sigma=_real(0.001, 30.0),
        lr_octaves=_real(0.001, 100.0),  # 2^100 is a number with room to spare
        rule=Node,
    ),
    "prior": _section(level_sigma=Sigma, exponent_sigma=Sigma),
    "protocol": _Protocol,
    "trial": _checked(_Trial, _check_trial),
    "data": _section(root=HomePath),
    "trainer": Node,
    "hardware": _section(
        enabled=bool,
        seconds=PositiveSeconds,
        refresh=bool,
        cache=HomePath,
        memory=_Memory,
        step_time=_StepTime,
        ceilings=_Ceilings,
        scale_out=_ScaleOut,
    ),
    "mlflow": _section(
        enabled=bool,
        experiment=Text,
        uri=Uri | None,
        seconds=Seconds,
        study_seconds=Seconds,
        request_seconds=PositiveFew,
        retries=_whole(0, 10),  # what MLflow allows
    ),
    "sampler": Annotated[Node, AfterValidator(_check_sampler)],
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
    config, unknown = compose_known(CONFIG_MODULE, parsed.config_name, options)
    return validate(config, unknown, complete, groups_in(parsed.config_dir))


def groups_in(folder: str | None) -> frozenset[str]:
    """Return the names of the config groups in a folder of the user's: they may stand beside bstune's own options."""
    return frozenset(path.name for path in Path(folder).iterdir() if path.is_dir()) if folder else frozenset()


def compose_workload(
    workload: Mapping[str, Any], arguments: Sequence[str], set_options: Mapping[str, Any]
) -> DictConfig:
    """Return the config of a workload that is given as values instead of by name, composed and validated.

    ``arguments`` are those of a command line; ``set_options`` are values by option, which come after them.
    """
    name = "python"
    ConfigStore.instance().store(group="workload", name=name, node=dict(workload))
    config, unknown = compose_known(CONFIG_MODULE, CONFIG_NAME, [f"workload={name}", *arguments])
    for option, value in set_options.items():
        OmegaConf.update(config, option, value, force_add=True)
    return validate(config, unknown)


def read_yaml(name: str) -> Any:
    """Return the content of a YAML file of ``conf/``."""
    return safe_load(files(CONFIG_MODULE).joinpath(name).read_text(encoding="utf-8"))


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


def with_choices(arguments: Sequence[str]) -> list[str]:
    """Return the arguments as Hydra takes them: without ``schedule=null``, the default, and with ``~`` in quotes.

    ConfigError for the choice of a group that is no name.
    """
    kept = []
    for argument in arguments:
        name, _, value = argument.partition("=")
        if "~" in value and not re.search(r"['\"\\,]|^[\[{]", value):
            argument = f"{name}='{value}'"
        group, choice = name.lstrip("+"), None
        if group in GROUPS:
            try:
                choice = OverridesParser.create().parse_override(argument).value()
            except HydraException as error:
                raise ConfigError(plain_error(error)) from error
            if choice is None and group == "schedule":
                continue
            names = choice if isinstance(choice, list) else [choice]
            is_name = all(isinstance(one, str) and 0 < len(one) <= 200 for one in names)
            if not is_name and not isinstance(choice, Sweep):
                raise ConfigError(f"{group} must be the name of a choice, but got {argument[:200]}")
        kept.append(argument)
    return kept


def compose_known(module: str, name: str, options: Sequence[str]) -> tuple[DictConfig, list[str]]:
    """Return a config composed of the options that Hydra knows, and the names of those that it does not know."""
    unknown: list[str] = []
    options = with_choices(options)
    with _own_hydra(), initialize_config_module(module, version_base=HYDRA_VERSION):
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


@contextmanager
def _own_hydra() -> Iterator[None]:
    """Put aside, for a while, the Hydra of a program that calls this one, which would be refused as a second one."""
    theirs, version = GlobalHydra.instance().hydra, VersionBase.instance().version_base
    if theirs is None:
        yield
        return
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        GlobalHydra.instance().hydra, VersionBase.instance().version_base = theirs, version


def plain_error(error: Exception) -> str:
    """Return Hydra's message without its search path, its workloads on one line."""
    message = str(error) or str(error.__cause__)
    lines = [line.strip() for line in message.split("Config search path")[0].splitlines() if line.strip()]
    workload = re.search(r"You must specify 'workload'|Could not find 'workload/(.*)'", lines[0])
    if not workload:
        return "\n".join(lines)
    problem = "no workload was given" if workload[1] is None else f"there is no workload {workload[1]!r}"
    return f"{problem}\nworkloads: {', '.join(lines[2:])}\nrun one with: python -m bstune +workload=NAME"


def validate(
    config: DictConfig,
    unknown: Sequence[str] = (),
    complete: Complete | None = None,
    groups: Collection[str] = (),
) -> DictConfig:
    """Return a copy of the config with every value checked and of its type; references stay references.

    ``groups`` are further sections, which the user's own files refer to.
    ConfigError lists all mistakes, a line each, with those options that were already found to be unknown.
    """
    config = _with_schedule(config.copy())
    if is_replayed(config) and complete is not None:
        _parse(config, unknown, groups, incomplete=True)
        config = complete(config)
    with open_dict(config):
        _write_types(config, _parse(config, unknown, groups))
    return config


def _parse(
    config: DictConfig, unknown: Sequence[str], groups: Collection[str], incomplete: bool = False
) -> Section | None:
    """Return the options of a config; ConfigError for all mistakes, without missing values if it is ``incomplete``."""
    names = flatten(OmegaConf.to_container(config))  # type: ignore[arg-type]  # of a mapping
    mistakes, options = {name: _unknown(name, names) for name in unknown}, None
    values = _resolve(config, "", mistakes)
    remember(values)
    values = {name: value for name, value in values.items() if name in _OPTIONS or name not in groups}
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
    if error["type"] == "int_parsing_size":
        message = "is too large"
    if error["type"] == "value_error":
        message = message.removeprefix("Value error, ")
        return message if message.startswith(f"{name}.") else f"{name}: {message}"
    for key, word in (("ge", "at least"), ("le", "at most"), ("gt", "greater than"), ("lt", "less than")):
        if key in error.get("ctx", {}):
            message = f"must be {word} {error['ctx'][key]:.12g}"
    return f"{name} {message}, but got {_text(error['input'])}"


def _text(value: object) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)"


def _unknown(name: str, names: Mapping[str, Any]) -> str:
    """Return the line for an option that there is not: its new name, or the nearest that there is."""
    renamed = read_yaml("renamed.yaml")
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
        elif field.annotation != Node:
            text = isinstance(value, str) and value != node[name]  # a home directory, or a reference to a number
            if text or not OmegaConf.is_interpolation(node, name):
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
    """Instantiate a config node, whose targets are written as Hydra does or as LightningCLI does.

    ConfigError is raised if a target cannot be found or does not take its arguments.
    """
    try:
        return hydra_instantiate(_with_targets(node), _convert_="all")
    except (InstantiationException, OmegaConfBaseException, TypeError) as error:  # TypeError: of _partial_ and its like
        if isinstance(error.__cause__, BstuneError):
            raise error.__cause__ from None  # it caused the error: a ring of causes has no end
        reason = _not_found(error) or " ".join(str(error).split())
        raise ConfigError(f"{what} cannot be built: {reason}") from error


def _with_targets(node: DictConfig) -> DictConfig:
    """Return a node in which ``_target_`` and the arguments beside it stand for ``class_path`` and ``init_args``."""
    if "class_path" not in OmegaConf.to_yaml(node):
        return node
    converted: DictConfig = OmegaConf.create(_targets(OmegaConf.to_container(node, resolve=True)))
    return converted


def _targets(value: Any) -> Any:
    if isinstance(value, list):
        return [_targets(one) for one in value]
    if not isinstance(value, dict) or value.get("_recursive_") is False:  # its target reads what is inside
        return value
    if "class_path" in value and value.keys() <= CLASS_KEYS:
        value = {"_target_": value["class_path"], **(value.get("init_args") or {}), **(value.get("dict_kwargs") or {})}
    return {key: _targets(one) for key, one in value.items()}


def _not_found(error: Exception) -> str | None:
    """Return which module, or which name in a module, a target misses; None if that is not what is wrong."""
    located = re.match(r"Error locating target '([^']*)'", str(error))
    if located is None or error.__cause__ is None:
        return None
    cause, target = error.__cause__.__cause__ or error.__cause__, located[1]
    if not isinstance(cause, ModuleNotFoundError) or cause.name is None:
        return f"importing {target} fails: {cause!r}"
    parent, _, name = cause.name.rpartition(".")
    if not f"{target}.".startswith(f"{cause.name}."):
        return f"importing {target} needs the module {cause.name}, which is not installed"
    if parent:
        return f"{parent} has no {name}, for {target}"
    return f"there is no module {name}, for {target}: run bstune in the folder that holds it, or install it"


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
