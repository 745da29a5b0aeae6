"""The posterior of the law, by a tempered Monte Carlo sampler over all trials.

Draws of the prior are led to the posterior through likelihoods to rising powers. At each power they
are resampled, and moved by Metropolis steps of two kinds: towards a normal distribution fitted to
all draws, and along the difference of two of them (ter Braak 2006, differential evolution).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from bstune.core.question import Question
from bstune.core.records import Record, Records, Spec, Target, last_of_chains
from bstune.core.space import Space
from bstune.search.histories import LEAST_LEFT, excess_scale, extrapolate, log_curve
from bstune.search.law import NO_VALUES, NOISE, Law, make_law
from bstune.search.metric import behind_best, law_of_metric
from bstune.search.schedule_length import Ends, ends_of, read_ends

Array = NDArray[np.float64]

# How a row tells of log S.
VALUE = 0
BOUND = 1
DIVERGED = 2

# Standard deviation of a bound's log steps: a step more or less decides nothing.
BOUND_DEVIATION = 0.1
# An extrapolation whose deviation is over this share of its log factor, and which more than
# e-folds the steps, is a bound one deviation below.
WIDE_SHARE = 0.5
FAR = 1.0
MOST_BOUND_DEVIATION = 0.5
# A value is an outlier with this probability, and scatters by so much more then.
OUTLIER_SHARE = 0.04
OUTLIER_DEVIATION = 0.8
# A bound, or a divergence, is wrong with about this probability.
WRONG_SHARE = 0.01
# A trial diverges where rates above the best cost about so much log steps, and its deviation.
DIVERGES_AT = 1.5
DIVERGES_DEVIATION = 0.4

# Tempering: least effective sample size after an increment of the power, as a share of the draws,
# and the bisections that find it.
LEAST_EFFECTIVE = 0.5
BISECTIONS = 25
# The largest step of differential evolution, times 1/sqrt(parameters) (ter Braak 2006).
JUMP = 2.38 / math.sqrt(2.0)
# Its shortest step over that, and the standard deviation of what is added, over the prior's: draws
# do not stay on the lines between each other.
SHORTEST = 0.3
JITTER = 1e-3
# How much of a draw's place a move towards the normal distribution keeps.
KEPT = (0.3, 0.7, 0.95)
# What is added to the fitted variances, over the prior's: draws that agree have a covariance too.
LEAST_VARIANCE = 1e-6


class Rows(NamedTuple):
    """What trials tell of the steps to the target, one row each."""

    x: Array
    """log2 of the batch size."""
    z: Array
    """log2 of the learning rate."""
    log_steps: Array
    deviation: Array
    """Of ``log_steps``, without the noise from seed to seed."""
    kind: NDArray[np.int64]
    """VALUE, BOUND (at least ``log_steps``) or DIVERGED (``log_steps`` tells nothing)."""
    excess: Array = np.zeros(1)
    early: Array = np.zeros(1)
    """How schedules that end with their trials ended, as :class:`Ends` has it; ``log_steps`` is
    then of the trial's end."""
    u: Array = NO_VALUES
    """Coordinates of the further values, (n, values)."""

    def seen(self, law: Law, theta: Array) -> tuple[Array, Array, Array]:
        """log S as the trials tell it, its variance without the noise, and a log weight.

        Each is (n,), or (m, n) where m draws have their own law of schedules that end.
        """
        variance = self.deviation**2
        if not law.schedule_ends:
            return self.log_steps, variance, np.zeros(1)
        reading = read_ends(theta, Ends(self.excess, self.early))
        log_steps = self.log_steps + reading.log_over
        return log_steps, variance + reading.variance, reading.log_slope


