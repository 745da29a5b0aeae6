"""What an evaluation says of a trial: that it has reached its target, has diverged, is out of steps, or goes on."""

import math

from bstune.core.errors import ConfigError
from bstune.core.records import Target
from bstune.trial.parts.state import TrialState


class Verdict:
    """Ends a trial by what its evaluations say.

    Args:
        state: of the trial, whose history, status and lower bound of the steps to target it writes.
        target: that ends it.
        divergence: how many times as far from the target as at its start a trial counts as diverged.
        start_gap: how far from the target the trial was before training; None if that was not measured on all
            validation data, so that no value is far past it.
        may_begin_met: whether untrained weights may meet the target, as they may one that another trial
            came to; else they are refused.
    """

    def __init__(
        self,
        state: TrialState,
        target: Target,
        divergence: float,
        start_gap: float | None = None,
        may_begin_met: bool = False,
    ) -> None:
        self._state = state
        self._target = target
        self._divergence = divergence
        self.start_gap = start_gap
        self._may_begin_met = may_begin_met

    def begin(self, value: float) -> None:
        """Take in the metric before training; a ConfigError says that it meets the target already."""
        if self._may_begin_met and self._target.reached(value):
            # Its first evaluation then ends the trial, unless it is worse.
            return
        refuse_met_target(self._target, value)
        self.start_gap = self._target.gap(value)

    def judge(self, value: float | None, loss: float) -> None:
        """Take in an evaluation, which may end the trial.

        Args:
            value: of the target's metric; None if it is not finite.
            loss: of the last training step.
        """
        state = self._state
        state.history.append((state.steps, value))
        state.ended = True
        divergence = self._divergence_of(value, loss)
        if divergence is not None:
            state.diverge(divergence)
        elif value is not None and self._target.reached(value):
            state.status = "reached"
            state.message = None
            # The lower bound stays that of the last evaluation that missed the target.
            return
        elif state.steps >= state.last_step:
            state.status = "stopped"
            state.message = None
        else:
            state.ended = False
        state.steps_low = state.steps

    def leave_out(self, loss: float) -> None:
        """Take in an evaluation that did not log the target's metric, and so tells nothing of it."""
        state = self._state
        if not math.isfinite(loss):
            state.ended = True
            state.diverge(f"the training loss is {loss} at step {state.steps}")
        elif state.steps >= state.last_step:
            state.ended = True
            state.status = "stopped"
            state.message = None
        else:
            state.ended = False

    def _divergence_of(self, value: float | None, loss: float) -> str | None:
        """Return why the trial has diverged; None if it has not."""
        metric = self._target.metric
        step = self._state.steps
        if not math.isfinite(loss):
            return f"the training loss is {loss} at step {step}"
        if value is None:
            return f"{metric} is not finite at step {step}"
        if self.start_gap is None:
            return None
        if self._target.gap(value) > self._divergence * self.start_gap:
            return f"{metric} is {value:g} at step {step}, far past its start"
        return None


def refuse_met_target(target: Target, value: float) -> None:
    """Raise a ConfigError for a target that untrained weights meet."""
    if target.reached(value):
        raise ConfigError(
            f"the target {target} is met before training ({target.metric} starts at {value:g}): "
            "check workload.target.mode and workload.target.value"
        )
