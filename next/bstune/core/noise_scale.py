"""Gradient noise scale B_simple = tr(Sigma)/|G|^2 from squared gradient norms at two batch sizes.

Source: McCandlish et al. 2018, arXiv 1812.06162, eq. 2.9 and appendix A.1. G is the gradient of the
loss averaged over all data, Sigma the covariance of the gradient of one example.

1. A mean gradient over n examples has E|g|^2 = |G|^2 + tr(Sigma)/n.
2. A batch of B examples in k parts of n_i has g = sum w_i g_i with w_i = n_i/B, so that E|g|^2 =
   |G|^2 + tr(Sigma)/B and E[sum w_i |g_i|^2] = |G|^2 + tr(Sigma) k/B: batch sizes B and B/k.
3. Two equations give both terms (eq. A.2, A.3), without bias. The trace is never negative; |G|^2
   can be, and is where the noise is large.
4. Their ratio is biased, so both are averaged over steps before they are divided.
5. The interval is Fieller's (1954): all r >= 0 for which mean(tr Sigma - r |G|^2) does not differ
   from 0 by Student's t. It opens where |G|^2 may be 0. The means and their covariance are those of
   at most ``MAX_BLOCKS`` blocks of consecutive steps, as steps are autocorrelated: what drifts from
   block to block counts as scatter.

It assumes examples that are drawn independently and a loss that is a mean over them. It can miss
the critical batch size by several times.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from bstune.core.errors import InputError

# Both ends of an interval of 90% leave out this much less than one.
UPPER = 0.95
# Most blocks of steps: enough for Student's t to be near the normal, few enough to leave long ones.
MAX_BLOCKS = 16
# Fewest blocks: with fewer, t is so large that every interval is open.
MIN_BLOCKS = 4

Terms = tuple[float, float]
"""|G|^2 and tr(Sigma), each without bias, of one measured step."""


@dataclass(frozen=True)
class NoiseScaleEstimate:
    """B_simple = tr(Sigma)/|G|^2, in examples, with its 90% interval.

    Args:
        value: None where |G|^2 does not differ significantly from 0, or few steps were measured.
        low, high: ends of the interval; None: open. ``low`` may be known without ``value``.
        steps: how many were measured.
    """

    value: float | None
    low: float | None
    high: float | None
    steps: int


def terms_of(squares: Sequence[float], sizes: Sequence[int], square_of_batch: float) -> Terms:
    """|G|^2 and tr(Sigma) from the gradients of a batch's parts.

    Args:
        squares: |g_i|^2 of each part's mean gradient, (k,).
        sizes: n_i, the examples of each, (k,).
        square_of_batch: |g|^2 of the whole batch.

    Raises:
        InputError: for fewer than two parts.
    """
    if len(sizes) < 2:
        raise InputError(
            f"the noise scale needs the gradients of at least 2 micro-batches a step, but got "
            f"{len(sizes)}"
        )
    batch = sum(sizes)
    part = batch / len(sizes)
    square = math.fsum(n * one for n, one in zip(sizes, squares, strict=True)) / batch
    gradient = (batch * square_of_batch - part * square) / (batch - part)
    trace = (square - square_of_batch) / (1.0 / part - 1.0 / batch)
    return gradient, trace


def estimate_noise_scale(measured: Sequence[Terms]) -> NoiseScaleEstimate:
    """B_simple from consecutive measurements, the oldest first; without any nothing is known."""
    count = len(measured)
    length = math.ceil(count / MAX_BLOCKS)
    if count < MIN_BLOCKS:
        return NoiseScaleEstimate(None, None, None, count)
    # The oldest steps that fill no block are left out.
    whole = np.array(measured[count % length :], np.float64)
    blocks = whole.reshape(-1, length, 2).mean(axis=1)
    low, high = _fieller(blocks)
    gradient, trace = blocks.mean(axis=0).tolist()
    return NoiseScaleEstimate(None if high is None else trace / gradient, low, high, count)


def _fieller(blocks: NDArray[np.float64]) -> tuple[float | None, float | None]:
    """The ends of Fieller's interval of r = tr Sigma/|G|^2; None for an end that is open.

    With x and y the means of |G|^2 and tr Sigma and t Student's quantile, the interval holds all
    r >= 0 for which (y - r x)^2 <= t^2 Var[y - r x], that is a r^2 - 2 b r + c <= 0. Its upper end
    is open unless a and x are positive: |G|^2 may then be 0.

    Args:
        blocks: |G|^2 and tr Sigma of each block, (blocks, 2).
    """
    count = len(blocks)
    # Squares of tiny gradients would underflow: both are taken in units of their largest value.
    unit = np.abs(blocks).max(axis=0)
    unit[unit == 0.0] = 1.0
    scaled = blocks / unit
    # t^2 times the covariance of x and y.
    margin = np.cov(scaled.T) * float(stdtrit(count - 1, UPPER)) ** 2 / count
    x, y = scaled.mean(axis=0).tolist()
    a = float(x * x - margin[0, 0])
    b = float(x * y - margin[0, 1])
    c = float(y * y - margin[1, 1])
    root = math.sqrt(max(b * b - a * c, 0.0))
    unit_ratio = float(unit[1] / unit[0])
    low = None
    high = None
    # Where c > 0, tr Sigma differs from 0, and so does the least r: (b - root)/a, written without a
    # difference. There is none where b + root <= 0, or where |G|^2 is significantly below 0.
    if c > 0.0 and b + root > 0.0 and (x > 0.0 or a <= 0.0):
        low = c / (b + root) * unit_ratio
    # Where a > 0, |G|^2 differs from 0, and there is a second root.
    if a > 0.0 and x > 0.0:
        high = (b + root) / a * unit_ratio
    return low, high