@dataclass(frozen=True)
class Posterior:
    """Draws of the law's parameters, given trials."""

    law: Law
    theta: Array
    """(draws, parameters)."""
    rows: Rows
    chains: tuple[Record, ...]
    """The last record of each chain that tells something, in the order of ``rows``; running trials
    have rows behind theirs."""

    @property
    def noise(self) -> float:
        """Standard deviation of log steps from seed to seed."""
        return math.sqrt(float(np.exp(2.0 * self.theta[:, NOISE]).mean()))

    def log_steps_of_rows(self) -> Array:
        """log S of the draws at each row, (draws, n)."""
        return self.law.log_steps(self.theta, self.rows.x, self.rows.z, self.rows.u)


def sample_posterior(
    question: Question,
    space: Space,
    records: Records,
    *,
    seed: int,
    running: Sequence[Spec] = (),
    misfit: bool = False,
    draws: int = 192,
    moves: int = 3,
) -> Posterior:
    """Sample the posterior; the same arguments give the same draws.

    Failed, refused and out-of-memory trials tell nothing. Without any other the draws are the
    prior's.

    Args:
        question: whose target and budget the trials have.
        space: batch sizes, the rule and the further values.
        records: of all finished trials, new seeds included.
        seed: of the study.
        running: trials that count as done at the steps that the others predict.
        misfit: whether the curve may leave the law: for what is said of B_crit, and for ``curve``;
            for ``metric`` it always may.
        draws: how many.
        moves: Metropolis steps at each power, twice as many at the last.
    """
    chains = tuple(
        last_of_chains([record for record in records if _tells_something(record, question)])
    )
    budget = question.last_step(2.0**space.middle)
    if question.seeks_metric:
        law = law_of_metric(make_law(space, budget, misfit=True))
        rows = rows_of_metric(chains, question)
    else:
        law = make_law(space, budget, misfit, question.schedule_ends)
        rows = rows_of(chains, question.target, question.schedule_ends)
    rows = rows._replace(u=places_of(space, chains)[2])
    rng = np.random.default_rng([seed, len(records), len(running)])
    theta = sample(law, rows, rng, draws, moves)
    if running:
        rows = _with_predictions(rows, law, theta, places_of(space, running))
        theta = sample(law, rows, rng, draws, moves)
    return Posterior(law, theta, rows, chains)


def places_of(space: Space, specs: Sequence[Spec]) -> tuple[Array, Array, Array]:
    """log2 of n batch sizes and rates, (n,), and coordinates of further values, (n, values)."""
    x = np.log2([spec.batch_size for spec in specs])
    z = np.log2([spec.lr for spec in specs])
    u = np.array([space.places(spec.values) for spec in specs], dtype=float)
    return x, z, u.reshape(len(specs), len(space.tunables))


def _tells_something(record: Record, question: Question) -> bool:
    """Whether a record says anything of S."""
    if record.status == "diverged":
        return True
    # What a run would have come to at its schedule's end does not show before.
    if record.status == "pruned" and question.schedule_ends:
        return False
    return record.has_trained and record.steps > 0


def rows_of(chains: Records, target: Target, schedule_ends: bool = False) -> Rows:
    """One row a chain, in their order.

    A trial that reached the target gives a value, in the middle of the interval that its
    evaluations leave; one that diverged says that its rate was too high; one that missed gives a
    bound; and one that was pruned a bound or an extrapolated value. Where schedules end with their
    trials, how far from the target they ended is told as well.
    """
    scale = excess_scale(target, chains)
    reached = [log_curve(chain, target, scale) for chain in chains if chain.reached]
    table = []
    for chain in chains:
        row = (0.0, 1.0, DIVERGED)
        if chain.reached:
            row = (math.log(chain.steps_to_target), chain.steps_error, VALUE)
        elif chain.status == "missed":
            row = (math.log(chain.steps), BOUND_DEVIATION, BOUND)
        elif chain.status == "pruned":
            row = _pruned_row(chain, log_curve(chain, target, scale), reached)
        table.append((math.log2(chain.batch_size), math.log2(chain.lr), *row))
    rows = _rows_of_table(table)
    if not schedule_ends:
        return rows
    at_ends = ends_of(chains, target, scale)
    # The metric at a schedule's end tells how far S is from its length, also of a miss.
    has_ended = at_ends.excess != 0.0
    rows.kind[has_ended] = VALUE
    rows.kind[at_ends.is_at_start] = BOUND
    rows.deviation[has_ended] = 0.0
    rows.log_steps[has_ended] = np.log([max(chain.steps, 1) for chain in chains])[has_ended]
    return rows._replace(excess=at_ends.excess, early=at_ends.early)


