"""Where trials run: in processes of their own, or in this one (``search.workers``).

What a user's code does in a process of its own, such as a crash or a step that never ends, is the
end of one trial. The processes are forked by multiprocessing's fork server, which has imported what
all of them need and never touches the device: CUDA does not survive a fork. This module imports
neither torch nor lightning.

An exception, ``sys.exit``, a crash or want of memory ends one trial: ``failed``, with the message
and the line of the user's file; ``diverged`` where the loss was no longer finite before; or ``out
of memory``. A failed point is tried once more. Three failures in a row end the study with status 1,
and the same command continues it. ``protocol.trial_seconds`` ends what never ends.
"""

import faulthandler
import math
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, chdir, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NoReturn, Protocol, Self, TypeVar

from bstune.core.errors import BstuneError, UserCodeError
from bstune.core.records import TrialResult, TrialSpec
from bstune.system import interruption
from bstune.system.exits import Terminated, os_exit_answered, sys_exit_error, untrainable
from bstune.system.failures import described, in_users_code, note_users_code
from bstune.system.files import Output, full_disk
from bstune.system.openmp import SPIN, spin_shortly
from bstune.system.secrets import know, known
from bstune.system.terminal import install_filters
from bstune.trial.processes.trials_log import TrialsLog

Value = TypeVar("Value")
Train = Callable[[TrialSpec, Output, TrialResult | None], TrialResult]
CONTEXT = multiprocessing.get_context("forkserver")
PRELOAD = ["bstune.trial.workload"]
# Between two looks for a signal, while trials train.
LOOK_SECONDS = 0.2
# Between the ends of the processes of one trial, which end together but for writing files.
APART_SECONDS = 30
# That a process may take to end once it has nothing to do.
END_SECONDS = 2
# Errors of reading what a process sent before it died.
PICKLE_ERRORS = (
    pickle.PickleError,
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
    RuntimeError,
    ImportError,
)


@contextmanager
def temporarily(mapping: MutableMapping[str, Value], key: str, value: Value) -> Iterator[None]:
    """Set a key of a mapping, such as ``os.environ``, while the body runs."""
    former = mapping.get(key)
    mapping[key] = value
    try:
        yield
    finally:
        if former is None:
            del mapping[key]
        else:
            mapping[key] = former


def start_server() -> None:
    """Start the fork server, which begins to import at once, while this process goes on.

    Once is enough.
    """
    CONTEXT.set_forkserver_preload(PRELOAD)
    # Lets torch answer whether there is CUDA without touching the device, which the server must not
    # before it forks.
    environment = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", **os.environ}
    spin_shortly(environment)
    with ExitStack() as stack:
        for name in ("PYTORCH_NVML_BASED_CUDA_CHECK", SPIN):
            if name in environment:
                stack.enter_context(temporarily(os.environ, name, environment[name]))
        stack.enter_context(_ignoring_ctrl_c())
        forkserver.ensure_running()


