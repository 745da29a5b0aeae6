"""Explains the end of a trial that no evaluation ended.

It ended by itself, was stopped by the module or a call-back, or ended by an error.
"""

from torch import Tensor

from bstune.trial.lightning.installed import LightningModule, Trainer
from bstune.trial.parts.state import TrialState


def explain_end(state: TrialState, trainer: Trainer) -> None:
    """Write into the state why the trial stopped, if the user's code or the Trainer stopped it.

    Nothing is written where an evaluation has ended the trial, or its gradients have diverged.

    Raises:
        RuntimeError: if nothing has asked the training to end, as when a hook raises a
            StopIteration.
    """
    if state.ended or state.status != "stopped":
        return
    has_no_step = state.steps == state.first_step
    # A Trainer that still has a single epoch has an endless one, which only a StopIteration ends: a
    # finite one is followed by another as long as the trial lacks steps.
    if not trainer.should_stop and (has_no_step or trainer.max_epochs == 1):
        raise RuntimeError(
            f"the training ended by itself at step {state.steps}, as a StopIteration ends it"
        )
    reason = _reason_of_callbacks(trainer)
    if reason is None:
        reason = "by the module or a call-back" if trainer.should_stop else "by itself"
    state.message = f"the training was stopped at step {state.steps}: {reason.splitlines()[0]}"


def _reason_of_callbacks(trainer: Trainer) -> str | None:
    """Give the first reason to stop that a call-back states, as Lightning's EarlyStopping does.

    None where no call-back states one.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        reason: str | None = getattr(callback, "stopping_reason_message", None)
        if reason:
            return reason
    return None


def what_is_not_finite(state: TrialState, module: LightningModule | None) -> str | None:
    """Say whether the last step's loss or some weight is not finite, in words; None if all are."""
    try:
        if isinstance(state.loss, Tensor) and not state.loss.isfinite().all():
            return f"the training loss is {state.loss.float().mean().item()}"
        if module is None:
            return None
        for name, weight in module.named_parameters():
            if not weight.isfinite().all():
                return f"{name} is not finite"
    # The device does not compute any more, as after an assertion of CUDA.
    except RuntimeError:
        return None
    return None
