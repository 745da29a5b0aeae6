r"""One filter on what is printed: no secret, and no character that a terminal obeys.

    write_out("trial 3: \x1b]0;owned\x07")  # its characters are visible: trial 3: \x1b]0;owned\x07

A folder of somebody else's, a file's name or an exception of the user's code may hold sequences
that rename a window, move the cursor or write to the clipboard. rich's own colours stay: a console
filters the text, before it is coloured. What is logged and what is warned of is filtered where it
is made, inside :func:`filtered`, whoever prints it.
"""

import argparse
import logging
import re
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from bstune.core.errors import BstuneError
from bstune.system.failures import with_causes
from bstune.system.secrets import redact

if TYPE_CHECKING:
    from rich.console import Console

# Control characters: all of C0 but \n and \t, DEL, C1, and those that turn the text's direction.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    r"""Write a text with its control characters as ``\x1b`` or ``\u202e``.

    Line ends of Windows become plain ones.
    """
    return _CONTROL.sub(_escape, text.replace("\r\n", "\n"))


def _escape(match: re.Match[str]) -> str:
    r"""Write a control character as ``\x1b`` or ``\u202e``."""
    code = ord(match[0])
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}"


def printable(text: str) -> str:
    """Filter a text for printing: secrets are hidden, and control characters made visible."""
    return visible(redact(text))


def write_out(text: str) -> None:
    """Print a text to the standard output at once, and end its last line."""
    _write(sys.stdout, text)


def write_error(text: str) -> None:
    """Print a text to the standard error, and end its last line."""
    _write(sys.stderr, text)


def _write(stream: TextIO, text: str) -> None:
    """Filter a text, print it at once, and end its last line."""
    end = "" if text.endswith("\n") else "\n"
    stream.write(printable(text) + end)
    stream.flush()


class ArgumentParser(argparse.ArgumentParser):
    """argparse's parser, whose errors repeat what was typed: they are filtered."""

    def error(self, message: str) -> NoReturn:
        """End with status 2 and a line, as argparse does."""
        super().error(printable(message))


def safe_console(**options: Any) -> "Console":
    """Make rich's console, with its own ``options``, so that all its text is filtered."""
    # Rich takes a tenth of a second to import, which --help need not wait for.
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class SafeConsole(Console):
        def render(
            self, renderable: RenderableType, options: ConsoleOptions | None = None
        ) -> Iterable[Segment]:
            """Render as rich does, with the text of every segment filtered."""
            for segment in super().render(renderable, options):
                # The segment is rich's own: it moves the cursor of a live line.
                if segment.control:
                    yield segment
                else:
                    yield Segment(printable(segment.text), segment.style)

    return SafeConsole(**options)


@contextmanager
def filtered() -> Iterator[None]:
    """Hide secrets and control characters in what the body logs and warns of, and in its errors.

    The errors are bstune's own, which a notebook shows, and those of threads that fail.
    """
    make_record = logging.getLogRecordFactory()
    show_warning = warnings.showwarning
    thread_hook = threading.excepthook
    install_filters()
    try:
        yield
    except BstuneError as error:
        _redact_chain(error)
        raise
    finally:
        logging.setLogRecordFactory(make_record)
        warnings.showwarning = show_warning
        threading.excepthook = thread_hook


def _redact_chain(error: BaseException) -> None:
    """Hide secrets in the texts of an error and of its causes: a notebook shows them all."""
    for cause in with_causes(error):
        if cause.args and isinstance(cause.args[0], str):
            cause.args = (redact(cause.args[0]), *cause.args[1:])


def install_filters() -> None:
    """Hide secrets and control characters in logs, warnings and the errors of threads.

    That holds until the process ends, or until the former functions are put back.
    """
    logging.setLogRecordFactory(_filtering(logging.getLogRecordFactory()))
    show_warning = warnings.showwarning

    def warn(message: Warning | str, category: type[Warning], *where: Any, **named: Any) -> None:
        """Show a warning, filtered, as ``warnings.showwarning`` does."""
        text = str(message)
        shown = printable(text)
        # A warning with nothing to hide is passed on as it is. A text in its place would be made a
        # warning of its class, whose constructor may take other arguments.
        if shown == text:
            show_warning(message, category, *where, **named)
        else:
            show_warning(shown, category, *where, **named)

    warnings.showwarning = warn
    threading.excepthook = _show_thread


def _filtering(make_record: Callable[..., logging.LogRecord]) -> Callable[..., logging.LogRecord]:
    """Make a factory of log records whose messages and tracebacks are filtered.

    ``make_record`` is the factory that makes them. A record without anything to filter stays as it
    is.
    """

    def make(*arguments: Any, **named: Any) -> logging.LogRecord:
        """Make a record and filter it; arguments are those of ``make_record``."""
        record = make_record(*arguments, **named)
        try:
            message = record.getMessage()
        # A user's __str__ may raise anything; logging says itself that it cannot be formatted.
        except Exception:  # noqa: BLE001
            return record
        shown = printable(message)
        if shown != message:
            record.msg = shown
            record.args = ()
        if record.exc_info and record.exc_info[1] is not None:
            trace = "".join(traceback.format_exception(record.exc_info[1])).rstrip("\n")
            shown_trace = printable(trace)
            # A formatter writes exc_text, if there is one, in place of the traceback.
            if shown_trace != trace:
                record.exc_text = shown_trace
        return record

    return make


def _show_thread(error: threading.ExceptHookArgs) -> None:
    """Print the error of a thread that failed, as threading does, but filtered."""
    if error.exc_value is None or issubclass(error.exc_type, SystemExit):
        return
    name = error.thread.name if error.thread is not None else "unknown"
    trace = "".join(traceback.format_exception(error.exc_value))
    write_error(f"Exception in thread {name}:\n{trace}")


def parse_values(
    kind: Callable[[str], float], smallest: float, largest: float, text: str
) -> tuple[float, ...]:
    """Parse an option's values, which are separated by commas.

    Args:
        kind: ``int`` or ``float``.
        smallest: the least value that is allowed.
        largest: the greatest value that is allowed.
        text: as typed.

    Raises:
        argparse.ArgumentTypeError: for equal values, one out of the range, or none.
    """
    try:
        values = tuple(kind(part) for part in text.split(","))
    except ValueError:
        values = ()
    are_different = len(set(values)) == len(values)
    are_within = all(smallest <= value <= largest for value in values)
    if not values or not are_different or not are_within:
        noun = "integers" if kind is int else "numbers"
        raise argparse.ArgumentTypeError(
            f"takes different {noun} from {smallest:.10g} to {largest:.10g} with commas between, "
            f"but got {text!r}"
        )
    return values
