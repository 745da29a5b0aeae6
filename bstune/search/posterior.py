"""A posterior of the steps to target over batch size and learning rate, from a few trials.

The model of log S is

    log S(B, lr) = level + log(f(B)/f(B_mid)) + g(B) + penalty(d),
    f(B) = 1 + B_crit/B + (B_opt/B)^2,
    d = (log2 lr - optimum(B)) exp(tilt log2(B/B_mid)),

- the frontier S*(B) = S_min (1 + B_crit/B) (McCandlish et al. 2018, arXiv 1812.06162, eq. 2.11),
  B_mid the geometric middle of the batch sizes; the small-batch term is ours: the examples B S*(B)
  are fewest at B_opt. Nine tenths of its prior lie below the smallest batch size, where the term
  changes nothing; the rest has a long tail, as B_crit comes out too high where the prior rules the
  term out;
- g, the discrepancy, what the law misses of the frontier: piecewise linear in log2 B, its values at
  the knots normal with a standard deviation that is a parameter. It is sampled with the others, so
  that a wrong law widens what is said of B_crit;
- optimum(B), log2 of the best learning rate: the scaling rule plus a shift at B_mid and a deviation
  of the exponent, with a bend at B_crit, above which the exponent may differ (the rule is the prior
  mean, never the model);
- the cost of being off the optimum, ours: below, where S grows as lr falls (at most as 1/lr, log 2
  per octave), a hyperbola of slope ``low_slope`` per octave; above, a parabola, whose curvature
  soon means that nothing is reached; both may be steeper or broader at large batch sizes than at
  small ones (the tilt);
- other hyper-parameters, each scaled to [0, 1]: a parabola around a best value, and a shift of the
  best learning rate in proportion to it (as momentum shifts it).

The posterior of the parameters is sampled by sequential Monte Carlo: particles from the prior,
tempered to the likelihood, moved by Metropolis steps at each temperature. Reached trials are normal
in log S with an outlier mixture, stopped ones are bounds (or estimates above their bound, where
their history can be extrapolated), and a diverged one means a large penalty. The draws depend on
the data and the generator alone: the same study asks the same trials.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from bstune.core.noise_scale import NoiseScaleEstimate, estimate_noise_scale
from bstune.core.records import TrialResult
from bstune.search.horizon import (
    HORIZON_NORMAL,
    Ends,
    early_variance,
    log_chance_at_end,
    log_jacobian,
    log_shortest,
)

Array = NDArray[np.float64]
# An index that chooses some of the trials.
Columns = slice | NDArray[np.bool_]
# Places of the parameters, see make_prior.
(
    LEVEL,
    B_CRIT,
    SHIFT,
    EXPONENT,
    BEND,
    LOW_SLOPE,
    LOW_WIDTH,
    HIGH_WIDTH,
    NOISE,
    TILT,
    B_OPT,
    ROUGHNESS,
) = range(12)
# From here on: three parameters for each other hyper-parameter (OtherPlaces), then those of the law
# over horizons, then the knots.
OTHER = 12
# Prior mean and standard deviation of each of the three.
OTHER_NORMAL = [(0.5, 0.35), (math.log(0.3), 1.0), (0.0, 1.0)]
# Octaves from knot to knot of the discrepancy, about.
KNOT_OCTAVES = 1.5
# Share of the trials that are outliers, and the deviation of their log S beside that of the others.
TRIAL_OUTLIER_SHARE = 0.04
TRIAL_OUTLIER_SPREAD = 0.8
# Chance that is left to a bound, or to a divergence, which the model rules out: the trial may be an
# outlier.
LEAST_CHANCE = TRIAL_OUTLIER_SHARE / 4.0
# A trial that diverged is at least this far above the frontier, in log S ...
DIVERGED_PENALTY = 1.5
# ... give or take this.
DIVERGED_SPREAD = 0.4
# Shares of a particle's deviation from the mean that a step towards the fitted normal keeps.
KEPT_BY_STEP = (0.3, 0.7, 0.95)
# Values of log S worked out at a time, 320 kB: likelihoods of 1,000 trials take two thirds of the
# time so.
CACHED_VALUES = 40_000
# Batch sizes per octave, at which what depends on them alone is worked out for many trials.
NODES_PER_OCTAVE = 8
# Degrees of freedom of Student's t: the reference learning rate may be wrong by ten times.
SHIFT_FREEDOM = 3.0
# Share of the particles that still count (effective number over m) after a step in temperature.
KEPT_WEIGHT = 0.5


class OtherPlaces(NamedTuple):
    """Places of the parameters of one other hyper-parameter, which is scaled to [0, 1]."""

    best: int
    """Its best value."""
    log_curvature: int
    """The log of what the squared distance from the best value adds to log S."""
    rate_shift: int
    """Octaves by which the best learning rate rises from its lowest value to its highest."""


def other_places(j: int) -> OtherPlaces:
    """Give the places in ``theta`` of the three parameters of other hyper-parameter ``j``."""
    first = OTHER + len(OTHER_NORMAL) * j
    return OtherPlaces(best=first, log_curvature=first + 1, rate_shift=first + 2)


@dataclass(frozen=True)
class Points:
    """n points at which log S is asked for: arrays of shape (n,)."""

    x: Array
    """Log2 of the batch size."""
    z: Array
    """Log2 of the learning rate."""
    other: Array
    """The other hyper-parameters, each in [0, 1], shape (n, k); k may be 0."""
    rule: Array
    """Log2 of the rule's learning rate."""
    hats: Array
    """Weights of the discrepancy's knots, shape (knots, n)."""
    nodes: "Nodes | None" = None
    """Batch sizes between which what depends on x alone is interpolated; None: it is not."""

    def take(self, rows: NDArray[np.intp]) -> "Points":
        """Keep the points in these rows, without nodes."""
        return Points(
            x=self.x[rows],
            z=self.z[rows],
            other=self.other[rows],
            rule=self.rule[rows],
            hats=self.hats[:, rows],
        )

    def on_nodes(self, prior: "Prior") -> "Points":
        """Add nodes, batch sizes between which functions of the batch size alone are interpolated.

        Many points then cost less, and log S is the same to 0.001. The knots of the discrepancy
        are nodes, so that it stays exact. Points that are few, or lie beyond the study's batch
        sizes, get no nodes.
        """
        low = prior.knots[0]
        high = prior.knots[-1]
        pieces = prior.knots.size - 1
        # Evenly spaced nodes hit every knot if there is a whole number of them from knot to knot.
        count = pieces * math.ceil(NODES_PER_OCTAVE * (high - low) / pieces)
        if self.x.size <= count or self.x.min() < low or self.x.max() > high:
            return self
        place = (self.x - low) / (high - low) * count
        below = np.minimum(place.astype(np.intp), count - 1)
        nodes = prior.points_at(np.linspace(low, high, count + 1))
        return replace(self, nodes=Nodes(nodes, below, place - below))


