"""The figure ``curve.png``: steps and time to target, and the learning rate, over batch size.

    draw_curve(trials, result, Path("curve.png"), Path("curve.svg"))

It draws the rows that ``rows.py`` prepares, as the page does. Its words are those of ``answer.py``.
In the panels only the winner to use and the baseline are named. All other words stand in a key of
their own, so that no text covers data. matplotlib is imported in functions here, once a figure
is drawn: it takes 0.4 s.
"""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bstune.core.records import TrialResult
from bstune.report.answer import answer, figure_titles
from bstune.report.drawing import (
    BLUE,
    GREEN,
    GREY,
    INK,
    PAGE_DPI,
    PAGE_INCHES,
    PURPLE,
    VERMILION,
    draw_empty,
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
    Panel,
    band,
    panel,
    perfect_scaling_examples,
    rate_lines,
    shown_critical,
)
from bstune.report.words import b_opt_text, critical_text, expected_text, winner_text
from bstune.result import INTERVAL_LEVEL, StudyResult
from bstune.system.console import format_count, format_number, format_seconds, plural, time_unit

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.path import Path as Outline
    from matplotlib.patheffects import AbstractPathEffect

    from bstune.report.picture import Picture

FIGURE_INCHES = PAGE_INCHES, 7.6
# Sizes of letters in points: of the answer above, of the panels' titles and axes, and of the ticks.
TITLE_POINTS = 10.5
AXIS_POINTS = 9.0
TICK_POINTS = 8.0
# Letters per line of the answer above: the first that fits the figure's width is taken.
TITLE_WIDTHS = (112, 90, 70, 50, 40)
# Letters per line of a panel's title, and of the key.
PANEL_WIDTH = 66
KEY_WIDTH = 60
# The most lines of one entry of the key.
MAX_KEY_LINES = 3
# Sizes of the key's letters in points: the first with which it fits is taken.
KEY_POINTS = (8.0, 7.0, 6.0, 5.0)
# The greatest height of the key over its panel's: titles and margins leave so much room.
KEY_HEIGHT = 1.12
# The distance of a name from its mark, in points.
MARK_OFFSET = 8.0
POINT_TEXT = "fewest examples near its batch size; bar: last miss to first hit"
OTHER_TEXT = "other trial that reached the target"
STOPPED_TEXT = "stopped before the target: it takes more"
SLOPE_TEXT = "twice the batch, half the steps"
# The figure shows a B_crit that lies up to this many times beyond the batch sizes that reached the
# target. One that is farther off would leave the trials no room.
NEAR_CRITICAL = 4.0
FIGURE_DASHES: dict[str, Any] = {
    "none": (0, (1, 2)),
    "sqrt": (0, (5, 2)),
    "linear": (0, (6, 2, 1, 2)),
    LAW: "solid",
}
# The dash of any further rule.
OTHER_FIGURE_DASH = (0, (9, 3))


@dataclass(frozen=True)
class _View:
    """The rows that a panel draws, and the scales on which it draws them."""

    shown: Panel
    """The rows."""
    axis_unit: float
    """What values are divided by: 60 for seconds that are shown in minutes, 1 for steps."""
    x_limits: tuple[float, float]
    """The batch sizes at both ends of the panel."""


def draw_curve(trials: Sequence[TrialResult], result: StudyResult, *paths: Path) -> None:
    """Write ``curve.png``, 900 pixels wide, and ``curve.svg``, by the suffix of each path."""
    save_figure(
        lambda figure: _paint(figure, trials, result),
        FIGURE_INCHES,
        *paths,
        dots_per_inch=PAGE_DPI,
    )


def curve_figure(trials: Sequence[TrialResult], result: StudyResult) -> "Picture":
    """Give the figure that :func:`draw_curve` writes, for a notebook."""
    return figure_of(lambda figure: _paint(figure, trials, result), FIGURE_INCHES, PAGE_DPI)