@contextmanager
def _ignoring_ctrl_c() -> Iterator[None]:
    """Let a process that is started meanwhile ignore SIGINT from its first moment on.

    The fork server ignores it once it has imported torch; before, Ctrl-C would print its traceback.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # None is a handler that was not set from Python.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN) or signal.SIG_DFL
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def mps_runs() -> bool:
    """Say whether NVIDIA's Multi-Process Service runs (docs.nvidia.com/deploy/mps).

    Its control daemon has a pipe in a folder of its own.
    """
    # The folder is its own default.
    folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")  # noqa: S108
    return Path(folder, "control").exists()


@dataclass(frozen=True)
class Finished:
    """A trial that is over: its record, or the error that ends the study.

    Of a failed one also the user's frames.
    """

    spec: TrialSpec
    record: TrialResult | None = None
    error: BstuneError | None = None
    frames: str = ""
    # The error that a trial in this process failed with.
    cause: Exception | None = None
    # Whether a loop of the user's has left it at its last report, short of where it was to be
    # compared.
    is_cut: bool = False

    def result(self) -> TrialResult:
        """Give the record, or raise the error."""
        if self.record is not None:
            return self.record
        if self.error is not None:
            raise self.error
        raise RuntimeError(f"trial {self.spec.number} is over with neither record nor error")


@dataclass(frozen=True)
class Call:
    """Asks a process to call a method of what it has opened."""

    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class SaidLine:
    """A line that a process has to say while it is asked for something."""

    text: str


@dataclass(frozen=True)
class CallAnswer:
    """What a call came to: a value, or an error.

    Args:
        value: that the method returned.
        error: for the user, in lines.
        cause: the error of the user's own code behind it, pickled, where it can be.
    """

    value: Any = None
    error: BstuneError | None = None
    cause: bytes | None = None

    def result(self) -> Any:
        """Return the value, or raise the error, the user's own behind it."""
        if self.error is None:
            return self.value
        if self.cause is None:
            raise self.error
        try:
            cause = pickle.loads(self.cause)  # noqa: S301 (of a process that this one started)
        except PICKLE_ERRORS:
            raise self.error from None
        note_users_code(cause)
        raise self.error from cause


class Runner(Protocol):
    """What runs trials: :class:`Workers` or :class:`InProcess`."""

    count: int

    @property
    def free(self) -> bool:
        """Whether one more trial can be started."""

    @property
    def running(self) -> list[TrialSpec]:
        """The trials that are not over, or have not been waited for."""

    def start(self, spec: TrialSpec, output: Output, resumed_from: TrialResult | None) -> None:
        """Begin a trial."""

    def wait(self) -> Finished:
        """Give a trial that is over, once one is."""

    def poll(self) -> Iterator[Finished]:
        """Yield the trials that are over now."""


def failed(spec: TrialSpec, error: BaseException, seconds: float) -> Finished:
    """Make a failed trial of an error of the user's code, with the frames of the user's own files.

    A full disk is no error of that code: every trial would fail.
    """
    full = full_disk(error)
    if full is not None:
        return Finished(spec, error=full)
    message, frames = described(error)
    record = TrialResult.unmeasured(spec, "failed", message=message, wall_seconds=seconds)
    return Finished(spec, record, frames=frames)


class InProcess:
    """Runs trials in this process, one at a time: for debuggers, profilers and replays.

    A crash ends the study.
    """

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
        spec, output, resumed_from = self._next
        self._next = None
        start = time.monotonic()
        try:
            # The user's code may leave the folder.
            with chdir("."):
                return Finished(spec, self._train(spec, output, resumed_from))
        except BstuneError:
            raise
        # Whatever the user's code raises ends a trial, not the study.
        except Exception as error:  # noqa: BLE001
            return replace(failed(spec, error, time.monotonic() - start), cause=error)

    def poll(self) -> Iterator[Finished]:
        """Yield nothing: no trial is over that was not waited for."""
        return iter(())


def with_step_time(result: TrialResult, step_time: Callable[[float], float]) -> TrialResult:
    """Put the seconds of a step that were measured before the study into a trial's record.

    Nothing ran beside that measurement; the trial's own are kept as ``measured_seconds_per_step``.
    """
    measured = result.seconds_per_step
    if measured is None:
        return result
    alone = float(step_time(result.batch_size))
    return replace(result, seconds_per_step=alone, measured_seconds_per_step=measured)


