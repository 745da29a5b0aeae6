"""Steps and time to target over batch size, with the critical batch size."""

import math
from collections.abc import Iterable, Mapping

from bstune.core.records import TrialResult
from bstune.report.charts.traces import (
    STATUS_LOOKS,
    Layout,
    Trace,
    area_trace,
    baseline_marker,
    dots_trace,
    line_trace,
    log_range,
    merit_text,
    trial_lines,
)
from bstune.report.html import axis, chart, label, paragraph
from bstune.report.rows import (
    USE,
    YOURS,
    Mark,
    Panel,
    Star,
    panel,
    perfect_scaling_examples,
    shown_critical,
)
from bstune.report.study_folder import StudyFolder
from bstune.report.words import critical_text, expected_text, interval_text, winner_text
from bstune.result import CriticalBatchSize, StudyResult
from bstune.system.console import format_count, format_number, plural


def frontier_charts(study: StudyFolder) -> str:
    """Draw steps to target over batch size and, where trials were timed, time to target.

    Empty where no chart has a point.
    """
    steps = _frontier_chart(study, panel(study.files.trials, study.result, "steps"))
    seconds = ""
    is_timed = any(trial.seconds_per_step for trial in study.files.trials)
    if is_timed:
        seconds = _frontier_chart(study, panel(study.files.trials, study.result, "time"))
    if not steps + seconds:
        return ""
    sentences = list[str]()
    critical = shown_critical(study.result)
    # An interval that is open at both ends is not shaded.
    if critical is not None and not (critical.low is None and critical.high is None):
        sentences.append(f"Shaded: the critical batch size, {critical_text(critical)}.")
    sentences.append("Hollow triangles are trials that were stopped: they need more than that.")
    if study.result.baseline is not None:
        sentences.append(f"Square: {YOURS}, trial {study.result.baseline.number}.")
    return f'<div class="pair">{steps}{seconds}</div>{paragraph(" ".join(sentences), "faint")}'


def _frontier_chart(study: StudyFolder, shown: Panel) -> str:
    """Draw the chart of a panel: steps, or time, to target over batch size."""
    result = study.result
    trials = {trial.number: trial for trial in study.files.trials}
    # Plotly draws later traces over earlier ones: the winners and the baseline lie on top.
    traces = _curve_traces(shown, result)
    traces.append(_marks_trace(shown.reached, "reached", trials))
    traces.append(_marks_trace(shown.stopped, "stopped", trials))
    for star in shown.stars:
        traces.append(_star_trace(star, shown))
    if shown.baseline is not None:
        traces.append(_baseline_trace(shown.baseline, shown, trials))
    title = "steps to target S"
    if shown.merit == "time":
        title = "time to target T (seconds)"
    x_range, y_range = _limits(shown)
    layout: Layout = {
        "xaxis": axis("batch size B (examples)", **x_range),
        "yaxis": axis(title, **y_range),
    }
    critical = shown_critical(result)
    # Where no range is stated plotly chooses one, whose ends are not known here.
    if critical is not None and x_range:
        log_start, log_end = x_range["range"]
        layout |= _critical_marks(critical, 10.0**log_start, 10.0**log_end)
    return chart(traces, layout, alt=_frontier_text(shown, result, title))


def _limits(shown: Panel) -> tuple[Layout, Layout]:
    """Give plotly's ranges of both axes: around trials that reached the target, and the winners.

    The baseline is within them, too. Both are empty where no trial reached the target.
    """
    # Without a range plotly chooses one that shows all.
    if not shown.reached:
        return {}, {}
    batch_sizes = list[float]()
    heights = list[float | None]()
    for mark in shown.reached:
        batch_sizes.append(mark.batch_size)
        heights.append(mark.height)
    if shown.baseline is not None:
        batch_sizes.append(shown.baseline.batch_size)
        heights.append(shown.baseline.height)
    for star in shown.stars:
        batch_sizes.append(star.winner.batch_size)
        heights += (star.value, star.low, star.high)
    known_heights = [height for height in heights if height]
    return log_range(batch_sizes, pad=0.12), log_range(known_heights, pad=0.15)


