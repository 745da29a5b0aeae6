"""A Gaussian process over what the model of the frontier leaves: it lets the data overrule a wrong shape.

Mean 0, squared-exponential covariance over (log2 B, log2 lr). Its amplitude and its length are drawn in proportion to
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


@dataclass(frozen=True)
class Residuals:
    """Residuals of log S, arrays of shape (n,), at points (n, 2 + k); ``variance`` is that of the noise.

    A point is log2 of batch size and learning rate, then the k other hyper-parameters, each in [0, 1].
    """

    at: Array
    value: Array
    variance: Array


def _covariance(at: Array, other: Array, lengths: tuple[float, float]) -> Array:
    scale = np.array([*lengths, *[OTHER_LENGTH] * (at.shape[1] - 2)])
    return np.asarray(np.exp(-0.5 * cdist(at / scale, other / scale, "sqeuclidean")))


def _evidence(covariance: Array, value: Array) -> float:
    root = np.linalg.cholesky(covariance)
    white = np.linalg.solve(root, value)
    return float(-0.5 * white @ white - np.log(np.diag(root)).sum())


@dataclass(frozen=True)
class Process:
    """A Gaussian process given its residuals: amplitude and lengths, and (K + noise)^-1 times the residuals."""

    seen: Residuals
    amplitude: float
    lengths: tuple[float, float]
    covariance: Array
    weights: Array


def draw_process(seen: Residuals, rng: np.random.Generator) -> Process:
    """Return a process whose amplitude and lengths are drawn in proportion to prior times evidence.

    Args:
        seen: residuals of the trials; may be empty.
        rng: the source of chance.
    """
    options = list(product(AMPLITUDES.items(), LENGTHS.items()))
    kernels = {lengths: _covariance(seen.at, seen.at, lengths) for lengths in LENGTHS}
    noise = np.diag(seen.variance + JITTER)
    evidence = np.array([math.log(a[1] * k[1]) for a, k in options])
    if seen.value.size:
        evidence += [_evidence(a[0] ** 2 * kernels[k[0]] + noise, seen.value) for a, k in options]
    share = np.exp(evidence - evidence.max())
    (amplitude, _), (lengths, _) = options[int(rng.choice(len(options), p=share / share.sum()))]
    covariance = amplitude**2 * kernels[lengths] + noise
    weights = np.asarray(np.linalg.solve(covariance, seen.value), dtype=np.float64)
    return Process(seen, amplitude, lengths, covariance, weights)


def mean_residual(process: Process, at: Array) -> Array:
    """Return the mean of the residual at points (m, 2 + k), shape (m,)."""
    return np.asarray(process.amplitude**2 * _covariance(at, process.seen.at, process.lengths) @ process.weights)


def draw_residual(process: Process, at: Array, rng: np.random.Generator) -> Array:
    """Return one joint draw of the residual at points (m, 2 + k), shape (m,)."""
    cross = process.amplitude**2 * _covariance(at, process.seen.at, process.lengths)
    own = process.amplitude**2 * _covariance(at, at, process.lengths)
    own = own - cross @ np.linalg.solve(process.covariance, cross.T)
    root = np.linalg.cholesky(own + (JITTER + 1e-4 * process.amplitude**2) * np.eye(len(at)))
    return np.asarray(cross @ process.weights + root @ rng.standard_normal(len(at)))
