"""Where trials run: in processes of their own, while this one keeps the study, or in this one (``search.workers``).

What a user's code does in a process of its own, such as a crash or a step that never ends, is the end of one trial.
The processes are forked by multiprocessing's fork server, which has imported what all of them need and never touches
the device: CUDA does not survive a fork. This module imports neither torch nor lightning.
"""

import math
import multiprocessing
import os
import pickle
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import chdir, contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Protocol, Self

import bstune
from bstune.core import interruption
from bstune.core.errors import BstuneError
from bstune.core.files import Output, full_disk
from bstune.core.records import TrialResult, TrialSpec
from bstune.core.secrets import redact

Train = Callable[[TrialSpec, Output, TrialResult | None], TrialResult]
CONTEXT = multiprocessing.get_context("forkserver")
PRELOAD = ["bstune.trial.workload"]
LOOK_SECONDS = 0.2  # between two looks for a signal, while trials train
END_SECONDS = 2  # that a process may take to end once it has nothing to do
NOT_OWN = (*bstune.__path__, sysconfig.get_path("stdlib"), "<")  # of files in which no user's code is, as in those ...
INSTALLED = {"site-packages", "dist-packages"}  # ... below such folders, of which there may be many
# Errors of reading what a process sent before it died.
PICKLE_ERRORS = (pickle.PickleError, TypeError, ValueError, AttributeError, LookupError, RuntimeError, ImportError)


@dataclass(frozen=True)
class Finished:
    """A trial that is over: its record, or the error that ends the study; of a failed one also the user's frames."""

    spec: TrialSpec
    record: TrialResult | None = None
    error: BstuneError | None = None
    frames: str = ""
    cause: Exception | None = None  # that a trial in this process failed with

    def result(self) -> TrialResult:
        """Return the record, without passwords in its message, or raise the error."""
        if self.record is None:
            raise self.error or RuntimeError(f"trial {self.spec.number} is over with neither record nor error")
        return replace(self.record, message=self.record.message and redact(self.record.message))


class Runner(Protocol):
    """What runs trials: :class:`Workers` or :class:`InProcess`."""

    count: int

    @property
    def free(self) -> bool: ...  # noqa: D102 (as those of Workers)
    @property
    def running(self) -> list[TrialSpec]: ...  # noqa: D102
    def start(self, spec: TrialSpec, output: Output, resumed_from: TrialResult | None) -> None: ...  # noqa: D102
    def wait(self) -> Finished: ...  # noqa: D102
    def poll(self) -> Iterator[Finished]: ...  # noqa: D102


def _is_own(file: str) -> bool:
    return not file.startswith(NOT_OWN) and INSTALLED.isdisjoint(Path(file).parts)


def in_users_code(error: BaseException) -> bool:
    """Return whether an error came by the user's own code: a file that is no package's, or what was typed."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(one.f_globals.get("__name__") == "__main__" or _is_own(one.f_code.co_filename) for one, _ in frames)


def described(error: BaseException) -> tuple[str, str]:
    """Return an error of the user's code in a line, and the frames of the user's own files as lines."""
    kind, text = type(error).__name__, str(error).strip()
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_own(frame.filename)]
    frames = "".join(f"  {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}\n" for frame in own)
    where = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
    if "Original Traceback" in text:  # of a DataLoader's process, whose error ends the text
        return text.splitlines()[-1], f"{text}\n"
    return (f"{kind}: {text.splitlines()[0]}" if text else kind) + where, frames


def failed(spec: TrialSpec, error: BaseException, seconds: float) -> Finished:
    """Return a trial that an error of the user's code ended, with the frames of the user's own files.

    A full disk is no error of that code: every trial would fail.
    """
    if (full := full_disk(error)) is not None:
        return Finished(spec, error=full)
    message, frames = described(error)
    return Finished(spec, TrialResult.unmeasured(spec, "failed", message=message, wall_seconds=seconds), frames=frames)


class InProcess:
    """Runs trials in this process, one at a time: for debuggers, profilers and replays. A crash ends the study."""

    count = 1

    def __init__(self, train: Train) -> None:
        self._train = train
        self._next: tuple[TrialSpec, Output, TrialResult | None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._next = None

    @property
    def free(self) -> bool:
        """Whether no trial waits to be run."""
        return self._next is None

    @property
    def running(self) -> list[TrialSpec]:
        """The trial that waits to be run."""
        return [] if self._next is None else [self._next[0]]

    def start(self, spec: TrialSpec, output: Output, resumed_from: TrialResult | None) -> None:
        """Take a trial, which :meth:`wait` runs."""
        self._next = spec, output, resumed_from

    def wait(self) -> Finished:
        """Run the trial."""
        assert self._next is not None  # noqa: S101 (it was started)
        task, self._next = self._next, None
        start = time.monotonic()
        try:
            with chdir("."):  # the user's code may leave the folder
                return Finished(task[0], self._train(*task))
        except BstuneError:
            raise
        except Exception as error:  # noqa: BLE001 (whatever the user's code raises ends a trial, not the study)
            return replace(failed(task[0], error, time.monotonic() - start), cause=error)

    def poll(self) -> Iterator[Finished]:
        """Yield nothing: no trial is over that was not waited for."""
        return iter(())


def with_step_time(result: TrialResult, step_time: Callable[[float], float]) -> TrialResult:
    """Return a trial's record with the seconds per step that were measured before the study, with nothing beside it."""
    own = result.seconds_per_step
    if own is None:
        return result
    return replace(result, seconds_per_step=float(step_time(result.batch_size)), measured_seconds_per_step=own)


