"""Runs replayed studies that are killed at commits, syncs, renames and unlinks, then continued.

``python tests/kills.py STUDIES KILLS``

So many studies of different arguments, each killed so many times at points that are drawn from all of its own; every
kill is of a study in a new folder, which the same command then continues. It prints a line of JSON for each study.
Each run is a fork of this process, which has imported what a study needs.
"""

import json
import os
import random
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"

from rich import console  # noqa: F401 (before the forks, as the next ones)
from sqlalchemy.engine.default import DefaultDialect
from toolbox import column, contents, forked, made_table, read_rows

from bstune.__main__ import main
from bstune.study import report, run  # noqa: F401
from bstune.tracking.database import make_database

STUDY = (
    "workload=replay",
    "workload.target.value=0.14",
    "search.trials=5",
    "study=s",
    "output=outputs",
)
# Without beats two runs commit the same.
STUDY += ("search.lease_seconds=3600",)
SAMPLERS = ("frontier", "random", "tpe")
OBJECTIVES = ("steps", "time", "both", "curve")
# Every so many studies make MLflow's database, which takes seconds; the others find it made.
OWN_DATABASE = 5
# These values differ from run to run.
UNEQUAL = ("wall_seconds", "eval_seconds", "startup_seconds")
TRIALS = "bstune.trials"
DONE = "bstune.result_trials"


class Killer:
    """Counts the calls that make something durable, and kills this process just before or just after one."""

    def __init__(self, at: int, after: bool) -> None:
        self.at = at
        self.after = after
        self.calls = 0
        for owner, name in (
            (DefaultDialect, "do_commit"),
            (os, "replace"),
            (os, "rename"),
            (os, "unlink"),
            (os, "fsync"),
        ):
            setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            self.calls += 1
            # At 0 it is none: the first call is 1.
            mine = self.calls == self.at
            if mine and not self.after:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return call(*arguments, **named)
            finally:
                if mine:
                    os.kill(os.getpid(), signal.SIGKILL)

        return counted


def run_in(folder: Path, arguments: list[str], at: int = 0, after: bool = False) -> int:
    """Run the command in a folder, killed at a call; return its status."""

    def command() -> int:
        os.chdir(folder)
        output = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        killer = Killer(at, after)
        sys.argv = ["bstune", *arguments]
        status = main()
        Path("calls").write_text(str(killer.calls))
        return status

    return forked(command)


def history(folder: Path) -> dict[int, Any]:
    """The outcome of each trial index; numbers count the trials that were cut short, too."""
    trials = read_rows(folder / "outputs" / "trials.jsonl")
    index = {trial["number"]: trial["trial_index"] for trial in trials}
    fields = ("batch_size", "lr", "seed", "status", "steps", "history")
    outcomes = {}
    for trial in trials:
        if trial["status"] != "failed":
            outcome = [trial[name] for name in fields]
            # Numbers differ between studies that were cut short at other points; indices do not.
            outcome.append(index.get(trial["resumed_from"]))
            outcome.append(index.get(trial["replicate_of"]))
            outcomes[trial["trial_index"]] = outcome
    return outcomes


def tracked(folder: Path) -> list[Any]:
    """MLflow's record of the study: its run, and those of the trials that were not cut short."""
    with closing(sqlite3.connect(folder / "mlflow.db")) as database:

        def of(run: str, what: str) -> list[Any]:
            return database.execute(f"SELECT {what} WHERE run_uuid = ?", (run,)).fetchall()

        found = []
        for run, status in database.execute(
            "SELECT run_uuid, status FROM runs WHERE lifecycle_stage = 'active'"
        ):
            tags = dict(of(run, "key, value FROM tags"))
            params = dict(of(run, "key, value FROM params"))
            metrics = sorted(of(run, "key, step, value FROM metrics"))
            metrics = [metric for metric in metrics if metric[0].rpartition("/")[2] not in UNEQUAL]
            if tags.get("bstune.status") != "failed":
                found.append([tags["bstune.kind"], params.get("trial_index"), status, metrics])
    return sorted(found, key=str)


