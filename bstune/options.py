"""Every option of a study: its type, its bounds and one line of meaning.

``conf/config.yaml`` has the defaults. The names are the same on the command line
(``baseline.lr=0.1``), in a workload's file and in Python (``baseline=(64, 0.1)``).
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from functools import reduce
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

from bstune.core import records
from bstune.core.errors import InputError
from bstune.core.question import Objective
from bstune.core.records import Budget, Frozen, Target
from bstune.core.rules import DEFAULT_RULE, RULES, Rule
from bstune.core.space import Number, Space, Tunable
from bstune.system.console import guess
from bstune.system.secrets import hide

# Batch sizes under mixed precision on CUDA are multiples of it, which fill tensor cores.
MIXED_MULTIPLE = 8
# Names of the argument of a module that is the learning rate.
RATES = ("lr", "learning_rate")
# What a project gets of a trial by name: as an argument, or in a config as ${trial.NAME}.
TRIAL_VALUES = ("batch_size", "lr", "seed", "total_steps")
# What each trial has: no further value is called so.
OF_EACH_TRIAL = {*TRIAL_VALUES, *RATES, "max_steps"}


# By mlflow 3.17.
MLFLOW_SCHEMES = (
    *("http", "https", "file", "databricks", "databricks-uc"),
    *("sqlite", "postgresql", "mysql", "mssql"),
)


def _refuse_bool_and_text(value: Any) -> Any:
    """Refuse what pydantic would turn into a number: True and '3'."""
    if isinstance(value, bool | str):
        raise ValueError("must be a number")
    return value


def _parse_target(value: Any) -> Any:
    """Read a target's text; Target and mapping stay."""
    return value if isinstance(value, Target | dict) else Target.parse(str(value))


def _check_tune(value: Any) -> Any:
    """Check names, or names with ranges; ValueError says what they must be."""
    if value is None:
        return None
    if isinstance(value, list | tuple) and all(isinstance(name, str) for name in value):
        value = tuple(value)
    elif not isinstance(value, dict):
        raise ValueError("must be [NAME, ...] or {NAME: [LOW, HIGH], ...}")
    for name in value:
        if name in OF_EACH_TRIAL:
            raise ValueError(
                f"must name further values, not {name}: batch_size.low, batch_size.high, lr.low "
                f"and lr.high are the ranges of what each trial has"
            )
    for name, ends in value.items() if isinstance(value, dict) else ():
        is_pair = (
            isinstance(ends, list | tuple) and len(ends) == 2 and all(map(_is_finite_number, ends))
        )
        if not is_pair or ends[0] >= ends[1]:
            raise ValueError(f"must give {name} two finite numbers, the lower one first")
    return value


def _is_finite_number(value: Any) -> bool:
    """Whether it is one; True is none."""
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and math.isfinite(value)


def _off_as_word(value: Any) -> Any:
    """Take YAML's ``off``, which is a boolean, as the word."""
    return "off" if value is False else value


def _check_tracking_uri(value: Any) -> Any:
    """Refuse a scheme that mlflow has no store for; a folder has none."""
    scheme, is_uri, _ = str(value).partition("://")
    if is_uri and scheme.partition("+")[0] not in MLFLOW_SCHEMES:
        raise ValueError(
            "must be an MLflow server's address, such as http://host:5000, or a database's, such "
            "as sqlite:///mlflow.db"
        )
    return value


Count = Annotated[records.Count, BeforeValidator(_refuse_bool_and_text)]
Seed = Annotated[int, BeforeValidator(_refuse_bool_and_text), Field(ge=0, lt=2**32)]
Positive = Annotated[float, BeforeValidator(_refuse_bool_and_text), Field(gt=0)]
Flag = Annotated[bool, Strict()]
# No name of a file has a null character.
Text = Annotated[str, Field(min_length=1, pattern=r"^[^\x00]*$")]
Values = dict[str, Annotated[int | float, BeforeValidator(_refuse_bool_and_text)]]
Node = dict[str, Any]

# An option that nobody has to give: it is None until :func:`bstune.recipe.found.fill_by_found` has
# filled it, and only what comes later reads it.
T = TypeVar("T")
if TYPE_CHECKING:
    Open = Annotated[T, "filled by completed"]
