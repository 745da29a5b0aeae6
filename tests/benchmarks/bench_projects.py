"""A stranger's first study beside a script with Optuna's TPE, on small projects, for the same wall time.

    python tests/benchmarks/bench_projects.py [--options quick=true] [--seeds 3] [--projects NAME ...]
        [--folder DIR] [--core 0] [--json FILE]

Each study is a command with the ``--options`` given, say ``search.trials=10``; the script then gets as many seconds as
the command took from the prompt to its end, imports, preflight and survey in them. Both run on one core, one after the
other. What each picks is trained on fresh seeds, alternately in one process: the training seconds until the target are
compared, with the reference's. A run that misses counts as unbounded.

``--folder`` has the packages and ``conf/workload``; by default these are ``tests/projects``. Rows that the JSON file
has already are not run again.
"""

import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import yaml
from common import machine, options_of, write

from bstune.core.records import TrialSpec
from bstune.study.prepare import compose_checked
from bstune.trial.loop import run_trial
from bstune.trial.workload import load_workload

PROJECTS = Path(__file__).parents[1] / "projects"
SCRIPT = Path(__file__).with_name("optuna_script.py")
NAMES = (
    "lazy_layers",
    "one_cycle",
    "pl_transformer",
    "callback_metric",
    "no_test_split",
    "early_stopping",
)
# How a line of progress ends.
TO_GO = re.compile(r"about ([\d.,]+) (ms|s|min|h) to go$")
UNITS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
# Each pick is trained on so many seeds.
FRESH = 5
# An answer begins with one of these labels.
ANSWERS = ("USE",)


