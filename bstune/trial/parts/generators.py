"""Random numbers that an evaluation draws are none of the training's."""

from collections.abc import Mapping
from typing import Any

from bstune.trial.devices.randomness import random_state, set_random_state


class Generators:
    """Keeps the states of the random number generators across an evaluation, or from a stopped trial.

    Args:
        kept: a stopped trial's, as :func:`bstune.trial.devices.randomness.random_state` returned
            them; None: it starts afresh.
    """

    def __init__(self, kept: Mapping[str, Any] | None = None) -> None:
        self._kept = kept

    def keep(self) -> Mapping[str, Any]:
        """Keep the states as they are, and return them."""
        kept = random_state()
        self._kept = kept
        return kept

    def restore(self) -> None:
        """Set the generators to the states that were kept, once.

        Without any they are left alone.
        """
        if self._kept is not None:
            set_random_state(self._kept)
            self._kept = None
