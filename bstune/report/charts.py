"""The charts of a study's page, each as HTML; empty where there is nothing to show.

They draw the rows that ``rows.py`` prepares, as the picture does. Each has a text of what it shows,
for those who do not see it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bstune.core.records import Merit, TrialResult
from bstune.report.answer import (
    critical_text,
    expected_text,
    growth_text,
    interval_text,
    winner_text,
)
from bstune.report.html import axis, chart, label, paragraph, text
from bstune.report.rows import (
    LAW,
    USE,
    YOURS,
    Band,
    Mark,
    Panel,
    Star,
    last_parts,
    panel,
    perfect_scaling_examples,
    rate_lines,
    shown_critical,
)
from bstune.report.schema import HardwareFile
from bstune.report.study_folder import StudyFolder
from bstune.result import CriticalAtTarget, CriticalBatchSize, StudyResult
from bstune.system.console import format_count, format_number, format_seconds, plural

# The most digits of a number in a chart's words.
WORD_DIGITS = 4
# The most points of a learning curve: hundreds of trials would make the page large.
CURVE_POINTS = 48
# The most classes of batch sizes among the learning curves; each has a look of its own.
CURVE_CLASSES = 4
# A class is told by its dash, too: colours alone do not tell it to everybody.
CLASS_LOOKS = (
    ("--blue", "solid"),
    ("--orange", "dash"),
    ("--green", "dot"),
    ("--purple", "dashdot"),
)
RATE_DASHES = {"none": "dot", "sqrt": "dash", "linear": "dashdot", LAW: "solid"}
STATUS_LOOKS = {
    "reached": ("--blue", "circle"),
    "stopped": ("--grey", "triangle-up-open"),
    "diverged": ("--vermilion", "x"),
}
# Of the line of memory over batch size.
MEMORY_POINTS = 33
BYTES_PER_MEBIBYTE = 2.0**20
# Plotly's own: a trace, and what a layout or an axis is told.
Trace = dict[str, Any]
Layout = dict[str, Any]


def curves(study: StudyFolder) -> str:
    """Draw steps and time to target over batch size."""
    steps = _frontier(study, panel(study.files.trials, study.result, "steps"))
    seconds = ""
    is_timed = any(trial.seconds_per_step for trial in study.files.trials)
    if is_timed:
        seconds = _frontier(study, panel(study.files.trials, study.result, "time"))
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


def _frontier(study: StudyFolder, shown: Panel) -> str:
    """Draw steps or time to target over batch size."""
    result = study.result
    trials = {trial.number: trial for trial in study.files.trials}
    # Plotly draws later traces over earlier ones: the winners and the baseline lie on top.
    traces = _curve_traces(shown, result)
    traces.append(_marks(shown.reached, "reached", trials))
    traces.append(_marks(shown.stopped, "stopped", trials))
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
    # Without a range of ours the axis is plotly's, whose ends are not known here.
    if critical is not None and x_range:
        log_start, log_end = x_range["range"]
        layout |= _critical_marks(critical, 10.0**log_start, 10.0**log_end)
    return chart(traces, layout, alt=_frontier_text(shown, result, title))


def _limits(shown: Panel) -> tuple[Layout, Layout]:
    """Give both axes' ranges: around what reached the target, the winners and the baseline."""
    # Of a study that failed all is shown: plotly's own range.
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
    return _range(batch_sizes, 0.12), _range(known_heights, 0.15)


def _frontier_text(shown: Panel, result: StudyResult, title: str) -> str:
    """Say what the chart of steps or of time shows."""
    sentences = [f"{title} over batch size."]
    reached = plural(len(shown.reached), "trial")
    stopped = format_count(len(shown.stopped))
    sentences.append(f"{reached} reached the target, {stopped} were stopped.")
    band = shown.band
    if band is not None:
        first_value = _merit_text(shown.merit, band.middle[0])
        last_value = _merit_text(shown.merit, band.middle[-1])
        smallest = format_count(band.batch_size[0])
        largest = format_count(band.batch_size[-1])
        sentences.append(
            f"From {first_value} at batch size {smallest} to {last_value} at {largest}."
        )
    critical = shown_critical(result)
    if critical is not None:
        sentences.append(f"Critical batch size {critical_text(critical)}.")
    for star in shown.stars:
        value = _merit_text(shown.merit, star.value)
        size = format_count(star.winner.batch_size)
        sentences.append(f"{star.heading.capitalize()}: batch size {size}, {value}.")
    if shown.baseline is not None and shown.baseline.height:
        value = _merit_text(shown.merit, shown.baseline.height)
        sentences.append(f"{_baseline_name(shown.baseline).capitalize()}: {value}.")
    return " ".join(sentences)


