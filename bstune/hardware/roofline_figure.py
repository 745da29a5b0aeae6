"""The figure ``roofline.png``: the device's two ceilings with a workload's layers at several batch sizes."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bstune.errors import HardwareError
from bstune.figure import BLUE, FIGURE_DPI, GREY, INK, PURPLE, VERMILION
from bstune.hardware.device_limits import DeviceLimits
from bstune.hardware.roofline import (
    Achieved,
    LayerCost,
    StepCost,
    achieved,
    allowed_seconds,
    intensity,
    layer_seconds,
    turning_batch_size,
)
from bstune.report import format_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FIGURE_WIDTH, ROOF_HEIGHT, ROW_HEIGHT = 11.0, 3.6, 0.24  # inches
MOST_ROWS = 14  # of layers: those that take the most of the time allowed


def draw_roofline(
    cost: StepCost,
    limits: DeviceLimits,
    batch_sizes: Sequence[int],
    measured: Iterable[tuple[int, float]],
    title: str,
    path: Path,
) -> None:
    """Write the roofline: attainable FLOP/s over FLOPs per byte, layers and the whole step on it, measured steps below.

    Args:
        cost: of the step.
        limits: of the device.
        batch_sizes: those at which layers and step are drawn, at least one; each layer is a line through them.
        measured: (B, tau(B) in seconds) pairs; none are drawn for none.
        title: names the workload; device and ceilings are added.
        path: written under a temporary name beside it, then renamed.

    Raises:
        HardwareError: for no batch size, one below 1, or seconds that are not positive.
    """
    import matplotlib.style

    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with matplotlib.style.context(["default", {"font.size": 9.0}]):
        try:
            figure = roofline_figure(cost, limits, batch_sizes, achieved(cost, limits, measured), title)
            figure.savefig(temporary, dpi=FIGURE_DPI, format="png")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def roofline_figure(
    cost: StepCost, limits: DeviceLimits, batch_sizes: Sequence[int], steps: Sequence[Achieved], title: str
) -> "Figure":
    """Return the figure that :func:`draw_roofline` writes, drawn with matplotlib's current settings."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if not batch_sizes:
        raise HardwareError("the roofline needs at least one batch size to draw the layers at")
    sizes = sorted(set(batch_sizes))
    layers = [layer for layer in cost.layers if layer.flops.at(sizes[-1]) and layer.bytes.at(sizes[-1])]
    layers = sorted(layers, key=lambda layer: -layer_seconds(layer, limits, sizes[-1]))[:MOST_ROWS]
    rows = len(layers) + 1
    figure = Figure(figsize=(FIGURE_WIDTH, ROOF_HEIGHT + ROW_HEIGHT * rows + 1.4), dpi=FIGURE_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    heights = [ROOF_HEIGHT, ROW_HEIGHT * rows]
    roof, ranges = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": heights})
    parts: list[LayerCost | StepCost] = [cost, *layers]
    points = [[_point(part, size) for size in sizes] for part in parts]
    _draw_roof(roof, limits, points)
    _draw_step(roof, cost, limits, points[0], sizes, steps)
    _draw_ranges(ranges, limits, points, sizes, _names(cost, layers, limits, sizes[-1]))
    for axes in (roof, ranges):
        axes.axvline(limits.ridge, color=GREY, linewidth=0.9, linestyle="--", zorder=1)
        axes.grid(color=INK, alpha=0.07, linewidth=0.6)
    figure.suptitle(_title(cost, limits, title), fontsize=10.5, parse_math=False)
    handles, labels = roof.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8.5, frameon=False)
    return figure


def _title(cost: StepCost, limits: DeviceLimits, title: str) -> str:
    turning = turning_batch_size(cost, limits.ridge)
    turns = "memory-bound at any batch size" if turning is None else f"compute-bound from batch size {turning:,.0f} on"
    flops, moved = (format_number(rate / 1e9) for rate in (limits.flops_per_second, limits.bytes_per_second))
    return (
        f"{title}: the step is {turns}, by its shapes\n"
        f"{limits.device}; measured ceilings: {flops} GFLOP/s in {limits.dtype}, {moved} GB/s"
    )


def _names(cost: StepCost, layers: Sequence[LayerCost], limits: DeviceLimits, size: int) -> list[str]:
    """Return the rows' names, each layer with its share of the time that the roofline allows the step."""
    whole = allowed_seconds(cost, limits, size)
    shares = [layer_seconds(layer, limits, size) / whole for layer in layers]
    named = [f"{layer.name} ({layer.kind}), {share:.0%}" for layer, share in zip(layers, shares, strict=True)]
    return [f"whole step; layers without FLOPs or not listed take {max(0.0, 1.0 - sum(shares)):.0%}", *named]


