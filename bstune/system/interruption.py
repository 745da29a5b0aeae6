"""SIGINT and SIGTERM end the command within seconds, whatever it is doing: one KeyboardInterrupt, then by force.

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

# For storing what has finished and ending other processes; five are promised.
FORCED_END_SECONDS = 4.0
# After which whoever waits for the fork server to start a process waits no longer.
SERVER_SECONDS = 1.0
# For what is printed and not yet written: the thread that prints may stand.
FLUSH_SECONDS = 1.0
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stage(Enum):
    """What a command does, with what an interruption of it leaves, in words."""

    PREPARATION = "nothing was trained yet; trials of an earlier run, if any, stay stored"
    SEARCH = "every finished trial is stored; the same command continues the study"
    REPORT = "every trial is stored; the same command writes the rest of the report"
    SINGLE = (
        "the trial was cut short, and nothing of it is stored; the same command starts it again"
    )


# Of this process's command.
stage = Stage.PREPARATION
# The first signal's number.
received: int | None = None
# Of a command that is through.
last_status: int | None = None
_installed = False
_raised = False
# Temporary ones, which an end by force removes.
_folders: set[str] = set()
# Kept, as it is replaced while the user's code runs.
_leave = os._exit


def install() -> None:
    """Handle both signals from now on, in the main thread of a command."""
    global _installed
    _installed = True
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reading,), name="bstune-signals", daemon=True).start()
    for number in SIGNALS:
        signal.signal(number, _interrupt)


def is_installed() -> bool:
    """Say whether this process is a command, which may be ended; another one is the user's own."""
    return _installed


def _own_folders(process_id: int) -> str:
    """How the names of a process's temporary folders begin."""
    return f"bstune-{process_id}-"


@contextmanager
def temporary_folder() -> Iterator[str]:
    """Make a temporary folder that is removed at the end, by force or not.

    What a process leaves that was killed, :func:`kill` removes.
    """
    with tempfile.TemporaryDirectory(prefix=_own_folders(os.getpid())) as folder:
        _folders.add(folder)
        try:
            yield folder
        finally:
            _folders.discard(folder)


def enter(now: Stage) -> None:
    """Note what the command does from here on."""
    global stage
    stage = now


def note(number: int) -> None:
    """Remember the first signal; for handlers that others install for a while."""
    global received
    if _installed and received is None:
        received = number
        # An interruption that a callback swallows would be printed with its traceback.
        sys.unraisablehook = lambda _: None


def status() -> int | None:
    """Give the exit status of a command that was interrupted; None if it was not."""
    if received is None:
        return None
    # As a shell gives that of a program which a signal has ended.
    return 128 + received


def _interrupt(number: int, frame: FrameType | None) -> None:
    global _raised
    note(number)
    # A second one must not cut what the first one has begun to clean up.
    if not _raised:
        _raised = True
        raise KeyboardInterrupt


def leave(status: int) -> NoReturn:
    """End this process and those it started, without what libraries do at the end, which may take long."""
    for process in multiprocessing.active_children():
        kill(process)
    _kill_server()
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    # multiprocessing's own is there only where something has asked for it.
    for folder in {*_folders, config.get("tempdir")} - {None}:
        shutil.rmtree(folder, ignore_errors=True)
    _leave(status)


def leave_last() -> None:
    """End a command that is through, once all else that is to be done at its exit has been done.

    To take torch's modules apart, object by object, takes Python up to four seconds (torch 2.13,
    two CPU cores under load). It is registered before the others, so that it is called after them.
    """
    # An error that Python itself is to print.
    if last_status is None:
        return
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        # Where nobody reads it any more.
        with suppress(OSError, ValueError):
            stream.flush()
    _leave(last_status)


def end(text: str, status: int) -> NoReturn:
    """Write an error and end this process by force, from any thread, whatever the others do."""
    flushing = threading.Thread(target=sys.stdout.flush, daemon=True)
    # Where the interpreter ends already, and has flushed.
    with suppress(RuntimeError):
        flushing.start()
        flushing.join(FLUSH_SECONDS)
    # A live line hides the cursor: it is cleared, and the cursor shown.
    if sys.stdout.isatty():
        text = f"\r\x1b[2K\x1b[?25h{text}"
    os.write(2, text.encode(errors="replace"))
    leave(status)


def kill(process: BaseProcess) -> None:
    """Kill a process and those that the user's code has started in its group, and remove its folders."""
    process.kill()
    if not process.pid:
        return
    # None is left, or it has just been forked and leads no group yet.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for folder in Path(tempfile.gettempdir()).glob(f"{_own_folders(process.pid)}*"):
        shutil.rmtree(folder, ignore_errors=True)


def _kill_server() -> None:
    """End multiprocessing's fork server, which answers to nothing before it has imported torch."""
    server = getattr(forkserver._forkserver, "_forkserver_pid", None)
    if server is not None:
        with suppress(ProcessLookupError):
            os.kill(server, signal.SIGKILL)


def _watch(reading: int) -> None:
    number = 0
    # Others have handlers in Python, too.
    while number not in SIGNALS:
        (number,) = os.read(reading, 1)
    note(number)
    time.sleep(SERVER_SECONDS)
    _kill_server()
    time.sleep(FORCED_END_SECONDS - SERVER_SECONDS)
    end(
        f"interrupted: ended by force, as it did not end within {FORCED_END_SECONDS:g} s\n",
        128 + number,
    )
