"""The likelihood of S*(B)'s law, minimised over all but one of its parameters.

Points 1 to 3 of :mod:`bstune.core.curve` say what the law and the error model are. At a reference
batch size B_ref, with r = B_ref/B, the curve is S(B) = h (1 - p + p r + v r^2). The parameters
stand here as ``log_odds`` = log(B_crit/B_ref), of which p is the expit; ``log_small`` = log v;
``log_height`` = log h; and ``log_sigma``.
"""

import math
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_expit, log_ndtr

Array = NDArray[np.float64]

# Standard deviation of log S that the prior of sigma expects. It and the next number are chosen so
# that the coverage holds at 10% noise with 6 to 9 points, see the tests.
PRIOR_NOISE = 0.11
# The prior counts as so many residuals.
PRIOR_WEIGHT = 1.0
# Share of the points that are bad.
POINT_OUTLIER_SHARE = 0.05
# Standard deviation of a bad point in log S: it is typically off by a factor of up to e.
POINT_OUTLIER_SPREAD = 1.0
# B_crit is sought within this factor of the batch sizes, and at 0 and infinity.
LOG_REACH = math.log(1e4)
# Starts of the search in v: the log of the third term over the others at the smallest batch size,
# from a tenth of the steps there to nearly all.
LOG_SMALL_STARTS = (-2.0, 1.0, 4.0, 7.0)
# How many heights the search starts from.
HEIGHT_STARTS = 9
# Values of sigma that the search starts from.
SIGMA_STARTS = (0.03, 0.1, 0.3, 1.0)
# First step of the search in log sigma, the ratio of each next step to it, and how many there are.
FIRST_SEARCH_STEP = 0.6
STEP_RATIO = 0.7
SEARCH_STEPS = 22
# Three free parameters are searched twice: shortly, and from there again.
STEPS_OF_SHORT_SEARCH = 12
FIRST_SEARCH_STEP_AGAIN = 0.3


@dataclass(frozen=True)
class Observed:
    """The points as the likelihood takes them, arrays of shape (n,)."""

    log_batch: Array
    """log(B/B_ref)."""
    log_steps: Array
    stopped: NDArray[np.bool_]
    log_reference: float
    """log B_ref, the mean over the points that are not stopped."""


@dataclass(frozen=True)
class Profile:
    """The deviance at m log odds, minimised over the other parameters: arrays of shape (m,)."""

    log_odds: Array
    """log(B_crit/B_ref)."""
    log_small: Array
    """log v."""
    deviance: Array
    """-2 log likelihood, up to a constant."""
    log_height: Array
    log_sigma: Array


def compute_profile(observed: Observed, terms: int, rise: float) -> Profile:
    """Compute the profile on a grid of log odds that resolves its minimum and the interval.

    The profile is the least deviance at each B_crit. Its log odds, log(B_crit/B_ref), are in
    ascending order; the first is -inf (B_crit = 0) and the last is inf.

    Args:
        observed: the points.
        terms: how many the law has, 2 or 3.
        rise: how far the deviance rises from its minimum to an end of B_crit's interval.
    """

    def profile_at(log_odds: Array) -> Profile:
        """Minimise the deviance of the law at each of the log odds."""
        # None lets log v, the log factor of the third term, be fitted. Two terms have a v of 0.
        log_small = None
        if terms == 2:
            log_small = np.full(log_odds.size, -np.inf)
        return minimise_deviance(observed, log_odds, log_small)

    limits = profile_at(np.array([-np.inf, np.inf]))
    # Beyond the points' batch sizes B_crit is sought within a factor of 10,000.
    first = observed.log_batch.min() - LOG_REACH
    last = observed.log_batch.max() + LOG_REACH
    inner = profile_at(np.linspace(first, last, 96))
    # Each finer grid spans the interval alone. There are two of them, as only one point of the
    # first grid may lie within the interval.
    for _ in range(2):
        lowest = min(inner.deviance.min(), limits.deviance.min())
        # Where a limit fits far better, no point is that low: then the grid's best one counts.
        inside = np.flatnonzero(inner.deviance <= max(lowest + rise, inner.deviance.min()))
        low = inner.log_odds[max(inside[0] - 1, 0)]
        high = inner.log_odds[min(inside[-1] + 1, inner.log_odds.size - 1)]
        inner = profile_at(np.linspace(low, high, 41))
    # Three more grids close in on the minimum.
    around_minimum = inner
    for _ in range(3):
        lowest_at = int(around_minimum.deviance.argmin())
        low = around_minimum.log_odds[max(lowest_at - 1, 0)]
        high = around_minimum.log_odds[min(lowest_at + 1, around_minimum.log_odds.size - 1)]
        around_minimum = profile_at(np.linspace(low, high, 9))
    return _joined(limits, inner, around_minimum)


