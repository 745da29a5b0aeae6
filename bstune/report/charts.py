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

DIGITS = 4  # of a number in words, at most
CURVE_POINTS = 48  # of a learning curve, at most: the page is to stay small
CURVE_CLASSES = 4  # of batch sizes among the learning curves, at most
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
Trace = dict[str, Any]


def curves(study: StudyFolder) -> str:
    """Draw steps and time to target over batch size."""
    steps = _frontier(study, panel(study.files.trials, study.result, "steps"))
    seconds = ""
    if any(trial.seconds_per_step for trial in study.files.trials):
        seconds = _frontier(study, panel(study.files.trials, study.result, "time"))
    if not steps + seconds:
        return ""
    sentences = list[str]()
    critical = shown_critical(study.result)
    if critical is not None and not (critical.low is None and critical.high is None):
        sentences.append(f"Shaded: the critical batch size, {critical_text(critical)}.")
    sentences.append("Hollow triangles are trials that were stopped: they need more than that.")
    if study.result.baseline is not None:
        sentences.append(f"Square: {YOURS}, trial {study.result.baseline.number}.")
    return f'<div class="pair">{steps}{seconds}</div>{paragraph(" ".join(sentences), "faint")}'


def _frontier(study: StudyFolder, shown: Panel) -> str:
    """Draw steps or time to target over batch size."""
    result = study.result
    told = {trial.number: trial for trial in study.files.trials}
    traces = _curve_traces(shown, result)
    traces.append(_marks(shown.reached, "reached", told))
    traces.append(_marks(shown.stopped, "stopped", told))
    traces += [_star_trace(star, shown) for star in shown.stars]
    if shown.baseline is not None:
        traces.append(_baseline_trace(shown.baseline, shown, told))
    title = "steps to target S"
    if shown.merit == "time":
        title = "time to target T (seconds)"
    x_range, y_range = _limits(shown)
    layout: dict[str, Any] = {
        "xaxis": axis("batch size B (examples)", **x_range),
        "yaxis": axis(title, **y_range),
    }
    critical = shown_critical(result)
    if critical is not None and x_range:
        layout |= _critical_marks(critical, [10.0**end for end in x_range["range"]])
    return chart(traces, layout, alt=_frontier_text(shown, result, title))


def _limits(shown: Panel) -> tuple[dict[str, Any], dict[str, Any]]:
    """Give both axes' ranges: around what reached the target, the winners and the baseline."""
    marks = list(shown.reached)
    if shown.baseline is not None:
        marks.append(shown.baseline)
    sizes: list[float] = [mark.batch_size for mark in marks]
    heights = [mark.height for mark in marks if mark.height]
    for star in shown.stars:
        sizes.append(star.winner.batch_size)
        heights += [value for value in (star.value, star.low, star.high) if value]
    # Of a study that failed all is shown: plotly's own range.
    if not shown.reached:
        return {}, {}
    return _range(sizes, 0.12), _range(heights, 0.15)


def _frontier_text(shown: Panel, result: StudyResult, title: str) -> str:
    """Say what the chart of steps or of time shows."""
    sentences = [f"{title} over batch size."]
    reached, stopped = plural(len(shown.reached), "trial"), len(shown.stopped)
    sentences.append(f"{reached} reached the target, {format_count(stopped)} were stopped.")
    if shown.band is not None:
        first = _merit_text(shown.merit, shown.band.middle[0])
        last = _merit_text(shown.merit, shown.band.middle[-1])
        ends = [format_count(shown.band.batch_size[i]) for i in (0, -1)]
        sentences.append(f"From {first} at batch size {ends[0]} to {last} at {ends[1]}.")
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
        ends = [sizes[0], sizes[-1]]
        heights = [examples / end for end in ends]
        name = "twice the batch, half the steps"
        traces.append(_line(ends, heights, name, None, "--faint", "dash"))
    return traces


