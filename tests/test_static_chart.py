"""Where the picture of a chart puts what its traces hold."""

import re

import pytest

from bstune.report.static_chart import (
    CHART_WIDTH,
    LEFT_MARGIN,
    RIGHT_MARGIN,
    TOP_MARGIN,
    static_chart,
)

# Of these pixels the panel has 276.
HEIGHT = 348.0
PANEL = HEIGHT - 48.0 - TOP_MARGIN
LOG = {
    "xaxis": {"type": "log", "range": [0.0, 2.0], "title": {"text": "B"}},
    "yaxis": {"type": "linear", "range": [0.0, 10.0], "title": {"text": "a &lt; b"}},
}


def drawn(*traces, **changes):
    return static_chart(traces, {**LOG, **changes}, HEIGHT)


def numbers(pattern, picture):
    return [[float(one) for one in found] for found in re.findall(pattern, picture)]


def test_a_mark_lies_where_its_axes_put_it():
    dots = {"x": [1.0, 10.0, None, -1.0], "y": [10.0, 5.0, 1.0, 1.0], "mode": "markers"}
    picture = drawn({**dots, "marker": {"color": "--ink", "size": 8}})
    at = numbers(r'<circle cx="([\d.]+)" cy="([\d.]+)" r="4"', picture)
    width = CHART_WIDTH - LEFT_MARGIN - RIGHT_MARGIN
    # What a logarithm does not have, and what is not known, is left out.
    assert at == [[LEFT_MARGIN, TOP_MARGIN], [LEFT_MARGIN + width / 2.0, TOP_MARGIN + PANEL / 2.0]]
    assert "fill:var(--ink)" in picture


def test_a_line_is_broken_where_a_value_is_missing():
    line = {"x": [1.0, 10.0, 10.0, 100.0], "y": [1.0, 2.0, None, 4.0], "mode": "lines"}
    picture = drawn({**line, "line": {"color": "--blue", "dash": "dash"}})
    outline = re.search(r'<path d="(M[^"]*)" style="fill:none;stroke:var\(--blue\)', picture)[1]
    assert (outline.count("M"), outline.count("L")) == (2, 1)
    assert "stroke-dasharray:7 4" in picture


def test_error_bars_reach_from_end_to_end():
    bars = {"array": [2.0], "arrayminus": [1.0], "color": "--purple"}
    picture = drawn({"x": [10.0], "y": [5.0], "mode": "markers", "error_y": bars})
    ((_, low, high),) = numbers(r'<path d="M([\d.]+) ([\d.]+)V([\d.]+)" style="stroke', picture)
    # From 4 to 7 of 10, counted from above.
    assert low == pytest.approx(TOP_MARGIN + 0.6 * PANEL, abs=0.1)
    assert high == pytest.approx(TOP_MARGIN + 0.3 * PANEL, abs=0.1)


def test_texts_stay_texts_and_the_legend_names_what_is_shown():
    line = {"x": [1.0, 2.0], "y": [1.0, 2.0], "mode": "lines"}
    picture = drawn({**line, "name": "<b>x</b>"}, {**line, "name": "hidden", "showlegend": False})
    assert "<b>" not in picture
    assert ">&lt;b&gt;x&lt;/b&gt;<" in picture
    assert ">a &lt; b<" in picture
    assert ">hidden<" not in picture


@pytest.mark.parametrize("values", [[0.0], [5.0, 5.0], [1e308, -1e308], [1e-300, 1e300], [None]])
@pytest.mark.parametrize("kind", ["log", "linear"])
def test_any_values_are_drawn(values, kind):
    picture = drawn({"x": [10.0] * len(values), "y": values}, yaxis={"type": kind})
    assert picture.endswith("</svg>")
    assert "nan" not in picture
    assert "inf" not in picture
