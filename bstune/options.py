"""Every option: its type, its bounds, its cross-checks. The defaults are in ``conf/``, none is here."""

import math
import re
import unicodedata
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Protocol, Self, TypeVar, get_args, get_origin
from urllib.parse import urlsplit

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

from bstune.core.objectives import Objective
from bstune.core.records import Budget, CompileMode, FastMode, Target
from bstune.core.search_space import BUDGET, HALF_LIVES, MODULE
from bstune.system.files import expand_home

MOST_THREADS = 1024
# Of a metric.
LARGEST_VALUE = 1e15


# What builds several loaders, or none.
COLLECTIONS = ("builtins.dict", "builtins.list", "builtins.tuple")
# Of workload.data that builds loaders.
NO_DATA_MODULE = (
    "must build a LightningDataModule, but builds {got}: let _target_ be "
    "lightning.pytorch.LightningDataModule.from_datasets, with train_dataset and val_dataset; in "
    "Python, bstune.tune takes loaders as they are: data=(train, val)"
)


def _not_bool(value: object) -> object:
    if isinstance(value, bool):  # pydantic takes true for 1
        raise PydanticCustomError("number_type", "Input should be a number")
    return value


_NUMBER = BeforeValidator(_not_bool)


def _auto_or_count(value: object) -> object:
    """Refuse what is neither, in one line: pydantic would say why it is none of the two."""
    is_count = isinstance(value, int) and not isinstance(value, bool)
    if value == "auto" or (is_count and 1 <= value <= MOST_THREADS):  # type: ignore[operator]
        return value
    raise ValueError(f"must be auto or 1 to {MOST_THREADS}, but got {value!r}")


def _auto_or_number(value: object) -> object:
    """Refuse what is neither, in one line, as :func:`_auto_or_count` does."""
    if value == "auto":
        return value
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, bool) or not abs(number) <= LARGEST_VALUE:
        raise ValueError(
            f"must be a number of at most {LARGEST_VALUE:g} in size, or auto, but got {value!r}"
        )
    return number


# Every number has a range. Its ends are far from what one needs; beyond them arithmetic or memory
# ends. An end of a metric's range is the one without, as it may be infinite.
Number = Annotated[float, _NUMBER]
# Of examples or steps: a float holds every one.
Count = Annotated[int, Field(ge=0, le=10**15), _NUMBER]
Positive = Annotated[int, Field(ge=1, le=10**15), _NUMBER]
Few = Annotated[int, Field(ge=0, le=10**6), _NUMBER]
PositiveFew = Annotated[int, Field(ge=1, le=10**6), _NUMBER]
SomeFew = Annotated[list[PositiveFew], Field(min_length=1, max_length=1000)]
WholeTo1000 = Annotated[int, Field(ge=0, le=1000), _NUMBER]
OneTo1000 = Annotated[int, Field(ge=1, le=1000), _NUMBER]
Bytes = Annotated[int, Field(ge=1, le=2**60), _NUMBER]
# As numpy and Lightning take it.
Seed = Annotated[int, Field(ge=0, le=2**32 - 1), _NUMBER]
Finite = Annotated[float, Field(ge=-1e15, le=1e15, allow_inf_nan=False), _NUMBER]
PositiveFinite = Annotated[float, Field(ge=1e-15, le=1e15, allow_inf_nan=False), _NUMBER]
Seconds = Annotated[float, Field(ge=0.0, le=1e9, allow_inf_nan=False), _NUMBER]
PositiveSeconds = Annotated[float, Field(ge=1e-6, le=1e9, allow_inf_nan=False), _NUMBER]
Sigma = Annotated[float, Field(ge=0.01, le=100.0, allow_inf_nan=False), _NUMBER]
Factor = Annotated[float, Field(ge=1e-6, le=1e6, allow_inf_nan=False), _NUMBER]
Weight = Annotated[float, Field(ge=0.0, le=1e6, allow_inf_nan=False), _NUMBER]
OverOne = Annotated[float, Field(gt=1, le=1e6, allow_inf_nan=False), _NUMBER]
Share = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False), _NUMBER]
PositiveShare = Annotated[float, Field(ge=1e-6, le=1.0, allow_inf_nan=False), _NUMBER]
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


