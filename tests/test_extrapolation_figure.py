"""The picture of an extrapolation: a panel a law, with each study's bar, the band, and the wanted scale."""

import numpy as np
import pytest
from matplotlib.figure import Figure

from bstune.core.scale_law import ScalePoint, fit_scale_law
from bstune.report.extrapolation import Extrapolation, Reading, ScaleRow, quantity_law
from bstune.report.extrapolation_figure import draw_extrapolation, paint_extrapolation

SCALES = (10.0, 100.0, 1000.0)


@pytest.fixture
def found():
    """Studies whose batch size is the root of the scale and whose learning rate is 0.1."""
    laws = {}
    rows = {scale: {} for scale in SCALES}
    for name, exponent in (("critical_batch_size", 0.5), ("lr", 0.0)):
        points = [ScalePoint(scale, 0.1 * scale**exponent, 0.1, str(scale)) for scale in SCALES]
        laws[name] = quantity_law(fit_scale_law(points), 1e4)
        for point in points:
            # The smallest study's interval is open above.
            high = None if point.scale == 10.0 else point.value * 1.2
            rows[point.scale][name] = Reading(point.value, point.value / 1.2, high)
    studies = tuple(ScaleRow(f"n{scale:g}", scale, rows[scale]) for scale in SCALES)
    return Extrapolation(
        scale="examples",
        meaning="examples of the training data",
        wanted=1e4,
        rows=studies,
        laws=laws,
        size_to_use="critical_batch_size",
        fixed={},
        schedule=(),
        notes=(),
    )


def test_each_law_has_a_panel_with_what_was_measured_and_what_is_predicted(found):
    figure = Figure()
    paint_extrapolation(found, figure)
    assert len(figure.axes) == 2
    for axes, name in zip(figure.axes, found.laws, strict=True):
        line, measured, wanted = (np.array(one.get_xydata()) for one in axes.lines)
        assert measured[:, 0].tolist() == list(SCALES)
        expected = [row.readings[name].value for row in found.rows]
        assert measured[:, 1] == pytest.approx(expected)
        assert wanted[0] == pytest.approx([1e4, found.laws[name].wanted.value])
        # From the smallest study to what is wanted.
        assert (line[0, 0], line[-1, 0]) == pytest.approx((10.0, 1e4))
        assert line[-1, 1] == pytest.approx(found.laws[name].wanted.value)
        low, high = axes.get_ylim()
        assert low < found.laws[name].wanted.low
        assert high > found.laws[name].wanted.high


def test_an_open_end_has_no_bar(found):
    figure = Figure()
    paint_extrapolation(found, figure)
    bars = figure.axes[0].containers[0].lines[2][0].get_segments()
    open_above = bars[0][:, 1]
    closed = bars[1][:, 1]
    value = found.rows[0].readings["critical_batch_size"].value
    assert open_above == pytest.approx([value / 1.2, value])
    assert closed[1] > closed[0]


@pytest.mark.parametrize(
    ("suffix", "head"), [("png", b"\x89PNG"), pytest.param("svg", b"<?xml", marks=pytest.mark.slow)]
)
@pytest.mark.usefixtures("rendered")
def test_it_is_written_whole(found, tmp_path, suffix, head):
    path = tmp_path / f"laws.{suffix}"
    draw_extrapolation(found, path)
    assert path.read_bytes().startswith(head)
    assert list(tmp_path.iterdir()) == [path]
