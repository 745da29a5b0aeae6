"""Gate *speed*: CPU seconds of a decision, and seconds of ``import bstune``. Run nothing else.

    python tests/benchmarks/speed.py [--seeds 5]

A row is one decision after so many trials of fashion_mlp's table at random configurations, or one
import in a process of its own. A row names the machine that it was measured on.
"""

import platform
import subprocess
import sys
import time

import numpy as np
import scipy
from common import run_gate, table_problem
from pandas import DataFrame

from bstune.search.decide import Proposal, propose

# Trials before a decision.
SIZES = (60, 200, 1000)
IMPORT = "import time; t = time.perf_counter(); import bstune; print(time.perf_counter() - t)"


def measure(objective, trials, seed):
    """One decision, or an import where there are no trials."""
    row = {"what": "decision", "machine": machine()}
    if trials is None:
        command = [sys.executable, "-c", IMPORT]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return row | {"what": "import", "seconds": float(done.stdout)}
    problem = table_problem("fashion_mlp", objective)
    records = random_trials(problem, trials, seed)
    began = time.process_time()
    propose(problem.question, problem.space, problem.step_time, records, seed)
    return row | {"seconds": time.process_time() - began}


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


def summary(rows):
    """Seconds of each kind by machine."""
    kinds = DataFrame(rows).groupby(["machine", "what", "objective", "trials"], dropna=False)
    return [kinds["seconds"].agg(["median", "min", "max", "count"]).to_string()]


if __name__ == "__main__":
    run_gate(
        __doc__,
        "speed.jsonl",
        measure,
        summary,
        seeds=5,
        wanted=lambda objective, trials, seed: (objective is None) == (trials is None),
        objectives=("objective", (None, "time", "curve")),
        trials=("trials", (None, *SIZES)),
    )
