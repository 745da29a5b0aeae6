"""Gradient noise scale B_simple = tr(Sigma)/|G|^2 from squared gradient norms at two batch sizes.

Source: McCandlish et al. 2018, arXiv 1812.06162, eq. 2.9 and appendix A.1. G is the gradient of the loss averaged over
all data, Sigma the covariance of the gradient of one example.

1. A mean gradient over n examples has E|g|^2 = |G|^2 + tr(Sigma)/n.
2. A step takes k micro-batches of n_i examples and weighs their mean gradients by w_i, with sum w_i = 1:
   g = sum w_i g_i. The g_i are independent, so E|g|^2 = |G|^2 + tr(Sigma) sum w_i^2/n_i, hence 1/B_big = sum w_i^2/n_i;
   likewise E[sum w_i |g_i|^2] = |G|^2 + tr(Sigma) sum w_i/n_i, hence 1/B_small = sum w_i/n_i. With w_i = n_i/B they are
   B_big = B and B_small = B/k.
3. Two equations in two unknowns (eq. A.2, A.3): |G|^2 = (B_big |g_big|^2 - B_small |g_small|^2)/(B_big - B_small) and
   tr Sigma = (|g_small|^2 - |g_big|^2)/(1/B_small - 1/B_big). Both are unbiased; the second is never negative, because
   |g_small|^2 - |g_big|^2 = sum w_i |g_i - g|^2. The first can be, and is where the noise is large.
4. Their ratio is biased, so both are averaged over steps before they are divided.
5. The interval is Fieller's (1954): all r >= 0 for which mean(tr Sigma - r |G|^2) does not differ from 0 by Student's
   t. Unlike a jackknife's it opens where the denominator may be 0. The means and their covariance are those of at most
   ``MAX_BLOCKS`` blocks of equally many consecutive steps, because steps are autocorrelated: what drifts from block to
   block counts as scatter.

B_simple assumes examples that are drawn independently and a loss that is a mean over them. It can miss the critical
batch size by several times.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import stdtrit

from bstune.core.errors import ConfigError

MAX_BLOCKS = 16  # enough for Student's t to be near the normal, few enough to leave long blocks
MIN_BLOCKS = 4  # below, t is so large that every interval is open
WINDOW = 64  # measured steps in a moving estimate, the latest; older ones are from when the noise was smaller
LEVEL = 0.9  # of intervals


@dataclass(frozen=True)
class GradientNorms:
    """Squared norms of one step's gradient at two batch sizes, B_small (need not be whole) and B_big."""

    small: float  # mean |g_small|^2 over the micro-batches
    small_size: float
    big: float
    big_size: float

    def __post_init__(self) -> None:
        if not 0.0 < self.small_size < self.big_size < math.inf:
            raise ConfigError(
                "the noise scale needs gradients at two batch sizes, 0 < B_small < B_big, but got"
                f" {self.small_size:g} and {self.big_size:g}: measure at least two micro-batches a step"
            )

    @property
    def squared_gradient(self) -> float:
        """Unbiased |G|^2 (eq. A.2); negative where the noise drowns it, NaN if a norm is."""
        return (self.big_size * self.big - self.small_size * self.small) / (
            self.big_size - self.small_size
        )

    @property
    def trace(self) -> float:
        """Unbiased tr Sigma (eq. A.3), of one example; NaN if a norm is."""
        return (self.small - self.big) / (1.0 / self.small_size - 1.0 / self.big_size)


@dataclass(frozen=True)
class NoiseScaleEstimate:
    """B_simple = tr(Sigma)/|G|^2 of the steps that were measured, in examples."""

    noise_scale: float | None  # None where |G|^2 does not differ significantly from 0
    low: (
        float | None
    )  # an end of the interval, None where it is open: at 0; it may exist without ``noise_scale``
    high: float | None  # likewise, at infinity
    squared_gradient: (
        float | None
    )  # |G|^2 averaged over the steps, possibly negative; None without steps
    trace: float | None  # tr Sigma averaged over the steps; None without steps
    measurements: int  # steps that were averaged
    level: float  # of the interval
    undetermined: str | None  # why there is no noise scale

    def __str__(self) -> str:
        low, high = ("open" if end is None else f"{end:.3g}" for end in (self.low, self.high))
        value = (
            f"{self.noise_scale:.3g}"
            if self.noise_scale is not None
            else f"undetermined ({self.undetermined})"
        )
        return f"noise scale {value}, {self.level:.0%} interval {low} to {high}, from {self.measurements} steps"