@dataclass(frozen=True)
class Nodes:
    """Batch sizes between which a function of them is taken as a straight line over log B."""

    points: Points
    left: NDArray[np.intp]
    """The node below each of n points."""
    share: Array
    """Share of the way to the next one."""

    def between(self, values: Array) -> Array:
        """Interpolate values at the nodes, (m, nodes), to the points: (m, n)."""
        below = np.take(values, self.left, axis=1)
        rise = np.take(np.diff(values, axis=1), self.left, axis=1)
        return np.asarray(below + self.share * rise)


@dataclass(frozen=True)
class Prior:
    """The prior of the p parameters, normal but for the shift's Student's t; and the rule."""

    log_low: float
    """Log2 of the smallest batch size."""
    log_high: float
    """Log2 of the largest."""
    rule: Callable[[Array], Array]
    """Gives log2 of the rule's learning rate at log2 B."""
    mean: Array
    """Means of the parameters, (p,), in the order of the places above."""
    spread: Array
    """Their standard deviations, (p,)."""
    knots: Array
    """Log2 of the batch sizes at which the discrepancy is a parameter."""
    horizon: bool = False
    """Whether schedules end with the trial: the law of the metric over horizons is then sampled."""

    @property
    def log_mid(self) -> float:
        """Log2 of B_mid."""
        return 0.5 * (self.log_low + self.log_high)

    @property
    def others(self) -> int:
        """How many other hyper-parameters there are."""
        # The p parameters are those of the law, then three for each other hyper-parameter, then
        # those of horizons and of the knots.
        of_horizons = len(HORIZON_NORMAL) * self.horizon
        of_others = self.mean.size - OTHER - of_horizons - self.knots.size
        return of_others // len(OTHER_NORMAL)

    @property
    def horizon_law(self) -> slice:
        """Places of the parameters of the metric's law over horizons."""
        place = OTHER + len(OTHER_NORMAL) * self.others
        return slice(place, place + len(HORIZON_NORMAL))

    @cached_property
    def fingerprint(self) -> tuple[bytes, ...]:
        """All that the prior's density depends on, as a key to remember results by."""
        # The rule is a function: its values at a few batch sizes stand for it.
        grid = np.linspace(self.log_low, self.log_high, 33)
        arrays = [self.mean, self.spread, self.knots, self.rule(grid), grid]
        return (*[array.tobytes() for array in arrays], bytes([self.horizon]))

    def points_at(self, x: Array, z: Array | None = None, other: Array | None = None) -> Points:
        """Make points for :func:`log_steps` from log2 batch sizes, log2 rates and other columns.

        The frontier and the optimum need ``x`` alone. Other hyper-parameters that are not given are
        in the middle of their ranges: the optimum is the best learning rate there.
        """
        if z is None:
            z = np.zeros(x.shape)
        if other is None:
            other = np.full((x.size, self.others), 0.5)
        # The weights with which each point interpolates between the discrepancy's knots, linearly
        # and constant beyond the ends.
        hats = np.stack([np.interp(x, self.knots, unit) for unit in np.eye(self.knots.size)])
        return Points(x=x, z=z, other=other, rule=self.rule(x), hats=hats)


