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
    Candidates,
    Pending,
    are_near,
    candidate_log_steps,
    cost_to_go,
    expected_steps,
    log_over_sizes,
)
from bstune.search.frontier_findings import FRONTIER_SIZES_PER_OCTAVE, log_b_crit
from bstune.search.frontier_law import log_steps, noise_variance, optimum
from bstune.search.posterior import Posterior

Array = NDArray[np.float64]

# What a trial costs beside its steps, over the cheapest one's cost: few trials rather than many.
SETUP = 0.2
# A look at a regime lies so many octaves beyond its edge, which moves, or at least so near to the
# end of the batch sizes.
REGIME_EDGE = 0.25
# Where schedules end with the trial, one run of so many may spend its budget and miss the target.
MISSES_EVERY = 30
# Share of its budget from which on a run counts as having spent it.
WHOLE_BUDGET = 0.95
# Least octaves between the batch sizes of trials that are named together.
APART = 1.0
# Within so many octaves of a running trial, in batch size and in rate, a candidate tells this share
# of what it else would of B_crit.
ALIKE_FOR_CURVE = 0.5
LEFT_TO_TELL = 0.3
# A trial ends at so many times its expected steps.
GIVEN_UP_AT = 1.6
# Deviation, in log S, by which one more trial at a place still misses the frontier there.
FRONTIER_MISFIT = 0.14


def choose_for_curve(
    posterior: Posterior,
    candidates: Candidates,
    pending: Pending,
    allowed: float,
    longest: Callable[[float], float] | None = None,
) -> tuple[int, float]:
    """Choose the candidate that tells most of B_crit for its cost.

    If nothing has reached the target yet at batch sizes far below B_crit, or far above it, a
    candidate there comes first, if it is cheap enough (:func:`unseen_regime`).

    Args:
        posterior: of the trials so far.
        candidates: to choose from.
        pending: the trials that run now.
        allowed: the most that trials in such a regime may cost, in units of the posterior's
            ``tau``, the cost of a step.
        longest: the longest horizon at a batch size, where schedules end with the trial. A
            candidate that is expected to take more steps would spend all of it and miss the target:
            only one run in ``MISSES_EVERY`` may.

    Returns:
        The candidate's place, and the steps to the target that are expected of it.
    """
    log_s = candidate_log_steps(posterior, candidates, posterior.theta)
    if longest is not None and not _one_more_may_miss(posterior, longest):
        log_over = np.median(log_s, axis=0) - log_over_sizes(longest, candidates.x)
        within = np.flatnonzero(log_over <= 0.0)
        # All are expected to miss the target: the one that misses by the fewest steps is next.
        if not within.size:
            nearest = int(log_over.argmin())
            return nearest, float(expected_steps(log_s)[nearest])
        chosen, expected = choose_for_curve(posterior, candidates.take(within), pending, allowed)
        return int(within[chosen]), expected
    log_b_crits = log_b_crit(posterior.theta, posterior.prior)
    unseen = unseen_regime(posterior, candidates, pending, log_s, log_b_crits, allowed)
    return unseen or max_variance_reduction(posterior, candidates, pending, log_s, log_b_crits)


def _one_more_may_miss(posterior: Posterior, longest: Callable[[float], float]) -> bool:
    """Whether the next run may be one that is expected to spend its budget and miss the target.

    One in ``MISSES_EVERY`` runs may. ``longest`` gives the steps of the budget at a batch size.
    """
    # Stopped trials have not met the target. Those that ran nearly all of their budget missed it.
    missed = 0
    for trial in posterior.stopped:
        if trial.steps >= WHOLE_BUDGET * longest(2.0**trial.x):
            missed += 1
    return missed < len(posterior.observations) // MISSES_EVERY


def max_variance_reduction(
    posterior: Posterior, candidates: Candidates, pending: Pending, log_s: Array, log_b_crits: Array
) -> tuple[int, float]:
    """Choose the candidate that reduces Var[log B_crit] most for its cost.

    Args:
        posterior: of the trials so far.
        candidates: to choose from.
        pending: the trials that run now.
        log_s: log of the steps to the target of the n candidates in m draws, (m, n).
        log_b_crits: log B_crit in these draws, (m,).

    Returns:
        The candidate's place, and the steps to the target that are expected of it.
    """
    joint = _joint_draws(posterior, log_s, log_b_crits)
    gain = _variance_reduction(joint.log_steps, joint.log_b_crit, joint.noise)
    whole_cost = joint.expected * posterior.tau(np.exp2(candidates.x))
    share_left = np.maximum(1.0 - candidates.done / joint.expected, LEAST_LEFT)
    # Beside its steps each trial costs a set-up, so that few trials are run rather than many.
    cost_left = whole_cost * share_left + SETUP * whole_cost.min()
    # A stopped trial past its expected steps shows that the model is wrong there: more steps of it
    # add nothing.
    gain[candidates.done >= GIVEN_UP_AT * joint.expected] = 0.0
    # A running trial will tell most of what one near it would.
    for log_size, log_rate, _ in pending:
        is_near = are_near(candidates.x, candidates.z, log_size, log_rate, ALIKE_FOR_CURVE)
        gain[is_near] *= LEFT_TO_TELL
    chosen = int((gain / cost_left).argmax())
    return chosen, float(joint.expected[chosen])


