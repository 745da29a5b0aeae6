"""Runs trials in processes of their own, or in this one (``search.workers``).

Where a trial has a process of its own, a crash of the user's code or a step that never ends is the
end of that trial alone. The processes are forked by multiprocessing's fork server, which has
imported the modules that all of them need. The server never touches the device, as CUDA does not
survive a fork. This module imports neither torch nor lightning.

An exception, ``sys.exit``, a crash or want of memory ends one trial. Its status is ``failed``, with
the message and the line of the user's file; ``diverged`` where the loss was no longer finite
before; or ``out of memory``. A failed point is tried once more. Three failures in a row end the
study with status 1, and the same command continues it. ``protocol.trial_seconds`` ends a trial that
hangs.
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
# Trains a trial, which may go on from the record of a stopped one, and gives its record.
Train = Callable[[TrialSpec, Output, TrialResult | None], TrialResult]
CONTEXT = multiprocessing.get_context("forkserver")
# The modules that the fork server imports, with all that they import.
PRELOAD = ["bstune.trial.workload"]
# Seconds between two looks for signals while trials train.
LOOK_SECONDS = 0.2
# Seconds from the end of a trial's process until a signal that has ended it has come to this one,
# too.
SIGNAL_SECONDS = 0.5
# Seconds between two looks for that signal.
SIGNAL_LOOK_SECONDS = 0.05
# The longest time between the ends of the processes that train one trial together. They end at the
# same step, after which one of them may still write files.
APART_SECONDS = 30
# The longest time that a process may take to end once it has nothing to do.
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
    """Start the fork server, unless it runs. It imports while this process goes on."""
    CONTEXT.set_forkserver_preload(PRELOAD)
    # This lets torch answer whether there is CUDA without touching the device, which the server
    # must not do before it forks.
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
    """Within the context, a process that is started ignores SIGINT from its first moment on.

    The fork server by itself ignores it only once it has imported torch. Before that, Ctrl-C would
    print the server's traceback. In another thread than the main one nothing changes.
    """
    # Python lets the main thread alone set a signal's handler.
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
    """Whether NVIDIA's Multi-Process Service runs (docs.nvidia.com/deploy/mps).

    It runs where the pipe of its control daemon is there.
    """
    # The daemon's default folder.
    folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")  # noqa: S108
    return Path(folder, "control").exists()


@dataclass(frozen=True)
class Finished:
    """A trial that is over: its record, or the error that ends the study."""

    spec: TrialSpec
    record: TrialResult | None = None
    error: BstuneError | None = None
    # The lines of the user's code that a failed trial's error came through, as text.
    frames: str = ""
    # The error that a trial in this process failed with; None for any other trial.
    cause: Exception | None = None
    # Whether the user's training loop left the trial before the step at which it was to be compared
    # with others.
    is_cut: bool = False

    def result(self) -> TrialResult:
        """Give the record, or raise the error that ends the study."""
        if self.record is not None:
            return self.record
        if self.error is not None:
            raise self.error
        raise RuntimeError(f"trial {self.spec.number} is over with neither record nor error")


@dataclass(frozen=True)
class Call:
    """A request to a process: to call a method of the object with which it trains."""

    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class SaidLine:
    """A line for the user, which a process sends while it answers a call."""

    text: str


@dataclass(frozen=True)
class CallAnswer:
    """The answer of a process to a call: a value, or an error.

    Args:
        value: that the method returned.
        error: for the user, in lines; None: the method returned.
        cause: the error of the user's own code behind ``error``, pickled; None: there is none, or
            it cannot be pickled.
    """

    value: Any = None
    error: BstuneError | None = None
    cause: bytes | None = None

    def result(self) -> Any:
        """Return the value, or raise the error, with the user's own error as its cause."""
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
    """Runs trials, ``count`` at a time: :class:`Workers` or :class:`InProcess`."""

    count: int

    @property
    def free(self) -> bool:
        """Whether one more trial can be started."""

    @property
    def running(self) -> list[TrialSpec]:
        """The started trials that neither :meth:`wait` nor :meth:`poll` has given yet."""

    def start(self, spec: TrialSpec, output: Output, resumed_from: TrialResult | None) -> None:
        """Begin a trial, which may go on from the stopped one that ``resumed_from`` records."""

    def wait(self) -> Finished:
        """Wait until a trial is over, and give it."""

    def poll(self) -> Iterator[Finished]:
        """Yield the trials that are over now, without a wait."""


