"""The picture of ``bstune extrapolate``: a panel a quantity, its law with its interval up to the wanted scale."""

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


def draw_extrapolation(found: Extrapolation, path: Path) -> None:
    """Write the picture of an extrapolation with at least one law."""
    width, height = PANEL_INCHES
    save_figure(
        lambda figure: paint_extrapolation(found, figure), (width * len(found.laws), height), path
    )


def paint_extrapolation(found: Extrapolation, figure: "Figure") -> None:
    """Draw a panel for each law on an empty figure."""
    panels = figure.subplots(1, len(found.laws), squeeze=False)[0]
    for axes, (name, law) in zip(panels, found.laws.items(), strict=True):
        _paint_law(axes, found, name, law)


def _paint_law(axes: "Axes", found: Extrapolation, name: Quantity, law: QuantityLaw) -> None:
    rows = [row for row in found.rows if name in row.readings]
    scales = [row.scale for row in rows]
    readings = [row.readings[name] for row in rows]
    at = [scale for scale, _ in law.line]
    low = [one.low for _, one in law.line]
    middle = [one.value for _, one in law.line]
    high = [one.high for _, one in law.line]
    axes.fill_between(at, low, high, color=BLUE, alpha=0.15, linewidth=0)
    axes.plot(at, middle, color=BLUE, linewidth=1.4)
    axes.errorbar(
        scales,
        [one.value for one in readings],
        yerr=_error_bars(readings),
        fmt="o",
        markersize=4,
        color=INK,
        linewidth=1.0,
    )
    wanted = law.wanted
    ends = [[wanted.value - wanted.low], [wanted.high - wanted.value]]
    axes.errorbar([found.wanted], [wanted.value], yerr=ends, fmt="D", markersize=5, color=BLUE)
    log_axis(axes, "x", log_limits([*at, found.wanted], (0.08, 0.08)), decimal=True)
    log_axis(axes, "y", log_limits([*low, *high], (0.05, 0.05)))
    axes.set_xlabel(found.scale)
    axes.set_title(f"{HEADINGS[name]}, {LAW_LEVEL:.0%} interval", fontsize=9)


def _error_bars(readings: Sequence[Reading]) -> list[list[float]]:
    """Give the lengths of error bars, 0 to an end that is open or not told."""
    below, above = list[float](), list[float]()
    for one in readings:
        below.append(0.0 if one.low is None else max(one.value - one.low, 0.0))
        above.append(0.0 if one.high is None else max(one.high - one.value, 0.0))
    return [below, above]
