"""Where trials run: in processes of their own, while this one keeps the study, or in this one (``search.workers``).

What a user's code does in a process of its own, such as a crash or a step that never ends, is the end of one trial.
The processes are forked by multiprocessing's fork server, which has imported what all of them need and never touches
the device: CUDA does not survive a fork. This module imports neither torch nor lightning.

An exception, ``sys.exit``, a crash or want of memory ends one trial: ``failed``, with the message and
the line of the user's file; ``diverged`` where the loss was no longer finite before; or ``out of
memory``. A failed point is tried once more. Three failures in a row end the study with status 1, and
the same command continues it. ``protocol.trial_seconds`` ends what never ends.
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
from typing import Any, NoReturn, Protocol, Self

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

Train = Callable[[TrialSpec, Output, TrialResult | None], TrialResult]
CONTEXT = multiprocessing.get_context("forkserver")
PRELOAD = ["bstune.trial.workload"]
LOOK_SECONDS = 0.2  # between two looks for a signal, while trials train
APART_SECONDS = (
    30  # between the ends of the processes of one trial, which end together but for writing files
)
END_SECONDS = 2  # that a process may take to end once it has nothing to do
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
def temporarily(mapping: MutableMapping[str, Any], key: str, value: Any) -> Iterator[None]:
    """Set a key of a mapping, such as ``os.environ``, while the body runs."""
    before = mapping.get(key)
    mapping[key] = value
    try:
        yield
    finally:
        if before is None:
            del mapping[key]
        else:
            mapping[key] = before


def start_server() -> None:
    """Start the fork server, which begins to import at once, while this process goes on; once is enough."""
    CONTEXT.set_forkserver_preload(PRELOAD)
    # Lets torch answer whether there is CUDA without touching the device, which the server must not before it forks.
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
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler if handler is not None else signal.SIG_DFL)


def mps_runs() -> bool:
    """Return whether NVIDIA's Multi-Process Service runs, by its control daemon's pipe (docs.nvidia.com/deploy/mps)."""
    folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")  # its own default  # noqa: S108
    return Path(folder, "control").exists()


@dataclass(frozen=True)
class Finished:
    """A trial that is over: its record, or the error that ends the study; of a failed one also the user's frames."""

    spec: TrialSpec
    record: TrialResult | None = None
    error: BstuneError | None = None
    frames: str = ""
    cause: Exception | None = None  # that a trial in this process failed with
    # Whether a loop of the user's has left it at its last report, short of where it was to be compared.
    is_cut: bool = False

    def result(self) -> TrialResult:
        """Return the record, or raise the error."""
        if self.record is None:
            raise self.error or RuntimeError(
                f"trial {self.spec.number} is over with neither record nor error"
            )
        return self.record


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
    def free(self) -> bool: ...  # noqa: D102 (as those of Workers)
    @property
    def running(self) -> list[TrialSpec]: ...  # noqa: D102
    def start(self, spec: TrialSpec, output: Output, resumed_from: TrialResult | None) -> None: ...  # noqa: D102
    def wait(self) -> Finished: ...  # noqa: D102
    def poll(self) -> Iterator[Finished]: ...  # noqa: D102


def failed(spec: TrialSpec, error: BaseException, seconds: float) -> Finished:
    """Return a trial that an error of the user's code ended, with the frames of the user's own files.

    A full disk is no error of that code: every trial would fail.
    """
    if (full := full_disk(error)) is not None:
        return Finished(spec, error=full)
    message, frames = described(error)
    return Finished(
        spec,
        TrialResult.unmeasured(spec, "failed", message=message, wall_seconds=seconds),
        frames=frames,
    )


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
    return replace(
        result, seconds_per_step=float(step_time(result.batch_size)), measured_seconds_per_step=own
    )


