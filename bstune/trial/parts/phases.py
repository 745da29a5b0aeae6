"""Switches a trial's clock between training, evaluation and the rest.

The seconds of training are counted in segments between the evaluations.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from bstune.core.clock import Phase, TrialClock
from bstune.trial.fast.compile import Compiling
from bstune.trial.parts.state import TrialState


class Phases:
    """Tells the clock a trial's phases, and the steps of each segment between two evaluations.

    Args:
        state: of the trial, whose steps it reads.
        clock: the trial's.
        warmup_steps: first steps that get a segment of their own, unless an evaluation comes
            earlier.
    """

    def __init__(self, state: TrialState, clock: TrialClock, warmup_steps: int) -> None:
        self._state = state
        self._clock = clock
        self._warmup_steps = warmup_steps
        self._segment_start = state.steps

    def begin_sanity_check(self) -> None:
        """Count an evaluation before the training, until :meth:`end_sanity_check`."""
        self._clock.enter(Phase.EVALUATION)

    def end_sanity_check(self) -> None:
        """Count start-up from here on, until the first step."""
        self._clock.enter(Phase.STARTUP)

    def begin_training(self) -> None:
        """Count training from here on, until the first evaluation."""
        self._clock.enter(Phase.TRAINING)

    def repeat_evaluation(self) -> None:
        """Count the evaluation that ended the stopped trial and is repeated before training."""
        self._clock.enter(Phase.EVALUATION)

    def begin_evaluation(self) -> None:
        """Close the segment of the steps since the last evaluation."""
        self._clock.end_segment(self._state.steps - self._segment_start, Phase.EVALUATION)

    def close_warmup_segment(self) -> None:
        """Close the clock's segment at the warm-up's last step, to leave it out of the step time.

        If the trial was evaluated before, that has closed the segment already.
        """
        steps = self._state.steps
        first_step = self._state.first_step
        is_first_segment = self._segment_start == first_step
        if is_first_segment and steps - first_step == self._warmup_steps:
            self._clock.end_segment(self._warmup_steps, Phase.TRAINING)
            self._segment_start = steps

    def end_evaluation(self, stops: bool, trains: bool) -> None:
        """Begin the next segment of training, or close the trial.

        Args:
            stops: whether the trial ends here.
            trains: whether the training's seconds begin at once; else the loop that takes the steps
                starts the clock later.
        """
        self._segment_start = self._state.steps
        if stops:
            self._clock.enter(Phase.CLOSING)
        elif trains:
            self._clock.train()


@contextmanager
def aside(clock: TrialClock, compiling: Compiling) -> Iterator[None]:
    """Within the context, work beside the training: off its clock, and without compiled code.

    The code is compiled for the shapes of whole batches.
    """
    with clock.interrupt_segment(Phase.EVALUATION), compiling.eagerly():
        yield