class Workers:
    """``count`` processes that train one trial each at a time.

    It is a context, at whose end they are gone.

    ``open_train``, which is pickled, is called once in each process and returns what trains a
    trial. A trial that takes longer than ``seconds``, the start of its process among them, has
    failed. With several ``devices`` each of the ``count`` is as many processes, which train one
    trial together. After ``trials`` trials a process is replaced by a fresh one, as what is
    compiled keeps memory. What they print goes to ``log``; None: to this process's output. Of
    ``kept`` a process that has nothing to do is used first, and put back at the end. An
    interruption or a termination signal is raised by :meth:`start`, :meth:`wait` or the end, where
    nothing is cut; a second one at once.
    """

    def __init__(
        self,
        open_train: Callable[[], Train],
        count: int,
        seconds: float | None = None,
        devices: int = 1,
        trials: int | None = None,
        log: TrialsLog | None = None,
        kept: list["Process"] | None = None,
    ) -> None:
        self._open_train = open_train
        self.count = count
        self._devices = devices
        self._log = log
        self._kept = kept
        self._seconds = math.inf if seconds is None else seconds
        self._trials = math.inf if trials is None else trials
        self._workers: list[Process | _Team] = []
        self._running: dict[Process | _Team, TrialSpec] = {}
        # Of those that run, not yet returned.
        self._finished: dict[Process | _Team, Finished] = {}
        self._handlers: dict[int, Any] = {}
        self._signal: int | None = None

    def __enter__(self) -> Self:
        if self._kept is not None:
            self._workers += self._kept
            self._kept.clear()
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
            raise Terminated(128 + self._signal)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._kept is not None:
            for worker in self._workers:
                if isinstance(worker, Process) and worker.is_usable:
                    self._workers.remove(worker)
                    self._kept.append(worker)
                    break
        for worker in self._workers:
            # Lightning would put off the signal to terminate until a batch is done.
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
        """Train a trial in a process that has nothing to do.

        It is trained as :meth:`bstune.trial.backend.TrialBackend.run` does.
        """
        self._check()
        for worker in self._idle():
            # One that was ended while it had nothing to do is replaced, as is one after an error,
            # which may have left anything behind: after an assertion of CUDA, its device computes
            # nothing any more.
            if worker.has_failed or not worker.is_alive() or worker.trials >= self._trials:
                worker.close()
                worker.end()
                self._workers.remove(worker)
        idle = self._idle()
        worker = idle[0] if idle else self._add()
        self._running[worker] = spec
        worker.send((spec, output, resumed_from))

    def _idle(self) -> "list[Process | _Team]":
        return [worker for worker in self._workers if worker not in self._running]

    def _add(self) -> "Process | _Team":
        worker: Process | _Team
        if self._devices == 1:
            worker = Process(self._open_train, self._log)
        else:
            worker = _Team(self._open_train, self._devices, self._log)
        self._workers.append(worker)
        return worker

    def wait(self) -> Finished:
        """Wait until a trial is over, and give it: of several those with a record come first."""
        while True:
            self._check()
            finished = self._next(LOOK_SECONDS)
            if finished is not None:
                return finished

    def poll(self) -> Iterator[Finished]:
        """Yield the trials that are over now, in the same order."""
        while (finished := self._next(0)) is not None:
            yield finished

    def _next(self, seconds: float) -> Finished | None:
        """Give a trial that is over within some seconds, the least number first; None: none is."""
        self._look(seconds)
        if not self._finished:
            return None

        # One that ends the study comes last: what else is over is recorded before that.
        def place(worker: Process | _Team) -> tuple[bool, int]:
            return self._finished[worker].error is not None, self._running[worker].number

        worker = min(self._finished, key=place)
        del self._running[worker]
        return self._finished.pop(worker)

    def _look(self, seconds: float) -> None:
        """Take in the trials that are over within some seconds, or take too long."""
        running = [worker for worker in self._running if worker not in self._finished]
        worker_of: dict[object, Process | _Team] = {}
        handles = list[Connection | int]()
        for worker in running:
            handles += worker.handles
            worker_of |= dict.fromkeys(worker.handles, worker)
        # What is over already is not kept waiting for what comes next.
        ready = wait(handles, 0 if self._finished else seconds)
        over = {worker_of[handle] for handle in ready}
        for worker in running:
            is_late = time.monotonic() - worker.started > self._seconds
            if worker not in over and not is_late:
                continue
            too_long: str | None = None
            if is_late:
                too_long = f"took longer than protocol.trial_seconds={self._seconds:g}"
            finished = worker.finish(self._running[worker], too_long)
            # A team's is over once all of its processes have answered.
            if finished is not None:
                self._finished[worker] = finished


