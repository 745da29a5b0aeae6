"""A posterior over the frontier's own shape: steps to target over (batch size, learning rate) from a few trials.

The model of log S is

    log S(B, lr) = level + log((1 + B_crit/B) / (1 + B_crit/B_mid)) + penalty(d) + residual,  d = log2 lr - optimum(B),

- the frontier S*(B) = S_min (1 + B_crit/B) (McCandlish et al. 2018, arXiv 1812.06162, eq. 2.11), B_mid the geometric
  middle of the batch sizes;
- optimum(B), log2 of the best learning rate: the scaling rule plus a shift at B_mid and a deviation of the exponent,
  with a bend at B_crit, above which the exponent may differ (the rule is the prior mean, never the model);
- the cost of being off the optimum, ours: below, where S grows as lr falls (at most as 1/lr, log 2 an octave),
  a hyperbola of slope ``low_slope`` an octave; above, a parabola, whose curvature soon means that nothing is reached;
- other hyper-parameters, each scaled to [0, 1]: a parabola around a best value, and a shift of the best learning rate
  in proportion to it (as momentum shifts it);
- the residual, a Gaussian process over (log2 B, log2 lr), so that a wrong shape cannot trap the search
  (see :mod:`bstune.search.gaussian_process`).

The posterior of the parameters is sampled by sequential Monte Carlo: particles from the prior, tempered to the
likelihood, moved by random-walk Metropolis steps at each temperature. Reached trials are normal in log S with an
outlier mixture, censored ones are bounds (softened by what their history foretells), diverged ones say that the
penalty is large. All of it is a function of the observations and the generator: the same study asks the same trials.

The noise scale that a study's trials measured, as a wide prior of B_crit: a hint, never a substitute.

McCandlish et al. 2018 (arXiv 1812.06162, section 2 and appendix D) find B_crit to be the noise scale averaged over the
training. What is measured is B_simple, which stands for it, at some steps (see :mod:`bstune.core.noise_scale`). From these:

- Trials that reached the target count, none else. The noise scale grows by tens of times as |G|^2 falls: a stopped
  trial has seen the beginning alone, and one that diverged has left the path.
- Of each, all steps: the mean of |G|^2 and that of tr Sigma. Divided, they weigh a step by its |G|^2, so that the
  beginning says more than the end, and the ratio errs to the small side; the later half alone would err to the large
  one, where |G|^2 is hardly told apart from 0.
- Both means in units of the trial's own tr Sigma. Gradients of a large learning rate may be ten times as large as
  others: one such trial would speak for all. tr Sigma is known far better than |G|^2, so this adds little bias.
- Each trial is one block of the interval, which so holds what batch size, learning rate and seed change.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr

from bstune.core.noise_scale import FEWEST_BLOCKS, NoiseScaleEstimate, estimate_noise_scale
from bstune.core.records import TrialResult

Array = NDArray[np.float64]
PARAMETERS = (
    "level",  # log S at B_mid and the best learning rate
    "b_crit",  # log(B_crit/B_mid)
    "shift",  # of the optimum at B_mid against the rule, in octaves
    "exponent",  # of the optimum against the rule, below B_crit
    "bend",  # added to the exponent above B_crit
    "low_slope",  # log of: log S an octave, far below the optimum
    "low_width",  # log of: octaves below the optimum over which the slope sets in
    "high_width",  # log of: octaves above the optimum at which S is e^(1/2) times as large
    "noise",  # log of: standard deviation of log S from seed to seed
)
LEVEL, B_CRIT, SHIFT, EXPONENT, BEND, LOW_SLOPE, LOW_WIDTH, HIGH_WIDTH, NOISE = range(len(PARAMETERS))
OUTLIER_SHARE = 0.04
OUTLIER_SPREAD = 0.8  # in log S
OTHER = len(
    PARAMETERS
)  # where those of the other hyper-parameters begin: for each its best value, log curvature, shift
OTHER_MEAN, OTHER_SPREAD = (0.5, math.log(0.3), 0.0), (0.35, 1.0, 1.0)
DIVERGED_PENALTY = 1.5  # a trial that diverged is at least this far above the frontier, in log S ...
DIVERGED_SPREAD = 0.4  # ... give or take this
SHIFT_FREEDOM = 3.0  # degrees of freedom of Student's t: the reference learning rate may be wrong by ten times


@dataclass(frozen=True)
class Prior:
    """Means and standard deviations of the normal priors, and the scaling rule.

    Args:
        log_low, log_high: log2 of the smallest and largest batch size.
        rule: log2 of the rule's learning rate over log2 B.
        mean, spread: shape (p,), in the order of :data:`PARAMETERS`, then three for each other hyper-parameter; the
            shift's prior has heavy tails.
    """

    log_low: float
    log_high: float
    rule: Callable[[Array], Array]
    mean: Array
    spread: Array

    @property
    def log_mid(self) -> float:
        """Log2 of B_mid."""
        return 0.5 * (self.log_low + self.log_high)


@dataclass(frozen=True)
class Observations:
    """Trials as the likelihood takes them: arrays of shape (n,).

    Args:
        x: log2 of the batch size.
        z: log2 of the learning rate.
        other: the other hyper-parameters, each in [0, 1], shape (n, k); k may be 0.
        y: log of steps to target where known, of the estimate or the bound elsewhere.
        spread: standard deviation of ``y`` beside the noise from seed to seed: 0 where the target was reached.
        bound: whether log S lies above ``y`` rather than around it.
        diverged: whether the trial diverged; ``y`` is not read then.
    """

    x: Array
    z: Array
    other: Array
    y: Array
    spread: Array
    bound: NDArray[np.bool_]
    diverged: NDArray[np.bool_]


def optimum(theta: Array, x: Array, prior: Prior) -> Array:
    """Return log2 of the best learning rate: parameters (m, p) and log2 batch sizes (n,) give (m, n)."""
    t = theta[:, :, None]
    away = x[None, :] - prior.log_mid
    corner = t[:, B_CRIT] / math.log(2.0)
    # softplus with a width of an octave, zero at B_mid: the bend is where the frontier flattens
    bend = _softplus(away - corner) - _softplus(-corner)
    return np.asarray(prior.rule(x)[None, :] + t[:, SHIFT] + t[:, EXPONENT] * away + t[:, BEND] * bend)


def make_prior(
    *,
    low: float,
    high: float,
    rule: Callable[[Array], Array],
    log_budget: float,
    sigma: float,
    exponent_sigma: float,
    noise_scale: float | None,
    noise_scale_spread: float = 0.0,
    others: int,
) -> Prior:
    """Return the prior of a study.

    Args:
        low: smallest batch size.
        high: largest batch size.
        rule: log2 of the rule's learning rate over log2 B, arrays of one shape.
        log_budget: log of the settings' budget in steps at the middle batch size: a rough scale.
        sigma: of the rule's level, in octaves.
        exponent_sigma: of the exponent of lr*(B) around the rule's.
        noise_scale: in examples, a hint at B_crit, which it may miss by several times; None for none.
        noise_scale_spread: standard deviation of its logarithm, where it was measured; 0 for one that is given.
        others: columns of other hyper-parameters.
    """
    log_low, log_high = math.log2(low), math.log2(high)
    log_mid = 0.5 * (log_low + log_high)
    b_crit = 0.0 if noise_scale is None else math.log(noise_scale) - log_mid * math.log(2.0)
    b_crit_spread = math.log(6.0) if noise_scale is None else math.hypot(math.log(4.0), noise_scale_spread)
    normal = {
        LEVEL: (log_budget - math.log(4.0), 3.0),
        B_CRIT: (b_crit, b_crit_spread),
        SHIFT: (0.0, sigma),
        EXPONENT: (0.0, exponent_sigma),
        BEND: (-0.15, 0.3),
        LOW_SLOPE: (math.log(0.45), 0.35),
        LOW_WIDTH: (math.log(1.2), 0.5),
        HIGH_WIDTH: (math.log(1.2), 0.4),
        NOISE: (math.log(0.12), 0.5),
    }
    mean = [normal[i][0] for i in range(len(PARAMETERS))] + list(OTHER_MEAN) * others
    spread = [normal[i][1] for i in range(len(PARAMETERS))] + list(OTHER_SPREAD) * others
    return Prior(log_low, log_high, rule, np.array(mean), np.array(spread))


def _softplus(value: Array) -> Array:
    return np.logaddexp(0.0, 2.0 * value) / 2.0


def frontier(theta: Array, x: Array, prior: Prior) -> Array:
    """Return log S*(B), shape (m, n)."""
    t = theta[:, :, None]
    scale = t[:, B_CRIT]
    away = (x[None, :] - prior.log_mid) * math.log(2.0)
    return np.asarray(t[:, LEVEL] + np.logaddexp(0.0, scale - away) - np.logaddexp(0.0, scale))


def penalty(theta: Array, d: Array) -> Array:
    """Return the cost in log S of a learning rate ``d`` (m, n) octaves off the optimum."""
    t = theta[:, :, None]
    width = np.exp(t[:, LOW_WIDTH])
    below = np.minimum(d, 0.0)
    above = np.maximum(d, 0.0)
    low = np.exp(t[:, LOW_SLOPE]) * (np.sqrt(below**2 + width**2) - width)
    return np.asarray(low + 0.5 * above**2 * np.exp(-2.0 * t[:, HIGH_WIDTH]))


def off_optimum(theta: Array, x: Array, z: Array, other: Array, prior: Prior) -> Array:
    """Return how many octaves the learning rate lies above the best one, shape (m, n)."""
    d = z[None, :] - optimum(theta, x, prior)
    for j in range(other.shape[1]):
        d = d - theta[:, OTHER + 3 * j + 2, None] * (other[None, :, j] - 0.5)
    return np.asarray(d)


def log_steps(theta: Array, x: Array, z: Array, other: Array, prior: Prior) -> Array:
    """Return log S without the residual, shape (m, n), for parameters (m, p) and points (n,), (n,) and (n, k)."""
    total = frontier(theta, x, prior) + penalty(theta, off_optimum(theta, x, z, other, prior))
    for j in range(other.shape[1]):
        best, curvature = theta[:, OTHER + 3 * j, None], np.exp(theta[:, OTHER + 3 * j + 1, None])
        total = total + curvature * (other[None, :, j] - best) ** 2
    return np.asarray(total)


def log_prior(theta: Array, prior: Prior) -> Array:
    """Return the log density of the prior up to a constant, shape (m,)."""
    square = ((theta - prior.mean) / prior.spread) ** 2
    heavy = (SHIFT_FREEDOM + 1.0) * np.log1p(square[:, SHIFT] / SHIFT_FREEDOM)
    return np.asarray(-0.5 * (square.sum(axis=1) - square[:, SHIFT] + heavy))


def log_likelihood(theta: Array, seen: Observations, prior: Prior) -> Array:
    """Return the log likelihood, shape (m,); zero without observations."""
    total = np.zeros(len(theta))
    exact = ~seen.bound & ~seen.diverged
    noise = np.exp(theta[:, NOISE, None])
    if exact.any():
        gap = seen.y[exact] - log_steps(theta, seen.x[exact], seen.z[exact], seen.other[exact], prior)
        sigma = np.hypot(noise, seen.spread[exact])
        wide = np.hypot(sigma, OUTLIER_SPREAD)
        core = math.log1p(-OUTLIER_SHARE) - np.log(sigma) - 0.5 * (gap / sigma) ** 2
        bad = math.log(OUTLIER_SHARE) - np.log(wide) - 0.5 * (gap / wide) ** 2
        total += np.logaddexp(core, bad).sum(axis=1)
    if seen.bound.any():
        at = seen.x[seen.bound], seen.z[seen.bound], seen.other[seen.bound]
        over = log_steps(theta, *at, prior) - seen.y[seen.bound]
        sigma = np.hypot(noise, seen.spread[seen.bound])
        total += np.logaddexp(log_ndtr(over / sigma), math.log(OUTLIER_SHARE / 4.0)).sum(axis=1)
    if seen.diverged.any():
        at = seen.x[seen.diverged], seen.z[seen.diverged], seen.other[seen.diverged]
        # Only too high a learning rate makes a trial diverge.
        above = np.maximum(off_optimum(theta, *at, prior), 0.0)
        over = penalty(theta, above) - DIVERGED_PENALTY
        total += np.logaddexp(log_ndtr(over / DIVERGED_SPREAD), math.log(OUTLIER_SHARE / 4.0)).sum(axis=1)
    return np.asarray(total)


def draw_prior(prior: Prior, count: int, rng: np.random.Generator) -> Array:
    """Return parameters drawn from the prior, shape (count, p)."""
    drawn = rng.standard_normal((count, prior.mean.size))
    drawn[:, SHIFT] = rng.standard_t(SHIFT_FREEDOM, count)
    return np.asarray(prior.mean + prior.spread * drawn)


def sample_posterior(seen: Observations, prior: Prior, rng: np.random.Generator, count: int, moves: int) -> Array:
    """Return draws of the posterior, shape (count, p), by sequential Monte Carlo.

    Args:
        seen: the trials; without any the prior is returned.
        prior: of the parameters.
        rng: the only source of chance.
        count: particles.
        moves: Metropolis steps at each temperature.
    """
    theta = draw_prior(prior, count, rng)
    if not seen.x.size:
        return theta
    likelihood = log_likelihood(theta, seen, prior)
    temperature = 0.0
    while temperature < 1.0:
        step = _next_step(likelihood, temperature)
        temperature += step
        weight = np.exp(step * (likelihood - likelihood.max()))
        chosen = _systematic(weight / weight.sum(), rng)
        theta, likelihood = theta[chosen], likelihood[chosen]
        last = temperature >= 1.0
        theta, likelihood = _move(theta, likelihood, temperature, seen, prior, rng, 2 * moves if last else moves)
    return theta


def _next_step(likelihood: Array, temperature: float) -> float:
    """Return the rise in temperature that leaves half of the particles' weight, by bisection."""
    low, high = 0.0, 1.0 - temperature
    excess = likelihood - likelihood.max()

    def share(step: float) -> float:
        weight = np.exp(step * excess)
        return float(weight.sum() ** 2 / (weight @ weight) / weight.size)

    if share(high) >= 0.5:
        return high
    for _ in range(30):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if share(middle) >= 0.5 else (low, middle)
    return max(low, 1e-9)