def _curve_traces(shown: Panel, result: StudyResult) -> list[Trace]:
    """Give S*(B), or S*(B) tau(B), with its band, and of steps the line of perfect scaling."""
    if shown.band is None:
        return []
    sizes = shown.band.batch_size
    hover = list[str]()
    for size, value in zip(sizes, shown.band.middle, strict=True):
        hover.append(f"B = {format_count(size)}: {_merit_text(shown.merit, value)}")
    name = "S*(B), all trials"
    if shown.merit == "time":
        name = "S*(B) tau(B)"
    traces = [_band(shown.band), _line(sizes, shown.band.middle, name, hover)]
    examples = perfect_scaling_examples(result)
    if shown.merit == "steps" and examples is not None:
        start, end = sizes[0], sizes[-1]
        heights = [examples / start, examples / end]
        name = "twice the batch, half the steps"
        traces.append(_line([start, end], heights, name, None, "--faint", "dash"))
    return traces


def _critical_marks(critical: CriticalBatchSize, start: float, end: float) -> Layout:
    """Give the layout's line and span of the critical batch size, with its name in place.

    ``start`` and ``end`` are the axis's, in examples: an open interval reaches them.
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
    # Its level stands below the chart.
    name = interval_text(critical).partition(": ")[2]
    if value is not None:
        line = {"color": "--purple", "width": 2}
        shapes.append({"type": "line", "x0": value, "x1": value, **tall, "line": line})
        name = format_number(value, 2)
    # Where the value is not known the name stands at an end that is, within the axis.
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
    """Give a winner with its range over fresh seeds; the one to use is filled and named."""
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
        trace |= _named(USE, "--vermilion", _side(shown, star.value, is_use=True))
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
    """Give the baseline's own run, hollow where it was stopped; ``trials`` are by number."""
    height = mark.height or 1.0
    lines = [_baseline_name(mark), *_trial_lines(trials[mark.number])]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": YOURS,
        "x": [mark.batch_size],
        "y": [height],
        "marker": _baseline_marker(mark.reached),
        "hoverinfo": "text",
        "hovertext": "<br>".join(map(label, lines)),
        **_named(YOURS, "--green", _side(shown, height, is_use=False)),
    }


def _baseline_marker(is_reached: bool) -> Trace:
    symbol = "square" if is_reached else "square-open"
    return {"symbol": symbol, "size": 10, "color": "--green"}


def _baseline_name(mark: Mark) -> str:
    name = f"{YOURS}, batch size {format_count(mark.batch_size)}"
    if mark.reached:
        return name
    return f"{name}, stopped before the target"


def _named(words: str, colour: str, position: str) -> Trace:
    return {
        "mode": "markers+text",
        "text": [words],
        "textposition": position,
        "textfont": {"color": colour},
    }


