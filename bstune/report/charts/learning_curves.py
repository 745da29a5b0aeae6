"""The metric over steps, a line a trial."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bstune.core.records import TrialResult
from bstune.report.charts.traces import WORD_DIGITS, Layout, Trace, log_range, trial_lines
from bstune.report.html import axis, chart, label
from bstune.report.rows import last_part_of_each
from bstune.report.study_folder import StudyFolder
from bstune.system.console import format_count, format_number, plural

# The most points of a learning curve: hundreds of trials would make the page large.
CURVE_POINTS = 48
# The number of classes of batch sizes among the learning curves; each has a look of its own.
SIZE_CLASSES = 4
# A class has a dash of its own, too, for those who do not tell the colours apart.
CLASS_LOOKS = (
    ("--blue", "solid"),
    ("--orange", "dash"),
    ("--green", "dot"),
    ("--purple", "dashdot"),
)


@dataclass(frozen=True)
class _SizeClass:
    """A range of batch sizes whose learning curves are drawn alike."""

    smallest: int
    """The smallest batch size of its trials, in examples."""
    largest: int
    """The largest batch size of its trials, in examples."""
    trials: tuple[TrialResult, ...]
    """The trials at these batch sizes."""

    @property
    def name(self) -> str:
        """Its name in the legend, such as ``B = 8 to 40``."""
        if self.smallest == self.largest:
            return f"B = {format_count(self.smallest)}"
        return f"B = {format_count(self.smallest)} to {format_count(self.largest)}"


def _size_classes(trials: Sequence[TrialResult]) -> list[_SizeClass]:
    """Divide trials into ``SIZE_CLASSES`` ranges of batch sizes that are equally wide in octaves.

    Ranges without a trial are left out.
    """
    log_sizes = [math.log(trial.batch_size) for trial in trials]
    log_low = min(log_sizes)
    log_high = max(log_sizes)
    by_class: dict[int, list[TrialResult]] = {}
    for trial, log_size in zip(trials, log_sizes, strict=True):
        share = 0.0
        if log_high > log_low:
            share = (log_size - log_low) / (log_high - log_low)
        # The largest batch size belongs to the last class, whose upper end it is.
        number = min(int(share * SIZE_CLASSES), SIZE_CLASSES - 1)
        by_class.setdefault(number, []).append(trial)
    classes = list[_SizeClass]()
    for number in sorted(by_class):
        members = by_class[number]
        sizes = [trial.batch_size for trial in members]
        classes.append(_SizeClass(min(sizes), max(sizes), tuple(members)))
    return classes


def learning_curves(study: StudyFolder) -> str:
    """Draw the metric over steps, a line for each trial. Empty where no trial was evaluated.

    Of a trial in several parts the last one is drawn, which has the whole history.
    """
    shown = list[TrialResult]()
    for trial in last_part_of_each(study.files.trials):
        # The axis of steps is logarithmic: step 0 has no place on it.
        if any(step > 0 for step, _ in trial.history):
            shown.append(trial)
    if not shown:
        return ""
    goal = study.result.target_value
    # Batch sizes in a few ranges, each with a look of its own.
    classes = _size_classes(shown)
    reached = sum(trial.reached for trial in shown)
    traces = list[Trace]()
    for i, size_class in enumerate(classes):
        color, dash = CLASS_LOOKS[i]
        # The legend shows the first line of a class, so that must not be a faint one.
        ordered = sorted(size_class.trials, key=lambda trial: not trial.reached)
        for j, trial in enumerate(ordered):
            # Where no trial reached the target all lines have full strength.
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
    caption = _curves_caption(goal is not None, reached, missed=len(shown) - reached)
    return chart(traces, layout, caption, height=460, alt=_curves_text(study, shown, classes))


def _curves_caption(has_target: bool, reached: int, missed: int) -> str:
    """Write the caption: which trials reached the target. Empty where all of them did."""
    if not has_target:
        return "Each trial ends with its budget, or waits on the way."
    if not reached:
        return "None reached the target (dashed line)."
    if missed:
        return f"Faint: {plural(missed, 'trial')} that did not reach the target (dashed line)."
    return ""


def _learning_curve(trial: TrialResult, is_faint: bool) -> Trace:
    """Give the line of a trial's metric over its steps, faint or in full strength."""
    steps = list[int]()
    values = list[float | None]()
    # The axis of steps is logarithmic: step 0 has no place on it.
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
        "text": "<br>".join(map(label, trial_lines(trial))),
    }


def _metric_axis(trials: Sequence[TrialResult], goal: float | None) -> Layout:
    """Give the scale and the range of the metric's axis: around the trials' values and the target.

    The scale is logarithmic where all values and the target, ``goal``, are positive. The target is
    always within the range: how far trials are from it is what a reader looks for.
    """
    values = list[float]()
    # Diverged trials and the trials' starts are left out here: they would leave the others no room.
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
    # Where all trials diverged, they are all that there is to see.
    if len(near) < 2:
        near += values
    can_be_log = goal is None or goal > 0.0
    if can_be_log and all(value > 0.0 for value in values):
        return {"log": True, **log_range(near, pad=0.05)}
    pad = 0.05 * max(max(near) - min(near), 1e-9)
    # The values of a folder may lie as far apart as floats can.
    if not math.isfinite(pad):
        return {"log": False}
    return {"log": False, "range": [min(near) - pad, max(near) + pad]}


def _target_line(goal: float, is_log: bool) -> Layout:
    """Give the layout's entries of a dashed line at the target, ``goal``, with its name.

    ``is_log``: whether the metric's axis is logarithmic.
    """
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
    """Say what the learning curves show, for those who do not see them.

    ``shown``: the trials with a curve. ``classes``: the same, by ranges of the batch size; each has
    a sentence.
    """
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
    """Thin out a history to about ``CURVE_POINTS`` evaluations, evenly spaced in log steps.

    The first and the last evaluation stay. Steps must be above 0.
    """
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
