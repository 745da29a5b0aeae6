"""The ends of epochs, at which a trial may be evaluated, and after which it may need another."""

from bstune.trial.lightning.installed import LightningModule, Trainer, sized_len
from bstune.trial.lightning.trainer import uses_epoch_metrics
from bstune.trial.parts.state import TrialState


class EpochEnds:
    """Knows whether a trial's epochs end, and whether it is evaluated at their ends.

    Args:
        state: of the trial, whose steps it reads.
        adds_epochs: whether epochs are added to the Trainer's until the trial has taken its steps.

    Attributes:
        epochs_end: whether epochs end, as batches come from a loader with a length; else there is
            one endless epoch.
    """

    def __init__(self, state: TrialState, adds_epochs: bool) -> None:
        self._state = state
        self._adds_epochs = adds_epochs
        # Whether the trial is evaluated at the ends of epochs; begin() finds out.
        self._evaluates_epochs = False
        # The trial's steps when the last epoch ended.
        self._steps_at_last_end = state.steps
        self.epochs_end = False

    def begin(self, trainer: Trainer, module: LightningModule) -> None:
        """Find out whether epochs end, and whether validation metrics are used at their ends."""
        self.epochs_end = sized_len(trainer.train_dataloader) is not None
        self._evaluates_epochs = self.epochs_end and uses_epoch_metrics(trainer, module)

    def evaluates(self, trainer: Trainer) -> bool:
        """Whether the present batch ends an epoch, and epochs are evaluated at their ends."""
        if not self._evaluates_epochs:
            return False
        return trainer.fit_loop.batch_idx + 1 >= trainer.num_training_batches

    def end(self, trainer: Trainer) -> None:
        """At the end of the Trainer's last epoch, add another one if that epoch had steps.

        The trial lacks steps at that point if the module or a gradient scaler has left out some.
        """
        is_last = trainer.current_epoch + 1 == trainer.max_epochs
        has_steps = self._state.steps > self._steps_at_last_end
        may_go_on = self.epochs_end and self._adds_epochs and not trainer.should_stop
        # An epoch without steps would be followed by others without end.
        if may_go_on and is_last and has_steps:
            # Epochs are counted from 0, so the present one and the next are 2 more than it says.
            trainer.fit_loop.max_epochs = trainer.current_epoch + 2
        self._steps_at_last_end = self._state.steps
