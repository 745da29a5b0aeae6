"""The figure ``curve.png``: steps and time to target, and the learning rate, over batch size.

    draw_curve(trials, result, Path("curve.png"), Path("curve.svg"))

It draws the rows that ``rows.py`` prepares, as the page does; its words are those of ``answer.py``.
All that needs words stands in a key of its own, so that no text covers data: in the panels only the
winner to use and the baseline are named. matplotlib is imported in functions here, once a figure
is drawn: it takes 0.4 s.
"""

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bstune.core.records import TrialResult
from bstune.report.answer import answer, b_opt_text, critical_text, expected_text, winner_text
from bstune.report.drawing import (
    BLUE,
    GREEN,
    GREY,
    INK,
    PAGE_DPI,
    PAGE_INCHES,
    PURPLE,
    VERMILION,
    figure_of,
    log_axis,
    log_limits,
    save_figure,
)
from bstune.report.rows import (
    LAW,
    USE,
    YOURS,
    Band,
    Mark,
    Panel,
    band,
    panel,
    perfect_scaling_examples,
    rate_lines,
    shown_critical,
)
from bstune.result import INTERVAL_LEVEL, StudyResult
from bstune.system.console import format_count, format_number, format_seconds, plural, time_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.path import Path as Outline

    from bstune.report.picture import Picture

FIGURE_INCHES = PAGE_INCHES, 7.6
TITLE_SIZE, SIZE, SMALL = 10.5, 9.0, 8.0  # of letters, in points
TITLE_WIDTHS = (112, 90, 70, 50, 40)  # in letters: the first that fits
PANEL_WIDTH = 66  # in letters of a panel's title
KEY_WIDTH = 60  # in letters of a line of the key
MAX_KEY_LINES = 3  # of one entry
KEY_SIZES = (8.0, 7.0, 6.0, 5.0)  # of letters, in points: the first with which the key fits
MARK_OFFSET = 8.0  # of a mark's name, in points
POINT_TEXT = "fewest examples near its batch size; bar: last miss to first hit"
OTHER_TEXT = "other trial that reached the target"
STOPPED_TEXT = "stopped before the target: it takes more"
SLOPE_TEXT = "twice the batch, half the steps"
NEAR = 4.0  # times the batch sizes that reached the target: a B_crit this near is in the figure
RATE_DASHES: dict[str, Any] = {
    "none": (0, (1, 2)),
    "sqrt": (0, (5, 2)),
    "linear": (0, (6, 2, 1, 2)),
    LAW: "solid",
}


@dataclass(frozen=True)
class _View:
    """A panel's rows, the unit of its values and the limits of its batch sizes."""

    shown: Panel
    unit: float
    x_limits: tuple[float, float]


def draw_curve(trials: Sequence[TrialResult], result: StudyResult, *paths: Path) -> None:
    """Write ``curve.png``, 900 pixels wide, and ``curve.svg``, by the suffix of each path."""
    save_figure(
        lambda figure: _paint(figure, trials, result),
        FIGURE_INCHES,
        *paths,
        dots_per_inch=PAGE_DPI,
    )


def curve_figure(trials: Sequence[TrialResult], result: StudyResult) -> "Picture":
    """Draw what :func:`draw_curve` writes."""
    return figure_of(lambda figure: _paint(figure, trials, result), FIGURE_INCHES, PAGE_DPI)


def _paint(figure: "Figure", trials: Sequence[TrialResult], result: StudyResult) -> None:
    panels = figure.subplots(2, 2, gridspec_kw={"height_ratios": [1.0, 0.8]})
    left, right, rates, key = panels.flat
    steps, time = panel(trials, result, "steps"), panel(trials, result, "time")
    x_limits = _sizes(trials, steps, result)
    unit, unit_name = time_unit(min(_heights(time), default=1.0))
    _draw_panel(left, _View(steps, 1.0, x_limits), result)
    _draw_guides(left, result)
    _draw_panel(right, _View(time, unit, x_limits), result)
    _draw_critical(right, result)
    _draw_rates(rates, trials, result, x_limits)
    headed = {
        left: f"steps to {result.target}, S(B)",
        right: f"time to target, S(B) x tau(B), {unit_name} of training",
        rates: textwrap.fill(f"learning rate {_lr_text(result)}", PANEL_WIDTH),
    }
    for axes, title in headed.items():
        axes.set_title(title, loc="left", fontsize=SIZE, parse_math=False)
        axes.set_xlabel("batch size B (examples per step)", fontsize=SIZE, labelpad=1.0)
        axes.tick_params(labelsize=SMALL)
        axes.grid(color=INK, alpha=0.07, linewidth=0.6)
    _set_title(figure, result)
    _draw_key(figure, key, (left, right, rates))


