"""What the user's code prints in this process, while a study is prepared: each kind of line once.

    log = TrialsLog(Path("outputs/digits/trials.log"))
    with printed_once(log):
        ...  # builds the module a dozen times
        own_lines(print)("a line of bstune's own, which stands whatever stood before")

The preflight and the survey build and train the user's module a dozen times, and it prints and
warns each time. In the processes of trials the same log takes what is printed.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from bstune.trial.processes.trials_log import TrialsLog

# ``is_own``: whether this thread prints a line of bstune's own.
_thread = threading.local()


@contextmanager
def printed_once(log: TrialsLog) -> Iterator[None]:
    """Let ``log`` take the lines that the body prints, but bstune's own.

    They are those to ``sys.stdout`` and ``sys.stderr``.
    """
    stdout = sys.stdout
    stderr = sys.stderr
    out = _Lines(stdout, log)
    err = _Lines(stderr, log)
    sys.stdout = out
    sys.stderr = err
    try:
        yield
    finally:
        sys.stdout = stdout
        sys.stderr = stderr
        out.end()
        err.end()


def own_lines(say: Callable[[str], None]) -> Callable[[str], None]:
    """Make a ``say`` whose lines are printed as they are."""

    def say_own(line: str) -> None:
        with _own():
            say(line)

    return say_own


@contextmanager
def _own() -> Iterator[None]:
    was_own = getattr(_thread, "is_own", False)
    _thread.is_own = True
    try:
        yield
    finally:
        _thread.is_own = was_own


class _Lines:
    """A text stream whose lines go to a log.

    The log says the first of each kind on the stream beneath.

    A handler of the user's may keep it: once it has ended it is the stream beneath.
    """

    def __init__(self, stream: TextIO, log: TrialsLog) -> None:
        self._stream = stream
        self._log = log
        # Of a line whose end is not there yet.
        self._rest = ""
        self._has_ended = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Take the lines that end within a text."""
        if self._has_ended or getattr(_thread, "is_own", False):
            return self._stream.write(text)
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._take(line)
        return len(text)

    def end(self) -> None:
        """Take what was printed without the end of its line, and pass everything on from now."""
        self._has_ended = True
        if self._rest:
            self._take(self._rest)

    def _take(self, line: str) -> None:
        # A progress bar writes over its line.
        self._log.take(line.rstrip("\r").rpartition("\r")[2], self._say)

    def _say(self, line: str) -> None:
        with _own():
            self._stream.write(line + "\n")
            self._stream.flush()
