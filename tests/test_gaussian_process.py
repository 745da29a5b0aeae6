import math
from itertools import product

import numpy as np
import pytest
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel

from bstune.search import gaussian_process
from bstune.search.gaussian_process import AMPLITUDES, JITTER, LENGTHS, OTHER_LENGTH, draw_process


def some(rng, count, others=0, noise=0.01):
    at = np.column_stack([rng.uniform(3, 12, count), rng.uniform(-8, 0, count), rng.random((count, others))])
    return at, 0.3 * rng.standard_normal(count), np.full(count, noise)


def draws(residuals, at, count, seed=0):
    rng = np.random.default_rng(seed)
    return np.array([draw_process(*residuals, rng).draw(at, rng) for _ in range(count)])


def only(monkeypatch, amplitude, lengths):
    monkeypatch.setattr(gaussian_process, "AMPLITUDES", {amplitude: 1.0})
    monkeypatch.setattr(gaussian_process, "LENGTHS", {lengths: 1.0})


@pytest.mark.parametrize(("others", "noise"), [(0, 1e-4), (2, 0.04)])
def test_draws_have_the_mean_and_covariance_of_a_gaussian_process(monkeypatch, others, noise):
    amplitude, lengths = 0.3, (1.5, 0.8)
    only(monkeypatch, amplitude, lengths)
    rng = np.random.default_rng(1)
    residuals, at = some(rng, 7, others, noise), some(rng, 5, others)[0]
    at[0] = residuals[0][0] + 0.1
    kernel = ConstantKernel(amplitude**2, "fixed") * RBF([*lengths, *[OTHER_LENGTH] * others], "fixed")
    reference = GaussianProcessRegressor(kernel, alpha=noise + JITTER, optimizer=None).fit(*residuals[:2])
    mean, covariance = reference.predict(at, return_cov=True)
    drawn = draws(residuals, at, 6000)
    error = amplitude / math.sqrt(len(drawn))
    np.testing.assert_allclose(drawn.mean(axis=0), mean, atol=4.0 * error)
    np.testing.assert_allclose(np.cov(drawn.T), covariance, atol=6.0 * amplitude * error)
    np.testing.assert_allclose(draw_process(*residuals, rng).mean(at), mean, atol=1e-9)


def test_without_trials_the_prior_is_drawn(monkeypatch):
    only(monkeypatch, 0.5, (2.0, 1.0))
    nothing, at = some(np.random.default_rng(0), 0), np.array([[5.0, -3.0], [7.0, -3.0], [5.0, -2.0], [12.0, 2.0]])
    drawn = draws(nothing, at, 6000)
    near = [1.0, math.exp(-0.5), math.exp(-0.5), math.exp(-0.5 * (3.5**2 + 5.0**2))]
    np.testing.assert_allclose(drawn.mean(axis=0), 0.0, atol=0.03)
    np.testing.assert_allclose(np.cov(drawn.T)[0], 0.25 * np.array(near), atol=0.02)
    assert not draw_process(*nothing, np.random.default_rng(0)).mean(at).any()


def test_amplitudes_and_lengths_are_drawn_by_their_evidence():
    points, value, variance = some(np.random.default_rng(2), 6)
    weights = {}
    for (amplitude, prior), (lengths, share) in product(AMPLITUDES.items(), LENGTHS.items()):
        away = (points[:, None] - points[None]) / np.array(lengths)
        covariance = amplitude**2 * np.exp(-0.5 * (away**2).sum(axis=2)) + np.diag(variance + JITTER)
        white = value @ np.linalg.inv(covariance) @ value
        weights[amplitude, lengths] = prior * share * math.exp(-0.5 * white) / math.sqrt(np.linalg.det(covariance))
    rng = np.random.default_rng(3)
    drawn = [draw_process(points, value, variance, rng) for _ in range(3000)]
    chosen = [(process.amplitude, process.lengths) for process in drawn]
    for option, weight in weights.items():
        assert chosen.count(option) / 3000 == pytest.approx(weight / sum(weights.values()), abs=0.04)
