"""The posterior of a study's frontier, and the exponent of lr*(B) with the rules that fit it.

The exponent over a range of batch sizes is the least-squares slope of log2 lr*(B) over log2 B
there, one for each draw of the posterior (the model's optimum, other hyper-parameters left out).
The prior's own interval, by the same arithmetic, stands beside it: an exponent that the trials do
not narrow is not identified.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bstune.core.records import Target, TrialResult
from bstune.core.scaling import RULES
from bstune.options import ReplayedWorkload
from bstune.result import INTERVAL_LEVEL, Exponent, LearningRateLaw, SeedScatter
from bstune.search.fixed_budget import BudgetPosterior
from bstune.search.frontier_law import NOISE, Prior, draw_prior, optimum
from bstune.search.histories import ideal_value
from bstune.search.posterior import Posterior
from bstune.search.sampler import FrontierSampler
from bstune.study.analysis.critical import INTERVAL, QUANTILES
from bstune.study.prepared import PreparedStudy
from bstune.study.storage.asking import distributions

Array = NDArray[np.float64]
# Draws of the posterior for a report.
REPORT_PARTICLES = 600
# Moves of each draw: with the few that do for a decision, intervals come out too narrow.
MOVES = 10
# Batch sizes of a slope, even in log B.
SLOPE_SIZES = 33
EXPONENT_PRIOR_DRAWS = 4000
# An interval wider than this fraction of the prior's is not identified.
MIN_SHRINKAGE = 0.8
# Trials that reached the target: fewer identify no exponent.
MIN_EXPONENT_TRIALS = 3
# Trials that span less than this share of the octaves of an exponent do not identify it.
MIN_OCTAVES_SHARE = 0.5
# The least ratio of the largest to the smallest batch size: less has no slope.
MIN_SLOPE_SPAN = 2.0


def ideal_of(prepared: PreparedStudy) -> float | None:
    """Give the best value that the study's metric can take.

    It is the better one of the metric's bounds, where the user has set them. Otherwise it is 0 for
    a metric that falls to a positive target, and None for any other.
    """
    bounds = prepared.options.workload.target.bounds
    if bounds is None:
        return ideal_value(prepared.protocol.target, None)
    return ideal_value(prepared.protocol.target, list(bounds))


def sampler_context(prepared: PreparedStudy, finished: Collection[int] = ()) -> dict[str, Any]:
    """Collect the arguments that a study offers a sampler, by their names.

    A sampler's class lists in ``context`` which of them it takes. ``horizon`` says whether
    schedules end with the trial, ``ideal`` is the best value that the metric can have.

    ``finished``: numbers of stopped trials that go no further.
    """
    space = prepared.space
    backend = prepared.backend

    def can_continue(number: int) -> bool:
        return number not in finished and backend.resumable(number, prepared.files)

    resumable: Callable[[int], bool] | None = None
    if backend.stops and backend.continues:
        resumable = can_continue
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
    """Build bstune's own sampler for a study, whichever sampler suggested its trials.

    ``target``: in place of the study's own; None: its own.
    """
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
    """Turn the trials' further hyper-parameters into the values that the search sees.

    Where ``complement`` is set, a value x is searched as 1 - x.
    """
    if not any(tunable.complement for tunable in prepared.space.tunables):
        return done
    records = list[TrialResult]()
    for trial in done:
        searched = prepared.space.searched(trial.hyperparameters)
        records.append(replace(trial, hyperparameters=searched))
    return records


def study_posterior(
    prepared: PreparedStudy,
    done: Sequence[TrialResult],
    particles: int,
    target: Target | None = None,
) -> Posterior:
    """Sample the posterior of the frontier after these trials, whichever sampler suggested them.

    Args:
        prepared: the study.
        done: its trials.
        particles: how many draws.
        target: towards which the trials are read, where it is another one than the study's; None:
            the study's own.
    """
    sampler = _sampler_of(prepared, target)
    rng = np.random.default_rng(prepared.budget.seed)
    # Trials that a recorded table answers may be the same run.
    independent = not isinstance(prepared.options.workload, ReplayedWorkload)
    posterior = sampler.posterior(
        _as_searched(prepared, done),
        particles=particles,
        moves=MOVES,
        rng=rng,
        independent=independent,
    )
    # A sampler gives none only where it has no search space.
    assert posterior is not None  # noqa: S101
    return posterior


def budget_posteriors(
    prepared: PreparedStudy, done: Sequence[TrialResult], particles: int, shares: Sequence[float]
) -> dict[float, BudgetPosterior]:
    """Sample the posterior of the objective loss at each of some shares of the budget.

    A share s, of (0, 1], stands for a study whose trials end at s times the budget. The posteriors
    are given by their shares.
    """
    sampler = _sampler_of(prepared)
    searched = _as_searched(prepared, done)
    by_share = dict[float, BudgetPosterior]()
    for place, share in enumerate(shares):
        # Each share has draws of its own: with shared ones, the growth of the best batch size from
        # share to share would not show the scatter of the draws.
        rng = np.random.default_rng([prepared.budget.seed, place])
        posterior = sampler.budget_posterior(
            searched, share=share, particles=particles, moves=MOVES, rng=rng
        )
        # A sampler gives none only where it has no search space.
        assert posterior is not None  # noqa: S101
        by_share[share] = posterior
    return by_share


def seed_scatter(posterior: Posterior) -> SeedScatter:
    """Estimate the scatter of log S from seed to seed: its standard deviation, with an interval."""
    quantiles = np.quantile(posterior.theta[:, NOISE], QUANTILES)
    low, middle, high = np.exp(quantiles).tolist()
    return SeedScatter(scatter=middle, low=low, high=high, level=INTERVAL_LEVEL)


def fit_lr_exponent(
    posterior: Posterior,
    low: float,
    high: float,
    b_crit: float | None,
    noise_scale: float | None = None,
) -> LearningRateLaw | None:
    """Estimate the exponent of lr*(B) from ``low`` to ``high``, and the one below B_crit.

    It is None where the batch sizes span less than an octave. The scaling rules that take a noise
    scale get ``noise_scale``. Without it they get ``b_crit``, of which it is an estimate
    (McCandlish et al. 2018, section 2), and without either they are left out.
    """
    if high < MIN_SLOPE_SPAN * low:
        return None
    scale = noise_scale or b_crit
    whole = _exponent(posterior, low, high, scale)
    below: Exponent | None = None
    if b_crit is not None and min(high, b_crit) >= MIN_SLOPE_SPAN * low:
        below = _exponent(posterior, low, min(high, b_crit), scale)
        if below.reached < MIN_EXPONENT_TRIALS:
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
    """Estimate the exponent of lr*(B) over a range, and tell whether the trials identify it."""
    prior = posterior.prior
    drawn = slopes(posterior.theta, prior, start, end)
    low, middle, high = np.quantile(drawn, QUANTILES).tolist()
    prior_theta = draw_prior(prior, EXPONENT_PRIOR_DRAWS, np.random.default_rng(0))
    prior_drawn = slopes(prior_theta, prior, start, end)
    prior_low, prior_high = np.quantile(prior_drawn, INTERVAL).tolist()
    log_sizes = list[float]()
    for observation in posterior.observations:
        # The margin lets the largest batch size count, whose logarithm may be rounded upwards.
        is_in_range = math.log2(start) <= observation.x <= math.log2(end) + 1e-9
        if observation.status == "reached" and is_in_range:
            log_sizes.append(observation.x)
    octaves = 0.0
    if log_sizes:
        octaves = max(log_sizes) - min(log_sizes)
    spans_enough = octaves >= MIN_OCTAVES_SHARE * math.log2(end / start)
    is_narrowed = high - low < MIN_SHRINKAGE * (prior_high - prior_low)
    return Exponent(
        exponent=middle,
        low=low,
        high=high,
        prior_low=prior_low,
        prior_high=prior_high,
        start=start,
        end=end,
        reached=len(log_sizes),
        octaves=octaves,
        identified=len(log_sizes) >= MIN_EXPONENT_TRIALS and spans_enough and is_narrowed,
        rules=rule_exponents(start, end, noise_scale),
    )


def slopes(theta: Array, prior: Prior, low: float, high: float) -> Array:
    """Give the least-squares slope of log2 lr*(B) over log2 B from ``low`` to ``high``.

    ``theta`` has m draws of the posterior's p parameters, shape (m, p). The slopes have shape (m,).
    """
    log_sizes = np.linspace(math.log2(low), math.log2(high), SLOPE_SIZES)
    return _slope(log_sizes, optimum(theta, prior.points_at(log_sizes), prior))


def rule_exponents(low: float, high: float, noise_scale: float | None) -> dict[str, float]:
    """Give the slope of log lr over log B of each scaling rule, by name, in rising order.

    They are fitted by the same least squares as the trials' exponent. A rule that takes a noise
    scale is left out where that is None.
    """
    log_sizes = np.linspace(math.log2(low), math.log2(high), SLOPE_SIZES)
    exponents = dict[str, float]()
    for name, rule in RULES.items():
        if rule.exponent is not None:
            # The exponent is exact, and no sum of rounded logarithms: an interval may end exactly
            # there.
            exponents[name] = rule.exponent
        elif noise_scale is not None:
            # The slope is the same from any reference.
            lrs = list[float]()
            for log_size in log_sizes:
                lr = rule.lr(
                    2.0**log_size,
                    reference_batch_size=1.0,
                    reference_lr=1.0,
                    noise_scale=noise_scale,
                )
                lrs.append(lr)
            exponents[name] = float(_slope(log_sizes, np.log2(lrs)))
    return dict(sorted(exponents.items(), key=lambda item: item[1]))


def _slope(x: Array, y: Array) -> Array:
    """Give the least-squares slope of y over x.

    x has shape (n,). y of shape (n,) gives a number, y of shape (m, n) gives shape (m,).
    """
    centred = x - x.mean()
    return np.asarray(y @ centred / (centred @ centred))
