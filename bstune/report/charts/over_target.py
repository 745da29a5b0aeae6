"""The critical batch size at other targets."""

from collections.abc import Sequence

from bstune.report.charts.traces import Trace
from bstune.report.html import axis, chart, label, paragraph
from bstune.report.lines.critical import growth_text
from bstune.report.words import critical_text
from bstune.result import CriticalAtTarget, StudyResult
from bstune.system.console import format_number, plural


def over_target(result: StudyResult) -> str:
    """Draw the critical batch size over targets, or say why it is known at the study's own alone.

    Empty where nothing is known of it.
    """
    # A study of the best metric within a budget has no target.
    if result.target_value is None:
        return ""
    if not result.over_target:
        note = result.over_target_note
        if result.critical_batch_size is None or not note:
            return ""
        return paragraph(f"Only known at the study's own target: {note}.")
    metric = result.metric
    rows = _by_target(result, result.target_value)
    hover = list[str]()
    for row in rows:
        if row.value is None:
            continue
        passed = f"passed by {plural(row.passed, 'trial')}"
        hover.append(f"{metric} {format_number(row.target)}: {critical_text(row)}; {passed}")
    trace = _critical_trace(rows, hover, result.target_value)
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


def _critical_trace(rows: Sequence[CriticalAtTarget], hover: Sequence[str], goal: float) -> Trace:
    """Give the critical batch size over targets as a line with marks and error bars.

    Targets at which it is not known are left out. ``hover`` has a text for each other one. The mark
    at ``goal``, the study's own target, is larger than the others.
    """
    targets = list[float]()
    values = list[float]()
    above = list[float]()
    below = list[float]()
    sizes = list[int]()
    for row in rows:
        if row.value is None:
            continue
        targets.append(row.target)
        values.append(row.value)
        above.append(_distance(row.value, row.high))
        below.append(_distance(row.value, row.low))
        size = 8
        if row.target == goal:
            size = 12
        sizes.append(size)
    return {
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


def _by_target(result: StudyResult, goal: float) -> list[CriticalAtTarget]:
    """Give the critical batch size at each target, in order. ``goal``: the study's own target."""
    # Of several rows at one target the last one counts.
    rows = {row.target: row for row in result.over_target}
    critical = result.critical_batch_size
    # At the study's own target its answer counts, which the console gives, too.
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
    """Give the length of an error bar to an end of an interval: 0 where that is open."""
    if end is None:
        return 0.0
    return abs(end - value)
