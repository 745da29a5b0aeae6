"""Seconds per step over batch size from the trials so far: the search's known half."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

Array = NDArray[np.float64]


BANDWIDTH = 0.35  # octaves of B over which what was measured is averaged: a single trial's steps may be lucky
DOUBT = 0.3  # how many measurements the smooth function counts for


@dataclass(frozen=True)
class StepTimes:
    """tau(B) = overhead + per_example B, or a given function of B, times a correction towards what was measured.

    ``x`` and ``left``: log2 of the measured batch sizes, and log of what was measured there over the smooth function.
    The correction is their average, weighted by a normal kernel, and shrunk to 0 away from them.
    """

    overhead: float
    per_example: float
    x: tuple[float, ...] = ()
    left: tuple[float, ...] = ()
    given: Callable[[float], float] | None = None

    def __call__(self, batch_size: Array) -> Array:
        """Return tau in seconds (in an arbitrary unit where nothing was measured), in the shape of ``batch_size``."""
        smooth = self._smooth(batch_size)
        if not self.x:
            return smooth
        away = (np.log2(batch_size)[..., None] - np.array(self.x)) / BANDWIDTH
        weight = np.exp(-0.5 * away**2)
        return np.asarray(smooth * np.exp(weight @ np.array(self.left) / (weight.sum(axis=-1) + DOUBT)))

    def _smooth(self, batch_size: Array) -> Array:
        given = self.given
        if given is None:
            return np.asarray(self.overhead + self.per_example * batch_size)
        return np.array([given(size) for size in np.ravel(batch_size)]).reshape(np.shape(batch_size))


def fit_step_times(
    measured: Iterable[tuple[float, float]], middle: float, given: Callable[[float], float] | None = None
) -> StepTimes:
    """Return tau(B) from (batch size, seconds per step) pairs.

    Overhead and throughput are the non-negative least squares of the relative error. With one batch size, half of its
    step is taken to be overhead; with none, of a step at ``middle`` examples. Seconds over batch size that were
    measured before the first trial take their place if they are ``given``.
    """
    pairs = list(measured)
    batch = np.array([size for size, _ in pairs], dtype=np.float64)
    tau = np.array([seconds for _, seconds in pairs], dtype=np.float64)
    if given is not None:
        plain = StepTimes(0.0, 0.0, given=given)
    elif not pairs:
        return StepTimes(middle, 1.0)
    elif len(set(batch)) == 1:
        plain = StepTimes(float(np.median(tau)) / 2.0, float(np.median(tau) / batch[0]) / 2.0)
    else:
        (overhead, per_example), _ = nnls(np.column_stack([1.0 / tau, batch / tau]), np.ones(len(pairs)))
        plain = StepTimes(float(overhead), float(per_example))
    left = np.log(tau / plain(batch)) if pairs else np.empty(0)
    return replace(plain, x=tuple(np.log2(batch).tolist()), left=tuple(left.tolist()))
