"""Processes that train side by side on one device, while this one keeps the study (``search.workers``).

Each is an executor of one process, started afresh (CUDA does not survive a fork): where a process dies, for memory
say, the trials beside its own go on. Whatever a worker does, this module knows only that it trains: it imports neither
torch nor lightning.
"""

import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from types import FrameType, TracebackType
from typing import Any, Self

from bstune.core.files import Output
from bstune.core.records import TrialResult, TrialSpec

Train = Callable[[TrialSpec, Output, TrialResult | None], TrialResult]
LOOK_SECONDS = 0.2  # between two looks for a signal, while trials train
# What an error of a module's own may raise as it is written or read: its constructor is called with its arguments.
NOT_SENT = (pickle.PickleError, TypeError, ValueError, AttributeError, LookupError, RuntimeError, ImportError)


@dataclass(frozen=True)
class Ended:
    """A trial that is over.

    Args:
        spec: of the trial.
        future: of its record; its ``result`` raises what the training raised.
        died: how its process ended, in words; None if it goes on.
    """

    spec: TrialSpec
    future: Future[TrialResult]
    died: str | None


def alone(result: TrialResult, step_time: Callable[[float], float]) -> TrialResult:
    """Return the record of a trial that trained beside others with the seconds per step that were measured alone.

    What the trial itself took stays in its other seconds. A trial without a step has no seconds per step either way.

    Args:
        result: of the trial.
        step_time: tau(B) in seconds, measured with nothing beside it.
    """
    if result.seconds_per_step is None:
        return result
    return replace(result, seconds_per_step=float(step_time(result.batch_size)))


class Workers:
    """Some processes that train one trial each at a time; a context, at whose end they are gone.

    In the context an interruption from the keyboard, which is left to this process alone, is a ``KeyboardInterrupt`` of
    :meth:`start`, :meth:`wait` or the end, and a termination signal a ``SystemExit``, as Lightning has it while a trial
    trains in this process: nothing is cut in the middle of what is stored. The second signal acts at once.

    Args:
        open_train: is called once in each process, and returns what trains a trial; it is sent there, so that it has to
            be a function of a module, or a partial one.
        count: how many trials train at once.
    """

    def __init__(self, open_train: Callable[[], Train], count: int) -> None:
        self._open_train, self._count = open_train, count
        self._workers: list[_Worker] = []
        self._running: dict[Future[TrialResult], tuple[TrialSpec, _Worker]] = {}
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:  # with trials that nobody waits for: an interruption may have come at any line of ours
            for worker in self._workers:
                worker.kill()
        for worker in self._workers:
            worker.end()
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
        return [spec for spec, _ in self._running.values()]

    def start(self, spec: TrialSpec, output: Output, parent: TrialResult | None) -> None:
        """Train a trial in a process that has nothing to do; the arguments are those of :meth:`bstune.trial.backend.TrialBackend.run`.

        Raises:
            ValueError: if there is none.
        """
        self._check()
        if not self.free:
            raise ValueError(f"{self._count} trials train already")
        busy = [worker for _, worker in self._running.values()]
        for worker in [worker for worker in self._workers if worker not in busy and worker.gone]:
            self._dismiss(worker)  # it was ended while it had nothing to do
        worker = next((worker for worker in self._workers if worker not in busy), None) or self._hire()
        self._running[worker.submit(spec, output, parent)] = spec, worker

    def _hire(self) -> "_Worker":
        self._workers.append(_Worker(self._open_train))
        return self._workers[-1]

    def _dismiss(self, worker: "_Worker") -> str:
        self._workers.remove(worker)
        return worker.end()

    def wait(self) -> Ended:
        """Wait until a trial is over, and return it: of several those that raised nothing come first.

        Raises:
            ValueError: if no trial runs.
        """
        if not self._running:
            raise ValueError("no trial runs")
        ended = None
        while ended is None:
            self._check()
            ended = self._next(LOOK_SECONDS)
        return ended

    def over(self) -> Iterator[Ended]:
        """Yield the trials that are over now, in the same order."""
        while (ended := self._next(0)) is not None:
            yield ended

    def _next(self, seconds: float) -> Ended | None:
        over, _ = wait(self._running, timeout=seconds, return_when=FIRST_COMPLETED)
        if not over:
            return None
        future = min(over, key=lambda future: (future.exception() is not None, self._running[future][0].number))
        spec, worker = self._running.pop(future)
        error = future.exception()
        # The other kind of a broken pool has a cause: a record that could not be read.
        if isinstance(error, BrokenProcessPool) and error.__cause__ is None:
            return Ended(spec, future, self._dismiss(worker))
        return Ended(spec, future, None)


class _Worker:
    """One process, started with its first trial."""

    def __init__(self, open_train: Callable[[], Train]) -> None:
        context = multiprocessing.get_context("spawn")
        self._executor = ProcessPoolExecutor(1, context, initializer=_begin, initargs=(open_train,))
        self._process: BaseProcess | None = None

    def submit(self, spec: TrialSpec, output: Output, parent: TrialResult | None) -> Future[TrialResult]:
        try:
            if self._process is not None:
                return self._executor.submit(_run, spec, output, parent)
            with _interrupts_held():
                before = set(multiprocessing.active_children())
                future = self._executor.submit(_run, spec, output, parent)
                started = set(multiprocessing.active_children()) - before
                self._process = next(iter(started), None)  # none: it has ended already
        except BrokenProcessPool as error:  # just now: the trial has died with its process, as any other does
            future = Future()
            future.set_exception(error)
        return future

    @property
    def gone(self) -> bool:
        return self._process is not None and not self._process.is_alive()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()  # Lightning puts off the signal to terminate until a batch is done

    def end(self) -> str:
        """End the process, once it has nothing to do, and return how it ended, in words."""
        self._executor.shutdown()
        status = None if self._process is None else self._process.exitcode
        if status is None:
            return "ended as it began"
        if status == -signal.SIGKILL:
            return "was ended by the system, as it does when memory runs out"
        if status < 0:
            return f"was ended by {signal.Signals(-status).name}"
        return f"ended with status {status}"


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold back Ctrl-C: a process that is started here never gets one, and this one gets it at the end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_open_train: Callable[[], Train] | None = None  # of this process, if it is a worker
_train: Train | None = None


def _begin(open_train: Callable[[], Train]) -> None:
    """Set up this process as a worker."""
    global _open_train
    _open_train = open_train
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)  # killed, it could not end us: a trial that nobody records would train on


def _run(spec: TrialSpec, output: Output, parent: TrialResult | None) -> TrialResult:
    """Train a trial in this process, a worker."""
    global _train
    with _Sent():
        if _train is None and _open_train is not None:
            _train = _open_train()  # here, not in _begin, whose errors are not sent
        if _train is None:
            raise RuntimeError("this process is no worker")
        return _train(spec, output, parent)


class _Sent:
    """Raises an error that cannot be sent to another process as a ``RuntimeError`` in its words."""

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and not _can_be_sent(error):
            raise RuntimeError(f"{type(error).__name__}: {error}") from error


def _can_be_sent(error: BaseException) -> bool:
    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)  # our own bytes
    except NOT_SENT:
        return False
