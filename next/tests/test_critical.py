"""B_crit: its law is twice its floor there, ends that trials do not bound are open."""

import math

import numpy as np
import pytest
from results import curve as drawn_curve
from search_records import BUDGET, SPACE, TARGET, record

from bstune.search.law import B_CRIT, make_law
from bstune.search.posterior import Posterior, rows_of
from bstune.study.critical import best_s_min, critical_batch_size, is_narrow
from bstune.study.result import Interval


def critical(sizes, b_crit, factor):
    """B_crit of draws, 90% of them within a factor, where trials of some sizes reached."""
    records = [record(number, batch_size=size) for number, size in enumerate(sizes)]
    law = make_law(SPACE, BUDGET, misfit=False)
    theta = np.tile(law.mean, (2001, 1))
    log_b_crit = math.log(b_crit / 2**law.middle)
    theta[:, B_CRIT] = log_b_crit + np.linspace(-1.0, 1.0, 2001) * math.log(factor) / 0.9
    posterior = Posterior(law, theta, rows_of(records, TARGET), tuple(records))
    return critical_batch_size(posterior, records)


def test_the_law_that_fits_a_curve_on_the_law_is_that_law():
    # S*(B) = 26 (1 + 130/B).
    points = [(point.batch_size, point.steps) for point in drawn_curve()]
    assert best_s_min(*np.array(points).T, 130.0) == pytest.approx(26.0)


def test_the_law_fits_best_in_log_steps():
    sizes, steps = np.array([10.0, 40.0, 160.0]), np.array([300.0, 150.0, 90.0])

    def squares(s_min):
        return float((np.log(steps / (s_min * (1.0 + 40.0 / sizes))) ** 2).sum())

    best = best_s_min(sizes, steps, 40.0)
    assert squares(best) < min(squares(0.99 * best), squares(1.01 * best))


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


def test_regimes_and_the_law_go_with_the_printed_value():
    found = critical((8, 32, 128, 512), 64.0, 1.5)
    value = found.interval.value
    assert (found.interval.low, value, found.interval.high) == pytest.approx((64 / 1.5, 64, 96))
    assert (found.linear_below, found.no_gain_above) == pytest.approx((64 / 9, 576))
    assert found.s_min is not None
    assert (found.smallest, found.largest) == (8, 512)


# Trials that reached, B_crit and its factor of uncertainty -> low and high of the interval.
OPEN = [
    ((8, 16), 64.0, 1.5, 8, None),  # all beyond the trials: an octave below the largest is claimed
    ((8, 16, 32), 24.0, 8.0, 3, None),  # its high end, 192, lies over 4 times the largest
    ((256, 512), 64.0, 1.5, None, 512),
    ((64, 512), 64.0, 6.0, None, 384),
    ((64,), 64.0, 6.0, None, None),
]


@pytest.mark.parametrize(("sizes", "b_crit", "factor", "low", "high"), OPEN)
def test_an_end_that_no_trial_bounds_is_open(sizes, b_crit, factor, low, high):
    found = critical(sizes, b_crit, factor)
    assert found.interval.value is None
    assert (found.s_min, found.linear_below, found.no_gain_above) == (None, None, None)
    for end, expected in ((found.interval.low, low), (found.interval.high, high)):
        assert (end is None) == (expected is None)
        assert end is None or end == pytest.approx(expected)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(50.0, 100.0, True), (50.0, 101.0, False), (None, 60.0, False), (50.0, None, False)],
)
def test_a_narrow_interval_has_two_ends(low, high, expected):
    assert is_narrow(Interval(value=None, low=low, high=high)) == expected
