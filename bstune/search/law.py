"""The law of the steps to the target over batch size and learning rate, and what is known before.

With x = log2 B and z = log2 lr, both relative to the middle of the batch sizes where that is said::

    log S(B, lr) = level + log(1 + B_crit/B) - log(1 + B_crit/B_mid) + misfit(x) + penalty(d)
    d = z - log2 lr*(B) = z - (rule(x) + shift + exponent (x - x_mid))
                        - the sum of slope (u - u*) over the further values

The curve is S_min (1 + B_crit/B) of McCandlish et al. 2018 (arXiv 1812.06162, eq. 2.11). The rule
goes through its anchor; one that turns at a noise scale turns at B_crit. Off the best rate steps
rise as a hyperbola below it and as a parabola above it: both are assumptions. The misfit is
piecewise linear in x: what is said of B_crit and searches for the curve have it, other searches do
without.

Each further value, at a coordinate u (:class:`bstune.core.space.Tunable`), adds a parabola
1/2 ((u - u*)/width)^2 to log S, and moves the best rate, as momentum does: assumptions, too. The
curve and the best rate are those at the best values within the ranges.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bstune.core.rules import RULES
from bstune.core.space import Space, Tunable
from bstune.search import schedule_length

Array = NDArray[np.float64]

# Columns of the draws, with their units.
LEVEL = 0  # log steps at the middle batch size and its best rate
B_CRIT = 1  # log(B_crit/B_mid)
SHIFT = 2  # octaves of lr*(B_mid) above the rule's
EXPONENT = 3  # of lr*(B), over the rule's
LOW = 4  # log of what an octave adds to log steps, far below the best rate
HIGH = 5  # log of the octaves above the best rate at which log steps have risen by 1/2
NOISE = 6  # log of the standard deviation of log steps from seed to seed
MISFIT_SIZE = 7  # log of the standard deviation of the misfit at a knot
KNOTS = 8  # this column and the further ones: the misfit at each knot, in units of its size
# Further columns, each for all further values in turn: the best coordinate; log of the distance
# from it at which log steps have risen by 1/2; octaves that lr* rises by over the value's range.
# Their prior means and standard deviations; the last one's where nothing is known of the value.
BEST_PLACE = (0.5, 0.35)
LOG_WIDTH = (math.log(0.5), 0.7)
RATE_SLOPE = (0.0, 0.75)
COLUMNS_OF_VALUE = 3

# Prior means and standard deviations in the order of the columns; SHIFT is a Student's t with 3
# degrees of freedom. The level's mean is a quarter of the budget. They are wide guesses: a factor
# of 20 for the level, of 6 for B_crit, 2.5 octaves for the rate. Without a prior around the rule
# the choice was 1.14 times as far off after 10 times the best trial's cost.
LEVEL_BELOW_BUDGET = math.log(4.0)
MEANS = (0.0, 0.0, 0.0, 0.0, math.log(0.45), math.log(1.2), math.log(0.15))
SPREADS = (3.0, math.log(6.0), 2.5, 0.35, 0.35, 0.4, 0.5)
SHIFT_DEGREES = 3.0
# With these, 90% intervals of B_crit hold 221 of 240 truths (three tables, nine kinds of synthetic
# curves, ``time`` and ``curve``); with 0.08 226, and under ``time`` they are 1.2 times as wide.
MISFIT_MEAN = math.log(0.06)
MISFIT_SPREAD = 0.8
OCTAVES_BETWEEN_KNOTS = 1.5
# Log steps at rates far above the best one are kept below this: their exponential is finite.
MOST_LOG_STEPS = 50.0
# Octaves below the best rate over which the penalty turns from a parabola into a line.
LOW_TURN = 1.2
# Coordinates of any configurations, where there are no further values.
NO_VALUES: Array = np.zeros((1, 0))


@dataclass(frozen=True)
class Law:
    """The law over a space; draws of its parameters are rows of ``theta``, (m, parameters).

    Args:
        low, high: log2 of the batch sizes that are searched.
        rule: the name of the scaling rule; one that turns does at each draw's own B_crit.
        anchor: batch size and rate that the rule goes through.
        mean, spread: of the prior, (parameters,).
        knots: of the misfit, in log2 B; none for a law without.
        values: how many further values there are.
        first_value: the first of their columns.
        schedule_ends: whether schedules end with their trials: the last columns of the draws are
            then those of :mod:`bstune.search.schedule_length`.
    """

    low: float
    high: float
    rule: str
    anchor: tuple[float, float]
    mean: Array
    spread: Array
    knots: Array
    values: int = 0
    first_value: int = 0
    schedule_ends: bool = False

    @property
    def middle(self) -> float:
        """log2 of the geometric middle of the batch sizes."""
        return 0.5 * (self.low + self.high)

    def rule_rate(self, theta: Array, x: Array) -> Array:
        """log2 of the scaling rule's rate at log2 batch sizes, (m, n), or (n,) for all draws."""
        batch_size, rate = self.anchor
        b_crit = np.exp(theta[:, B_CRIT, None]) * 2.0**self.middle
        above_anchor: Array = np.log2(RULES[self.rule].growth(np.exp2(x), batch_size, b_crit))
        return math.log2(rate) + above_anchor

    def best_rate(self, theta: Array, x: Array) -> Array:
        """log2 lr*(B) of m draws at n batch sizes, (m, n).

        ``x`` is of n batch sizes for all draws, (n,), or of each draw's own, (m, n).
        """
        exponents = theta[:, EXPONENT, None] * (x - self.middle)
        return self.rule_rate(theta, x) + theta[:, SHIFT, None] + exponents

    def curve(self, theta: Array, x: Array) -> Array:
        """log S*(B) of m draws at n batch sizes, (m, n)."""
        log_b = (x - self.middle) * math.log(2.0)
        log_b_crit = theta[:, B_CRIT, None]
        relative = np.logaddexp(0.0, log_b_crit - log_b) - np.logaddexp(0.0, log_b_crit)
        law: Array = theta[:, LEVEL, None] + relative
        if not self.knots.size:
            return law
        hats = np.stack([np.interp(x, self.knots, hat) for hat in np.eye(self.knots.size)])
        at_knots = theta[:, KNOTS : KNOTS + self.knots.size]
        return law + np.exp(theta[:, MISFIT_SIZE, None]) * (at_knots @ hats)

    def best_places(self, theta: Array) -> Array:
        """Coordinates of the best further values of m draws, (m, values)."""
        return np.clip(theta[:, self.first_value : self.first_value + self.values], 0.0, 1.0)

    def effect_of_values(self, theta: Array, u: Array) -> tuple[Array, Array]:
        """What further values off their best cost, in log steps, and by how much they move lr*.

        Both are (m, n), the latter in octaves.

        Args:
            theta: m draws.
            u: coordinates at n places, (n, values), or of each draw's own, (m, n, values).
        """
        last = self.first_value + COLUMNS_OF_VALUE * self.values
        columns = theta[:, None, self.first_value : last]
        best, log_width, slope = np.split(columns, COLUMNS_OF_VALUE, axis=2)
        # The best of a range counts, where a parabola's own lies beyond it.
        inside = np.clip(best, 0.0, 1.0)
        squares = (u - best) ** 2 - (inside - best) ** 2
        cost: Array = 0.5 * (squares * np.exp(-2.0 * log_width)).sum(axis=2)
        return cost, ((u - inside) * slope).sum(axis=2)

    def penalty_above(self, theta: Array, x: Array, z: Array) -> Array:
        """The penalty of rates above the best one, in log steps, (m, n); trials diverge by it."""
        octaves = np.maximum(z - self.best_rate(theta, x), 0.0)
        return 0.5 * octaves**2 * np.exp(-2.0 * theta[:, HIGH, None])

    def penalty_below(self, theta: Array, x: Array, z: Array) -> Array:
        """The penalty of rates below the best one, in log steps, (m, n)."""
        octaves = np.minimum(z - self.best_rate(theta, x), 0.0)
        return np.exp(theta[:, LOW, None]) * (np.hypot(octaves, LOW_TURN) - LOW_TURN)

    def log_steps(self, theta: Array, x: Array, z: Array, u: Array = NO_VALUES) -> Array:
        """log S(B, lr) of m draws at n configurations, (m, n).

        Args:
            theta: m draws.
            x, z: log2 of batch sizes and rates, (n,).
            u: coordinates of the further values, (n, values).
        """
        cost, moved = self.effect_of_values(theta, u)
        z = z - moved
        log_steps = (
            self.curve(theta, x) + self.penalty_below(theta, x, z) + self.penalty_above(theta, x, z)
        )
        return np.minimum(log_steps + cost, MOST_LOG_STEPS)

    def sample_prior(self, count: int, rng: np.random.Generator) -> Array:
        """Draws before any trial, (count, parameters)."""
        theta: Array = self.mean + self.spread * rng.standard_normal((count, self.mean.size))
        theta[:, SHIFT] = self.spread[SHIFT] * rng.standard_t(SHIFT_DEGREES, count)
        return theta

    def log_prior(self, theta: Array) -> Array:
        """Log density of the prior up to a constant, (m,)."""
        squares = ((theta - self.mean) / self.spread) ** 2
        normal: Array = squares.sum(axis=1) - squares[:, SHIFT]
        tail = 0.5 * (SHIFT_DEGREES + 1.0) * np.log1p(squares[:, SHIFT] / SHIFT_DEGREES)
        return -0.5 * normal - tail


