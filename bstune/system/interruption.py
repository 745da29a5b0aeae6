"""SIGINT and SIGTERM end the command within seconds: by one KeyboardInterrupt, then by force.

A handler in Python runs only where the main thread comes back to Python, and what it raises may be
lost in a callback. So a thread reads the signals as the system writes them, and ends the process if
it has not ended by itself.
"""

import logging
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import NoReturn

# Seconds from a signal to the end by force, for storing what has finished and ending other
# processes. Five are promised.
FORCED_END_SECONDS = 4.0
# Seconds from a signal until nobody waits any longer for the fork server to start a process.
SERVER_SECONDS = 1.0
# Seconds for writing out what was printed: the thread that prints may hang.
FLUSH_SECONDS = 1.0
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stage(Enum):
    """What a command is doing; the values say what an interruption leaves."""

    PREPARATION = "nothing was trained yet; trials of an earlier run, if any, stay stored"
    SEARCH = "every finished trial is stored; the same command continues the study"
    REPORT = "every trial is stored; the same command writes the rest of the report"
    SINGLE = (
        "the trial was cut short, and nothing of it is stored; the same command starts it again"
    )


def text() -> str:
    """Say what the interruption of this process's command leaves."""
    return f"interrupted: {stage.value}"


# What this process's command is doing.
stage = Stage.PREPARATION
# The first signal's number; None before any.
received: int | None = None
# The exit status of a command that is through; None before.
last_status: int | None = None
_installed = False
_raised = False
# The temporary folders of this process, which an end by force removes.
_folders: set[str] = set()
# Python's own os._exit, which is replaced while the user's code runs.
_leave = os._exit


def install() -> None:
    """Handle SIGINT and SIGTERM from now on, in the main thread of a command."""
    global _installed
    _installed = True
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    # Python writes each signal's number to the pipe at once, and a thread reads it. So a signal is
    # seen even where the main thread cannot call a handler, as within a long call of C code.
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reading,), name="bstune-signals", daemon=True).start()
    for number in SIGNALS:
        signal.signal(number, _interrupt)


def is_installed() -> bool:
    """Whether this process is a command, which may be ended; else it is the user's own."""
    return _installed


def _folder_prefix(process_id: int) -> str:
    """Make the beginning of the names of a process's temporary folders."""
    return f"bstune-{process_id}-"


@contextmanager
def temporary_folder() -> Iterator[str]:
    """Make a temporary folder for the body, and remove it afterwards.

    It is also removed where this process ends by force, and :func:`kill` removes the folders of a
    process that it kills.
    """
    with tempfile.TemporaryDirectory(prefix=_folder_prefix(os.getpid())) as folder:
        _folders.add(folder)
        try:
            yield folder
        finally:
            _folders.discard(folder)


def enter_stage(new_stage: Stage) -> None:
    """Note what the command is doing from here on."""
    global stage
    stage = new_stage


def note(number: int) -> None:
    """Remember the number of the first signal that a command gets.

    Every handler of SIGINT or SIGTERM calls it, also those that other modules install for a while.
    In a process of the user's own nothing is remembered.
    """
    global received
    if _installed and received is None:
        received = number
        # Python would print the traceback of a KeyboardInterrupt that a callback cannot raise.
        sys.unraisablehook = lambda _: None


def status() -> int | None:
    """Compute the exit status of a command that was interrupted; None if it was not.

    It is 128 plus the signal's number, as a shell has it.
    """
    if received is None:
        return None
    return 128 + received


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Handle a signal: the first one raises KeyboardInterrupt."""
    global _raised
    note(number)
    # A second one must not cut what the first one has begun to clean up.
    if not _raised:
        _raised = True
        raise KeyboardInterrupt


def leave(status: int) -> NoReturn:
    """End this process and those that it started at once, with an exit status.

    What libraries do at the end, which may take long, is left out.
    """
    for process in multiprocessing.active_children():
        kill(process)
    _remove_server_and_folders()
    _leave(status)


def _remove_server_and_folders() -> None:
    """Kill multiprocessing's fork server, and remove this process's temporary folders."""
    _kill_fork_server()
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    # multiprocessing notes here the folder that it made for its fork server; None: it made none.
    for folder in {*_folders, config.get("tempdir")} - {None}:
        shutil.rmtree(folder, ignore_errors=True)


def leave_last() -> None:
    """End a finished command at once, without Python's own clean-up.

    To take torch's modules apart Python would need up to four seconds (torch 2.13, two CPU cores
    under load). It is an exit function of :mod:`atexit`, registered before all others but
    multiprocessing's, so that it runs after them; multiprocessing's never runs.
    """
    # The command set no status: it ended with an error that Python itself is to print.
    if last_status is None:
        return
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        # Nobody may read it any more.
        with suppress(OSError, ValueError):
            stream.flush()
    _remove_server_and_folders()
    _leave(last_status)


def end(text: str, status: int) -> NoReturn:
    """Write an error and end this process by force, from any thread, whatever the others do.

    ``status`` is its exit status.
    """
    # Flushing may hang, as on a pipe that nobody reads. A thread does it, and is waited for
    # FLUSH_SECONDS at most.
    flushing = threading.Thread(target=sys.stdout.flush, daemon=True)
    # No thread starts where the interpreter is ending already, and has flushed.
    with suppress(RuntimeError):
        flushing.start()
        flushing.join(FLUSH_SECONDS)
    # A live line hides the cursor: it is cleared, and the cursor shown.
    if sys.stdout.isatty():
        text = f"\r\x1b[2K\x1b[?25h{text}"
    os.write(2, text.encode(errors="replace"))
    leave(status)


def kill(process: BaseProcess) -> None:
    """Kill a process and all in its group, and remove its temporary folders.

    The group holds what the user's code has started in it.
    """
    process.kill()
    if not process.pid:
        return
    # There is no such group if all its processes have ended, or if the process has just been forked
    # and leads none yet.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for folder in Path(tempfile.gettempdir()).glob(f"{_folder_prefix(process.pid)}*"):
        shutil.rmtree(folder, ignore_errors=True)


def _kill_fork_server() -> None:
    """Kill multiprocessing's fork server, if there is one.

    While it imports torch it answers no request, so it cannot be asked to end.
    """
    server = getattr(forkserver._forkserver, "_forkserver_pid", None)
    if server is not None:
        with suppress(ProcessLookupError):
            os.kill(server, signal.SIGKILL)


def _watch(reading: int) -> None:
    """Wait in a thread for one of the two signals, and end the process if it does not end itself.

    ``reading`` is the descriptor that the system writes the signals' numbers to.
    """
    number = 0
    # Other signals have handlers in Python, too.
    while number not in SIGNALS:
        (number,) = os.read(reading, 1)
    note(number)
    time.sleep(SERVER_SECONDS)
    # The main thread may wait for the fork server to start a process. Killing it ends that wait.
    _kill_fork_server()
    time.sleep(FORCED_END_SECONDS - SERVER_SECONDS)
    end(
        f"interrupted: ended by force, as it did not end within {FORCED_END_SECONDS:g} s\n",
        128 + number,
    )
