"""Workloads whose schedule ends with the trial: the law of the metric over horizons, and the next trial's horizon.

A run whose schedule ends after h steps, its horizon, meets the target if h is at least S(B, lr) of its seed. Such a
trial is neither stopped nor continued, and how it ended says how far S is:

- One that missed: S lies above h, by ``log(S/h) = scale excess^power``, the excess being the least log excess of its
  evaluations (:func:`bstune.search.observations.log_excess`), mostly that at its end. With power 1 the metric's
  distance from its ideal value falls as a power of h; below 1 it flattens out, as where the best that can be reached is
  not the ideal value.
- One that met the target at its horizon's end: the same law with the opposite sign.
- One that met it at step s before its end: ``log(S/s) = share log(s/h)``. With share 0 the schedule does not matter;
  the more is gained at its end alone, the larger the share.

The three numbers are those of a workload: they are parameters of the posterior, sampled with the others.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr

Array = NDArray[np.float64]
SHARE = 2  # its place in the law
# Mean and standard deviation of: log scale, log power, log share.
HORIZON_NORMAL = [(math.log(2.0), 0.6), (math.log(0.8), 0.25), (math.log(2.5), 1.3)]
MISFIT = 0.25  # of log(S/h): what the law misses of one trial, over what it says ...
EARLY_MISFIT = 0.25  # ... likewise over log(s/h)
LEAST_MISFIT = 0.03  # in log S
LONGEST = 4.0  # deviations of log S that a horizon lies above it, at most


@dataclass(frozen=True)
class Ends:
    """How trials ended their horizons: arrays of shape (n,)."""

    excess: Array  # log excess at the horizon's end, 0 of a trial that ended before: above 0 the target is missed
    early: Array  # log(steps/horizon) of a trial that met the target before its horizon's end; else 0


def log_shortest(law: Array, ends: Ends) -> Array:
    """Return log(S/steps) by parameters (m, 3) of n trials: (m, n)."""
    scale, power, share = np.exp(law.T)[:, :, None]
    return np.asarray(np.sign(ends.excess) * scale * np.abs(ends.excess) ** power + share * ends.early)


def misfit(ends: Ends) -> Array:
    """Return the standard deviation of log S beside the law's: what it misses grows with how far it has to reach."""
    usual = np.array([[mean for mean, _ in HORIZON_NORMAL]])
    far = log_shortest(usual, Ends(ends.excess, np.zeros(ends.early.shape)))[0]
    return np.asarray(np.sqrt(LEAST_MISFIT**2 + (MISFIT * far) ** 2 + (EARLY_MISFIT * ends.early) ** 2))


def met_at(share: float) -> float:
    """Return by which power of the horizon h the step rises at which the target is met: S^(1 - power) h^power."""
    return share / (1.0 + share)


def slack(spread: float, share: float) -> float:
    """Return log(h/S) of the horizon h that reaches the target at least cost, where log S has this deviation.

    A run that misses has cost h and is run again, one that reaches the target ends where it meets it: so the cost until
    one does is ``met + h (1 - P)/P`` with P = P(S <= h). Where all is gained at the schedule's end that is h/P, which
    is least 17% above S if that is known to 10%; the less the end matters, the cheaper is a longer horizon. Where
    hardly anything is known of S it is least below S: many short runs are cheaper than one long one.
    """
    spread = min(spread, 10.0)  # beyond that nothing is known, and exp would overflow
    k = np.linspace(-spread - 1.0, LONGEST, 600)
    x = k * spread
    cost = np.exp(np.where(x < 0.0, x, met_at(share) * x)) + np.exp(x - log_ndtr(k)) - np.exp(x)
    return float(x[cost.argmin()])
