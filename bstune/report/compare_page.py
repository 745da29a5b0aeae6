"""The page ``comparison.html``: what the figure has, with the numbers of each point on hover, and tables."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from bstune.report.compare import Array, Compared, Comparison, Use, collapsed
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
    """Show a row a study: all that it says to use, what that takes and gains, and what it found."""
    names = list[str]()
    for study in studies:
        if study.use is not None:
            names += study.use.hyperparameters
    names = list(dict.fromkeys(names))
    heads = ["study", "batch size", "learning rate", *names, "time to target", "gain"]
    heads += ["critical batch size", "exponent of lr*(B)", "fresh seeds"]
    heads += ["workload", "target", "device", "spent"]
    rows = list[list[Cell | str]]()
    for study in studies:
        rows.append(
            [
                study.name,
                *_use_cells(study.use, names),
                Cell(study.gain_text, study.gain),
                Cell(study.critical, study.b_crit),
                Cell(study.exponent_text, study.exponent),
                "-" if study.use is None else study.use.fresh,
                study.workload,
                study.target,
                study.device,
                Cell(study.spend, study.spend_seconds),
            ]
        )
    return table(heads, rows, name="studies", wrapped=True)


def _use_cells(use: Use | None, names: Sequence[str]) -> list[Cell]:
    """Show what a study says to use, with all its hyper-parameters, and the seconds that it takes."""
    if use is None:
        return [Cell("-", None)] * (3 + len(names))
    cells = [
        Cell(format_count(use.batch_size), use.batch_size),
        Cell(format_number(use.lr), use.lr),
    ]
    for name in names:
        value = use.hyperparameters.get(name)
        cells.append(Cell(format_number(value), value))
    cells.append(Cell(format_seconds(use.seconds), use.seconds))
    return cells


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
    traces = list[Trace]()
    told = list[str]()
    for i, study in enumerate(studies):
        sizes = [one.batch_size for one in study.points]
        steps = [one.steps for one in study.points]
        name = study.name
        # Its number stands in the legend: beside the marks, those of like studies would cover each other.
        if study.mark is not None:
            name += f": critical batch size {format_number(study.b_crit, 2)}"
        traces.append(_dots(study, i, sizes, steps, name=label(name)))
        traces.append(_line(i, study.batch_size, study.steps))
        told.append(f"{study.name}: critical batch size {study.critical}")
        if study.mark is not None:
            look = _look(i)
            symbol = f"{look['symbol']}-open"
            marker = {**look, "symbol": symbol, "size": 14, "line": {"width": 2.5}}
            place = {"x": study.mark[:1], "y": study.mark[1:], "legendgroup": str(i)}
            hover = _hover([f"{study.name}: critical batch size {study.critical}"])
            shown = {"mode": "markers", "marker": marker, "showlegend": False}
            traces.append({**shown, **place, **hover})
    axes = {"xaxis": axis(BATCH_SIZE), "yaxis": axis("steps to target S")}
    caption = "Lines: S*(B) by all of a study's trials. Large and hollow: its critical batch size."
    alt = f"Steps to target over batch size. {'. '.join(told)}."
    return chart(traces, axes, caption, alt=alt)


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
    alt = f"S/S_min over B/B_crit. {found.collapse}."
    return paragraph(f"{law} {found.collapse}. {against}") + chart(traces, axes, caption, alt=alt)


def _critical(found: Comparison) -> str:
    """Show each study's critical batch size with its interval, and which pairs differ."""
    ends = list[float]()
    for study in found.studies:
        for end in (study.b_crit, study.b_crit_low, study.b_crit_high):
            if end is not None:
                ends.append(end)
    traces = list[Trace]()
    told = list[str]()
    for i, study in enumerate(found.studies):
        middle = study.b_crit or study.b_crit_low or study.b_crit_high
        if middle is None:
            continue
        # An open end lies far.
        low = study.b_crit_low or min(ends) / 2.0
        high = study.b_crit_high or 2.0 * max(ends)
        bar = {
            "type": "data",
            "symmetric": False,
            "array": [high - middle],
            "arrayminus": [middle - low],
            "color": _look(i)["color"],
            "thickness": 2.5,
        }
        words = f"{study.name}: {study.critical}"
        told.append(words)
        place = {"x": [middle], "y": [label(study.name)], "mode": "markers"}
        shown = {"marker": {**_look(i), "size": 10}, "error_x": bar, "showlegend": False}
        traces.append({**place, **shown, **_hover([words])})
    rows = {
        "xaxis": axis("B_crit (examples)"),
        "yaxis": axis("", log=False, type="category", autorange="reversed"),
    }
    alt = f"Critical batch sizes. {'. '.join(told)}."
    drawn = chart(traces, rows, height=130 + 34 * len(traces), alt=alt)
    if not found.pairs:
        return drawn or paragraph("No study has a critical batch size.")
    heads = ("larger", "smaller", "B_crit over B_crit", "its interval", "judged")
    cells = list[list[Cell | str]]()
    for pair in found.pairs:
        ratio = Cell(format_number(pair.ratio, 2), pair.ratio)
        cells.append([pair.larger, pair.smaller, ratio, pair.interval, pair.verdict])
    pairs = table(heads, cells, name="pairs of critical batch sizes", wrapped=True)
    return drawn + pairs + paragraph(found.judged, "faint")


def _times(studies: Sequence[Compared]) -> str:
    """Show times to target over batch size, with what each study says to use."""
    traces = list[Trace]()
    told = list[str]()
    for i, study in enumerate(studies):
        if any(one.seconds is not None for one in study.points):
            sizes = [one.batch_size for one in study.points]
            seconds = [one.seconds for one in study.points]
            traces.append(_dots(study, i, sizes, seconds))
        if study.seconds.size:
            traces.append(_line(i, study.batch_size, study.seconds))
        if study.use is not None and study.use.seconds is not None:
            words = f"{study.name}: use {study.use}: {study.use.text}"
            told.append(words)
            star = _star(i, study.use, study.use.seconds)
            traces.append({**star, **_hover([words])})
    if not traces:
        return paragraph("No study has a time to target.")
    axes = {"xaxis": axis(BATCH_SIZE), "yaxis": axis("time to target T (seconds of training)")}
    caption = (
        "Lines: S*(B) times the seconds per step. Dots: single runs. Stars: what to use, the median and range over "
        "fresh seeds; hollow where one missed the target, or none ran."
    )
    return chart(traces, axes, caption, alt=f"Time to target over batch size. {'. '.join(told)}.")


def _star(i: int, use: Use, seconds: float) -> Trace:
    """Give the star of what a study says to use, with its range over fresh seeds."""
    colour = _look(i)["color"]
    high = use.high or seconds
    low = use.low or seconds
    ends = {"array": [high - seconds], "arrayminus": [seconds - low]}
    symbol = "star" if use.reliable else "star-open"
    return {
        "x": [use.batch_size],
        "y": [seconds],
        "mode": "markers",
        "marker": {"color": colour, "symbol": symbol, "size": 15},
        "error_y": {"type": "data", "symmetric": False, **ends, "color": colour},
        "legendgroup": str(i),
        "showlegend": False,
    }
