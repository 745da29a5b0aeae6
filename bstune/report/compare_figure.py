"""The figure ``comparison.png``: S(B) of several studies, their collapse, their B_crit and their times to target."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bstune.report.compare import Collapse, Compared, Comparison, collapsed
from bstune.report.drawing import (
    BLUE,
    GREY,
    INK,
    PAGE_DPI,
    PURPLE,
    VERMILION,
    Label,
    figure_of,
    log_axis,
    log_limits,
    place_labels,
    save_figure,
)
from bstune.system.console import format_count, format_number, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

    from bstune.report.picture import Picture

INCHES_WIDE, TOP_INCHES, FOOT_INCHES, ROW_INCHES = 6.0, 5.0, 0.7, 0.52
COLOURS = (BLUE, VERMILION, "#009E73", PURPLE, "#E69F00", "#56B4E9", INK)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LONGEST = 26  # characters of a name
MOST_FURTHER = 44  # characters of a line below a row
GRID: dict[str, Any] = {"color": INK, "alpha": 0.07, "linewidth": 0.6}


@dataclass(frozen=True)
class Look:
    """How a study is drawn in every panel, and its name, shortened."""

    study: Compared
    name: str
    colour: str
    marker: str


@dataclass(frozen=True)
class Row:
    """What a study says in one line: a value with its interval, words above and below it, and whether to rely on it."""

    value: float | None
    low: float | None
    high: float | None
    text: str
    reliable: bool = True
    further: tuple[str, ...] = ()


def draw_comparison(found: Comparison, path: Path) -> None:
    """Write the figure: S(B) above, the collapse below it, then a row for each study's B_crit and time to target."""
    save_figure(lambda figure: paint_comparison(figure, found), comparison_inches(found), path)


def comparison_figure(found: Comparison) -> "Picture":
    """Draw what :func:`draw_comparison` writes, of a page's resolution."""
    paint = partial(paint_comparison, found=found)
    return figure_of(paint, comparison_inches(found), PAGE_DPI)


def comparison_inches(found: Comparison) -> tuple[float, float]:
    """Return width and height of the figure."""
    return INCHES_WIDE, TOP_INCHES + FOOT_INCHES + ROW_INCHES * len(found.studies)


def paint_comparison(figure: "Figure | SubFigure", found: Comparison) -> None:
    """Draw what :func:`draw_comparison` writes, on a figure or on a part of one whose other parts are drawn."""
    drawn = looks(found.studies)
    (top,), (foot,) = figure.subfigures(
        2, 1, squeeze=False, height_ratios=[TOP_INCHES, FOOT_INCHES + ROW_INCHES * len(drawn)]
    )
    curves, law = top.subplots(2, 1, gridspec_kw={"height_ratios": [1.25, 1.0]})
    critical, times = foot.subplots(1, 2)
    _draw_curves(curves, drawn)
    _draw_collapse(law, drawn, found.collapse)
    _draw_rows(critical, drawn, _critical_row, "Critical batch size (examples)")
    _draw_rows(times, drawn, _time_row, "Time to target (seconds)")
    for i, look in enumerate(drawn):
        _write(critical, -0.03, i - 0.3, look.name, look.colour, ha="right", fontsize=8.5)
        for below, text in ((0.02, look.study.target), (0.28, look.study.device)):
            _write(
                critical, -0.03, i + below, _shortened(text), "#555555", ha="right", fontsize=6.5
            )
    _name_curves(figure, curves, drawn)


