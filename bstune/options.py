"""Every option: its type, its bounds, its cross-checks. The defaults are in ``conf/``, none is here."""

import re
import unicodedata
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from omegaconf import OmegaConf
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
)
from pydantic_core import PydanticCustomError

from bstune.core.batch_schedule import BatchSchedule
from bstune.core.errors import ConfigError
from bstune.core.records import CompileMode, FastMode, Objective, Target
from bstune.core.search_space import BATCH_SCHEDULE, BUDGET, HALF_LIVES, MODULE
from bstune.system.files import expand_home


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
Number = Annotated[
    float, _NUMBER
]  # the one without: an end of a metric's range, which may be infinite
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
# YAML reads off as false.
Fast = Annotated[FastMode, BeforeValidator(lambda value: "off" if value is False else value)]
Precision = Literal["auto", "32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true"]


def _is_text(value: str) -> str:
    """Refuse what no file name, database or terminal takes."""
    if not value.strip():
        raise PydanticCustomError("text", "must not be empty")
    if any(
        unicodedata.category(character) in ("Cc", "Cs") for character in value
    ):  # NUL is one; undecodable bytes
        raise PydanticCustomError("text", "must not contain control characters")
    return value


def _is_name(value: str) -> str:
    """Refuse a name that, as a path below a folder, leaves it or is no path."""
    parts = value.split("/")
    if any(part.strip() in ("", ".", "..") or len(part.encode()) > 200 for part in parts):
        raise PydanticCustomError(
            "text", "must be a name, or names with / between, of at most 200 bytes each"
        )
    return value


def _is_one_name(value: str) -> str:
    if "/" in _is_name(value):
        raise PydanticCustomError("text", "must be a name without /")
    return value


def _is_uri(value: str) -> str:
    try:
        urlsplit(value).port  # noqa: B018  # raises for what is no address
    except ValueError as error:
        raise PydanticCustomError(
            "text", "must be a URL: {reason}", {"reason": str(error)}
        ) from error
    return value


Text = Annotated[str, Field(max_length=4000), AfterValidator(_is_text)]
Name = Annotated[str, Field(max_length=400), AfterValidator(_is_text), AfterValidator(_is_name)]
OneName = Annotated[
    str, Field(max_length=200), AfterValidator(_is_text), AfterValidator(_is_one_name)
]
HomePath = Annotated[
    Text, AfterValidator(expand_home)
]  # a path, or a SQLite URL, with ~ for the home directory
Uri = Annotated[
    str, Field(max_length=4000), AfterValidator(_is_uri), AfterValidator(expand_home)
]  # empty: none
Node = dict[str, Any]  # instantiated by Hydra: takes what its target takes


class Section(BaseModel):
    """A group of options; unknown ones are mistakes."""

    model_config = ConfigDict(extra="forbid", coerce_numbers_to_str=True)


def _listed(kind: Any) -> Any:
    """Return the type of a list of some."""
    return Annotated[list[kind], Field(min_length=1, max_length=1000)]


def _section(base: Any = Section, **types: Any) -> Any:
    """Return the model of a group: the type of each option, with a default where the YAML may leave it out."""
    fields = {
        name: kind if isinstance(kind, tuple) else (kind, ...) for name, kind in types.items()
    }
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
        (
            target.gap(best) > 0,
            f"the target {target} cannot be reached: {target.metric} lies in {bounds}",
        ),
        (
            target.gap(worst) <= 0,
            f"the target {target} is met by every value in {bounds}: check mode and value",
        ),
    ]


def _check_tunable(options: Any) -> list[tuple[Any, str]]:
    whole = options.low.is_integer() and options.high.is_integer()
    ends = f"low={options.low:g} and high={options.high:g}"
    places = (MODULE, BUDGET, f"{BATCH_SCHEDULE}.")  # these are made anew for each trial
    below = options.key.startswith(places) or options.key in HALF_LIVES
    named = f"below workload.module, budget or batch_schedule, or be {' or '.join(HALF_LIVES)}"
    return [
        (not below, f"key must lie {named}, but got {options.key!r}"),
        (not options.low < options.high, f"low must be less than high, but got {ends}"),
        (
            options.log and not options.complement and not options.low > 0,
            f"low must be over 0 on a log scale, but got {ends}",
        ),
        (
            options.log and options.complement and not options.high < 1,
            f"high must be less than 1 where its complement is on a log scale, but got {ends}",
        ),
        (
            options.integer and options.complement,
            "a whole number has no complement: leave out complement or integer",
        ),
        (
            options.integer and not whole,
            f"low and high of a whole number must be whole, but got {ends}",
        ),
    ]


def _check_names(tunable: Any) -> list[tuple[Any, str]]:
    taken = sorted({"batch_size", "lr", "delta"} & tunable.keys())
    return [(taken, f"a study has {', '.join(taken)} already: choose another name")]


