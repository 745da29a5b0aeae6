"""The figure ``curve.png``: steps and time to target, and the learning rate, over batch size.

It is drawn from ``curve.json``'s mapping and the trials' records; its words are those of ``answer.py``. matplotlib is
imported in functions here, once a figure is drawn: it takes 0.4 s.
"""

import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bstune.core.records import TrialResult
from bstune.report.answer import (
    RULE_WORDS,
    answer,
    critical_text,
    fresh_text,
    interval_text,
    range_text,
)
from bstune.report.drawing import (
    BLUE,
    GREY,
    GUIDE,
    INK,
    PAGE_DPI,
    PAGE_INCHES,
    PURPLE,
    VERMILION,
    Label,
    figure_of,
    log_axis,
    log_limits,
    place_labels,
    save_figure,
)
from bstune.report.rows import WINNERS, Row, Summary, trial_row
from bstune.system.console import format_count, format_number, format_seconds, plural, time_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.path import Path as Outline

FIGURE_INCHES = PAGE_INCHES, 7.2
TITLE_SIZE, SIZE, SMALL = 10.5, 9.0, 8.0  # of letters, in points
TITLE_WIDTHS = (112, 90, 70, 50, 40)  # in letters: the first that fits
PANEL_WIDTH = 66
POINT_TEXT = "fewest examples near its batch size;\nbar: last miss to first hit"
NEAR = 4.0  # times the batch sizes that reached the target: a B_crit this near is in the figure
GROWTH, MAX_GROWTHS = (
    0.15,
    8,
)  # of a panel's lower end, in shares of its height, until its labels have room
USE_TEXT = "the one to use; bar: over fresh seeds, if any ran"
SLOPE_TEXT = "twice the batch,\nhalf the steps"
POWERS = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}  # of the batch size, by the rules that are drawn


@dataclass(frozen=True)
class _Quantity:
    """What a panel shows over batch size: fields of a row and of its fresh seeds, and the unit."""

    merit: str
    value: str
    low: str
    winner: str
    unit: float
    text: Callable[[float], str]


def draw_curve(trials: Sequence[TrialResult], summary: Summary, *paths: Path) -> None:
    """Write ``curve.png``, 900 pixels wide, and ``curve.svg``, by the suffix of each path."""
    save_figure(
        lambda figure: _paint(figure, trials, summary),
        FIGURE_INCHES,
        *paths,
        dots_per_inch=PAGE_DPI,
    )


def curve_figure(trials: Sequence[TrialResult], summary: Summary) -> "Figure":
    """Return what :func:`draw_curve` writes."""
    return figure_of(lambda figure: _paint(figure, trials, summary), FIGURE_INCHES, PAGE_DPI)


def _paint(figure: "Figure", trials: Sequence[TrialResult], summary: Summary) -> None:
    panels = figure.subplots(2, 2, gridspec_kw={"height_ratios": [1.0, 0.72]})
    left, right, rates, key = panels.flat
    rows = [trial_row(trial) for trial in trials if trial.reached or trial.status == "censored"]
    reached = [row for row in rows if not row["censored"]]
    x_limits = _sizes(
        [row["batch_size"] for row in reached or rows] or [trial.batch_size for trial in trials],
        summary,
    )
    times = [row["time_to_target"] or row["time_low"] for row in reached or rows]
    unit, unit_name = time_unit(min((time for time in times if time), default=1.0))
    steps = _Quantity(
        "steps",
        "steps",
        "steps_low",
        "best_by_steps",
        1.0,
        lambda value: plural(round(value), "step"),
    )
    time = _Quantity("time", "time_to_target", "time_low", "best_by_time", unit, format_seconds)
    headed = {
        left: f"steps to {summary.get('target', 'target')}, S(B)",
        right: f"time to target, S(B) x tau(B), {unit_name} of training",
        rates: textwrap.fill(f"learning rate {_lr_text(summary)}", PANEL_WIDTH),
    }
    labels = {
        left: [*_draw_panel(left, rows, summary, steps, x_limits), *_draw_guides(left, summary)],
        right: [
            *_draw_panel(right, rows, summary, time, x_limits),
            *_draw_critical(right, summary, named=False),
        ],
        rates: _draw_rates(rates, trials, summary, x_limits),
    }
    for axes, title in headed.items():
        axes.set_title(title, loc="left", fontsize=SIZE, parse_math=False)
        axes.set_xlabel("batch size B (examples per step)", fontsize=SIZE, labelpad=1.0)
        axes.tick_params(labelsize=SMALL)
        axes.grid(color=INK, alpha=0.07, linewidth=0.6)
    _draw_key(key, (left, right, rates))
    _set_title(figure, summary)
    _place(figure, labels)


