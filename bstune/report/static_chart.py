"""The picture of a chart, for paper and where no script runs: an SVG of the chart's own traces.

    static_chart(traces, layout, height=430)

It reads of plotly's traces and layouts what bstune's charts use, and leaves out what needs a
pointer. Colours are the style sheet's names, so that it follows the reader's theme, too.
"""

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bstune.report.drawing import decimal_ticks
from bstune.system.console import format_number

WIDTH = 640.0  # pixels of the drawing, which is scaled to the width of the page
LEFT, RIGHT, TOP, BOTTOM = 70.0, 16.0, 24.0, 48.0  # pixels around the panel
LETTER = 6.6  # pixels of a letter's width, on average
LONG_NAME = 24  # letters of a category, beyond which it is shortened
LEGEND_LINE = 20.0  # pixels of its height
SAMPLE = 30.0  # pixels of a legend's sample and the room beside it
LOG_PAD = 0.06  # of an axis whose range is not stated, in shares of its span
LEAST_SPAN = 0.3  # of a logarithmic axis, in decades
MANY_DECADES = 6.0  # of a logarithmic axis: with more of them its ticks are powers of ten
LARGEST = 1e300  # of a value, so that no span of two overflows
TICKS = 5  # of a linear axis, at least
# Of lines, in pixels; those without a name here are solid.
DASHES = {"dot": "2 3", "dash": "7 4", "dashdot": "8 3 2 3", "longdash": "13 5"}
# Corners of symbols of half a size of 1, y downwards.
CORNERS: Mapping[str, Sequence[tuple[float, float]]] = {
    "square": ((-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85)),
    "diamond": ((0.0, -1.2), (1.2, 0.0), (0.0, 1.2), (-1.2, 0.0)),
    "triangle-up": ((0.0, -1.1), (1.05, 0.8), (-1.05, 0.8)),
    "triangle-down": ((0.0, 1.1), (1.05, -0.8), (-1.05, -0.8)),
}
STROKES: Mapping[str, str] = {
    "x": "M-.8-.8L.8.8M-.8.8L.8-.8",
    "cross": "M-1 0H1M0-1V1",
}
Trace = Mapping[str, Any]
Point = tuple[float, float]