def _check_trial(options: Any) -> list[tuple[Any, str]]:
    pair = f"batch_size={shown(options.batch_size)} and lr={shown(options.lr)}"
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
        if name == BATCH_SCHEDULE:
            raise ValueError(
                f"{named}, but batch sizes stay: choose a schedule that grows, batch_schedule=doubling"
            )
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
            raise ValueError(
                f"{key} must name a number of the config, or null, but got {value} there"
            )
    if search.workers > 1 and workload and hardware and trial and trial.batch_size is None:
        reason = None
        if hasattr(workload, "table"):
            reason = (
                f"workload {workload.name} is answered from recorded runs, which need no training"
            )
        elif not hardware.enabled:  # trials slow each other down
            reason = (
                "seconds per step are the survey's, measured alone: it needs hardware.enabled=true"
            )
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
    ratio=(OverOne, 2),
    policy=(
        _section(
            _Open,
            particles=(_whole(10, 10_000), 10),
            moves=(_whole(1, 1000), 1),
            candidates=(_whole(10, 2000), 10),
            **dict.fromkeys(
                ("initial_fraction", "max_growth", "max_first_growth", "probe_fraction"),
                (_real(1e-6, 1e6), 1),
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
            if not OmegaConf.is_interpolation(
                info.context.sampler, str(one["loc"][0])
            ):  # checked where it stands
                raise ValueError(
                    mistake(".".join(["sampler", *map(str, one["loc"])]), one)
                ) from error
    return sampler


def _check_batch_schedule(options: Any) -> list[tuple[Any, str]]:
    try:
        BatchSchedule(**{**options.model_dump(), "switch_examples": tuple(options.switch_examples)})
    except ConfigError as error:
        return [(True, str(error))]
    return []


_Budget = _section(steps=Positive, examples=Positive)
_Target = _section(
    metric=Text, value=Finite, mode=Literal["min", "max"], bounds=(list[Number] | None, None)
)
_Tunable = _section(
    key=Text,
    low=Finite,
    high=Finite,
    log=(bool, False),
    integer=(bool, False),
    complement=(bool, False),
)
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
    evaluation_cost=(
        PositiveFinite | None,
        Field(default=None, exclude=True),
    ),  # of a study's settings, if it is left out
    fast=(Fast | None, Field(default=None, exclude=True)),
    tokens=(
        Positive | None,
        Field(default=None, exclude=True),
    ),  # of an example: batch sizes are said in them too
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
    baseline=(bool, False),  # a folder of before it had none
    tune=list[Text],
    workers=_whole(0, 1000),
    lease_seconds=_real(0.1, 1e6),
    stratified=Share,
    batch_size=_checked(_section(_Range, multiple=Positive | None), _check_range),
)
_Trial = _section(
    batch_size=Positive | None, lr=PositiveFinite | None, seed=Seed, total_steps=Count | None
)
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
    fast=Fast,
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
    show=bool,
    devices=_listed(PositiveFew),
    candidate_ratio=_real(1.001, 1e6),
    all_reduce=_checked(_AllReduce, _check_all_reduce),
)
_BatchSchedule = _section(
    factor=_real(0.0, 1e6),
    switch_examples=_listed(Positive),
    stretch=PositiveFinite,
    lr_exponent=_real(-2.0, 2.0),
    largest=Positive | None,
)
OPTIONS: dict[str, Any] = {
    "study": Name,
    "seed": Seed,
    "output": HomePath,
    "storage": HomePath,
    "device": Text,
    "devices": _whole(1, 1024),
    "precision": Precision,
    "compile": CompileMode | None,
    "quick": (bool, False),
    "debug": bool,
    "workload": _section(_Workload, data=Node, module=Node),
    "budget": _Budget,
    "scaling": _section(
        batch_size=PositiveFinite,
        lr=PositiveFinite,
        noise_scale=PositiveFinite | None,
        beta2_half_life=PositiveFinite | None,
        weight_decay_half_life=PositiveFinite | None,
        lr_octaves_sigma=_real(0.001, 30.0),
        lr_octaves=_real(0.001, 100.0),  # 2^100 is a number with room to spare
        rule=Node,
    ),
    "batch_schedule": (
        _checked(_BatchSchedule, _check_batch_schedule) | None,
        Field(default=None, exclude=True),  # of a study's settings, where batch sizes stay
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
TrainedOptions: type[Section] = _section(**OPTIONS)
ReplayedOptions: type[Section] = _section(
    **{**OPTIONS, "workload": _section(_Workload, table=Text)}
)


def mistake(name: str, error: Mapping[str, Any]) -> str:
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
    for key, word in (
        ("ge", "at least"),
        ("le", "at most"),
        ("gt", "greater than"),
        ("lt", "less than"),
    ):
        if key in error.get("ctx", {}):
            message = f"must be {word} {error['ctx'][key]:.12g}"
    return f"{name} {message}, but got {shown(error['input'])}"


def shown(value: object) -> str:
    """Return a value as messages quote it, cut if it is long."""
    text = "null" if value is None else repr(value)
    return text if len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)"
