"""Gate *speed*: CPU seconds of a decision. Run nothing else.

    python tests/benchmarks/speed.py [--seeds 5]

A row is one decision after so many trials of fashion_mlp's table at random configurations. It names
the machine that it was measured on.
"""

import platform
import time

import numpy as np
import scipy
from common import run_gate, table_problem
from pandas import DataFrame

from bstune.search.decide import Proposal, propose

# Trials before a decision.
SIZES = (60, 200, 1000)


def measure(objective, trials, seed):
    """One decision."""
    problem = table_problem("fashion_mlp", objective)
    records = random_trials(problem, trials, seed)
    began = time.process_time()
    propose(problem.question, problem.space, problem.step_time, records, seed)
    return {"machine": machine(), "seconds": time.process_time() - began}


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
    kinds = DataFrame(rows).groupby(["machine", "objective", "trials"])
    return [kinds["seconds"].agg(["median", "min", "max", "count"]).to_string()]


if __name__ == "__main__":
    run_gate(
        __doc__,
        "speed.jsonl",
        measure,
        summary,
        seeds=5,
        objectives=("objective", ("time", "curve")),
        trials=("trials", SIZES),
    )
