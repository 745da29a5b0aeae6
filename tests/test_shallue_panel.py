"""Steps over batch size on one law: in closed form, on curves whose law is known."""

import math
from dataclasses import replace

import numpy as np
import pytest
from test_compare import UNREACHED, studies, summary

from bstune.report.drawing import figure_of
from bstune.sweeps.shallue_panel import (
    PanelCurve,
    distance_from_law,
    law_text,
    over_perfect_scaling,
    paint_panel,
    panel_curve,
    panel_inches,
)

S_MIN = 40.0


def curve_of(b_crit, sizes, factor=1.0):
    """Build a curve of the law; its points take ``factor`` times the law's steps."""
    sizes = np.array(sizes, dtype=np.float64)
    steps = S_MIN * (1.0 + b_crit / sizes)
    return PanelCurve(
        name="made",
        point_sizes=sizes,
        point_steps=factor * steps,
        batch_size=sizes,
        steps=steps,
        steps_low=steps / 1.1,
        steps_high=steps * 1.1,
        b_crit=b_crit,
        s_min=S_MIN,
    )


@pytest.mark.parametrize("b_crit", [10.0, 500.0])
def test_all_workloads_lie_on_one_curve(b_crit):
    curve = curve_of(b_crit, [8, 64, 512])
    sizes, excess = over_perfect_scaling(curve, curve.batch_size, curve.steps)
    assert sizes == pytest.approx(curve.batch_size / b_crit)
    assert excess == pytest.approx(1.0 + sizes)
    # At B_crit the examples are twice the fewest.
    at_critical = over_perfect_scaling(curve, np.array([b_crit]), np.array([2.0 * S_MIN]))
    assert at_critical == (pytest.approx([1.0]), pytest.approx([2.0]))


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        # B_crit/9 and 9 B_crit.
        ([10, 90, 810], (True, True)),
        ([11, 90, 810], (False, True)),
        ([10, 90, 809], (True, False)),
        ([], (False, False)),
    ],
)
def test_a_regime_shows_where_a_batch_size_in_it_reached_the_target(sizes, expected):
    curve = curve_of(90.0, sizes)
    shown = (curve.shows_perfect_scaling, curve.shows_maximal_data_parallelism)
    assert shown == expected
    unknown = replace(curve, b_crit=None)
    assert not unknown.shows_perfect_scaling
    assert not unknown.shows_maximal_data_parallelism


def test_the_distance_counts_each_workload_alike():
    on_it = curve_of(90.0, [10, 90, 810])
    off_it = curve_of(90.0, [10], factor=math.exp(0.2))
    assert distance_from_law([on_it]) == pytest.approx(0.0, abs=1e-12)
    # The root mean square over two curves.
    assert distance_from_law([on_it, off_it]) == pytest.approx(0.2 / math.sqrt(2.0))
    # One whose S_min is not known has no place there.
    assert distance_from_law([off_it, replace(on_it, s_min=None)]) == pytest.approx(0.2)
    assert distance_from_law([replace(on_it, b_crit=None)]) is None


def test_the_text_counts_the_regimes_that_show():
    perfect = curve_of(90.0, [10, 90])
    both = curve_of(90.0, [10, 90, 810])
    assert law_text([perfect, both]) == (
        "the points lie within 0% of one law (root mean square); perfect scaling shows on 2 of 2 "
        "studies, maximal data parallelism on 1"
    )
    assert law_text([replace(both, b_crit=None)]) is None


def test_a_studys_curve_is_taken_over():
    (study,) = studies(summary(b_crit=100.0, s_min=80.0))
    curve = panel_curve(study)
    assert (curve.b_crit, curve.s_min, curve.least_examples) == (100.0, 80.0, 8000.0)
    assert curve.point_sizes.tolist() == [point.batch_size for point in study.points]
    assert distance_from_law([curve]) == pytest.approx(0.0, abs=0.02)


@pytest.mark.parametrize("changes", [{}, {"s_min": None}, {"b_crit": None}])
def test_what_is_not_known_is_left_out_of_the_figure(changes):
    (unreached,) = studies(summary(**UNREACHED))
    curves = [replace(curve_of(90.0, [10, 90, 810]), **changes), panel_curve(unreached)]
    figure = figure_of(lambda empty: paint_panel(empty, curves), panel_inches(len(curves)))
    *panels, law = figure.axes
    assert len(panels[0].collections) > 0
    assert any(text.get_text() == "not reached" for text in panels[1].texts)
    drawn = len(law.lines)
    # The curve and the law.
    assert drawn == (0 if changes else 2)
