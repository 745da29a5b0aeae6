"""Gradient noise scale B_simple = tr(Sigma)/|G|^2 from squared gradient norms at two batch sizes.

Source: McCandlish et al. 2018, arXiv 1812.06162, eq. 2.9 and appendix A.1. G is the gradient of the
loss averaged over all data, Sigma the covariance of the gradient of one example.

1. A mean gradient over n examples has E|g|^2 = |G|^2 + tr(Sigma)/n.
2. A step takes k micro-batches of n_i examples and weighs their mean gradients by w_i, with sum w_i
   = 1: g = sum w_i g_i. The g_i are independent, so E|g|^2 = |G|^2 + tr(Sigma) sum w_i^2/n_i, hence
   1/B_big = sum w_i^2/n_i; likewise E[sum w_i |g_i|^2] = |G|^2 + tr(Sigma) sum w_i/n_i, hence
   1/B_small = sum w_i/n_i. With w_i = n_i/B they are B_big = B and B_small = B/k.
3. Two equations in two unknowns (eq. A.2, A.3): |G|^2 = (B_big |g_big|^2 - B_small
   |g_small|^2)/(B_big - B_small) and tr Sigma = (|g_small|^2 - |g_big|^2)/(1/B_small - 1/B_big).
   Both are unbiased; the second is never negative, because |g_small|^2 - |g_big|^2 = sum w_i |g_i -
   g|^2. The first can be, and is where the noise is large.
4. Their ratio is biased, so both are averaged over steps before they are divided.
5. The interval is Fieller's (1954): all r >= 0 for which mean(tr Sigma - r |G|^2) does not differ
   from 0 by Student's t. Unlike a jackknife's it opens where the denominator may be 0. The means
   and their covariance are those of at most ``MAX_BLOCKS`` blocks of equally many consecutive
   steps, because steps are autocorrelated: what drifts from block to block counts as scatter.

B_simple assumes examples that are drawn independently and a loss that is a mean over them. It can
miss the critical batch size by several times.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import stdtrit

from bstune.core.errors import ConfigError
from bstune.core.interval import INTERVAL_LEVEL

# Most blocks of steps: enough for Student's t to be near the normal, few enough to leave long
# blocks.
MAX_BLOCKS = 16
# Fewest blocks: with fewer, t is so large that every interval is open.
MIN_BLOCKS = 4
# A moving estimate takes so many of the latest measured steps: the noise grows during the training.
WINDOW = 64


@dataclass(frozen=True)
class GradientNorms:
    """Squared norms of one step's gradient at two batch sizes, B_small and B_big.

    The sizes need not be whole numbers.
    """

    small: float
    """Mean |g_small|^2 over the micro-batches."""
    small_size: float
    """B_small, in examples."""
    big: float
    """|g_big|^2 of the whole batch."""
    big_size: float
    """B_big, in examples."""

    def __post_init__(self) -> None:
        if not 0.0 < self.small_size < self.big_size < math.inf:
            raise ConfigError(
                "the noise scale needs gradients at two batch sizes, 0 < B_small < B_big, but got "
                f"{self.small_size:g} and {self.big_size:g}: measure at least two micro-batches a "
                "step"
            )

    @property
    def squared_gradient(self) -> float:
        """Unbiased estimate of |G|^2 (eq. A.2): may be negative by noise, NaN if a norm is NaN."""
        difference = self.big_size * self.big - self.small_size * self.small
        return difference / (self.big_size - self.small_size)

    @property
    def trace(self) -> float:
        """Unbiased estimate of tr Sigma of one example (eq. A.3); NaN if a norm is NaN."""
        return (self.small - self.big) / (1.0 / self.small_size - 1.0 / self.big_size)


@dataclass(frozen=True)
class NoiseScaleEstimate:
    """B_simple = tr(Sigma)/|G|^2 of the steps that were measured, in examples."""

    noise_scale: float | None
    """None where |G|^2 does not differ significantly from 0."""
    low: float | None
    """Lower end of the interval; None: it is open, at 0. It may exist without ``noise_scale``."""
    high: float | None
    """Upper end; None: it is open, at infinity."""
    squared_gradient: float | None
    """|G|^2 averaged over the steps, possibly negative; None without steps."""
    trace: float | None
    """tr Sigma averaged over the steps; None without steps."""
    measurements: int
    """How many steps were averaged."""
    level: float
    """Nominal coverage of the interval."""
    undetermined: str | None
    """Why there is no noise scale; None where there is one."""

    def __str__(self) -> str:
        low = "open" if self.low is None else f"{self.low:.3g}"
        high = "open" if self.high is None else f"{self.high:.3g}"
        value = f"undetermined ({self.undetermined})"
        if self.noise_scale is not None:
            value = f"{self.noise_scale:.3g}"
        interval = f"{self.level:.0%} interval {low} to {high}"
        return f"noise scale {value}, {interval}, from {self.measurements} steps"


def combine_norms(squared_norms: ArrayLike, sizes: ArrayLike, big: float) -> GradientNorms:
    """Combine the gradients of a step's micro-batches into norms at two batch sizes.

    The mean gradient g of n examples has E|g|^2 = |G|^2 + tr(Sigma)/n. With the weights w_i =
    n_i/B, the mean of |g_i|^2 has sum w_i/n_i in the place of 1/n, and |sum w_i g_i|^2 has
    sum w_i^2/n_i: these are 1/B_small and 1/B_big.

    Args:
        squared_norms: |g_i|^2 of each micro-batch.
        sizes: n_i, the examples of each.
        big: |sum w_i g_i|^2, of the whole batch.

    Raises:
        ConfigError: for fewer than two micro-batches, or one without an example.
    """
    norms = np.asarray(squared_norms, np.float64)
    n = np.asarray(sizes, np.float64)
    if len(n) < 2 or not np.all(n > 0):
        raise ConfigError(
            "the noise scale needs two or more micro-batches with an example each, but got sizes "
            f"{n.tolist()}: take larger batches, or leave out empty ones"
        )
    w = n / n.sum()
    return GradientNorms(
        small=float(w @ norms),
        small_size=float(1.0 / (w / n).sum()),
        big=float(big),
        big_size=float(1.0 / (w**2 / n).sum()),
    )


def estimate_noise_scale(
    squared_gradients: ArrayLike, traces: ArrayLike, level: float = INTERVAL_LEVEL
) -> NoiseScaleEstimate:
    """Estimate B_simple from measurements at consecutive steps.

    It is undetermined with fewer than ``MIN_BLOCKS`` steps, and where |G|^2 may be 0.

    Args:
        squared_gradients: |G|^2 of each step, (n,).
        traces: tr Sigma of each step, (n,).
        level: nominal coverage of the interval.
    """
    if not 0.0 < level < 1.0:
        raise ConfigError(
            f"the level of the noise scale's interval must lie in (0, 1), but got {level}"
        )
    pairs = np.stack([np.asarray(squared_gradients, np.float64), np.asarray(traces, np.float64)])
    if pairs.ndim != 2 or not np.isfinite(pairs).all():
        raise ValueError(f"|G|^2 and tr Sigma must be finite and (n,), but got {pairs.tolist()}")
    n = pairs.shape[1]
    # Each value is put in once it is known, so that every return below gives what is known by then.
    estimate = NoiseScaleEstimate(
        noise_scale=None,
        low=None,
        high=None,
        squared_gradient=None,
        trace=None,
        measurements=n,
        level=level,
        undetermined=None,
    )
    if n == 0:
        return replace(estimate, undetermined="no step was measured")
    # Consecutive steps are correlated. The means over blocks of them are taken as independent.
    length = math.ceil(n / MAX_BLOCKS)
    # The oldest steps that fill no block are left out.
    count = n // length
    blocks = np.asarray(pairs[:, -count * length :].reshape(2, count, length).mean(axis=2))
    gradient, trace = blocks.mean(axis=1).tolist()
    estimate = replace(estimate, squared_gradient=gradient, trace=trace)
    if count < MIN_BLOCKS:
        reason = f"{n} of at least {MIN_BLOCKS} steps were measured"
        return replace(estimate, undetermined=reason)
    low, high = _fieller(blocks, level)
    if high is None:
        reason = (
            f"|G|^2 = {gradient:.3g} does not differ significantly from 0 after {n} steps: "
            "measure more of them"
        )
        return replace(estimate, low=low, undetermined=reason)
    return replace(estimate, noise_scale=trace / gradient, low=low, high=high)


def moving_estimate(
    measurements: Sequence[tuple[int, float, float]],
    window: int = WINDOW,
    level: float = INTERVAL_LEVEL,
) -> NoiseScaleEstimate:
    """Estimate the gradient noise scale B_simple from the latest measurements.

    ``measurements`` are (step, |G|^2, tr Sigma), in order of the steps. The last ``window`` of them
    count, as the noise scale grows during the training. ``level`` is the interval's coverage.
    """
    latest = measurements[-window:]
    squared_gradients = [measurement[1] for measurement in latest]
    traces = [measurement[2] for measurement in latest]
    return estimate_noise_scale(squared_gradients, traces, level)


def _fieller(blocks: NDArray[np.float64], level: float) -> tuple[float | None, float | None]:
    """Find the ends of Fieller's interval of r = tr Sigma/|G|^2; None for an end that is open.

    With x and y the means of |G|^2 and tr Sigma and t Student's quantile, the interval holds all
    r >= 0 for which (y - r x)^2 <= t^2 Var[y - r x], that is a r^2 - 2 b r + c <= 0. Its upper end
    is open unless a and x are positive: |G|^2 may then be 0.

    Args:
        blocks: |G|^2 and tr Sigma of each block, (2, blocks).
        level: nominal coverage of the interval.
    """
    count = blocks.shape[1]
    # Squares of tiny gradients would underflow: both are taken in units of their largest value.
    unit = np.where(blocks.any(axis=1), np.abs(blocks).max(axis=1), 1.0)
    scaled = blocks / unit[:, None]
    # t^2 times the covariance of x and y.
    margin = np.cov(scaled) * float(stdtrit(count - 1, 0.5 + level / 2.0)) ** 2 / count
    x, y = scaled.mean(axis=1).tolist()
    a = float(x * x - margin[0, 0])
    b = float(x * y - margin[0, 1])
    c = float(y * y - margin[1, 1])
    root = math.sqrt(max(b * b - a * c, 0.0))
    unit_ratio = float(unit[1] / unit[0])
    low = None
    high = None
    # Where c > 0, tr Sigma differs from 0, and so does the least r. It is the root (b - root)/a,
    # written without a difference: the only positive one, or the smaller of two. There is none
    # where b + root <= 0, nor an end where |G|^2 is significantly below 0 (a > 0 and x < 0).
    if c > 0.0 and b + root > 0.0 and (x > 0.0 or a <= 0.0):
        low = c / (b + root) * unit_ratio
    # Where a > 0, |G|^2 differs from 0, and there is a second root.
    if a > 0.0 and x > 0.0:
        high = (b + root) / a * unit_ratio
    return low, high
