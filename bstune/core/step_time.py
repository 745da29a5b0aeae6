"""tau(B), the seconds of a step: one Gaussian process on log tau over log2 B.

Its mean is the robust law ``overhead + per_example B``, both at least 0: what each step costs, and
each example. The process adds what no straight line in B has: a cache that is too small, sizes that
suit a device. A survey's timings and the trials' own step times are rows of the same kind.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_solve, cholesky, solve_triangular
from scipy.optimize import least_squares

from bstune.core.records import Record, StepTime

Array = NDArray[np.float64]

Surveyed = tuple[float, float, float]
"""A survey's timing: batch size, seconds of a step, their relative standard deviation."""

# Beyond so many (in log tau) a timing counts as an outlier of the mean.
OUTLIER = 0.1
# The pull of both parts of the mean to a half of the step, in residuals of log tau: it decides
# where timings do not, as of one batch size alone.
PULL = 0.01
# Standard deviation of the log of both parts, about the mean's.
PARTS = 1.0
# Octaves over which deviations from the mean are alike.
OCTAVES = 1.0
# Devices like batch sizes that are multiples of it.
ALIGNED = 8
# Standard deviations of log tau, each of which is averaged over by its likelihood: of what is alike
# at similar sizes, of what each size has of its own, of what aligned sizes share, of a timing.
SIMILAR = (0.01, 0.1, 0.3)
OWN = (0.01, 0.1)
OF_ALIGNED = (0.0, 0.2)
OF_TIMING = (0.02, 0.05, 0.12)
# Of a survey's timing, beside its own.
OF_SURVEY = 0.02
# A timing's error has Student's t with so many degrees of freedom, so that a busy minute does not
# bend the curve: its variance grows with its distance from the mean (the expectation step of t as a
# mixture of normal distributions, Liu and Rubin 1995).
DEGREES = 3.0
# Averages leave out what has less than this share of the most likely.
LEAST_SHARE = 1e-3


@dataclass(frozen=True)
class _Fitted:
    """The process under one choice of its standard deviations."""

    log_likelihood: float
    variances: Array
    """Of each kernel, (4,)."""
    factor: Array
    """Lower Cholesky factor of the timings' covariance, (n, n)."""
    solved: Array
    """That covariance's inverse times the timings, (n,)."""


@dataclass(frozen=True)
class StepTimeModel:
    """tau(B), in seconds, and its error."""

    overhead: float
    """Of the mean."""
    per_example: float
    sizes: Array
    """The batch sizes that were timed, (n,)."""
    fitted: tuple[_Fitted, ...]
    weights: Array
    """Of each of ``fitted``."""
    solved: Array
    """What each kernel with the timings is multiplied by, (4, n)."""

    def __call__(self, batch_size: float) -> float:
        """Seconds of a step."""
        mean = self.overhead + self.per_example * batch_size
        return float(mean * math.exp((self._kernels(batch_size, self.sizes) * self.solved).sum()))

    def error(self, batch_size: float) -> float:
        """Relative standard deviation of tau at a batch size; it grows away from timed ones."""
        kernels = self._kernels(batch_size, self.sizes)
        own = self._kernels(batch_size, np.array([batch_size]))[:, 0]
        moments = []
        for one in self.fitted:
            covariance = one.variances @ kernels
            explained = solve_triangular(one.factor, covariance, lower=True)
            mean = covariance @ one.solved
            variance = one.variances @ own - explained @ explained
            moments.append((mean, variance + mean**2))
        mean, square = self.weights @ np.array(moments)
        return math.sqrt(max(square - mean**2, 0.0))

    def _kernels(self, batch_size: float, others: Array) -> Array:
        """As :func:`_kernels`, of one batch size with m others, (4, m)."""
        return _kernels(self.overhead, self.per_example, np.array([batch_size]), others)[:, 0]


def step_time_of_trials(
    records: Iterable[Record], middle: float, surveyed: Sequence[Surveyed] = ()
) -> StepTime:
    """tau(B), in seconds, by the trials' own step times and a survey's.

    Before the first one it is an overhead as large as what the ``middle`` batch size's examples
    take: a guess in no unit, which only ranks batch sizes.
    """
    timings = []
    for record in records:
        if record.seconds_per_step is not None:
            timings.append((record.batch_size, record.seconds_per_step))
    return fit_step_time(timings, surveyed) or (lambda batch_size: 1.0 + batch_size / middle)


