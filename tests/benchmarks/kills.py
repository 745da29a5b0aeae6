"""Gate *kills*: SIGKILL at any moment loses no finished trial and doubles none.

    python tests/benchmarks/kills.py [--kills 15] [--workloads replay digits] [--workers 1]

A row starts a study, kills the process group of one of its processes after a random time, and
starts that again, as often as asked; then it runs to its end. With ``--workers N`` N processes
share the study on a PostgreSQL server of its own: the command, and N - 1 times ``bstune worker``.
After each kill every record that was stored before is still there, and at the end each place of the
plan has one record, and nothing runs.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import optuna
from common import run_gate

from bstune.core.records import Record

sys.path.insert(0, str(Path(__file__).parents[1]))
from postgres import Postgres

COMMANDS = {
    "replay": ["+workload=replay", "table=fashion_mlp", "trials=200"],
    "digits": ["+workload=digits", "trials=150"],
}
UNFIT = ("failed", "refused", "out of memory")
# Seconds after the plan was printed within which a process is killed.
LONGEST = 5.0


class Process:
    """A process of a study, in a group of its own."""

    def __init__(self, folder, *options):
        self.log = folder / f"process-{time.monotonic_ns()}.log"
        with self.log.open("w") as log:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "bstune", *options],
                cwd=folder,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )

    def wait_for_plan(self):
        """Wait until it has printed its plan, or ended."""
        while "configurations" not in self.log.read_text() and self.popen.poll() is None:
            time.sleep(0.05)

    def kill(self):
        os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()


def stored(url):
    """The study in a storage, None before it is made, and its records by number."""
    try:
        (name,) = optuna.get_all_study_names(url)
    except Exception:  # the tables may not be made yet  # noqa: BLE001
        return None, {}
    study = optuna.load_study(study_name=name, storage=url)
    return study, {
        trial.number: Record.model_validate_json(trial.user_attrs["record"])
        for trial in study.trials
        if "record" in trial.user_attrs and not came_late(trial)
    }


def came_late(trial):
    """Whether a record came through after another process had failed its trial."""
    status = json.loads(trial.user_attrs["record"])["status"]
    return trial.state == optuna.trial.TrialState.FAIL and status not in UNFIT


def measure(workload, workers, kills, seed):
    """One study that is killed so many times; what came of it."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        # The server has a user of its own.
        folder.chmod(0o755)
        url = f"sqlite:///{folder}/bstune.db"
        if workers > 1:
            (folder / "postgres").mkdir()
            server = Postgres(folder / "postgres")
            stack.callback(server.stop)
            url = server.new_url()
        return killed(workload, workers, kills, seed, folder, url)


def killed(workload, workers, kills, seed, folder, url):
    """The same in a folder, with a database."""
    rng = random.Random(seed)
    seen, lost = {}, 0
    tune = [*COMMANDS[workload], f"seed={seed}", "mlflow.uri=null", f"storage={url}"]
    join = ["worker", f"storage={url}", f"study={workload}"]
    commands = [tune, *[join] * (workers - 1)]
    processes = []
    for command in commands:
        processes.append(Process(folder, *command))
        processes[0].wait_for_plan()
    for _ in range(kills):
        place = rng.randrange(workers)
        processes[place].wait_for_plan()
        time.sleep(rng.uniform(0.05, LONGEST))
        processes[place].kill()
        records = stored(url)[1]
        lost += sum(records.get(number) != record for number, record in seen.items())
        seen = records
        processes[place] = Process(folder, *commands[place])
    statuses = [process.popen.wait() for process in processes]
    study, records = stored(url)
    lost += sum(records.get(number) != record for number, record in seen.items())
    # One that failed, as what hangs does, leaves its place free for another try.
    failed = [number for number, record in records.items() if record.status == "failed"]
    places = Counter(record.place for number, record in records.items() if number not in failed)
    searched = sorted(int(p.split("/")[1]) for p in places if p.startswith("search/"))
    return {
        "records": len(records),
        "lost": lost,
        "failed": len(failed),
        "doubled": sum(count - 1 for count in places.values()),
        "gaps": len(set(range(len(searched))) - set(searched)),
        "running": sum(trial.state == optuna.trial.TrialState.RUNNING for trial in study.trials),
        "status": statuses,
    }


if __name__ == "__main__":
    run_gate(
        __doc__,
        "kills.jsonl",
        measure,
        lambda rows: rows,
        seeds=1,
        workloads=("workload", (*COMMANDS,)),
        workers=("workers", (1,)),
        kills=("kills", (15,)),
    )
