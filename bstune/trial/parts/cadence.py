"""When a trial is evaluated: by its examples and past values, and never by a clock."""

from collections.abc import Sequence

from bstune.core.evaluation_schedule import is_near, next_dense_evaluation, next_evaluation
from bstune.core.records import TrialProtocol, TrialSpec
from bstune.trial.parts.checkpoint import StoppedState


class Cadence:
    """Names the step of the next evaluation.

    Evaluations that were not due, at an epoch's end or where a trial was stopped, change nothing:
    later ones are due at the same steps, with them or without.

    Attributes:
        due_step: of the next evaluation.
        near: whether the target has been near at one of the evaluations that were due.
        forced: steps that were evaluated though they were not due.
    """

    def __init__(self, spec: TrialSpec, protocol: TrialProtocol, validation_examples: int) -> None:
        self._spec = spec
        self._target = protocol.target
        self._schedule = protocol.evaluation_schedule
        self._validation_examples = validation_examples
        self.near = False
        self.forced: tuple[int, ...] = ()
        self.due_step = self._next_due(0, ())

    def go_on(self, stopped: StoppedState, history: Sequence[tuple[int, float | None]]) -> None:
        """Take up the cadence of a stopped trial."""
        self.near = stopped.near
        self.forced = stopped.forced
        self.due_step = stopped.due_step
        # The state is from before the evaluation that ended it.
        self.take_in(stopped.steps, history)

    def take_in(
        self, step: int, history: Sequence[tuple[int, float | None]], stops: bool = False
    ) -> None:
        """Take in an evaluation at ``step`` that did not end the trial.

        It is the last one of ``history``.

        Where something else ``stops`` the trial, no other one is due.
        """
        if step < self.due_step:
            self.forced += (step,)
        else:
            self.pass_over(step, history, stops)

    def pass_over(
        self, step: int, history: Sequence[tuple[int, float | None]], stops: bool = False
    ) -> None:
        """Take in an evaluation at ``step`` that is not in ``history``.

        It did not log the target's metric.
        """
        if step >= self.due_step and not stops:
            self.due_step = self._next_due(step, history)

    def _next_due(self, step: int, history: Sequence[tuple[int, float | None]]) -> int:
        due = [pair for pair in history if pair[0] not in self.forced]
        # A trial that has once been near stays near: a noisy metric would switch back and forth.
        self.near = self.near or is_near(due, self._target.gap, self._schedule.near)
        so_far = (
            step,
            self._spec.batch_size,
            self._validation_examples,
            len(due),
            self.near,
            self._schedule,
        )
        if self._spec.dense_steps is None:
            return next_evaluation(*so_far)
        return next_dense_evaluation(*so_far, self._spec.dense_steps)
