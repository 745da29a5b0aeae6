"""A log of what trials print: every line goes to a file, and each kind of line once to the console.

A module that warns, or prints a line an epoch, does so in each of fifty trials::

    log = TrialsLog(Path("outputs/digits/trials.log"))
    with CONTEXT.Process(target=train, args=(log.pipe(),)):  # whose outputs are that pipe
        ...

Lines that differ by their numbers alone are of one kind.
"""

import multiprocessing
import os
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from bstune.system.terminal import printable, write_out

# So many kinds of lines are shown on the console; further ones are in the file alone.
MAX_KINDS = 20
# The most bytes that one read takes.
CHUNK_BYTES = 65_536
NUMBER = re.compile(r"[-+]?\d+(\.\d*)?([eE][-+]?\d+)?")


class TrialsLog:
    """Takes lines that other processes print, through pipes that threads of this process read.

    Args:
        path: of the file, which is made with the first line; a link is not followed.
        say: takes a line for the console.
    """

    def __init__(self, path: Path, say: Callable[[str], None] = write_out) -> None:
        self._path = path
        self._say = say
        # The kinds of lines that were shown: a line's text with 0 in place of each number.
        self._kinds: set[str] = set()
        # Whether a line on the console has named the file.
        self._is_file_named = False
        self._lock = threading.Lock()

    def pipe(self) -> Connection:
        """Open a pipe whose lines the log takes, and return the end for a process to write to."""
        reading, writing = multiprocessing.Pipe(duplex=False)
        threading.Thread(
            target=self._read, args=(reading,), name="bstune-trials-log", daemon=True
        ).start()
        return writing

    def take(self, line: str, say: Callable[[str], None] | None = None) -> None:
        """Write a line to the file, if its folder is there yet, and show the first of its kind.

        ``say`` takes the line for the console; None: the log's own ``say`` does.
        """
        say = say or self._say
        line = printable(line)
        # Lines that differ by their numbers alone are of one kind.
        kind = NUMBER.sub("0", line.strip())
        with self._lock:
            is_written = self._append(line)
            if not kind:
                return
            if kind not in self._kinds and len(self._kinds) < MAX_KINDS:
                self._kinds.add(kind)
                _show(line, say)
            # At the first line that is not shown the user is told of the file, once.
            elif is_written and not self._is_file_named:
                self._is_file_named = True
                _show(f"what trials print besides is in {self._path}", say)

    def _append(self, line: str) -> bool:
        """Write a line to the file, and say whether that was possible.

        A full disk raises nothing here: the trial ends where it stores its own files.
        """
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        try:
            descriptor = os.open(self._path, flags, 0o666)
            with os.fdopen(descriptor, "a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError:
            return False
        return True

    def _read(self, reading: Connection) -> None:
        """Take the lines of a pipe until every process has closed its other end."""
        # The beginning of a line whose end was not read yet.
        unended = b""
        with reading:
            while chunk := _read_chunk(reading):
                *lines, unended = (unended + chunk).split(b"\n")
                for line in lines:
                    self.take(line.decode(errors="replace"))
        if unended:
            self.take(unended.decode(errors="replace"))


def _show(line: str, say: Callable[[str], None]) -> None:
    """Say a line, or do nothing where the console is closed."""
    with suppress(OSError, ValueError):
        say(line)


def _read_chunk(reading: Connection) -> bytes:
    """Wait for bytes in a pipe and read them; none come once its other end is closed."""
    try:
        return os.read(reading.fileno(), CHUNK_BYTES)
    # A pipe that cannot be read any more has ended: an error would end the thread with a traceback.
    except OSError:
        return b""
