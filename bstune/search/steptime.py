"""Seconds per step over batch size from the trials so far: the search's known half."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

Array = NDArray[np.float64]


@dataclass(frozen=True)
class StepTimes:
    """tau(B) = overhead + per_example B, or a given function of B, times a correction that meets what was measured.

    ``log_batch``, ``log_correction``: natural logarithms at the measured batch sizes, ascending; between them the
    correction is linear in them, outside it is the nearest one's.
    """

    overhead: float
    per_example: float
    log_batch: tuple[float, ...] = ()
    log_correction: tuple[float, ...] = ()
    given: Callable[[float], float] | None = None

    def __call__(self, batch_size: Array) -> Array:
        """Return tau in seconds (in an arbitrary unit where nothing was measured)."""
        if self.given is not None:
            smooth = np.array([self.given(size) for size in np.ravel(batch_size)]).reshape(np.shape(batch_size))
        else:
            smooth = self.overhead + self.per_example * batch_size
        if not self.log_batch:
            return np.asarray(smooth)
        return np.asarray(smooth * np.exp(np.interp(np.log(batch_size), self.log_batch, self.log_correction)))


def fit_step_times(
    measured: Iterable[tuple[float, float]], middle: float, given: Callable[[float], float] | None = None
) -> StepTimes:
    """Return tau(B) from (batch size, seconds per step) pairs.

    Overhead and throughput are the non-negative least squares of the relative error. With one batch size, half of its
    step is taken to be overhead; with none, of a step at ``middle`` examples. Seconds over batch size that were
    measured before the first trial take their place if they are ``given``.
    """
    times: dict[float, list[float]] = {}
    for batch_size, seconds in measured:
        times.setdefault(batch_size, []).append(seconds)
    sizes = sorted(times)
    if given is not None:
        correction = [math.log(median(times[size]) / given(size)) for size in sizes]
        return StepTimes(0.0, 0.0, tuple(map(math.log, sizes)), tuple(correction), given)
    if not sizes:
        return StepTimes(middle, 1.0)
    tau = np.array([median(times[size]) for size in sizes])
    batch = np.array(sizes)
    if len(sizes) == 1:
        return StepTimes(float(tau[0]) / 2.0, float(tau[0] / batch[0]) / 2.0)
    (overhead, per_example), _ = nnls(np.column_stack([1.0 / tau, batch / tau]), np.ones(len(sizes)))
    left = np.log(tau / (overhead + per_example * batch))
    return StepTimes(float(overhead), float(per_example), tuple(map(math.log, sizes)), tuple(left.tolist()))
