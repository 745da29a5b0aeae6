"""Keeps the trials that the user's own training loop has, as a study starts and awaits them."""

from collections.abc import Iterator
from typing import Self

from bstune.core.records import TrialResult, TrialSpec
from bstune.system.files import Output
from bstune.trial.own_loop.loop_backend import LoopBackend
from bstune.trial.own_loop.loop_trial import LoopTrial, last_report
from bstune.trial.processes.messages import Finished
from bstune.trial.processes.reached import Reached


class LoopRunner:
    """Keeps the trials that the user's training loop has, for a study that starts and awaits them.

    The loop trains between two calls of the study, so no call here waits.

    Args:
        backend: hands trials over, and takes them back.
        count: how many trials the loop has at once.
    """

    def __init__(self, backend: LoopBackend, count: int = 1) -> None:
        self.count = max(1, count)
        self._backend = backend
        self._folder: Output | None = None
        # The trials that were not taken back yet, in the order in which they were started.
        self._trials: list[LoopTrial] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._trials.clear()

    @property
    def to_train(self) -> list[LoopTrial]:
        """The trials that the loop has, and has not ended."""
        return [trial for trial in self._trials if trial.finished is None]

    @property
    def free(self) -> bool:
        """Whether the loop takes another trial.

        It does not before all trials that it has ended are taken back.
        """
        all_taken_back = len(self.to_train) == len(self._trials)
        return all_taken_back and len(self._trials) < self.count

    @property
    def running(self) -> list[TrialSpec]:
        """The specs of the trials that were not taken back yet."""
        return [trial.spec for trial in self._trials]

    def reached(self, number: int) -> Reached:
        """Give the step and the value that a trial's loop has reported last."""
        for trial in self._trials:
            if trial.number == number:
                return Reached(evaluation=last_report(trial))
        return Reached()

    def start(self, spec: TrialSpec, output: Output, resumed_from: TrialResult | None) -> None:
        """Make a trial for the loop, which gets it once the study waits for trials to end."""
        self._folder = output
        self._trials.append(self._backend.hand_over(spec, output, resumed_from))

    def wait(self) -> Finished:
        """Take the first trial back. It has failed if the loop has not ended it.

        The study pauses before it calls this, and the loop trains in that pause, in the same
        thread. A wait would therefore never end: a trial that is not over now was left by its loop,
        and no one trains it any more.
        """
        return self._take_back(self._trials[0])

    def poll(self) -> Iterator[Finished]:
        """Take back the trials that the loop has ended, and yield how each ended."""
        for trial in self._trials.copy():
            if trial.finished is not None:
                yield self._take_back(trial)

    def _take_back(self, trial: LoopTrial) -> Finished:
        """Take a trial back from the loop, and tell how it ended."""
        assert self._folder is not None  # noqa: S101 (a trial was started)
        self._trials.remove(trial)
        return self._backend.take_back(trial, self._folder)
