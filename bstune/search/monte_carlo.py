"""Samples the posterior of the parameters of log S(B, lr) by sequential Monte Carlo.

Particles are drawn from the prior, tempered to the likelihood, and moved by Metropolis steps at
each temperature. The draws depend on the data and the generator alone: the same study asks the same
trials.
"""

import math
from dataclasses import dataclass

import numpy as np

from bstune.search.frontier_law import Array, Prior, draw_prior, log_prior
from bstune.search.likelihood import LikelihoodData, log_likelihood

# Shares of a particle's deviation from the mean that a step towards the fitted normal keeps.
KEPT_BY_STEP = (0.3, 0.7, 0.95)
# Share of the particles that still count (effective number over m) after a step in temperature.
KEPT_WEIGHT = 0.5


@dataclass(frozen=True)
class Start:
    """Draws of a posterior of fewer trials, from which that of all of them is sampled."""

    theta: Array
    """Shape (count, p)."""
    data: LikelihoodData
    """The fewer trials, as :meth:`LikelihoodData.rearranged` has them."""
    prior: Prior


def sample_posterior(
    data: LikelihoodData,
    prior: Prior,
    rng: np.random.Generator,
    count: int,
    moves: int,
    start: Start | None = None,
) -> Array:
    """Draw ``count`` times from the posterior of the p parameters: (count, p).

    ``moves`` are Metropolis steps at each temperature. The particles are tempered from the prior
    or, with ``start``, from the posterior of fewer trials, which is much nearer (iterated batch
    importance sampling: Chopin 2002, Biometrika 89(3)). Estimates of stopped trials change as
    others join them: so the fewer trials' likelihood is replaced, not multiplied by a further one.
    """
    if start is None:
        theta = draw_prior(prior, count, rng)
        if not data.y.size:
            return theta
    else:
        # Each of the particles is taken as often as any other, or once more.
        theta = start.theta[np.arange(count) * len(start.theta) // count]
        # Only a study of many trials has a start: their likelihood is made cheap.
        data = data.rearranged(prior)
    return _temper(theta, _Path(start, data, prior), rng, moves)


@dataclass(frozen=True)
class _Path:
    """Log densities base + temperature x rise, from a start at 0 to the posterior at 1."""

    start: Start | None
    """None: the path starts at the prior."""
    data: LikelihoodData
    prior: Prior

    def log_density_parts(self, theta: Array, temperature: float) -> tuple[Array, Array]:
        """Compute the two parts of the log density at m draws, base and rise: (m,) each.

        The log density at ``temperature`` is base + temperature x rise. A path from the prior has
        the log prior as base and the log likelihood as rise. A path from a start has the log
        density of the start's posterior as base, and the rise from that to the log density of the
        posterior of all trials.
        """
        if self.start is None:
            return log_prior(theta, self.prior), log_likelihood(theta, self.data, self.prior)
        at_end = log_prior(theta, self.prior) + log_likelihood(theta, self.data, self.prior)
        # At the path's end base + rise is this, whatever the start: its density, which costs time,
        # is left out.
        if temperature == 1.0:
            return at_end, np.zeros(len(theta))
        start_likelihood = log_likelihood(theta, self.start.data, self.start.prior)
        base = log_prior(theta, self.start.prior) + start_likelihood
        return base, at_end - base


def _temper(theta: Array, path: _Path, rng: np.random.Generator, moves: int) -> Array:
    """Take particles ``theta`` from the beginning of a path to its end, the posterior: (m, p).

    A path begins at the prior or, where it has a ``start``, at a posterior of fewer trials. At
    temperature t the log density is ``base`` + t ``rise`` (:meth:`_Path.log_density_parts`).
    """
    count = len(theta)
    temperature = 0.0
    base, rise = path.log_density_parts(theta, temperature)
    while temperature < 1.0:
        temperature_step = _temperature_step(rise, temperature)
        temperature += temperature_step
        weight = np.exp(temperature_step * (rise - rise.max()))
        # Systematic resampling: evenly spaced places on the cumulative weights, shifted together at
        # random.
        places = (rng.random() + np.arange(count)) / count
        chosen = np.minimum(np.searchsorted(np.cumsum(weight / weight.sum()), places), count - 1)
        theta = theta[chosen]
        base = base[chosen]
        rise = rise[chosen]
        # Resampling has made copies of particles, which moves spread again. A start is near the
        # end: half of the moves are enough on the way from it. At the end itself, twice as many
        # make the draws less alike.
        moves_now = moves if path.start is None else max(1, moves // 2)
        if temperature >= 1.0:
            moves_now = 2 * moves
        theta, base, rise = _move(theta, base, rise, temperature, path, rng, moves_now)
    return theta


def _temperature_step(rise: Array, temperature: float) -> float:
    """Find by bisection how far the temperature may go up at once, towards 1.

    At least half of the particles must still count after it. ``rise`` (m,) is what each particle's
    log density gains for a unit of temperature.
    """
    low = 0.0
    high = 1.0 - temperature
    # Relative to the largest one, so that the exponential does not overflow.
    from_largest = rise - rise.max()

    def effective_share(temperature_step: float) -> float:
        """Compute the share of the particles that still count after the temperature has gone up."""
        weight = np.exp(temperature_step * from_largest)
        return float(weight.sum() ** 2 / (weight @ weight) / weight.size)

    if effective_share(high) >= KEPT_WEIGHT:
        return high
    for _ in range(30):
        middle = 0.5 * (low + high)
        if effective_share(middle) >= KEPT_WEIGHT:
            low = middle
        else:
            high = middle
    # The temperature rises in any case, so that the tempering ends.
    return max(low, 1e-9)


def _move(
    theta: Array,
    base: Array,
    rise: Array,
    temperature: float,
    path: _Path,
    rng: np.random.Generator,
    moves: int,
) -> tuple[Array, Array, Array]:
    """Move m particles ``theta``, (m, p), by Metropolis steps at a temperature.

    Returns:
        The moved particles, (m, p), and the ``base`` and ``rise`` of their log density, (m,) each.
    """
    for i in range(moves):
        # Particles move alternately towards a normal distribution fitted to them, which leads far
        # in many dimensions, and by the difference of two particles, which does not trust that
        # shape.
        if i % 2 == 0:
            proposed, correction = _towards_normal(theta, path.prior, rng)
        else:
            proposed = _by_difference(theta, path.prior, rng)
            correction = np.zeros(len(theta))
        base_after, rise_after = path.log_density_parts(proposed, temperature)
        log_ratio = temperature * (rise_after - rise) + base_after - base + correction
        accepted = np.log(rng.random(len(theta))) < log_ratio
        theta = np.where(accepted[:, None], proposed, theta)
        base = np.where(accepted, base_after, base)
        rise = np.where(accepted, rise_after, rise)
    return theta, base, rise


def _towards_normal(theta: Array, prior: Prior, rng: np.random.Generator) -> tuple[Array, Array]:
    """Propose moves that leave a normal distribution fitted to the particles as it is.

    They are steps of preconditioned Crank-Nicolson (Cotter et al. 2013, arXiv 1202.0709).

    Returns:
        The proposed particles, (m, p), and the log of that distribution's density at the old ones
        over that at the proposed ones, (m,).
    """
    # A little of the prior's variance keeps the covariance of few particles positive definite.
    root = np.linalg.cholesky(np.cov(theta.T) + 1e-6 * np.diag(prior.spread**2))
    mean = theta.mean(axis=0)
    # How much of its deviation from the mean each particle keeps.
    keep = rng.choice(KEPT_BY_STEP, (len(theta), 1))
    # The particles in coordinates in which that distribution is the standard one.
    white = np.linalg.solve(root, (theta - mean).T).T
    fresh = keep * white + np.sqrt(1.0 - keep**2) * rng.standard_normal(theta.shape)
    correction = 0.5 * ((fresh**2).sum(axis=1) - (white**2).sum(axis=1))
    return mean + fresh @ root.T, correction


def _by_difference(theta: Array, prior: Prior, rng: np.random.Generator) -> Array:
    """Propose moves along the difference of two particles, and a little jitter: (m, p).

    Source: ter Braak 2006, Statistics and Computing 16.
    """
    first = rng.permutation(len(theta))
    second = rng.permutation(len(theta))
    # The source's factor for so many parameters; smaller ones are accepted more often.
    largest = 2.38 / math.sqrt(2.0 * theta.shape[1])
    scale = largest * rng.uniform(0.3, 1.0, (len(theta), 1))
    jitter = 1e-3 * prior.spread * rng.standard_normal(theta.shape)
    return np.asarray(theta + scale * (theta[first] - theta[second]) + jitter)
