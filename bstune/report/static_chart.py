"""The picture of a chart, for paper and where no script runs: an SVG of the chart's own traces.

    static_chart(traces, layout, height=430)

It knows the parts of plotly's traces and layouts that bstune's charts use, and leaves out texts
that need a pointer. Colours are the style sheet's names, so that it follows the reader's theme.
"""

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bstune.report.drawing import decimal_ticks
from bstune.system.console import format_number

# All lengths are pixels of the drawing, which is scaled to the width of the page.
CHART_WIDTH = 640.0
# The margins around the panel.
LEFT_MARGIN = 70.0
RIGHT_MARGIN = 16.0
TOP_MARGIN = 24.0
BOTTOM_MARGIN = 48.0
# The average width of a letter.
LETTER = 6.6
# The height of a line of the legend.
LEGEND_LINE = 20.0
# The width of the legend's sample and of the room beside it.
SAMPLE = 30.0
# Room on either side of an axis whose range is not stated, as a share of its span.
AXIS_PAD = 0.06
# The least span of a logarithmic axis, in decades: an octave.
LEAST_DECADES = 0.3
# Over more decades a logarithmic axis has its ticks at powers of ten.
MANY_DECADES = 6.0
# The largest value that is drawn, so that the span of two does not overflow.
LARGEST_DRAWN = 1e300
# The fewest ticks of a linear axis, about.
FEWEST_TICKS = 5
# Dashes of lines by plotly's names, as SVG has them, in pixels. Other names are solid lines.
DASHES = {"dot": "2 3", "dash": "7 4", "dashdot": "8 3 2 3", "longdash": "13 5"}
# Corners of symbols by plotly's names, for half a size of 1, with y downwards.
CORNERS: Mapping[str, Sequence[tuple[float, float]]] = {
    "square": ((-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85)),
    "diamond": ((0.0, -1.2), (1.2, 0.0), (0.0, 1.2), (-1.2, 0.0)),
    "triangle-up": ((0.0, -1.1), (1.05, 0.8), (-1.05, 0.8)),
}
# Symbols that are strokes, not areas: their paths as SVG has them, for half a size of 1.
STROKES: Mapping[str, str] = {
    "x": "M-.8-.8L.8.8M-.8.8L.8-.8",
}
PlotlyTrace = Mapping[str, Any]
"""A trace by plotly's own names."""
PlotlyLayout = Mapping[str, Any]
"""A layout or a part of it, by plotly's own names."""
Place = tuple[float, float]
"""A point of the drawing: x and y in pixels, y downwards."""
AxisValue = float | None
"""The value of a trace's point along an axis; None for no place."""


@dataclass(frozen=True)
class _Axis:
    """An axis of the drawing: where values lie along it, in pixels.

    A coordinate is a number along the axis: the value itself, or its logarithm to base 10 on a
    logarithmic axis.
    """

    kind: str
    """``log`` or ``linear``."""
    low: float
    """The coordinate at its start."""
    high: float
    """The coordinate at its end."""
    start: float
    """The pixel of its start."""
    end: float
    """The pixel of its end."""

    def pixel_of_value(self, value: AxisValue) -> float | None:
        """Give the pixel of a value. None where it has no place on the axis."""
        coordinate = _coordinate(value, self.kind)
        if coordinate is None:
            return None
        return self.pixel_of_coordinate(coordinate)

    def pixel_of_coordinate(self, coordinate: float) -> float:
        """Give the pixel of a coordinate of the axis."""
        share = (coordinate - self.low) / (self.high - self.low)
        return self.pixel_of_share(share)

    def pixel_of_share(self, share: float) -> float:
        """Give the pixel at a share of the axis's length, from its start."""
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[tuple[float, str]]:
        """Give the pixel of each tick, and its text."""
        span = self.high - self.low
        scale = (self.end - self.start) / span
        ticks = list[tuple[float, str]]()
        for coordinate, text in self._tick_coordinates():
            ticks.append((self.start + (coordinate - self.low) * scale, text))
        return ticks

    def _tick_coordinates(self) -> list[tuple[float, str]]:
        """Give the coordinate of each tick, and its text."""
        if self.kind == "log":
            return _log_ticks(self.low, self.high)
        values = _round_values(self.low, self.high)
        return [(value, format_number(value, 4)) for value in values]


