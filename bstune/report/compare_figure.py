"""The figure ``comparison.png``: S(B) of several studies, their collapse, B_crit and times."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bstune.report.compare import Collapse, Compared, Comparison, collapsed
from bstune.report.drawing import (
    BLUE,
    GREEN,
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

INCHES_WIDE = 6.0
# In height: the two charts above, the frame of the rows below them, and each row.
TOP_INCHES = 5.0
FOOT_INCHES = 0.7
ROW_INCHES = 0.52
# Seven colours and seven marks: a study beyond the seventh has a colour again, with another mark.
STUDY_COLOURS = (BLUE, VERMILION, GREEN, PURPLE, "#E69F00", "#56B4E9", INK)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
# Of what stands below a row.
FAINT_INK = "#555555"
# Characters of a study's name.
LONGEST_NAME = 26
# Characters of a line below a row.
LONGEST_LINE_BELOW = 44
GRID: dict[str, Any] = {"color": INK, "alpha": 0.07, "linewidth": 0.6}


@dataclass(frozen=True)
class Look:
    """How a study is drawn in every panel."""

    study: Compared
    name: str
    """Its name, shortened."""
    colour: str
    marker: str


@dataclass(frozen=True)
class FigureRow:
    """What a study says in one line."""

    value: float | None
    """Where its mark stands; None where there is none."""
    low: float | None
    """Lower end of its interval; None where that is open."""
    high: float | None
    """Upper end of its interval; None where that is open."""
    text: str
    """What is written above it."""
    reliable: bool = True
    """Whether its mark is filled."""
    further: tuple[str, ...] = ()
    """What is written below it, a line each."""


def draw_comparison(comparison: Comparison, path: Path) -> None:
    """Write the figure: S(B) above, the collapse below it.

    Then there is a row for each study's B_crit and time to target.
    """
    save_figure(
        lambda figure: paint_comparison(figure, comparison), comparison_inches(comparison), path
    )


def comparison_figure(comparison: Comparison) -> "Picture":
    """Draw what :func:`draw_comparison` writes, of a page's resolution."""
    paint = partial(paint_comparison, comparison=comparison)
    return figure_of(paint, comparison_inches(comparison), PAGE_DPI)


def comparison_inches(comparison: Comparison) -> tuple[float, float]:
    """Give width and height of the figure."""
    return INCHES_WIDE, TOP_INCHES + FOOT_INCHES + ROW_INCHES * len(comparison.studies)


def paint_comparison(figure: "Figure | SubFigure", comparison: Comparison) -> None:
    """Draw what :func:`draw_comparison` writes, on a figure, or on a part of one.

    The other parts of that are drawn already.
    """
    studies = looks(comparison.studies)
    (top,), (foot,) = figure.subfigures(
        2, 1, squeeze=False, height_ratios=[TOP_INCHES, FOOT_INCHES + ROW_INCHES * len(studies)]
    )
    curves, law = top.subplots(2, 1, gridspec_kw={"height_ratios": [1.25, 1.0]})
    critical, times = foot.subplots(1, 2)
    _draw_curves(curves, studies)
    _draw_collapse(law, studies, comparison.collapse)
    _draw_rows(critical, studies, _critical_row, "Critical batch size (examples)")
    _draw_rows(times, studies, _time_row, "Time to target (seconds)")
    # The names stand once, at the left of both columns of rows.
    name_style: dict[str, Any] = {"ha": "right", "fontsize": 8.5}
    below_style: dict[str, Any] = {"ha": "right", "fontsize": 6.5}
    for i, look in enumerate(studies):
        target = _shortened(look.study.target)
        device = _shortened(look.study.device)
        _write(critical, -0.03, i - 0.3, look.name, look.colour, **name_style)
        _write(critical, -0.03, i + 0.02, target, FAINT_INK, **below_style)
        _write(critical, -0.03, i + 0.28, device, FAINT_INK, **below_style)
    _name_curves(figure, curves, studies)


def looks(studies: Sequence[Compared]) -> list[Look]:
    """Choose how the studies are drawn: no two of the first 49 alike."""
    chosen = list[Look]()
    for place, study in enumerate(studies):
        colour, marker = look_of(place)
        chosen.append(Look(study, _shortened(study.name), colour, marker))
    return chosen