else:
    Open = T | None


class Section(Frozen):
    """Options under one name; the text below a field is its line of ``--help``."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class BudgetOptions(Budget, Section):
    """When a trial that does not reach the target ends."""

    steps: Open[Count]
    """Most steps of a trial; null: by the Trainer's length, or by a short run of the baseline."""
    examples: Count
    """Most examples of a trial; it ends once steps and examples are both spent."""
    seconds: Positive | None
    """Most training seconds of a trial, in place of steps and examples; null: those count."""

    @model_validator(mode="before")
    @classmethod
    def _without_steps(cls, values: Any) -> Any:
        """Leave no steps open where seconds or examples are given."""
        if not isinstance(values, dict) or values.get("steps") is not None:
            return values
        # One example is the default.
        is_given = values.get("seconds") is not None or values.get("examples", 1) != 1
        return values | {"steps": 1} if is_given else values


class BatchSizeOptions(Section):
    """The range of batch sizes."""

    low: Open[Count]
    """Smallest batch size; null: a sixteenth of the baseline's."""
    high: Open[Count]
    """Largest batch size, at most the training set; null: 32 times the baseline's."""
    multiple: Count | None
    """All batch sizes are multiples of this; null: 8 under mixed precision on CUDA, else 1."""


class LrOptions(Section):
    """The range of learning rates."""

    low: Positive | None
    """Smallest learning rate; null: ten factors of 2 below the scaling rule's."""
    high: Positive | None
    """Largest learning rate; null: ten factors of 2 above the scaling rule's."""


class BaselineOptions(Section):
    """What is used today, and what the answer is compared with."""

    batch_size: Count | None
    """Batch size that you use today; null: the data's."""
    lr: Positive | None
    """Learning rate that you use today; null: the module's."""
    values: Values | None
    """Further values that you use today, by name; null: the project's."""

    @property
    def pair(self) -> tuple[int, float] | None:
        """Batch size and rate; None without them."""
        if self.batch_size is None or self.lr is None:
            return None
        return self.batch_size, self.lr


class TrialOptions(BaselineOptions):
    """One run in place of a study."""

    batch_size: Count | None
    """Train once at this batch size; null: a study."""
    lr: Positive | None
    """Train once at this learning rate; null: a study."""
    values: Values | None
    """Train once with these further values, by name; null: the project's."""
    steps: Count | None
    """Steps of the one run and of its schedule; null: the budget's."""
    seed: Seed
    """Seed of the one run."""


class MlflowOptions(Section):
    """Where MLflow gets the study."""

    uri: Annotated[Text | None, BeforeValidator(_check_tracking_uri)]
    """MLflow's tracking URI; null: log nothing."""
    experiment: Text
    """MLflow's experiment."""


