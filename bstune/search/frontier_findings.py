"""The posterior's frontier: S*(B), the best learning rate over batch size, and B_crit.

B_crit of a draw is where the slope of log S*(B) over log B is -1/2, the small-batch term left out.
For S_min (1 + B_crit/B) that is B_crit itself. Where the law does not hold, it is what a dense
sweep over batch sizes would show; the model's own parameter leans on the batch sizes that were
tried most.
"""

import math
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from bstune.core.curve import CurveBand, half_slope
from bstune.search.frontier_law import Prior, frontier, log_small_batch_term, optimum
from bstune.search.posterior import Posterior

Array = NDArray[np.float64]

# Batch sizes per octave at which a draw of the frontier is worked out.
FRONTIER_SIZES_PER_OCTAVE = 4
# B_crit is sought so many octaves beyond the study's batch sizes.
B_CRIT_REACH = 7


def log_b_crit(theta: Array, prior: Prior) -> Array:
    """Compute the log of B_crit, in examples, by m draws ``theta`` of the parameters: (m,).

    It is the batch size at which the slope of log S*(B), the least steps to the target, over log B
    is -1/2. It may lie some octaves beyond the study's batch sizes. The law's term for small
    batches is left out, as it makes the curve steeper there, whatever B_crit is.
    """
    log_low = prior.log_low - B_CRIT_REACH
    log_high = prior.log_high + B_CRIT_REACH
    x = np.arange(log_low, log_high, 1.0 / FRONTIER_SIZES_PER_OCTAVE)
    points = prior.points_at(x)
    log_s = frontier(theta, points, prior) - log_small_batch_term(theta, points, prior)
    return half_slope(x * math.log(2.0), log_s)


def b_crit_quantiles(posterior: Posterior, shares: Collection[float]) -> Array:
    """Compute quantiles of B_crit over the posterior, in examples: one for each of ``shares``."""
    log_drawn = log_b_crit(posterior.theta, posterior.prior)
    return np.asarray(np.exp(np.quantile(log_drawn, list(shares))))


def steps_band(
    posterior: Posterior, batch_sizes: Sequence[int], interval: tuple[float, float]
) -> CurveBand:
    """Compute the posterior's median of S*(B), and the two quantiles of ``interval``.

    S*(B) is the steps to the target at the best learning rate.
    """
    sizes = np.array(batch_sizes, dtype=np.float64)
    log_drawn = frontier(
        posterior.theta, posterior.prior.points_at(np.log2(sizes)), posterior.prior
    )
    low, middle, high = np.exp(np.quantile(log_drawn, (interval[0], 0.5, interval[1]), axis=0))
    return CurveBand(batch_size=sizes, steps=middle, low=low, high=high)


def best_learning_rate(posterior: Posterior, batch_size: float) -> float:
    """Compute the posterior's median of the best learning rate at a batch size.

    Other hyper-parameters are in the middle of their ranges.
    """
    point = posterior.prior.points_at(np.array([math.log2(batch_size)]))
    return float(np.median(np.exp2(optimum(posterior.theta, point, posterior.prior))))


def best_learning_rates(
    posterior: Posterior, batch_sizes: Array, interval: tuple[float, float]
) -> tuple[Array, Array, Array]:
    """Compute the best learning rate at n batch sizes, other hyper-parameters in the middle.

    Returns:
        The low quantile of ``interval``, the median and the high quantile, (n,) each.
    """
    points = posterior.prior.points_at(np.log2(batch_sizes))
    drawn = np.exp2(optimum(posterior.theta, points, posterior.prior))
    low, middle, high = np.quantile(drawn, (interval[0], 0.5, interval[1]), axis=0)
    return low, middle, high