# What no file name, database or terminal takes is refused.
Text = Annotated[str, Field(max_length=4000), AfterValidator(_is_text)]
Name = Annotated[str, Field(max_length=400), AfterValidator(_is_text), AfterValidator(_is_name)]
OneName = Annotated[
    str, Field(max_length=200), AfterValidator(_is_text), AfterValidator(_is_one_name)
]
# A path, or a SQLite URL, with ~ for the home directory.
HomePath = Annotated[Text, AfterValidator(expand_home)]
# The address of a service; empty: none.
Uri = Annotated[str, Field(max_length=4000), AfterValidator(_is_uri), AfterValidator(expand_home)]
# Instantiated by Hydra: takes what its target takes.
Node = dict[str, Any]


class Section(BaseModel):
    """A group of options; unknown ones are mistakes, and none changes once it is checked."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        coerce_numbers_to_str=True,
        use_attribute_docstrings=True,
    )


class OpenSection(Section):
    """Arguments of a node's target: those that are named here have a type."""

    model_config = ConfigDict(extra="allow")


AnySection = TypeVar("AnySection", bound=Section)


class Lookup(Protocol):
    """What checks need of the config that the values come from; pydantic's ``context``."""

    def value_at(self, key: str) -> object:
        """Give the value at a dotted key; the text ``nothing`` where there is none."""

    def is_reference(self, section: str, name: str) -> bool:
        """Whether a value of a section is a reference to another one, where it is checked."""


class PlainLookup:
    """The lookup of values without references, as a study's folder holds them."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self._values = values

    def value_at(self, key: str) -> object:
        """Give the value at a dotted key; the text ``nothing`` where there is none."""
        value: object = self._values
        for part in key.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return "nothing"
            value = value[part]
        return value

    def is_reference(self, section: str, name: str) -> bool:
        """Say no: there are none."""
        return False


def _lookup_of(info: ValidationInfo) -> Lookup:
    lookup: Lookup | None = info.context
    if lookup is None:
        raise TypeError("options are checked with a Lookup as the context")
    return lookup


# Workloads


class ReferenceOptions(Section):
    """A pair that goes together."""

    batch_size: PositiveFinite
    """Batch size, in examples."""
    lr: PositiveFinite
    """Learning rate that goes with it."""


class BatchSizeRange(Section):
    """The batch sizes that are searched."""

    low: Positive
    """Smallest batch size, in examples."""
    high: Positive
    """Largest batch size, always a candidate itself."""

    @model_validator(mode="after")
    def _is_range(self) -> Self:
        _check_range(self.low, self.high)
        return self


class SearchedBatchSizes(BatchSizeRange):
    """The batch sizes that a study searches."""

    multiple: Positive | None
    """Batch sizes are multiples of this; null: 8 under mixed precision on CUDA, else 1."""


class BudgetOptions(Section):
    """A trial ends once both are spent."""

    steps: Positive
    """Optimizer steps of one trial."""
    examples: Positive
    """Examples that one trial trains on."""

    @property
    def budget(self) -> Budget:
        """The budget as trials have it."""
        return Budget(self.steps, self.examples)


class TrialBudgetOptions(BudgetOptions):
    """A trial gives up once both its steps and its examples are spent."""

    seconds: PositiveSeconds | None
    """Training seconds of one trial, by tau(B), for search.objective=loss; null: its examples,
    or its steps where examples=1."""


class TargetOptions(Section):
    """What a trial is to reach."""

    metric: Text
    """Name of a metric that the module logs in validation."""
    value: Annotated[Finite | Literal["auto"], BeforeValidator(_auto_or_number)]
    """Value to reach; auto: what the reference reaches by the end of its budget."""
    mode: Literal["min", "max"]
    """min: a value of at most the target reaches it; max: of at least."""
    bounds: list[Number] | None = None
    """Range of the metric by definition, as [0, 1] for an error; null: none."""

    @model_validator(mode="after")
    def _can_be_reached(self) -> Self:
        if self.bounds is None:
            return self
        if len(self.bounds) != 2 or not self.bounds[0] < self.bounds[1]:
            raise ValueError(f"bounds must be two increasing numbers, but got {self.bounds}")
        target = self.target
        if target.is_open:
            return self
        low, high = self.bounds
        best = low if self.mode == "min" else high
        worst = high if self.mode == "min" else low
        if target.gap(best) > 0:
            raise ValueError(
                f"the target {target} cannot be reached: {target.metric} lies in {self.bounds}"
            )
        if target.gap(worst) <= 0:
            raise ValueError(
                f"the target {target} is met by every value in {self.bounds}: check mode and value"
            )
        return self

    @property
    def target(self) -> Target:
        """The target as trials have it; open where its value is that of a first trial."""
        if self.value == "auto":
            return Target(self.metric, 0.0, self.mode).never_met
        return Target(self.metric, self.value, self.mode)


class TunableOptions(Section):
    """A further hyper-parameter that a search may tune."""

    key: Text
    """Dotted key of the number that it sets."""
    low: Finite
    """Smallest value."""
    high: Finite
    """Largest value."""
    log: bool = False
    """Search on a log scale."""
    integer: bool = False
    """Search whole numbers alone."""
    complement: bool = False
    """Search 1 - value, as for a momentum."""

    @model_validator(mode="after")
    def _is_searchable(self) -> Self:
        ends = f"low={self.low:g} and high={self.high:g}"
        # These are made anew for each trial.
        places = (MODULE, BUDGET)
        if not self.key.startswith(places) and self.key not in HALF_LIVES:
            half_lives = " or ".join(HALF_LIVES)
            raise ValueError(
                f"key must lie below workload.module or budget, or be {half_lives}, "
                f"but got {self.key!r}"
            )
        if not self.low < self.high:
            raise ValueError(f"low must be less than high, but got {ends}")
        if self.log and not self.complement and not self.low > 0:
            raise ValueError(f"low must be over 0 on a log scale, but got {ends}")
        if self.log and self.complement and not self.high < 1:
            raise ValueError(
                f"high must be less than 1 where its complement is on a log scale, but got {ends}"
            )
        if self.integer and self.complement:
            raise ValueError("a whole number has no complement: leave out complement or integer")
        if self.integer and not (self.low.is_integer() and self.high.is_integer()):
            raise ValueError(f"low and high of a whole number must be whole, but got {ends}")
        return self


class WorkloadOptions(Section):
    """What a workload states, whether it is trained or answered from a table."""

    name: OneName
    """Name of the workload."""
    precision: Precision
    """Precision in which its reference trains."""
    trials: PositiveFew
    """Configurations that a search of it tries."""
    reference: ReferenceOptions
    """The batch size and learning rate that its user runs today."""
    batch_size: BatchSizeRange
    """The batch sizes that are worth a try."""
    budget: BudgetOptions
    """When a trial gives up."""
    target: TargetOptions
    """What a trial is to reach."""
    evaluation_cost: PositiveFinite | None = Field(default=None, exclude=True)
    """Cost of an evaluated example, in trained ones; null: the protocol's."""
    fast: Fast | None = Field(default=None, exclude=True)
    """How steps are taken, as in protocol.fast; null: the protocol's."""
    tokens: Positive | None = Field(default=None, exclude=True)
    """Tokens of an example, in which answers state batch sizes too."""
    trainer: Node = {}
    """Further arguments of Lightning's Trainer."""
    tunable: dict[str, TunableOptions] = {}
    """The further hyper-parameters that search.tune may name."""

    @field_validator("tunable")
    @classmethod
    def _has_free_names(cls, tunable: dict[str, TunableOptions]) -> dict[str, TunableOptions]:
        taken = sorted({"batch_size", "lr", "delta"} & tunable.keys())
        if taken:
            raise ValueError(f"a study has {', '.join(taken)} already: choose another name")
        return tunable


