"""The first second of a study: its worker imports torch while this process imports the rest.

This module imports little itself.
"""

from pathlib import Path

from bstune.options import Options
from bstune.system.files import StudyFolder, claim_folder
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


def begin(options: Options, name: str, log: Path | None = None) -> AnyWorker:
    """Claim a study's folder, and start the worker.

    Args:
        options: of the study.
        name: of the study.
        log: gets what the worker prints, and its folder is made; None: the study's own.

    Raises:
        BstuneError: for options and a folder that cannot be used.
    """
    folder = StudyFolder(Path(options.output))
    claim_folder(folder, name, options.storage)
    if options.workers == 0:
        return InProcess()
    log = log or folder.log
    log.parent.mkdir(exist_ok=True)
    worker: AnyWorker = Worker(log, PRELOAD)
    if options.devices > 1:
        worker = Ranks(log, options.devices, PRELOAD)
    worker.start()
    return worker
