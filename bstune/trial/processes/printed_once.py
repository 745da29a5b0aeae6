"""Shows each kind of line once that the user's code prints while a study is prepared.

    log = TrialsLog(Path("outputs/digits/trials.log"))
    with printed_once(log):
        ...  # builds the module a dozen times
        own_lines(print)("a line of bstune's own, which is always shown")

The preflight and the survey build and train the user's module a dozen times in this process, and it
prints and warns each time. The same log takes what trials print in their own processes.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from bstune.trial.processes.trials_log import TrialsLog

# Its ``is_own`` says whether this thread prints a line of bstune's own.
_thread = threading.local()


@contextmanager
def printed_once(log: TrialsLog) -> Iterator[None]:
    """Within the context, ``log`` takes the lines printed to ``sys.stdout`` and ``sys.stderr``.

    Lines of bstune's own (:func:`own_lines`) are printed as they are.
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
    """Make a ``say`` whose lines are bstune's own: :func:`printed_once` prints them as they are."""

    def say_own(line: str) -> None:
        with _printing_own():
            say(line)

    return say_own


@contextmanager
def _printing_own() -> Iterator[None]:
    """Within the context, lines that this thread prints are bstune's own."""
    was_own = getattr(_thread, "is_own", False)
    _thread.is_own = True
    try:
        yield
    finally:
        _thread.is_own = was_own


class _Lines:
    """A text stream in the place of ``stream``, whose lines go to a log.

    The log says the first line of each kind on ``stream``. The user's code may keep this object,
    as a log handler does: after :meth:`end` it writes to ``stream`` directly.
    """

    def __init__(self, stream: TextIO, log: TrialsLog) -> None:
        self._stream = stream
        self._log = log
        # The beginning of a line whose end was not written yet.
        self._unended_line = ""
        self._has_ended = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Take a text: lines that end in it go to the log; its last line may go on later.

        A line of bstune's own is written to the stream itself.
        """
        if self._has_ended or getattr(_thread, "is_own", False):
            return self._stream.write(text)
        *lines, self._unended_line = (self._unended_line + text).split("\n")
        for line in lines:
            self._take(line)
        return len(text)

    def end(self) -> None:
        """Take a last line that did not end, and write to the stream itself from now on."""
        self._has_ended = True
        if self._unended_line:
            self._take(self._unended_line)

    def _take(self, line: str) -> None:
        """Hand a line to the log.

        A progress bar writes over its line after each carriage return: its last state is taken.
        """
        self._log.take(line.rstrip("\r").rpartition("\r")[2], self._say)

    def _say(self, line: str) -> None:
        """Write a line that the log shows to the stream itself, at once."""
        with _printing_own():
            self._stream.write(line + "\n")
            self._stream.flush()
