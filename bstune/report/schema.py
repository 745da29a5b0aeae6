"""What a study's files may hold: the type and the bounds of every value that the report reads.

    summary = checked(CurveFile, parse_json(text, "curve.json"), "outputs/digits/curve.json")

A folder may come from anybody. So everything that is read of it passes through these models first, and the code
behind them meets no text where it counts, no negative batch size and no list of another length. Keys that are not
named here are dropped; those that a file may lack have a default.
"""

import shlex
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from bstune.core.errors import StudyError
from bstune.core.records import STATUSES, Objective
from bstune.report.rows import WINNERS
from bstune.system.inputs import one_line

LARGEST = 1e15  # of counts and measurements: beyond what any study reports, and below where floats lose integers
MAX_ROWS = 100_000  # of a list
MAX_TEXT = 100_000  # characters

Count = Annotated[int, Field(ge=0, le=LARGEST)]
BatchSize = Annotated[int, Field(ge=1, le=LARGEST)]  # examples
# Metrics and their distances may be as large as a float can be, of trials that diverge.
Real = Annotated[float, Field(allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0.0, le=LARGEST, allow_inf_nan=False)]
Positive = Annotated[float, Field(ge=1e-15, le=LARGEST, allow_inf_nan=False)]
Rate = Annotated[float, Field(gt=0.0, le=1e30)]  # operations or bytes a second
Level = Annotated[float, Field(gt=0.0, lt=1.0)]  # nominal coverage of an interval
Text = Annotated[str, Field(max_length=MAX_TEXT)]
# An integer stays one: a width of 15.0 is none.
Hyperparameters = dict[Text, Annotated[int, Field(ge=-LARGEST, le=LARGEST)] | Real | None]

Item = TypeVar("Item")
Rows = Annotated[list[Item], Field(max_length=MAX_ROWS)]


def _is_command_of_bstune(value: str) -> str:
    """Refuse what a shell would take for more than one command of bstune: people paste it."""
    words = shlex.split(value)
    if words[:1] != ["bstune"] or shlex.join(words) != value:
        raise ValueError("must be one command that begins with bstune")
    return value


Command = Annotated[Text, AfterValidator(_is_command_of_bstune)]


class Row(BaseModel):
    """Part of a file: no value is converted to another type, unknown keys are dropped."""

    model_config = ConfigDict(strict=True, extra="ignore", populate_by_name=True)


# curve.json


class Spend(Row):
    """What the trials took; ``seconds`` are of training, evaluation and start-up."""

    runs: Count
    seconds: NotNegative
    examples: Count = 0


class Point(Row):
    """A trial on the frontier; ``steps`` is None where it was stopped before the target."""

    number: Count = 0
    batch_size: BatchSize
    lr: Positive
    delta: Real | None = None
    hyperparameters: Hyperparameters = {}
    steps_low: Count = 0
    steps: Count | None
    seconds_per_step: NotNegative | None = None
    time_to_target: NotNegative | None = None
    time_low: NotNegative | None = None
    examples_low: Count = 0
    examples: Count | None = None
    censored: bool = False


class NextTrial(Row):
    """A trial that would narrow the interval of the critical batch size."""

    batch_size: BatchSize
    lr: Positive
    steps: NotNegative
    seconds: NotNegative | None


class CriticalInterval(Row):
    """A critical batch size in examples, its interval and what goes with it."""

    b_crit: Positive | None = None
    b_crit_low: Positive | None = None
    b_crit_high: Positive | None = None
    level: Level = 0.9
    s_min: Positive | None = None
    e_min: Positive | None = None
    b_opt: Positive | None = None
    b_opt_low: Positive | None = None
    b_opt_high: Positive | None = None
    perfect_scaling_below: Positive | None = None
    maximal_data_parallelism_above: Positive | None = None


class Critical(CriticalInterval):
    """The study's own: ``smallest`` and ``largest`` are the batch sizes that reached the target."""

    smallest: BatchSize
    largest: BatchSize
    next_trials: Rows[NextTrial] = []
    note: Text | None = None


class CriticalAtTarget(CriticalInterval):
    """The critical batch size at an easier target, and how many trials passed that."""

    target: Real
    passed: Count


