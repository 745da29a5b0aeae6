"""How often the interval of ``bstune extrapolate`` holds what is there 4, 16 and 64 times beyond the largest scale.

    python tests/benchmarks/bench_extrapolate.py            # 40 made curves, then measured scales held out
    python tests/benchmarks/bench_extrapolate.py --tune     # the prior's widths on other curves

Made curves: three to five studies each, of four families, three of which the model does not know.
Measured ones: :mod:`tests.recorded`'s studies and the public grid of Li et al. 2025 (step law,
arXiv 2503.04715), each held out at its largest scales.
"""

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np

from bstune.core import scale_law
from bstune.core.scale_law import Estimate, ScalePoint, fit_scale_law

FAMILIES = ("power", "broken", "saturating", "log")
DISTANCES = (4.0, 16.0, 64.0)
CURVES = 40
# The prior is set on so many curves, of other seeds.
TUNING = 400
TUNING_SEED = 10_000
TUNED_DRIFTS = (0.06, 0.09, 0.12, 0.16, 0.2)
TUNED_OFFSETS = (0.15, 0.3)
HERE = Path(__file__).parent
ROWS = HERE / "extrapolate.jsonl"
MEASURED = HERE / "extrapolate_measured.json"

# The log of a quantity over the log of a scale.
Curve = Callable[[float], float]


@dataclass(frozen=True)
class Made:
    """A made curve and the studies that measured it."""

    family: str
    curve: Curve
    points: tuple[ScalePoint, ...]


def made_curve(seed: int) -> Made:
    """Draw a curve and its studies; the largest scale is 1."""
    rng = np.random.default_rng(seed)
    family = FAMILIES[seed % len(FAMILIES)]
    count = int(rng.integers(3, 6))
    span = math.log(rng.uniform(6.0, 40.0))
    # About evenly spaced in logs, the largest at 1.
    log_scales = np.linspace(-span, 0.0, count) + rng.uniform(-0.1, 0.1, count)
    log_scales[-1] = 0.0
    curve = _curve(family, span, rng)
    # Studies differ by more than their errors tell, and the model does not know by how much.
    offset = rng.uniform(0.0, 0.2)
    points = list[ScalePoint]()
    for i, log_scale in enumerate(log_scales.tolist()):
        error = rng.uniform(0.06, 0.25)
        told = curve(log_scale) + rng.normal(0.0, offset) + rng.normal(0.0, error)
        points.append(ScalePoint(math.exp(log_scale), math.exp(told), error, str(i)))
    return Made(family, curve, tuple(points))


def _curve(family: str, span: float, rng: np.random.Generator) -> Curve:
    """Draw a curve of a family: it rises or falls."""
    # Seven in ten rise.
    sign = 1.0 if rng.uniform() < 0.7 else -1.0
    if family == "log":
        # log(s/start): the quantity itself grows as the log of the scale.
        start = span + math.log(rng.uniform(10.0, 1000.0))
        return lambda x: sign * math.log(x + start)
    slope = sign * rng.uniform(0.1, 0.9)
    if family == "power":
        return lambda x: slope * x
    # A slope that changes by up to 0.4, within the studies or up to 16 times beyond them.
    if family == "broken":
        place = rng.uniform(-span, math.log(16.0))
        change = rng.uniform(-0.4, 0.4)
        return lambda x: slope * x + change * float(np.logaddexp(0.0, x - place))
    # It flattens out beyond all studies, within the distances that are judged.
    place = rng.uniform(0.0, math.log(64.0))
    return lambda x: slope * (x - float(np.logaddexp(0.0, x - place)))


def holds(found: Estimate, log_value: float) -> bool:
    """Say whether an interval holds a value."""
    return math.log(found.low) <= log_value <= math.log(found.high)


