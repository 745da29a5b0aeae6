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
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from bstune.trial.workload import load

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INCHES = (6.5, 4.0)
COLOURS = (VERMILION, BLUE, INK)
Run = tuple[int, float, int]  # batch size, learning rate, seed
History = Sequence[tuple[int, float]]  # steps and the metric there


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
    workload, protocol = load(options, composed.trained)
    _check(batch_sizes, lrs, seeds, workload.train_examples)
    target = protocol.target
    protocol = replace(protocol.for_steps_only(Budget(steps, examples)), noise_scale_every=None)
    settings = {**flat_settings(options), "budget.steps": steps, "budget.examples": examples}
    kept = _Runs(Path(runs), sha256(dump_json(settings).encode()).hexdigest()[:16])

    def histories(wanted: Sequence[Run]) -> dict[Run, History]:
        for number, (size, lr, seed) in enumerate(wanted, start=1):
            if (size, lr, seed) in kept.histories:
                continue
            try:
                result = trainer(
                    workload, TrialSpec(number, number, size, lr, None, seed), protocol
                )
            except (
                KeyboardInterrupt,
                SystemExit,
            ) as error:  # Lightning turns the first into the second
                raise Interrupted(
                    f"interrupted: {runs} keeps finished runs; the same command goes on"
                ) from error
            kept.add(result)
            line = f"{number} of {len(wanted)}  B {size}  lr {format_number(lr)}  seed {seed}: {result.status}"
            console.print(line, soft_wrap=True, markup=False, highlight=False)
        return {one: kept.histories[one] for one in wanted}

    first = histories([(size, lr, seeds[0]) for size in batch_sizes for lr in lrs])
    sign = target.sign
    budgets = {
        f"{format_count(examples)} examples": (None, examples),
        f"{format_count(steps)} steps": (steps, None),
        "both": (None, None),
    }
    chosen = {
        (name, size): min(
            lrs, key=lambda lr: sign * best(first[size, lr, seeds[0]], size, sign, *limits)
        )
        for name, limits in budgets.items()
        for size in batch_sizes
    }
    again = dict.fromkeys(
        (size, lr, seed) for (_, size), lr in chosen.items() for seed in seeds[1:]
    )
    found = histories(list(again))
    rows = []
    for (name, size), lr in chosen.items():
        values = [best(found[size, lr, seed], size, sign, *budgets[name]) for seed in seeds[1:]]
        rows.append(row(name, size, lr, values, level))
    device = device_name(protocol.trainer)
    title = (
        f"{options.workload.name} on {device}: best {target.metric}, {len(seeds) - 1} seeds, "
        f"{level:.0%} intervals"
    )
    text = sentence(rows, target.metric, target.mode, level)
    return Finding(
        text, rows, len(seeds) - 1, device, functools.partial(_paint, rows, title), INCHES
    )


def _check(
    batch_sizes: Sequence[int], lrs: Sequence[float], seeds: Sequence[int], examples: int
) -> None:
    if len(set(batch_sizes)) < 2 or not 1 <= min(batch_sizes) <= max(batch_sizes) <= examples:
        raise ConfigError(
            f"this sweep needs two batch sizes or more, from 1 to {examples}, but got {list(batch_sizes)}"
        )
    if not lrs or not all(0.0 < lr < math.inf for lr in lrs):
        raise ConfigError(f"this sweep needs learning rates over 0, but got {list(lrs)}")
    if len(seeds) < 3 or len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise ConfigError(
            f"this sweep needs three different seeds or more, from 0, but got {list(seeds)}"
        )