@dataclass(frozen=True)
class _Frame:
    """The panel of a chart: its two axes."""

    x: _Axis
    y: _Axis

    def points(self, trace: PlotlyTrace) -> list[Place | None]:
        """Give the pixels of a trace's points. None stands for a point without a place."""
        points = list[Place | None]()
        for x_value, y_value in zip(trace["x"], trace["y"], strict=True):
            x = self.x.pixel_of_value(x_value)
            y = self.y.pixel_of_value(y_value)
            if x is None or y is None:
                points.append(None)
            else:
                points.append((x, y))
        return points


def static_chart(traces: Sequence[PlotlyTrace], layout: PlotlyLayout, height: float) -> str:
    """Draw a chart's traces as an SVG. ``height``: its pixels without the legend."""
    entries = [trace for trace in traces if _in_legend(trace)]
    rows = _legend_rows(entries)
    frame = _Frame(
        x=_axis(traces, layout, "x", (LEFT_MARGIN, CHART_WIDTH - RIGHT_MARGIN)),
        y=_axis(traces, layout, "y", (height - BOTTOM_MARGIN, TOP_MARGIN)),
    )
    width = CHART_WIDTH - LEFT_MARGIN - RIGHT_MARGIN
    panel_height = height - TOP_MARGIN - BOTTOM_MARGIN
    drawn = _shapes(layout, frame)
    # Areas come first, so that lines and marks lie on top of them.
    for trace in _areas_first(traces):
        drawn.append(_trace(trace, frame))
    # An inner svg cuts off what lies outside of the panel.
    box = f'x="{LEFT_MARGIN:g}" y="{TOP_MARGIN:g}" width="{width:g}" height="{panel_height:g}"'
    view = f'viewBox="{LEFT_MARGIN:g} {TOP_MARGIN:g} {width:g} {panel_height:g}"'
    whole_height = height + LEGEND_LINE * len(rows)
    parts = [
        f'<svg viewBox="0 0 {CHART_WIDTH:g} {whole_height:g}" aria-hidden="true">',
        *_grid(frame, height),
        f"<svg {box} {view}>{''.join(drawn)}</svg>",
        *_titles(layout, height),
        *_annotations(layout, frame),
        *_legend(rows, height),
        "</svg>",
    ]
    return "".join(parts)


def _coordinate(value: AxisValue, kind: str) -> float | None:
    """Give a value's coordinate on an axis of a kind.

    None where the value has no place there, as 0 on a logarithmic axis.
    """
    if value is None or not math.isfinite(value):
        return None
    if kind != "log":
        return float(max(-LARGEST_DRAWN, min(LARGEST_DRAWN, value)))
    if value <= 0.0:
        return None
    return math.log10(value)


def _axis(
    traces: Sequence[PlotlyTrace], layout: PlotlyLayout, name: str, pixels: tuple[float, float]
) -> _Axis:
    """Give the axis ``x`` or ``y``, with its stated range or else one that holds all traces.

    ``pixels``: those of its start and of its end.
    """
    stated = layout.get(f"{name}axis", {})
    kind = stated.get("type", "linear")
    start, end = pixels
    values = list[AxisValue]()
    for trace in traces:
        values += trace[name]
    if "range" in stated:
        low, high = stated["range"]
        return _Axis(kind=kind, low=low, high=high, start=start, end=end)
    if name == "y":
        for trace in traces:
            values += _ends_of_error_bars(trace)
    coordinates = list[float]()
    for value in values:
        coordinate = _coordinate(value, kind)
        if coordinate is not None:
            coordinates.append(coordinate)
    low = min(coordinates, default=0.0)
    high = max(coordinates, default=1.0)
    # A single value has no span: it stands in the middle of the least one.
    least_span = 1e-9 * max(abs(high), 1e-9)
    if kind == "log":
        least_span = LEAST_DECADES
    span = max(high - low, least_span)
    if stated.get("rangemode") == "tozero":
        low = min(low, 0.0)
        return _Axis(kind=kind, low=low, high=high + AXIS_PAD * (high - low), start=start, end=end)
    return _Axis(
        kind=kind, low=low - AXIS_PAD * span, high=high + AXIS_PAD * span, start=start, end=end
    )


