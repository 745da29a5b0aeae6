"""How often the fit to points alone holds B_crit and B_opt, for points that two and that three terms made.

Every cell simulates curves of S_min = 100 and B_crit = 1000 with log-normal noise and fits them. "waste" is how many
times the fewest examples the smallest batch size takes; 0 stands for two terms. Shown are coverage and median width
(upper end over lower) of B_crit's interval, the share of the curves in which three terms were reported and, of those,
the coverage of B_opt's interval.

    python tests/benchmarks/bench_fit.py [--curves 100] [--noise 0.1 0.2] [--json FILE]

It takes 0.2 s a curve on one core; no clock goes into the results.
"""

import argparse
import json
import math
import sys
from pathlib import Path

import numpy as np
from scipy.optimize import brentq

from bstune.core.curve import CurveFit, FrontierPoint, fit_curve

B_CRIT = 1000.0
SIZES = {
    "9, B_crit/32 to 8 B_crit": B_CRIT * 2.0 ** np.arange(-5, 4),
    "12, B_crit/64 to 32 B_crit": B_CRIT * 2.0 ** np.arange(-6, 6),
    "6, B_crit/8 to 4 B_crit": B_CRIT * 2.0 ** np.arange(-3, 3),
}
WASTES = (0.0, 1.3, 1.8, 2.8)


def b_opt_of(smallest: float, waste: float) -> float:
    """The B_opt at which the smallest batch size takes ``waste`` times the fewest examples."""
    # Two terms.
    if waste == 0.0:
        return 0.0
    # B S(B)/S_min = B + B_crit + o^2/B is least at B = o, where it is 2 o + B_crit.
    return float(
        brentq(
            lambda o: (smallest + B_CRIT + o**2 / smallest) / (2 * o + B_CRIT) - waste,
            smallest,
            1e5,
        )
    )


def interval(low: float | None, high: float | None) -> tuple[float, float]:
    """The ends of an interval, 0 and infinity where open."""
    return low or 0.0, high or math.inf


def simulate(
    sizes: "np.ndarray[tuple[int], np.dtype[np.float64]]", noise: float, waste: float, curves: int
) -> list[float]:
    """Coverage and width of B_crit's interval, the share of three terms and the coverage of B_opt."""
    # Every cell has the same noise, so that cells differ by what they are of.
    rng = np.random.default_rng(14)
    b_opt = b_opt_of(sizes[0], waste)
    fits: list[CurveFit] = []
    for _ in range(curves):
        steps = (
            100
            * (1 + B_CRIT / sizes + (b_opt / sizes) ** 2)
            * np.exp(noise * rng.standard_normal(len(sizes)))
        )
        points = [
            FrontierPoint(size, one, False, None)
            for size, one in zip(sizes.tolist(), steps.tolist(), strict=True)
        ]
        fits.append(fit_curve(points))
    low, high = np.array(
        [interval(fit.critical_batch_size_low, fit.critical_batch_size_high) for fit in fits]
    ).T
    # Open at its lower end an interval is endlessly wide.
    width = np.divide(high, low, out=np.full(curves, math.inf), where=low > 0)
    covered = float(((low <= B_CRIT) & (high >= B_CRIT)).mean())
    three = [interval(fit.b_opt_low, fit.b_opt_high) for fit in fits if fit.law == "three-terms"]
    b_opt_covered = (
        float(np.mean([low <= b_opt <= high for low, high in three])) if three else math.nan
    )
    return [covered, float(np.median(width)), len(three) / curves, b_opt_covered]


def main() -> None:
    """Print a table, one row per cell."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--curves", type=int, default=100)
    parser.add_argument("--noise", type=float, nargs="+", default=[0.1, 0.2])
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    rows = {}
    print("| points | noise | waste | B_crit covered | width | three terms | B_opt covered |")
    print("|" + " --- |" * 7)
    for noise in options.noise:
        for waste in WASTES:
            for name, sizes in SIZES.items():
                row = rows[f"{name}, noise {noise}, waste {waste}"] = simulate(
                    sizes, noise, waste, options.curves
                )
                cells = f"{row[0]:.0%}", f"{row[1]:.2f}", f"{row[2]:.0%}", f"{row[3]:.0%}"
                print(f"| {name} | {noise:.0%} | {waste:g} | {' | '.join(cells)} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    sys.exit(main())
