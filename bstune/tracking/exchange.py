"""Exchanges with MLflow, each in a thread that is waited for a limited time: none stops a study.

Left alone MLflow's client retries for minutes. So all exchanges of a run together are waited for
``mlflow.study_seconds`` at most. The first failure is logged as one line and ends sending.
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

from alembic.util import CommandError
from mlflow.exceptions import MlflowException
from mlflow.utils.logging_utils import suppress_logs_in_thread
from sqlalchemy.exc import SQLAlchemyError

from bstune.options import MlflowOptions

# The errors of a server that is down, a locked or newer database, a full disk or a missing driver.
# Those of requests are OSErrors.
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
# Lines of mlflow's HTTP client on its retries are dropped. mlflow's own loggers are silenced while
# the thread runs.
logging.getLogger("urllib3.connectionpool").addFilter(lambda record: record.threadName != THREAD)


def _thread_of(work: Callable[[], None]) -> tuple[threading.Thread, "Future[None]"]:
    """Make a thread that does some work without logging, and the future that gets its outcome.

    The thread is not started.
    """
    outcome: Future[None] = Future()

    def run_quietly() -> None:
        with suppress_logs_in_thread():
            try:
                work()
                outcome.set_result(None)
            # All errors are caught: an uncaught one would be printed with the passwords in it.
            except Exception as error:  # noqa: BLE001
                outcome.set_exception(error)

    # It is a daemon: a thread that hangs must not keep the process from ending.
    return threading.Thread(target=run_quietly, name=THREAD, daemon=True), outcome


class Exchanges:
    """A study's exchanges with MLflow, one after the other.

    Once one has failed, ``failed`` is true and nothing more is to be sent.
    """

    def __init__(
        self,
        settings: MlflowOptions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Allow all exchanges together ``mlflow.study_seconds`` of waiting.

        Args:
            settings: the options of MLflow.
            clock: gives seconds from a fixed moment.
        """
        self._settings = settings
        self._clock = clock
        self._seconds_left = settings.study_seconds
        self.failed = False

    def run(self, what: str, work: Callable[[], None], seconds: float = math.inf) -> None:
        """Run ``work`` in a thread, and wait for it ``seconds`` at most.

        Where it fails or takes longer, log one line and set ``failed``. ``what`` completes that
        line: "could not ``what``".
        """
        thread, outcome = _thread_of(work)
        # All exchanges of a study have mlflow.study_seconds together.
        allowed = min(seconds, self._seconds_left)
        start = self._clock()
        limit = f"what was left of mlflow.study_seconds={self._settings.study_seconds:g}"
        if seconds < self._seconds_left:
            limit = f"mlflow.seconds={seconds:g}"
        with short_requests(self._settings):
            if allowed > 0:
                thread.start()
                thread.join(allowed)
        self._seconds_left -= self._clock() - start
        trace = ""
        if allowed <= 0 or thread.is_alive():
            reason = f"no answer within {max(0.0, allowed):.3g} s, {limit}"
        else:
            error = outcome.exception()
            if error is None:
                return
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            # Any other error is a mistake in bstune, which the traceback helps to find.
            if not isinstance(error, FAILURES):
                trace = "\n" + "".join(traceback.format_exception(error))
        self.failed = True
        _log.warning(
            "MLflow: could not %s (%s). The next run of the same command sends what is missing, if "
            "MLflow answers by then.%s",
            what,
            reason,
            trace,
        )


@contextmanager
def short_requests(settings: MlflowOptions) -> Iterator[None]:
    """Give MLflow's HTTP client short time limits while the context is open.

    They are environment variables, which the client reads at each request. Afterwards the user's
    own are back.
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
