"""How often the 90% interval of B_crit holds the truth, under every objective, as a study spends.

    python tests/benchmarks/bench_coverage.py laws [--studies 30] [--cells "u-shape" ...] [--jobs 2] [--json FILE]
    python tests/benchmarks/bench_coverage.py tables [--studies 12] [--jobs 2] [--json FILE]

``laws``: every study draws a law of a kind (S_min, B_crit, the exponent of lr*(B) and its level, the penalties, tau)
and every trial draws its noise from it anew. ``tables``: the tables that are shipped, judged by the same B_crit of all
of their cells. bstune's own search spends 40 times the best trial's cost: the fastest cell's seconds or, for the
objective steps, the examples of the one with the fewest steps. No clock goes into the results.
"""

import argparse
import math
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from common import machine, write
from synthetic import TARGET, Law, law_table
from torch import device

from bstune.core.records import Target, TrialResult, TrialSpec
from bstune.search.frontier_findings import b_crit_quantiles
from bstune.study.analysis.model import MOVES, REPORT_PARTICLES, slopes
from bstune.sweeps.baselines import FrontierSearch
from bstune.sweeps.search_problem import Benchmark, factor_off, make_benchmark, run_search
from bstune.trial.replay import read_index, read_table

# In units of the best trial's cost.
SPENDINGS = (20.0, 40.0)
# The ends and the middle of an interval.
SHARES = (0.05, 0.5, 0.95)
OBJECTIVES = ("time", "steps", "curve")
LRS = tuple(float(2.0**octave) for octave in np.arange(-11.0, 1.25, 0.5))
# The batch size in the geometric middle of the tables' 8 to 4096.
MIDDLE = 181.0
KINDS: dict[str, dict[str, Any]] = {
    "noise 10%": {},
    "noise 20%": {"noise": 0.2},
    "noise 30%": {"noise": 0.3},
    "exponent 0.7": {"kind": "power", "parameter": 0.7},
    "exponent 1.5": {"kind": "power", "parameter": 1.5},
    "sharp knee": {"kind": "knee", "parameter": 4.0},
    "u-shape": {"kind": "u_shape"},
    "lucky hits": {"luck": 0.1},
    "coarse cadence": {"cadence": 1.25},
}


class Watched(FrontierSearch):
    """bstune's own search; it keeps the intervals of B_crit and of lr*(B)'s exponent once each spending is reached."""

    def __init__(self, benchmark: Benchmark, unit: float, seed: int) -> None:
        super().__init__(benchmark.problem, seed)
        self._unit = unit
        self.intervals: list[Sequence[float]] = []
        self.exponents: list[Sequence[float]] = []

    def propose(self, finished: Sequence[TrialResult]) -> TrialSpec:
        """Keep the interval, then propose."""
        # This has told the last trial.
        spec = super().propose(finished)
        spent = sum(trial.train_seconds for trial in finished)
        if (
            len(self.intervals) < len(SPENDINGS) - 1
            and spent >= SPENDINGS[len(self.intervals)] * self._unit
        ):
            self.look()
        return spec

    def look(self) -> None:
        """Keep the intervals of now: lower end, median and upper end."""
        # As a study on a table reports it; on a law no two histories are the same.
        posterior = self.sampler.posterior(
            self.study, particles=REPORT_PARTICLES, moves=MOVES, independent=False
        )
        if posterior is None or not any(one.status == "reached" for one in posterior.observations):
            self.intervals.append((0.0, math.nan, math.inf))
            self.exponents.append((-math.inf, math.nan, math.inf))
            return
        self.intervals.append(b_crit_quantiles(posterior, SHARES).tolist())
        prior = posterior.prior
        exponents = slopes(posterior.theta, prior, 2.0**prior.log_low, 2.0**prior.log_high)
        self.exponents.append(np.quantile(exponents, SHARES).tolist())


def draw_law(seed: int, kind: str) -> Law:
    """A law that a real table could have, B_crit well within the batch sizes."""
    rng = np.random.default_rng([seed, 1])
    example = math.exp(rng.uniform(math.log(1e-6), math.log(1e-4)))
    law = Law(
        s_min=math.exp(rng.uniform(math.log(50.0), math.log(500.0))),
        b_crit=math.exp(rng.uniform(math.log(32.0), math.log(1024.0))),
        lr=2.0 ** rng.uniform(-6.5, -4.5),
        batch_size=MIDDLE,
        exponent=float(rng.choice((0.0, 0.5, 1.0))),
        left=rng.uniform(0.06, 0.2),
        right=rng.uniform(0.2, 0.6),
        edge=rng.uniform(2.0, 3.5),
        noise=0.1,
        overhead=example * math.exp(rng.uniform(math.log(20.0), math.log(2000.0))),
        per_example=example,
    )
    # B_opt, where the examples are fewest, lies above the smallest batch sizes.
    if kind == "u-shape":
        b_opt = math.exp(rng.uniform(math.log(24.0), math.log(96.0)))
        law = replace(law, b_crit=max(law.b_crit, 2.0 * b_opt))
        return replace(law, kind="u_shape", parameter=b_opt / law.b_crit)
    return replace(law, **KINDS[kind])


