"""What runs in a process that trains: it takes trials and calls, and answers each.

Whatever the user's code does there ends one trial or one call: an exception, ``sys.exit``, or
``os._exit`` in a call. A crash is seen by the process that asked (``process.py``).
"""

import faulthandler
import os
import pickle
import threading
import time
from collections.abc import Callable, Mapping, MutableSequence
from contextlib import chdir
from multiprocessing.connection import Connection
from typing import NoReturn

from bstune.core.errors import BstuneError, UserCodeError
from bstune.core.records import TrialResult, TrialSpec
from bstune.system.exits import os_exit_as_users_error, sys_exit_error, untrainable
from bstune.system.failures import in_users_code
from bstune.system.files import Output
from bstune.system.secrets import know
from bstune.system.terminal import install_filters
from bstune.trial.processes.messages import Call, CallAnswer, Finished, SaidLine, Train, failed
from bstune.trial.processes.reached import tell_in


def work(
    open_train: Callable[[], Train],
    connection: Connection,
    environment: Mapping[str, str],
    secrets: tuple[str, ...],
    printed: Connection | None = None,
    reached: MutableSequence[float] | None = None,
) -> None:
    """Train trials and answer calls in this process, one at a time, until the connection closes.

    Args:
        open_train: is called at the first request; its function serves the later ones too.
        connection: brings requests and takes answers.
        environment: the environment variables of the process that asks.
        secrets: texts that are never printed.
        printed: takes what is printed; None: it goes where the fork server prints.
        reached: numbers that say how far a trial is; None: nobody reads them.
    """
    if printed is not None:
        # Standard output and standard error, of libraries in C as well.
        for descriptor in (1, 2):
            os.dup2(printed.fileno(), descriptor)
        printed.close()
    # A crash says where the user's code was.
    faulthandler.enable(file=2)
    # The fork server still has the environment of its own start.
    os.environ.update(environment)
    if reached is not None:
        tell_in(reached)
    # The filters keep these secrets out of logs and warnings.
    know(secrets)
    install_filters()
    process = os.getpid()
    train: Train | None = None
    answer: CallAnswer | Finished
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        if isinstance(request, Call):
            train, answer = _answer_call(request, train, open_train, connection)
        else:
            train, answer = _train_trial(request, train, open_train)
        # The user's code may have forked this process: a copy answers nothing.
        if os.getpid() != process:
            os._exit(0)
        _send(connection, answer)


def _train_trial(
    task: tuple[TrialSpec, Output, TrialResult | None],
    train: Train | None,
    open_train: Callable[[], Train],
) -> tuple[Train | None, Finished]:
    """Train a trial in this process.

    Args:
        task: the spec, the folder, and the record of the trial that it continues.
        train: trains it; None: no trial has been trained yet, and ``open_train`` is called.
        open_train: returns the function that trains a trial.

    Returns:
        The function that trains trials (None: it could not be opened), and how the trial ended.
    """
    spec = task[0]
    start = time.monotonic()
    try:
        train = train or open_train()
        # The user's code may change the working directory: chdir puts it back.
        with chdir("."):
            return train, Finished(spec, train(*task))
    except BstuneError as error:
        return train, Finished(spec, error=error)
    # Whatever the user's code raises ends one trial, the SystemExit of sys.exit included.
    except BaseException as error:  # noqa: BLE001
        return train, failed(spec, error, time.monotonic() - start)


def _answer_call(
    call: Call, train: Train | None, open_train: Callable[[], Train], connection: Connection
) -> tuple[Train | None, CallAnswer]:
    """Call a method of the object that trains, in the process that was asked for it.

    The method gets two functions besides its arguments: ``say`` sends a line to the user, and
    ``end`` sends an error as the answer and ends this process. A call of ``os._exit`` in the user's
    code is answered as an error, too.

    Args:
        call: the method's name and its arguments.
        train: the object that trains; None: it is not open yet.
        open_train: opens it.
        connection: takes the lines, and the answer if the process ends.

    Returns:
        The object that trains (``train``, or what ``open_train`` returned; None: it could not be
        opened), and the answer.
    """
    # It is kept here, as os._exit is replaced while the user's code runs.
    leave = os._exit

    def say(line: str) -> None:
        _send(connection, SaidLine(line))

    def end(message: str) -> NoReturn:
        _send(connection, CallAnswer(error=UserCodeError(message)))
        leave(1)

    def answer_exit(message: str, status: int) -> NoReturn:
        # The process that gets the answer writes "error: " before it itself.
        end(message.removeprefix("error: "))

    try:
        # The user's code may change the working directory: chdir puts it back.
        with os_exit_as_users_error(answer_exit), chdir("."):
            train = train or open_train()
            method = getattr(train, call.method)
            return train, CallAnswer(method(*call.arguments, say=say, end=end))
    except BstuneError as error:
        return train, CallAnswer(error=error, cause=_users_cause(error))
    except SystemExit as error:
        shown = sys_exit_error(error)
        return train, CallAnswer(error=untrainable(error), cause=_pickled(shown))
    # The user's code may raise anything else.
    except BaseException as error:  # noqa: BLE001
        return train, CallAnswer(error=untrainable(error), cause=_pickled(error))


# The watchdog's thread sends as well.
_sending = threading.Lock()


def _send(connection: Connection, message: SaidLine | CallAnswer | Finished) -> None:
    """Send a message whole, also where two threads send at a time."""
    with _sending:
        connection.send(message)


def _users_cause(error: BaseException) -> bytes | None:
    """Pickle the error of the user's code that one of bstune's errors comes from.

    None where there is no such error, or it cannot be pickled.
    """
    cause = error.__cause__
    while cause is not None and (isinstance(cause, BstuneError) or not in_users_code(cause)):
        cause = cause.__cause__
    if cause is None:
        return None
    return _pickled(cause)


def _pickled(error: BaseException) -> bytes | None:
    """Pickle an error; None where it does not pickle, or cannot be loaded again.

    None also for what is no ``Exception``, such as a SystemExit: as the cause of another error it
    would tell the user nothing.
    """
    # It is imported here, as a process that trains has imported cloudpickle anyway, and others need
    # not.
    import cloudpickle

    if not isinstance(error, Exception):
        return None
    try:
        pickled: bytes = cloudpickle.dumps(error)
        # Some errors pickle, but do not load.
        pickle.loads(pickled)  # noqa: S301 (what was pickled here)
    except Exception:  # noqa: BLE001 (the user's classes may raise anything)
        return None
    return pickled
