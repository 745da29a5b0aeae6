"""A power law of a quantity over a scale, from few points, and how far it holds beyond them.

A critical batch size, a best batch size or a best learning rate y is measured at three or more
scales s, such as examples of the training data. The model is a straight line in logarithms whose
slope may drift::

    log y_i = f(log s_i) + u_study(i) + e_i
    f(x)    = a + b x + the integral of W from the middle of the points to x

W is a Brownian motion of the slope, so that f is a cubic smoothing spline (Wahba 1978): between
the points it hardly matters, at a distance of d beyond them it adds drift^2 d^3/3 to the variance.
That makes the interval wider with the distance, where a straight line alone would be sure of a
law that nobody has seen there. u is a study's own offset, e_i its stated error, of which those
of one study (several targets of the same runs) go together to an unknown degree.

Offset, drift and correlation are averaged over a grid by their marginal likelihood times a prior.
With three points it is the prior that decides. Its two widths are assumptions; they were set on
made curves (``tests/benchmarks/bench_extrapolate.py --tune``) other than those that judge them.

    law = fit_scale_law(points)
    law.exponent.value, law.at(1e9).low
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from bstune.core.errors import StudyError
from bstune.core.interval import INTERVAL_LEVEL

Array = NDArray[np.float64]

# Fewest different scales that a law is fitted to.
FEWEST_SCALES = 3
# Nominal coverage of a law's intervals.
LAW_LEVEL = INTERVAL_LEVEL
# Standard deviation of a's prior, in log of the quantity: so wide that it says nothing.
LEVEL_SIGMA = 20.0
# Standard deviation of b's prior around 0.
SLOPE_SIGMA = 1.0
# Half-normal prior of the studies' own offsets, in log of the quantity.
OFFSET_SIGMA = 0.15
# Half-normal prior of the slope's drift, for a scale e times as large.
DRIFT_SIGMA = 0.1
# The grid of offsets, drifts, and correlations of one study's errors that the law is averaged over.
OFFSETS = (0.02, 0.06, 0.12, 0.2, 0.3, 0.45, 0.7)
DRIFTS = (0.01, 0.04, 0.08, 0.12, 0.18, 0.25, 0.36)
CORRELATIONS = (0.0, 0.5, 0.9)
# Error of log y where a study tells none: a factor of 1.35.
UNTOLD_ERROR = 0.3
# Least error of log y, as a median over posterior draws has it.
LEAST_LOG_ERROR = 0.02
# Halvings with which a quantile is found.
BISECTIONS = 60
# Logs beyond this have an exponential that no float holds.
LARGEST_LOG_OF_FLOAT = 700.0


@dataclass(frozen=True)
class ScalePoint:
    """A quantity at one scale, as one study tells it."""

    scale: float
    value: float
    error: float | None
    """Standard deviation of log value; None where the study tells none."""
    study: str
    """Points of one study share its offset, and their errors go together."""


@dataclass(frozen=True)
class Estimate:
    """A median with its interval of ``LAW_LEVEL``."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Component:
    """The law at one choice of offset, drift and correlation."""

    weight: float
    """Share of this choice in the average over all."""
    offset_sigma: float
    """Standard deviation of a study's own offset."""
    drift_sigma: float
    """Standard deviation of the slope's drift, for a scale e times as large."""
    inverse_times_y: Array
    """K^-1 log y, shape (n,)."""
    inverse: Array
    """K^-1, the inverse of the points' covariance, shape (n, n)."""


