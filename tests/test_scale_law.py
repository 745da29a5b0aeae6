"""The law over scales: closed forms of its covariance, what widens its interval, and that it takes three scales."""

import math
from itertools import pairwise

import numpy as np
import pytest

from bstune.core.errors import StudyError
from bstune.core.scale_law import LEVEL_SIGMA, SLOPE_SIGMA, Covariance, ScalePoint, fit_scale_law

SCALES = (1e3, 4e3, 1.6e4, 6.4e4)


def points_of(exponent, error=0.05, scales=SCALES, study=None):
    """Points on 20 (s/1000)^exponent, each of a study of its own, or all of one."""
    return [
        ScalePoint(scale, 20.0 * (scale / 1e3) ** exponent, error, study or str(i))
        for i, scale in enumerate(scales)
    ]


@pytest.mark.parametrize("exponent", [-0.4, 0.0, 0.33, 0.8])
def test_a_power_is_found_and_continued(exponent):
    law = fit_scale_law(points_of(exponent, error=0.02))
    assert law.exponent.value == pytest.approx(exponent, abs=0.02)
    assert law.exponent.low < exponent < law.exponent.high
    found = law.at(6.4e4 * 16)
    # 6.4e4 x 16/1e3 = 1,024.
    expected = 20.0 * 1024.0**exponent
    assert found.value == pytest.approx(expected, rel=0.1)
    assert found.low < expected < found.high


def test_the_interval_widens_with_the_distance_to_either_side():
    law = fit_scale_law(points_of(0.5))
    for factors in ((1, 4, 16, 64, 256), (1, 1 / 4, 1 / 16, 1 / 64)):
        edge = 6.4e4 if factors[1] > 1 else 1e3
        widths = [math.log(law.at(edge * one).high / law.at(edge * one).low) for one in factors]
        assert all(wide > 1.05 * narrow for narrow, wide in pairwise(widths))


@pytest.mark.parametrize(
    ("narrow", "wide"),
    [
        (points_of(0.5, error=0.05), points_of(0.5, error=0.5)),
        (points_of(0.5), points_of(0.5)[:3]),
        (points_of(0.5, error=0.05), points_of(0.5, error=None)),
        # A study's own offset is in all its points.
        (points_of(0.5, study="one"), points_of(0.5)),
    ],
)
def test_what_is_known_less_has_a_wider_interval(narrow, wide):
    there = 1e6
    widths = []
    for points in (narrow, wide):
        found = fit_scale_law(points).at(there)
        widths.append(math.log(found.high / found.low))
    assert widths[1] > 1.02 * widths[0]


def test_scatter_that_no_error_explains_widens_the_interval():
    straight = points_of(0.5)
    bent = [
        ScalePoint(one.scale, one.value * factor, one.error, one.study)
        for one, factor in zip(straight, (1.5, 0.6, 1.6, 0.7), strict=True)
    ]
    widths = []
    for points in (straight, bent):
        found = fit_scale_law(points).at(6.4e4)
        widths.append(math.log(found.high / found.low))
    assert widths[1] > 1.5 * widths[0]


def test_units_do_not_matter():
    one = fit_scale_law(points_of(0.4))
    scaled = [ScalePoint(p.scale * 1e6, p.value * 1e3, p.error, p.study) for p in points_of(0.4)]
    other = fit_scale_law(scaled)
    assert other.exponent.value == pytest.approx(one.exponent.value, abs=1e-4)
    found = other.at(1e12)
    expected = one.at(1e6)
    assert (found.low, found.high) == pytest.approx(
        (1e3 * expected.low, 1e3 * expected.high), rel=1e-3
    )


def test_a_study_with_a_large_error_counts_little():
    points = points_of(0.5, error=0.05)
    odd = ScalePoint(2e4, 2000.0, 2.0, "odd")
    alone = fit_scale_law(points).at(1e6)
    together = fit_scale_law([*points, odd]).at(1e6)
    assert together.value == pytest.approx(alone.value, rel=0.1)


def test_the_covariance_is_that_of_an_integrated_brownian_motion():
    x = np.array([-1.0, 2.0, 3.0])
    line = LEVEL_SIGMA**2 + SLOPE_SIGMA**2 * np.outer(x, x)
    # u^3/3 + u^2 (v - u)/2 of u = 2, v = 3: 8/3 + 2; nothing across the middle.
    bent = np.array([[1 / 3, 0.0, 0.0], [0.0, 8 / 3, 8 / 3 + 2.0], [0.0, 8 / 3 + 2.0, 9.0]])
    assert Covariance.between(x, x).at(0.5) == pytest.approx(line + 0.25 * bent)


@pytest.mark.parametrize("scales", [(), (1.0,), (1.0, 2.0), (1.0, 2.0, 2.0, 1.0)])
def test_fewer_than_three_scales_are_no_law(scales):
    with pytest.raises(StudyError, match=f"takes 3 of them, but got {len(set(scales))}"):
        fit_scale_law(points_of(0.5, scales=scales))


@pytest.mark.parametrize("scales", [(1e-15, 1.0, 1e18), (1.0, 1.0 + 1e-12, 1.0 + 2e-12)])
def test_extremes_stay_finite(scales):
    law = fit_scale_law(points_of(0.5, scales=scales))
    for scale in (1e-18, 1e18):
        found = law.at(scale)
        assert all(map(math.isfinite, (found.value, found.low, found.high)))
        assert found.low <= found.value <= found.high
