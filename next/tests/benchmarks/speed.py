"""Gate *speed*: CPU seconds of a decision, and seconds of ``import bstune``. Run nothing else.

    python tests/benchmarks/speed.py [--seeds 5]

A row is one decision after so many trials of fashion_mlp's table at random configurations, or one
import in a process of its own. A row names the machine that it was measured on.
"""

import platform
import statistics
import subprocess
import sys
import time
from itertools import product

import numpy as np
import scipy
from common import add_rows, parser, read_rows, table_problem

from bstune.search.decide import Proposal, propose

# Trials before a decision.
SIZES = (60, 200, 1000)
IMPORT = "import time; t = time.perf_counter(); import bstune; print(time.perf_counter() - t)"


def measure(what, objective, trials, seed):
    """One decision or import."""
    if what == "import":
        command = [sys.executable, "-c", IMPORT]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return {"seconds": float(done.stdout), "machine": machine()}
    problem = table_problem("fashion_mlp", objective)
    records = random_trials(problem, trials, seed)
    began = time.process_time()
    propose(problem.question, problem.space, problem.step_time, records, seed)
    return {"seconds": time.process_time() - began, "machine": machine()}


def random_trials(problem, count, seed):
    """Trials at random configurations within two octaves of the rule, up to random last steps."""
    rng = np.random.default_rng(seed)
    space = problem.space
    records = []
    for _ in range(count):
        size = space.snap(2.0 ** rng.uniform(np.log2(space.low), np.log2(space.high)))
        last_step = problem.question.budget.last_step(size)
        proposal = Proposal(
            batch_size=size,
            lr=space.snap_lr(space.rule_lr(size) * 2.0 ** rng.uniform(-2.0, 2.0)),
            max_steps=max(10, round(last_step * rng.uniform(0.05, 0.5))),
            resumed_from=None,
        )
        records.append(problem.answer(proposal, seed, records))
    return records


def machine():
    """The processor and the versions that seconds depend on."""
    with open("/proc/cpuinfo") as file:
        model = next(line for line in file if line.startswith("model name"))
    versions = f"Python {platform.python_version()}, numpy {np.__version__}"
    return f"{model.partition(':')[2].strip()}, {versions}, scipy {scipy.__version__}"


def main():
    given = parser(__doc__, "speed.jsonl", seeds=5).parse_args()
    kinds = [{"what": "import", "objective": None, "trials": None}]
    for objective, trials in product(("time", "curve"), SIZES):
        kinds.append({"what": "decision", "objective": objective, "trials": trials})
    jobs = [{**kind, "seed": seed} for seed, kind in product(range(given.seeds), kinds)]
    add_rows(given, jobs, measure)
    rows = read_rows(given.rows)
    for kind in kinds:
        seconds = [row["seconds"] for row in rows if kind.items() <= row.items()]
        if seconds:
            name = "import bstune" if kind["what"] == "import" else "{objective}, {trials} trials"
            spread = f"{min(seconds):.3f} to {max(seconds):.3f}"
            median = statistics.median(seconds)
            print(f"{name.format(**kind):20} {median:.3f} s ({spread}), n = {len(seconds)}")
    for hardware in sorted({row["machine"] for row in rows}):
        print(hardware)


if __name__ == "__main__":
    main()