def _systematic(weight: Array, rng: np.random.Generator) -> NDArray[np.intp]:
    places = (rng.random() + np.arange(weight.size)) / weight.size
    return np.minimum(np.searchsorted(np.cumsum(weight), places), weight.size - 1)


def _move(
    theta: Array,
    likelihood: Array,
    temperature: float,
    seen: Observations,
    prior: Prior,
    rng: np.random.Generator,
    moves: int,
) -> tuple[Array, Array]:
    before = log_prior(theta, prior)
    dimensions = theta.shape[1]
    for i in range(moves):
        # Alternately a normal step with the particles' covariance and the difference of two particles.
        if i % 2 == 0:
            covariance = np.cov(theta.T) + 1e-6 * np.diag(prior.spread**2)
            root = np.linalg.cholesky(covariance)
            scale = 2.38 / math.sqrt(dimensions) * rng.choice([0.3, 0.7, 1.0])
            proposed = theta + scale * rng.standard_normal(theta.shape) @ root.T
        else:
            a, b = rng.permutation(len(theta)), rng.permutation(len(theta))
            scale = 2.38 / math.sqrt(2.0 * dimensions) * rng.uniform(0.3, 1.0, (len(theta), 1))
            proposed = theta + scale * (theta[a] - theta[b]) + 1e-3 * prior.spread * rng.standard_normal(theta.shape)
        after, seen_after = log_prior(proposed, prior), log_likelihood(proposed, seen, prior)
        ratio = temperature * (seen_after - likelihood) + after - before
        taken = np.log(rng.random(len(theta))) < ratio
        theta = np.where(taken[:, None], proposed, theta)
        likelihood = np.where(taken, seen_after, likelihood)
        before = np.where(taken, after, before)
    return theta, likelihood


