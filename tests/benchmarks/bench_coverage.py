"""How often the 90% interval of B_crit holds the truth, after a search of objective ``curve`` on tables of known truth.

Every seed draws a law (S_min, B_crit, the exponent of lr*(B) and its level, the penalties, the noise, tau) and makes a
table of it; bstune's own search spends three times the frontier's cost on it. After one and three times that cost its
posterior is compared with the law's B_crit, and so is the fit to the frontier points of the same trials, the estimate
of all other searches. A z-score is (log estimate - log truth) over the posterior's standard deviation of log B_crit:
standard deviation 1 and mean 0 if the interval is right. ``widen`` is what the intervals' half widths in log B_crit
would have to be multiplied by to hold the truth in 90% of the seeds.

Noise is drawn anew for every run of a cell, so that few ``--runs`` make trials at one place repeat each other, which no
real seeds do.

    python tests/benchmarks/bench_coverage.py [--seeds 200] [--out FILE]

It takes 5 to 9 s a seed on one core; no clock goes into the results.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from synthetic import Law, Metric, synthetic_table

from bstune.core.curve import CurveError, fit_curve, frontier_points
from bstune.core.files import write_text
from bstune.core.records import Target, TrialResult, dump_json
from bstune.sweeps.baselines import OwnSearch
from bstune.sweeps.contest import Problem, Task, factor, make_task, percentile, play

SPENDINGS = (1.0, 3.0)  # in the frontier's cost
LEVEL, Z = 0.9, 1.645  # of the intervals, and its two-sided normal quantile
EXPONENTS = (0.0, 0.5, 1.0)
METRIC = Metric(noise=0.05)
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
        """Return how many standard deviations the estimate is too high, in log B_crit."""
        if self.b_crit is None or not self.spread:
            return None
        return math.log(self.b_crit / truth) / self.spread

    def covers(self, truth: float) -> bool:
        """Return whether the interval holds the truth."""
        return (self.low is None or self.low <= truth) and (self.high is None or truth <= self.high)

    def widen(self, truth: float) -> float | None:
        """Return what the half width towards the truth would have to be multiplied by to end there."""
        end = self.high if self.b_crit is not None and truth > self.b_crit else self.low
        if self.b_crit is None or end is None:
            return None
        return math.log(truth / self.b_crit) / math.log(end / self.b_crit)


@dataclass(frozen=True)
class Row:
    """One seed: the law, and the estimates after each spending."""

    seed: int
    law: Law
    trials: int
    posterior: tuple[Estimate, ...]
    fit: tuple[Estimate | None, ...]


class Watched(OwnSearch):
    """bstune's own search, which keeps both estimates whenever it is asked for B_crit."""

    def __init__(self, problem: Problem, seed: int) -> None:
        super().__init__(problem, seed)
        self.posterior: list[Estimate] = []
        self.fit: list[Estimate | None] = []

    def b_crit(self, finished: Sequence[TrialResult]) -> float | None:
        quantiles = self.b_crit_quantiles((0.05, 0.5, 0.95, 0.16, 0.84))
        if quantiles is None:
            self.posterior.append(Estimate(None, None, None, None))
        else:
            low, middle, high, minus, plus = quantiles
            self.posterior.append(Estimate(middle, low, high, 0.5 * math.log(plus / minus)))
        self.fit.append(fitted(finished))
        return self.posterior[-1].b_crit


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


def pose(law: Law, lr_step: float, runs: int) -> Task:
    """Return the task of a law's table."""
    octaves = np.arange(OCTAVES[0], OCTAVES[1] + 0.5 * lr_step, lr_step)
    table = synthetic_table(law, lrs=[float(2.0**z) for z in octaves], seeds=range(runs), metric=METRIC)
    return make_task("law", table, Target("error", METRIC.target, "min"), "curve")


def measure(seed: int, lr_step: float, runs: int) -> Row:
    """Play one seed."""
    law = draw_law(seed)
    task = pose(law, lr_step, runs)
    search = Watched(task.problem, seed)
    played = play(search, task, SPENDINGS)
    return Row(seed, law, played.trials, tuple(search.posterior), tuple(search.fit))


def summarize(rows: Sequence[Row], index: int) -> list[dict[str, Any]]:
    """Return how both estimates did after the spending ``index``."""
    found = []
    for name in ("posterior", "fit"):
        pairs = [(estimate, row.law.b_crit) for row in rows if (estimate := getattr(row, name)[index]) is not None]
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


def main() -> int:
    """Play all seeds, print the table, and write the JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200, help="laws, one search each")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--lr-step", type=float, default=0.5, help="octaves between the tables' learning rates")
    parser.add_argument("--runs", type=int, default=8, help="runs in a cell of the tables")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write every number to FILE")
    options = parser.parse_args()
    if min(options.seeds, options.runs) < 1 or not 0 < options.lr_step <= 2:
        parser.error("--seeds and --runs must be at least 1, --lr-step above 0 and at most 2")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    began = time.perf_counter()
    rows = []
    for seed in range(options.first, options.first + options.seeds):
        rows.append(measure(seed, options.lr_step, options.runs))
        if sys.stderr.isatty():
            print(f"\r\x1b[K{len(rows)}/{options.seeds}", end="", file=sys.stderr, flush=True)
    summary = [line for index in range(len(SPENDINGS)) for line in summarize(rows, index)]
    trials = statistics.median(row.trials for row in rows)
    print(
        f"{len(rows)} laws, {trials:g} trials (median), tables of {options.runs} runs a cell at every "
        f"{options.lr_step:g} octaves; {(time.perf_counter() - began) / len(rows):.1f} s a law"
    )
    show(summary)
    if options.out is not None:
        settings = {"lr_step": options.lr_step, "runs": options.runs, "level": LEVEL}
        found = {"settings": settings, "summary": summary, "rows": [asdict(row) for row in rows]}
        write_text(options.out, dump_json(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
