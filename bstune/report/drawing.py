"""The palette of all figures, and the one way to write them.

They are whole files, in matplotlib's own style, and need no display. matplotlib is imported in
functions: only commands that draw should wait for it, 0.4 s (3.11, files cached, two CPU cores).
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bstune.system.console import format_number
from bstune.system.files import whole_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    from bstune.report.picture import Picture

Places = NDArray[np.float64]
"""Points or boxes in pixels, a row each."""
FIGURE_DPI = 150
# A figure of this size and resolution is 900 pixels wide, as on a page.
PAGE_INCHES = 9.0
PAGE_DPI = 100
# The gid of a guide: a line that is not data, and that labels may cover.
GUIDE = "guide"
POINTS_PER_INCH = 72.0
# In points: the distance between the places that are tried for a label, and the room around it.
LABEL_STRIDE = 4.0
LABEL_MARGIN = 1.5
# In points: a label farther than this from what it names gets a line to it.
LEADER_FROM = 9.0
# The points of such a line, as shares of it, that must not lie on another label.
LEADER_PARTS = np.linspace(0.0, 1.0, 25)
# The cost of a label that covers a piece of a guide, in points of distance from what it names.
GUIDE_COST = 12.0
# The cost of a label that covers a mark, a curve or another label: more than any distance within a
# figure.
COVER_COST = 1e4
# The most pixels of a line that are cut into pieces: a line may leave the panel by far.
LONGEST_LINE_PIXELS = 1e4
# Colours from Okabe and Ito's palette, which survives the common colour blindnesses.
BLUE = "#0072B2"
VERMILION = "#D55E00"
PURPLE = "#AA4499"
GREEN = "#009E73"
INK = "#1a1a1a"
GREY = "#9a9a9a"
# Fonts for the letters that matplotlib's own font lacks, where the machine has one of these: those
# of Linux, macOS and Windows.
FURTHER_FONTS = (
    "Noto Sans CJK JP",
    "WenQuanYi Zen Hei",
    "IPAGothic",
    "Arial Unicode MS",
    "Hiragino Sans",
    "Yu Gothic",
)


@contextmanager
def own_style() -> Iterator[None]:
    """Draw in matplotlib's own style while the context is open, whatever the user's settings are.

    A letter that no font has becomes a box, without a warning.
    """
    # Only what draws waits for matplotlib.
    import matplotlib.style
    from matplotlib.font_manager import fontManager

    installed = {font.name for font in fontManager.ttflist}
    fonts = ["DejaVu Sans"]
    # matplotlib warns of a font that it is told of and does not find.
    fonts += [name for name in FURTHER_FONTS if name in installed]
    with (
        matplotlib.style.context(["default", {"font.size": 9.0, "font.family": fonts}]),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", r"Glyph .* missing from (current )?font", UserWarning)
        yield


def figure_of(
    paint: Callable[["Figure"], None], inches: tuple[float, float], dots_per_inch: int = FIGURE_DPI
) -> "Picture":
    """Make a figure of width x height ``inches``, and let ``paint`` draw on it.

    A notebook shows it as a picture.
    """
    # Only what draws waits for matplotlib.
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    from bstune.report.picture import Picture

    with own_style():
        figure = Picture(figsize=inches, dpi=dots_per_inch, layout="constrained")
        # The figure gets a canvas of this kind: the backend of the importing program stays as it
        # is.
        FigureCanvasAgg(figure)
        paint(figure)
        return figure


def save_figure(
    paint: Callable[["Figure"], None],
    inches: tuple[float, float],
    *paths: Path,
    dots_per_inch: int = FIGURE_DPI,
) -> None:
    """Write what ``paint`` draws on an empty figure of width x height ``inches``.

    A path that ends in ``.svg`` gets SVG, any other path PNG. No file takes its place before all
    are written.
    """
    figure = figure_of(paint, inches, dots_per_inch)
    # All of them are written before the first takes its place.
    with ExitStack() as files, own_style():
        for path in paths:
            file = files.enter_context(whole_file(path))
            # An SVG that was written before has set a resolution of its own.
            figure.set_dpi(dots_per_inch)
            render(figure, file, path.suffix)


def render(figure: "Figure", file: IO[bytes], suffix: str) -> None:
    """Write a painted figure to a file: as SVG where ``suffix`` is ``.svg``, else as PNG."""
    # Only what draws waits for matplotlib.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    # The methods are those of the canvases, as Figure.savefig draws everything twice.
    if suffix == ".svg":
        FigureCanvasSVG(figure).print_svg(file)  # type: ignore[no-untyped-call]
    else:
        FigureCanvasAgg(figure).print_png(file)  # type: ignore[no-untyped-call]


def draw_empty(axes: "Axes", reason: str) -> None:
    """Write into a panel why there is nothing to draw, and take its ticks away."""
    axes.text(0.5, 0.5, reason, transform=axes.transAxes, ha="center", va="center", color=GREY)
    axes.set(xticks=[], yticks=[])
    axes.minorticks_off()


def log_axis(axes: "Axes", name: str, limits: tuple[float, float], decimal: bool = False) -> None:
    """Make an axis logarithmic, with ticks at round numbers that are written in full.

    Args:
        axes: the panel.
        name: ``x`` or ``y``.
        limits: the values at its ends, the smaller one first.
        decimal: whether ticks of ``x`` are decimal. Else they are batch sizes, powers of two.
    """
    if name == "x" and not decimal:
        minor_ticks, ticks = _batch_ticks(*limits)
    elif name == "x":
        # Beside each other labels take more room than above each other.
        minor_ticks, ticks = decimal_ticks(*limits, fewest=3)
    else:
        minor_ticks, ticks = decimal_ticks(*limits, fewest=4)
    axes.set(**{f"{name}scale": "log", f"{name}lim": limits})
    axis = axes.xaxis if name == "x" else axes.yaxis
    axis.set_ticks(ticks, [format_number(tick, 6) for tick in ticks])
    axis.set_ticks(minor_ticks, [""] * len(minor_ticks), minor=True)


def log_limits(values: Iterable[float], pads: tuple[float, float]) -> tuple[float, float]:
    """Give the limits of a logarithmic axis that holds all ``values``, which are positive.

    ``pads`` are the room below and above them, as shares of their span. The span is that of their
    logarithms, and two octaves at least.
    """
    logs = [math.log(value) for value in values]
    middle = (min(logs) + max(logs)) / 2.0
    span = max(max(logs) - min(logs), math.log(4.0))
    below, above = pads
    return math.exp(middle - (0.5 + below) * span), math.exp(middle + (0.5 + above) * span)


def _batch_ticks(low: float, high: float) -> tuple[list[float], list[float]]:
    """Give the powers of two from ``low`` to ``high``, and the batch sizes that get a label.

    At most eight powers get one. Where there are only few powers, sizes between them get one, too.
    """
    first_power = max(0, math.ceil(math.log2(low)))
    last_power = math.floor(math.log2(high))
    powers = [2.0**power for power in range(first_power, last_power + 1)]
    if len(powers) > 3:
        return powers, powers[:: math.ceil(len(powers) / 8)]
    # Over less than three octaves the sizes between are named, too: 96 between 64 and 128.
    labelled = list(powers)
    for power in range(last_power + 1):
        between = 3.0 * 2.0**power
        if low <= between <= high:
            labelled.append(between)
    return powers, sorted(labelled)


def decimal_ticks(low: float, high: float, fewest: int) -> tuple[list[float], list[float]]:
    """Give the round numbers from ``low`` to ``high``, and those that get a label.

    The labelled ones are powers of ten, or 1-3, 1-2-5 or finer digits before zeros: the coarsest
    choice that gives at least ``fewest`` labels.
    """
    labelled = list[float]()
    choices = ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0))
    for digits in choices:
        labelled = _round_numbers(low, high, digits)
        if len(labelled) >= fewest:
            break
    return _round_numbers(low, high, range(1, 10)), labelled


def _round_numbers(low: float, high: float, digits: Sequence[float]) -> list[float]:
    """Give the numbers from ``low`` to ``high`` that are one of ``digits`` times a power of ten."""
    numbers = list[float]()
    for decade in range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1):
        for digit in digits:
            number = digit * 10.0**decade
            if low <= number <= high:
                numbers.append(number)
    return numbers


@dataclass(frozen=True)
class Label:
    """A text for a place in a panel."""

    text: str
    at: NDArray[np.float64]
    """The points that it names, (n, 2) in the data's units. It stands near one of them."""
    colour: str