def _critical_marks(critical: CriticalBatchSize, ends: Sequence[float]) -> dict[str, Any]:
    """Give the layout's line and span of the critical batch size, its name in place; an open one reaches the ends."""
    value, low, high = critical.value, critical.low, critical.high
    if low is None and high is None:
        return {}
    tall = {"yref": "paper", "y0": 0, "y1": 1, "layer": "below"}
    span = {
        "x0": low or ends[0],
        "x1": high or ends[1],
        "fillcolor": "--interval",
        "line": {"width": 0},
    }
    shapes = [{"type": "rect", **span, **tall}]
    name = interval_text(critical).partition(": ")[2]
    if value is not None:
        line = {"color": "--purple", "width": 2}
        shapes.append({"type": "line", "x0": value, "x1": value, **tall, "line": line})
        name = format_number(value, 2)
    # Plotly takes a shape's x as it is and an annotation's as its logarithm.
    at = math.log10(min(max(value or low or high or ends[0], ends[0]), ends[1]))
    note = {
        "x": at,
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


def _baseline_trace(mark: Mark, shown: Panel, told: Mapping[int, TrialResult]) -> Trace:
    """Give the baseline's own run, hollow where it was stopped."""
    height = mark.height or 1.0
    symbol = "square" if mark.reached else "square-open"
    lines = [_baseline_name(mark), *_trial_lines(told[mark.number])]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": YOURS,
        "x": [mark.batch_size],
        "y": [height],
        "marker": {"symbol": symbol, "size": 10, "color": "--green"},
        "hoverinfo": "text",
        "hovertext": "<br>".join(map(label, lines)),
        **_named(YOURS, "--green", _side(shown, height, is_use=False)),
    }


def _baseline_name(mark: Mark) -> str:
    how = "" if mark.reached else ", stopped before the target"
    return f"{YOURS}, batch size {format_count(mark.batch_size)}{how}"


def _named(words: str, colour: str, position: str) -> Trace:
    return {
        "mode": "markers+text",
        "text": [words],
        "textposition": position,
        "textfont": {"color": colour},
    }


def _side(shown: Panel, height: float, is_use: bool) -> str:
    """Where a mark is named: the higher one of the winner to use and the baseline above it, the other below."""
    use = next((star.value for star in shown.stars if star.is_use), None)
    other = use
    if is_use:
        other = None if shown.baseline is None else shown.baseline.height
    if other is None or height > other or (height == other and is_use):
        return "top right"
    return "bottom right"


def _merit_text(merit: Merit, value: float) -> str:
    if merit == "time":
        return format_seconds(value)
    return f"{format_number(value, DIGITS)} steps"


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


def _marks(marks: Iterable[Mark], status: str, told: Mapping[int, TrialResult]) -> Trace:
    """Give trials of a panel as dots, where they reached the target or what did not suffice."""
    shown = [mark for mark in marks if mark.height]
    trials = [told[mark.number] for mark in shown]
    name = "reached the target" if status == "reached" else "stopped before it"
    heights = [mark.height for mark in shown]
    color, symbol = STATUS_LOOKS[status]
    return _dots(trials, heights, name, color, symbol)


def _dots(
    trials: Sequence[TrialResult],
    heights: Sequence[float | None],
    name: str,
    color: str,
    symbol: str = "circle",
) -> Trace:
    """Give trials as dots, each with what is known of it on hover."""
    told = ["<br>".join(map(label, _trial_lines(trial))) for trial in trials]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [trial.batch_size for trial in trials],
        "y": list(heights),
        "marker": {"color": color, "symbol": symbol, "size": 7, "opacity": 0.8},
        "hoverinfo": "text",
        "text": told,
    }


def _trial_lines(trial: TrialResult) -> list[str]:
    """Tell what is known of a trial, in lines."""
    place = [f"B = {format_count(trial.batch_size)}", f"lr = {format_number(trial.lr)}"]
    place += [f"{name} {format_number(value)}" for name, value in trial.hyperparameters.items()]
    steps = f"{trial.status}, after {format_count(trial.steps)} steps"
    if trial.reached:
        steps = f"{format_count(trial.steps)} steps (missed at {format_count(trial.steps_low)})"
    lines = [part_text(trial), ", ".join(place), steps]
    if trial.time_to_target is not None:
        lines.append(f"{format_seconds(trial.time_to_target)} to target")
    if trial.seconds_per_step is not None:
        lines.append(f"{format_seconds(trial.seconds_per_step)} a step")
    return lines


def part_text(trial: TrialResult) -> str:
    """Name a trial by its number, and the one that it runs again or continues."""
    again = "" if trial.replicate_of is None else f", {trial.replicate_of} again on a fresh seed"
    more = "" if trial.resumed_from is None else f", continues {trial.resumed_from}"
    return f"trial {trial.number}{again}{more}"


