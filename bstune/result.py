"""A study's result: all that a finished study found, as one typed, frozen value.

    result = StudyResult.model_validate_json(path.read_text())
    result.critical_batch_size.value if result.critical_batch_size else None  # examples

It is built once, at the end of a study. ``curve.json`` is its dump and reads back to an equal
value; the console, the pages, the figures, comparisons and MLflow read its attributes.

A folder may come from anybody. So every value has its type and its bounds here, no value is
converted to another type and an unknown key is refused: the code behind meets no text where it
counts, no negative batch size and no list of another length.
"""

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal, NamedTuple, TypeVar

from pydantic import AfterValidator, BaseModel, Field, model_validator

# For whoever reads a result's intervals, too.
from bstune.core.interval import INTERVAL_LEVEL as INTERVAL_LEVEL
from bstune.core.interval import INTERVAL_QUANTILE as INTERVAL_QUANTILE
from bstune.core.objectives import Objective
from bstune.core.records import STATUSES, Merit, Status, dump_json

# Of curve.json: a change of its keys or of their meaning counts it up, one more that may be missing
# does not.
SCHEMA_NUMBER = 5
# Of counts and measurements: beyond what any study reports, below where floats lose integers.
LARGEST_COUNT = 1e15
MAX_ITEMS = 100_000  # of a list
MAX_TEXT = 100_000  # characters

