"""Schedules that end with the trial: the metric's law over horizons, and the next horizon.

A run whose schedule ends after h steps, its horizon, meets the target if h is at least S(B, lr) of
its seed. Such a trial is neither stopped nor continued. How it ended says how far S is:

- One that missed: S lies above h, by ``log(S/h) = scale excess^power``, the excess being the least
  log excess of its evaluations (:func:`bstune.search.histories.log_excess`), mostly that at its
  end. With power 1 the metric's distance from its ideal value falls as a power of h; below 1 it
  flattens out, as where the best that can be reached is not the ideal value.
- One that met the target at its horizon's end: the same law with the opposite sign. That it did so
  no earlier says how much of what is gained is gained at the end, see the next one.
- One that met it at step s before its end: ``log(S/s) = waste tanh(early/waste) - share early``,
  early = log(h/s). The more is gained at the schedule's end alone, the larger the share: with the
  target met at S^(1 - m) h^m it is m/(1 - m), 0 where the horizon does not matter. The waste is of
  steps at a rate near its end, which train little: a run with a long horizon meets the target after
  S e^-waste. With a straight line to zero it is log 2 if progress is the sum of the rates; tanh, as
  S is at most h.

The four numbers are those of a workload: they are parameters of the posterior, sampled with the
others.

What is measured is the datum, given the horizon h that was chosen: the log excess e at the
horizon's end, or the log of the step s at which the target was met before it. log S is what the law
makes of the datum, so that its density has to be one of the datum: p(e | h) = p(log S) |d log
S/de|, and likewise for log s. Without that factor, the Jacobian, a law that maps all data to nearly
the same log S, by a small scale, is preferred to one that spreads them out, whatever they are. It
is

- scale power e^(power - 1) for an excess of this size, above 0 or below;
- 1 + share - sech^2(early/waste) = share + tanh^2(early/waste) for a step, as early = log(h/s)
  falls where log s rises.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr, ndtr

Array = NDArray[np.float64]
# Mean and standard deviation of: log scale, log power, log share, log waste. The share m/(1 - m)
# has a median of 1 and a deviation with which m itself is nearly uniform: from a target that is met
# at S^(1 - m) h^m wherever a schedule ends (recorded linear schedules have m of 0 to 0.1) to one
# that is met at its end alone.
HORIZON_NORMAL = [
    (math.log(2.0), 0.6),
    (math.log(0.8), 0.25),
    (0.0, 1.8),
    (math.log(0.18), 1.2),
]
# Deviation of log(S/h) of one trial from the law, over the law's own value.
HORIZON_MISFIT = 0.25
# The same of each of the two terms of log(S/s).
EARLY_MISFIT = 0.25
# Least deviation of one trial from the law, in log S.
LEAST_MISFIT = 0.03
# Log excess that is told from 0: ten examples more or less, where 10% of 10,000 are wrong.
EXCESS_RESOLUTION = 0.01
# Log(h/S) at which a law's draws are compared.
LOG_HORIZONS = np.linspace(0.0, 12.0, 1201)
# Draws of the law, at most about, of which the median is taken.
LAW_DRAWS = 32
# A horizon lies at most so many deviations of log S above it.
MOST_DEVIATIONS = 4.0
# A winner's horizon lies at least so many above it: nine of ten runs reach the target.
RELIABLE = 1.28
# Share of the runs that miss the target whatever their horizon.
OUTLIERS = 0.04


@dataclass(frozen=True)
class Ends:
    """How n trials ended their horizons: arrays of shape (n,)."""

    log_excess: Array
    """Log excess at the horizon's end: above 0 the target was missed. 0 of a trial that ended
    before."""
    log_share_run: Array
    """Log(steps/horizon) of a trial that met the target before its horizon's end; else 0."""
    log_over_last_miss: Array | None = None
    """Log(horizon/step) of the last step that missed the target, of a trial that met it at its
    horizon's end. Infinite for other trials, and where there was no evaluation before. None: it is
    infinite for all trials."""

    def take(self, rows: NDArray[np.intp]) -> "Ends":
        """Keep the trials in these rows."""
        log_over_last_miss: Array | None = None
        if self.log_over_last_miss is not None:
            log_over_last_miss = self.log_over_last_miss[rows]
        return Ends(self.log_excess[rows], self.log_share_run[rows], log_over_last_miss)


def log_shortest(law: Array, ends: Ends) -> Array:
    """Compute log(S/steps) of n trials from how each ended: (m, n).

    S is the shortest horizon with which the trial would have met the target. A trial that ended its
    horizon is taken to S by its log excess, below 0 where it met the target; one that met the
    target before that, by how early it did.

    Args:
        law: m draws of the log of the law's four parameters, scale, power, share and waste, (m, 4).
        ends: of the n trials.
    """
    scale, power = np.exp(law.T[:2])[:, :, None]
    missed = np.sign(ends.log_excess) * scale * np.abs(ends.log_excess) ** power
    return np.asarray(missed + _log_over_met(law, -ends.log_share_run))