def _paint(figure: "Figure", trials: Sequence[TrialResult], result: StudyResult) -> None:
    """Draw the panels of steps, of time and of learning rates, the title, and the key."""
    panels = figure.subplots(2, 2, gridspec_kw={"height_ratios": [1.0, 0.8]})
    steps_axes, time_axes, rates_axes, key_axes = panels.flat
    steps = panel(trials, result, "steps")
    time = panel(trials, result, "time")
    # All panels have the same batch sizes, so that one is read below the other.
    x_limits = _size_limits(trials, steps, result)
    # The unit of the axis of time, which suits the shortest one: its seconds, 1e-3 for ms.
    unit, unit_name = time_unit(min(_heights(time), default=1.0))
    _draw_panel(steps_axes, _View(shown=steps, axis_unit=1.0, x_limits=x_limits), result)
    _draw_guides(steps_axes, result)
    _draw_panel(time_axes, _View(shown=time, axis_unit=unit, x_limits=x_limits), result)
    _draw_critical(time_axes, result)
    _draw_rates(rates_axes, trials, result, x_limits)
    titles = {
        steps_axes: f"steps to {result.target}, S(B)",
        time_axes: f"time to target, S(B) x tau(B), {unit_name} of training",
        rates_axes: textwrap.fill(f"learning rate {_lr_text(result)}", PANEL_WIDTH),
    }
    for axes, title in titles.items():
        axes.set_title(title, loc="left", fontsize=AXIS_POINTS, parse_math=False)
        axes.set_xlabel("batch size B (examples per step)", fontsize=AXIS_POINTS, labelpad=1.0)
        axes.tick_params(labelsize=TICK_POINTS)
        axes.grid(color=INK, alpha=0.07, linewidth=0.6)
    _set_title(figure, result)
    # The key comes last, as it collects what the panels have drawn.
    _draw_key(figure, key_axes, (steps_axes, time_axes, rates_axes))


def _set_title(figure: "Figure", result: StudyResult) -> None:
    """Make the answer the title, with what was asked below it.

    Both are broken into lines that are no wider than the figure.
    """
    headline, asked = figure_titles(result)
    title = figure.suptitle("", x=0.01, ha="left", fontsize=TITLE_POINTS, parse_math=False)
    # Line widths in characters, the largest first: the first one that fits is taken.
    for width in TITLE_WIDTHS:
        title.set_text(f"{textwrap.fill(headline, width)}\n{textwrap.fill(asked, width)}")
        # A hundredth of the width is left free on each side.
        if title.get_window_extent().width < 0.98 * figure.bbox.width:
            break


def _lr_text(result: StudyResult) -> str:
    """Give the beginning of the answer's line LR: how the best learning rate grows.

    Without such a line it is ``of the trials``. Both complete a title that begins "learning rate".
    """
    for label, texts in answer(result).details:
        if label == "LR":
            return texts[0].partition("; ")[0]
    return "of the trials"


def _size_limits(
    trials: Sequence[TrialResult], steps: Panel, result: StudyResult
) -> tuple[float, float]:
    """Give the batch sizes at both ends of the panels.

    They hold the trials that reached the target, or all trials where none did. They hold the
    baseline, and B_crit where it is near.
    """
    batch_sizes: list[float] = [mark.batch_size for mark in steps.trials if mark.reached]
    if not batch_sizes:
        batch_sizes = [mark.batch_size for mark in steps.trials]
    # Trials that failed or diverged have no mark.
    if not batch_sizes:
        batch_sizes = [trial.batch_size for trial in trials] or [1.0]
    if steps.baseline is not None:
        batch_sizes.append(steps.baseline.batch_size)
    critical = shown_critical(result)
    if critical is not None and critical.value is not None:
        nearest = min(batch_sizes) / NEAR_CRITICAL
        farthest = max(batch_sizes) * NEAR_CRITICAL
        if nearest <= critical.value <= farthest:
            batch_sizes.append(critical.value)
    return log_limits(batch_sizes, pads=(0.06, 0.06))


def _draw_panel(axes: "Axes", view: _View, result: StudyResult) -> None:
    """Draw a panel of steps, or of time, to the target over batch size.

    From back to front: the trials that reached the target, the curve with its band, the frontier's
    points, arrows for its stopped trials, and the winners with the baseline. An empty panel says
    why it is empty.
    """
    shown = view.shown
    log_axis(axes, "x", view.x_limits)
    values = _heights(shown)
    if not values:
        reason = "no trial got far enough to show"
        if shown.trials and shown.merit == "time":
            reason = "no seconds were measured"
        draw_empty(axes, reason)
        return
    limits = log_limits([value / view.axis_unit for value in values], pads=(0.1, 0.1))
    log_axis(axes, "y", limits)
    _draw_dots(axes, view)
    _draw_band(axes, view, result)
    _draw_hits(axes, view)
    _draw_bounds(axes, view, limits)
    _draw_winners(axes, view, result)


