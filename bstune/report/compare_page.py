"""The page ``comparison.html``: what the figure has, with every number on hover, and the table of the studies."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bstune.core.console import format_count, format_number, format_seconds
from bstune.report.compare import Comparison, Compared, law, mark
from bstune.report.html import Cell, Section, axis, chart, label, page, paragraph, table

COLOURS = ("--blue", "--vermilion", "--green", "--purple", "--orange", "--sky", "--ink")  # as the figure's
SYMBOLS = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "x")


def comparison_page(found: Comparison) -> str:
    """Return the page of a comparison."""
    sections = [
        Section("", "\n".join(paragraph(line, "warning") for line in (*found.differences, *found.left_out))),
        Section("Studies", _table(found.studies) + _notes(found.studies)),
        Section("Steps to target", chart(_curves(found.studies), _axes("steps to target S"), "Each curve's B_crit is marked.")),
        Section("One law", _collapse(found)),
        Section("Critical batch sizes", _critical(found)),
        Section("Time to target", _times(found.studies)),
    ]
    return page(found.title, sections)


def _look(i: int) -> dict[str, Any]:
    return {"color": COLOURS[i % len(COLOURS)], "symbol": SYMBOLS[(i + i // len(COLOURS)) % len(SYMBOLS)]}


def _axes(y: str, **changes: Any) -> dict[str, Any]:
    return {"xaxis": axis("batch size B (examples per optimizer step)"), "yaxis": axis(y), **changes}


def _table(studies: Sequence[Compared]) -> str:
    heads = ("study", "workload", "target", "device", "use B", "learning rate", "time to target", "steps", "B_crit",
             "exponent of lr*(B)", "spent")  # fmt: skip
    return table(heads, [_row(study) for study in studies])


def _row(study: Compared) -> list[Cell | str]:
    use = study.use
    return [
        *(study.name, study.workload, study.target, study.device),
        Cell("-" if use is None else format_count(use.batch_size), None if use is None else use.batch_size),
        Cell("-" if use is None else format_number(use.lr), None if use is None else use.lr),
        Cell("-" if use is None else use.time, None if use is None else use.seconds),
        Cell("-" if use is None else use.steps, None if use is None else use.expected_steps),
        Cell(study.critical, study.b_crit),
        Cell(study.exponent, study.lr_exponent),
        Cell(study.spend, study.spent_seconds),
    ]


def _notes(studies: Sequence[Compared]) -> str:
    return "\n".join(paragraph(f"{study.name}: {note}", "warning") for study in studies for note in study.notes)


def _curves(studies: Sequence[Compared]) -> list[dict[str, Any]]:
    traces: list[dict[str, Any]] = []
    for i, study in enumerate(studies):
        look, common = _look(i), {"legendgroup": str(i), "name": label(study.name)}
        size, steps = law(study)
        line = {"x": size.tolist(), "y": steps.tolist(), "mode": "lines", "line": {"color": look["color"]}}
        traces.append({**common, **line, "hoverinfo": "skip", "showlegend": False})
        texts = [f"B {format_count(one.batch_size)}: {format_count(one.steps)} steps" for one in study.reached]
        traces.append({**common, **_points(study, [one.steps for one in study.reached], look, texts)})
        if (place := mark(study)) is not None:
            text = f"{study.name}<br>".replace("<br>", ": ") + f"B_crit {study.critical}"
            marker = {**look, "size": 14, "symbol": f"{look['symbol']}-open", "line": {"width": 2.5}}
            dot = {"x": [place[0]], "y": [place[1]], "mode": "markers+text", "marker": marker, "showlegend": False}
            named = {"text": [f"B_crit {format_number(study.b_crit, 2)}"], "textposition": "top right"}
            traces.append({**common, **dot, **named, "textfont": {"color": look["color"]}, **_hover([text])})
    return traces


def _points(
    study: Compared, y: Sequence[float | None], look: Mapping[str, Any], texts: Sequence[str]
) -> dict[str, Any]:
    x = [one.batch_size for one in study.reached]
    hover = _hover([f"{study.name}: {text}" for text in texts])
    return {"x": x, "y": list(y), "mode": "markers", "marker": {**look, "size": 7}, **hover}


def _hover(texts: Sequence[str]) -> dict[str, Any]:
    return {"hovertext": [label(text) for text in texts], "hoverinfo": "text"}


def _collapse(found: Comparison) -> str:
    if found.collapse is None:
        return paragraph("no study has a critical batch size, so nothing can be laid on one curve")
    x = np.geomspace(found.collapse.smallest / 1.5, found.collapse.largest * 1.5, 100)
    name = label("S/S_min = 1 + B_crit/B")
    line = {"x": x.tolist(), "y": (1.0 + 1.0 / x).tolist(), "mode": "lines", "line": {"color": "--ink"}}
    traces: list[dict[str, Any]] = [{**line, "name": name, "hoverinfo": "skip"}]
    for i, study in enumerate(found.studies):
        if study.name in found.collapse.by_study and study.b_crit and study.s_min:
            y = [one.steps / study.s_min for one in study.reached]
            texts = [f"B {format_count(one.batch_size)}: {format_count(one.steps)} steps" for one in study.reached]
            points = _points(study, y, _look(i), texts)
            x_of = [one.batch_size / study.b_crit for one in study.reached]
            traces.append({**points, "x": x_of, "name": label(study.name)})
    axes = {"xaxis": axis("B / B_crit"), "yaxis": axis("S / S_min")}
    return paragraph(str(found.collapse)) + chart(traces, axes)


def _critical(found: Comparison) -> str:
    names = [label(study.name) for study in found.studies]
    traces = []
    for i, study in enumerate(found.studies):
        middle = study.b_crit or study.b_crit_low or study.b_crit_high
        if middle is None:
            continue
        ends = {
            "array": [(study.b_crit_high or middle) - middle],
            "arrayminus": [middle - (study.b_crit_low or middle)],
        }
        bar = {"type": "data", "symmetric": False, **ends, "color": _look(i)["color"], "thickness": 2.5}
        one = {"x": [middle], "y": [names[i]], "mode": "markers", "marker": {**_look(i), "size": 10}, "error_x": bar}
        traces.append({**one, "showlegend": False, **_hover([f"{study.name}: {study.critical}"])})
    rows = {"xaxis": axis("B_crit (examples)"), "yaxis": {"automargin": True, "autorange": "reversed"}}
    drawn = chart(traces, rows, height=120 + 34 * len(traces)) if traces else ""
    if not found.pairs:
        return drawn
    heads = ("larger", "smaller", "ratio of B_crit", "its interval", "judged")
    cells = [
        [pair.larger, pair.smaller, Cell(format_number(pair.ratio, 2), pair.ratio), pair.interval, pair.verdict]
        for pair in found.pairs
    ]
    return drawn + table(heads, cells) + paragraph(found.judged, "faint")


def _times(studies: Sequence[Compared]) -> str:
    traces: list[dict[str, Any]] = []
    for i, study in enumerate(studies):
        look, common = _look(i), {"legendgroup": str(i), "name": label(study.name)}
        texts = [f"B {format_count(one.batch_size)}: {format_seconds(one.seconds)}" for one in study.reached]
        if any(one.seconds is not None for one in study.reached):
            points = _points(study, [one.seconds for one in study.reached], look, texts)
            traces.append({**common, **points, "mode": "lines+markers", "line": {"color": look["color"], "width": 1}})
        if study.use is None or study.use.seconds is None:
            continue
        use = study.use
        ends = {"array": [(use.high or use.seconds) - use.seconds], "arrayminus": [use.seconds - (use.low or use.seconds)]}
        bar = {"type": "data", "symmetric": False, **ends, "color": look["color"]}
        star = {"x": [use.batch_size], "y": [use.seconds], "mode": "markers", "error_y": bar, "showlegend": False}
        marker = {"color": look["color"], "symbol": "star" if use.reliable else "star-open", "size": 15}
        text = f"{study.name}: use B {format_count(use.batch_size)}, lr {format_number(use.lr)}: {use.time}"
        traces.append({**common, **star, "marker": marker, **_hover([text])})
    if not traces:
        return paragraph("no study has a time to target")
    caption = "Stars: the batch size to use, median and range over fresh seeds; hollow where one missed the target."
    return chart(traces, _axes("time to target (seconds of training)"), caption)