class Regime(Row):
    """A range of batch sizes in which more data parallelism pays alike."""

    name: Text
    start: Positive = Field(alias="from")
    end: Positive = Field(alias="to")


class SmallEnd(Row):
    """The slope of log steps over log batch size at the smallest batch sizes."""

    slope: Real
    standard_error: NotNegative | None
    batch_sizes: Rows[BatchSize]


class Fit(Row):
    """The fit to the frontier's points, a diagnostic."""

    law: Text | None = None
    s_min: Positive | None = None
    b_crit: NotNegative | None = None
    b_crit_low: NotNegative | None = None
    b_crit_high: NotNegative | None = None
    b_opt: NotNegative | None = None
    b_opt_low: NotNegative | None = None
    b_opt_high: NotNegative | None = None
    e_min: NotNegative | None = None
    perfect_scaling_below: NotNegative | None = None
    maximal_data_parallelism_above: NotNegative | None = None
    level: Level = 0.9
    noise: NotNegative | None = None
    note: Text | None = None


class NoiseScaleRow(Row):
    """The gradient noise scale that the trials measured, in examples."""

    noise_scale: Positive | None
    low: Real | None
    high: Real | None
    level: Level
    trials: Count
    steps: Count
    undetermined: Text | None
    ratio_to_critical: NotNegative | None
    ratio_to_fit: NotNegative | None


class Exponent(Row):
    """The exponent of the best learning rate over the batch size, and what each rule's is."""

    exponent: Real
    low: Real
    high: Real
    prior_low: Real
    prior_high: Real
    start: Positive
    end: Positive
    reached: Count
    octaves: NotNegative
    identified: bool
    rules: dict[Text, Real] = {}


class LrExponent(Exponent):
    """The exponent over the whole range, and below the critical batch size."""

    below_b_crit: Exponent | None = None
    level: Level = 0.9


class Confirmed(Row):
    """What a winner's runs on fresh seeds came to."""

    seeds: Rows[Count] = []
    reached: Count
    runs: Count
    time_median: NotNegative | None = None
    time_low: NotNegative | None = None
    time_high: NotNegative | None = None
    steps_median: NotNegative | None = None
    steps_low: NotNegative | None = None
    steps_high: NotNegative | None = None


class SingleRun(Row):
    """What the winner's own trial, which may be a lucky one, came to."""

    steps: Count
    time_to_target: NotNegative | None


class ParetoRow(Row):
    """A trial that no other beats both in steps and in seconds."""

    number: Count
    seed: Count = 0
    batch_size: BatchSize
    lr: Positive
    hyperparameters: Hyperparameters = {}
    horizon: Count | None = None
    steps: NotNegative | None
    seconds_per_step: NotNegative | None = None
    time_to_target: NotNegative | None = None


class WinnerRow(ParetoRow):
    """A winner: ``steps`` and ``time_to_target`` are those to expect of a fresh seed."""

    confirmed: Confirmed | None = None
    single_run: SingleRun | None = None


class SearchRow(Row):
    """The search's budget, and the option that ended it before its trials were through."""

    trials: Count
    replicates: Count = 0
    limit: Text | None = None


class Reference(Row):
    """The pair of batch size and learning rate that the rule goes through."""

    batch_size: Positive
    lr: Positive
    rule: Text


class Curve(Row):
    """S*(B) and its interval on a ladder of batch sizes; all lists have one length."""

    batch_size: Rows[Positive]
    steps: Rows[Positive]
    low: Rows[Positive]
    high: Rows[Positive]
    lr_low: Rows[Positive] | None = None
    lr: Rows[Positive] | None = None
    lr_high: Rows[Positive] | None = None
    seconds_per_step: Rows[NotNegative | None] | None = None

    @model_validator(mode="after")
    def _has_one_length(self) -> "Curve":
        lists = [values for _, values in self if values is not None]
        lengths = {len(values) for values in lists}
        if len(lengths) != 1:
            raise ValueError(f"the lists must have one length, but got {sorted(lengths)}")
        if sorted(self.batch_size) != self.batch_size:
            raise ValueError("batch sizes must rise")
        return self