def complete(folder: Path) -> bool:
    """Whether MLflow has each trial of the study once, those that were cut short too, and all have ended."""
    numbers = column(read_rows(folder / "outputs" / "trials.jsonl"), "number")
    with closing(sqlite3.connect(folder / "mlflow.db")) as database:
        active = database.execute(
            "SELECT run_uuid, status FROM runs WHERE lifecycle_stage = 'active'"
        ).fetchall()
        tags = database.execute("SELECT run_uuid, key, value FROM tags").fetchall()
    status_of = dict(active)
    sent: list[int] = []
    done = []
    for run_uuid, name, value in tags:
        if run_uuid in status_of and name == TRIALS:
            sent += map(int, value.split())
        elif run_uuid in status_of and name == DONE:
            done.append(value)
    ended = "RUNNING" not in status_of.values()
    return ended and sorted(sent) == numbers and done == [str(len(numbers))]


def left(folder: Path) -> list[str]:
    """The names of the files below a folder, MLflow's copies of them under one name without its partial ones."""
    names = []
    copies = set()
    for file in contents(folder):
        path = file.relative_to(folder)
        if path.parts[0] != "mlruns":
            names.append(str(path))
        elif not path.name.startswith(".artifact.uploading"):
            copies.add(path.name)
    return sorted([*copies, *names])


def check(number: int, kills: int, table: Path, database: Path) -> dict[str, Any]:
    """Kill one of the studies at sampled points, continue each with the same command; return what differs."""
    # Twelve studies have every pair of sampler and objective.
    sampler = SAMPLERS[number % 3]
    objective = OBJECTIVES[number % 4]
    replicates = 1 - number // 4 % 2
    arguments = [
        *STUDY,
        f"workload.table={table}",
        f"search.objective={objective}",
        f"seed={number}",
    ]
    arguments += [f"search.replicates={replicates}", "mlflow.uri=sqlite:///mlflow.db"]
    arguments += [] if sampler == "frontier" else [f"sampler={sampler}"]
    start = time.monotonic()

    def study(name: str, at: int = 0, after: bool = False) -> Path:
        folder = Path(name)
        if number % OWN_DATABASE:
            shutil.copy(database, folder / "mlflow.db")
        assert run_in(folder, arguments, at, after) == (-signal.SIGKILL if at else 0), (
            folder / "log"
        ).read_text()
        return folder

    with tempfile.TemporaryDirectory() as name:
        whole = study(name)
        calls = int((whole / "calls").read_text())
        expected = history(whole)
        sent = tracked(whole)
        files = left(whole)
        assert complete(whole)
    counts = dict.fromkeys(("kills", "equal", "mlflow"), 0)
    different = []
    # Just before each call, and just after it.
    points = list(product(range(1, calls + 1), (False, True)))
    for at, after in sorted(random.Random(number).sample(points, min(kills, len(points)))):
        with tempfile.TemporaryDirectory() as name:
            folder = study(name, at, after)
            status = run_in(folder, arguments)
            equal = status == 0 and history(folder) == expected and left(folder) == files
            mlflow = status == 0 and complete(folder) and tracked(folder) == sent
            for key, one in (("kills", True), ("equal", equal), ("mlflow", mlflow)):
                counts[key] += one
            if not (equal and mlflow):
                extra = sorted({*left(folder)} ^ {*files})
                log = (folder / "log").read_text()[-2000:]
                different.append(
                    {"at": at, "after": after, "status": status, "files": extra, "log": log}
                )
    what = {
        "study": number,
        "sampler": sampler,
        "objective": objective,
        "replicates": replicates,
        "calls": calls,
    }
    return {**what, **counts, "seconds": round(time.monotonic() - start), "different": different}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        rows = made_table(Path(scratch))
        empty = Path(scratch) / "mlflow.db"
        assert forked(lambda: make_database(empty)) == 0
        for one in range(int(sys.argv[1])):
            print(json.dumps(check(one, int(sys.argv[2]), rows, empty)), flush=True)
