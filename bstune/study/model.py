"""What bstune's own model is told of a job, and what it tells of B_crit.

Which scaling rule held: the posterior exponent of lr*(B), with its interval and in words.

The exponent over a range of batch sizes is the least-squares slope of log2 lr*(B) over log2 B there, one for each draw
of the posterior (the model's optimum, its residual left out). What the prior alone would say, by the same arithmetic,
stands beside it: an exponent that the trials hardly tell is no finding.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bstune.core.records import TrialResult
from bstune.search.acquisition import b_crit_quantiles
from bstune.search.observations import Posterior, ideal_value
from bstune.search.posterior import Prior, draw_prior, optimum
from bstune.search.sampler import FrontierSampler
from bstune.study.prepare import PreparedStudy
from bstune.study.storage import distributions

INTERVAL = (0.05, 0.95)  # of B_crit's posterior, for search.precision
MOVES = 10  # of its sampler: at the few of a decision, intervals come out too narrow


def own_arguments(prepared: PreparedStudy, ended: Collection[int] = ()) -> dict[str, Any]:
    """Return what bstune's own sampler is told of the job, where ``ended`` trials go no further."""
    space = prepared.space

    def resumable(number: int) -> bool:
        return number not in ended and prepared.backend.resumable(number, prepared.files)

    return {
        "objective": prepared.budget.objective,
        "rule": space.rule,
        "budget": lambda batch_size: float(prepared.protocol.budget.last_step(round(batch_size))),
        "target": prepared.protocol.target,
        "ideal": _ideal(prepared),
        "resumable": resumable if prepared.backend.stops else None,
        "snap": space.snap,
        "lr_range": (space.lr_low, space.lr_high),
        "step_time": prepared.backend.step_time,
        "search_space": distributions(space),
    }


def _ideal(prepared: PreparedStudy) -> float | None:
    bounds = prepared.config.workload.target.bounds
    return ideal_value(prepared.protocol.target, None if bounds is None else list(bounds))


def known_of(prepared: PreparedStudy, done: Sequence[TrialResult], particles: int) -> Posterior:
    """Return the posterior of the frontier after these trials, whatever sampler asked them."""
    sampler = FrontierSampler(
        **own_arguments(prepared),
        sigma=prepared.config.prior.level_sigma,
        exponent_sigma=prepared.config.prior.exponent_sigma,
        noise_scale=prepared.config.scaling.noise_scale,
    )
    posterior = sampler.posterior(
        done, particles=particles, moves=MOVES, rng=np.random.default_rng(prepared.budget.seed)
    )
    assert posterior is not None  # its search space is given
    return posterior


def b_crit_interval(prepared: PreparedStudy, posterior: Posterior) -> list[float]:
    """Return the low end, the median and the high end of B_crit's interval, in examples."""
    rng = np.random.default_rng([prepared.budget.seed, len(posterior.observations)])
    return [float(value) for value in b_crit_quantiles(posterior, (INTERVAL[0], 0.5, INTERVAL[1]), rng)]


Array = NDArray[np.float64]
RULES = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}  # exponents of lr*(B)
GRID = 33  # batch sizes, even in log B
PRIOR_DRAWS = 4000
HARDLY = 0.8  # an interval this much as wide as the prior's says what the prior says
FEWEST = 3  # reached trials below which there is no exponent but the prior's
LEAST_OCTAVES = 1.0


@dataclass(frozen=True)
class Exponent:
    """The exponent of lr*(B) over the batch sizes from ``start`` to ``end``: median and interval.

    ``prior_low`` and ``prior_high`` are the interval of the prior alone; ``told`` is whether the trials narrow it, and
    ``reached`` the number of trials there that reached the target.
    """

    exponent: float
    low: float
    high: float
    prior_low: float
    prior_high: float
    start: float
    end: float
    reached: int
    told: bool


@dataclass(frozen=True)
class Held:
    """Which rule held over all batch sizes, and below B_crit: None where that range is too short or too few reached.

    ``level`` is the coverage of the intervals, ``text`` all of it in words.
    """

    whole: Exponent
    below_b_crit: Exponent | None
    level: float
    text: str


def which_rule_held(posterior: Posterior, low: float, high: float, b_crit: float, level: float = 0.9) -> Held | None:
    """Return the exponent of lr*(B) over the batch sizes from ``low`` to ``high``, and over those below B_crit.

    Args:
        posterior: after the trials.
        low: smallest batch size.
        high: largest batch size.
        b_crit: the posterior's median, in examples.
        level: coverage of the intervals.

    Returns:
        None where the range is less than an octave: it has no slope. With fewer than three reached trials the exponent
        is next to the prior's, and ``told`` is False.
    """
    if not math.log2(high / low) >= LEAST_OCTAVES:
        return None
    sizes = [2.0**one.x for one in posterior.observations if one.status == "reached"]
    whole = _exponent(posterior, (low, high), sizes, level)
    edge = min(high, b_crit)
    below = None
    if edge > low and math.log2(edge / low) >= LEAST_OCTAVES:
        found = _exponent(posterior, (low, edge), sizes, level)
        below = found if found.reached >= FEWEST else None
    return Held(whole, below, level, _text(whole, below, b_crit))


