"""B_crit, the curve's slopes at both ends and the best learning rate's exponent, from all runs of a dense table.

At each target the frontier is the best cell of each half octave, by the median over its seeds, and B_crit is fitted to
it (:func:`bstune.core.curve.fit_curve`). The best learning rate at a batch size is the top of a parabola through log
steps at the best cell and its neighbours, and its exponent the least-squares slope of its logarithm over that of B,
with Student's t of as many batch sizes. Easier targets are read from the same runs.
"""

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import stdtrit

from bstune.core.curve import CurveError, CurveFit, fit_curve, log_slope
from bstune.core.errors import ConfigError, TableError
from bstune.core.records import Target
from bstune.report.drawing import INK, PURPLE, log_axis, log_limits
from bstune.result import CriticalAtTarget
from bstune.study.analysis.critical import FINE, MAX_COARSE, growth
from bstune.sweeps.harness import Finding
from bstune.sweeps.search_benchmark import find_sources, find_target, read_without_horizons
from bstune.sweeps.search_problem import dense_points
from bstune.system.console import format_number
from bstune.trial.replay import Run, Table, read_index

if TYPE_CHECKING:
    from matplotlib.figure import Figure

END = 3  # batch sizes whose line is the slope at an end
MARKERS = "osD^vPX*"


def run(
    *,
    tables: list[str],
    target: float | None,
    easier: list[float],
    level: float,
) -> Finding:
    """Return a row for each table and target that it determines."""
    if not easier or not all(math.isfinite(times) and times >= 1.0 for times in easier):
        raise ConfigError(
            f"sweep.experiment.easier must be multiples of the target, 1 or more, but got {easier}"
        )
    if not 0.0 < level < 1.0:
        raise ConfigError(f"sweep.experiment.level must be between 0 and 1, but got {level}")
    rows, notes, seeds = [], [], []
    for name, (file, shipped) in find_sources(tables, read_index()).items():
        table = read_without_horizons(file)
        goal = find_target(file, shipped, target)
        if goal.mode != "min":
            raise TableError(
                f"{file}: its target {goal} is to be exceeded, and easier ones are multiples of a loss or error"
            )
        seeds.append(min(len(runs) for runs in table.cells.values()))
        for times in sorted(set(easier)):
            one = replace(goal, value=goal.value * times)
            why = too_coarse(table, one)
            try:
                rows += (
                    []
                    if why
                    else [{"table": name, "metric": goal.metric, **row(table, one, level)}]
                )
            except CurveError as error:
                why = str(error)
            notes += [f"{name}, {one} is left out: {why}"] if why else []
    if not rows:
        raise TableError(f"no table determines anything: {'; '.join(notes)}")
    paint = functools.partial(_paint, rows, level)
    shown_rows = [shown(row) for row in rows]
    return Finding(
        sentence(rows),
        shown_rows,
        min(seeds),
        "recorded runs",
        paint,
        (7.0, 4.6),
        notes,
        {"numbers": rows},
    )


def shown(row: Mapping[str, Any]) -> dict[str, str]:
    """Return a row as texts; ``numbers`` of result.json has its values."""
    low, high = (
        format_number(row[f"b_crit_{end}"], 3) if row[f"b_crit_{end}"] else "open"
        for end in ("low", "high")
    )
    b_crit = "undetermined" if row["b_crit"] is None else format_number(row["b_crit"], 3)
    rates = (
        "-"
        if row["lr_low"] is None
        else f"{row['lr_exponent']:.2f} ({row['lr_low']:.2f} to {row['lr_high']:.2f})"
    )
    return {
        "table": row["table"],
        "target": f"{row['metric']} {format_number(row['target'])}",
        "batch sizes": f"{row['smallest']} to {row['largest']}",
        "slope at each end": f"{row['slope_small']:.2f}, {row['slope_large']:z.2f}",
        "B_crit": f"{b_crit} ({low} to {high})",
        "lr's exponent": rates,
    }


def row(table: Table, target: Target, level: float) -> dict[str, Any]:
    """Return what a table says at one target; CurveError where too few batch sizes reached it."""
    points = dense_points(table, target)
    fit = fit_curve(points, level)
    reached = [point for point in points if not point.stopped]
    exponent, low, high = lr_exponent(best_rates(table, target), level)
    return {
        "target": target.value,
        "smallest": reached[0].batch_size,
        "largest": reached[-1].batch_size,
        "slope_small": log_slope(reached[:END]),
        "slope_large": log_slope(reached[-END:]),
        "b_crit": fit.critical_batch_size,
        "b_crit_low": fit.critical_batch_size_low,
        "b_crit_high": fit.critical_batch_size_high,
        "lr_exponent": exponent,
        "lr_low": low,
        "lr_high": high,
        "fit": _described(fit),
    }


def _described(fit: CurveFit) -> Mapping[str, Any]:
    """Return the fit as nested values, which go to the file alone."""
    return {key: value for key, value in vars(fit).items() if key != "points"} | {
        "points": [vars(point) for point in fit.points]
    }