class Process:
    """One process that trains, and the connection to it."""

    def __init__(self, open_train: Callable[[], Train], log: TrialsLog | None) -> None:
        start_server()
        self.connection, other = CONTEXT.Pipe()
        printed = None if log is None else log.pipe()
        arguments = (open_train, other, dict(os.environ), known(), printed)
        self.process = CONTEXT.Process(target=_work, args=arguments)
        start_process(self.process)
        if printed is not None:
            printed.close()
        self.has_failed = False
        self.trials = 0
        self.started = time.monotonic()
        # The process has its end: as long as this one holds it too, nothing tells of its death.
        other.close()

    @property
    def handles(self) -> list[Connection | int]:
        """What :func:`multiprocessing.connection.wait` waits for.

        That is an answer, or the process's end.
        """
        return [self.connection, self.process.sentinel]

    def is_alive(self) -> bool:
        """Say whether the process runs."""
        return self.process.is_alive()

    @property
    def is_usable(self) -> bool:
        """Whether another trial can be trained in it."""
        return self.is_alive() and not self.has_failed

    def send(self, request: tuple[TrialSpec, Output, TrialResult | None]) -> None:
        """Send a trial, whose time begins."""
        self.started = time.monotonic()
        self.trials += 1
        # It has just died, and the trial with it.
        with suppress(OSError):
            self.connection.send(request)

    def call(self, method: str, *arguments: object, say: Callable[[str], None]) -> Any:
        """Call a method of what the process has opened.

        ``say`` takes the lines that it says meanwhile.

        Raises:
            UserCodeError: where the process has ended without an answer.
            BstuneError: that the method raised.
        """
        # It has just died.
        with suppress(OSError):
            self.connection.send(Call(method, arguments))
        while True:
            wait(self.handles, LOOK_SECONDS)
            message = self._message()
            if isinstance(message, SaidLine):
                say(message.text)
            elif message is not None:
                return message.result()
            elif not self.is_alive():
                self.process.join()
                # What the process has started ends with it.
                self.kill()
                raise UserCodeError(f"the workload cannot be trained: {self._end()}")

    def _message(self) -> SaidLine | CallAnswer | None:
        """Receive a message to a call, if one has come."""
        with suppress(EOFError, OSError, *PICKLE_ERRORS):
            if self.connection.poll():
                message: SaidLine | CallAnswer = self.connection.recv()
                return message
        return None

    def _end(self) -> str:
        """Say how the process has ended."""
        status = self.process.exitcode or 0
        if status == -signal.SIGKILL:
            return (
                "its process was ended by the system, as it does when memory runs out: "
                "lower search.batch_size.high or search.workers"
            )
        if status < 0:
            return f"its process was ended by {signal.Signals(-status).name}"
        return f"its process ended with status {status}"

    def close(self) -> None:
        """Tell the process to end once it has nothing to do."""
        self.connection.close()

    def receive(self) -> Finished | None:
        """Take the answer to a trial if it has come."""
        with suppress(EOFError, OSError, *PICKLE_ERRORS):
            if self.connection.poll():
                answer: Finished = self.connection.recv()
                self.has_failed = answer.record is None or answer.record.status == "failed"
                return answer
        return None

    def finish(self, spec: TrialSpec, too_long: str | None) -> Finished:
        """Receive the answer to a trial.

        Without one the process has ended, or is killed as it took ``too_long``.
        """
        answer = self.receive()
        if answer is not None:
            return answer
        if too_long is not None:
            self.kill()
        self.process.join()
        # What the process has started ends with it.
        self.kill()
        reason = self._end() if too_long is None else too_long
        seconds = time.monotonic() - self.started
        record = TrialResult.unmeasured(spec, "failed", message=reason, wall_seconds=seconds)
        return Finished(spec, record)

    def kill(self) -> None:
        """Kill the process, and those that the user's code has started in it."""
        interruption.kill(self.process)

    def end(self) -> None:
        """Wait for a process whose connection is closed, and kill what goes on.

        That may be a thread of the user's.
        """
        self.process.join(END_SECONDS)
        self.kill()
        self.process.join()