@dataclass(frozen=True)
class _Axis:
    """Where values lie along an axis of the drawing, in pixels."""

    kind: str
    """``log``, ``linear`` or ``category``."""
    low: float
    """The value at its start; its logarithm to base 10 of a logarithmic axis."""
    high: float
    """The value at its end, likewise."""
    start: float
    """Pixels of its start."""
    end: float
    """Pixels of its end."""
    names: tuple[str, ...] = ()
    """The categories in their order."""

    def at(self, value: Any) -> float | None:
        """Give the pixel of a value; None where it has no place."""
        place = _number(value, self.kind, self.names)
        if place is None:
            return None
        share = (place - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[tuple[float, str]]:
        """Give the pixels of ticks and their texts."""
        if self.kind == "category":
            shown = [(float(i), _shortened(name)) for i, name in enumerate(self.names)]
        elif self.kind == "log":
            shown = _log_ticks(self.low, self.high)
        else:
            shown = [
                (value, format_number(value, 4)) for value in _round_values(self.low, self.high)
            ]
        span = self.high - self.low
        scale = (self.end - self.start) / span
        return [(self.start + (value - self.low) * scale, text) for value, text in shown]


@dataclass(frozen=True)
class _Frame:
    """The panel of a chart: its two axes."""

    x: _Axis
    y: _Axis

    def points(self, trace: Trace) -> list[Point | None]:
        """Give the pixels of a trace's points; None where one has no place."""
        points = list[Point | None]()
        for x_value, y_value in zip(trace["x"], trace["y"], strict=True):
            x, y = self.x.at(x_value), self.y.at(y_value)
            points.append(None if x is None or y is None else (x, y))
        return points


def static_chart(traces: Sequence[Trace], layout: Mapping[str, Any], height: float) -> str:
    """Draw a chart's traces as an SVG, ``height`` pixels of it without its legend."""
    entries = [trace for trace in traces if _in_legend(trace)]
    rows = _legend_rows(entries)
    frame = _Frame(
        _axis(traces, layout, "x", (LEFT, WIDTH - RIGHT)),
        _axis(traces, layout, "y", (height - BOTTOM, TOP)),
    )
    width, panel_height = WIDTH - LEFT - RIGHT, height - TOP - BOTTOM
    # An inner svg cuts off what lies outside of the panel.
    box = f'x="{LEFT:g}" y="{TOP:g}" width="{width:g}" height="{panel_height:g}"'
    inside = "".join(
        [
            *_shapes(layout, frame),
            *(_trace(trace, frame) for trace in _fills_first(traces)),
        ]
    )
    whole = height + LEGEND_LINE * len(rows)
    parts = [
        f'<svg viewBox="0 0 {WIDTH:g} {whole:g}" aria-hidden="true">',
        *_grid(frame, height),
        f'<svg {box} viewBox="{LEFT:g} {TOP:g} {width:g} {panel_height:g}">{inside}</svg>',
        *_titles(layout, height),
        *_annotations(layout, frame),
        *_legend(rows, height),
        "</svg>",
    ]
    return "".join(parts)


def _number(value: Any, kind: str, names: Sequence[str]) -> float | None:
    """Give a value as its axis measures it; None where it has no place there."""
    if kind == "category":
        return float(names.index(value))
    if value is None or not math.isfinite(value):
        return None
    if kind != "log":
        return float(max(-LARGEST, min(LARGEST, value)))
    if value <= 0.0:
        return None
    return math.log10(value)


def _axis(
    traces: Sequence[Trace], layout: Mapping[str, Any], name: str, ends: tuple[float, float]
) -> _Axis:
    """Give the axis ``x`` or ``y``: of its stated range, else of all that the traces have."""
    stated = layout.get(f"{name}axis", {})
    kind = stated.get("type", "linear")
    values = [value for trace in traces for value in trace[name]]
    if kind == "category":
        names = tuple(dict.fromkeys(values))
        return _Axis(kind, -0.6, len(names) - 0.4, ends[1], ends[0], names)
    if "range" in stated:
        low, high = stated["range"]
        return _Axis(kind, low, high, *ends)
    for trace in traces:
        values += _bar_ends(trace, name)
    places = [
        place for place in (_number(value, kind, ()) for value in values) if place is not None
    ]
    low, high = min(places, default=0.0), max(places, default=1.0)
    span = max(high - low, LEAST_SPAN if kind == "log" else 1e-9 * max(abs(high), 1e-9))
    if stated.get("rangemode") == "tozero":
        low = min(low, 0.0)
        return _Axis(kind, low, high + LOG_PAD * (high - low), *ends)
    return _Axis(kind, low - LOG_PAD * span, high + LOG_PAD * span, *ends)


def _bar_ends(trace: Trace, name: str) -> list[float]:
    """Give the ends of a trace's error bars along an axis, in its values."""
    bars = trace.get(f"error_{name}")
    if bars is None:
        return []
    ends = list[float]()
    for value, up, down in zip(trace[name], bars["array"], bars["arrayminus"], strict=True):
        ends += [value + up, value - down]
    return ends


def _log_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Give ticks from ``low`` to ``high``, logarithms to base 10: 1-2-5, or powers of ten over many decades."""
    if high - low <= MANY_DECADES:
        _, values = decimal_ticks(10.0**low, 10.0**high, 4)
        return [(math.log10(value), format_number(value, 4)) for value in values]
    step = math.ceil((high - low) / MANY_DECADES)
    powers = range(math.ceil(low), math.floor(high) + 1, step)
    return [(float(power), f"1e{power}") for power in powers]


def _round_values(low: float, high: float) -> list[float]:
    """Give round numbers from ``low`` to ``high``, evenly apart."""
    step = 10.0 ** math.floor(math.log10((high - low) / TICKS))
    for factor in (5.0, 2.0):
        if (high - low) / (factor * step) >= TICKS - 1:
            step *= factor
            break
    first = math.ceil(low / step)
    last = math.floor(high / step)
    return [step * i for i in range(first, last + 1)]


def _grid(frame: _Frame, height: float) -> list[str]:
    parts = list[str]()
    bottom, right = height - BOTTOM, WIDTH - RIGHT
    for x, text in frame.x.ticks():
        parts.append(f'<path class="grid" d="M{x:.1f} {TOP:g}V{bottom:g}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16:g}" text-anchor="middle">{text}</text>')
    for y, text in frame.y.ticks():
        parts.append(f'<path class="grid" d="M{LEFT:g} {y:.1f}H{right:g}"/>')
        place = f'x="{LEFT - 6:g}" y="{y + 4:.1f}" text-anchor="end"'
        parts.append(f"<text {place}>{_text(text)}</text>")
    return parts


def _titles(layout: Mapping[str, Any], height: float) -> list[str]:
    across = _text(layout.get("xaxis", {}).get("title", {}).get("text", ""))
    up = _text(layout.get("yaxis", {}).get("title", {}).get("text", ""))
    middle = LEFT + (WIDTH - LEFT - RIGHT) / 2.0
    centre = TOP + (height - TOP - BOTTOM) / 2.0
    return [
        f'<text x="{middle:g}" y="{height - 12:g}" text-anchor="middle">{across}</text>',
        f'<text transform="translate(14 {centre:g}) rotate(-90)" text-anchor="middle">{up}</text>',
    ]


def _shapes(layout: Mapping[str, Any], frame: _Frame) -> list[str]:
    """Draw the layout's lines and spans; ``paper`` coordinates are shares of the panel."""
    parts = list[str]()
    for shape in layout.get("shapes", ()):
        x = [_place(shape, end, "x", frame.x) for end in ("x0", "x1")]
        y = [_place(shape, end, "y", frame.y) for end in ("y0", "y1")]
        line = shape.get("line", {})
        if shape["type"] == "rect":
            size = f'width="{abs(x[1] - x[0]):.1f}" height="{abs(y[1] - y[0]):.1f}"'
            style = f"fill:{_colour(shape['fillcolor'])}"
            parts.append(f'<rect x="{min(x):.1f}" y="{min(y):.1f}" {size} style="{style}"/>')
        else:
            outline = f"M{x[0]:.1f} {y[0]:.1f}L{x[1]:.1f} {y[1]:.1f}"
            parts.append(f'<path d="{outline}" style="{_line_style(line)}"/>')
    return parts


def _place(shape: Mapping[str, Any], end: str, name: str, axis: _Axis) -> float:
    if shape.get(f"{name}ref") == "paper":
        return float(axis.start + shape[end] * (axis.end - axis.start))
    place = axis.at(shape[end])
    return axis.start if place is None else place


def _annotations(layout: Mapping[str, Any], frame: _Frame) -> list[str]:
    """Write the layout's notes, which stand above the panel or at a height of it."""
    parts = list[str]()
    for note in layout.get("annotations", ()):
        if note.get("xref") == "paper":
            x = frame.x.start + note["x"] * (frame.x.end - frame.x.start)
        else:
            # Plotly takes an annotation's place on a logarithmic axis as its logarithm.
            share = (note["x"] - frame.x.low) / (frame.x.high - frame.x.low)
            x = frame.x.start + share * (frame.x.end - frame.x.start)
        if note.get("yref") == "paper":
            y = frame.y.start + note["y"] * (frame.y.end - frame.y.start)
        else:
            share = (note["y"] - frame.y.low) / (frame.y.high - frame.y.low)
            y = frame.y.start + share * (frame.y.end - frame.y.start)
        anchor = {"left": "start", "right": "end"}.get(note.get("xanchor", ""), "middle")
        style = f"fill:{_colour(note['font']['color'])}"
        place = f'x="{x:.1f}" y="{y - 5:.1f}" text-anchor="{anchor}"'
        parts.append(f'<text {place} style="{style}">{_text(note["text"])}</text>')
    return parts


def _fills_first(traces: Sequence[Trace]) -> list[Trace]:
    return sorted(traces, key=lambda trace: "fill" not in trace)


def _trace(trace: Trace, frame: _Frame) -> str:
    points = frame.points(trace)
    parts = list[str]()
    mode = trace.get("mode", "lines")
    if "fill" in trace:
        corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in _known(points))
        parts.append(f'<polygon points="{corners}" style="fill:{_colour(trace["fillcolor"])}"/>')
    elif "lines" in mode:
        line = trace.get("line", {})
        outline = _outline(points, line.get("shape") == "hv")
        parts.append(f'<path d="{outline}" style="{_line_style(line, trace)}"/>')
    for name in ("x", "y"):
        parts += _bars(trace, frame, name)
    if "markers" in mode:
        parts += _markers(trace, points)
    if "text" in mode:
        parts += _words(trace, points)
    return "".join(parts)


