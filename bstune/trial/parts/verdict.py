"""Decides after an evaluation how a trial goes on.

It has reached its target, has diverged, is out of steps, or trains on.
"""

import math

from bstune.core.errors import ConfigError
from bstune.core.records import Status, Target
from bstune.core.trial_end import status_at, steps_low_of
from bstune.trial.parts.state import TrialState
from bstune.trial.processes.reached import tell_evaluation

# What a target is changed to that untrained weights meet.
OTHER_TARGET = "give workload.target.mode the other direction, or a harder value"


class Verdict:
    """Ends a trial that an evaluation finds at its target, diverged, or at its last step.

    Args:
        state: of the trial, whose history, status and lower bound of the steps to target it writes.
        target: that ends the trial.
        divergence: a trial has diverged once its distance from the target is over this many times
            the distance at its start.
        start_gap: how far from the target the trial was before training. None: that was not
            measured on all validation data, so that no distance counts as divergence.
        may_start_at_target: whether untrained weights may meet the target. They may where the
            target is a value that another trial came to; else they are refused.
        sets_goal: whether the study takes its target from this trial. The state then keeps the
            metric of the untrained weights, with which what the trial comes to is compared.
    """

    def __init__(
        self,
        state: TrialState,
        target: Target,
        divergence: float,
        start_gap: float | None = None,
        may_start_at_target: bool = False,
        sets_goal: bool = False,
    ) -> None:
        self._state = state
        self._target = target
        self._divergence = divergence
        self.start_gap = start_gap
        self._may_start_at_target = may_start_at_target
        self._sets_goal = sets_goal

    def begin(self, value: float, change: str = OTHER_TARGET) -> None:
        """Take in the metric of the untrained weights, from which divergence is measured.

        Args:
            value: the metric.
            change: what the user is to do where it meets the target already.

        Raises:
            ConfigError: where it meets the target already, and that is not allowed.
        """
        # What this trial comes to is the goal of the others, which untrained weights must not meet.
        if self._sets_goal:
            self._state.start_value = value
        if self._may_start_at_target and self._target.reached(value):
            # The first evaluation then ends the trial, unless it is worse. Divergence is not
            # measured: there is no distance from the target at the start to measure it by.
            return
        refuse_met_target(self._target, value, change)
        self.start_gap = self._target.gap(value)

    def judge(self, value: float | None, loss: float | None) -> None:
        """Take in an evaluation, which may end the trial; after its last step it does.

        Args:
            value: of the target's metric; None if it is not finite.
            loss: of the last training step; None where it is not known.
        """
        state = self._state
        state.history.append((state.steps, value))
        tell_evaluation(state.steps, value)
        has_reached = value is not None and self._target.reached(value)
        status = self._end(self._divergence_of(value, loss), has_reached=has_reached)
        # The last step at which the target was missed bounds the steps to the target from below.
        state.steps_low = steps_low_of(status, state.steps, state.steps_low)

    def judge_by_loss(self, loss: float) -> None:
        """Take in an evaluation that did not log the target's metric.

        The trial may still end: by its last step, or by a loss that is not finite.
        """
        self._end(self._divergence_of_loss(loss), has_reached=False)

    def _end(self, divergence: str | None, *, has_reached: bool) -> Status | None:
        """Write how an evaluation ends the trial into its state, and give its status.

        None: the trial goes on. ``divergence`` says why the trial has diverged; None: it has not.
        """
        state = self._state
        has_diverged = divergence is not None
        status = status_at(state.steps, state.last_step, has_reached, has_diverged)
        state.ended = status is not None
        if divergence is not None:
            state.diverge(divergence)
        elif status is not None:
            state.status = status
            state.message = None
        return status

    def _divergence_of_loss(self, loss: float | None) -> str | None:
        """Say that the loss of the last step is not finite; None if it is, or is not known."""
        if loss is None or math.isfinite(loss):
            return None
        return f"the training loss is {loss} at step {self._state.steps}"

    def _divergence_of(self, value: float | None, loss: float | None) -> str | None:
        """Say why the trial has diverged; None if it has not."""
        metric = self._target.metric
        step = self._state.steps
        divergence = self._divergence_of_loss(loss)
        if divergence is not None:
            return divergence
        if value is None:
            return f"{metric} is not finite at step {step}"
        # Without a measured start no distance from the target counts as divergence.
        if self.start_gap is None:
            return None
        if self._target.gap(value) > self._divergence * self.start_gap:
            return f"{metric} is {value:g} at step {step}, far past its start"
        return None


def refuse_met_target(target: Target, value: float, change: str = OTHER_TARGET) -> None:
    """Raise a ConfigError for a target that untrained weights meet; ``change`` says what to do."""
    if target.reached(value):
        raise ConfigError(
            f"the target {target} is met before training ({target.metric} starts at {value:g}): "
            f"{change}"
        )
