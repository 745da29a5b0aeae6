"""Lets several processes agree, at an evaluation, on a stop that only one of them may want."""

from bstune.trial.lightning.installed import Trainer


class AgreedStop:
    """Puts off a Trainer's stop until the processes that train together have agreed on it.

    A process that stopped by itself would leave the others waiting for its gradients.

    Args:
        alone: whether this process trains the trial by itself, so that nothing is put off.
    """

    def __init__(self, alone: bool) -> None:
        self._alone = alone
        self._asked = False
        self._decided = False

    def hold(self, trainer: Trainer) -> None:
        """Take back and remember the Trainer's wish to stop, unless all have agreed on it."""
        if self._alone or self._decided:
            return
        # A stop that was asked for at an earlier step stays asked for.
        self._asked |= trainer.should_stop
        trainer.should_stop = False

    def is_asked(self, trainer: Trainer) -> bool:
        """Whether something in this process wants to stop, or has wanted to since the start."""
        return trainer.should_stop or self._asked

    def decide(self, trainer: Trainer, stops: bool) -> None:
        """Stop the Trainer or let it go on, as all processes have agreed."""
        self._decided = stops
        trainer.should_stop = stops
