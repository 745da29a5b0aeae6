"""Lines of progress on the error stream, one at least every few seconds whatever goes on."""

import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Self

from bstune.system.console import plain
from bstune.system.secrets import hide_in_text

if TYPE_CHECKING:
    from rich.live import Live

# What goes on is said where nothing else was said for so many seconds, looked at that often.
QUIET_SECONDS = 8.0
LOOK_SECONDS = 1.0
# In a terminal, a second.
REFRESHES = 2.0


class _Said:
    """When a line was last printed."""

    at = 0.0


def say(text: str) -> None:
    """Print a line of progress at once."""
    _Said.at = time.monotonic()
    print(plain(hide_in_text(text)), file=sys.stderr, flush=True)


class Ticker:
    """Says what goes on where nothing else is said, from a thread of its own.

    In a terminal it is the last line, below what is said; in a pipe a line now and then.

    Args:
        write: prints a line.
    """

    def __init__(self, write: Callable[[str], None] = say) -> None:
        self.doing: Callable[[], str] = lambda: "importing"
        """Gives the line; it is set anew with what goes on."""
        self._write = write
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._write_when_quiet, daemon=True)
        self._last_line: Live | None = None

    def start(self) -> Self:
        """Say lines until it is closed."""
        if sys.stderr.isatty():
            self._last_line = _live_line(self._text)
            self._last_line.start()
        else:
            self._thread.start()
        return self

    def close(self) -> None:
        """Say nothing any more."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._last_line is not None:
            self._last_line.stop()

    def does(self, what: str) -> None:
        """Say what goes on from now on."""
        self.doing = lambda: what
        if self._last_line is None:
            self._write(what)

    def _text(self) -> str:
        return hide_in_text(self.doing())

    def _write_when_quiet(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            if time.monotonic() - _Said.at > QUIET_SECONDS:
                self._write(self.doing())


def _live_line(text: Callable[[], str]) -> "Live":
    """The last line of a terminal, over which what is printed scrolls."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    return Live(
        console=Console(stderr=True),
        get_renderable=lambda: Text(text(), no_wrap=True, overflow="ellipsis", style="dim"),
        refresh_per_second=REFRESHES,
        transient=True,
    )
