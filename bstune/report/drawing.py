"""The palette of all figures, and the one way to write them.

They are whole files, in matplotlib's own style, and need no display. matplotlib is imported in
functions: only commands that draw should wait for it, 0.4 s (3.11, files cached, two CPU cores).
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

from bstune.system.console import format_number
from bstune.system.files import whole_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from bstune.report.picture import Picture

FIGURE_DPI = 150
# A figure of this size and resolution is 900 pixels wide, as on a page.
PAGE_INCHES = 9.0
PAGE_DPI = 100
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
