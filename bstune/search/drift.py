"""How far ``behind`` a trial will be at its budget's end, from how far it is now.

Before the end ``behind`` moves: large batches begin slowly, and high rates flatten out soon. How
far it moves on average, by where a trial lies, is learned from full trials (:class:`Drift`); around
that it wanders (:func:`stopped_spread`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bstune.search.acquisition import Policy
from bstune.search.budget_runs import BudgetRun
from bstune.search.ruler import Array, Ruler

# Prior mean and standard deviation of the drift's two coefficients: how ``behind`` moves, over
# log(budget/steps), for each octave that the batch size, and the rate, lie above the ruler's.
# Recorded runs of the five tables have -0.02 to -0.2 per octave of batch size, and -0.07 to 0.2 of
# rate; with them 2.0 as for bstune.search.fixed_budget's PLACE_MISFIT, 2.4 without.
SIZE_DRIFT = (-0.07, 0.07)
RATE_DRIFT = (0.0, 0.05)
# Error with which a full trial shows that, as a share of how far behind it is.
DRIFT_MISREAD = 0.3


@dataclass(frozen=True)
class Drift:
    """How far a trial's lag on the best one, ``behind``, moves on until its budget's end.

    Larger batches and lower rates begin slowly and flatten out late. For each octave by which a
    trial's batch size, and its rate, lie above the ruler's, ``behind`` moves by a coefficient times
    log(1/s) from the share s on. The coefficients are normal; full trials show them.
    """

    x: float
    """Log2 of the batch size of the ruler, the best full trial."""
    z: float
    """Log2 of its rate."""
    mean: Array
    """Mean of the two coefficients, (2,)."""
    covariance: Array
    """Their covariance, (2, 2)."""

    def until_the_end(self, run: BudgetRun, log_left: float) -> tuple[float, float]:
        """Predict how far ``behind`` of a run moves until its budget's end: mean and variance.

        ``log_left`` is log(1/s), with s the share of the budget that it has run.
        """
        # The coefficients are for each octave above the ruler's batch size and rate.
        offset = log_left * np.array([run.x - self.x, run.z - self.z])
        return float(offset @ self.mean), float(offset @ self.covariance @ offset)


def stopped_spread(log_left: float, policy: Policy) -> float:
    """Compute the deviation of ``behind`` at the budget's end, for a trial that stopped before it.

    ``behind`` is by how many log steps a trial has its metric later than the best full trial, the
    ruler, had it. On the way to the end it wanders like a random walk over log steps, of which
    ``log_left`` = log(1/s) is left, with s the share of the budget that the trial has run.
    """
    return math.hypot(policy.loss_spread, policy.loss_drift * math.sqrt(log_left))


def fit_drift(full: Sequence[BudgetRun], ruler: Ruler, policy: Policy) -> Drift:
    """Fit the drift's coefficients by linear regression to full trials, the best one first.

    A trial is ``behind`` by the log steps that it lags the best one, the ruler. The drift is how
    far that number moves until the budget's end. Each other full trial shows it, from the first
    share of its budget, at which new trials stop, to the end.
    """
    best = full[0]
    # The regression's normal equations: a precision, and that times the coefficients. They begin
    # with those of the prior, and each trial adds to both.
    size_mean, size_deviation = SIZE_DRIFT
    rate_mean, rate_deviation = RATE_DRIFT
    precision = np.diag([size_deviation**-2.0, rate_deviation**-2.0])
    precision_times_mean = precision @ np.array([size_mean, rate_mean])
    for run in full[1:]:
        curve = run.curve
        if curve is None or run.behind is None:
            continue
        # An evaluation at this very share counts, in spite of rounding.
        seen = curve.log_shares <= math.log(policy.loss_first_share) + 1e-9
        if not seen.any():
            continue
        log_left = -float(curve.log_shares[seen][-1])
        # Its own log share there, less that at which the ruler had the same metric.
        behind_then = -log_left - float(ruler.log_share(curve.heights[seen][-1:])[0])
        # The coefficients are for each octave above the ruler's batch size and rate, and each unit
        # of log share that is left.
        offset = log_left * np.array([run.x - best.x, run.z - best.z])
        # Far behind the ruler, only the order of magnitude of ``behind`` can be read.
        reading_error = DRIFT_MISREAD * max(behind_then, run.behind, 0.0)
        variance = stopped_spread(log_left, policy) ** 2 + reading_error**2
        precision = precision + np.outer(offset, offset) / variance
        precision_times_mean += offset * (run.behind - behind_then) / variance
    covariance = np.linalg.inv(precision)
    mean = covariance @ precision_times_mean
    return Drift(x=best.x, z=best.z, mean=mean, covariance=covariance)
