"""The figure and the page of a comparison."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from bstune.report.compare import Comparison, PowerLaw, critical_of, statements, table
from bstune.report.figure import Panel, curve_seconds, draw_legend, scale_axes
from bstune.report.page import svg, template
from bstune.study.result import StudyResult
from bstune.system import console
from bstune.system.files import whole_file, write_text

INCHES = (11.0, 4.4)
BAND: dict[str, Any] = {"alpha": 0.12, "linewidth": 0}


def write(comparison: Comparison, folder: Path) -> None:
    """Write compare.json, compare.png and compare.html to a folder.

    Raises:
        StudyError: it cannot be written to.
    """
    write_text(folder / "compare.json", comparison.model_dump_json(indent=1))
    with whole_file(folder / "compare.png") as file:
        compare_figure(comparison).savefig(file, format="png", dpi=150)
    write_text(folder / "compare.html", page(comparison))


def page(comparison: Comparison) -> str:
    """Write a comparison as HTML: the figure, the table and what stands below it."""
    return template("compare.html.j2").render(
        comparison=comparison,
        figure=svg(partial(compare_figure, comparison)),
        table=table(comparison),
        statements=statements(comparison),
    )


def compare_figure(comparison: Comparison) -> Figure:
    """Draw the studies' curves over batch size, a colour each, with their bands and bests.

    The first panel has steps to target, with B_crit as a dotted line, the second one training
    seconds. Studies of the best metric have one panel in their place: all studies of a comparison
    are, or none. The last panel has the power law, where there is one. The legend has all studies.
    """
    figure = Figure(figsize=INCHES, layout="constrained")
    first = next(iter(comparison.studies.values()))
    panels = [_metric_panel(first)] if first.seeks_metric else [STEPS, TIME]
    all_axes = figure.subplots(1, len(panels) + (comparison.law is not None), squeeze=False)[0]
    colours = _colours(len(comparison.studies))
    for axes, panel in zip(all_axes, panels, strict=False):
        for (name, result), colour in zip(comparison.studies.items(), colours, strict=True):
            _draw_study(axes, panel, result, name, colour)
        axes.set_ylabel(panel.name, parse_math=False)
        scale_axes(axes, panel)
    if comparison.law is not None:
        _draw_power_law(all_axes[-1], comparison, comparison.law, colours)
    draw_legend(figure, all_axes[:1])
    return figure


STEPS = Panel(
    name="steps to target",
    curve=lambda point: (point.steps_low, point.steps, point.steps_high),
    trial=lambda record: None,
    confirmed=lambda runs: runs.steps,
)
TIME = Panel(
    name="training time to target",
    curve=curve_seconds,
    trial=lambda record: None,
    confirmed=lambda runs: runs.seconds,
    number=console.seconds,
)


def _colours(count: int) -> list[Any]:
    """A colour a study: up to ten that are easy to tell apart, else so many of a rainbow."""
    colormap = colormaps["tab10"] if count <= 10 else colormaps["turbo"].resampled(count)
    return [colormap(place) for place in range(count)]


def _metric_panel(result: StudyResult) -> Panel:
    return Panel(
        name=f"best {result.target.metric}",
        curve=lambda point: (point.steps_low, point.steps, point.steps_high),
        trial=lambda record: None,
        confirmed=lambda runs: runs.metric,
        scale="linear",
    )


def _draw_study(axes: Axes, panel: Panel, result: StudyResult, name: str, colour: Any) -> None:
    """Draw a study's curve, its best and, over steps, its B_crit; what it lacks is left out."""
    sizes = [point.batch_size for point in result.curve]
    # Without a curve the line is empty: the legend has each study.
    low, middle, high = np.reshape([panel.curve(point) for point in result.curve], (-1, 3)).T
    axes.fill_between(sizes, low, high, color=colour, **BAND)
    axes.plot(sizes, middle, color=colour, label=console.plain(name))
    height = None if result.best is None else panel.confirmed(result.best)
    if result.best is not None and height is not None:
        axes.scatter(result.best.batch_size, height, marker="*", s=110, color=colour, zorder=5)
    critical = critical_of(result)
    if panel is STEPS and critical is not None and critical.value is not None:
        axes.axvline(critical.value, color=colour, linestyle=":", linewidth=1.0)


def _draw_power_law(axes: Axes, comparison: Comparison, law: PowerLaw, colours: list[Any]) -> None:
    """Draw B_crit of each study over its size N, and the law as far as it says anything."""
    for (name, result), colour in zip(comparison.studies.items(), colours, strict=True):
        interval = critical_of(result)
        if name in law.values and interval is not None and interval.value is not None:
            value = interval.value
            # An open end has no bar.
            bars = [[value - (interval.low or value)], [(interval.high or value) - value]]
            style: dict[str, Any] = {"fmt": "o", "capsize": 3, "color": colour}
            axes.errorbar(law.values[name], value, bars, **style)
    assert law.exponent.value is not None and law.at_furthest.value is not None  # noqa: PT018, S101
    sizes = np.geomspace(min(law.values.values()), law.furthest, 50)
    on_law = law.at_furthest.value * (sizes / law.furthest) ** law.exponent.value
    axes.plot(sizes, on_law, color="black", linestyle="--", linewidth=0.9)
    axes.set(xscale="log", yscale="log", xlabel=law.over, ylabel="critical batch size, 90%")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(10, subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: console.number(value)))
        axis.set_minor_formatter(NullFormatter())
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.15)
