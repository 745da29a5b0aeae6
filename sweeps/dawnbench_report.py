"""What the DAWNBench ladder comes to: differences between rungs, the sentence and the figure.

A rung is compared with the one before it on the same seeds, so that what a seed does to both drops out.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from scipy import stats

from bstune.report.drawing import BLUE, GREY, INK, VERMILION
from bstune.system.console import format_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SEEDS_BELOW = 0.24  # of a line, that the points of the seeds lie under their mean
CONFIDENCE = 0.95  # of the intervals; significant is a corrected p below 1 - CONFIDENCE


def _t(n: int) -> float:
    """Return by how many standard errors Student's interval for a mean of n values reaches to each side."""
    return float(stats.t.ppf((1.0 + CONFIDENCE) / 2.0, n - 1))


def sentence(
    rows: Sequence[Mapping[str, Any]], level: float, n: int, left_out: Sequence[str]
) -> str:
    """Return the finding in words: what the ladder comes to, and which rungs help or hurt beyond the noise."""
    ends = [row for row in rows if row["accuracy"] is not None]
    if not ends:
        return f"No trial of any rung got to its end (n = {_seeds(n)})."
    first, last = ends[0], ends[-1]
    text = f"From {first['rung']} to {last['rung']} accuracy goes from {_percent(first)} to {_percent(last)}"
    text += (
        f", {last['at_level']:.0%} of the seeds at {level:.1%} or over"
        if last["at_level"] > 0
        else ""
    )
    tested = [row for row in rows if row["p"] is not None]
    if tested:
        apart = [row for row in tested if row["p"] < 1.0 - CONFIDENCE]
        helps = [_change(row) for row in apart if row["difference"] > 0]
        hurts = [_change(row) for row in apart if row["difference"] < 0]
        rest = [row for row in tested if row not in apart]
        alone = [
            row["rung"] for row in rest if row["difference_low"] > 0 or row["difference_high"] < 0
        ]
        parts = [
            f"{_listed(helps) or 'no rung'} help{'' if len(helps) > 1 else 's'} beyond the noise"
        ]
        parts += [f"{_listed(hurts)} hurt{'' if len(hurts) > 1 else 's'}"] if hurts else []
        parts += (
            [f"{_listed(alone)} stand{'' if len(alone) > 1 else 's'} out only uncorrected"]
            if alone
            else []
        )
        quiet = len(rest) - len(alone)
        parts += (
            [f"{quiet} of {len(tested)} do not differ significantly from the rung before"]
            if quiet
            else []
        )
        text += f": {'; '.join(parts)} (points of accuracy with {CONFIDENCE:.0%} intervals, paired by seed, n = "
        text += f"{_seeds(n)}, p corrected for {len(tested)} comparisons)"
    else:
        text += f" (n = {_seeds(n)}: too few for a test)"
    lost = sum(trial["accuracy"] is None for row in rows for trial in row["trials"])
    text += f"; {lost} trial{'s' if lost > 1 else ''} did not get to the end" if lost else ""
    text += f"; left out on this device: {_listed(left_out)}" if left_out else ""
    return f"{text}."


def _seeds(n: int) -> str:
    return f"{n} seed{'s' if n > 1 else ''}"


def _percent(row: Mapping[str, Any]) -> str:
    return f"{100.0 * row['accuracy']:.2f}%"


def _change(row: Mapping[str, Any]) -> str:
    return f"{row['rung']} ({_points(row).replace(' (', ', ')}"


def _points(row: Mapping[str, Any]) -> str:
    mean, low, high = (
        f"{100.0 * row[key]:+.2f}" for key in ("difference", "difference_low", "difference_high")
    )
    return f"{mean} ({low} to {high})"


def _listed(names: Sequence[str]) -> str:
    return " and ".join([*([", ".join(names[:-1])] if len(names) > 1 else []), *names[-1:]])


def shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row as the table shows it, with its numbers under ``measured``."""
    measured = {key: value for key, value in row.items() if key not in ("rung", "trials")}
    source = [f"{row['source_seconds']:.4g} s"] if row["source_seconds"] is not None else []
    source += (
        [f"{100.0 * row['source_accuracy']:.4g}%"] if row["source_accuracy"] is not None else []
    )
    return {
        "rung": row["rung"],
        "epochs": round(row["epochs"], 2),
        "steps": row["steps"],
        "n": row["n"],
        "seconds_(SD)": _with_deviation(row["seconds"], row["seconds_sd"], format_number),
        "accuracy_(SD)": _with_deviation(row["accuracy"], row["accuracy_sd"], "{:.2%}".format),
        "at_level": f"{row['at_level']:.0%}",
        "gain": None if row["p"] is None else _points(row),
        "source": ", ".join(source) or None,
        "measured": measured,
        "trials": row["trials"],
    }


def _with_deviation(
    mean: float | None, deviation: float | None, write: Callable[[float], str]
) -> str | None:
    if mean is None:
        return None
    return write(mean) if deviation is None else f"{write(mean)} ({write(deviation)})"


def paint(
    rows: Sequence[Mapping[str, Any]], level: float, title: str, reduced: bool, figure: "Figure"
) -> None:
    """Draw a line a rung, the first one on top: accuracies, differences, and seconds beside the source's.

    Seconds are left out of the reduced setting: those of the source are of another network and other steps.
    """
    panels = figure.subplots(1, 2 if reduced else 3, sharey=True)
    _draw_accuracies(panels[0], rows, level, reduced)
    _draw_differences(panels[1], rows)
    if not reduced:
        _draw_seconds(panels[2], rows)
    panels[0].set_yticks(range(len(rows)), [row["rung"] for row in rows])
    panels[0].set_ylim(len(rows) - 0.4, -0.6)
    for axes in panels:
        axes.grid(color=INK, alpha=0.07, linewidth=0.6)
        axes.set_axisbelow(True)
    figure.suptitle(title, fontsize=10.5, parse_math=False)


def _draw_accuracies(
    axes: "Axes", rows: Sequence[Mapping[str, Any]], level: float, reduced: bool
) -> None:
    for place, row in enumerate(rows):
        points = [
            100.0 * trial["accuracy"] for trial in row["trials"] if trial["accuracy"] is not None
        ]
        shown: dict[str, Any] = {
            "s": 16,
            "color": BLUE,
            "alpha": 0.45,
            "linewidths": 0,
            "label": "a seed" if not place else None,
        }
        axes.scatter(points, [place + SEEDS_BELOW] * len(points), **shown)
        if row["accuracy_sd"] is not None:
            reach = _t(row["n"]) * row["accuracy_sd"]
            label = f"mean and its {CONFIDENCE:.0%} interval" if not place else None
            at, half = 100.0 * row["accuracy"], 100.0 * reach / math.sqrt(row["n"])
            axes.errorbar(
                at,
                place,
                xerr=half,
                fmt="D",
                color=VERMILION,
                capsize=3,
                markersize=4.5,
                label=label,
            )
        if row["source_accuracy"] is not None and not reduced:
            axes.plot(
                100.0 * row["source_accuracy"],
                place,
                "s",
                color=INK,
                markerfacecolor="none",
                markersize=7,
            )
    if not reduced:
        axes.plot([], [], "s", color=INK, markerfacecolor="none", markersize=7, label="source")
        axes.axvline(
            100.0 * level, color=GREY, linewidth=0.9, linestyle="--", label=f"{100 * level:.4g}%"
        )
    axes.set_xlabel("accuracy at the end, %")
    _legend(axes)


def _draw_differences(axes: "Axes", rows: Sequence[Mapping[str, Any]]) -> None:
    axes.axvline(0.0, color=INK, linewidth=0.8)
    for place, row in enumerate(rows):
        if row["p"] is None:
            continue
        at, low, high = (
            100.0 * row[key] for key in ("difference", "difference_low", "difference_high")
        )
        significant = row["p"] < 1.0 - CONFIDENCE
        colour = GREY if not significant else BLUE if at > 0 else VERMILION
        marker: dict[str, Any] = {
            "fmt": "o",
            "markersize": 5.5,
            "markerfacecolor": colour if significant else "white",
        }
        axes.errorbar(at, place, xerr=[[at - low], [high - at]], color=colour, capsize=3, **marker)
    for colour, name in (
        (BLUE, "helps"),
        (VERMILION, "hurts"),
        (GREY, "not significant (corrected)"),
    ):
        axes.plot(
            [],
            [],
            "o",
            color=colour,
            markerfacecolor="white" if colour == GREY else colour,
            label=name,
        )
    axes.set_xlabel(
        f"difference from the rung before, points\n({CONFIDENCE:.0%} intervals, paired by seed)"
    )
    _legend(axes)


def _draw_seconds(axes: "Axes", rows: Sequence[Mapping[str, Any]]) -> None:
    for place, row in enumerate(rows):
        points = [trial["seconds"] for trial in row["trials"] if trial["seconds"] is not None]
        axes.scatter(
            points, [place + SEEDS_BELOW] * len(points), s=16, color=BLUE, alpha=0.45, linewidths=0
        )
        if row["seconds"] is not None:
            axes.plot(row["seconds"], place, "D", color=VERMILION, markersize=4.5)
            note: dict[str, Any] = {
                "xytext": (7, 0),
                "textcoords": "offset points",
                "va": "center",
                "fontsize": 8.0,
            }
            axes.annotate(format_number(row["seconds"], 3), (row["seconds"], place), **note)
        if row["source_seconds"] is not None:
            axes.plot(
                row["source_seconds"], place, "s", color=INK, markerfacecolor="none", markersize=7
            )
    axes.plot([], [], "D", color=VERMILION, markersize=4.5, label="here")
    axes.plot(
        [],
        [],
        "s",
        color=INK,
        markerfacecolor="none",
        markersize=7,
        label="source, on its own device",
    )
    axes.set_xscale("log")
    axes.set_xlabel("seconds of training, steps x tau(B)")
    _legend(axes)


def _legend(axes: "Axes") -> None:
    """Put the legend above the panel, where it hides no rung."""
    axes.legend(
        frameon=False,
        fontsize=8.0,
        loc="lower left",
        bbox_to_anchor=(-0.02, 1.0),
        ncols=2,
        borderaxespad=0.2,
    )
