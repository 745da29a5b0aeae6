"""Parts that several charts share: lines, bands, dots, ranges of axes, a trial in words."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from bstune.core.records import Merit, TrialResult
from bstune.report.html import label
from bstune.system.console import format_count, format_number, format_seconds

# The most digits of a number in a chart's words.
WORD_DIGITS = 4
STATUS_LOOKS = {
    "reached": ("--blue", "circle"),
    "stopped": ("--grey", "triangle-up-open"),
    "diverged": ("--vermilion", "x"),
}
Trace = dict[str, Any]
"""Points that plotly draws as a line or as marks, by plotly's own names."""
Layout = dict[str, Any]
"""Settings of a chart or of an axis, by plotly's own names."""


def area_trace(x: Sequence[float], low: Sequence[float], high: Sequence[float]) -> Trace:
    """Give the area between two lines, which is called a 90% band."""
    return {
        "type": "scatter",
        "mode": "lines",
        "line": {"width": 0},
        "hoverinfo": "skip",
        "name": "90% band",
        # The line goes along the upper end and back along the lower one: plotly fills what it
        # encloses.
        "x": [*x, *reversed(x)],
        "y": [*high, *reversed(low)],
        "fill": "toself",
        "fillcolor": "--band",
    }


def line_trace(
    x: Sequence[float],
    y: Sequence[float | None],
    name: str,
    hover: Sequence[str] | None = None,
    color: str = "--blue",
    dash: str = "solid",
    width: float = 2.0,
) -> Trace:
    """Give a line.

    ``hover``: the text of each point, which is shown where a reader points at it. None shows none.
    """
    trace: Trace = {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": list(x),
        "y": list(y),
        "line": {"color": color, "dash": dash, "width": width},
        "hoverinfo": "skip",
    }
    if hover is not None:
        trace |= {"hoverinfo": "text", "text": list(map(label, hover))}
    return trace


def dots_trace(
    trials: Sequence[TrialResult],
    heights: Sequence[float | None],
    name: str,
    color: str,
    symbol: str = "circle",
) -> Trace:
    """Give trials as dots over batch size, each with its facts where a reader points at it."""
    batch_sizes = list[int]()
    hover = list[str]()
    for trial in trials:
        batch_sizes.append(trial.batch_size)
        # In a chart's text plotly breaks lines at this tag alone.
        hover.append("<br>".join(map(label, trial_lines(trial))))
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": batch_sizes,
        "y": list(heights),
        "marker": {"color": color, "symbol": symbol, "size": 7, "opacity": 0.8},
        "hoverinfo": "text",
        "text": hover,
    }


def trial_lines(trial: TrialResult) -> list[str]:
    """Give a trial's facts in lines: its configuration, how it ended, its steps and seconds."""
    configuration = [f"B = {format_count(trial.batch_size)}", f"lr = {format_number(trial.lr)}"]
    for name, value in trial.hyperparameters.items():
        configuration.append(f"{name} {format_number(value)}")
    steps = f"{trial.status}, after {format_count(trial.steps)} steps"
    if trial.reached:
        steps = f"{format_count(trial.steps)} steps (missed at {format_count(trial.steps_low)})"
    lines = [trial_with_origin(trial), ", ".join(configuration), steps]
    if trial.time_to_target is not None:
        lines.append(f"{format_seconds(trial.time_to_target)} to target")
    if trial.seconds_per_step is not None:
        lines.append(f"{format_seconds(trial.seconds_per_step)} a step")
    return lines


def trial_with_origin(trial: TrialResult) -> str:
    """Name a trial by its number, and the one that it runs again or continues."""
    words = f"trial {trial.number}"
    if trial.replicate_of is not None:
        words += f", {trial.replicate_of} again on a fresh seed"
    if trial.resumed_from is not None:
        words += f", continues {trial.resumed_from}"
    return words


def baseline_marker(is_reached: bool) -> Trace:
    """Give plotly's marker of the baseline: hollow where it did not reach the target."""
    symbol = "square" if is_reached else "square-open"
    return {"symbol": symbol, "size": 10, "color": "--green"}


def log_range(values: Iterable[float], pad: float) -> Layout:
    """Give the range of a logarithmic axis around the values that are above 0.

    ``pad``: the room beyond them on either side, as a share of their span. Without a value it is
    empty: plotly then chooses a range.
    """
    logs = [math.log10(value) for value in values if value > 0.0]
    if not logs:
        return {}
    # The span is an octave at least, as a single value has none to take a share of.
    span = max(max(logs) - min(logs), 0.3)
    return {"range": [min(logs) - pad * span, max(logs) + pad * span]}


def merit_text(merit: Merit, value: float) -> str:
    """Write a value of merit ``time`` as seconds of training, of ``steps`` as ``56 steps``."""
    if merit == "time":
        return format_seconds(value)
    return f"{format_number(value, WORD_DIGITS)} steps"