def too_coarse(table: Table, target: Target) -> str | None:
    """Return why the runs do not tell when they passed a target: too many were not evaluated closely before it."""
    gaps = [gap for run in table.runs if (gap := _gap(run, target)) is not None]
    coarse = sum(gap < FINE for gap in gaps)
    return (
        f"{coarse} of {len(gaps)} runs that passed it were not evaluated closely there"
        if (coarse > MAX_COARSE * len(gaps))
        else None
    )


def _gap(run: Run, target: Target) -> float | None:
    """Return the last evaluated step that missed over the first that met the target; None if none did."""
    hit = run.steps_to(target)
    if hit is None:
        return None
    return max((step for step in run.steps if step < hit), default=0) / hit


def best_rates(table: Table, target: Target) -> dict[int, float]:
    """Return the learning rate of the fewest steps at each batch size that reached the target."""
    best = {}
    for size in table.batch_sizes:
        steps = {
            lr: statistics.median(
                math.inf if (hit := run.steps_to(target)) is None else float(hit) for run in runs
            )
            for (batch_size, lr), runs in table.cells.items()
            if batch_size == size
        }
        rates = sorted(steps)
        k = min(range(len(rates)), key=lambda i: steps[rates[i]])
        near = rates[max(k - 1, 0) : k + 2]
        if not math.isfinite(steps[rates[k]]):
            continue
        best[size] = rates[k]
        if len(near) == 3 and all(math.isfinite(steps[lr]) for lr in near):
            x, y = np.log(near), np.log([steps[lr] for lr in near])
            curvature, slope, _ = np.polyfit(x - x[1], y, 2)
            if curvature > 0:
                best[size] = float(np.exp(np.clip(x[1] - slope / (2.0 * curvature), x[0], x[2])))
    return best


def lr_exponent(
    best: Mapping[int, float], level: float
) -> tuple[float | None, float | None, float | None]:
    """Return the least-squares exponent of the best learning rate over B, and its interval; None for too few sizes."""
    if len(best) < 3:
        return None, None, None
    x, y = np.log(list(best)), np.log(list(best.values()))
    away = x - x.mean()
    slope = float(away @ y / (away @ away))
    residual = y - y.mean() - slope * away
    error = math.sqrt(residual @ residual / (len(x) - 2) / (away @ away)) * stdtrit(
        len(x) - 2, (1.0 + level) / 2.0
    )
    return slope, slope - error, slope + error


def sentence(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return how B_crit depends on the target, table by table, in words."""
    texts = []
    for name in dict.fromkeys(row["table"] for row in rows):
        own = [row for row in rows if row["table"] == name]
        points = [
            CriticalAtTarget(
                target=row["target"],
                passed=0,
                value=row["b_crit"],
                low=row["b_crit_low"],
                high=row["b_crit_high"],
            )
            for row in own
        ]
        found = growth(points, 0.0)
        if found is None:
            texts.append(f"{name}: too few targets have a critical batch size with both ends")
            continue
        sign = (
            "rises"
            if found.high < 0
            else "falls"
            if found.low > 0
            else "neither surely rises nor falls"
        )
        ends = f"{format_number(found.start)} to {format_number(found.end)}"
        texts.append(
            f"{name}: from {own[0]['metric']} {ends} B_crit {sign}, as its power {found.exponent:.2f} "
            f"({found.level:.0%}: {found.low:.2f} to {found.high:.2f})"
        )
    return "; ".join(texts) + "."


def _paint(rows: Sequence[Mapping[str, Any]], level: float, figure: "Figure") -> None:
    """Draw B_crit over the target's share of the table's own, a line a table."""
    # only what draws waits for matplotlib
    from matplotlib import colormaps

    axes = figure.subplots()
    names = list(dict.fromkeys(row["table"] for row in rows))
    values = []
    for i, name in enumerate(names):
        own = [row for row in rows if row["table"] == name and row["b_crit"] is not None]
        if not own:
            continue
        middle = [row["b_crit"] for row in own]
        low, high = (
            [row[key] or row["b_crit"] for row in own] for key in ("b_crit_low", "b_crit_high")
        )
        reach = [
            [m - a for m, a in zip(middle, low, strict=True)],
            [b - m for m, b in zip(middle, high, strict=True)],
        ]
        color = PURPLE if len(names) == 1 else colormaps["viridis"](0.9 * i / len(names))
        label = f"{name}, {own[0]['metric']}"
        marker = MARKERS[i % len(MARKERS)]
        axes.errorbar(
            [row["target"] for row in own],
            middle,
            reach,
            label=label,
            color=color,
            marker=marker,
            capsize=3.0,
            lw=1.0,
        )
        values += [*low, *high]
    log_axis(axes, "y", log_limits(values, (0.05, 0.08)))
    axes.set_xscale("log")
    axes.set_xlabel("target, harder to the left")
    axes.set_ylabel(f"critical batch size, {level:.0%} interval")
    axes.grid(color=INK, alpha=0.07, linewidth=0.6)
    axes.legend(fontsize=8.0)
