"""What the posterior says of the frontier: S*(B), the best learning rate over batch size, and B_crit.

B_crit of a draw is where the slope of its frontier, log S*(B) over log B, its small-batch term left
out, is -1/2: for S_min (1 + B_crit/B) that is B_crit itself, and where the law does not hold, it is
what a dense sweep over batch sizes would show, while the model's own parameter leans on the batch
sizes that were tried most.
"""

import math
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from bstune.core.curve import CurveBand, half_slope
from bstune.search.observations import Posterior
from bstune.search.posterior import NOISE, Prior, frontier, log_small_batch_term, optimum

Array = NDArray[np.float64]

# Of a frontier's draw: batch sizes an octave, and the octaves beyond those of the study within
# which B_crit is sought.
FRONTIER_SIZES_AN_OCTAVE = 4
B_CRIT_REACH = 7


def log_b_crit(theta: Array, prior: Prior) -> Array:
    """Give log B_crit, B in examples, of each draw of the parameters: (m, p) gives (m,)."""
    low = prior.log_low - B_CRIT_REACH
    high = prior.log_high + B_CRIT_REACH
    x = np.arange(low, high, 1.0 / FRONTIER_SIZES_AN_OCTAVE)
    points = prior.at(x)
    log_s = frontier(theta, points, prior) - log_small_batch_term(theta, points, prior)
    return half_slope(x * math.log(2.0), log_s)


def b_crit_quantiles(posterior: Posterior, shares: Collection[float]) -> Array:
    """Give quantiles of B_crit over the posterior, in examples."""
    drawn = log_b_crit(posterior.theta, posterior.prior)
    return np.asarray(np.exp(np.quantile(drawn, list(shares))))


def steps_band(
    posterior: Posterior, batch_sizes: Sequence[int], interval: tuple[float, float]
) -> CurveBand:
    """Give the median of S*(B) and two quantiles over the posterior."""
    sizes = np.array(batch_sizes, dtype=np.float64)
    drawn = frontier(posterior.theta, posterior.prior.at(np.log2(sizes)), posterior.prior)
    low, middle, high = np.exp(np.quantile(drawn, (interval[0], 0.5, interval[1]), axis=0))
    return CurveBand(batch_size=sizes, steps=middle, low=low, high=high)


def best_learning_rate(posterior: Posterior, batch_size: float) -> float:
    """Give the posterior's median of the best learning rate at a batch size, other hyper-parameters in the middle."""
    at = posterior.prior.at(np.array([math.log2(batch_size)]))
    return float(np.median(np.exp2(optimum(posterior.theta, at, posterior.prior))))


def best_learning_rates(
    posterior: Posterior, batch_sizes: Array, interval: tuple[float, float]
) -> tuple[Array, Array, Array]:
    """Give the low quantile, the median and the high one of the best learning rate at each batch size (n,)."""
    at = posterior.prior.at(np.log2(batch_sizes))
    drawn = np.exp2(optimum(posterior.theta, at, posterior.prior))
    low, middle, high = np.quantile(drawn, (interval[0], 0.5, interval[1]), axis=0)
    return low, middle, high


def noise_variance(posterior: Posterior) -> float:
    """Give the mean variance of log S from seed to seed."""
    return float(np.mean(np.exp(2.0 * posterior.theta[:, NOISE])))
