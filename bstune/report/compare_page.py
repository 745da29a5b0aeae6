"""The page ``comparison.html``: what the figure has, with the numbers of each point on hover, and tables."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from bstune.report.compare import Array, Compared, Comparison, collapsed
from bstune.report.html import Cell, Section, axis, chart, label, page, paragraph, table
from bstune.system.console import format_count, format_number, format_seconds

COLOURS = ("--blue", "--vermilion", "--green", "--purple", "--orange", "--sky", "--ink")
SYMBOLS = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "x")
BATCH_SIZE = "batch size B (examples per optimizer step)"
Trace = dict[str, Any]


def comparison_page(found: Comparison) -> str:
    """Return the page of a comparison."""
    studies = found.studies
    notes = [*found.notes, *(f"{study.name}: {note}" for study in studies for note in study.notes)]
    sections = [
        Section("", "\n".join(paragraph(line, "warning") for line in notes)),
        Section("Studies", _table(studies)),
        Section("Steps to target", _curves(studies)),
        Section("Does one law fit all?", _collapse(found)),
        Section("Critical batch sizes", _critical(found)),
        Section("Time to target", _times(studies)),
    ]
    return page(found.title, sections)


def _table(studies: Sequence[Compared]) -> str:
    heads = ("study", "workload", "target", "device", "use B", "learning rate", "time", "B_crit", "exponent of lr*(B)",
             "spent", "to the target, of fresh seeds")  # fmt: skip
    rows: list[list[Cell | str]] = []
    for one in studies:
        use = one.use
        rows.append([
            *(one.name, one.workload, one.target, one.device),
            Cell("-", None) if use is None else Cell(format_count(use.batch_size), use.batch_size),
            Cell("-", None) if use is None else Cell(format_number(use.lr), use.lr),
            Cell("-", None) if use is None else Cell(format_seconds(use.seconds), use.seconds),
            Cell(one.critical, one.b_crit),
            Cell(one.exponent_text, one.exponent),
            Cell(one.spend, one.spend_seconds),
            "-" if use is None else use.text,
        ])  # fmt: skip
    return table(heads, rows)


def _look(i: int) -> dict[str, str]:
    """Return the colour and symbol of the i-th study: no two of the first 49 are alike."""
    return {
        "color": COLOURS[i % len(COLOURS)],
        "symbol": SYMBOLS[(i + i // len(COLOURS)) % len(SYMBOLS)],
    }


def _dots(
    study: Compared, i: int, x: Sequence[float], y: Sequence[float | None], **changes: Any
) -> Trace:
    """Return the trace of a study's points, which a click on its name hides in this chart."""
    texts = [
        f"{study.name}: B = {format_count(one.batch_size)}, {format_count(one.steps)} steps, "
        f"{format_seconds(one.seconds)}"
        for one in study.points
    ]
    marker = {**_look(i), "size": 7}
    common = {"name": label(study.name), "legendgroup": str(i), "mode": "markers", "marker": marker}
    return {**common, "x": list(x), "y": list(y), **_hover(texts), **changes}


def _line(i: int, x: Array, y: Array) -> Trace:
    """Return the trace of a study's curve, which goes with its points."""
    line = {"x": x.tolist(), "y": y.tolist(), "mode": "lines", "line": {"color": _look(i)["color"]}}
    return {**line, "legendgroup": str(i), "showlegend": False, "hoverinfo": "skip"}


def _hover(texts: Sequence[str]) -> Trace:
    return {"hovertext": [label(text) for text in texts], "hoverinfo": "text"}


def _curves(studies: Sequence[Compared]) -> str:
    traces = []
    for i, study in enumerate(studies):
        colour, hidden = {"color": _look(i)["color"]}, {"legendgroup": str(i), "showlegend": False}
        traces.append(
            _dots(
                study,
                i,
                [one.batch_size for one in study.points],
                [one.steps for one in study.points],
            )
        )
        traces.append(_line(i, study.batch_size, study.steps))
        if study.mark is not None:
            marker = {
                **_look(i),
                "symbol": f"{_look(i)['symbol']}-open",
                "size": 14,
                "line": {"width": 2.5},
            }
            at = {
                "x": study.mark[:1],
                "y": study.mark[1:],
                "mode": "markers+text",
                "marker": marker,
                "textfont": colour,
            }
            name = {
                "text": [f"B_crit {format_number(study.b_crit, 2)}"],
                "textposition": "top right",
            }
            traces.append(
                {**hidden, **at, **name, **_hover([f"{study.name}: B_crit {study.critical}"])}
            )
    axes = {"xaxis": axis(BATCH_SIZE), "yaxis": axis("steps to target S")}
    return chart(
        traces,
        axes,
        "Lines: S*(B) by all of a study's trials. Large and hollow: its critical batch size.",
    )