def rows_of_metric(chains: Records, question: Question) -> Rows:
    """One row a chain: the steps, or the least, that it takes to the best run's final metric.

    Args:
        chains: the last records of all runs.
        question: of the metric, with its budget.
    """
    table = []
    for chain, behind in zip(chains, behind_best(chains, question), strict=True):
        row = (0.0, 1.0, DIVERGED)
        if chain.status != "diverged":
            row = (math.log(chain.steps), BOUND_DEVIATION, BOUND)
            if behind is not None:
                log_budget = math.log(question.last_step(chain.batch_size))
                row = (log_budget + behind.log_factor, behind.deviation, VALUE)
        table.append((math.log2(chain.batch_size), math.log2(chain.lr), *row))
    return _rows_of_table(table)


def _rows_of_table(table: Sequence[tuple[float, float, float, float, int]]) -> Rows:
    """Rows of (x, z, log_steps, deviation, kind); the other fields are zeros."""
    x, z, log_steps, deviation, kind = np.array(table, dtype=float).reshape(-1, 5).T
    nothing = np.zeros(len(table))
    return Rows(x, z, log_steps, deviation, kind.astype(int), nothing, nothing)


def _pruned_row(chain: Record, curve: Array, reached: Sequence[Array]) -> tuple[float, float, int]:
    """log_steps, deviation and kind of a pruned chain; arguments as of :func:`extrapolate`."""
    log_ran = math.log(chain.steps)
    extrapolation = extrapolate(curve, reached)
    if extrapolation is None:
        return log_ran, BOUND_DEVIATION, BOUND
    log_factor = max(extrapolation.log_steps - log_ran, LEAST_LEFT)
    deviation = extrapolation.deviation
    if log_factor > FAR and deviation > WIDE_SHARE * log_factor:
        least = max(log_factor - deviation, 0.0)
        return log_ran + least, min(deviation, MOST_BOUND_DEVIATION), BOUND
    return log_ran + log_factor, deviation, VALUE


def _with_predictions(
    rows: Rows, law: Law, theta: Array, places: tuple[Array, Array, Array]
) -> Rows:
    """The rows and one more for each running trial: a value, at the mean of the draws."""
    x, z, u = places
    log_steps = law.log_steps(theta, x, z, u).mean(axis=0)
    predicted = _rows_of_table([(*one, 0.0, VALUE) for one in zip(x, z, log_steps, strict=True)])
    pairs = zip(rows, predicted._replace(u=u), strict=True)
    return Rows(*(np.concatenate(pair) for pair in pairs))


def log_likelihood(law: Law, theta: Array, rows: Rows) -> Array:
    """Log likelihood of m draws, (m,): normal values with outliers, and Tobit bounds."""
    cost, moved = law.effect_of_values(theta, rows.u)
    z = rows.z - moved
    above = law.penalty_above(theta, rows.x, z)
    expected = law.curve(theta, rows.x) + law.penalty_below(theta, rows.x, z) + above + cost
    log_steps, variance, log_weight = rows.seen(law, theta)
    variance = np.exp(2.0 * theta[:, NOISE, None]) + variance
    off = log_steps - expected
    wide = variance + OUTLIER_DEVIATION**2
    usual = (1.0 - OUTLIER_SHARE) * np.exp(-0.5 * off**2 / variance) / np.sqrt(variance)
    outlier = OUTLIER_SHARE * np.exp(-0.5 * off**2 / wide) / np.sqrt(wide)
    # 1e-30 keeps the log finite where both have underflowed.
    value = np.log(usual + outlier + 1e-30) + log_weight
    bound = np.log(ndtr(-off / np.sqrt(variance)) + WRONG_SHARE)
    diverged = np.log(ndtr((above - DIVERGES_AT) / DIVERGES_DEVIATION) + WRONG_SHARE)
    total: Array = np.choose(rows.kind, [value, bound, diverged]).sum(axis=1)
    return total


