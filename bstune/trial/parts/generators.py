"""Random numbers that an evaluation draws are none of the training's."""

from bstune.trial.devices.randomness import GeneratorStates, random_state, set_random_state


class Generators:
    """Keeps the states of the random number generators across an evaluation.

    Or those from a stopped trial, until its training begins again.

    Args:
        kept: a stopped trial's, as :func:`bstune.trial.devices.randomness.random_state` returned
            them; None: it starts afresh.
    """

    def __init__(self, kept: GeneratorStates | None = None) -> None:
        self._kept = kept

    def keep(self) -> GeneratorStates:
        """Keep the states as they are, and give them."""
        self._kept = random_state()
        return self._kept

    def restore(self) -> None:
        """Set the generators to the states that were kept, once.

        Without any they are left alone.
        """
        if self._kept is not None:
            set_random_state(self._kept)
            self._kept = None
