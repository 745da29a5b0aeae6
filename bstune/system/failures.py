"""Errors of the user's code in one line, with the user's own file and line.

They are read from the text of a traceback, which is the same for an error of this process, of a
worker, and of a DataLoader's process (torch puts that one's traceback into the message).
"""

import functools
import re
import sysconfig
import traceback
from pathlib import Path

from bstune.system.secrets import hide_in_text

PACKAGE = Path(__file__).parents[1]
STDLIB = Path(sysconfig.get_path("stdlib"))
# Names of the folders that packages are installed in.
INSTALLED = {"site-packages", "dist-packages"}
# Characters of a message; one that is longer is cut.
MESSAGE_LENGTH = 200
# The last lines that a process wrote before it died, of which a C++ exception takes two.
LAST_LINES = 2
# What faulthandler writes last, below the process's own lines.
FATAL = "Fatal Python error: "

_FRAME = re.compile(r'File "(?P<file>[^"\n]+)", line (?P<line>\d+)')


def where(error: BaseException) -> str:
    """Find the user's own file and line of an error or its causes, as ``model.py:12``.

    Where no frame is the user's own, it is the last one; empty for an error that was never raised.
    """
    return where_in_traceback("".join(traceback.format_exception(error)))


def where_in_traceback(text: str) -> str:
    """Find the user's own file and line in the text of a traceback, as :func:`where` does."""
    frames = list(_FRAME.finditer(text))
    own = [frame for frame in frames if is_users(frame["file"])]
    # Tracebacks name the innermost frame last, and the error that was raised last after its causes.
    for frame in reversed(own or frames):
        return f"{Path(frame['file']).name}:{frame['line']}"
    return ""


@functools.cache
def is_users(file: str) -> bool:
    """Whether a file is the user's own; code without a file has a name such as ``<string>``."""
    path = Path(file)
    is_installed = not INSTALLED.isdisjoint(path.parts)
    is_known = path.is_relative_to(PACKAGE) or path.is_relative_to(STDLIB)
    return not (is_installed or is_known or file.startswith("<"))


def one_line(error: BaseException) -> str:
    """Write an error as one line: ``ValueError: no such file (data.py:12)``, without secrets."""
    lines = str(error).strip().splitlines()
    message = type(error).__name__
    # The message of an error in a DataLoader's process is a traceback, which ends with the error.
    if any(line.startswith("Original Traceback") for line in lines):
        message = lines[-1]
    elif lines:
        message += f": {lines[0]}"
    message = hide_in_text(message)
    if len(message) > MESSAGE_LENGTH:
        message = f"{message[:MESSAGE_LENGTH]}..."
    place = where(error)
    return f"{message} ({place})" if place else message


def where_in_dump(text: str) -> str:
    """Find the user's own file and line in what faulthandler wrote, as :func:`where` does."""
    # It names the innermost frame first.
    return where_in_traceback("\n".join(reversed(text.splitlines())))


def last_lines(text: str) -> str:
    """Write the end of what a process that died has printed, in one line, without secrets.

    The place is the innermost frame of the user's own in the dump of Python's faulthandler. It is
    empty where nothing was printed.
    """
    printed, _, dump = text.partition(FATAL)
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    message = hide_in_text("; ".join(lines[-LAST_LINES:]))
    if len(message) > MESSAGE_LENGTH:
        message = f"...{message[-MESSAGE_LENGTH:]}"
    place = where_in_dump(dump)
    return f"{message} ({place})".lstrip() if place else message
