"""Gate *intervals*: whether the answer's interval of seconds holds what further plain runs take.

    BSTUNE_DATA=... python tests/benchmarks/intervals.py [--seeds 10]

A row is one study of ``digits``, ``fashion_mlp`` or the project ``tutorial``, quiet or beside two
busy processes, then 20 plain Trainer runs of its best under the same load. The interval is to
hold their median steps, at the evaluations that bstune would have made, times a plain step's time
without what the process waited for a processor, which the answer leaves out, too. Beside it: with
these waits, and the steps at which any of the runs' denser evaluations first met the target.
Run nothing else.

Short form: ``--seeds 1 --names tutorial --runs 3 --rows /tmp/intervals.jsonl``.
"""

import logging
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import torch
from common import add_rows, jobs_of, parser, read_rows
from plain_runs import first_evaluation, plain_run
from projects import PROJECTS, busy, rebatched, step_seconds
from race import LOADS

import bstune
from bstune.config import compose
from bstune.core.clock import processor_wait
from bstune.result import load

NAMES = ("digits", "fashion_mlp", "tutorial")
FIRST_SEED = 10_000
EVALUATE_EVERY = 2
# How often the step time is measured, between the runs: the median counts.
TIMINGS = 5
# How the plain runs' seconds are read; the first is the gate's.
READINGS = ("the seconds", "them with waits", "them at all evaluations")
# Of all studies so many intervals are to hold.
ASKED = 51 / 60


def study(name, wall_seconds, seed, folder):
    """Run one study as its user does, in a process and a home of its own."""
    own = {"HOME": folder, "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **own, "PYTHONPATH": str(Path(bstune.__file__).parents[1])}
    limit = str(wall_seconds)
    if name in PROJECTS:
        script = Path(__file__).with_name("contestants.py")
        command = [sys.executable, script, "bstune", name, limit, str(seed)]
    else:
        options = [f"seed={seed}", f"wall_seconds={limit}", "threads=1", "device=cpu", "output=out"]
        command = [sys.executable, "-m", "bstune", f"+workload={name}", *options, "mlflow.uri=null"]
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)


def plain(name, batch_size, lr):
    """How plain runs are built, their longest step and further arguments of the Trainer."""
    if name in PROJECTS:
        project = PROJECTS[name]
        build = partial(project.build, batch_size, lr)
        return build, project.last_step(batch_size), dict(project.trainer)
    composed = compose([f"+workload={name}", "device=cpu"])
    options, recipe = composed.options, composed.recipe
    most = options.budget.last_step(batch_size)
    trial = SimpleNamespace(
        batch_size=batch_size, lr=lr, values={}, seed=0, max_steps=most, total_steps=most
    )

    def built():
        return recipe.module(trial), rebatched(recipe.data(trial), batch_size)

    return built, most, recipe.trainer(trial)


def measure(name, load_name, wall_seconds, seed, runs):
    """One study and the further runs of its best."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, busy(LOADS[load_name]):
        began = time.monotonic()
        study(name, wall_seconds, seed, folder)
        took = time.monotonic() - began
        result = load(Path(folder) / "out")
        best = result.best
        build, most, arguments = plain(name, best.batch_size, best.lr)
        to_target = (build, result.target, best.batch_size, most)
        first = first_evaluation(result.records, best.number)
        waited = processor_wait()
        clocks = {
            "running": lambda: time.perf_counter() - waited(),
            "passed": time.perf_counter,
        }
        plain_runs = []
        timings = {clock: [] for clock in clocks}
        for run in range(runs):
            plain_runs.append(
                plain_run(*to_target, FIRST_SEED + run, EVALUATE_EVERY, first, **arguments)
            )
            if run < TIMINGS:
                for clock, now in clocks.items():
                    timings[clock].append(step_seconds(build, now=now, **arguments))
    taus = {clock: statistics.median(measured) for clock, measured in timings.items()}
    steps = statistics.median(run.steps for run in plain_runs)
    first_steps = statistics.median(run.first_steps for run in plain_runs)
    values = (steps * taus["running"], steps * taus["passed"], first_steps * taus["running"])
    seconds = dict(zip(READINGS, values, strict=True))
    return {
        "took": took,
        "verdict": result.verdict,
        "pair": [best.batch_size, best.lr],
        "stated": [best.seconds_low, best.seconds, best.seconds_high],
        "stated_steps": [best.steps_low, best.steps, best.steps_high],
        "stated_step_seconds": best.step_seconds,
        "step_seconds": taus,
        "steps": [finite(run.steps) for run in plain_runs],
        "first_steps": [finite(run.first_steps) for run in plain_runs],
        "seconds": {name: finite(value) for name, value in seconds.items()},
        "holds": {name: holds(best, value) for name, value in seconds.items()},
    }


def finite(value):
    """JSON has no infinity."""
    return value if math.isfinite(value) else None


def holds(best, seconds):
    """Whether an interval holds a median; one that half of the runs miss is above any end."""
    return (best.seconds_low or 0.0) <= seconds <= (best.seconds_high or math.inf)


def main():
    options = parser(__doc__, "intervals.jsonl", seeds=10)
    options.add_argument("--names", nargs="*", choices=NAMES, default=NAMES)
    options.add_argument("--loads", nargs="*", choices=LOADS, default=list(LOADS))
    options.add_argument("--runs", type=int, default=20)
    options.add_argument("--wall-seconds", type=float, default=30.0)
    given = options.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    jobs = jobs_of(
        seed=range(given.seeds),
        name=given.names,
        load_name=given.loads,
        wall_seconds=[given.wall_seconds],
        runs=[given.runs],
    )
    add_rows(given, jobs, measure)
    rows = read_rows(given.rows)
    for name, one in product(NAMES, LOADS):
        cell = [row for row in rows if (row["name"], row["load_name"]) == (name, one)]
        if cell:
            parts = [f"{sum(row['holds'][key] for row in cell)} {key}" for key in READINGS]
            ratios = [row["stated_step_seconds"] / row["step_seconds"]["running"] for row in cell]
            print(
                f"{name} {one}: of {len(cell)} hold {', '.join(parts)}; a stated step takes "
                f"{statistics.median(ratios):.2f} times a plain one's time"
            )
    if rows:
        held = sum(row["holds"][READINGS[0]] for row in rows)
        print(f"{held} of {len(rows)} hold; asked {math.ceil(ASKED * len(rows))}")


if __name__ == "__main__":
    main()
