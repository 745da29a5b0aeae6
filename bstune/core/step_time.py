"""tau(B), seconds per training step over batch size: a line, what corrects it, and a step on several devices.

With its error it is in :mod:`bstune.core.step_time_law`.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from bstune.core.errors import HardwareError

Array = NDArray[np.float64]
# Octaves of B over which measurements are averaged: a single trial's steps may be lucky.
BANDWIDTH = 0.35
# How many measurements the smooth function counts for.
SHRINKAGE = 0.3
# Batch sizes whose step times are worked out at a time: 4 MB of 1,000 trials.
PREPARED = 512


@dataclass(frozen=True)
class StepTime:
    """tau(B) = overhead + per_example B: alpha + beta b of Pollux, Qiao et al. 2021, arXiv 2008.12260, eq. 8."""

    overhead: float
    per_example: float

    def __call__(self, batch_size: float) -> float:
        """Give tau(B) in seconds."""
        return self.overhead + self.per_example * batch_size


@dataclass(frozen=True)
class StepTimes:
    """A search's tau(B): a smooth one times a correction to measurements, averaged by a normal kernel, shrunk to 1."""

    smooth: Callable[[float], float]
    x: tuple[float, ...] = ()
    """log2 of the measured batch sizes."""
    log_ratio: tuple[float, ...] = ()
    """Log of what was measured there over the smooth function."""

    def __call__(self, batch_size: Array) -> Array:
        """Give tau in seconds (in an arbitrary unit where nothing was measured), in the shape of ``batch_size``."""
        if np.ndim(batch_size):
            return self._corrected(batch_size)
        # One at a time they are asked for again and again: each trial's at each decision.
        size = float(batch_size)
        if size not in self._known:
            self._known[size] = self._corrected(np.array(size))
        return self._known[size]

    def prepare(self, batch_sizes: Array) -> None:
        """Work out the step times of single batch sizes (n,) that will be asked for, to the same bits, at once.

        Most of a call's time is numpy's own, however few the numbers are.
        """
        sizes = np.unique(batch_sizes)
        for start in range(0, sizes.size, PREPARED):
            some = sizes[start : start + PREPARED]
            x, log_ratio = self._measured
            away = (np.log2(some)[:, None] - x) / BANDWIDTH
            weight = np.exp(-0.5 * away**2)
            total = weight.sum(axis=-1) + SHRINKAGE
            # A product of a matrix would add up in another order.
            logs = np.array([float(row @ log_ratio) for row in weight])
            smooth = np.array([self.smooth(size) for size in some])
            corrected = smooth * np.exp(logs / total)
            self._known.update(zip(some.tolist(), map(np.asarray, corrected), strict=True))

    def _corrected(self, batch_size: Array) -> Array:
        smooth = np.array([self.smooth(size) for size in np.ravel(batch_size)])
        smooth = smooth.reshape(np.shape(batch_size))
        x, log_ratio = self._measured
        away = (np.log2(batch_size)[..., None] - x) / BANDWIDTH
        weight = np.exp(-0.5 * away**2)
        correction = weight @ log_ratio / (weight.sum(axis=-1) + SHRINKAGE)
        return np.asarray(smooth * np.exp(correction))

    @cached_property
    def _known(self) -> dict[float, Array]:
        """Step times over batch size that were asked for already."""
        return {}

    @cached_property
    def _measured(self) -> tuple[Array, Array]:
        """Keep the measurements as arrays: a decision asks for thousands of step times."""
        return np.array(self.x), np.array(self.log_ratio)


def fit_line(pairs: Sequence[tuple[float, float]]) -> StepTime:
    """Fit a line to (batch size, seconds) by non-negative least squares of the relative error.

    With one batch size, half a step is overhead.
    """
    batch_size = np.array([pair[0] for pair in pairs], dtype=np.float64)
    tau = np.array([pair[1] for pair in pairs], dtype=np.float64)
    if len(set(batch_size)) == 1:
        middle = np.median(tau)
        return StepTime(float(middle) / 2.0, float(middle / batch_size[0]) / 2.0)
    columns = np.column_stack([1.0 / tau, batch_size / tau])
    (overhead, per_example), _ = nnls(columns, np.ones(len(pairs)))
    return StepTime(float(overhead), float(per_example))


def fit_step_times(
    measured: Iterable[tuple[float, float]],
    middle: float,
    given: Callable[[float], float] | None = None,
) -> StepTimes:
    """Fit tau(B) to (batch size, seconds) around ``given``, else around their line.

    Without either, half a step at the batch size ``middle`` is overhead, in an arbitrary unit.
    """
    pairs = list(measured)
    smooth: Callable[[float], float]
    if given:
        smooth = given
    elif pairs:
        smooth = fit_line(pairs)
    else:
        smooth = StepTime(middle, 1.0)
    # The copy has rows in one piece, which numpy's log may treat otherwise.
    batch_size, tau = np.array(pairs, dtype=np.float64).reshape(-1, 2).T.copy()
    log_ratio = np.log(tau / StepTimes(smooth)(batch_size))
    return StepTimes(smooth, tuple(np.log2(batch_size).tolist()), tuple(log_ratio.tolist()))


def sync_seconds(devices: int, alpha: float, beta: float) -> float:
    """Give T_sync = alpha + beta (K - 2) for K >= 2 devices, 0 for one (Pollux, eq. 9), in seconds."""
    if devices < 2:
        return 0.0
    return alpha + beta * (devices - 2)


def fit_sync(measured: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Fit T_sync's alpha and beta, at least 0, to (devices, all-reduce seconds) by least relative squares."""
    pairs = [(devices, seconds) for devices, seconds in measured if devices > 1]
    are_positive = all(math.isfinite(seconds) and seconds > 0.0 for _, seconds in pairs)
    if not pairs or not are_positive:
        raise HardwareError(
            f"an all-reduce needs positive seconds at 2 devices or more, but got {list(measured)}"
        )
    if len({devices for devices, _ in pairs}) == 1:
        return statistics.median(seconds for _, seconds in pairs), 0.0
    rows = [[1.0 / seconds, (devices - 2) / seconds] for devices, seconds in pairs]
    (alpha, beta), _ = nnls(np.array(rows), np.ones(len(pairs)))
    return float(alpha), float(beta)


def iteration_seconds(gradient: float, sync: float, gamma: float) -> float:
    """Give T_iter = (T_grad^gamma + T_sync^gamma)^(1/gamma) (Pollux, eq. 10).

    The larger gamma, the more overlap.
    """
    longest = max(gradient, sync)
    if longest == 0.0 or math.isinf(gamma):
        return longest
    # Over the longest of both, so that no power overflows.
    powers = (gradient / longest) ** gamma + (sync / longest) ** gamma
    return float(longest * powers ** (1.0 / gamma))


def seconds_between(times: Sequence[tuple[int, float]], batch_size: float) -> float:
    """Give the seconds of a step between some batch sizes, (examples, seconds) each, rising.

    It is a straight line of log seconds over log B, and beyond the ends as at them.
    """
    sizes, seconds = zip(*times, strict=True)
    return math.exp(float(np.interp(math.log(batch_size), np.log(sizes), np.log(seconds))))