def _point(part: LayerCost | StepCost, size: int) -> float:
    return intensity(part, size) or 0.0


def _attainable(limits: DeviceLimits, x: float) -> float:
    return min(limits.flops_per_second, limits.bytes_per_second * x) / 1e9


def _draw_roof(axes: "Axes", limits: DeviceLimits, points: Sequence[Sequence[float]]) -> None:
    every = [limits.ridge, *(value for row in points for value in row if value)]
    low, high = min(every) / 2.0, max(every) * 2.0
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylabel="attainable GFLOP/s")
    axes.set_ylim(_attainable(limits, low) / 1.5, limits.flops_per_second / 1e9 * 2.5)  # room for labels above the roof
    x = [low, limits.ridge, high]
    axes.plot(x, [_attainable(limits, value) for value in x], color=INK, linewidth=1.8, label="ceilings of the device")
    for row in points[1:]:
        axes.plot(row, [_attainable(limits, value) for value in row], "o", color=BLUE, markersize=4, alpha=0.5)
    axes.annotate(
        f"ridge: {format_number(limits.ridge)} FLOPs per byte",
        (limits.ridge, 0.03),
        xycoords=("data", "axes fraction"),
        xytext=(5.0, 0.0),
        textcoords="offset points",
        color="#555555",
        fontsize=8.5,
    )


def _draw_step(
    axes: "Axes",
    cost: StepCost,
    limits: DeviceLimits,
    points: Sequence[float],
    sizes: Sequence[int],
    steps: Sequence[Achieved],
) -> None:
    """Draw the whole step on the roof, and what was measured below it."""
    axes.plot([], [], "o", color=BLUE, markersize=4, label="layers, where the roofline puts them")
    roof = [_attainable(limits, value) for value in points]
    axes.plot(points, roof, "D", color=VERMILION, markersize=6.5, label="whole step, by the sum of its bytes")
    for at in {0, len(sizes) - 1}:
        axes.annotate(
            f"B = {sizes[at]:,}",
            (points[at], roof[at]),
            xytext=(0.0, 8.0),
            textcoords="offset points",
            ha="left" if at else "right",
            color=VERMILION,
            fontsize=8.5,
        )
    if not steps:
        return
    x = [_point(cost, row.batch_size) for row in steps]
    y = [row.share_of_peak * limits.flops_per_second / 1e9 for row in steps]
    axes.set_ylim(bottom=min(axes.get_ylim()[0], min(y) / 2.5))  # room for a label below
    axes.plot(x, y, "*-", color=PURPLE, markersize=10, linewidth=0.8, label="whole step, measured: share of peak")
    for at in {0, len(steps) - 1}:
        axes.annotate(
            f"B = {steps[at].batch_size:,}: {steps[at].share_of_peak:.0%}",
            (x[at], y[at]),
            xytext=(0.0, -9.0),
            textcoords="offset points",
            ha="left" if at else "right",
            va="top",
            color=PURPLE,
            fontsize=8.5,
        )


def _draw_ranges(
    axes: "Axes",
    limits: DeviceLimits,
    points: Sequence[Sequence[float]],
    sizes: Sequence[int],
    names: Sequence[str],
) -> None:
    """Draw one row for the step and for each layer: FLOPs per byte from the smallest to the largest batch size."""
    for row, values in enumerate(points):
        colour = BLUE if row else VERMILION
        axes.plot(values, [row] * len(values), color=colour, linewidth=1.2, alpha=0.6)
        areas = [14.0 + 46.0 * at / max(1, len(sizes) - 1) for at in range(len(sizes))]
        axes.scatter(values, [row] * len(values), s=areas, color=colour, zorder=3)
    axes.set_yticks(range(len(names)), names, fontsize=8.5)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.axvspan(limits.ridge, axes.get_xlim()[1], color="#e6f0f8", linewidth=0, zorder=-2)
    batches = ", ".join(f"{size:,}" for size in sizes)
    axes.set_xlabel(
        f"FLOPs per byte moved; dots grow with the batch size B = {batches}; shaded: compute-bound\n"
        f"behind each layer: its share of the time that the roofline allows a step at B = {sizes[-1]:,}"
    )