def _columns(chosen: NDArray[np.bool_]) -> Columns:
    """Turn a mask of trials into a slice if they are neighbours: it is read without a copy."""
    places = np.flatnonzero(chosen)
    if not places.size:
        return slice(0, 0)
    start = int(places[0])
    end = int(places[-1]) + 1
    if end - start == places.size:
        return slice(start, end)
    return chosen


@dataclass(frozen=True)
class LikelihoodData:
    """n trials as the likelihood takes them: arrays of shape (n,)."""

    points: Points
    y: Array
    """Log of the steps to target where they are known, else of their estimate or lower bound."""
    spread: Array
    """Standard deviation of y beside the noise from seed to seed."""
    log_steps_missed: Array
    """Where y is an estimate, the log of the steps that still missed the target; else -inf."""
    bound: NDArray[np.bool_]
    """Whether log S lies above y rather than around it."""
    diverged: NDArray[np.bool_]
    """Whether it diverged: ``y`` is not read then."""
    weight: Array | None = None
    """Weight of each trial in the likelihood; None: all weigh 1."""
    ends: Ends | None = None
    """How each trial ended its horizon, where schedules end with the trial. y is then the log of
    the step where it ended, from which the law over horizons leads to log S."""

    @cached_property
    def columns(self) -> tuple[Columns, Columns, Columns]:
        """Three groups of trials: with a log S of their own, with a bound alone, and diverged."""
        exact = ~self.bound & ~self.diverged
        return _columns(exact), _columns(self.bound), _columns(self.diverged)

    @cached_property
    def estimated(self) -> Columns:
        """Which trials have an estimate of log S, above the steps that they have run."""
        return _columns(~self.bound & ~self.diverged & np.isfinite(self.log_steps_missed))

    def rearranged(self, prior: Prior) -> "LikelihoodData":
        """Sort many trials by kind, and add nodes to their points: their likelihood is then cheap.

        Trials of a kind that stand side by side are read without a copy. Between nodes
        (:meth:`Points.on_nodes`) the law is interpolated.
        """
        kind = np.isfinite(self.log_steps_missed) + 2 * self.bound + 4 * self.diverged
        ordered = self.take(np.argsort(kind, kind="stable"))
        return replace(ordered, points=ordered.points.on_nodes(prior))

    def take(self, rows: NDArray[np.intp]) -> "LikelihoodData":
        """Keep the trials in these rows."""
        weight = None if self.weight is None else self.weight[rows]
        ends = None if self.ends is None else self.ends.take(rows)
        return LikelihoodData(
            points=self.points.take(rows),
            y=self.y[rows],
            spread=self.spread[rows],
            log_steps_missed=self.log_steps_missed[rows],
            bound=self.bound[rows],
            diverged=self.diverged[rows],
            weight=weight,
            ends=ends,
        )


def _b_crit_normal(
    log_mid: float, noise_scale: float | None, noise_scale_spread: float
) -> tuple[float, float]:
    """Choose the prior's mean and standard deviation of log(B_crit/B_mid).

    Arguments are as of :func:`make_prior`; ``log_mid`` is log2 of B_mid.
    """
    # B_crit is guessed to be B_mid, give or take a factor of 6.
    if noise_scale is None:
        return 0.0, math.log(6.0)
    # A noise scale may miss B_crit by several times: its prior stays wide.
    spread = math.hypot(math.log(4.0), noise_scale_spread)
    return math.log(noise_scale) - log_mid * math.log(2.0), spread


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
    horizon: bool = False,
) -> Prior:
    """Make a study's prior.

    Args:
        low: the smallest batch size.
        high: the largest batch size.
        rule: gives log2 of the scaling rule's learning rate at log2 B.
        log_budget: log of the steps that a trial may take.
        sigma: deviation of the best learning rate from the rule's, in octaves.
        exponent_sigma: deviation of its exponent over B from the rule's.
        noise_scale: in examples, a guess of B_crit; None: not known.
        noise_scale_spread: deviation of the logarithm of a measured noise scale, else 0.
        others: how many columns other hyper-parameters take.
        horizon: whether schedules end with the trial.
    """
    log_low = math.log2(low)
    log_high = math.log2(high)
    log_mid = 0.5 * (log_low + log_high)
    log_low_over_mid = (log_low - log_mid) * math.log(2.0)
    # The mean and the standard deviation of each parameter, in the order of the places above.
    normal = [
        # Level: log S at B_mid and the best learning rate. Good trials are meant to end within the
        # budget: the guess is a quarter of it, give or take a factor of 20, e^3.
        (log_budget - math.log(4.0), 3.0),
        # The log of B_crit/B_mid.
        _b_crit_normal(log_mid, noise_scale, noise_scale_spread),
        # Shift of the optimum at B_mid against the rule, in octaves.
        (0.0, sigma),
        # Exponent of the optimum against the rule, below B_crit.
        (0.0, exponent_sigma),
        # Bend: added to the exponent above B_crit, where the optimum mostly rises less.
        (-0.15, 0.3),
        # The log of the low slope: what an octave adds to log S, far below the optimum.
        (math.log(0.45), 0.35),
        # The log of the low width: the octaves below the optimum over which that slope sets in.
        (math.log(1.2), 0.5),
        # The log of the high width: so many octaves above the optimum, S is e^(1/2) times as large.
        (math.log(1.2), 0.4),
        # The log of the noise: the standard deviation of log S from seed to seed.
        (math.log(0.12), 0.5),
        # Tilt: what an octave of batch size adds to the log of the penalty's steepness.
        (0.0, 0.12),
        # The log of B_opt/B_mid. Its mean lies e^3, 20 times, below the smallest batch size: with
        # the spread of 2.5, nine tenths of the prior are below that size, where the term changes
        # nothing.
        (log_low_over_mid - 3.0, 2.5),
        # The log of the roughness: the standard deviation of the discrepancy, in log S.
        (math.log(0.08), 0.8),
    ]
    normal += OTHER_NORMAL * others
    if horizon:
        normal += HORIZON_NORMAL
    # The discrepancy at the knots, in units of the roughness.
    count = 1 + max(1, round((log_high - log_low) / KNOT_OCTAVES))
    normal += [(0.0, 1.0)] * count
    mean, spread = np.array(normal).T
    return Prior(
        log_low=log_low,
        log_high=log_high,
        rule=rule,
        mean=mean,
        spread=spread,
        knots=np.linspace(log_low, log_high, count),
        horizon=horizon,
    )