class TrainedWorkload(WorkloadOptions):
    """A workload whose trials are trained."""

    data: Node
    """Node that builds the LightningDataModule."""
    module: Node
    """Node that builds a trial's LightningModule."""

    @field_validator("data", mode="before")
    @classmethod
    def _is_no_loader(cls, data: object) -> object:
        """Refuse loaders by their names: what else is none is known only once it is imported and built."""
        target = ""
        if isinstance(data, Mapping):
            target = str(data.get("_target_") or data.get("class_path") or "")
        is_loader = target.rpartition(".")[2] == "DataLoader" or target in COLLECTIONS
        if is_loader or isinstance(data, list | tuple):
            raise ValueError(NO_DATA_MODULE.format(got=target or "a list"))
        return data


class ReplayedWorkload(WorkloadOptions):
    """A workload whose trials are answered from recorded runs."""

    table: Text
    """The name of a table that ships, or the path of one."""


class GivenWorkload(WorkloadOptions):
    """A workload of Python objects; what they are stands here in words alone."""

    given_data: Text
    """The class of the data module."""
    given_module: Text
    """The class of the modules."""
    given_trainer: Node
    """Further arguments of Lightning's Trainer, objects by their classes."""


# What a search does


class SearchOptions(Section):
    """How a study spends its trials."""

    objective: Objective
    """time (steps x seconds per step), steps, both (Pareto), curve (B_crit), or loss (best
    metric within a budget)."""
    trials: PositiveFew
    """Configurations to try, over all runs of the command; a continued one counts once."""
    seconds: PositiveSeconds | None
    """Training seconds, a sum over all trials and workers; trials under way finish; null: no
    limit."""
    wall_seconds: PositiveSeconds | None
    """Wall time of all runs of the command, reports included; null: no limit."""
    precision: OverOne | None
    """Factor that ends the search once B_crit's 90% interval is narrower; null: never."""
    least_gain: PositiveFinite | None
    """Expected gain, in scatters of a seed, at which objective=loss ends; null: never."""
    replicates: WholeTo1000
    """Fresh seeds on which a winner runs again, after the search."""
    candidates: OneTo1000
    """Most configurations that run again; the next one does if it is predicted to be better."""
    baseline: bool
    """Trial 0 runs the reference pair, over which the answer states the gain."""
    tune: list[Text]
    """Further hyper-parameters to search, by their names under workload.tunable."""
    workers: WholeTo1000
    """Trials side by side, each in its own process; 0: in this process, to debug."""
    lease_seconds: Annotated[float, Field(ge=0.1, le=1e6, allow_inf_nan=False), _NUMBER]
    """Silence of another machine's process, in seconds, after which its trials run again."""
    stratified: Share
    """Share of trials whose B is spread evenly over log B, under samplers that stop none."""
    batch_size: SearchedBatchSizes
    """The range of the search."""


