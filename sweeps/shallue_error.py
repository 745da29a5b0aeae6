"""The best error that each batch size reaches within a budget, which says whether large batches generalise worse.

Shallue et al. 2018 (arXiv 1811.03600), section 4.8: solution quality depends on the budget more than on the batch
size. Within a budget of examples large batches take few steps, and within one of steps small batches see few examples;
within the longer of the two neither is short.

Each batch size is trained at each learning rate on the first seed. A budget's best learning rate there is trained on
the other seeds, which alone are reported: what was chosen by is no evidence. A run lasts until both budgets are spent,
and its history says what it had reached within either.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
from rich.console import Console
from scipy import stats

from bstune.config import Composed
from bstune.core.errors import ConfigError, InputError, Interrupted, TableError
from bstune.core.records import Budget, TrialProtocol, TrialResult, TrialSpec, dump_json
from bstune.options import flat_settings
from bstune.report.drawing import BLUE, INK, VERMILION, log_axis, log_limits
from bstune.study.record import row as row_of
from bstune.sweeps.harness import Finding
from bstune.system.console import format_count, format_number
from bstune.system.inputs import parse_json, read_text
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
    """The mean of a batch size's best values within a budget, one value a seed; None where one diverged."""

    budget: str
    batch_size: int
    lr: float
    mean: float | None
    low: float | None
    high: float | None
    values: list[float]


@dataclass(frozen=True)
class TrainingBudget:
    """A budget of steps, of examples, of both, or none beside the runs' own."""

    name: str
    steps: int | None = None
    examples: int | None = None

    def last_step(self, batch_size: int) -> float:
        """Give the steps that it allows at a batch size."""
        by_steps = math.inf if self.steps is None else self.steps
        by_examples = math.inf if self.examples is None else self.examples / batch_size
        return min(by_steps, by_examples)


def run(
    composed: Composed,
    console: Console,
    *,
    batch_sizes: list[int],
    lrs: list[float],
    seeds: list[int],
    steps: int,
    examples: int,
    level: float,
    runs: str,
    trainer: Callable[[Workload, TrialSpec, TrialProtocol], TrialResult] = run_trial,
) -> Finding:
    """Train each batch size as the module says, but for what the file ``runs`` has, and compare the best errors.

    ``level`` is that of the intervals; the metric is the workload's target's, whose direction says what is best. Tests
    replace ``trainer``.
    """
    options = composed.options
    workload, protocol = load_workload(options, composed.trained)
    _check_grid(batch_sizes, lrs, seeds, workload.train_examples)
    target = protocol.target
    protocol = replace(protocol.for_steps_only(Budget(steps, examples)), noise_scale_every=None)
    settings = {**flat_settings(options), "budget.steps": steps, "budget.examples": examples}
    kept = _KeptRuns(runs, sha256(dump_json(settings).encode()).hexdigest()[:16])
    train = functools.partial(_train_missing, kept, workload, protocol, trainer, console)
    chosen_by, *reported = seeds
    train([(size, lr, chosen_by) for size in batch_sizes for lr in lrs])
    budgets = (
        TrainingBudget(f"{format_count(examples)} examples", examples=examples),
        TrainingBudget(f"{format_count(steps)} steps", steps=steps),
        TrainingBudget("both"),
    )
    chosen = list[tuple[TrainingBudget, int, float]]()
    for budget in budgets:
        for size in batch_sizes:
            by_lr = {lr: kept.histories[size, lr, chosen_by] for lr in lrs}
            chosen.append((budget, size, _best_lr(by_lr, budget, size, target.sign)))
    again = [(size, lr, seed) for _, size, lr in chosen for seed in reported]
    train(list(dict.fromkeys(again)))
    rows = list[ErrorRow]()
    for budget, size, lr in chosen:
        histories = [kept.histories[size, lr, seed] for seed in reported]
        values = [best(history, size, target.sign, budget) for history in histories]
        rows.append(row(budget.name, size, lr, values, level))
    device = device_name(protocol.trainer)
    title = (
        f"{options.workload.name} on {device}: best {target.metric}, {len(reported)} seeds, "
        f"{level:.0%} intervals"
    )
    return Finding(
        sentence=sentence(rows, target.metric, target.mode, level),
        rows=rows,
        n=len(reported),
        device=device,
        paint=functools.partial(_paint_errors, rows, title),
        inches=ERROR_FIGURE_INCHES,
    )


def _train_missing(
    kept: "_KeptRuns",
    workload: Workload,
    protocol: TrialProtocol,
    trainer: Callable[[Workload, TrialSpec, TrialProtocol], TrialResult],
    console: Console,
    wanted: Sequence[SeedRun],
) -> None:
    """Train what is wanted and not kept yet, with a line for each."""
    for number, (size, lr, seed) in enumerate(wanted, start=1):
        if (size, lr, seed) in kept.histories:
            continue
        spec = TrialSpec(number, number, size, lr, None, seed)
        try:
            result = trainer(workload, spec, protocol)
        # Lightning turns the first into the second.
        except (KeyboardInterrupt, SystemExit) as error:
            raise Interrupted(
                f"interrupted: {kept.file} keeps finished runs; the same command goes on"
            ) from error
        kept.add(result)
        line = (
            f"{number} of {len(wanted)}  B {size}  lr {format_number(lr)}  seed {seed}: "
            f"{result.status}"
        )
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def _best_lr(
    by_lr: Mapping[float, MetricHistory], budget: TrainingBudget, batch_size: int, sign: float
) -> float:
    """Choose the learning rate of the best value within a budget, the first of equals."""
    return min(by_lr, key=lambda lr: sign * best(by_lr[lr], batch_size, sign, budget))


