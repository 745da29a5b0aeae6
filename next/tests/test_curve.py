import doctest

import pytest
import yaml
from refusals import cases, refused

import bstune
from bstune.core.curve import slope_b_crit
from bstune.study import fit_curve as module
from bstune.study.fit_curve import fit_curve

SIZES = [2.0**k for k in range(3, 13)]


def law(batch_size, s_min=150.0, b_crit=64.0):
    return s_min * (1.0 + b_crit / batch_size)


def knee(batch_size, exponent, b_crit):
    """Its slope -r/(1 + r), with r = (B_crit/B)^p, is -1/2 at B_crit."""
    return 200.0 * (1.0 + (b_crit / batch_size) ** exponent) ** (1.0 / exponent)


# The slope is averaged over an octave, and drawn towards the law's, of exponent 1, near the ends.
@cases("""
exponent | tolerance
0.7 | 0.02
1.0 | 0.01
4.0 | 0.02
""")
@pytest.mark.parametrize("b_crit", [40.0, 1000.0])
def test_the_truth_of_other_formulas_is_the_slope(exponent, tolerance, b_crit):
    points = [(size, knee(size, exponent, b_crit)) for size in SIZES]
    assert slope_b_crit(points) == pytest.approx(b_crit, rel=tolerance)
    # Neither their order nor the unit of the steps decides.
    other = [(size, 7.0 * steps) for size, steps in reversed(points)]
    assert slope_b_crit(other) == pytest.approx(slope_b_crit(points))


def test_no_slope_of_a_half_is_no_truth():
    # No points, steps that fall as 1/B, and steps that rise.
    for points in ((), [(size, 1e5 / size) for size in SIZES], [(size, size) for size in SIZES]):
        assert slope_b_crit(points) is None


def points_of(sizes, **parameters):
    return [(size, law(size, **parameters), True) for size in sizes]


def test_the_docstring_s_example_runs():
    assert doctest.testmod(module).attempted == 4
    assert doctest.testmod(module).failed == 0


def test_a_fit_finds_the_law():
    fit = bstune.fit_curve(points_of([8, 16, 32, 64, 128, 256, 512]))
    assert (fit.b_crit.value, fit.s_min) == pytest.approx((64, 150), rel=0.05)
    assert fit.b_crit.low < 60 < 68 < fit.b_crit.high
    regimes = fit.b_crit.value / 9, fit.b_crit.value * 9
    assert (fit.linear_below, fit.no_gain_above) == pytest.approx(regimes)
    assert [fit.steps(size) for size in SIZES] == pytest.approx(list(map(law, SIZES)), rel=0.07)


def test_runs_that_did_not_reach_the_target_are_bounds():
    # Two points say little; a bound far above what they predict says that B_crit is larger.
    two = [(32, law(32), True), (512, law(512), True)]
    low = fit_curve([*two, (8, 100, False)])
    high = fit_curve([*two, (8, 4000, False)])
    # It took longer than 100 steps in any case.
    assert low.steps(8) == pytest.approx(fit_curve(two).steps(8), rel=0.2)
    assert high.steps(8) > 1.15 * low.steps(8)


# The curve is level, or still falls as 1/B: one end is open, and there is no value.
OPEN = [([128, 256, 512, 1024], 30.0, True), ([8, 16, 32, 64], 1000.0, False)]


@pytest.mark.parametrize("sizes, b_crit, is_level", OPEN)
def test_ends_that_the_points_do_not_bound_are_open(sizes, b_crit, is_level):
    fit = fit_curve(points_of(sizes, b_crit=b_crit))
    assert (fit.b_crit.low is None, fit.b_crit.high is None) == (is_level, not is_level)
    assert (fit.b_crit.value, fit.s_min, fit.linear_below, fit.no_gain_above) == (None,) * 4
    assert fit.steps(sizes[0]) == pytest.approx(law(sizes[0], b_crit=b_crit), rel=0.1)


UNUSABLE = """
[]
[GOOD, GOOD]
[GOOD, [64, 100, false]]
[GOOD, [64, 100, true], [0, 100, true]]
[GOOD, [64, 100, true], [8, .nan, true]]
[GOOD, [64, 100, true], [8, many, true]]
7
[GOOD, [64, 100, true], [8, 100]]
[GOOD, [64, 100, true], [8, 100, 'False']]
"""


@pytest.mark.parametrize("points", UNUSABLE.strip().splitlines())
def test_points_that_cannot_be_used_are_one_line(points):
    with refused():
        fit_curve(yaml.safe_load(points.replace("GOOD", "[8, 200, true]")))
    with refused():
        fit_curve(points_of([8, 64])).steps(0)
