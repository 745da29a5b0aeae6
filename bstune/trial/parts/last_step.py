"""The step after which a trial ends.

It is that of its own limit or else of its budget; once its wall time is over, it is the next one.
"""

import time
from collections.abc import Callable

from bstune.core.errors import ConfigError
from bstune.core.records import TrialProtocol, TrialSpec
from bstune.trial.parts.state import TrialState


def last_step_of(spec: TrialSpec, protocol: TrialProtocol, steps: int) -> int:
    """Give the step at which a trial ends that has taken ``steps`` steps.

    A ConfigError says that it has none left.
    """
    last = spec.max_steps
    # A limit replaces the budget, and may lie past it in a trial that is run by itself.
    if last is None:
        last = protocol.last_step(spec.batch_size)
    if last <= steps:
        raise ConfigError(
            f"a trial that has {steps} steps cannot be trained until step {last}: raise max_steps"
        )
    return last


def steps_of_trainer(
    state: TrialState, spec: TrialSpec, protocol: TrialProtocol, horizon: int | None
) -> int:
    """Give the number of steps after which the Trainer ends: its max_steps, which schedules read.

    It is ``horizon``, if that is given. Otherwise it is the budget's last step, so that a trial
    that is stopped early has the same schedules as one that is not; or the trial's own last step,
    if that lies past the budget. Steps that a gradient scaler has skipped are added, as the Trainer
    counts them too.
    """
    if horizon is not None:
        return horizon
    budget = protocol.last_step(spec.batch_size)
    return max(budget, state.last_step) + state.skipped


class LastStep:
    """Ends a trial with its next step once its wall time is over.

    Args:
        state: of the trial, whose last step it writes.
        max_seconds: of wall time, from now on; None: there is no limit.
        now: a monotonic clock, in seconds.
    """

    def __init__(
        self,
        state: TrialState,
        max_seconds: float | None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = state
        self._max_seconds = max_seconds
        self._now = now
        self._started_at = now()

    def bring_forward(self) -> None:
        """Make the next step the last one if the time is over."""
        if self._max_seconds is None:
            return
        if self._now() - self._started_at > self._max_seconds:
            self._state.last_step = min(self._state.last_step, self._state.steps + 1)