def run(command: list[str], core: int, folder: Path, projects: Path) -> list[tuple[float, str]]:
    """Run a command of Python on one core; return its lines, each with the seconds from the start."""
    folder.mkdir(parents=True)
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(projects),
        "PYTHONUNBUFFERED": "1",
        "BSTUNE_CACHE": str(folder / "cache"),
    }
    began = time.monotonic()
    lines = []
    with subprocess.Popen(
        ["taskset", "-c", str(core), sys.executable, *command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        for line in process.stdout:
            lines.append((time.monotonic() - began, line.rstrip()))
    # A last line of our own tells how it ended, and when.
    lines.append((time.monotonic() - began, f"status {process.returncode}"))
    return lines


def estimates_of(lines: list[tuple[float, str]], end: float) -> list[dict]:
    """The point of the search, the seconds left as said and the true ones, of each line with an estimate."""
    found = []
    for second, line in lines:
        said = TO_GO.search(line)
        place = re.search(r"point (\d+) of", line)
        if said is not None:
            seconds = float(said[1].replace(",", "")) * UNITS[said[2]]
            point = None if place is None else int(place[1])
            found.append({"point": point, "at": second, "said": seconds, "was": end - second})
    return found


def study_of(name: str, seed: int, options: list[str], core: int, folder: Path, projects: Path):
    """Run a stranger's study; return what it came to, and its pick."""
    command = ["-m", "bstune", "--config-dir", str(projects / "conf"), f"+workload={name}"]
    command += [*options, f"seed={seed}", "mlflow.enabled=false", "device=cpu"]
    lines = run(command, core, folder, projects)
    answered = [second for second, line in lines if line.split(" ")[0] in ANSWERS]
    curves = list(folder.glob("outputs/*/curve.json"))
    # A study that failed has nothing but its last lines.
    if not curves:
        return {"lines": [line for _, line in lines[-10:]]}, None, lines[-1][0]
    summary = json.loads(curves[0].read_text())
    text = (curves[0].parent / "trials.jsonl").read_text()
    trials = [json.loads(line) for line in text.splitlines()]
    # A trial that goes on begins where another one stopped.
    steps = {trial["number"]: trial["steps"] for trial in trials}
    stopped = [
        {"steps": trial["steps"], "from": steps.get(trial["resumed_from"], 0)}
        for trial in trials
        if trial["status"] == "stopped"
    ]
    best = summary[summary["use"]] if summary["use"] else None
    row = {
        "status": lines[-1][1],
        "first_line_seconds": lines[0][0],
        "longest_silence_seconds": max(
            after - before for (before, _), (after, _) in pairwise(lines)
        ),
        "answer_seconds": answered[0] if answered else None,
        "end_seconds": lines[-1][0],
        "answer": next((line for _, line in lines if line.split(" ")[0] in ANSWERS), None),
        "gain": summary["gain"],
        "so_far": summary["so_far"],
        "baseline": summary["baseline"],
        "stop_reason": summary["stop_reason"],
        "trials": len(trials),
        "stopped": stopped,
        "fresh_seeds": best and best["confirmed"],
        "estimates": estimates_of(lines, answered[0] if answered else lines[-1][0]),
    }
    pick = best and {name: best[name] for name in ("batch_size", "lr", "horizon")}
    return row, pick, lines[-1][0]


def compare(name: str, seed: int, options, folder: Path) -> dict:
    projects = Path(options.folder or PROJECTS).resolve()
    row, pick, seconds = study_of(
        name, seed, options.options, options.core, folder / "bstune", projects
    )
    workload = projects / "conf" / "workload" / f"{name}.yaml"
    script = [str(SCRIPT), str(workload), str(seconds), str(seed)]
    printed = run(script, options.core, folder / "script", projects)
    # The last line is the status; the one before it is the script's answer.
    last = printed[-2][1] if len(printed) > 1 else ""
    # Anything else is the end of an error's trace.
    is_pick = last == "null" or last.startswith("{")
    reference = yaml.safe_load(workload.read_text())["reference"]
    picks = {
        "bstune": pick,
        "script": json.loads(last) if is_pick else None,
        "reference": reference,
    }
    if not is_pick:
        row["script_lines"] = [line for _, line in printed[-5:]]
    return {
        "project": name,
        "seed": seed,
        "options": options.options,
        **row,
        "script_seconds": printed[-1][0],
        "picks": picks,
        "fresh": fresh_seconds(name, picks, projects),
    }


def fresh_seconds(name: str, picks: dict, projects: Path) -> dict:
    """The training seconds to the target of each pick on fresh seeds, infinite where it was missed."""
    composed = compose_checked(
        ["--config-dir", str(projects / "conf"), f"+workload={name}", "device=cpu"]
    )
    workload, protocol = load_workload(composed.options, composed.trained_recipe)
    seconds: dict[str, list[float]] = {tool: [] for tool in picks}
    # Within a seed the tools take turns, so that what else the machine does slows all alike.
    for seed in range(1000, 1000 + FRESH):
        for tool, pick in picks.items():
            took = math.inf
            if pick is not None:
                # Without a horizon the schedule is as long as the budget.
                horizon = pick.get("horizon")
                spec = TrialSpec(
                    0, 0, pick["batch_size"], pick["lr"], None, seed, max_steps=horizon
                )
                result = run_trial(workload, spec, protocol, horizon=horizon)
                if result.status == "reached":
                    took = result.train_seconds
            seconds[tool].append(took)
    return {tool: sorted(values) for tool, values in seconds.items()}


def main() -> None:
    options = options_of(
        __doc__,
        ("--options", {"nargs": "+", "default": ["quick=true"]}),
        ("--seeds", {"type": int, "default": 3}),
        ("--projects", {"nargs": "+", "default": list(NAMES)}),
        ("--folder", {"default": None}),
        ("--core", {"type": int, "default": 0}),
    )
    about = machine(options.device, options.seeds)
    path = Path(options.json) if options.json else None
    rows = json.loads(path.read_text())["rows"] if path and path.exists() else []
    done = {(row["project"], row["seed"]) for row in rows}
    sys.path.insert(0, str(Path(options.folder or PROJECTS).resolve()))
    for seed in range(options.seeds):
        for name in options.projects:
            if (name, seed) in done:
                continue
            with tempfile.TemporaryDirectory() as folder:
                rows.append(compare(name, seed, options, Path(folder)))
            print(json.dumps(rows[-1]), flush=True)
            write(options.json, about, rows)


if __name__ == "__main__":
    main()