class Workers:
    """``count`` processes that train one trial each at a time; a context, at whose end they are gone.

    ``open_train``, which is pickled, is called once in each process and returns what trains a trial. A trial that takes
    longer than ``seconds``, the start of its process among them, has failed. An interruption or a termination signal is
    raised by :meth:`start`, :meth:`wait` or the end, where nothing is cut; a second one at once.
    """

    def __init__(self, open_train: Callable[[], Train], count: int, seconds: float | None = None) -> None:
        self._open_train, self.count = open_train, count
        self._seconds = math.inf if seconds is None else seconds
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
        interruption.note(number)
        signal.signal(number, self._handlers[number])

    def _check(self) -> None:
        if self._signal == signal.SIGINT:
            raise KeyboardInterrupt
        if self._signal is not None:
            sys.exit(128 + self._signal)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for worker in self._workers:
            if kind is not None:  # Lightning would put off the signal to terminate until a batch is done
                worker.kill()
            worker.connection.close()
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
        return len(self._running) < self.count

    @property
    def running(self) -> list[TrialSpec]:
        """The trials that are not over, or have not been waited for."""
        return list(self._running.values())

    def start(self, spec: TrialSpec, output: Output, resumed_from: TrialResult | None) -> None:
        """Train a trial in a process that has nothing to do, as :meth:`bstune.trial.backend.TrialBackend.run` does."""
        self._check()
        for free in [worker for worker in self._workers if worker not in self._running]:
            # One that was ended while it had nothing to do is replaced, as is one after an error, which may have left
            # anything behind: after an assertion of CUDA, its device computes nothing any more.
            if free.has_failed or not free.process.is_alive():
                free.connection.close()
                free.end()
                self._workers.remove(free)
        worker = next((worker for worker in self._workers if worker not in self._running), None)
        if worker is None:
            worker = _Worker(self._open_train)
            self._workers.append(worker)
        self._running[worker] = spec
        worker.started = time.monotonic()
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
        over = {handles[handle] for handle in wait(list(handles), 0 if self._finished else seconds)}  # type: ignore[index]
        for worker in running:
            late = time.monotonic() - worker.started > self._seconds
            if worker in over or late:
                too_long = f"took longer than protocol.trial_seconds={self._seconds:g}"
                self._finished[worker] = worker.finish(self._running[worker], too_long if late else None)
        if not self._finished:
            return None
        worker = min(self._finished, key=lambda w: (self._finished[w].error is not None, self._running[w].number))
        del self._running[worker]
        return self._finished.pop(worker)


class _Worker:
    """One process and the connection to it."""

    def __init__(self, open_train: Callable[[], Train]) -> None:
        CONTEXT.set_forkserver_preload(PRELOAD)
        self.connection, other = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=_work, args=(open_train, other, dict(os.environ)))
        start_process(self.process)
        self.has_failed = False
        self.started = time.monotonic()
        other.close()

    def finish(self, spec: TrialSpec, too_long: str | None) -> Finished:
        """Receive the answer to a trial; without one the process has ended, or is killed as it took ``too_long``."""
        with suppress(EOFError, OSError, *PICKLE_ERRORS):
            if self.connection.poll():
                answer: Finished = self.connection.recv()
                self.has_failed = answer.record is None or answer.record.status == "failed"
                return answer
        if too_long is not None:
            self.kill()
        self.process.join()
        self.kill()  # what it has started
        status = self.process.exitcode or 0
        if too_long is not None:
            reason = too_long
        elif status == -signal.SIGKILL:
            reason = (
                "its process was ended by the system, as it does when memory runs out: "
                "lower search.batch_size.high or search.workers"
            )
        elif status < 0:
            reason = f"its process was ended by {signal.Signals(-status).name}"
        else:
            reason = f"its process ended with status {status}"
        seconds = time.monotonic() - self.started
        return Finished(spec, TrialResult.unmeasured(spec, "failed", message=reason, wall_seconds=seconds))

    def kill(self) -> None:
        """Kill the process, and those that the user's code has started in it."""
        interruption.kill(self.process)

    def end(self) -> None:
        """Wait for a process whose connection is closed, and kill what goes on, such as a thread of the user's."""
        self.process.join(END_SECONDS)
        self.kill()
        self.process.join()


def _work(open_train: Callable[[], Train], connection: Connection, environment: Mapping[str, str]) -> None:
    """Train trials in this process, a worker, until the connection is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    lead_group()
    os.environ.update(environment)  # the fork server's is that of its start
    process = os.getpid()
    train: Train | None = None
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        start = time.monotonic()
        try:
            train = train or open_train()
            with chdir("."):  # the user's code may leave the folder
                answer = Finished(request[0], train(*request))
        except BstuneError as error:
            answer = Finished(request[0], error=error)
        except BaseException as error:  # noqa: BLE001 (sys.exit too: whatever the user's code raises ends one trial)
            answer = failed(request[0], error, time.monotonic() - start)
        if os.getpid() != process:  # the user's code has forked, and this is the copy
            os._exit(0)
        connection.send(answer)


@contextmanager
def temporarily(mapping: MutableMapping[str, Any], key: str, value: Any) -> Iterator[None]:
    """Let a key have another value for a while."""
    before = mapping.get(key)
    mapping[key] = value
    try:
        yield
    finally:
        if before is None:
            del mapping[key]
        else:
            mapping[key] = before


def start_process(process: BaseProcess) -> None:
    """Start a process without the caller's script, which multiprocessing would import there, guarded or not."""
    with temporarily(sys.modules, "__main__", ModuleType("__main__")):
        process.start()


def lead_group() -> None:
    """Let this process lead a group with what the user's code starts, which can be ended as one, as with the parent."""
    os.setpgrp()
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.killpg(0, signal.SIGKILL)  # killed, it could not end us: a trial that nobody records would train on
