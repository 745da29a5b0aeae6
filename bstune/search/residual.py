"""A Gaussian process over what the model of the frontier leaves: it lets the data overrule a wrong shape.

Mean 0, squared-exponential covariance over (log2 B, log2 lr). Its amplitude and its length are drawn in proportion to
their marginal likelihood, so that the process is as large as the data ask for and no larger.
"""

import math
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

AMPLITUDES = {0.04: 0.25, 0.12: 0.4, 0.3: 0.25, 0.8: 0.1}  # in log S, with their prior weights
LENGTHS = {(1.2, 0.9): 0.5, (3.0, 2.0): 0.5}  # octaves of B and of lr
JITTER = 1e-6


@dataclass(frozen=True)
class Residuals:
    """Residuals of log S at some points, arrays of shape (n,); ``variance`` is that of the noise."""

    x: Array
    z: Array
    value: Array
    variance: Array


def _covariance(x: Array, z: Array, other_x: Array, other_z: Array, lengths: tuple[float, float]) -> Array:
    along = ((x[:, None] - other_x[None, :]) / lengths[0]) ** 2
    across = ((z[:, None] - other_z[None, :]) / lengths[1]) ** 2
    return np.asarray(np.exp(-0.5 * (along + across)))


def _evidence(covariance: Array, value: Array) -> float:
    root = np.linalg.cholesky(covariance)
    white = np.linalg.solve(root, value)
    return float(-0.5 * white @ white - np.log(np.diag(root)).sum())


def draw_residual(seen: Residuals, x: Array, z: Array, rng: np.random.Generator) -> tuple[Array, Array]:
    """Return one draw of the residual at the points (x, z), and its mean there, both of shape (m,).

    Args:
        seen: residuals of the trials; may be empty.
        x, z: log2 of batch size and learning rate, (m,).
        rng: the source of chance.
    """
    options = list(product(AMPLITUDES.items(), LENGTHS.items()))
    weights = np.array([math.log(a[1] * k[1]) for a, k in options])
    if seen.x.size:
        kernels = {lengths: _covariance(seen.x, seen.z, seen.x, seen.z, lengths) for lengths in LENGTHS}
        for i, ((amplitude, _), (lengths, _)) in enumerate(options):
            covariance = amplitude**2 * kernels[lengths] + np.diag(seen.variance + JITTER)
            weights[i] += _evidence(covariance, seen.value)
    share = np.exp(weights - weights.max())
    (amplitude, _), (lengths, _) = options[int(rng.choice(len(options), p=share / share.sum()))]
    own = amplitude**2 * _covariance(x, z, x, z, lengths)
    mean = np.zeros(x.size)
    if seen.x.size:
        cross = amplitude**2 * _covariance(x, z, seen.x, seen.z, lengths)
        covariance = amplitude**2 * kernels[lengths] + np.diag(seen.variance + JITTER)
        solved = np.linalg.solve(covariance, np.column_stack([seen.value, cross.T]))
        mean = cross @ solved[:, 0]
        own = own - cross @ solved[:, 1:]
    root = np.linalg.cholesky(own + (JITTER + 1e-4 * amplitude**2) * np.eye(x.size))
    return mean + root @ rng.standard_normal(x.size), mean
