"""B_crit: the slope of known curves, the law that is fitted, and ends that no trial bounds."""

import math

import numpy as np
import pytest
import yaml
from refusals import cases, refused, text_cases
from search_records import BUDGET, QUESTION, SPACE, TARGET, Workload, record, step_time

import bstune
from bstune.core.curve import slope_b_crit
from bstune.search.grid import best_of_grid, propose_of_grid
from bstune.search.law import B_CRIT, make_law
from bstune.search.posterior import Posterior, rows_of
from bstune.study.critical import best_s_min, critical_batch_size
from bstune.study.estimates import answer_posterior
from bstune.study.fit_curve import fit_curve
from bstune.study.plan import Plan

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


@text_cases("""
points
[]
[GOOD, GOOD]
[GOOD, [64, 100, false]]
[GOOD, [64, 100, true], [0, 100, true]]
[GOOD, [64, 100, true], [8, .nan, true]]
[GOOD, [64, 100, true], [8, many, true]]
7
[GOOD, [64, 100, true], [8, 100]]
[GOOD, [64, 100, true], [8, 100, 'False']]
""")
def test_points_that_cannot_be_used_are_one_line(points):
    with refused():
        fit_curve(yaml.safe_load(points.replace("GOOD", "[8, 200, true]")))
    with refused():
        fit_curve(points_of([8, 64])).steps(0)


def critical(sizes, b_crit, factor):
    """B_crit of draws, 90% of them within a factor, where trials of some sizes reached."""
    records = [record(number, batch_size=size) for number, size in enumerate(sizes)]
    law = make_law(SPACE, BUDGET, misfit=False)
    theta = np.tile(law.mean, (2001, 1))
    log_b_crit = math.log(b_crit / 2**law.middle)
    theta[:, B_CRIT] = log_b_crit + np.linspace(-1.0, 1.0, 2001) * math.log(factor) / 0.9
    posterior = Posterior(law, theta, rows_of(records, TARGET), tuple(records))
    return critical_batch_size(posterior, records)


def test_the_law_is_fitted_over_all_batch_sizes_that_reached():
    """The misfit tilts the curve about the middle, by 10% at both ends: S_min stays the law's."""
    records = [record(number, batch_size=size) for number, size in enumerate((8, 64, 512))]
    law = make_law(SPACE, BUDGET, misfit=True)
    theta = np.array(
        [[math.log(200), 0.0, 0.0, 0.0, -1.0, 0.2, -2.0, 0.0, -0.1, -0.05, 0.0, 0.05, 0.1]]
    )
    posterior = Posterior(law, theta, rows_of(records, TARGET), tuple(records))
    # 200 steps at 64 examples, which B_crit is.
    assert critical_batch_size(posterior, records).s_min == pytest.approx(100.0)


def test_s_min_of_points_on_the_law():
    sizes = np.array([8.0, 16.0, 300.0])
    assert best_s_min(sizes, law(sizes), 64.0) == pytest.approx(150.0)


def test_regimes_and_the_law_go_with_the_printed_value():
    found = critical((8, 32, 128, 512), 64.0, 1.5)
    ends = found.interval.low, found.interval.value, found.interval.high
    assert ends == pytest.approx((64 / 1.5, 64, 96))
    assert (found.linear_below, found.no_gain_above) == pytest.approx((64 / 9, 576))
    assert (found.smallest, found.largest) == (8, 512)


# Trials that reached, B_crit's factor of uncertainty about 64 -> low and high of the interval.
@cases("""
sizes | factor | low | high
# All beyond the trials: an octave below the largest is claimed.
[8, 16] | 1.5 | 8 | null
# Its high end lies over 4 times the largest.
[8, 16, 32] | 8.0 | 8 | null
[256, 512] | 1.5 | null | 512
[64] | 6.0 | null | null
""")
def test_an_end_that_no_trial_bounds_is_open(sizes, factor, low, high):
    found = critical(sizes, 64.0, factor)
    assert (found.interval.value, found.s_min, found.linear_below) == (None, None, None)
    assert (found.interval.low, found.interval.high) == (
        low and pytest.approx(low),
        high and pytest.approx(high),
    )


def test_of_a_grid_the_best_of_each_batch_size_counts():
    """The law of other rates takes no part."""
    records = []
    for number in range(30):
        proposal = propose_of_grid(QUESTION, SPACE, step_time, records)
        records.append(Workload().train(number, proposal, records))
    plan = Plan(QUESTION, SPACE, baseline=None, trials=30, seeds=3, seed=0, sampler="grid")
    assert answer_posterior(plan, records).chains == tuple(best_of_grid(SPACE, records))
