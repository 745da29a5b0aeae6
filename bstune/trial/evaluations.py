"""The evaluations of a trial and the clock between them, for call-backs of any framework."""

from collections.abc import Sequence

import torch

from bstune.core.clock import WARMUP_STEPS, TrainingClock
from bstune.core.evaluation_schedule import next_evaluation
from bstune.trial.batches import rng_state, set_rng_state
from bstune.trial.trial import Trial


class Evaluations:
    """Says when a trial is evaluated, times its training alone, and reports.

    A call-back calls :meth:`begin` as the training begins; :meth:`step` after each optimizer step;
    before an evaluation :meth:`pause`, after it :meth:`report`; and :meth:`go_on` if the trial goes
    on. The training goes on as if there had been no evaluation: with the same random numbers.

    Args:
        trial: that is trained.
        on_schedule: (step, value) of the evaluations of a resumed trial that are on schedule. Those
            that are made only because a trial stops are not, so that a resumed trial is evaluated
            where one that never stopped is. Without any, they are told by the trial's history and
            the rule of :mod:`bstune.core.evaluation_schedule`.
    """

    def __init__(self, trial: Trial, on_schedule: Sequence[tuple[int, float | None]] = ()) -> None:
        self._trial = trial
        self.on_schedule = list(on_schedule)

    def begin(self, step: int, examples: int, on_cuda: bool) -> None:
        """Start the clock; the first steps are not timed if others follow.

        Args:
            step: optimizer steps so far.
            examples: of one evaluation.
            on_cuda: whether the clock waits for the device.
        """
        self._examples = examples
        if not self.on_schedule:
            for earlier, value in self._trial.history:
                if earlier >= self.next:
                    self.on_schedule.append((earlier, value))
        self.clock = TrainingClock(synchronize=torch.cuda.synchronize if on_cuda else lambda: None)
        self.go_on(step, WARMUP_STEPS)

    @property
    def next(self) -> int:
        """The step of the next evaluation by the rule."""
        trial = self._trial
        return next_evaluation(
            self.on_schedule,
            trial.target,
            trial.batch_size,
            self._examples,
            first=trial.spec.first_evaluation,
        )

    def go_on(self, step: int, cold_steps: int = 1) -> None:
        """Train on to the next evaluation.

        Args:
            step: optimizer steps so far.
            cold_steps: that are not timed, as the step after an evaluation finds cold caches.
        """
        self.due = self.next
        self._first_step = self._timed_from = step
        self._last_cold = step + cold_steps
        self.clock.start()

    def step(self, step: int) -> None:
        """Count an optimizer step after which the training goes on."""
        if step <= self._last_cold:
            self._timed_from = step
            self.clock.start()

    def pause(self, step: int) -> None:
        """Stop the clock for an evaluation after so many steps."""
        self.clock.stop(step - self._first_step, step - self._timed_from)
        self._random = rng_state()

    def report(self, step: int, value: float, is_scheduled: bool) -> bool:
        """Report an evaluation; whether the trial goes on.

        Args:
            step: optimizer steps so far.
            value: of the target's metric.
            is_scheduled: whether it is on schedule.
        """
        set_rng_state(self._random)
        if is_scheduled:
            self.on_schedule.append((step, value))
        return self._trial.report(step, value, seconds=self.clock.seconds)
