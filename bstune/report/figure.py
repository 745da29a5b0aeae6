"""The figure ``curve.png``: steps and time to target, and the learning rate, over batch size.

It is drawn from a study's result and the trials' records; its words are those of ``answer.py``. matplotlib is
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

from bstune.core.records import Merit, TrialResult
from bstune.core.scaling import RULES
from bstune.report.answer import (
    answer,
    b_opt_text,
    critical_text,
    fresh_text,
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
from bstune.report.rows import Mark, marks, shown_trials
from bstune.result import INTERVAL_LEVEL, WINNERS, CurvePoint, StudyResult, WinnerName, WinnerResult
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


@dataclass(frozen=True)
class _Quantity:
    """What a panel shows over batch size: seconds or steps, in which unit, and in words."""

    merit: Merit
    unit: float
    text: Callable[[float], str]


@dataclass(frozen=True)
class _Band:
    """S(B), or S(B) x tau(B), with its band on its batch sizes."""

    batch_size: NDArray[np.float64]
    low: NDArray[np.float64]
    middle: NDArray[np.float64]
    high: NDArray[np.float64]


def draw_curve(trials: Sequence[TrialResult], result: StudyResult, *paths: Path) -> None:
    """Write ``curve.png``, 900 pixels wide, and ``curve.svg``, by the suffix of each path."""
    save_figure(
        lambda figure: _paint(figure, trials, result),
        FIGURE_INCHES,
        *paths,
        dots_per_inch=PAGE_DPI,
    )


def curve_figure(trials: Sequence[TrialResult], result: StudyResult) -> "Figure":
    """Return what :func:`draw_curve` writes."""
    return figure_of(lambda figure: _paint(figure, trials, result), FIGURE_INCHES, PAGE_DPI)


def _paint(figure: "Figure", trials: Sequence[TrialResult], result: StudyResult) -> None:
    panels = figure.subplots(2, 2, gridspec_kw={"height_ratios": [1.0, 0.72]})
    left, right, rates, key = panels.flat
    points = shown_trials(trials)
    reached = [point for point in points if not point.stopped]
    sizes = [point.batch_size for point in reached or points]
    x_limits = _sizes(sizes or [trial.batch_size for trial in trials], result)
    times = [point.time_to_target or point.time_low for point in reached or points]
    unit, unit_name = time_unit(min((time for time in times if time), default=1.0))
    steps = _Quantity("steps", 1.0, lambda value: plural(round(value), "step"))
    time = _Quantity("time", unit, format_seconds)
    headed = {
        left: f"steps to {result.target}, S(B)",
        right: f"time to target, S(B) x tau(B), {unit_name} of training",
        rates: textwrap.fill(f"learning rate {_lr_text(result)}", PANEL_WIDTH),
    }
    labels = {
        left: [*_draw_panel(left, points, result, steps, x_limits), *_draw_guides(left, result)],
        right: [
            *_draw_panel(right, points, result, time, x_limits),
            *_draw_critical(right, result, named=False),
        ],
        rates: _draw_rates(rates, trials, result, x_limits),
    }
    for axes, title in headed.items():
        axes.set_title(title, loc="left", fontsize=SIZE, parse_math=False)
        axes.set_xlabel("batch size B (examples per step)", fontsize=SIZE, labelpad=1.0)
        axes.tick_params(labelsize=SMALL)
        axes.grid(color=INK, alpha=0.07, linewidth=0.6)
    _draw_key(key, (left, right, rates))
    _set_title(figure, result)
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


def _set_title(figure: "Figure", result: StudyResult) -> None:
    """Make the answer the title, broken where it would be wider than the figure; what was asked stands below it."""
    found = answer(result)
    asked = found.title.removeprefix(f"{result.workload} · ")
    title = figure.suptitle("", x=0.01, ha="left", fontsize=TITLE_SIZE, parse_math=False)
    for width in TITLE_WIDTHS:
        title.set_text("\n".join(textwrap.fill(line, width) for line in (found.headline, asked)))
        if title.get_window_extent().width < 0.98 * figure.bbox.width:
            break


def _lr_text(result: StudyResult) -> str:
    """Return what is known of the best learning rate over batch size, its first sentence."""
    text = next(
        (texts[0] for label, texts in answer(result).lines if label == "LR"), "of the trials"
    )
    return text.partition("; ")[0]


def _sizes(sizes: Sequence[float], result: StudyResult) -> tuple[float, float]:
    """Return the limits of the batch sizes: of what reached the target, and B_crit where it is near."""
    sizes = sizes or [1.0]
    b_crit = None if result.critical_batch_size is None else result.critical_batch_size.value
    near = (
        [b_crit] if b_crit is not None and min(sizes) / NEAR <= b_crit <= max(sizes) * NEAR else []
    )
    return log_limits([*sizes, *near], (0.06, 0.06))


def _draw_panel(
    axes: "Axes",
    trials: Sequence[CurvePoint],
    result: StudyResult,
    shown: _Quantity,
    x_limits: tuple[float, float],
) -> list[Label]:
    """Draw the trials, the curve with its band, and the winners; return their labels."""
    log_axis(axes, "x", x_limits)
    all_marks = marks(trials, shown.merit)
    curve = _curve(result, shown.merit)
    stars = _stars(result, shown)
    values = _heights(all_marks, curve, stars)
    if not values:
        reason = "no trial got far enough to show"
        if trials and shown.merit == "time":
            reason = "no seconds were measured"
        _say(axes, reason)
        return []
    limits = log_limits([value / shown.unit for value in values], (0.14, 0.06))
    log_axis(axes, "y", limits)
    points = marks(result.points, shown.merit)
    taken = {point.number for point in points if point.value}
    _draw_dots(axes, [mark for mark in all_marks if mark.number not in taken], shown)
    if curve is not None:
        _draw_band(axes, curve, result, shown)
    _draw_hits(axes, points, shown)
    _draw_bounds(axes, points, curve, shown, limits, x_limits)
    return [star.draw(axes, shown) for star in stars]


def _heights(trials: Sequence[Mark], curve: _Band | None, stars: Sequence["_Star"]) -> list[float]:
    """All that a panel has to have room for: where no trial reached the target, what did not suffice."""
    values = [mark.value for mark in trials if mark.value]
    if not values:
        values = [mark.low for mark in trials if not mark.reached and mark.low]
    if curve is not None:
        values += curve.middle.tolist()
    for star in stars:
        values += [value for value in (star.value, star.low, star.high) if value]
    return values


def _draw_dots(axes: "Axes", trials: Sequence[Mark], shown: _Quantity) -> None:
    """Draw trials that reached the target, those on the frontier left out."""
    sizes, heights = list[int](), list[float]()
    for mark in trials:
        if mark.value:
            sizes.append(mark.batch_size)
            heights.append(mark.value / shown.unit)
    if sizes:
        name = "other trial that reached the target"
        axes.scatter(
            sizes, heights, s=12, color=GREY, alpha=0.75, linewidths=0, zorder=2, label=name
        )


def _draw_band(axes: "Axes", curve: _Band, result: StudyResult, shown: _Quantity) -> None:
    low, high = curve.low / shown.unit, curve.high / shown.unit
    axes.fill_between(curve.batch_size, low, high, color=BLUE, alpha=0.18, linewidth=0, zorder=1.5)
    level = (
        INTERVAL_LEVEL if result.critical_batch_size is None else result.critical_batch_size.level
    )
    name = f"S(B) by all trials, {level:.0%} band"
    middle = curve.middle / shown.unit
    axes.plot(curve.batch_size, middle, color=BLUE, linewidth=1.8, zorder=3, label=name)


def _draw_hits(axes: "Axes", points: Sequence[Mark], shown: _Quantity) -> None:
    """Draw the frontier's points that reached the target, with a bar from the last miss."""
    sizes, misses, hits = list[int](), list[float](), list[float]()
    for point in points:
        if point.value:
            sizes.append(point.batch_size)
            misses.append((point.low or point.value) / shown.unit)
            hits.append(point.value / shown.unit)
    axes.vlines(sizes, misses, hits, colors=INK, linewidth=1.4, zorder=5.5)
    if sizes:
        style: dict[str, Any] = {
            "facecolor": INK,
            "edgecolor": "white",
            "linewidths": 0.8,
            "zorder": 5,
        }
        axes.scatter(sizes, hits, s=30, label=POINT_TEXT, **style)


