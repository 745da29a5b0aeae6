"""The page ``comparison.html``: the figure's charts with the numbers of each point, and tables."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from bstune.report.compare import Comparison
from bstune.report.compared_pairs import Pair
from bstune.report.compared_study import Array, Compared, Use
from bstune.report.html import Cell, Section, axis, chart, label, page, paragraph, table
from bstune.report.one_law import points_over_law
from bstune.system.console import format_count, format_number, format_seconds

# Seven colours and seven symbols: a study beyond the seventh has a colour again, with another
# symbol.
CSS_COLOURS = ("--blue", "--vermilion", "--green", "--purple", "--orange", "--sky", "--ink")
SYMBOLS = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "x")
BATCH_SIZE_AXIS = "batch size B (examples per optimizer step)"
Trace = dict[str, Any]


def comparison_page(comparison: Comparison) -> str:
    """Make the page of a comparison, as HTML."""
    studies = comparison.studies
    notes = list(comparison.notes)
    for study in studies:
        notes += [f"{study.name}: {note}" for note in study.notes]
    sections = [
        Section("", "\n".join(paragraph(line, "warning") for line in notes)),
        Section("Studies", _studies_table(studies)),
        Section("Steps to target", _steps_chart(studies)),
        Section("Does one law fit all?", _collapse_chart(comparison)),
        Section("Critical batch sizes", _critical_chart(comparison)),
        Section("Time to target", _times_chart(studies)),
    ]
    return page(comparison.title, sections)


def _studies_table(studies: Sequence[Compared]) -> str:
    """Show the studies as a table: what each says to use, its time and gain, and what it found."""
    names = list[str]()
    for study in studies:
        if study.use is not None:
            names += study.use.hyperparameters
    # Studies may search the same hyper-parameters: each is one column, in the order they come in.
    names = list(dict.fromkeys(names))
    heads = ["study", "batch size", "learning rate", *names, "time to target", "gain"]
    heads += ["critical batch size", "exponent of lr*(B)", "fresh seeds"]
    heads += ["workload", "target", "device", "spent"]
    rows = list[list[Cell | str]]()
    for study in studies:
        fresh = "-"
        if study.use is not None:
            fresh = study.use.fresh_seeds_text
        rows.append(
            [
                study.name,
                *_use_cells(study.use, names),
                Cell(study.gain_text, study.gain),
                Cell(study.critical, study.b_crit),
                Cell(study.exponent_text, study.exponent),
                fresh,
                study.workload,
                study.target,
                study.device,
                Cell(study.spend, study.spend_seconds),
            ]
        )
    return table(heads, rows, name="studies", wrapped=True)


def _use_cells(use: Use | None, names: Sequence[str]) -> list[Cell]:
    """Give the cells of a row that show a study's USE: its hyper-parameters and time to target.

    ``names`` are the further hyper-parameters that any of the studies searches. Where ``use`` is
    None, each cell is a dash.
    """
    # Batch size, learning rate and time stand beside the further hyper-parameters.
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


def _look(index: int) -> dict[str, str]:
    """Give the colour and symbol of a study by its index, from 0.

    No two of the first 49 are alike.
    """
    # After each round of the colours the symbols are one further.
    rounds = index // len(CSS_COLOURS)
    return {
        "color": CSS_COLOURS[index % len(CSS_COLOURS)],
        "symbol": SYMBOLS[(index + rounds) % len(SYMBOLS)],
    }


def _dots(
    study: Compared, index: int, x: Sequence[float], y: Sequence[float | None], **changes: Any
) -> Trace:
    """Give the trace of a study's points, which a click on its name in the legend hides.

    Args:
        study: the study.
        index: its index among the studies, from 0, which sets its look.
        x: where each of its points stands.
        y: where each of its points stands; None for a point without a place.
        changes: entries of the trace that replace the usual ones.
    """
    texts = list[str]()
    for point in study.points:
        size = format_count(point.batch_size)
        took = f"{format_count(point.steps)} steps, {format_seconds(point.seconds)}"
        texts.append(f"{study.name}: B = {size}, {took}")
    marker = {**_look(index), "size": 7}
    common = {
        "name": label(study.name),
        "legendgroup": str(index),
        "mode": "markers",
        "marker": marker,
    }
    return {**common, "x": list(x), "y": list(y), **_hover(texts), **changes}


def _line(index: int, x: Array, y: Array) -> Trace:
    """Give the trace of a study's curve, which the legend shows and hides with its points."""
    line = {
        "x": x.tolist(),
        "y": y.tolist(),
        "mode": "lines",
        "line": {"color": _look(index)["color"]},
    }
    return {**line, "legendgroup": str(index), "showlegend": False, "hoverinfo": "skip"}