def _heights(shown: Panel) -> list[float]:
    """Give all steps, or seconds, that a panel has to have room for.

    Where no trial reached the target, these are the ones that did not suffice.
    """
    heights: list[float | None] = [mark.value for mark in shown.reached]
    if not heights:
        heights = [mark.low for mark in shown.stopped]
    if shown.band is not None:
        heights += shown.band.middle
    for star in shown.stars:
        heights += (star.value, star.low, star.high)
    if shown.baseline is not None:
        heights.append(shown.baseline.height)
    # A height that is 0 or not known has no place on a logarithmic axis.
    return [height for height in heights if height]


def _draw_dots(axes: "Axes", view: _View) -> None:
    """Draw the trials that reached the target and are not on the frontier.

    The frontier has the trial of the fewest examples for each half octave of batch sizes.
    """
    on_frontier = {mark.number for mark in view.shown.frontier if mark.value}
    sizes = list[int]()
    heights = list[float]()
    for mark in view.shown.reached:
        if mark.value and mark.number not in on_frontier:
            sizes.append(mark.batch_size)
            heights.append(mark.value / view.axis_unit)
    if sizes:
        style: dict[str, Any] = {"s": 12, "color": GREY, "alpha": 0.75, "linewidths": 0}
        axes.scatter(sizes, heights, zorder=2, label=OTHER_TEXT, **style)


def _draw_band(axes: "Axes", view: _View, result: StudyResult) -> None:
    """Draw the curve by all trials, with the band of its interval."""
    curve = view.shown.band
    if curve is None:
        return
    low = np.array(curve.low) / view.axis_unit
    middle = np.array(curve.middle) / view.axis_unit
    high = np.array(curve.high) / view.axis_unit
    axes.fill_between(curve.batch_size, low, high, color=BLUE, alpha=0.18, linewidth=0, zorder=1.5)
    level = INTERVAL_LEVEL
    if result.critical_batch_size is not None:
        level = result.critical_batch_size.level
    name = f"S(B) by all trials, {level:.0%} band"
    axes.plot(curve.batch_size, middle, color=BLUE, linewidth=1.8, zorder=3, label=name)


def _draw_hits(axes: "Axes", view: _View) -> None:
    """Draw the frontier's points that reached the target: the best of each half octave of B.

    A bar goes from the last evaluation that missed it to the first one that met it.
    """
    sizes = list[int]()
    misses = list[float]()
    hits = list[float]()
    for mark in view.shown.frontier:
        if mark.value:
            sizes.append(mark.batch_size)
            # Where no evaluation missed the target the bar has no length.
            misses.append((mark.low or mark.value) / view.axis_unit)
            hits.append(mark.value / view.axis_unit)
    axes.vlines(sizes, misses, hits, colors=INK, linewidth=1.4, zorder=5.5)
    if sizes:
        style: dict[str, Any] = {"facecolor": INK, "edgecolor": "white", "linewidths": 0.8}
        axes.scatter(sizes, hits, s=30, label=POINT_TEXT, zorder=5, **style)


def _draw_bounds(axes: "Axes", view: _View, limits: tuple[float, float]) -> None:
    """Draw the frontier's stopped trials, as arrows that point upwards.

    Each stands for a half octave of batch sizes in which no trial reached the target. Trials
    outside of the panel are left out, and so are those that tell less than the curve's band does.
    ``limits``: the heights at both ends of the panel.
    """
    smallest, largest = view.x_limits
    lowest, highest = limits
    sizes = list[int]()
    heights = list[float]()
    for mark in view.shown.frontier:
        if mark.reached or not mark.low:
            continue
        if not _tells_more_than_band(mark.batch_size, mark.low, view.shown.band):
            continue
        height = mark.low / view.axis_unit
        if smallest <= mark.batch_size <= largest and lowest <= height <= highest:
            sizes.append(mark.batch_size)
            heights.append(height)
    if sizes:
        style: dict[str, Any] = {"facecolors": "none", "edgecolors": INK, "linewidths": 0.8}
        axes.scatter(
            sizes, heights, marker=_bound_mark(), s=240, zorder=4, label=STOPPED_TEXT, **style
        )


def _tells_more_than_band(batch_size: int, low: float, curve: Band | None) -> bool:
    """Whether a stopped trial went on to at least the band's lower end, and so tells more.

    ``low``: the steps or seconds after which it still missed the target. True without a band.
    """
    if curve is None:
        return True
    least = np.interp(math.log(batch_size), np.log(curve.batch_size), curve.low)
    return bool(low >= least)


