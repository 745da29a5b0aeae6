"""Steps to target over batch size, workload by workload, and all of them on one law.

After figure 1 of Shallue et al. 2018 (arXiv 1811.03600): at small batch sizes steps halve as the
batch size doubles (perfect scaling), then less (diminishing returns), and at last not at all
(maximal data parallelism). Workloads differ by orders of magnitude in both directions, so the last
panel divides batch sizes by B_crit, and steps by those of perfect scaling, S_min B_crit/B. There
the law S* = S_min (1 + B_crit/B) is 1 + B/B_crit for all of them. That quotient is E(B)/E_min, too:
how many times the fewest examples a batch size takes (McCandlish et al. 2018, arXiv 1812.06162,
eq. 2.11 and 2.12).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from bstune.core.curve import SLOPE_RATIO
from bstune.report.compare_figure import GRID, look_of
from bstune.report.compared_study import Compared
from bstune.report.drawing import INK, log_axis, log_limits
from bstune.system.console import format_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

Array = NDArray[np.float64]
COLUMNS = 3
PANEL_INCHES = (2.6, 2.1)
LAW_INCHES = 3.4
# The colour behind the two outer regimes.
REGIME_SHADE = "#f0f0f0"


@dataclass(frozen=True)
class PanelCurve:
    """The steps to target of one workload over batch size."""

    name: str
    point_sizes: Array
    """The batch sizes of the frontier that reached the target, rising, (n,)."""
    point_steps: Array
    """The optimizer steps of these points, (n,)."""
    batch_size: Array
    """The batch sizes of the curve, rising, (m,); m is 0 where there is no curve."""
    steps: Array
    """S*(B) at the curve's batch sizes, (m,)."""
    steps_low: Array
    """The lower end of its interval, (m,)."""
    steps_high: Array
    """The upper end of its interval, (m,)."""
    b_crit: float | None
    """In examples; None where it is not known."""
    s_min: float | None
    """Fewest steps at any batch size; None where it is not known."""

    @property
    def least_examples(self) -> float | None:
        """E_min = S_min B_crit, the examples to target in perfect scaling; None if not known."""
        if self.b_crit is None or self.s_min is None:
            return None
        return self.s_min * self.b_crit

    @property
    def shows_perfect_scaling(self) -> bool:
        """Whether a batch size of at most B_crit/9 reached the target: slope -0.9 or steeper."""
        if self.b_crit is None or not self.point_sizes.size:
            return False
        return bool(self.point_sizes[0] <= self.b_crit / SLOPE_RATIO)

    @property
    def shows_maximal_data_parallelism(self) -> bool:
        """Whether a batch size of at least 9 B_crit reached the target: slope -0.1 or flatter."""
        if self.b_crit is None or not self.point_sizes.size:
            return False
        return bool(self.point_sizes[-1] >= self.b_crit * SLOPE_RATIO)


def panel_curve(study: Compared) -> PanelCurve:
    """Make the curve of a study that is compared with others."""
    return PanelCurve(
        name=study.name,
        point_sizes=np.array([point.batch_size for point in study.points], dtype=np.float64),
        point_steps=np.array([point.steps for point in study.points], dtype=np.float64),
        batch_size=study.batch_size,
        steps=study.steps,
        steps_low=study.steps_low,
        steps_high=study.steps_high,
        b_crit=study.b_crit,
        s_min=study.s_min,
    )


def over_perfect_scaling(
    curve: PanelCurve, batch_size: Array, steps: Array
) -> tuple[Array, Array] | None:
    """Give B/B_crit, and steps over those of perfect scaling, E_min/B, each (n,).

    ``batch_size`` and ``steps``, each (n,), are points of the curve. None where B_crit or S_min is
    not known.
    """
    if curve.b_crit is None or curve.least_examples is None:
        return None
    return batch_size / curve.b_crit, steps * batch_size / curve.least_examples


def distance_from_law(curves: Iterable[PanelCurve]) -> float | None:
    """Give how far the points lie off the law: the root mean square of log(S over the law's S).

    Each workload counts alike, however many points it has. None where no workload has points,
    B_crit and S_min.
    """
    squares = list[float]()
    for curve in curves:
        placed = over_perfect_scaling(curve, curve.point_sizes, curve.point_steps)
        if placed is not None and curve.point_sizes.size:
            # In units of B_crit and of perfect scaling the law is 1 + B.
            sizes, excess = placed
            squares.append(float(np.mean(np.log(excess / (1.0 + sizes)) ** 2)))
    if not squares:
        return None
    return math.sqrt(sum(squares) / len(squares))


def law_text(curves: Sequence[PanelCurve]) -> str | None:
    """Say how near the points lie to the law, and how many curves show its outer regimes.

    None where no curve has B_crit and S_min.
    """
    distance = distance_from_law(curves)
    if distance is None:
        return None
    perfect = sum(curve.shows_perfect_scaling for curve in curves)
    flat = sum(curve.shows_maximal_data_parallelism for curve in curves)
    return (
        f"the points lie within {distance:.0%} of one law (root mean square); perfect scaling "
        f"shows on {perfect} of {len(curves)} studies, maximal data parallelism on {flat}"
    )


def panel_inches(count: int) -> tuple[float, float]:
    """Give the width and the height of the figure of ``count`` workloads."""
    width, height = PANEL_INCHES
    return COLUMNS * width, math.ceil(count / COLUMNS) * height + LAW_INCHES


