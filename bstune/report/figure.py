"""The figure ``curve.png``: steps and time to target over batch size, from trial records, their summary and a fit.

matplotlib is imported in functions here, once a figure is drawn: it takes 0.4 s.
"""

import math
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bstune.core.console import format_count, format_number, time_unit
from bstune.core.curve import CurveBand
from bstune.core.figures import BLUE, GREY, INK, PURPLE, VERMILION, save_figure
from bstune.core.records import TrialResult
from bstune.report.answer import PREDICTED, counts_text, critical_text, expected_text
from bstune.report.rows import REGIMES, WINNERS, Row, Summary, trial_row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap, Normalize
    from matplotlib.figure import Figure

FIGURE_INCHES = (13.0, 6.5)
REGIME_TINTS = dict(zip(REGIMES, ("#e6f0f8", "#f7f7f7", "#fcf1e2"), strict=True))
CURVE_LABEL = "S*(B) by all trials, {:.0%} band"
FOOT_MARKERS = {"diverged": ("x", "diverged"), "oom": ("s", "out of memory"), "failed": ("P", "failed")}
COLOUR_LABELS = {"delta": "delta = log2(learning rate / rule(B)), in octaves", "lr": "learning rate"}


def draw_curve(trials: Sequence[TrialResult], summary: Summary, band: CurveBand | None, title: str, path: Path) -> None:
    """Write ``curve.png``: steps to target over batch size on the left, time to target on the right."""
    save_figure(lambda figure: paint_curve(figure, trials, summary, band, title), FIGURE_INCHES, path)


def paint_curve(
    figure: "Figure", trials: Sequence[TrialResult], summary: Summary, band: CurveBand | None, title: str
) -> None:
    """Draw what :func:`draw_curve` writes; target, device and number of trials are added to the title."""
    left, right = figure.subplots(1, 2, gridspec_kw={"wspace": 0.06})
    rows = [trial_row(trial) for trial in trials if trial.reached or trial.status == "censored"]
    sizes = [float(trial.batch_size) for trial in trials] or [1.0]
    times = [row["time_to_target"] or row["time_low"] for row in rows]
    scale, unit = time_unit(min((time for time in times if time), default=1.0))
    # B_crit is in the figure where it is near enough to leave the points room.
    b_crit = (summary["critical"] or {}).get("b_crit")
    near = [b_crit] if b_crit is not None and min(sizes) / 8.0 <= b_crit <= max(sizes) * 8.0 else []
    _draw_panel(left, rows, summary, ("steps_low", "steps", "best_by_steps"), 1.0, [*sizes, *near])
    _draw_panel(right, rows, summary, ("time_low", "time_to_target", "best_by_time"), scale, sizes)
    left.set_ylabel("steps to target S (optimizer steps)")
    right.set_ylabel(f"time to target T = S x tau(B) ({unit} of training)")
    _draw_foot(left, trials)
    _draw_curve(left, summary, band)
    if rows:
        from matplotlib.cm import ScalarMappable  # matplotlib takes 0.4 s to import

        name, norm, colours = _colours(rows)
        figure.colorbar(ScalarMappable(norm, colours), ax=right, label=COLOUR_LABELS[name], pad=0.02, aspect=40)
    pairs = [pair for axes in (left, right) for pair in zip(*axes.get_legend_handles_labels(), strict=True)]
    legend = {label: handle for handle, label in pairs}
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=4, fontsize=8.5, frameon=False)
    lines = [title, "; ".join([f"target {summary['target']}", *summary["devices"], counts_text(summary)])]

    figure.suptitle("\n".join(textwrap.fill(line, 155) for line in lines), fontsize=10.5, parse_math=False)
    _label_regimes(figure, left, summary["regimes"])


def _colours(rows: Sequence[Row]) -> tuple[str, "Normalize", "Colormap"]:
    """Return what the dots' colour shows, its norm and colour map: delta where every row has one, else lr."""
    # 0.4 s, once a figure is drawn
    import matplotlib
    from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize

    deltas = [abs(row["delta"]) for row in rows if row["delta"] is not None]
    if len(deltas) == len(rows) > 0:
        reach = max(1.0, *deltas)
        # grey in the middle: the usual white would vanish on the background
        return "delta", Normalize(-reach, reach), LinearSegmentedColormap.from_list("delta", [BLUE, GREY, VERMILION])
    rates = [row["lr"] for row in rows] or [1.0]
    return "lr", LogNorm(min(rates) / 1.2, max(rates) * 1.2), matplotlib.colormaps["viridis"]


