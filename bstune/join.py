"""``bstune worker``: joins a study from another process or machine, and trains what it plans.

What a storage holds is data: of it the workload's name and the options are read. The workload's
file is this machine's own, and has to be the same.
"""

import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bstune.config import compose
from bstune.core.errors import BstuneError, InputError, StudyError
from bstune.core.records import Frozen
from bstune.options import Options, options_from
from bstune.recipe.hydra import recipe_of
from bstune.run_study import study_trials
from bstune.study.begin import begin
from bstune.study.commands import COMMAND, Way
from bstune.study.make_plan import OF_MACHINE, fixed_options
from bstune.study.storage import StudyStorage, database_errors
from bstune.study.workload import Workload
from bstune.system.files import StudyFolder
from bstune.system.ticker import say


class Shared(Frozen):
    """What a study keeps for those who join it."""

    way: Way
    command: str
    """That began it."""
    workload: str | None = None
    options: dict[str, Any] = {}
    """Without those that whoever joins has of its own."""
    began: float = 0.0
    """By ``time.time()``."""


def join(arguments: Sequence[str]) -> None:
    """Train trials of a study that ``tune`` began, until its plan is done.

    Args:
        arguments: ``storage=URL study=NAME``, ``--config-dir DIR``, and options of this machine.

    Raises:
        InputError: for what is missing, and for an option that the study has.
        StudyError: there is no such study, or none that can be joined so.
    """
    given = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    url, name = given.get("storage"), given.get("study")
    if not url or not name:
        raise InputError(
            f"worker needs storage=URL and study=NAME, as {COMMAND} worker "
            f"storage=postgresql+psycopg://me@host/optuna study=digits"
        )
    with database_errors(url, "failed"):
        storage = StudyStorage(url, name)
        try:
            shared = _shared(storage)
            options, workload = _options_and_workload_here(shared, arguments, given)
            storage.check({**fixed_options(options), **workload.settings})
        except BstuneError:
            storage.discard()
            raise
    log = StudyFolder(Path(options.output)).log.with_stem(
        f"trials-{socket.gethostname()}-{os.getpid()}"
    )
    # A time limit counts from the study's own begin.
    at = time.monotonic() - (time.time() - shared.began)
    begun = begin(options, at, trains=workload.recipe is not None, log=log)
    # It trains all trials itself.
    list(study_trials(options, workload, begun, joins=True))
    say(f"nothing is left to train; the answer: {shared.command}")


def _shared(storage: StudyStorage) -> Shared:
    """What a storage has of its study; StudyError where it was not begun."""
    try:
        return Shared.model_validate(storage.shared)
    except ValidationError as error:
        raise StudyError(
            "the storage does not tell how its study was begun: run the command that began it"
        ) from error


def _options_and_workload_here(
    shared: Shared, arguments: Sequence[str], given: Mapping[str, str]
) -> tuple[Options, Workload]:
    """The options and the workload of a study, on this machine.

    Args:
        shared: what the study keeps for those who join it.
        arguments: of this command.
        given: the options among them.
    """
    of_study = {name: it for name, it in shared.options.items() if name not in OF_MACHINE}
    if shared.way != "command":
        raise StudyError(
            f"the study was begun by {shared.command}, which a worker cannot build: start the same "
            f"script here, with the same storage"
        )
    doubled = [key for key in given if key.lstrip("+").partition(".")[0] in of_study]
    if doubled:
        raise InputError(
            f"{', '.join(doubled)}: the study has its own; give options of this machine, such as "
            f"device, threads, workers, output and data_root"
        )
    composed = compose([f"+workload={shared.workload}", *arguments])
    options = options_from(composed.options.model_dump() | of_study)
    recipe = recipe_of(composed.parts, options) if composed.recipe else None
    composed = replace(composed, options=options, recipe=recipe)
    return options, composed.workload()