class _Runs:
    """The finished runs of one setting, in a file of JSON lines that may hold others; one cut short is none."""

    def __init__(self, path: Path, settings: str) -> None:
        self._path, self._settings = path, settings
        self.histories: dict[Run, History] = {}
        text = read_text(path, "the file of runs") if path.exists() else ""
        for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), start=1):
            try:
                values: Any = parse_json(line, "it")
                if values["settings"] == settings:
                    self._take(values)
            except (InputError, ValueError, LookupError, TypeError) as error:
                raise TableError(
                    f"{path}, line {number} is no run of this sweep: delete the line"
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


def best(
    history: History, batch_size: int, sign: float, steps: int | None, examples: int | None
) -> float:
    """Return the best value within a budget, None being none; the worst there can be where nothing was measured."""
    limit = min(
        math.inf if steps is None else steps,
        math.inf if examples is None else examples / batch_size,
    )
    return sign * min((sign * value for step, value in history if step <= limit), default=math.inf)


def row(
    budget: str, batch_size: int, lr: float, values: Sequence[float], level: float
) -> dict[str, Any]:
    """Return the mean of a batch size's best values, one a seed, with Student's interval; None where one diverged."""
    mean = float(np.mean(values))
    low = high = None
    if math.isfinite(mean):
        half = float(stats.t.ppf((1.0 + level) / 2.0, len(values) - 1) * stats.sem(values))
        low, high = mean - half, mean + half
    return {
        "budget": budget,
        "batch_size": batch_size,
        "lr": lr,
        "mean": mean if math.isfinite(mean) else None,
        "low": low,
        "high": high,
        "values": list(values) if math.isfinite(mean) else [],
    }


def sentence(rows: Sequence[Mapping[str, Any]], metric: str, mode: str, level: float) -> str:
    """Return the finding in words: of each budget, whether the largest batch size is worse than the smallest.

    Welch's t interval of the difference, not corrected for the number of budgets.
    """
    parts = []
    for name in dict.fromkeys(one["budget"] for one in rows):
        there = [one for one in rows if one["budget"] == name and one["values"]]
        if len(there) < 2:
            parts.append(f"within {_named(name)}, too few batch sizes have a value")
            continue
        small, large = there[0], there[-1]
        ends = f"{format_number(large['mean'])} at B = {large['batch_size']}"
        ends += f", {format_number(small['mean'])} at B = {small['batch_size']}"
        low, high = difference(large["values"], small["values"], level)
        worse = low > 0.0 if mode == "min" else high < 0.0
        better = high < 0.0 if mode == "min" else low > 0.0
        verdict = (
            "larger is worse"
            if worse
            else "larger is better"
            if better
            else "no difference is shown"
        )
        parts.append(
            f"within {_named(name)}, {verdict} ({ends}; difference {low:.2g} to {high:.2g})"
        )
    return f"Best {metric}: {'; '.join(parts)}."


def _named(budget: str) -> str:
    return "the longer of both" if budget == "both" else budget


def difference(one: Sequence[float], other: Sequence[float], level: float) -> tuple[float, float]:
    """Return Welch's interval of the difference of two means; the difference itself where neither scatters."""
    if np.ptp(one) == 0.0 and np.ptp(other) == 0.0:
        return (float(np.mean(one) - np.mean(other)),) * 2
    interval = stats.ttest_ind(one, other, equal_var=False).confidence_interval(level)
    return float(interval.low), float(interval.high)


def _paint(rows: Sequence[Mapping[str, Any]], title: str, figure: "Figure") -> None:
    """Draw the best value over batch size, a line for each budget."""
    axes = figure.subplots()
    for colour, name in zip(COLOURS, dict.fromkeys(one["budget"] for one in rows), strict=True):
        there = [one for one in rows if one["budget"] == name and one["values"]]
        middle = np.array([one["mean"] for one in there])
        ends = np.abs(
            np.array([[one["low"], one["high"]] for one in there]).reshape(-1, 2).T - middle
        )
        sizes = [one["batch_size"] for one in there]
        axes.errorbar(
            sizes, middle, ends, color=colour, marker="o", capsize=3, label=f"within {_named(name)}"
        )
    log_axis(axes, "x", log_limits([one["batch_size"] for one in rows], (0.05, 0.05)))
    axes.set(xlabel="batch size B (examples per optimizer step)", ylabel="best value")
    axes.grid(color=INK, alpha=0.07, linewidth=0.6)
    axes.legend(frameon=False, fontsize=8.5)
    axes.set_title(title, fontsize=9.5, parse_math=False)