def _ends_of_error_bars(trace: PlotlyTrace) -> list[float]:
    """Give the values at both ends of each of a trace's error bars, which are upright."""
    bars = trace.get("error_y")
    if bars is None:
        return []
    ends = list[float]()
    for value, up, down in zip(trace["y"], bars["array"], bars["arrayminus"], strict=True):
        ends += [value + up, value - down]
    return ends


def _log_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Give the ticks of a logarithmic axis: the logarithm to base 10 of each, and its text.

    They are round numbers or, over many decades, powers of ten. ``low`` and ``high`` are the
    logarithms at the axis's ends.
    """
    if high - low <= MANY_DECADES:
        _minor_ticks, values = decimal_ticks(10.0**low, 10.0**high, fewest=4)
        return [(math.log10(value), format_number(value, 4)) for value in values]
    step = math.ceil((high - low) / MANY_DECADES)
    powers = range(math.ceil(low), math.floor(high) + 1, step)
    return [(float(power), f"1e{power}") for power in powers]


def _round_values(low: float, high: float) -> list[float]:
    """Give round numbers from ``low`` to ``high``, evenly apart."""
    # The step is 1, 2 or 5 times a power of ten: the largest that leaves about FEWEST_TICKS ticks.
    step = 10.0 ** math.floor(math.log10((high - low) / FEWEST_TICKS))
    for factor in (5.0, 2.0):
        if (high - low) / (factor * step) >= FEWEST_TICKS - 1:
            step *= factor
            break
    first_multiple = math.ceil(low / step)
    last_multiple = math.floor(high / step)
    return [step * multiple for multiple in range(first_multiple, last_multiple + 1)]


def _grid(frame: _Frame, height: float) -> list[str]:
    """Draw a line at each tick of both axes, with its text some pixels beside the line's end."""
    parts = list[str]()
    bottom = height - BOTTOM_MARGIN
    right = CHART_WIDTH - RIGHT_MARGIN
    for x, text in frame.x.ticks():
        parts.append(f'<path class="grid" d="M{x:.1f} {TOP_MARGIN:g}V{bottom:g}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16:g}" text-anchor="middle">{text}</text>')
    for y, text in frame.y.ticks():
        parts.append(f'<path class="grid" d="M{LEFT_MARGIN:g} {y:.1f}H{right:g}"/>')
        place = f'x="{LEFT_MARGIN - 6:g}" y="{y + 4:.1f}" text-anchor="end"'
        parts.append(f"<text {place}>{_text(text)}</text>")
    return parts


def _titles(layout: PlotlyLayout, height: float) -> list[str]:
    """Write the titles of both axes, that of ``y`` turned, to be read from below upwards.

    They stand some pixels from the drawing's lower and left edge.
    """
    across = _text(layout.get("xaxis", {}).get("title", {}).get("text", ""))
    up = _text(layout.get("yaxis", {}).get("title", {}).get("text", ""))
    middle = LEFT_MARGIN + (CHART_WIDTH - LEFT_MARGIN - RIGHT_MARGIN) / 2.0
    centre = TOP_MARGIN + (height - TOP_MARGIN - BOTTOM_MARGIN) / 2.0
    return [
        f'<text x="{middle:g}" y="{height - 12:g}" text-anchor="middle">{across}</text>',
        f'<text transform="translate(14 {centre:g}) rotate(-90)" text-anchor="middle">{up}</text>',
    ]


