"""The best error of each batch size within a budget: whether large ones generalise worse.

Shallue et al. 2018 (arXiv 1811.03600), section 4.8: solution quality depends on the budget more
than on the batch size. Within a budget of examples large batches take few steps, and within one of
steps small batches see few examples; within the longer of the two neither is short.

Each batch size is trained at each learning rate on the first seed, which chooses the best rate for
each budget. The best rates are trained on the other seeds, and only these are reported. A run lasts
until both budgets are spent, and its history has the metric within either. It is kept as it ends
(:mod:`bstune.sweeps.unit_log`).
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, TypedDict

import numpy as np
from pydantic import TypeAdapter
from scipy import stats

from bstune.config import Composed
from bstune.core.errors import ConfigError
from bstune.core.records import Budget, Status, TrialProtocol, TrialResult, TrialSpec
from bstune.report.drawing import BLUE, INK, VERMILION, log_axis, log_limits
from bstune.study.verbs.record import row as row_of
from bstune.sweeps.harness import Finding
from bstune.sweeps.unit_log import UnitLog, UnitPlan, check_only
from bstune.system.console import format_count, format_number
from bstune.trial.devices.device import device_name
from bstune.trial.loop import Workload, run_trial
from bstune.trial.workload import load_workload

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ERROR_FIGURE_INCHES = (6.5, 4.0)
BUDGET_COLOURS = (VERMILION, BLUE, INK)
# Batch size, learning rate and seed.
SeedRun = tuple[int, float, int]
# Steps and the metric there.
MetricHistory = Sequence[tuple[int, float]]


class ErrorRow(TypedDict):
    """A batch size's row: its best value within a budget, the mean over seeds with an interval.

    These are None if a run has no value within the budget.
    """

    budget: str
    batch_size: int
    lr: float
    mean: float | None
    low: float | None
    high: float | None
    values: list[float]


@dataclass(frozen=True)
class TrainingBudget:
    """A budget of steps, of examples or of both; with neither, all of a run is within it."""

    name: str
    steps: int | None = None
    examples: int | None = None

    def last_step(self, batch_size: int) -> float:
        """Give the last step within the budget at a batch size; infinite without a limit."""
        limit = math.inf
        if self.steps is not None:
            limit = min(limit, self.steps)
        if self.examples is not None:
            limit = min(limit, self.examples / batch_size)
        return limit


# A budget, a batch size, and its best learning rate within the budget.
ChosenRate = tuple[TrainingBudget, int, float]


def run(
    composed: Composed,
    log: UnitLog,
    *,
    batch_sizes: list[int],
    lrs: list[float],
    seeds: list[int],
    steps: int,
    examples: int,
    level: float,
    only: list[str],
    trainer: Callable[[Workload, TrialSpec, TrialProtocol], TrialResult] = run_trial,
) -> Finding:
    """Train each batch size to the ends of both budgets, and compare the best values.

    The first seed chooses each batch size's best rate for each budget; the others train at it.
    The metric is that of the workload's target, whose direction says which value is best.

    Args:
        composed: the workload.
        log: keeps the runs.
        batch_sizes: two or more.
        lrs: the learning rates to choose from.
        seeds: the first chooses the rates, the others are reported.
        steps: the budget of steps.
        examples: the budget of examples.
        level: the nominal coverage of the intervals, between 0 and 1.
        only: the runs to train now; empty: all.
        trainer: trains a trial; tests replace it.
    """
    options = composed.options
    # The target names the metric, and no trial ends at it.
    workload, protocol = load_workload(options, composed.trained_recipe)
    _check_grid(batch_sizes, lrs, seeds, workload.train_examples)
    target = protocol.target
    # A trial gives up once its steps and its examples are both spent: a run lasts for either
    # budget.
    budget_of_runs = Budget(steps, examples)
    # It measures no noise scale, which would only take time.
    protocol = replace(protocol.for_steps_only(budget_of_runs), noise_scale_every=None)
    choosing_seed, *reported_seeds = seeds
    # All runs that there may be: only the best rates of the first seed are trained on others.
    grid = {_run_name(seed_run): seed_run for seed_run in product(batch_sizes, lrs, seeds)}
    check_only(only, list(grid))
    device = device_name(protocol.trainer)
    # A run is kept by its batch size, rate and seed: more of them, or another level, keep it.
    may_change = ("batch_sizes", "lrs", "seeds", "level")
    log.begin(device, may_change)

    def train(name: str) -> dict[str, object]:
        size, lr, seed = grid[name]
        number = list(grid).index(name)
        spec = TrialSpec(
            number=number, trial_index=number, batch_size=size, lr=lr, delta=None, seed=seed
        )
        return row_of(trainer(workload, spec, protocol))

    def trained(wanted: Iterable[SeedRun]) -> dict[str, ErrorRun]:
        return log.measure(_plan_runs(wanted, grid, only, budget_of_runs), train)

    choosing_runs = list(product(batch_sizes, lrs, [choosing_seed]))
    runs = trained(choosing_runs)
    budgets = _compared_budgets(steps, examples)
    chosen = _choose_rates(runs, budgets, batch_sizes, lrs, choosing_seed, target.sign)
    runs_on_other_seeds = list[SeedRun]()
    for _budget, size, lr in chosen:
        runs_on_other_seeds += product([size], [lr], reported_seeds)
    runs |= trained(runs_on_other_seeds)
    needed = dict.fromkeys(map(_run_name, [*choosing_runs, *runs_on_other_seeds]))
    log.check_finished(needed, runs)
    rows = _rows_of_chosen(chosen, runs, reported_seeds, target.sign, level)
    title = (
        f"{options.workload.name} on {device}: best {target.metric}, {len(reported_seeds)} seeds, "
        f"{level:.0%} intervals"
    )
    return Finding(
        sentence=sentence(rows, target.metric, target.mode, level),
        rows=rows,
        n=len(reported_seeds),
        device=device,
        paint=functools.partial(_paint_errors, rows, title),
        inches=ERROR_FIGURE_INCHES,
    )


@dataclass(frozen=True)
class ErrorRun:
    """The kept values of a trial: how it ended, and the metric over its steps."""

    status: Status
    steps: list[int]
    metric: list[float]

    @property
    def history(self) -> MetricHistory:
        """Pairs of a step and the metric there."""
        return list(zip(self.steps, self.metric, strict=True))


READ_RUN = TypeAdapter(ErrorRun)


def _compared_budgets(steps: int, examples: int) -> tuple[TrainingBudget, ...]:
    """Name the budgets within which the values of a run are compared."""
    return (
        TrainingBudget(f"{format_count(examples)} examples", examples=examples),
        TrainingBudget(f"{format_count(steps)} steps", steps=steps),
        # Without a limit of its own it is a whole run.
        TrainingBudget("both"),
    )


def _plan_runs(
    wanted: Iterable[SeedRun], grid: Mapping[str, SeedRun], only: Sequence[str], budget: Budget
) -> UnitPlan[ErrorRun]:
    """Plan the ``wanted`` runs, each once.

    ``grid`` has all runs that there may be, by name; ``budget`` is that of each run.
    """
    names = list(dict.fromkeys(map(_run_name, wanted)))
    # A run's steps, to which its time is taken to be in proportion.
    work = dict[str, float]()
    for name in names:
        size, _lr, _seed = grid[name]
        work[name] = float(budget.last_step(size))
    return UnitPlan(
        names=names,
        only=only,
        noun="run",
        read=READ_RUN.validate_python,
        choices=list(grid),
        work=work,
        shown=lambda run: run.status,
    )


def _choose_rates(
    runs: Mapping[str, ErrorRun],
    budgets: Iterable[TrainingBudget],
    batch_sizes: Iterable[int],
    lrs: Sequence[float],
    seed: int,
    sign: float,
) -> list[ChosenRate]:
    """Choose each batch size's best learning rate within each budget.

    A batch size is left out until a run has ended at each of its learning rates.

    Args:
        runs: by name.
        budgets: in which a rate is the best.
        batch_sizes: for which rates are chosen.
        lrs: the learning rates to choose from.
        seed: of the runs that choose.
        sign: 1 if a smaller metric is better, else -1.
    """
    histories = dict[int, dict[float, MetricHistory]]()
    for size in batch_sizes:
        names = {lr: _run_name((size, lr, seed)) for lr in lrs}
        if all(name in runs for name in names.values()):
            histories[size] = {lr: runs[name].history for lr, name in names.items()}
    chosen = list[ChosenRate]()
    for budget in budgets:
        for size, by_lr in histories.items():
            chosen.append((budget, size, _best_lr(by_lr, budget, size, sign)))
    return chosen


def _rows_of_chosen(
    chosen: Iterable[ChosenRate],
    runs: Mapping[str, ErrorRun],
    seeds: Iterable[int],
    sign: float,
    level: float,
) -> list[ErrorRow]:
    """Make the row of each chosen rate, from its runs on ``seeds``.

    ``sign`` is 1 if a smaller metric is better, else -1. ``level`` is the nominal coverage of the
    intervals.
    """
    rows = list[ErrorRow]()
    for budget, size, lr in chosen:
        values = list[float]()
        for seed in seeds:
            history = runs[_run_name((size, lr, seed))].history
            values.append(best_within(history, size, sign, budget))
        rows.append(row(budget.name, size, lr, values, level))
    return rows


def _run_name(seed_run: SeedRun) -> str:
    """Name a run by its batch size, learning rate and seed."""
    return "/".join(map(str, seed_run))


def _best_lr(
    by_lr: Mapping[float, MetricHistory], budget: TrainingBudget, batch_size: int, sign: float
) -> float:
    """Choose the learning rate with the best value within a budget, the first of equals.

    ``by_lr`` has the history of each rate. ``sign`` is 1 if a smaller metric is better, else -1.
    """
    return min(by_lr, key=lambda lr: sign * best_within(by_lr[lr], batch_size, sign, budget))


def _check_grid(
    batch_sizes: Sequence[int], lrs: Sequence[float], seeds: Sequence[int], examples: int
) -> None:
    """Refuse batch sizes, learning rates and seeds that are out of their range, or too few."""
    if len(set(batch_sizes)) < 2 or not 1 <= min(batch_sizes) <= max(batch_sizes) <= examples:
        raise ConfigError(
            f"this sweep needs two batch sizes or more, from 1 to {examples}, but got "
            f"{list(batch_sizes)}"
        )
    if not lrs or not all(0.0 < lr < math.inf for lr in lrs):
        raise ConfigError(f"this sweep needs learning rates over 0, but got {list(lrs)}")
    if len(seeds) < 3 or len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise ConfigError(
            f"this sweep needs three different seeds or more, from 0, but got {list(seeds)}"
        )


def best_within(
    history: MetricHistory, batch_size: int, sign: float, budget: TrainingBudget
) -> float:
    """Give the best value within a budget; infinitely bad if nothing was measured there.

    ``sign`` is 1 if a smaller metric is better, else -1.
    """
    limit = budget.last_step(batch_size)
    # Times the sign, a smaller value is better in either direction.
    signed_values = [sign * value for step, value in history if step <= limit]
    return sign * min(signed_values, default=math.inf)


def row(budget: str, batch_size: int, lr: float, values: Sequence[float], level: float) -> ErrorRow:
    """Make a batch size's row: the mean of its best values, one per seed, with Student's interval.

    If a value is infinite, the row has no values, and None for the mean and the interval's ends.
    """
    mean = float(np.mean(values))
    # The mean is infinite if a trial has no value within the budget.
    if not math.isfinite(mean):
        return {
            "budget": budget,
            "batch_size": batch_size,
            "lr": lr,
            "mean": None,
            "low": None,
            "high": None,
            "values": [],
        }
    half_width = float(stats.t.ppf((1.0 + level) / 2.0, len(values) - 1) * stats.sem(values))
    return {
        "budget": budget,
        "batch_size": batch_size,
        "lr": lr,
        "mean": mean,
        "low": mean - half_width,
        "high": mean + half_width,
        "values": list(values),
    }


def _with_values(rows: Sequence[ErrorRow]) -> dict[str, list[ErrorRow]]:
    """Group the rows that have values by their budget; a budget may have none."""
    by_budget = dict[str, list[ErrorRow]]()
    for row in rows:
        rows_of_budget = by_budget.setdefault(row["budget"], [])
        if row["values"]:
            rows_of_budget.append(row)
    return by_budget


def sentence(rows: Sequence[ErrorRow], metric: str, mode: str, level: float) -> str:
    """Say for each budget whether the largest batch size is worse than the smallest.

    It is decided by Welch's t interval of the difference, not corrected for the number of budgets.
    """
    parts = list[str]()
    for name, rows_of_budget in _with_values(rows).items():
        if len(rows_of_budget) < 2:
            parts.append(f"within {_budget_text(name)}, too few batch sizes have a value")
            continue
        small = rows_of_budget[0]
        large = rows_of_budget[-1]
        low, high = difference(large["values"], small["values"], level)
        means_text = f"{_mean_text(large)}, {_mean_text(small)}"
        parts.append(
            f"within {_budget_text(name)}, {_verdict_of(low, high, mode)} "
            f"({means_text}; difference {low:.2g} to {high:.2g})"
        )
    return f"Best {metric}: {'; '.join(parts)}."


def _mean_text(row: ErrorRow) -> str:
    """Write a batch size's mean over seeds of the best value, ``0.061 at B = 256``."""
    return f"{format_number(row['mean'])} at B = {row['batch_size']}"


