"""How often the 90% interval of B_crit holds the truth, after a search of objective ``curve`` on tables of known truth.

Every seed draws a law (S_min, B_crit, the exponent of lr*(B) and its level, the penalties, the noise, tau) and makes a
table of it; bstune's own search spends three times the frontier's cost on it. After one and three times that cost its
posterior is compared with the law's B_crit. The noise of a table is drawn anew for every run of a cell, so that few
``--runs`` make trials at one place repeat each other, which no real seeds do.

    python tests/benchmarks/bench_coverage.py [--seeds 200] [--json FILE]

It takes 5 to 9 s a seed on one core; no clock goes into the results.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from common import machine, options_of, write
from synthetic import TARGET, Law, synthetic_table

from bstune.core.records import Target, TrialResult
from bstune.sweeps.baselines import FrontierSearch
from bstune.sweeps.search_problem import factor, make_benchmark, run_search

SPENDINGS = (1.0, 3.0)  # in the frontier's cost
LRS = tuple(float(2.0**octave) for octave in np.arange(-11.0, 1.25, 0.5))
MIDDLE = 181.0  # batch size, the geometric middle of the tables' 8 to 4096


class Watched(FrontierSearch):
    """bstune's own search, which keeps the interval whenever it is asked for B_crit."""

    intervals: tuple[Sequence[float], ...] = ()  # lower end, median and upper end

    def b_crit(self, finished: Sequence[TrialResult]) -> float | None:
        quantiles = self.b_crit_quantiles((0.05, 0.5, 0.95))
        self.intervals += (quantiles or (0.0, math.inf, math.inf),)
        return quantiles and quantiles[1]


def draw_law(seed: int) -> Law:
    """Return a law that a real table could have, B_crit well within the batch sizes."""
    rng = np.random.default_rng([seed, 1])
    example = math.exp(rng.uniform(math.log(1e-6), math.log(1e-4)))
    return Law(
        s_min=math.exp(rng.uniform(math.log(50.0), math.log(500.0))),
        b_crit=math.exp(rng.uniform(math.log(32.0), math.log(1024.0))),
        lr=2.0 ** rng.uniform(-6.5, -4.5),
        batch_size=MIDDLE,
        exponent=float(rng.choice((0.0, 0.5, 1.0))),
        left=rng.uniform(0.06, 0.2),
        right=rng.uniform(0.2, 0.6),
        edge=rng.uniform(2.0, 3.5),
        noise=rng.uniform(0.05, 0.15),
        overhead=example * math.exp(rng.uniform(math.log(20.0), math.log(2000.0))),
        per_example=example,
    )


def measure(seed: int, runs: int) -> dict[str, Any]:
    """Run one seed; return its law, its number of trials, and the interval after each spending."""
    law = draw_law(seed)
    table = synthetic_table(law, lrs=LRS, seeds=range(runs), metric_noise=0.05)
    benchmark = make_benchmark("law", table, Target("error", TARGET, "min"), "curve")
    search = Watched(benchmark.problem, seed)
    trials = run_search(search, benchmark, SPENDINGS).trials
    return {"seed": seed, "law": asdict(law), "trials": trials, "intervals": search.intervals}


if __name__ == "__main__":
    options = options_of(
        __doc__,
        ("--seeds", {"type": int, "default": 200, "help": "laws, one search each"}),
        ("--runs", {"type": int, "default": 8, "help": "runs in a cell of the tables"}),
    )
    about = machine(options.device, options.seeds)
    rows = [measure(seed, options.runs) for seed in range(options.seeds)]
    trials = statistics.median(row["trials"] for row in rows)
    print(f"{trials:g} trials (median), tables of {options.runs} runs a cell")
    for index, spending in enumerate(SPENDINGS):
        cases = [(row["law"]["b_crit"], *row["intervals"][index]) for row in rows]
        share = statistics.mean(low <= truth <= high for truth, low, _, high in cases)
        error = math.sqrt(max(share * (1.0 - share), 0.25 / len(cases)) / len(cases))
        off = statistics.median(factor(middle / truth) for truth, _, middle, _ in cases)
        print(f"after {spending:g}x: covers {share:.3f} +- {error:.3f}, off by {off:.2f} (median)")
    write(options.json, about, rows)
