"""Runs trials in processes of their own, or in this one (``search.workers``).

Where a trial has a process of its own, a crash of the user's code or a step that never ends is the
end of that trial alone. This module imports neither torch nor lightning.

An exception, ``sys.exit``, a crash or want of memory ends one trial. Its status is ``failed``, with
the message and the line of the user's file; ``diverged`` where the loss was no longer finite
before; or ``out of memory``. A failed point is tried once more. Three failures in a row end the
study with status 1, and the same command continues it. ``protocol.trial_seconds`` ends a trial that
hangs.
"""

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import chdir
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, Self

from bstune.core.errors import BstuneError
from bstune.core.records import TrialResult, TrialSpec
from bstune.system import interruption
from bstune.system.exits import Terminated
from bstune.system.files import Output
from bstune.trial.processes.messages import Finished, Train, failed
from bstune.trial.processes.process import LOOK_SECONDS, SIGNAL_SECONDS, Process
from bstune.trial.processes.reached import Reached, forget, told_here
from bstune.trial.processes.team import Team
from bstune.trial.processes.trials_log import TrialsLog

# Seconds between two looks for a signal that has ended a trial's process.
SIGNAL_LOOK_SECONDS = 0.05


def mps_runs() -> bool:
    """Whether NVIDIA's Multi-Process Service runs (docs.nvidia.com/deploy/mps).

    It runs where the pipe of its control daemon is there.
    """
    # The daemon's default folder.
    folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")  # noqa: S108
    return Path(folder, "control").exists()


class Runner(Protocol):
    """Runs trials, ``count`` at a time: :class:`Workers` or :class:`InProcess`."""

    count: int

    @property
    def free(self) -> bool:
        """Whether one more trial can be started."""

    @property
    def running(self) -> list[TrialSpec]:
        """The started trials that neither :meth:`wait` nor :meth:`poll` has given yet."""

    def reached(self, number: int) -> Reached:
        """Give the steps and the last evaluation of a trial, as far as they are known here."""
        return Reached()

    def start(self, spec: TrialSpec, output: Output, resumed_from: TrialResult | None) -> None:
        """Begin a trial, which may go on from the stopped one that ``resumed_from`` records."""

    def wait(self) -> Finished:
        """Wait until a trial is over, and give it."""

    def poll(self) -> Iterator[Finished]:
        """Yield the trials that are over now, without a wait."""