def _place(figure: "Figure", labels: dict["Axes", list[Label]]) -> None:
    """Write the labels where they cover no data; a panel without room for them gets more of it below."""
    layout = figure.get_layout_engine()
    assert layout is not None  # noqa: S101  # figure_of's; a whole draw would take twice as long
    for attempt in range(MAX_GROWTHS + 1):
        layout.execute(figure)
        written = {axes: place_labels(axes, some, SMALL) for axes, some in labels.items()}
        crowded = [axes for axes, (_, room) in written.items() if not room]
        if not crowded or attempt == MAX_GROWTHS:
            break
        for artist in chain.from_iterable(artists for artists, _ in written.values()):
            artist.remove()
        for axes in crowded:
            low, high = axes.get_ylim()
            log_axis(axes, "y", (low * (low / high) ** GROWTH, high))
    figure.set_layout_engine("none")  # the places are those of this layout


def _set_title(figure: "Figure", summary: Summary) -> None:
    """Make the answer the title, broken where it would be wider than the figure; what was asked stands below it."""
    found = answer(summary)
    asked = found.title.removeprefix(f"{summary.get('workload')} · ")
    title = figure.suptitle("", x=0.01, ha="left", fontsize=TITLE_SIZE, parse_math=False)
    for width in TITLE_WIDTHS:
        title.set_text("\n".join(textwrap.fill(line, width) for line in (found.headline, asked)))
        if title.get_window_extent().width < 0.98 * figure.bbox.width:
            break


def _lr_text(summary: Summary) -> str:
    """Return what is known of the best learning rate over batch size, its first sentence."""
    text = next(
        (texts[0] for label, texts in answer(summary).lines if label == "LR"), "of the trials"
    )
    return text.partition("; ")[0]


def _sizes(sizes: Sequence[float], summary: Summary) -> tuple[float, float]:
    """Return the limits of the batch sizes: of what reached the target, and B_crit where it is near."""
    sizes = sizes or [1.0]
    b_crit = (summary.get("critical") or {}).get("b_crit")
    near = (
        [b_crit] if b_crit is not None and min(sizes) / NEAR <= b_crit <= max(sizes) * NEAR else []
    )
    return log_limits([*sizes, *near], (0.06, 0.06))


def _draw_panel(
    axes: "Axes",
    rows: Sequence[Row],
    summary: Summary,
    shown: _Quantity,
    x_limits: tuple[float, float],
) -> list[Label]:
    """Draw the trials, the curve with its band, and the winners; return their labels."""
    log_axis(axes, "x", x_limits)
    reached = [row for row in rows if row[shown.value]]
    bounds = [row for row in rows if row["censored"] and row[shown.low]]
    curve = _curve(summary, shown.merit == "time")
    stars = _stars(summary, shown)
    values = [row[shown.value] for row in reached] or [row[shown.low] for row in bounds]
    values += [] if curve is None else curve["steps"].tolist()
    values += [value for star in stars for value in (star.value, star.low, star.high) if value]
    if not values:
        _say(
            axes,
            "no seconds were measured"
            if rows and shown.merit == "time"
            else "no trial got far enough to show",
        )
        return []
    limits = log_limits([value / shown.unit for value in values], (0.14, 0.06))
    log_axis(axes, "y", limits)
    points = summary.get("points") or []
    hits = [row for row in points if row.get(shown.value)]
    taken = {row["number"] for row in hits}
    _dots(axes, [row for row in reached if row["number"] not in taken], shown)
    if curve is not None:
        x, (low, middle, high) = (
            curve["batch_size"],
            (curve[name] / shown.unit for name in ("low", "steps", "high")),
        )
        axes.fill_between(x, low, high, color=BLUE, alpha=0.18, linewidth=0, zorder=1.5)
        name = f"S(B) by all trials, {(summary.get('critical') or {}).get('level', 0.9):.0%} band"
        axes.plot(x, middle, color=BLUE, linewidth=1.8, zorder=3, label=name)
    ends = [
        [(row.get(name) or row[shown.value]) / shown.unit for row in hits]
        for name in (shown.low, shown.value)
    ]
    sizes = [row["batch_size"] for row in hits]
    axes.vlines(sizes, ends[0], ends[1], colors=INK, linewidth=1.4, zorder=5.5)
    if hits:
        style: dict[str, Any] = {
            "facecolor": INK,
            "edgecolor": "white",
            "linewidths": 0.8,
            "zorder": 5,
        }
        axes.scatter(sizes, ends[1], s=30, label=POINT_TEXT, **style)
    telling = [
        row
        for row in points
        if row["censored"] and row.get(shown.low) and _tells(row, curve, shown)
    ]
    telling = [row for row in telling if limits[0] <= row[shown.low] / shown.unit <= limits[1]]
    telling = [row for row in telling if x_limits[0] <= row["batch_size"] <= x_limits[1]]
    if telling:
        at = (
            [row["batch_size"] for row in telling],
            [row[shown.low] / shown.unit for row in telling],
        )
        style = {"facecolors": "none", "edgecolors": INK, "linewidths": 0.8, "zorder": 4}
        axes.scatter(
            *at, marker=_arrow(), s=240, label="stopped before the target: it takes more", **style
        )
    return [star.draw(axes, shown) for star in stars]


