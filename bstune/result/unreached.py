"""A study that has not reached its target: its best point, and why it has not."""

from pydantic import model_validator

from bstune.result.values import (
    BatchSize,
    Count,
    FromOne,
    NotNegative,
    Part,
    Positive,
    Real,
    Text,
    TrialPoint,
)


class AtEqualSeconds(Part, frozen=True):
    """The metrics of the best point so far and of the baseline, after equal seconds of training."""

    seconds: NotNegative
    """Seconds of training."""
    value: Real
    """The metric of the best point so far."""
    baseline_value: Real
    """The metric of the baseline."""


class SoFar(TrialPoint, frozen=True):
    """The best point of a study that has not reached its target."""

    value: Real
    """The value of its metric that is closest to the target."""
    steps: Count
    """Steps after which the metric had that value."""
    seconds: NotNegative | None
    """Seconds of training after which it had that value. None where no step was timed."""
    predicted_steps: Real | None
    """Steps that it is predicted to take to the target. None where its history does not tell, or
    where they are more than ``more_than``."""
    predicted_seconds: Real | None
    """Seconds of training that it is predicted to take. None as for steps, or without timings."""
    compared: AtEqualSeconds | None
    """It beside the baseline. None where there is no baseline to compare."""
    more_than: Count | None = None
    """It is predicted to take more steps than these: how many is not known, as nothing ran so far.
    None where its history does not tell, or where ``predicted_steps`` are known."""
    beyond_budget: bool = False
    """Whether ``more_than`` are the steps of a trial's budget, and no fewer."""


class ClosestTrial(Part, frozen=True):
    """The trial that came closest to a target that none reached."""

    value: Real
    """The value of its metric that is closest to the target."""
    steps: Count
    """Steps after which the metric had that value."""
    number: Count
    """The trial's number."""
    batch_size: BatchSize
    """Examples of a step."""
    lr: Positive
    """The learning rate."""


class Failures(Part, frozen=True):
    """Trials that failed by an error or a crash of their own.

    Those that were cut short, as by an interruption of the study, are none of them.
    """

    trials: FromOne
    """How many failed."""
    message: Text
    """The error of the last one."""


class Unreached(Part, frozen=True):
    """Facts that tell why no trial reached the target."""

    closest: ClosestTrial | None
    """The trial that came closest. None where no trial has a metric."""
    easier: Real | None = None
    """A target that the closest value would have met, and the trial's first value would not.

    None where there is none to advise.
    """
    as_fraction: Real | None = None
    """The target as a fraction, where it looks like a percentage of one. None elsewhere."""
    stopped: Count | None = None
    """Trials that were stopped. None where nothing is known of how trials ended."""
    improving: Count = 0
    """Stopped trials that still improved over the last half of their steps."""
    improving_at_budget: Count = 0
    """Improving trials that had spent their budget."""
    untold: Count = 0
    """Stopped trials of fewer than two evaluations, which do not tell whether they improved."""
    untold_at_budget: Count = 0
    """Trials among these that had spent their budget."""
    cut_schedules: Count = 0
    """Stopped trials whose schedule, which ends with its trial, had not ended."""
    cut_examples: Count = 0
    """The most examples that one of these has trained on; 0 where none took more than a few steps.
    """
    budget_steps: Count | None = None
    """``budget.steps`` of a trial. Not None where ``stopped`` is known."""
    budget_examples: Count | None = None
    """``budget.examples`` of a trial. Not None where ``stopped`` is known."""
    smallest_diverged_lr: Positive | None = None
    """The smallest learning rate that diverged. None where none did."""

    @model_validator(mode="after")
    def _check_budget(self) -> "Unreached":
        """Refuse stopped trials without the budget that they had."""
        budget = (self.budget_steps, self.budget_examples)
        if self.stopped is not None and None in budget:
            raise ValueError("stopped trials need a budget_steps and a budget_examples")
        return self