def _shapes(layout: PlotlyLayout, frame: _Frame) -> list[str]:
    """Draw the layout's lines and spans, as Plotly's shapes describe them."""
    parts = list[str]()
    for shape in layout.get("shapes", ()):
        x0 = _shape_end(shape, "x", end=0, axis=frame.x)
        x1 = _shape_end(shape, "x", end=1, axis=frame.x)
        y0 = _shape_end(shape, "y", end=0, axis=frame.y)
        y1 = _shape_end(shape, "y", end=1, axis=frame.y)
        if shape["type"] == "rect":
            corner = f'x="{min(x0, x1):.1f}" y="{min(y0, y1):.1f}"'
            size = f'width="{abs(x1 - x0):.1f}" height="{abs(y1 - y0):.1f}"'
            style = f"fill:{_colour(shape['fillcolor'])}"
            parts.append(f'<rect {corner} {size} style="{style}"/>')
        else:
            outline = f"M{x0:.1f} {y0:.1f}L{x1:.1f} {y1:.1f}"
            style = _line_style(shape.get("line", {}))
            parts.append(f'<path d="{outline}" style="{style}"/>')
    return parts


def _shape_end(shape: PlotlyLayout, name: str, end: int, axis: _Axis) -> float:
    """Give the pixel of a shape's ``end``, 0 or 1, along the axis ``name``.

    A value without a place on the axis, such as 0 on a logarithmic one, is drawn at its start.
    """
    value = shape[f"{name}{end}"]
    if shape.get(f"{name}ref") == "paper":
        return axis.pixel_of_share(value)
    pixel = axis.pixel_of_value(value)
    if pixel is None:
        return axis.start
    return pixel


def _annotations(layout: PlotlyLayout, frame: _Frame) -> list[str]:
    """Write the layout's notes, which stand above the panel or within it."""
    parts = list[str]()
    for note in layout.get("annotations", ()):
        x = _note_pixel(note, "x", frame.x)
        y = _note_pixel(note, "y", frame.y)
        anchor = {"left": "start", "right": "end"}.get(note.get("xanchor", ""), "middle")
        style = f"fill:{_colour(note['font']['color'])}"
        place = f'x="{x:.1f}" y="{y - 5:.1f}" text-anchor="{anchor}"'
        parts.append(f'<text {place} style="{style}">{_text(note["text"])}</text>')
    return parts


def _note_pixel(note: PlotlyLayout, name: str, axis: _Axis) -> float:
    """Give the pixel of a note along the axis ``name``."""
    if note.get(f"{name}ref") == "paper":
        return axis.pixel_of_share(note[name])
    # Plotly takes an annotation's place on a logarithmic axis as its logarithm.
    return axis.pixel_of_coordinate(note[name])


def _areas_first(traces: Sequence[PlotlyTrace]) -> list[PlotlyTrace]:
    """Give the traces with areas before all others, which are to be drawn over them."""
    return sorted(traces, key=lambda trace: "fill" not in trace)


def _trace(trace: PlotlyTrace, frame: _Frame) -> str:
    """Write a trace as SVG elements: its area or its line, its error bars, its marks, their texts.

    ``frame`` gives the pixels of the trace's points.
    """
    points = frame.points(trace)
    parts = list[str]()
    mode = trace.get("mode", "lines")
    if "fill" in trace:
        corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in _known(points))
        parts.append(f'<polygon points="{corners}" style="fill:{_colour(trace["fillcolor"])}"/>')
    elif "lines" in mode:
        line = trace.get("line", {})
        # Plotly's name for stairs: a line goes sideways first (h), then up or down (v).
        outline = _outline(points, is_stairs=line.get("shape") == "hv")
        parts.append(f'<path d="{outline}" style="{_line_style(line, trace)}"/>')
    parts += _bars(trace, frame)
    if "markers" in mode:
        parts += _markers(trace, points)
    if "text" in mode:
        parts += _words(trace, points)
    return "".join(parts)