def _side(shown: Panel, height: float, is_use: bool) -> str:
    """Where a mark is named, so that the names of the two that are compared do not overlap.

    The higher one of the winner to use and the baseline is named above it, the other below.
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
    if height == other_height and is_use:
        return "top right"
    return "bottom right"


def _merit_text(merit: Merit, value: float) -> str:
    if merit == "time":
        return format_seconds(value)
    return f"{format_number(value, WORD_DIGITS)} steps"


def _band(rows: Band) -> Trace:
    return area(rows.batch_size, rows.low, rows.high)


def area(x: Sequence[float], low: Sequence[float], high: Sequence[float]) -> Trace:
    """Give the 90% band between two lines."""
    return {
        "type": "scatter",
        "mode": "lines",
        "line": {"width": 0},
        "hoverinfo": "skip",
        "name": "90% band",
        # Along the upper line and back along the lower one: plotly fills what that encloses.
        "x": [*x, *reversed(x)],
        "y": [*high, *reversed(low)],
        "fill": "toself",
        "fillcolor": "--band",
    }


def _line(
    x: Sequence[float],
    y: Sequence[float | None],
    name: str,
    hover: Sequence[str] | None = None,
    color: str = "--blue",
    dash: str = "solid",
    width: float = 2.0,
) -> Trace:
    """Give a line; without ``hover``, texts for each point, it shows none."""
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


def _marks(marks: Iterable[Mark], status: str, trials: Mapping[int, TrialResult]) -> Trace:
    """Give trials of a panel as dots, where they reached the target or what did not suffice.

    ``trials`` are by number.
    """
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
    return _dots(shown, heights, name, color, symbol)


def _dots(
    trials: Sequence[TrialResult],
    heights: Sequence[float | None],
    name: str,
    color: str,
    symbol: str = "circle",
) -> Trace:
    """Give trials as dots, each with what is known of it on hover."""
    batch_sizes = list[int]()
    hover = list[str]()
    for trial in trials:
        batch_sizes.append(trial.batch_size)
        # In a chart's text plotly breaks lines at this tag alone.
        hover.append("<br>".join(map(label, _trial_lines(trial))))
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


def _trial_lines(trial: TrialResult) -> list[str]:
    """Tell what is known of a trial, in lines."""
    configuration = [f"B = {format_count(trial.batch_size)}", f"lr = {format_number(trial.lr)}"]
    for name, value in trial.hyperparameters.items():
        configuration.append(f"{name} {format_number(value)}")
    steps = f"{trial.status}, after {format_count(trial.steps)} steps"
    if trial.reached:
        steps = f"{format_count(trial.steps)} steps (missed at {format_count(trial.steps_low)})"
    lines = [part_text(trial), ", ".join(configuration), steps]
    if trial.time_to_target is not None:
        lines.append(f"{format_seconds(trial.time_to_target)} to target")
    if trial.seconds_per_step is not None:
        lines.append(f"{format_seconds(trial.seconds_per_step)} a step")
    return lines


def part_text(trial: TrialResult) -> str:
    """Name a trial by its number, and the one that it runs again or continues."""
    words = f"trial {trial.number}"
    if trial.replicate_of is not None:
        words += f", {trial.replicate_of} again on a fresh seed"
    if trial.resumed_from is not None:
        words += f", continues {trial.resumed_from}"
    return words


def _range(values: Iterable[float], pad: float) -> Layout:
    """Give a logarithmic axis's range around the values; plotly's own, where there are none.

    ``pad``: what it has beyond them on either side, as a share of their span.
    """
    logs = [math.log10(value) for value in values if value > 0.0]
    if not logs:
        return {}
    # An octave at least: around a single value there is no span to take a share of.
    span = max(max(logs) - min(logs), 0.3)
    return {"range": [min(logs) - pad * span, max(logs) + pad * span]}


def learning_rates(study: StudyFolder) -> str:
    """Draw the learning rates of all trials over batch size.

    Beside them stand the best one, the scaling rules, and the trials' law.
    """
    result = study.result
    trials = last_parts(study.files.trials)
    if not trials:
        return ""
    traces = _best_rate_traces(result)
    traces += _rule_traces(result, trials)
    traces += _rates_by_status(trials)
    traces += _rates_to_compare(result)
    # Trials that failed may have learning rates far off, which leave the others no room.
    shown_rates = [trial.lr for trial in trials if trial.reached]
    point = "the study's reference"
    if result.curve is not None:
        shown_rates += result.curve.lr
        point = "the best learning rate at the middle of the curve"
    layout = {
        "xaxis": axis("batch size B (examples)"),
        "yaxis": axis("learning rate", **_range(shown_rates, 0.25)),
    }
    lines = "scaling rules"
    if result.lr_exponent is not None and result.lr_exponent.identified:
        lines += " and the trials' own law"
    caption = f"The {lines} go through one point: {point}."
    return chart(traces, layout, caption, alt=_rates_text(study))


def _best_rate_traces(result: StudyResult) -> list[Trace]:
    """Give the best learning rate at each batch size of the curve, with its band."""
    curve = result.curve
    if curve is None:
        return []
    hover = list[str]()
    for size, lr in zip(curve.batch_size, curve.lr, strict=True):
        hover.append(f"B = {format_count(size)}: lr = {format_number(lr)}")
    band = area(curve.batch_size, curve.lr_low, curve.lr_high)
    return [band, _line(curve.batch_size, curve.lr, "best learning rate", hover)]


def _rule_traces(result: StudyResult, trials: Sequence[TrialResult]) -> list[Trace]:
    """Give the scaling rules over the curve's batch sizes, else the trials', and their law."""
    batch_sizes = [trial.batch_size for trial in trials]
    start = min(batch_sizes)
    end = max(batch_sizes)
    if result.curve is not None:
        start = round(result.curve.batch_size[0])
        end = round(result.curve.batch_size[-1])
    traces = list[Trace]()
    for line in rate_lines(result, start, end):
        color = "--faint"
        width = 1.2
        if line.name == LAW:
            color = "--ink"
            width = 2.0
        # Two points are a whole line: both axes are logarithmic.
        rates = [line.at(line.start), line.at(line.end)]
        dash = RATE_DASHES[line.name]
        traces.append(_line([line.start, line.end], rates, line.words, None, color, dash, width))
    return traces


def _rates_by_status(trials: Sequence[TrialResult]) -> list[Trace]:
    """Give the trials' learning rates as dots, a trace a status, which the legend can hide."""
    traces = list[Trace]()
    for status, (color, symbol) in STATUS_LOOKS.items():
        ended_so = [trial for trial in trials if trial.status == status]
        rates = [trial.lr for trial in ended_so]
        traces.append(_dots(ended_so, rates, status, color, symbol))
    return traces