def place_labels(axes: "Axes", labels: Sequence[Label], size: float) -> None:
    """Write labels near what they name, where they cover neither marks nor curves nor each other.

    A label stands at the place of the least cost: its distance from what it names, and a cost for
    all that it covers. Guides, which are lines that are not data, cost little. Places are in
    pixels, so the figure must have its final layout. A box is a row (x, y, half width, half height)
    with its centre.

    Args:
        axes: the panel.
        labels: the labels in the order in which they choose their places.
        size: height of the letters, in points.
    """
    pixels_per_point = axes.figure.dpi / POINTS_PER_INCH
    to_axes = axes.transAxes.inverted().transform
    marks, guides = _obstacles(axes, pixels_per_point)
    # The boxes of the labels that are placed, and of the lines to what they name.
    label_boxes = np.empty((0, 4))
    for label in labels:
        text = _write_label(axes, label, size)
        extent = text.get_window_extent()
        half = np.array([extent.width, extent.height]) / 2.0 + LABEL_MARGIN * pixels_per_point
        # For each centre: the nearest point that the label names, and the edge of the label there.
        tried = _tried_places(axes, label, half, pixels_per_point)
        covered = _covered(tried, half, marks, label_boxes)
        guides_covered = _overlaps(tried.centres, half, guides)
        cost = tried.distances + GUIDE_COST * pixels_per_point * guides_covered
        cost = cost + COVER_COST * covered
        best = int(cost.argmin())
        centre = tried.centres[best]
        label_boxes = np.vstack([label_boxes, [*centre, *half]])
        text.set_position(tuple(to_axes(centre)))
        if tried.distances[best] > LEADER_FROM * pixels_per_point:
            edge = tried.edges[best]
            named = tried.named[best]
            leader_boxes = list[list[float]]()
            for point in _points_of_leader(edge, named):
                leader_boxes.append([*point, pixels_per_point, pixels_per_point])
            label_boxes = np.vstack([label_boxes, *leader_boxes])
            _draw_leader(axes, to_axes([edge, named]), label.colour)


