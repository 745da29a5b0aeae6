"""tau(B), the seconds of a training step over batch size.

With its error tau(B) is in :mod:`bstune.core.step_time_law`.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

Array = NDArray[np.float64]
# Octaves of B over which measurements are averaged: a single trial's steps may be lucky.
BANDWIDTH = 0.35
# The smooth function counts as so many measurements.
SHRINKAGE = 0.3
# Batch sizes whose step times are worked out at a time: 4 MB with 1,000 trials.
PREPARED = 512


@dataclass(frozen=True)
class StepTime:
    """tau(B) = overhead + per_example B, a straight line (Pollux, Qiao et al. 2021, eq. 8).

    Pollux (arXiv 2008.12260) calls the two alpha and beta.
    """

    overhead: float
    per_example: float

    def __call__(self, batch_size: float) -> float:
        """Compute tau(B) in seconds."""
        return self.overhead + self.per_example * batch_size


@dataclass(frozen=True)
class StepTimes:
    """A search's tau(B): a smooth function, corrected towards measurements nearby.

    The correction is an average over measurements by a normal kernel, shrunk towards 1.
    """

    smooth: Callable[[float], float]
    x: tuple[float, ...] = ()
    """log2 of the measured batch sizes."""
    log_ratio: tuple[float, ...] = ()
    """Log of what was measured there over the smooth function."""

    def __call__(self, batch_size: Array) -> Array:
        """Compute tau in seconds at each batch size, in the shape of the argument.

        The unit is arbitrary where nothing was measured.
        """
        if np.ndim(batch_size):
            return self._corrected(batch_size)
        # Single batch sizes are asked for again and again: that of each trial, at each decision.
        size = float(batch_size)
        if size not in self._known:
            self._known[size] = self._corrected(np.array(size))
        return self._known[size]

    def prepare(self, batch_sizes: Array) -> None:
        """Compute and store step times of batch sizes (n,) that will be asked for one by one.

        They are the same to the bit as those of single calls, and come sooner: most of a single
        call's time is numpy's overhead.
        """
        sizes = np.unique(batch_sizes)
        # They are taken in portions, so that the arrays of the kernel stay small.
        for start in range(0, sizes.size, PREPARED):
            sizes_at_a_time = sizes[start : start + PREPARED]
            log2_measured, log_ratio = self._measured
            distance = (np.log2(sizes_at_a_time)[:, None] - log2_measured) / BANDWIDTH
            weight = np.exp(-0.5 * distance**2)
            total = weight.sum(axis=-1) + SHRINKAGE
            # The product of the whole matrix would add up in another order, and round otherwise.
            logs = np.array([float(row @ log_ratio) for row in weight])
            smooth = np.array([self.smooth(size) for size in sizes_at_a_time])
            corrected = smooth * np.exp(logs / total)
            # np.asarray makes arrays without dimensions, as single calls give.
            self._known.update(
                zip(sizes_at_a_time.tolist(), map(np.asarray, corrected), strict=True)
            )

    def _corrected(self, batch_size: Array) -> Array:
        """Compute tau in seconds, in the shape of ``batch_size``.

        It is the smooth function times a correction. That is the geometric mean of the ratios of
        measured seconds to the smooth function, weighed by a normal kernel over log2 B, whose
        standard deviation is ``BANDWIDTH`` octaves. ``SHRINKAGE`` draws it towards 1.
        """
        smooth = np.array([self.smooth(size) for size in np.ravel(batch_size)])
        smooth = smooth.reshape(np.shape(batch_size))
        log2_measured, log_ratio = self._measured
        distance = (np.log2(batch_size)[..., None] - log2_measured) / BANDWIDTH
        weight = np.exp(-0.5 * distance**2)
        correction = weight @ log_ratio / (weight.sum(axis=-1) + SHRINKAGE)
        return np.asarray(smooth * np.exp(correction))

    @cached_property
    def _known(self) -> dict[float, Array]:
        """A cache: the step times that were asked for, in seconds, by batch size."""
        return {}

    @cached_property
    def _measured(self) -> tuple[Array, Array]:
        """Keep the measurements as arrays: a decision asks for thousands of step times."""
        return np.array(self.x), np.array(self.log_ratio)


def fit_line(pairs: Sequence[tuple[float, float]]) -> StepTime:
    """Fit a line to (batch size, seconds) by non-negative least squares of the relative error.

    A single batch size does not tell overhead from seconds per example: each is taken to be half of
    the step there.
    """
    batch_size = np.array([pair[0] for pair in pairs], dtype=np.float64)
    tau = np.array([pair[1] for pair in pairs], dtype=np.float64)
    if len(set(batch_size)) == 1:
        median_tau = np.median(tau)
        return StepTime(float(median_tau) / 2.0, float(median_tau / batch_size[0]) / 2.0)
    # Divided by tau, an error is a relative one: overhead/tau + per_example B/tau is to be 1.
    columns = np.column_stack([1.0 / tau, batch_size / tau])
    (overhead, per_example), _ = nnls(columns, np.ones(len(pairs)))
    return StepTime(float(overhead), float(per_example))


def fit_step_times(
    measured: Iterable[tuple[float, float]],
    middle: float,
    given: Callable[[float], float] | None = None,
) -> StepTimes:
    """Fit tau(B) to measurements (batch size, seconds) around a smooth function.

    The function is ``given``, else a line through the measurements. Without either it is a line in
    an arbitrary unit, by which half of a step at the batch size ``middle`` is overhead.
    """
    pairs = list(measured)
    smooth: Callable[[float], float]
    if given:
        smooth = given
    elif pairs:
        smooth = fit_line(pairs)
    else:
        smooth = StepTime(overhead=middle, per_example=1.0)
    # Rows of the copy are contiguous: numpy's log may round strided ones otherwise.
    batch_size, tau = np.array(pairs, dtype=np.float64).reshape(-1, 2).T.copy()
    log_ratio = np.log(tau / StepTimes(smooth)(batch_size))
    return StepTimes(smooth, tuple(np.log2(batch_size).tolist()), tuple(log_ratio.tolist()))


def seconds_between(times: Sequence[tuple[int, float]], batch_size: float) -> float:
    """Interpolate the seconds of a step at a batch size between those that were timed.

    The interpolation is linear in log seconds over log B. Beyond the ends it is the end's value.
    ``times`` are (batch size, seconds), in ascending order.
    """
    sizes, seconds = zip(*times, strict=True)
    return math.exp(float(np.interp(math.log(batch_size), np.log(sizes), np.log(seconds))))
