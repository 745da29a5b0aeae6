"""Gate *the race*: bstune beside a script of Optuna's TPE, on the same time. Run nothing else.

    PROJECT_DATA=... python tests/benchmarks/race.py [--walls 120] [--seeds 2]

A row is one race: each contestant (see ``contestants.py``) tunes one project in a process of its
own, quiet or beside two busy processes; all begin with the project's own pair and have the same
ranges and budget. Then the picks and the baseline are trained by the project's plain Trainer on
further seeds, quiet and in turns: the median of steps to the target times the step time.

Short form: ``--walls 60 --seeds 1 --projects tutorial char_lstm --rows /tmp/race.jsonl``.
"""

import json
import logging
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path

import torch
from common import run_gate
from pandas import json_normalize
from projects import PROJECTS, plain_run, step_seconds

import bstune

CONTESTANTS = ("bstune", "tpe")
LOADS = {"quiet": 0, "busy": 2}
# Further seeds of a judged pair, and how often its step time is measured, in turns.
RUNS = 5
TIMINGS = 2
FIRST_SEED = 10_000
# Seconds after its limit at which a contestant is ended.
GRACE = 120.0
# A pick that takes at most this times as long as another is at least as fast.
TIE = 1.05


@contextmanager
def busy(count):
    """Keep so many processes computing meanwhile."""
    spin = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(spin) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def compete(name, project, wall_seconds, seed):
    """What a contestant picked, its verdict, and where its seconds went."""
    command = [sys.executable, Path(__file__).with_name("contestants.py"), name, project]
    with tempfile.TemporaryDirectory() as folder:
        own = {"HOME": folder, "OMP_NUM_THREADS": "1"}
        own["PYTHONPATH"] = str(Path(bstune.__file__).parents[1])
        began = time.time()
        # GNU's timeout ends one that hangs, with a status of its own.
        done = subprocess.run(
            ["timeout", str(wall_seconds + GRACE), *command, str(wall_seconds), str(seed)],
            cwd=folder, env={**os.environ, **own}, text=True, capture_output=True,
        )  # fmt: skip
        ended = time.time()
    told = {"pick": None, "seconds": ended - began}
    if done.returncode != 0:
        return told | {"error": (done.stderr.strip() or "hangs").splitlines()[-1]}
    told |= json.loads(done.stdout.splitlines()[-1])
    return told | {"spent": where_seconds_went(told.pop("trials"), began, ended)}


def where_seconds_went(trials, began, ended):
    """Seconds before the first trial, after the last one, and by role; choosing one counts as it.

    Trials run one after another.
    """
    spent = defaultdict(float)
    if not trials:
        return {"start": ended - began}
    before = min(first for _, first, _ in trials)
    spent["start"] = before - began
    for role, _, last in sorted(trials, key=lambda trial: trial[1]):
        spent[role] += last - before
        before = last
    spent["end"] = ended - before
    return dict(spent)


def judge(project, pairs):
    """Plain runs of each pair, in turns: median seconds to the target, None for no median."""
    torch.set_num_threads(1)
    steps, timings = defaultdict(list), defaultdict(list)
    for run in range(RUNS):
        for pair in pairs:
            until = plain_run(project, pair, FIRST_SEED + run, project.evaluate_every)
            steps[pair].append(until.first_steps)
            if run < TIMINGS:
                timings[pair].append(step_seconds(project, pair))
    judged = {}
    for pair in pairs:
        tau = statistics.median(timings[pair])
        seconds = statistics.median(steps[pair]) * tau
        judged[pair] = {
            "steps": [one if math.isfinite(one) else None for one in steps[pair]],
            "step_seconds": tau,
            "seconds": seconds if math.isfinite(seconds) else None,
        }
    return judged


def measure(project, wall_seconds, seed, load):
    """One race."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    with busy(LOADS[load]):
        told = {name: compete(name, project, wall_seconds, seed) for name in CONTESTANTS}
    baseline = PROJECTS[project].baseline
    # A contestant that found nothing leaves its user with the own pair.
    pairs = {name: tuple(row["pick"] or baseline) for name, row in told.items()}
    judged = judge(PROJECTS[project], sorted({baseline, *pairs.values()}))
    plain = {name: judged[pair] for name, pair in {"baseline": baseline, **pairs}.items()}
    return {"told": told, "plain": plain}


def summary(rows):
    """Each race, then how many bstune wins or ties, its verdicts, and its time on others."""
    races = json_normalize(rows)
    seconds = races.filter(regex=r"^plain\..*\.seconds$")
    yield races[["project", "seed", "load", "told.bstune.verdict"]].join(seconds).to_string()
    limits = TIE * races["plain.tpe.seconds"].fillna(math.inf)
    races["as fast as TPE"] = races["plain.bstune.seconds"] <= limits
    share = races["told.bstune.spent.search"] / races["told.bstune.seconds"]
    races["half on others"] = share >= 0.5
    races["a verdict"] = races["told.bstune.verdict"] != "not yet"
    flags = ["as fast as TPE", "half on others", "a verdict"]
    yield races.groupby("load")[flags].agg(["sum", "count"]).to_string()


if __name__ == "__main__":
    run_gate(
        __doc__,
        "race.jsonl",
        measure,
        summary,
        seeds=2,
        projects=("project", (*PROJECTS,)),
        loads=("load", (*LOADS,)),
        walls=("wall_seconds", (120.0,)),
    )