class Options(Section):
    """All options, checked."""

    workload: Text | None
    """Name of the workload: a file of conf/workload, or of --config-dir."""
    objective: Objective
    """time, steps: least to the target; curve: critical batch size; metric: best in the budget."""
    target: Open[Annotated[Target, BeforeValidator(_parse_target)]]
    """Metric and goal, such as 'val/loss <= 0.1' or 'min val/loss'; null: found in the project."""
    budget: BudgetOptions
    """When a trial that does not reach the target ends."""
    batch_size: BatchSizeOptions
    """The range of batch sizes."""
    lr: LrOptions
    """The range of learning rates."""
    baseline: BaselineOptions
    """What is used today, and what the answer is compared with."""
    scaling: Rule | None = Field(
        description=f"Rule for the rate: {', '.join(RULES)}; "
        f"null: linear for SGD, else {DEFAULT_RULE}."
    )
    tune: Annotated[
        tuple[str, ...] | dict[str, tuple[Number, Number]] | None, BeforeValidator(_check_tune)
    ]
    """Further values to search: names of the workload's ranges, or names with ranges."""
    trials: Count | None
    """Configurations of the search; null: 32, all of a grid, or what wall_seconds allows."""
    wall_seconds: Positive | None
    """Time limit of this command in seconds, answer included; null: none."""
    seeds: Annotated[int, BeforeValidator(_refuse_bool_and_text), Field(ge=1, le=100)]
    """New seeds on which the best configuration and the baseline run."""
    workers: Annotated[int, BeforeValidator(_refuse_bool_and_text), Field(ge=0, le=1000)]
    """Trials at once, a process with its share of the cores each; 0: in this process, to debug."""
    sampler: Literal["frontier", "tpe", "gp", "random", "qmc", "grid"]
    """What proposes configurations: frontier (the law); Optuna's tpe, gp, qmc, random; grid."""
    seed: Seed
    """Seed of the study, which sets the seeds of its trials."""
    study: Text | None
    """Name of the study; the same name continues it."""
    data: Node | None
    """A _target_ that builds the data, and its arguments."""
    module: Node | None
    """A _target_ that builds the LightningModule, and its arguments."""
    trainer: Node | None
    """Further arguments of Lightning's Trainer."""
    precision: Literal["auto", "32-true", "bf16-mixed", "16-mixed", "bf16-true", "64-true"]
    """Precision of Lightning's Trainer; auto: mixed on CUDA, 32-true on a CPU."""
    compile: Literal["default", "reduce-overhead", "max-autotune"] | None
    """Mode of torch.compile, such as default; null: eager."""
    micro_batch_size: Count | Literal["auto"] | None
    """Examples that a device takes at once; auto: as many as fit; null: the whole batch."""
    algorithm: str | Node | None
    """Optimizer that replaces the workload's own: a file of conf/algorithm."""
    schedule: str | Node | None
    """Schedule that replaces the workload's own: a file of conf/schedule."""
    schedule_ends: Flag
    """Search the schedule's length, too: the schedule ends with its trial."""
    override_lr: Flag
    """Put the trial's rate into the optimizer's groups, for a project whose rate is a literal."""
    validation_batch_size: Literal["trial"] | None
    """Batch size of validation; trial: the trial's; null: the data's."""
    trial_seconds: Positive | None
    """Seconds of silence after which a trial is ended; null: 60, or 20 times the longest so far."""
    noise_scale: Flag
    """Measure the gradient noise scale as well."""
    device: Literal["auto", "cpu", "cuda"]
    """Device of training; auto: CUDA where there is one."""
    devices: Count
    """Devices that share each batch equally; each has a process."""
    threads: Count | None
    """Threads of torch; null: those that the survey finds fastest, else torch's own number."""
    survey: Annotated[Literal["auto", "off", "refresh"], BeforeValidator(_off_as_word)]
    """Measure memory and step times first; auto: where unknown; off: never; refresh: again."""
    survey_seconds: Positive
    """Most seconds of the survey."""
    memory_limit: Count | None
    """Most bytes of device memory to use; null: what is free."""
    trial: TrialOptions
    """One run in place of a study."""
    output: Text
    """Folder of the study's files."""
    storage: Text
    """URL of Optuna's storage: SQLite on one machine, PostgreSQL on several."""
    data_root: Text
    """Folder of downloaded data."""
    mlflow: MlflowOptions
    """Where MLflow gets the study."""
    debug: Flag
    """Show tracebacks of bstune's own errors."""

    @property
    def study_name(self) -> str:
        """Of the study: the workload's, unless another is given."""
        return str(self.study or self.workload)

    @property
    def tunables(self) -> tuple[Tunable, ...]:
        """The further values that are searched."""
        ranges = self.tune if isinstance(self.tune, dict) else {}
        return tuple(Tunable(name, *ends) for name, ends in ranges.items())

    @property
    def given_micro_batch_size(self) -> int | None:
        """``micro_batch_size``; None for ``auto``, too, which a survey finds."""
        return None if self.micro_batch_size == "auto" else self.micro_batch_size

    @property
    def seeks_metric(self) -> bool:
        """Whether the best metric within the budget is sought."""
        return self.objective == "metric"

    @property
    def budget_is_in_steps(self) -> bool:
        """Whether the budget is one of steps and examples, and known."""
        return self.budget.seconds is None and not self.is_open("budget.steps")

    def is_open(self, name: str) -> bool:
        """Whether an option, by its dotted name, has still to be found."""
        return reduce(getattr, name.split("."), self) is None


# Runs of the whole budget that the least answer stands on.
RUNS_OF_ANSWER = 4


