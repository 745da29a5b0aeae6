"""A study that has not reached its target: its best point, and what tells why."""

from pydantic import model_validator

from bstune.result.values import (
    BatchSize,
    Count,
    NotNegative,
    Part,
    Positive,
    Real,
    Text,
    TrialPoint,
)


class AtEqualSeconds(Part, frozen=True):
    """What the best point so far and the baseline had come to after as much training."""

    seconds: NotNegative
    """Seconds of training."""
    value: Real
    """The metric of the best point so far."""
    baseline_value: Real
    """The metric of the baseline."""


class SoFar(TrialPoint, frozen=True):
    """The best point of a study that has not reached its target."""

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