Count = Annotated[int, Field(ge=0, le=LARGEST_COUNT)]
FromOne = Annotated[int, Field(ge=1, le=LARGEST_COUNT)]
BatchSize = FromOne  # examples
# Metrics and their distances may be as large as a float can be, of trials that diverge.
Real = Annotated[float, Field(allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0.0, le=LARGEST_COUNT, allow_inf_nan=False)]
Positive = Annotated[float, Field(ge=1e-15, le=LARGEST_COUNT, allow_inf_nan=False)]
Level = Annotated[float, Field(gt=0.0, lt=1.0)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Text = Annotated[str, Field(max_length=MAX_TEXT)]
# An integer stays one: a width of 15.0 is none.
Whole = Annotated[int, Field(ge=-LARGEST_COUNT, le=LARGEST_COUNT)]
Hyperparameters = dict[Text, Whole | Real | None]

Item = TypeVar("Item")
Items = Annotated[tuple[Item, ...], Field(max_length=MAX_ITEMS)]


def _is_command_of_bstune(value: str) -> str:
    """Refuse what a shell would take for more than one command of bstune: people paste it."""
    words = shlex.split(value)
    if words[:1] != ["bstune"] or shlex.join(words) != value:
        raise ValueError("must be one command that begins with bstune")
    return value


Command = Annotated[Text, AfterValidator(_is_command_of_bstune)]

WinnerName = Literal["best_by_time", "best_by_steps"]
RegimeName = Literal["perfect scaling", "diminishing returns", "maximal data parallelism"]
PERFECT_SCALING: RegimeName = "perfect scaling"
DIMINISHING_RETURNS: RegimeName = "diminishing returns"
MAXIMAL_DATA_PARALLELISM: RegimeName = "maximal data parallelism"


class Criterion(NamedTuple):
    """What a winner is best by, and a heading for it."""

    merit: Merit
    heading: str


WINNERS: Mapping[WinnerName, Criterion] = {
    "best_by_time": Criterion("time", "least time"),
    "best_by_steps": Criterion("steps", "fewest steps"),
}


def finite(value: float | None) -> float | None:
    """Give a number as a result may hold it: None stands for what is not finite."""
    if value is None or not math.isfinite(value):
        return None
    return value


# mypy sees that a model is frozen where its own class says so.
class Part(BaseModel, strict=True, extra="forbid", frozen=True):
    """A part of a result: no value is converted, none changes, and there is no other key."""

    def __repr_args__(self) -> Iterator[tuple[str | None, object]]:
        """Give numbers with four digits, as they are shown everywhere; the attributes have all."""
        for name, value in super().__repr_args__():
            yield name, float(f"{value:.4g}") if isinstance(value, float) else value


class Spend(Part, frozen=True):
    """What the trials took."""

    trials: Count
    """Trials, those in several parts counted once."""
    seconds: NotNegative
    """Seconds of training, evaluation and start-up."""
    examples: Count
    """Examples trained on."""


class CurvePoint(Part, frozen=True):
    """A trial on the frontier; what it would take to the target is open where it was stopped."""

    number: Count
    """The trial's number."""
    batch_size: BatchSize
    """Examples of a step."""
    lr: Positive
    """The learning rate."""
    delta: Real | None
    """Octaves of the learning rate above the scaling rule's."""
    hyperparameters: Hyperparameters
    """Further ones that the study searches, by name."""
    steps_low: Count
    """Steps that did not suffice: the last miss."""
    steps: Count | None
    """Steps to the target: the first hit."""
    seconds_per_step: NotNegative | None
    """tau(B) in seconds; None where no step was timed."""
    time_to_target: NotNegative | None
    """Seconds of training to the target."""
    time_low: NotNegative | None
    """Seconds of training that did not suffice."""
    examples_low: Count
    """Examples that did not suffice."""
    examples: Count | None
    """Examples to the target."""
    stopped: bool
    """Whether it was stopped before the target."""


class NextTrial(Part, frozen=True):
    """A trial that would narrow the interval of the critical batch size."""

    batch_size: BatchSize
    """Examples of a step."""
    lr: Positive
    """The learning rate."""
    steps: NotNegative
    """Steps that the posterior expects to the target."""
    seconds: NotNegative | None
    """Seconds of training that it expects."""


class CriticalInterval(Part, frozen=True):
    """A critical batch size with its interval, in examples; None is what the trials leave open."""

    value: Positive | None = None
    """Median over the posterior."""
    low: Positive | None = None
    """Lower end of the interval."""
    high: Positive | None = None
    """Upper end of the interval."""


class CriticalBatchSize(CriticalInterval, frozen=True):
    """The study's critical batch size by all trials, and what goes with it."""

    level: Level
    """Nominal coverage of the intervals."""
    s_min: Positive | None
    """Fewest steps, at unlimited batch size."""
    e_min: Positive | None
    """Fewest examples."""
    b_opt: Positive | None
    """Batch size with the fewest examples; None where the trials ask for no small-batch term."""
    b_opt_low: Positive | None
    """Lower end of its interval."""
    b_opt_high: Positive | None
    """Upper end of its interval."""
    perfect_scaling_below: Positive | None
    """Batch size at which the slope of log S* is -0.9: B_crit/9 without a small-batch term."""
    maximal_data_parallelism_above: Positive | None
    """Batch size at which that slope is -0.1: 9 B_crit."""
    smallest: BatchSize
    """Smallest batch size that reached the target."""
    largest: BatchSize
    """Largest batch size that reached the target."""
    next_trials: Items[NextTrial]
    """Trials that would narrow a wide interval."""
    note: Text | None
    """What no trial of this search would show."""

    @property
    def is_of_one_size(self) -> bool:
        """Whether one batch size alone reached the target, which says nothing of the others."""
        return self.smallest == self.largest

    @property
    def is_open(self) -> bool:
        """Whether an end of the interval is not determined."""
        return self.low is None or self.high is None


class CriticalAtTarget(CriticalInterval, frozen=True):
    """The critical batch size at another target than the study's."""

    target: Real
    """The metric's value that is the goal."""
    passed: Count
    """Trials that passed it."""

    @property
    def level(self) -> float:
        """Nominal coverage of the interval."""
        return INTERVAL_LEVEL


class Regime(Part, frozen=True):
    """A range of batch sizes in which more data parallelism pays alike."""

    name: RegimeName
    """By the slope of log S* over log B (Shallue et al. 2018)."""
    start: Positive
    """Smallest batch size of it, in examples."""
    end: Positive
    """Largest batch size of it, in examples."""


class SmallEnd(Part, frozen=True):
    """The slope of log steps over log batch size at the smallest batch sizes."""

    slope: Real
    """-1 is perfect scaling."""
    standard_error: NotNegative | None
    """Of the slope; None for two batch sizes."""
    batch_sizes: Items[BatchSize]
    """Those that it is of."""


class Fit(Part, frozen=True):
    """The fit of the curve to the frontier's points alone, a diagnostic."""

    law: Text
    """``two-terms`` or ``three-terms``."""
    s_min: Positive | None
    """Fewest steps."""
    critical_batch_size: NotNegative | None
    """Critical batch size in examples."""
    critical_batch_size_low: NotNegative | None
    """Lower end of its interval."""
    critical_batch_size_high: NotNegative | None
    """Upper end of its interval."""
    b_opt: NotNegative | None
    """Batch size with the fewest examples."""
    b_opt_low: NotNegative | None
    """Lower end of its interval."""
    b_opt_high: NotNegative | None
    """Upper end of its interval."""
    e_min: NotNegative | None
    """Fewest examples."""
    perfect_scaling_below: NotNegative | None
    """Batch size at which the slope of log S* is -0.9."""
    maximal_data_parallelism_above: NotNegative | None
    """Batch size at which that slope is -0.1."""
    level: Level
    """Nominal coverage of the intervals."""
    noise: NotNegative | None
    """Standard deviation of log steps around the curve."""
    note: Text | None
    """What is not known, and what to run for it."""


class MeasuredNoiseScale(Part, frozen=True):
    """The gradient noise scale that the trials measured, in examples."""

    noise_scale: Positive | None
    """tr(Sigma)/|G|^2; None where it is undetermined."""
    low: Real | None
    """Lower end of its interval."""
    high: Real | None
    """Upper end of its interval."""
    level: Level
    """Nominal coverage of the interval."""
    trials: Count
    """Trials that it is of."""
    steps: Count
    """Steps at which it was measured."""
    undetermined: Text | None
    """Why there is no value."""
    ratio_to_critical: NotNegative | None
    """Over the study's critical batch size."""
    ratio_to_fit: NotNegative | None
    """Over that of the fit to points alone, which does not use it."""


class Exponent(Part, frozen=True):
    """The exponent of the best learning rate over the batch size, within a range of these."""

    exponent: Real
    """Median over the posterior."""
    low: Real
    """Lower end of its interval."""
    high: Real
    """Upper end of its interval."""
    prior_low: Real
    """Lower end of the prior's interval."""
    prior_high: Real
    """Upper end of the prior's interval."""
    start: Positive
    """Smallest batch size of the range, in examples."""
    end: Positive
    """Largest batch size of the range, in examples."""
    reached: Count
    """Trials there that reached the target."""
    octaves: NotNegative
    """Between the smallest and the largest batch size of these trials."""
    identified: bool
    """Whether they narrow the prior, over enough of the range."""
    rules: dict[Text, Real]
    """The exponent that each scaling rule has there."""


class LearningRateLaw(Exponent, frozen=True):
    """How the best learning rate grows: over the whole range, and below the critical batch size."""

    below_b_crit: Exponent | None
    """None where that range is too short."""
    level: Level
    """Nominal coverage of the intervals."""


class Confirmed(Part, frozen=True):
    """What a winner's runs on fresh seeds came to; an end is None where runs missed the target."""

    seeds: Items[Count]
    """Of the runs."""
    reached: Count
    """Runs that reached the target."""
    runs: Count
    """All runs."""
    time_median: NotNegative | None
    """Seconds of training to the target."""
    time_low: NotNegative | None
    """Lower end of its interval: that of the steps, and the error of a step's seconds."""
    time_high: NotNegative | None
    """Upper end of it."""
    steps_median: NotNegative | None
    """Steps to the target."""
    steps_low: NotNegative | None
    """Lower end of the 90% interval of this median: the scatter over seeds, and the evaluations'
    grid."""
    steps_high: NotNegative | None
    """Upper end of it."""
    untold: Count = 0
    """Runs that met the target at their first evaluation: when, is not known."""

    @property
    def all_reached(self) -> bool:
        """Whether every run reached the target."""
        return self.reached == self.runs

    def ends(self, merit: Merit) -> tuple[float | None, float | None]:
        """Give the least and the most seconds, or steps, to the target."""
        if merit == "time":
            return self.time_low, self.time_high
        return self.steps_low, self.steps_high


class SingleRun(Part, frozen=True):
    """What the winner's own trial, which may be a lucky one, came to."""

    steps: Count
    """Steps to the target."""
    time_to_target: NotNegative | None
    """Seconds of training to the target."""


class ParetoTrial(Part, frozen=True):
    """A trial that no other beats both in steps and in seconds."""

    number: Count
    """The trial's number."""
    seed: Count
    """The trial's seed."""
    batch_size: BatchSize
    """Examples of a step."""
    lr: Positive
    """The learning rate."""
    hyperparameters: Hyperparameters
    """Further ones that the study searches, by name."""
    horizon: Count | None
    """Steps after which its schedule ends; None where none does."""
    steps: NotNegative | None
    """Steps to the target."""
    seconds_per_step: NotNegative | None
    """tau(B) in seconds."""
    time_to_target: NotNegative | None
    """Seconds of training to the target."""


class Reaching(Part, frozen=True):
    """How likely further seeds reach the target where schedules end with the trial: predicted by all trials."""

    chance: Share
    """With the winner's horizon."""
    best_chance: Share
    """With the longest horizon that the budget allows at its batch size."""
    longest: Count
    """That horizon: steps."""


class WinnerResult(ParetoTrial, frozen=True):
    """A winner: steps and seconds are those to expect of a fresh seed.

    They are the median over its runs on fresh seeds, None where half of these missed the target;
    without such runs they are predicted.
    """

    confirmed: Confirmed | None
    """None where it was not run again."""
    single_run: SingleRun
    """Its own trial's."""
    reaching: Reaching | None = None
    """None where schedules do not end with the trial."""

    def expected(self, merit: Merit) -> float | None:
        """Give the seconds of training, or the steps, that a fresh seed takes to the target."""
        if merit == "time":
            return self.time_to_target
        return self.steps

    def of_single_run(self, merit: Merit) -> float | None:
        """Give the seconds of training, or the steps, that its own trial took to the target."""
        if merit == "time":
            return self.single_run.time_to_target
        return self.single_run.steps


class SearchPlan(Part, frozen=True):
    """The search's budget."""

    trials: Count
    """``search.trials``: points that may be tried."""
    replicates: Count
    """``search.replicates``: runs of the winner on fresh seeds."""
    limit: Text | None
    """The option that ended the search before its trials were through."""


class Reference(Part, frozen=True):
    """The pair of batch size and learning rate that the scaling rule goes through."""

    batch_size: Positive
    """Examples of a step."""
    lr: Positive
    """The learning rate."""
    rule: Text
    """The rule's name."""


class Curve(Part, frozen=True):
    """S*(B) and what goes with it on a ladder of batch sizes; all lists have one length."""

    batch_size: Items[Positive]
    """Examples of a step, rising."""
    steps: Items[Positive]
    """Steps to the target, at the best learning rate."""
    low: Items[Positive]
    """Lower end of the interval of these."""
    high: Items[Positive]
    """Upper end of the interval of these."""
    lr_low: Items[Positive]
    """Lower end of the interval of the best learning rate."""
    lr: Items[Positive]
    """The best learning rate."""
    lr_high: Items[Positive]
    """Upper end of the interval of the best learning rate."""
    seconds_per_step: Items[NotNegative] | None
    """tau(B) in seconds; None where nothing was timed."""
    seconds_error: Items[NotNegative] | None = None
    """Standard deviation of log tau(B); None where it is not known."""

    @model_validator(mode="after")
    def _has_one_length(self) -> "Curve":
        lengths = {len(values) for _, values in self if values is not None}
        if len(lengths) != 1:
            raise ValueError(f"the lists must have one length, but got {sorted(lengths)}")
        if tuple(sorted(self.batch_size)) != self.batch_size:
            raise ValueError("batch sizes must rise")
        return self


class StepTiming(Part, frozen=True):
    """What the seconds of a step are, and how well they are known."""

    seconds_of: Literal["trainer", "lean"]
    """Whose steps were timed: ``Trainer.fit``'s, or the lean loop's."""
    surveyed: bool
    """Whether a survey timed them, else the trials themselves."""
    relative_error: NotNegative
    """Standard deviation of log tau(B) at the winner; 0.1 is about 10%."""
    waited: NotNegative
    """Share of the survey's seconds for which it waited for a processor, which is in no timing."""
    threads: Count | None
    """Of torch, that trained; None where a CPU does not train."""
    not_told_apart: Items[BatchSize] = ()
    """Batch sizes that ran on fresh seeds, too, and whose times the timing does not tell from the
    winner's."""


class SeedScatter(Part, frozen=True):
    """The scatter of log steps from seed to seed, one standard deviation."""

    scatter: NotNegative
    """Median over the posterior; 0.1 is about 10%."""
    low: NotNegative
    """Lower end of its interval."""
    high: NotNegative
    """Upper end of its interval."""
    level: Level
    """Nominal coverage of the interval."""


class BaselineResult(Part, frozen=True):
    """What the configuration that the user runs today came to."""

    number: Count
    """The number of its first run, or of the last one that continued it."""
    batch_size: BatchSize
    """Examples of a step."""
    lr: Positive
    """The learning rate."""
    hyperparameters: Hyperparameters
    """The values that the config itself has of what else is searched."""
    status: Status
    """How that run ended."""
    steps: Count
    """Steps to its end."""
    seconds: NotNegative | None
    """Seconds of training to its end."""
    value: Real | None
    """The metric's last value."""
    telling_target: Real | None
    """A harder target, where it met the study's at its first evaluation."""
    runs: Count
    """Its runs on the winner's fresh seeds."""
    reached: Count
    """Those of them that reached the target."""


class Gain(Part, frozen=True):
    """How many times as fast the winner is as the baseline, by the study's merit."""

    ratio: Positive
    """The baseline's seconds, or steps, over the winner's."""
    low: Positive | None
    """Lower end of its interval."""
    high: Positive | None
    """Upper end of its interval."""
    level: Level
    """Nominal coverage of the interval."""
    merit: Merit
    """Whether it is of seconds or of steps."""
    seeds: Count
    """Fresh seeds on which both ran."""
    at_least: bool
    """The baseline was stopped before the target: the ratio is the least that it can be."""


class AtEqualSeconds(Part, frozen=True):
    """What the best point so far and the baseline had come to after as much training."""

    seconds: NotNegative
    """Seconds of training."""
    value: Real
    """The metric of the best point so far."""
    baseline_value: Real
    """The metric of the baseline."""


class SoFar(Part, frozen=True):
    """The best point of a study that has not reached its target."""

    number: Count
    """The trial's number."""
    seed: Count
    """The trial's seed."""
    batch_size: BatchSize
    """Examples of a step."""
    lr: Positive
    """The learning rate."""
    hyperparameters: Hyperparameters
    """Further ones that the study searches, by name."""
    horizon: Count | None
    """Steps after which its schedule ends; None where none does."""
    value: Real
    """The metric that is closest to the target."""
    steps: Count
    """Steps at which it came to that."""
    seconds: NotNegative | None
    """Seconds of training at which it came to that."""
    predicted_steps: Real | None
    """Steps that it is predicted to take to the target; None where its history does not tell."""
    predicted_seconds: Real | None
    """Seconds of training that it is predicted to take."""
    compared: AtEqualSeconds | None
    """None where there is no baseline to compare."""


class AsGood(Part, frozen=True):
    """The batch sizes that are nearly as good as the best one, each at its best learning rate."""

    merit: Merit
    """Whether it is of seconds or of steps."""
    within: Level
    """By how much more than the least they may take; 0.1 is 10%."""
    low: BatchSize
    """The smallest of them, in examples."""
    middle: BatchSize
    """One between them: the winner's, if it lies there."""
    high: BatchSize
    """The largest of them, in examples."""
    lr_low: Positive
    """The best learning rate at ``low``."""
    lr_middle: Positive
    """The best learning rate at ``middle``."""
    lr_high: Positive
    """The best learning rate at ``high``."""
    is_low_open: bool
    """Whether smaller ones may be as good: nothing is known of them."""
    is_high_open: bool
    """Whether larger ones may be as good: nothing is known of them."""


class NotRunAgain(Part, frozen=True):
    """A point that is predicted to be better than the winner and got no fresh seeds."""

    batch_size: BatchSize
    """Examples of a step."""
    lr: Positive
    """The learning rate."""
    candidates: Count | None
    """``search.candidates``, which kept it from them; None: the study ended before."""


class Growth(Part, frozen=True):
    """The exponent of the critical batch size over the target's distance from the ideal value."""

    exponent: Real
    """Below 0 where it grows as the target gets harder."""
    low: Real
    """Lower end of its interval."""
    high: Real
    """Upper end of its interval."""
    level: Level
    """Nominal coverage of the interval."""
    ideal: Real
    """The metric's best value."""
    start: Real
    """The easiest target."""
    end: Real
    """The hardest target."""


class ClosestTrial(Part, frozen=True):
    """The trial that came closest to a target that none reached."""

    value: Real
    """The metric that is closest to the target."""
    steps: Count
    """Steps at which it came to that."""
    number: Count
    """The trial's number."""
    batch_size: BatchSize
    """Examples of a step."""
    lr: Positive
    """The learning rate."""


class Unreached(Part, frozen=True):
    """What tells why no trial reached the target."""

    closest: ClosestTrial | None
    """None where no trial has a metric."""
    easier: Real | None = None
    """A target that the closest value would have met."""
    stopped: Count | None = None
    """Trials that were stopped; None where it is not known why, and so is what follows."""
    improving: Count = 0
    """Those of them that still improved over the last half of their steps."""
    improving_at_budget: Count = 0
    """Those of these that had spent their budget."""
    budget_steps: Count | None = None
    """``budget.steps`` of a trial."""
    budget_examples: Count | None = None
    """``budget.examples`` of a trial."""
    smallest_diverged_lr: Positive | None = None
    """The smallest learning rate that diverged."""
    message: Text | None = None
    """The last trial's that has one."""

    @model_validator(mode="after")
    def _is_whole(self) -> "Unreached":
        budget = (self.budget_steps, self.budget_examples)
        if self.stopped is not None and None in budget:
            raise ValueError("stopped trials need a budget_steps and a budget_examples")
        return self


class DevicePlan(Part, frozen=True):
    """The best that a number of devices can do; seconds' interval is from the curve's band alone."""

    devices: BatchSize
    """How many share each batch."""
    device_batch_size: BatchSize
    """Examples of a step on each."""
    batch_size: BatchSize
    """Examples of a step on all."""
    lr: Positive
    """The learning rate."""
    steps: NotNegative
    """Steps to the target."""
    seconds_per_step: NotNegative
    """Seconds, with the all-reduce."""
    seconds: NotNegative
    """Seconds of training to the target."""
    seconds_low: NotNegative
    """Lower end of their interval."""
    seconds_high: NotNegative
    """Upper end of their interval."""
    device_seconds: NotNegative
    """Seconds times devices."""
    speed_up: NotNegative
    """The best time of one device over the time."""
    efficiency: NotNegative
    """Speed-up over devices."""


class DevicePlans(Part, frozen=True):
    """Plans for several devices, each as fast as this one."""

    ideal: Items[DevicePlan] = ()
    """Without an all-reduce."""
    with_all_reduce: Items[DevicePlan] = ()
    """Empty where the config states no all-reduce."""

    @property
    def told(self) -> tuple[DevicePlan, ...]:
        """The plan to tell: with the all-reduce, where it is known."""
        return self.with_all_reduce or self.ideal


class FreshValues(Part, frozen=True):
    """What runs of one point on fresh seeds came to at their budget's end."""

    seeds: Items[Count]
    """Their seeds."""
    values: Items[Real]
    """The best value of the metric of each."""
    mean: Real
    """Their mean."""
    low: Real
    """Lower end of the mean's interval."""
    high: Real
    """Upper end of the mean's interval."""
    level: Level
    """Nominal coverage of the interval."""
    broken: Count
    """Further runs that diverged or ended before, which are not among the values."""


class SizeSeconds(Part, frozen=True):
    """The seconds of a step at a batch size."""

    batch_size: BatchSize
    """Examples of a step."""
    seconds: Positive
    """Of a step."""


class PointAtBudget(Part, frozen=True):
    """A point, and what it comes to at its budget's end."""

    number: Count
    """Its trial's number."""
    seed: Count
    """Its trial's seed."""
    batch_size: BatchSize
    """Examples of a step."""
    lr: Positive
    """The learning rate."""
    hyperparameters: Hyperparameters
    """Further ones that the study searches, by name."""
    horizon: Count | None
    """Steps after which its schedule ends; None where none does."""
    steps: Count
    """Of its budget."""
    value: Real
    """The best value of the metric within its trial, which may be lucky."""
    predicted: Real | None
    """The metric that all trials predict of a fresh seed."""
    fresh: FreshValues | None
    """None where it did not run on fresh seeds."""

    @property
    def expected(self) -> float:
        """The metric to expect: of its fresh seeds, else predicted, else its own."""
        if self.fresh is not None:
            return self.fresh.mean
        return self.value if self.predicted is None else self.predicted


class GainAtBudget(Part, frozen=True):
    """By how much the winner is better than the baseline at the budget's end."""

    difference: Real
    """The baseline's metric over the winner's, or the other way where it rises: above 0 is
    better."""
    low: Real | None
    """Lower end of its interval; None without fresh seeds of both."""
    high: Real | None
    """Upper end of its interval."""
    level: Level
    """Nominal coverage of the interval."""
    seeds: Count
    """Fresh seeds on which both ran."""
    share: Share | None
    """The part of the budget after which the winner has the baseline's metric; None: it never
    has."""


class AsGoodAtBudget(Part, frozen=True):
    """The batch sizes that are not shown to be worse than the best, each at its best learning rate."""

    low: BatchSize
    """The smallest of them, in examples."""
    high: BatchSize
    """The largest of them, in examples."""
    lr_low: Positive
    """The best learning rate at ``low``."""
    lr_high: Positive
    """The best learning rate at ``high``."""
    is_low_open: bool
    """Whether ``low`` is the smallest that was searched."""
    is_high_open: bool
    """Whether ``high`` is the largest that was searched."""


class SizeAtBudget(Part, frozen=True):
    """What a batch size comes to at the budget's end, at its best learning rate."""

    batch_size: BatchSize
    """Examples of a step."""
    value: Real
    """The metric, the posterior's median, without a seed's luck."""
    low: Real
    """Lower end of its interval."""
    high: Real
    """Upper end of its interval."""
    lr: Positive
    """The best learning rate."""


class BestSizeAtShare(Part, frozen=True):
    """The best batch size for a part of the budget."""

    share: Share
    """Of the budget."""
    batch_size: Positive
    """The posterior's median, in examples."""
    low: Positive
    """Lower end of its interval."""
    high: Positive
    """Upper end of its interval."""
    is_at_end: bool
    """Whether it is an end of the batch sizes that were searched."""


class BestSizeLater(Part, frozen=True):
    """The best batch size for a longer budget, foretold by how it has grown."""

    times: Positive
    """The budget."""
    batch_size: Positive
    """The posterior's median, in examples."""
    low: Positive
    """Lower end of its interval."""
    high: Positive
    """Upper end of its interval."""


class SizeGrowthOverBudget(Part, frozen=True):
    """How the best batch size grows with the budget: B ~ budget^exponent."""

    exponent: Real
    """The posterior's median."""
    low: Real
    """Lower end of its interval."""
    high: Real
    """Upper end of its interval."""
    level: Level
    """Nominal coverage of the interval."""
    best_sizes: Items[BestSizeAtShare]
    """The longest budget first."""
    later: BestSizeLater
    """At several times the budget."""


class SameAtBudget(Part, frozen=True):
    """Trials that all have the same metric at their budget's end, which tells nothing of them."""

    value: Real
    """The metric."""
    differs_at: Share | None
    """The smallest part of the budget by which they differed; None: by none of it."""


class AtBudget(Part, frozen=True):
    """The answer of the objective loss: what has the best metric when the budget ends."""

    seconds: Positive | None
    """Seconds of training, by ``times``, where these are the budget."""
    examples: Count | None
    """Examples, where these are."""
    steps: Count | None
    """Steps, where these are."""
    times: Items[SizeSeconds]
    """Seconds of a step by which seconds are counted; empty for another budget."""
    winner: PointAtBudget
    """The point to use."""
    baseline: PointAtBudget | None
    """The reference; None where it did not run to its budget's end."""
    gain: GainAtBudget | None
    """None without a baseline, or where it is the winner."""
    as_good: AsGoodAtBudget
    """Around the best batch size."""
    curve: Items[SizeAtBudget]
    """Over rising batch sizes."""
    growth: SizeGrowthOverBudget | None
    """None where fewer than two parts of the budget have a trial."""
    same: SameAtBudget | None
    """None where the trials differ at their budget's end."""
    gain_left: NotNegative
    """What one more point may gain, expected, in units of the metric."""
    gain_left_at_most: NotNegative
    """What whoever knew the law exactly would gain, expected: a bound of what any search may."""
    seed_scatter: NotNegative
    """What one seed differs from another, a standard deviation, in units of the metric."""


class Best(Part, frozen=True):
    """The winner by the study's objective: the least time, or the fewest steps, to the target.

    Where no trial of the study reached the target, it is the point that came closest to it, and
    what it takes is predicted from its history, or None.
    """

    batch_size: BatchSize
    """Examples of a step."""
    lr: Positive
    """The learning rate."""
    hyperparameters: Hyperparameters
    """Further ones that the study searches, by name."""
    steps: Real | None
    """Steps to expect of a fresh seed; None where half of these missed the target."""
    time_to_target: Real | None
    """Seconds of training to expect of a fresh seed."""
    horizon: Count | None
    """Steps after which its schedule ends; None where none does."""
    number: Count
    """Its trial's number."""
    seed: Count
    """Its trial's seed."""
    reached: bool
    """Whether a trial of the study reached the target."""


class WorkloadSize(Part, frozen=True):
    """How large what was trained is: the scales over which studies are compared."""

    examples: BatchSize
    """Of the training data."""
    parameters: FromOne
    """Of the module that are trained."""


class StudyResult(Part, frozen=True):
    """What a study found; ``curve.json`` is its dump."""

    schema_number: int
    """Of this model: ``SCHEMA_NUMBER``."""
    study: Text
    """The study's name."""
    workload: Text
    """The workload's name."""
    tokens: BatchSize | None
    """Tokens of an example, where it has some."""
    size: WorkloadSize | None = None
    """Of the data and of the module; None where nothing was trained."""
    overrides_lr: bool = False
    """Whether the learning rate was set in the optimizer that the module had built."""
    objective: Objective
    """What the search sought."""
    target: Text
    """The target in words, such as ``val/loss <= 0.1``."""
    metric: Text
    """The target's metric."""
    target_value: Real | None
    """The target's value; None of the objective loss, which has none."""
    mode: Literal["min", "max"]
    """Whether the metric falls or rises to it."""
    devices: Items[Text]
    """Names of the devices that trials ran on."""
    training_loops: dict[Text, Count]
    """Trials by what took their steps."""
    stop_reason: Text | None
    """What ended the search; None where it has not ended."""
    trials: Count
    """Trials, those in several parts counted once."""
    continued: Count
    """Parts of trials that another part goes on from."""
    spend: Spend
    """What the trials took."""
    statuses: dict[Text, Count]
    """Trials by how they ended; every status is there."""
    unreached: Unreached | None
    """None where a trial reached the target, or none ran."""
    points: Items[CurvePoint]
    """The frontier's, from the smallest batch size."""
    critical_batch_size: CriticalBatchSize | None
    """None where no trial reached the target."""
    regimes: Items[Regime]
    """Those within the batch sizes that reached the target."""
    small_end: SmallEnd | None
    """None for fewer than two batch sizes."""
    fit: Fit | None
    """A diagnostic."""
    fit_note: Text | None
    """Why there is no fit, or what it leaves open."""
    noise_scale: MeasuredNoiseScale | None
    """None where it was not measured."""
    lr_exponent: LearningRateLaw | None
    """None for less than an octave of batch sizes."""
    best_by_time: WinnerResult | None
    """The winner by seconds of training; None where no trial that reached the target was timed."""
    best_by_steps: WinnerResult | None
    """The winner by steps."""
    pareto: Items[ParetoTrial]
    """From the least time to the fewest steps."""
    use: WinnerName | None
    """The winner by the study's objective."""
    confirmed: bool
    """Whether all its fresh seeds reached the target, and their times tell it from the others'; of
    the objective loss whether it ran on fresh seeds."""
    train: Command | None
    """The command that trains it; None for a study of Python objects."""
    arguments: Items[Text] | None
    """The command line's that give the study again; None for a study of Python objects."""
    search: SearchPlan
    """What the search was allowed."""
    reference: Reference
    """The pair that the scaling rule goes through."""
    curve: Curve | None
    """None where no trial reached the target."""
    timing: StepTiming | None
    """None where there was no survey, or too few trials were timed."""
    seed_scatter: SeedScatter | None
    """None where no trial reached the target."""
    baseline: BaselineResult | None
    """None for a study without one."""
    so_far: SoFar | None
    """None where a trial reached the target, or none has a metric."""
    gain: Gain | None
    """None where winner and baseline cannot be compared."""
    as_good: AsGood | None
    """None where no trial reached the target, or the curve has no seconds that it asks for."""
    not_run_again: NotRunAgain | None
    """None where ``search.candidates`` left nothing out."""
    at_budget: AtBudget | None = None
    """Of the objective loss; None of another one, and before a trial has run to its budget's
    end."""
    over_target: Items[CriticalAtTarget]
    """The critical batch size at easier targets."""
    over_target_note: Text | None
    """Why there is none."""
    over_target_growth: Growth | None
    """How it grows; None for fewer than three targets."""
    test: dict[WinnerName, dict[Text, Real | None]]
    """The winners' metrics on the test set, one run of each."""
    scale_out: DevicePlans
    """Empty where the curve does not allow a plan."""
    notes: Items[Text]
    """What to know beside it, such as what is missing and why."""

    @model_validator(mode="after")
    def _is_consistent(self) -> "StudyResult":
        if self.use is not None and self.winner is None:
            raise ValueError(f"use names {self.use!r}, which is no winner of the file")
        if sorted(self.statuses) != sorted(STATUSES):
            raise ValueError(
                f"statuses must be {sorted(STATUSES)}, but got {sorted(self.statuses)}"
            )
        why = self.unreached
        explains = why is not None and why.stopped is not None and self.statuses["diverged"] > 0
        if why is not None and explains and why.smallest_diverged_lr is None:
            raise ValueError("unreached lacks the smallest_diverged_lr of trials that diverged")
        return self

    @property
    def winner(self) -> WinnerResult | None:
        """The winner by the study's objective; None where there is none."""
        if self.use is None:
            return None
        return self.winner_by(WINNERS[self.use].merit)

    @property
    def other_winner(self) -> WinnerResult | None:
        """The winner by the other merit, where it is another point than the one to use."""
        use = self.winner
        if use is None:
            return None
        other = self.best_by_steps if self.use == "best_by_time" else self.best_by_time
        if other is None or other.number == use.number:
            return None
        return other

    def winner_by(self, merit: Merit) -> WinnerResult | None:
        """Give the winner by seconds of training, or by steps."""
        if merit == "time":
            return self.best_by_time
        return self.best_by_steps

    def best_by(self, merit: Merit) -> Best | None:
        """Give the winner by a merit, or the best point so far; None where no trial has a metric."""
        if self.at_budget is not None:
            at_budget = self.at_budget.winner
            return Best(
                batch_size=at_budget.batch_size,
                lr=at_budget.lr,
                hyperparameters=at_budget.hyperparameters,
                steps=at_budget.steps,
                time_to_target=None,
                horizon=at_budget.horizon,
                number=at_budget.number,
                seed=at_budget.seed,
                reached=False,
            )
        winner = self.winner_by(merit)
        if winner is not None:
            return Best(
                batch_size=winner.batch_size,
                lr=winner.lr,
                hyperparameters=winner.hyperparameters,
                steps=winner.steps,
                time_to_target=winner.time_to_target,
                horizon=winner.horizon,
                number=winner.number,
                seed=winner.seed,
                reached=True,
            )
        point = self.so_far
        if point is None:
            return None
        return Best(
            batch_size=point.batch_size,
            lr=point.lr,
            hyperparameters=point.hyperparameters,
            steps=point.predicted_steps,
            time_to_target=point.predicted_seconds,
            horizon=point.horizon,
            number=point.number,
            seed=point.seed,
            reached=False,
        )

    def has_regime(self, name: RegimeName) -> bool:
        """Whether a regime lies within the batch sizes that reached the target."""
        return any(regime.name == name for regime in self.regimes)

    def with_notes(self, notes: Sequence[str]) -> "StudyResult":
        """Give the same result with other notes: of what failed after it was built."""
        return self.model_copy(update={"notes": tuple(notes)})

    def to_json(self) -> str:
        """Give the content of ``curve.json``, strict JSON that reads back to an equal result."""
        return dump_json(self.model_dump(), indent=2) + "\n"