FEWEST_STEPS = 2  # measured in a trial, for it to count


@dataclass(frozen=True)
class Measured:
    """The noise scale over a study's trials.

    Args:
        estimate: whose ``measurements`` are trials, each a block; its terms are in units of tr Sigma.
        steps: measured in all of them.
    """

    estimate: NoiseScaleEstimate
    steps: int


def measured_noise_scale(trials: Iterable[TrialResult]) -> Measured | None:
    """Return the noise scale over the trials of a study that reached the target; None if none of them was measured.

    Its estimate is undetermined while they are few, or |G|^2 is not told apart from 0.
    """
    gradients, steps = [], 0
    for trial in sorted(trials, key=lambda trial: trial.number):
        if not trial.reached or len(trial.noise_scale) < FEWEST_STEPS:
            continue
        _, gradient, trace = np.mean(trial.noise_scale, axis=0).tolist()
        if trace > 0.0:
            gradients.append(gradient / trace)
            steps += len(trial.noise_scale)
    return Measured(estimate_noise_scale(gradients, [1.0] * len(gradients)), steps) if gradients else None


def hint(trials: Iterable[TrialResult]) -> tuple[float, float] | None:
    """Return the measured noise scale and half the width of its interval in log; None while undetermined."""
    measured = measured_noise_scale(trials)
    if measured is None:
        return None
    value, low, high = measured.estimate.noise_scale, measured.estimate.low, measured.estimate.high
    if value is None or low is None or high is None:
        return None
    return value, 0.5 * math.log(high / low)


