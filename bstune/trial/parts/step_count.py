"""Counts the optimizer steps that a trial has applied; skipped ones do not count."""

from bstune.trial.lightning.installed import LightningModule, Trainer
from bstune.trial.parts.skipped_steps import SkippedSteps
from bstune.trial.parts.state import TrialState
from bstune.trial.processes.reached import tell_steps

# After so many skipped steps in a row the trial has diverged. A gradient scaler halves its scale at
# each of them, so by then a finite loss would not overflow.
SKIPPED_STEPS_MEAN_DIVERGED = 50


class StepCount:
    """Counts a trial's steps.

    Args:
        state: of the trial, whose steps, skipped steps and status it writes.
        adds_steps: whether the Trainer takes another step for each skipped one.
    """

    def __init__(self, state: TrialState, adds_steps: bool) -> None:
        self._state = state
        self._adds_steps = adds_steps
        self._skipped_steps: SkippedSteps | None = None
        self._skipped_in_a_row = 0

    def begin(self, trainer: Trainer, module: LightningModule) -> None:
        """Look for a gradient scaler, before the first step."""
        self._skipped_steps = SkippedSteps(trainer, module)

    def end_step(self, trainer: Trainer) -> None:
        """Count the step that has just ended; too many skipped steps in a row end the trial."""
        state = self._state
        if self._skipped_steps is None or not self._skipped_steps.skipped(state.loss):
            state.steps += 1
            tell_steps(state.steps)
            self._skipped_in_a_row = 0
            return
        state.skipped += 1
        # Lightning counts the skipped step: another one replaces it.
        if self._adds_steps and trainer.max_steps > 0:
            trainer.fit_loop.epoch_loop.max_steps += 1
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row >= SKIPPED_STEPS_MEAN_DIVERGED:
            state.diverge(f"the gradients overflowed in {self._skipped_in_a_row} steps in a row")
            trainer.should_stop = True
