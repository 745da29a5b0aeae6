"""A process of its own to which functions are sent; whatever becomes of it is a result.

A *template* process imports what the functions need, once, and forks the process that calls them.
Where that one dies the template says how, and forks the next one. Both end with the process that
started them. Unlike multiprocessing's start methods this does not import the user's script again.
"""

import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, Self

import cloudpickle

from bstune.core.errors import BstuneError, InputError, UserCodeError
from bstune.system.failures import last_lines, one_line, where_in_dump
from bstune.system.files import appending
from bstune.trial.by_value import import_in_order, send_by_value, users_modules

# The number of a function that the template gives, which knows none.
ANY_NUMBER = 0
# Seconds that a process takes at most to end once its socket is closed.
EXIT_SECONDS = 1.0
# Seconds between two messages that a function makes progress.
PROGRESS_SECONDS = 0.2
# Seconds between two looks at a worker.
POLL_SECONDS = 0.2
# A process that gets it writes where its code is; on a busy machine that takes a while.
TELL_WHERE = signal.SIGUSR2
TELLING_SECONDS = (0.05, 0.2, 1.0)
# The most of what a process has printed that is read once it is dead.
LOG_BYTES = 65_536
# The template's program; the user's modules are found where this process finds them, and read the
# same command line.
PROGRAM = """
import sys
sys.path[:] = {path!r}
sys.argv[:] = {argv!r}
from bstune.trial import worker
worker.run_template{arguments!r}
"""
# torch counts devices through NVML, without starting CUDA, which no forked process could use then.
ENVIRONMENT = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


@dataclass(frozen=True)
class Returned:
    """What a function returned."""

    value: Any


@dataclass(frozen=True)
class Failure:
    """Why a function returned nothing: it raised, or its process died or was ended."""

    reason: str
    """In one line, such as ``its process was ended by SIGSEGV``."""
    refusal: BstuneError | None = None
    """What bstune itself refused, such as a metric that is not logged."""


class AnyWorker(Protocol):
    """What calls functions: one process, several that train together, or this one."""

    @property
    def told(self) -> str:
        """What the function said last of its progress."""

    @property
    def silent_seconds(self) -> float:
        """Seconds since a function was sent, or its process said something."""

    def start(self) -> None:
        """Begin to import what functions need."""

    def submit(self, function: Callable[..., Any], *args: Any) -> None:
        """Send a function, which is called as ``function(*args)``."""

    def poll(self, seconds: float) -> Returned | Failure | None:
        """Wait for what became of it, at most so long; None while it works."""

    def kill(self, limit: float) -> None:
        """End a process that said nothing for so many seconds; the next poll gives a Failure."""

    def close(self) -> None:
        """End the process, if one was started."""


