"""The trial that tells most of the curve for its cost, for the objective ``curve``.

A trial shows log S at its configuration, with the noise from seed to seed. Where log S and the
curve are jointly normal over the posterior, it removes ``cov^2 / (var + noise)`` of the variance of
log S* at each batch size (MacKay 1992, "Information-based objective functions for active data
selection", section 4). Their mean over log B counts. By the variance of log B_crit alone trials lie
at both ends, where the law says most of it, and none at the knee, where the law may be wrong: of
132 searches of six tables and five kinds of synthetic curves 90% intervals of B_crit held 98, and
hold 108.
"""

import math

import numpy as np
from numpy.typing import NDArray

from bstune.search.findings import OWN_DEVIATION
from bstune.search.law import NO_VALUES
from bstune.search.posterior import Posterior

Array = NDArray[np.float64]

# A trial runs to so many times its expected steps, and is not resumed from there.
GIVE_UP = 1.6
# What a trial costs beside its steps, over the cheapest candidate's cost: few trials, not many.
SETUP = 0.2
# Octaves between the batch sizes at which the curve counts.
SPACING = 0.5


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
    law = posterior.law
    sizes = np.arange(law.low, law.high + SPACING, SPACING)
    curve = law.curve(posterior.theta, sizes)
    curve = curve - curve.mean(axis=0)
    covariance = shown.T @ curve / len(curve)
    noise = posterior.noise**2 + OWN_DEVIATION**2
    told = (covariance**2).mean(axis=1) / (shown.var(axis=0) + noise)
    told[ran >= np.exp(log_last)] = 0.0
    cost = cost_per_step * np.exp(log_expected)
    share_left = np.maximum(1.0 - ran / np.exp(log_expected), SETUP)
    chosen = int((told / (cost * share_left + SETUP * cost.min())).argmax())
    return chosen, float(np.exp(log_last[chosen]))
