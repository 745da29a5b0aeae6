"""The curve S*(B) as the trials tell it, its B_crit, and the trial that would tell most of it.

A draw of the frontier is the model's, at the model's best learning rates, plus a draw of the residual: it follows the
trials where there are some near the best learning rate, and the model where there are none. Its B_crit is that of
S_min (1 + B_crit/B) fitted to it by least squares in log S, even in log B: the number that a dense sweep over batch
sizes would end with, whether or not the frontier has just that shape. The model's own parameter leans on the batch
sizes that happened to be tried most; where the shape is wrong it is off by more than its interval.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bstune.curve import CurveBand
from bstune.search.known import Known
from bstune.search.posterior import B_CRIT, NOISE, frontier, log_steps, optimum
from bstune.search.residual import Residuals, draw_process, draw_residual

Array = NDArray[np.float64]

PER_OCTAVE = 2  # batch sizes at which a frontier is drawn
NEAR = 0.7  # in log S: trials with more than this penalty say little of the frontier
STRANGE = 1.0  # in log S: a trial further off its draw is taken for an outlier
REACH = math.log(100.0)  # B_crit is sought within this factor of the batch sizes
FITTED = 400  # values of B_crit that are tried
DECISION_DRAWS = 64
SETUP = 0.2  # what a trial costs beside its steps, over the cheapest one's cost: few trials rather than many
GIVEN_UP_AT = 1.6  # times the steps that are expected of a trial: where it ends
MISFIT = 0.14  # in log S: what one more trial at a place still misses of the frontier there


@dataclass(frozen=True)
class Frontiers:
    """Draws of the frontier.

    Args:
        theta: the model's parameters, shape (m, p).
        x: log2 batch sizes, shape (g,).
        residual: of log S*, shape (m, g).
        log_b_crit: log of B_crit of each draw, in examples, shape (m,).
        log_steps: log S* of each draw at ``x``, shape (m, g).
    """

    theta: Array
    x: Array
    residual: Array
    log_b_crit: Array
    log_steps: Array


def draw_frontiers(known: Known, count: int, rng: np.random.Generator) -> Frontiers:
    """Return draws of the frontier, one for each of ``count`` draws of the posterior (all, if there are fewer)."""
    prior, seen = known.prior, known.observations
    theta = known.theta[rng.permutation(len(known.theta))[:count]]
    high = max(prior.log_low, min(prior.log_high, known.too_large))
    x = np.linspace(prior.log_low, high, 1 + round(PER_OCTAVE * (high - prior.log_low)))
    log_front = frontier(theta, x, prior)
    best = optimum(theta, x, prior)
    fitted = log_steps(theta, seen.x, seen.z, seen.other, prior)
    gap = seen.y - fitted
    off = fitted - frontier(theta, seen.x, prior)
    told = ~seen.diverged & ~seen.bound & (off < NEAR) & (np.abs(gap) < STRANGE)
    at = np.column_stack([seen.x, seen.z])
    residual = np.empty_like(log_front)
    for i, row in enumerate(theta):
        use = told[i]
        variance = seen.spread[use] ** 2 + math.exp(2.0 * row[NOISE])
        process = draw_process(Residuals(at[use], gap[i, use], variance), rng)
        residual[i] = draw_residual(process, np.column_stack([x, best[i]]), rng)
    # Over less than an octave there is no curve to fit: the model's own B_crit stands.
    own = prior.log_mid * math.log(2.0) + theta[:, B_CRIT]
    drawn = log_front + residual
    log_b_crit = _fit(x, drawn) if x.size > PER_OCTAVE else own
    return Frontiers(theta, x, residual, log_b_crit, drawn)


def _fit(x: Array, log_front: Array) -> Array:
    """Return log B_crit of S_min (1 + B_crit/B) fitted to each frontier (m, g) by least squares, shape (m,)."""
    log_batch = x * math.log(2.0)
    tried = np.linspace(log_batch[0] - REACH, log_batch[-1] + REACH, FITTED)
    shape = np.logaddexp(0.0, tried[:, None] - log_batch)
    shape -= shape.mean(axis=1, keepdims=True)
    centred = log_front - log_front.mean(axis=1, keepdims=True)
    # The square of the difference, but for what all values of B_crit share.
    error = (shape**2).sum(axis=1) - 2.0 * centred @ shape.T
    return np.asarray(tried[error.argmin(axis=1)])


def most_learned(
    known: Known,
    x: Array,
    z: Array,
    other: Array,
    done: Array,
    pending: Sequence[tuple[float, float, int | None]],
    rng: np.random.Generator,
) -> tuple[int, float]:
    """Return the choice that tells most of log B_crit for its cost, and the steps that it is expected to take.

    Told is the fall of the variance of log B_crit by one observation of log S there, as if all were jointly normal:
    cov(log S, log B_crit)^2 / (var log S + noise^2).

    Args:
        known: what the trials tell.
        x: log2 of the batch sizes to choose from, shape (n,).
        z: log2 of their learning rates, shape (n,).
        other: their other hyper-parameters, shape (n, k).
        done: steps that are already paid, shape (n,).
        pending: log2 batch size, log2 learning rate and parent of the trials that run now.
        rng: the source of chance.
    """
    drawn = draw_frontiers(known, DECISION_DRAWS, rng)
    nearest = np.abs(x[:, None] - drawn.x).argmin(axis=1)
    steps = log_steps(drawn.theta, x, z, other, known.prior) + drawn.residual[:, nearest]
    noise = float(np.mean(np.exp(2.0 * drawn.theta[:, NOISE]))) + MISFIT**2
    centred = steps - steps.mean(axis=0)
    b_crit = drawn.log_b_crit - drawn.log_b_crit.mean()
    gain = (centred.T @ b_crit / len(b_crit)) ** 2 / (centred.var(axis=0) + noise)
    expected = np.exp(np.minimum(np.median(steps, axis=0), 50.0))
    whole = expected * known.tau(np.exp2(x))
    to_go = whole * np.maximum(1.0 - done / expected, 0.1) + SETUP * whole.min()
    # A stopped trial that is past what is expected of it says that the model is wrong there: more of it tells nothing.
    gain[done >= GIVEN_UP_AT * expected] = 0.0
    for log_size, log_rate, _ in pending:
        gain[(np.abs(x - log_size) < 0.5) & (np.abs(z - log_rate) < 0.5)] *= 0.3
    chosen = int((gain / to_go).argmax())
    return chosen, float(expected[chosen])


def b_crit_quantiles(known: Known, shares: Collection[float], rng: np.random.Generator) -> Array:
    """Return quantiles of B_crit over draws of the frontier, in examples."""
    drawn = draw_frontiers(known, len(known.theta), rng)
    return np.asarray(np.exp(np.quantile(drawn.log_b_crit, list(shares))))


def steps_band(
    known: Known, batch_sizes: Sequence[int], interval: tuple[float, float], rng: np.random.Generator
) -> CurveBand:
    """Return S*(B) of the drawn frontiers; beyond the largest batch size, each goes on as 1 + B_crit/B with its B_crit.

    Args:
        known: what the trials tell.
        batch_sizes: where, in examples; below the smallest batch size of the study, its own steps are returned.
        interval: the quantiles of its ends; the steps are the median.
        rng: the source of chance.
    """
    drawn = draw_frontiers(known, len(known.theta), rng)
    sizes = np.array(batch_sizes, dtype=np.float64)
    within = np.array([np.interp(np.log2(sizes), drawn.x, row) for row in drawn.log_steps])
    last = drawn.x[-1] * math.log(2.0)
    scale = drawn.log_b_crit[:, None]
    beyond = np.logaddexp(0.0, scale - np.maximum(np.log(sizes), last)) - np.logaddexp(0.0, scale - last)
    low, middle, high = np.exp(np.quantile(within + beyond, (interval[0], 0.5, interval[1]), axis=0))
    return CurveBand(sizes, middle, low, high)


def best_learning_rate(known: Known, batch_size: float) -> float:
    """Return the posterior's median of the best learning rate at a batch size, other hyper-parameters in the middle."""
    return float(np.median(np.exp2(optimum(known.theta, np.array([math.log2(batch_size)]), known.prior))))