@dataclass(frozen=True)
class ScaleLaw:
    """A quantity as a power of the scale."""

    exponent: Estimate
    """The mean slope between the smallest and the largest scale that was measured."""
    smallest: float
    """The smallest scale that was measured."""
    largest: float
    """The largest."""
    points: tuple[ScalePoint, ...]
    log_centre: float
    """Mean of the points' log scales."""
    log_level: float
    """Mean of the points' log values."""
    components: tuple[Component, ...]

    def at(self, scale: float) -> Estimate:
        """Predict the quantity, such as a critical batch size, of a study at ``scale``.

        The error with which that study measures it is left out. ``scale`` is in the unit of the
        points' scales, and the estimate in that of their values.
        """
        # Each component is the law at one choice of the widths of its priors. It gives a normal
        # distribution of the log quantity, less ``log_level``; the prediction is their weighted
        # mixture.
        log_scale = math.log(scale) - self.log_centre
        # f is the log of the quantity, less ``log_level``, as a function of the log of the scale.
        # The sum has one term here: f at this scale, with the weight 1.
        moments = self._moments(log_scales=np.array([log_scale]), factors=np.array([1.0]))
        means = list[float]()
        sigmas = list[float]()
        for component, (mean, variance) in zip(self.components, moments, strict=True):
            means.append(self.log_level + mean)
            # Each study has an offset of its own.
            sigmas.append(math.sqrt(variance + component.offset_sigma**2))
        log_estimate = self._interval(np.array(means), np.array(sigmas))
        logs = [log_estimate.value, log_estimate.low, log_estimate.high]
        value, low, high = np.exp(
            np.clip(logs, -LARGEST_LOG_OF_FLOAT, LARGEST_LOG_OF_FLOAT)
        ).tolist()
        return Estimate(value=value, low=low, high=high)

    def _moments(self, log_scales: Array, factors: Array) -> list[tuple[float, float]]:
        """Compute mean and variance of a weighted sum of f's values, by each component.

        A component is the law at one choice of its priors' widths. f is the log of the quantity,
        relative to ``log_level``. ``factors`` (n,) weigh its values at ``log_scales`` (n,), which
        are relative to ``log_centre``.
        """
        x = np.log([point.scale for point in self.points]) - self.log_centre
        with_points = Covariance.between(log_scales, x)
        within = Covariance.between(log_scales, log_scales)
        # The prior covariance of the sum with f at the points, and the sum's prior variance. Both
        # are computed once for each drift, as components share them.
        across_at = dict[float, Array]()
        prior_variance_at = dict[float, float]()
        for drift_sigma in {component.drift_sigma for component in self.components}:
            across_at[drift_sigma] = factors @ with_points.at(drift_sigma)
            prior_variance_at[drift_sigma] = float(factors @ within.at(drift_sigma) @ factors)
        moments = list[tuple[float, float]]()
        for component in self.components:
            # The mean and the variance of a Gaussian process, given the points.
            across = across_at[component.drift_sigma]
            variance = prior_variance_at[component.drift_sigma]
            variance -= float(across @ component.inverse @ across)
            # Rounding can leave less than nothing, near a point that has no error to speak of.
            moments.append((float(across @ component.inverse_times_y), max(variance, 1e-12)))
        return moments

    def _interval(self, means: Array, sigmas: Array) -> Estimate:
        """Compute the median and the interval of a mixture of normals, one for each component."""
        return Estimate(
            value=self._quantile(0.5, means, sigmas),
            low=self._quantile((1.0 - LAW_LEVEL) / 2.0, means, sigmas),
            high=self._quantile((1.0 + LAW_LEVEL) / 2.0, means, sigmas),
        )

    def _quantile(self, probability: float, means: Array, sigmas: Array) -> float:
        """Find a quantile of a mixture of normals, one for each component, by bisection."""
        weights = np.array([component.weight for component in self.components])
        # No quantile that is asked for lies farther out than 10 deviations of every component.
        low = float((means - 10.0 * sigmas).min())
        high = float((means + 10.0 * sigmas).max())
        for _ in range(BISECTIONS):
            middle = (low + high) / 2.0
            below = float(weights @ ndtr((middle - means) / sigmas))
            if below < probability:
                low = middle
            else:
                high = middle
        return (low + high) / 2.0


def fit_scale_law(points: Sequence[ScalePoint]) -> ScaleLaw:
    """Fit the law to points of at least ``FEWEST_SCALES`` different scales.

    Raises:
        StudyError: for fewer.
    """
    scales = sorted({point.scale for point in points})
    if len(scales) < FEWEST_SCALES:
        raise StudyError(f"a law over scales takes {FEWEST_SCALES} of them, but got {len(scales)}")
    log_scales = np.log([point.scale for point in points])
    log_values = np.log([point.value for point in points])
    log_centre = float(log_scales.mean())
    log_level = float(log_values.mean())
    components = _components(points, log_scales - log_centre, log_values - log_level)
    # The exponent is computed from the rest of the law, and put in last.
    blank = Estimate(value=0.0, low=0.0, high=0.0)
    law = ScaleLaw(
        exponent=blank,
        smallest=scales[0],
        largest=scales[-1],
        points=tuple(points),
        log_centre=log_centre,
        log_level=log_level,
        components=components,
    )
    # The mean slope is a weighted sum of f's values at both ends: their difference over the
    # distance.
    log_ends = np.log([scales[0], scales[-1]]) - log_centre
    factors = np.array([-1.0, 1.0]) / (log_ends[1] - log_ends[0])
    means, variances = np.array(law._moments(log_ends, factors)).T
    return replace(law, exponent=law._interval(means, np.sqrt(variances)))


