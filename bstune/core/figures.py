"""The palette of all figures, and the one way to write them: whole, in matplotlib's own style, without a display."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURE_DPI = 150
# from Okabe and Ito's palette, which survives the common colour blindnesses
BLUE, VERMILION, PURPLE, INK, GREY = "#0072B2", "#D55E00", "#AA4499", "#1a1a1a", "#9a9a9a"


def figure_of(paint: Callable[["Figure"], None], inches: tuple[float, float]) -> "Figure":
    """Return an empty figure of width x height ``inches`` after ``paint`` has drawn on it."""
    # Only commands that draw should wait for matplotlib: its import takes 0.4 s (3.11, files cached, two CPU cores).
    import matplotlib.style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Style context and Agg canvas leave the settings and the backend of the importing program as they are.
    with matplotlib.style.context(["default", {"font.size": 9.0}]):
        figure = Figure(figsize=inches, dpi=FIGURE_DPI, layout="constrained")
        FigureCanvasAgg(figure)
        paint(figure)
        return figure


def save_figure(paint: Callable[["Figure"], None], inches: tuple[float, float], path: Path) -> None:
    """Write what ``paint`` draws on an empty figure of width x height ``inches`` as a PNG, whatever the suffix."""
    # as above
    import matplotlib.style

    temporary = path.with_name(path.name + ".partial")  # as write_text: the next run replaces what a kill leaves
    figure = figure_of(paint, inches)
    try:
        with matplotlib.style.context(["default", {"font.size": 9.0}]):
            figure.savefig(temporary, dpi=FIGURE_DPI, format="png")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