def _draw_panel(
    axes: "Axes", rows: Sequence[Row], summary: Summary, names: tuple[str, str, str], scale: float, sizes: list[float]
) -> None:
    """Draw trials as faint dots, frontier points with (last miss, first hit], bounds as triangles, and the winner."""
    low, high, best = names
    name, norm, colours = _colours(rows)

    def draw(some: Sequence[Row], censored: bool, label: str, **style: Any) -> None:
        end, marker = (low, "^") if censored else (high, "o")
        kept = [row for row in some if row["censored"] == censored and row[end]]
        if kept:
            style |= {"c": [row[name] for row in kept], "norm": norm, "cmap": colours} if some is rows else {}
            x, y = [row["batch_size"] for row in kept], [row[end] / scale for row in kept]
            axes.scatter(x, y, marker=marker, label=label, **style)

    ends = [row[high] or row[low] for row in rows]
    _set_scale(axes, "x", sizes, (0.06, 0.06))
    _set_scale(axes, "y", [end / scale for end in ends if end] or [1.0], (0.27, 0.07))
    axes.set_xlabel("batch size B (examples per optimizer step)")
    axes.grid(color=INK, alpha=0.07, linewidth=0.6)
    draw(rows, False, "trial that reached the target", s=16, alpha=0.65, linewidths=0)
    draw(rows, True, "trial stopped before the target", s=16, alpha=0.65, linewidths=0)
    hit = [row for row in summary["points"] if row[high]]
    starts, stops = [row[low] / scale for row in hit], [row[high] / scale for row in hit]
    axes.vlines([row["batch_size"] for row in hit], starts, stops, colors=INK, linewidth=1.6, zorder=5.5)
    point: dict[str, Any] = {"facecolor": INK, "edgecolor": "white", "linewidths": 0.9, "zorder": 5}
    draw(hit, False, "frontier point, (last miss, first hit]", s=42, **point)
    draw(summary["points"], True, "frontier bound: target not reached by then", s=70, **point)
    if summary[best] is not None and summary[best][WINNERS[best].field]:
        _draw_winner(axes, summary[best], scale, best)


def _set_scale(axes: "Axes", name: str, values: Sequence[float], pads: tuple[float, float]) -> None:
    """Make the axis logarithmic around ``values``, its lower and upper pad in lengths of their span, plain numbers."""
    low, high = math.log(min(values)), math.log(max(values))
    span = max(high - low, math.log(4.0))
    middle = (low + high) / 2.0
    limits = math.exp(middle - (0.5 + pads[0]) * span), math.exp(middle + (0.5 + pads[1]) * span)
    every, ticks = _batch_ticks(*limits) if name == "x" else _decimal_ticks(*limits)
    axes.set(**{f"{name}scale": "log", f"{name}lim": limits})
    axis = axes.xaxis if name == "x" else axes.yaxis
    axis.set_ticks(ticks, [format_number(tick, 6) for tick in ticks])
    axis.set_ticks(every, [""] * len(every), minor=True)


def _batch_ticks(low: float, high: float) -> tuple[list[float], list[float]]:
    """Return the powers of two from ``low`` to ``high``, and the batch sizes, at most eight, that get a label."""
    powers = range(max(0, math.ceil(math.log2(low))), math.floor(math.log2(high)) + 1)
    every = [2.0**power for power in powers]
    if len(every) > 3:
        return every, every[:: math.ceil(len(every) / 8)]
    halves = [3.0 * size for size in (2.0**power for power in range(powers.stop)) if low <= 3.0 * size <= high]
    return every, sorted([*every, *halves])


def _decimal_ticks(low: float, high: float) -> tuple[list[float], list[float]]:
    """Return the round numbers from ``low`` to ``high``, and those that get a label: 1-3, 1-2-5, or finer."""
    decades = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1)

    def within(digits: Iterable[float]) -> list[float]:
        return [digit * 10.0**decade for decade in decades for digit in digits if low <= digit * 10.0**decade <= high]

    choices = [within(digits) for digits in ((1.0, 3.0), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0))]
    return within(range(1, 10)), next((ticks for ticks in choices if len(ticks) >= 5), choices[-1])


