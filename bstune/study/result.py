"""The typed result of a study: frozen values, built where they are known; curve.json is their dump.

Text, figure, page and MLflow read its attributes and compute nothing that is stated here.
"""

import math
from typing import Literal

from bstune.core.noise_scale import NoiseScaleEstimate
from bstune.core.question import Objective
from bstune.core.records import Budget, Frozen, Status, Target
from bstune.core.space import Configuration
from bstune.search.findings import CurvePoint

SCHEMA = 1
# Keep: the best other configuration is shown to be less than so many times as fast, or to be better
# by at most so many standard deviations over seeds.
NOT_WORTH = 1.25
NOT_WORTH_DEVIATIONS = 0.5

Verdict = Literal["switch", "keep", "not yet", "use"]
Trend = Literal["still falling", "flat", "stopped early", "diverged", "failed"]
Warned = Literal[
    "schedule", "evaluations", "step times", "far from the law", "octave without a trial"
]


class Measured(Configuration):
    """The trial of the fewest steps to the target at a batch size."""

    steps: float


class Confirmed(Configuration):
    """A configuration with its runs on new seeds.

    ``steps`` and ``seconds`` are medians over the runs; where half of them or more did not reach
    the target they are bounds ("at least"). Before the first run they are the search's own trial's,
    without intervals.
    """

    number: int
    """The trial of the search whose configuration it is."""
    seeds: tuple[int, ...]
    runs_steps: tuple[float, ...]
    """Steps to target of each run, in the order of ``seeds``: the middle between the last
    evaluation that missed it and the first that met it; else those that it is known to exceed."""
    runs_status: tuple[Status, ...]
    schedule_steps: int | None = None
    """Where the schedule of each run ended; None: it did not end with the run."""
    train_steps: int | None = None
    """To train it for: to the end of that schedule, of a budget of seconds, or of one in which the
    best metric is sought; None: the study's options say."""
    steps: float
    steps_low: float | None
    steps_high: float | None
    """Ends of the 90% interval of the median over seeds; an end that is open is None."""
    seconds: float
    """Training seconds to the target: ``steps`` times ``step_seconds``."""
    seconds_low: float | None
    seconds_high: float | None
    is_bound: bool
    predicted_share: float
    """Share of further seeds that are predicted to reach the target."""
    step_seconds: float
    step_seconds_error: float
    """Relative standard deviation of ``step_seconds``."""
    metric: float | None = None
    """The median of each run's best metric, where that is sought; before the first run the search's
    own trial's. None: half did not train to their ends."""
    metric_low: float | None = None
    metric_high: float | None = None
    """Ends of the 90% interval of the median over seeds."""

    @property
    def runs(self) -> int:
        """Runs on new seeds."""
        return len(self.seeds)

    @property
    def reached(self) -> int:
        """How many of them reached the target."""
        return sum(status in ("reached", "finished") for status in self.runs_status)


class Interval(Frozen):
    """A value with its 90% interval; an end that the trials do not bound is None."""

    value: float | None
    low: float | None
    high: float | None


class Speedup(Frozen):
    """How many times as fast the best is as the baseline: the quotient of the two medians."""

    value: float
    low: float
    high: float | None
    at_least: bool
    """Whether the baseline's median is a bound, and so is ``value``; ``high`` is None then."""

    @property
    def is_better(self) -> bool:
        """Whether it is shown to be above 1."""
        return self.low > 1.0

    @property
    def is_not_worth(self) -> bool:
        """Whether it is shown to be below ``NOT_WORTH``."""
        return self.high is not None and self.high < NOT_WORTH

    @property
    def is_worse(self) -> bool:
        """Whether the baseline's median is the lower one."""
        return self.value < 1.0 and not self.at_least

    @property
    def margins(self) -> tuple[float, float]:
        """Half of its interval, and how far it is from what decides, both in logs."""
        value = math.log(self.value)
        return value - math.log(self.low), max(value, math.log(NOT_WORTH) - value)


class Improvement(Frozen):
    """How much better the best's metric is than the baseline's: the difference of the medians."""

    value: float
    """In the metric's units; negative where it is worse."""
    low: float | None
    high: float | None
    """None with one run each, whose seeds show no deviation."""
    deviation: float
    """Standard deviation of the metric from seed to seed."""

    @property
    def is_better(self) -> bool:
        """Whether it is shown to be above 0."""
        return self.low is not None and self.low > 0.0

    @property
    def is_not_worth(self) -> bool:
        """Whether it is shown to be at most ``NOT_WORTH_DEVIATIONS``."""
        return self.high is not None and self.high <= NOT_WORTH_DEVIATIONS * self.deviation

    @property
    def is_worse(self) -> bool:
        """Whether the baseline's median is the better one."""
        return self.value < 0.0

    @property
    def margins(self) -> tuple[float, float]:
        """Half of its interval, 0 without one, and how far it is from what decides."""
        half_width = 0.0 if self.low is None else self.value - self.low
        return half_width, max(self.value, NOT_WORTH_DEVIATIONS * self.deviation - self.value)


class LrAlone(Frozen):
    """The best rate at the baseline's own batch size, and its predicted speedup.

    Where the baseline's median is a bound, so is this.
    """

    lr: float
    speedup: float


class FewestSteps(Frozen):
    """The batch size and rate that are predicted to take the fewest steps.

    Of the batch sizes that are near-optimal in steps it is the smallest.
    """

    batch_size: int
    lr: float
    steps: float
    steps_low: float
    steps_high: float