def _components(points: Sequence[ScalePoint], x: Array, y: Array) -> tuple[Component, ...]:
    """Solve the law at each choice of offset, drift and correlation, and weigh the choices.

    The law is a line in logs whose slope drifts with the scale. Each study is off it by an offset
    of its own, and errors of one study's points are correlated. A choice weighs as much as its
    prior times the likelihood of the points.

    Args:
        points: n measured values of the quantity, and their scales.
        x: the points' log scales less their mean, (n,).
        y: the points' log values less their mean, (n,).
    """
    # A study may tell no error: UNTOLD_ERROR stands for it. Its value is a median over posterior
    # draws, which is not known better than to LEAST_LOG_ERROR.
    stated = [UNTOLD_ERROR if point.error is None else point.error for point in points]
    errors = np.maximum(stated, LEAST_LOG_ERROR)
    names = [point.study for point in points]
    is_same_study = np.equal.outer(np.array(names), np.array(names)).astype(float)
    offsets: Sequence[float] = OFFSETS
    correlations: Sequence[float] = CORRELATIONS
    # All points of a single study share its offset: the law is then the one of this study.
    if len(set(names)) == 1:
        offsets = (0.0,)
    # With one point a study, no errors are correlated.
    if len(set(names)) == len(names):
        correlations = (0.0,)
    between_points = Covariance.between(x, x)
    log_weights = list[float]()
    unweighted = list[Component]()
    for offset_sigma, drift_sigma, correlation in product(offsets, DRIFTS, correlations):
        # The log values are normal. Their covariance is the sum of three: that of the law f, that
        # of the errors, which one study's points share in part, and that of the studies' offsets,
        # which they share altogether.
        shared = is_same_study * correlation
        np.fill_diagonal(shared, 1.0)
        of_errors = np.outer(errors, errors) * shared
        of_offsets = is_same_study * offset_sigma**2
        covariance = between_points.at(drift_sigma) + (of_errors + of_offsets)
        inverse: Array = np.linalg.inv(covariance).astype(np.float64)
        inverse_times_y = inverse @ y
        log_determinant = float(np.linalg.slogdet(covariance)[1])
        log_weight = -0.5 * (log_determinant + float(y @ inverse_times_y))
        log_weight += _log_prior(offset_sigma, OFFSETS, OFFSET_SIGMA)
        log_weight += _log_prior(drift_sigma, DRIFTS, DRIFT_SIGMA)
        log_weights.append(log_weight)
        # The weights are put in below, once their sum is known.
        unweighted.append(
            Component(
                weight=0.0,
                offset_sigma=offset_sigma,
                drift_sigma=drift_sigma,
                inverse_times_y=inverse_times_y,
                inverse=inverse,
            )
        )
    # Taken over the largest weight, no exponential overflows.
    largest = max(log_weights)
    weights = [math.exp(log_weight - largest) for log_weight in log_weights]
    total = sum(weights)
    return tuple(
        replace(component, weight=weight / total)
        for weight, component in zip(weights, unweighted, strict=True)
    )


def _log_prior(value: float, grid: Sequence[float], sigma: float) -> float:
    """Compute the log of a half-normal prior's weight of one value of a grid.

    The weight is the density there, up to a factor that all values share, times the width of the
    part of the axis for which the value stands. A value that is not on the grid has no alternative:
    its weight is 1.
    """
    if value not in grid:
        return 0.0
    i = grid.index(value)
    # That part ends halfway to the neighbours. The first value's part begins at 0. The last value's
    # part goes on above it as far as it begins below.
    below = 0.0
    if i > 0:
        below = (grid[i - 1] + value) / 2.0
    above = value + (value - below)
    if i < len(grid) - 1:
        above = (value + grid[i + 1]) / 2.0
    return -0.5 * (value / sigma) ** 2 + math.log(above - below)


@dataclass(frozen=True)
class Covariance:
    """The covariance of f between log scales (n,) and (m,), less their centre: (n, m).

    f is a line, whose level and slope have normal priors, plus a bend, by which its slope drifts
    away from the centre to either side. The bends of the two sides are integrals of independent
    Brownian motions.
    """

    line: Array
    bend: Array
    """At a drift of 1."""

    @classmethod
    def between(cls, first: Array, second: Array) -> "Covariance":
        """Compute the covariance of f at each of ``first`` (n,) with f at each of ``second`` (m,).

        Both are log scales less their centre. With u the smaller distance from the centre and v the
        larger one, the bends' covariance is u^3/3 + u^2 (v - u)/2 on one side, and 0 between the
        sides.
        """
        column = first[:, None]
        row = second[None, :]
        u = np.minimum(np.abs(column), np.abs(row))
        v = np.maximum(np.abs(column), np.abs(row))
        bend = np.where(column * row > 0.0, u**3 / 3.0 + u**2 * (v - u) / 2.0, 0.0)
        line = LEVEL_SIGMA**2 + SLOPE_SIGMA**2 * column * row
        return cls(line=line, bend=bend)

    def at(self, drift_sigma: float) -> Array:
        """Give the covariance at a standard deviation of the slope's drift."""
        covariance: Array = self.line + drift_sigma**2 * self.bend
        return covariance