def failed(spec: TrialSpec, error: BaseException, seconds: float) -> Finished:
    """Describe a trial that an error of the user's code has ended, after ``seconds`` of wall time.

    It has failed, and has the frames of the user's own files. A full disk ends the study instead,
    as every trial would fail.
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

    def start(self, spec: TrialSpec, output: Output, resumed_from: TrialResult | None) -> None:
        """Take a trial, which :meth:`wait` runs."""
        self._waiting = spec, output, resumed_from

    def wait(self) -> Finished:
        """Run the trial that was started, and give it once it is over."""
        assert self._waiting is not None  # noqa: S101 (it was started)
        spec, output, resumed_from = self._waiting
        self._waiting = None
        start = time.monotonic()
        try:
            # The user's code may change the working directory: chdir puts it back.
            with chdir("."):
                return Finished(spec, self._train(spec, output, resumed_from))
        except BstuneError:
            raise
        # Whatever the user's code raises ends a trial, not the study.
        except Exception as error:  # noqa: BLE001
            return replace(failed(spec, error, time.monotonic() - start), cause=error)

    def poll(self) -> Iterator[Finished]:
        """Yield nothing: a trial is over only as :meth:`wait` runs it."""
        return iter(())


def with_step_time(result: TrialResult, step_time: Callable[[float], float]) -> TrialResult:
    """Give a trial's record with the seconds of a step of a law over batch size.

    The trial's own seconds of a step are kept as ``measured_seconds_per_step``. A record without
    any is left as it is.
    """
    if result.seconds_per_step is None:
        return result
    # A record that has another law's seconds keeps the trial's own.
    trials_own = result.measured_seconds_per_step or result.seconds_per_step
    by_law = float(step_time(result.batch_size))
    return replace(result, seconds_per_step=by_law, measured_seconds_per_step=trials_own)


class Workers:
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
        spare: list["Process"] | None = None,
    ) -> None:
        self._open_train = open_train
        self.count = count
        self._devices = devices
        self._log = log
        self._spare = spare
        self._seconds = math.inf if seconds is None else seconds
        self._trials = math.inf if trials is None else trials
        self._workers: list[Process | _Team] = []
        # The trial that each process has, until wait() or poll() gives it.
        self._running: dict[Process | _Team, TrialSpec] = {}
        # How it ended, for each of these processes whose trial is over.
        self._finished: dict[Process | _Team, Finished] = {}
        # The handlers of signals that this context has replaced.
        self._handlers: dict[int, Any] = {}
        # The number of the signal that has come; None: none has.
        self._signal: int | None = None

    def __enter__(self) -> Self:
        if self._spare is not None:
            self._workers += self._spare
            self._spare.clear()
        # Only the main thread may set handlers. One that was not set in Python is None here.
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
            # A shell's status of a process that a signal has ended.
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
            self._raise_signal()

    @property
    def free(self) -> bool:
        """Whether one more trial can be started."""
        return len(self._running) < self.count

    @property
    def running(self) -> list[TrialSpec]:
        """The started trials that neither :meth:`wait` nor :meth:`poll` has given yet."""
        return list(self._running.values())

    def start(self, spec: TrialSpec, output: Output, resumed_from: TrialResult | None) -> None:
        """Train a trial in a process that has nothing to do.

        It is trained as :meth:`bstune.trial.backend.TrialBackend.run` does.
        """
        self._raise_signal()
        for worker in self._idle_workers():
            # A process that was ended while it had nothing to do is replaced. So is one after an
            # error, which may have left anything behind: after an assertion of CUDA, its device
            # computes nothing any more.
            if worker.has_failed or not worker.is_alive() or worker.trials >= self._trials:
                worker.close()
                worker.end()
                self._workers.remove(worker)
        idle = self._idle_workers()
        worker = idle[0] if idle else self._start_worker()
        self._running[worker] = spec
        worker.send((spec, output, resumed_from))

    def _idle_workers(self) -> "list[Process | _Team]":
        """Give the processes, or teams of them, that have no trial."""
        return [worker for worker in self._workers if worker not in self._running]

    def _start_worker(self) -> "Process | _Team":
        """Start a process; where a trial takes several devices, a team of processes."""
        worker: Process | _Team
        if self._devices == 1:
            worker = Process(self._open_train, self._log)
        else:
            worker = _Team(self._open_train, self._devices, self._log)
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
        """Give the trial with the least number of those that are over within some seconds.

        A trial with an error that ends the study comes last, so that the others are recorded before
        that. None where no trial is over.
        """
        self._take_finished(seconds)
        if not self._finished:
            return None

        def place_in_line(worker: Process | _Team) -> tuple[bool, int]:
            return self._finished[worker].error is not None, self._running[worker].number

        worker = min(self._finished, key=place_in_line)
        del self._running[worker]
        return self._finished.pop(worker)

    def _take_finished(self, seconds: float) -> None:
        """Take in the trials that end within some seconds, and end those that take too long."""
        running = [worker for worker in self._running if worker not in self._finished]
        worker_of: dict[object, Process | _Team] = {}
        handles = list[Connection | int]()
        for worker in running:
            handles += worker.handles
            worker_of |= dict.fromkeys(worker.handles, worker)
        # A trial that is over already does not wait for others.
        ready = wait(handles, 0 if self._finished else seconds)
        ready_workers = {worker_of[handle] for handle in ready}
        for worker in running:
            is_late = time.monotonic() - worker.started > self._seconds
            if worker not in ready_workers and not is_late:
                continue
            too_long: str | None = None
            if is_late:
                too_long = f"took longer than protocol.trial_seconds={self._seconds:g}"
            finished = worker.finish(self._running[worker], too_long)
            # A team's trial is over only once all of its processes have answered.
            if finished is not None:
                self._finished[worker] = finished


class Process:
    """One process that trains, and the connection to it.

    Attributes:
        has_failed: whether its last trial failed.
        trials: how many it has been sent.
        started: when its present trial began, in seconds of the monotonic clock.
    """

    def __init__(self, open_train: Callable[[], Train], log: TrialsLog | None) -> None:
        start_server()
        self.connection, childs_end = CONTEXT.Pipe()
        printed = None if log is None else log.pipe()
        arguments = (open_train, childs_end, dict(os.environ), known(), printed)
        self.process = CONTEXT.Process(target=_work, args=arguments)
        start_process(self.process)
        if printed is not None:
            printed.close()
        self.has_failed = False
        self.trials = 0
        self.started = time.monotonic()
        # While this process held the child's end too, a read would not tell of the child's death.
        childs_end.close()

    @property
    def handles(self) -> list[Connection | int]:
        """The handles that are ready once the process has answered, or has ended.

        :func:`multiprocessing.connection.wait` takes them.
        """
        return [self.connection, self.process.sentinel]

    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self.process.is_alive()

    @property
    def is_usable(self) -> bool:
        """Whether another trial can be trained in it."""
        return self.is_alive() and not self.has_failed

    def send(self, request: tuple[TrialSpec, Output, TrialResult | None]) -> None:
        """Send a trial to the process; its time begins here."""
        self.started = time.monotonic()
        self.trials += 1
        # An OSError says that the process has just died, which finish() will see.
        with suppress(OSError):
            self.connection.send(request)

    def call(self, method: str, *arguments: object, say: Callable[[str], None]) -> Any:
        """Call a method of the object with which the process trains, and return its value.

        ``say`` takes the lines that the method has for the user meanwhile.

        Raises:
            UserCodeError: where the process has ended without an answer.
            BstuneError: that the method raised.
        """
        # An OSError says that the process has just died, which is seen below.
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
                # Processes that the user's code has started end with it.
                self.kill()
                # If a signal to all processes of the study has ended it, that is raised here
                # meanwhile.
                time.sleep(SIGNAL_SECONDS)
                raise UserCodeError(f"the workload cannot be trained: {self._how_it_ended()}")

    def _message(self) -> SaidLine | CallAnswer | None:
        """Receive a line or the answer to a call; None if nothing has come."""
        with suppress(EOFError, OSError, *PICKLE_ERRORS):
            if self.connection.poll():
                message: SaidLine | CallAnswer = self.connection.recv()
                return message
        return None

    def _how_it_ended(self) -> str:
        """Say in words how the process has ended: by a signal, or with which status."""
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
        """Receive the answer to a trial; None if it has not come."""
        with suppress(EOFError, OSError, *PICKLE_ERRORS):
            if self.connection.poll():
                answer: Finished = self.connection.recv()
                self.has_failed = answer.record is None or answer.record.status == "failed"
                return answer
        return None

    def finish(self, spec: TrialSpec, too_long: str | None) -> Finished:
        """Receive the answer to a trial that is over or takes too long.

        Args:
            spec: of the trial.
            too_long: says that the trial took too long: the process is killed if it has not
                answered. None: it did not, and without an answer the process has died.
        """
        answer = self.receive()
        if answer is not None:
            return answer
        if too_long is not None:
            self.kill()
        self.process.join()
        # Processes that the user's code has started end with it.
        self.kill()
        reason = self._how_it_ended() if too_long is None else too_long
        seconds = time.monotonic() - self.started
        record = TrialResult.unmeasured(spec, "failed", message=reason, wall_seconds=seconds)
        return Finished(spec, record)

    def kill(self) -> None:
        """Kill the process, and those that the user's code has started in it."""
        interruption.kill(self.process)

    def end(self) -> None:
        """Wait for the process to end after :meth:`close`, and kill it if it goes on.

        A thread of the user's may keep it alive.
        """
        self.process.join(END_SECONDS)
        self.kill()
        self.process.join()