class TrialOptions(Section):
    """With batch_size and lr, one trial is trained instead of a study."""

    batch_size: Positive | None
    """Batch size of the one trial."""
    lr: PositiveFinite | None
    """Learning rate of the one trial."""
    seed: Seed
    """Seed of the one trial."""
    total_steps: Count | None
    """Steps of the trial's horizon, at most its budget; bstune sets it."""

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if (self.batch_size is None) != (self.lr is None):
            pair = f"batch_size={shown(self.batch_size)} and lr={shown(self.lr)}"
            raise ValueError(
                f"to train one trial, give both trial.batch_size and trial.lr, but got {pair}"
            )
        return self


class ScalingOptions(Section):
    """The rule of the learning rate, which the search begins from."""

    batch_size: PositiveFinite
    """Batch size of the pair that the rule passes through."""
    lr: PositiveFinite
    """Learning rate of that pair."""
    noise_scale: PositiveFinite | None
    """Noise scale in examples, which the rules saturating and surge need."""
    beta2_half_life: PositiveFinite | None
    """Half-life of Adam's second moments, in examples: beta2 is 2^(-B / this); null: unchanged."""
    weight_decay_half_life: PositiveFinite | None
    """Half-life of a weight without gradient, in examples; null: weight decay is unchanged."""
    override_lr: bool
    """Set the trial's rate in the module's optimizers, whose own stands in configure_optimizers."""
    lr_octaves_sigma: Annotated[float, Field(ge=0.001, le=30.0, allow_inf_nan=False), _NUMBER]
    """Sigma of delta = log2(lr / rule(B)), in octaves; Optuna's samplers search +-3 sigma."""
    lr_octaves: Annotated[float, Field(ge=0.001, le=100.0, allow_inf_nan=False), _NUMBER]
    """Octaves on each side of the rule that bstune's own sampler searches."""
    rule: Node
    """The function that gives the learning rate of a batch size."""


class PriorOptions(Section):
    """Priors of bstune's posterior, in the search and in the report."""

    level_sigma: Sigma
    """Sigma of the best learning rate around the rule, in octaves, heavy-tailed."""
    exponent_sigma: Sigma
    """Sigma of the exponent of lr*(B) around the rule's."""


class ProtocolOptions(Section):
    """What stays fixed in every trial."""

    evaluation_ratio: OverOne
    """Ratio of the steps of successive evaluations, near the target."""
    evaluation_share: PositiveShare
    """Most that evaluation near the target costs, as a share of training, in examples."""
    evaluation_cost: PositiveFinite
    """Cost of an evaluated example, in trained ones."""
    close_to_target: OverOne
    """Near: the target is predicted within this many times the steps so far."""
    micro_batch_size: Positive | None
    """Examples of a micro-batch, of which larger batches are accumulated; null: never."""
    warmup_steps: Count
    """First steps, left out of the seconds per step."""
    trial_seconds: PositiveSeconds | None
    """Wall time after which a trial has failed; null: none, 300 s for a preflight step."""
    divergence: PositiveFinite
    """Distance from the target, over that at the start, from which a trial has diverged."""
    noise_scale_every: Positive | None
    """Steps between measurements of the noise scale, a prior of B_crit; null: none."""
    fast: Fast
    """auto: bstune's lean loop where nothing differs; off: Lightning's; graph: auto, in CUDA
    graphs on CUDA."""


