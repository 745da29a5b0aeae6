"""Gate *kills*: SIGKILL at any moment loses no finished trial and doubles none.

    python kills.py KILLS --rows rows/kills.jsonl [WORKLOAD ...]

starts a study, kills its process group after a random time, and starts it again, as often as asked;
then it runs to its end. After each kill every record that was stored before is still there, and at
the end each place of the plan has one record, and nothing runs.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import optuna

import bstune
from bstune.core.records import Record

COMMANDS = {
    "replay": ["+workload=replay", "table=fashion_mlp", "trials=200"],
    "digits": ["+workload=digits", "trials=150"],
}
# Seconds after the plan was printed within which a process is killed.
LONGEST = 5.0


def start(workload, folder, seed):
    options = [*COMMANDS[workload], f"seed={seed}", "mlflow.uri=null"]
    return subprocess.Popen(
        [sys.executable, "-m", "bstune", *options],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )


def stored(folder):
    """The records in the study's storage, by number."""
    database = folder / "outputs" / "bstune.db"
    if not database.exists():
        return {}
    try:
        (name,) = optuna.get_all_study_names(f"sqlite:///{database}")
    except Exception:  # the tables may not be made yet  # noqa: BLE001
        return {}
    study = optuna.load_study(study_name=name, storage=f"sqlite:///{database}")
    return {
        trial.number: Record.model_validate_json(trial.user_attrs["record"])
        for trial in study.trials
        if "record" in trial.user_attrs
    }, study


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("kills", type=int)
    parser.add_argument("workloads", nargs="*", default=["replay", "digits"])
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    rng = random.Random(given.seed)
    for workload in given.workloads:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            seen = {}
            lost = 0
            for _ in range(given.kills):
                process = start(workload, folder, given.seed)
                for line in process.stderr:
                    if "configurations" in line:
                        break
                time.sleep(rng.uniform(0.05, LONGEST))
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                now = stored(folder)
                records = now[0] if now else {}
                lost += sum(records.get(number) != record for number, record in seen.items())
                seen = records
            process = start(workload, folder, given.seed)
            process.stderr.read()
            status = process.wait()
            records, study = stored(folder)
            lost += sum(records.get(number) != record for number, record in seen.items())
            places = Counter(record.place for record in records.values())
            searched = sorted(int(p.split("/")[1]) for p in places if p.startswith("search/"))
            row = {
                "workload": workload,
                "bstune": [bstune.__file__, bstune.__version__],
                "kills": given.kills,
                "records_at_last_kill": len(seen),
                "trials": len(study.trials),
                "records": len(records),
                "asked_again": len(study.trials) - len(records),
                "lost": lost,
                "doubled": sum(count - 1 for count in places.values()),
                "gaps": len(set(range(len(searched))) - set(searched)),
                "running": sum(
                    trial.state == optuna.trial.TrialState.RUNNING for trial in study.trials
                ),
                "status": status,
            }
            given.rows.parent.mkdir(parents=True, exist_ok=True)
            with given.rows.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(row, flush=True)


if __name__ == "__main__":
    main()
