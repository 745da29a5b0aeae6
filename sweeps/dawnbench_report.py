"""The results of the DAWNBench ladder: differences between rungs, the sentence and the figure.

A rung is compared with the one before it on the same seeds, so that a seed's effect on both drops
out.
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from scipy import stats

from bstune.report.drawing import BLUE, GREY, INK, VERMILION
from bstune.system.console import format_number, listing, plural

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The points of the seeds lie by this share of a line below their mean.
SEEDS_BELOW = 0.24
# The level of the intervals. An effect is significant if its corrected p is below 1 - CONFIDENCE.
CONFIDENCE = 0.95
# The style of a source's own value.
HOLLOW_SQUARE: dict[str, Any] = {
    "marker": "s",
    "linestyle": "none",
    "color": INK,
    "markerfacecolor": "none",
    "markersize": 7,
}
# The style of the values of the seeds.
SEED_POINTS: dict[str, Any] = {"s": 16, "color": BLUE, "alpha": 0.45, "linewidths": 0}


class RungTrial(TypedDict):
    """A trial of a rung in result.json; accuracy and seconds are None if it ended early."""

    seed: int
    status: str
    accuracy: float | None
    seconds: float | None
    train_seconds: float
    seconds_per_step: float | None
    message: str | None


class RungPairs(TypedDict):
    """The pairs of seeds that a difference rests on."""

    n: int
    p_uncorrected: float | None


class RungRow(TypedDict):
    """A rung's row in result.json; a value that is not known is None.

    ``n`` trials got to their end, and means and deviations are over them. ``difference`` is in
    accuracy, from the rung before, with its interval and a p that is corrected for the number of
    rungs. ``at_level`` is the share of all seeds whose accuracy is at least the sweep's ``level``.
    """

    rung: str
    epochs: float
    batch_size: int
    lr: float
    steps: int
    seconds: float | None
    seconds_sd: float | None
    source_seconds: float | None
    accuracy: float | None
    accuracy_sd: float | None
    source_accuracy: float | None
    n: int
    at_level: float
    difference: float | None
    difference_low: float | None
    difference_high: float | None
    p: float | None
    pairs: RungPairs
    trials: list[RungTrial]


class RungGain(NamedTuple):
    """The gain of a rung over the one before, in points of accuracy, with its interval."""

    rung: str
    mean: float
    low: float
    high: float
    significant: bool

    @property
    def text(self) -> str:
        """Mean and interval in points of accuracy, such as ``+0.42 (+0.10 to +0.74)``."""
        return f"{self.mean:+.2f} ({self.low:+.2f} to {self.high:+.2f})"

    @property
    def text_with_rung(self) -> str:
        """The rung with its mean and interval, as text."""
        return f"{self.rung} ({self.mean:+.2f}, {self.low:+.2f} to {self.high:+.2f})"


def rung_gain(row: RungRow) -> RungGain | None:
    """Give a rung's gain from its row; None where there were too few pairs for a test."""
    mean = row["difference"]
    low = row["difference_low"]
    high = row["difference_high"]
    p = row["p"]
    if mean is None or low is None or high is None or p is None:
        return None
    return RungGain(
        rung=row["rung"],
        mean=100.0 * mean,
        low=100.0 * low,
        high=100.0 * high,
        significant=p < 1.0 - CONFIDENCE,
    )


def _standard_errors_to_interval(n: int) -> float:
    """Give how many standard errors Student's interval of a mean over n values has on each side."""
    return float(stats.t.ppf((1.0 + CONFIDENCE) / 2.0, n - 1))


def sentence(rows: Sequence[RungRow], level: float, n: int, left_out: Sequence[str]) -> str:
    """Say how accuracy changes along the ladder, and which rungs help or hurt beyond the noise.

    Args:
        rows: of the rungs in order. Each has settings on top of those before it.
        level: an accuracy. The text tells how many of the last rung's seeds came up to it.
        n: the number of seeds.
        left_out: the names of the rungs that this device cannot train.
    """
    seeds = plural(n, "seed")
    measured_rungs = list[tuple[RungRow, float]]()
    for row in rows:
        if row["accuracy"] is not None:
            measured_rungs.append((row, row["accuracy"]))
    if not measured_rungs:
        return f"No trial of any rung got to its end (n = {seeds})."
    first_rung, first_accuracy = measured_rungs[0]
    last_rung, last_accuracy = measured_rungs[-1]
    text = (
        f"From {first_rung['rung']} to {last_rung['rung']} accuracy goes from "
        f"{100.0 * first_accuracy:.2f}% to {100.0 * last_accuracy:.2f}%"
    )
    if last_rung["at_level"] > 0:
        text += f", {last_rung['at_level']:.0%} of the seeds at {level:.1%} or over"
    gains = list(filter(None, map(rung_gain, rows)))
    if gains:
        text += (
            f": {_effects_in_words(gains)} (points of accuracy with {CONFIDENCE:.0%} intervals, "
            f"paired by seed, n = {seeds}, p corrected for {len(gains)} comparisons)"
        )
    else:
        text += f" (n = {seeds}: too few for a test)"
    lost = 0
    for row in rows:
        lost += sum(trial["accuracy"] is None for trial in row["trials"])
    if lost:
        text += f"; {plural(lost, 'trial')} did not get to the end"
    if left_out:
        text += f"; left out on this device: {_listed(left_out)}"
    return f"{text}."


