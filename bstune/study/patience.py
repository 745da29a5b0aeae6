"""A storage that does not answer is asked again for a while, then the study ends with a line.

Servers are restarted, connections end, databases are locked, disks fill up. Each call of the storage is repeated until
it is answered; one that was carried out although no answer came does no harm when it is repeated.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial, wraps
from pathlib import Path
from typing import Any

from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import BaseStorage
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DataError, NotSupportedError, ProgrammingError

from bstune.core.errors import StudyError
from bstune.study.lease import STORAGE_ERRORS

logger = logging.getLogger(__name__)
ANSWER_SECONDS = 15.0  # that a server may take to answer one call
RETRY_SECONDS = 120.0  # from the first call that was not answered, until the study ends
WAIT_SECONDS = (0.2, 0.5, 1.0, 2.0, 5.0)  # between tries; the last one again and again
UNANSWERED: tuple[type[Exception], ...] = (*STORAGE_ERRORS, OSError)
LASTING = (DataError, NotSupportedError, ProgrammingError)  # such as a table that is not there
METHODS = [name for name in vars(BaseStorage) if name.startswith(("get_", "set_", "create_"))]
# Those of RDBStorage that Optuna's cache calls beside them.
METHODS += ["_create_new_trial", "_get_trials", "_set_trial_param", "_get_best_trial_id"]


class Patience:
    """Repeats the calls of one storage."""

    def __init__(
        self,
        url: str,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._url, self._clock, self._sleep = url, clock, sleep
        self._within = (
            threading.local()
        )  # a call of the storage that another one makes is repeated with it
        self._ended: str | None = None  # why the storage is not asked any more
        location = make_url(url)
        self._sqlite = location.get_backend_name() == "sqlite"
        database = location.database if self._sqlite else None
        # One that begins with file: is a URI of its own.
        path = None if str(database).startswith((":memory:", "file:")) else database
        self._file = Path(path).absolute() if path else None
        self._inode = None if self._file is None else self._identify()

    def apply(self, storage: BaseStorage) -> None:
        """Let all calls of ``storage`` be repeated."""
        for name in METHODS:
            if hasattr(storage, name):
                setattr(storage, name, self._repeated(getattr(storage, name)))

    def _identify(self) -> tuple[int, int]:
        assert self._file is not None  # noqa: S101 (it is a file's)
        found = os.stat(self._file)
        return found.st_dev, found.st_ino

    def _repeated(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*arguments: Any, **named: Any) -> Any:
            if getattr(self._within, "call", False):
                return method(*arguments, **named)
            return self._call(partial(method, *arguments, **named), method.__name__)

        return call

    def _call(self, call: Callable[[], Any], name: str) -> Any:
        start, tries = self._clock(), 0
        while True:
            if self._ended is not None:  # what ends the study asks again and again
                raise StudyError(self._ended)
            try:
                return self._answer(call)
            except UpdateFinishedTrialError:
                if (
                    name == "set_trial_state_values" and tries > 0
                ):  # the last try has done it, but did not say so
                    return True
                raise
            except UNANSWERED as error:
                reason = (str(error.__cause__ or error) or type(error).__name__).splitlines()[0]
                seconds = self._clock() - start
                if isinstance(error.__cause__ or error, LASTING) or seconds >= RETRY_SECONDS:
                    self._ended = f"the storage does not answer: storage={self._url}: {reason}" + (
                        f"; tried for {seconds:.0f} s (RETRY_SECONDS of {__name__} is {RETRY_SECONDS:g})"
                        "; what has finished is kept, and the same command continues"
                    )
                    raise StudyError(self._ended) from error
                if tries == 0:
                    text = "the storage does not answer: %s; trying again for up to %g s"
                    logger.warning(text, reason, RETRY_SECONDS)
                self._sleep(WAIT_SECONDS[min(tries, len(WAIT_SECONDS) - 1)])
                tries += 1
            except KeyError as error:
                if "Record does not exist" not in str(error):
                    raise
                self._ended = f"the study was deleted from storage={self._url} while it ran"
                raise StudyError(self._ended) from error

    def _answer(self, call: Callable[[], Any]) -> Any:
        """Call in this thread where a file answers; where a server does, in one that need not be waited for."""
        if self._sqlite:
            if self._file is not None:
                self._check_file()
            return self._run(call)
        outcome: Future[Any] = Future()

        def run() -> None:
            try:
                outcome.set_result(self._run(call))
            except Exception as error:  # noqa: BLE001 (raised below)
                outcome.set_exception(error)

        # A driver waits for a server that is frozen for as long as its machine is there.
        threading.Thread(target=run, daemon=True).start()
        try:
            return outcome.result(timeout=ANSWER_SECONDS)
        except TimeoutError as error:
            raise TimeoutError(f"no answer within {ANSWER_SECONDS:g} s") from error

    def _check_file(self) -> None:
        # A connection that is open would go on writing to a file that has no name any more, and a new one would make
        # an empty file.
        if self._identify() != self._inode:
            raise FileNotFoundError(f"{self._file} was replaced by another file")

    def _run(self, call: Callable[[], Any]) -> Any:
        self._within.call = True
        try:
            return call()
        finally:
            self._within.call = False