def judge_made(seeds: Sequence[int]) -> list[dict[str, object]]:
    """Judge the interval at each distance of each curve."""
    rows = list[dict[str, object]]()
    for seed in seeds:
        made = made_curve(seed)
        law = fit_scale_law(made.points)
        for distance in DISTANCES:
            found = law.at(distance)
            truth = made.curve(math.log(distance))
            rows.append(
                {
                    "seed": seed,
                    "family": made.family,
                    "studies": len(made.points),
                    "distance": distance,
                    "holds": holds(found, truth),
                    # Half of the interval's width in logs, as a factor.
                    "width": math.sqrt(found.high / found.low),
                    "error": math.exp(abs(math.log(found.value) - truth)),
                }
            )
    return rows


def judge_measured(series: dict[str, object]) -> list[dict[str, object]]:
    """Hold the largest scale out, of all the others and of the three smallest ones alone."""
    points = [ScalePoint(**point) for point in series["points"]]  # type: ignore[attr-defined]
    points.sort(key=lambda point: point.scale)
    scales = sorted({point.scale for point in points})
    largest = scales[-1]
    rows = list[dict[str, object]]()
    # Once where both are the same.
    for kept in sorted({min(3, len(scales) - 1), len(scales) - 1}):
        known = [point for point in points if point.scale <= scales[kept - 1]]
        law = fit_scale_law(known)
        found = law.at(largest)
        for held in points:
            if held.scale != largest:
                continue
            error = abs(math.log(found.value / held.value))
            rows.append(
                {
                    "source": series["source"],
                    "quantity": series["quantity"],
                    "scales": kept,
                    "distance": largest / law.largest,
                    "holds": holds(found, math.log(held.value)),
                    "low": found.low,
                    "value": found.value,
                    "high": found.high,
                    "measured": held.value,
                    "width": math.sqrt(found.high / found.low),
                    "error": math.exp(error),
                }
            )
    return rows


def share(rows: Sequence[dict[str, object]]) -> str:
    """Write how many intervals hold, their median half width and the median error, as factors."""
    count = sum(bool(row["holds"]) for row in rows)
    width = np.median([row["width"] for row in rows])  # type: ignore[arg-type]
    error = np.median([row["error"] for row in rows])  # type: ignore[arg-type]
    return (
        f"{count} of {len(rows)} ({count / len(rows):.0%}), half width {width:.2f}, error "
        f"{error:.2f}"
    )


def show_made(rows: Sequence[dict[str, object]]) -> None:
    """Print the made curves, by distance and by family."""
    for distance in DISTANCES:
        there = [row for row in rows if row["distance"] == distance]
        print(f"{distance:g} times: {share(there)}")
        for family in FAMILIES:
            print(f"    {family}: {share([row for row in there if row['family'] == family])}")


def main() -> None:
    """Judge, print and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tune", action="store_true", help="other priors, on other curves")
    parser.add_argument("--curves", type=int, default=CURVES)
    options = parser.parse_args()
    if options.tune:
        for drift, offset in product(TUNED_DRIFTS, TUNED_OFFSETS):
            # The fit reads these constants of its module anew each time.
            scale_law.DRIFT_SIGMA = drift
            scale_law.OFFSET_SIGMA = offset
            print(f"drift {drift:g}, offset {offset:g}")
            show_made(judge_made(range(TUNING_SEED, TUNING_SEED + TUNING)))
        return
    made = judge_made(range(options.curves))
    show_made(made)
    # Of three measured scales two are left, which the command would refuse.
    scale_law.FEWEST_SCALES = 2
    groups = defaultdict[str, list[dict[str, object]]](list)
    measured = list[dict[str, object]]()
    for series in json.loads(MEASURED.read_text()):
        for row in judge_measured(series):
            measured.append(row)
            whose = "own" if str(row["source"]).startswith("tests/") else "step law"
            groups[f"{whose}, {row['quantity']}"].append(row)
            print(
                f"{row['source']}, {row['quantity']}, {row['scales']} scales, "
                f"{row['distance']:.3g} times: "
                f"{row['low']:.3g} to {row['high']:.3g}, measured {row['measured']:.4g}"
            )
    for name, rows in groups.items():
        print(f"{name}: {share(rows)}")
    # The README's figures are of all of them.
    if options.curves == CURVES:
        text = "".join(json.dumps(row) + "\n" for row in [*made, *measured])
        ROWS.write_text(text)


if __name__ == "__main__":
    main()
