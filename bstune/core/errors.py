"""The few named exceptions; the command line turns each into one line and an exit status."""

import sys
import traceback

from bstune.system.console import plain
from bstune.system.secrets import hide_in_error, hide_in_text


class BstuneError(Exception):
    """An error that the user can fix: the message says what was received and what to do.

    Secrets in what was received are left out, and nothing in it steers a terminal.
    """

    exit_status = 2

    def __init__(self, message: str = "") -> None:
        super().__init__(plain(hide_in_text(message)))


class InputError(BstuneError):
    """An option, a file, a workload or an argument cannot be used."""


class StudyError(BstuneError):
    """A study cannot be opened or continued."""


class UserCodeError(BstuneError):
    """The user's own code raised: the message ends with its file and line."""

    exit_status = 1


class Interrupted(BaseException):
    """Ctrl-C or a termination signal ended a study, which the same command continues.

    As KeyboardInterrupt it is no Exception: libraries turn these into errors of their own.
    """

    exit_status = 130


def print_error(error: BstuneError | Interrupted, with_traceback: bool) -> int:
    """Print the line of an error that is being handled, below its traceback; its exit status."""
    if with_traceback:
        print(hide_in_error(traceback.format_exc()), file=sys.stderr)
    print(error, file=sys.stderr)
    return error.exit_status