@dataclass(frozen=True)
class _NamedMark:
    """A mark that has its name beside it."""

    name: str
    batch_size: float
    """Examples of a step."""
    height: float
    """Steps, or time in the panel's unit."""
    colour: str


def _draw_winners(axes: "Axes", view: _View, result: StudyResult) -> None:
    """Draw the winners with their intervals over fresh seeds, and the baseline.

    The winner to use and the baseline get their names beside them.
    """
    named = list[_NamedMark]()
    for star in view.shown.stars:
        size = star.winner.batch_size
        height = star.value / view.axis_unit
        if star.low is not None and star.high is not None:
            low = star.low / view.axis_unit
            high = star.high / view.axis_unit
            axes.vlines([size], [low], [high], colors=VERMILION, linewidth=1.6, zorder=5.8)
        # The winner to use is filled and named. The other one is hollow, and the key names it.
        face = "white"
        if star.is_use:
            face = VERMILION
            named.append(_NamedMark(name=USE, batch_size=size, height=height, colour=VERMILION))
        text = f"{star.heading}: {winner_text(star.winner)}; {expected_text(star.winner)}"
        style: dict[str, Any] = {"marker": "*", "s": 150, "edgecolor": VERMILION, "zorder": 6}
        axes.scatter([size], [height], facecolor=face, label=text, **style)
    baseline = view.shown.baseline
    # A baseline of which neither a time nor a bound is known has no place.
    if baseline is not None and baseline.height:
        height = baseline.height / view.axis_unit
        face = "white"
        if baseline.reached:
            face = GREEN
        style = {"marker": "s", "s": 42, "edgecolor": GREEN, "linewidths": 1.2, "zorder": 5.7}
        text = _baseline_text(result)
        axes.scatter([baseline.batch_size], [height], facecolor=face, label=text, **style)
        named.append(
            _NamedMark(name=YOURS, batch_size=baseline.batch_size, height=height, colour=GREEN)
        )
    _name_marks(axes, named)


def _baseline_text(result: StudyResult) -> str:
    """Write the baseline's configuration, and the steps and seconds of its trial."""
    baseline = result.baseline
    if baseline is None:
        return YOURS
    parts = [f"batch size {format_count(baseline.batch_size)}"]
    parts.append(f"learning rate {format_number(baseline.lr)}")
    for name, value in baseline.hyperparameters.items():
        parts.append(f"{name} {format_number(value)}")
    took = plural(baseline.steps, "step")
    if baseline.status != "reached":
        took = f"{baseline.status} after {took}"
    if baseline.seconds is not None:
        took += f", {format_seconds(baseline.seconds)}"
    return f"{YOURS}: {', '.join(parts)}; {took} (one run)"


def _name_marks(axes: "Axes", named: Sequence[_NamedMark]) -> None:
    """Write the names of at most two marks: the higher one's above it, the other's below it.

    So the names are apart, however near the marks are.
    """
    middle = math.sqrt(math.prod(axes.get_xlim()))
    by_height = sorted(named, key=lambda mark: -mark.height)
    for i, mark in enumerate(by_height):
        is_highest = i == 0
        side = -MARK_OFFSET
        vertical = "top"
        if is_highest:
            side = MARK_OFFSET
            vertical = "bottom"
        # A name is written towards the middle of the panel, where there is room for it.
        horizontal = "right"
        if mark.batch_size < middle:
            horizontal = "left"
        axes.annotate(
            mark.name,
            (mark.batch_size, mark.height),
            xytext=(0.0, side),
            textcoords="offset points",
            ha=horizontal,
            va=vertical,
            color=mark.colour,
            fontsize=AXIS_POINTS,
            fontweight="bold",
            zorder=8,
            path_effects=_halo(),
        )


def _halo() -> "list[AbstractPathEffect]":
    """Give a white outline of letters, so that they can be read over lines and marks."""
    # As in report/drawing.py, only what draws waits for matplotlib.
    from matplotlib.patheffects import withStroke

    return [withStroke(linewidth=2.5, foreground="white")]


def _bound_mark() -> "Outline":
    """Give the mark of a bound: a small circle around the point, and an arrow upwards from it."""
    # As in report/drawing.py, only what draws waits for matplotlib.
    from matplotlib.path import Path as Outline

    circle = Outline.circle((0.0, 0.0), 0.34)
    corners = [(0.0, 0.34), (0.0, 1.4), (-0.3, 1.0), (0.0, 1.4), (0.3, 1.0)]
    codes = [Outline.MOVETO, Outline.LINETO, Outline.MOVETO, Outline.LINETO, Outline.LINETO]
    return Outline.make_compound_path(circle, Outline(corners, codes))


