"""How often the 90% interval of B_crit holds the truth, after a search of objective ``curve`` on tables of known truth.

Every seed draws a law (S_min, B_crit, the exponent of lr*(B) and its level, the penalties, the noise, tau) and makes a
table of it; bstune's own search spends three times the frontier's cost on it. After one and three times that cost its
posterior is compared with the law's B_crit, and so is the fit to the frontier points of the same trials, the estimate
of all other searches. A z-score is (log estimate - log truth) over the posterior's standard deviation of log B_crit:
standard deviation 1 and mean 0 if the interval is right. ``widen`` is what the intervals' half widths in log B_crit
would have to be multiplied by to hold the truth in 90% of the seeds.

Noise is drawn anew for every run of a cell, so that few ``--runs`` make trials at one place repeat each other, which no
real seeds do.

    python tests/benchmarks/bench_coverage.py [--seeds 200] [--json FILE]

It takes 5 to 9 s a seed on one core; no clock goes into the results.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from common import machine, options_of, write
from synthetic import TARGET, Law, synthetic_table

from bstune.core.curve import CurveError, fit_curve, frontier_points
from bstune.core.records import Target, TrialResult
from bstune.sweeps.baselines import FrontierSearch
from bstune.sweeps.search_problem import Benchmark, factor, make_benchmark, percentile, run_search

SPENDINGS = (1.0, 3.0)  # in the frontier's cost
LEVEL, Z = 0.9, 1.645  # of the intervals, and its two-sided normal quantile
EXPONENTS = (0.0, 0.5, 1.0)
OCTAVES = (-11.0, 1.0)  # of the learning rates
MIDDLE = 181.0  # batch size, the geometric middle of the tables' 8 to 4096


@dataclass(frozen=True)
class Estimate:
    """B_crit with its 90% interval; None is an open end, or no estimate. ``spread`` is of log B_crit."""

    b_crit: float | None
    low: float | None
    high: float | None
    spread: float | None

    def z(self, truth: float) -> float | None:
        if self.b_crit is None or not self.spread:
            return None
        return math.log(self.b_crit / truth) / self.spread

    def covers(self, truth: float) -> bool:
        return (self.low is None or self.low <= truth) and (self.high is None or truth <= self.high)

    def widen(self, truth: float) -> float | None:
        # what the half width towards the truth would have to be multiplied by to end there
        end = self.high if self.b_crit is not None and truth > self.b_crit else self.low
        if self.b_crit is None or end is None:
            return None
        return math.log(truth / self.b_crit) / math.log(end / self.b_crit)


class Watched(FrontierSearch):
    """bstune's own search, which keeps both estimates whenever it is asked for B_crit."""

    def b_crit(self, finished: Sequence[TrialResult]) -> float | None:
        quantiles = self.b_crit_quantiles((0.05, 0.5, 0.95, 0.16, 0.84))
        estimate = Estimate(None, None, None, None)
        if quantiles is not None:
            low, middle, high, minus, plus = quantiles
            estimate = Estimate(middle, low, high, 0.5 * math.log(plus / minus))
        self.pairs = [*getattr(self, "pairs", []), (estimate, fitted(finished))]
        return estimate.b_crit


def fitted(finished: Sequence[TrialResult]) -> Estimate | None:
    """Return the fit's B_crit with its interval; None where there are too few points for a fit."""
    try:
        fit = fit_curve(frontier_points(finished), LEVEL)
    except CurveError:
        return None
    spread = None
    if fit.b_crit_low is not None and fit.b_crit_high is not None:
        spread = math.log(fit.b_crit_high / fit.b_crit_low) / (2.0 * Z)
    return Estimate(fit.b_crit, fit.b_crit_low, fit.b_crit_high, spread)


def draw_law(seed: int) -> Law:
    """Return a law that a real table could have, B_crit well within the batch sizes."""
    rng = np.random.default_rng([seed, 1])
    example = math.exp(rng.uniform(math.log(1e-6), math.log(1e-4)))
    return Law(
        s_min=math.exp(rng.uniform(math.log(50.0), math.log(500.0))),
        b_crit=math.exp(rng.uniform(math.log(32.0), math.log(1024.0))),
        lr=2.0 ** rng.uniform(-6.5, -4.5),
        batch_size=MIDDLE,
        exponent=float(rng.choice(EXPONENTS)),
        left=rng.uniform(0.06, 0.2),
        right=rng.uniform(0.2, 0.6),
        edge=rng.uniform(2.0, 3.5),
        noise=rng.uniform(0.05, 0.15),
        overhead=example * math.exp(rng.uniform(math.log(20.0), math.log(2000.0))),
        per_example=example,
    )


