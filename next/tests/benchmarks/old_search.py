"""Rows of the old package's search, which bench_search.py compares with: recorded once.

It runs where bstune 0.1.0 (commit 38d319c7) is installed, in an empty folder, and adds the rows
that FILE lacks::

    HOME=OLD_HOME python old_search.py --rows FILE --seeds 5
"""

import argparse
import json
import math
from importlib.metadata import version
from pathlib import Path

import bstune
from bstune.sweeps import search_problem as old
from bstune.sweeps.baselines import FrontierSearch
from bstune.sweeps.search_benchmark import find_sources, find_target, read_stoppable_runs
from bstune.trial.replay import read_index

TABLES = ["fashion_mlp", "mnist_cnn", "cifar_mlp", "shakespeare_lstm", "mnist_mlp"]
MULTIPLES = (5.0, 10.0, 20.0, 40.0)


def finite(value: float) -> float | None:
    """JSON has no infinity: what never came is null."""
    return value if math.isfinite(value) else None


def main() -> None:
    """Append a line a search: table, seed, first hit and ratios after each spending."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    options.rows.touch()
    rows = [json.loads(line) for line in options.rows.read_text().splitlines()]
    there = {(row["table"], row["seed"]) for row in rows}
    for name, (path, shipped) in find_sources(TABLES, read_index()).items():
        target = find_target(path, shipped, None)
        benchmark = old.make_benchmark(name, read_stoppable_runs(path), target, "time")
        for seed in range(options.seeds):
            if (name, seed) in there:
                continue
            run = old.run_search(FrontierSearch(benchmark.problem, seed), benchmark, MULTIPLES)
            row = {
                "table": name,
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