class Workers:
    """``count`` processes that train one trial each at a time; a context, at whose end they are gone.

    ``open_train``, which is pickled, is called once in each process and returns what trains a trial. A trial that takes
    longer than ``seconds``, the start of its process among them, has failed. With several ``devices`` each of the
    ``count`` is as many processes, which train one trial together. After ``trials`` trials a process is replaced by a
    fresh one, as what is compiled keeps memory. What they print goes to ``log``; None: to this
    process's output. Of ``kept`` a process that has nothing to do is used first, and put back at
    the end. An interruption or a termination signal is raised by :meth:`start`, :meth:`wait` or
    the end, where nothing is cut; a second one at once.
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
        self._open_train, self.count, self._devices = open_train, count, devices
        self._log = log
        self._kept = kept
        self._seconds, self._trials = (
            math.inf if limit is None else limit for limit in (seconds, trials)
        )
        self._workers: list[Process | _Team] = []
        self._running: dict[Process | _Team, TrialSpec] = {}
        self._finished: dict[Process | _Team, Finished] = {}  # of those that run, not yet returned
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
            idle = [one for one in self._workers if isinstance(one, Process) and one.is_usable]
            self._kept += idle[:1]
            self._workers = [one for one in self._workers if one not in self._kept]
        for worker in self._workers:
            if (
                kind is not None
            ):  # Lightning would put off the signal to terminate until a batch is done
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
        """Train a trial in a process that has nothing to do, as :meth:`bstune.trial.backend.TrialBackend.run` does."""
        self._check()
        for free in [worker for worker in self._workers if worker not in self._running]:
            # One that was ended while it had nothing to do is replaced, as is one after an error, which may have left
            # anything behind: after an assertion of CUDA, its device computes nothing any more.
            if free.has_failed or not free.is_alive() or free.trials >= self._trials:
                free.close()
                free.end()
                self._workers.remove(free)
        worker = next((worker for worker in self._workers if worker not in self._running), None)
        if worker is None:
            worker = (
                Process(self._open_train, self._log)
                if self._devices == 1
                else _Team(self._open_train, self._devices, self._log)
            )
            self._workers.append(worker)
        self._running[worker] = spec
        worker.send((spec, output, resumed_from))

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
        handles = {handle: worker for worker in running for handle in worker.handles}
        over = {handles[handle] for handle in wait(list(handles), 0 if self._finished else seconds)}
        for worker in running:
            late = time.monotonic() - worker.started > self._seconds
            if worker in over or late:
                too_long = f"took longer than protocol.trial_seconds={self._seconds:g}"
                finished = worker.finish(self._running[worker], too_long if late else None)
                if finished is not None:  # all of a team
                    self._finished[worker] = finished
        if not self._finished:
            return None
        worker = min(
            self._finished,
            key=lambda w: (self._finished[w].error is not None, self._running[w].number),
        )
        del self._running[worker]
        return self._finished.pop(worker)


class Process:
    """One process that trains, and the connection to it."""

    def __init__(self, open_train: Callable[[], Train], log: TrialsLog | None) -> None:
        start_server()
        self.connection, other = CONTEXT.Pipe()
        printed = None if log is None else log.pipe()
        self.process = CONTEXT.Process(
            target=_work, args=(open_train, other, dict(os.environ), known(), printed)
        )
        start_process(self.process)
        if printed is not None:
            printed.close()
        self.has_failed, self.trials = False, 0
        self.started = time.monotonic()
        other.close()

    @property
    def handles(self) -> list[Any]:
        """What :func:`multiprocessing.connection.wait` waits for: an answer, or the process's end."""
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
        with suppress(OSError):  # it has just died, and the trial with it
            self.connection.send(request)

    def call(self, method: str, *arguments: object, say: Callable[[str], None]) -> Any:
        """Call a method of what the process has opened; ``say`` takes the lines that it says meanwhile.

        Raises:
            UserCodeError: where the process has ended without an answer.
            BstuneError: that the method raised.
        """
        with suppress(OSError):  # it has just died
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
                self.kill()  # what it has started
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
        """Return the answer to a trial if it has come."""
        with suppress(EOFError, OSError, *PICKLE_ERRORS):
            if self.connection.poll():
                answer: Finished = self.connection.recv()
                self.has_failed = answer.record is None or answer.record.status == "failed"
                return answer
        return None

    def finish(self, spec: TrialSpec, too_long: str | None) -> Finished:
        """Receive the answer to a trial; without one the process has ended, or is killed as it took ``too_long``."""
        if (answer := self.receive()) is not None:
            return answer
        if too_long is not None:
            self.kill()
        self.process.join()
        self.kill()  # what it has started
        reason = self._end() if too_long is None else too_long
        seconds = time.monotonic() - self.started
        return Finished(
            spec, TrialResult.unmeasured(spec, "failed", message=reason, wall_seconds=seconds)
        )

    def kill(self) -> None:
        """Kill the process, and those that the user's code has started in it."""
        interruption.kill(self.process)

    def end(self) -> None:
        """Wait for a process whose connection is closed, and kill what goes on, such as a thread of the user's."""
        self.process.join(END_SECONDS)
        self.kill()
        self.process.join()