def _hover(texts: Sequence[str]) -> Trace:
    """Give the entries of a trace that show a text for each point at which a reader points."""
    return {"hovertext": [label(text) for text in texts], "hoverinfo": "text"}


def _steps_chart(studies: Sequence[Compared]) -> str:
    """Draw steps to target over batch size, with each study's critical batch size on its curve."""
    traces = list[Trace]()
    sentences = list[str]()
    for index, study in enumerate(studies):
        sizes = [point.batch_size for point in study.points]
        steps = [point.steps for point in study.points]
        name = study.name
        # Its number stands in the legend: beside the marks, those of like studies would cover each
        # other.
        if study.b_crit_on_curve is not None:
            name += f": critical batch size {format_number(study.b_crit, 2)}"
        traces.append(_dots(study, index, sizes, steps, name=label(name)))
        traces.append(_line(index, study.batch_size, study.steps))
        words = f"{study.name}: critical batch size {study.critical}"
        sentences.append(words)
        if study.b_crit_on_curve is not None:
            look = _look(index)
            symbol = f"{look['symbol']}-open"
            marker = {**look, "symbol": symbol, "size": 14, "line": {"width": 2.5}}
            place_entries = {
                "x": study.b_crit_on_curve[:1],
                "y": study.b_crit_on_curve[1:],
                "legendgroup": str(index),
            }
            look_entries = {"mode": "markers", "marker": marker, "showlegend": False}
            traces.append({**look_entries, **place_entries, **_hover([words])})
    axes = {"xaxis": axis(BATCH_SIZE_AXIS), "yaxis": axis("steps to target S")}
    caption = "Lines: S*(B) by all of a study's trials. Large and hollow: its critical batch size."
    alt = f"Steps to target over batch size. {'. '.join(sentences)}."
    return chart(traces, axes, caption, alt=alt)


def _collapse_chart(comparison: Comparison) -> str:
    """Draw all curves as S/S_min over B/B_crit, and say how well the law holds."""
    if comparison.collapse is None:
        return paragraph("No study has a critical batch size, so nothing can be laid on one curve.")
    # The law goes on a little beyond what the studies have seen.
    ratios = np.geomspace(
        comparison.collapse.smallest / 1.5, comparison.collapse.largest * 1.5, 100
    )
    line = {
        "x": ratios.tolist(),
        "y": (1.0 + 1.0 / ratios).tolist(),
        "mode": "lines",
        "line": {"color": "--ink", "width": 1},
    }
    traces: list[Trace] = [{**line, "name": "1 + B_crit/B", "hoverinfo": "skip"}]
    for index, study in enumerate(comparison.studies):
        placed = points_over_law(study)
        if placed is not None:
            sizes, steps = placed
            traces.append(_dots(study, index, sizes.tolist(), steps.tolist()))
        if study.b_crit is not None and study.s_min is not None:
            traces.append(_line(index, study.batch_size / study.b_crit, study.steps / study.s_min))
    axes = {"xaxis": axis("B / B_crit"), "yaxis": axis("S / S_min")}
    law = "If S(B) = S_min (1 + B_crit/B) holds, then the curves of all studies are one."
    caption = "Dots are single runs: above the lines where their learning rate was not the best."
    # Written out, the collapse says at what share of the batch sizes the intervals hold the law.
    against = f"Well below {comparison.collapse.level:.0%}, the trials speak against the law."
    alt = f"S/S_min over B/B_crit. {comparison.collapse}."
    return paragraph(f"{law} {comparison.collapse}. {against}") + chart(
        traces, axes, caption, alt=alt
    )