def _section_model(name: str) -> type[Section] | None:
    """Give the model of a section of options; None for a name that is no section's."""
    field = Options.model_fields.get(name)
    annotation: Any = field and field.annotation
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return None


def option_meanings() -> Iterator[tuple[str, str]]:
    """Give each option's dotted name and its line of meaning, in the order of ``--help``."""
    for name, field in Options.model_fields.items():
        section = _section_model(name)
        if section is None:
            yield name, field.description or ""
            continue
        for key, inner in section.model_fields.items():
            yield f"{name}.{key}", inner.description or ""


OPTION_NAMES = tuple(name for name, _ in option_meanings())


def options_from(values: Mapping[str, Any]) -> Options:
    """Check the values of all options, nested as in ``conf/config.yaml``.

    Raises:
        InputError: with a line for each option that is unknown, missing or out of its bounds, or
            that contradicts another one.
    """
    try:
        options = Options.model_validate(values)
    except ValidationError as error:
        lines: dict[str, str] = {}
        for details in error.errors():
            name = _option_at(details["loc"])
            # Of the alternatives that a value may be, the first is told.
            lines.setdefault(name, _line_of_mistake(name, details))
        raise InputError("\n".join(lines.values())) from error
    problems = list(_contradictions(options))
    if problems:
        raise InputError("\n".join(problems))
    return options


def own_target(target: str, objective: str) -> str:
    """A workload's own target, without its goal where the best metric is sought."""
    return str(replace(Target.parse(target), goal=None)) if objective == "metric" else target


def _option_at(location: tuple[int | str, ...]) -> str:
    """Name the option that an error of pydantic lies in: it may lie deeper."""
    depth = 1 if _section_model(str(location[0])) is None else 2
    return ".".join(map(str, location[:depth]))


def _line_of_mistake(name: str, details: ErrorDetails) -> str:
    """Write an error of pydantic as one line."""
    if details["type"] == "missing":
        return missing(name)
    if details["type"] == "extra_forbidden":
        return unknown(name)
    section = _section_model(name)
    # A plain value stands in the place of a section.
    if section is not None:
        message = f"must have {', '.join(section.model_fields)}"
    else:
        # "Input should be a valid integer, unable to parse ..." becomes "must be a valid integer".
        message = re.sub(r", (unable|got) .*", "", details["msg"])
        message = re.sub(r"^(Input|String) should|^Value error, must", "must", message)
        message = message.replace("greater than or equal to", "at least")
        message = message.replace("less than or equal to", "at most")
    got = hide(details["input"], str(details["loc"][-1]))
    return f"{name} {message}, but got {got!r:.200}"


def missing(name: str) -> str:
    """Say in one line that an option has to be given."""
    return f"{name} is missing: give it, as {name}=VALUE"


def unknown(name: str) -> str:
    """Say in one line that there is no such option, and which one may be meant."""
    meant = guess(name, OPTION_NAMES)
    hint = f"did you mean {meant}?" if meant else "python -m bstune --help lists them"
    return f"there is no option {name}: {hint}"


