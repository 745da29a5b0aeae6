"""The cost of a learning-rate rule: steps to target at its rate, over the fewest of any rate.

At one batch size the learning rate is tuned: it is the best recorded one. A rule carries it to
every other batch size of the table. There S at the rule's rate is read between the two recorded
rates around it, log S on a straight line over log lr, with S of a cell the median over its seeds.
Where one of the two misses the target in half of its runs or more, the rule misses it. A rate
outside of the recorded ones tells nothing.
"""

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from bstune.core.errors import ConfigError, TableError
from bstune.core.records import Target
from bstune.core.scaling import RULES, lr_of
from bstune.report.drawing import BLUE, GREEN, INK, PURPLE, VERMILION, log_axis, log_limits
from bstune.sweeps.critical_batch import median_steps_over_rates
from bstune.sweeps.harness import Finding
from bstune.sweeps.search_benchmark import find_sources, find_target, read_stoppable_runs
from bstune.system.console import format_number
from bstune.trial.replay import Table, read_index

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The sentence counts batch sizes from so many times that of the tuned rate on.
FAR_BATCH_SIZE = 8.0
RULE_PANEL_INCHES = (2.6, 3.0)
# The factor between the heights of two rules' crosses.
CROSS_STEP = 1.2
RULE_COLOURS = (VERMILION, BLUE, GREEN, PURPLE)
Outcome = Literal["reached", "missed", "not recorded"]


@dataclass(frozen=True)
class RuleCost:
    """The cost of one rule at one batch size of one table."""

    table: str
    batch_size: int
    tuned_at: int
    """The batch size whose best rate the rule carries on."""
    rule: str
    lr: float
    """The rule's learning rate."""
    best_lr: float
    """The recorded rate of the fewest steps at this batch size."""
    outcome: Outcome
    ratio: float | None
    """Steps at the rule's rate over the fewest; None where it missed or is not known."""


def run(*, tables: list[str], target: float | None, rules: list[str], tuned_at: float) -> Finding:
    """Compare rules on recorded tables: a row for each batch size, with every rule's cost.

    Args:
        tables: names or files; empty: all that ship.
        target: its value; None: that of each table.
        rules: names of rules without a noise scale.
        tuned_at: the learning rate is tuned at the recorded batch size nearest to this one.
    """
    # A table has no noise scale to give to the others.
    plain = [rule for rule, entry in RULES.items() if not entry.takes_noise_scale]
    if not rules or len(set(rules)) < len(rules) or not set(rules) <= set(plain):
        raise ConfigError(
            f"sweep.experiment.rules must be different ones of {', '.join(plain)}, but got {rules}"
        )
    if not (math.isfinite(tuned_at) and tuned_at > 0):
        raise ConfigError(f"sweep.experiment.tuned_at must be positive, but got {tuned_at}")
    costs = list[RuleCost]()
    # The fewest seeds of a recorded point, for each table.
    seeds = list[int]()
    for name, (file, shipped) in find_sources(tables, read_index()).items():
        table = read_stoppable_runs(file)
        costs += table_costs(name, table, find_target(file, shipped, target), rules, tuned_at)
        seeds.append(min(map(len, table.cells.values())))
    width, height = RULE_PANEL_INCHES
    return Finding(
        sentence=sentence(costs, rules),
        rows=shown_rows(costs, rules),
        n=min(seeds),
        device="recorded runs",
        paint=functools.partial(_paint_costs, costs, rules),
        inches=(width * len(seeds), height),
        details={"numbers": list(map(asdict, costs))},
    )


def table_costs(
    name: str, table: Table, target: Target, rules: Sequence[str], tuned_at: float
) -> list[RuleCost]:
    """Give each rule's cost at each batch size that reached the target. TableError if none did.

    The rules start from the best rate at the recorded batch size nearest to ``tuned_at``.
    """
    # By batch size: the best rate, and the steps at each rate.
    reached = dict[int, tuple[float, dict[float, float]]]()
    for size in table.batch_sizes:
        steps = median_steps_over_rates(table, target, size)
        best_lr = best_rate(steps)
        if best_lr is not None:
            reached[size] = best_lr, steps
    if not reached:
        raise TableError(f"{name}: no cell reaches {target} in more than half of its runs")
    # The nearest one is that by ratio, as recorded batch sizes go in factors.
    tuned_size = min(reached, key=lambda size: abs(math.log(size / tuned_at)))
    tuned_lr, _steps = reached[tuned_size]
    costs = list[RuleCost]()
    for size, (best_lr, steps) in reached.items():
        for rule in rules:
            lr = lr_of(rule, size, tuned_size, tuned_lr)
            outcome, steps_of_rule = steps_at(steps, lr)
            ratio: float | None = None
            if steps_of_rule is not None:
                ratio = steps_of_rule / steps[best_lr]
            costs.append(
                RuleCost(
                    table=name,
                    batch_size=size,
                    tuned_at=tuned_size,
                    rule=rule,
                    lr=lr,
                    best_lr=best_lr,
                    outcome=outcome,
                    ratio=ratio,
                )
            )
    return costs


def best_rate(steps: Mapping[float, float]) -> float | None:
    """Give the learning rate of the fewest steps, from steps by rate.

    Steps are infinite where the target was missed. None if no rate reached it.
    """
    best = min(steps, key=lambda lr: steps[lr])
    if math.isinf(steps[best]):
        return None
    return best


