"""Worker processes that train one trial together, each on a device of its own.

Each is told its place by the variables that torchelastic sets, by which Lightning joins them. All
of them run the same function; what the first one returns counts.
"""

import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from bstune.trial.worker import Failure, Returned, Worker

# Seconds that the others get once one process is done: one that has failed is waited for in vain.
PATIENCE = 5.0
# Seconds of a look at one process.
LOOK_SECONDS = 0.02


class Ranks:
    """Calls a function in several processes at once; it is used as a :class:`Worker`.

    Args:
        log: gets what the processes print.
        count: of processes.
        preload: modules that are imported once, before the first function; None: as a Worker does.
    """

    def __init__(self, log: Path, count: int, preload: Sequence[str] | None = None) -> None:
        arguments: dict[str, Any] = {} if preload is None else {"preload": preload}
        self._workers = [Worker(log, **arguments) for _ in range(count)]
        self._outcomes: dict[int, Returned | Failure] = {}
        self._first_done = 0.0

    def start(self) -> None:
        """Begin to import the modules, before there is a function to call."""
        for worker in self._workers:
            worker.start()

    def submit(self, function: Callable[..., Any], *args: Any) -> None:
        """Send a function, which each process calls as ``function(*args)``."""
        self._outcomes = {}
        count = len(self._workers)
        port = _free_port()
        for rank, worker in enumerate(self._workers):
            worker.submit(_call_in_group, _environment(rank, count, port), function, args)

    def poll(self, seconds: float) -> Returned | Failure | None:
        """Wait for what became of the function, at most so long; None while it works."""
        end = time.monotonic() + seconds
        while True:
            for rank, worker in enumerate(self._workers):
                if rank in self._outcomes:
                    continue
                left = max(0.0, end - time.monotonic())
                outcome = worker.poll(min(left, LOOK_SECONDS))
                if outcome is not None:
                    self._first_done = self._first_done if self._outcomes else time.monotonic()
                    self._outcomes[rank] = outcome
            outcome = self._outcome_that_counts()
            if outcome is not None or time.monotonic() >= end:
                return outcome

    def _outcome_that_counts(self) -> Returned | Failure | None:
        """What counts: a failure, else the first process's, else that of one that ended early."""
        for outcome in self._outcomes.values():
            if isinstance(outcome, Failure):
                self.close()
                return outcome
        if len(self._outcomes) == len(self._workers):
            return self._outcomes[0]
        if self._outcomes and time.monotonic() - self._first_done > PATIENCE:
            self.close()
            return next(iter(self._outcomes.values()))
        return None

    @property
    def told(self) -> str:
        """What the first process said last of its progress."""
        return self._workers[0].told

    @property
    def silent_seconds(self) -> float:
        """Seconds since a function was sent, or the most silent process said something."""
        at_work = [one for rank, one in enumerate(self._workers) if rank not in self._outcomes]
        return max((worker.silent_seconds for worker in at_work), default=0.0)

    def kill(self, limit: float) -> None:
        """End processes of which one said nothing for so long; the next poll gives a Failure."""
        for worker in self._workers:
            worker.kill(limit)

    def close(self) -> None:
        """End the processes, if they were started."""
        for worker in self._workers:
            worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _environment(rank: int, count: int, port: int) -> dict[str, str]:
    """The variables that torchelastic sets, which name a process's place among the others."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "bstune",
    }


def _call_in_group(
    environment: dict[str, str], function: Callable[..., Any], args: Sequence[Any]
) -> Any:
    """Call a function as one of a group, which is a new one for each call."""
    import torch
    from torch import distributed

    # The processes share the cores.
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(environment["WORLD_SIZE"])))
    # Here, not after the last call: a process that has failed leaves the others waiting, which does
    # not look like a failure of theirs.
    if distributed.is_initialized():
        distributed.destroy_process_group()
    os.environ.update(environment)
    return function(*args)


def _free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port