def _verdict_of(low: float, high: float, mode: str) -> str:
    """Say which batch size an interval shows to be better.

    ``low`` and ``high`` are its ends, of the larger batch size's value less the smaller one's;
    ``mode`` is the target's.
    """
    rises = low > 0.0
    falls = high < 0.0
    if not rises and not falls:
        return "no difference is shown"
    # A rise is worse for an error, and better for an accuracy.
    if rises == (mode == "min"):
        return "larger is worse"
    return "larger is better"


def _budget_text(budget: str) -> str:
    """Write a budget's name in a sentence."""
    return "the longer of both" if budget == "both" else budget


def difference(
    values: Sequence[float], other_values: Sequence[float], level: float
) -> tuple[float, float]:
    """Give both ends of Welch's interval of the difference of two means, the first less the second.

    They are the difference itself if neither has any scatter.
    """
    if np.ptp(values) == 0.0 and np.ptp(other_values) == 0.0:
        exact = float(np.mean(values) - np.mean(other_values))
        return exact, exact
    interval = stats.ttest_ind(values, other_values, equal_var=False).confidence_interval(level)
    return float(interval.low), float(interval.high)


def _paint_errors(rows: Sequence[ErrorRow], title: str, figure: "Figure") -> None:
    """Draw the best value over batch size, a line for each budget."""
    axes = figure.subplots()
    by_budget = _with_values(rows)
    for colour, (name, rows_of_budget) in zip(BUDGET_COLOURS, by_budget.items(), strict=True):
        columns = [
            (row["batch_size"], row["mean"], row["low"], row["high"]) for row in rows_of_budget
        ]
        # Without rows the array has no columns of its own.
        sizes, middle, low, high = np.array(columns, dtype=np.float64).reshape(-1, 4).T
        axes.errorbar(
            sizes,
            middle,
            [middle - low, high - middle],
            color=colour,
            marker="o",
            capsize=3,
            label=f"within {_budget_text(name)}",
        )
    log_axis(axes, "x", log_limits([row["batch_size"] for row in rows], (0.05, 0.05)))
    axes.set(xlabel="batch size B (examples per optimizer step)", ylabel="best value")
    axes.grid(color=INK, alpha=0.07, linewidth=0.6)
    axes.legend(frameon=False, fontsize=8.5)
    axes.set_title(title, fontsize=9.5, parse_math=False)