def _set_title(figure: "Figure", result: StudyResult) -> None:
    """Make the answer the title, broken where it would be wider than the figure; what was asked stands below it."""
    found = answer(result)
    asked = found.title.replace(f"{result.workload} · ", "", 1)
    title = figure.suptitle("", x=0.01, ha="left", fontsize=TITLE_SIZE, parse_math=False)
    for width in TITLE_WIDTHS:
        title.set_text("\n".join(textwrap.fill(line, width) for line in (found.headline, asked)))
        if title.get_window_extent().width < 0.98 * figure.bbox.width:
            break


def _lr_text(result: StudyResult) -> str:
    """Give what is known of the best learning rate over batch size, its first sentence."""
    for label, texts in answer(result).details:
        if label == "LR":
            return texts[0].partition("; ")[0]
    return "of the trials"


def _sizes(trials: Sequence[TrialResult], steps: Panel, result: StudyResult) -> tuple[float, float]:
    """Give the limits of the batch sizes: of what reached the target, the baseline, and B_crit where it is near."""
    sizes: list[float] = [mark.batch_size for mark in steps.trials if mark.reached]
    if not sizes:
        sizes = [mark.batch_size for mark in steps.trials]
    if not sizes:
        sizes = [trial.batch_size for trial in trials] or [1.0]
    if steps.baseline is not None:
        sizes.append(steps.baseline.batch_size)
    critical = shown_critical(result)
    if critical is not None and critical.value is not None:
        is_near = min(sizes) / NEAR <= critical.value <= max(sizes) * NEAR
        if is_near:
            sizes.append(critical.value)
    return log_limits(sizes, (0.06, 0.06))


def _draw_panel(axes: "Axes", view: _View, result: StudyResult) -> None:
    """Draw the trials, the curve with its band, the winners and the baseline."""
    shown = view.shown
    log_axis(axes, "x", view.x_limits)
    values = _heights(shown)
    if not values:
        reason = "no trial got far enough to show"
        if shown.trials and shown.merit == "time":
            reason = "no seconds were measured"
        _say(axes, reason)
        return
    limits = log_limits([value / view.unit for value in values], (0.1, 0.1))
    log_axis(axes, "y", limits)
    on_frontier = {mark.number for mark in shown.frontier if mark.value}
    _draw_dots(axes, [mark for mark in shown.reached if mark.number not in on_frontier], view)
    _draw_band(axes, view, result)
    _draw_hits(axes, view)
    _draw_bounds(axes, view, limits)
    _draw_winners(axes, view, result)


def _heights(shown: Panel) -> list[float]:
    """All that a panel has to have room for: where no trial reached the target, what did not suffice."""
    values = [mark.value for mark in shown.reached if mark.value]
    if not values:
        values = [mark.low for mark in shown.stopped if mark.low]
    if shown.band is not None:
        values += shown.band.middle
    for star in shown.stars:
        values += [value for value in (star.value, star.low, star.high) if value]
    if shown.baseline is not None and shown.baseline.height:
        values.append(shown.baseline.height)
    return values


def _draw_dots(axes: "Axes", marks: Iterable[Mark], view: _View) -> None:
    """Draw trials that reached the target, those on the frontier left out."""
    sizes, heights = list[int](), list[float]()
    for mark in marks:
        if mark.value:
            sizes.append(mark.batch_size)
            heights.append(mark.value / view.unit)
    if sizes:
        style: dict[str, Any] = {"s": 12, "color": GREY, "alpha": 0.75, "linewidths": 0}
        axes.scatter(sizes, heights, zorder=2, label=OTHER_TEXT, **style)


def _draw_band(axes: "Axes", view: _View, result: StudyResult) -> None:
    curve = view.shown.band
    if curve is None:
        return
    low, middle, high = (
        np.array(values) / view.unit for values in (curve.low, curve.middle, curve.high)
    )
    axes.fill_between(curve.batch_size, low, high, color=BLUE, alpha=0.18, linewidth=0, zorder=1.5)
    critical = result.critical_batch_size
    level = INTERVAL_LEVEL if critical is None else critical.level
    name = f"S(B) by all trials, {level:.0%} band"
    axes.plot(curve.batch_size, middle, color=BLUE, linewidth=1.8, zorder=3, label=name)


