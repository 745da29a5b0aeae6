"""The figure of a study: steps, training time and learning rate over batch size.

matplotlib is used without pyplot: nothing of the importing program's figures changes.
"""

import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from bstune.core.records import Record, Status, last_of_chains
from bstune.hardware.roofline import Roofline
from bstune.hardware.survey import Timing
from bstune.report.answer import answer, growth
from bstune.search.findings import CurvePoint
from bstune.study.result import Confirmed, CriticalAt, StudyResult
from bstune.system import console

# Okabe and Ito's colours, which readers with any colour vision tell apart.
BLUE, VERMILION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
GREY = "#8a8a8a"
INCHES = (11.0, 4.2)
# Width with a fourth panel.
WIDE_INCHES = 14.5
# Targets that have a critical batch size, from which on it is drawn over them.
LEAST_TARGETS = 3
# Trials of a kind that an SVG draws as shapes, else as a bitmap.
MOST_SHAPES = 100
# Letters of a line of the title.
TITLE_WIDTH = 115
# Room below and above the curve, the best and the baseline, as a factor.
ROOM = 1.6
# An axis over so many powers of ten has a number at each of them alone, else also at 2 and 5.
MANY_DECADES = 2.5

LINE: dict[str, Any] = {"color": BLUE}
MEDIAN = "median at the best rate, with its 90% band"
# A run in a longer schedule may reach the target in fewer steps, and its trial lies lower.
SHORTEST = "shortest schedule that reaches it, at the best rate, with its 90% band"
BAND: dict[str, Any] = {"color": BLUE, "alpha": 0.18, "linewidth": 0}
LAW: dict[str, Any] = {"color": "black", "linewidth": 0.9, "zorder": 4}
CRITICAL: dict[str, Any] = {"color": PURPLE, "alpha": 0.15, "linewidth": 0, "zorder": 0}
STAR: dict[str, Any] = {"marker": "*", "s": 170, "edgecolors": VERMILION, "zorder": 6}
SQUARE: dict[str, Any] = {"marker": "s", "s": 45, "edgecolors": GREEN, "zorder": 5}
DOT: dict[str, Any] = {"s": 14, "color": GREY, "label": "trial that reached the target"}
BOUND: dict[str, Any] = {
    "s": 18,
    "marker": "^",
    "facecolors": "none",
    "edgecolors": GREY,
    "label": "trial that ended earlier: a bound",
}
CROSS: dict[str, Any] = {"s": 16, "marker": "x", "color": GREY, "label": "trial that diverged"}


@dataclass(frozen=True)
class Panel:
    """What a panel shows over batch size, of the curve, of a trial, and of new seeds."""

    name: str
    curve: Callable[[CurvePoint], tuple[float, float, float]]
    """Low, median and high."""
    trial: Callable[[Record], float | None]
    confirmed: Callable[[Confirmed], float | None]
    number: Callable[[float], str] = console.number
    scale: str = "log"


RATE = Panel(
    name="learning rate",
    curve=lambda point: (point.lr_low, point.lr, point.lr_high),
    trial=lambda record: record.lr,
    confirmed=lambda runs: runs.lr,
)


def curve_figure(
    result: StudyResult, records: Sequence[Record], *, has_title: bool = True
) -> Figure:
    """Draw what a study found, by its question; see :func:`_draw_curve` and :func:`_draw_metric`.

    Args:
        result: with the best and the baseline.
        records: of all trials.
        has_title: line 1 of the answer stands above it.
    """
    figure = Figure(figsize=INCHES, layout="constrained")
    if result.seeks_metric:
        _draw_metric(figure, result, records)
    else:
        _draw_curve(figure, result, records)
    if has_title:
        verdict = answer(result)[0]
        title = textwrap.fill(f"{verdict.label}   {verdict.text}", TITLE_WIDTH)
        figure.suptitle(title, x=0.01, ha="left", fontsize=10, parse_math=False)
    return figure


def _draw_metric(figure: Figure, result: StudyResult, records: Sequence[Record]) -> None:
    """Draw the best metric and the rate over batch size, and the evaluations of new seeds."""
    panel = Panel(
        name=f"best {result.target.metric} in {result.budget}",
        curve=lambda point: (point.steps_low, point.steps, point.steps_high),
        trial=lambda record: result.target.best(record.finite_values or [math.nan]),
        confirmed=lambda runs: runs.metric,
        scale="linear",
    )
    trials = [record for record in last_of_chains(records) if record.role != "new seed"]
    metric_axes, rate_axes, run_axes = figure.subplots(1, 3)
    _draw_panel(metric_axes, panel, result, trials)
    _scatter(rate_axes, RATE, trials, ("diverged",), CROSS)
    _draw_panel(rate_axes, RATE, result, trials)
    for runs, colour in ((result.baseline, GREEN), (result.best, VERMILION)):
        for record in last_of_chains(records):
            if runs is not None and record.repeats == runs.number and record.finite_history:
                steps, values = zip(*record.finite_history, strict=True)
                shares = [step / runs.steps for step in steps]
                run_axes.plot(shares, values, color=colour, linewidth=0.9)
    run_axes.set_xlabel("share of the budget")
    run_axes.set_ylabel(f"{result.target.metric} on new seeds", parse_math=False)
    run_axes.tick_params(labelsize=8)
    run_axes.grid(alpha=0.15)
    draw_legend(figure, (metric_axes, rate_axes))


