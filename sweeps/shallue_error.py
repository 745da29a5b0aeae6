"""The best error of each batch size within a budget: whether large batches generalise worse.

Shallue et al. 2018 (arXiv 1811.03600), section 4.8: solution quality depends on the budget more
than on the batch size. Within a budget of examples large batches take few steps, and within one of
steps small batches see few examples; within the longer of the two neither is short.
"""

import math
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from matplotlib.figure import Figure
from pandas import DataFrame, Series, concat
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt
from scipy.stats import t as student

from bstune.core.records import Budget
from bstune.report.compare_page import STEPS
from bstune.report.figure import draw_legend, scale_axes
from bstune.sweeps.rows import Unit, measure_units
from bstune.sweeps.shallue import over_first
from bstune.sweeps.studies import train
from bstune.system.ticker import say

INCHES = (5.0, 4.4)
# Of a two-sided 90% interval.
QUANTILE = 0.95
OF_BUDGET = ["variant", "budget"]
OF_TRAINING = ["variant", "batch_size", "steps"]


def run(
    output: Path,
    *,
    common: list[str],
    variants: dict[str, list[str]],
    batch_sizes: Annotated[list[PositiveInt], Field(min_length=2)],
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
        batch_sizes: differences are over the first one.
        lrs: the rates; the best one is chosen for each variant, batch size and budget.
        seeds: the first one chooses the rates, the others are reported.
        steps, examples: of the budgets: of examples, of steps, and of both, the longer one.

    Returns:
        A row a variant, budget and batch size: the rate, the mean over seeds of the least error
        with its 90% interval by Student's t, and the difference to the first batch size as of
        :func:`bstune.sweeps.shallue.over_first`. The error is infinite where a training diverged
        before its first evaluation.
    """

    def measure(unit: Unit) -> dict[str, Any]:
        say(", ".join(f"{name} {value}" for name, value in unit.items()))
        names = ("batch_size", "lr", "steps", "seed")
        trial_options = [f"trial.{name}={unit[name]}" for name in names]
        record = train([*common, *variants[str(unit["variant"])], *trial_options])
        return {"error": min(record.finite_values, default=math.inf), "status": record.status}

    def trainings(cells: DataFrame, seeds: list[int]) -> DataFrame:
        units = cells.merge(Series(seeds, name="seed"), how="cross").to_dict("records")
        settings = {"common": common, "variants": variants}
        return measure_units(output / "rows.jsonl", settings, units, measure)

    both = Budget(steps=steps, examples=examples)
    budgets = [Budget(steps=1, examples=examples), Budget(steps=steps), both]
    asked = []
    for variant, budget, size in product(variants, budgets, batch_sizes):
        asked.append((variant, str(budget), size, budget.last_step(size)))
    cells = DataFrame(asked, columns=[*OF_BUDGET, *OF_TRAINING[1:]])
    once = cells[OF_TRAINING].drop_duplicates()
    tuning = trainings(once.merge(Series(lrs, name="lr"), how="cross"), seeds[:1])
    best = tuning.loc[tuning.groupby(OF_TRAINING)["error"].idxmin(), [*OF_TRAINING, "lr"]]
    runs = cells.merge(trainings(best, seeds[1:]), on=OF_TRAINING)
    errors = runs.groupby([*cells, "lr"], sort=False)["error"]
    table = errors.agg(["mean", "sem"]).reset_index()
    half = student.ppf(QUANTILE, len(seeds) - 2) * table.pop("sem")
    table["low"], table["high"] = table["mean"] - half, table["mean"] + half
    over = {
        names: over_first(rows["error"], rows["batch_size"])
        for names, rows in runs.groupby(OF_BUDGET)
    }
    differences = concat(over, names=[*OF_BUDGET, "batch_size"]).add_prefix("over_first_")
    table = table.merge(differences.reset_index(), how="left")
    return table, figure(table)


def figure(table: DataFrame) -> Figure:
    """Draw the least error over batch size: a panel a variant, a line a budget."""
    panels = table.groupby("variant", sort=False)
    width, height = INCHES
    drawn = Figure(figsize=(width * len(panels), height), layout="constrained")
    all_axes = drawn.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (variant, of_variant) in zip(all_axes, panels, strict=True):
        for budget, rows in of_variant.groupby("budget", sort=False):
            bars = rows["high"] - rows["mean"]
            axes.errorbar(rows["batch_size"], rows["mean"], bars, fmt="o-", capsize=3, label=budget)
        axes.set(title=variant, ylabel="least error within the budget")
        scale_axes(axes, STEPS)
    draw_legend(drawn, all_axes)
    return drawn
