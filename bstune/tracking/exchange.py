"""Exchanges with MLflow, each in a thread that is waited for so long at most: none stops a study.

Left alone its client retries for minutes. So every exchange is waited for ``mlflow.study_seconds``
in all, over the whole run; the first failure is logged as one line and ends sending.
"""

import json
import logging
import math
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

from alembic.util import CommandError
from mlflow.exceptions import MlflowException
from mlflow.utils.logging_utils import suppress_logs_in_thread
from sqlalchemy.exc import SQLAlchemyError

from bstune.options import MlflowOptions

# Of a server that is down, a locked or newer database, a full disk, a missing driver; those of
# requests are OSErrors.
FAILURES = (
    MlflowException,
    SQLAlchemyError,
    CommandError,
    OSError,
    ImportError,
    json.JSONDecodeError,
)
THREAD = "bstune-mlflow"
_log = logging.getLogger(__name__)
# What mlflow's HTTP client says of its retries; mlflow's own loggers are silenced as the thread
# runs.
logging.getLogger("urllib3.connectionpool").addFilter(lambda record: record.threadName != THREAD)


class Exchanges:
    """A run's exchanges with MLflow, one after the other.

    After one that failed, nothing more is to be sent.
    """

    def __init__(
        self,
        settings: MlflowOptions,
        clock: Callable[[], float] = time.monotonic,
        database: Path | None = None,
    ) -> None:
        """Begin with ``mlflow.study_seconds`` left; ``database``: MLflow's SQLite file, if any."""
        self._database = database
        self._settings = settings
        self._clock = clock
        self._left = settings.study_seconds
        self.failed = False

    def run(self, what: str, work: Callable[[], None], seconds: float = math.inf) -> None:
        """Run ``work`` in a thread and wait ``seconds`` for it.

        After a failure log one line, which names ``what`` was to be done, and end sending.
        """
        outcome: Future[None] = Future()

        def run() -> None:
            with suppress_logs_in_thread():
                try:
                    work()
                    outcome.set_result(None)
                # All of them: the thread's end would print the passwords in what it raises.
                except Exception as error:  # noqa: BLE001
                    outcome.set_exception(error)

        # A daemon: one that hangs must not keep the process from ending.
        thread = threading.Thread(target=run, name=THREAD, daemon=True)
        allowed = min(seconds, self._left)
        start = self._clock()
        limit = f"what was left of mlflow.study_seconds={self._settings.study_seconds:g}"
        if seconds < self._left:
            limit = f"mlflow.seconds={seconds:g}"
        with short_requests(self._settings):
            if allowed > 0:
                thread.start()
                thread.join(allowed)
        self._left -= self._clock() - start
        trace = ""
        if allowed <= 0 or thread.is_alive():
            reason = f"no answer within {max(0.0, allowed):.3g} s, {limit}"
        elif (error := outcome.exception()) is not None:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            if not isinstance(error, FAILURES):
                trace = "\n" + "".join(traceback.format_exception(error))
        else:
            return
        self.failed = True
        _log.warning("MLflow: could not %s (%s). %s%s", what, reason, self._advice(), trace)

    def _advice(self) -> str:
        """Say what sends the rest: the same command, unless the database is damaged."""
        if self._database is not None:
            # MLflow's tables take a second to import.
            from bstune.tracking.database import damage

            fault = damage(self._database)
            if fault is not None:
                return (
                    f"The database {self._database} is damaged ({fault}): move it away, and the "
                    "same command then makes a new one and sends all of the study."
                )
        return "The next run of the same command sends what is missing, if MLflow answers by then."


@contextmanager
def short_requests(settings: MlflowOptions) -> Iterator[None]:
    """Give MLflow's HTTP client short limits while the context is open.

    It reads the environment at each request.
    """
    values = {
        "MLFLOW_HTTP_REQUEST_TIMEOUT": str(settings.request_seconds),
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": str(settings.retries),
        "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "0",
        "MLFLOW_HTTP_REQUEST_BACKOFF_JITTER": "0",
        # An overloaded server may ask for minutes.
        "MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER": "false",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    }
    users_own = {name: os.environ.pop(name) for name in values if name in os.environ}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            del os.environ[name]
        os.environ.update(users_own)
