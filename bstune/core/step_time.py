"""Seconds per step over batch size from the trials so far: the search's known half.

tau(B) between measured batch sizes and beyond them, and the time of a step on several devices. Arithmetic alone.

During a search :mod:`bstune.core.step_time` corrects what is given here by what trials then measure; the line through
the measured points is its too.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import PchipInterpolator
from scipy.optimize import isotonic_regression, nnls

from bstune.core.errors import HardwareError

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


@dataclass(frozen=True)
class StepTimeModel:
    """tau(B) on one device: what was measured, made monotone and joined smoothly; overhead + throughput beyond.

    Args:
        overhead: alpha of T_grad = alpha + beta b (Pollux, Qiao et al. 2021, arXiv 2008.12260, eq. 8), in seconds.
        per_example: beta, in seconds.
        residual: the median relative error of that line at the measured batch sizes.
        sizes: measured batch sizes, rising.
        seconds: tau there, never falling.
    """

    overhead: float
    per_example: float
    residual: float
    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    def line(self, batch_size: float) -> float:
        """Return alpha + beta B in seconds."""
        return self.overhead + self.per_example * batch_size

    def __call__(self, batch_size: float) -> float:
        """Return tau(B) in seconds; beyond the measured sizes, the line through the last one."""
        if batch_size <= self.sizes[0]:
            return self.seconds[0] * self.line(batch_size) / self.line(self.sizes[0])
        if batch_size >= self.sizes[-1]:
            return self.seconds[-1] * self.line(batch_size) / self.line(self.sizes[-1])
        return math.exp(float(self._joined(math.log(batch_size))))

    @cached_property
    def _joined(self) -> PchipInterpolator:
        return PchipInterpolator(np.log(self.sizes), np.log(self.seconds))  # keeps a rising sequence rising


def fit_step_model(measured: Sequence[tuple[float, float]]) -> StepTimeModel:
    """Return the model of (batch size, seconds) pairs, one a batch size; a fall from noise is averaged away.

    Raises:
        HardwareError: for fewer than two batch sizes, one given twice, or seconds that are not positive numbers.
    """
    pairs = sorted(measured)
    sizes, seconds = [size for size, _ in pairs], [value for _, value in pairs]
    if len(set(sizes)) < max(2, len(sizes)) or not all(math.isfinite(v) and v > 0 for v in seconds):
        raise HardwareError(f"tau(B) needs positive seconds at two or more batch sizes, each once, but got {pairs}")
    line = fit_step_times(pairs, sizes[0])
    rising = np.exp(isotonic_regression(np.log(seconds)).x)
    model = StepTimeModel(line.overhead, line.per_example, 0.0, tuple(sizes), tuple(rising.tolist()))
    errors = [abs(model.line(size) / value - 1.0) for size, value in pairs]
    return replace(model, residual=statistics.median(errors))


def leave_one_out(measured: Sequence[tuple[float, float]]) -> tuple[float, ...]:
    """Return the relative error of tau at each measured size but the ends, predicted from all the others.

    Empty for fewer than three sizes.

    Raises:
        HardwareError: as :func:`fit_step_model` does.
    """
    pairs = sorted(measured)
    return tuple(
        abs(fit_step_model(pairs[:i] + pairs[i + 1 :])(pairs[i][0]) / pairs[i][1] - 1.0)
        for i in range(1, len(pairs) - 1)
    )


def sync_seconds(devices: int, alpha: float, beta: float) -> float:
    """Return T_sync = alpha + beta (K - 2) for K >= 2 devices, 0 for one (Pollux, eq. 9), in seconds."""
    if devices < 1:
        raise HardwareError(f"the number of devices must be at least 1, but got {devices}")
    return alpha + beta * (devices - 2) if devices > 1 else 0.0


def fit_sync(measured: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return alpha and beta of T_sync = alpha + beta (K - 2), neither negative, by least relative squares.

    With one number of devices, beta is 0.

    Args:
        measured: (devices, seconds of an all-reduce) pairs, at least one; those of a single device say nothing.

    Raises:
        HardwareError: if none is of two devices or more, or seconds are not positive.
    """
    pairs = [(devices, seconds) for devices, seconds in measured if devices > 1]
    if not pairs or not all(math.isfinite(seconds) and seconds > 0.0 for _, seconds in pairs):
        raise HardwareError(f"an all-reduce needs positive seconds at 2 devices or more, but got {list(measured)}")
    if len({devices for devices, _ in pairs}) == 1:
        return statistics.median(seconds for _, seconds in pairs), 0.0
    rows = [[1.0 / seconds, (devices - 2) / seconds] for devices, seconds in pairs]
    (alpha, beta), _ = nnls(np.array(rows), np.ones(len(pairs)))
    return float(alpha), float(beta)


def iteration_seconds(gradient: float, sync: float, gamma: float) -> float:
    """Return T_iter = (T_grad^gamma + T_sync^gamma)^(1/gamma) (Pollux, eq. 10).

    Args:
        gradient: T_grad, seconds of the step on one device, at its own share of the batch.
        sync: T_sync, seconds of communication.
        gamma: 1: one after the other; the larger, the more they overlap; inf: wholly.

    Raises:
        HardwareError: for gamma under 1, or seconds that are negative.
    """
    if not gamma >= 1.0 or not (gradient >= 0.0 and sync >= 0.0):
        raise HardwareError(
            f"a step needs gamma of at least 1 and seconds of at least 0, but got {gamma}, {gradient} and {sync}"
        )
    longest = max(gradient, sync)
    if longest == 0.0 or math.isinf(gamma):
        return longest
    return float(longest * ((gradient / longest) ** gamma + (sync / longest) ** gamma) ** (1.0 / gamma))


@dataclass(frozen=True)
class StepTime:
    """Seconds per training step as overhead + per_example x B."""

    overhead: float
    per_example: float

    def __call__(self, batch_size: float) -> float:
        """Return tau(B) in seconds."""
        return self.overhead + self.per_example * batch_size