def _points_of_leader(edge: Places, named: Places) -> list[Places]:
    """Give some points of the line from a label's box to what it names, which stand for all of it.

    ``edge`` and ``named`` are its ends, (2,) or (n, 2) for n lines. Each point has their shape.
    """
    return [edge + part * (named - edge) for part in LEADER_PARTS]


def _write_label(axes: "Axes", label: Label, size: float) -> "Text":
    """Write a label in the panel's middle, so that its size can be measured. It is moved later."""
    style: dict[str, Any] = {
        "fontsize": size,
        "color": label.colour,
        "ha": "center",
        "va": "center",
        "zorder": 8,
    }
    text = axes.text(0.5, 0.5, label.text, transform=axes.transAxes, parse_math=False, **style)
    # Labels are placed in a layout that must not change by them.
    text.set_in_layout(False)
    return text


@dataclass(frozen=True)
class _TriedPlaces:
    """The n places that are tried for a label, in pixels."""

    centres: Places
    """The label's centre at each place, shape (n, 2)."""
    named: Places
    """The nearest of the points that the label names, shape (n, 2)."""
    edges: Places
    """The point of the label's box that is nearest to that, shape (n, 2)."""
    distances: Places
    """The distance of these two points, shape (n,)."""


def _tried_places(
    axes: "Axes", label: Label, half: Places, pixels_per_point: float
) -> _TriedPlaces:
    """Give the places that are tried for a label, with its distance there from what it names.

    ``half``: half of the label's width and height, in pixels.
    """
    centres = _label_centres(axes, half, pixels_per_point)
    # The pixels of the points that the label names: it stands near one of them.
    anchors = axes.transData.transform(label.at)
    # From the label's box to each anchor, along x and y: (places, anchors, 2).
    gaps = np.maximum(np.abs(centres[:, None] - anchors) - half, 0.0)
    distances = np.linalg.norm(gaps, axis=2)
    named = anchors[distances.argmin(axis=1)]
    # The point of the label's box that is nearest to the named point.
    edges = np.clip(named, centres - half, centres + half)
    return _TriedPlaces(centres=centres, named=named, edges=edges, distances=distances.min(axis=1))


def _label_centres(axes: "Axes", half: Places, pixels_per_point: float) -> Places:
    """Give a grid of centres over the panel at which a label is within it, (n, 2) pixels.

    ``half``: half of the label's width and height, in pixels.
    """
    # A label keeps some distance from the panel's edge.
    inside = axes.get_window_extent().padded(-2.0 * LABEL_MARGIN * pixels_per_point)
    stride = LABEL_STRIDE * pixels_per_point
    half_width, half_height = half
    # A panel that is smaller than the label has one place all the same.
    left = inside.x0 + half_width
    right = max(inside.x1 - half_width, left)
    bottom = inside.y0 + half_height
    top = max(inside.y1 - half_height, bottom)
    x = np.arange(left, right + 1.0, stride)
    y = np.arange(bottom, top + 1.0, stride)
    return np.stack(np.meshgrid(x, y), axis=-1).reshape(-1, 2)


