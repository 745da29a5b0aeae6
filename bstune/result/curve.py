"""S*(B), steps to the target over batch size: the frontier's points and the curve."""

from pydantic import model_validator

from bstune.result.values import (
    BatchSize,
    Count,
    Hyperparameters,
    Items,
    NotNegative,
    Part,
    Positive,
    Real,
)


class CurvePoint(Part, frozen=True):
    """A trial on the frontier. Where it was stopped, its steps to the target are not known."""

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
    """Steps of the last evaluation that missed the target."""
    steps: Count | None
    """Steps of the first evaluation that met the target. None where it was stopped before."""
    seconds_per_step: NotNegative | None
    """tau(B) in seconds. None where no step was timed."""
    time_to_target: NotNegative | None
    """Seconds of training to the target. None where it was stopped before, or no step was timed."""
    time_low: NotNegative | None
    """Seconds of training that did not suffice. None where no step was timed."""
    examples: Count | None
    """Examples to the target. None where it was stopped before."""
    stopped: bool
    """Whether it was stopped before the target."""


class Curve(Part, frozen=True):
    """S*(B), the best learning rate and tau(B) over batch size. All lists have the same length."""

    batch_size: Items[Positive]
    """Examples of a step, rising."""
    steps: Items[Positive]
    """Steps to the target, at the best learning rate."""
    low: Items[Positive]
    """Lower end of the interval of these steps."""
    high: Items[Positive]
    """Upper end of the interval of these steps."""
    lr_low: Items[Positive]
    """Lower end of the interval of the best learning rate."""
    lr: Items[Positive]
    """The best learning rate."""
    lr_high: Items[Positive]
    """Upper end of the interval of the best learning rate."""
    seconds_per_step: Items[NotNegative] | None
    """tau(B) in seconds. None where nothing was timed."""
    seconds_error: Items[NotNegative] | None = None
    """Standard deviation of log tau(B). None where it is not known."""

    @model_validator(mode="after")
    def _check_lists(self) -> "Curve":
        """Refuse lists of different lengths, and batch sizes that do not rise."""
        lengths = {len(values) for _, values in self if values is not None}
        if len(lengths) != 1:
            raise ValueError(f"the lists must have one length, but got {sorted(lengths)}")
        if tuple(sorted(self.batch_size)) != self.batch_size:
            raise ValueError("batch sizes must rise")
        return self
