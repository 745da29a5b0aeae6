"""What an experiment comes to: a sentence, the numbers behind it, and one figure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bstune.figure import FIGURE_DPI

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Finding:
    """What an experiment comes to.

    Args:
        sentence: the finding, computed from the rows, in one sentence.
        rows: the numbers, one mapping a line of the table; all of plain values that go to JSON. Lists and mappings in
            them are written to ``result.json`` and left out of the table.
        n: how many measurements stand behind each row: repeats, or seeds.
        device: name of the device that it was measured on.
        draw: writes the figure to the path that it is given, as a PNG whatever the path's suffix is.
    """

    sentence: str
    rows: Sequence[Mapping[str, Any]]
    n: int
    device: str
    draw: Callable[[Path], None]


def draw_figure(paint: Callable[["Figure"], None], inches: tuple[float, float], path: Path) -> None:
    """Write one figure as a PNG, in matplotlib's own style, with the backend and the settings of the program untouched.

    Args:
        paint: draws on an empty figure with constrained layout.
        inches: width and height.
        path: the file; its suffix does not matter.
    """
    import matplotlib.style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.style.context(["default", {"font.size": 9.0}]):
        figure = Figure(figsize=inches, dpi=FIGURE_DPI, layout="constrained")
        FigureCanvasAgg(figure)
        paint(figure)
        figure.savefig(path, dpi=FIGURE_DPI, format="png")