def looks(studies: Sequence[Compared]) -> list[Look]:
    """Return how the studies are drawn: no two of the first 49 alike."""
    count = len(COLOURS)
    return [
        Look(study, _shortened(study.name), COLOURS[i % count], MARKERS[(i + i // count) % count])
        for i, study in enumerate(studies)
    ]


def _shortened(text: str, longest: int = LONGEST) -> str:
    """Give a text without the middle of it where it has more than ``longest`` letters."""
    if len(text) <= longest:
        return text
    half = (longest - 1) // 2
    return f"{text[:half]}…{text[-half:]}"


def _draw_curves(axes: "Axes", drawn: Sequence[Look]) -> None:
    """Draw S(B): points that reached the target, the curve, and B_crit on it with its interval."""
    axes.set(xlabel="batch size B (examples per optimizer step)", ylabel="steps to target S")
    axes.set_title("Steps to target; hollow: the critical batch size", fontsize=9.0, loc="left")
    if not any(look.study.points for look in drawn):
        _say(axes, "no study reached its target")
        return
    for look in (look for look in drawn if look.study.points):
        study = look.study
        x, y = [point.batch_size for point in study.points], [point.steps for point in study.points]
        axes.scatter(
            x, y, s=12, color=look.colour, marker=look.marker, linewidths=0, alpha=0.7, zorder=3
        )
        if study.steps.size:
            axes.plot(
                study.batch_size, study.steps, color=look.colour, linewidth=1.2, alpha=0.8, zorder=2
            )
        if study.mark is not None:
            ends, height = (
                [study.b_crit_low or study.mark[0], study.b_crit_high or study.mark[0]],
                study.mark[1],
            )
            axes.plot(
                ends,
                [height] * 2,
                color=look.colour,
                linewidth=3.0,
                alpha=0.45,
                zorder=4,
                solid_capstyle="butt",
            )
            style: dict[str, Any] = {
                "s": 55,
                "facecolor": "white",
                "edgecolor": look.colour,
                "linewidths": 1.6,
                "zorder": 5,
            }
            axes.scatter([study.mark[0]], [height], marker=look.marker, **style)
    points = [point for look in drawn for point in look.study.points]
    curves = np.concatenate([look.study.steps for look in drawn])
    log_axis(axes, "x", log_limits([point.batch_size for point in points], (0.05, 0.05)))
    log_axis(axes, "y", log_limits([*(point.steps for point in points), *curves], (0.2, 0.08)))
    axes.grid(**GRID)


def _draw_collapse(axes: "Axes", drawn: Sequence[Look], collapse: Collapse | None) -> None:
    """Draw S/S_min over B/B_crit with the law, and how well it holds."""
    axes.set(xlabel="B / B_crit", ylabel="S / S_min")
    if collapse is None:
        _say(axes, "no study has a critical batch size")
        return
    heights = [np.ones(1)]
    for look in drawn:
        study = look.study
        if (placed := collapsed(study)) is not None:
            heights.append(placed[1])
            axes.scatter(
                *placed,
                s=12,
                color=look.colour,
                marker=look.marker,
                linewidths=0,
                alpha=0.5,
                zorder=3,
            )
        if study.b_crit is not None and study.s_min is not None:
            x, y = study.batch_size / study.b_crit, study.steps / study.s_min
            axes.plot(x, y, color=look.colour, linewidth=1.6, zorder=4)
    x = np.geomspace(collapse.smallest / 1.5, collapse.largest * 1.5, 100)
    axes.plot(x, 1.0 + 1.0 / x, color=INK, linewidth=1.0, linestyle="--", zorder=5)
    log_axis(axes, "x", (float(x[0]), float(x[-1])), decimal=True)
    log_axis(axes, "y", log_limits(np.concatenate([*heights, 1.0 + 1.0 / x]), (0.05, 0.08)))
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


def _say(axes: "Axes", text: str) -> None:
    """Write why a panel is empty."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=GREY)
    axes.set(xticks=[], yticks=[])


def _critical_row(study: Compared) -> Row:
    return Row(study.b_crit, study.b_crit_low, study.b_crit_high, study.critical)


def _time_row(study: Compared) -> Row:
    """Give the row of a study's time to target, all that it says to use, and what that gains."""
    use = study.use
    if use is None:
        return Row(None, None, None, "target not reached")
    place = f"B = {format_count(use.batch_size)}, lr = {format_number(use.lr)}"
    below = [part for part in (use.further, f"gain {study.gain_text}") if part]
    further = tuple(_shortened(part, MOST_FURTHER) for part in below)
    if use.seconds is None:
        return Row(None, None, None, f"seconds not known; {place}", further=further)
    text = format_seconds(use.seconds)
    if not use.reliable:
        text += f" ({use.reached} of {use.runs})" if use.runs else " (predicted)"
    return Row(use.seconds, use.low, use.high, f"{text}: {place}", use.reliable, further)


def _draw_rows(
    axes: "Axes", drawn: Sequence[Look], row_of: Callable[[Compared], Row], title: str
) -> None:
    """Draw a row for each study: a mark, an interval, and above them in words what they say."""
    rows = [row_of(look.study) for look in drawn]
    values = [
        value for row in rows for value in (row.value, row.low, row.high) if value is not None
    ]
    axes.set_title(title, fontsize=9.0, loc="left")
    axes.set(yticks=[], ylim=(len(drawn) - 0.5, -0.75), xticks=[])
    if values:
        log_axis(axes, "x", log_limits(values, (0.12, 0.12)), decimal=True)
        axes.grid(axis="x", **GRID)
    left, right = axes.get_xlim()
    for i, (look, row) in enumerate(zip(drawn, rows, strict=True)):
        if row.low is not None or row.high is not None:
            ends = [row.low or left, row.high or right]  # an open one reaches to the edge
            axes.plot(
                ends, [i, i], color=look.colour, linewidth=3.0, alpha=0.45, solid_capstyle="butt"
            )
        if row.value is not None:
            face = look.colour if row.reliable else "white"
            axes.scatter(
                [row.value],
                [i],
                marker=look.marker,
                s=26,
                facecolor=face,
                edgecolor=look.colour,
                zorder=3,
            )
        _write(axes, 0.02, i - 0.4, row.text, INK, fontsize=7.5)
        for j, text in enumerate(row.further):
            _write(axes, 0.02, i + 0.2 + 0.18 * j, text, "#555555", fontsize=6.5)


def _write(axes: "Axes", x: float, row: float, text: str, colour: str, **style: Any) -> None:
    """Write a text, as it is, in a row: ``x`` from 0 to 1 lies within the axes."""
    where = axes.get_yaxis_transform()
    axes.text(x, row, text, transform=where, color=colour, va="center", parse_math=False, **style)


def _name_curves(figure: "Figure | SubFigure", axes: "Axes", drawn: Sequence[Look]) -> None:
    """Write each study's name near its B_crit, and that; near its curve or its points, where it has none."""
    figure.canvas.figure.draw_without_rendering()  # the whole of it, where this is a part
    labels = []
    for look in drawn:
        study, points = look.study, [(point.batch_size, point.steps) for point in look.study.points]
        if study.mark is not None:
            text, at = f"{look.name}: {format_number(study.b_crit, 2)}", [study.mark]
        else:
            text, at = look.name, [*zip(study.batch_size, study.steps, strict=True)] or points
        labels += [Label(text, np.array(at), look.colour)] if at else []
    place_labels(axes, labels, 7.5)