def _draw_bounds(
    axes: "Axes",
    points: Sequence[Mark],
    curve: _Band | None,
    shown: _Quantity,
    limits: tuple[float, float],
    x_limits: tuple[float, float],
) -> None:
    """Draw the frontier's stopped trials within the panel that tell more than the band does."""
    sizes, heights = list[int](), list[float]()
    for point in points:
        if point.reached or not point.low or not _tells(point.batch_size, point.low, curve):
            continue
        height = point.low / shown.unit
        is_inside = x_limits[0] <= point.batch_size <= x_limits[1]
        if is_inside and limits[0] <= height <= limits[1]:
            sizes.append(point.batch_size)
            heights.append(height)
    if sizes:
        style: dict[str, Any] = {
            "facecolors": "none",
            "edgecolors": INK,
            "linewidths": 0.8,
            "zorder": 4,
        }
        name = "stopped before the target: it takes more"
        axes.scatter(sizes, heights, marker=_arrow(), s=240, label=name, **style)


def _curve(result: StudyResult, merit: Merit) -> _Band | None:
    """Return S(B), or S(B) x tau(B), with its band on its batch sizes; None where it is not known."""
    curve = result.curve
    if curve is None or len(curve.batch_size) < 2:
        return None
    factor: NDArray[np.float64] | float = 1.0
    if merit == "time":
        if curve.seconds_per_step is None:
            return None
        factor = np.array(curve.seconds_per_step)
    return _Band(
        np.array(curve.batch_size),
        np.array(curve.low) * factor,
        np.array(curve.steps) * factor,
        np.array(curve.high) * factor,
    )