def _log_over_met(law: Array, early: Array) -> Array:
    """Compute log(S/s) of n runs that met the target at step s before their horizon h: (m, n).

    The two terms are opposed. A shorter horizon would have met the target sooner, by ``share`` of
    log(h/s). But the last steps of a schedule train little: S, at whose end they lie, is larger by
    up to ``waste``, in log.

    S is the shortest horizon that meets the target.

    Args:
        law: m draws of the logs of the law's parameters, scale, power, share and waste, (m, 4).
        early: log(h/s), (n,).
    """
    # The last two columns; (m, 1) each, to stand beside the n runs.
    share, waste = np.exp(law.T[2:])[:, :, None]
    return np.asarray(waste * np.tanh(early / waste) - share * early)


def log_jacobian(law: Array, ends: Ends) -> Array:
    """Compute the log of |d log S/d datum| of n trials, by m draws ``law`` of the law: (m, n).

    A horizon h is the length of a schedule that ends with its trial, S the shortest that meets the
    target. The law has the logs of scale, power, share and waste, (m, 4). The datum is what was
    measured: the log excess at the horizon's end, or the log of the step s that met the target
    before it. With this factor a density of log S, which follows from the datum by
    :func:`log_shortest`, becomes one of the datum. The log is 0 for a trial without a datum, which
    diverged or ended its horizon without a metric. No excess is known finer than to
    ``EXCESS_RESOLUTION``: at the target itself the derivative would be infinite, or 0.
    """
    log_scale, log_power, log_share, log_waste = law.T[:, :, None]
    distance = np.maximum(np.abs(ends.log_excess), EXCESS_RESOLUTION)
    # The derivative of log(S/h) = scale excess^power is scale power excess^(power - 1).
    by_excess = log_scale + log_power + (np.exp(log_power) - 1.0) * np.log(distance)
    # Log(horizon/step) of the trials whose datum is a step; of the others any number will do.
    early = np.where(ends.log_share_run < 0.0, -ends.log_share_run, 1.0)
    # That of log S = log s + waste tanh(early/waste) - share early is share + tanh^2(early/waste),
    # as early = log h - log s.
    by_step = np.log(np.exp(log_share) + np.tanh(early / np.exp(log_waste)) ** 2)
    of_excess = np.where(ends.log_excess != 0.0, by_excess, 0.0)
    return np.asarray(np.where(ends.log_share_run < 0.0, by_step, of_excess))


def log_chance_at_end(law: Array, ends: Ends) -> Array:
    """Compute the log of the chance that n trials met the target no earlier than they did: (m, n).

    ``law`` is m draws of the logs of scale, power, share and waste, (m, 4). For trials that met the
    target before their end, or missed it, the log is 0: a chance of 1. A trial that met the target
    at its end, the horizon h, shows by its excess how far h lies above S, the shortest horizon that
    meets it: log(h/S) = a. By the law it then met the target already at a step s, where early =
    log(h/s) solves ``a = (1 + share) early - waste tanh(early/waste)``. As 0 <= tanh(x) <= min(x,
    1), early is at most a/share and (a + waste)/(1 + share), and near the smaller of the two. But
    the last evaluation before the end missed the target: the chance is that s comes after it.
    """
    chances = np.zeros((len(law), ends.log_excess.size))
    if ends.log_over_last_miss is None:
        return chances
    # It is infinite for trials that did not meet the target at their end.
    at_end = ends.log_over_last_miss < np.inf
    if not at_end.any():
        return chances
    scale, power, share, waste = np.exp(law.T)[:, :, None]
    log_over_s = scale * np.abs(ends.log_excess[at_end]) ** power
    early = np.minimum(log_over_s / share, (log_over_s + waste) / (1.0 + share))
    # The law is not exact about s: a normal error makes the comparison a chance.
    spread = np.hypot(LEAST_MISFIT, EARLY_MISFIT * early)
    chance = ndtr((ends.log_over_last_miss[at_end] - early) / spread)
    chances[:, at_end] = np.log((1.0 - OUTLIERS) * chance + OUTLIERS)
    return chances


def misfit(ends: Ends) -> Array:
    """Compute the standard deviation of log S around the law for n trials: (n,).

    S is the shortest horizon with which a trial would have met the target. The deviation grows with
    the distance from a trial's horizon to S, over which the law has to reach.
    """
    # The law is taken at its prior means, so that the deviation is the same in all draws. Trials
    # that met the target early are taken as met at their end: :func:`early_variance` is theirs.
    usual_law = np.array([[mean for mean, _ in HORIZON_NORMAL]])
    at_end = Ends(log_excess=ends.log_excess, log_share_run=np.zeros(ends.log_share_run.shape))
    # Log(S/horizon).
    log_reach = log_shortest(usual_law, at_end)[0]
    return np.asarray(np.hypot(LEAST_MISFIT, HORIZON_MISFIT * log_reach))