# What the machine has


class DataOptions(Section):
    """Where data sets lie."""

    root: HomePath
    """Folder of the data sets."""


class RelativePrecision(Section):
    """Of the largest batch size that fits, as a share of it; 0: exact to the multiple."""

    cpu: BelowOne
    """Precision of a CPU's ceiling, as a share of it; 0: exact to the multiple."""
    cuda: BelowOne
    """Precision of a CUDA device's ceiling, likewise."""


class MemoryOptions(Section):
    """The probes for the largest batch size that fits."""

    limit: Bytes | None
    """Bytes that all processes share; null: the device's, or a CPU's free memory."""
    free_share: PositiveShare
    """Share that is used of a CPU's free memory."""
    relative: RelativePrecision
    """Precision of the ceiling."""
    steps: PositiveFew
    """Steps of a probe; the optimizer's state exists from the second on."""
    verify: WholeTo1000
    """Further probes that the ceiling has to pass."""
    probe_seconds: PositiveSeconds
    """Seconds after which a probe has failed."""


class StepTimeOptions(Section):
    """How seconds per step are measured."""

    rungs: Annotated[int, Field(ge=2, le=1000), _NUMBER]
    """Batch sizes to time, evenly over log B, both ends included."""
    repeats: OneTo1000
    """Visits to each, in shuffled order."""
    visit_seconds: PositiveSeconds
    """Timed seconds of a visit, within min_steps and max_steps."""
    min_steps: PositiveFew
    """Fewest steps of a visit."""
    max_steps: PositiveFew
    """Most steps of a visit."""
    warmup_steps: Few
    """Untimed steps before a visit."""


class CeilingOptions(Section):
    """How the device's own ceilings, of the roofline, are measured."""

    seconds: PositiveSeconds
    """Seconds for each kind of ceiling."""
    matrix_sizes: Annotated[
        list[Annotated[int, Field(ge=1, le=2**15), _NUMBER]], Field(min_length=1, max_length=1000)
    ]
    """Sizes of square products, as far as time allows."""
    copy_bytes: Annotated[
        list[Annotated[int, Field(ge=1, le=2**36), _NUMBER]], Field(min_length=1, max_length=1000)
    ]
    """Bytes of the copies that measure memory bandwidth."""
    traced_batch_sizes: SomeFew
    """Two batch sizes whose steps give FLOPs and bytes; batch normalisation needs 2 or more."""


class AllReduceOptions(Section):
    """Of the gradients; without it the plan is the ideal alone."""

    bytes_per_second: PositiveFinite | None
    """Bytes per second of one link of a ring; null: unknown."""
    latency: Seconds
    """Seconds a message."""
    seconds: dict[PositiveFew, PositiveSeconds] | None
    """Measured seconds by number of devices, as {2: 0.001, 8: 0.002}; null: none."""
    overlap: Annotated[float, Field(ge=1.0, le=1e6, allow_inf_nan=False), _NUMBER]
    """Overlap of exchange and step: 1: none; larger: more; 1e6: all."""

    @model_validator(mode="after")
    def _is_one_of_two(self) -> Self:
        if self.seconds is not None and self.bytes_per_second is not None:
            raise ValueError("give bytes_per_second or seconds, not both")
        if self.seconds is not None and max(self.seconds, default=0) < 2:
            raise ValueError(f"seconds must be given for 2 devices or more, but got {self.seconds}")
        return self


class ScaleOutOptions(Section):
    """The plan for several devices, after a study."""

    show: bool
    """Draw scale_out.png and print its table; the answer has the first rows anyway."""
    devices: SomeFew
    """Numbers of devices to plan for."""
    candidate_ratio: Annotated[float, Field(ge=1.001, le=1e6, allow_inf_nan=False), _NUMBER]
    """Largest ratio between neighbouring candidates of batch size per device."""
    all_reduce: AllReduceOptions
    """The exchange of gradients."""


