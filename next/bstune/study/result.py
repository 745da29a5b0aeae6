"""The typed result of a study: frozen values, built where they are known; curve.json is their dump.

Text, figure, page and MLflow read its attributes and compute nothing that is stated here.
"""

from typing import Literal

from bstune.core.question import Objective
from bstune.core.records import Frozen, Status, Target
from bstune.core.space import Configuration
from bstune.search.findings import CurvePoint

SCHEMA = 1

Verdict = Literal["switch", "keep", "not yet", "use"]
Warned = Literal["step times", "far from the law"]


class Confirmed(Configuration):
    """A configuration with its runs on new seeds.

    ``steps`` and ``seconds`` are medians over the runs; where half of them or more did not reach
    the target they are bounds ("at least"). Before the first run they are the search's own trial's.
    """

    number: int
    """The trial of the search whose configuration it is."""
    seeds: tuple[int, ...]
    runs_steps: tuple[int, ...]
    """Steps of each run, in the order of ``seeds``."""
    runs_status: tuple[Status, ...]
    schedule_steps: int | None = None
    """Where the schedule of each run ended; None: it did not end with the run."""
    predicted_share: float | None = None
    """Share of further seeds that are predicted to reach the target, where schedules end."""
    steps: float
    seconds: float
    """Training seconds to the target: ``steps`` times ``step_seconds``."""
    is_bound: bool
    step_seconds: float
    step_seconds_error: float
    """Relative standard deviation of ``step_seconds``."""

    @property
    def runs(self) -> int:
        """Runs on new seeds."""
        return len(self.seeds)

    @property
    def reached(self) -> int:
        """How many of them reached the target."""
        return sum(status == "reached" for status in self.runs_status)


class Interval(Frozen):
    """A value with its 90% interval; an end that the trials do not bound is None."""

    value: float | None
    low: float | None
    high: float | None


class Speedup(Frozen):
    """How many times as fast the best is as the baseline: the quotient of the two medians."""

    value: float
    low: float | None
    high: float | None
    at_least: bool
    """Whether the baseline's median is a bound, and so is ``value``."""
    at_most: bool = False
    """Whether the best's is, likewise."""


class LrAlone(Frozen):
    """The best rate at the baseline's own batch size, and its predicted speedup."""

    lr: float
    speedup: float


class Critical(Frozen):
    """The critical batch size: the parameter B_crit of S*(B) = S_min (1 + B_crit/B)."""

    interval: Interval
    s_min: float | None
    """S_min of the drawn law, in steps; None where B_crit has no value."""
    smallest: int
    largest: int
    """The batch sizes between which trials reached the target."""


class Closest(Frozen):
    """The trial that came closest to a target which nothing reached."""

    configuration: Configuration
    number: int
    value: float
    trend: Literal["still falling", "flat", "diverged", "failed"]
    """What most trials did at their end; it decides what to do next."""


class ResultWarning(Frozen):
    """What could change the answer: its kind, the fix first, then the state."""

    kind: Warned
    fix: str
    state: str


class Spent(Frozen):
    """Where the seconds of a study went."""

    training: float
    other: float


class StudyResult(Frozen):
    """What a study found; ``best`` is what the first line of the answer names."""

    schema_number: Literal[1] = 1
    bstune: str
    """The version that made it."""
    workload: str
    study: str
    objective: Objective
    target: Target
    device: str
    threads: int
    seeds: int
    """New seeds that were asked for."""
    configurations: int
    """That the search tried."""
    trials: int
    """Trials that were run: resumptions and new seeds included."""
    verdict: Verdict | None
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
    near_optimal: tuple[int, int] | None = None
    """Batch sizes whose predicted median at their best rate is at most 1.1 times the least; the
    best's own belongs to it."""
    lr_alone: LrAlone | None = None
    """What the rate alone would give; None where the best has the baseline's batch size."""
    critical: Critical | None = None
    lr_exponent: Interval | None = None
    """lr*(B) grows as B to this power."""
    curve: tuple[CurvePoint, ...] = ()
    closest: Closest | None = None
    """Where nothing reached the target."""
    easier_goal: float | None = None
    """A goal that a quarter of the trials met, where nothing reached the target."""
    easier: str | None = None
    """The command or call that asks for it."""
    missing: str | None = None
    """Under ``not yet``: what is missing."""
    next: str | None = None
    """Under ``not yet``: the command or call that gets it."""
    warnings: tuple[ResultWarning, ...] = ()
    spent: Spent
    train: str | None = None
    """The command or call that trains the best."""