def _known(points: Iterable[Point | None]) -> list[Point]:
    return [point for point in points if point is not None]


def _outline(points: Sequence[Point | None], is_stairs: bool) -> str:
    """Give the path of a line, which is broken where a point has no place."""
    parts = list[str]()
    last: Point | None = None
    for point in points:
        if point is not None:
            x, y = point
            if last is None:
                parts.append(f"M{x:.1f} {y:.1f}")
            elif is_stairs:
                parts.append(f"H{x:.1f}V{y:.1f}")
            else:
                parts.append(f"L{x:.1f} {y:.1f}")
        last = point
    return "".join(parts)


def _bars(trace: Trace, frame: _Frame, name: str) -> list[str]:
    """Draw a trace's error bars along an axis."""
    bars = trace.get(f"error_{name}")
    if bars is None:
        return []
    axis = frame.x if name == "x" else frame.y
    colour = _colour(bars["color"])
    parts = list[str]()
    for point, value, up, down in zip(
        frame.points(trace), trace[name], bars["array"], bars["arrayminus"], strict=True
    ):
        if point is None:
            continue
        x, y = point
        low, high = axis.at(value - down), axis.at(value + up)
        low = axis.start if low is None else low
        high = axis.end if high is None else high
        outline = f"M{low:.1f} {y:.1f}H{high:.1f}"
        if name == "y":
            outline = f"M{x:.1f} {low:.1f}V{high:.1f}"
        width = bars.get("thickness", 1.5)
        parts.append(f'<path d="{outline}" style="stroke:{colour};stroke-width:{width:g}"/>')
    return parts


