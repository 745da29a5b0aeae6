"""The first second of a study: its worker imports torch while this process imports the rest.

This module imports little itself.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from bstune.core.errors import InputError
from bstune.options import Options
from bstune.system.files import StudyFolder, claim_folder
from bstune.system.ticker import Ticker
from bstune.trial.ranks import Ranks
from bstune.trial.worker import AnyWorker, InProcess, Worker

# What a worker imports before it is sent the first function, which needs all of it.
PRELOAD = (
    "torch",
    "lightning.pytorch",
    "bstune.trial.lightning",
    "bstune.study.loop",
    "bstune.study.machine",
)


@dataclass(frozen=True)
class Begun:
    """What a study has from its first second on."""

    at: float
    """The ``time.monotonic()`` from which a time limit counts."""
    ticker: Ticker
    worker: AnyWorker | None
    """None for recorded runs."""

    def close(self) -> None:
        """End what runs."""
        self.ticker.close()
        if self.worker is not None:
            self.worker.close()


def begin(
    options: Options, name: str, at: float | None = None, trains: bool = True, log: str = ""
) -> Begun:
    """Claim a study's folder, and start its worker.

    Args:
        options: of the study.
        name: of the study.
        at: when the command began, by ``time.monotonic()``; None: now.
        trains: whether there is something to train: recorded runs need no worker.
        log: a folder in the study's, which is made, for what the worker prints; the study's own.

    Raises:
        BstuneError: for options and a folder that cannot be used.
    """
    at = time.monotonic() if at is None else at
    # A process each, also on CUDA, imports torch before anything can be asked of it.
    there = len(os.sched_getaffinity(0))
    if options.devices > there:
        raise InputError(
            f"devices must be at most {there}, the processors there are, but got {options.devices}"
        )
    folder = StudyFolder(Path(options.output))
    claim_folder(folder, name, options.storage)
    worker: AnyWorker | None = None
    if trains and options.workers == 0:
        worker = InProcess()
    elif trains:
        of_worker = StudyFolder(folder.root / log)
        of_worker.root.mkdir(exist_ok=True)
        worker = Worker(of_worker.log, PRELOAD)
        if options.devices > 1:
            worker = Ranks(of_worker.log, options.devices, PRELOAD)
        worker.start()
    return Begun(at, Ticker().start(), worker)