def _draw_hits(axes: "Axes", view: _View) -> None:
    """Draw the frontier's points that reached the target, with a bar from the last miss."""
    sizes, misses, hits = list[int](), list[float](), list[float]()
    for mark in view.shown.frontier:
        if mark.value:
            sizes.append(mark.batch_size)
            misses.append((mark.low or mark.value) / view.unit)
            hits.append(mark.value / view.unit)
    axes.vlines(sizes, misses, hits, colors=INK, linewidth=1.4, zorder=5.5)
    if sizes:
        style: dict[str, Any] = {"facecolor": INK, "edgecolor": "white", "linewidths": 0.8}
        axes.scatter(sizes, hits, s=30, label=POINT_TEXT, zorder=5, **style)


def _draw_bounds(axes: "Axes", view: _View, limits: tuple[float, float]) -> None:
    """Draw the frontier's stopped trials within the panel that tell more than the band does."""
    sizes, heights = list[int](), list[float]()
    for mark in view.shown.frontier:
        if mark.reached or not mark.low or not _tells(mark.batch_size, mark.low, view.shown.band):
            continue
        height = mark.low / view.unit
        is_inside = view.x_limits[0] <= mark.batch_size <= view.x_limits[1]
        if is_inside and limits[0] <= height <= limits[1]:
            sizes.append(mark.batch_size)
            heights.append(height)
    if sizes:
        style: dict[str, Any] = {"facecolors": "none", "edgecolors": INK, "linewidths": 0.8}
        axes.scatter(sizes, heights, marker=_arrow(), s=240, zorder=4, label=STOPPED_TEXT, **style)


def _tells(batch_size: int, low: float, curve: Band | None) -> bool:
    """Whether a stopped trial went on past what the band says anyway."""
    if curve is None:
        return True
    at = np.interp(math.log(batch_size), np.log(curve.batch_size), curve.low)
    return bool(low >= at)


def _draw_winners(axes: "Axes", view: _View, result: StudyResult) -> None:
    """Draw the winners with their ranges over fresh seeds, and the baseline, and name what is used."""
    named = list[tuple[str, float, float, str]]()
    for star in view.shown.stars:
        x, y = star.winner.batch_size, star.value / view.unit
        if star.low is not None and star.high is not None:
            low, high = star.low / view.unit, star.high / view.unit
            axes.vlines([x], [low], [high], colors=VERMILION, linewidth=1.6, zorder=5.8)
        face = VERMILION if star.is_use else "white"
        text = f"{star.heading}: {winner_text(star.winner)}; {expected_text(star.winner)}"
        style: dict[str, Any] = {"marker": "*", "s": 150, "edgecolor": VERMILION, "zorder": 6}
        axes.scatter([x], [y], facecolor=face, label=text, **style)
        if star.is_use:
            named.append((USE, x, y, VERMILION))
    baseline = view.shown.baseline
    if baseline is not None and baseline.height:
        height = baseline.height / view.unit
        face = GREEN if baseline.reached else "white"
        style = {"marker": "s", "s": 42, "edgecolor": GREEN, "linewidths": 1.2, "zorder": 5.7}
        text = _baseline_text(result)
        axes.scatter([baseline.batch_size], [height], facecolor=face, label=text, **style)
        named.append((YOURS, baseline.batch_size, height, GREEN))
    _name_marks(axes, named)


def _baseline_text(result: StudyResult) -> str:
    """Say what the baseline's own run came to."""
    baseline = result.baseline
    if baseline is None:
        return YOURS
    parts = [f"batch size {format_count(baseline.batch_size)}"]
    parts.append(f"learning rate {format_number(baseline.lr)}")
    parts += [f"{name} {format_number(value)}" for name, value in baseline.hyperparameters.items()]
    took = plural(baseline.steps, "step")
    if baseline.status != "reached":
        took = f"{baseline.status} after {took}"
    if baseline.seconds is not None:
        took += f", {format_seconds(baseline.seconds)}"
    return f"{YOURS}: {', '.join(parts)}; {took} (one run)"