def _dots(axes: "Axes", rows: Sequence[Row], shown: _Quantity) -> None:
    if rows:
        at = [row["batch_size"] for row in rows], [row[shown.value] / shown.unit for row in rows]
        axes.scatter(
            *at,
            s=12,
            color=GREY,
            alpha=0.75,
            linewidths=0,
            zorder=2,
            label="other trial that reached the target",
        )


def _curve(summary: Summary, in_seconds: bool) -> dict[str, NDArray[np.float64]] | None:
    """Return S(B), or S(B) x tau(B), with its band on its batch sizes; None where it is not known."""
    curve = summary.get("curve")
    if (
        not curve
        or len(curve["batch_size"]) < 2
        or (in_seconds and None in (curve.get("seconds_per_step") or (None,)))
    ):
        return None
    factor = np.array(curve["seconds_per_step"]) if in_seconds else 1.0
    bands = {name: np.array(curve[name]) * factor for name in ("low", "steps", "high")}
    return {"batch_size": np.array(curve["batch_size"]), **bands}


def _tells(row: Row, curve: dict[str, NDArray[np.float64]] | None, shown: _Quantity) -> bool:
    """Return whether a stopped trial went on past what the band says anyway."""
    if curve is None:
        return True
    at = np.interp(math.log(row["batch_size"]), np.log(curve["batch_size"]), curve["low"])
    return bool(row[shown.low] >= at)


@dataclass(frozen=True)
class _Star:
    """A winner in a panel: what is expected of it, and the range over fresh seeds; None where it is not known."""

    winner: Row
    heading: str
    chosen: bool  # by the study's objective
    value: float
    low: float | None
    high: float | None
    how: str

    def draw(self, axes: "Axes", shown: _Quantity) -> Label:
        x, y = self.winner["batch_size"], self.value / shown.unit
        if self.low is not None and self.high is not None:
            low, high = self.low / shown.unit, self.high / shown.unit
            axes.vlines([x], [low], [high], colors=VERMILION, linewidth=1.6, zorder=5.8)
        face, label = (VERMILION, USE_TEXT) if self.chosen else ("white", self.heading)
        axes.scatter(
            [x], [y], marker="*", s=150, facecolor=face, edgecolor=VERMILION, zorder=6, label=label
        )
        place = f"B = {format_count(x)}, lr = {format_number(self.winner['lr'])}"
        expected = shown.text(self.value) if self.winner.get(shown.value) else "not known"
        text = "\n".join([f"{self.heading}: {expected}", f"({self.how})", place])
        return Label(text, np.array([[x, y]]), VERMILION)


