"""Rows of the old package's search, which search.py compares with: recorded once.

It runs where bstune 0.1.0 (commit 38d319c7) is installed, in an empty folder, and adds the rows
that FILE lacks::

    HOME=OLD_HOME python old_search.py --rows FILE --seeds 20 [--objectives ...] [--baseline ...]
"""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import bstune
from bstune.sweeps import search_problem as old
from bstune.sweeps.baselines import FrontierSearch
from bstune.sweeps.search_benchmark import find_sources, find_target, read_stoppable_runs
from bstune.trial.replay import read_index

TABLES = ["fashion_mlp", "mnist_cnn", "cifar_mlp", "shakespeare_lstm", "mnist_mlp"]
MULTIPLES = (5.0, 10.0, 20.0, 40.0)
# What the tables' workloads use today: batch size and learning rate of their configs.
BASELINES = {
    "fashion_mlp": (128, 0.03),
    "mnist_cnn": (64, 0.1),
    "cifar_mlp": (128, 0.001),
    "shakespeare_lstm": (32, 0.01),
    "mnist_mlp": (64, 0.2),
}


class BaselineFirst(FrontierSearch):
    """The search whose first trial is the baseline, to its budget; the rule goes through it."""

    def __init__(self, problem: old.Problem, seed: int, baseline: tuple[int, float]) -> None:
        size, lr = baseline
        through = replace(problem, reference_batch_size=float(size), reference_lr=lr)
        super().__init__(through, seed)
        self.study.enqueue_trial({"batch_size": size, "lr": lr})

    def last_step_and_start(
        self, trial: Any, batch_size: int, finished: Sequence[Any]
    ) -> tuple[int, int | None]:
        """Give the baseline its whole budget, and any other trial what the sampler decided."""
        if not finished:
            return self._problem.budget.last_step(batch_size), None
        return super().last_step_and_start(trial, batch_size, finished)


def finite(value: float) -> float | None:
    """JSON has no infinity: what never came is null."""
    return value if math.isfinite(value) else None


def main() -> None:
    """Append a line a search: table, seed, first hit and ratios after each spending."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--objectives", nargs="+", default=["time", "steps"])
    parser.add_argument("--baseline", nargs="+", type=int, default=[0, 1])
    options = parser.parse_args()
    options.rows.touch()
    rows = [json.loads(line) for line in options.rows.read_text().splitlines()]
    there = {(row["table"], row["objective"], row["baseline"], row["seed"]) for row in rows}
    sources = find_sources(TABLES, read_index())
    jobs = product(options.objectives, options.baseline, range(options.seeds), sources.items())
    for objective, with_baseline, seed, (name, (path, shipped)) in jobs:
        if (name, objective, bool(with_baseline), seed) in there:
            continue
        target = find_target(path, shipped, None)
        benchmark = old.make_benchmark(name, read_stoppable_runs(path), target, objective)
        search = FrontierSearch(benchmark.problem, seed)
        if with_baseline:
            search = BaselineFirst(benchmark.problem, seed, BASELINES[name])
        run = old.run_search(search, benchmark, MULTIPLES)
        row = {
            "table": name,
            "objective": objective,
            "baseline": bool(with_baseline),
            "seed": seed,
            "bstune": bstune.__file__,
            "version": version("bstune"),
            "trials": run.trials,
            "first": run.path[0][0] if run.path else None,
            "ratios": [finite(old.ratio_after(run.path, multiple)) for multiple in MULTIPLES],
        }
        with options.rows.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
