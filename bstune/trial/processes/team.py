"""The processes that train one trial together, one for each of its devices."""

import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path

from bstune.core.records import TrialResult, TrialSpec
from bstune.system.files import Output
from bstune.trial.processes.messages import Finished, Train
from bstune.trial.processes.process import END_SECONDS, LOOK_SECONDS, Process
from bstune.trial.processes.reached import Reached
from bstune.trial.processes.trials_log import TrialsLog

# The longest time between the ends of the processes that train one trial together. They end at the
# same step, after which one of them may still write files.
APART_SECONDS = 30


class Team:
    """A process for each of several devices, which train one trial together.

    It has the methods of a :class:`Process`. Each process has a rank, its number in the team.
    """

    def __init__(
        self, open_train: Callable[[], Train], devices: int, log: TrialsLog | None
    ) -> None:
        # The processes find each other by an empty file, as another program may have taken a port.
        descriptor, self._store = tempfile.mkstemp(prefix="bstune-")
        os.close(descriptor)
        self._ranks = list[Process]()
        for rank in range(devices):
            open_rank = partial(_open_rank, open_train, rank, devices, self._store)
            self._ranks.append(Process(open_rank, log))
        self._answers: dict[Process, Finished] = {}
        self.has_failed = False
        self.trials = 0
        self.started = time.monotonic()

    @property
    def handles(self) -> list[Connection | int]:
        """The handles of those processes that have not answered yet."""
        handles = list[Connection | int]()
        for rank in self._unanswered:
            handles += rank.handles
        return handles

    @property
    def reached(self) -> Reached:
        """How far the trial is that the processes train together."""
        return self._ranks[0].reached

    def is_alive(self) -> bool:
        """Whether all processes run."""
        return all(rank.is_alive() for rank in self._ranks)

    def send(self, request: tuple[TrialSpec, Output, TrialResult | None]) -> None:
        """Send a trial to all processes; its time begins here."""
        self.started = time.monotonic()
        self.trials += 1
        self._answers.clear()
        for rank in self._ranks:
            rank.send(request)

    def finish(self, spec: TrialSpec, too_long: str | None) -> Finished | None:
        """Give the trial's answer if it is over; None while the processes train on.

        Once all processes have answered, it is the first one's answer, or that of one that failed.
        Where one has died, has failed or takes too long, it is the answer of that one. The others
        are then killed: they would wait for it for ever in an exchange of gradients.

        Args:
            spec: of the trial.
            too_long: says that the trial took too long; None: it did not.
        """
        died = self._take_answers(seconds=0)
        # Once one has answered, the others are waited for: they end at the same step, and see alike
        # that a loss diverges.
        if self._answers and not died and too_long is None:
            died, too_long = self._wait_for_others()
        if not self._unanswered:
            self.has_failed = any(rank.has_failed for rank in self._ranks)
            # Where they disagree, one that failed says why.
            answering = self._failed or self._ranks
            return self._answers[answering[0]]
        if not self._failed and not died and too_long is None:
            return None
        # The one that died is told first, as it makes others fail; then one that failed, then one
        # that is late.
        cause = (died or self._failed or self._unanswered)[0]
        answer = self._answers.get(cause)
        if answer is None:
            answer = cause.finish(spec, too_long)
        self.has_failed = True
        self.kill()
        return answer

    def _wait_for_others(self) -> tuple[list[Process], str | None]:
        """Wait until all have answered, or one has died: the others fail when they lose it.

        After a failure the wait is short: the others fail within moments, or hang.

        Returns:
            The processes that have died, and a text that some did not answer in time (None: none).
        """
        start = time.monotonic()
        died = list[Process]()
        too_long: str | None = None
        while self._unanswered and not died and too_long is None:
            patience = END_SECONDS if self._failed else APART_SECONDS
            if time.monotonic() - start > patience:
                too_long = (
                    f"did not end with the others, {APART_SECONDS} s before: one stops where "
                    "another trains on"
                )
            died = self._take_answers(LOOK_SECONDS)
        return died, too_long

    @property
    def _unanswered(self) -> list[Process]:
        """The processes that have not answered yet."""
        return [rank for rank in self._ranks if rank not in self._answers]

    @property
    def _failed(self) -> list[Process]:
        """The processes that answered other than ``reached`` or ``stopped``.

        All processes agree on those two; on others they need not.
        """
        failed = list[Process]()
        for rank in self._ranks:
            answer = self._answers.get(rank)
            if answer is None:
                continue
            if answer.record is None or answer.record.status not in ("reached", "stopped"):
                failed.append(rank)
        return failed

    def _take_answers(self, seconds: float) -> list[Process]:
        """Take the answers that come within some seconds, and give the processes that have died.

        Those that answered before they died are left out.
        """
        wait(self.handles, seconds)
        for rank in self._unanswered:
            answer = rank.receive()
            if answer is not None:
                self._answers[rank] = answer
        return [rank for rank in self._unanswered if not rank.is_alive()]

    def kill(self) -> None:
        """Kill all processes, and those that the user's code has started in them."""
        for rank in self._ranks:
            rank.kill()

    def close(self) -> None:
        """Tell all processes to end once they have nothing to do."""
        for rank in self._ranks:
            rank.close()

    def end(self) -> None:
        """Wait for all processes to end after :meth:`close`, and kill those that go on."""
        for rank in self._ranks:
            rank.end()
        Path(self._store).unlink(missing_ok=True)


def _open_rank(open_train: Callable[[], Train], rank: int, devices: int, store: str) -> Train:
    """Join the processes that train one trial together, and open the function that trains it."""
    # It is imported here, as only the trial's own process is to import torch.
    from bstune.trial.devices.distributed import join

    join(rank, devices, store)
    return open_train()
