"""The page's chart of the objective loss: the metric at the budget's end over batch size."""

from bstune.report.budget_rows import BudgetRows, Dot, budget_rows
from bstune.report.charts.traces import Trace, area_trace
from bstune.report.html import axis, chart
from bstune.report.rows import YOURS, last_part_of_each
from bstune.report.study_folder import StudyFolder
from bstune.system.console import format_count, format_number, plural


def metric_at_budget(study: StudyFolder) -> str:
    """Draw the best metric over batch size with its interval, the trials, winner and baseline.

    Empty before a trial has run to its budget's end.
    """
    rows = budget_rows(last_part_of_each(study.files.trials), study.result)
    if rows is None:
        return ""
    # Plotly draws later traces over earlier ones: the winner and the baseline lie on top.
    traces = [
        area_trace(rows.batch_sizes, rows.low, rows.high),
        _curve_trace(rows),
        _dots_trace(rows.dots, "trials to the budget's end", "--blue", "circle", size=7),
        _dots_trace((rows.use,), "USE", "--vermilion", "star", size=17),
    ]
    if rows.baseline is not None:
        traces.append(_dots_trace((rows.baseline,), YOURS, "--green", "square", size=10))
    low, high = rows.shown
    # The axis is linear, as a metric may be 0 or less.
    layout = {
        "xaxis": axis("batch size B (examples)"),
        "yaxis": axis(rows.title, log=False, range=[low, high]),
    }
    caption = (
        "Line and band: the best learning rate at each batch size, without a seed's luck, and its "
        "90% interval."
    )
    return chart(traces, layout, caption, alt=_alt_text(rows))


def _curve_trace(rows: BudgetRows) -> Trace:
    """Give the line of the best metric at each batch size."""
    hover = list[str]()
    for size, value, lr in zip(rows.batch_sizes, rows.values, rows.lrs, strict=True):
        metric = f"{rows.metric} {format_number(value)}"
        hover.append(f"B = {format_count(size)}: {metric} at lr = {format_number(lr)}")
    return {
        "type": "scatter",
        "mode": "lines",
        "x": list(rows.batch_sizes),
        "y": list(rows.values),
        "name": "best at each batch size",
        "line": {"color": "--blue", "width": 2},
        "hoverinfo": "text",
        "hovertext": hover,
    }


def _dots_trace(dots: tuple[Dot, ...], name: str, color: str, symbol: str, size: int) -> Trace:
    """Give dots as marks of one look. ``name`` stands in the legend; ``size`` is in pixels."""
    batch_sizes = list[int]()
    values = list[float]()
    hover = list[str]()
    for dot in dots:
        batch_sizes.append(dot.batch_size)
        values.append(dot.value)
        hover.append(dot.words)
    return {
        "type": "scatter",
        "mode": "markers",
        "x": batch_sizes,
        "y": values,
        "name": name,
        "marker": {"symbol": symbol, "size": size, "color": color},
        "hoverinfo": "text",
        "hovertext": hover,
    }


def _alt_text(rows: BudgetRows) -> str:
    """Say what the chart shows, for those who do not see it."""
    sentences = [f"{rows.title} over batch size: {plural(len(rows.dots), 'trial')}."]
    for dot in (rows.use, rows.baseline):
        if dot is not None:
            sentences.append(f"{dot.words}, {rows.metric} {format_number(dot.value)}.")
    return " ".join(sentences)