def _unseen_sizes(
    posterior: Posterior, pending: Pending, log2_b_crit: float
) -> tuple[float, float]:
    """Find the batch sizes of a trial in either regime where nothing has reached the target yet.

    Perfect scaling holds far below B_crit: a trial that shows it has at most the first batch size.
    Maximal data parallelism holds far above: such a trial has at least the second batch size. Both
    are log2, and -inf or inf for a regime where a trial has reached the target or runs now. The
    regimes begin a factor ``SLOPE_RATIO`` from B_crit; where that is beyond the search's batch
    sizes, their end stands for it. Somewhere, a trial has to have reached the target already.
    """
    # Batch sizes next to the smallest and to the largest one that the search may run.
    near_smallest = posterior.prior.log_low + REGIME_EDGE
    near_largest = min(posterior.prior.log_high, posterior.too_large - MEMORY_ROOM) - REGIME_EDGE
    log_lower_edge = log2_b_crit - math.log2(SLOPE_RATIO)
    log_upper_edge = log2_b_crit + math.log2(SLOPE_RATIO)
    seen_sizes = [trial.x for trial in posterior.reached]
    seen_sizes += [log_size for log_size, _, _ in pending]
    at_most = -math.inf
    at_least = math.inf
    # A regime's edge is uncertain: its trial is to lie a little beyond that, unless the search's
    # batch sizes end before.
    if min(seen_sizes) > max(log_lower_edge, near_smallest):
        at_most = max(log_lower_edge - REGIME_EDGE, near_smallest)
    if max(seen_sizes) < min(log_upper_edge, near_largest):
        at_least = min(log_upper_edge + REGIME_EDGE, near_largest)
    return at_most, at_least


def unseen_regime(
    posterior: Posterior,
    candidates: Candidates,
    pending: Pending,
    log_s: Array,
    log_b_crits: Array,
    allowed: float,
) -> tuple[int, float] | None:
    """Choose the cheapest candidate in a regime where nothing has reached the target.

    The regimes are perfect scaling below B_crit/9 and maximal data parallelism above 9 B_crit. The
    law predicts S there, but only a trial can show whether that is right.

    Args:
        posterior: of the trials so far.
        candidates: to choose from.
        pending: the trials that run now: a regime that one of them is in counts as seen.
        log_s: log S, the steps to the target, of the n candidates in m draws, (m, n).
        log_b_crits: log B_crit in these draws, (m,).
        allowed: the most that all trials in the regime may cost, earlier ones included, in units of
            the posterior's ``tau``.

    Returns:
        The candidate's place, and the steps to the target that are expected of it. None where both
        regimes have been seen, or a trial there costs too much.
    """
    x = candidates.x
    log2_b_crit = float(np.median(log_b_crits)) / math.log(2.0)
    at_most, at_least = _unseen_sizes(posterior, pending, log2_b_crit)
    expected = expected_steps(log_s)
    to_go = cost_to_go(posterior, candidates, expected)
    # A trial that has run so far past its expected steps was given up, and is not continued.
    to_go[candidates.done >= GIVEN_UP_AT * expected] = np.inf
    stopped_x = np.array([trial.x for trial in posterior.stopped])
    stopped_steps = np.array([trial.steps for trial in posterior.stopped])
    paid = stopped_steps * posterior.tau(np.exp2(stopped_x))
    # The cost of a regime, if the candidate is run: trials that were stopped there count, too.
    # Candidates elsewhere have an infinite cost.
    cost = np.full(x.size, np.inf)
    cost[x <= at_most] = to_go[x <= at_most] + paid[stopped_x <= at_most].sum()
    cost[x >= at_least] = to_go[x >= at_least] + paid[stopped_x >= at_least].sum()
    chosen = int(cost.argmin())
    if cost[chosen] > allowed:
        return None
    return chosen, float(expected[chosen])