def _tells(batch_size: int, low: float, curve: _Band | None) -> bool:
    """Return whether a stopped trial went on past what the band says anyway."""
    if curve is None:
        return True
    at = np.interp(math.log(batch_size), np.log(curve.batch_size), curve.low)
    return bool(low >= at)


@dataclass(frozen=True)
class _Star:
    """A winner in a panel: what is expected of it, and the range over fresh seeds; None where it is not known."""

    winner: WinnerResult
    heading: str
    chosen: bool  # by the study's objective
    value: float
    low: float | None
    high: float | None
    how: str

    def draw(self, axes: "Axes", shown: _Quantity) -> Label:
        x, y = self.winner.batch_size, self.value / shown.unit
        if self.low is not None and self.high is not None:
            low, high = self.low / shown.unit, self.high / shown.unit
            axes.vlines([x], [low], [high], colors=VERMILION, linewidth=1.6, zorder=5.8)
        face, label = (VERMILION, USE_TEXT) if self.chosen else ("white", self.heading)
        axes.scatter(
            [x], [y], marker="*", s=150, facecolor=face, edgecolor=VERMILION, zorder=6, label=label
        )
        place = f"B = {format_count(x)}, lr = {format_number(self.winner.lr)}"
        expected = "not known"
        if self.winner.expected(shown.merit):
            expected = shown.text(self.value)
        text = "\n".join([f"{self.heading}: {expected}", f"({self.how})", place])
        return Label(text, np.array([[x, y]]), VERMILION)


def _stars(result: StudyResult, shown: _Quantity) -> list[_Star]:
    """Return the winner by the study's objective, and this panel's own if it is another."""
    stars = list[_Star]()
    use = result.winner
    if result.use is not None and use is not None:
        stars += _star(result.use, use, True, shown)
    own = next(name for name, one in WINNERS.items() if one.merit == shown.merit)
    winner = result.winner_by(shown.merit)
    if winner is not None and (use is None or winner.number != use.number):
        stars += _star(own, winner, False, shown)
    return stars


def _star(
    name: WinnerName, winner: WinnerResult, chosen: bool, shown: _Quantity
) -> Iterator[_Star]:
    """Yield the star of a winner, if there is a place for it."""
    fresh = winner.confirmed
    low, high = (None, None) if fresh is None else fresh.ends(shown.merit)
    # Where half of the fresh seeds missed the target, the star stands at the best of them, or at the trial itself.
    value = winner.expected(shown.merit) or low or winner.of_single_run(shown.merit)
    if not value:
        return
    how = "predicted"
    if fresh is not None:
        how = range_text(shown.merit, fresh) or fresh_text(fresh)
        if not fresh.all_reached:
            how = f"only {fresh_text(fresh)}"
    heading = "use" if chosen else WINNERS[name].heading
    yield _Star(winner, heading, chosen, value, low, high, how)


