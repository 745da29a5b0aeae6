"""The ends of epochs.

A trial may be evaluated at them, and its last one may not be the last.
"""

from bstune.trial.lightning.installed import LightningModule, Trainer, sized_len
from bstune.trial.lightning.trainer import looks_at_epochs
from bstune.trial.parts.state import TrialState


class EpochEnds:
    """Knows whether a trial's epochs end, and what is due there.

    Args:
        state: of the trial, whose steps it reads.
        adds_epochs: whether the Trainer goes on after its last epoch until the trial has its steps.

    Attributes:
        exist: whether batches come from a loader that has a length; else there is one endless
            epoch.
    """

    def __init__(self, state: TrialState, adds_epochs: bool) -> None:
        self._state = state
        self._adds_epochs = adds_epochs
        self._looked_at = False
        self._steps_at_last = state.steps
        self.exist = False

    def begin(self, trainer: Trainer, module: LightningModule) -> None:
        """Look at the Trainer's batches, and at what takes metrics at an epoch's end."""
        self.exist = sized_len(trainer.train_dataloader) is not None
        self._looked_at = self.exist and looks_at_epochs(trainer, module)

    def evaluates(self, trainer: Trainer) -> bool:
        """Return whether this batch ends an epoch that is evaluated there."""
        if not self._looked_at:
            return False
        return trainer.fit_loop.batch_idx + 1 >= trainer.num_training_batches

    def end(self, trainer: Trainer) -> None:
        """Add an epoch to the last one, if it had steps.

        The module or a gradient scaler has left out others.
        """
        is_last = trainer.current_epoch + 1 == trainer.max_epochs
        has_steps = self._state.steps > self._steps_at_last
        goes_on = self.exist and self._adds_epochs and not trainer.should_stop
        if goes_on and is_last and has_steps:
            trainer.fit_loop.max_epochs = trainer.current_epoch + 2
        self._steps_at_last = self._state.steps