def _rates_to_compare(result: StudyResult) -> list[Trace]:
    """Give the learning rates of the winner to use and of the baseline."""
    traces = list[Trace]()
    common: Trace = {"type": "scatter", "mode": "markers", "hoverinfo": "text"}
    use = result.winner
    if use is not None:
        marker: Trace = {"symbol": "star", "size": 17, "color": "--vermilion"}
        place = {"x": [use.batch_size], "y": [use.lr], "name": USE, "marker": marker}
        words = label(f"{USE}: {winner_text(use)}")
        traces.append({**common, **place, "hovertext": words})
    baseline = result.baseline
    if baseline is not None:
        marker = _baseline_marker(baseline.status == "reached")
        place = {"x": [baseline.batch_size], "y": [baseline.lr], "name": YOURS, "marker": marker}
        size = format_count(baseline.batch_size)
        words = f"{YOURS}: B = {size}, lr = {format_number(baseline.lr)}"
        traces.append({**common, **place, "hovertext": words})
    return traces


def _rates_text(study: StudyFolder) -> str:
    """Say what the chart of learning rates shows."""
    result = study.result
    trials = last_parts(study.files.trials)
    rates = [trial.lr for trial in trials]
    span = f"{format_number(min(rates))} to {format_number(max(rates))}"
    sentences = [f"Learning rate over batch size: {plural(len(trials), 'trial')} at {span}."]
    curve = result.curve
    if curve is not None:
        first = f"{format_number(curve.lr[0])} at batch size {format_count(curve.batch_size[0])}"
        last = f"{format_number(curve.lr[-1])} at {format_count(curve.batch_size[-1])}"
        sentences.append(f"The best one goes from {first} to {last}.")
    law = result.lr_exponent
    if law is not None and law.identified:
        interval = f"{law.low:z.2f} to {law.high:z.2f}"
        sentences.append(f"It follows B^{law.exponent:z.2f} ({law.level:.0%}: {interval}).")
    return " ".join(sentences)


def over_target(result: StudyResult) -> str:
    """Draw the critical batch size at each target where it is known, or say why it is not."""
    if result.target_value is None:
        return ""
    if not result.over_target:
        note = result.over_target_note
        if result.critical_batch_size is None or not note:
            return ""
        return paragraph(f"Only known at the study's own target: {note}.")
    metric = result.metric
    targets = list[float]()
    values = list[float]()
    above = list[float]()
    below = list[float]()
    sizes = list[int]()
    hover = list[str]()
    for row in _by_target(result, result.target_value):
        if row.value is None:
            continue
        targets.append(row.target)
        values.append(row.value)
        above.append(_distance(row.value, row.high))
        below.append(_distance(row.value, row.low))
        size = 8
        if row.target == result.target_value:
            size = 12
        sizes.append(size)
        passed = f"passed by {plural(row.passed, 'trial')}"
        hover.append(f"{metric} {format_number(row.target)}: {critical_text(row)}; {passed}")
    trace = {
        "type": "scatter",
        "mode": "lines+markers",
        "x": targets,
        "y": values,
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": above,
            "arrayminus": below,
            "color": "--purple",
        },
        "line": {"color": "--purple", "dash": "dot"},
        "marker": {"size": sizes, "color": "--purple"},
        "hoverinfo": "text",
        "text": list(map(label, hover)),
        "showlegend": False,
    }
    layout = {
        "xaxis": axis(f"target: {metric}", log=False),
        "yaxis": axis("critical batch size (examples)"),
    }
    caption = (
        "From the same histories, at targets that enough trials passed; the large dot is this "
        "page's target."
    )
    if result.over_target_growth is not None:
        caption += f" It {growth_text(result.over_target_growth, metric)}."
    alt = f"Critical batch size over the target. {'. '.join(hover)}."
    return chart([trace], layout, caption, height=360, alt=alt)