def _stars(summary: Summary, shown: _Quantity) -> list[_Star]:
    """Return the winner by the study's objective, and this panel's own if it is another."""
    names = dict.fromkeys(
        name for name in (summary.get("use"), shown.winner) if name and summary.get(name)
    )
    rows = {summary[name]["number"]: (name, summary[name]) for name in reversed(names)}
    stars = []
    for name, winner in reversed(rows.values()):
        fresh = winner.get("confirmed")
        low, high = (
            None if fresh is None else fresh.get(f"{shown.merit}_{end}") for end in ("low", "high")
        )
        # where half of the fresh seeds missed the target, the star stands at the best of them, or at the trial itself
        value = winner.get(shown.value) or low or (winner.get("single_run") or {}).get(shown.value)
        if not value:
            continue
        how = "predicted" if fresh is None else range_text(shown.merit, fresh) or fresh_text(fresh)
        if fresh is not None and fresh["reached"] < fresh["runs"]:
            how = f"only {fresh_text(fresh)}"
        chosen = name == summary.get("use")
        stars.append(
            _Star(winner, "use" if chosen else WINNERS[name].heading, chosen, value, low, high, how)
        )
    return stars


def _arrow() -> "Outline":
    """Return the mark of a bound: a small circle around the point, and an arrow upwards from it."""
    # as in report/drawing.py
    from matplotlib.path import Path as Outline

    circle = Outline.circle((0.0, 0.0), 0.34)
    corners = [(0.0, 0.34), (0.0, 1.4), (-0.3, 1.0), (0.0, 1.4), (0.3, 1.0)]
    codes = [Outline.MOVETO, Outline.LINETO, Outline.MOVETO, Outline.LINETO, Outline.LINETO]
    return Outline.make_compound_path(circle, Outline(corners, codes))


def _draw_guides(axes: "Axes", summary: Summary) -> list[Label]:
    """Draw B_crit, the slope of perfect scaling, and the batch size with the fewest examples; return their labels."""
    labels = _draw_critical(axes, summary, named=True)
    critical, curve = summary.get("critical") or {}, _curve(summary, in_seconds=False)
    reached = [row["examples"] for row in summary.get("points") or () if row.get("examples")]
    if len(reached) > 1:
        examples = critical.get("e_min") or reached[0]
        limits = axes.get_xlim(), axes.get_ylim()
        x = np.geomspace(*limits[0], 200)
        axes.plot(x, examples / x, color=INK, linewidth=0.8, linestyle="--", zorder=1.6, gid=GUIDE)
        axes.set(xlim=limits[0], ylim=limits[1])
        inside = (examples / x > limits[1][0]) & (examples / x < limits[1][1])
        if inside.any():
            labels.append(Label(SLOPE_TEXT, np.stack([x, examples / x], axis=-1)[inside], INK))
    b_opt = critical.get("b_opt")
    if b_opt is not None and curve is not None:
        y = float(
            np.exp(np.interp(math.log(b_opt), np.log(curve["batch_size"]), np.log(curve["steps"])))
        )
        axes.scatter([b_opt], [y], marker="D", s=34, facecolor="white", edgecolor=BLUE, zorder=5.2)
        text = (
            f"fewest examples: B = {format_number(b_opt, 2)}\n({interval_text(critical, 'b_opt')})"
        )
        labels.append(Label(text, np.array([[b_opt, y]]), BLUE))
    return labels


def _draw_critical(axes: "Axes", summary: Summary, named: bool) -> list[Label]:
    """Draw B_crit with its interval; return its label, at the upper end of its line."""
    critical = summary.get("critical")
    if (
        critical is None
        or not axes.has_data()
        or critical.get("smallest") == critical.get("largest")
    ):
        return []  # one batch size says nothing of it
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    value, low, high = (critical.get(name) for name in ("b_crit", "b_crit_low", "b_crit_high"))
    if value is not None:
        axes.axvline(value, color=PURPLE, linewidth=1.3, zorder=2.5, gid=GUIDE)
    if low is not None or high is not None:
        axes.axvspan(low or left, high or right, color=PURPLE, alpha=0.1, linewidth=0, zorder=-1)
    axes.set_xlim(left, right)
    if not named:
        return []
    at = min(max(value or low or high or left, left), right)
    beyond = ", beyond this plot" if value is not None and not left <= value <= right else ""
    heights = np.geomspace((bottom * top**3) ** 0.25, top, 20)
    text = f"critical batch size{beyond}\n{critical_text(critical)}"
    return [Label(text, np.stack([np.full(20, at), heights], axis=-1), PURPLE)]