def _effects_in_words(gains: Sequence[RungGain]) -> str:
    """Say which rungs help or hurt significantly, and which stand out only without correction.

    A gain is that of a rung over the one before, whose settings it adds to.
    """
    helps = list[str]()
    hurts = list[str]()
    # The interval of these rungs leaves 0 out, which one of twenty does by chance. Their p is too
    # large once it is corrected for the number of rungs.
    only_uncorrected = list[str]()
    undecided = 0
    for gain in gains:
        if gain.significant:
            if gain.mean > 0:
                helps.append(gain.text_with_rung)
            elif gain.mean < 0:
                hurts.append(gain.text_with_rung)
        elif gain.low > 0 or gain.high < 0:
            only_uncorrected.append(gain.rung)
        else:
            undecided += 1
    parts = [f"{_listed(helps) or 'no rung'} help{_third_person(helps)} beyond the noise"]
    if hurts:
        parts.append(f"{_listed(hurts)} hurt{_third_person(hurts)}")
    if only_uncorrected:
        ending = _third_person(only_uncorrected)
        parts.append(f"{_listed(only_uncorrected)} stand{ending} out only uncorrected")
    if undecided:
        parts.append(
            f"{undecided} of {len(gains)} do not differ significantly from the rung before"
        )
    return "; ".join(parts)


def _third_person(subjects: Sequence[str]) -> str:
    """Give the ending of a verb for one subject, or for several."""
    if len(subjects) > 1:
        return ""
    return "s"


def _listed(names: Sequence[str]) -> str:
    """Join names by commas, the last one by ``and``; empty for no names."""
    return listing(names) if names else ""


def printed_row(row: RungRow) -> dict[str, object]:
    """Make a rung's row of the printed table, with all its numbers under ``measured``.

    ``at_level`` is the share of all seeds that came up to the sweep's level of accuracy. ``gain``
    is in accuracy over the rung before. ``source`` has the seconds and the accuracy of the
    publication that trained this rung first.
    """
    measured = dict[str, object](row)
    # The printed row has these two under keys of their own.
    del measured["rung"], measured["trials"]
    source = list[str]()
    if row["source_seconds"] is not None:
        source.append(f"{row['source_seconds']:.4g} s")
    if row["source_accuracy"] is not None:
        source.append(f"{100.0 * row['source_accuracy']:.4g}%")
    gain = rung_gain(row)
    gain_text: str | None = None
    if gain is not None:
        gain_text = gain.text
    return {
        "rung": row["rung"],
        "epochs": round(row["epochs"], 2),
        "steps": row["steps"],
        "n": row["n"],
        "seconds_(SD)": _with_deviation(row["seconds"], row["seconds_sd"], format_number),
        "accuracy_(SD)": _with_deviation(row["accuracy"], row["accuracy_sd"], "{:.2%}".format),
        "at_level": f"{row['at_level']:.0%}",
        "gain": gain_text,
        "source": ", ".join(source) or None,
        "measured": measured,
        "trials": row["trials"],
    }


def _with_deviation(
    mean: float | None, deviation: float | None, write: Callable[[float], str]
) -> str | None:
    """Write a mean, with its deviation in brackets if it is known; None without a mean."""
    if mean is None:
        return None
    if deviation is None:
        return write(mean)
    return f"{write(mean)} ({write(deviation)})"


def paint(
    rows: Sequence[RungRow], level: float, title: str, reduced: bool, figure: "Figure"
) -> None:
    """Draw a line for each rung, the first on top: accuracies, differences and seconds.

    A rung has settings on top of those of all rungs before it. A line stands at the accuracy
    ``level``. The reduced setting has no panel of seconds: the source's are of another network and
    other steps.
    """
    count = 2 if reduced else 3
    panels = figure.subplots(1, count, sharey=True)
    _draw_accuracies(panels[0], rows, goal_accuracy=level, reduced=reduced)
    _draw_differences(panels[1], rows)
    if not reduced:
        _draw_seconds(panels[2], rows)
    panels[0].set_yticks(range(len(rows)), [row["rung"] for row in rows])
    # The first rung stands at the top, as the ladder is read.
    panels[0].set_ylim(len(rows) - 0.4, -0.6)
    for axes in panels:
        axes.grid(color=INK, alpha=0.07, linewidth=0.6)
        axes.set_axisbelow(True)
    figure.suptitle(title, fontsize=10.5, parse_math=False)


