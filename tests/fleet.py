"""Processes that work on one study of replayed trials, as on machines of their own: to be killed and replaced."""

import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import optuna
from rich.console import Console

from bstune.core.errors import BstuneError
from bstune.options import StudyOptions
from bstune.study.prepare import compose_checked, compose_joined, prepare
from bstune.study.prepared import PreparedStudy
from bstune.study.run import run_study, run_worker
from bstune.study.storage.opening import find_study
from bstune.study.storage.patience import STORAGE_ERRORS
from bstune.study.storage.trials import trial_index_of
from bstune.trial.backend import make_protocol
from bstune.trial.replay import ReplayBackend

CONTEXT = multiprocessing.get_context("forkserver")
# On the fork server's path, as we are not.
PRELOAD = [
    "bstune.study.run",
    "bstune.trial.replay",
    "alembic.command",
    "optuna.storages._rdb.models",
]
STUDY = (
    "workload=replay",
    "workload.table=fashion_mlp",
    "search.objective=steps",
    "search.precision=null",
    "study=s",
)
STUDY += ("search.replicates=0", "mlflow.enabled=false")
DONE = (optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED)
FAIL = optuna.trial.TrialState.FAIL


class Sleeping(ReplayBackend):
    """Answers from the table, after ``seconds``; a stopped trial leaves its state in the folder of its machine."""

    def __init__(self, options, seconds=0.0, states=False):
        super().__init__(options, make_protocol(options, None))
        self.seconds = seconds
        self.states = states
        self.train_examples = 1 if states else None

    def run(self, spec, folder, resumed_from):
        time.sleep(self.seconds)
        if self.states:
            # Machines do not share their disks.
            assert resumed_from is None or folder.state(resumed_from.number).exists(), (
                "its state is elsewhere"
            )
            folder.states.mkdir(exist_ok=True)
            folder.state(spec.number).touch()
            folder.checkpoint(spec.number).touch()
        return super().run(spec, folder, resumed_from)

    def resumable(self, number, folder):
        return not self.states or folder.state(number).exists()


def work(role: str, folder: Path, options: Sequence[str], backend: dict) -> None:
    """Own the study, or join it, in this process: what it prints is appended to ``log`` in its folder."""
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    sys.stdout = sys.stderr = Path("log").open("a", buffering=1)  # noqa: SIM115 (until the process ends)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    console = Console(file=sys.stdout, width=200)
    try:
        if role == "owner":
            arguments = [*STUDY, *options]
            prepared = _prepared(compose_checked(arguments).options, backend)
            run_study(prepared, arguments, console)
        else:
            storage = next(
                one.removeprefix("storage=") for one in options if one.startswith("storage=")
            )
            study = find_study("s", storage)
            joined = compose_joined(study, ["study=s", *options])
            run_worker(_prepared(joined.options, backend), study, console)
    except BstuneError as error:
        print(f"error: {error}")
        sys.exit(error.exit_status)


def _prepared(options: StudyOptions, backend: dict) -> PreparedStudy:
    return prepare(options, None, backend=Sleeping(options, **backend))


def start(role: str, folder: Path, *options: str, **backend: object) -> ForkServerProcess:
    """Start a process that owns or joins the study; its imports are made once for all of them."""
    CONTEXT.set_forkserver_preload(PRELOAD)
    process = CONTEXT.Process(target=work, args=(role, folder, options, backend), daemon=True)
    process.start()
    return process


class Watch:
    """What a study's storage holds, as an onlooker reads it."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._study = None

    def trials(self, *states: optuna.trial.TrialState) -> list[optuna.trial.FrozenTrial]:
        """The study's trials in these states, none where there is no study yet or no server."""
        try:
            self._study = self._study or find_study("s", self._url)
            return self._study.get_trials(deepcopy=False, states=states)
        except (BstuneError, *STORAGE_ERRORS):
            return []

    def finished(self) -> dict[int, int]:
        """The number of finished trials at each index."""
        return dict(Counter(trial_index_of(trial) for trial in self.trials(*DONE)))

    def running(self) -> int:
        """The number of running trials."""
        return len(self.trials(optuna.trial.TrialState.RUNNING))
