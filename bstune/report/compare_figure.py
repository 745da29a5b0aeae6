"""The figure ``comparison.png``: S(B) of several studies, their collapse, their B_crit and their times to target.

matplotlib is imported in functions here, once a figure is drawn: it takes 0.4 s.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bstune.core.console import format_count, format_number, format_seconds
from bstune.core.figures import BLUE, GREY, INK, PURPLE, VERMILION, save_figure
from bstune.report.compare import Collapse, Compared

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INCHES_WIDE = 6.0
COLOURS = (BLUE, VERMILION, "#009E73", PURPLE, "#E69F00", "#56B4E9", INK)  # Okabe and Ito's; their yellow is too pale
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LONGEST = 26  # characters of a name


@dataclass(frozen=True)
class Look:
    """How one study is drawn, in every panel."""

    study: Compared
    colour: str
    marker: str

    @property
    def name(self) -> str:
        """The study's name, its middle left out if it is long."""
        name, half = self.study.name, (LONGEST - 1) // 2
        return name if len(name) <= LONGEST else f"{name[:half]}…{name[-half:]}"


def looks(studies: Sequence[Compared]) -> list[Look]:
    """Return how the studies are drawn: no two of the first 49 alike."""
    return [
        Look(study, COLOURS[i % len(COLOURS)], MARKERS[(i + i // len(COLOURS)) % len(MARKERS)])
        for i, study in enumerate(studies)
    ]


def draw_comparison(studies: Sequence[Compared], collapse: Collapse | None, path: Path) -> None:
    """Write the figure: S(B) above, collapse and B_crit below it, and the times to target at the foot."""
    inches = INCHES_WIDE, 6.0 + 0.5 * len(studies)
    save_figure(lambda figure: paint_comparison(figure, studies, collapse), inches, path)


def paint_comparison(figure: "Figure", studies: Sequence[Compared], collapse: Collapse | None) -> None:
    """Draw what :func:`draw_comparison` writes."""
    drawn, rows = looks(studies), 0.7 + 0.25 * len(studies)
    grid = figure.add_gridspec(4, 1, height_ratios=[2.7, 2.4, rows, rows])
    curves, law, critical, times = (figure.add_subplot(grid[i]) for i in range(4))
    _draw_curves(curves, drawn)
    _draw_collapse(law, drawn, collapse)
    _draw_rows(critical, drawn, _critical_row, "critical batch size B_crit and its interval (examples)")
    _draw_rows(times, drawn, _time_row, "time to target with the batch size to use, its range over fresh seeds (s of training)")
    _name_curves(figure, curves, drawn)


def _log_axis(axes: "Axes", name: str) -> None:
    # as above
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set(**{f"{name}scale": "log"})
    axis = axes.xaxis if name == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(10.0, (1.0, 3.0) if name == "y" else (1.0,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: format_number(value)))
    axis.set_minor_formatter(NullFormatter())
    axes.grid(color=INK, alpha=0.07, linewidth=0.6)


def _law(study: Compared) -> tuple[np.ndarray, np.ndarray]:
    """Return S*(B) as the study has it or, of one that lacks it, by the law through B_crit and S_min; maybe empty."""
    if study.curve:
        size, steps = zip(*study.curve, strict=True)
        return np.array(size), np.array(steps)
    if study.b_crit is None or study.s_min is None or not study.reached:
        return np.empty(0), np.empty(0)
    size = np.geomspace(study.reached[0].batch_size, study.reached[-1].batch_size, 50)
    return size, study.s_min * (1.0 + study.b_crit / size)


def _mark(look: Look) -> tuple[float, float] | None:
    """Return where B_crit lies on a study's curve; None where it is not known."""
    size, steps = _law(look.study)
    if look.study.b_crit is None or not size.size:
        return None
    return look.study.b_crit, float(np.exp(np.interp(math.log(look.study.b_crit), np.log(size), np.log(steps))))


def _draw_curves(axes: "Axes", drawn: Sequence[Look]) -> None:
    """Draw S(B): points that reached the target, the curve, and B_crit on it with its interval."""
    for look in drawn:
        points = look.study.reached
        x, y = [point.batch_size for point in points], [point.steps for point in points]
        axes.scatter(x, y, s=13, color=look.colour, marker=look.marker, linewidths=0, alpha=0.7, zorder=3)
        axes.plot(*_law(look.study), color=look.colour, linewidth=1.2, alpha=0.8, zorder=2)
        if (mark := _mark(look)) is not None:
            low, high = look.study.b_crit_low or mark[0], look.study.b_crit_high or mark[0]
            axes.plot([low, high], [mark[1]] * 2, color=look.colour, linewidth=3.0, alpha=0.5, zorder=4, solid_capstyle="butt")
            style = {"s": 60, "facecolor": "white", "edgecolor": look.colour, "linewidths": 1.6, "zorder": 5}
            axes.scatter([mark[0]], [mark[1]], marker=look.marker, **style)
    axes.set(xlabel="batch size B (examples per optimizer step)", ylabel="steps to target S")
    axes.set_title("Steps to target, and where B_crit lies on each curve", fontsize=9.0, loc="left")
    if any(look.study.reached for look in drawn):
        for name in "xy":
            _log_axis(axes, name)
        axes.margins(0.08, 0.12)
    else:
        _say(axes, "no study reached its target")


def _draw_collapse(axes: "Axes", drawn: Sequence[Look], collapse: Collapse | None) -> None:
    """Draw S/S_min over B/B_crit with the law, and how well it holds."""
    axes.set(xlabel="B / B_crit", ylabel="S / S_min")
    if collapse is None:
        return _say(axes, "no study has a critical batch size")
    for look in drawn:
        study = look.study
        if study.b_crit is None or study.s_min is None:
            continue
        x = [point.batch_size / study.b_crit for point in study.reached]
        y = [point.steps / study.s_min for point in study.reached]
        axes.scatter(x, y, s=15, color=look.colour, marker=look.marker, linewidths=0, alpha=0.8, zorder=3)
    x = np.geomspace(collapse.smallest / 1.5, collapse.largest * 1.5, 100)
    axes.plot(x, 1.0 + 1.0 / x, color=INK, linewidth=1.0, zorder=2)
    for name in "xy":
        _log_axis(axes, name)
    several = "of one study" if len(collapse.by_study) == 1 else f"of {len(collapse.by_study)} studies"
    seeds = "" if collapse.seeds is None else f"; seeds alone scatter by {collapse.seeds:.0%}"
    title = f"One law: {collapse.points} points {several} within {collapse.deviation:.0%} of it (rms){seeds}"
    axes.set_title(title, fontsize=9.0, loc="left")
    axes.annotate("S = S_min (1 + B_crit/B)", (0.97, 0.93), xycoords="axes fraction", ha="right", va="top", color=INK)


def _say(axes: "Axes", text: str) -> None:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=GREY)
    axes.set(xticks=[], yticks=[])


Row = tuple[float | None, float | None, float | None, str, bool]  # middle, its ends, what it says, whether it holds


def _critical_row(study: Compared) -> Row:
    ends = (study.b_crit_low, study.b_crit_high)
    value = format_number(study.b_crit, 2) if study.b_crit else "not known"
    low, high = (format_number(end, 2) for end in ends)
    between = f" ({low} to {high})" if None not in ends else f", above {low}" if ends[0] else f", below {high}" if ends[1] else ""
    return study.b_crit, *ends, value + between, True


def _time_row(study: Compared) -> Row:
    if study.use is None or study.use.seconds is None:
        return None, None, None, "target not reached" if study.use is None else "seconds not known", True
    use = study.use
    with_ = f"B = {format_count(use.batch_size)}, lr = {format_number(use.lr)}"
    few = "" if use.reliable else f" ({use.reached} of {use.runs} seeds)"
    return use.seconds, use.low, use.high, f"{format_seconds(use.seconds)}{few} at {with_}", use.reliable


def _draw_rows(axes: "Axes", drawn: Sequence[Look], row: Callable[[Compared], Row], title: str) -> None:
    """Draw a row for each study: a mark, an interval, and in words what it says."""
    rows = [row(look.study) for look in drawn]
    values = [value for one in rows for value in one[:3] if value is not None]
    axes.set_title(title, fontsize=9.0, loc="left")
    axes.set(yticks=range(len(drawn)), ylim=(len(drawn) - 0.4, -0.6))
    axes.set_yticklabels([look.name for look in drawn], parse_math=False)
    for label, look in zip(axes.get_yticklabels(), drawn, strict=True):
        label.set_color(look.colour)
    if values:
        axes.set_xlim(min(values) / 1.3, max(values) * 1.3)
        _log_axis(axes, "x")
    else:
        axes.set(xticks=[])
    for i, (look, (middle, low, high, text, holds)) in enumerate(zip(drawn, rows, strict=True)):
        left, right = (low or (axes.get_xlim()[0] if high else None)), (high or (axes.get_xlim()[1] if low else None))
        if left is not None and right is not None:
            axes.plot([left, right], [i, i], color=look.colour, linewidth=3.0, alpha=0.45, solid_capstyle="butt")
        if middle is not None:
            face = look.colour if holds else "white"
            axes.scatter([middle], [i], marker=look.marker, s=32, facecolor=face, edgecolor=look.colour, zorder=3)
        axes.text(1.01, i, text, transform=axes.get_yaxis_transform(), va="center", fontsize=8.0, parse_math=False)


def _name_curves(figure: "Figure", axes: "Axes", drawn: Sequence[Look]) -> None:
    """Write each study's name and B_crit beside its mark, where the label covers least of the data and the labels."""
    figure.draw_without_rendering()
    renderer, inside = figure.canvas.get_renderer(), axes.get_window_extent()
    dots = [(point.batch_size, point.steps) for look in drawn for point in look.study.reached]
    lines = [pair for look in drawn for pair in zip(*_law(look.study), strict=True)]
    covered = axes.transData.transform(np.array([*dots, *lines]).reshape(-1, 2)) if dots or lines else np.empty((0, 2))
    placed = []
    for look in drawn:
        if (mark := _mark(look)) is None:
            continue
        label = axes.annotate(
            f"{look.name}: {format_number(look.study.b_crit, 2)}", mark, xytext=(0.0, 0.0), textcoords="offset points",
            color=look.colour, fontsize=8.0, zorder=6, parse_math=False,
            arrowprops={"arrowstyle": "-", "color": look.colour, "linewidth": 0.6, "shrinkA": 0.0, "shrinkB": 3.0},
        )  # fmt: skip
        best = None
        for distance in (8.0, 14.0, 22.0, 32.0, 44.0):
            for turn in range(16):
                angle = math.pi * (turn / 8.0 + 1.0 / 4.0)
                x, y = distance * math.cos(angle), distance * math.sin(angle)
                label.set(position=(x, y), ha="left" if x > 0.0 else "right", va="bottom" if y > 0.0 else "top")
                box = label.get_window_extent(renderer).padded(1.5)
                over = sum(box.overlaps(other) for other in placed) * 100
                over += int(((covered > (box.x0, box.y0)) & (covered < (box.x1, box.y1))).all(axis=1).sum())
                over += 1000 * (not (inside.x0 < box.x0 and box.x1 < inside.x1 and inside.y0 < box.y0 and box.y1 < inside.y1))
                if best is None or over + distance / 10.0 < best[0]:
                    best = over + distance / 10.0, (x, y), box
        (x, y), box = best[1], best[2]
        label.set(position=(x, y), ha="left" if x > 0.0 else "right", va="bottom" if y > 0.0 else "top")
        placed.append(box)