class Critical(Frozen):
    """The critical batch size: the parameter B_crit of S*(B) = S_min (1 + B_crit/B)."""

    interval: Interval
    s_min: float | None = None
    """S_min of the drawn law, in steps: the law with the value of B_crit that fits the curve best,
    so that it is twice this there. It is None where B_crit has no value, as are the next two."""
    linear_below: float | None = None
    """B_crit/9: below it lies perfect scaling, in the names of Shallue et al. 2018."""
    no_gain_above: float | None = None
    """9 B_crit: above it lies maximal data parallelism."""
    smallest: int
    largest: int
    """The batch sizes between which trials reached the target."""


class CriticalAt(Frozen):
    """The critical batch size at another goal of the target, by the same trials."""

    goal: float
    interval: Interval


class Searched(Frozen):
    """The batch sizes that a study may try, and how many octaves have a trial that reached."""

    low: int
    high: int
    octaves: int
    reached: int
    unreached: tuple[int, ...]
    """The middle of each octave without a trial that reached the target."""


class Faster(Configuration):
    """A configuration that is predicted to reach the target sooner than the best, in seconds."""

    seconds: float
    speedup: float
    """Over the best's predicted seconds."""


class Closest(Frozen):
    """The trial that came closest to a target which nothing reached."""

    configuration: Configuration
    value: float
    trend: Trend
    """What most trials did at their end; it decides what to do next. ``stopped early``: they were
    falling or flat, and none of these came near its budget."""


class ResultWarning(Frozen):
    """What could change the answer: its kind, the fix first, then the state."""

    kind: Warned
    fix: str
    state: str


class Phases(Frozen):
    """Seconds of the phases of the last command that trained, by the clock on the wall."""

    start: float = 0.0
    preparation: float = 0.0
    """Survey, preflight, and what nobody gave."""
    baseline: float = 0.0
    """Its first run."""
    others: float = 0.0
    """The search's other configurations, with the time to choose them."""
    confirmation: float = 0.0
    """Runs on new seeds."""
    answer: float = 0.0
    """What the trials say; files and MLflow come after it."""

    @property
    def total(self) -> float:
        """Seconds of all of them."""
        return float(sum(self.model_dump().values()))

    @property
    def share_of_others(self) -> float:
        """The share of the seconds that went to other configurations."""
        return self.others / self.total if self.total else 0.0


class Spent(Frozen):
    """Where the seconds of a study went."""

    training: float
    """Of all trials, as is ``other``."""
    other: float
    phases: Phases = Phases()


class StudyResult(Frozen):
    """What a study found; ``best`` is what the first line of the answer names."""

    schema_number: Literal[1] = 1
    bstune: str
    """The version that made it."""
    workload: str
    study: str
    objective: Objective
    target: Target
    budget: Budget
    ran_for: str | None = None
    """The target, or the budget, that the trials were run for, where another was asked for."""
    device: str
    threads: int
    parameters: int | None = None
    """Of the module, that are trained; None: recorded runs, or a loop of one's own."""
    examples: int | None = None
    """Of the training set."""
    seeds: int
    """New seeds that were asked for."""
    configurations: int
    """That the search tried."""
    trials: int
    """Trials that were run: resumptions and new seeds included."""
    verdict: Verdict | None
    """None for ``curve``, which compares nothing, once a trial has reached the target."""
    reached: bool
    """Whether a trial reached the target."""
    best: Confirmed | None = None
    """What to train: the baseline under ``keep``."""
    other: Confirmed | None = None
    """Under ``keep`` the best other configuration, on which the verdict stands."""
    baseline: Confirmed | None = None
    baseline_limit: Literal["budget", "stopped", "failed"] | None = None
    """Why the baseline's runs that missed the target ended: their whole budget, or 4 times the
    best's time."""
    speedup: Speedup | None = None
    """None where they have no new seed in common, or half of the best's or more missed the target:
    how many seeds reach it decides then, and these are too few to tell."""
    improvement: Improvement | None = None
    """In place of a speedup, where the best metric within the budget is sought."""
    near_optimal: tuple[int, int] | None = None
    """Batch sizes whose predicted median at their best rate is at most 1.1 times the least; the
    best's own belongs to it."""
    lr_alone: LrAlone | None = None
    """What the rate alone would give; None where the best has the baseline's batch size, or where
    that is not predicted to gain less than the best."""
    fewest_steps: FewestSteps | None = None
    """None where the best takes as few."""
    critical: Critical | None = None
    over_targets: tuple[CriticalAt, ...] = ()
    """B_crit at easier targets, the easiest first."""
    searched: Searched | None = None
    """None where nothing reached the target."""
    faster: Faster | None = None
    noise_scale: NoiseScaleEstimate | None = None
    """tr(Sigma)/|G|^2 of the trials near the best, in examples; None: it is not known."""
    lr_exponent: Interval | None = None
    """lr*(B) grows as B to this power."""
    allowed_rules: tuple[str, ...] = ()
    """The scaling rules that this interval allows."""
    curve: tuple[CurvePoint, ...] = ()
    measured: tuple[Measured, ...] = ()
    """With ``sampler=grid``: the fewest steps that were seen at each batch size."""
    closest: Closest | None = None
    """Where nothing reached the target."""
    easier_goal: float | None = None
    """A goal that a quarter of the trials met, where nothing reached the target."""
    easier: str | None = None
    """The command or call that asks for it."""
    missing: str | None = None
    """Under ``not yet``: what is missing; under ``curve``: what would narrow B_crit."""
    next: str | None = None
    """The command or call that gets it."""
    next_options: dict[str, int | float | str] = {}
    """Its options."""
    warnings: tuple[ResultWarning, ...] = ()
    spent: Spent
    train_command: str | None = None
    """The command or call that trains the best."""

    @property
    def seeks_metric(self) -> bool:
        """Whether the best metric within the budget is sought."""
        return self.target.goal is None