def early_variance(law: Array, ends: Ends) -> Array:
    """Compute the variance of log S that is added for trials that met the target early: (m, n).

    It comes on top of the square of :func:`misfit`. S is the shortest horizon that meets the
    target, s the step at which a trial met it before its own horizon h. By the law log(S/s) =
    waste tanh(early/waste) - share early, with early = log(h/s). Both terms have an error of their
    own, with a deviation of ``EARLY_MISFIT`` times the term. It is 0 for trials that ran to their
    horizon's end.

    Args:
        law: m draws of the logs of the law's parameters, scale, power, share and waste, (m, 4).
        ends: of the n trials.
    """
    # The last two columns; (m, 1) each, to stand beside the n trials.
    share, waste = np.exp(law.T[2:])[:, :, None]
    # log(h/s).
    early = -ends.log_share_run
    of_waste = waste * np.tanh(early / waste)
    return np.asarray(EARLY_MISFIT**2 * (of_waste**2 + (share * early) ** 2))


def log_met(law: Array) -> Array:
    """Compute log(s/S) of the step s at which a run of each of several horizons meets the target.

    The horizons h are those of ``LOG_HORIZONS``, which gives log(h/S). The result, of its shape, is
    the median over m draws of the law, the logs of its scale, power, share and waste, (m, 4).
    """
    # A few of the draws are enough for a median.
    law = law[:: max(1, len(law) // LAW_DRAWS)]
    # The law gives log(S/s) over early = log(h/s). It is worked out at many values of that, and
    # read off at the horizons. Early exceeds log(h/S) by the waste at most. Its values are squares,
    # which lie closest at the beginning: there the curve is steepest.
    most = LOG_HORIZONS[-1] + math.exp(law[:, -1].max())
    early = np.linspace(0.0, math.sqrt(most), 400) ** 2
    met = list[Array]()
    for log_over_met in _log_over_met(law, early):
        # log(h/S) = log(h/s) - log(S/s).
        met.append(-np.interp(LOG_HORIZONS, early - log_over_met, log_over_met))
    return np.asarray(np.median(met, axis=0))


def least_cost(
    log_met_over_s: Array,
    spread: float,
    log_longest: float,
    log_latest: float = math.inf,
    shortest: float = -math.inf,
) -> tuple[float, float]:
    """Choose the horizon h that reaches the target at least cost: log(h/S), and that cost over S.

    A run that misses the target costs h and is run again. One that meets it, at step s, ends
    there. So the expected cost until one does is s + h (1 - P)/P, with P the chance that S <= h:
    log S is normal with deviation ``spread``, and a share of the runs are outliers.

    Where all is gained at the schedule's end the cost is h/P. Its least value is 17% above S
    if S is known to 10%. The less of the gain comes at the end, the less a longer horizon costs.
    Where hardly anything is known of S the cost is least below S: many short runs are cheaper than
    one long one.

    Args:
        log_met_over_s: log(s/S) of the step s at which each horizon of ``LOG_HORIZONS`` meets the
            target, as :func:`log_met` gives it.
        spread: standard deviation of log S.
        log_longest: the largest log(h/S).
        log_latest: the largest log(s/S) of the step at which the run may meet the target.
        shortest: the least log(h/S), in standard deviations of log S; ``log_longest`` prevails.

    Returns:
        log(h/S), and the cost over S: infinite where no horizon meets the target by ``log_latest``.
    """
    # Beyond that nothing is known, and exp would overflow.
    spread = min(spread, 10.0)
    # The less is known of S, the farther below it the horizon of least cost may lie.
    deviations = np.linspace(max(-spread - 1.0, shortest), MOST_DEVIATIONS, 600)
    # Horizons h, and the steps s at which they meet the target, as log(h/S) and log(s/S).
    log_horizons = np.minimum(deviations * spread, log_longest)
    log_steps_met = np.where(
        log_horizons < 0.0, log_horizons, np.interp(log_horizons, LOG_HORIZONS, log_met_over_s)
    )
    # The cost is s + h/P - h, with the outliers in P.
    repeated = np.exp(log_horizons - log_ndtr(log_horizons / spread)) / (1.0 - OUTLIERS)
    cost = np.exp(log_steps_met) + repeated - np.exp(log_horizons)
    best = int(np.where(log_steps_met <= log_latest, cost, np.inf).argmin())
    # No horizon meets the target in time: the one that ends at the latest step is given.
    if log_steps_met[best] > log_latest:
        return min(log_latest, log_longest), math.inf
    return float(log_horizons[best]), float(cost[best])