def _check_grid(
    batch_sizes: Sequence[int], lrs: Sequence[float], seeds: Sequence[int], examples: int
) -> None:
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


class _KeptRuns:
    """The finished runs of one setting, in a file of JSON lines that may hold others; one cut short is none."""

    def __init__(self, file: str, settings: str) -> None:
        self.file = file
        self._path = Path(file)
        self._settings = settings
        self.histories = dict[SeedRun, MetricHistory]()
        text = ""
        if self._path.exists():
            text = read_text(self._path, "the file of runs")
        whole_lines = text[: text.rfind("\n") + 1].splitlines()
        for number, line in enumerate(whole_lines, start=1):
            try:
                values: Any = parse_json(line, "it")
                if values["settings"] == settings:
                    self._take(values)
            except (InputError, ValueError, LookupError, TypeError) as error:
                raise TableError(
                    f"{self._path}, line {number} is no run of this sweep: delete the line"
                ) from error

    def _take(self, values: Mapping[str, Any]) -> None:
        place = values["batch_size"], values["lr"], values["seed"]
        self.histories[place] = list(zip(values["steps"], values["metric"], strict=True))

    def add(self, result: TrialResult) -> None:
        """Append a trial."""
        values = {"settings": self._settings, **row_of(result)}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(dump_json(values) + "\n")
        self._take(values)


def best(history: MetricHistory, batch_size: int, sign: float, budget: TrainingBudget) -> float:
    """Give the best value within a budget; the worst there can be where nothing was measured."""
    limit = budget.last_step(batch_size)
    heights = [sign * value for step, value in history if step <= limit]
    return sign * min(heights, default=math.inf)


def row(budget: str, batch_size: int, lr: float, values: Sequence[float], level: float) -> ErrorRow:
    """Give the mean of a batch size's best values, one a seed, with Student's interval; None where one diverged."""
    mean = float(np.mean(values))
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
    half = float(stats.t.ppf((1.0 + level) / 2.0, len(values) - 1) * stats.sem(values))
    return {
        "budget": budget,
        "batch_size": batch_size,
        "lr": lr,
        "mean": mean,
        "low": mean - half,
        "high": mean + half,
        "values": list(values),
    }


def _with_values(rows: Sequence[ErrorRow]) -> dict[str, list[ErrorRow]]:
    """Give the rows that have values, by budget."""
    by_budget = dict[str, list[ErrorRow]]()
    for row in rows:
        of_budget = by_budget.setdefault(row["budget"], [])
        if row["values"]:
            of_budget.append(row)
    return by_budget


def sentence(rows: Sequence[ErrorRow], metric: str, mode: str, level: float) -> str:
    """Put the finding into words: of each budget, whether the largest batch size is worse than the smallest.

    Welch's t interval of the difference, not corrected for the number of budgets.
    """
    parts = list[str]()
    for name, of_budget in _with_values(rows).items():
        if len(of_budget) < 2:
            parts.append(f"within {_budget_text(name)}, too few batch sizes have a value")
            continue
        small = of_budget[0]
        large = of_budget[-1]
        low, high = difference(large["values"], small["values"], level)
        ends = f"{_mean_text(large)}, {_mean_text(small)}"
        parts.append(
            f"within {_budget_text(name)}, {_verdict_of(low, high, mode)} "
            f"({ends}; difference {low:.2g} to {high:.2g})"
        )
    return f"Best {metric}: {'; '.join(parts)}."


def _mean_text(row: ErrorRow) -> str:
    return f"{format_number(row['mean'])} at B = {row['batch_size']}"


def _verdict_of(low: float, high: float, mode: str) -> str:
    """Say what an interval of the larger batch size's value less the smaller one's shows."""
    rises = low > 0.0
    falls = high < 0.0
    if rises or falls:
        is_worse = rises if mode == "min" else falls
        return "larger is worse" if is_worse else "larger is better"
    return "no difference is shown"


def _budget_text(budget: str) -> str:
    return "the longer of both" if budget == "both" else budget


def difference(one: Sequence[float], other: Sequence[float], level: float) -> tuple[float, float]:
    """Give Welch's interval of the difference of two means; the difference itself where neither scatters."""
    if np.ptp(one) == 0.0 and np.ptp(other) == 0.0:
        exact = float(np.mean(one) - np.mean(other))
        return exact, exact
    interval = stats.ttest_ind(one, other, equal_var=False).confidence_interval(level)
    return float(interval.low), float(interval.high)


def _paint_errors(rows: Sequence[ErrorRow], title: str, figure: "Figure") -> None:
    """Draw the best value over batch size, a line for each budget."""
    axes = figure.subplots()
    by_budget = _with_values(rows)
    for colour, (name, of_budget) in zip(BUDGET_COLOURS, by_budget.items(), strict=True):
        middle = np.array([row["mean"] for row in of_budget])
        ends = np.array([[row["low"], row["high"]] for row in of_budget]).reshape(-1, 2).T
        axes.errorbar(
            [row["batch_size"] for row in of_budget],
            middle,
            np.abs(ends - middle),
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