def _softplus(value: Array) -> Array:
    """Compute log(1 + e^(2 value))/2; numpy's logaddexp takes three times as long."""
    exact = np.maximum(value, 0.0)
    return np.asarray(exact + 0.5 * np.log1p(np.exp(-2.0 * np.abs(value))))


def optimum(theta: Array, points: Points, prior: Prior) -> Array:
    """Compute log2 of the best learning rate at n points, by m draws ``theta`` (m, p): (m, n).

    It is rule(B) + shift + exponent log2(B/B_mid) + bend s(B), where s rises with log2 B above
    B_crit and hardly below.
    """
    # Many points have nodes among the batch sizes: it is computed there, and interpolated between.
    if points.nodes is not None:
        return points.nodes.between(optimum(theta, points.nodes.points, prior))
    # (m, p, 1), to stand beside the n points.
    t = theta[:, :, None]
    from_middle = points.x[None, :] - prior.log_mid
    # Log2 of B_crit/B_mid.
    corner = t[:, B_CRIT] / math.log(2.0)
    # A softplus with a width of an octave, zero at B_mid: the bend is where the frontier flattens.
    bend = _softplus(from_middle - corner) - _softplus(-corner)
    rule = points.rule[None, :]
    return np.asarray(rule + t[:, SHIFT] + t[:, EXPONENT] * from_middle + t[:, BEND] * bend)


def log_small_batch_term(theta: Array, points: Points, prior: Prior) -> Array:
    """Compute how much the small-batch term adds to log S* at n points, by m draws: (m, n).

    That is log((1 + B_crit/B + (B_opt/B)^2)/(1 + B_crit/B)).
    """
    t = theta[:, :, None]
    from_middle = (points.x[None, :] - prior.log_mid) * math.log(2.0)
    two_terms = np.logaddexp(0.0, t[:, B_CRIT] - from_middle)
    return np.asarray(np.log1p(np.exp(2.0 * (t[:, B_OPT] - from_middle) - two_terms)))


def frontier(theta: Array, points: Points, prior: Prior) -> Array:
    """Compute log S*(B) at n points, by m draws ``theta`` (m, p): (m, n).

    S*(B) is the steps to the target at the best learning rate. Its log is
    level + log(f(B)/f(B_mid)) + discrepancy(B), with f(B) = 1 + B_crit/B + (B_opt/B)^2.
    """
    # Many points have nodes among the batch sizes: it is computed there, and interpolated between.
    if points.nodes is not None:
        return points.nodes.between(frontier(theta, points.nodes.points, prior))
    # (m, p, 1), to stand beside the n points.
    t = theta[:, :, None]
    from_middle = (points.x[None, :] - prior.log_mid) * math.log(2.0)
    # B_crit/B and (B_opt/B)^2.
    first_term = np.exp(t[:, B_CRIT] - from_middle)
    second_term = np.exp(2.0 * (t[:, B_OPT] - from_middle))
    log_law = np.log1p(first_term + second_term)
    # The law at the middle batch size, where log S is to be the level.
    log_law_at_mid = np.log1p(np.exp(t[:, B_CRIT]) + np.exp(2.0 * t[:, B_OPT]))
    knots = np.exp(theta[:, ROUGHNESS, None]) * theta[:, theta.shape[1] - prior.knots.size :]
    # A matrix product of BLAS with two threads on a busy machine takes over ten times as long.
    discrepancy = np.einsum("mk,kn->mn", knots, points.hats)
    return np.asarray(t[:, LEVEL] + log_law - log_law_at_mid + discrepancy)