def _draw_guides(axes: "Axes", result: StudyResult) -> None:
    """Draw B_crit, the line of perfect scaling, and the batch size with the fewest examples."""
    _draw_critical(axes, result)
    examples = perfect_scaling_examples(result)
    if examples is not None and axes.has_data():
        x_limits = axes.get_xlim()
        y_limits = axes.get_ylim()
        # Perfect scaling takes as many examples at every batch size: steps are examples / B.
        ends = np.array(x_limits)
        style: dict[str, Any] = {"color": INK, "linewidth": 0.8, "linestyle": "--", "zorder": 1.6}
        axes.plot(ends, examples / ends, label=SLOPE_TEXT, **style)
        # The line leaves the panel, and matplotlib would make room for it.
        axes.set(xlim=x_limits, ylim=y_limits)
    critical = result.critical_batch_size
    curve = band(result, "steps")
    if critical is not None and critical.b_opt is not None and curve is not None:
        b_opt = critical.b_opt
        log_steps = np.interp(math.log(b_opt), np.log(curve.batch_size), np.log(curve.middle))
        steps = float(np.exp(log_steps))
        text = f"fewest examples: batch size {format_number(b_opt, 2)} ({b_opt_text(critical)})"
        style = {"marker": "D", "s": 34, "facecolor": "white", "edgecolor": BLUE, "zorder": 5.2}
        axes.scatter([b_opt], [steps], label=text, **style)


def _draw_critical(axes: "Axes", result: StudyResult) -> None:
    """Draw B_crit with its interval. An open end of it reaches to the panel's edge."""
    critical = shown_critical(result)
    if critical is None or not axes.has_data():
        return
    start, end = axes.get_xlim()
    value = critical.value
    low = critical.low
    high = critical.high
    text = f"critical batch size {critical_text(critical)}"
    if value is not None and not start <= value <= end:
        text += ", beyond this plot"
    if value is not None:
        axes.axvline(value, color=PURPLE, linewidth=1.3, zorder=2.5, label=text)
        # The key names it once, by its line.
        text = ""
    if low is not None or high is not None:
        style: dict[str, Any] = {"color": PURPLE, "alpha": 0.1, "linewidth": 0, "zorder": -1}
        axes.axvspan(low or start, high or end, label=text, **style)
    # matplotlib would make room for what lies beyond the panel.
    axes.set_xlim(start, end)


def _draw_rates(
    axes: "Axes", trials: Sequence[TrialResult], result: StudyResult, x_limits: tuple[float, float]
) -> None:
    """Draw learning rates over batch size: the trials', the best one, and scaling rules."""
    log_axis(axes, "x", x_limits)
    curve = result.curve
    rates = _shown_rates(trials)
    if curve is not None:
        rates += curve.lr
    if not rates:
        draw_empty(axes, "no trial has run")
        return
    limits = log_limits(rates, pads=(0.1, 0.1))
    log_axis(axes, "y", limits)
    _draw_rates_of_trials(axes, trials, result, limits)
    if curve is not None:
        style: dict[str, Any] = {"color": BLUE, "alpha": 0.18, "linewidth": 0, "zorder": 1.5}
        axes.fill_between(curve.batch_size, curve.lr_low, curve.lr_high, **style)
        axes.plot(curve.batch_size, curve.lr, color=BLUE, linewidth=1.8, zorder=3)
    for line in rate_lines(result, *x_limits):
        dash = FIGURE_DASHES.get(line.name, OTHER_FIGURE_DASH)
        style = {"color": INK, "linewidth": 0.9, "linestyle": dash}
        if line.name == LAW:
            style["linewidth"] = 1.8
        # Two points are a whole line: both axes are logarithmic.
        ends = [line.start, line.end]
        end_rates = [line.lr_at(line.start), line.lr_at(line.end)]
        axes.plot(ends, end_rates, zorder=1.8, label=f"learning rate: {line.words}", **style)
    # The rules leave the panel, and matplotlib would make room for them.
    axes.set(xlim=x_limits, ylim=limits)
    _draw_rates_to_compare(axes, result, limits)