def _joined(*profiles: Profile) -> Profile:
    """Join profiles into one, in ascending order of the log odds."""
    columns = [
        np.concatenate(parts)
        for parts in zip(*(vars(profile).values() for profile in profiles), strict=True)
    ]
    # The first field is the log odds.
    order = np.argsort(columns[0], kind="stable")
    return Profile(*(column[order] for column in columns))


def minimise_deviance(
    observed: Observed, log_odds: Array, log_small: Array | None = None
) -> Profile:
    """Minimise the deviance at each of m values of B_crit over the curve's other parameters.

    The curve is S = h (1 - p + p r + v r^2), with r = B_ref/B and p = B_crit/(B_crit + B_ref). The
    last term is that of small batches: v is in proportion to B_opt^2, the square of the batch size
    that takes the fewest examples. The other parameters are the height h, the scatter sigma of
    log S and, if it is free, v. The search takes the best of a grid of starts, as the deviance has
    several minima, and goes on from it by a pattern search of shrinking steps.

    Args:
        observed: the points, n of them.
        log_odds: log(B_crit/B_ref), (m,); some may be infinite.
        log_small: the given log v at each of them, (m,), -inf for v = 0; None: v is free.
    """
    is_small_free = log_small is None
    rows = np.arange(log_odds.size)
    log_odds = log_odds[:, None]
    # k candidates at each of the log odds: arrays (m, k), and the curve's shape (m, k, n).
    log_small_tried, log_shape, log_height, log_sigma = _starts(observed, log_odds, log_small)
    # A move is a step up, down or none in each of log v, the height and log sigma.
    directions = (-1.0, 0.0, 1.0)
    small_directions = directions if is_small_free else (0.0,)
    moves = np.array(list(product(small_directions, directions, directions)))
    for step in _search_steps(is_small_free):
        errors = observed.log_steps - log_shape - log_height[..., None]
        deviance = _deviance(errors, observed.stopped, log_sigma)
        least = deviance.argmin(1)
        best = Profile(
            log_odds=log_odds[:, 0],
            log_small=log_small_tried[rows, least],
            deviance=deviance[rows, least],
            log_height=log_height[rows, least],
            log_sigma=log_sigma[rows, least],
        )
        # The height moves in units of sigma, as the deviance changes with log h over such a width.
        height_step = step * np.exp(best.log_sigma)
        log_height = best.log_height[:, None] + height_step[:, None] * moves[:, 1]
        log_sigma = best.log_sigma[:, None] + step * moves[:, 2]
        log_shape = np.repeat(log_shape[rows, least][:, None], len(moves), axis=1)
        # log v takes steps of twice the width, so that log B_opt takes steps as wide as the others.
        log_small_tried = best.log_small[:, None] + 2.0 * step * moves[:, 0]
        if is_small_free:
            # Another v also moves the whole curve. The height makes up for that, so that the curve
            # stays among the points.
            former_mean = log_shape.mean(-1)
            log_shape = _log_shape(log_odds, log_small_tried, observed.log_batch)
            log_height += former_mean - log_shape.mean(-1)
    return best


def _starts(
    observed: Observed, log_odds: Array, log_small: Array | None
) -> tuple[Array, Array, Array, Array]:
    """Choose k starts of the search at each of m values of B_crit: all pairs of heights and sigmas.

    The curve is S = h (1 - p + p r + v r^2), with sigma the scatter of log S. Where v is free, the
    starts also try several values of it.

    Args:
        observed: the points, n of them.
        log_odds: log(B_crit/B_ref), (m, 1).
        log_small: the given log v, (m,); None: v is free.

    Returns:
        log v (m, k), the log of the curve over h at the n points (m, k, n), log h (m, k) and
        log sigma (m, k).
    """
    if log_small is None:
        log_smallest = observed.log_batch.min(keepdims=True)
        # These v make v r^2 given multiples of the other two terms at the smallest batch size.
        log_two_terms = _log_shape(log_odds, np.array([-np.inf]), log_smallest)[..., 0]
        log_small_tried = log_two_terms + 2.0 * log_smallest + np.array(LOG_SMALL_STARTS)
    else:
        log_small_tried = log_small[:, None]
    log_shape = _log_shape(log_odds, log_small_tried, observed.log_batch)
    # The heights put the curve through the points that reached the target, from the lowest to the
    # highest one.
    gaps = (observed.log_steps - log_shape)[..., ~observed.stopped]
    quantiles = np.quantile(gaps, np.linspace(0.0, 1.0, HEIGHT_STARTS), axis=-1)
    log_height = np.moveaxis(quantiles, 0, -1).reshape(log_odds.size, -1)
    log_small_tried = np.repeat(log_small_tried, HEIGHT_STARTS, axis=1)
    log_shape = np.repeat(log_shape, HEIGHT_STARTS, axis=1)
    # Each of these is combined with every sigma.
    log_sigmas = np.log(SIGMA_STARTS)
    log_sigma = np.tile(log_sigmas, log_height.shape)
    return (
        np.repeat(log_small_tried, log_sigmas.size, axis=1),
        np.repeat(log_shape, log_sigmas.size, axis=1),
        np.repeat(log_height, log_sigmas.size, axis=1),
        log_sigma,
    )


