"""The figure ``comparison.png``: S(B) of several studies, their collapse, their B_crit and their times to target.

matplotlib is imported in functions here, once a figure is drawn: it takes 0.4 s.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bstune.core.console import format_number, format_seconds
from bstune.core.figures import BLUE, GREY, INK, PURPLE, VERMILION, save_figure
from bstune.report.compare import Collapse, Compared, Comparison, collapsed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation
    from matplotlib.transforms import BboxBase

INCHES_WIDE = 6.0
COLOURS = (BLUE, VERMILION, "#009E73", PURPLE, "#E69F00", "#56B4E9", INK)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LONGEST = 26  # characters of a name
DISTANCES, TURNS = (8.0, 14.0, 22.0, 32.0, 44.0, 60.0), 16  # of a label from what it names, in points and directions


@dataclass(frozen=True)
class Look:
    """How a study is drawn in every panel."""

    study: Compared
    name: str
    colour: str
    marker: str


@dataclass(frozen=True)
class Row:
    """What a study says in one line: a value, the ends of its interval, words, and whether it can be relied on."""

    value: float | None
    low: float | None
    high: float | None
    text: str
    reliable: bool = True


def draw_comparison(found: Comparison, path: Path) -> None:
    """Write the figure: S(B) above, the collapse below it, then a row for each study's B_crit and time to target."""
    inches = INCHES_WIDE, 6.4 + 0.5 * len(found.studies)
    save_figure(lambda figure: paint_comparison(figure, found), inches, path)


def paint_comparison(figure: "Figure", found: Comparison) -> None:
    """Draw what :func:`draw_comparison` writes."""
    drawn, rows = _looks(found.studies), 0.6 + 0.22 * len(found.studies)
    grid = figure.add_gridspec(4, 1, height_ratios=[2.5, 2.1, rows, rows])
    curves, law, critical, times = (figure.add_subplot(grid[i]) for i in range(4))
    _draw_curves(curves, drawn)
    _draw_collapse(law, drawn, found.collapse)
    _draw_rows(critical, drawn, _critical_row, "Critical batch size in examples, with its interval")
    _draw_rows(times, drawn, _time_row, "Time to target in seconds of training, with the range over fresh seeds")
    _name_curves(figure, curves, drawn)