class HardwareOptions(Section):
    """The survey of what the hardware allows, before a study or alone."""

    enabled: bool
    """Survey before a study; false: search the range as given."""
    seconds: PositiveSeconds
    """Seconds of a survey, at most a tenth of search.wall_seconds; what is left out is listed."""
    refresh: bool
    """Measure again instead of reading the cache."""
    cache: HomePath
    """Folder of surveys, by workload, device and versions."""
    memory: MemoryOptions
    """The largest batch size that fits."""
    step_time: StepTimeOptions
    """Seconds per step."""
    ceilings: CeilingOptions
    """Of the device itself."""
    scale_out: ScaleOutOptions
    """Several devices."""


class MlflowOptions(Section):
    """What is logged to MLflow."""

    enabled: bool
    """Log to MLflow."""
    experiment: Text
    """MLflow's experiment of studies; that of trials adds -trials."""
    uri: Uri | None
    """MLflow's address; null: sqlite:///mlflow.db in the working directory."""
    seconds: Seconds
    """Most seconds of sending in one trial; the next run sends the rest."""
    study_seconds: Seconds
    """Most seconds that a run waits for MLflow in all."""
    request_seconds: PositiveFew
    """Seconds until one HTTP request times out."""
    retries: Annotated[int, Field(ge=0, le=10), _NUMBER]
    """Retries of one HTTP request; MLflow allows at most 10."""


# The numbers of conf/sampler/


class PolicyNumbers(OpenSection):
    """How bstune's sampler chooses among what its posterior says."""

    particles: Annotated[int, Field(ge=10, le=10_000), _NUMBER] = 10
    moves: OneTo1000 = 1
    candidates: Annotated[int, Field(ge=10, le=2000), _NUMBER] = 10
    initial_fraction: Factor = 1
    max_growth: Factor = 1
    max_first_growth: Factor = 1
    probe_fraction: Factor = 1
    max_predicted_fraction: Factor = 1
    stop_factor: OverOne = 2
    cost_weight: Weight = 0
    random_fraction: Share = 0
    curve_after: Weight = 0
    curve_share: Share = 0
    curve_cost: Factor = 1
    curve_width: OverOne = 2
    loss_first_share: PositiveShare = 1
    loss_sure: Weight = 0
    loss_early: Weight = 0
    loss_cost_weight: Weight = 0
    loss_fresh_after: Factor = 1
    loss_drift: Factor = 1
    loss_spread: Factor = 1
    loss_least_slope: Factor = 1


class SamplerNumbers(OpenSection):
    """The arguments of the samplers that ship."""

    sigma: Sigma | None = None
    exponent_sigma: Sigma | None = None
    noise_scale: PositiveFinite | None = None
    n_startup_trials: Few = 0
    ratio: OverOne = 2
    policy: PolicyNumbers | None = None


# The whole


class StudyOptions(Section):
    """Every option of a study, checked."""

    study: Name
    """Name of the study, which the same name and settings continue."""
    seed: Seed
    """Seed of the study, from which trials and sampler have theirs."""
    output: HomePath
    """Folder of the study's files."""
    storage: HomePath
    """Optuna's storage: URL of SQLite, PostgreSQL or a gRPC proxy."""
    device: Text
    """cpu, cuda, or auto: CUDA where there is one."""
    devices: Annotated[int, Field(ge=1, le=1024), _NUMBER]
    """Devices that share each batch by DDP: CUDA's, or processes on a CPU."""
    precision: Precision
    """Precision of the Trainer; auto: bf16-mixed on CUDA, else 32-true."""
    threads: Annotated[
        Literal["auto"] | Annotated[int, Field(ge=1, le=MOST_THREADS)],
        BeforeValidator(_auto_or_count),
    ]
    """Threads of torch on a CPU; auto: the fastest of one, half, all, or OMP_NUM_THREADS."""
    seconds_of: Literal["auto", "trainer", "lean"]
    """Loop whose steps the survey times; auto: lean for bstune's own modules, else trainer."""
    compile: CompileMode | None
    """Mode of torch.compile; null: eager. Raise hardware.seconds and
    hardware.memory.probe_seconds with it."""
    quick: bool = False
    """Two minutes of wall time: search.wall_seconds=120 unless that is set."""
    debug: bool
    """Show a traceback instead of a plain message."""
    workload: WorkloadOptions
    """What is trained, and what is to be reached."""
    budget: TrialBudgetOptions
    """Of one trial."""
    scaling: ScalingOptions
    """The rule of the learning rate."""
    prior: PriorOptions
    """Of the posterior."""
    protocol: ProtocolOptions
    """Of every trial."""
    trial: TrialOptions
    """One trial in place of a study."""
    data: DataOptions
    """Data sets."""
    trainer: Node
    """Further arguments of Lightning's Trainer."""
    hardware: HardwareOptions
    """The survey."""
    mlflow: MlflowOptions
    """Tracking."""
    sampler: Node
    """An optuna.samplers.BaseSampler and its arguments."""
    search: SearchOptions
    """The search; last, as its check reads the others."""

    @field_validator("sampler")
    @classmethod
    def _has_numbers_in_range(cls, sampler: Node, info: ValidationInfo) -> Node:
        _check_sampler(sampler, _lookup_of(info))
        return sampler

    @field_validator("search")
    @classmethod
    def _goes_with_the_rest(cls, search: SearchOptions, info: ValidationInfo) -> SearchOptions:
        protocol = info.data.get("protocol")
        workload = info.data.get("workload")
        budget = info.data.get("budget")
        if budget is not None and budget.seconds is not None and search.objective != "loss":
            raise ValueError(
                f"budget.seconds={budget.seconds:g} is of search.objective=loss, but got "
                f"search.objective={search.objective}: a trial for a target ends by budget.steps "
                "and budget.examples"
            )
        if protocol is not None:
            _check_own_process(search, protocol)
        if workload is not None:
            _check_tune(search, workload, _lookup_of(info))
            trial = info.data.get("trial")
            hardware = info.data.get("hardware")
            if trial is not None and hardware is not None:
                _check_workers(search, workload, trial, hardware)
        return search