def _arrow() -> "Outline":
    """Return the mark of a bound: a small circle around the point, and an arrow upwards from it."""
    # as in report/drawing.py
    from matplotlib.path import Path as Outline

    circle = Outline.circle((0.0, 0.0), 0.34)
    corners = [(0.0, 0.34), (0.0, 1.4), (-0.3, 1.0), (0.0, 1.4), (0.3, 1.0)]
    codes = [Outline.MOVETO, Outline.LINETO, Outline.MOVETO, Outline.LINETO, Outline.LINETO]
    return Outline.make_compound_path(circle, Outline(corners, codes))


def _draw_guides(axes: "Axes", result: StudyResult) -> list[Label]:
    """Draw B_crit, the slope of perfect scaling, and the batch size with the fewest examples; return their labels."""
    labels = _draw_critical(axes, result, named=True)
    critical, curve = result.critical_batch_size, _curve(result, "steps")
    reached = [point.examples for point in result.points if point.examples]
    if len(reached) > 1:
        examples: float = reached[0]
        if critical is not None and critical.e_min is not None:
            examples = critical.e_min
        limits = axes.get_xlim(), axes.get_ylim()
        x = np.geomspace(*limits[0], 200)
        axes.plot(x, examples / x, color=INK, linewidth=0.8, linestyle="--", zorder=1.6, gid=GUIDE)
        axes.set(xlim=limits[0], ylim=limits[1])
        inside = (examples / x > limits[1][0]) & (examples / x < limits[1][1])
        if inside.any():
            labels.append(Label(SLOPE_TEXT, np.stack([x, examples / x], axis=-1)[inside], INK))
    if critical is not None and critical.b_opt is not None and curve is not None:
        b_opt = critical.b_opt
        log_steps = np.interp(math.log(b_opt), np.log(curve.batch_size), np.log(curve.middle))
        y = float(np.exp(log_steps))
        axes.scatter([b_opt], [y], marker="D", s=34, facecolor="white", edgecolor=BLUE, zorder=5.2)
        text = f"fewest examples: B = {format_number(b_opt, 2)}\n({b_opt_text(critical)})"
        labels.append(Label(text, np.array([[b_opt, y]]), BLUE))
    return labels


def _draw_critical(axes: "Axes", result: StudyResult, named: bool) -> list[Label]:
    """Draw B_crit with its interval; return its label, at the upper end of its line."""
    critical = result.critical_batch_size
    # One batch size says nothing of it.
    if critical is None or not axes.has_data() or critical.is_of_one_size:
        return []
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    value, low, high = critical.value, critical.low, critical.high
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
    axes: "Axes", trials: Sequence[TrialResult], result: StudyResult, x_limits: tuple[float, float]
) -> list[Label]:
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
        return []
    limits = log_limits(rates, (0.1, 0.1))
    log_axis(axes, "y", limits)
    points = {point.number for point in result.points if not point.stopped}
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
    start, lr = result.reference.batch_size, result.reference.lr
    if curve is not None:
        x = np.array(curve.batch_size)
        axes.fill_between(
            x, curve.lr_low, curve.lr_high, color=BLUE, alpha=0.18, linewidth=0, zorder=1.5
        )
        axes.plot(x, curve.lr, color=BLUE, linewidth=1.8, zorder=3)
        start, lr = x[len(x) // 2], curve.lr[len(x) // 2]
    use = result.winner
    if use is not None:
        axes.scatter(
            [use.batch_size],
            [use.lr],
            marker="*",
            s=150,
            facecolor=VERMILION,
            edgecolor=VERMILION,
            zorder=6,
        )
    return list(_draw_rules(axes, start, lr))


def _draw_rules(axes: "Axes", start: float, lr: float) -> Iterator[Label]:
    """Draw the powers that rules say, from the best learning rate at one batch size; yield their labels."""
    limits = axes.get_xlim(), axes.get_ylim()
    low, high = limits[1]
    x = np.geomspace(*limits[0], 100)
    for rule in RULES.values():
        if rule.exponent is None:
            continue
        y = lr * (x / start) ** rule.exponent
        axes.plot(x, y, color=INK, linewidth=0.8, linestyle=":", zorder=1.6, gid=GUIDE)
        far = (
            (y > low)
            & (y < high)
            & (np.abs(np.log(x / start)) >= 0.25 * math.log(limits[0][1] / limits[0][0]))
        )
        far = far if far.any() else (y > low) & (y < high)
        if far.any():
            yield Label(rule.words, np.stack([x, y], axis=-1)[far], INK)
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
