"""``curve.png`` of the objective loss: the metric at the budget's end over batch size.

The best learning rate stands beside it.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bstune.core.records import TrialResult
from bstune.report.answer import figure_titles
from bstune.report.budget_rows import USE_NAME, BudgetRows, Dot, budget_rows
from bstune.report.drawing import (
    BLUE,
    GREEN,
    INK,
    PAGE_DPI,
    PAGE_INCHES,
    VERMILION,
    figure_of,
    save_figure,
)
from bstune.report.rows import YOURS
from bstune.result import StudyResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from bstune.report.picture import Picture

BUDGET_FIGURE_INCHES = (PAGE_INCHES, 4.2)
BAND_ALPHA = 0.15


def draw_budget(trials: Sequence[TrialResult], result: StudyResult, *paths: Path) -> None:
    """Write the picture to each path: as SVG where it ends in ``.svg``, else as PNG."""
    save_figure(
        lambda figure: _paint(figure, trials, result),
        BUDGET_FIGURE_INCHES,
        *paths,
        dots_per_inch=PAGE_DPI,
    )


def budget_figure(trials: Sequence[TrialResult], result: StudyResult) -> "Picture":
    """Give the picture that :func:`draw_budget` writes, for a notebook."""
    return figure_of(lambda figure: _paint(figure, trials, result), BUDGET_FIGURE_INCHES, PAGE_DPI)


def _paint(figure: "Figure", trials: Sequence[TrialResult], result: StudyResult) -> None:
    """Draw the title, the panel of the metric and that of the learning rates.

    Before a trial has run to its budget's end there is the title alone.
    """
    headline, asked = figure_titles(result)
    title = f"{headline}\n{asked}"
    # Names of workloads and metrics may hold dollar signs, which are no formulas.
    figure.suptitle(title, x=0.01, ha="left", parse_math=False)
    rows = budget_rows(trials, result)
    if rows is None:
        return
    metric_axes, rates_axes = figure.subplots(1, 2)
    _draw_metric(metric_axes, rows)
    _draw_rates(rates_axes, rows)
    for axes in (metric_axes, rates_axes):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda size, _: f"{size:g}")
        axes.set_xlabel("batch size B (examples per step)")
        axes.grid(color=INK, alpha=0.07, linewidth=0.6)
    metric_axes.legend(fontsize=7.5, frameon=False)


def _draw_metric(axes: "Axes", rows: BudgetRows) -> None:
    """Draw the metric at the budget's end over batch size: the curve, its band, the trials."""
    axes.fill_between(
        rows.batch_sizes, rows.low, rows.high, color=BLUE, alpha=BAND_ALPHA, linewidth=0
    )
    axes.plot(rows.batch_sizes, rows.values, color=BLUE, label="best learning rate, 90%")
    _draw_points(axes, rows, lambda dot: dot.value)
    # Trials far from the best would leave the curve no room.
    axes.set_ylim(*rows.shown)
    axes.set_title(rows.title, loc="left", fontsize=9, parse_math=False)


def _draw_rates(axes: "Axes", rows: BudgetRows) -> None:
    """Draw the best learning rate over batch size, and the trials' learning rates."""
    axes.plot(rows.batch_sizes, rows.lrs, color=BLUE)
    _draw_points(axes, rows, lambda dot: dot.lr)
    axes.set_yscale("log")
    axes.set_title("best learning rate, and the trials'", loc="left", fontsize=9)


def _draw_points(axes: "Axes", rows: BudgetRows, height_of: Callable[[Dot], float]) -> None:
    """Draw the trials that ran to the budget's end, the user's own point and the one to use.

    ``height_of`` gives the value of each that the panel shows.
    """
    sizes = list[int]()
    heights = list[float]()
    for dot in rows.dots:
        sizes.append(dot.batch_size)
        heights.append(height_of(dot))
    axes.plot(
        sizes,
        heights,
        "o",
        color=BLUE,
        markersize=4,
        fillstyle="none",
        label="trials to the budget's end",
    )
    if rows.baseline is not None:
        size = rows.baseline.batch_size
        height = height_of(rows.baseline)
        axes.plot([size], [height], "s", color=GREEN, markersize=7, label=YOURS)
    size = rows.use.batch_size
    height = height_of(rows.use)
    axes.plot([size], [height], "*", color=VERMILION, markersize=13, label=USE_NAME)