def _markers(trace: Trace, points: Sequence[Point | None]) -> list[str]:
    sizes = trace.get("marker", {}).get("size", 7)
    if not isinstance(sizes, list | tuple):
        sizes = [sizes] * len(points)
    parts = list[str]()
    for point, size in zip(points, sizes, strict=True):
        if point is not None:
            parts.append(_symbol(trace, point, size))
    return parts


def _symbol(trace: Trace, point: Point, size: float) -> str:
    """Draw a trace's mark at a point; ``-open`` marks are an outline."""
    marker = trace.get("marker", {})
    name = marker.get("symbol", "circle")
    kind = name.removesuffix("-open")
    # A mark without a colour of its own has that of its line.
    of_line = trace.get("line", {}).get("color", "--blue")
    colour = _colour(marker.get("color", of_line))
    x, y = point
    half = size / 2.0
    style = f"fill:{colour}"
    if name.endswith("-open"):
        style = f"fill:none;stroke:{colour};stroke-width:1.3"
    if "opacity" in marker:
        style += f";opacity:{marker['opacity']:g}"
    if kind == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{half:g}" style="{style}"/>'
    if kind in STROKES:
        moved = f"translate({x:.1f} {y:.1f}) scale({half:g})"
        stroke = f"stroke:{colour};stroke-width:.45"
        return f'<path transform="{moved}" d="{STROKES[kind]}" style="{stroke}"/>'
    corners = _star_corners() if kind == "star" else CORNERS[kind]
    placed = " ".join(f"{x + half * dx:.1f},{y + half * dy:.1f}" for dx, dy in corners)
    return f'<polygon points="{placed}" style="{style}"/>'


