"""The winners: what they take to the target, by their own run and on fresh seeds."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from bstune.core.records import Merit
from bstune.result.values import (
    BatchSize,
    Count,
    Hyperparameters,
    Items,
    Level,
    NotNegative,
    Part,
    Positive,
    Real,
    Share,
    TrialPoint,
)

WinnerName = Literal["best_by_time", "best_by_steps"]


class Criterion(NamedTuple):
    """What a winner is best by, and a heading for it."""

    merit: Merit
    heading: str


WINNERS: Mapping[WinnerName, Criterion] = {
    "best_by_time": Criterion("time", "least time"),
    "best_by_steps": Criterion("steps", "fewest steps"),
}


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


class ParetoTrial(TrialPoint, frozen=True):
    """A trial that no other beats both in steps and in seconds."""

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
