"""The first second of a study: its worker imports torch while this process imports the rest.

This module imports little itself.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from bstune.core.errors import InputError
from bstune.options import Options
from bstune.system.files import StudyFolder, claim_folder, ensure_home
from bstune.system.ticker import Ticker
from bstune.trial.ranks import Ranks
from bstune.trial.worker import AnyWorker, InProcess, Worker, call, value_of

# The most seconds that a worker may take to start.
START_SECONDS = 600.0
# What a worker imports before it is sent the first function, which needs all of it.
PRELOAD = (
    "torch",
    "lightning.pytorch",
    "bstune.trial.lightning",
    "bstune.study.loop",
    "bstune.study.machine",
)


def further_workers(workers: int, first: AnyWorker, log: Path) -> list[Worker]:
    """The workers beside the first one; each has the next CUDA device, as far as there are.

    Args:
        workers: all that train at once.
        first: which knows the devices.
        log: of the first one, beside which theirs lie.
    """
    if workers <= 1:
        return []
    devices: list[str] = value_of(call(first, cuda_devices, limit=START_SECONDS))
    made = []
    for place in range(1, workers):
        variables = {"CUDA_VISIBLE_DEVICES": devices[place % len(devices)]} if devices else {}
        made.append(Worker(log.with_stem(f"{log.stem}-{place}"), PRELOAD, variables))
    return made


def cuda_devices() -> list[str]:
    """The CUDA devices that a worker sees, as ``CUDA_VISIBLE_DEVICES`` names them."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    there = torch.cuda.device_count()
    return named.split(",")[:there] if named else list(map(str, range(there)))


@dataclass(frozen=True)
class Begun:
    """What a study has from its first second on."""

    at: float
    """The ``time.monotonic()`` from which a time limit counts."""
    ticker: Ticker
    worker: AnyWorker | None
    """None for recorded runs."""
    log: Path = Path()
    """Gets what it prints."""

    def close(self) -> None:
        """End what runs."""
        self.ticker.close()
        if self.worker is not None:
            self.worker.close()


def begin(
    options: Options,
    at: float | None = None,
    trains: bool = True,
    log: Path | None = None,
) -> Begun:
    """Claim a study's folder, and start its worker.

    Args:
        options: of the study.
        at: when the command began, by ``time.monotonic()``; None: now.
        trains: whether there is something to train: recorded runs need no worker.
        log: gets what the worker prints, in a folder which is made; the study's own.

    Raises:
        BstuneError: for options and a folder that cannot be used.
    """
    at = time.monotonic() if at is None else at
    ensure_home()
    # A process each, also on CUDA, imports torch before anything can be asked of it.
    there = len(os.sched_getaffinity(0))
    if options.devices > there:
        raise InputError(
            f"devices must be at most {there}, the processors there are, but got {options.devices}"
        )
    folder = StudyFolder(Path(options.output))
    claim_folder(folder, options.study_name, options.storage)
    log = log or folder.log
    worker: AnyWorker | None = None
    if trains and options.workers == 0:
        worker = InProcess()
    elif trains:
        log.parent.mkdir(exist_ok=True)
        worker = Worker(log, PRELOAD)
        if options.devices > 1:
            worker = Ranks(log, options.devices, PRELOAD)
        worker.start()
    return Begun(at, Ticker().start(), worker, log)
