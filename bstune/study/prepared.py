"""A study that has been checked, and all that runs it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bstune.core.records import TrialProtocol, TrialSpec
from bstune.core.search_space import Space
from bstune.core.step_time import seconds_between
from bstune.options import StudyOptions
from bstune.recipe import Recipe
from bstune.study.planning.baseline import Baseline
from bstune.study.planning.plan import SearchBudget
from bstune.study.planning.trial_budget import steps_at_budget
from bstune.study.training import Training
from bstune.system.console import format_seconds, plural
from bstune.system.files import Output
from bstune.trial.backend import TrialBackend, chooses_horizons
from bstune.trial.processes.workers import InProcess, Workers

if TYPE_CHECKING:
    from bstune.hardware.survey import Survey
    from bstune.trial.own_loop.loop_runner import LoopRunner

# Batch sizes whose seconds of a step are stored with a budget of seconds.
BUDGET_SIZES = 33
HORIZON_CAVEAT = (
    "The workload's schedule ends with the trial, at its horizon: S(B) is the shortest horizon "
    "that reaches the target, and a point stands where a run met the target, at its horizon's end "
    "or before."
)
FIXED_HORIZON_CAVEAT = (
    "The workload's schedule ends with the budget, which this sampler leaves as it is: the curve "
    "shows where this schedule stops working rather than the fewest steps (sampler=frontier "
    "chooses each trial's horizon)."
)
ON_TEST_CAVEAT = (
    "The target is measured on the test images, as the workload's source does: there is no other "
    "test."
)
OVERRIDDEN_CAVEAT = (
    "The learning rate was set in the optimizer that configure_optimizers builds, in place of its "
    "own, all groups and schedules in proportion."
)
OWN_TARGET_CAVEAT = (
    "The target is what your own configuration came to {after}: {target}, which is made easier by "
    "what chance is worth (workload.target.value sets another)."
)
SHARED_CAVEAT = (
    "No plan for further devices: it starts from the seconds per step of one, and here {} share "
    "the steps."
)


@dataclass(frozen=True)
class OwnGoal:
    """The target's value, where the study's first trial has set it.

    Args:
        value: of the metric.
        steps: of that trial's whole run; 0 where its record is not at hand.
        seconds: of training in these steps; None where not known.
    """

    value: float
    steps: int
    seconds: float | None

    @property
    def after(self) -> str:
        """How long the trial ran, in words, or "in its first run" where that is not at hand."""
        if not self.steps:
            return "in its first run"
        words = f"after {plural(self.steps, 'step')}"
        if self.seconds is not None:
            words += f", {format_seconds(self.seconds)}"
        return words


@dataclass(frozen=True)
class PreparedStudy:
    """A checked study, or one trial by itself."""

    options: StudyOptions
    """Of the study, with device and precision resolved."""
    recipe: Recipe | None
    """None: nothing is trained."""
    budget: SearchBudget
    space: Space
    """What is searched, within what the hardware takes."""
    protocol: TrialProtocol
    backend: TrialBackend
    files: Output
    trial: TrialSpec | None
    """The one trial to run instead of a study."""
    frozen_settings: Mapping[str, Any]
    """Options by their dotted names, which must not change while a study goes on."""
    survey: "Survey | None"
    """None where the hardware was not surveyed."""
    # Starts a number of processes that train; None: trials run in this one.
    open_processes: "Callable[[int], Workers | LoopRunner] | None"
    training: Training | None
    """None: nothing is trained."""
    notes: list[str]
    """Further lines of the printed plan."""
    elapsed: Callable[[], float]
    """Gives the seconds since the command began, which search.wall_seconds limits."""
    survey_seconds: float = 0.0
    """How long this command surveyed the hardware; 0 where the survey was cached."""
    baseline: Baseline | None = None
    """What trial 0 runs; None: the search's own first point."""
    goal: OwnGoal | None = None
    """The value of the target, where trial 0 has set it."""
    # Batch sizes and seconds of a step with which a study for the loss began; None: measured now.
    budget_times: tuple[tuple[int, float], ...] | None = None

    def open_runner(self, count: int | None = None) -> "Workers | InProcess | LoopRunner":
        """Start what runs the trials, ``count`` at a time; None: ``search.workers`` at a time."""
        if self.open_processes is None:
            return InProcess(self.backend.run)
        return self.open_processes(count or self.options.search.workers)

    def seconds_per_step(self, batch_size: float) -> float:
        """Give the seconds of a step that turn a budget of seconds into steps.

        A study that has begun keeps the seconds that it stored then, interpolated in logarithms
        between batch sizes: a new survey must not change its budget.
        """
        if self.budget_times is None:
            return self.backend.step_time(batch_size)
        return seconds_between(self.budget_times, batch_size)

    def measured_budget_times(self) -> tuple[tuple[int, float], ...]:
        """Give batch sizes spread evenly in logarithm over the range, each with a step's seconds.

        The reference's batch size is one of them.
        """
        low = self.space.low
        high = self.space.high
        shares_of_range = np.linspace(0.0, 1.0, BUDGET_SIZES)
        sizes = {round(low * (high / low) ** share) for share in shares_of_range.tolist()}
        # At the reference the baseline's budget is not interpolated.
        sizes.add(self.options.scaling.whole_batch_size)
        return tuple((size, self.backend.step_time(size)) for size in sorted(sizes))

    @property
    def sets_target(self) -> bool:
        """Whether the study's first trial is still to set its target."""
        return self.budget.objective != "loss" and self.protocol.target.is_open

    def last_step(self, batch_size: float) -> int:
        """Give the step after which a trial's budget is spent.

        For the objective loss the budget is one of three: seconds, which the seconds of a step turn
        into steps, else examples, else steps.
        """
        size = round(batch_size)
        if self.budget.objective != "loss":
            return self.protocol.last_step(size)
        return steps_at_budget(self.options, size, self.seconds_per_step)

    def close(self) -> None:
        """End the process that has loaded the data, if one was started and trains nothing now."""
        if self.training is not None:
            self.training.close()

    @property
    def caveats(self) -> list[str]:
        """Sentences of the report on how the schedule, devices and target were treated."""
        caveats = list[str]()
        if self.backend.horizon and chooses_horizons(self.options):
            caveats.append(HORIZON_CAVEAT)
        elif self.backend.horizon:
            caveats.append(FIXED_HORIZON_CAVEAT)
        if self.options.devices > 1:
            caveats.append(SHARED_CAVEAT.format(self.options.devices))
        if self.options.scaling.override_lr:
            caveats.append(OVERRIDDEN_CAVEAT)
        if self.backend.validates_on_test:
            caveats.append(ON_TEST_CAVEAT)
        if self.goal is not None:
            target = self.protocol.target
            caveats.append(OWN_TARGET_CAVEAT.format(after=self.goal.after, target=target))
        return caveats
