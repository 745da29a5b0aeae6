import math
from dataclasses import replace

import numpy as np
import pytest
from search_records import BUDGET, QUESTION, SPACE, TARGET, record, step_time

from bstune.search.findings import curve, lr_exponent_quantiles, near_optimal, predictions
from bstune.search.law import B_CRIT, make_law
from bstune.search.posterior import Posterior, rows_of

# S_min 100, B_crit 32, lr*(64) = 0.1, lr* grows as B^0.6, noise 0.14.
THETA = np.array([[math.log(150), math.log(0.5), 1.0, 0.1, -1.0, 0.2, math.log(0.14)]])


def posterior(chains=(), theta=THETA):
    law = make_law(SPACE, BUDGET, misfit=False)
    return Posterior(law, theta, rows_of(chains, TARGET), tuple(chains))


def test_a_prediction_lies_between_the_law_and_the_trial():
    lucky = record(0, lr=0.1, steps=100, steps_low=99)
    trials = [lucky, record(1, "missed"), record(2, role="new seed")]
    (got,) = predictions(posterior(trials), QUESTION, step_time)
    # A configuration's own deviation and a seed's are equal here: halfway.
    halfway = 0.5 * (math.log(150) + math.log(100))
    assert got.record is lucky
    assert got.log_value == pytest.approx(halfway + math.log(step_time(64)))
    assert got.deviation == pytest.approx(0.14 * math.sqrt(0.5))


def test_the_curve_and_its_band():
    theta = np.repeat(THETA, 101, axis=0)
    theta[:, [0, 2]] += np.linspace(-1.0, 1.0, 101)[:, None]
    low, middle = curve(posterior(theta=theta), step_time, [32, 64])
    assert (low.steps, middle.steps) == pytest.approx((200, 150))
    band = 200 / math.exp(0.9), 200 * math.exp(0.9)
    assert (low.steps_low, low.steps_high) == pytest.approx(band)
    rates = 0.1 / 2**0.9, 0.1, 0.1 * 2**0.9
    assert (middle.lr_low, middle.lr, middle.lr_high) == pytest.approx(rates)
    assert (low.lr, low.step_seconds) == pytest.approx((0.1 / 2**0.6, 1.32e-3))


def test_the_near_optimal_range():
    # (1 + 32/B)(100 + B) is least at B = sqrt(3200), within 1.1 of it from 29.6 to 108.03.
    points = curve(posterior(), step_time, range(8, 513))
    assert near_optimal(points, QUESTION, step_time) == (30, 108)
    # Where a step costs the same at all sizes the largest is best.
    assert near_optimal(points, QUESTION, lambda batch_size: 1.0)[1] == 512


@pytest.mark.parametrize(
    "space, exponent",
    [
        # From 8 to 512, 64 = B_crit in the middle, saturating grows eightfold: as the square root.
        (replace(SPACE, rule="saturating"), 0.5),
        (replace(SPACE, rule="surge"), 0.0),
        # One batch size alone, 8 = B_crit: over the octave above it.
        (replace(SPACE, rule="saturating", low=8, high=8), math.log2(2 / 1.5)),
    ],
)
def test_the_exponent_is_the_slope_of_the_best_rate(space, exponent):
    theta = THETA.copy()
    theta[:, B_CRIT] = 0.0
    law = make_law(space, BUDGET, misfit=False)
    got = lr_exponent_quantiles(Posterior(law, theta, rows_of((), TARGET), ()))
    assert got == pytest.approx((0.1 + exponent,) * 3)