def _by_target(result: StudyResult, goal: float) -> list[CriticalAtTarget]:
    """Give the critical batch size at each target in order, the study's ``goal`` among them."""
    # Of several rows at one target the last one counts.
    rows = {row.target: row for row in result.over_target}
    critical = result.critical_batch_size
    # At its own target the study's answer counts, which the console gives, too.
    if critical is not None:
        rows[goal] = CriticalAtTarget(
            target=goal,
            passed=result.statuses["reached"],
            value=critical.value,
            low=critical.low,
            high=critical.high,
        )
    return [rows[target] for target in sorted(rows)]


def _distance(value: float, end: float | None) -> float:
    """How far an end of an interval is from its value: an open one is drawn without a bar."""
    if end is None:
        return 0.0
    return abs(end - value)


@dataclass(frozen=True)
class _SizeClass:
    """Batch sizes whose learning curves look alike."""

    smallest: int
    """Of those that trials ran at, in examples."""
    largest: int
    """Of those that trials ran at, in examples."""
    trials: tuple[TrialResult, ...]
    """Their trials."""

    @property
    def name(self) -> str:
        """What the legend calls it."""
        if self.smallest == self.largest:
            return f"B = {format_count(self.smallest)}"
        return f"B = {format_count(self.smallest)} to {format_count(self.largest)}"


def _size_classes(trials: Sequence[TrialResult]) -> list[_SizeClass]:
    """Divide trials by their batch sizes into ranges that are equally wide in octaves.

    Those without a trial are left out.
    """
    logs = [math.log(trial.batch_size) for trial in trials]
    low = min(logs)
    high = max(logs)
    by_class: dict[int, list[TrialResult]] = {}
    for trial, log in zip(trials, logs, strict=True):
        share = 0.0
        if high > low:
            share = (log - low) / (high - low)
        # The largest batch size belongs to the last class, whose upper end it is.
        number = min(int(share * CURVE_CLASSES), CURVE_CLASSES - 1)
        by_class.setdefault(number, []).append(trial)
    classes = list[_SizeClass]()
    for number in sorted(by_class):
        members = by_class[number]
        sizes = [trial.batch_size for trial in members]
        classes.append(_SizeClass(min(sizes), max(sizes), tuple(members)))
    return classes


def learning_curves(study: StudyFolder) -> str:
    """Draw the metric over steps, a line a trial.

    A trial that was continued is the last of its parts, which has the whole history.
    """
    shown = list[TrialResult]()
    for trial in last_parts(study.files.trials):
        # The axis of steps is logarithmic: step 0 has no place on it.
        if any(step > 0 for step, _ in trial.history):
            shown.append(trial)
    if not shown:
        return ""
    goal = study.result.target_value
    classes = _size_classes(shown)
    reached = sum(trial.reached for trial in shown)
    traces = list[Trace]()
    for i, size_class in enumerate(classes):
        color, dash = CLASS_LOOKS[i]
        # The legend shows the first of a class, so that is one in full strength.
        ordered = sorted(size_class.trials, key=lambda trial: not trial.reached)
        for j, trial in enumerate(ordered):
            # Where none reached the target, faint lines would have nothing to stand out from.
            is_faint = reached > 0 and not trial.reached
            trace = _learning_curve(trial, is_faint)
            trace["name"] = size_class.name
            trace["legendgroup"] = str(i)
            trace["showlegend"] = j == 0
            trace["line"] = {"color": color, "dash": dash, "width": 1.5}
            traces.append(trace)
    scale = _metric_axis(shown, goal)
    layout: Layout = {
        "xaxis": axis("optimizer steps"),
        "yaxis": axis(study.result.metric, **scale),
    }
    # On a logarithmic axis a target of 0 or less has no place.
    if goal is not None and (goal > 0.0 or not scale["log"]):
        layout |= _target_line(goal, scale["log"])
    missed = len(shown) - reached
    caption = ""
    if goal is None:
        caption = "Each trial ends with its budget, or waits on the way."
    elif not reached:
        caption = "None reached the target (dashed line)."
    elif missed:
        caption = f"Faint: {plural(missed, 'trial')} that did not reach the target (dashed line)."
    return chart(traces, layout, caption, height=460, alt=_curves_text(study, shown, classes))