def _known(points: Iterable[Place | None]) -> list[Place]:
    """Leave out the points that have no place."""
    return [point for point in points if point is not None]


def _outline(points: Sequence[Place | None], is_stairs: bool) -> str:
    """Give the path of a line through points. It is broken where a point has no place.

    ``is_stairs``: whether it goes to the next point sideways first, then up or down.
    """
    parts = list[str]()
    is_drawing = False
    for point in points:
        if point is None:
            is_drawing = False
            continue
        x, y = point
        if not is_drawing:
            parts.append(f"M{x:.1f} {y:.1f}")
        elif is_stairs:
            parts.append(f"H{x:.1f}V{y:.1f}")
        else:
            parts.append(f"L{x:.1f} {y:.1f}")
        is_drawing = True
    return "".join(parts)


def _bars(trace: PlotlyTrace, frame: _Frame) -> list[str]:
    """Draw a trace's error bars, which are upright."""
    bars = trace.get("error_y")
    if bars is None:
        return []
    style = f"stroke:{_colour(bars['color'])};stroke-width:1.5"
    parts = list[str]()
    for point, value, up, down in zip(
        frame.points(trace), trace["y"], bars["array"], bars["arrayminus"], strict=True
    ):
        if point is None:
            continue
        x, _y = point
        # An end without a place, as 0 on a logarithmic axis, reaches to the panel's edge.
        low = frame.y.pixel_of_value(value - down)
        if low is None:
            low = frame.y.start
        high = frame.y.pixel_of_value(value + up)
        if high is None:
            high = frame.y.end
        outline = f"M{x:.1f} {low:.1f}V{high:.1f}"
        parts.append(f'<path d="{outline}" style="{style}"/>')
    return parts


def _markers(trace: PlotlyTrace, points: Sequence[Place | None]) -> list[str]:
    """Draw a mark at each point of a trace: all of one size, or each of its own."""
    sizes = trace.get("marker", {}).get("size", 7)
    if not isinstance(sizes, list | tuple):
        sizes = [sizes] * len(points)
    parts = list[str]()
    for point, size in zip(points, sizes, strict=True):
        if point is not None:
            parts.append(_symbol(trace, point, size))
    return parts


def _symbol(trace: PlotlyTrace, point: Place, size: float) -> str:
    """Draw a trace's mark at a point, ``size`` pixels wide. ``-open`` marks are an outline."""
    marker = trace.get("marker", {})
    name = marker.get("symbol", "circle")
    kind = name.removesuffix("-open")
    # A mark without a colour of its own has that of its line.
    line_colour = trace.get("line", {}).get("color", "--blue")
    colour = _colour(marker.get("color", line_colour))
    x, y = point
    half = size / 2.0
    style = f"fill:{colour}"
    if name.endswith("-open"):
        style = f"fill:none;stroke:{colour};stroke-width:1.3"
    if "opacity" in marker:
        style += f";opacity:{marker['opacity']:g}"
    if kind == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{half:g}" style="{style}"/>'
    # These marks, crosses, are lines that hold no area to fill.
    if kind in STROKES:
        moved = f"translate({x:.1f} {y:.1f}) scale({half:g})"
        stroke = f"stroke:{colour};stroke-width:.45"
        return f'<path transform="{moved}" d="{STROKES[kind]}" style="{stroke}"/>'
    corners = _star_corners() if kind == "star" else CORNERS[kind]
    placed = list[str]()
    for right, down in corners:
        placed.append(f"{x + half * right:.1f},{y + half * down:.1f}")
    return f'<polygon points="{" ".join(placed)}" style="{style}"/>'


def _star_corners() -> list[Place]:
    """Give the ten corners of a five-pointed star, outer and inner in turn, the top one first.

    In units of half the mark's size, to the right and down.
    """
    corners = list[Place]()
    for i in range(10):
        is_outer = i % 2 == 0
        # It reaches further out than a circle of the same size, so that it looks as large.
        radius = 1.25 if is_outer else 0.5
        angle = math.pi * (i / 5.0 - 0.5)
        corners.append((radius * math.cos(angle), radius * math.sin(angle)))
    return corners


