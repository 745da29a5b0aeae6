"""bstune beside a script with Optuna's TPE, on small projects as strangers write them, for the same wall time.

    python tests/benchmarks/bench_projects.py [--seconds 60] [--seeds 5] [--projects NAME ...] [--json FILE]

Both are commands that get ``--seconds`` from their start to their end, imports, survey and preflight in them, and one
core each, at once and in turns. What each picks is trained on fresh seeds, alternately in one process: the training
seconds until the target are compared. A run that misses counts as unbounded.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml
from common import machine, options_of, write

from bstune.core.records import TrialSpec
from bstune.study.prepare import compose_checked
from bstune.trial.loop import run_trial
from bstune.trial.workload import load

PROJECTS = Path(__file__).parents[1] / "projects"
SCRIPT = Path(__file__).with_name("optuna_script.py")
NAMES = ("lazy_layers", "one_cycle", "pl_transformer")
LR_FACTOR = 30.0  # of the reference, to either side: what the script searches
FRESH = 5  # seeds on which each pick is trained


def workload_of(name: str) -> dict:
    return yaml.safe_load((PROJECTS / "conf" / "workload" / f"{name}.yaml").read_text())


def bstune_command(name: str, seconds: float, seed: int) -> list[str]:
    options = [
        f"search.wall_seconds={seconds}",
        "search.trials=1000",
        f"seed={seed}",
        "mlflow.enabled=false",
    ]
    return [
        "-m",
        "bstune",
        "--config-dir",
        str(PROJECTS / "conf"),
        f"+workload={name}",
        *options,
        "device=cpu",
    ]


def script_command(name: str, seconds: float, seed: int) -> list[str]:
    own = workload_of(name)
    lr = own["reference"]["lr"]
    numbers = [own["batch_size"]["low"], own["batch_size"]["high"], lr / LR_FACTOR, lr * LR_FACTOR]
    numbers += [own["budget"]["steps"], own["budget"]["examples"], seconds, seed]
    target = own["target"]
    names = [own["module"]["_target_"], own["data"]["_target_"], target["metric"], target["value"]]
    return [str(part) for part in (SCRIPT, *names, *numbers, json.dumps(own.get("trainer", {})))]


def start(command: list[str], core: int, folder: Path) -> subprocess.Popen:
    folder.mkdir(parents=True)
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(PROJECTS),
        "BSTUNE_CACHE": str(folder / "cache"),
    }
    log = (folder / "log").open("w")
    pinned = ["taskset", "-c", str(core), sys.executable, *command]
    return subprocess.Popen(pinned, cwd=folder, env=environment, stdout=log, stderr=log)


def pick_of(folder: Path, tool: str) -> dict | None:
    """Return the batch size, learning rate and horizon that a command picked; None if nothing reached the target."""
    if tool == "script":
        return json.loads((folder / "log").read_text().splitlines()[-1])
    best = yaml.safe_load(next(folder.glob("outputs/*/best.yaml")).read_text())
    return (
        {name: next(iter(best.values()))[name] for name in ("batch_size", "lr", "horizon")}
        if best
        else None
    )


def main() -> None:
    options = options_of(
        __doc__,
        ("--seconds", {"type": float, "default": 60.0}),
        ("--seeds", {"type": int, "default": 5}),
        ("--projects", {"nargs": "+", "default": list(NAMES)}),
    )
    about, rows = machine(options.device, options.seeds), []
    sys.path.insert(0, str(PROJECTS))
    for name in options.projects:
        for seed in range(options.seeds):
            with tempfile.TemporaryDirectory() as folder:
                rows.append(compare(name, seed, options.seconds, Path(folder)))
            print(json.dumps(rows[-1]), flush=True)
            write(options.json, about, rows)


def compare(name: str, seed: int, seconds: float, folder: Path) -> dict:
    commands = {
        "bstune": bstune_command(name, seconds, seed),
        "script": script_command(name, seconds, seed),
    }
    began, took = time.monotonic(), {}
    runs = {
        tool: start(commands[tool], (place + seed) % 2, folder / tool)
        for place, tool in enumerate(commands)
    }
    while len(took) < len(runs):
        time.sleep(0.1)
        took |= {
            tool: time.monotonic() - began
            for tool, run in runs.items()
            if run.poll() is not None and tool not in took
        }
    picks = {tool: pick_of(folder / tool, tool) for tool in runs}
    return {
        "project": name,
        "seed": seed,
        "command_seconds": took,
        "picks": picks,
        "fresh": fresh_seconds(name, picks),
    }


def fresh_seconds(name: str, picks: dict) -> dict:
    """Return the training seconds to the target of each pick on fresh seeds, infinite where it was missed."""
    config = compose_checked(
        ["--config-dir", str(PROJECTS / "conf"), f"+workload={name}", "device=cpu"]
    )
    workload, protocol = load(config)
    seconds: dict[str, list[float]] = {tool: [] for tool in picks}
    for seed in range(1000, 1000 + FRESH):
        for tool, pick in picks.items():
            if pick is not None:
                horizon = pick.get("horizon")  # None: the schedule is as long as the budget
                spec = TrialSpec(
                    0, 0, pick["batch_size"], pick["lr"], None, seed, max_steps=horizon
                )
                result = run_trial(workload, spec, protocol, horizon=horizon)
            reached = pick is not None and result.status == "reached"
            seconds[tool].append(result.train_seconds if reached else math.inf)
    return {tool: sorted(values) for tool, values in seconds.items()}


if __name__ == "__main__":
    main()
