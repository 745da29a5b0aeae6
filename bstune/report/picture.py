"""A figure that a notebook shows as a cell's last value, without pyplot and without a setting.

    picture = result.plot()
    picture.savefig("curve.pdf")  # it is matplotlib's Figure in all else

A Figure that pyplot has not made has no picture of its own: a notebook shows its ``repr``.
"""

import io

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


class Picture(Figure):
    """Matplotlib's figure, which a notebook shows as a PNG of inches x dpi pixels."""

    def _repr_png_(self) -> bytes:
        """Give the bytes of the PNG, at the figure's own resolution.

        The canvas that draws it takes the place of the figure's, which is put back.
        """
        # drawing.py imports this module where it draws.
        from bstune.report.drawing import own_style

        file = io.BytesIO()
        canvas = self.canvas
        try:
            with own_style():
                FigureCanvasAgg(self).print_png(file)  # type: ignore[no-untyped-call]
        finally:
            self.set_canvas(canvas)
        return file.getvalue()