def _words(trace: PlotlyTrace, points: Sequence[Place | None]) -> list[str]:
    """Write the texts beside marks, by plotly's ``textposition``, such as ``top right``."""
    position = trace.get("textposition", "top center")
    anchor = "middle"
    # How far the text stands from the mark's middle, to the right and down, in pixels.
    shift = 0.0
    if "right" in position:
        anchor = "start"
        shift = 8.0
    elif "left" in position:
        anchor = "end"
        shift = -8.0
    drop = -11.0
    if "bottom" in position:
        drop = 22.0
    colour = trace.get("textfont", {}).get("color", "--ink")
    style = f"fill:{_colour(colour)}"
    parts = list[str]()
    for point, words in zip(points, trace["text"], strict=True):
        if point is not None:
            x, y = point
            place = f'x="{x + shift:.1f}" y="{y + drop:.1f}" text-anchor="{anchor}"'
            parts.append(f'<text class="name" {place} style="{style}">{_text(words)}</text>')
    return parts


def _in_legend(trace: PlotlyTrace) -> bool:
    """Whether the legend has an entry for a trace."""
    return bool(trace.get("name")) and trace.get("showlegend", True)


def _legend_rows(entries: Sequence[PlotlyTrace]) -> list[list[tuple[PlotlyTrace, float]]]:
    """Break the legend into rows of entries. Each entry has the pixel at which it begins.

    An entry is a sample of the trace and its name, at LETTER pixels a letter, and some room.
    """
    rows: list[list[tuple[PlotlyTrace, float]]] = []
    # No room is left before the first entry, so that it begins the first row.
    x = CHART_WIDTH
    for trace in entries:
        needed = SAMPLE + LETTER * len(html.unescape(trace["name"])) + 14.0
        if x + needed > CHART_WIDTH:
            rows.append([])
            x = 8.0
        rows[-1].append((trace, x))
        x += needed
    return rows


def _legend(rows: Sequence[Sequence[tuple[PlotlyTrace, float]]], height: float) -> list[str]:
    """Draw the rows of the legend, below the ``height`` pixels of the chart."""
    parts = list[str]()
    for i, row in enumerate(rows):
        y = height + LEGEND_LINE * i + 6.0
        for trace, x in row:
            parts.append(_sample(trace, x, y))
            name = _text(trace["name"])
            parts.append(f'<text x="{x + SAMPLE:.1f}" y="{y + 4:g}">{name}</text>')
    return parts


def _sample(trace: PlotlyTrace, x: float, y: float) -> str:
    """Draw a sample of a trace's look for the legend, at a pixel."""
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
        if isinstance(size, list | tuple):
            size = max(size)
        # The mark stands in the middle of the sample's 24 pixels. A larger mark would lie over the
        # lines of the legend above and below it.
        parts.append(_symbol(trace, (x + 12.0, y), min(size, 13)))
    return "".join(parts)


def _line_style(line: PlotlyLayout, trace: PlotlyTrace | None = None) -> str:
    """Give the CSS of a line. ``trace``: the trace that has the line, for its opacity."""
    style = f"fill:none;stroke:{_colour(line.get('color', '--blue'))}"
    style += f";stroke-width:{line.get('width', 2):g}"
    dash = DASHES.get(line.get("dash", "solid"))
    if dash:
        style += f";stroke-dasharray:{dash}"
    if trace is not None and "opacity" in trace:
        style += f";opacity:{trace['opacity']:g}"
    return style


def _colour(value: str) -> str:
    """Write a colour as CSS: a name of the style sheet, such as ``--ink``, or any other colour."""
    if value.startswith("--"):
        return f"var({value})"
    return value


def _text(value: str) -> str:
    """Escape a chart's text for an element of SVG, in place of how it was escaped for plotly."""
    return html.escape(html.unescape(value))