def _critical_chart(comparison: Comparison) -> str:
    """Draw each study's critical batch size with its interval, and show the pairs below."""
    known_sizes = list[float]()
    for study in comparison.studies:
        for size in (study.b_crit, study.b_crit_low, study.b_crit_high):
            if size is not None:
                known_sizes.append(size)
    traces = list[Trace]()
    sentences = list[str]()
    for index, study in enumerate(comparison.studies):
        # An interval without a value stands at an end that is known.
        middle = study.b_crit or study.b_crit_low or study.b_crit_high
        if middle is None:
            continue
        # An open end lies beyond all others.
        low = study.b_crit_low or min(known_sizes) / 2.0
        high = study.b_crit_high or 2.0 * max(known_sizes)
        bar = {
            "type": "data",
            "symmetric": False,
            "array": [high - middle],
            "arrayminus": [middle - low],
            "color": _look(index)["color"],
            "thickness": 2.5,
        }
        words = f"{study.name}: {study.critical}"
        sentences.append(words)
        place_entries = {"x": [middle], "y": [label(study.name)], "mode": "markers"}
        look_entries = {"marker": {**_look(index), "size": 10}, "error_x": bar, "showlegend": False}
        traces.append({**place_entries, **look_entries, **_hover([words])})
    rows = {
        "xaxis": axis("B_crit (examples)"),
        "yaxis": axis("", log=False, type="category", autorange="reversed"),
    }
    alt = f"Critical batch sizes. {'. '.join(sentences)}."
    # A row of 34 pixels for each study, and room for the axis.
    drawn = chart(traces, rows, height=130 + 34 * len(traces), alt=alt)
    if not comparison.pairs:
        return drawn or paragraph("No study has a critical batch size.")
    return drawn + _pairs_table(comparison.pairs) + paragraph(comparison.judged, "faint")


def _pairs_table(compared_pairs: Sequence[Pair]) -> str:
    """Show the ratio of the critical batch sizes of each two studies, and whether they differ."""
    heads = ("larger", "smaller", "B_crit over B_crit", "its interval", "judged", "not alike in")
    cells = list[list[Cell | str]]()
    for pair in compared_pairs:
        ratio = Cell(format_number(pair.ratio, 2), pair.ratio)
        unlike = ", ".join(pair.unlike) or "-"
        cells.append([pair.larger, pair.smaller, ratio, pair.interval, pair.verdict, unlike])
    return table(heads, cells, name="pairs of critical batch sizes", wrapped=True)


def _times_chart(studies: Sequence[Compared]) -> str:
    """Draw times to target over batch size, with what each study says to use."""
    traces = list[Trace]()
    sentences = list[str]()
    for index, study in enumerate(studies):
        # A study of recorded steps has no seconds: it has no part in this chart.
        if any(point.seconds is not None for point in study.points):
            sizes = [point.batch_size for point in study.points]
            seconds = [point.seconds for point in study.points]
            traces.append(_dots(study, index, sizes, seconds))
        if study.seconds.size:
            traces.append(_line(index, study.batch_size, study.seconds))
        if study.use is not None and study.use.seconds is not None:
            words = f"{study.name}: use {study.use}: {study.use.text}"
            sentences.append(words)
            star = _star(index, study.use, study.use.seconds)
            traces.append({**star, **_hover([words])})
    if not traces:
        return paragraph("No study has a time to target.")
    axes = {"xaxis": axis(BATCH_SIZE_AXIS), "yaxis": axis("time to target T (seconds of training)")}
    caption = (
        "Lines: S*(B) times the seconds per step. Dots: single runs. Stars: what to use, the "
        "median and range over fresh seeds; hollow where one missed the target, or none ran."
    )
    alt = f"Time to target over batch size. {'. '.join(sentences)}."
    return chart(traces, axes, caption, alt=alt)


def _star(index: int, use: Use, seconds: float) -> Trace:
    """Give the star of a study's USE at its ``seconds``, with their interval over fresh seeds.

    ``index``: the study's index, from 0.
    """
    colour = _look(index)["color"]
    # An end that is not known has no bar.
    high = use.high or seconds
    low = use.low or seconds
    lengths = {"array": [high - seconds], "arrayminus": [seconds - low]}
    symbol = "star" if use.reliable else "star-open"
    return {
        "x": [use.batch_size],
        "y": [seconds],
        "mode": "markers",
        "marker": {"color": colour, "symbol": symbol, "size": 15},
        "error_y": {"type": "data", "symmetric": False, **lengths, "color": colour},
        "legendgroup": str(index),
        "showlegend": False,
    }