def _learning_curve(trial: TrialResult, is_faint: bool) -> Trace:
    """Give a trial's metric over its steps."""
    steps = list[int]()
    values = list[float | None]()
    for step, value in _thinned([pair for pair in trial.history if pair[0] > 0]):
        steps.append(step)
        values.append(value)
    opacity = 0.95
    if is_faint:
        opacity = 0.35
    return {
        "type": "scatter",
        "mode": "lines",
        "x": steps,
        "y": values,
        "opacity": opacity,
        "hoverinfo": "x+y+text",
        "text": "<br>".join(map(label, _trial_lines(trial))),
    }


def _metric_axis(trials: Sequence[TrialResult], goal: float | None) -> Layout:
    """Give the metric's axis: around what trials came to and the target.

    The gap between them is what a reader looks for where none reached it.
    """
    values = list[float]()
    # A trial that diverged, or a trial's start, would leave the others no room.
    near = list[float]()
    if goal is not None:
        near.append(goal)
    for trial in trials:
        for i, (_, value) in enumerate(trial.history):
            if value is None:
                continue
            values.append(value)
            if i > 0 and trial.status != "diverged":
                near.append(value)
    # Where all of them diverged, they are what there is to see.
    if len(near) < 2:
        near += values
    can_be_log = goal is None or goal > 0.0
    if can_be_log and all(value > 0.0 for value in values):
        return {"log": True, **_range(near, 0.05)}
    pad = 0.05 * max(max(near) - min(near), 1e-9)
    # The values of a folder may lie as far apart as floats can.
    if not math.isfinite(pad):
        return {"log": False}
    return {"log": False, "range": [min(near) - pad, max(near) + pad]}


def _target_line(goal: float, is_log: bool) -> Layout:
    """Give the layout's dashed line at the target, with its name."""
    line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": goal, "y1": goal}
    # Plotly takes a shape's y as it is and an annotation's as its logarithm.
    height = math.log10(goal) if is_log else goal
    note = {
        "xref": "paper",
        "x": 0,
        "xanchor": "left",
        "y": height,
        "yanchor": "bottom",
        "showarrow": False,
        "text": f"target {format_number(goal, WORD_DIGITS)}",
        "font": {"color": "--ink"},
    }
    return {
        "shapes": [line | {"line": {"color": "--ink", "width": 1, "dash": "dash"}}],
        "annotations": [note],
    }


def _curves_text(
    study: StudyFolder, shown: Sequence[TrialResult], classes: Sequence[_SizeClass]
) -> str:
    """Say what the learning curves show."""
    # A class has a sentence, as it has a look: what it says is seen at a glance in the chart.
    result = study.result
    sentences = [f"{result.metric} over optimizer steps: {plural(len(shown), 'trial')}."]
    for size_class in classes:
        reached = format_count(sum(trial.reached for trial in size_class.trials))
        count = plural(len(size_class.trials), "trial")
        sentences.append(f"{size_class.name}: {count}, {reached} reached the target.")
    why = result.unreached
    if why is not None and why.closest is not None:
        closest = format_number(why.closest.value, WORD_DIGITS)
        goal = format_number(result.target_value, WORD_DIGITS)
        sentences.append(f"The closest came to {closest}; the target is {goal}.")
    return " ".join(sentences)


def _thinned(history: Sequence[tuple[int, float | None]]) -> list[tuple[int, float | None]]:
    """Give at most ``CURVE_POINTS`` of a history, evenly over log steps, its ends among them."""
    if len(history) <= CURVE_POINTS:
        return list(history)
    log_first = math.log(history[0][0])
    log_last = math.log(history[-1][0])
    # Of several evaluations at one place the last one stays, so that the history's end does.
    by_place: dict[int, tuple[int, float | None]] = {}
    for pair in history:
        log_step = math.log(pair[0])
        place = round((CURVE_POINTS - 1) * (log_step - log_first) / (log_last - log_first))
        by_place[place] = pair
    # The first one stays, too: a curve begins where its trial was first seen.
    return [history[0], *(pair for pair in by_place.values() if pair != history[0])]