class _Team:
    """A process for each of several devices, which train one trial together.

    It is used as a :class:`Process`.
    """

    def __init__(
        self, open_train: Callable[[], Train], devices: int, log: TrialsLog | None
    ) -> None:
        # An empty file is all that the processes find each other by: no port that another program
        # may have taken.
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
        handles = list[Connection | int]()
        for rank in self._missing:
            handles += rank.handles
        return handles

    def is_alive(self) -> bool:
        return all(rank.is_alive() for rank in self._ranks)

    def send(self, request: tuple[TrialSpec, Output, TrialResult | None]) -> None:
        self.started = time.monotonic()
        self.trials += 1
        self._answers.clear()
        for rank in self._ranks:
            rank.send(request)

    def finish(self, spec: TrialSpec, too_long: str | None) -> Finished | None:
        """Give the first process's answer once all have answered, or what ended one of them.

        None before that.

        The others would wait for it for ever, in an exchange of gradients: they are killed.
        """
        died = self._look(0)
        start = time.monotonic()
        # What all of them see alike, as a loss that diverges, all of them say within moments; one
        # that died is looked for, as it makes others fail that lose it.
        while self._answers and self._missing and not died and too_long is None:
            patience = END_SECONDS if self._failed else APART_SECONDS
            if time.monotonic() - start > patience:
                too_long = (
                    f"did not end with the others, {APART_SECONDS} s before: one stops where "
                    "another trains on"
                )
            died = self._look(LOOK_SECONDS)
        if not self._missing:
            self.has_failed = any(rank.has_failed for rank in self._ranks)
            telling = self._failed or self._ranks
            return self._answers[telling[0]]
        if not self._failed and not died and too_long is None:
            return None
        # What died comes first, as it makes others fail; then what failed, then what is too late.
        cause = (died or self._failed or self._missing)[0]
        answer = self._answers.get(cause)
        if answer is None:
            answer = cause.finish(spec, too_long)
        self.has_failed = True
        self.kill()
        return answer

    @property
    def _missing(self) -> list[Process]:
        return [rank for rank in self._ranks if rank not in self._answers]

    @property
    def _failed(self) -> list[Process]:
        """The processes whose answer need not be that of the others."""
        failed = list[Process]()
        for rank in self._ranks:
            answer = self._answers.get(rank)
            if answer is None:
                continue
            if answer.record is None or answer.record.status not in ("reached", "stopped"):
                failed.append(rank)
        return failed

    def _look(self, seconds: float) -> list[Process]:
        """Take the answers that come within some seconds; give the processes that died without."""
        wait(self.handles, seconds)
        for rank in self._missing:
            answer = rank.receive()
            if answer is not None:
                self._answers[rank] = answer
        return [rank for rank in self._missing if not rank.is_alive()]

    def kill(self) -> None:
        for rank in self._ranks:
            rank.kill()

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()

    def end(self) -> None:
        for rank in self._ranks:
            rank.end()
        Path(self._store).unlink(missing_ok=True)


def _open_rank(open_train: Callable[[], Train], rank: int, devices: int, store: str) -> Train:
    """Open what trains a trial in one of the processes that share it."""
    # Only the trial's own process imports torch.
    from bstune.trial.devices.distributed import join

    join(rank, devices, store)
    return open_train()