def _draw_rates_to_compare(axes: "Axes", result: StudyResult, limits: tuple[float, float]) -> None:
    """Draw the winner and, if it lies within the panel, the baseline at their learning rates.

    ``limits``: the learning rates at both ends of the panel.
    """
    use = result.winner
    if use is not None:
        style: dict[str, Any] = {"marker": "*", "s": 150, "facecolor": VERMILION}
        style["edgecolor"] = VERMILION
        axes.scatter([use.batch_size], [use.lr], zorder=6, **style)
    baseline = result.baseline
    if baseline is not None and limits[0] <= baseline.lr <= limits[1]:
        face = "white"
        if baseline.status == "reached":
            face = GREEN
        style = {"marker": "s", "s": 42, "facecolor": face, "edgecolor": GREEN, "linewidths": 1.2}
        axes.scatter([baseline.batch_size], [baseline.lr], zorder=5.7, **style)


def _shown_rates(trials: Sequence[TrialResult]) -> list[float]:
    """Give the learning rates that the panel has room for: of trials that reached the target.

    Without such a trial they are those of stopped trials, and without these all.
    """
    reached = list[float]()
    stopped = list[float]()
    for trial in trials:
        if trial.reached:
            reached.append(trial.lr)
        elif trial.status == "stopped":
            stopped.append(trial.lr)
    return reached or stopped or [trial.lr for trial in trials]


def _draw_rates_of_trials(
    axes: "Axes",
    trials: Sequence[TrialResult],
    result: StudyResult,
    limits: tuple[float, float],
) -> None:
    """Draw the learning rate of each trial, with a mark for how it ended.

    Trials on the frontier, the best of each half octave of batch sizes, are drawn larger. Diverged
    trials are always drawn. Others that missed the target are drawn only where no trial reached it.
    ``limits``: the learning rates at both ends of the panel.
    """
    on_frontier = {point.number for point in result.points if not point.stopped}
    frontier = list[TrialResult]()
    reached = list[TrialResult]()
    diverged = list[TrialResult]()
    missed = list[TrialResult]()
    for trial in trials:
        if not limits[0] <= trial.lr <= limits[1]:
            continue
        if trial.status == "diverged":
            diverged.append(trial)
        elif not trial.reached:
            missed.append(trial)
        elif trial.number in on_frontier:
            frontier.append(trial)
        else:
            reached.append(trial)
    # Once a trial has reached the target, those that missed it say nothing of the best learning
    # rate.
    if frontier or reached:
        missed = []
    dots: dict[str, Any] = {"s": 12, "color": GREY, "alpha": 0.75, "linewidths": 0}
    points: dict[str, Any] = {"s": 30, "facecolor": INK, "edgecolor": "white", "zorder": 5}
    crosses: dict[str, Any] = {"s": 16, "color": GREY, "linewidths": 1.0, "label": "diverged"}
    circles: dict[str, Any] = {"s": 14, "facecolors": "none", "edgecolors": INK}
    circles["label"] = "did not reach the target"
    kinds = (
        (reached, dots),
        (frontier, points | {"linewidths": 0.8}),
        (diverged, crosses | {"marker": "x"}),
        (missed, circles | {"linewidths": 0.8}),
    )
    for members, style in kinds:
        # A kind without trials would have an entry in the key all the same.
        if members:
            sizes = [trial.batch_size for trial in members]
            rates = [trial.lr for trial in members]
            axes.scatter(sizes, rates, **style)


def _draw_key(figure: "Figure", axes: "Axes", panels: Sequence["Axes"]) -> None:
    """Draw the key: what the marks of ``panels`` are, in letters that are small enough to fit."""
    named: dict[str, Artist] = {}
    for panel_axes in panels:
        handles, texts = panel_axes.get_legend_handles_labels()
        for handle, text in zip(handles, texts, strict=True):
            lines = textwrap.wrap(text, KEY_WIDTH, max_lines=MAX_KEY_LINES, placeholder=" …")
            # An entry that two panels have stands in the key once.
            named.setdefault("\n".join(lines), handle)
    axes.set_axis_off()
    if not named:
        return
    # The key's axes have their final size only once the figure is laid out.
    layout = figure.get_layout_engine()
    if layout is not None:
        layout.execute(figure)
    room = axes.get_window_extent()
    # Heights of the letters in points, the largest first: the first one that fits is taken.
    for size in KEY_POINTS:
        style: dict[str, Any] = {"fontsize": size, "frameon": False, "labelspacing": 0.5}
        legend = axes.legend(
            named.values(), named.keys(), loc="center left", borderaxespad=0.0, **style
        )
        # The layout is not to shrink the panels for a key that is too large.
        legend.set_in_layout(False)
        box = legend.get_window_extent()
        if box.height <= room.height * KEY_HEIGHT and box.x1 <= figure.bbox.width:
            break
