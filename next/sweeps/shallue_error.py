"""The best error of each batch size within a budget: whether large batches generalise worse.

Shallue et al. 2018 (arXiv 1811.03600), section 4.8: solution quality depends on the budget more
than on the batch size. Within a budget of examples large batches take few steps, and within one of
steps small batches see few examples; within the longer of the two neither is short.
"""

import math
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from matplotlib.figure import Figure
from pandas import DataFrame, Series
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt
from scipy import stats

from bstune.report.compare_page import STEPS
from bstune.report.figure import BLUE, GREEN, VERMILION, draw_legend, scale
from bstune.sweeps.rows import Unit, measured
from bstune.sweeps.shallue import SHARE, difference
from bstune.sweeps.studies import train
from bstune.system.ticker import say

INCHES = (5.0, 4.4)
COLOURS = {"examples": VERMILION, "steps": BLUE, "both": GREEN}
OVER = ("over_smallest", "over_low", "over_high")
CELL = ["variant", "batch_size", "steps"]

Several = Annotated[list[PositiveInt], Field(min_length=2)]


def run(
    output: Path,
    *,
    common: list[str],
    variants: dict[str, list[str]],
    batch_sizes: Several,
    lrs: Annotated[list[PositiveFloat], Field(min_length=1)],
    seeds: Annotated[list[NonNegativeInt], Field(min_length=3)],
    steps: PositiveInt,
    examples: PositiveInt,
) -> tuple[DataFrame, Figure]:
    """Train each batch size to the end of each budget, and compare the least validation errors.

    Args:
        output: gets the rows, a training each.
        common: arguments of all trainings, as on the command line; the workload's metric has to
            fall.
        variants: further arguments, by the names of what is compared.
        batch_sizes: the smallest one first.
        lrs: the rates; the best one is chosen for each variant, batch size and budget.
        seeds: the first one chooses the rates, the others are reported.
        steps: the budget of steps.
        examples: the budget of examples; ``both`` is the longer of the two.

    Returns:
        A row a variant, budget and batch size: the rate, the mean over seeds of the least error
        with its 90% interval by Student's t, and the difference to the smallest batch size with its
        90% interval by Welch's t. A training that diverged before its first evaluation has an
        infinite error.
    """

    def measure(unit: Unit) -> dict[str, Any]:
        names = ("batch_size", "lr", "steps", "seed")
        of_trial = [f"trial.{name}={unit[name]}" for name in names]
        say(", ".join(f"{name} {value}" for name, value in unit.items()))
        record = train([*common, *variants[str(unit["variant"])], *of_trial])
        return {"error": min(record.finite_values, default=math.inf), "status": record.status}

    def trainings(cells: DataFrame, seeds: Sequence[int]) -> DataFrame:
        units = cells.merge(DataFrame({"seed": seeds}), how="cross").to_dict("records")
        settings = {"common": common, "variants": variants}
        return measured(output / "rows.jsonl", settings, units, measure)

    lengths = {size: lengths_of(size, steps, examples) for size in batch_sizes}
    pairs = [(size, length) for size in batch_sizes for length in {*lengths[size].values()}]
    cells = [(variant, *pair, lr) for variant, pair, lr in product(variants, pairs, lrs)]
    tuning = trainings(DataFrame(cells, columns=[*CELL, "lr"]), seeds[:1])
    best = tuning.loc[tuning.groupby(CELL)["error"].idxmin(), [*CELL, "lr"]]
    rates = best.set_index(CELL)["lr"]
    errors = trainings(best, seeds[1:]).set_index(CELL)["error"].sort_index()
    rows = []
    for variant, budget, size in product(variants, COLOURS, batch_sizes):
        cell = variant, size, lengths[size][budget]
        named = {"variant": variant, "budget": budget, "batch_size": size, "steps": cell[-1]}
        smallest = errors[variant, batch_sizes[0], lengths[batch_sizes[0]][budget]]
        rows.append(named | {"lr": rates[cell]} | _summary(errors[cell], smallest))
    table = DataFrame(rows)
    # Its difference to itself is 0.
    table.loc[table["batch_size"] == batch_sizes[0], list(OVER)] = math.nan
    return table, figure(table)


def lengths_of(batch_size: int, steps: int, examples: int) -> dict[str, int]:
    """The steps of each budget at a batch size."""
    of_examples = max(1, examples // batch_size)
    return {"examples": of_examples, "steps": steps, "both": max(of_examples, steps)}


def _summary(values: Series, smallest: Series) -> dict[str, float]:
    """The mean with its interval, and the difference to that of the smallest batch size."""
    mean = float(values.mean())
    low, high = stats.t.interval(SHARE, len(values) - 1, mean, stats.sem(values))
    over = difference(values, smallest)
    own = {"mean": mean, "low": float(low), "high": float(high)}
    return own | dict(zip(OVER, over, strict=True))


def figure(table: DataFrame) -> Figure:
    """Draw the least error over batch size: a panel a variant, a line a budget."""
    panels = table.groupby("variant", sort=False)
    width, height = INCHES
    drawn = Figure(figsize=(width * len(panels), height), layout="constrained")
    all_axes = drawn.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (variant, of_variant) in zip(all_axes, panels, strict=True):
        for budget, rows in of_variant.groupby("budget", sort=False):
            bars = rows["mean"] - rows["low"], rows["high"] - rows["mean"]
            style: dict[str, Any] = {"fmt": "o-", "capsize": 3, "color": COLOURS[budget]}
            axes.errorbar(rows["batch_size"], rows["mean"], bars, label=budget, **style)
        axes.set(title=variant, ylabel="least error within the budget")
        scale(axes, STEPS)
    draw_legend(drawn, all_axes)
    return drawn