def _frontier_text(shown: Panel, result: StudyResult, title: str) -> str:
    """Say what the chart of steps or of time shows, for those who do not see it."""
    sentences = [f"{title} over batch size."]
    reached = plural(len(shown.reached), "trial")
    stopped = format_count(len(shown.stopped))
    sentences.append(f"{reached} reached the target, {stopped} were stopped.")
    band = shown.band
    if band is not None:
        first_value = merit_text(shown.merit, band.middle[0])
        last_value = merit_text(shown.merit, band.middle[-1])
        smallest = format_count(band.batch_size[0])
        largest = format_count(band.batch_size[-1])
        sentences.append(
            f"From {first_value} at batch size {smallest} to {last_value} at {largest}."
        )
    critical = shown_critical(result)
    if critical is not None:
        sentences.append(f"Critical batch size {critical_text(critical)}.")
    for star in shown.stars:
        value = merit_text(shown.merit, star.value)
        size = format_count(star.winner.batch_size)
        sentences.append(f"{star.heading.capitalize()}: batch size {size}, {value}.")
    if shown.baseline is not None and shown.baseline.height:
        value = merit_text(shown.merit, shown.baseline.height)
        sentences.append(f"{_baseline_name(shown.baseline).capitalize()}: {value}.")
    return " ".join(sentences)


def _curve_traces(shown: Panel, result: StudyResult) -> list[Trace]:
    """Give the curve S*(B), the fewest steps, or S*(B) tau(B), the seconds, with its band.

    A chart of steps gets the line of perfect scaling, too. Empty where the curve is not known.
    """
    if shown.band is None:
        return []
    sizes = shown.band.batch_size
    hover = list[str]()
    for size, value in zip(sizes, shown.band.middle, strict=True):
        hover.append(f"B = {format_count(size)}: {merit_text(shown.merit, value)}")
    name = "S*(B), all trials"
    if shown.merit == "time":
        name = "S*(B) tau(B)"
    band = area_trace(sizes, shown.band.low, shown.band.high)
    traces = [band, line_trace(sizes, shown.band.middle, name, hover)]
    examples = perfect_scaling_examples(result)
    if shown.merit == "steps" and examples is not None:
        start, end = sizes[0], sizes[-1]
        heights = [examples / start, examples / end]
        name = "twice the batch, half the steps"
        traces.append(line_trace([start, end], heights, name, color="--faint", dash="dash"))
    return traces


def _critical_marks(critical: CriticalBatchSize, start: float, end: float) -> Layout:
    """Give the layout's entries that mark the critical batch size: a line, a span, and its name.

    ``start`` and ``end`` are the batch sizes at both ends of the axis. An open end of the interval
    reaches there.
    """
    value = critical.value
    low = critical.low
    high = critical.high
    if low is None and high is None:
        return {}
    tall = {"yref": "paper", "y0": 0, "y1": 1, "layer": "below"}
    span = {
        "x0": low or start,
        "x1": high or end,
        "fillcolor": "--interval",
        "line": {"width": 0},
    }
    shapes = [{"type": "rect", **span, **tall}]
    # The text is "90%: 41 to 110", and the level stands below the chart.
    name = interval_text(critical).partition(": ")[2]
    if value is not None:
        line = {"color": "--purple", "width": 2}
        shapes.append({"type": "line", "x0": value, "x1": value, **tall, "line": line})
        name = format_number(value, 2)
    # Without a value the name stands at an end of the interval, within the axis.
    named_size = value or low or high or start
    seen_size = min(max(named_size, start), end)
    # Plotly takes a shape's x as it is and an annotation's as its logarithm.
    note = {
        "x": math.log10(seen_size),
        "y": 1,
        "yref": "paper",
        "yanchor": "bottom",
        "showarrow": False,
        "font": {"color": "--purple"},
        "text": f"critical batch size {name}",
    }
    return {"shapes": shapes, "annotations": [note]}


