"""Processes that train side by side on one device, while this one keeps the study (``search.workers``).

They are forked by multiprocessing's fork server, which has imported what all of them need and never touches the device:
CUDA does not survive a fork. This module imports neither torch nor lightning.
"""

import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.pool import ExceptionWithTraceback  # type: ignore[attr-defined]
from types import FrameType
from typing import Any, Self

from bstune.core.files import Output
from bstune.core.records import TrialResult, TrialSpec

Train = Callable[[TrialSpec, Output, TrialResult | None], TrialResult]
CONTEXT = multiprocessing.get_context("forkserver")
PRELOAD = ["bstune.trial.workload"]
LOOK_SECONDS = 0.2  # between two looks for a signal, while trials train
# Errors of pickling an error of a user's own: its constructor is called with its arguments.
PICKLE_ERRORS = (pickle.PickleError, TypeError, ValueError, AttributeError, LookupError, RuntimeError, ImportError)


@dataclass(frozen=True)
class Finished:
    """A trial that is over: its record, or the error that its training raised, or how its process ended."""

    spec: TrialSpec
    record: TrialResult | None = None
    error: BaseException | None = None
    exit_reason: str | None = None

    def result(self) -> TrialResult:
        """Return the record, or raise the error."""
        if self.record is None:
            raise self.error or RuntimeError(f"the process of trial {self.spec.number} {self.exit_reason}")
        return self.record


def with_solo_step_time(result: TrialResult, step_time: Callable[[float], float]) -> TrialResult:
    """Return the record of a trial that trained beside others with the seconds per step that were measured alone."""
    if result.seconds_per_step is None:
        return result
    return replace(result, seconds_per_step=float(step_time(result.batch_size)))


class Workers:
    """``count`` processes that train one trial each at a time; a context, at whose end they are gone.

    ``open_train``, which is pickled, is called once in each process and returns what trains a trial. An interruption or
    a termination signal is raised by :meth:`start`, :meth:`wait` or the end, where nothing is cut; a second at once.
    """

    def __init__(self, open_train: Callable[[], Train], count: int) -> None:
        self._open_train, self._count = open_train, count
        self._workers: list[_Worker] = []
        self._running: dict[_Worker, TrialSpec] = {}
        self._finished: dict[_Worker, Finished] = {}  # of those that run, not yet returned
        self._handlers: dict[int, Any] = {}
        self._signal: int | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._handlers[number] = signal.signal(number, self._note) or signal.SIG_DFL
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signal = number
        signal.signal(number, self._handlers[number])

    def _check(self) -> None:
        if self._signal == signal.SIGINT:
            raise KeyboardInterrupt
        if self._signal is not None:
            sys.exit(128 + self._signal)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for worker in self._workers:
            if kind is not None:  # Lightning would put off the signal to terminate until a batch is done
                worker.process.kill()
            worker.connection.close()
        for worker in self._workers:
            worker.process.join()
        self._workers.clear()
        self._running.clear()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if kind is None:
            self._check()

    @property
    def free(self) -> bool:
        """Whether one more trial can be started."""
        return len(self._running) < self._count

    @property
    def running(self) -> list[TrialSpec]:
        """The trials that are not over, or have not been waited for."""
        return list(self._running.values())

    def start(self, spec: TrialSpec, output: Output, resumed_from: TrialResult | None) -> None:
        """Train a trial in a process that has nothing to do, as :meth:`bstune.trial.backend.TrialBackend.run` does."""
        self._check()
        # One that was ended while it had nothing to do is replaced.
        self._workers = [worker for worker in self._workers if worker in self._running or worker.process.is_alive()]
        worker = next((worker for worker in self._workers if worker not in self._running), None)
        if worker is None:
            worker = _Worker(self._open_train)
            self._workers.append(worker)
        self._running[worker] = spec
        with suppress(OSError):  # it has just died, and the trial with it
            worker.connection.send((spec, output, resumed_from))

    def wait(self) -> Finished:
        """Wait until a trial is over, and return it: of several those with a record come first."""
        while True:
            self._check()
            if (finished := self._next(LOOK_SECONDS)) is not None:
                return finished

    def poll(self) -> Iterator[Finished]:
        """Yield the trials that are over now, in the same order."""
        while (finished := self._next(0)) is not None:
            yield finished

    def _next(self, seconds: float) -> Finished | None:
        running = [worker for worker in self._running if worker not in self._finished]
        handles = {handle: worker for worker in running for handle in (worker.connection, worker.process.sentinel)}
        for handle in wait(list(handles), 0 if self._finished else seconds):
            worker = handles[handle]  # type: ignore[index]
            if worker not in self._finished:
                self._finished[worker] = worker.finish(self._running[worker])
        if not self._finished:
            return None
        worker = min(self._finished, key=lambda w: (self._finished[w].record is None, self._running[w].number))
        del self._running[worker]
        return self._finished.pop(worker)


class _Worker:
    """One process and the connection to it."""

    def __init__(self, open_train: Callable[[], Train]) -> None:
        CONTEXT.set_forkserver_preload(PRELOAD)
        self.connection, other = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=_work, args=(open_train, other, dict(os.environ)))
        self.process.start()
        other.close()

    def finish(self, spec: TrialSpec) -> Finished:
        """Receive the answer to a trial; without one, wait for the end of the process."""
        answer = None
        with suppress(EOFError, OSError):
            answer = self.connection.recv() if self.connection.poll() else None
        if isinstance(answer, TrialResult):
            return Finished(spec, record=answer)
        if answer is not None:
            return Finished(spec, error=answer)
        self.process.join()
        status = self.process.exitcode or 0
        if status == -signal.SIGKILL:
            return Finished(spec, exit_reason="was ended by the system, as it does when memory runs out")
        reason = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return Finished(spec, exit_reason=reason)


def _work(open_train: Callable[[], Train], connection: Connection, environment: Mapping[str, str]) -> None:
    """Train trials in this process, a worker, until the connection is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.update(environment)  # the fork server's is that of its start
    train: Train | None = None
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        answer: Any
        try:
            train = train or open_train()
            answer = train(*request)
        except BaseException as error:  # noqa: BLE001 (the other process raises it)
            answer = ExceptionWithTraceback(_sendable(error), error.__traceback__)
        connection.send(answer)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)  # killed, it could not end us: a trial that nobody records would train on


def _sendable(error: BaseException) -> BaseException:
    with suppress(*PICKLE_ERRORS):
        if type(pickle.loads(pickle.dumps(error))) is type(error):  # noqa: S301 (our own bytes)
            return error
    return RuntimeError(f"{type(error).__name__}: {error}")