def measure(seed: int, lr_step: float, runs: int) -> dict[str, Any]:
    """Run one seed; return its law, its number of trials, and (posterior, fit) after each spending."""
    law = draw_law(seed)
    octaves = np.arange(OCTAVES[0], OCTAVES[1] + 0.5 * lr_step, lr_step)
    table = synthetic_table(law, lrs=[float(2.0**z) for z in octaves], seeds=range(runs), metric_noise=0.05)
    benchmark: Benchmark = make_benchmark("law", table, Target("error", TARGET, "min"), "curve")
    search = Watched(benchmark.problem, seed)
    trials = run_search(search, benchmark, SPENDINGS).trials
    return {"seed": seed, "law": law, "trials": trials, "estimates": search.pairs}


def summarize(rows: Sequence[dict[str, Any]], index: int) -> list[dict[str, Any]]:
    """Return how both estimates did after the spending ``index``."""
    found = []
    for place, name in enumerate(("posterior", "fit")):
        truths = [(row["estimates"][index][place], row["law"].b_crit) for row in rows]
        pairs = [(estimate, truth) for estimate, truth in truths if estimate is not None]
        offs = [factor(None if e.b_crit is None else e.b_crit / truth) for e, truth in pairs]
        zs = [z for e, truth in pairs if (z := e.z(truth)) is not None]
        widths = [math.log(e.high / e.low) for e, _ in pairs if e.low is not None and e.high is not None]
        widening = [w for e, truth in pairs if (w := e.widen(truth)) is not None]
        found.append(
            {
                "estimate": name,
                "spending": SPENDINGS[index],
                "seeds": len(rows),
                "without": len(rows) - len(pairs),
                "open": len(pairs) - len(widths),
                "coverage": statistics.mean(e.covers(truth) for e, truth in pairs) if pairs else None,
                "off": statistics.median(offs) if offs else None,
                "off_p90": percentile(offs, 0.9) if offs else None,
                "z_mean": statistics.mean(zs) if zs else None,
                "z_sd": statistics.stdev(zs) if len(zs) > 1 else None,
                "width": math.exp(statistics.median(widths)) if widths else None,
                "widen": percentile(widening, LEVEL) if widening else None,
            }
        )
    return found


def show(summary: Sequence[dict[str, Any]]) -> None:
    """Print the table."""
    print(
        f"{'after':>6} {'estimate':<10} {'covers':>7} {'+-':>5} {'off by':>7} {'p90':>6} {'z mean':>7} {'z sd':>6} "
        f"{'high/low':>9} {'widen':>6} {'open':>5} {'none':>5}"
    )
    for row in summary:
        share, n = row["coverage"], row["seeds"] - row["without"]
        error = None if share is None else math.sqrt(max(share * (1.0 - share), 0.25 / n) / n)
        print(
            f"{row['spending']:>5g}x {row['estimate']:<10} {_cell(share, 7, 3)} {_cell(error, 5, 3)} "
            f"{_cell(row['off'], 7)} {_cell(row['off_p90'], 6)} {_cell(row['z_mean'], 7)} {_cell(row['z_sd'], 6)} "
            f"{_cell(row['width'], 9)} {_cell(row['widen'], 6)} {row['open']:>5} {row['without']:>5}"
        )


def _cell(value: float | None, width: int, digits: int = 2) -> str:
    return f"{'-' if value is None else format(value, f'.{digits}f'):>{width}}"


if __name__ == "__main__":
    options = options_of(
        __doc__,
        ("--seeds", {"type": int, "default": 200, "help": "laws, one search each"}),
        ("--first", {"type": int, "default": 0, "help": "the first seed"}),
        ("--lr-step", {"type": float, "default": 0.5, "help": "octaves between the tables' learning rates"}),
        ("--runs", {"type": int, "default": 8, "help": "runs in a cell of the tables"}),
    )
    about = machine(options.device, options.seeds)
    rows = [measure(options.first + i, options.lr_step, options.runs) for i in range(options.seeds)]
    summary = [row for index in range(len(SPENDINGS)) for row in summarize(rows, index)]
    trials = statistics.median(row["trials"] for row in rows)
    print(f"{trials:g} trials (median), tables of {options.runs} runs a cell at every {options.lr_step:g} octaves")
    show(summary)
    for row in rows:
        row["law"] = asdict(row["law"])
        row["estimates"] = [[one and asdict(one) for one in pair] for pair in row["estimates"]]
    write(options.json, about, rows, summary=summary)