def _contradictions(options: Options) -> Iterator[str]:
    """Say which options contradict each other, a line each; what is open contradicts nothing."""
    sizes, rates, baseline = options.batch_size, options.lr, options.baseline
    ranges = (
        ("batch_size", sizes.low or 1, sizes.high or math.inf, baseline.batch_size),
        ("lr", rates.low or 0.0, rates.high or math.inf, baseline.lr),
    )
    for name, low, high, used in ranges:
        if low > high:
            yield f"{name}.low must be at most {name}.high={high}, but got {low}"
        elif used is not None and not low <= used <= high:
            yield f"baseline.{name} must lie within {name}, {low} to {high}, but got {used}"
    if rates.low is not None and rates.low == rates.high:
        yield f"lr.low must be below lr.high={rates.high}, but got {rates.low}"
    for key, size in (("low", sizes.low), ("high", sizes.high)):
        if (size or 0) % (sizes.multiple or 1):
            yield (
                f"batch_size.{key} must be a multiple of batch_size.multiple={sizes.multiple}, "
                f"but got {size}"
            )
    micro = options.given_micro_batch_size
    if micro is not None and sizes.high is not None and micro > sizes.high:
        yield (
            f"micro_batch_size must be at most batch_size.high={sizes.high}, but got {micro}: "
            f"leave it out where each batch is taken whole"
        )
    if options.devices > 1 and options.workers != 1:
        yield (
            f"devices={options.devices} share each batch of one trial, a process each: leave out "
            f"workers={options.workers}"
        )
    if options.devices > 1 and options.noise_scale:
        yield (
            f"noise_scale=true is measured on one device, but got devices={options.devices}: leave "
            f"out one of them"
        )
    for name, pair in (("baseline", baseline), ("trial", options.trial)):
        if pair.batch_size is not None and pair.batch_size % options.devices:
            yield (
                f"{name}.batch_size must be a multiple of devices={options.devices}, which share "
                f"each batch equally, but got {pair.batch_size}"
            )
    if isinstance(options.tune, tuple):
        for name in options.tune:
            yield f"tune={name} has no range: give tune={{{name}: [LOW, HIGH]}}"
    yield from _contradictions_of_objective(options)
    of_run = options.trial
    if of_run.steps and of_run.batch_size and options.budget_is_in_steps:
        most = options.budget.last_step(of_run.batch_size)
        if of_run.steps > most:
            yield (
                f"trial.steps must be at most the budget's {most} steps at batch size "
                f"{of_run.batch_size}, but got {of_run.steps}: raise budget.steps"
            )
    if (of_run.batch_size is None) != (of_run.lr is None):
        absent = "batch_size" if of_run.batch_size is None else "lr"
        yield f"trial.{absent} is missing: give both batch size and learning rate"


def _contradictions_of_objective(options: Options) -> Iterator[str]:
    """Say what contradicts the objective, a line each."""
    sizes = options.batch_size
    if options.objective == "curve" and sizes.low == sizes.high and sizes.low:
        yield (
            f"objective=curve needs a range of batch sizes, but batch_size.low and batch_size.high "
            f"are both {sizes.low}"
        )
    limit, each = options.wall_seconds, options.budget.seconds
    if limit is not None and each is not None and limit < RUNS_OF_ANSWER * each:
        yield (
            f"wall_seconds={limit:g} has no time for {RUNS_OF_ANSWER} runs of budget.seconds="
            f"{each:g}, the least that an answer takes: baseline, another one, a new seed of each"
        )
    if options.seeks_metric and options.schedule_ends:
        yield "objective=metric trains to the end of its budget: leave out schedule_ends=true"
    if options.sampler == "grid" and options.tune:
        yield "sampler=grid tunes batch size and learning rate alone: leave out tune"
    if options.sampler != "frontier" and options.schedule_ends:
        yield (
            f"sampler={options.sampler} chooses no length of a schedule: leave out "
            f"schedule_ends=true, or sampler"
        )
    if options.is_open("target"):
        return
    target = options.target
    if options.seeks_metric and target.goal is not None:
        yield (
            f"objective=metric seeks the best value, which has no goal: give "
            f"target='{target.mode} {target.metric}', but got '{target}'"
        )
    elif not options.seeks_metric and target.goal is None:
        sign = "<=" if target.mode == "min" else ">="
        yield (
            f"objective={options.objective} needs a goal: give target='{target.metric} {sign} "
            f"GOAL', or objective=metric, but got '{target}'"
        )


# Options that Python takes as a pair.
_PAIRS = {"batch_size": ("low", "high"), "lr": ("low", "high"), "baseline": ("batch_size", "lr")}


def from_python(given: Mapping[str, Any]) -> dict[str, Any]:
    """Nest options as ``conf/config.yaml`` does that are spelled as Python arguments.

    ``baseline=(64, 0.1)``, ``batch_size=(8, 1024)``, ``lr=(1e-4, 1)``; ``budget`` is a number of
    steps or a :class:`bstune.core.records.Budget`, ``target`` a text or a
    :class:`bstune.core.records.Target`. None leaves an option at its default.
    """
    values = {name: value for name, value in given.items() if value is not None}
    for name, keys in _PAIRS.items():
        pair = values.get(name)
        if isinstance(pair, tuple | list):
            if len(pair) != len(keys):
                raise InputError(f"{name} must be ({', '.join(keys)}), but got {pair!r}")
            values[name] = dict(zip(keys, pair, strict=True))
    match values.get("budget"):
        case Budget() as budget:
            values["budget"] = budget.model_dump()
        case int() as steps:
            values["budget"] = {"steps": steps}
    match values.get("target"):
        case Target() as target:
            values["target"] = asdict(target)
    return values