def _range(values: Iterable[float], pad: float) -> dict[str, Any]:
    """Give a logarithmic axis's range around the values, its pad in shares of their span; plotly's own of none."""
    logs = [math.log10(value) for value in values if value > 0.0]
    if not logs:
        return {}
    span = max(max(logs) - min(logs), 0.3)
    return {"range": [min(logs) - pad * span, max(logs) + pad * span]}


def learning_rates(study: StudyFolder) -> str:
    """Draw the learning rates of all trials over batch size, the best one, the scaling rules, and the trials' law."""
    result, trials = study.result, last_parts(study.files.trials)
    if not trials:
        return ""
    sizes = [trial.batch_size for trial in trials]
    start, end = min(sizes), max(sizes)
    traces: list[Trace] = []
    curve = result.curve
    if curve is not None:
        start, end = round(curve.batch_size[0]), round(curve.batch_size[-1])
        traces.append(area(curve.batch_size, curve.lr_low, curve.lr_high))
        hover = list[str]()
        for size, lr in zip(curve.batch_size, curve.lr, strict=True):
            hover.append(f"B = {format_count(size)}: lr = {format_number(lr)}")
        traces.append(_line(curve.batch_size, curve.lr, "best learning rate", hover))
    for line in rate_lines(result, start, end):
        ends = [line.start, line.end]
        rates = [line.at(end) for end in ends]
        color, width = ("--ink", 2.0) if line.name == LAW else ("--faint", 1.2)
        traces.append(_line(ends, rates, line.words, None, color, RATE_DASHES[line.name], width))
    for status, (color, symbol) in STATUS_LOOKS.items():
        some = [trial for trial in trials if trial.status == status]
        traces.append(_dots(some, [trial.lr for trial in some], status, color, symbol))
    traces += _rates_to_compare(result)
    shown = [trial.lr for trial in trials if trial.reached]
    if curve is not None:
        shown += curve.lr
    layout = {
        "xaxis": axis("batch size B (examples)"),
        "yaxis": axis("learning rate", **_range(shown, 0.25)),
    }
    through = "the study's reference"
    if curve is not None:
        through = "the best learning rate at the middle of the curve"
    what = "scaling rules"
    if result.lr_exponent is not None and result.lr_exponent.identified:
        what += " and the trials' own law"
    caption = f"The {what} go through one point: {through}."
    return chart(traces, layout, caption, alt=_rates_text(study))


def _rates_to_compare(result: StudyResult) -> list[Trace]:
    """Give the learning rates of the winner to use and of the baseline."""
    traces = list[Trace]()
    use, baseline = result.winner, result.baseline
    if use is not None:
        marker: Trace = {"symbol": "star", "size": 17, "color": "--vermilion"}
        place = {"x": [use.batch_size], "y": [use.lr], "name": USE, "marker": marker}
        traces.append({**place, "hovertext": label(f"{USE}: {winner_text(use)}")})
    if baseline is not None:
        symbol = "square" if baseline.status == "reached" else "square-open"
        marker = {"symbol": symbol, "size": 10, "color": "--green"}
        place = {"x": [baseline.batch_size], "y": [baseline.lr], "name": YOURS, "marker": marker}
        words = f"B = {format_count(baseline.batch_size)}, lr = {format_number(baseline.lr)}"
        traces.append({**place, "hovertext": f"{YOURS}: {words}"})
    common = {"type": "scatter", "mode": "markers", "hoverinfo": "text"}
    return [common | trace for trace in traces]


def _rates_text(study: StudyFolder) -> str:
    """Say what the chart of learning rates shows."""
    result, trials = study.result, last_parts(study.files.trials)
    rates = [trial.lr for trial in trials]
    span = f"{format_number(min(rates))} to {format_number(max(rates))}"
    sentences = [f"Learning rate over batch size: {plural(len(trials), 'trial')} at {span}."]
    curve = result.curve
    if curve is not None:
        first, last = format_number(curve.lr[0]), format_number(curve.lr[-1])
        ends = [format_count(curve.batch_size[i]) for i in (0, -1)]
        sentences.append(
            f"The best one goes from {first} at batch size {ends[0]} to {last} at {ends[1]}."
        )
    law = result.lr_exponent
    if law is not None and law.identified:
        interval = f"{law.low:z.2f} to {law.high:z.2f}"
        sentences.append(f"It follows B^{law.exponent:z.2f} ({law.level:.0%}: {interval}).")
    return " ".join(sentences)