def _star_corners() -> list[Point]:
    corners = list[Point]()
    for i in range(10):
        radius = 1.25 if i % 2 == 0 else 0.5
        angle = math.pi * (i / 5.0 - 0.5)
        corners.append((radius * math.cos(angle), radius * math.sin(angle)))
    return corners


def _words(trace: Trace, points: Sequence[Point | None]) -> list[str]:
    """Write the texts that stand beside marks; ``textposition`` is ``top right`` and its like."""
    position = trace.get("textposition", "top center")
    anchor = "middle"
    shift = 0.0
    if "right" in position:
        anchor, shift = "start", 8.0
    elif "left" in position:
        anchor, shift = "end", -8.0
    rise = 22.0 if "bottom" in position else -11.0
    style = f"fill:{_colour(trace.get('textfont', {}).get('color', '--ink'))}"
    parts = list[str]()
    for point, words in zip(points, trace["text"], strict=True):
        if point is not None:
            place = f'x="{point[0] + shift:.1f}" y="{point[1] + rise:.1f}" text-anchor="{anchor}"'
            parts.append(f'<text class="name" {place} style="{style}">{_text(words)}</text>')
    return parts


def _in_legend(trace: Trace) -> bool:
    return bool(trace.get("name")) and trace.get("showlegend", True)


def _legend_rows(entries: Sequence[Trace]) -> list[list[tuple[Trace, float]]]:
    """Break the legend into rows: each entry with where it begins, in pixels."""
    rows: list[list[tuple[Trace, float]]] = []
    x = WIDTH
    for trace in entries:
        needed = SAMPLE + LETTER * len(html.unescape(trace["name"])) + 14.0
        if x + needed > WIDTH:
            rows.append([])
            x = 8.0
        rows[-1].append((trace, x))
        x += needed
    return rows


def _legend(rows: Sequence[Sequence[tuple[Trace, float]]], height: float) -> list[str]:
    parts = list[str]()
    for i, row in enumerate(rows):
        y = height + LEGEND_LINE * i + 6.0
        for trace, x in row:
            parts.append(_sample(trace, x, y))
            name = _text(trace["name"])
            parts.append(f'<text x="{x + SAMPLE:.1f}" y="{y + 4:g}">{name}</text>')
    return parts


def _sample(trace: Trace, x: float, y: float) -> str:
    """Draw what a trace looks like, for the legend."""
    if "fill" in trace:
        style = f"fill:{_colour(trace['fillcolor'])}"
        return f'<rect x="{x:.1f}" y="{y - 6:g}" width="24" height="12" style="{style}"/>'
    parts = list[str]()
    mode = trace.get("mode", "lines")
    if "lines" in mode:
        style = _line_style(trace.get("line", {}))
        parts.append(f'<path d="M{x:.1f} {y:g}h24" style="{style}"/>')
    if "markers" in mode:
        size = trace.get("marker", {}).get("size", 7)
        size = max(size) if isinstance(size, list | tuple) else size
        parts.append(_symbol(trace, (x + 12.0, y), min(size, 13)))
    return "".join(parts)


def _line_style(line: Mapping[str, Any], trace: Trace | None = None) -> str:
    style = f"fill:none;stroke:{_colour(line.get('color', '--blue'))}"
    style += f";stroke-width:{line.get('width', 2):g}"
    dash = DASHES.get(line.get("dash", "solid"))
    if dash:
        style += f";stroke-dasharray:{dash}"
    if trace is not None and "opacity" in trace:
        style += f";opacity:{trace['opacity']:g}"
    return style


def _colour(value: str) -> str:
    """Give a colour of the style sheet, which has a name there, as CSS."""
    return f"var({value})" if value.startswith("--") else value


def _text(value: str) -> str:
    """Give a chart's text, which is escaped for plotly, as that of an element."""
    return html.escape(html.unescape(value))


def _shortened(text: str) -> str:
    shown = html.unescape(text)
    if len(shown) <= LONG_NAME:
        return text
    return f"{shown[: LONG_NAME - 1]}…"