def _draw_curve(figure: Figure, result: StudyResult, records: Sequence[Record]) -> None:
    """Draw three panels over batch size, all axes logarithmic.

    A fourth has the critical batch size over easier targets, where ``LEAST_TARGETS`` have one.

    Args:
        result: the curve with its band, the law, the best and the baseline.
        records: of all trials; the last of each resumed chain is shown. Runs on new seeds are not,
            as the best and the baseline stand for them.
    """
    steps = Panel(
        name=f"steps to {result.target}",
        curve=lambda point: (point.steps_low, point.steps, point.steps_high),
        trial=lambda record: record.steps_to_target,
        confirmed=lambda runs: runs.steps,
    )
    time = Panel(
        name="training time to the target",
        curve=curve_seconds,
        trial=_trial_seconds,
        confirmed=lambda runs: runs.seconds,
        number=console.seconds,
    )
    trials = [record for record in last_of_chains(records) if record.role != "new seed"]
    over_targets = _over_targets(result)
    if over_targets:
        figure.set_figwidth(WIDE_INCHES)
    steps_axes, time_axes, rate_axes, *further = figure.subplots(1, 3 + bool(over_targets))
    _draw_law(steps_axes, result)
    _draw_panel(steps_axes, steps, result, trials)
    _draw_panel(time_axes, time, result, trials)
    _scatter(rate_axes, RATE, trials, ("diverged",), CROSS)
    _draw_panel(rate_axes, RATE, result, trials)
    text = growth(result)
    if text is not None:
        rate_axes.set_title(text, fontsize=8, parse_math=False)
    for axes in further:
        _draw_over_targets(axes, over_targets)
    draw_legend(figure, (steps_axes, rate_axes))


def curve_seconds(point: CurvePoint) -> tuple[float, float, float]:
    """Give the training seconds to the target: low, median and high."""
    each = point.step_seconds
    return point.steps_low * each, point.steps * each, point.steps_high * each


def _trial_seconds(record: Record) -> float | None:
    each = record.seconds_per_step
    return None if each is None else record.steps_to_target * each


def _draw_panel(axes: Axes, panel: Panel, result: StudyResult, trials: Sequence[Record]) -> None:
    """Draw the trials, the curve, the baseline and the best; a median that is a bound is hollow."""
    _scatter(axes, panel, trials, ("pruned", "missed"), BOUND)
    _scatter(axes, panel, trials, ("reached",), DOT)
    _scatter(axes, panel, trials, ("finished",), DOT | {"label": "trial to its budget's end"})
    heights: list[float] = []
    if result.curve:
        sizes = [point.batch_size for point in result.curve]
        low, middle, high = zip(*map(panel.curve, result.curve), strict=True)
        axes.fill_between(sizes, low, high, **BAND)
        label = MEDIAN
        if any(record.schedule_steps is not None for record in trials):
            label = SHORTEST
        axes.plot(sizes, middle, label=label, **LINE)
        heights += [*low, *high]
    marks = (("baseline", result.baseline, SQUARE), ("best", result.best, STAR))
    for label, runs, style in marks:
        if runs is not None:
            face = "none" if runs.is_bound else style["edgecolors"]
            height = panel.confirmed(runs)
            if height is None:
                continue
            axes.scatter(runs.batch_size, height, facecolors=face, label=label, **style)
            heights.append(height)
    if result.curve:
        # Trials far off the curve would leave it little room.
        axes.set_ylim(min(heights) / ROOM, max(heights) * ROOM)
    axes.set_ylabel(panel.name, parse_math=False)
    scale_axes(axes, panel)


def _scatter(
    axes: Axes,
    panel: Panel,
    trials: Sequence[Record],
    statuses: Sequence[Status],
    style: dict[str, Any],
) -> None:
    """Draw the trials that ended so and have a height; without any the legend has no entry."""
    sizes = []
    heights = []
    for record in trials:
        height = panel.trial(record)
        # A trial without a step has no place on a logarithmic axis.
        if height and record.status in statuses:
            sizes.append(record.batch_size)
            heights.append(height)
    if sizes:
        # A page with a shape for each of 1,000 trials has a megabyte.
        axes.scatter(sizes, heights, rasterized=len(sizes) > MOST_SHAPES, **style)