def study_prior(
    trials: Iterable[TrialResult],
    *,
    low: float,
    high: float,
    rule: Callable[[Array], Array],
    budget: Callable[[float], float],
    sigma: float,
    exponent_sigma: float,
    noise_scale: float | None,
    others: int,
) -> Prior:
    """Return the prior of a study after some trials: those that measured the noise scale give a hint at B_crit.

    Args:
        trials: that have finished.
        low: smallest batch size.
        high: largest batch size.
        rule: log2 of the rule's learning rate over log2 B, arrays of one shape.
        budget: steps over batch size that one expects to be more than enough.
        sigma: of the rule's level, in octaves.
        exponent_sigma: of the exponent of lr*(B) around the rule's.
        noise_scale: one that is given, in examples, which takes precedence; None for none.
        others: columns of other hyper-parameters.
    """
    value, spread = (noise_scale, 0.0) if noise_scale is not None else hint(trials) or (None, 0.0)
    return make_prior(
        low=low,
        high=high,
        rule=rule,
        log_budget=math.log(budget(math.sqrt(low * high))),
        sigma=sigma,
        exponent_sigma=exponent_sigma,
        noise_scale=value,
        noise_scale_spread=spread,
        others=others,
    )


def hint_row(
    trials: Iterable[TrialResult], posterior: Sequence[float] | None, fit_b_crit: float | None
) -> dict[str, Any] | None:
    """Return the measured noise scale as a row of ``curve.json``; None where none was measured.

    Args:
        trials: of the study.
        posterior: low end, median and high end of B_crit's interval; None for none. Its prior was the noise scale
            itself, however wide, so that the ratio to the fit is the one that is measured twice.
        fit_b_crit: B_crit of the fit to the frontier points; None if it has none.

    Returns:
        noise_scale, low, high (null where undetermined or open), level, trials, steps, undetermined (why there is no
        value, or null), and the value's ratio to B_crit, ratio_to_posterior and ratio_to_fit (null where there is
        none).
    """
    measured = measured_noise_scale(trials)
    if measured is None:
        return None
    estimate, value = measured.estimate, measured.estimate.noise_scale
    b_crits = {"posterior": None if posterior is None else posterior[1], "fit": fit_b_crit}
    ratios = {name: None if value is None or b_crit is None else value / b_crit for name, b_crit in b_crits.items()}
    return {
        "noise_scale": value,
        "low": estimate.low,
        "high": estimate.high,
        "level": estimate.level,
        "trials": estimate.measurements,
        "steps": measured.steps,
        "undetermined": None if value is not None else _reason(estimate.measurements),
        **{f"ratio_to_{name}": ratio for name, ratio in ratios.items()},
    }


def _reason(trials: int) -> str:
    if trials < FEWEST_BLOCKS:
        return f"{FEWEST_BLOCKS} trials that reach the target are needed"
    return "|G|^2 is not told apart from 0"
