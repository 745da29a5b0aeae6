"""How often what a search within a budget says of batch sizes holds the truth, on made curves.

    python tests/benchmarks/bench_budget_coverage.py [--curves 40] [--spend 20] [--json FILE]
        [--families ...] [--growth 1]

No clock goes in. A run has the height h, its metric above a floor, after

    n(h) = S_min ((h_0/h)^(1/p) - 1) F(B_crit(h)/B) exp(c delta^2)

steps, with B_crit(h) = b (h_1/h)^g, delta the octaves from the best learning rate, c one penalty
below it and another above. F is 1 + r for two terms. So the best batch size grows with the budget
where g is above 0. All of it is drawn for each curve, the budget of seconds too. Seeds differ by
10% in steps, and evaluations by 1% in h. Eight families, five curves each:

- ``two terms``: the posterior's own law;
- ``u-shape``, ``power 0.7``, ``sharp knee``: other F, those of ``synthetic.Law``;
- ``rate exponent 0.7``: the best rate is as B^0.7, between the rules;
- ``bent``: p falls from twice to half of it while the metric falls;
- ``noisy rates``: both kinds of noise double with each octave of the rate;
- ``rate floor``: the floor rises with lr/B, so that curves cross: the best rate falls as the budget
  grows.

bstune's sampler spends so many full trials as ``--spend`` says. Then what a report would say is held
against the truth, which is without noise: whether AS GOOD holds the best batch size, and the
interval of the best one at four times the budget the best one there, of those that are searched.
With ``--json`` FILE has the machine and a row for each curve, and a second run does only what is not
there.
"""

import argparse
import json
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from bench_fixed_budget import (
    HIGH,
    LOW,
    LR_HIGH,
    LR_LOW,
    SHARES,
    STEPS_A_STEP,
    Array,
    BudgetSearch,
)
from common import machine
from synthetic import START
from torch import device

from bstune.search.budget_findings import LONGER

FAMILIES = (
    "two terms",
    "u-shape",
    "power 0.7",
    "sharp knee",
    "rate exponent 0.7",
    "bent",
    "noisy rates",
    "rate floor",
)
# The batch size in the geometric middle of 8 to 4096.
MIDDLE = 181.0
# The noise of log steps from seed to seed, and of log height from evaluation to evaluation.
SEED_NOISE = 0.1
EVALUATION_NOISE = 0.01
# Heights of the curve over h_0, and h_1 over h_0.
HEIGHTS = np.geomspace(1.0, 1e-6, 600)
REFERENCE = 0.1
# The truth is known to an eighth of an octave of the batch size.
SLACK = 2.0 ** (1 / 8)