def over_target(result: StudyResult) -> str:
    """Draw the critical batch size at each target where it is known, or say why it is not."""
    critical, goal, metric = result.critical_batch_size, result.target_value, result.metric
    if goal is None:
        return ""
    rows = list(result.over_target)
    if not rows:
        note = result.over_target_note
        if critical is None or not note:
            return ""
        return paragraph(f"Only known at the study's own target: {note}.")
    if critical is not None:
        own = CriticalAtTarget(
            target=goal,
            passed=result.statuses["reached"],
            value=critical.value,
            low=critical.low,
            high=critical.high,
        )
        rows.append(own)
    # Of several rows at one target the last one counts.
    known = {row.target: row for row in rows}
    seen = list[CriticalAtTarget]()
    values, up, down = list[float](), list[float](), list[float]()
    hover = list[str]()
    for target in sorted(known):
        row = known[target]
        if row.value is None:
            continue
        seen.append(row)
        values.append(row.value)
        up.append(0.0 if row.high is None else abs(row.high - row.value))
        down.append(0.0 if row.low is None else abs(row.low - row.value))
        passed = f"passed by {plural(row.passed, 'trial')}"
        hover.append(f"{metric} {format_number(target)}: {critical_text(row)}; {passed}")
    trace = {
        "type": "scatter",
        "mode": "lines+markers",
        "x": [row.target for row in seen],
        "y": values,
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": up,
            "arrayminus": down,
            "color": "--purple",
        },
        "line": {"color": "--purple", "dash": "dot"},
        "marker": {
            "size": [12 if row.target == goal else 8 for row in seen],
            "color": "--purple",
        },
        "hoverinfo": "text",
        "text": list(map(label, hover)),
        "showlegend": False,
    }
    layout = {
        "xaxis": axis(f"target: {metric}", log=False),
        "yaxis": axis("critical batch size (examples)"),
    }
    caption = "From the same histories, at targets that enough trials passed; the large dot is this page's target."
    if result.over_target_growth is not None:
        caption += f" It {growth_text(result.over_target_growth, metric)}."
    alt = f"Critical batch size over the target. {'. '.join(hover)}."
    return chart([trace], layout, caption, height=360, alt=alt)


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
    """Divide trials by their batch sizes, into ranges as wide as each other in octaves; empty ones are left out."""
    logs = [math.log(trial.batch_size) for trial in trials]
    low, high = min(logs), max(logs)
    divided: list[list[TrialResult]] = [[] for _ in range(CURVE_CLASSES)]
    for trial, log in zip(trials, logs, strict=True):
        share = (log - low) / (high - low) if high > low else 0.0
        divided[min(int(share * CURVE_CLASSES), CURVE_CLASSES - 1)].append(trial)
    classes = list[_SizeClass]()
    for some in divided:
        if some:
            sizes = [trial.batch_size for trial in some]
            classes.append(_SizeClass(min(sizes), max(sizes), tuple(some)))
    return classes


def learning_curves(study: StudyFolder) -> str:
    """Draw the metric over steps, a line a trial: a trial that was continued is the last of its parts."""
    shown = list[TrialResult]()
    for trial in last_parts(study.files.trials):
        if any(step > 0 for step, _ in trial.history):
            shown.append(trial)
    if not shown:
        return ""
    metric, goal = study.result.metric, study.result.target_value
    classes = _size_classes(shown)
    any_reached = any(trial.reached for trial in shown)
    traces = list[Trace]()
    for i, one in enumerate(classes):
        color, dash = CLASS_LOOKS[i]
        # The legend shows the first of a class, so that is one in full strength.
        ordered = sorted(one.trials, key=lambda trial: not trial.reached)
        for j, trial in enumerate(ordered):
            traces.append(
                _learning_curve(trial, is_faint=any_reached and not trial.reached)
                | {
                    "name": one.name,
                    "legendgroup": str(i),
                    "showlegend": j == 0,
                    "line": {"color": color, "dash": dash, "width": 1.5},
                }
            )
    scale = _metric_axis(shown, goal)
    layout: dict[str, Any] = {
        "xaxis": axis("optimizer steps"),
        "yaxis": axis(metric, **scale),
    }
    if goal is not None and (goal > 0.0 or not scale["log"]):
        layout |= _target_line(goal, scale["log"])
    missed = sum(not trial.reached for trial in shown)
    caption = ""
    if goal is None:
        caption = "Each trial ends with its budget, or waits on the way."
    elif missed == len(shown):
        caption = "None reached the target (dashed line)."
    elif missed:
        caption = f"Faint: {plural(missed, 'trial')} that did not reach the target (dashed line)."
    return chart(traces, layout, caption, height=460, alt=_curves_text(study, shown, classes))


