"""The palette of all figures, and the one way to write them: whole, in matplotlib's own style, without a display."""

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
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from bstune.report.picture import Picture

FIGURE_DPI = 150
PAGE_INCHES, PAGE_DPI = 9.0, 100  # of a figure that is 900 pixels wide, as on a page
GUIDE = "guide"  # gid of a line that is no data
STRIDE, MARGIN, LEADER = (
    4.0,
    1.5,
    9.0,
)  # in points: between a label's places, around it, and to what a line leads
LEADER_PARTS = np.linspace(0.0, 1.0, 25)
GUIDE_COST = 12.0  # of a label over a piece of a guide, in points of distance
# from Okabe and Ito's palette, which survives the common colour blindnesses
BLUE, VERMILION, PURPLE, GREEN = "#0072B2", "#D55E00", "#AA4499", "#009E73"
INK, GREY = "#1a1a1a", "#9a9a9a"
# For the letters that matplotlib's own font lacks, where the machine has one of these: Linux, macOS, Windows.
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
    """Draw in matplotlib's own style, then restore the settings; a letter that no font has is a box, not a warning."""
    # Only commands that draw should wait for matplotlib: its import takes 0.4 s (3.11, files cached, two CPU cores).
    import matplotlib.style
    from matplotlib.font_manager import fontManager

    installed = {font.name for font in fontManager.ttflist}
    fonts = ["DejaVu Sans", *(name for name in FURTHER_FONTS if name in installed)]
    with (
        matplotlib.style.context(["default", {"font.size": 9.0, "font.family": fonts}]),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", r"Glyph .* missing from (current )?font", UserWarning)
        yield


def figure_of(
    paint: Callable[["Figure"], None], inches: tuple[float, float], dots_per_inch: int = FIGURE_DPI
) -> "Picture":
    """Draw on an empty figure of width x height ``inches``, which a notebook shows as its picture."""
    # as above
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    from bstune.report.picture import Picture

    with own_style():
        figure = Picture(figsize=inches, dpi=dots_per_inch, layout="constrained")
        FigureCanvasAgg(figure)  # the backend of the importing program stays as it is
        paint(figure)
        return figure


def save_figure(
    paint: Callable[["Figure"], None],
    inches: tuple[float, float],
    *paths: Path,
    dots_per_inch: int = FIGURE_DPI,
) -> None:
    """Write what ``paint`` draws on an empty figure of width x height ``inches``: SVG by that suffix, else PNG."""
    figure = figure_of(paint, inches, dots_per_inch)
    # All of them are written before the first takes its place.
    with ExitStack() as files, own_style():
        # Figure.savefig draws everything twice.
        for path in paths:
            file = files.enter_context(whole_file(path))
            figure.set_dpi(dots_per_inch)  # which an SVG sets to its own
            render(figure, file, path.suffix)


def render(figure: "Figure", file: IO[bytes], suffix: str) -> None:
    """Write a painted figure to a file: as SVG by that suffix, else as PNG."""
    # as above
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    if suffix == ".svg":
        FigureCanvasSVG(figure).print_svg(file)  # type: ignore[no-untyped-call]
    else:
        FigureCanvasAgg(figure).print_png(file)  # type: ignore[no-untyped-call]


def log_axis(axes: "Axes", name: str, limits: tuple[float, float], decimal: bool = False) -> None:
    """Make the axis ``x`` or ``y`` logarithmic from low to high, its ticks round numbers as text.

    On ``x`` these are batch sizes, powers of two, unless they are to be ``decimal``.
    """
    if name == "x" and not decimal:
        every, ticks = _batch_ticks(*limits)
    else:
        every, ticks = decimal_ticks(
            *limits, fewest=3 if name == "x" else 4
        )  # beside each other they take more room
    axes.set(**{f"{name}scale": "log", f"{name}lim": limits})
    axis = axes.xaxis if name == "x" else axes.yaxis
    axis.set_ticks(ticks, [format_number(tick, 6) for tick in ticks])
    axis.set_ticks(every, [""] * len(every), minor=True)


def log_limits(values: Iterable[float], pads: tuple[float, float]) -> tuple[float, float]:
    """Return limits around positive ``values``, the lower and the upper pad in lengths of their logarithms' span."""
    logs = [math.log(value) for value in values]
    middle, span = (min(logs) + max(logs)) / 2.0, max(max(logs) - min(logs), math.log(4.0))
    return math.exp(middle - (0.5 + pads[0]) * span), math.exp(middle + (0.5 + pads[1]) * span)


def _batch_ticks(low: float, high: float) -> tuple[list[float], list[float]]:
    """Return the powers of two from ``low`` to ``high``, and the batch sizes, at most eight, that get a label."""
    powers = range(max(0, math.ceil(math.log2(low))), math.floor(math.log2(high)) + 1)
    every = [2.0**power for power in powers]
    if len(every) > 3:
        return every, every[:: math.ceil(len(every) / 8)]
    halves = [
        3.0 * size
        for size in (2.0**power for power in range(powers.stop))
        if low <= 3.0 * size <= high
    ]
    return every, sorted([*every, *halves])


def decimal_ticks(low: float, high: float, fewest: int) -> tuple[list[float], list[float]]:
    """Return the round numbers from ``low`` to ``high``, and those that get a label: 1-3, 1-2-5, or finer."""
    decades = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1)

    def within(digits: Iterable[float]) -> list[float]:
        return [
            digit * 10.0**decade
            for decade in decades
            for digit in digits
            if low <= digit * 10.0**decade <= high
        ]

    choices = [
        within(digits)
        for digits in ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0))
    ]
    return within(range(1, 10)), next(
        (ticks for ticks in choices if len(ticks) >= fewest), choices[-1]
    )


