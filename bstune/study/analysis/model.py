"""The posterior of a study's frontier, and the exponent of lr*(B) with the rules that fit it.

The exponent over a range of batch sizes is the least-squares slope of log2 lr*(B) over log2 B there, one for each draw
of the posterior (the model's optimum, other hyper-parameters left out). The prior's own interval, by the same
arithmetic, stands beside it: an exponent that the trials do not narrow is not identified.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bstune.core.records import Target, TrialResult
from bstune.core.scaling import RULES
from bstune.options import ReplayedWorkload
from bstune.result import INTERVAL_LEVEL, Exponent, LearningRateLaw, SeedScatter
from bstune.search.fixed_budget import BudgetPosterior
from bstune.search.histories import ideal_value
from bstune.search.observations import Posterior
from bstune.search.posterior import NOISE, Prior, draw_prior, optimum
from bstune.search.sampler import FrontierSampler
from bstune.study.analysis.critical import INTERVAL
from bstune.study.prepare import PreparedStudy
from bstune.study.storage.asking import distributions

Array = NDArray[np.float64]
REPORT_PARTICLES = 600  # of the posterior for a report
MOVES = 10  # of its sampler: at the few of a decision, intervals come out too narrow
GRID = 33  # batch sizes of a slope, even in log B
PRIOR_DRAWS = 4000
MIN_SHRINKAGE = 0.8  # an interval wider than this fraction of the prior's is not identified
MIN_REACHED = 3  # reached trials, fewer identify no exponent ...
MIN_SHARE = 0.5  # ... nor do those that span less than this share of the octaves that it is about
MIN_SPAN = 2.0  # of batch sizes, largest over smallest: less has no slope


def ideal_of(prepared: PreparedStudy) -> float | None:
    """Return the best value that the study's metric can take; None where it has no bound."""
    bounds = prepared.options.workload.target.bounds
    return ideal_value(prepared.protocol.target, None if bounds is None else list(bounds))


def sampler_context(prepared: PreparedStudy, finished: Collection[int] = ()) -> dict[str, Any]:
    """Return the study's arguments for a sampler that stops and continues trials; ``finished`` ones go no further."""
    space, backend, files = prepared.space, prepared.backend, prepared.files
    resumable = (
        (lambda number: number not in finished and backend.resumable(number, files))
        if backend.stops and backend.continues
        else None
    )
    return {
        "objective": prepared.budget.objective,
        "rule": space.rule,
        "budget": lambda batch_size: float(prepared.last_step(batch_size)),
        "target": prepared.protocol.target,
        "ideal": ideal_of(prepared),
        "resumable": resumable,
        "snap": space.snap,
        "lr_range": (space.lr_low, space.lr_high),
        "step_time": backend.step_time,
        "horizon": backend.horizon,
        "search_space": distributions(space),
    }


def _sampler_of(prepared: PreparedStudy, target: Target | None = None) -> FrontierSampler:
    """Give bstune's own sampler, whatever suggested the trials; ``target``: in place of the study's."""
    prior = prepared.options.prior
    context = sampler_context(prepared)
    if target is not None:
        context["target"] = target
    return FrontierSampler(
        **context,
        sigma=prior.level_sigma,
        exponent_sigma=prior.exponent_sigma,
        noise_scale=prepared.options.scaling.noise_scale,
    )


def _as_searched(prepared: PreparedStudy, done: Sequence[TrialResult]) -> Sequence[TrialResult]:
    """Give the trials with their further hyper-parameters on the axes that are searched: the model's."""
    if not any(one.complement for one in prepared.space.tunables):
        return done
    searched = prepared.space.searched
    return [replace(one, hyperparameters=searched(one.hyperparameters)) for one in done]


def study_posterior(
    prepared: PreparedStudy,
    done: Sequence[TrialResult],
    particles: int,
    target: Target | None = None,
) -> Posterior:
    """Return the posterior of the frontier after these trials, whatever sampler suggested them; ``target``: theirs."""
    sampler = _sampler_of(prepared, target)
    rng = np.random.default_rng(prepared.budget.seed)
    # On a recorded table trials repeat its runs.
    independent = not isinstance(prepared.options.workload, ReplayedWorkload)
    posterior = sampler.posterior(
        _as_searched(prepared, done),
        particles=particles,
        moves=MOVES,
        rng=rng,
        independent=independent,
    )
    assert posterior is not None  # noqa: S101 - its search space is given
    return posterior


