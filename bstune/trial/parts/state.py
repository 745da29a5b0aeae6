"""What the parts of a trial share: how far it has come, and how it ends."""

from dataclasses import dataclass, field

from bstune.core.records import Status, TrialResult


@dataclass(slots=True)
class TrialState:
    """Steps and evaluations of a trial so far.

    Steps are optimizer steps that were applied, those of the trial that it continues among them;
    one that a gradient scaler skips is none. Each attribute has one writer, but for the status,
    which whatever ends a trial sets.
    """

    # Taken before this trial began, by the one that it continues.
    first_step: int
    # It ends there, unless something has ended it before.
    last_step: int
    steps: int
    # Of the last evaluation that missed the target; 0: there was none.
    steps_low: int = 0
    # Steps that a gradient scaler left out.
    skipped: int = 0
    # The step and the value of each evaluation; None is a value that is not finite.
    history: list[tuple[int, float | None]] = field(default_factory=list)
    status: Status = "stopped"
    message: str | None = None
    # Whether an evaluation has ended it.
    ended: bool = False
    # What ``training_step`` returned for the last batch: a tensor, unless the module steps its
    # optimizers itself.
    loss: object = None
    # lr/(1 - m) of an SGD with a momentum m, before any schedule.
    effective_lr: float | None = None

    def diverge(self, message: str) -> None:
        """Note that the trial has diverged, and why."""
        self.status = "diverged"
        self.message = message


def state_after(record: TrialResult, skipped: int, last_step: int) -> TrialState:
    """Return the state of a trial that goes on after the ``record`` of the one that it continues.

    ``skipped`` counts the steps that a gradient scaler left out of that one.
    """
    return TrialState(
        first_step=record.steps,
        last_step=last_step,
        steps=record.steps,
        steps_low=record.steps_low,
        skipped=skipped,
        history=list(record.history),
    )