def study(
    benchmark: Benchmark, truth: float, objective: str, seed: int, regret: bool
) -> dict[str, Any]:
    """Run one search; return the truth, the intervals after each spending and, with ``regret``, its path."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    unit = benchmark.best[2]
    search = Watched(
        replace(benchmark, problem=replace(benchmark.problem, objective=objective)), unit, seed
    )
    # A third of the time goes into naming an incumbent after each trial.
    if not regret:
        search.incumbent = lambda finished: None
    run = run_search(search, benchmark, SPENDINGS)
    search.look()
    return {
        "truth": truth,
        "trials": run.trials,
        "intervals": search.intervals,
        "exponents": search.exponents,
        "path": run.path,
    }


def of_law(job: tuple[str, str, int]) -> dict[str, Any]:
    """Run one study on a law of a kind."""
    kind, objective, seed = job
    law = draw_law(seed, kind)
    table = law_table(law, LRS, metric_noise=0.05)
    benchmark = make_benchmark(
        kind, table, Target("error", TARGET, "min"), "steps" if objective == "steps" else "time"
    )
    found = study(benchmark, law.b_crit, objective, seed, regret=False)
    return {"cell": kind, "objective": objective, "seed": seed, "exponent": law.exponent, **found}


def of_table(job: tuple[str, str, int]) -> dict[str, Any]:
    """Run one study on a shipped table."""
    name, objective, seed = job
    source = read_index()[name]
    table = read_table(source.path)
    benchmark = make_benchmark(
        name, table, source.target, "steps" if objective == "steps" else "time"
    )
    found = study(benchmark, benchmark.b_crit, objective, seed, regret=True)
    return {"cell": name, "objective": objective, "seed": seed, **found}


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print coverage, median width and median factor off of each cell, objective and spending, and of all."""
    cells = list(dict.fromkeys(row["cell"] for row in rows))
    for objective, at in product(OBJECTIVES, range(len(SPENDINGS))):
        for cell in (*cells, None):
            some = [
                row for row in rows if row["objective"] == objective and cell in (None, row["cell"])
            ]
            if not some:
                continue
            ends = [(row["truth"], *row["intervals"][at]) for row in some]
            share = statistics.mean(low <= truth <= high for truth, low, _, high in ends)
            width = statistics.median(
                high / low if low > 0 else math.inf for _, low, _, high in ends
            )
            off = statistics.median(factor_off(middle / truth) for truth, _, middle, _ in ends)
            low = statistics.mean(middle < truth for truth, _, middle, _ in ends)
            print(
                f"{objective} after {SPENDINGS[at]:g}x, {cell or 'all'}: covers {share:.0%} of "
                f"{len(some)}, "
                f"width {width:.2f}, off by {off:.2f} (low in {low:.0%})"
            )
    share = statistics.mean(
        low <= row["truth"] <= high for row in rows for low, _, high in row["intervals"]
    )
    print(f"over all: covers {share:.1%}")
    known = []
    for row in rows:
        if "exponent" in row:
            known += [(row["exponent"], *ends) for ends in row["exponents"]]
    if known:
        share = statistics.mean(low <= truth <= high for truth, low, _, high in known)
        width = statistics.median(high - low for _, low, _, high in known)
        print(f"the exponent of lr*(B): covers {share:.1%}, width {width:.2f}")


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_subparsers(required=True, dest="what")
    for name, studies, cells in (("laws", 30, list(KINDS)), ("tables", 12, list(read_index()))):
        kind = kinds.add_parser(name)
        kind.add_argument("--studies", type=int, default=studies, help="of each cell and objective")
        kind.add_argument("--cells", nargs="+", default=cells, choices=cells)
        kind.add_argument("--objectives", nargs="+", default=list(OBJECTIVES), choices=OBJECTIVES)
        kind.add_argument("--jobs", type=int, default=2, help="processes")
        kind.add_argument("--json", type=Path, help="file for every study's numbers")
    options = parser.parse_args()
    about = machine(device("cpu"), options.studies)
    # Seed by seed, so that a run that is cut short has judged every cell as often.
    jobs = []
    for seed in range(options.studies):
        jobs += [(*job, seed) for job in product(options.cells, options.objectives)]
    run = of_table if options.what == "tables" else of_law
    rows = []
    with ProcessPoolExecutor(options.jobs) as pool:
        for row in pool.map(run, jobs):
            rows.append(row)
            write(options.json, about, rows)
    show(rows)


if __name__ == "__main__":
    main()