def fit_step_time(
    timings: Sequence[tuple[float, float]], surveyed: Sequence[Surveyed] = ()
) -> StepTimeModel | None:
    """Fit the process to step times; None without any.

    Args:
        timings: (batch size, seconds of a step), one a trial.
        surveyed: a survey's.
    """
    if not timings and not surveyed:
        return None
    sizes, seconds = np.array([*timings, *(row[:2] for row in surveyed)], dtype=float).T
    of_survey = [math.hypot(deviation, OF_SURVEY) for *_, deviation in surveyed]
    overhead, per_example = _fit_mean(sizes, np.log(seconds))
    off = np.log(seconds / (overhead + per_example * sizes))
    kernels = _kernels(overhead, per_example, sizes, sizes)
    inflation = (DEGREES + (off / OUTLIER) ** 2) / (DEGREES + 1.0)
    fitted = []
    for *deviations, of_timing in product(SIMILAR, OWN, OF_ALIGNED, OF_TIMING):
        noise = np.array([of_timing] * len(timings) + of_survey) ** 2 * inflation
        fitted.append(_fit(kernels, np.array([PARTS, *deviations]) ** 2, noise, off))
    log_likelihoods = np.array([one.log_likelihood for one in fitted])
    weights = np.exp(log_likelihoods - log_likelihoods.max())
    kept = weights > LEAST_SHARE
    weights = weights[kept] / weights[kept].sum()
    fitted = [one for one, is_kept in zip(fitted, kept, strict=True) if is_kept]
    solved = [np.outer(one.variances, one.solved) for one in fitted]
    return StepTimeModel(
        overhead=overhead,
        per_example=per_example,
        sizes=sizes,
        fitted=tuple(fitted),
        weights=weights,
        solved=np.tensordot(weights, solved, axes=1),
    )


def _fit_mean(sizes: Array, logs: Array) -> tuple[float, float]:
    """Overhead and seconds per example by residuals of log tau, with the loss ``soft_l1``.

    One batch size alone gives half of the step to each part.
    """
    middle = float(np.exp(np.log(sizes).mean()))
    start = math.log(0.5) + float(np.median(logs))

    def residuals(log_parts: Array) -> Array:
        """Residuals of log tau, (n,), and the pull of both parts to a half of the step, (2,)."""
        overhead, per_middle = np.exp(log_parts)
        predicted = np.log(overhead + per_middle * sizes / middle)
        return np.concatenate([predicted - logs, PULL * (log_parts - start)])

    fit = least_squares(residuals, [start, start], loss="soft_l1", f_scale=OUTLIER)
    overhead, per_middle = np.exp(fit.x)
    return float(overhead), float(per_middle / middle)


def _kernels(overhead: float, per_example: float, sizes: Array, others: Array) -> Array:
    """Covariances between n and m batch sizes, (4, n, m), of variance 1.

    They are of the parts of the mean (its gradient in the log of each), of what is alike at similar
    sizes, of what each size has of its own, and of what aligned sizes share.
    """
    # Sizes may come from their logs.
    sizes, others = np.round(sizes), np.round(others)

    def shares(of: Array) -> Array:
        """The overhead's share of the mean, and the examples', (2, n)."""
        return np.stack([np.full(len(of), overhead), per_example * of]) / (
            overhead + per_example * of
        )

    octaves = np.abs(np.subtract.outer(np.log2(sizes), np.log2(others)))
    aligned = np.outer(sizes % ALIGNED == 0, others % ALIGNED == 0)
    return np.stack(
        [shares(sizes).T @ shares(others), np.exp(-octaves / OCTAVES), octaves == 0.0, aligned]
    )


def _fit(kernels: Array, variances: Array, noise: Array, off: Array) -> _Fitted:
    """The process under variances of kernels and timings, given log tau off the mean."""
    covariance = np.tensordot(variances, kernels, axes=1) + np.diag(noise)
    factor = cholesky(covariance, lower=True)
    solved = cho_solve((factor, True), off)
    # Rasmussen and Williams 2006, eq. 2.30, without its constant.
    log_likelihood = -0.5 * off @ solved - np.log(np.diag(factor)).sum()
    return _Fitted(float(log_likelihood), variances, factor, solved)