class Joint(NamedTuple):
    """Draws of n trials' log S and of log B_crit, side by side: how one tells of the other.

    Args:
        expected: the steps expected of each trial, the median of S over the draws, (n,).
        log_steps: log S of the trials in m draws, less its mean, (m, n).
        log_b_crit: log B_crit in these draws, less its mean, (m,).
        noise: variance with which a trial shows its log S.
    """

    expected: Array
    log_steps: Array
    log_b_crit: Array
    noise: float


def _joint_draws(posterior: Posterior, log_s: Array, log_b_crits: Array) -> Joint:
    """Centre the draws of n trials' log S and of log B_crit, for their covariance.

    With them go the steps expected of each trial, and the variance with which a trial that is run
    shows its log S.

    Args:
        posterior: the one that was drawn from.
        log_s: log S, the steps to the target, of the n trials in m draws, (m, n).
        log_b_crits: log B_crit in these draws, (m,).
    """
    # A trial is ended at ``GIVEN_UP_AT`` times its expected steps. It cannot tell apart draws with
    # a larger S, so that S is set to these steps in all of them.
    log_middle = np.median(log_s, axis=0)
    log_shown = np.minimum(log_s, log_middle + math.log(GIVEN_UP_AT))
    return Joint(
        expected=expected_steps(log_s),
        log_steps=log_shown - log_shown.mean(axis=0),
        log_b_crit=log_b_crits - log_b_crits.mean(),
        # A trial's log S differs from the law by the noise from seed to seed, and by what the law
        # misses at one place.
        noise=noise_variance(posterior.theta) + FRONTIER_MISFIT**2,
    )


def _variance_reduction(centred: Array, log_b_crits: Array, noise: float) -> Array:
    """Compute by how much each of n trials would reduce Var[log B_crit]: (n,).

    It is cov^2 / (var + noise), which holds where log S and log B_crit are jointly normal.

    Args:
        centred: log S of the trials in m draws, less its mean, (m, n).
        log_b_crits: log B_crit in these draws, less its mean, (m,).
        noise: variance with which a trial shows its log S.
    """
    covariance = centred.T @ log_b_crits / len(log_b_crits)
    return np.asarray(covariance**2 / (centred.var(axis=0) + noise))


def _unknown_after(
    trial: int, centred: Array, log_b_crits: Array, noise: float
) -> tuple[Array, Array]:
    """Find what is unknown of log S and log B_crit after one trial has run, by regression on it.

    Takes and gives draws as of :func:`_variance_reduction`; ``trial`` is a column of ``centred``.
    """
    count = len(log_b_crits)
    # Times this, the covariance of a quantity with the trial's log S is the part of the quantity
    # that the trial tells.
    scaled_log_s = centred[:, trial] / (centred[:, trial].var() + noise)
    log_s_left = centred - np.outer(scaled_log_s, centred[:, trial] @ centred / count)
    log_b_crits_left = log_b_crits - scaled_log_s * float(centred[:, trial] @ log_b_crits) / count
    return log_s_left, log_b_crits_left


def most_telling(posterior: Posterior, count: int) -> list[tuple[float, float, float]]:
    """Choose at most ``count`` trials that together tell most of B_crit for their cost.

    They are at least an octave apart, at the best learning rate of their batch size.

    Returns:
        log2 B, log2 lr and the expected steps of each trial, in order of the batch size.
    """
    prior = posterior.prior
    x = np.arange(prior.log_low, prior.log_high + 1e-9, 1.0 / FRONTIER_SIZES_PER_OCTAVE)
    # Without those that ran out of memory, or nearly would.
    x = x[np.round(np.exp2(x)) <= 2.0 ** (posterior.too_large - MEMORY_ROOM)]
    if x.size == 0:
        return []
    z = np.median(optimum(posterior.theta, prior.points_at(x), prior), axis=0)
    log_s = log_steps(posterior.theta, prior.points_at(x, z), prior)
    joint = _joint_draws(posterior, log_s, log_b_crit(posterior.theta, prior))
    centred = joint.log_steps
    log_b_crits = joint.log_b_crit
    cost = joint.expected * posterior.tau(np.exp2(x))
    chosen = list[int]()
    while len(chosen) < count:
        reduction = _variance_reduction(centred, log_b_crits, joint.noise)
        # Beside its steps each trial costs a set-up, so that few trials are named, not many.
        gain = reduction / (cost + SETUP * cost.min())
        # Sizes too near one that is chosen already are out.
        gain[(np.abs(x[:, None] - x[chosen]) < APART).any(axis=1)] = 0.0
        best = int(gain.argmax())
        # No batch size is left that is far enough from those that are chosen.
        if gain[best] == 0.0:
            break
        chosen.append(best)
        centred, log_b_crits = _unknown_after(best, centred, log_b_crits, joint.noise)
    return [(float(x[i]), float(z[i]), float(joint.expected[i])) for i in sorted(chosen)]
