"""A Gaussian process over the residuals of the frontier's model: it lets the data overrule a wrong shape.

Mean 0, squared-exponential covariance over (log2 B, log2 lr). Its amplitude and its lengths are drawn in proportion to
their marginal likelihood, so that the process is as large as the data ask for and no larger.
"""

import math
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import cdist

Array = NDArray[np.float64]
AMPLITUDES = {0.04: 0.25, 0.12: 0.4, 0.3: 0.25, 0.8: 0.1}  # in log S, with their prior weights
LENGTHS = {(0.6, 0.5): 0.25, (1.2, 0.9): 0.4, (3.0, 2.0): 0.35}  # octaves of B and of lr, with their prior weights
OTHER_LENGTH = 0.5  # of the other hyper-parameters, scaled to [0, 1]
JITTER = 1e-6


def _covariance(at: Array, other: Array, lengths: tuple[float, float]) -> Array:
    scale = np.array([*lengths, *[OTHER_LENGTH] * (at.shape[1] - 2)])
    return np.asarray(np.exp(-0.5 * cdist(at / scale, other / scale, "sqeuclidean")))


@dataclass(frozen=True)
class GaussianProcess:
    """A process conditioned on residuals of log S at points (n, 2 + k): log2 B, log2 lr, k values in [0, 1]."""

    points: Array
    amplitude: float
    lengths: tuple[float, float]
    covariance: Array
    weights: Array  # (K + noise)^-1 times the residuals

    def mean(self, at: Array) -> Array:
        """Return the mean of the residual at points (m, 2 + k), shape (m,)."""
        return np.asarray(self.amplitude**2 * _covariance(at, self.points, self.lengths) @ self.weights)

    def draw(self, at: Array, rng: np.random.Generator) -> Array:
        """Return one joint draw of the residual at points (m, 2 + k), shape (m,)."""
        cross = self.amplitude**2 * _covariance(at, self.points, self.lengths)
        own = self.amplitude**2 * _covariance(at, at, self.lengths)
        own = own - cross @ np.linalg.solve(self.covariance, cross.T)
        root = np.linalg.cholesky(own + (JITTER + 1e-4 * self.amplitude**2) * np.eye(len(at)))
        return np.asarray(cross @ self.weights + root @ rng.standard_normal(len(at)))


def draw_process(points: Array, residuals: Array, variance: Array, rng: np.random.Generator) -> GaussianProcess:
    """Return a process given residuals (n,) with noise variances (n,); its amplitude and lengths are drawn."""
    options = list(product(AMPLITUDES.items(), LENGTHS.items()))
    kernels = {lengths: _covariance(points, points, lengths) for lengths in LENGTHS}
    noise = np.diag(variance + JITTER)
    evidence = np.array([math.log(a[1] * k[1]) for a, k in options])
    for i, ((amplitude, _), (lengths, _)) in enumerate(options if residuals.size else ()):
        root = np.linalg.cholesky(amplitude**2 * kernels[lengths] + noise)
        white = np.linalg.solve(root, residuals)
        evidence[i] += -0.5 * white @ white - np.log(np.diag(root)).sum()
    share = np.exp(evidence - evidence.max())
    (amplitude, _), (lengths, _) = options[int(rng.choice(len(options), p=share / share.sum()))]
    covariance = amplitude**2 * kernels[lengths] + noise
    weights = np.asarray(np.linalg.solve(covariance, residuals), dtype=np.float64)
    return GaussianProcess(points, amplitude, lengths, covariance, weights)