def _draw_rates(
    axes: "Axes", trials: Sequence[TrialResult], summary: Summary, x_limits: tuple[float, float]
) -> list[Label]:
    """Draw learning rates over batch size: what reached the target, the best one, and rules through its middle."""
    log_axis(axes, "x", x_limits)
    curve, reference = summary.get("curve") or {}, summary.get("reference")
    reached = [trial for trial in trials if trial.reached]
    shown = reached or [trial for trial in trials if trial.status == "censored"] or trials
    rates = [trial.lr for trial in shown] + list(curve.get("lr") or ())
    if not rates:
        _say(axes, "no trial has run")
        return []
    limits = log_limits(rates, (0.1, 0.1))
    log_axis(axes, "y", limits)
    points = {row["number"] for row in summary.get("points") or () if not row["censored"]}
    kinds: list[tuple[list[TrialResult], dict[str, Any]]] = [
        ([one for one in reached if one.number not in points],
         {"s": 12, "color": GREY, "alpha": 0.75, "linewidths": 0}),
        ([one for one in reached if one.number in points],
         {"s": 30, "facecolor": INK, "edgecolor": "white", "linewidths": 0.8, "zorder": 5}),
        ([one for one in trials if one.status == "diverged"],
         {"marker": "x", "s": 16, "color": GREY, "linewidths": 1.0, "label": "diverged"}),
        ([] if reached else [one for one in trials if one.status != "diverged"],
         {"s": 14, "facecolors": "none", "edgecolors": INK, "linewidths": 0.8, "label": "did not reach the target"}),
    ]  # fmt: skip
    for some, style in kinds:
        kept = [one for one in some if limits[0] <= one.lr <= limits[1]]
        if kept:
            axes.scatter([one.batch_size for one in kept], [one.lr for one in kept], **style)
    start = None if not reference else (reference["batch_size"], reference["lr"])
    if curve.get("lr"):
        x = np.array(curve["batch_size"])
        axes.fill_between(
            x, curve["lr_low"], curve["lr_high"], color=BLUE, alpha=0.18, linewidth=0, zorder=1.5
        )
        axes.plot(x, curve["lr"], color=BLUE, linewidth=1.8, zorder=3)
        start = x[len(x) // 2], curve["lr"][len(x) // 2]
    use = summary.get(summary.get("use") or "")
    if use:
        axes.scatter(
            [use["batch_size"]],
            [use["lr"]],
            marker="*",
            s=150,
            facecolor=VERMILION,
            edgecolor=VERMILION,
            zorder=6,
        )
    return [] if start is None else list(_draw_rules(axes, *start))


def _draw_rules(axes: "Axes", start: float, lr: float) -> Iterator[Label]:
    """Draw the powers that rules say, from the best learning rate at one batch size; yield their labels."""
    limits = axes.get_xlim(), axes.get_ylim()
    low, high = limits[1]
    x = np.geomspace(*limits[0], 100)
    for rule, power in POWERS.items():
        y = lr * (x / start) ** power
        axes.plot(x, y, color=INK, linewidth=0.8, linestyle=":", zorder=1.6, gid=GUIDE)
        far = (
            (y > low)
            & (y < high)
            & (np.abs(np.log(x / start)) >= 0.25 * math.log(limits[0][1] / limits[0][0]))
        )
        far = far if far.any() else (y > low) & (y < high)
        if far.any():
            yield Label(RULE_WORDS[rule], np.stack([x, y], axis=-1)[far], INK)
    axes.set(xlim=limits[0], ylim=limits[1])


def _draw_key(axes: "Axes", panels: Sequence["Axes"]) -> None:
    """Say in a place of its own what the marks are."""
    pairs = [
        pair for panel in panels for pair in zip(*panel.get_legend_handles_labels(), strict=True)
    ]
    axes.set_axis_off()
    if pairs:
        named = {label: handle for handle, label in pairs}
        style: dict[str, Any] = {"fontsize": SIZE, "frameon": False, "labelspacing": 0.9}
        axes.legend(named.values(), named.keys(), loc="center left", borderaxespad=0.0, **style)


def _say(axes: "Axes", text: str) -> None:
    """Write why a panel is empty."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=GREY)
    axes.set(xticks=[], yticks=[])
    axes.minorticks_off()
