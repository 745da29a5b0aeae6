"""The ends of intervals are where a likelihood written again from the model says."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import ndtr, stdtrit

from bstune.core import curve_likelihood as likelihood
from bstune.core.curve import FrontierPoint, fit_curve

S_MIN = 100.0
B_CRIT = 1000.0
# They go from B_crit/32 to 8 B_crit.
NINE = B_CRIT * 2.0 ** np.arange(-5, 4)


def point(batch_size, steps, stopped=False):
    return FrontierPoint(float(batch_size), float(steps), stopped=stopped, steps_low=None)


def density(off, scale):
    """The normal density times the root of 2 pi: scipy.stats' takes twenty times as long."""
    return np.exp(-0.5 * (off / scale) ** 2) / scale


def reference_deviance(points, b_crit=None, s_min=None, b_opt=0.0):
    """The least deviance, written again from the model with scipy's minimiser; free where None."""
    size, steps = np.array([(p.batch_size, p.steps) for p in points]).T
    stopped = np.array([p.stopped for p in points])
    share = likelihood.POINT_OUTLIER_SHARE

    def deviance(parameters):
        log_sigma, log_e, log_b, log_o = parameters
        log_b = log_b if b_crit is None else math.log(b_crit)
        log_e = log_e if s_min is None else math.log(s_min) + log_b
        sigma = math.exp(log_sigma)
        wide = math.hypot(sigma, likelihood.POINT_OUTLIER_SPREAD)
        o = math.exp(log_o) if b_opt is None else b_opt
        # S = e/B_crit (1 + B_crit/B + (B_opt/B)^2)
        off = np.log(steps) - (log_e - log_b + np.log1p(math.exp(log_b) / size + (o / size) ** 2))
        # Without the factor of all densities, 1/sqrt(2 pi).
        exact = (1 - share) * density(off, sigma) + share * density(off, wide)
        above = (1 - share) * ndtr(-off / sigma) + share * ndtr(-off / wide)
        chance = np.where(stopped, above, exact)
        prior = likelihood.PRIOR_WEIGHT * (log_sigma + likelihood.PRIOR_NOISE**2 / (2 * sigma**2))
        return 2 * prior - 2 * np.log(chance).sum()

    middle = float(np.median(np.log(steps * size)))
    starts = [
        (math.log(s), middle + shift, 7.0, 5.0) for shift in (-1.0, 0.0, 1.0) for s in (0.05, 0.3)
    ]
    options = {"xatol": 1e-7, "fatol": 1e-9, "maxiter": 8000, "maxfev": 8000}
    return min(
        minimize(deviance, start, method="Nelder-Mead", options=options).fun for start in starts
    )


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [(), (0, 6), (8,)])
def test_the_ends_are_where_a_reference_likelihood_falls_by_the_stated_amount(stopped):
    steps = S_MIN * (1 + B_CRIT / NINE) * np.exp(0.1 * np.random.default_rng(5).standard_normal(9))
    # With an outlier the mixture matters.
    steps[3] *= 3
    steps[list(stopped)] *= 0.8
    points = [point(B, S, i in stopped) for i, (B, S) in enumerate(zip(NINE, steps, strict=True))]
    fit = fit_curve(points)
    n = 9 - len(stopped) + likelihood.PRIOR_WEIGHT
    t = stdtrit(n - 2, 0.95)
    least = reference_deviance(points)
    assert reference_deviance(points, fit.critical_batch_size) == pytest.approx(least, abs=1e-3)
    for end in (fit.critical_batch_size_low, fit.critical_batch_size_high):
        assert reference_deviance(points, end) - least == pytest.approx(
            n * math.log(1 + t**2 / (n - 2)), abs=0.02
        )


@pytest.mark.slow
def test_the_ends_of_three_terms_are_where_a_reference_likelihood_falls_likewise():
    noise = np.exp(0.1 * np.random.default_rng(2).standard_normal(9))
    steps = S_MIN * (1 + B_CRIT / NINE + (250.0 / NINE) ** 2) * noise
    points = [point(B, S) for B, S in zip(NINE, steps, strict=True)]
    points[4] = replace(points[4], steps=points[4].steps * 0.8, stopped=True)
    fit = fit_curve(points)
    assert fit.law == "three-terms"
    n = 8 + likelihood.PRIOR_WEIGHT
    t = stdtrit(6.0, 0.95)
    least = reference_deviance(points, b_opt=None)
    assert reference_deviance(points, fit.critical_batch_size, b_opt=fit.b_opt) == pytest.approx(
        least, abs=2e-3
    )
    for b_crit, b_opt in (
        (fit.critical_batch_size_low, None),
        (fit.critical_batch_size_high, None),
        (None, fit.b_opt_low),
        (None, fit.b_opt_high),
    ):
        rise = reference_deviance(points, b_crit, b_opt=b_opt) - least
        assert rise == pytest.approx(n * math.log(1 + t**2 / (n - 3)), abs=0.1)
