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
    """By which merit a winner is the best, and what headings call it."""

    merit: Merit
    """``time`` or ``steps``."""
    heading: str
    """Such as ``least time``."""


WINNERS: Mapping[WinnerName, Criterion] = {
    "best_by_time": Criterion("time", "least time"),
    "best_by_steps": Criterion("steps", "fewest steps"),
}


class Confirmed(Part, frozen=True):
    """A winner's runs on fresh seeds: how many reached the target, and after how long.

    A run that missed the target takes longer than all that reached it. So where runs missed it an
    upper end is None, and where half of them did the median is None, too.
    """

    seeds: Items[Count]
    """The seed of each run."""
    reached: Count
    """Runs that reached the target."""
    runs: Count
    """All runs."""
    time_median: NotNegative | None
    """Median seconds of training to the target."""
    time_low: NotNegative | None
    """Lower end of the 90% interval of ``time_median``.

    The interval is that of the steps, widened by the error of a step's seconds.
    """
    time_high: NotNegative | None
    """Upper end of the 90% interval of ``time_median``."""
    steps_median: NotNegative | None
    """Median steps to the target."""
    steps_low: NotNegative | None
    """Lower end of the 90% interval of ``steps_median``.

    The interval holds the scatter over seeds and the distance between evaluations.
    """
    steps_high: NotNegative | None
    """Upper end of the 90% interval of ``steps_median``."""
    untold: Count = 0
    """Runs that met the target at their first evaluation, so that their steps are not known."""
    diverged: Count = 0
    """Runs that diverged."""

    @property
    def all_reached(self) -> bool:
        """Whether every run reached the target."""
        return self.reached == self.runs

    def interval_by(self, merit: Merit) -> tuple[float | None, float | None]:
        """Give both ends of the interval of the median, in seconds of training or in steps.

        An end is None where so many runs missed the target that it is not known.
        """
        if merit == "time":
            return self.time_low, self.time_high
        return self.steps_low, self.steps_high


class SingleRun(Part, frozen=True):
    """The winner's own trial of the search, which may be a lucky one."""

    steps: Count
    """Steps to the target."""
    time_to_target: NotNegative | None
    """Seconds of training to the target."""


class Reaching(Part, frozen=True):
    """How likely a further seed reaches the target, as all trials predict.

    It is told where schedules end with the trial: a horizon may be too short for a seed.
    """

    chance: Share
    """The chance with the winner's horizon."""
    best_chance: Share
    """The chance with the longest horizon that the budget allows at the winner's batch size."""
    longest: Count
    """The steps of that longest horizon."""


class WinnerResult(TrialPoint, frozen=True):
    """A winner. Its steps and seconds are those to expect of a fresh seed.

    They are the median over its runs on fresh seeds, and None where half of these missed the
    target. Without such runs they are predicted.
    """

    steps: NotNegative | None
    """Steps to the target."""
    seconds_per_step: NotNegative | None
    """tau(B) in seconds. None where no step was timed."""
    time_to_target: NotNegative | None
    """Seconds of training to the target."""
    confirmed: Confirmed | None
    """Its runs on fresh seeds. None where there were none."""
    single_run: SingleRun
    """Its own trial of the search."""
    reaching: Reaching | None = None
    """The chance that a further seed reaches the target. None where schedules end elsewhere."""

    def expected(self, merit: Merit) -> float | None:
        """Give the seconds of training, or the steps, that a fresh seed is expected to take.

        They are to the target. None where half of the fresh seeds missed it. Seconds are None, too,
        where no step was timed.
        """
        if merit == "time":
            return self.time_to_target
        return self.steps

    def of_single_run(self, merit: Merit) -> float | None:
        """Give the seconds of training, or the steps, that its own trial took to the target.

        Seconds are None where no step was timed.
        """
        if merit == "time":
            return self.single_run.time_to_target
        return self.single_run.steps


class AsGood(Part, frozen=True):
    """The batch sizes that are nearly as good as the best one, each at its best learning rate."""

    merit: Merit
    """Whether they are as good in seconds or in steps."""
    within: Level
    """How much more than the best one they may take, as a share: 0.1 is 10%."""
    low: BatchSize
    """The smallest of them, in examples."""
    middle: BatchSize
    """A batch size between these two: the winner's, if it lies there."""
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


class UntoldOthers(Part, frozen=True):
    """What the other configurations came to, where one of them may be better than the own one.

    The user's own configuration is then the winner only as those that may be better were stopped
    before the target.
    """

    chance: Share
    """The chance that one that was stopped takes at least a tenth less."""
    reached: Count
    """How many others reached the target."""
    stopped: Count
    """How many were stopped before it."""
    diverged: Count
    """How many diverged."""
    out_of_memory: Count
    """How many ran out of memory."""


class NotRunAgain(Part, frozen=True):
    """A point that is predicted to be better than the winner and lacks fresh seeds."""

    batch_size: BatchSize
    """Examples of a step."""
    lr: Positive
    """The learning rate."""
    candidates: Count | None
    """``search.candidates``, which kept it from them. None where the study ended before."""


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
    """Seconds of training to expect of a fresh seed. None as for ``steps``, or without timings."""
    horizon: Count | None
    """Steps after which its schedule ends; None where none does."""
    number: Count
    """Its trial's number."""
    seed: Count
    """Its trial's seed."""
    reached: bool
    """Whether a trial of the study reached the target."""
