"""The palette of all figures, and the one way to write them: whole, in matplotlib's own style, without a display."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURE_DPI = 150
# from Okabe and Ito's palette, which survives the common colour blindnesses
BLUE, VERMILION, PURPLE, INK, GREY = "#0072B2", "#D55E00", "#AA4499", "#1a1a1a", "#9a9a9a"
# For the letters that matplotlib's own font lacks, where the machine has one of these: Linux, macOS, Windows.
FURTHER_FONTS = ("Noto Sans CJK JP", "WenQuanYi Zen Hei", "IPAGothic", "Arial Unicode MS", "Hiragino Sans", "Yu Gothic")


@contextmanager
def _own_style() -> Iterator[None]:
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
        warnings.filterwarnings("ignore", r"Glyph .* missing from font", UserWarning)
        yield


def figure_of(paint: Callable[["Figure"], None], inches: tuple[float, float]) -> "Figure":
    """Return an empty figure of width x height ``inches`` after ``paint`` has drawn on it."""
    # as above
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with _own_style():
        figure = Figure(figsize=inches, dpi=FIGURE_DPI, layout="constrained")
        FigureCanvasAgg(figure)  # the backend of the importing program stays as it is
        paint(figure)
        return figure


def save_figure(paint: Callable[["Figure"], None], inches: tuple[float, float], path: Path) -> None:
    """Write what ``paint`` draws on an empty figure of width x height ``inches`` as a PNG, whatever the suffix."""
    temporary = path.with_name(path.name + ".partial")  # as write_text: the next run replaces what a kill leaves
    figure = figure_of(paint, inches)
    try:
        with _own_style():
            figure.savefig(temporary, dpi=FIGURE_DPI, format="png")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
