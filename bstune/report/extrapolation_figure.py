"""The picture of ``bstune extrapolate``: a panel a quantity, its law up to the wanted scale."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bstune.core.scale_law import LAW_LEVEL
from bstune.report.drawing import BLUE, INK, log_axis, log_limits, save_figure
from bstune.report.extrapolation import HEADINGS, Extrapolation, Quantity, QuantityLaw, Reading

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANEL_INCHES = (3.6, 3.0)


def draw_extrapolation(extrapolation: Extrapolation, path: Path) -> None:
    """Write the picture of an extrapolation, which must have at least one law."""
    width, height = PANEL_INCHES
    save_figure(
        lambda figure: paint_extrapolation(extrapolation, figure),
        (width * len(extrapolation.laws), height),
        path,
    )


def paint_extrapolation(extrapolation: Extrapolation, figure: "Figure") -> None:
    """Draw a panel for each law, side by side, on an empty figure."""
    panels = figure.subplots(1, len(extrapolation.laws), squeeze=False)[0]
    for axes, (name, law) in zip(panels, extrapolation.laws.items(), strict=True):
        _paint_law(axes, extrapolation, name, law)


def _paint_law(
    axes: "Axes", extrapolation: Extrapolation, name: Quantity, law: QuantityLaw
) -> None:
    """Draw a quantity's law with its interval, the studies' values, and the prediction."""
    line_scales = list[float]()
    low = list[float]()
    middle = list[float]()
    high = list[float]()
    for scale, estimate in law.line:
        line_scales.append(scale)
        low.append(estimate.low)
        middle.append(estimate.value)
        high.append(estimate.high)
    axes.fill_between(line_scales, low, high, color=BLUE, alpha=0.15, linewidth=0)
    axes.plot(line_scales, middle, color=BLUE, linewidth=1.4)
    scales = list[float]()
    values = list[float]()
    readings = list[Reading]()
    for row in extrapolation.rows:
        reading = row.readings.get(name)
        if reading is not None:
            scales.append(row.scale)
            values.append(reading.value)
            readings.append(reading)
    bars = _error_bars(readings)
    axes.errorbar(scales, values, yerr=bars, fmt="o", markersize=4, color=INK, linewidth=1.0)
    wanted = law.wanted
    # The prediction has another mark than the studies' values.
    bars = [[wanted.value - wanted.low], [wanted.high - wanted.value]]
    axes.errorbar(
        [extrapolation.wanted], [wanted.value], yerr=bars, fmt="D", markersize=5, color=BLUE
    )
    log_axis(
        axes, "x", log_limits([*line_scales, extrapolation.wanted], pads=(0.08, 0.08)), decimal=True
    )
    log_axis(axes, "y", log_limits([*low, *high], pads=(0.05, 0.05)))
    axes.set_xlabel(extrapolation.scale)
    axes.set_title(f"{HEADINGS[name]}, {LAW_LEVEL:.0%} interval", fontsize=9)


def _error_bars(readings: Sequence[Reading]) -> list[list[float]]:
    """Give the lengths of error bars below and above each value. An open end has length 0."""
    below = list[float]()
    above = list[float]()
    for reading in readings:
        low = reading.value if reading.low is None else reading.low
        high = reading.value if reading.high is None else reading.high
        # matplotlib refuses a negative length: a reading may lie outside of its interval.
        below.append(max(reading.value - low, 0.0))
        above.append(max(high - reading.value, 0.0))
    return [below, above]
