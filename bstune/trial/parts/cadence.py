"""Decides at which steps a trial is evaluated: by examples and past values, never by a clock."""

from collections.abc import Callable, Sequence
from functools import partial

from bstune.core.evaluation_schedule import is_near, next_dense_evaluation, next_evaluation
from bstune.core.records import TrialProtocol, TrialSpec
from bstune.trial.parts.checkpoint import StoppedState


class Cadence:
    """Gives the step at which the next evaluation is due.

    There may be further evaluations: at an epoch's end, or where a trial is stopped. They do not
    change the steps at which later ones are due.

    Attributes:
        due_step: the step at which the next evaluation is due.
        near: whether the trial has been near its target at an evaluation that was due.
        forced: the steps of evaluations that were not due.
    """

    def __init__(self, spec: TrialSpec, protocol: TrialProtocol, validation_examples: int) -> None:
        self._spec = spec
        self._target = protocol.target
        self._schedule = protocol.evaluation_schedule
        self._validation_examples = validation_examples
        self.near = False
        self.forced: tuple[int, ...] = ()
        self.due_step = self._next_due(step=0, history=())

    def go_on(self, stopped: StoppedState, history: Sequence[tuple[int, float | None]]) -> None:
        """Take up the cadence of a stopped trial.

        Args:
            stopped: its state: the step at which an evaluation was due, the steps of evaluations
                that were not due (``forced``), and whether it has been near its target.
            history: step and value of all its evaluations.
        """
        self.near = stopped.near
        self.forced = stopped.forced
        self.due_step = stopped.due_step
        # The state is from before the evaluation that ended the trial, which is in the history.
        self.take_in(stopped.steps, history)

    def take_in(
        self, step: int, history: Sequence[tuple[int, float | None]], stops: bool = False
    ) -> None:
        """Take in an evaluation that did not end the trial.

        Args:
            step: of the evaluation.
            history: step and value of all evaluations, this one the last.
            stops: whether something else stops the trial, so that no other evaluation is due.
        """
        # An evaluation that was not due yet, as at an epoch's end, leaves the next due step alone.
        if step < self.due_step:
            self.forced += (step,)
        else:
            self.schedule_next(step, history, stops)

    def schedule_next(
        self, step: int, history: Sequence[tuple[int, float | None]], stops: bool = False
    ) -> None:
        """Set the step of the next evaluation, if the one at ``step`` was due.

        Args:
            step: of the evaluation.
            history: step and value of all evaluations that logged the target's metric.
            stops: whether something stops the trial, so that no other evaluation is due.
        """
        if step >= self.due_step and not stops:
            self.due_step = self._next_due(step, history)

    def _next_due(self, step: int, history: Sequence[tuple[int, float | None]]) -> int:
        """Give the step of the evaluation that is due next after ``step``.

        Evaluations are more frequent once the trial is near its target. In ``dense_steps``, where
        the spec has that range of steps, they are more frequent still.
        """
        # Evaluations that were not due, as at an epoch's end, do not change when others are due.
        due = [pair for pair in history if pair[0] not in self.forced]
        # A trial that has once been near stays near: a noisy metric would switch back and forth.
        self.near = self.near or is_near(due, self._target.gap, self._schedule.near)
        choose: Callable[..., int] = next_evaluation
        if self._spec.dense_steps is not None:
            choose = partial(next_dense_evaluation, dense_steps=self._spec.dense_steps)
        return choose(
            step=step,
            batch_size=self._spec.batch_size,
            validation_examples=self._validation_examples,
            evaluations=len(due),
            near=self.near,
            schedule=self._schedule,
        )
