"""Lines of progress on the error stream, one at least every few seconds whatever goes on."""

import sys
import threading
import time
from collections.abc import Callable
from typing import Self

from bstune.system.secrets import hide_in_text

# What goes on is said where nothing else was said for so many seconds, looked at that often.
QUIET_SECONDS = 8.0
LOOK_SECONDS = 1.0


class _Said:
    """When a line was last printed."""

    at = 0.0


def say(text: str) -> None:
    """Print a line of progress at once."""
    _Said.at = time.monotonic()
    print(hide_in_text(text), file=sys.stderr, flush=True)


class Ticker:
    """Says what goes on where nothing else is said, from a thread of its own.

    Args:
        write: prints a line.
    """

    def __init__(self, write: Callable[[str], None] = say) -> None:
        self.doing: Callable[[], str] = lambda: "importing"
        """Gives the line; it is set anew with what goes on."""
        self._write = write
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> Self:
        """Say lines until it is closed."""
        self._thread.start()
        return self

    def close(self) -> None:
        """Say nothing any more."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def does(self, what: str) -> None:
        """Say what goes on from now on."""
        self.doing = lambda: what
        self._write(what)

    def _run(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            if time.monotonic() - _Said.at > QUIET_SECONDS:
                self._write(self.doing())
