"""The learning rates of all trials over batch size, with the best one and the scaling rules."""

from collections.abc import Sequence

from bstune.core.records import TrialResult
from bstune.report.charts.traces import (
    STATUS_LOOKS,
    Trace,
    area_trace,
    baseline_marker,
    dots_trace,
    line_trace,
    log_range,
)
from bstune.report.html import axis, chart, label
from bstune.report.rows import LAW, USE, YOURS, last_part_of_each, rate_lines
from bstune.report.study_folder import StudyFolder
from bstune.report.words import winner_text
from bstune.result import StudyResult
from bstune.system.console import format_count, format_number, plural

# Rules are drawn in one colour: their dashes tell them apart.
RATE_DASHES = {"none": "dot", "sqrt": "dash", "linear": "dashdot", LAW: "solid"}
# The dash of any further rule.
OTHER_RATE_DASH = "longdash"


def learning_rates(study: StudyFolder) -> str:
    """Draw the learning rates of all trials over batch size. Empty without a trial.

    Beside them stand the best learning rate, the scaling rules, and the trials' own law.
    """
    result = study.result
    trials = last_part_of_each(study.files.trials)
    if not trials:
        return ""
    traces = _best_rate_traces(result)
    traces += _rule_traces(result, trials)
    traces += _rates_by_status(trials)
    traces += _rates_to_compare(result)
    # Trials that missed the target may have learning rates far off, which leave the others no room.
    shown_rates = [trial.lr for trial in trials if trial.reached]
    point = "the study's reference"
    if result.curve is not None:
        shown_rates += result.curve.lr
        point = "the best learning rate at the middle of the curve"
    layout = {
        "xaxis": axis("batch size B (examples)"),
        "yaxis": axis("learning rate", **log_range(shown_rates, pad=0.25)),
    }
    lines = "scaling rules"
    if result.lr_exponent is not None and result.lr_exponent.identified:
        lines += " and the trials' own law"
    caption = f"The {lines} go through one point: {point}."
    return chart(traces, layout, caption, alt=_rates_text(study))


def _best_rate_traces(result: StudyResult) -> list[Trace]:
    """Give the best learning rate over batch size, with its band. Empty without a curve."""
    curve = result.curve
    if curve is None:
        return []
    hover = list[str]()
    for size, lr in zip(curve.batch_size, curve.lr, strict=True):
        hover.append(f"B = {format_count(size)}: lr = {format_number(lr)}")
    band = area_trace(curve.batch_size, curve.lr_low, curve.lr_high)
    return [band, line_trace(curve.batch_size, curve.lr, "best learning rate", hover)]


def _rule_traces(result: StudyResult, trials: Sequence[TrialResult]) -> list[Trace]:
    """Give the lines of the scaling rules and of the trials' own law.

    They go over the batch sizes of the curve or, without one, of the trials.
    """
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
        rates = [line.lr_at(line.start), line.lr_at(line.end)]
        dash = RATE_DASHES.get(line.name, OTHER_RATE_DASH)
        traces.append(
            line_trace(
                [line.start, line.end], rates, line.words, color=color, dash=dash, width=width
            )
        )
    return traces


def _rates_by_status(trials: Sequence[TrialResult]) -> list[Trace]:
    """Give the trials' learning rates as dots, a trace for each status: the legend can hide one."""
    traces = list[Trace]()
    for status, (color, symbol) in STATUS_LOOKS.items():
        ended_so = [trial for trial in trials if trial.status == status]
        rates = [trial.lr for trial in ended_so]
        traces.append(dots_trace(ended_so, rates, status, color, symbol))
    return traces


def _rates_to_compare(result: StudyResult) -> list[Trace]:
    """Give the marks of the winner to use and of the baseline, at their learning rates."""
    traces = list[Trace]()
    common: Trace = {"type": "scatter", "mode": "markers", "hoverinfo": "text"}
    use = result.winner
    if use is not None:
        marker: Trace = {"symbol": "star", "size": 17, "color": "--vermilion"}
        place_and_look = {"x": [use.batch_size], "y": [use.lr], "name": USE, "marker": marker}
        words = label(f"{USE}: {winner_text(use)}")
        traces.append({**common, **place_and_look, "hovertext": words})
    baseline = result.baseline
    if baseline is not None:
        marker = baseline_marker(baseline.status == "reached")
        place_and_look = {
            "x": [baseline.batch_size],
            "y": [baseline.lr],
            "name": YOURS,
            "marker": marker,
        }
        size = format_count(baseline.batch_size)
        words = f"{YOURS}: B = {size}, lr = {format_number(baseline.lr)}"
        traces.append({**common, **place_and_look, "hovertext": words})
    return traces


def _rates_text(study: StudyFolder) -> str:
    """Say what the chart of learning rates shows, for those who do not see it."""
    result = study.result
    trials = last_part_of_each(study.files.trials)
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