def look_of(place: int) -> tuple[str, str]:
    """Give the colour and the mark of the study at a place, 0 for the first."""
    count = len(STUDY_COLOURS)
    return STUDY_COLOURS[place % count], MARKERS[(place + place // count) % count]


def _shortened(text: str, longest: int = LONGEST_NAME) -> str:
    """Give a text without the middle of it where it has more than ``longest`` letters."""
    if len(text) <= longest:
        return text
    half = (longest - 1) // 2
    return f"{text[:half]}…{text[-half:]}"


def _draw_curves(axes: "Axes", studies: Sequence[Look]) -> None:
    """Draw S(B): points that reached the target, the curve, and B_crit on it with its interval."""
    axes.set(xlabel="batch size B (examples per optimizer step)", ylabel="steps to target S")
    axes.set_title("Steps to target; hollow: the critical batch size", fontsize=9.0, loc="left")
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
        if study.mark is not None:
            _draw_critical(axes, look, study.mark)
    if not all_sizes:
        _say(axes, "no study reached its target")
        return
    log_axis(axes, "x", log_limits(all_sizes, (0.05, 0.05)))
    log_axis(axes, "y", log_limits([*all_steps, *all_curves], (0.2, 0.08)))
    axes.grid(**GRID)


def _draw_critical(axes: "Axes", look: Look, mark: tuple[float, float]) -> None:
    """Draw B_crit at its place on the curve, with its interval as far as it is closed."""
    size, height = mark
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
        _say(axes, "no study has a critical batch size")
        return
    # S_min itself belongs into the picture, however far the studies lie above it.
    heights = [np.ones(1)]
    for look in studies:
        study = look.study
        placed = collapsed(study)
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
    log_axis(axes, "y", log_limits(np.concatenate([*heights, law]), (0.05, 0.08)))
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


def _critical_row(study: Compared) -> FigureRow:
    return FigureRow(
        value=study.b_crit, low=study.b_crit_low, high=study.b_crit_high, text=study.critical
    )


def _time_row(study: Compared) -> FigureRow:
    """Give the row of a study's time to target, all that it says to use, and what that gains."""
    use = study.use
    if use is None:
        return FigureRow(value=None, low=None, high=None, text="target not reached")
    place = f"B = {format_count(use.batch_size)}, lr = {format_number(use.lr)}"
    below = list[str]()
    if use.further:
        below.append(_shortened(use.further, LONGEST_LINE_BELOW))
    below.append(_shortened(f"gain {study.gain_text}", LONGEST_LINE_BELOW))
    further = tuple(below)
    if use.seconds is None:
        unknown = f"seconds not known; {place}"
        return FigureRow(value=None, low=None, high=None, text=unknown, further=further)
    text = format_seconds(use.seconds)
    if not use.runs:
        text += " (predicted)"
    elif not use.reliable:
        text += f" ({use.reached} of {use.runs})"
    return FigureRow(
        value=use.seconds,
        low=use.low,
        high=use.high,
        text=f"{text}: {place}",
        reliable=use.reliable,
        further=further,
    )


def _draw_rows(
    axes: "Axes", studies: Sequence[Look], row_of: Callable[[Compared], FigureRow], title: str
) -> None:
    """Draw a row for each study: a mark, an interval, and above them in words what they say."""
    rows = [row_of(look.study) for look in studies]
    values = list[float]()
    for row in rows:
        values += [value for value in (row.value, row.low, row.high) if value is not None]
    axes.set_title(title, fontsize=9.0, loc="left")
    # Rows count downwards, the first one at 0.
    axes.set(yticks=[], ylim=(len(studies) - 0.5, -0.75), xticks=[])
    if values:
        log_axis(axes, "x", log_limits(values, (0.12, 0.12)), decimal=True)
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
        _write(axes, 0.02, i - 0.4, row.text, INK, fontsize=7.5)
        for j, text in enumerate(row.further):
            _write(axes, 0.02, i + 0.2 + 0.18 * j, text, FAINT_INK, fontsize=6.5)


def _write(axes: "Axes", x: float, row: float, text: str, colour: str, **style: Any) -> None:
    """Write a text, as it is, in a row: ``x`` from 0 to 1 lies within the axes."""
    where = axes.get_yaxis_transform()
    axes.text(x, row, text, transform=where, color=colour, va="center", parse_math=False, **style)


def _name_curves(figure: "Figure | SubFigure", axes: "Axes", studies: Sequence[Look]) -> None:
    """Write each study's name near its B_crit, and that.

    Where it has none the name stands near its curve or its points.
    """
    # Labels are placed once all else has its place; the whole figure, where this is a part of it.
    figure.canvas.figure.draw_without_rendering()
    labels = list[Label]()
    for look in studies:
        study = look.study
        text = look.name
        if study.mark is not None:
            text = f"{look.name}: {format_number(study.b_crit, 2)}"
            places = [study.mark]
        elif study.steps.size:
            places = list(zip(study.batch_size, study.steps, strict=True))
        else:
            places = [(point.batch_size, point.steps) for point in study.points]
        if places:
            labels.append(Label(text, np.array(places), look.colour))
    place_labels(axes, labels, 7.5)
