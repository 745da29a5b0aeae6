"""Gate *projects*: twenty projects as their authors wrote them, each tuned for ``--walls`` seconds.

    python tests/benchmarks/twenty_projects.py [--names ...]

A study is given what a file of ``tests/projects/conf/workload`` says: data, module, Trainer and
target. Batch size, rate and length are the project's own.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import run_gate

import bstune

FOLDER = Path(__file__).parents[1] / "projects"
CONF = FOLDER / "conf" / "workload"
TREE = FOLDER / "hydra_tree" / "conf"
CLI = FOLDER / "lightning_cli.yaml"
LOOP = FOLDER / "own_loop.py"
SWEEP = FOLDER / "hydra_digits" / "train.py"


def answer_of(place):
    """The verdict and the speedup that a study's folder has; None: it has no answer."""
    for file in place.glob("outputs/*/curve.json"):
        result = bstune.load(file.parent)
        return {
            "verdict": result.verdict,
            "configurations": result.configurations,
            "best": [getattr(result.best, name, None) for name in ("batch_size", "lr")],
            "speedup": [getattr(result.speedup, name, None) for name in ("value", "low", "high")],
        }
    return None


def command_of(name, wall):
    """What tunes a project."""
    options = [f"wall_seconds={wall:g}", "mlflow.uri=null"]
    module = [sys.executable, "-m", "bstune"]
    if name == CLI.stem:
        return [*module, "lightning", str(CLI), "target=val_loss <= 0.2", *options]
    if name == "hydra_sweep":
        sweeper = [f"hydra.sweeper.wall_seconds={wall:g}", "+hydra.sweeper.mlflow.uri=null"]
        most = ["hydra.sweeper.trials=null", "hydra.sweeper.seeds=3"]
        return [sys.executable, str(SWEEP), "-m", *sweeper, *most]
    if name == LOOP.stem:
        return [sys.executable, str(LOOP), str(wall)]
    file = TREE / "workload" / "wine.yaml" if name == "hydra_tree" else CONF / f"{name}.yaml"
    return [*module, "--config-dir", str(file.parents[1]), f"+workload={file.stem}", *options]


def measure(name, wall_seconds):
    """One study."""
    paths = [str(Path(bstune.__file__).parents[1]), str(FOLDER)]
    with tempfile.TemporaryDirectory() as place:
        began = time.monotonic()
        done = subprocess.run(
            command_of(name, wall_seconds),
            cwd=place,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            capture_output=True,
            text=True,
            timeout=3 * wall_seconds,
        )
        return {
            "status": done.returncode,
            "answer": answer_of(Path(place)),
            "last_line": (done.stderr.strip().splitlines() or [""])[-1] if done.returncode else "",
            "seconds": round(time.monotonic() - began, 1),
        }


if __name__ == "__main__":
    files = [file.stem for file in sorted(CONF.glob("*.yaml"))]
    run_gate(
        __doc__,
        "twenty_projects.jsonl",
        measure,
        lambda rows: rows,
        seeds=None,
        names=("name", (*files, CLI.stem, "hydra_tree", "hydra_sweep", LOOP.stem)),
        walls=("wall_seconds", (120.0,)),
    )