class _Team:
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

        Arguments as of :meth:`Process.finish`.
        """
        died = self._take_answers(seconds=0)
        start = time.monotonic()
        # Once one has answered, the others are waited for: they see alike that a loss diverges, and
        # say so within moments. One that died is looked for, as the others fail when they lose it.
        while self._answers and self._unanswered and not died and too_long is None:
            patience = END_SECONDS if self._failed else APART_SECONDS
            if time.monotonic() - start > patience:
                too_long = (
                    f"did not end with the others, {APART_SECONDS} s before: one stops where "
                    "another trains on"
                )
            died = self._take_answers(LOOK_SECONDS)
        if not self._unanswered:
            self.has_failed = any(rank.has_failed for rank in self._ranks)
            telling = self._failed or self._ranks
            return self._answers[telling[0]]
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


def _work(
    open_train: Callable[[], Train],
    connection: Connection,
    environment: Mapping[str, str],
    secrets: tuple[str, ...],
    printed: Connection | None = None,
) -> None:
    """Train trials and answer calls in this process, one at a time, until the connection closes.

    Args:
        open_train: is called at the first request; its function serves the later ones too.
        connection: brings requests and takes answers.
        environment: the environment variables of the process that asks.
        secrets: texts that are never printed.
        printed: takes what is printed; None: it goes where the fork server prints.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if printed is not None:
        for descriptor in (1, 2):
            os.dup2(printed.fileno(), descriptor)
        printed.close()
    # A crash says where the user's code was.
    faulthandler.enable(file=2)
    # Processes that the user's code starts here can then be killed with it, and end with the
    # parent.
    lead_group()
    # The fork server still has the environment of its own start.
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
        # The user's code may have forked this process: a copy answers nothing.
        if os.getpid() != process:
            os._exit(0)
        _send(connection, answer)