def _work(
    open_train: Callable[[], Train],
    connection: Connection,
    environment: Mapping[str, str],
    secrets: tuple[str, ...],
    printed: Connection | None = None,
) -> None:
    """Train trials and answer calls, one request at a time, until the connection is closed.

    ``open_train`` is called at the first request, and what it returns is kept for the later ones.
    What is printed goes to ``printed``; None: to where the fork server's goes.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if printed is not None:
        for descriptor in (1, 2):
            os.dup2(printed.fileno(), descriptor)
        printed.close()
    # A crash says where the user's code was.
    faulthandler.enable(file=2)
    # So that all that the user's code starts here can be killed with it, and ends with the parent.
    lead_group()
    # The fork server's is that of its start.
    os.environ.update(environment)
    know(secrets)
    install_filters()
    process = os.getpid()
    train: Train | None = None
    answer: CallAnswer | Finished
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        if isinstance(request, Call):
            train, answer = _answer_call(request, train, open_train, connection)
        else:
            train, answer = _train_trial(request, train, open_train)
        # The user's code may have forked, and this be the copy.
        if os.getpid() != process:
            os._exit(0)
        _send(connection, answer)


def _train_trial(
    task: tuple[TrialSpec, Output, TrialResult | None],
    train: Train | None,
    open_train: Callable[[], Train],
) -> tuple[Train | None, Finished]:
    """Train a trial; what trains is opened by the first one."""
    spec = task[0]
    start = time.monotonic()
    try:
        train = train or open_train()
        # The user's code may leave the folder.
        with chdir("."):
            return train, Finished(spec, train(*task))
    except BstuneError as error:
        return train, Finished(spec, error=error)
    # Whatever the user's code raises ends one trial, sys.exit's error too.
    except BaseException as error:  # noqa: BLE001
        return train, failed(spec, error, time.monotonic() - start)


def _answer_call(
    call: Call, train: Train | None, open_train: Callable[[], Train], connection: Connection
) -> tuple[Train | None, CallAnswer]:
    """Answer a call in the process that it was sent to; what trains is opened by the first one."""

    def say(line: str) -> None:
        _send(connection, SaidLine(line))

    def end(message: str) -> NoReturn:
        _send(connection, CallAnswer(error=UserCodeError(message)))
        leave(1)

    def end_exit(message: str, status: int) -> NoReturn:
        end(message.removeprefix("error: "))

    # As it is before the calls of the user's code are answered in another way.
    leave = os._exit
    try:
        with os_exit_answered(end_exit), chdir("."):
            train = train or open_train()
            method = getattr(train, call.method)
            return train, CallAnswer(method(*call.arguments, say=say, end=end))
    except BstuneError as error:
        return train, CallAnswer(error=error, cause=_users_cause(error))
    except SystemExit as error:
        shown = sys_exit_error(error)
        return train, CallAnswer(error=untrainable(error), cause=_pickled(shown))
    # Whatever else the user's code raises.
    except BaseException as error:  # noqa: BLE001
        return train, CallAnswer(error=untrainable(error), cause=_pickled(error))


# The watchdog's thread sends as well.
_sending = threading.Lock()


def _send(connection: Connection, message: SaidLine | CallAnswer | Finished) -> None:
    with _sending:
        connection.send(message)


def _users_cause(error: BaseException) -> bytes | None:
    """Pickle what the user's code raised behind one of bstune's errors.

    None: nothing that can be.
    """
    cause = error.__cause__
    while cause is not None and (isinstance(cause, BstuneError) or not in_users_code(cause)):
        cause = cause.__cause__
    if cause is None:
        return None
    return _pickled(cause)


def _pickled(error: BaseException) -> bytes | None:
    # In the process of a study that trains, which has imported it.
    import cloudpickle

    if not isinstance(error, Exception):
        return None
    try:
        pickled: bytes = cloudpickle.dumps(error)
        # Not all that pickles loads.
        pickle.loads(pickled)  # noqa: S301 (what was pickled here)
    except Exception:  # noqa: BLE001 (the user's classes may raise anything)
        return None
    return pickled


def start_process(process: BaseProcess) -> None:
    """Start a process without the caller's script.

    multiprocessing would import it there, whether it is guarded or not.
    """
    with temporarily(sys.modules, "__main__", ModuleType("__main__")):
        process.start()


def lead_group() -> None:
    """Let this process lead a group with what the user's code starts.

    The group can be ended as one, and ends with the parent.
    """
    os.setpgrp()
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        # A parent that was killed could not end us: a trial that nobody records would train on.
        os.killpg(0, signal.SIGKILL)