def budget_posteriors(
    prepared: PreparedStudy, done: Sequence[TrialResult], particles: int, shares: Sequence[float]
) -> dict[float, BudgetPosterior]:
    """Give the posterior of the objective loss for these shares of the budget, of the same trials."""
    sampler = _sampler_of(prepared)
    searched = _as_searched(prepared, done)
    found = dict[float, BudgetPosterior]()
    for place, share in enumerate(shares):
        # With the same draws for each share, their growth would have no scatter.
        rng = np.random.default_rng([prepared.budget.seed, place])
        posterior = sampler.budget_posterior(
            searched, share=share, particles=particles, moves=MOVES, rng=rng
        )
        assert posterior is not None  # noqa: S101 - its search space is given
        found[share] = posterior
    return found


def seed_scatter(posterior: Posterior) -> SeedScatter:
    """Return the scatter of log S from seed to seed, one standard deviation: its median and interval."""
    low, middle, high = np.exp(
        np.quantile(posterior.theta[:, NOISE], (INTERVAL[0], 0.5, INTERVAL[1]))
    ).tolist()
    return SeedScatter(scatter=middle, low=low, high=high, level=INTERVAL_LEVEL)


def fit_lr_exponent(
    posterior: Posterior,
    low: float,
    high: float,
    b_crit: float | None,
    noise_scale: float | None = None,
) -> LearningRateLaw | None:
    """Give the exponent of lr*(B), and that below B_crit; None for less than an octave.

    The rules that take a noise scale get ``b_crit`` where there is none (McCandlish et al. 2018, section 2); without
    either they are left out.
    """
    if high < MIN_SPAN * low:
        return None
    scale = noise_scale or b_crit
    whole = _exponent(posterior, low, high, scale)
    edge = 0.0 if b_crit is None else min(high, b_crit)
    below = None
    if edge >= MIN_SPAN * low:
        below = _exponent(posterior, low, edge, scale)
    if below is not None and below.reached < MIN_REACHED:
        below = None
    return LearningRateLaw(
        exponent=whole.exponent,
        low=whole.low,
        high=whole.high,
        prior_low=whole.prior_low,
        prior_high=whole.prior_high,
        start=whole.start,
        end=whole.end,
        reached=whole.reached,
        octaves=whole.octaves,
        identified=whole.identified,
        rules=whole.rules,
        below_b_crit=below,
        level=INTERVAL_LEVEL,
    )


def _exponent(
    posterior: Posterior, start: float, end: float, noise_scale: float | None
) -> Exponent:
    theta, prior = posterior.theta, posterior.prior
    quantiles = (INTERVAL[0], 0.5, INTERVAL[1])
    low, middle, high = np.quantile(slopes(theta, prior, start, end), quantiles).tolist()
    draws = draw_prior(prior, PRIOR_DRAWS, np.random.default_rng(0))
    prior_low, prior_high = np.quantile(slopes(draws, prior, start, end), INTERVAL).tolist()
    logs = [one.x for one in posterior.observations if one.status == "reached"]
    there = [x for x in logs if math.log2(start) <= x <= math.log2(end) + 1e-9]
    octaves = max(there) - min(there) if there else 0.0
    enough = len(there) >= MIN_REACHED and octaves >= MIN_SHARE * math.log2(end / start)
    return Exponent(
        exponent=middle,
        low=low,
        high=high,
        prior_low=prior_low,
        prior_high=prior_high,
        start=start,
        end=end,
        reached=len(there),
        octaves=octaves,
        identified=enough and high - low < MIN_SHRINKAGE * (prior_high - prior_low),
        rules=rule_exponents(start, end, noise_scale),
    )


def slopes(theta: Array, prior: Prior, low: float, high: float) -> Array:
    """Return the least-squares slope of log2 lr*(B) over log2 B from ``low`` to ``high``: draws (m, p) give (m,)."""
    x = np.linspace(math.log2(low), math.log2(high), GRID)
    return np.asarray(_slope(x, optimum(theta, prior.at(x), prior)))


def rule_exponents(low: float, high: float, noise_scale: float | None) -> dict[str, float]:
    """Return the slope of each scaling rule's log lr over log B, by the same least squares, in rising order."""
    x = np.linspace(math.log2(low), math.log2(high), GRID)
    exponents = dict[str, float]()
    for name, rule in RULES.items():
        if rule.exponent is not None:
            # Not by a sum of rounded logarithms: an interval may end there.
            exponents[name] = rule.exponent
        elif noise_scale is not None:
            lrs = [rule.lr(2.0**size, 1.0, 1.0, noise_scale) for size in x]
            exponents[name] = float(_slope(x, np.log2(lrs)))
    return dict(sorted(exponents.items(), key=lambda item: item[1]))


def _slope(x: Array, y: Array) -> Any:
    away = x - x.mean()
    return y @ away / (away @ away)