class Load(Row):
    """Between what the trials' own seconds a step, over the survey's, lie."""

    low: NotNegative
    high: NotNegative


class SeedScatter(Row):
    """The scatter of log steps from seed to seed, one standard deviation."""

    scatter: NotNegative
    low: NotNegative
    high: NotNegative
    level: Level


class BaselineRow(Row):
    """What the configuration that the user runs today came to; ``seconds`` are of training, to ``steps``."""

    number: Count
    batch_size: BatchSize
    lr: Positive
    hyperparameters: Hyperparameters = {}
    status: Text
    steps: Count
    seconds: NotNegative | None = None
    value: Real | None = None
    telling_target: Real | None = None
    runs: Count = 0
    reached: Count = 0


class Gain(Row):
    """How many times as fast the winner is as the baseline, by the study's merit; ``low`` and ``high`` at ``level``."""

    ratio: Positive
    low: Positive | None
    high: Positive | None
    level: Level
    merit: Literal["time", "steps"]
    seeds: Count = 0
    at_least: bool = False


class Compared(Row):
    """What the best point so far and the baseline had come to after as many seconds of training."""

    seconds: NotNegative
    value: Real
    baseline_value: Real


class SoFar(Row):
    """The best point of a study that has not reached its target, and what it is predicted to take."""

    number: Count
    seed: Count = 0
    batch_size: BatchSize
    lr: Positive
    hyperparameters: Hyperparameters = {}
    horizon: Count | None = None
    value: Real
    steps: Count
    seconds: NotNegative | None = None
    predicted_steps: Real | None = None
    predicted_seconds: Real | None = None
    compared: Compared | None = None


class NotRunAgain(Row):
    """A point that may be better than the winner and got no fresh seeds."""

    batch_size: BatchSize
    lr: Positive
    candidates: Count


class Growth(Row):
    """The exponent of the critical batch size over the target's distance from the ideal value."""

    exponent: Real
    low: Real
    high: Real
    level: Level
    ideal: Real
    start: Real = Field(alias="from")
    end: Real = Field(alias="to")


class ClosestTrial(Row):
    """The trial that came closest to a target that none reached."""

    value: Real
    steps: Count
    number: Count
    batch_size: BatchSize
    lr: Positive


class Unreached(Row):
    """What tells why no trial reached the target; ``stopped`` is None where that is not known, and so is the rest."""

    closest: ClosestTrial | None = None
    easier: Real | None = None
    stopped: Count | None = None
    improving: Count = 0
    improving_at_budget: Count = 0
    budget_steps: Count | None = None
    budget_examples: Count | None = None
    smallest_diverged_lr: Positive | None = None
    message: Text | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> "Unreached":
        budget = (self.budget_steps, self.budget_examples)
        if self.stopped is not None and None in budget:
            raise ValueError("stopped trials need a budget_steps and a budget_examples")
        return self


class Devices(Row):
    """The best that a number of devices can do."""

    devices: BatchSize
    device_batch_size: BatchSize
    batch_size: BatchSize
    lr: Positive
    steps: NotNegative
    seconds_per_step: NotNegative
    seconds: NotNegative
    seconds_low: NotNegative
    seconds_high: NotNegative
    device_seconds: NotNegative
    speed_up: NotNegative
    efficiency: NotNegative


class DevicePlans(Row):
    """Plans for several devices; the second is empty where the config states no all-reduce."""

    ideal: Rows[Devices] = []
    with_all_reduce: Rows[Devices] = []