class TrainedOptions(StudyOptions):
    """The options of a study whose trials are trained."""

    workload: TrainedWorkload
    """What is trained, and what is to be reached."""


class ReplayedOptions(StudyOptions):
    """The options of a study whose trials are answered from a table."""

    workload: ReplayedWorkload
    """What is replayed, and what is to be reached."""


class GivenOptions(StudyOptions):
    """The options of a study whose trials train Python objects."""

    workload: GivenWorkload
    """What is trained, and what is to be reached."""


OPTION_NAMES = frozenset(StudyOptions.model_fields)


def kind_of_options(workload: object) -> type[StudyOptions]:
    """Choose the options that go with a workload's keys: replayed, given in Python, or trained."""
    keys = set(workload) if isinstance(workload, Mapping) else set()
    if "table" in keys:
        return ReplayedOptions
    if "given_module" in keys:
        return GivenOptions
    return TrainedOptions


def option_at(options: BaseModel, key: str) -> object:
    """Look up an option, or a part of a node, by its dotted key; None where there is none."""
    value: object = options
    for part in key.split("."):
        if isinstance(value, BaseModel):
            value = getattr(value, part, None)
        elif isinstance(value, Mapping):
            value = value.get(part)
        elif isinstance(value, list) and part.isdigit() and int(part) < len(value):
            # As the second of Adam's betas.
            value = value[int(part)]
        else:
            return None
    return value


def with_option(options: AnySection, key: str, value: object) -> AnySection:
    """Copy the options with another value in the place of one of them, by its dotted key.

    The value is not checked again: it is bstune's own, or that of a tunable.

    Raises:
        AttributeError: for a key that no option has.
    """
    name, _, rest = key.partition(".")
    if name not in type(options).model_fields:
        raise AttributeError(f"{type(options).__name__} has no option {name}")
    if rest:
        value = with_option(getattr(options, name), rest, value)
    return options.model_copy(update={name: value})


def with_tuned(options: StudyOptions, values: Mapping[str, float]) -> StudyOptions:
    """Copy the options with the values of a trial's tunables that are options of bstune's own.

    Those below ``workload.module`` are the recipe's, which builds the module from them.
    """
    for name, value in values.items():
        key = options.workload.tunable[name].key
        if not key.startswith(MODULE):
            options = with_option(options, key, value)
    return options


def overrides(options: StudyOptions, values: Mapping[str, float]) -> list[str]:
    """Write the arguments of the command line that give tunables their values."""
    return [f"{options.workload.tunable[name].key}={value!r}" for name, value in values.items()]


