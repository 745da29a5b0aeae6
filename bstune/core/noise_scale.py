"""Gradient noise scale B_simple = tr(Sigma)/|G|^2 from squared gradient norms at two batch sizes.

Source: McCandlish et al. 2018, arXiv 1812.06162, eq. 2.9 and appendix A.1. G is the gradient of the
loss averaged over all data, Sigma the covariance of the gradient of one example.

1. A mean gradient over n examples has E|g|^2 = |G|^2 + tr(Sigma)/n.
2. A batch of B examples in k parts of n_i has g = sum w_i g_i with w_i = n_i/B, so that E|g|^2 =
   |G|^2 + tr(Sigma)/B and E[sum w_i |g_i|^2] = |G|^2 + tr(Sigma) k/B: batch sizes B and B/k.
3. Two equations give both terms (eq. A.2, A.3), without bias. The trace is never negative; |G|^2
   can be, and is where the noise is large.
4. Their ratio is biased, so both are averaged over steps before they are divided.
5. The interval is Fieller's (1954): all r for which mean(tr Sigma - r |G|^2) does not differ from 0
   by Student's t. It has no end where |G|^2 may be 0. The means and their covariance are those of
   at most ``MAX_BLOCKS`` blocks of consecutive steps, as steps are autocorrelated: what drifts from
   block to block counts as scatter.

It assumes examples that are drawn independently and a loss that is a mean over them. It can miss
the critical batch size by several times.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from bstune.core.errors import InputError

# An interval of 90% leaves out as much on both sides.
UPPER = 0.95
# Most blocks of steps: enough for Student's t to be near the normal, few enough to leave long ones.
MAX_BLOCKS = 16
# Fewest blocks: with fewer, t is so large that every interval is open.
MIN_BLOCKS = 4

Terms = tuple[float, float]
"""|G|^2 and tr(Sigma), each without bias, of one measured step."""


@dataclass(frozen=True)
class NoiseScaleEstimate:
    """B_simple = tr(Sigma)/|G|^2, in examples, with its 90% interval."""

    value: float
    low: float
    high: float


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
            f"the noise scale needs the gradients of at least 2 parts of a batch, but got "
            f"{len(sizes)}"
        )
    batch = sum(sizes)
    part = batch / len(sizes)
    square = math.fsum(n * one for n, one in zip(sizes, squares, strict=True)) / batch
    gradient = (batch * square_of_batch - part * square) / (batch - part)
    trace = (square - square_of_batch) / (1.0 / part - 1.0 / batch)
    return gradient, trace


def estimate_noise_scale(measured: Sequence[Terms]) -> NoiseScaleEstimate | None:
    """B_simple from consecutive measurements, the oldest first.

    None with fewer than ``MIN_BLOCKS``, or where |G|^2 does not differ significantly from 0.
    """
    if len(measured) < MIN_BLOCKS:
        return None
    length = math.ceil(len(measured) / MAX_BLOCKS)
    # The oldest steps that fill no block are left out.
    whole = np.array(measured[len(measured) % length :], np.float64)
    blocks = whole.reshape(-1, length, 2).mean(axis=1)
    x, y = blocks.mean(axis=0).tolist()
    # t^2 times the covariance of both means.
    margin = np.cov(blocks.T) * float(stdtrit(len(blocks) - 1, UPPER)) ** 2 / len(blocks)
    # All r with (y - r x)^2 <= t^2 Var[y - r x], that is a r^2 - 2 b r + c <= 0.
    a = x * x - float(margin[0, 0])
    b = x * y - float(margin[0, 1])
    c = y * y - float(margin[1, 1])
    if a <= 0.0 or x <= 0.0:
        return None
    root = math.sqrt(max(b * b - a * c, 0.0))
    return NoiseScaleEstimate(y / x, max((b - root) / a, 0.0), (b + root) / a)
