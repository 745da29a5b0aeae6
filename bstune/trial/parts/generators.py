"""Keeps the random numbers of the training apart from those that an evaluation draws."""

from bstune.trial.devices.randomness import GeneratorStates, random_state, set_random_state


class Generators:
    """Keeps the states of the random number generators during an evaluation.

    Args:
        states: those of a stopped trial, which are kept until the training begins; None: the trial
            starts afresh.
    """

    def __init__(self, states: GeneratorStates | None = None) -> None:
        # None where nothing is kept.
        self._states = states

    def keep(self) -> GeneratorStates:
        """Keep the present states, and give them."""
        self._states = random_state()
        return self._states

    def restore(self) -> None:
        """Set the generators to the kept states, once; where none are kept, leave them alone."""
        if self._states is not None:
            set_random_state(self._states)
            self._states = None