def _rate_slope(tunable: Tunable) -> tuple[float, float]:
    """Prior mean and standard deviation of the octaves that lr* rises by over a value's range.

    Rates count as lr/(1 - x) of a momentum, and not of other values near 1: half way is the mean.
    """
    if tunable.scale != "log of 1 - x":
        return RATE_SLOPE
    half = 0.5 * math.log2((1.0 - tunable.high) / (1.0 - tunable.low))
    return half, -half


def make_law(space: Space, budget: float, misfit: bool, schedule_ends: bool = False) -> Law:
    """The law over a space, with a prior around its rule and a quarter of the budget.

    Args:
        space: batch sizes, the rule and the further values; these have columns behind those of the
            misfit.
        budget: of a trial at the middle batch size, in steps.
        misfit: whether the curve may leave the law, piecewise linearly.
        schedule_ends: as of the law.
    """
    low = math.log2(space.low)
    high = math.log2(space.high)
    priors = list(zip(MEANS, SPREADS, strict=True))
    priors[LEVEL] = (math.log(budget) - LEVEL_BELOW_BUDGET, SPREADS[LEVEL])
    knots = np.zeros(0)
    if misfit:
        intervals = max(1, round((high - low) / OCTAVES_BETWEEN_KNOTS))
        knots = np.linspace(low, high, intervals + 1)
        priors += [(MISFIT_MEAN, MISFIT_SPREAD), *[(0.0, 1.0)] * knots.size]
    slopes = [_rate_slope(tunable) for tunable in space.tunables]
    values = len(slopes)
    first_value = len(priors)
    priors += [*[BEST_PLACE] * values, *[LOG_WIDTH] * values, *slopes]
    if schedule_ends:
        priors += zip(schedule_length.MEANS, schedule_length.SPREADS, strict=True)
    mean, spread = np.array(priors).T.copy()
    return Law(
        low=low,
        high=high,
        rule=space.rule,
        anchor=space.anchor,
        mean=mean,
        spread=spread,
        knots=knots,
        values=values,
        first_value=first_value,
        schedule_ends=schedule_ends,
    )