class _Team:
    """A process for each of several devices, which train one trial together; used as a :class:`Process`."""

    def __init__(
        self, open_train: Callable[[], Train], devices: int, log: TrialsLog | None
    ) -> None:
        # An empty file is all that the processes find each other by: no port that another program may have taken.
        descriptor, self._store = tempfile.mkstemp(prefix="bstune-")
        os.close(descriptor)
        opens = [
            partial(_open_rank, open_train, rank, devices, self._store) for rank in range(devices)
        ]
        self._ranks = [Process(open_rank, log) for open_rank in opens]
        self._answers: dict[Process, Finished] = {}
        self.has_failed, self.trials = False, 0
        self.started = time.monotonic()

    @property
    def handles(self) -> list[Any]:
        return [handle for rank in self._missing for handle in rank.handles]

    def is_alive(self) -> bool:
        return all(rank.is_alive() for rank in self._ranks)

    def send(self, request: tuple[TrialSpec, Output, TrialResult | None]) -> None:
        self.started = time.monotonic()
        self.trials += 1
        self._answers.clear()
        for rank in self._ranks:
            rank.send(request)

    def finish(self, spec: TrialSpec, too_long: str | None) -> Finished | None:
        """Return the first process's answer once all have answered, or what ended one of them; None before that.

        The others would wait for it for ever, in an exchange of gradients: they are killed.
        """
        died = self._look(0)
        start = time.monotonic()
        # What all of them see alike, as a loss that diverges, all of them say within moments; one that died is looked
        # for, as it makes others fail that lose it.
        while self._answers and self._missing and not died and too_long is None:
            if time.monotonic() - start > (END_SECONDS if self._failed else APART_SECONDS):
                too_long = f"did not end with the others, {APART_SECONDS} s before: one stops where another trains on"
            died = self._look(LOOK_SECONDS)
        if not self._missing:
            self.has_failed = any(rank.has_failed for rank in self._ranks)
            return self._answers[(self._failed or self._ranks)[0]]
        if not self._failed and not died and too_long is None:
            return None
        cause = (died or self._failed or self._missing)[0]
        answer = self._answers[cause] if cause in self._answers else cause.finish(spec, too_long)
        self.has_failed = True
        self.kill()
        return answer

    @property
    def _missing(self) -> list[Process]:
        return [rank for rank in self._ranks if rank not in self._answers]

    @property
    def _failed(self) -> list[Process]:
        """The processes whose answer need not be that of the others."""
        ends = {
            rank: answer.record.status if answer.record else None
            for rank, answer in self._answers.items()
        }
        return [
            rank
            for rank in self._ranks
            if rank in ends and ends[rank] not in ("reached", "stopped")
        ]

    def _look(self, seconds: float) -> list[Process]:
        """Take the answers that come within some seconds, and return the processes that died without one."""
        wait(self.handles, seconds)
        answers = {rank: rank.receive() for rank in self._missing}
        self._answers |= {rank: answer for rank, answer in answers.items() if answer is not None}
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
    """Return what trains a trial in one of the processes that share it."""
    from bstune.trial.devices.distributed import join  # torch, in the trial's process alone

    join(rank, devices, store)
    return open_train()


def _work(
    open_train: Callable[[], Train],
    connection: Connection,
    environment: Mapping[str, str],
    secrets: tuple[str, ...],
    printed: Connection | None = None,
) -> None:
    """Train trials in this process, a worker, until the connection is closed.

    What is printed goes to ``printed``; None: to where the fork server's goes.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if printed is not None:
        for descriptor in (1, 2):
            os.dup2(printed.fileno(), descriptor)
        printed.close()
    # A crash says where the user's code was.
    faulthandler.enable(file=2)
    lead_group()
    os.environ.update(environment)  # the fork server's is that of its start
    know(secrets)
    install_filters()
    process = os.getpid()
    train: Train | None = None
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        start = time.monotonic()
        if isinstance(request, Call):
            train, reply = _answer(request, train, open_train, connection)
            if os.getpid() != process:  # the user's code has forked, and this is the copy
                os._exit(0)
            _send(connection, reply)
            continue
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


def _answer(
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

    leave = os._exit
    try:
        with os_exit_answered(end_exit), chdir("."):
            train = train or open_train()
            return train, CallAnswer(getattr(train, call.method)(*call.arguments, say=say, end=end))
    except BstuneError as error:
        return train, CallAnswer(error=error, cause=_users_cause(error))
    except BaseException as error:  # noqa: BLE001 (sys.exit too: whatever the user's code raises)
        shown = sys_exit_error(error) if isinstance(error, SystemExit) else error
        return train, CallAnswer(error=untrainable(error), cause=_pickled(shown))


# The watchdog's thread sends as well.
_sending = threading.Lock()


def _send(connection: Connection, message: SaidLine | CallAnswer) -> None:
    with _sending:
        connection.send(message)


def _users_cause(error: BaseException) -> bytes | None:
    """Pickle what the user's code raised behind one of bstune's errors; None: nothing that can be."""
    cause = error.__cause__
    while cause is not None and (isinstance(cause, BstuneError) or not in_users_code(cause)):
        cause = cause.__cause__
    return None if cause is None else _pickled(cause)


def _pickled(error: BaseException) -> bytes | None:
    import cloudpickle  # in the process of a study that trains, which has imported it

    if not isinstance(error, Exception):
        return None
    try:
        pickled: bytes = cloudpickle.dumps(error)
        pickle.loads(pickled)  # noqa: S301 (what was pickled here; not all that pickles loads)
    except Exception:  # noqa: BLE001 (the user's classes may raise anything)
        return None
    return pickled


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
        os.killpg(
            0, signal.SIGKILL
        )  # killed, it could not end us: a trial that nobody records would train on