def _train_trial(
    task: tuple[TrialSpec, Output, TrialResult | None],
    train: Train | None,
    open_train: Callable[[], Train],
) -> tuple[Train | None, Finished]:
    """Train a trial in this process.

    Args:
        task: the spec, the folder, and the record of the trial that it continues.
        train: trains it; None: no trial has been trained yet, and ``open_train`` is called.
        open_train: returns the function that trains a trial.

    Returns:
        The function that trains trials (None: it could not be opened), and how the trial ended.
    """
    spec = task[0]
    start = time.monotonic()
    try:
        train = train or open_train()
        # The user's code may change the working directory: chdir puts it back.
        with chdir("."):
            return train, Finished(spec, train(*task))
    except BstuneError as error:
        return train, Finished(spec, error=error)
    # Whatever the user's code raises ends one trial, the SystemExit of sys.exit included.
    except BaseException as error:  # noqa: BLE001
        return train, failed(spec, error, time.monotonic() - start)


def _answer_call(
    call: Call, train: Train | None, open_train: Callable[[], Train], connection: Connection
) -> tuple[Train | None, CallAnswer]:
    """Call a method of the object that trains, in the process that was asked for it.

    The method gets two functions besides its arguments: ``say`` sends a line to the user, and
    ``end`` sends an error as the answer and ends this process. A call of ``os._exit`` in the user's
    code is answered as an error, too.

    Args:
        call: the method's name and its arguments.
        train: the object that trains; None: it is not open yet.
        open_train: opens it.
        connection: takes the lines, and the answer if the process ends.

    Returns:
        The object that trains (``train``, or what ``open_train`` returned; None: it could not be
        opened), and the answer.
    """
    # It is kept here, as os._exit is replaced while the user's code runs.
    leave = os._exit

    def say(line: str) -> None:
        _send(connection, SaidLine(line))

    def end(message: str) -> NoReturn:
        _send(connection, CallAnswer(error=UserCodeError(message)))
        leave(1)

    def answer_exit(message: str, status: int) -> NoReturn:
        # The process that gets the answer writes "error: " before it itself.
        end(message.removeprefix("error: "))

    try:
        # The user's code may change the working directory: chdir puts it back.
        with os_exit_answered(answer_exit), chdir("."):
            train = train or open_train()
            method = getattr(train, call.method)
            return train, CallAnswer(method(*call.arguments, say=say, end=end))
    except BstuneError as error:
        return train, CallAnswer(error=error, cause=_users_cause(error))
    except SystemExit as error:
        shown = sys_exit_error(error)
        return train, CallAnswer(error=untrainable(error), cause=_pickled(shown))
    # The user's code may raise anything else.
    except BaseException as error:  # noqa: BLE001
        return train, CallAnswer(error=untrainable(error), cause=_pickled(error))