def _draw_law(axes: Axes, result: StudyResult) -> None:
    """Draw the law whose B_crit is printed, S_min (1 + B_crit/B), which is 2 S_min there."""
    if result.critical is None or not result.curve:
        return
    sizes = [point.batch_size for point in result.curve]
    ends_of_critical = result.critical.interval
    value = ends_of_critical.value
    floor = result.critical.s_min
    if value is not None and floor is not None:
        law = [floor * (1.0 + value / size) for size in sizes]
        axes.plot(sizes, law, linestyle="--", label="law S_min (1 + B_crit/B)", **LAW)
        axes.axhline(2.0 * floor, linestyle=":", label="2 S_min", **LAW)
    # An end that is open reaches to the panel's edge.
    low = max(ends_of_critical.low or sizes[0], sizes[0])
    high = min(ends_of_critical.high or sizes[-1], sizes[-1])
    is_known = ends_of_critical.low is not None or ends_of_critical.high is not None
    if is_known and low < high:
        axes.axvspan(low, high, label="critical batch size B_crit, 90%", **CRITICAL)


def _over_targets(result: StudyResult) -> list[CriticalAt]:
    """The easier targets and the study's own, as far as B_crit is known there; none for few."""
    found = list(result.over_targets)
    goal = result.target.goal
    if found and goal is not None and result.critical is not None:
        found.append(CriticalAt(goal=goal, interval=result.critical.interval))
    known = [one for one in found if one.interval.value is not None]
    return known if len(known) >= LEAST_TARGETS else []


def _draw_over_targets(axes: Axes, points: Sequence[CriticalAt]) -> None:
    """Draw B_crit over targets, side by side, that get harder to the right."""
    intervals = [(one.interval.low, one.interval.value, one.interval.high) for one in points]
    low, values, high = np.array(intervals, dtype=float).T
    places = range(len(points))
    axes.errorbar(places, values, (values - low, high - values), fmt="o-", capsize=3, color=PURPLE)
    axes.set(yscale="log", xlabel="target", ylabel="critical batch size, 90%")
    axes.set_xticks(places, [console.number(one.goal) for one in points])
    axes.yaxis.set_major_locator(LogLocator(2, numticks=9))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.15)


def scale_axes(axes: Axes, panel: Panel) -> None:
    """Scale both axes, with batch sizes at powers of two and plain numbers."""
    axes.set(xscale="log", yscale=panel.scale, xlabel="batch size")
    axes.xaxis.set_major_locator(LogLocator(2, numticks=9))
    if panel.scale == "log":
        low, high = axes.get_ylim()
        has_many = math.log10(high / low) > MANY_DECADES
        axes.yaxis.set_major_locator(LogLocator(10, subs=(1.0,) if has_many else (1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:,.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: panel.number(value)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter(NullFormatter())
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.15)


def draw_legend(figure: Figure, panels: Sequence[Axes]) -> None:
    """Draw one legend for all panels, each entry once."""
    entries: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    style: dict[str, Any] = {"loc": "outside lower center", "ncols": 4, "frameon": False}
    if entries:
        legend = figure.legend(entries.values(), entries.keys(), fontsize=8, **style)
        # A study may be called a$b$.
        for text in legend.get_texts():
            text.set_parse_math(False)


def roofline_figure(roofline: Roofline, timings: Sequence[Timing]) -> Figure:
    """Draw the roofline, with a point a batch size that was timed; both axes logarithmic.

    For a study's roofline.png and its page; there is one timing at least.
    """
    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    axes = figure.add_subplot()
    intensities = []
    rates = []
    for timing in timings:
        intensity = roofline.intensity(timing.batch_size)
        rate = roofline.flops(timing.batch_size) / timing.seconds
        label = f"{timing.batch_size:,}"
        axes.annotate(label, (intensity, rate), (4, -10), textcoords="offset points")
        intensities.append(intensity)
        rates.append(rate)
    ends = min(*intensities, roofline.ridge) / 3, max(*intensities, roofline.ridge) * 3
    x = np.geomspace(*ends, 100)
    axes.plot(x, np.minimum(roofline.peak, roofline.bandwidth * x), color=GREY)
    axes.plot(intensities, rates, color=BLUE, marker="o", markersize=4, linewidth=0.8)
    axes.axvline(roofline.ridge, color=VERMILION, linewidth=0.8, linestyle=":")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="FLOPs per byte",
        ylabel="FLOP/s",
        title="training steps under the measured roofline, by batch size",
    )
    return figure