class Worker:
    """Calls functions in another process, one at a time; it starts at the first one.

    A study has one for each trial, or device, that trains at once.

    Args:
        log: gets what the process prints.
        preload: modules that are imported once, before the first function.
        environment: variables of its own.
    """

    def __init__(
        self,
        log: Path,
        preload: Sequence[str] = ("torch", "lightning.pytorch"),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._log = log
        self._preload = tuple(preload)
        self._environment = environment or {}
        self._process: subprocess.Popen[bytes] | None = None
        self._function_number = 0
        self._killed_because: Failure | None = None
        self._last_heard = time.monotonic()
        self._has_started = False
        self.told = ""
        """What the function said last of its progress."""

    def start(self) -> None:
        """Begin to import the modules, before there is a function to call."""
        if self._process is not None:
            return
        with appending(self._log) as log:
            self._log_start = log.tell()
            ours, theirs = socket.socketpair()
            # It closes when this process dies, however it dies: then the template ends the others.
            lifeline_end, self._lifeline = os.pipe()
            self._has_started = False
            # How the script starts the processes of its loaders; None: as Python does.
            start_method = multiprocessing.get_start_method(allow_none=True)
            arguments = (theirs.fileno(), lifeline_end, self._preload, start_method)
            self._process = subprocess.Popen(  # noqa: S603 (it is this package)
                [
                    *(sys.executable, "-u", "-X", "faulthandler", "-c"),
                    PROGRAM.format(path=sys.path, argv=sys.argv, arguments=arguments),
                ],
                env={**ENVIRONMENT, **os.environ, **self._environment},
                pass_fds=arguments[:2],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        theirs.close()
        os.close(lifeline_end)
        self._connection = Connection(ours.detach())

    def submit(self, function: Callable[..., Any], *args: Any) -> None:
        """Send a function, which is called as ``function(*args)``; the last one has to be over."""
        task = _dump_task(function, args)
        self._function_number += 1
        self._killed_because = None
        self._last_heard = time.monotonic()
        self.told = ""
        self.start()
        try:
            # That a process died between two functions is no outcome of this one.
            while self._connection.poll():
                self._connection.recv()
                self._has_started = True
            self._connection.send((self._function_number, task))
        except (EOFError, OSError):
            self._end_processes()
            self.start()
            self._connection.send((self._function_number, task))

    def poll(self, seconds: float) -> Returned | Failure | None:
        """Wait for what became of the function, at most so long; None while it works."""
        if self._killed_because is not None:
            return self._killed_because
        end = time.monotonic() + seconds
        while self._connection.poll(max(0.0, end - time.monotonic())):
            try:
                number, message = self._connection.recv()
            except (EOFError, OSError, pickle.UnpicklingError):
                status = self._end_processes(patience=EXIT_SECONDS)
                return self._failure_by_death(_how_ended(status))
            self._last_heard = time.monotonic()
            self._has_started = True
            if isinstance(message, str):
                self.told, message = message, None
            if message is not None and number in (self._function_number, ANY_NUMBER):
                outcome: Returned | Failure | str = pickle.loads(message)  # noqa: S301 (ours)
                if isinstance(outcome, str):
                    outcome = self._failure_by_death(outcome)
                self._log_start = self._log.stat().st_size
                return outcome
        return None

    def _failure_by_death(self, how: str) -> Failure:
        """Say how the process ended, with its last lines since the function before."""
        lines = last_lines(self._printed_since(self._log_start))
        return Failure(f"its process {how}: {lines}" if lines else f"its process {how}")

    def _printed_since(self, start: int) -> str:
        """What stands in the log from a position on; of much of it, the end."""
        with self._log.open("rb") as log:
            log.seek(max(start, self._log.stat().st_size - LOG_BYTES))
            return log.read().decode(errors="replace")

    @property
    def silent_seconds(self) -> float:
        """Seconds since a function was sent, or its process said something.

        While it imports the modules that it starts with, which a busy machine makes slow, it is 0.
        """
        return time.monotonic() - self._last_heard if self._has_started else 0.0

    def kill(self, limit: float) -> None:
        """End the process and those that it started; the next poll gives a Failure.

        Its reason ends with the user's file and line at which one of them was.

        Args:
            limit: seconds that the process may say nothing for, and did.
        """
        reason = f"it said nothing for {limit:.0f} s; trial_seconds sets that limit"
        place = self._where_it_is()
        self._end_processes()
        self._killed_because = Failure(f"{reason} ({place})" if place else reason)

    def _where_it_is(self) -> str:
        """The user's file and line at which the process, or a loader's, is; empty: unknown."""
        if self._process is None:
            return ""
        start = self._log.stat().st_size
        for worker in _children(self._process.pid):
            for pid in (worker, *_children(worker)):
                # One after another: their lines would be mixed.
                before = self._log.stat().st_size
                with suppress(ProcessLookupError):
                    os.kill(pid, TELL_WHERE)
                for wait in TELLING_SECONDS:
                    time.sleep(wait)
                    if self._log.stat().st_size > before:
                        break
        return where_in_dump(self._printed_since(start))

    def close(self) -> None:
        """End the process, if one was started."""
        self._end_processes()

    def _end_processes(self, patience: float = 0.0) -> int:
        """End both processes, and what they started; the template's exit status.

        Args:
            patience: seconds in which the template may end by itself.
        """
        if self._process is None:
            return 0
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        status = self._process.wait()
        self._process = None
        self._connection.close()
        os.close(self._lifeline)
        return status

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class InProcess:
    """Calls functions in this process, for a debugger; it is used as a :class:`Worker`."""

    silent_seconds = 0.0
    told = ""

    def start(self) -> None:
        """Do nothing: there is no process."""

    def submit(self, function: Callable[..., Any], *args: Any) -> None:
        """Keep a function, which the next poll calls."""
        self._task = _dump_task(function, args)

    def poll(self, seconds: float) -> Returned | Failure | None:
        """Call the function, however long it takes."""
        return _call_task(self._task)

    def kill(self, limit: float) -> None:
        """Do nothing: nothing runs between two calls."""

    def close(self) -> None:
        """Do nothing: there is no process."""


def call(
    worker: AnyWorker, function: Callable[..., Any], *args: Any, limit: float
) -> Returned | Failure:
    """Send a function and wait for what becomes of it.

    Look-ups, preflight and survey are called so; trials by
    :func:`bstune.study.loop.train_in_worker`.

    Args:
        worker: that calls it.
        function, args: what is called, as in :meth:`Worker.submit`.
        limit: seconds that it may say nothing for; then its process is ended.
    """
    worker.submit(function, *args)
    while (outcome := worker.poll(POLL_SECONDS)) is None:
        if worker.silent_seconds > limit:
            worker.kill(limit)
    return outcome


def value_of(outcome: Returned | Failure) -> Any:
    """What a function returned.

    Raises:
        BstuneError: what bstune itself refused; UserCodeError for any other failure.
    """
    if isinstance(outcome, Failure):
        raise outcome.refusal or UserCodeError(outcome.reason)
    return outcome.value


def _dump_task(function: Callable[..., Any], args: Sequence[Any]) -> bytes:
    """Write a function down for another process; InputError if something in it cannot be."""
    try:
        called = cloudpickle.dumps((function, args))
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        raise InputError(
            f"module and data cannot be sent to another process ({error}): give a function that "
            f"builds what holds files or locks, such as data=lambda: MyData()"
        ) from error
    return pickle.dumps((users_modules(), called))


def _call_task(task: bytes) -> Returned | Failure:
    """Call a function that was sent."""
    try:
        tell_where_on_signal()
        modules, called = pickle.loads(task)  # noqa: S301 (from our process)
        for name in modules:
            import_in_order([name])
            tell_progress()
        send_by_value(modules)
        # What the function says first is told at once.
        _Progress.told = 0.0
        function, args = cloudpickle.loads(called)
        return Returned(function(*args))
    # The user's code may raise anything, or call sys.exit.
    except (Exception, SystemExit) as error:  # noqa: BLE001
        refusal = error if isinstance(error, BstuneError) else None
        return Failure(one_line(error), refusal)


class _Progress:
    """Says now and then that the function works, in the process that calls it."""

    connection: Connection | None = None
    number = 0
    told = 0.0


def tell_progress(what: Callable[[], str] = str) -> None:
    """Say that the function which is called here works; elsewhere it does nothing.

    Trainings call it in each batch and evaluation: a process that says nothing for long hangs.

    Args:
        what: gives what it has come to.
    """
    now = time.monotonic()
    if _Progress.connection is not None and now - _Progress.told > PROGRESS_SECONDS:
        _Progress.told = now
        _Progress.connection.send((_Progress.number, what()))


def tell_where_on_signal() -> None:
    """Let ``TELL_WHERE`` show where the code is; each fit asks, as Lightning ends it."""
    if _Progress.connection is not None:
        # What is registered already is not registered again.
        faulthandler.unregister(TELL_WHERE)
        faulthandler.register(TELL_WHERE, all_threads=False)


def run_template(
    descriptor: int, lifeline: int, preload: Sequence[str], start_method: str | None
) -> None:
    """Be the template: import modules, and fork a process whenever there is none.

    ``PROGRAM``, which a :class:`Worker` starts, does nothing else.

    Args:
        descriptor: of the socket on which functions come.
        lifeline: a pipe that closes when the worker's owner dies.
        preload: names of modules.
        start_method: of the processes that a loader starts; None: Python's default.
    """
    os.set_inheritable(descriptor, False)
    os.set_inheritable(lifeline, False)
    # Ctrl-C is for the owner, which ends these processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Looking for garbage meanwhile takes a fourth of the time, and a module is never any.
    gc.disable()
    for name in preload:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    multiprocessing.set_start_method(start_method, force=True)
    connection = Connection(descriptor)
    connection.send((ANY_NUMBER, None))
    while True:
        child = os.fork()
        if child == 0:
            os.close(lifeline)
            _serve(connection)
            os._exit(0)
        ended = os.pidfd_open(child)
        ready, _, _ = select.select([ended, lifeline], [], [])
        if lifeline in ready:
            os.killpg(0, signal.SIGKILL)
        os.close(ended)
        _, status = os.waitpid(child, 0)
        # Only the process writes while it lives, and only the template once it is dead.
        _send_outcome(connection, ANY_NUMBER, _how_ended(os.waitstatus_to_exitcode(status)))


def _children(pid: int) -> list[int]:
    """Processes that a process has started."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    return []


def _serve(connection: Connection) -> None:
    """Call functions as they come, until the other side closes."""
    _Progress.connection = connection
    while True:
        try:
            number, task = connection.recv()
        except (EOFError, OSError):
            return
        _Progress.number = number
        outcome = _call_task(task)
        try:
            _send_outcome(connection, number, outcome)
        # The answer may be of a class that pickle cannot write, which raises anything.
        except Exception as error:  # noqa: BLE001
            _send_outcome(connection, number, Failure(one_line(error)))


def _send_outcome(connection: Connection, number: int, outcome: Returned | Failure | str) -> None:
    """Send what became of a function; a text says how its process ended."""
    connection.send((number, cloudpickle.dumps(outcome)))


def _how_ended(status: int) -> str:
    """Say how a process ended, by its exit status; that of a signal is negative."""
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"