def _draw_leader(axes: "Axes", ends: Places, colour: str) -> None:
    """Draw a thin line from a label to what it names.

    ``ends``: both ends of the line, (2, 2) in shares of the panel.
    """
    # Only what draws waits for matplotlib.
    from matplotlib.lines import Line2D

    leader = Line2D(
        *ends.T,
        transform=axes.transAxes,
        color=colour,
        linewidth=0.7,
        zorder=7,
        gid=GUIDE,
    )
    # Labels are placed in the figure's final layout, which must not change for this line.
    leader.set_in_layout(False)
    axes.add_artist(leader)


def _covered(
    tried: _TriedPlaces, half: Places, marks: Places, label_boxes: Places
) -> NDArray[np.int64]:
    """Count the marks and the earlier labels that a label would cover at each place, (n,).

    ``half``: half of its width and height.
    """
    covered = _overlaps(tried.centres, half, marks)
    covered += _overlaps(tried.centres, half, label_boxes)
    # The line from the label to what it names is not to lie on another label. Some of its points,
    # which have no width, stand for it.
    for points in _points_of_leader(tried.edges, tried.named):
        covered += _overlaps(points, np.zeros(2), label_boxes)
    return covered


def _overlaps(centres: Places, half: Places, boxes: Places) -> NDArray[np.int64]:
    """Count the boxes that a label would cover at each of n places, shape (n,).

    Args:
        centres: the places of its centre, shape (n, 2).
        half: half of its width and height.
        boxes: centre and half sides of each box, shape (m, 4).
    """
    in_x = np.abs(centres[:, None, 0] - boxes[:, 0]) < half[0] + boxes[:, 2]
    in_y = np.abs(centres[:, None, 1] - boxes[:, 1]) < half[1] + boxes[:, 3]
    counts: NDArray[np.int64] = (in_x & in_y).sum(axis=1)
    return counts


def _obstacles(axes: "Axes", pixels_per_point: float) -> tuple[Places, Places]:
    """Give the marks and curves of a panel, and apart from them its guides, as boxes in pixels.

    Each is of shape (n, 4): centres and half sides. A line is a row of small boxes.
    """
    # Only what draws waits for matplotlib.
    from matplotlib.collections import LineCollection, PathCollection

    data = [np.empty((0, 4))]
    guides = [np.empty((0, 4))]
    for collection in axes.collections:
        if isinstance(collection, PathCollection):
            radius = math.sqrt(max(collection.get_sizes())) / 2.0 * pixels_per_point
            centres = axes.transData.transform(collection.get_offsets())
            data.append(_boxes(centres, radius))
        elif isinstance(collection, LineCollection):
            for segment in collection.get_segments():
                corners = axes.transData.transform(segment)
                data.append(_boxes(_points_along(corners, pixels_per_point), pixels_per_point))
    for line in axes.lines:
        corners = line.get_transform().transform(line.get_xydata())
        boxes = _boxes(_points_along(corners, pixels_per_point), pixels_per_point)
        if line.get_gid() == GUIDE:
            guides.append(boxes)
        else:
            data.append(boxes)
    return np.vstack(data), np.vstack(guides)


def _boxes(centres: Places, radius: float) -> Places:
    """Give squares around ``centres``, each of half side ``radius``: (n, 4), as boxes are given."""
    return np.hstack([centres, np.full_like(centres, radius)])


def _points_along(corners: Places, pixels_per_point: float) -> Places:
    """Give points along a line through ``corners``, both (n, 2) in pixels.

    They are at most ``LABEL_STRIDE`` apart, unless the line is longer than ``LONGEST_LINE_PIXELS``.
    """
    lengths = np.linalg.norm(np.diff(corners, axis=0), axis=1)
    along = np.concatenate([[0.0], lengths.cumsum()])
    count = int(min(along[-1], LONGEST_LINE_PIXELS) / (LABEL_STRIDE * pixels_per_point))
    distances = np.linspace(0.0, along[-1], 2 + count)
    x = np.interp(distances, along, corners[:, 0])
    y = np.interp(distances, along, corners[:, 1])
    return np.stack([x, y], axis=-1)