@dataclass(frozen=True)
class MadeCurves:
    """Runs whose metric is known; see the module's docstring."""

    family: str
    s_min: float
    b_crit: float
    # g of the module's docstring.
    growth: float
    # p of it.
    power: float
    floor: float
    # Seconds of a step.
    overhead: float
    per_example: float
    # The best one at MIDDLE.
    lr: float
    # Of the best rate over the batch size.
    exponent: float
    left: float
    right: float
    # Octaves above the best rate, from which runs diverge.
    edge: float
    seconds: float = 1.0
    sizes: tuple[int, int] = (LOW, HIGH)
    lrs: tuple[float, float] = (LR_LOW, LR_HIGH)
    worst: float = START

    def tau(self, batch_size: float) -> float:
        """Give the seconds of a step."""
        return self.overhead + self.per_example * batch_size

    def budget(self, batch_size: float) -> float:
        """Give the thousandths of steps in the budget's seconds."""
        return STEPS_A_STEP * self.seconds / self.tau(batch_size)

    def best_lr(self, batch_size: float) -> float:
        """Give the rate of the fewest steps."""
        lr = self.lr * float((batch_size / MIDDLE) ** self.exponent)
        return min(max(lr, LR_LOW), LR_HIGH)

    def curve(self, batch_size: float, lr: float, seed: int) -> Array:
        """Give a run's metric at ``SHARES``, with its own noise."""
        rng = np.random.default_rng([seed, 77])
        delta = math.log2(lr / self.best_lr(batch_size))
        if delta >= self.edge:
            # From the edge on a run diverges within a tenth of the budget.
            return np.where(SHARES > 0.1, math.inf, START)
        noisier = 1.0
        if self.family == "noisy rates":
            noisier = 2.0**delta
        luck = math.exp(noisier * SEED_NOISE * rng.standard_normal())
        exact = self._metric(batch_size, lr, SHARES / luck)
        heights = exact - self.floor
        noise = noisier * EVALUATION_NOISE * rng.standard_normal(SHARES.size)
        return np.asarray(self.floor + heights * np.exp(noise))

    def truth(self, batch_size: float, lr: float, share: float = 1.0) -> float:
        """Give the metric at a share of the budget, without noise."""
        if math.log2(lr / self.best_lr(batch_size)) >= self.edge:
            return START
        return float(self._metric(batch_size, lr, np.array([share]))[0])

    def best_size(self, share: float = 1.0) -> float:
        """Give the batch size, of those searched, whose metric is best at a share of the budget."""
        sizes = np.exp2(np.arange(math.log2(LOW), math.log2(HIGH) + 1e-9, 1 / 8))
        truths = [self._best_truth(size, share) for size in sizes]
        return float(sizes[int(np.argmin(truths))])

    @cached_property
    def best(self) -> float:
        """The least truth."""
        return self._best_truth(self.best_size(), 1.0)

    def _best_truth(self, batch_size: float, share: float) -> float:
        octaves = [0.0]
        # A floor that rises with the rate makes a lower one than that of the fewest steps the best.
        if self.family == "rate floor":
            octaves = np.arange(-4.0, 2.01, 0.25).tolist()
        lr = self.best_lr(batch_size)
        return min(self.truth(batch_size, lr * 2.0**octave, share) for octave in octaves)

    def _metric(self, batch_size: float, lr: float, shares: Array) -> Array:
        """Give the metric at shares of the budget, by the steps to each of many heights."""
        delta = math.log2(lr / self.best_lr(batch_size))
        curvature = self.left if delta < 0.0 else self.right
        steps = self._steps_to_heights(batch_size) * math.exp(curvature * delta**2)
        at = shares * self.seconds / self.tau(batch_size)
        log_heights = np.interp(np.log1p(at), np.log1p(steps), np.log(HEIGHTS))
        floor = self.floor
        if self.family == "rate floor":
            floor += 0.03 * (lr / self.lr) * MIDDLE / batch_size
        return np.asarray(floor + (START - self.floor) * np.exp(log_heights))

    def _steps_to_heights(self, batch_size: float) -> Array:
        """Give n(h) at the best rate."""
        power = np.full(HEIGHTS.size, self.power)
        if self.family == "bent":
            # A mean of the local powers from the start on, which is twice p there.
            fallen = np.minimum(-np.log(HEIGHTS) / -math.log(0.01), 1.0)
            power = self.power * 2.0 ** (1.0 - 2.0 * fallen)
        least = self.s_min * (HEIGHTS ** (-1.0 / power) - 1.0)
        ratio = self.b_crit * (HEIGHTS / REFERENCE) ** -self.growth / batch_size
        # A lower metric never takes fewer steps.
        return np.asarray(np.maximum.accumulate(least * self._factor(ratio)))

    def _factor(self, ratio: Array) -> Array:
        """Give F; see ``synthetic.Law``."""
        if self.family == "u-shape":
            return np.asarray(1.0 + ratio + (0.15 * ratio) ** 2)
        if self.family == "power 0.7":
            return np.asarray(1.0 + ratio**0.7 / 0.4)
        if self.family == "sharp knee":
            return np.asarray((1.0 + ratio**4.0) ** 0.25)
        return 1.0 + ratio


def draw_curves(number: int, growth: float = 1.0) -> MadeCurves:
    """Draw the curves of a number: its family, and all that a family leaves open.

    ``growth``: times that of B_crit as it is drawn.
    """
    family = FAMILIES[number % len(FAMILIES)]
    rng = np.random.default_rng([number, 13])
    example = math.exp(rng.uniform(math.log(1e-6), math.log(1e-4)))
    power = 0.7 * math.exp(rng.uniform(-0.5, 0.5))
    exponent = float(rng.choice((0.0, 0.5, 1.0)))
    made = MadeCurves(
        family=family,
        s_min=math.exp(rng.uniform(math.log(10.0), math.log(100.0))),
        b_crit=math.exp(rng.uniform(math.log(32.0), math.log(1024.0))),
        # So that B_crit is as S_min^0 to S_min^0.5.
        growth=growth * rng.uniform(0.0, 0.5) / power,
        power=power,
        floor=rng.uniform(0.0, 0.05),
        overhead=example * math.exp(rng.uniform(math.log(20.0), math.log(2000.0))),
        per_example=example,
        lr=2.0 ** rng.uniform(-6.5, -4.5),
        exponent=0.7 if family == "rate exponent 0.7" else exponent,
        left=rng.uniform(0.06, 0.2),
        right=rng.uniform(0.2, 0.6),
        edge=rng.uniform(2.0, 3.5),
    )
    # The budget is the least time to a tenth of the first height, or up to four times as long.
    place = int(np.argmin(np.abs(HEIGHTS - REFERENCE)))
    sizes = np.exp2(np.arange(math.log2(LOW), math.log2(HIGH) + 1e-9, 1 / 4))
    times = [made._steps_to_heights(size)[place] * made.tau(size) for size in sizes]
    seconds = min(times) * math.exp(rng.uniform(math.log(0.5), math.log(4.0)))
    values = {**vars(made), "seconds": seconds}
    return MadeCurves(**values)


