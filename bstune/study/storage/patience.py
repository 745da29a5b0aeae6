"""A storage that does not answer is asked again for a while, then the study ends with a line.

Servers are restarted, connections end, databases are locked, disks fill up. What is repeated here
is a function that may be repeated: one that was carried out although no answer came does no harm
when it is called again.
"""

import importlib.util
import logging
import re
import time
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from optuna.exceptions import StorageInternalError
from sqlalchemy.exc import (
    ArgumentError,
    DataError,
    NotSupportedError,
    ProgrammingError,
    SQLAlchemyError,
)

from bstune.core.errors import StudyError

logger = logging.getLogger(__name__)
# Seconds from the first call that was not answered until the study ends.
RETRY_SECONDS = 120.0
# Seconds between tries; the last value repeats.
WAIT_SECONDS = (0.2, 0.5, 1.0, 2.0, 5.0)
Errors = tuple[type[Exception], ...]
STORAGE_ERRORS: Errors = (SQLAlchemyError, StorageInternalError)
if importlib.util.find_spec("grpc") is not None:
    import grpc

    STORAGE_ERRORS = (*STORAGE_ERRORS, grpc.RpcError)
# Errors that no waiting ends, such as a table that is not there.
LASTING: Errors = (ArgumentError, DataError, NotSupportedError, ProgrammingError)
# Waiting does end these: another process made a table, or an enumeration's type, between the look
# for it and the statement that makes it. They are PostgreSQL's codes of duplicate_table and
# duplicate_object, which both of its drivers carry.
MADE_MEANWHILE = frozenset({"42P07", "42710"})
# Errors that no waiting ends, and that drivers tell by their text alone. PostgreSQL's are in the
# server's language; in another one than English they are waited for in vain.
LASTING_TEXT = re.compile(
    r"authentication failed|no password supplied|no pg_hba.conf entry|permission denied"
    r"|(database|role) \".*\" does not exist|could not translate host name"
    r"|file is not a database|disk image is malformed"
)
P = ParamSpec("P")
T = TypeVar("T")


class StorageGoneError(StudyError):
    """The storage was waited for in vain: whoever asks it again would wait again."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the storage does not answer: {reason}")
        self.reason = reason


def patient(function: Callable[P, T], errors: Errors = STORAGE_ERRORS) -> Callable[P, T]:
    """Wrap a function that asks the storage: it is called again until the storage has answered.

    Args:
        function: asks the storage. It may be carried out twice.
        errors: that it raises where the storage does not answer.

    The wrapped function raises:
        StorageGoneError: the storage has not answered for ``RETRY_SECONDS``, or never will.
        StudyError: the study is not there any more.
    """

    @wraps(function)
    def repeated(*arguments: P.args, **named: P.kwargs) -> T:
        start = time.monotonic()
        tries = 0
        while True:
            try:
                return function(*arguments, **named)
            except errors as error:
                _pause(error, tries, time.monotonic() - start)
                tries += 1
            except KeyError as error:
                # Optuna's error for a record that is gone; from its proxy it comes without text.
                if error.args and "Record does not exist" not in str(error):
                    raise
                raise StudyError("the study was deleted from its storage while it ran") from error

    return repeated


def reason_of(error: Exception) -> str:
    """Say in a line why the storage did not answer."""
    # Optuna wraps the database's error, which says more, in one of its own.
    cause = error.__cause__ or error
    text = str(cause) or str(error) or type(error).__name__
    return text.splitlines()[0]


def _is_lasting(error: BaseException) -> bool:
    """Whether waiting does not end an error, such as a table that is not there."""
    if not isinstance(error, LASTING):
        return False
    # An error of these codes passes: another process is making what is missing.
    drivers_error = getattr(error, "orig", None)
    codes = {getattr(drivers_error, "pgcode", None), getattr(drivers_error, "sqlstate", None)}
    return MADE_MEANWHILE.isdisjoint(codes)


def _pause(error: Exception, tries: int, seconds: float) -> None:
    """Wait before the next try.

    Args:
        error: of the last try.
        tries: how many were made before it.
        seconds: since the first one began.

    Raises:
        StorageGoneError: where no waiting helps, or ``RETRY_SECONDS`` are over.
    """
    cause = error.__cause__ or error
    reason = reason_of(error)
    has_lasting_text = LASTING_TEXT.search(str(cause)) is not None
    if has_lasting_text or _is_lasting(error) or _is_lasting(cause):
        raise StorageGoneError(reason) from error
    if seconds >= RETRY_SECONDS:
        raise StorageGoneError(
            f"{reason}; tried for {seconds:.0f} s (RETRY_SECONDS of {__name__} is "
            f"{RETRY_SECONDS:g}); what has finished is kept, and the same command continues"
        ) from error
    if tries == 0:
        text = "the storage does not answer: %s; trying again for up to %g s"
        logger.warning(text, reason, RETRY_SECONDS)
    time.sleep(WAIT_SECONDS[min(tries, len(WAIT_SECONDS) - 1)])