def _search_steps(is_small_free: bool) -> list[float]:
    """List the shrinking widths of the pattern search's steps, in log sigma.

    ``is_small_free``: whether the small-batch term is searched beside the height and sigma. With
    three parameters one search may shrink before it arrives, so a second one starts where it ended.
    """
    searches = [(FIRST_SEARCH_STEP, SEARCH_STEPS)]
    if is_small_free:
        searches = [
            (FIRST_SEARCH_STEP, STEPS_OF_SHORT_SEARCH),
            (FIRST_SEARCH_STEP_AGAIN, SEARCH_STEPS),
        ]
    steps = list[float]()
    for step, count in searches:
        for _ in range(count):
            steps.append(step)
            step = STEP_RATIO * step
    return steps


def _log_shape(log_odds: Array, log_small: Array, log_batch: Array) -> Array:
    """Compute log(S(B)/h) at n batch sizes, log(1 - p + p r + v r^2) with r = B_ref/B.

    S(B) are the steps to the target at batch size B, and h is its height: S(B_ref) = h (1 + v).

    Args:
        log_odds: log(B_crit/B_ref), (m, 1); may be infinite. p = B_crit/(B_crit + B_ref) is its
            expit.
        log_small: log v, the factor of the term for small batches, (m, k) or an array that
            broadcasts to it; -inf leaves the term out.
        log_batch: log(B/B_ref), (n,).

    Returns:
        An array (m, k, n).
    """
    log_two_terms = np.logaddexp(
        log_expit(-log_odds)[..., None], log_expit(log_odds)[..., None] - log_batch
    )
    return np.asarray(np.logaddexp(log_two_terms, log_small[..., None] - 2.0 * log_batch))


def _deviance(errors: Array, stopped: NDArray[np.bool_], log_sigma: Array) -> Array:
    """Compute -2 log of the likelihood times the prior of the scatter, up to a constant.

    Its shape is (m, k): m curves, each with k values of the scatter of n points. A point is good,
    with normal scatter in log S, or with a small probability an outlier, whose scatter is wider.

    Args:
        errors: log S of the points less that of the curve, (m, k, n).
        stopped: which of the points are bounds, (n,): the target was still missed after S steps.
        log_sigma: log of the points' scatter, (m, k).
    """
    log_good_share = math.log1p(-POINT_OUTLIER_SHARE)
    log_outlier_share = math.log(POINT_OUTLIER_SHARE)
    sigma = np.exp(log_sigma)[..., None]
    outlier_sigma = np.hypot(sigma, POINT_OUTLIER_SPREAD)
    square = errors[..., ~stopped] ** 2
    good = log_good_share - log_sigma[..., None] - square / (2.0 * sigma**2)
    outlier = log_outlier_share - np.log(outlier_sigma) - square / (2.0 * outlier_sigma**2)
    log_likelihood = np.logaddexp(good, outlier).sum(-1)
    if stopped.any():
        # The probability that S exceeds the bound.
        over = errors[..., stopped]
        good = log_good_share + log_ndtr(-over / sigma)
        outlier = log_outlier_share + log_ndtr(-over / outlier_sigma)
        log_likelihood += np.logaddexp(good, outlier).sum(-1)
    # The prior of sigma is a scaled inverse chi-square.
    log_prior_of_sigma = -PRIOR_WEIGHT * (log_sigma + 0.5 * (PRIOR_NOISE / sigma[..., 0]) ** 2)
    return np.asarray(-2.0 * (log_prior_of_sigma + log_likelihood))