class CurveFile(Row):
    """The content of ``curve.json``."""

    study: Text = "?"
    workload: Text = "?"
    tokens: BatchSize | None = None
    objective: Objective | None = None
    target: Text = "?"
    metric: Text | None = None
    goal: Real | None = None
    mode: Literal["min", "max"] | None = None
    devices: Rows[Text] = []
    training_loops: dict[Text, Count] = {}
    stop_reason: Text | None = None
    trials: Count = 0
    continued: Count = 0
    spend: Spend | None = None
    statuses: dict[Text, Count] = {}
    unreached: Unreached | None = None
    points: Rows[Point]
    critical: Critical | None = None
    regimes: Rows[Regime] = []
    small_end: SmallEnd | None = None
    fit: Fit | None = None
    fit_note: Text | None = None
    noise_scale: NoiseScaleRow | None = None
    lr_exponent: LrExponent | None = None
    best_by_time: WinnerRow | None = None
    best_by_steps: WinnerRow | None = None
    pareto: Rows[ParetoRow] = []
    use: Text | None = None
    train: Command | None = None
    arguments: Rows[Text] | None = None
    search: SearchRow | None = None
    reference: Reference | None = None
    curve: Curve | None = None
    load: Load | None = None
    seed_scatter: SeedScatter | None = None
    baseline: BaselineRow | None = None
    gain: Gain | None = None
    so_far: SoFar | None = None
    not_run_again: NotRunAgain | None = None
    over_target: Rows[CriticalAtTarget] = []
    over_target_note: Text | None = None
    over_target_growth: Growth | None = None
    test: dict[Text, dict[Text, Real | None]] = {}
    scale_out: DevicePlans = DevicePlans()
    notes: Rows[Text] = []

    @model_validator(mode="after")
    def _is_consistent(self) -> "CurveFile":
        if self.use is not None and (self.use not in WINNERS or getattr(self, self.use) is None):
            raise ValueError(f"use names {self.use!r}, which is no winner of the file")
        unknown = sorted(self.statuses.keys() - set(STATUSES))
        if unknown:
            raise ValueError(f"statuses has unknown {unknown}")
        self.statuses = dict.fromkeys(STATUSES, 0) | self.statuses
        why = self.unreached
        explains = why is not None and why.stopped is not None and self.statuses["diverged"] > 0
        if why is not None and explains and why.smallest_diverged_lr is None:
            raise ValueError("unreached lacks the smallest_diverged_lr of trials that diverged")
        return self


# hardware.json


class Probe(Row):
    """A batch size whose memory was measured, in bytes."""

    batch_size: BatchSize
    outcome: Text
    limit: Count | None = None
    peak_bytes: Count | None = None


class MemoryModel(Row):
    """Bytes of a training step: ``base`` and so many an example."""

    base: Real
    per_example: Real


class CeilingAt(Row):
    """The largest batch size that fits, and the limit in bytes."""

    batch_size: BatchSize
    limit: Count | None = None


class Ceiling(Row):
    """The memory ceiling and the probes that found it."""

    at: CeilingAt
    smallest: BatchSize
    model: MemoryModel | None = None
    probes: Rows[Probe] = []


class Timing(Row):
    """Seconds of a step at a batch size, with quartiles; ``bare``: without what bstune adds."""

    batch_size: BatchSize
    seconds: Positive
    low: NotNegative
    high: NotNegative
    bare: NotNegative | None = None


class Measured(Row):
    """The timed steps."""

    timings: Rows[Timing] = []


class Limits(Row):
    """What the device can compute and move in a second."""

    flops_per_second: Rate
    bytes_per_second: Rate


class Achieved(Row):
    """The share of the device's peak that steps at a batch size achieve."""

    batch_size: BatchSize
    share_of_peak: NotNegative
    intensity: NotNegative | None = None


class Derived(Row):
    """What the survey concludes."""

    achieved: Rows[Achieved] = []
    advice: Rows[Text] = []


class HardwareFile(Row):
    """The content of ``hardware.json`` as far as the page shows it."""

    device: Text = "?"
    precision: Text = "?"
    high: BatchSize
    ceiling: Ceiling
    measured: Measured
    limits: Limits | None = None
    derived: Derived = Derived()


File = TypeVar("File", bound=Row)


def checked(model: type[File], values: object, what: str) -> dict[str, Any]:
    """Check the content of a file against its model and give it as plain values with all keys of the model.

    StudyError names ``what`` and the first value that the file may not hold.
    """
    try:
        return model.model_validate(values).model_dump(by_alias=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        reason = f"{where}: {first['msg']}" if where else first["msg"]
        raise StudyError(
            f"{what} is no file of this version of bstune: {one_line(reason)}"
        ) from error