def row_of(number: int, spend: float, growth: float) -> dict[str, Any]:
    """Search on the curves of a number; hold what is said against the truth."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    problem = draw_curves(number, growth)
    search = BudgetSearch(problem, number)
    spent = 0.0
    trials = 0
    for cost in search.costs():
        if spent + cost > spend + 1e-6:
            break
        spent = spent + cost
        trials = trials + 1
    point = search.recommended()
    # Above the best batch size and rate, in units of the metric.
    above = math.nan if point is None else problem.truth(*point) - problem.best
    row: dict[str, Any] = {
        "curve": number,
        "family": problem.family,
        "spend": spend,
        "growth": growth,
        "trials": trials,
        "best": problem.best,
        "above": above,
        "best_size": problem.best_size(),
        "best_size_later": problem.best_size(LONGER),
    }
    findings = search.findings()
    if findings is None or findings.growth is None:
        return row
    later = findings.growth.longer
    good = findings.as_good
    return row | {
        "as_good": [good.low, good.high],
        "later": [later.low, later.batch_size, later.high],
        "exponent": [findings.growth.low, findings.growth.exponent, findings.growth.high],
        "gain_left": [findings.gain_left.next_point, findings.gain_left.at_most],
        "seed_scatter": findings.gain_left.seed_scatter,
    }


def holds(interval: Sequence[float], truth: float) -> bool:
    """Say whether an interval, its ends first and last, holds one of the batch sizes searched."""
    low = min(interval[0], HIGH)
    high = max(interval[-1], LOW)
    return low <= truth * SLACK and truth <= high * SLACK


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print how many intervals hold the truth, by family and in all."""
    judged = [row for row in rows if "as_good" in row]
    by_family = Counter(row["family"] for row in judged)
    for family in [*by_family, "all"]:
        own = [row for row in judged if family in (row["family"], "all")]
        good = sum(holds(row["as_good"], row["best_size"]) for row in own)
        later = sum(holds(row["later"], row["best_size_later"]) for row in own)
        widths = [math.log2(row["as_good"][1] / row["as_good"][0]) for row in own]
        later_widths = [math.log2(row["later"][2] / row["later"][0]) for row in own]
        print(
            f"{family:18s} n {len(own):2d}: AS GOOD holds the best batch size in {good}, "
            f"{statistics.median(widths):.1f} octaves wide; at {LONGER:g} times the budget its "
            f"interval in {later}, {statistics.median(later_widths):.1f} octaves; the point to "
            "use is "
            f"{_per_cent(own, [row['above'] for row in own]):.2f}% above the best, where at most "
            f"{_per_cent(own, [row['gain_left'][1] for row in own]):.2f}% was said to be left"
        )
    if len(judged) < len(rows):
        print(f"{len(rows) - len(judged)} curves without a full trial at two parts of the budget")


def _per_cent(rows: Sequence[dict[str, Any]], values: Sequence[float]) -> float:
    """Give the mean of values in per cent of each curve's best metric."""
    shares = [value / row["best"] for row, value in zip(rows, values, strict=True)]
    return 100.0 * statistics.fmean(shares)


def main() -> None:
    """Run what is asked for and is not there yet."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--curves", type=int, default=40)
    parser.add_argument("--spend", type=float, default=20.0, help="full trials' cost")
    parser.add_argument("--growth", type=float, default=1.0, help="times that of B_crit")
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--json", type=Path, help="file for every curve's row, and to go on from")
    options = parser.parse_args()
    about = machine(device("cpu"), options.curves)
    rows = list[dict[str, Any]]()
    if options.json is not None and options.json.exists():
        lines = options.json.read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
    elif options.json is not None:
        options.json.write_text(json.dumps({"machine": about}) + "\n", encoding="utf-8")
    # The first line is the machine's.
    asked = (options.spend, options.growth)
    rows = [row for row in rows if (row.get("spend"), row.get("growth")) == asked]
    done = {row["curve"] for row in rows}
    for number in range(options.curves):
        is_asked = FAMILIES[number % len(FAMILIES)] in options.families
        if number in done or not is_asked:
            continue
        row = row_of(number, *asked)
        rows.append(row)
        if options.json is not None:
            with options.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    show(sorted(rows, key=lambda row: row["curve"]))


if __name__ == "__main__":
    main()