def _learning_curve(trial: TrialResult, is_faint: bool) -> Trace:
    """Give a trial's metric over its steps."""
    history = _thinned([pair for pair in trial.history if pair[0] > 0])
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [step for step, _ in history],
        "y": [value for _, value in history],
        "opacity": 0.35 if is_faint else 0.95,
        "hoverinfo": "x+y+text",
        "text": "<br>".join(map(label, _trial_lines(trial))),
    }


def _metric_axis(trials: Sequence[TrialResult], goal: float | None) -> dict[str, Any]:
    """Give the metric's axis: around what trials came to, and the target, so that the gap to it is seen."""
    values = [value for trial in trials for _, value in trial.history if value is not None]
    is_log = (goal is None or goal > 0.0) and all(value > 0.0 for value in values)
    # One that diverged, or its start, would leave the others no room.
    near = list[float]() if goal is None else [goal]
    for trial in trials:
        if trial.status != "diverged":
            near += [value for _, value in trial.history[1:] if value is not None]
    if len(near) < 2:
        near += values
    if is_log:
        return {"log": True, **_range(near, 0.05)}
    pad = 0.05 * max(max(near) - min(near), 1e-9)
    if not math.isfinite(pad):
        return {"log": False}
    return {"log": False, "range": [min(near) - pad, max(near) + pad]}