@dataclass(frozen=True)
class _Spent:
    """A trial of the search's progress."""

    trial: TrialResult
    seconds: float
    """Seconds that the search had spent at its end."""
    value: float | None
    """Seconds of training, or steps, that it took to the target."""
    best: float | None
    """The least of these so far, without runs on fresh seeds."""


def _spent(trials: Sequence[TrialResult], in_seconds: bool) -> list[_Spent]:
    rows = list[_Spent]()
    total = 0.0
    best: float | None = None
    for trial in trials:
        total += trial.train_seconds + trial.eval_seconds + trial.startup_seconds
        # In steps where no trial was timed: all of them then count alike.
        value: float | None = None
        if in_seconds:
            value = trial.time_to_target
        elif trial.reached:
            value = float(trial.steps)
        # Fresh seeds repeat a configuration, which the search had found before.
        if value is not None and trial.replicate_of is None:
            best = value if best is None else min(best, value)
        rows.append(_Spent(trial, total, value, best))
    return rows


def progress(study: StudyFolder) -> str:
    """Draw the best time, or steps, so far over what the search has spent."""
    trials = study.files.trials
    if not any(trial.reached for trial in trials):
        return ""
    in_seconds = any(trial.time_to_target is not None for trial in trials)
    rows = _spent(trials, in_seconds)
    spent = [row.seconds for row in rows]
    best_so_far = [row.best for row in rows]
    line = _line(spent, best_so_far, "best run so far", None, "--vermilion")
    # Stairs: it falls where a trial ends, and not on the way there.
    line["line"] |= {"shape": "hv"}
    searched = list[_Spent]()
    repeated = list[_Spent]()
    for row in rows:
        if row.value is None:
            continue
        if row.trial.replicate_of is None:
            searched.append(row)
        else:
            repeated.append(row)
    traces = [
        line,
        _spent_dots(searched, "trial that reached the target", "circle"),
        _spent_dots(repeated, "on a fresh seed", "diamond-open"),
    ]
    merit: Merit = "steps"
    title = "steps to target"
    if in_seconds:
        merit = "time"
        title = "time to target (seconds)"
    layout = {
        "xaxis": axis("seconds spent in trials", log=False, rangemode="tozero"),
        "yaxis": axis(title),
    }
    alt = f"Best {title} so far over seconds spent."
    last_row = rows[-1]
    if last_row.best is not None:
        seconds = format_seconds(last_row.seconds)
        best = _merit_text(merit, last_row.best)
        alt += f" {plural(len(rows), 'trial')} took {seconds}; best {best}."
    return chart(traces, layout, height=360, alt=alt)


def _spent_dots(rows: Sequence[_Spent], name: str, symbol: str) -> Trace:
    """Give trials of the search's progress as dots, over the seconds that were spent."""
    dots = _dots([row.trial for row in rows], [row.value for row in rows], name, "--blue", symbol)
    dots["x"] = [row.seconds for row in rows]
    return dots


def hardware(hardware: HardwareFile | None) -> str:
    """Show what the survey found; empty where there was none."""
    if hardware is None:
        return ""
    lines = [*hardware.derived.advice]
    if hardware.derived.bound:
        lines.insert(0, hardware.derived.bound)
    advice = "".join(f"<li>{text(line)}</li>" for line in lines)
    facts = paragraph(f"{hardware.device} in {hardware.precision}")
    charts = [_step_times(hardware), _memory(hardware), _roofline(hardware)]
    return f'{facts}<ul>{advice}</ul><div class="pair">{"".join(charts)}</div>'