def noise_variance(theta: Array) -> float:
    """Compute the variance of log S from seed to seed: its mean over m draws ``theta`` (m, p)."""
    return float(np.mean(np.exp(2.0 * theta[:, NOISE])))


def penalty(theta: Array, d: Array) -> Array:
    """Compute what a learning rate ``d`` octaves off the best one adds to log S; both (m, n).

    Below the best rate it is a hyperbola, which far away rises by the low slope for each octave.
    Above it is the parabola 1/2 (d/high width)^2.
    """
    t = theta[:, :, None]
    width = np.exp(t[:, LOW_WIDTH])
    below = np.minimum(d, 0.0)
    above = np.maximum(d, 0.0)
    low = np.exp(t[:, LOW_SLOPE]) * (np.sqrt(below**2 + width**2) - width)
    return np.asarray(low + 0.5 * above**2 * np.exp(-2.0 * t[:, HIGH_WIDTH]))


def off_optimum(theta: Array, points: Points, prior: Prior) -> Array:
    """Compute how many octaves n points' learning rates lie above the best ones: (m, n).

    ``theta`` is m draws of the parameters, (m, p). The tilt, one of them, stretches or shrinks the
    octaves with the batch size.
    """
    d = points.z[None, :] - optimum(theta, points, prior)
    for j in range(prior.others):
        shift = theta[:, other_places(j).rate_shift, None]
        d = d - shift * (points.other[None, :, j] - 0.5)
    return np.asarray(d * _steepness(theta, points, prior))


def _steepness(theta: Array, points: Points, prior: Prior) -> Array:
    """Compute how much more an octave off the best rate counts at n points than at B_mid: (m, n).

    The tilt, a parameter, is the log of this factor for each octave of batch size above B_mid, the
    middle one. Many points are interpolated between nodes, a few batch sizes.
    """
    if points.nodes is not None:
        return points.nodes.between(_steepness(theta, points.nodes.points, prior))
    return np.exp(theta[:, TILT, None] * (points.x - prior.log_mid))


def log_steps(theta: Array, points: Points, prior: Prior) -> Array:
    """Compute log S, the log of the steps to the target, at n points: (m, n).

    ``theta`` is m draws of the parameters, (m, p).
    """
    return _log_steps_off(theta, off_optimum(theta, points, prior), points, prior)


def _log_steps_off(theta: Array, d: Array, points: Points, prior: Prior) -> Array:
    """Compute log S at n points whose learning rates lie ``d`` octaves off the best ones: (m, n).

    Each other hyper-parameter adds a parabola around its best value.
    """
    total = frontier(theta, points, prior) + penalty(theta, d)
    for j in range(prior.others):
        places = other_places(j)
        best = theta[:, places.best, None]
        curvature = np.exp(theta[:, places.log_curvature, None])
        total = total + curvature * (points.other[None, :, j] - best) ** 2
    return np.asarray(total)


def log_prior(theta: Array, prior: Prior) -> Array:
    """Compute the log density of the prior at m draws, up to a constant: (m,).

    The shift has Student's t, all other parameters are normal.
    """
    square = ((theta - prior.mean) / prior.spread) ** 2
    of_shift = (SHIFT_FREEDOM + 1.0) * np.log1p(square[:, SHIFT] / SHIFT_FREEDOM)
    return np.asarray(-0.5 * (square.sum(axis=1) - square[:, SHIFT] + of_shift))