def paint_panel(figure: "Figure | SubFigure", curves: Sequence[PanelCurve]) -> None:
    """Draw a panel for each workload, and below them all of them on one law."""
    _width, height = panel_inches(len(curves))
    (top,), (foot,) = figure.subfigures(
        2, 1, squeeze=False, height_ratios=[height - LAW_INCHES, LAW_INCHES]
    )
    panels = top.subplots(math.ceil(len(curves) / COLUMNS), COLUMNS, squeeze=False).ravel()
    for place, curve in enumerate(curves):
        _draw_workload(panels[place], curve, place)
    for unused in panels[len(curves) :]:
        unused.set_axis_off()
    # All panels share labels: a small one has no room for its own.
    top.supxlabel(
        "batch size B (examples per optimizer step); dashed: perfect scaling, dotted: B_crit",
        fontsize=8.5,
        parse_math=False,
    )
    top.supylabel("steps to target S", fontsize=8.5)
    _draw_law(foot.subplots(), curves)


def _draw_workload(axes: "Axes", curve: PanelCurve, place: int) -> None:
    """Draw S(B) of one workload beside perfect scaling, with B_crit and the outer regimes.

    ``place`` is that of the workload among all, which sets its colour.
    """
    colour, marker = look_of(place)
    axes.set_title(curve.name, fontsize=8.5, loc="left", parse_math=False)
    axes.tick_params(labelsize=7.0)
    if not curve.point_sizes.size:
        axes.text(0.5, 0.5, "not reached", transform=axes.transAxes, ha="center", va="center")
        axes.set(xticks=[], yticks=[])
        return
    axes.fill_between(
        curve.batch_size, curve.steps_low, curve.steps_high, color=colour, alpha=0.2, linewidth=0
    )
    axes.plot(curve.batch_size, curve.steps, color=colour, linewidth=1.2)
    axes.scatter(curve.point_sizes, curve.point_steps, s=9, color=colour, marker=marker, zorder=3)
    size_limits = log_limits(curve.point_sizes, (0.06, 0.06))
    # A small panel has no room for powers of two.
    log_axis(axes, "x", size_limits, decimal=True)
    log_axis(axes, "y", log_limits([*curve.point_steps, *curve.steps], (0.08, 0.08)))
    axes.grid(**GRID)
    if curve.b_crit is None:
        return
    _shade_regimes(axes, curve.b_crit)
    axes.axvline(curve.b_crit, color=INK, linewidth=0.8, linestyle=":")
    if curve.least_examples is not None:
        # Perfect scaling takes E_min at every batch size: S = E_min/B.
        sizes = np.array(size_limits)
        axes.plot(sizes, curve.least_examples / sizes, color=INK, linewidth=0.9, linestyle="--")
    axes.annotate(
        f"B_crit {format_number(curve.b_crit, 2)}",
        (0.97, 0.95),
        xycoords="axes fraction",
        ha="right",
        va="top",
        fontsize=7.0,
        parse_math=False,
    )


def _shade_regimes(axes: "Axes", b_crit: float) -> None:
    """Shade perfect scaling and maximal data parallelism, as far as the axis shows them.

    They are the batch sizes far below and far above B_crit, by the factor SLOPE_RATIO: there log
    steps over log batch size have nearly the slope -1, and nearly the slope 0.
    """
    smallest, largest = axes.get_xlim()
    for start, end in ((smallest, b_crit / SLOPE_RATIO), (b_crit * SLOPE_RATIO, largest)):
        if start < end:
            axes.axvspan(start, end, color=REGIME_SHADE, linewidth=0, zorder=0)


def _draw_law(axes: "Axes", curves: Sequence[PanelCurve]) -> None:
    """Draw steps over those of perfect scaling, over B/B_crit: points, curves and the law."""
    axes.set(xlabel="B / B_crit", ylabel="S / S of perfect scaling")
    all_sizes = list[Array]()
    all_excess = list[Array]()
    for place, curve in enumerate(curves):
        placed_points = over_perfect_scaling(curve, curve.point_sizes, curve.point_steps)
        placed_curve = over_perfect_scaling(curve, curve.batch_size, curve.steps)
        # Without B_crit a workload has no place on the law.
        if placed_points is None or placed_curve is None:
            continue
        colour, marker = look_of(place)
        axes.scatter(*placed_points, s=12, color=colour, marker=marker, label=curve.name, zorder=3)
        axes.plot(*placed_curve, color=colour, linewidth=1.0, alpha=0.7, zorder=4)
        sizes, excess = placed_points
        all_sizes.append(sizes)
        all_excess.append(excess)
    if not all_sizes:
        axes.text(0.5, 0.5, "no B_crit is known", transform=axes.transAxes, ha="center")
        axes.set(xticks=[], yticks=[])
        return
    size_limits = log_limits(np.concatenate(all_sizes), (0.04, 0.04))
    law_sizes = np.geomspace(*size_limits, 100)
    law = 1.0 + law_sizes
    # The law lies in front of the curves: a curve that obeys the law would hide it.
    axes.plot(law_sizes, law, color=INK, linewidth=1.0, linestyle="--", zorder=5)
    log_axis(axes, "x", size_limits, decimal=True)
    log_axis(axes, "y", log_limits(np.concatenate([*all_excess, law]), (0.05, 0.08)))
    # The axis is in units of B_crit.
    _shade_regimes(axes, b_crit=1.0)
    axes.grid(**GRID)
    axes.annotate(
        "1 + B/B_crit",
        (law_sizes[-1], law[-1]),
        xytext=(-4.0, -2.0),
        textcoords="offset points",
        ha="right",
        va="bottom",
        fontsize=8.0,
        parse_math=False,
    )
    axes.set_title("All on one law; shaded: outer regimes", fontsize=9.0, loc="left")
    axes.legend(frameon=False, fontsize=7.0, ncols=2, loc="upper left")