def _draw_accuracies(
    axes: "Axes", rows: Sequence[RungRow], goal_accuracy: float, reduced: bool
) -> None:
    """Draw each rung's accuracies in percent: of each seed, their mean, and the source's.

    The source is the publication that trained the rung first. The mean has an interval. A line
    stands at ``goal_accuracy``.
    """
    for place, row in enumerate(rows):
        # One entry in the legend is enough for all rungs.
        seed_label: str | None = None
        mean_label: str | None = None
        if place == 0:
            seed_label = "a seed"
            mean_label = f"mean and its {CONFIDENCE:.0%} interval"
        points = list[float]()
        for trial in row["trials"]:
            if trial["accuracy"] is not None:
                points.append(100.0 * trial["accuracy"])
        below = [place + SEEDS_BELOW] * len(points)
        axes.scatter(points, below, label=seed_label, **SEED_POINTS)
        if row["accuracy"] is not None and row["accuracy_sd"] is not None:
            standard_error = row["accuracy_sd"] / math.sqrt(row["n"])
            half_width = _standard_errors_to_interval(row["n"]) * standard_error
            axes.errorbar(
                100.0 * row["accuracy"],
                place,
                xerr=100.0 * half_width,
                fmt="D",
                color=VERMILION,
                capsize=3,
                markersize=4.5,
                label=mean_label,
            )
        if row["source_accuracy"] is not None and not reduced:
            axes.plot(100.0 * row["source_accuracy"], place, **HOLLOW_SQUARE)
    # The source's accuracy is of its own network and epochs, not of the reduced ones.
    if not reduced:
        axes.plot([], [], label="source", **HOLLOW_SQUARE)
        goal = 100.0 * goal_accuracy
        axes.axvline(goal, color=GREY, linewidth=0.9, linestyle="--", label=f"{goal:.4g}%")
    axes.set_xlabel("accuracy at the end, %")
    _legend_above(axes)


def _draw_differences(axes: "Axes", rows: Sequence[RungRow]) -> None:
    """Draw each rung's gain in accuracy over the rung before, whose settings it adds to."""
    axes.axvline(0.0, color=INK, linewidth=0.8)
    for place, row in enumerate(rows):
        gain = rung_gain(row)
        if gain is None:
            continue
        colour = _colour_of(gain)
        # A filled point is one that the correction leaves significant.
        filling = colour if gain.significant else "white"
        axes.errorbar(
            gain.mean,
            place,
            xerr=[[gain.mean - gain.low], [gain.high - gain.mean]],
            color=colour,
            capsize=3,
            fmt="o",
            markersize=5.5,
            markerfacecolor=filling,
        )
    axes.plot([], [], "o", color=BLUE, markerfacecolor=BLUE, label="helps")
    axes.plot([], [], "o", color=VERMILION, markerfacecolor=VERMILION, label="hurts")
    quiet = "not significant (corrected)"
    axes.plot([], [], "o", color=GREY, markerfacecolor="white", label=quiet)
    axes.set_xlabel(
        f"difference from the rung before, points\n({CONFIDENCE:.0%} intervals, paired by seed)"
    )
    _legend_above(axes)


def _colour_of(gain: RungGain) -> str:
    """Give the colour of a gain: grey if it is not significant, else by its sign."""
    if not gain.significant:
        return GREY
    if gain.mean > 0:
        return BLUE
    return VERMILION


def _draw_seconds(axes: "Axes", rows: Sequence[RungRow]) -> None:
    """Draw each rung's seconds of training: of each seed, their mean, and the source's.

    The source is the publication whose ladder of settings the rungs are.
    """
    for place, row in enumerate(rows):
        seconds = list[float]()
        for trial in row["trials"]:
            if trial["seconds"] is not None:
                seconds.append(trial["seconds"])
        axes.scatter(seconds, [place + SEEDS_BELOW] * len(seconds), **SEED_POINTS)
        if row["seconds"] is not None:
            axes.plot(row["seconds"], place, "D", color=VERMILION, markersize=4.5)
            axes.annotate(
                format_number(row["seconds"], 3),
                (row["seconds"], place),
                xytext=(7, 0),
                textcoords="offset points",
                va="center",
                fontsize=8.0,
            )
        if row["source_seconds"] is not None:
            axes.plot(row["source_seconds"], place, **HOLLOW_SQUARE)
    axes.plot([], [], "D", color=VERMILION, markersize=4.5, label="here")
    axes.plot([], [], label="source, on its own device", **HOLLOW_SQUARE)
    # Rungs and devices differ by an order of magnitude.
    axes.set_xscale("log")
    axes.set_xlabel("seconds of training, steps x tau(B)")
    _legend_above(axes)


def _legend_above(axes: "Axes") -> None:
    """Put the legend above the panel, where it hides no rung."""
    axes.legend(
        frameon=False,
        fontsize=8.0,
        loc="lower left",
        bbox_to_anchor=(-0.02, 1.0),
        ncols=2,
        borderaxespad=0.2,
    )