def flat_settings(options: StudyOptions) -> dict[str, object]:
    """Collect the settings, by dotted key, that must not change while a study goes on.

    Budget, sampler and what the search spends may; so may the place of the data, whose checksums
    are pinned.
    """
    sections = ("workload", "scaling", "prior", "protocol", "trainer")
    values = flatten(options.model_dump(mode="json", include=set(sections)))
    values |= flatten({"search": {"batch_size": options.search.batch_size.model_dump()}})
    for name in ("trials", "budget.steps", "budget.examples"):
        values.pop(f"workload.{name}", None)
    # What may be searched is no matter of a study that does not.
    searched = tuple(f"workload.tunable.{name}." for name in options.search.tune)
    for key in list(values):
        if key.startswith("workload.tunable") and not key.startswith(searched):
            del values[key]
    # A study from before there was this option continues.
    if not options.scaling.override_lr:
        del values["scaling.override_lr"]
    if options.search.objective == "loss":
        # There it is what is asked, and the value of a target is not.
        values |= flatten({"budget": options.budget.model_dump()})
        values.pop("workload.target.value", None)
    return {**values, "search.objective": options.search.objective, "seed": options.seed}


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Join nested mappings to one, its keys joined by dots."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{name}."))
        else:
            flat[name] = value
    return flat


def _check_range(low: float, high: float) -> None:
    if low > high:
        raise ValueError(f"low must be at most high, but got low={low:g} and high={high:g}")


def _check_own_process(search: SearchOptions, protocol: ProtocolOptions) -> None:
    if search.workers == 0 and protocol.trial_seconds is not None:
        raise ValueError(
            f"search.workers=0 runs trials in this process, which cannot end one after "
            f"protocol.trial_seconds={protocol.trial_seconds:g}: use search.workers=1, or "
            "protocol.trial_seconds=null"
        )


def _check_tune(search: SearchOptions, workload: WorkloadOptions, lookup: Lookup) -> None:
    for name in search.tune:
        named = f"search.tune names {name!r}"
        if name not in workload.tunable:
            listed = ", ".join(workload.tunable) or "nothing"
            instead = ""
            if name == "horizon":
                instead = "; the search chooses each trial's horizon without it"
            raise ValueError(
                f"{named}, but the workload {workload.name} lists {listed} under "
                f"workload.tunable{instead}"
            )
        if search.tune.count(name) > 1:
            raise ValueError(f"{named} twice")
        if isinstance(workload, GivenWorkload):
            # Its module's arguments are no numbers of a config.
            continue
        key = workload.tunable[name].key
        value = lookup.value_at(key)
        # null: what it tunes is off.
        if type(value) not in (int, float, type(None)):
            raise ValueError(
                f"workload.tunable.{name}.key={key} must name a number of the config, or null, "
                f"but got {value} there"
            )


def _check_workers(
    search: SearchOptions,
    workload: WorkloadOptions,
    trial: TrialOptions,
    hardware: HardwareOptions,
) -> None:
    if search.workers <= 1 or trial.batch_size is not None:
        return
    reason = None
    if isinstance(workload, ReplayedWorkload):
        reason = f"workload {workload.name} is answered from recorded runs, which need no training"
    elif not hardware.enabled:
        # Trials slow each other down.
        reason = "seconds per step are the survey's, measured alone: it needs hardware.enabled=true"
    if reason is not None:
        raise ValueError(f"search.workers={search.workers}: {reason}; or use search.workers=1")


def _check_sampler(sampler: Node, lookup: Lookup) -> None:
    """Check the numbers of a sampler that ships; a reference is checked where it leads."""
    if not str(sampler.get("_target_")).startswith(("bstune.search.", "optuna.samplers.")):
        return
    try:
        SamplerNumbers.model_validate(sampler)
    except ValidationError as error:
        for one in error.errors():
            if not lookup.is_reference("sampler", str(one["loc"][0])):
                option = ".".join(["sampler", *map(str, one["loc"])])
                raise ValueError(mistake(option, one)) from error


def mistake(name: str, error: Mapping[str, Any]) -> str:
    """Return one of pydantic's errors as a line: the option, what is allowed and what was received."""
    if error["type"] == "missing":
        allowed = _choices_of(StudyOptions, name)
        if allowed:
            return f"{name} is missing: give it one of {', '.join(allowed)}, as {name}={allowed[0]}"
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


def _choices_of(section: type[BaseModel], name: str) -> list[str]:
    """List what an option may be, by its dotted name, where that is one of some words; empty elsewhere."""
    first, _, rest = name.partition(".")
    field = section.model_fields.get(first)
    if field is None:
        return []
    annotation: object = field.annotation
    if rest:
        is_section = isinstance(annotation, type) and issubclass(annotation, BaseModel)
        return _choices_of(annotation, rest) if is_section else []  # type: ignore[arg-type]
    return [str(one) for one in get_args(annotation)] if get_origin(annotation) is Literal else []


def shown(value: object) -> str:
    """Return a value as messages quote it, cut if it is long."""
    text = "null" if value is None else repr(value)
    return text if len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)"