def combine_norms(squared_norms: ArrayLike, sizes: ArrayLike, big: float) -> GradientNorms:
    """Return the norms of a step from |g_i|^2 of its micro-batches, their n_i (w_i = n_i/B) and |sum w_i g_i|^2."""
    norms, n = np.asarray(squared_norms, np.float64), np.asarray(sizes, np.float64)
    if len(n) < 2 or not np.all(n > 0):
        raise ConfigError(
            f"the noise scale needs two or more micro-batches with an example each, but got sizes {n.tolist()}: take"
            " larger batches, or leave out empty ones"
        )
    w = n / n.sum()
    return GradientNorms(
        float(w @ norms), float(1.0 / (w / n).sum()), float(big), float(1.0 / (w**2 / n).sum())
    )


def estimate_noise_scale(
    squared_gradients: ArrayLike, traces: ArrayLike, level: float = LEVEL
) -> NoiseScaleEstimate:
    """Return B_simple of consecutive steps; undetermined below ``MIN_BLOCKS``, and where |G|^2 may be 0."""
    if not 0.0 < level < 1.0:
        raise ConfigError(
            f"the level of the noise scale's interval must lie in (0, 1), but got {level}"
        )
    pairs = np.stack([np.asarray(squared_gradients, np.float64), np.asarray(traces, np.float64)])
    if pairs.ndim != 2 or not np.isfinite(pairs).all():
        raise ValueError(f"|G|^2 and tr Sigma must be finite and (n,), but got {pairs.tolist()}")
    n = pairs.shape[1]
    if n == 0:
        return NoiseScaleEstimate(None, None, None, None, None, 0, level, "no step was measured")
    length = math.ceil(n / MAX_BLOCKS)
    count = n // length  # the oldest steps that fill no block are left out
    blocks = np.asarray(pairs[:, -count * length :].reshape(2, count, length).mean(axis=2))
    gradient, trace = blocks.mean(axis=1).tolist()
    if count < MIN_BLOCKS:
        reason = f"{n} of at least {MIN_BLOCKS} steps were measured"
        return NoiseScaleEstimate(None, None, None, gradient, trace, n, level, reason)
    low, high = _fieller(blocks, level)
    if high is None:
        reason = f"|G|^2 = {gradient:.3g} does not differ significantly from 0 after {n} steps: measure more of them"
        return NoiseScaleEstimate(None, low, None, gradient, trace, n, level, reason)
    return NoiseScaleEstimate(trace / gradient, low, high, gradient, trace, n, level, None)


def moving_estimate(
    measurements: Sequence[tuple[int, float, float]], window: int = WINDOW, level: float = LEVEL
) -> NoiseScaleEstimate:
    """Return :func:`estimate_noise_scale` of the latest ``window`` of (step, |G|^2, tr Sigma), in order."""
    latest = measurements[-window:]
    return estimate_noise_scale([pair[1] for pair in latest], [pair[2] for pair in latest], level)


def _fieller(blocks: NDArray[np.float64], level: float) -> tuple[float | None, float | None]:
    """Return the ends of all r >= 0 with a r^2 - 2 b r + c <= 0; without ``high`` unless a and mean |G|^2 are > 0."""
    count = blocks.shape[1]
    unit = np.where(
        blocks.any(axis=1), np.abs(blocks).max(axis=1), 1.0
    )  # squares of tiny gradients would underflow
    scaled = blocks / unit[:, None]
    covariance = np.cov(scaled) * float(stdtrit(count - 1, 0.5 + level / 2.0)) ** 2 / count
    x, y = scaled.mean(axis=1).tolist()
    a, b, c = (
        float(v)
        for v in (x * x - covariance[0, 0], x * y - covariance[0, 1], y * y - covariance[1, 1])
    )
    root = math.sqrt(max(b * b - a * c, 0.0))
    ratio = float(unit[1] / unit[0])
    # c > 0: tr Sigma differs from 0. Of the roots of either sign, or the two positive ones, this is the smaller.
    low = c / (b + root) * ratio if c > 0.0 and b + root > 0.0 and (x > 0.0 or a <= 0.0) else None
    high = (b + root) / a * ratio if a > 0.0 and x > 0.0 else None
    return low, high