class InProcess(Runner):
    """Runs trials in this process, one at a time: for debuggers, profilers and replays.

    A crash ends the study.
    """

    count = 1

    def __init__(self, train: Train) -> None:
        self._train = train
        # The trial that was started and not run yet.
        self._waiting: tuple[TrialSpec, Output, TrialResult | None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._waiting = None

    @property
    def free(self) -> bool:
        """Whether no trial waits to be run."""
        return self._waiting is None

    @property
    def running(self) -> list[TrialSpec]:
        """The trial that waits to be run."""
        return [] if self._waiting is None else [self._waiting[0]]

    def reached(self, number: int) -> Reached:
        """Give how far the trial is that this process trains."""
        return told_here()

    def start(self, spec: TrialSpec, output: Output, resumed_from: TrialResult | None) -> None:
        """Take a trial, which :meth:`wait` runs."""
        self._waiting = spec, output, resumed_from

    def wait(self) -> Finished:
        """Run the trial that was started, and give it once it is over.

        A BstuneError of the trial is raised, as it ends the study. Any other error is recorded.
        """
        assert self._waiting is not None  # noqa: S101 (it was started)
        spec, output, resumed_from = self._waiting
        self._waiting = None
        forget()
        start = time.monotonic()
        try:
            # The user's code may change the working directory: chdir puts it back.
            with chdir("."):
                return Finished(spec, self._train(spec, output, resumed_from))
        except BstuneError:
            raise
        # Whatever the user's code raises ends a trial, not the study. The error itself can be kept,
        # as it need not be pickled, for an error of the study that it causes.
        except Exception as error:  # noqa: BLE001
            return replace(failed(spec, error, time.monotonic() - start), cause=error)

    def poll(self) -> Iterator[Finished]:
        """Yield nothing: no trial is over before :meth:`wait` runs it."""
        return iter(())


class Workers(Runner):
    """``count`` processes that train one trial each at a time.

    It is a context, at whose end the processes are gone. An interruption or a termination signal is
    raised by :meth:`start`, by :meth:`wait` or at the end of the context, so that it cuts nothing
    short. A second one is raised at once.

    Args:
        open_train: is pickled, called once in each process, and returns the function that trains a
            trial.
        count: how many trials are trained at a time.
        seconds: the longest that a trial may take, with the start of its process; one that takes
            longer has failed. None: there is no limit.
        devices: that each trial is trained on; where there are several, each of the ``count`` is a
            team of as many processes.
        trials: after so many a process is replaced by a fresh one, as compiled code keeps memory.
            None: never.
        log: takes what the processes print; None: they print to this process's output.
        spare: processes that have nothing to do. They are used first, and a usable process is put
            back at the end. None: none is kept.
    """

    def __init__(
        self,
        open_train: Callable[[], Train],
        count: int,
        seconds: float | None = None,
        devices: int = 1,
        trials: int | None = None,
        log: TrialsLog | None = None,
        spare: list[Process] | None = None,
    ) -> None:
        self._open_train = open_train
        self.count = count
        self._devices = devices
        self._log = log
        self._spare = spare
        self._most_seconds = math.inf if seconds is None else seconds
        self._most_trials = math.inf if trials is None else trials
        self._workers: list[Process | Team] = []
        # The trial that each process has, until wait() or poll() gives it.
        self._running: dict[Process | Team, TrialSpec] = {}
        # How it ended, for each of these processes whose trial is over.
        self._finished: dict[Process | Team, Finished] = {}
        # The handlers of signals that this context has replaced.
        self._handlers: dict[int, Any] = {}
        # The number of the signal that has come; None: none has.
        self._signal: int | None = None

    def __enter__(self) -> Self:
        # Idle processes of an earlier context are used again.
        if self._spare is not None:
            self._workers += self._spare
            self._spare.clear()
        # Only the main thread may set signal handlers. signal() gives None in place of a former
        # handler that was not set from Python.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._handlers[number] = signal.signal(number, self._note_signal) or signal.SIG_DFL
        return self

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        """Remember a signal, and leave the next one to the handler that was there before."""
        self._signal = number
        interruption.note(number)
        signal.signal(number, self._handlers[number])

    def _raise_signal(self) -> None:
        """Raise the signal that has come, if one has."""
        if self._signal == signal.SIGINT:
            raise KeyboardInterrupt
        if self._signal is not None:
            # Shells tell by the status 128 + n that signal n has ended a process.
            raise Terminated(128 + self._signal)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # One process is kept for later, where no error has ended the context.
        if kind is None and self._spare is not None:
            for worker in self._workers:
                if isinstance(worker, Process) and worker.is_usable:
                    self._workers.remove(worker)
                    self._spare.append(worker)
                    break
        for worker in self._workers:
            # After an error no trial's result is wanted any more. A signal to terminate would not
            # do, as Lightning puts it off until a batch is done.
            if kind is not None:
                worker.kill()
            worker.close()
        for worker in self._workers:
            worker.end()
        self._workers.clear()
        self._running.clear()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if kind is None:
            self._raise_signal()

    @property
    def free(self) -> bool:
        """Whether one more trial can be started."""
        return len(self._running) < self.count

    @property
    def running(self) -> list[TrialSpec]:
        """The started trials that neither :meth:`wait` nor :meth:`poll` has given yet."""
        return list(self._running.values())

    def reached(self, number: int) -> Reached:
        """Give how far a trial is that one of the processes trains."""
        # Another thread asks, while trials begin and end.
        for worker, spec in list(self._running.items()):
            if spec.number == number:
                return worker.reached
        return Reached()

    def start(self, spec: TrialSpec, output: Output, resumed_from: TrialResult | None) -> None:
        """Train a trial in a process that has nothing to do.

        It is trained as :meth:`bstune.trial.backend.TrialBackend.run` does.
        """
        self._raise_signal()
        for worker in self._idle_workers():
            # A process that was ended while it had nothing to do is replaced. So is one after an
            # error, which may have left anything behind: after an assertion of CUDA, its device
            # computes nothing any more. So is one that has trained many trials, as compiled code
            # keeps memory.
            if worker.has_failed or not worker.is_alive() or worker.trials >= self._most_trials:
                worker.close()
                worker.end()
                self._workers.remove(worker)
        idle = self._idle_workers()
        worker = idle[0] if idle else self._start_worker()
        self._running[worker] = spec
        worker.send((spec, output, resumed_from))

    def _idle_workers(self) -> list[Process | Team]:
        """Give the processes, or teams of them, that have no trial."""
        return [worker for worker in self._workers if worker not in self._running]

    def _start_worker(self) -> Process | Team:
        """Start a process; where a trial takes several devices, a team of processes."""
        worker: Process | Team
        if self._devices == 1:
            worker = Process(self._open_train, self._log)
        else:
            worker = Team(self._open_train, self._devices, self._log)
        self._workers.append(worker)
        return worker

    def wait(self) -> Finished:
        """Wait until a trial is over, and give it; of several, one with a record comes first."""
        while True:
            self._raise_signal()
            finished = self._next_finished(LOOK_SECONDS)
            if finished is None:
                continue
            if finished.record is not None and finished.record.status == "failed":
                # What ended its process may be a signal that is about to end this one, too.
                self._wait_for_signal()
            return finished

    def _wait_for_signal(self) -> None:
        """Raise the signal that has ended a trial's process, if one comes within a moment.

        A cluster's scheduler sends it to all processes of a study, this one among them, and the
        trial that it ended has not failed.
        """
        end = time.monotonic() + SIGNAL_SECONDS
        while self._handlers and self._signal is None and time.monotonic() < end:
            time.sleep(SIGNAL_LOOK_SECONDS)
        self._raise_signal()

    def poll(self) -> Iterator[Finished]:
        """Yield the trials that are over now, those with a record first."""
        while (finished := self._next_finished(seconds=0)) is not None:
            yield finished

    def _next_finished(self, seconds: float) -> Finished | None:
        """Wait for some seconds at most, and give the first trial, by number, that is over.

        A trial with an error that ends the study comes last, so that the others are recorded before
        that. None where no trial is over.
        """
        self._take_finished(seconds)
        if not self._finished:
            return None

        def place_in_line(worker: Process | Team) -> tuple[bool, int]:
            return self._finished[worker].error is not None, self._running[worker].number

        worker = min(self._finished, key=place_in_line)
        del self._running[worker]
        return self._finished.pop(worker)

    def _take_finished(self, seconds: float) -> None:
        """Take in the trials that end within some seconds, and end those that take too long."""
        running = [worker for worker in self._running if worker not in self._finished]
        worker_of: dict[object, Process | Team] = {}
        handles = list[Connection | int]()
        for worker in running:
            handles += worker.handles
            worker_of |= dict.fromkeys(worker.handles, worker)
        # A trial that is over already does not wait for others.
        ready = wait(handles, 0 if self._finished else seconds)
        ready_workers = {worker_of[handle] for handle in ready}
        for worker in running:
            is_late = time.monotonic() - worker.started > self._most_seconds
            if worker not in ready_workers and not is_late:
                continue
            too_long: str | None = None
            if is_late:
                too_long = f"took longer than protocol.trial_seconds={self._most_seconds:g}"
            finished = worker.finish(self._running[worker], too_long)
            # A team's trial is over only once all of its processes have answered.
            if finished is not None:
                self._finished[worker] = finished