@dataclass(frozen=True)
class Label:
    """A text for a place in a panel: the nearest of the points ``at``, (n, 2) in the data's units."""

    text: str
    at: NDArray[np.float64]
    colour: str


def place_labels(axes: "Axes", labels: Sequence[Label], size: float) -> tuple[list["Artist"], bool]:
    """Write labels near what they name, where they cover neither marks nor curves nor each other.

    Guides, the lines whose gid is ``GUIDE``, are covered where there is no room else. Returned are what was drawn and
    whether there was room for all; the figure must have its layout.
    """
    # as above
    from matplotlib.lines import Line2D

    pixels = axes.figure.dpi / 72.0  # of a point
    inside, drawn = axes.get_window_extent().padded(-2.0 * MARGIN * pixels), list["Artist"]()
    marks, guides = _obstacles(axes, pixels)
    boxes, room = np.empty((0, 4)), True
    for label in labels:
        style: dict[str, Any] = {
            "fontsize": size,
            "color": label.colour,
            "ha": "center",
            "va": "center",
            "zorder": 8,
        }
        text = axes.text(0.5, 0.5, label.text, transform=axes.transAxes, parse_math=False, **style)
        text.set_in_layout(False)
        extent = text.get_window_extent()
        half = np.array([extent.width, extent.height]) / 2.0 + MARGIN * pixels
        sides = [
            np.arange(start + side, max(end - side, start + side) + 1.0, STRIDE * pixels)
            for start, end, side in (
                (inside.x0, inside.x1, half[0]),
                (inside.y0, inside.y1, half[1]),
            )
        ]
        centres = np.stack(np.meshgrid(*sides), axis=-1).reshape(-1, 2)
        anchors = axes.transData.transform(label.at)
        distances = np.linalg.norm(
            np.maximum(np.abs(centres[:, None] - anchors) - half, 0.0), axis=2
        )
        covered = _overlaps(centres, half, marks) + _overlaps(centres, half, boxes)
        # of the line from each place to what it names, the points that would lie on another label
        named = anchors[distances.argmin(axis=1)]
        edges = np.clip(named, centres - half, centres + half)
        covered += sum(
            _overlaps(edges + part * (named - edges), np.zeros(2), boxes) for part in LEADER_PARTS
        )
        cost = (
            distances.min(axis=1)
            + GUIDE_COST * pixels * _overlaps(centres, half, guides)
            + 1e4 * covered
        )
        best = int(cost.argmin())
        room &= bool(covered[best] == 0)
        boxes = np.vstack([boxes, [*centres[best], *half]])
        to_axes = axes.transAxes.inverted().transform
        text.set_position(tuple(to_axes(centres[best])))
        drawn.append(text)
        nearest = int(distances[best].argmin())
        if distances[best, nearest] > LEADER * pixels:
            parts = [edges[best] + part * (named[best] - edges[best]) for part in LEADER_PARTS]
            boxes = np.vstack([boxes, *([*part, pixels, pixels] for part in parts)])
            ends = to_axes([edges[best], named[best]])
            leader = Line2D(
                *ends.T,
                transform=axes.transAxes,
                color=label.colour,
                linewidth=0.7,
                zorder=7,
                gid=GUIDE,
            )
            leader.set_in_layout(False)
            drawn.append(axes.add_artist(leader))
    return drawn, room


def _overlaps(
    centres: NDArray[np.float64], half: NDArray[np.float64], boxes: NDArray[np.float64]
) -> Any:
    """Return how many ``boxes``, (n, 4) of centres and half sides, one of sides ``half`` covers at each centre."""
    x, y = (
        np.abs(centres[:, None, axis] - boxes[:, axis]) < half[axis] + boxes[:, 2 + axis]
        for axis in (0, 1)
    )
    return (x & y).sum(axis=1)


def _obstacles(axes: "Axes", pixels: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the marks and curves of a panel, and its guides, as boxes in pixels: (n, 4) of centres and half sides."""
    # as above
    from matplotlib.collections import LineCollection, PathCollection

    data, guides = [np.empty((0, 4))], [np.empty((0, 4))]

    def boxes(centres: Any, radius: float) -> NDArray[np.float64]:
        return np.hstack([centres, np.full_like(centres, radius)])

    def pieces(placed: Any) -> NDArray[np.float64]:
        """Return points on a line, at most a stride apart."""
        along = np.concatenate([[0.0], np.linalg.norm(np.diff(placed, axis=0), axis=1).cumsum()])
        at = np.linspace(0.0, along[-1], 2 + int(min(along[-1], 1e4) / (STRIDE * pixels)))
        return np.stack(
            [np.interp(at, along, placed[:, 0]), np.interp(at, along, placed[:, 1])], axis=-1
        )

    for some in axes.collections:
        if isinstance(some, PathCollection):
            radius = math.sqrt(max(some.get_sizes())) / 2.0 * pixels
            data.append(boxes(axes.transData.transform(some.get_offsets()), radius))
        elif isinstance(some, LineCollection):
            data += [
                boxes(pieces(axes.transData.transform(one)), pixels) for one in some.get_segments()
            ]
    for line in axes.lines:
        corners = line.get_transform().transform(line.get_xydata())
        (guides if line.get_gid() == GUIDE else data).append(boxes(pieces(corners), pixels))
    return np.vstack(data), np.vstack(guides)
