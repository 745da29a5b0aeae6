"""The law of the steps to target, S, over batch size and learning rate, and its prior.

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

:mod:`bstune.search.likelihood` compares it with trials, and :mod:`bstune.search.monte_carlo`
samples its parameters.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bstune.search.horizon import HORIZON_NORMAL

Array = NDArray[np.float64]
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
# Batch sizes per octave, at which what depends on them alone is worked out for many trials.
NODES_PER_OCTAVE = 8
# Degrees of freedom of Student's t: the reference learning rate may be wrong by ten times.
SHIFT_FREEDOM = 3.0


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
    return log_steps_off(theta, off_optimum(theta, points, prior), points, prior)


def log_steps_off(theta: Array, d: Array, points: Points, prior: Prior) -> Array:
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


def draw_prior(prior: Prior, count: int, rng: np.random.Generator) -> Array:
    """Draw parameters from the prior: (count, p)."""
    drawn = rng.standard_normal((count, prior.mean.size))
    drawn[:, SHIFT] = rng.standard_t(SHIFT_FREEDOM, count)
    return np.asarray(prior.mean + prior.spread * drawn)
