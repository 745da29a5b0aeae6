"""The state that the parts of a trial share: its steps and evaluations so far, and how it ends."""

from dataclasses import dataclass, field

from bstune.core.records import Status, TrialResult


@dataclass(slots=True)
class TrialState:
    """Steps and evaluations of a trial so far.

    Steps are optimizer steps that were applied, those of the trial that it continues included. A
    step that a gradient scaler skips does not count. Each attribute is written by one part, but for
    the status, which every part that ends the trial sets.
    """

    # Steps that were taken before this trial began, by the one that it continues.
    first_step: int
    # The step at which the trial ends, unless something has ended it before.
    last_step: int
    # Steps taken so far.
    steps: int
    # Steps at the last evaluation that missed the target; 0: none has missed it.
    steps_low: int = 0
    # The number of steps that a gradient scaler has skipped.
    skipped: int = 0
    # The step and the value of each evaluation; a value of None was not finite.
    history: list[tuple[int, float | None]] = field(default_factory=list)
    # The metric before training, where the trial sets the study's goal; None: it is not known.
    start_value: float | None = None
    status: Status = "stopped"
    message: str | None = None
    # Whether an evaluation has ended the trial.
    ended: bool = False
    # The loss that ``training_step`` returned for the last batch: a tensor, unless the module steps
    # its optimizers itself.
    loss: object = None
    # lr/(1 - m) for an SGD with momentum m, before any schedule; None for other optimizers.
    effective_lr: float | None = None

    @property
    def recorded_history(self) -> tuple[tuple[int, float | None], ...]:
        """The history as the trial's record has it, after a known metric before training."""
        if self.start_value is None:
            return tuple(self.history)
        return (0, self.start_value), *self.history

    def diverge(self, message: str) -> None:
        """Note that the trial has diverged, and why."""
        self.status = "diverged"
        self.message = message


def state_after(record: TrialResult, skipped: int, last_step: int) -> TrialState:
    """Give the state with which a trial begins that continues a stopped one.

    Args:
        record: of the stopped trial.
        skipped: how many of the stopped trial's steps a gradient scaler has skipped.
        last_step: the step at which the new trial is to end.
    """
    return TrialState(
        first_step=record.steps,
        last_step=last_step,
        steps=record.steps,
        steps_low=record.steps_low,
        skipped=skipped,
        history=list(record.history),
    )
