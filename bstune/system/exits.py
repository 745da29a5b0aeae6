"""``sys.exit`` and ``os._exit`` in the user's code end a command with a line, not with status 0."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from bstune.core.errors import UserCodeError
from bstune.system import interruption
from bstune.system.failures import described, frame_lines, standing_frames
from bstune.system.secrets import redact


class Terminated(SystemExit):
    """A termination signal ends the command."""


def is_interruption(error: BaseException) -> bool:
    """Whether a signal raised an error rather than the user's code.

    Lightning makes a SystemExit of Ctrl-C, which counts as a signal's, too.
    """
    if interruption.status() is not None or isinstance(error, KeyboardInterrupt | Terminated):
        return True
    return _is_lightnings(error) or isinstance(error.__context__, KeyboardInterrupt)


def interrupted_status(error: BaseException) -> int:
    """Give the exit status of a process that a signal ended: 128 plus the signal's number.

    ``error``: that the signal raised.
    """
    status = interruption.status()
    if status is not None:
        return status
    if isinstance(error, Terminated) or _is_lightnings(error):
        return 128 + signal.SIGTERM
    return 128 + signal.SIGINT


def _is_lightnings(error: BaseException) -> bool:
    """Whether it is what Lightning raises on a termination signal."""
    # It is imported nowhere below the layer of trials.
    return type(error).__name__ == "SIGTERMException"


def sys_exit_error(error: SystemExit) -> RuntimeError:
    """Turn the user's own ``sys.exit``, ``exit`` or ``quit`` into an error with its traceback."""
    text = f"sys.exit({error.code!r}) was called"
    return RuntimeError(text).with_traceback(error.__traceback__)


def untrainable(error: BaseException) -> UserCodeError:
    """Make the command's error of one that the user's code raised before any trial.

    Its message has the user's frames.
    """
    if isinstance(error, SystemExit):
        error = sys_exit_error(error)
    message, frames = described(error)
    return UserCodeError(f"the workload cannot be trained: {message}\n{frames}".rstrip())


@contextmanager
def os_exit_as_users_error(
    end: Callable[[str, int], NoReturn] = interruption.end,
) -> Iterator[None]:
    """Make ``os._exit`` end this process with the frames of the user's files and status 1.

    That holds while the body runs. In processes that are forked from this one ``os._exit`` works as
    ever.

    Args:
        end: ends the process, given the error's text and the status.
    """
    process = os.getpid()
    leave = os._exit
    active = True

    def answer(status: int) -> NoReturn:
        """Take the place of ``os._exit``."""
        if not active or os.getpid() != process:
            leave(status)
        where = frame_lines(standing_frames(sys._getframe(1)))
        message = f"the user's code ended the process: os._exit({status!r}) was called at\n{where}"
        end(f"error: {redact(message)}", 1)

    os._exit = answer
    try:
        yield
    finally:
        os._exit = leave
        # Code that kept a reference to ``answer`` gets Python's own from here on.
        active = False