def _name_marks(axes: "Axes", named: Sequence[tuple[str, float, float, str]]) -> None:
    """Write the names of at most two marks: the higher one's above it and the other's below, so that they are apart."""
    middle = math.sqrt(math.prod(axes.get_xlim()))
    by_height = sorted(named, key=lambda one: -one[2])
    for i, (text, x, y, colour) in enumerate(by_height):
        side, align = (MARK_OFFSET, "bottom") if i == 0 else (-MARK_OFFSET, "top")
        horizontal = "left" if x < middle else "right"
        axes.annotate(
            text,
            (x, y),
            xytext=(0.0, side),
            textcoords="offset points",
            ha=horizontal,
            va=align,
            color=colour,
            fontsize=SIZE,
            fontweight="bold",
            zorder=8,
            path_effects=_halo(),
        )


def _halo() -> list[Any]:
    """Give a white outline of letters, so that they are read over what they cover."""
    # as in report/drawing.py
    from matplotlib.patheffects import withStroke

    return [withStroke(linewidth=2.5, foreground="white")]


def _arrow() -> "Outline":
    """Give the mark of a bound: a small circle around the point, and an arrow upwards from it."""
    # as in report/drawing.py
    from matplotlib.path import Path as Outline

    circle = Outline.circle((0.0, 0.0), 0.34)
    corners = [(0.0, 0.34), (0.0, 1.4), (-0.3, 1.0), (0.0, 1.4), (0.3, 1.0)]
    codes = [Outline.MOVETO, Outline.LINETO, Outline.MOVETO, Outline.LINETO, Outline.LINETO]
    return Outline.make_compound_path(circle, Outline(corners, codes))


def _draw_guides(axes: "Axes", result: StudyResult) -> None:
    """Draw B_crit, the slope of perfect scaling, and the batch size with the fewest examples."""
    _draw_critical(axes, result)
    critical, curve = result.critical_batch_size, band(result, "steps")
    examples = perfect_scaling_examples(result)
    if examples is not None and axes.has_data():
        x_limits, y_limits = axes.get_xlim(), axes.get_ylim()
        x = np.array(x_limits)
        style: dict[str, Any] = {"color": INK, "linewidth": 0.8, "linestyle": "--", "zorder": 1.6}
        axes.plot(x, examples / x, label=SLOPE_TEXT, **style)
        axes.set(xlim=x_limits, ylim=y_limits)
    if critical is not None and critical.b_opt is not None and curve is not None:
        b_opt = critical.b_opt
        log_steps = np.interp(math.log(b_opt), np.log(curve.batch_size), np.log(curve.middle))
        y = float(np.exp(log_steps))
        text = f"fewest examples: batch size {format_number(b_opt, 2)} ({b_opt_text(critical)})"
        style = {"marker": "D", "s": 34, "facecolor": "white", "edgecolor": BLUE, "zorder": 5.2}
        axes.scatter([b_opt], [y], label=text, **style)


def _draw_critical(axes: "Axes", result: StudyResult) -> None:
    """Draw B_crit with its interval; an open end reaches to the panel's edge."""
    critical = shown_critical(result)
    if critical is None or not axes.has_data():
        return
    left, right = axes.get_xlim()
    value, low, high = critical.value, critical.low, critical.high
    text = f"critical batch size {critical_text(critical)}"
    if value is not None and not left <= value <= right:
        text += ", beyond this plot"
    if value is not None:
        axes.axvline(value, color=PURPLE, linewidth=1.3, zorder=2.5, label=text)
        text = ""
    if low is not None or high is not None:
        style: dict[str, Any] = {"color": PURPLE, "alpha": 0.1, "linewidth": 0, "zorder": -1}
        axes.axvspan(low or left, high or right, label=text, **style)
    axes.set_xlim(left, right)


