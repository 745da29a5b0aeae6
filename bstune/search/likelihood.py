"""How likely a study's trials are, given the parameters of log S(B, lr).

Reached trials are normal in log S with an outlier mixture. Stopped ones are bounds, or estimates
above their bound where their history can be extrapolated. A diverged one means a large penalty. The
parameters and the law are those of :mod:`bstune.search.frontier_law`.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from bstune.search.frontier_law import (
    NOISE,
    Array,
    Points,
    Prior,
    log_steps_off,
    off_optimum,
    penalty,
)
from bstune.search.horizon import (
    Ends,
    early_variance,
    log_chance_at_end,
    log_jacobian,
    log_shortest,
)

# An index that chooses some of the trials.
Columns = slice | NDArray[np.bool_]
# Share of the trials that are outliers, and the deviation of their log S beside that of the others.
TRIAL_OUTLIER_SHARE = 0.04
TRIAL_OUTLIER_SPREAD = 0.8
# Chance that is left to a bound, or to a divergence, which the model rules out: the trial may be an
# outlier.
LEAST_CHANCE = TRIAL_OUTLIER_SHARE / 4.0
# A trial that diverged is at least this far above the frontier, in log S ...
DIVERGED_PENALTY = 1.5
# ... give or take this.
DIVERGED_SPREAD = 0.4
# Values of log S worked out at a time, 320 kB: likelihoods of 1,000 trials take two thirds of the
# time so.
CACHED_VALUES = 40_000


def _columns(chosen: NDArray[np.bool_]) -> Columns:
    """Turn a mask of trials into a slice if they are neighbours: it is read without a copy."""
    places = np.flatnonzero(chosen)
    if not places.size:
        return slice(0, 0)
    start = int(places[0])
    end = int(places[-1]) + 1
    if end - start == places.size:
        return slice(start, end)
    return chosen


@dataclass(frozen=True)
class LikelihoodData:
    """n trials as the likelihood takes them: arrays of shape (n,)."""

    points: Points
    y: Array
    """Log of the steps to target where they are known, else of their estimate or lower bound."""
    spread: Array
    """Standard deviation of y beside the noise from seed to seed."""
    log_steps_missed: Array
    """Where y is an estimate, the log of the steps that still missed the target; else -inf."""
    bound: NDArray[np.bool_]
    """Whether log S lies above y rather than around it."""
    diverged: NDArray[np.bool_]
    """Whether it diverged: ``y`` is not read then."""
    weight: Array | None = None
    """Weight of each trial in the likelihood; None: all weigh 1."""
    ends: Ends | None = None
    """How each trial ended its horizon, where schedules end with the trial. y is then the log of
    the step where it ended, from which the law over horizons leads to log S."""

    @cached_property
    def columns(self) -> tuple[Columns, Columns, Columns]:
        """Three groups of trials: with a log S of their own, with a bound alone, and diverged."""
        exact = ~self.bound & ~self.diverged
        return _columns(exact), _columns(self.bound), _columns(self.diverged)

    @cached_property
    def estimated(self) -> Columns:
        """Which trials have an estimate of log S, above the steps that they have run."""
        return _columns(~self.bound & ~self.diverged & np.isfinite(self.log_steps_missed))

    def rearranged(self, prior: Prior) -> "LikelihoodData":
        """Sort many trials by kind, and add nodes to their points: their likelihood is then cheap.

        Trials of a kind that stand side by side are read without a copy. Between nodes
        (:meth:`Points.on_nodes`) the law is interpolated.
        """
        kind = np.isfinite(self.log_steps_missed) + 2 * self.bound + 4 * self.diverged
        ordered = self.take(np.argsort(kind, kind="stable"))
        return replace(ordered, points=ordered.points.on_nodes(prior))

    def take(self, rows: NDArray[np.intp]) -> "LikelihoodData":
        """Keep the trials in these rows."""
        weight = None if self.weight is None else self.weight[rows]
        ends = None if self.ends is None else self.ends.take(rows)
        return LikelihoodData(
            points=self.points.take(rows),
            y=self.y[rows],
            spread=self.spread[rows],
            log_steps_missed=self.log_steps_missed[rows],
            bound=self.bound[rows],
            diverged=self.diverged[rows],
            weight=weight,
            ends=ends,
        )


def log_likelihood(theta: Array, data: LikelihoodData, prior: Prior) -> Array:
    """Compute the log likelihood of the trials by m draws: (m,); zero without trials."""
    # The draws are taken in parts, whose values of log S fit into the processor's cache.
    rows = max(1, CACHED_VALUES // max(data.y.size, 1))
    parts = list[Array]()
    for start in range(0, len(theta), rows):
        parts.append(_log_likelihood(theta[start : start + rows], data, prior))
    return np.concatenate(parts)


def _log_likelihood(theta: Array, data: LikelihoodData, prior: Prior) -> Array:
    """Compute the log likelihood as :func:`log_likelihood` does, for all draws at once: (m,)."""
    octaves_off = off_optimum(theta, data.points, prior)
    expected = log_steps_off(theta, octaves_off, data.points, prior)
    log_s_seen = log_steps_seen(theta, data, prior)
    exact, bound, diverged = data.columns
    noise = np.exp(theta[:, NOISE, None])

    # Trials that tell their own log S: the density there.
    variance_beside = variance_seen(theta, data, prior)[..., exact]
    log_density = _log_density(data, log_s_seen, expected, variance_beside, noise)
    # Where schedules end with the trial, log S follows from what was measured, a metric or a step,
    # by a law that differs from draw to draw: the density has to be one of the measured value. To
    # that comes the chance that a trial which met the target at its end had not met it before.
    if data.ends is not None:
        law = theta[:, prior.horizon_law]
        of_measured = log_jacobian(law, data.ends) + log_chance_at_end(law, data.ends)
        log_density = log_density + of_measured[:, exact]
    total = _weighed_sum(log_density, data, exact)

    # Trials that give a bound: the chance that log S lies above it.
    over = expected[:, bound] - log_s_seen[..., bound]
    chance_above = ndtr(over / np.hypot(noise, data.spread[bound]))
    total = total + _weighed_sum(np.log(chance_above + LEAST_CHANCE), data, bound)

    # Trials that diverged: the chance of that. Only too high a learning rate makes a trial diverge:
    # one that adds more than about ``DIVERGED_PENALTY`` to log S.
    too_high = np.maximum(octaves_off[:, diverged], 0.0)
    over_limit = penalty(theta, too_high) - DIVERGED_PENALTY
    chance_to_diverge = ndtr(over_limit / DIVERGED_SPREAD)
    log_chance = np.log(chance_to_diverge + LEAST_CHANCE)
    return np.asarray(total + _weighed_sum(log_chance, data, diverged))


def _weighed_sum(terms: Array, data: LikelihoodData, columns: Columns) -> Array:
    """Add up the log likelihoods of the trials in these columns, (m, k), by their weights: (m,)."""
    if data.weight is not None:
        terms = terms * data.weight[columns]
    return np.asarray(terms.sum(axis=1))


def _log_density(
    data: LikelihoodData, y: Array, expected: Array, variance_beside: Array, noise: Array
) -> Array:
    """Compute the log density of the k trials that have a log S of their own: (m, k).

    It is a mixture with outliers, up to a constant. Where a trial's log S is an estimate, S must
    exceed the steps that it has run: the density is multiplied by the chance that it does. An
    outlier's estimate may be wrong altogether, so its density is not multiplied.

    Args:
        data: all n trials.
        y: log S as the trials have it, (1, n) or (m, n).
        expected: log S by the model, (m, n).
        variance_beside: variance of the k trials' log S that is added to the noise from seed to
            seed, (k,) or (m, k).
        noise: standard deviation of log S from seed to seed, (m, 1).
    """
    exact, _, _ = data.columns
    square = (y[..., exact] - expected[:, exact]) ** 2
    variance = noise**2 + variance_beside
    wide = variance + TRIAL_OUTLIER_SPREAD**2
    # Both densities, the narrow one and the outliers' wide one, are divided by the exponential of
    # the wide one, so that neither underflows. It is put back at the end, in the logarithm.
    scaled_density = np.exp(0.5 * square * (1.0 / wide - 1.0 / variance)) / np.sqrt(variance)
    scaled_density *= 1.0 - TRIAL_OUTLIER_SHARE
    estimated = np.isfinite(data.log_steps_missed[exact])
    if estimated.any():
        scaled_density[:, estimated] *= _chance_above(data, y, expected, noise)
    return np.asarray(
        np.log(scaled_density + TRIAL_OUTLIER_SHARE / np.sqrt(wide)) - 0.5 * square / wide
    )


def log_steps_seen(theta: Array, data: LikelihoodData, prior: Prior) -> Array:
    """Compute log S, of the steps to the target, as n trials show it: (m, n), or (1, n).

    A trial that can go on has shown its log S, ``y``, or a bound of it. Where schedules end with
    the trial, S is the length of the shortest schedule that meets the target. A trial under a
    longer or a shorter one shows it by the law of the metric over schedules' lengths, of which each
    of the m draws has its own.
    """
    if data.ends is None:
        return data.y[None]
    return data.y + log_shortest(theta[:, prior.horizon_law], data.ends)


def variance_seen(theta: Array, data: LikelihoodData, prior: Prior) -> Array:
    """Compute the variance of :func:`log_steps_seen` without the noise from seed to seed.

    It is (n,), or (m, n) where schedules end with the trial.
    """
    variance = np.asarray(data.spread**2)
    if data.ends is None:
        return variance
    return variance + early_variance(theta[:, prior.horizon_law], data.ends)


def _chance_above(data: LikelihoodData, y: Array, expected: Array, noise: Array) -> Array:
    """Compute the chance that S exceeds the steps that a trial has run, given its estimate.

    S is the steps to the target. The result has a row for each of m draws of the parameters, and a
    column for each of the k trials whose log S is an estimate: (m, k).

    Args:
        data: all n trials.
        y: log S as the trials have it, (1, n) or (m, n).
        expected: log S by the model, (m, n).
        noise: standard deviation of log S from seed to seed, (m, 1).
    """
    places = data.estimated
    # Log S given the model and the estimate is normal, its precision the sum of theirs.
    by_model = noise**-2.0
    by_estimate = data.spread[places] ** -2.0
    precision = by_model + by_estimate
    mean = (by_model * expected[:, places] + by_estimate * y[..., places]) / precision
    return np.asarray(ndtr((mean - data.log_steps_missed[places]) * np.sqrt(precision)))
