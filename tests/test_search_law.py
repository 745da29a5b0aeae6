"""The law, and what draws of it say of configurations, the curve and rates."""

import math
from dataclasses import replace

import numpy as np
import pytest
from refusals import cases
from search_records import BUDGET, QUESTION, SPACE, TARGET, record, step_time

from bstune.core.rules import lr_of
from bstune.search.findings import curve, lr_exponent_quantiles, near_optimal, predictions
from bstune.search.law import B_CRIT, make_law
from bstune.search.posterior import Posterior, rows_of

LAW = make_law(SPACE, BUDGET, misfit=False)
MISFIT = make_law(SPACE, BUDGET, misfit=True)
# S_min 100, B_crit 32 (half of the middle, 64), a shift of 1 octave, an exponent 0.1 over the
# rule's, a slope of 0.5 below and 2 octaves above, noise 0.14.
THETA = np.array([[*np.log([150.0, 0.5]), 1.0, 0.1, *np.log([0.5, 2.0, 0.14])]])


def log2(*values):
    return np.log2(values)


def test_the_curve_is_mccandlish_s():
    sizes = np.array([8.0, 64.0, 300.0])
    expected = 100.0 * (1.0 + 32.0 / sizes)
    np.testing.assert_allclose(np.exp(LAW.curve(THETA, np.log2(sizes)))[0], expected)


def test_the_best_rate_is_the_rule_shifted_and_bent():
    # The rule is 0.05 at 64 and grows as the square root.
    rates = 2.0 ** LAW.best_rate(THETA, log2(64.0, 256.0))[0]
    np.testing.assert_allclose(rates, [0.1, 0.1 * 4**0.6])


# On the hyperbola 0.5 1.2 (sqrt(2) - 1), far below a line of slope 0.5 an octave; log steps are at
# most 50, the level is log 150.
@cases("""
octaves | penalty
2.0 | 0.5
4.0 | 2.0
-1.2 | 0.2485281
-60.0 | 29.4060
60.0 | 44.98936
""")
def test_penalties_off_the_best_rate(octaves, penalty):
    x = log2(64.0)
    z = LAW.best_rate(THETA, x)[0] + octaves
    got = LAW.log_steps(THETA, x, z) - LAW.curve(THETA, x)
    assert got[0, 0] == pytest.approx(penalty, rel=1e-6)
    assert (LAW.penalty_above(THETA, x, z)[0, 0] > 0.0) == (octaves > 0.0)


def test_the_misfit_is_linear_between_its_knots():
    assert len(MISFIT.knots) == 5
    at_knots = [0.0, 1.0, -1.0, 0.0, 2.0]
    theta = np.array([[*THETA[0], math.log(0.1), *at_knots]])
    halfway = 0.5 * (MISFIT.knots[1] + MISFIT.knots[2])
    x = np.array([*MISFIT.knots, halfway])
    misfit = MISFIT.curve(theta, x) - LAW.curve(THETA, x)
    np.testing.assert_allclose(misfit[0], [0.0, 0.1, -0.1, 0.0, 0.2, 0.0], atol=1e-12)


def test_a_rule_turns_at_each_draw_s_b_crit():
    law = make_law(replace(SPACE, rule="saturating"), BUDGET, misfit=False)
    theta = np.repeat(THETA, 3, axis=0)
    # B_crit 32, 64 and 1024; a shift of one octave, and 0.1 of an octave an octave from 64 on.
    theta[:, B_CRIT] = np.log([0.5, 1.0, 16.0])
    sizes = np.array([8.0, 64.0, 500.0])
    expected = [
        [lr_of("saturating", size, (64, 0.05), turn) * 2.0 * (size / 64) ** 0.1 for size in sizes]
        for turn in (32.0, 64.0, 1024.0)
    ]
    np.testing.assert_allclose(2.0 ** law.best_rate(theta, np.log2(sizes)), expected)


def posterior(chains=(), theta=THETA, law=LAW):
    return Posterior(law, theta, rows_of(chains, TARGET), tuple(chains))


# A configuration's own deviation is 0.14: with that of a seed halfway, with twice it a fifth.
@pytest.mark.parametrize("noise, share", [(0.14, 0.5), (0.28, 0.2)])
def test_a_prediction_lies_between_the_law_and_the_trial(noise, share):
    theta = np.array([[*THETA[0, :-1], math.log(noise)]])
    lucky = record(0, lr=0.1, steps=100, steps_low=99)
    trials = [lucky, record(1, "missed"), record(2, role="new seed")]
    (got,) = predictions(posterior(trials, theta), QUESTION, step_time)
    between = (1 - share) * math.log(150) + share * math.log(100)
    assert got.record is lucky
    assert got.log_value == pytest.approx(between + math.log(step_time(64)))
    assert got.deviation == pytest.approx(noise * math.sqrt(share))


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
    got = lr_exponent_quantiles(posterior(theta=theta, law=law))
    assert got == pytest.approx((0.1 + exponent,) * 3)
