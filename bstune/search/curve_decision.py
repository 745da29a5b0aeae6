"""The trial that tells most of B_crit for its cost, for the objective ``curve``."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bstune.core.curve import SLOPE_RATIO
from bstune.search.candidates import (
    LEAST_LEFT,
    MEMORY_ROOM,
    MOST_LOG_STEPS,
    Candidates,
    Pending,
    are_near,
    candidate_log_steps,
    expected_steps,
    log_over_sizes,
)
from bstune.search.frontier_findings import FRONTIER_SIZES_AN_OCTAVE, log_b_crit, noise_variance
from bstune.search.observations import Posterior
from bstune.search.posterior import log_steps, optimum

Array = NDArray[np.float64]

# What a trial costs beside its steps, over the cheapest one's cost: few trials rather than many.
SETUP = 0.2
# Octaves: a look lies so far within a regime, as its edge moves, or so near to the end of the
# range.
REGIME_EDGE = 0.25
# Runs of a study whose schedules end with the trial: one spends its budget to no end.
MISSES_EVERY = 30
# Of the budget, from which on a run has spent it.
WHOLE_BUDGET = 0.95
# Octaves, at least, between the batch sizes of trials that are named together.
APART = 1.0
# Octaves of batch size and of rate around a running trial, and what a candidate there still tells
# of B_crit.
ALIKE_FOR_CURVE = 0.5
LEFT_TO_TELL = 0.3
# Times the steps that are expected of a trial: where it ends.
GIVEN_UP_AT = 1.6
# In log S: what one more trial at a place still misses of the frontier there.
FRONTIER_MISFIT = 0.14


def choose_for_curve(
    posterior: Posterior,
    candidates: Candidates,
    pending: Pending,
    allowed: float,
    longest: Callable[[float], float] | None = None,
) -> tuple[int, float]:
    """Choose the candidate that tells most of B_crit for its cost; give its expected steps, too.

    A regime where nothing has reached the target comes first, where a look at it costs at most
    ``allowed``. ``longest`` is the longest horizon at a batch size, where schedules end with it:
    what is expected to take longer would spend all of it and miss the target, which is left to one
    run in ``MISSES_EVERY``.
    """
    steps = candidate_log_steps(posterior, candidates, posterior.theta)
    if longest is not None and not _one_more_may_miss(posterior, longest):
        over = np.median(steps, axis=0) - log_over_sizes(longest, candidates.x)
        within = np.flatnonzero(over <= 0.0)
        if not within.size:
            nearest = int(over.argmin())
            return nearest, float(expected_steps(steps)[nearest])
        chosen, expected = choose_for_curve(posterior, candidates.some(within), pending, allowed)
        return int(within[chosen]), expected
    b_crit = log_b_crit(posterior.theta, posterior.prior)
    look = unseen_regime(posterior, candidates, pending, steps, b_crit, allowed)
    return look or max_variance_reduction(posterior, candidates, pending, steps, b_crit)


def _one_more_may_miss(posterior: Posterior, longest: Callable[[float], float]) -> bool:
    """Say whether one more run may spend its whole budget where it is expected to miss the target."""
    missed = 0
    for trial in posterior.stopped:
        if trial.steps >= WHOLE_BUDGET * longest(2.0**trial.x):
            missed += 1
    return missed < len(posterior.observations) // MISSES_EVERY


def max_variance_reduction(
    posterior: Posterior, candidates: Candidates, pending: Pending, steps: Array, b_crit: Array
) -> tuple[int, float]:
    """Choose the candidate with the largest reduction of Var[log B_crit] per unit cost.

    Give its expected steps.

    ``steps`` is log S of n candidates in m draws, (m, n), and ``b_crit`` log B_crit in these, (m,).
    """
    joint = _jointly(posterior, steps, b_crit)
    gain = _variance_reduction(joint.log_steps, joint.log_b_crit, joint.noise)
    whole = joint.expected * posterior.tau(np.exp2(candidates.x))
    left = np.maximum(1.0 - candidates.done / joint.expected, LEAST_LEFT)
    to_go = whole * left + SETUP * whole.min()
    # A stopped trial past its expected steps shows that the model is wrong there: more steps of it
    # add nothing.
    gain[candidates.done >= GIVEN_UP_AT * joint.expected] = 0.0
    for x, z, _ in pending:
        gain[are_near(candidates.x, candidates.z, x, z, ALIKE_FOR_CURVE)] *= LEFT_TO_TELL
    chosen = int((gain / to_go).argmax())
    return chosen, float(joint.expected[chosen])


def unseen_regime(
    posterior: Posterior,
    candidates: Candidates,
    pending: Pending,
    steps: Array,
    b_crit: Array,
    allowed: float,
) -> tuple[int, float] | None:
    """Choose the cheapest candidate in a regime where nothing has reached the target.

    Give its expected steps, too.

    The law says what S is there; that it holds there is seen by looking. None where both ends are
    seen, or where looks there would come to cost more than ``allowed``. ``steps`` and ``b_crit`` as
    for :func:`max_variance_reduction`.
    """
    x = candidates.x
    middle = float(np.median(b_crit)) / math.log(2.0)
    bottom = posterior.prior.log_low
    top = min(posterior.prior.log_high, posterior.too_large - MEMORY_ROOM)
    low = middle - math.log2(SLOPE_RATIO)
    high = middle + math.log2(SLOPE_RATIO)
    looked = [trial.x for trial in posterior.reached]
    looked += [log_size for log_size, _, _ in pending]
    expected = expected_steps(steps)
    steps_to_go = np.maximum(expected - candidates.done, LEAST_LEFT * expected)
    to_go = steps_to_go * posterior.tau(np.exp2(x))
    to_go[candidates.done >= GIVEN_UP_AT * expected] = np.inf
    stopped_x = np.array([trial.x for trial in posterior.stopped])
    stopped_steps = np.array([trial.steps for trial in posterior.stopped])
    paid = stopped_steps * posterior.tau(np.exp2(stopped_x))
    # Of looks at a regime, those before that have not reached the target among them.
    cost = np.full(x.size, np.inf)
    if min(looked) > max(low, bottom + REGIME_EDGE):
        edge = max(low - REGIME_EDGE, bottom + REGIME_EDGE)
        cost[x <= edge] = to_go[x <= edge] + paid[stopped_x <= edge].sum()
    if max(looked) < min(high, top - REGIME_EDGE):
        edge = min(high + REGIME_EDGE, top - REGIME_EDGE)
        cost[x >= edge] = to_go[x >= edge] + paid[stopped_x >= edge].sum()
    chosen = int(cost.argmin())
    if cost[chosen] > allowed:
        return None
    return chosen, float(expected[chosen])


class Joint(NamedTuple):
    """Draws of the trials' log S and of log B_crit, side by side.

    Args:
        expected: steps of n trials.
        log_steps: log S of these in m draws, less its mean, (m, n).
        log_b_crit: log B_crit in these, less its mean, (m,).
        noise: variance of what a trial shows of log S around that.
    """

    expected: Array
    log_steps: Array
    log_b_crit: Array
    noise: float


def _jointly(posterior: Posterior, steps: Array, b_crit: Array) -> Joint:
    """Put log S of n trials, (m, n), and log B_crit, (m,), side by side."""
    # What lies beyond the end of a trial is not seen.
    middle = np.median(steps, axis=0)
    seen = np.minimum(steps, middle + math.log(GIVEN_UP_AT))
    return Joint(
        expected=np.exp(np.minimum(middle, MOST_LOG_STEPS)),
        log_steps=seen - seen.mean(axis=0),
        log_b_crit=b_crit - b_crit.mean(),
        noise=noise_variance(posterior) + FRONTIER_MISFIT**2,
    )


def _variance_reduction(centred: Array, b_crit: Array, noise: float) -> Array:
    """Give by how much one log S reduces Var[log B_crit], were they jointly normal: cov^2 / (var + noise), (n,)."""
    covariance = centred.T @ b_crit / len(b_crit)
    return np.asarray(covariance**2 / (centred.var(axis=0) + noise))


def most_telling(posterior: Posterior, count: int) -> list[tuple[float, float, float]]:
    """Give log2 B, log2 lr and expected steps of the trials that together tell most of B_crit for their cost."""
    prior = posterior.prior
    x = np.arange(prior.log_low, prior.log_high + 1e-9, 1.0 / FRONTIER_SIZES_AN_OCTAVE)
    x = x[np.round(np.exp2(x)) <= 2.0 ** (posterior.too_large - MEMORY_ROOM)]
    if x.size == 0:
        return []
    z = np.median(optimum(posterior.theta, prior.at(x), prior), axis=0)
    middle = np.full((x.size, prior.others), 0.5)
    steps = log_steps(posterior.theta, prior.at(x, z, middle), prior)
    joint = _jointly(posterior, steps, log_b_crit(posterior.theta, prior))
    centred = joint.log_steps
    b_crit = joint.log_b_crit
    cost = joint.expected * posterior.tau(np.exp2(x))
    chosen = list[int]()
    while len(chosen) < count:
        reduction = _variance_reduction(centred, b_crit, joint.noise)
        gain = reduction / (cost + SETUP * cost.min())
        gain[(np.abs(x[:, None] - x[chosen]) < APART).any(axis=1)] = 0.0
        best = int(gain.argmax())
        # There is no room for more.
        if gain[best] == 0.0:
            break
        chosen.append(best)
        # What the others still tell once this one has run, by regression on it.
        seen = centred[:, best] / (centred[:, best].var() + joint.noise)
        b_crit = b_crit - seen * float(centred[:, best] @ b_crit) / len(b_crit)
        centred = centred - np.outer(seen, centred[:, best] @ centred / len(b_crit))
    return [(float(x[i]), float(z[i]), float(joint.expected[i])) for i in sorted(chosen)]
