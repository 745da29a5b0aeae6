"""A wish to stop that only one of several processes may have.

They agree on it at the next evaluation.
"""

from bstune.trial.lightning.installed import Trainer


class AgreedStop:
    """Puts off what stops a Trainer, where it trains together with those of other processes.

    One that stopped by itself would leave the others waiting for its gradients.

    Args:
        alone: whether this process trains the trial by itself, so that nothing is put off.
    """

    def __init__(self, alone: bool) -> None:
        self._alone = alone
        self._asked = False
        self._decided = False

    def hold(self, trainer: Trainer) -> None:
        """Put off a wish to stop, unless all have agreed on it."""
        if self._alone or self._decided:
            return
        self._asked |= trainer.should_stop
        trainer.should_stop = False

    def is_asked(self, trainer: Trainer) -> bool:
        """Say whether something in this process wants to stop, or has since the start."""
        return trainer.should_stop or self._asked

    def decide(self, trainer: Trainer, stops: bool) -> None:
        """Stop the Trainer, or go on, as all have agreed on."""
        self._decided = stops
        trainer.should_stop = stops
