"""The figure ``comparison.png``: S(B) of several studies, their collapse, B_crit and times."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bstune.report.compare import Comparison
from bstune.report.compared_study import Compared
from bstune.report.drawing import (
    BLUE,
    GREEN,
    INK,
    PAGE_DPI,
    PURPLE,
    VERMILION,
    draw_empty,
    figure_of,
    log_axis,
    log_limits,
    save_figure,
)
from bstune.report.one_law import Collapse, points_over_law
from bstune.system.console import format_count, format_number, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

    from bstune.report.picture import Picture

INCHES_WIDE = 6.0
# Heights: of the two charts above, of each row of the legend over them, of the frame around the
# rows below them, and of each of these.
TOP_INCHES = 5.0
LEGEND_ROW_INCHES = 0.17
FOOT_INCHES = 0.7
ROW_INCHES = 0.52
LEGEND_COLUMNS = 2
# Seven colours and seven marks: a study beyond the seventh has a colour again, with another mark.
STUDY_COLOURS = (BLUE, VERMILION, GREEN, PURPLE, "#E69F00", "#56B4E9", INK)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
# The colour of the lines below a row.
FAINT_INK = "#555555"
# The most letters of a study's name, and of a line below a row.
LONGEST_NAME = 26
LONGEST_LINE_BELOW = 44
GRID: dict[str, Any] = {"color": INK, "alpha": 0.07, "linewidth": 0.6}


@dataclass(frozen=True)
class Look:
    """How a study is drawn in every panel."""

    study: Compared
    name: str
    """The study's name, shortened."""
    colour: str
    """The colour of its marks and lines."""
    marker: str
    """Matplotlib's name of its mark."""


@dataclass(frozen=True)
class FigureRow:
    """A study's row in the lower part of the figure: a mark with an interval, and texts."""

    value: float | None
    """The value at which the mark stands; None where there is no mark."""
    low: float | None
    """Lower end of the interval; None where that is open."""
    high: float | None
    """Upper end of the interval; None where that is open."""
    text: str
    """The text above the mark."""
    reliable: bool = True
    """Whether the mark is filled."""
    lines_below: tuple[str, ...] = ()
    """The lines below the mark."""


def draw_comparison(comparison: Comparison, path: Path) -> None:
    """Write the figure: S(B) above, the collapse below it, and then a row for each study.

    A row has the study's B_crit at the left, and its time to target at the right.
    """
    save_figure(
        lambda figure: paint_comparison(figure, comparison), comparison_inches(comparison), path
    )


def comparison_figure(comparison: Comparison) -> "Picture":
    """Give the figure that :func:`draw_comparison` writes, in a page's resolution."""
    paint = partial(paint_comparison, comparison=comparison)
    return figure_of(paint, comparison_inches(comparison), PAGE_DPI)


def comparison_inches(comparison: Comparison) -> tuple[float, float]:
    """Give width and height of the figure in inches, by the number of studies."""
    return INCHES_WIDE, sum(_heights(len(comparison.studies)))


def _heights(studies: int) -> tuple[float, float]:
    """Give the heights of the charts with their legend and of the rows below them, in inches."""
    legend_rows = math.ceil(studies / LEGEND_COLUMNS)
    top = TOP_INCHES + LEGEND_ROW_INCHES * legend_rows
    return top, FOOT_INCHES + ROW_INCHES * studies


def paint_comparison(figure: "Figure", comparison: Comparison) -> None:
    """Draw a comparison on a figure."""
    studies = looks(comparison.studies)
    heights = _heights(len(studies))
    (top,), (foot,) = figure.subfigures(2, 1, squeeze=False, height_ratios=heights)
    curves, law = top.subplots(2, 1, gridspec_kw={"height_ratios": [1.25, 1.0]})
    critical, times = foot.subplots(1, 2)
    _draw_curves(curves, studies)
    _name_curves(top, studies)
    _draw_collapse(law, studies, comparison.collapse)
    _draw_rows(critical, studies, _critical_row, "Critical batch size (examples)")
    _draw_rows(times, studies, _time_row, "Time to target (seconds)")
    # The names stand once, at the left of both columns of rows.
    name_style: dict[str, Any] = {"ha": "right", "fontsize": 8.5}
    below_style: dict[str, Any] = {"ha": "right", "fontsize": 6.5}
    for i, look in enumerate(studies):
        target = _shortened(look.study.target)
        device = _shortened(look.study.device)
        _write_in_row(
            critical, x=-0.03, row=i - 0.3, text=look.name, colour=look.colour, **name_style
        )
        _write_in_row(critical, x=-0.03, row=i + 0.02, text=target, colour=FAINT_INK, **below_style)
        _write_in_row(critical, x=-0.03, row=i + 0.28, text=device, colour=FAINT_INK, **below_style)