def with_question(own: Options, given: Mapping[str, Any]) -> Options:
    """A study's options with another target or budget, which its histories are asked for.

    Another goal keeps the objective; a study of the best metric is asked for the least time. A
    budget, and a target without a goal, ask for the best metric.

    Args:
        own: of the study.
        given: ``target``, a text, a :class:`bstune.core.records.Target` or another goal of the
            study's metric, and ``budget``, as of :func:`from_python`.

    Raises:
        InputError: for other names, as by :func:`options_from`, and for another metric or
            direction than the study's.
    """
    others = given.keys() - {"target", "budget"}
    if others:
        raise InputError(f"ask for target or budget, but got {', '.join(sorted(others))}")
    asked, budget = given.get("target"), from_python(given).get("budget")
    best = replace(own.target, goal=None)
    if isinstance(asked, int | float):
        asked = f"{best.metric} {'<=' if best.mode == 'min' else '>='} {asked!r}"
    target = own.target if budget is None else best
    if asked is not None:
        target = asked if isinstance(asked, Target) else Target.parse(str(asked))
    if replace(target, goal=None) != best:
        raise InputError(
            f"target={target}: the study's trials tell of '{best}' alone; ask for another goal of "
            f"that, as target=0.2"
        )
    values = own.model_dump() | {"target": target}
    if budget is not None:
        values["budget"] = budget
    if isinstance(budget, dict):
        # Seconds stand in the place of the study's steps and examples.
        counted = {"steps": 1, "examples": 1, "seconds": None}
        values["budget"] = (own.budget.model_dump() if "seconds" in budget else counted) | budget
    if budget is not None or target.goal is None:
        values["objective"] = "metric"
    elif own.seeks_metric:
        values["objective"] = "time"
    # Nothing is run: the study's time limit need not suffice for it.
    checked = options_from(values | {"wall_seconds": None})
    return checked.model_copy(update={"wall_seconds": own.wall_seconds})


def differing(before: Options, after: Options) -> dict[str, Any]:
    """The options of ``after`` that differ from those of ``before``, by their dotted names.

    For the command that asks another question, and to refuse options that have no use.
    """
    changes = {}
    for name in OPTION_NAMES:
        old, value = (reduce(getattr, name.split("."), one) for one in (before, after))
        if value != old:
            changes[name] = str(value) if isinstance(value, Target) else value
    return changes


def space_of(options: Options, fills_tensor_cores: bool) -> Space:
    """Derive what is searched.

    The scaling rule goes through the baseline or, without one, through the geometric middle of both
    ranges. Rates whose range is open reach ten octaves beyond the rule's.

    Args:
        options: of the study.
        fills_tensor_cores: whether training does; a multiple that is open is 8 then.

    Raises:
        InputError: if neither a baseline nor a range of rates says what rates are meant.
    """
    sizes, rates = options.batch_size, options.lr
    multiple = sizes.multiple
    if multiple is None:
        # A baseline that is no multiple of 8 shows that other sizes are meant, too.
        is_meant = (options.baseline.batch_size or 0) % MIXED_MULTIPLE == 0
        multiple = MIXED_MULTIPLE if fills_tensor_cores and is_meant else 1
    # Devices share each batch equally.
    multiple = math.lcm(multiple, options.devices)
    high = max(sizes.high // multiple, 1) * multiple
    low = min(math.ceil(sizes.low / multiple) * multiple, high)
    ends = rates.low, rates.high
    pair = options.baseline.pair
    rule = options.scaling or DEFAULT_RULE
    space = Space.around((low, high), ends, rule, pair, multiple)
    if space is None:
        raise InputError(
            "lr.low and lr.high are missing: without baseline.batch_size and baseline.lr "
            "nothing else says which learning rates to try"
        )
    return replace(space, tunables=options.tunables)
