"""The law through steps to a target that were measured elsewhere, by the posterior of a study.

It lies in this layer, as the ends of B_crit's interval are open by a study's own rule.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bstune.core.errors import InputError
from bstune.search.posterior import BOUND, BOUND_DEVIATION, VALUE, Posterior, Rows, sample
from bstune.study.critical import critical_among
from bstune.study.estimates import DRAWS, MOVES, law_at_best_rates
from bstune.study.result import Interval

SEED = 0


@dataclass(frozen=True)
class CurveFit:
    """S*(B) = S_min (1 + B_crit/B), fitted to points; None for what they do not bound."""

    b_crit: Interval
    """The critical batch size in examples, with its 90% interval."""
    s_min: float | None
    """The fewest steps, at any batch size."""
    linear_below: float | None
    """B_crit/9: up to it twice the batch size takes about half of the steps."""
    no_gain_above: float | None
    """9 B_crit: from it on larger batch sizes save hardly a step."""
    posterior: Posterior = field(repr=False, compare=False)
    """Draws of the law's parameters, with its piecewise-linear misfit."""

    def steps(self, batch_size: float) -> float:
        """The predicted median of S*(B), by the law and by how far off it the points lie.

        InputError for what is no finite number of at least 1.
        """
        x = np.log2([_at_least_one(batch_size, "batch_size")])
        return float(np.exp(np.median(self.posterior.law.curve(self.posterior.theta, x))))


def fit_curve(points: Iterable[tuple[float, float, bool]]) -> CurveFit:
    """Fit the steps-to-target curve to points of one's own, each at its best learning rate.

    >>> import bstune
    >>> points = [(8, 1350), (32, 450), (128, 225), (512, 170)]  # batch size, steps to the target
    >>> fit = bstune.fit_curve([(*point, True) for point in points] + [(2, 2000, False)])
    >>> fit.b_crit.low < 60 < fit.b_crit.value < 70 < fit.b_crit.high
    True

    Args:
        points: (batch size, steps, reached): the steps to the target or, of a run that did not
            reach it, the steps that it ran, which are a bound. Several at one batch size are
            several seeds.

    Raises:
        InputError: for fewer than two batch sizes that reached the target, and for batch sizes and
            steps below 1.
    """
    if not isinstance(points, Iterable):
        raise InputError(f"points must be (batch size, steps, reached), but got {points!r:.100}")
    checked = [_point(point) for point in points]
    sizes, steps, reached = np.array(checked, dtype=float).reshape(-1, 3).T
    has_reached = reached == 1.0
    reached_at = len(set(sizes[has_reached]))
    if reached_at < 2:
        raise InputError(
            f"points must have reached the target at two batch sizes or more, but got "
            f"{reached_at}: add runs at others"
        )
    rows = Rows(
        x=np.log2(sizes),
        z=np.zeros(len(checked)),
        log_steps=np.log(steps),
        deviation=np.where(has_reached, 0.0, BOUND_DEVIATION),
        kind=np.where(has_reached, VALUE, BOUND),
    )
    budget = math.ceil(4.0 * float(np.median(steps[has_reached])))
    law = law_at_best_rates(math.floor(sizes.min()), math.ceil(sizes.max()), budget)
    theta = sample(law, rows, np.random.default_rng(SEED), DRAWS, MOVES)
    posterior = Posterior(law, theta, rows, chains=())
    critical = critical_among(posterior, np.round(sizes[has_reached]).astype(int).tolist())
    return CurveFit(
        b_crit=critical.interval,
        s_min=critical.s_min,
        linear_below=critical.linear_below,
        no_gain_above=critical.no_gain_above,
        posterior=posterior,
    )


def _point(point: Any) -> tuple[float, float, bool]:
    """Check a point; InputError for what is none."""
    try:
        batch_size, steps, reached = point
    except (TypeError, ValueError) as error:
        raise InputError(
            f"a point must be (batch size, steps, reached), but got {point!r:.100}"
        ) from error
    # A text such as "False" would count as true, and NaN of a table as well.
    if reached not in (True, False):
        raise InputError(f"reached must be True or False, but got {reached!r:.100}")
    return _at_least_one(batch_size, "batch_size"), _at_least_one(steps, "steps"), bool(reached)


def _at_least_one(value: Any, name: str) -> float:
    """A number from 1 on; InputError, by its name, for anything else."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 1.0 <= number < math.inf:
        raise InputError(f"{name} must be a number, at least 1, but got {value!r:.100}")
    return number
