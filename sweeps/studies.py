"""Studies of a sweep, which differ in one factor, and single trainings."""

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from bstune.config import compose
from bstune.core.errors import InputError
from bstune.core.records import Record
from bstune.result import Result, load
from bstune.run_study import run_study
from bstune.study.once import train_once
from bstune.system.files import StudyFolder, read_json, write_text
from bstune.system.secrets import hide
from bstune.system.ticker import say


def study(name: str, output: Path, arguments: Sequence[str]) -> Result:
    """Run a study, or go on with it, in a folder of its name in ``output``; read a finished one.

    A study that its ``wall_seconds`` have ended would train for as long again.

    Args:
        name: of the study.
        output: the sweep's folder, which has the studies' database, too.
        arguments: as on the command line, ``+workload=digits trials=32``; of two for one option
            the last one holds.

    Raises:
        BstuneError: as by :func:`bstune.run_study.run_study`, and for a study of other arguments.
    """
    say(f"study {name}")
    folder = output / name
    asked = output / f"{name}.json"
    given = hide([*arguments])
    if asked.exists() and read_json(asked) != given:
        raise InputError(
            f"{folder} is a study of other settings: give another output, or delete it and {asked}"
        )
    if StudyFolder(folder).result.exists():
        return load(folder)
    where = [f"study={name}", f"output={folder}", f"storage=sqlite:///{output}/studies.db"]
    composed = compose([*arguments, *where])
    write_text(asked, json.dumps(given))
    return run_study(composed.options, composed.workload())


def train(arguments: Sequence[str]) -> Record:
    """Train one configuration in this process; nothing is kept but its record.

    Args:
        arguments: as of :func:`study`, with ``trial.batch_size`` and ``trial.lr``, and
            ``trial.steps`` for a run of that length, whatever it reaches.

    Raises:
        BstuneError: as by :func:`bstune.study.once.train_once`.
    """
    with TemporaryDirectory() as folder:
        composed = compose([*arguments, "workers=0", f"output={folder}"])
        return train_once(composed.options, composed.workload())
