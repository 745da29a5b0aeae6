"""The trial that tells most of B_crit for its cost, for the objective ``curve``.

A trial shows log S at its configuration, with the noise from seed to seed. Where log S and
log B_crit are jointly normal over the posterior, it removes ``cov^2 / (var + noise)`` of the
variance of log B_crit (MacKay 1992, "Information-based objective functions for active data
selection", section 4).
"""

import math

import numpy as np
from numpy.typing import NDArray

from bstune.search.findings import OWN_DEVIATION
from bstune.search.law import B_CRIT, NO_VALUES
from bstune.search.posterior import Posterior

Array = NDArray[np.float64]

# A trial runs to so many times its expected steps, and is not resumed from there.
GIVE_UP = 1.6
# What a trial costs beside its steps, over the cheapest candidate's cost: few trials, not many.
SETUP = 0.2


def choose_for_curve(
    posterior: Posterior,
    x: Array,
    z: Array,
    ran: Array,
    cost_per_step: Array,
    u: Array = NO_VALUES,
) -> tuple[int, float]:
    """Choose one of n trials: its place, and the step at which it stops.

    Args:
        posterior: with the misfit.
        x, z: log2 of batch sizes and rates, (n,).
        ran: steps of the pruned trials that are resumed, 0 for new ones, (n,).
        cost_per_step: (n,).
        u: coordinates of the further values, (n, values).
    """
    log_steps = posterior.law.log_steps(posterior.theta, x, z, u)
    log_expected = np.median(log_steps, axis=0)
    # It is stopped there: draws with more steps are not told apart.
    log_last = log_expected + math.log(GIVE_UP)
    shown = np.minimum(log_steps, log_last)
    shown = shown - shown.mean(axis=0)
    log_b_crit = posterior.theta[:, B_CRIT] - posterior.theta[:, B_CRIT].mean()
    covariance = shown.T @ log_b_crit / len(log_b_crit)
    noise = posterior.noise**2 + OWN_DEVIATION**2
    told = covariance**2 / (shown.var(axis=0) + noise)
    told[ran >= np.exp(log_last)] = 0.0
    cost = cost_per_step * np.exp(log_expected)
    share_left = np.maximum(1.0 - ran / np.exp(log_expected), SETUP)
    chosen = int((told / (cost * share_left + SETUP * cost.min())).argmax())
    return chosen, float(np.exp(log_last[chosen]))