def _target_line(goal: float, is_log: bool) -> dict[str, Any]:
    """Give the layout's dashed line at the target, with its name."""
    line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": goal, "y1": goal}
    note = {
        "xref": "paper",
        "x": 0,
        "xanchor": "left",
        "y": math.log10(goal) if is_log else goal,
        "yanchor": "bottom",
        "showarrow": False,
        "text": f"target {format_number(goal, DIGITS)}",
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
    result = study.result
    sentences = [f"{result.metric} over optimizer steps: {plural(len(shown), 'trial')}."]
    for one in classes:
        reached = sum(trial.reached for trial in one.trials)
        count = plural(len(one.trials), "trial")
        sentences.append(f"{one.name}: {count}, {format_count(reached)} reached the target.")
    why = result.unreached
    if why is not None and why.closest is not None:
        closest = format_number(why.closest.value, DIGITS)
        goal = format_number(result.target_value, DIGITS)
        sentences.append(f"The closest came to {closest}; the target is {goal}.")
    return " ".join(sentences)


def _thinned(history: Sequence[tuple[int, float | None]]) -> list[tuple[int, float | None]]:
    """Give at most ``CURVE_POINTS`` of a history, evenly over log steps, its ends among them."""
    if len(history) <= CURVE_POINTS:
        return list(history)
    first, last = math.log(history[0][0]), math.log(history[-1][0])
    kept: dict[int, tuple[int, float | None]] = {}
    for pair in history:
        place = round((CURVE_POINTS - 1) * (math.log(pair[0]) - first) / (last - first))
        kept[place] = pair  # the last one there
    return [history[0], *(pair for pair in kept.values() if pair != history[0])]


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
        value = trial.time_to_target
        if not in_seconds:
            value = float(trial.steps) if trial.reached else None
        if value is not None and trial.replicate_of is None and (best is None or value < best):
            best = value
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
    best = _line(spent, [row.best for row in rows], "best run so far", None, "--vermilion")
    best["line"] |= {"shape": "hv"}
    traces = [best]
    kinds = (
        (False, "trial that reached the target", "circle"),
        (True, "on a fresh seed", "diamond-open"),
    )
    for is_again, name, symbol in kinds:
        some = list[_Spent]()
        for row in rows:
            if row.value is not None and (row.trial.replicate_of is not None) == is_again:
                some.append(row)
        heights = [row.value for row in some]
        dots = _dots([row.trial for row in some], heights, name, "--blue", symbol)
        traces.append(dots | {"x": [row.seconds for row in some]})
    title = "time to target (seconds)" if in_seconds else "steps to target"
    layout = {
        "xaxis": axis("seconds spent in trials", log=False, rangemode="tozero"),
        "yaxis": axis(title),
    }
    merit: Merit = "time" if in_seconds else "steps"
    alt = f"Best {title} so far over seconds spent."
    last = rows[-1]
    if last.best is not None:
        found = _merit_text(merit, last.best)
        alt += f" {plural(len(rows), 'trial')} took {format_seconds(last.seconds)}; best {found}."
    return chart(traces, layout, height=360, alt=alt)


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
    sizes = [row.batch_size for row in timings]
    hover = list[str]()
    for row in timings:
        rate = format_number(row.batch_size / row.seconds)
        took = format_seconds(row.seconds)
        hover.append(f"B = {format_count(row.batch_size)}: {took}, {rate} examples a second")
    bars = {"type": "data", "symmetric": False, "color": "--blue"}
    bars["array"] = [row.high - row.seconds for row in timings]
    bars["arrayminus"] = [row.seconds - row.low for row in timings]
    measured = _line(sizes, [row.seconds for row in timings], "measured, with quartiles", hover)
    traces = [measured | {"mode": "lines+markers", "error_y": bars}]
    if all(row.bare for row in timings):
        bare = [row.bare for row in timings]
        traces.append(_line(sizes, bare, "without the framework", None, "--grey", "dash"))
    layout = {"xaxis": axis("batch size B (examples)"), "yaxis": axis("seconds per step, tau(B)")}
    alt = f"Seconds per step over batch size. {hover[0]}. {hover[-1]}."
    return chart(traces, layout, height=380, alt=alt)


def _memory(hardware: HardwareFile) -> str:
    ceiling = hardware.ceiling
    mebi = 2.0**20
    sizes, taken, hover = list[int](), list[float](), list[str]()
    for probe in ceiling.probes:
        if not probe.peak_bytes:
            continue
        size, mebibytes = probe.batch_size, probe.peak_bytes / mebi
        sizes.append(size)
        taken.append(mebibytes)
        hover.append(f"B = {format_count(size)}: {format_count(mebibytes)} MiB, {probe.outcome}")
    if not sizes:
        return ""
    dots = _line(sizes, taken, "probes", hover)
    traces = [dots | {"mode": "markers", "marker": {"size": 9, "color": "--blue"}}]
    model, ends = ceiling.model, [ceiling.smallest, hardware.high]
    if model is not None:
        line = [(model.base + model.per_example * size) / mebi for size in ends]
        traces.append(_line(ends, line, "base + B x an example's"))
    if ceiling.at.limit is not None:
        limit = ceiling.at.limit / mebi
        traces.append(_line(ends, [limit, limit], "limit", None, "--vermilion", "dash"))
    layout = {"xaxis": axis("batch size B (examples)"), "yaxis": axis("memory (MiB)")}
    alt = f"Memory over batch size: {plural(len(sizes), 'probe')}. {hover[-1]}."
    return chart(traces, layout, height=380, alt=alt)


def _roofline(hardware: HardwareFile) -> str:
    limits = hardware.limits
    if limits is None:
        return ""
    peak = limits.flops_per_second / 1e9
    ridge = limits.flops_per_second / limits.bytes_per_second
    at, reached, hover = list[float](), list[float](), list[str]()
    for row in hardware.derived.achieved:
        if not row.intensity:
            continue
        rate = row.share_of_peak * peak
        at.append(row.intensity)
        reached.append(rate)
        share = f"{row.share_of_peak:.1%} of the peak"
        hover.append(f"B = {format_count(row.batch_size)}: {format_number(rate)} GFLOP/s, {share}")
    if not at:
        return ""
    corners = sorted({min(ridge, *at) / 2.0, ridge, max(ridge, *at) * 2.0})
    roof = [min(peak, limits.bytes_per_second / 1e9 * x) for x in corners]
    steps = _line(at, reached, "whole step, measured", hover, "--purple")
    traces = [
        _line(corners, roof, "what the device can do", None, "--ink"),
        steps | {"mode": "lines+markers"},
    ]
    layout = {"xaxis": axis("FLOPs per byte moved"), "yaxis": axis("GFLOP/s")}
    parts = ["Roofline: GFLOP/s over FLOPs per byte moved.", f"{hover[0]}.", f"{hover[-1]}."]
    if hardware.derived.bound:
        parts.append(hardware.derived.bound)
    return chart(traces, layout, height=380, alt=" ".join(parts))
