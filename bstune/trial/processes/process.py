"""One process that trains, seen from this one: it is sent trials, and its answers are received."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from bstune.core.errors import UserCodeError
from bstune.core.records import TrialResult, TrialSpec
from bstune.system import interruption
from bstune.system.files import Output
from bstune.system.secrets import known
from bstune.trial.processes.child import work
from bstune.trial.processes.fork_server import CONTEXT, make_process, start_process, start_server
from bstune.trial.processes.messages import (
    PICKLE_ERRORS,
    Call,
    CallAnswer,
    Finished,
    SaidLine,
    Train,
)
from bstune.trial.processes.reached import Reached, forget, reached_by, shared_numbers
from bstune.trial.processes.trials_log import TrialsLog

# Seconds between two looks for signals while trials train.
LOOK_SECONDS = 0.2
# Seconds from the end of a trial's process until a signal that has ended it has come to this one,
# too.
SIGNAL_SECONDS = 0.5
# The longest time that a process may take to end once it has nothing to do.
END_SECONDS = 2


class Process:
    """One process that trains, and the connection to it.

    Attributes:
        has_failed: whether its last trial failed.
        trials: how many it has been sent.
        started: when its present trial began, in seconds of the monotonic clock.
    """

    def __init__(self, open_train: Callable[[], Train], log: TrialsLog | None) -> None:
        start_server()
        self.connection, childs_end = CONTEXT.Pipe()
        printed = None if log is None else log.pipe()
        # Texts that the process must never print, as this one must not.
        secrets = known()
        self._numbers = shared_numbers()
        arguments = (open_train, childs_end, dict(os.environ), secrets, printed, self._numbers)
        self.process = make_process(work, arguments)
        start_process(self.process)
        if printed is not None:
            printed.close()
        self.has_failed = False
        self.trials = 0
        self.started = time.monotonic()
        # While this process held the child's end too, a read would not tell of the child's death.
        childs_end.close()

    @property
    def handles(self) -> list[Connection | int]:
        """The handles that are ready once the process has answered, or has ended.

        :func:`multiprocessing.connection.wait` takes them.
        """
        return [self.connection, self.process.sentinel]

    @property
    def reached(self) -> Reached:
        """How far the trial is that the process trains."""
        return reached_by(self._numbers)

    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self.process.is_alive()

    @property
    def is_usable(self) -> bool:
        """Whether another trial can be trained in it."""
        return self.is_alive() and not self.has_failed

    def send(self, request: tuple[TrialSpec, Output, TrialResult | None]) -> None:
        """Send a trial to the process; its time begins here."""
        self.started = time.monotonic()
        self.trials += 1
        forget(self._numbers)
        # An OSError says that the process has just died, which finish() will see.
        with suppress(OSError):
            self.connection.send(request)

    def call(self, method: str, *arguments: object, say: Callable[[str], None]) -> Any:
        """Call a method of the object with which the process trains, and return its value.

        ``say`` takes the lines that the method has for the user meanwhile.

        Raises:
            UserCodeError: where the process has ended without an answer.
            BstuneError: that the method raised.
        """
        # An OSError says that the process has just died, which is seen below.
        with suppress(OSError):
            self.connection.send(Call(method, arguments))
        while True:
            wait(self.handles, LOOK_SECONDS)
            message = self._message()
            if isinstance(message, SaidLine):
                say(message.text)
            elif message is not None:
                return message.result()
            elif not self.is_alive():
                self.process.join()
                # Processes that the user's code has started end with it.
                self.kill()
                # A signal to all processes of the study may have ended it. Within this time the
                # signal also comes to this process, and is raised in place of the error below.
                time.sleep(SIGNAL_SECONDS)
                raise UserCodeError(f"the workload cannot be trained: {self._how_it_ended()}")

    def _message(self) -> SaidLine | CallAnswer | None:
        """Receive a line or the answer to a call; None if nothing has come."""
        # A process that died, amid a message perhaps, has sent nothing that can be read.
        with suppress(EOFError, OSError, *PICKLE_ERRORS):
            if self.connection.poll():
                message: SaidLine | CallAnswer = self.connection.recv()
                return message
        return None

    def _how_it_ended(self) -> str:
        """Say in words how the process has ended: by a signal, or with which status."""
        status = self.process.exitcode or 0
        if status == -signal.SIGKILL:
            return (
                "its process was ended by the system, as it does when memory runs out: "
                "lower search.batch_size.high or search.workers"
            )
        if status < 0:
            return f"its process was ended by {signal.Signals(-status).name}"
        return f"its process ended with status {status}"

    def close(self) -> None:
        """Tell the process to end once it has nothing to do."""
        self.connection.close()

    def receive(self) -> Finished | None:
        """Receive the answer to a trial; None if it has not come."""
        # A process that died, amid a message perhaps, has sent nothing that can be read.
        with suppress(EOFError, OSError, *PICKLE_ERRORS):
            if self.connection.poll():
                answer: Finished = self.connection.recv()
                self.has_failed = answer.record is None or answer.record.status == "failed"
                return answer
        return None

    def finish(self, spec: TrialSpec, too_long: str | None) -> Finished:
        """Receive the answer to a trial that is over or takes too long.

        Args:
            spec: of the trial.
            too_long: says that the trial took too long: the process is killed if it has not
                answered. None: it did not, and without an answer the process has died.
        """
        answer = self.receive()
        if answer is not None:
            return answer
        if too_long is not None:
            self.kill()
        self.process.join()
        # Processes that the user's code has started end with it.
        self.kill()
        reason = self._how_it_ended() if too_long is None else too_long
        seconds = time.monotonic() - self.started
        record = TrialResult.unmeasured(spec, "failed", message=reason, wall_seconds=seconds)
        return Finished(spec, record)

    def kill(self) -> None:
        """Kill the process, and those that the user's code has started in it."""
        interruption.kill(self.process)

    def end(self) -> None:
        """Wait for the process to end after :meth:`close`, and kill it if it goes on.

        A thread of the user's may keep it alive.
        """
        self.process.join(END_SECONDS)
        self.kill()
        self.process.join()