def looks(studies: Sequence[Compared]) -> list[Look]:
    """Choose how each study is drawn. No two of the first 49 look alike."""
    chosen = list[Look]()
    for index, study in enumerate(studies):
        colour, marker = look_of(index)
        name = _shortened(study.name)
        chosen.append(Look(study=study, name=name, colour=colour, marker=marker))
    return chosen


def look_of(index: int) -> tuple[str, str]:
    """Give the colour and the mark of a study by its index, from 0.

    No two of the first 49 are alike.
    """
    count = len(STUDY_COLOURS)
    # After each round of the colours the marks are one further.
    return STUDY_COLOURS[index % count], MARKERS[(index + index // count) % count]


def _shortened(text: str, longest: int = LONGEST_NAME) -> str:
    """Shorten a text to ``longest`` letters: an ellipsis takes the place of its middle."""
    if len(text) <= longest:
        return text
    half = (longest - 1) // 2
    return f"{text[:half]}…{text[-half:]}"


def _draw_curves(axes: "Axes", studies: Sequence[Look]) -> None:
    """Draw S(B) of each study: its points, its curve, and B_crit on the curve."""
    axes.set(xlabel="batch size B (examples per optimizer step)", ylabel="steps to target S")
    axes.set_title(
        "Steps to target; hollow and above: critical batch size", fontsize=9.0, loc="left"
    )
    all_sizes = list[float]()
    all_steps = list[float]()
    all_curves = list[float]()
    for look in studies:
        study = look.study
        all_curves += study.steps.tolist()
        if not study.points:
            continue
        sizes = [point.batch_size for point in study.points]
        steps = [point.steps for point in study.points]
        all_sizes += sizes
        all_steps += steps
        dots: dict[str, Any] = {"s": 12, "linewidths": 0, "alpha": 0.7, "zorder": 3}
        axes.scatter(sizes, steps, color=look.colour, marker=look.marker, **dots)
        if study.steps.size:
            line: dict[str, Any] = {"linewidth": 1.2, "alpha": 0.8, "zorder": 2}
            axes.plot(study.batch_size, study.steps, color=look.colour, **line)
        if study.b_crit_on_curve is not None:
            _draw_critical(axes, look, study.b_crit_on_curve)
    if not all_sizes:
        draw_empty(axes, "no study reached its target")
        return
    log_axis(axes, "x", log_limits(all_sizes, pads=(0.05, 0.05)))
    log_axis(axes, "y", log_limits([*all_steps, *all_curves], pads=(0.2, 0.08)))
    axes.grid(**GRID)


def _name_curves(part: "SubFigure", studies: Sequence[Look]) -> None:
    """Write a legend above the charts: the name of each study that is drawn, with its B_crit."""
    # Only what draws waits for matplotlib.
    from matplotlib.lines import Line2D

    handles = list[Line2D]()
    for look in studies:
        study = look.study
        if not study.points:
            continue
        name = look.name
        if study.b_crit_on_curve is not None:
            name += f": {format_number(study.b_crit, 2)}"
        style: dict[str, Any] = {"marker": look.marker, "markersize": 4.0, "linewidth": 1.2}
        handles.append(Line2D([], [], color=look.colour, label=name, **style))
    legend = part.legend(
        handles=handles,
        loc="outside upper left",
        ncols=LEGEND_COLUMNS,
        fontsize=7.5,
        frameon=False,
    )
    # A dollar sign does not begin a formula.
    for text in legend.get_texts():
        text.set_parse_math(False)


def _draw_critical(axes: "Axes", look: Look, place: tuple[float, float]) -> None:
    """Draw B_crit with its interval at ``place``: its batch size, and the steps of the curve there.

    An open end of the interval has no bar.
    """
    size, height = place
    low = look.study.b_crit_low or size
    high = look.study.b_crit_high or size
    bar: dict[str, Any] = {"linewidth": 3.0, "alpha": 0.45, "zorder": 4}
    axes.plot([low, high], [height, height], color=look.colour, solid_capstyle="butt", **bar)
    style: dict[str, Any] = {
        "s": 55,
        "facecolor": "white",
        "edgecolor": look.colour,
        "linewidths": 1.6,
        "zorder": 5,
    }
    axes.scatter([size], [height], marker=look.marker, **style)


def _draw_collapse(axes: "Axes", studies: Sequence[Look], collapse: Collapse | None) -> None:
    """Draw S/S_min over B/B_crit with the law, and how well it holds."""
    axes.set(xlabel="B / B_crit", ylabel="S / S_min")
    if collapse is None:
        draw_empty(axes, "no study has a critical batch size")
        return
    # S_min itself, at the height 1, is in the picture, however far the studies lie above it.
    heights = [np.ones(1)]
    for look in studies:
        study = look.study
        placed = points_over_law(study)
        if placed is not None:
            sizes, steps = placed
            heights.append(steps)
            dots: dict[str, Any] = {"s": 12, "linewidths": 0, "alpha": 0.5, "zorder": 3}
            axes.scatter(sizes, steps, color=look.colour, marker=look.marker, **dots)
        if study.b_crit is not None and study.s_min is not None:
            sizes = study.batch_size / study.b_crit
            steps = study.steps / study.s_min
            axes.plot(sizes, steps, color=look.colour, linewidth=1.6, zorder=4)
    # The law goes on a little beyond what the studies have seen.
    sizes = np.geomspace(collapse.smallest / 1.5, collapse.largest * 1.5, 100)
    law = 1.0 + 1.0 / sizes
    axes.plot(sizes, law, color=INK, linewidth=1.0, linestyle="--", zorder=5)
    log_axis(axes, "x", (float(sizes[0]), float(sizes[-1])), decimal=True)
    log_axis(axes, "y", log_limits(np.concatenate([*heights, law]), pads=(0.05, 0.08)))
    axes.grid(**GRID)
    inside = f"inside {collapse.inside:.0%} of the curves' {collapse.level:.0%} intervals"
    title = f"Does one law fit all? Within {collapse.deviation:.0%} (rms), {inside}"
    axes.set_title(title, fontsize=9.0, loc="left")
    axes.annotate(
        "S/S_min = 1 + B_crit/B",
        (0.98, 0.94),
        xycoords="axes fraction",
        ha="right",
        va="top",
        color=INK,
    )


def _critical_row(study: Compared) -> FigureRow:
    """Give the row of a study's critical batch size."""
    return FigureRow(
        value=study.b_crit, low=study.b_crit_low, high=study.b_crit_high, text=study.critical
    )


def _time_row(study: Compared) -> FigureRow:
    """Give the row of a study's time to target, with its USE and its gain in words."""
    use = study.use
    if use is None:
        return FigureRow(value=None, low=None, high=None, text="target not reached")
    point = f"B = {format_count(use.batch_size)}, lr = {format_number(use.lr)}"
    below = list[str]()
    if use.hyperparameters_text:
        below.append(_shortened(use.hyperparameters_text, LONGEST_LINE_BELOW))
    below.append(_shortened(f"gain {study.gain_text}", LONGEST_LINE_BELOW))
    lines_below = tuple(below)
    if use.seconds is None:
        unknown = f"seconds not known; {point}"
        return FigureRow(value=None, low=None, high=None, text=unknown, lines_below=lines_below)
    text = format_seconds(use.seconds)
    if not use.runs:
        text += " (predicted)"
    elif not use.reliable:
        text += f" ({use.reached} of {use.runs})"
    return FigureRow(
        value=use.seconds,
        low=use.low,
        high=use.high,
        text=f"{text}: {point}",
        reliable=use.reliable,
        lines_below=lines_below,
    )


def _draw_rows(
    axes: "Axes", studies: Sequence[Look], row_of: Callable[[Compared], FigureRow], title: str
) -> None:
    """Draw a row for each study: a mark with its interval, a text above and lines below it.

    The mark is hollow where the study's row is not reliable.

    Args:
        axes: that get the rows.
        studies: the first one is at the top.
        row_of: gives a study's row.
        title: of the axes.
    """
    rows = [row_of(look.study) for look in studies]
    values = list[float]()
    for row in rows:
        values += [value for value in (row.value, row.low, row.high) if value is not None]
    axes.set_title(title, fontsize=9.0, loc="left")
    # Rows count downwards, the first one at 0.
    axes.set(yticks=[], ylim=(len(studies) - 0.5, -0.75), xticks=[])
    if values:
        log_axis(axes, "x", log_limits(values, pads=(0.12, 0.12)), decimal=True)
        axes.grid(axis="x", **GRID)
    left, right = axes.get_xlim()
    for i, (look, row) in enumerate(zip(studies, rows, strict=True)):
        if row.low is not None or row.high is not None:
            # An open end reaches to the edge.
            interval = [row.low or left, row.high or right]
            bar: dict[str, Any] = {"linewidth": 3.0, "alpha": 0.45, "solid_capstyle": "butt"}
            axes.plot(interval, [i, i], color=look.colour, **bar)
        if row.value is not None:
            face = "white"
            if row.reliable:
                face = look.colour
            style: dict[str, Any] = {"s": 26, "edgecolor": look.colour, "zorder": 3}
            axes.scatter([row.value], [i], marker=look.marker, facecolor=face, **style)
        _write_in_row(axes, x=0.02, row=i - 0.4, text=row.text, colour=INK, fontsize=7.5)
        for j, text in enumerate(row.lines_below):
            _write_in_row(
                axes, x=0.02, row=i + 0.2 + 0.18 * j, text=text, colour=FAINT_INK, fontsize=6.5
            )


def _write_in_row(axes: "Axes", x: float, row: float, text: str, colour: str, **style: Any) -> None:
    """Write a text in a row. ``x`` is a share of the panel's width, ``row`` counts downwards.

    The text is written as it is: a dollar sign does not begin a formula.
    """
    where = axes.get_yaxis_transform()
    axes.text(x, row, text, transform=where, color=colour, va="center", parse_math=False, **style)