# The watchdog's thread sends as well.
_sending = threading.Lock()


def _send(connection: Connection, message: SaidLine | CallAnswer | Finished) -> None:
    """Send a message whole, also where two threads send at a time."""
    with _sending:
        connection.send(message)


def _users_cause(error: BaseException) -> bytes | None:
    """Pickle the error of the user's code that one of bstune's errors comes from.

    None where it comes from none, or that cannot be pickled.
    """
    cause = error.__cause__
    while cause is not None and (isinstance(cause, BstuneError) or not in_users_code(cause)):
        cause = cause.__cause__
    if cause is None:
        return None
    return _pickled(cause)


def _pickled(error: BaseException) -> bytes | None:
    """Pickle an error; None where it does not pickle, or cannot be loaded again.

    None also for what is no ``Exception``, such as a SystemExit: as the cause of another error it
    would tell the user nothing.
    """
    # It is imported here, as a process that trains has imported cloudpickle anyway, and others need
    # not.
    import cloudpickle

    if not isinstance(error, Exception):
        return None
    try:
        pickled: bytes = cloudpickle.dumps(error)
        # Some errors pickle, but do not load.
        pickle.loads(pickled)  # noqa: S301 (what was pickled here)
    except Exception:  # noqa: BLE001 (the user's classes may raise anything)
        return None
    return pickled


def start_process(process: BaseProcess) -> None:
    """Start a process that does not import the caller's script.

    multiprocessing would import the script there, whether it is guarded or not.
    """
    with temporarily(sys.modules, "__main__", ModuleType("__main__")):
        process.start()


def lead_group() -> None:
    """Let this process lead a process group, which processes of the user's code then belong to.

    The group can be ended as one. It is killed when the parent process ends.
    """
    os.setpgrp()
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Wait for the parent process to end, and kill this process's group.

    A parent that was killed could not end it: a trial that nobody records would train on.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.killpg(0, signal.SIGKILL)