def sample(law: Law, rows: Rows, rng: np.random.Generator, draws: int, moves: int) -> Array:
    """Draws of the parameters given rows, (draws, parameters)."""
    theta = law.sample_prior(draws, rng)
    if not rows.x.size:
        return theta
    likelihood = log_likelihood(law, theta, rows)
    prior = law.log_prior(theta)
    power = 0.0
    while power < 1.0:
        increment = _next_increment(likelihood, 1.0 - power)
        power = min(power + increment, 1.0)
        picked = _resample(np.exp(increment * (likelihood - likelihood.max())), rng)
        theta, likelihood, prior = theta[picked], likelihood[picked], prior[picked]
        for move in range(2 * moves if power == 1.0 else moves):
            propose = _jump if move % 2 else _towards_normal
            proposed, correction = propose(law, theta, rng)
            new_likelihood = log_likelihood(law, proposed, rows)
            new_prior = law.log_prior(proposed)
            log_ratio = power * (new_likelihood - likelihood) + new_prior - prior + correction
            moved = np.log(rng.random(draws)) < log_ratio
            theta[moved] = proposed[moved]
            likelihood[moved] = new_likelihood[moved]
            prior[moved] = new_prior[moved]
    return theta


def _next_increment(likelihood: Array, most: float) -> float:
    """The largest increment of the power that keeps the effective sample size, by bisection."""

    def is_effective(increment: float) -> bool:
        """Whether enough draws still count."""
        weights = np.exp(increment * (likelihood - likelihood.max()))
        effective = weights.sum() ** 2 / (weights @ weights)
        return bool(effective >= LEAST_EFFECTIVE * len(likelihood))

    if is_effective(most):
        return most
    low = 0.0
    high = most
    for _ in range(BISECTIONS):
        middle = 0.5 * (low + high)
        if is_effective(middle):
            low = middle
        else:
            high = middle
    return max(low, 1e-9)


def _resample(weights: Array, rng: np.random.Generator) -> NDArray[np.int64]:
    """Places of draws in proportion to their weights, by systematic resampling."""
    count = len(weights)
    shares = (rng.random() + np.arange(count)) / count
    places = np.searchsorted(np.cumsum(weights / weights.sum()), shares)
    return np.minimum(places, count - 1)


def _jump(law: Law, theta: Array, rng: np.random.Generator) -> tuple[Array, Array]:
    """Move along the difference of two other draws; a symmetric proposal."""
    count, parameters = theta.shape
    lengths = JUMP / math.sqrt(parameters) * rng.uniform(SHORTEST, 1.0, (count, 1))
    difference = theta[rng.permutation(count)] - theta[rng.permutation(count)]
    jitter = JITTER * law.spread * rng.standard_normal(theta.shape)
    return theta + lengths * difference + jitter, np.zeros(count)


def _towards_normal(law: Law, theta: Array, rng: np.random.Generator) -> tuple[Array, Array]:
    """Move within the normal distribution fitted to the draws, and the log ratio that corrects it.

    It is a Crank-Nicolson proposal, which leaves that distribution as it is.
    """
    mean = theta.mean(axis=0)
    covariance = np.cov(theta.T) + LEAST_VARIANCE * np.diag(law.spread**2)
    root = np.linalg.cholesky(covariance)
    kept = rng.choice(KEPT, (len(theta), 1))
    old = np.linalg.solve(root, (theta - mean).T).T
    new = kept * old + np.sqrt(1.0 - kept**2) * rng.standard_normal(theta.shape)
    correction = 0.5 * ((new**2).sum(axis=1) - (old**2).sum(axis=1))
    return mean + new @ root.T, correction