def _looks(studies: Sequence[Compared]) -> list[Look]:
    """Return how the studies are drawn: no two of the first 49 alike; of a long name the middle is left out."""
    half, count = (LONGEST - 1) // 2, len(COLOURS)
    names = [one.name if len(one.name) <= LONGEST else f"{one.name[:half]}…{one.name[-half:]}" for one in studies]
    return [
        Look(study, name, COLOURS[i % count], MARKERS[(i + i // count) % count])
        for i, (study, name) in enumerate(zip(studies, names, strict=True))
    ]


def _log_axis(axes: "Axes", name: str) -> None:
    # as above
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set(**{f"{name}scale": "log"})
    axis = axes.xaxis if name == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(10.0, (1.0, 3.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: format_number(value)))
    axis.set_minor_formatter(NullFormatter())
    axes.grid(color=INK, alpha=0.07, linewidth=0.6)


def _draw_curves(axes: "Axes", drawn: Sequence[Look]) -> None:
    """Draw S(B): points that reached the target, the curve, and B_crit on it with its interval."""
    axes.set(xlabel="batch size B (examples per optimizer step)", ylabel="steps to target S")
    axes.set_title("Steps to target; hollow: the critical batch size", fontsize=9.0, loc="left")
    if not any(look.study.points for look in drawn):
        _say(axes, "no study reached its target")
        return
    for look in drawn:
        study = look.study
        x, y = [point.batch_size for point in study.points], [point.steps for point in study.points]
        axes.scatter(x, y, s=12, color=look.colour, marker=look.marker, linewidths=0, alpha=0.7, zorder=3)
        axes.plot(study.batch_size, study.steps, color=look.colour, linewidth=1.2, alpha=0.8, zorder=2)
        if study.mark is not None:
            ends, height = [study.b_crit_low or study.mark[0], study.b_crit_high or study.mark[0]], study.mark[1]
            axes.plot(ends, [height] * 2, color=look.colour, linewidth=3.0, alpha=0.45, zorder=4, solid_capstyle="butt")
            style: dict[str, Any] = {
                "s": 55,
                "facecolor": "white",
                "edgecolor": look.colour,
                "linewidths": 1.6,
                "zorder": 5,
            }
            axes.scatter([study.mark[0]], [height], marker=look.marker, **style)
    for name in "xy":
        _log_axis(axes, name)
    axes.margins(0.06, 0.1)


def _draw_collapse(axes: "Axes", drawn: Sequence[Look], collapse: Collapse | None) -> None:
    """Draw S/S_min over B/B_crit with the law, and how well it holds."""
    axes.set(xlabel="B / B_crit", ylabel="S / S_min")
    if collapse is None:
        _say(axes, "no study has a critical batch size")
        return
    for look in drawn:
        if (placed := collapsed(look.study)) is not None:
            axes.scatter(*placed, s=15, color=look.colour, marker=look.marker, linewidths=0, alpha=0.8, zorder=3)
    x = np.geomspace(collapse.smallest / 1.5, collapse.largest * 1.5, 100)
    axes.plot(x, 1.0 + 1.0 / x, color=INK, linewidth=1.0, zorder=2)
    for name in "xy":
        _log_axis(axes, name)
    seeds = "" if collapse.seeds is None else f"; seeds alone scatter by {collapse.seeds:.0%}"
    title = f"One law: {collapse.points} points within {collapse.deviation:.0%} of it (root mean square){seeds}"
    axes.set_title(title, fontsize=9.0, loc="left")
    axes.annotate("S/S_min = 1 + B_crit/B", (0.98, 0.94), xycoords="axes fraction", ha="right", va="top", color=INK)


def _say(axes: "Axes", text: str) -> None:
    """Write why a panel is empty."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=GREY)
    axes.set(xticks=[], yticks=[])


def _critical_row(study: Compared) -> Row:
    return Row(study.b_crit, study.b_crit_low, study.b_crit_high, study.critical)


def _time_row(study: Compared) -> Row:
    use = study.use
    if use is None or use.seconds is None:
        return Row(None, None, None, "target not reached" if use is None else f"seconds not known; {use}")
    few = "" if use.reliable else f" on {use.reached} of {use.runs} seeds"
    return Row(use.seconds, use.low, use.high, f"{format_seconds(use.seconds)}{few}: {use}", use.reliable)


def _draw_rows(axes: "Axes", drawn: Sequence[Look], row_of: Callable[[Compared], Row], title: str) -> None:
    """Draw a row for each study: a mark, an interval, and in words what it says."""
    rows = [row_of(look.study) for look in drawn]
    values = [value for row in rows for value in (row.value, row.low, row.high) if value is not None]
    axes.set_title(title, fontsize=9.0, loc="left")
    axes.set(yticks=range(len(drawn)), ylim=(len(drawn) - 0.4, -0.6), xticks=[])
    axes.set_yticklabels([look.name for look in drawn], parse_math=False)
    if values:
        axes.set_xlim(min(values) / 1.3, max(values) * 1.3)
        _log_axis(axes, "x")
    left, right = axes.get_xlim()
    for i, (look, row, name) in enumerate(zip(drawn, rows, axes.get_yticklabels(), strict=True)):
        name.set_color(look.colour)
        if row.low is not None or row.high is not None:
            ends = [row.low or left, row.high or right]  # an open one reaches to the edge
            axes.plot(ends, [i, i], color=look.colour, linewidth=3.0, alpha=0.45, solid_capstyle="butt")
        if row.value is not None:
            face = look.colour if row.reliable else "white"
            axes.scatter([row.value], [i], marker=look.marker, s=30, facecolor=face, edgecolor=look.colour, zorder=3)
        style: dict[str, Any] = {"va": "center", "fontsize": 8.0, "parse_math": False}
        axes.text(1.01, i, row.text, transform=axes.get_yaxis_transform(), **style)


def _name_curves(figure: "Figure", axes: "Axes", drawn: Sequence[Look]) -> None:
    """Write each study's name and B_crit near its mark, where the label covers least of the data and other labels."""
    figure.draw_without_rendering()
    inside, placed = axes.get_window_extent(), list["BboxBase"]()
    corners = [(point.batch_size, point.steps) for look in drawn for point in look.study.points]
    corners += [pair for look in drawn for pair in zip(look.study.batch_size, look.study.steps, strict=True)]
    covered = axes.transData.transform(np.array(corners).reshape(-1, 2))
    offsets = [
        (far * math.cos(angle), far * math.sin(angle))
        for far in DISTANCES
        for angle in (math.pi * (0.25 + 2.0 * turn / TURNS) for turn in range(TURNS))
    ]
    for look in drawn:
        if look.study.mark is None:
            continue
        arrow = {"arrowstyle": "-", "color": look.colour, "linewidth": 0.6, "shrinkA": 0.0, "shrinkB": 3.0}
        text = f"{look.name}: {format_number(look.study.b_crit, 2)}"
        style: dict[str, Any] = {"textcoords": "offset points", "color": look.colour, "fontsize": 8.0, "zorder": 6}
        label = axes.annotate(text, look.study.mark, xytext=(0.0, 0.0), arrowprops=arrow, parse_math=False, **style)

        def cost(offset: tuple[float, float], label: "Annotation" = label) -> float:
            box = _place(label, offset)
            dots = ((covered > (box.x0, box.y0)) & (covered < (box.x1, box.y1))).all(axis=1).sum()
            outside = not (inside.x0 < box.x0 and box.x1 < inside.x1 and inside.y0 < box.y0 and box.y1 < inside.y1)
            return float(dots + 100 * sum(box.overlaps(other) for other in placed) + 1000 * outside)

        placed.append(_place(label, min(offsets, key=cost)))


def _place(label: "Annotation", offset: tuple[float, float]) -> "BboxBase":
    """Move a label to an offset from what it names; return the box of its text, with a margin, in pixels."""
    # as above
    from matplotlib.text import Text

    label.set(position=offset, ha="left" if offset[0] > 0.0 else "right", va="bottom" if offset[1] > 0.0 else "top")
    label.update_positions(label.figure.canvas.get_renderer())
    return Text.get_window_extent(label).padded(2.0)  # an annotation's own extent has its arrow in it