def held_row(held: Held) -> dict[str, Any]:
    """Return plain data for ``curve.json``: the whole range's exponent, ``below_b_crit`` (or null), level and text."""
    below = None if held.below_b_crit is None else _row(held.below_b_crit)
    return {**_row(held.whole), "below_b_crit": below, "level": held.level, "text": held.text}


def slopes(theta: Array, prior: Prior, low: float, high: float) -> Array:
    """Return the least-squares slope of log2 lr*(B) over log2 B from ``low`` to ``high``: draws (m, p) give (m,)."""
    x = np.linspace(math.log2(low), math.log2(high), GRID)
    away = x - x.mean()
    return np.asarray(optimum(theta, x, prior) @ away / (away @ away))


def _exponent(posterior: Posterior, span: tuple[float, float], sizes: list[float], level: float) -> Exponent:
    tail = 0.5 * (1.0 - level)
    low, middle, high = np.quantile(slopes(posterior.theta, posterior.prior, *span), [tail, 0.5, 1.0 - tail]).tolist()
    alone = draw_prior(posterior.prior, PRIOR_DRAWS, np.random.default_rng(0))
    prior_low, prior_high = np.quantile(slopes(alone, posterior.prior, *span), [tail, 1.0 - tail]).tolist()
    reached = sum(span[0] <= size <= span[1] * (1.0 + 1e-9) for size in sizes)
    told = reached >= FEWEST and high - low < HARDLY * (prior_high - prior_low)
    return Exponent(middle, low, high, prior_low, prior_high, *span, reached, told)


def _row(found: Exponent) -> dict[str, Any]:
    return {
        "exponent": found.exponent,
        "low": found.low,
        "high": found.high,
        "prior_low": found.prior_low,
        "prior_high": found.prior_high,
        "from": found.start,
        "to": found.end,
        "reached": found.reached,
        "told": found.told,
    }


def _text(whole: Exponent, below: Exponent | None, b_crit: float) -> str:
    if whole.reached < FEWEST:
        return (
            f"not told: {whole.reached or 'no'} trial{'s' * (whole.reached != 1)} reached the target, and it takes "
            f"{FEWEST}; the prior alone says an exponent of {_interval(whole.prior_low, whole.prior_high)}"
        )
    full = f"from B = {_size(whole.start)} to {_size(whole.end)}"
    edge = _size(float(f"{b_crit:.2g}"))
    if below is None:
        return (
            f"{_clause(whole, full)}; below the posterior's B_crit, {edge}, there are too few batch sizes or reached "
            "trials to tell"
        )
    if below.end >= whole.end:
        return _clause(below, f"up to B = {_size(below.end)}, all of it below the posterior's B_crit")
    near = _clause(below, f"up to B = {edge}, the posterior's B_crit")
    return f"{near}; {_clause(whole, full)}"


def _clause(found: Exponent, where: str) -> str:
    """Return one exponent in words; the prior's interval stands beside it."""
    verb = "fell" if found.exponent < 0.0 else "grew"
    power = f"lr {verb} as B^{_power(found.exponent)} {_interval(found.low, found.high)} {where}"
    alone = f"the prior alone: {_interval(found.prior_low, found.prior_high)}"
    if not found.told:
        few = f", {found.reached} reached trials there" if found.reached < FEWEST else ""
        return f"{power}: the trials hardly tell ({alone}{few})"
    return f"{power}: {verdict(found.low, found.high)} ({alone})"


def verdict(low: float, high: float) -> str:
    """Return what an interval of the exponent says of the rules none (0), sqrt (1/2) and linear (1), in words."""
    fitting = [name for name, exponent in RULES.items() if low <= exponent <= high]
    if len(fitting) == 1:
        return "no scaling, as none says" if fitting == ["none"] else f"as {fitting[0]} says"
    if fitting:
        count = "both" if len(fitting) == 2 else "all"
        return f"{', '.join(fitting[:-1])} and {fitting[-1]} {count} fit"
    below = [name for name, exponent in RULES.items() if exponent < low]
    above = [name for name, exponent in RULES.items() if exponent > high]
    if below and above:
        return f"between {below[-1]} and {above[0]}"
    return "faster than linear" if below else "against all of none, sqrt and linear"


def _power(value: float) -> str:
    text = f"{value:.2f}"
    return "0.00" if text == "-0.00" else text


def _interval(low: float, high: float) -> str:
    return f"[{_power(low)}, {_power(high)}]"


def _size(batch_size: float) -> str:
    return f"{batch_size:,.0f}" if batch_size >= 1e4 else f"{batch_size:.0f}"