def log_likelihood(theta: Array, data: LikelihoodData, prior: Prior) -> Array:
    """Compute the log likelihood of the trials by m draws: (m,); zero without trials."""
    # The draws are taken in parts, whose values of log S fit into the processor's cache.
    rows = max(1, CACHED_VALUES // max(data.y.size, 1))
    parts = list[Array]()
    for start in range(0, len(theta), rows):
        parts.append(_log_likelihood(theta[start : start + rows], data, prior))
    return np.concatenate(parts)


def _log_likelihood(theta: Array, data: LikelihoodData, prior: Prior) -> Array:
    """Compute the log likelihood as :func:`log_likelihood` does, for all draws at once: (m,)."""
    octaves_off = off_optimum(theta, data.points, prior)
    expected = _log_steps_off(theta, octaves_off, data.points, prior)
    log_s_seen = log_steps_seen(theta, data, prior)
    exact, bound, diverged = data.columns
    noise = np.exp(theta[:, NOISE, None])

    # Trials that tell their own log S: the density there.
    variance_beside = variance_seen(theta, data, prior)[..., exact]
    log_density = _log_density(data, log_s_seen, expected, variance_beside, noise)
    # Where schedules end with the trial, log S follows from what was measured, a metric or a step,
    # by a law that differs from draw to draw: the density has to be one of the measured value. To
    # that comes the chance that a trial which met the target at its end had not met it before.
    if data.ends is not None:
        law = theta[:, prior.horizon_law]
        of_measured = log_jacobian(law, data.ends) + log_chance_at_end(law, data.ends)
        log_density = log_density + of_measured[:, exact]
    total = _weighed_sum(log_density, data, exact)

    # Trials that give a bound: the chance that log S lies above it.
    over = expected[:, bound] - log_s_seen[..., bound]
    chance_above = ndtr(over / np.hypot(noise, data.spread[bound]))
    total = total + _weighed_sum(np.log(chance_above + LEAST_CHANCE), data, bound)

    # Trials that diverged: the chance of that. Only too high a learning rate makes a trial diverge:
    # one that adds more than about ``DIVERGED_PENALTY`` to log S.
    too_high = np.maximum(octaves_off[:, diverged], 0.0)
    over_limit = penalty(theta, too_high) - DIVERGED_PENALTY
    chance_to_diverge = ndtr(over_limit / DIVERGED_SPREAD)
    log_chance = np.log(chance_to_diverge + LEAST_CHANCE)
    return np.asarray(total + _weighed_sum(log_chance, data, diverged))


def _weighed_sum(terms: Array, data: LikelihoodData, columns: Columns) -> Array:
    """Add up the log likelihoods of the trials in these columns, (m, k), by their weights: (m,)."""
    if data.weight is not None:
        terms = terms * data.weight[columns]
    return np.asarray(terms.sum(axis=1))


def _log_density(
    data: LikelihoodData, y: Array, expected: Array, variance_beside: Array, noise: Array
) -> Array:
    """Compute the log density of the k trials that have a log S of their own: (m, k).

    It is a mixture with outliers, up to a constant. Where a trial's log S is an estimate, S must
    exceed the steps that it has run: the density is multiplied by the chance that it does. An
    outlier's estimate may be wrong altogether, so its density is not multiplied.

    Args:
        data: all n trials.
        y: log S as the trials have it, (1, n) or (m, n).
        expected: log S by the model, (m, n).
        variance_beside: variance of the k trials' log S that is added to the noise from seed to
            seed, (k,) or (m, k).
        noise: standard deviation of log S from seed to seed, (m, 1).
    """
    exact, _, _ = data.columns
    square = (y[..., exact] - expected[:, exact]) ** 2
    variance = noise**2 + variance_beside
    wide = variance + TRIAL_OUTLIER_SPREAD**2
    # Both densities, the narrow one and the outliers' wide one, are divided by the exponential of
    # the wide one, so that neither underflows. It is put back at the end, in the logarithm.
    scaled_density = np.exp(0.5 * square * (1.0 / wide - 1.0 / variance)) / np.sqrt(variance)
    scaled_density *= 1.0 - TRIAL_OUTLIER_SHARE
    estimated = np.isfinite(data.log_steps_missed[exact])
    if estimated.any():
        scaled_density[:, estimated] *= _chance_above(data, y, expected, noise)
    return np.asarray(
        np.log(scaled_density + TRIAL_OUTLIER_SHARE / np.sqrt(wide)) - 0.5 * square / wide
    )


def log_steps_seen(theta: Array, data: LikelihoodData, prior: Prior) -> Array:
    """Compute log S as n trials themselves show it: (m, n), or (1, n) without horizons.

    Where schedules end with the trial, the law of the metric over horizons leads from the step at
    which a trial ended to S. That law differs between the m draws.
    """
    if data.ends is None:
        return data.y[None]
    return data.y + log_shortest(theta[:, prior.horizon_law], data.ends)


def variance_seen(theta: Array, data: LikelihoodData, prior: Prior) -> Array:
    """Compute the variance of :func:`log_steps_seen` without the noise from seed to seed.

    It is (n,), or (m, n) where schedules end with the trial.
    """
    variance = np.asarray(data.spread**2)
    if data.ends is None:
        return variance
    return variance + early_variance(theta[:, prior.horizon_law], data.ends)


def _chance_above(data: LikelihoodData, y: Array, expected: Array, noise: Array) -> Array:
    """Compute the chance that S exceeds the steps that a trial has run, given its estimate.

    S is the steps to the target. The result has a row for each of m draws of the parameters, and a
    column for each of the k trials whose log S is an estimate: (m, k).

    Args:
        data: all n trials.
        y: log S as the trials have it, (1, n) or (m, n).
        expected: log S by the model, (m, n).
        noise: standard deviation of log S from seed to seed, (m, 1).
    """
    places = data.estimated
    # Log S given the model and the estimate is normal, its precision the sum of theirs.
    by_model = noise**-2.0
    by_estimate = data.spread[places] ** -2.0
    precision = by_model + by_estimate
    mean = (by_model * expected[:, places] + by_estimate * y[..., places]) / precision
    return np.asarray(ndtr((mean - data.log_steps_missed[places]) * np.sqrt(precision)))


def draw_prior(prior: Prior, count: int, rng: np.random.Generator) -> Array:
    """Draw parameters from the prior: (count, p)."""
    drawn = rng.standard_normal((count, prior.mean.size))
    drawn[:, SHIFT] = rng.standard_t(SHIFT_FREEDOM, count)
    return np.asarray(prior.mean + prior.spread * drawn)


@dataclass(frozen=True)
class Start:
    """Draws of a posterior of fewer trials, from which that of all of them is sampled."""

    theta: Array
    """Shape (count, p)."""
    data: LikelihoodData
    """The fewer trials, as :meth:`LikelihoodData.rearranged` has them."""
    prior: Prior


def sample_posterior(
    data: LikelihoodData,
    prior: Prior,
    rng: np.random.Generator,
    count: int,
    moves: int,
    start: Start | None = None,
) -> Array:
    """Draw ``count`` times from the posterior of the p parameters: (count, p).

    ``moves`` are Metropolis steps at each temperature. The particles are tempered from the prior
    or, with ``start``, from the posterior of fewer trials, which is much nearer (iterated batch
    importance sampling: Chopin 2002, Biometrika 89(3)). Estimates of stopped trials change as
    others join them: so the fewer trials' likelihood is replaced, not multiplied by a further one.
    """
    if start is None:
        theta = draw_prior(prior, count, rng)
        if not data.y.size:
            return theta
    else:
        # Each of the particles is taken as often as any other, or once more.
        theta = start.theta[np.arange(count) * len(start.theta) // count]
        # Only a study of many trials has a start: their likelihood is made cheap.
        data = data.rearranged(prior)
    return _temper(theta, _Path(start, data, prior), rng, moves)


@dataclass(frozen=True)
class _Path:
    """Log densities base + temperature x rise, from a start at 0 to the posterior at 1."""

    start: Start | None
    """None: the path starts at the prior."""
    data: LikelihoodData
    prior: Prior

    def log_density_parts(self, theta: Array, temperature: float) -> tuple[Array, Array]:
        """Compute the two parts of the log density at m draws, base and rise: (m,) each.

        The log density at ``temperature`` is base + temperature x rise. A path from the prior has
        the log prior as base and the log likelihood as rise. A path from a start has the log
        density of the start's posterior as base, and the rise from that to the log density of the
        posterior of all trials.
        """
        if self.start is None:
            return log_prior(theta, self.prior), log_likelihood(theta, self.data, self.prior)
        at_end = log_prior(theta, self.prior) + log_likelihood(theta, self.data, self.prior)
        # At the path's end base + rise is this, whatever the start: its density, which costs time,
        # is left out.
        if temperature == 1.0:
            return at_end, np.zeros(len(theta))
        start_likelihood = log_likelihood(theta, self.start.data, self.start.prior)
        base = log_prior(theta, self.start.prior) + start_likelihood
        return base, at_end - base


def _temper(theta: Array, path: _Path, rng: np.random.Generator, moves: int) -> Array:
    """Take particles ``theta`` from the beginning of a path to its end, the posterior: (m, p).

    A path begins at the prior or, where it has a ``start``, at a posterior of fewer trials. At
    temperature t the log density is ``base`` + t ``rise`` (:meth:`_Path.log_density_parts`).
    """
    count = len(theta)
    temperature = 0.0
    base, rise = path.log_density_parts(theta, temperature)
    while temperature < 1.0:
        temperature_step = _temperature_step(rise, temperature)
        temperature += temperature_step
        weight = np.exp(temperature_step * (rise - rise.max()))
        # Systematic resampling: evenly spaced places on the cumulative weights, shifted together at
        # random.
        places = (rng.random() + np.arange(count)) / count
        chosen = np.minimum(np.searchsorted(np.cumsum(weight / weight.sum()), places), count - 1)
        theta = theta[chosen]
        base = base[chosen]
        rise = rise[chosen]
        # Resampling has made copies of particles, which moves spread again. A start is near the
        # end: half of the moves are enough on the way from it. At the end itself, twice as many
        # make the draws less alike.
        moves_now = moves if path.start is None else max(1, moves // 2)
        if temperature >= 1.0:
            moves_now = 2 * moves
        theta, base, rise = _move(theta, base, rise, temperature, path, rng, moves_now)
    return theta


def _temperature_step(rise: Array, temperature: float) -> float:
    """Find by bisection how far the temperature may go up at once, towards 1.

    At least half of the particles must still count after it. ``rise`` (m,) is what each particle's
    log density gains for a unit of temperature.
    """
    low = 0.0
    high = 1.0 - temperature
    # Relative to the largest one, so that the exponential does not overflow.
    from_largest = rise - rise.max()

    def effective_share(temperature_step: float) -> float:
        """Compute the share of the particles that still count after the temperature has gone up."""
        weight = np.exp(temperature_step * from_largest)
        return float(weight.sum() ** 2 / (weight @ weight) / weight.size)

    if effective_share(high) >= KEPT_WEIGHT:
        return high
    for _ in range(30):
        middle = 0.5 * (low + high)
        if effective_share(middle) >= KEPT_WEIGHT:
            low = middle
        else:
            high = middle
    # The temperature rises in any case, so that the tempering ends.
    return max(low, 1e-9)


def _move(
    theta: Array,
    base: Array,
    rise: Array,
    temperature: float,
    path: _Path,
    rng: np.random.Generator,
    moves: int,
) -> tuple[Array, Array, Array]:
    """Move m particles ``theta``, (m, p), by Metropolis steps at a temperature.

    Returns:
        The moved particles, (m, p), and the ``base`` and ``rise`` of their log density, (m,) each.
    """
    for i in range(moves):
        # Particles move alternately towards a normal distribution fitted to them, which leads far
        # in many dimensions, and by the difference of two particles, which does not trust that
        # shape.
        if i % 2 == 0:
            proposed, correction = _towards_normal(theta, path.prior, rng)
        else:
            proposed = _by_difference(theta, path.prior, rng)
            correction = np.zeros(len(theta))
        base_after, rise_after = path.log_density_parts(proposed, temperature)
        log_ratio = temperature * (rise_after - rise) + base_after - base + correction
        accepted = np.log(rng.random(len(theta))) < log_ratio
        theta = np.where(accepted[:, None], proposed, theta)
        base = np.where(accepted, base_after, base)
        rise = np.where(accepted, rise_after, rise)
    return theta, base, rise


def _towards_normal(theta: Array, prior: Prior, rng: np.random.Generator) -> tuple[Array, Array]:
    """Propose moves that leave a normal distribution fitted to the particles as it is.

    They are steps of preconditioned Crank-Nicolson (Cotter et al. 2013, arXiv 1202.0709).

    Returns:
        The proposed particles, (m, p), and the log of that distribution's density at the old ones
        over that at the proposed ones, (m,).
    """
    # A little of the prior's variance keeps the covariance of few particles positive definite.
    root = np.linalg.cholesky(np.cov(theta.T) + 1e-6 * np.diag(prior.spread**2))
    mean = theta.mean(axis=0)
    # How much of its deviation from the mean each particle keeps.
    keep = rng.choice(KEPT_BY_STEP, (len(theta), 1))
    # The particles in coordinates in which that distribution is the standard one.
    white = np.linalg.solve(root, (theta - mean).T).T
    fresh = keep * white + np.sqrt(1.0 - keep**2) * rng.standard_normal(theta.shape)
    correction = 0.5 * ((fresh**2).sum(axis=1) - (white**2).sum(axis=1))
    return mean + fresh @ root.T, correction


def _by_difference(theta: Array, prior: Prior, rng: np.random.Generator) -> Array:
    """Propose moves along the difference of two particles, and a little jitter: (m, p).

    Source: ter Braak 2006, Statistics and Computing 16.
    """
    first = rng.permutation(len(theta))
    second = rng.permutation(len(theta))
    # The source's factor for so many parameters; smaller ones are accepted more often.
    largest = 2.38 / math.sqrt(2.0 * theta.shape[1])
    scale = largest * rng.uniform(0.3, 1.0, (len(theta), 1))
    jitter = 1e-3 * prior.spread * rng.standard_normal(theta.shape)
    return np.asarray(theta + scale * (theta[first] - theta[second]) + jitter)


# The noise scale that trials measured is a wide prior of B_crit, which McCandlish et al. 2018
# (section 2, appendix D) find to be the noise scale averaged over the training; B_simple at some
# steps stands for it:
# - Only trials that reached the target count: the noise scale grows by tens of times as |G|^2
#   falls, and a stopped trial has measured the beginning alone.
# - All steps of each count, weighed by |G|^2: that errs to the small side, the later half alone
#   would to the large one.
# - Both means are in units of the trial's own tr Sigma, or one with a large learning rate would
#   outweigh the rest.
# - Each trial is one block of the interval, which so holds what batch size, learning rate and seed
#   change.


def measured_noise_scale(trials: Iterable[TrialResult]) -> tuple[NoiseScaleEstimate, int] | None:
    """Estimate the noise scale from the gradient norms of the trials that reached the target.

    Gives the estimate, in examples, and the number of steps at which it was measured. None where no
    such trial has measured it.
    """
    # The mean |G|^2 of each trial, in units of its own mean tr Sigma: that is then 1 for all
    # trials, and none outweighs the others by large gradients.
    gradients = list[float]()
    steps = 0
    for trial in sorted(trials, key=lambda trial: trial.number):
        # A single step scatters too much to say anything.
        if not trial.reached or len(trial.noise_scale) < 2:
            continue
        # Each measurement is (step, |G|^2, tr Sigma).
        _, gradient, trace = np.mean(trial.noise_scale, axis=0).tolist()
        if trace > 0.0:
            gradients.append(gradient / trace)
            steps += len(trial.noise_scale)
    if not gradients:
        return None
    return estimate_noise_scale(gradients, [1.0] * len(gradients)), steps


def noise_scale_prior(trials: Iterable[TrialResult]) -> tuple[float | None, float]:
    """Estimate the noise scale, in examples, and its deviation in log: half its interval's width.

    None and 0 before a trial has measured it, and while an end of the interval is not known.
    """
    measured = measured_noise_scale(trials)
    if measured is None:
        return None, 0.0
    estimate, _ = measured
    if estimate.low is None or estimate.high is None:
        return None, 0.0
    return estimate.noise_scale, 0.5 * math.log(estimate.high / estimate.low)