def steps_at(steps: Mapping[float, float], lr: float) -> tuple[Outcome, float | None]:
    """Read the steps to the target at ``lr`` from those at recorded learning rates.

    ``steps`` has the steps by learning rate; they are infinite where the target was missed. Gives
    the outcome, and the steps if it is ``reached``, else None. Between two recorded rates log steps
    are interpolated over log lr.
    """
    rates = sorted(steps)
    nearest = min(rates, key=lambda rate: abs(math.log(rate / lr)))
    # A rate that differs from a recorded one in the last digits of its arithmetic is that one.
    if math.isclose(nearest, lr, rel_tol=1e-9):
        if math.isinf(steps[nearest]):
            return "missed", None
        return "reached", steps[nearest]
    for below, above in pairwise(rates):
        if not below < lr < above:
            continue
        # Steps are not read between a rate that reached the target and one that missed it.
        if math.isinf(steps[below]) or math.isinf(steps[above]):
            return "missed", None
        share = math.log(lr / below) / math.log(above / below)
        return "reached", steps[below] * (steps[above] / steps[below]) ** share
    return "not recorded", None


def shown_rows(costs: Sequence[RuleCost], rules: Sequence[str]) -> list[dict[str, object]]:
    """Make a row for each batch size of each table: the best rate, and each rule's cost."""
    rows = dict[tuple[str, int], dict[str, object]]()
    for cost in costs:
        row = rows.setdefault(
            (cost.table, cost.batch_size),
            {
                "table": cost.table,
                "batch_size": cost.batch_size,
                "best_lr": cost.best_lr,
                **dict.fromkeys(rules),
            },
        )
        row[cost.rule] = cost.outcome
        if cost.ratio is not None:
            row[cost.rule] = f"{cost.ratio:.2f}"
    return list(rows.values())


def sentence(costs: Sequence[RuleCost], rules: Sequence[str]) -> str:
    """Say for each rule how many steps it takes far from the batch size of the tuned rate."""
    parts = list[str]()
    for rule in rules:
        # A miss counts as infinitely many steps, so that the median is over all batch sizes.
        ratios = list[float]()
        for cost in costs:
            is_far = cost.batch_size >= FAR_BATCH_SIZE * cost.tuned_at
            if cost.rule == rule and cost.outcome != "not recorded" and is_far:
                ratios.append(_or_infinite(cost.ratio))
        if not ratios:
            parts.append(f"{rule} has no recorded point so far")
            continue
        missed = ratios.count(math.inf)
        middle = statistics.median(ratios)
        typical = "misses"
        if math.isfinite(middle):
            typical = f"takes {format_number(middle, 3)} times the steps"
        parts.append(
            f"{rule} {typical} (median) and misses the target at {missed} of {len(ratios)}"
        )
    return (
        f"At {FAR_BATCH_SIZE:.0f} times the batch size of the tuned rate and beyond, over the "
        f"fewest steps of any rate: {'; '.join(parts)}."
    )


def _or_infinite(ratio: float | None) -> float:
    """Give a ratio, infinite for None."""
    return math.inf if ratio is None else ratio


def _paint_costs(costs: Sequence[RuleCost], rules: Sequence[str], figure: "Figure") -> None:
    """Draw a panel for each table: ratios over batch size, a line and crosses for each rule."""
    by_table = dict[str, list[RuleCost]]()
    for cost in costs:
        by_table.setdefault(cost.table, []).append(cost)
    panels = figure.subplots(1, len(by_table), sharey=True, squeeze=False)[0]
    highest = max(cost.ratio for cost in costs if cost.ratio is not None)
    # Crosses are above all ratios, at another height for each rule: all of them are seen.
    crosses = {rule: highest * CROSS_STEP ** (k + 2) for k, rule in enumerate(rules)}
    for axes, (table, costs_of_table) in zip(panels, by_table.items(), strict=True):
        # There are colours to spare.
        for colour, rule in zip(RULE_COLOURS, rules, strict=False):
            costs_of_rule = [cost for cost in costs_of_table if cost.rule == rule]
            _paint_rule(axes, costs_of_rule, rule, colour, crosses[rule])
        log_axis(axes, "x", log_limits([cost.batch_size for cost in costs_of_table], (0.05, 0.05)))
        log_axis(axes, "y", (1.0 / CROSS_STEP, max(crosses.values()) * CROSS_STEP))
        axes.axhline(1.0, color=INK, linewidth=0.6)
        axes.set_xlabel("batch size")
        axes.grid(color=INK, alpha=0.07, linewidth=0.6)
        axes.set_title(f"{table}, lr tuned at {costs_of_table[0].tuned_at}", fontsize=8.5)
    panels[0].set_ylabel("steps at the rule's rate / fewest steps\n(x: misses the target)")
    # One legend is enough: it stands in the second panel, if there is one.
    second_or_only = panels[min(1, len(panels) - 1)]
    second_or_only.legend(frameon=False, fontsize=8.0, loc="upper left")


def _paint_rule(
    axes: "Axes", costs: Sequence[RuleCost], rule: str, colour: str, cross: float
) -> None:
    """Draw a rule's ratios over batch size, and its misses at the height ``cross``."""
    sizes = list[int]()
    ratios = list[float]()
    missed = list[int]()
    for cost in costs:
        sizes.append(cost.batch_size)
        # The line has a gap where there is no ratio.
        ratios.append(math.nan if cost.ratio is None else cost.ratio)
        if cost.outcome == "missed":
            missed.append(cost.batch_size)
    # A reader of the figure would not take "none" for a rule.
    label = "constant" if rule == "none" else rule
    axes.plot(sizes, ratios, color=colour, marker="o", markersize=3.5, label=label)
    axes.plot(missed, [cross] * len(missed), color=colour, marker="x", linestyle="none")