def _collapse(found: Comparison) -> str:
    if found.collapse is None:
        return paragraph("No study has a critical batch size, so nothing can be laid on one curve.")
    x = np.geomspace(found.collapse.smallest / 1.5, found.collapse.largest * 1.5, 100)
    line = {
        "x": x.tolist(),
        "y": (1.0 + 1.0 / x).tolist(),
        "mode": "lines",
        "line": {"color": "--ink", "width": 1},
    }
    traces: list[Trace] = [{**line, "name": "1 + B_crit/B", "hoverinfo": "skip"}]
    for i, study in enumerate(found.studies):
        if (placed := collapsed(study)) is not None:
            traces.append(_dots(study, i, placed[0].tolist(), placed[1].tolist()))
        if study.b_crit is not None and study.s_min is not None:
            traces.append(_line(i, study.batch_size / study.b_crit, study.steps / study.s_min))
    axes = {"xaxis": axis("B / B_crit"), "yaxis": axis("S / S_min")}
    law = "If S(B) = S_min (1 + B_crit/B) holds, then the curves of all studies are one."
    caption = "Dots are single runs: above the lines where their learning rate was not the best."
    against = f"Well below {found.collapse.level:.0%}, the trials speak against the law."
    return paragraph(f"{law} {found.collapse}. {against}") + chart(traces, axes, caption)


def _critical(found: Comparison) -> str:
    traces = []
    sizes = [
        end
        for one in found.studies
        for end in (one.b_crit, one.b_crit_low, one.b_crit_high)
        if end is not None
    ]
    for i, study in enumerate(found.studies):
        middle = study.b_crit or study.b_crit_low or study.b_crit_high
        if middle is not None:
            low, high = (
                study.b_crit_low or min(sizes) / 2.0,
                study.b_crit_high or 2.0 * max(sizes),
            )  # open: far
            ends = {"array": [high - middle], "arrayminus": [middle - low]}
            bar = {
                "type": "data",
                "symmetric": False,
                **ends,
                "color": _look(i)["color"],
                "thickness": 2.5,
            }
            shown = {"marker": {**_look(i), "size": 10}, "error_x": bar, "showlegend": False}
            hover = _hover([f"{study.name}: {study.critical}"])
            traces.append(
                {"x": [middle], "y": [label(study.name)], "mode": "markers", **shown, **hover}
            )
    rows = {
        "xaxis": axis("B_crit (examples)"),
        "yaxis": axis("", log=False, type="category", autorange="reversed"),
    }
    drawn = chart(traces, rows, height=130 + 34 * len(traces)) if traces else ""
    if not found.pairs:
        return drawn or paragraph("No study has a critical batch size.")
    heads = ("larger", "smaller", "B_crit over B_crit", "its interval", "judged")
    cells = [
        (
            *(one.larger, one.smaller),
            Cell(format_number(one.ratio, 2), one.ratio),
            one.interval,
            one.verdict,
        )
        for one in found.pairs
    ]
    return drawn + table(heads, cells) + paragraph(found.judged, "faint")


def _times(studies: Sequence[Compared]) -> str:
    traces = []
    for i, study in enumerate(studies):
        colour, use = _look(i)["color"], study.use
        if any(one.seconds is not None for one in study.points):
            sizes, seconds = (
                [one.batch_size for one in study.points],
                [one.seconds for one in study.points],
            )
            traces.append(_dots(study, i, sizes, seconds))
        if study.seconds.size:
            traces.append(_line(i, study.batch_size, study.seconds))
        if use is not None and use.seconds is not None:
            ends = {
                "array": [(use.high or use.seconds) - use.seconds],
                "arrayminus": [use.seconds - (use.low or use.seconds)],
            }
            shown = {
                "error_y": {"type": "data", "symmetric": False, **ends, "color": colour},
                "showlegend": False,
            }
            marker = {
                "color": colour,
                "symbol": "star" if use.reliable else "star-open",
                "size": 15,
            }
            at = {
                "x": [use.batch_size],
                "y": [use.seconds],
                "mode": "markers",
                "marker": marker,
                "legendgroup": str(i),
            }
            traces.append({**at, **shown, **_hover([f"{study.name}: use {use}: {use.text}"])})
    if not traces:
        return paragraph("No study has a time to target.")
    axes = {"xaxis": axis(BATCH_SIZE), "yaxis": axis("time to target T (seconds of training)")}
    caption = (
        "Lines: S*(B) times the seconds per step. Dots: single runs. Stars: what to use, the median and range over "
        "fresh seeds; hollow where one missed the target, or none ran."
    )
    return chart(traces, axes, caption)
