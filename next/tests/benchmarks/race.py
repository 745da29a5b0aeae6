"""Gate *the race*: bstune beside a script of Optuna's TPE, on the same time. Run nothing else.

    PROJECT_DATA=... python tests/benchmarks/race.py [--wall-seconds 120] [--seeds 2]
        [--contestants bstune tpe] [--old-python /path/of/its/environment/bin/python]

A row is one race: each contestant (see ``contestants.py``) tunes one project in a process of its
own, quiet or beside two busy processes; all begin with the project's own pair and have the same
ranges and budget. Then the picks and the baseline are trained by the project's plain Trainer on
further seeds, quiet and in turns: the median of steps to the target times the step time.

Short form: ``--wall-seconds 60 --seeds 1 --projects tutorial char_lstm --rows /tmp/race.jsonl``.
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
from functools import partial
from pathlib import Path

import torch
from common import add_rows, jobs_of, parser, read_rows
from projects import PROJECTS, busy, step_seconds, steps_to_target

import bstune

CONTESTANTS = ("bstune", "tpe", "old")
LOADS = {"quiet": 0, "busy": 2}
# Further seeds of a judged pair, and how often its step time is measured, in turns.
RUNS = 5
TIMINGS = 2
FIRST_SEED = 10_000
# Seconds after its limit at which a contestant is ended.
GRACE = 120.0
# A pick that takes at most this times as long as another is at least as fast.
TIE = 1.05


def compete(name, project, wall_seconds, seed, python):
    """What a contestant picked, its verdict, and where its seconds went."""
    command = [python, Path(__file__).with_name("contestants.py"), name, project]
    with tempfile.TemporaryDirectory() as folder:
        own = {"HOME": folder, "OMP_NUM_THREADS": "1"}
        environment = {**os.environ, **own, "PYTHONPATH": str(Path(bstune.__file__).parents[1])}
        if name == "old":
            del environment["PYTHONPATH"]
        began = time.time()
        # GNU's timeout ends one that hangs, with a status of its own.
        done = subprocess.run(
            ["timeout", str(wall_seconds + GRACE), *command, str(wall_seconds), str(seed)],
            cwd=folder, env=environment, text=True, capture_output=True,
        )  # fmt: skip
        ended = time.time()
    if done.returncode != 0:
        return {
            "pick": None,
            "error": (done.stderr.strip() or "hangs").splitlines()[-1],
            "seconds": ended - began,
        }
    told = json.loads(done.stdout.splitlines()[-1])
    spent = where_seconds_went(told.pop("trials"), began, ended)
    return {**told, "seconds": ended - began, "spent": spent}


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
    """Plain runs of several pairs, in turns: median seconds to the target, None for no median."""
    torch.set_num_threads(1)
    builds = [partial(project.build, *pair) for pair in pairs]
    steps = [[] for _ in pairs]
    timings = [[] for _ in pairs]
    for run in range(RUNS):
        for place, (size, _) in enumerate(pairs):
            most, seed = project.last_step(size), FIRST_SEED + run
            found = steps_to_target(
                builds[place], project.target, most, seed, project.evaluate_every, **project.trainer
            )
            steps[place].append(found)
            if run < TIMINGS:
                timings[place].append(step_seconds(builds[place], **project.trainer))
    judged = []
    for found_steps, taken in zip(steps, timings, strict=True):
        tau = statistics.median(taken)
        median = statistics.median(math.inf if one is None else one for one in found_steps)
        seconds = median * tau if math.isfinite(median) else None
        judged.append({"steps": found_steps, "step_seconds": tau, "seconds": seconds})
    return judged


def measure(project, wall_seconds, seed, load, contestants, pythons):
    """One race."""
    told = {}
    with busy(LOADS[load]):
        for name in contestants:
            told[name] = compete(name, project, wall_seconds, seed, pythons[name])
    picked = {name: row["pick"] for name, row in told.items() if row["pick"]}
    # A contestant that found nothing leaves its user with the own pair.
    pairs = {"baseline": PROJECTS[project].baseline} | {
        name: tuple(pick) for name, pick in picked.items()
    }
    different = sorted(set(pairs.values()))
    judged = dict(zip(different, judge(PROJECTS[project], different), strict=True))
    plain = {name: judged[pairs.get(name, pairs["baseline"])] for name in ["baseline", *told]}
    return {"told": told, "plain": plain}


def show(rows, rival):
    """Each race, then how many bstune wins or ties, its verdicts, and where the seconds went."""
    for load in LOADS:
        races = [row for row in rows if row["load"] == load and rival in row["told"]]
        as_fast = 0
        verdicts = defaultdict(int)
        half = 0
        phases = defaultdict(list)
        for row in races:
            seconds = {name: one["seconds"] or math.inf for name, one in row["plain"].items()}
            told = row["told"]["bstune"]
            spent = told.get("spent", {})
            share = spent.get("search", 0.0) / told["seconds"]
            as_fast += seconds["bstune"] <= TIE * seconds[rival]
            verdicts[told.get("verdict")] += 1
            half += share >= 0.5
            for phase, value in spent.items():
                phases[phase].append(value)
            parts = ", ".join(f"{name} {value:.1f}" for name, value in spent.items())
            taken = ", ".join(f"{name} {value:.3f}" for name, value in seconds.items())
            print(
                f"{row['project']} {row['seed']} {load}: {taken} s; {told.get('verdict')}; {parts}"
            )
        if races:
            medians = {name: round(statistics.median(all_of), 1) for name, all_of in phases.items()}
            print(f"{load}: where the seconds of bstune went, medians: {medians}")
            print(
                f"{load}: at least as fast as {rival} in {as_fast} of {len(races)}; verdicts "
                f"{dict(verdicts)}; half of the time on other configurations in {half}"
            )


def main():
    options = parser(__doc__, "race.jsonl", seeds=2)
    options.add_argument("--projects", nargs="*", choices=PROJECTS, default=list(PROJECTS))
    options.add_argument("--wall-seconds", type=float, default=120.0)
    options.add_argument("--loads", nargs="*", choices=LOADS, default=list(LOADS))
    options.add_argument("--contestants", nargs="*", choices=CONTESTANTS, default=["bstune", "tpe"])
    options.add_argument("--old-python", help="of an environment with the old package")
    given = options.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    pythons = dict.fromkeys(CONTESTANTS, sys.executable) | {"old": given.old_python}
    jobs = jobs_of(
        seed=range(given.seeds),
        project=given.projects,
        load=given.loads,
        wall_seconds=[given.wall_seconds],
        contestants=[given.contestants],
    )
    add_rows(given, jobs, partial(measure, pythons=pythons))
    rows = read_rows(given.rows)
    for rival in ("tpe", "old"):
        show(rows, rival)


if __name__ == "__main__":
    main()
