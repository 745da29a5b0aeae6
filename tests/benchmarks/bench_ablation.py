"""What each part of the search is worth: the same studies on the shipped tables with one part left out.

    python tests/benchmarks/bench_ablation.py [--seeds 20] [--json FILE]

Regret is the incumbent's time over the best cell's after a spending, a geometric mean over tables and seeds; "none" is
the share of studies in which nothing had reached the target yet. Costs are the recorded seconds: no clock is read.
"""

import math
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from types import MethodType
from typing import Any

import optuna
from common import machine, options_of, write

from bstune.search.sampler import default_policy
from bstune.sweeps.baselines import FrontierSearch
from bstune.sweeps.search_problem import least, make_benchmark, ratio_after, run_search
from bstune.trial.replay import read_index, read_table

# In units of the best trial's cost.
SPENDINGS = (10.0, 20.0, 40.0)


def _without_curve(search: FrontierSearch) -> None:
    search.sampler._policy = replace(default_policy(), curve_share=0.0)


def _without_continuation(search: FrontierSearch) -> None:
    search.sampler._resumable = None


def _without_extrapolation(search: FrontierSearch) -> None:
    # Without a target it reads no history.
    search.sampler._target = None


def _fastest_trial(search: FrontierSearch) -> None:
    search.incumbent = MethodType(lambda _, finished: least(finished), search)


PARTS: dict[str, Callable[[FrontierSearch], None]] = {
    "whole": lambda search: None,
    "no decisions for the curve": _without_curve,
    "the fastest trial in place of the one that fresh seeds are predicted to like best": _fastest_trial,
    "no extrapolation of stopped trials": _without_extrapolation,
    "no continuation of stopped trials": _without_continuation,
}


def study(job: tuple[int, str, str]) -> dict[str, Any]:
    """Run one search without a part on a table; return its incumbent's ratios to the best."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    seed, name, part = job
    source = read_index()[name]
    benchmark = make_benchmark(name, read_table(source.path), source.target, "time")
    search = FrontierSearch(benchmark.problem, seed)
    PARTS[part](search)
    path = run_search(search, benchmark, SPENDINGS).path
    first = path[0][0] if path else math.inf
    return {
        "seed": seed,
        "table": name,
        "part": part,
        "first": first,
        "ratios": [ratio_after(path, m) for m in SPENDINGS],
    }


def main() -> None:
    """Run the studies and print a row for each part."""
    options = options_of(__doc__, ("--seeds", {"type": int, "default": 20}))
    about = machine(options.device, options.seeds)
    jobs = list(product(range(options.seeds), read_index(), PARTS))
    with ProcessPoolExecutor(2) as pool:
        rows = list(pool.map(study, jobs))
    for part in PARTS:
        some = [row for row in rows if row["part"] == part]
        cells = [f"first after {statistics.median(row['first'] for row in some):.1f}x"]
        for i, spending in enumerate(SPENDINGS):
            found = [row["ratios"][i] for row in some if math.isfinite(row["ratios"][i])]
            mean = statistics.geometric_mean(found) if found else math.inf
            cells.append(f"{spending:g}x: {mean:.3f} (none {1 - len(found) / len(some):.0%})")
        print(f"{part}: {', '.join(cells)}")
    write(options.json, about, rows)


if __name__ == "__main__":
    main()