def _step_times(hardware: HardwareFile) -> str:
    timings = hardware.measured.timings
    if not timings:
        return ""
    sizes = list[int]()
    seconds = list[float]()
    bare_seconds = list[float | None]()
    above = list[float]()
    below = list[float]()
    hover = list[str]()
    for row in timings:
        sizes.append(row.batch_size)
        seconds.append(row.seconds)
        bare_seconds.append(row.bare)
        above.append(row.high - row.seconds)
        below.append(row.seconds - row.low)
        rate = format_number(row.batch_size / row.seconds)
        took = format_seconds(row.seconds)
        hover.append(f"B = {format_count(row.batch_size)}: {took}, {rate} examples a second")
    bars: Trace = {"type": "data", "symmetric": False, "color": "--blue"}
    bars |= {"array": above, "arrayminus": below}
    measured = _line(sizes, seconds, "measured, with quartiles", hover)
    traces = [measured | {"mode": "lines+markers", "error_y": bars}]
    # A line through some of the batch sizes would look as if it had been measured at all.
    if all(bare_seconds):
        traces.append(_line(sizes, bare_seconds, "without the framework", None, "--grey", "dash"))
    layout = {"xaxis": axis("batch size B (examples)"), "yaxis": axis("seconds per step, tau(B)")}
    alt = f"Seconds per step over batch size. {hover[0]}. {hover[-1]}."
    return chart(traces, layout, height=380, alt=alt)


def _memory(hardware: HardwareFile) -> str:
    ceiling = hardware.ceiling
    sizes = list[int]()
    taken = list[float]()
    hover = list[str]()
    for probe in ceiling.probes:
        if not probe.peak_bytes:
            continue
        mebibytes = probe.peak_bytes / BYTES_PER_MEBIBYTE
        sizes.append(probe.batch_size)
        taken.append(mebibytes)
        size = format_count(probe.batch_size)
        hover.append(f"B = {size}: {format_count(mebibytes)} MiB, {probe.outcome}")
    if not sizes:
        return ""
    # Dots alone: the line between them is the model's.
    dots = _line(sizes, taken, "probes", hover)
    traces = [dots | {"mode": "markers", "marker": {"size": 9, "color": "--blue"}}]
    span = [ceiling.smallest, hardware.high]
    model = ceiling.model
    if model is not None:
        # Between logarithmic axes it is no straight line: two points would not do.
        batch_sizes = list[float]()
        predicted = list[float]()
        for i in range(MEMORY_POINTS):
            share = i / (MEMORY_POINTS - 1)
            batch_size = ceiling.smallest * (hardware.high / ceiling.smallest) ** share
            batch_sizes.append(batch_size)
            predicted_bytes = model.base + model.per_example * batch_size
            predicted.append(predicted_bytes / BYTES_PER_MEBIBYTE)
        traces.append(_line(batch_sizes, predicted, "base + B x an example's"))
    if ceiling.at.limit is not None:
        limit = ceiling.at.limit / BYTES_PER_MEBIBYTE
        traces.append(_line(span, [limit, limit], "limit", None, "--vermilion", "dash"))
    layout = {"xaxis": axis("batch size B (examples)"), "yaxis": axis("memory (MiB)")}
    alt = f"Memory over batch size: {plural(len(sizes), 'probe')}. {hover[-1]}."
    return chart(traces, layout, height=380, alt=alt)


def _roofline(hardware: HardwareFile) -> str:
    limits = hardware.limits
    if limits is None:
        return ""
    peak = limits.flops_per_second / 1e9
    ridge = limits.flops_per_second / limits.bytes_per_second
    intensities = list[float]()
    rates = list[float]()
    hover = list[str]()
    for row in hardware.derived.achieved:
        if not row.intensity:
            continue
        rate = row.share_of_peak * peak
        intensities.append(row.intensity)
        rates.append(rate)
        share = f"{row.share_of_peak:.1%} of the peak"
        hover.append(f"B = {format_count(row.batch_size)}: {format_number(rate)} GFLOP/s, {share}")
    if not intensities:
        return ""
    # The roof bends at the ridge alone; it reaches twice as far as what was measured.
    corners = sorted({min(ridge, *intensities) / 2.0, ridge, max(ridge, *intensities) * 2.0})
    roof = [min(peak, limits.bytes_per_second / 1e9 * intensity) for intensity in corners]
    steps = _line(intensities, rates, "whole step, measured", hover, "--purple")
    traces = [
        _line(corners, roof, "what the device can do", None, "--ink"),
        steps | {"mode": "lines+markers"},
    ]
    layout = {"xaxis": axis("FLOPs per byte moved"), "yaxis": axis("GFLOP/s")}
    parts = ["Roofline: GFLOP/s over FLOPs per byte moved.", f"{hover[0]}.", f"{hover[-1]}."]
    if hardware.derived.bound:
        parts.append(hardware.derived.bound)
    return chart(traces, layout, height=380, alt=" ".join(parts))