def _star_trace(star: Star, shown: Panel) -> Trace:
    """Give a winner as a star, with its interval over fresh seeds."""
    winner = star.winner
    words = [f"{star.heading}: {winner_text(winner)}", expected_text(winner)]
    trace: Trace = {
        "type": "scatter",
        "mode": "markers",
        "name": star.heading,
        "x": [winner.batch_size],
        "y": [star.value],
        "marker": {"symbol": "star-open", "size": 17, "color": "--vermilion"},
        "hoverinfo": "text",
        "hovertext": "<br>".join(map(label, words)),
    }
    # The one to use is filled and named in place; the legend names the other.
    if star.is_use:
        outline = {"width": 1, "color": "--ground"}
        trace["marker"] |= {"symbol": "star", "line": outline}
        trace |= _name_beside(USE, "--vermilion", _side_of_name(shown, star.value, is_use=True))
    if star.low is not None and star.high is not None:
        trace["error_y"] = {
            "type": "data",
            "symmetric": False,
            "array": [star.high - star.value],
            "arrayminus": [star.value - star.low],
            "color": "--vermilion",
        }
    return trace


def _baseline_trace(mark: Mark, shown: Panel, trials: Mapping[int, TrialResult]) -> Trace:
    """Give the baseline's trial, hollow where it was stopped. ``trials`` are by number."""
    # A panel has a baseline only where that has a height.
    height = mark.height or 1.0
    lines = [_baseline_name(mark), *trial_lines(trials[mark.number])]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": YOURS,
        "x": [mark.batch_size],
        "y": [height],
        "marker": baseline_marker(mark.reached),
        "hoverinfo": "text",
        "hovertext": "<br>".join(map(label, lines)),
        **_name_beside(YOURS, "--green", _side_of_name(shown, height, is_use=False)),
    }


def _baseline_name(mark: Mark) -> str:
    """Write ``yours, batch size 64``, and whether it was stopped before the target."""
    name = f"{YOURS}, batch size {format_count(mark.batch_size)}"
    if mark.reached:
        return name
    return f"{name}, stopped before the target"


def _name_beside(words: str, colour: str, position: str) -> Trace:
    """Give the entries of a trace that write a name beside its mark, at plotly's ``position``."""
    return {
        "mode": "markers+text",
        "text": [words],
        "textposition": position,
        "textfont": {"color": colour},
    }


def _side_of_name(shown: Panel, height: float, is_use: bool) -> str:
    """Give plotly's position of the name of the winner to use, or of the baseline.

    The name of the higher one stands above its mark, the other below: so they do not overlap.
    ``height`` is that of the mark, and ``is_use`` whether it is the winner to use.
    """
    other_height: float | None = None
    if not is_use:
        for star in shown.stars:
            if star.is_use:
                other_height = star.value
    elif shown.baseline is not None:
        other_height = shown.baseline.height
    if other_height is None or height > other_height:
        return "top right"
    # Of two at one height the winner's name stands above.
    if height == other_height and is_use:
        return "top right"
    return "bottom right"


def _marks_trace(marks: Iterable[Mark], status: str, trials: Mapping[int, TrialResult]) -> Trace:
    """Give marks of a panel as dots, in the look of a status. ``trials`` are by number."""
    shown = list[TrialResult]()
    heights = list[float]()
    for mark in marks:
        if mark.height:
            shown.append(trials[mark.number])
            heights.append(mark.height)
    name = "stopped before it"
    if status == "reached":
        name = "reached the target"
    color, symbol = STATUS_LOOKS[status]
    return dots_trace(shown, heights, name, color, symbol)