def _draw_rates(
    axes: "Axes", trials: Sequence[TrialResult], result: StudyResult, x_limits: tuple[float, float]
) -> None:
    """Draw learning rates over batch size: what reached the target, the best one, and rules through its middle."""
    log_axis(axes, "x", x_limits)
    curve = result.curve
    reached = [trial for trial in trials if trial.reached]
    shown = reached or [trial for trial in trials if trial.status == "stopped"] or trials
    rates = [trial.lr for trial in shown]
    if curve is not None:
        rates += curve.lr
    if not rates:
        _say(axes, "no trial has run")
        return
    limits = log_limits(rates, (0.1, 0.1))
    log_axis(axes, "y", limits)
    _draw_rates_of_trials(axes, trials, result, limits)
    if curve is not None:
        style: dict[str, Any] = {"color": BLUE, "alpha": 0.18, "linewidth": 0, "zorder": 1.5}
        axes.fill_between(curve.batch_size, curve.lr_low, curve.lr_high, **style)
        axes.plot(curve.batch_size, curve.lr, color=BLUE, linewidth=1.8, zorder=3)
    for line in rate_lines(result, *x_limits):
        is_law = line.name == LAW
        ends = [line.start, line.end]
        style = {"color": INK, "linewidth": 0.9, "linestyle": RATE_DASHES[line.name]}
        if is_law:
            style["linewidth"] = 1.8
        name = f"learning rate: {line.words}"
        axes.plot(ends, [line.at(end) for end in ends], zorder=1.8, label=name, **style)
    axes.set(xlim=x_limits, ylim=limits)
    use = result.winner
    if use is not None:
        style = {"marker": "*", "s": 150, "facecolor": VERMILION, "edgecolor": VERMILION}
        axes.scatter([use.batch_size], [use.lr], zorder=6, **style)
    baseline = result.baseline
    if baseline is not None and limits[0] <= baseline.lr <= limits[1]:
        face = GREEN if baseline.status == "reached" else "white"
        style = {"marker": "s", "s": 42, "facecolor": face, "edgecolor": GREEN, "linewidths": 1.2}
        axes.scatter([baseline.batch_size], [baseline.lr], zorder=5.7, **style)


def _draw_rates_of_trials(
    axes: "Axes",
    trials: Sequence[TrialResult],
    result: StudyResult,
    limits: tuple[float, float],
) -> None:
    """Draw the learning rate of each trial by what became of it; of a study that failed, of all."""
    on_frontier = {point.number for point in result.points if not point.stopped}
    hits, others, diverged, missed = (list[TrialResult]() for _ in range(4))
    for trial in trials:
        if not limits[0] <= trial.lr <= limits[1]:
            continue
        if trial.status == "diverged":
            diverged.append(trial)
        elif not trial.reached:
            missed.append(trial)
        elif trial.number in on_frontier:
            hits.append(trial)
        else:
            others.append(trial)
    # Where others reached it, trials that were stopped say nothing of the best learning rate.
    if hits or others:
        missed = []
    dots: dict[str, Any] = {"s": 12, "color": GREY, "alpha": 0.75, "linewidths": 0}
    points: dict[str, Any] = {"s": 30, "facecolor": INK, "edgecolor": "white", "zorder": 5}
    crosses: dict[str, Any] = {"s": 16, "color": GREY, "linewidths": 1.0, "label": "diverged"}
    circles: dict[str, Any] = {"s": 14, "facecolors": "none", "edgecolors": INK}
    circles["label"] = "did not reach the target"
    kinds = (
        (others, dots),
        (hits, points | {"linewidths": 0.8}),
        (diverged, crosses | {"marker": "x"}),
        (missed, circles | {"linewidths": 0.8}),
    )
    for some, style in kinds:
        if some:
            sizes = [trial.batch_size for trial in some]
            axes.scatter(sizes, [trial.lr for trial in some], **style)


def _draw_key(figure: "Figure", axes: "Axes", panels: Sequence["Axes"]) -> None:
    """Say in a place of its own what the marks are, in letters that are small enough for it."""
    named = dict[str, Any]()
    for one in panels:
        handles, texts = one.get_legend_handles_labels()
        for handle, text in zip(handles, texts, strict=True):
            lines = textwrap.wrap(text, KEY_WIDTH, max_lines=MAX_KEY_LINES, placeholder=" …")
            named.setdefault("\n".join(lines), handle)
    axes.set_axis_off()
    if not named:
        return
    layout = figure.get_layout_engine()
    if layout is not None:
        layout.execute(figure)
    room = axes.get_window_extent()
    for size in KEY_SIZES:
        style: dict[str, Any] = {"fontsize": size, "frameon": False, "labelspacing": 0.5}
        legend = axes.legend(
            named.values(), named.keys(), loc="center left", borderaxespad=0.0, **style
        )
        legend.set_in_layout(False)
        box = legend.get_window_extent()
        if box.height <= room.height * 1.12 and box.x1 <= figure.bbox.width:
            break


def _say(axes: "Axes", text: str) -> None:
    """Write why a panel is empty."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=GREY)
    axes.set(xticks=[], yticks=[])
    axes.minorticks_off()