def _draw_winner(axes: "Axes", winner: Row, scale: float, key: str) -> None:
    """Mark what is expected of the winner and the range over fresh seeds, and write what it is below, where few are."""
    criterion, fresh = WINNERS[key], winner["confirmed"]
    x, y = winner["batch_size"], winner[criterion.field] / scale
    if fresh is not None and fresh[f"{criterion.merit}_high"] is not None:
        low, high = (fresh[f"{criterion.merit}_{end}"] / scale for end in ("low", "high"))
        axes.vlines([x], [low], [high], colors=VERMILION, linewidth=1.6, zorder=5.8)
    label = f"winner, {PREDICTED}" if fresh is None else "winner, median over fresh seeds"
    axes.scatter([x], [y], marker="*", s=190, facecolor=VERMILION, edgecolor="white", zorder=6, label=label)
    position = axes.transLimits.transform(axes.transScale.transform((x, y)))[0]
    value = f"{criterion.heading}: {expected_text(winner)}"
    text = f"{value}\nB = {format_count(x)}, lr = {format_number(winner['lr'])}"
    side = "left" if position < 0.2 else "right" if position > 0.8 else "center"
    style: dict[str, Any] = {"xytext": (0.0, -11.0), "textcoords": "offset points", "ha": side, "va": "top"}
    style["bbox"] = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 1.0}
    axes.annotate(text, (x, y), color=VERMILION, fontsize=8.5, zorder=7, **style)


def _draw_foot(axes: "Axes", trials: Sequence[TrialResult]) -> None:
    """Mark at the axis's foot the batch sizes of trials whose status has no steps to target."""
    style: dict[str, Any] = {"color": GREY, "s": 18, "linewidths": 1.0, "zorder": 4}
    for status, (marker, label) in FOOT_MARKERS.items():
        sizes = [trial.batch_size for trial in trials if trial.status == status]
        if sizes:
            style |= {"label": f"{label} (at the foot)", "transform": axes.get_xaxis_transform()}
            axes.scatter(sizes, [0.025] * len(sizes), marker=marker, **style)


def _draw_curve(axes: "Axes", summary: Summary, band: CurveBand | None) -> None:
    """Draw the regimes, B_crit with its interval, the curve with its band, and the slope of perfect scaling."""
    limits = {"xlim": axes.get_xlim(), "ylim": axes.get_ylim()}
    low, high = limits["xlim"]
    examples = next((row["examples"] for row in summary["points"] if row["examples"]), None)
    critical = summary["critical"]
    for regime in summary["regimes"]:
        axes.axvspan(regime["from"], regime["to"], color=REGIME_TINTS[regime["name"]], linewidth=0, zorder=-2)
    if critical is not None:
        label = f"critical batch size {critical_text(critical)}"
        if critical["b_crit"] is not None:
            off = "" if low <= critical["b_crit"] <= high else ", beyond this plot"
            axes.axvline(critical["b_crit"], color=PURPLE, linewidth=1.5, zorder=3, label=label + off)
        if critical["b_crit_low"] is not None or critical["b_crit_high"] is not None:
            span: dict[str, Any] = {"color": PURPLE, "alpha": 0.1, "linewidth": 0, "zorder": -1}
            name = label if critical["b_crit"] is None else "_interval"  # matplotlib's legend leaves out an underscore
            axes.axvspan(critical["b_crit_low"] or low, critical["b_crit_high"] or high, label=name, **span)
        else:
            axes.plot([], [], " ", label=label)
        examples = critical["e_min"] or examples
    if band is not None and critical is not None:
        axes.fill_between(band.batch_size, band.low, band.high, color=BLUE, alpha=0.2, linewidth=0, zorder=1.5)
        label = CURVE_LABEL.format(critical["level"])
        axes.plot(band.batch_size, band.steps, color=BLUE, linewidth=1.8, zorder=3, label=label)
    if examples is not None:
        x, label = np.geomspace(low, high, 200), "perfect scaling: slope -1"
        axes.plot(x, examples / x, color=INK, linewidth=0.8, linestyle="--", label=label, zorder=1.6)
    axes.set(**limits)


def _label_regimes(figure: "Figure", axes: "Axes", regimes: Sequence[Row]) -> None:
    """Write each regime's name above its span; a name wider than the visible span is left out."""
    low, high = axes.get_xlim()
    spans = [(row["name"], max(row["from"], low), min(row["to"], high)) for row in regimes]
    labels = [
        (axes.text(math.sqrt(start * end), 1.01, name.replace(" ", "\n", 1), transform=axes.get_xaxis_transform(),
                   ha="center", va="bottom", fontsize=8.5, color="#555555"), start, end)
        for name, start, end in spans if start < end
    ]  # fmt: skip
    figure.draw_without_rendering()
    for label, start, end in labels:
        left, right = (axes.transData.transform((edge, 1.0))[0] for edge in (start, end))
        if label.get_window_extent().width > right - left:
            label.remove()
