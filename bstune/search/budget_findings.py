"""What the trials of a fixed budget say: the point to use, how good it is, and what else would do.

Metrics are read from the ruler. A point that is ``behind`` by so much has at its budget's end what
the best trial had at the share e^-behind of its own; one that is ahead has what the best trial's
slope leads to. Intervals hold 90% of the posterior's draws; they are of the metric without the luck
of a seed.

The same histories, read up to a half, a quarter and an eighth of the budget, show how the best
batch size moves with the budget. The exponent of B ~ budget^exponent is the slope of a line through
log B* of one draw at each share. The draws of two shares are independent, though the trials are the
same: errors that they share would cancel, so that the interval is wide rather than narrow::

    posteriors = {}
    for share in BUDGET_SHARES:
        posteriors[share] = sampler.budget_posterior(study, share=share, particles=1000, moves=8)
    findings = findings_of(posteriors)
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bstune.search.budget_runs import BudgetRun
from bstune.search.candidates import MEMORY_ROOM
from bstune.search.fixed_budget import BudgetPosterior, Expected, rank_full_trials
from bstune.search.frontier_law import NOISE, frontier, log_steps, optimum, other_places
from bstune.search.ruler import Array, Ruler, RunningBest

# Shares of the budget up to which the trials are read.
BUDGET_SHARES = (1.0, 0.5, 0.25, 0.125)
# The best batch size is foretold for so many times the budget.
LONGER = 4.0
# Batch sizes per octave on the curve of the best metric.
SIZES_PER_OCTAVE = 4
# Batch sizes per octave among which the best one of a draw is sought.
OPTIMA_PER_OCTAVE = 16
# Quantiles of the draws: the ends of an interval that holds 90% of them, and the median.
LOW_MEDIAN_HIGH = (0.05, 0.5, 0.95)
# Metrics whose range is within this share of the largest count as the same.
NO_DIFFERENCE = 1e-6
# The least chance of being as good as the best that is not yet "shown to be worse". A batch size is
# better than the best one in each draw whose own best lies past half way to it: so these reach
# about twice as far as the interval of the best one.
LEAST_CHANCE_AS_GOOD = 0.05


@dataclass(frozen=True)
class RankedTrial:
    """A full trial, and what a fresh seed of it is predicted to be."""

    number: int
    batch_size: int
    lr: float
    metric: float
    """The best that the trial itself had within its budget."""
    behind: float
    """How far a fresh seed is predicted to be behind the best full trial, in log steps."""
    fresh_metric: float
    """The metric that a fresh seed is predicted to have."""


@dataclass(frozen=True)
class MetricAtSize:
    """The best metric that a batch size has at the budget's end, and the learning rate for it.

    Each has the ends of its 90% interval: ``_low`` is the smaller number, whichever way the metric
    is to go.
    """

    batch_size: int
    metric: float
    metric_low: float
    metric_high: float
    lr: float
    lr_low: float
    lr_high: float


@dataclass(frozen=True)
class AsGoodSizes:
    """The batch sizes around the best one that are not shown to be worse."""

    low: int
    high: int
    low_open: bool
    """Whether the search's smallest batch size is one of them: smaller ones may be, too."""
    high_open: bool


@dataclass(frozen=True)
class BestSize:
    """The best batch size for a share of the budget, with the ends of its 90% interval."""

    share: float
    batch_size: float
    low: float
    high: float
    at_end: bool
    """Whether it is an end of the batch sizes that were searched: the best one may lie beyond."""


@dataclass(frozen=True)
class SizeGrowth:
    """How the best batch size grows with the budget: B ~ budget^exponent, with its 90% interval."""

    exponent: float
    low: float
    high: float
    best_sizes: tuple[BestSize, ...]
    """The longest budget first."""
    longer: BestSize
    """The best batch size for ``LONGER`` times the budget, by the same lines."""


@dataclass(frozen=True)
class GainLeft:
    """What further points may gain over a fresh seed of the best one, in units of the metric.

    In each draw of the posterior the law at the best trial's place is compared with the law
    elsewhere: the luck that the trial had is in neither.

    Args:
        next_point: the gain expected of the best single point that could run next.
        at_most: the gain expected if the law were known exactly: no search can expect more.
        seed_scatter: the gain that a standard deviation of the noise from seed to seed is worth.
    """

    next_point: float
    at_most: float
    seed_scatter: float


@dataclass(frozen=True)
class NoDifference:
    """Full trials whose metric is the same at the budget's end.

    Args:
        metric: the one that all of them have.
        differs_at: the smallest share of the budget at which they differed. None: they never did,
            so that the trials do not say which budget would tell them apart.
    """

    metric: float
    differs_at: float | None


@dataclass(frozen=True)
class BudgetFindings:
    """All that a report needs of a fixed budget."""

    ranked: tuple[RankedTrial, ...]
    """The best first."""
    curve: tuple[MetricAtSize, ...]
    """The best metric over batch sizes, in ascending order."""
    as_good: AsGoodSizes
    gain_left: GainLeft
    no_difference: NoDifference | None
    """None where the full trials differ, or are of one point."""
    growth: SizeGrowth | None
    """None where fewer than two shares of the budget have a full trial."""


def findings_of(posteriors: Mapping[float, BudgetPosterior]) -> BudgetFindings | None:
    """Collect the findings of a fixed budget; None before a trial has run to its end, the ruler.

    ``posteriors`` holds the posterior of the whole budget at the key 1.0, and those of shares of
    the budget at these shares.
    """
    whole = posteriors[1.0]
    # The best full trial's curve, from which metrics are read.
    ruler = whole.ruler
    if ruler is None:
        return None
    expected = rank_full_trials(whole)
    x = _log_size_grid(whole, SIZES_PER_OCTAVE)
    drawn = _behind_at_best_rates(whole, x)
    return BudgetFindings(
        ranked=tuple(_ranked_trial(whole, ruler, fresh) for fresh in expected),
        curve=_best_over_sizes(whole, ruler, x, drawn),
        as_good=_sizes_as_good(x, drawn),
        gain_left=_gain_over(whole, ruler, expected[0].run),
        no_difference=_no_difference(whole),
        growth=size_growth(posteriors),
    )


def gain_left_of(posterior: BudgetPosterior) -> GainLeft | None:
    """Predict what further points may gain over the best one; None before a trial is full."""
    if posterior.ruler is None:
        return None
    return _gain_over(posterior, posterior.ruler, rank_full_trials(posterior)[0].run)


def share_to_match(
    winners: Sequence[RunningBest], baselines: Sequence[RunningBest]
) -> float | None:
    """Find the share of the budget at which the winner first has the baseline's final metric.

    That is the baseline's best metric by its budget's end. Where several seeds were run, the mean
    of their running bests is taken, on the scale of heights that falls as the metric gets better.
    Between two evaluations the share is interpolated in its logarithm. None where the winner never
    has that metric, or where either has no run.
    """
    if not winners or not baselines:
        return None
    goal = float(np.mean([curve.best for curve in baselines]))
    log_shares = np.unique(np.concatenate([curve.log_shares for curve in winners]))
    # Before all of them have been evaluated there is no mean.
    log_start = max(float(curve.log_shares[0]) for curve in winners)
    log_shares = log_shares[log_shares >= log_start]
    curves = [np.interp(log_shares, curve.log_shares, curve.heights) for curve in winners]
    mean = np.mean(curves, axis=0)
    met = np.flatnonzero(mean <= goal)
    if not met.size:
        return None
    first = int(met[0])
    # There is no earlier evaluation to interpolate from.
    if first == 0:
        return math.exp(float(log_shares[0]))
    missed = first - 1
    # How far the goal is from the last evaluation that missed it to the first that met it, 0 to 1.
    part = (mean[missed] - goal) / (mean[missed] - mean[first])
    log_share = log_shares[missed] + part * (log_shares[first] - log_shares[missed])
    return math.exp(float(log_share))


def size_growth(posteriors: Mapping[float, BudgetPosterior]) -> SizeGrowth | None:
    """Fit how the best batch size B* grows with the budget: B* ~ budget^exponent.

    The exponent is the slope of a line through log B* at several shares of the budget.
    ``posteriors`` are by their share. None where fewer than two of them have a full trial, one that
    has run to the end of that share.
    """
    # The ruler is the best full trial's curve, by which others are compared: None without one.
    shares = [share for share in posteriors if posteriors[share].ruler is not None]
    shares = sorted(shares, reverse=True)
    if len(shares) < 2:
        return None
    optima = list[Array]()
    best_sizes = list[BestSize]()
    for share in shares:
        x = _log_size_grid(posteriors[share], OPTIMA_PER_OCTAVE)
        # In each draw the best batch size is the one that is least behind the best full trial, each
        # batch size taken at its best learning rate.
        best = x[_behind_at_best_rates(posteriors[share], x).argmin(axis=1)]
        optima.append(best)
        best_sizes.append(_best_size(share, best, x))
    # A line through the i-th draw of each posterior is one draw of the exponent. At the share 1 its
    # log is 0, and the line has its intercept: the best size of the whole budget.
    count = min(len(best) for best in optima)
    log2_sizes = np.stack([best[:count] for best in optima])
    exponents, log2_now = np.polyfit(np.log2(shares), log2_sizes, 1)
    low, middle, high = np.quantile(exponents, LOW_MEDIAN_HIGH).tolist()
    searched = _log_size_grid(posteriors[shares[0]], OPTIMA_PER_OCTAVE)
    # The line goes on to a budget ``LONGER`` times as large.
    log2_later = log2_now + exponents * math.log2(LONGER)
    longer = _best_size(LONGER, log2_later, searched)
    return SizeGrowth(
        exponent=middle, low=low, high=high, best_sizes=tuple(best_sizes), longer=longer
    )


def _best_size(share: float, log2_sizes: Array, searched: Array) -> BestSize:
    """Summarise draws of log2 of the best batch size by their median and 90% interval.

    ``share`` is of the budget for which it is the best. ``searched`` are log2 of the batch sizes
    that were searched, in ascending order.
    """
    low, middle, high = np.quantile(log2_sizes, LOW_MEDIAN_HIGH).tolist()
    return BestSize(
        share=share,
        batch_size=2.0**middle,
        low=2.0**low,
        high=2.0**high,
        at_end=bool(middle <= searched[0] or middle >= searched[-1]),
    )


def _no_difference(posterior: BudgetPosterior) -> NoDifference | None:
    """Find the metric that all full trials end with, and the smallest share at which they differed.

    Full trials have run to the budget's end; the share is of the budget. None where their metrics
    differ at the budget's end, or where fewer than two points have a full trial: runs of one point
    say nothing of batch sizes.
    """
    points = {(run.x, run.z, run.other) for run in posterior.full}
    curves = [run.curve for run in posterior.full if run.curve is not None]
    final_metrics = posterior.scale.metric(np.array([curve.best for curve in curves]))
    if len(points) < 2 or _differ(final_metrics):
        return None
    differs_at: float | None = None
    for log_share in np.unique(np.concatenate([curve.log_shares for curve in curves])).tolist():
        evaluated = [curve for curve in curves if curve.log_shares[0] <= log_share]
        heights = [curve.heights[curve.log_shares <= log_share][-1] for curve in evaluated]
        if _differ(posterior.scale.metric(np.array(heights))):
            differs_at = math.exp(log_share)
            break
    return NoDifference(float(final_metrics[0]), differs_at)


def _differ(metrics: Array) -> bool:
    """Whether some of the metrics differ by more than rounding."""
    return bool(np.ptp(metrics) > NO_DIFFERENCE * np.abs(metrics).max())


def _log_size_grid(posterior: BudgetPosterior, per_octave: int) -> Array:
    """Space log2 of batch sizes evenly over the study's range, ``per_octave`` of them per octave.

    Those that do not fit into memory are left out.
    """
    prior = posterior.prior
    # ``too_large`` is log2 of the smallest batch size that ran out of memory.
    log_high = max(prior.log_low, min(prior.log_high, posterior.too_large - MEMORY_ROOM))
    count = 1 + math.ceil(per_octave * (log_high - prior.log_low))
    return np.linspace(prior.log_low, log_high, count)


def _behind_at_best_rates(posterior: BudgetPosterior, x: Array) -> Array:
    """Compute how far n batch sizes, each at its best rate, are behind the best full trial: (m, n).

    It is log(steps that they need for that trial's best metric / steps of their budget), by m draws
    of the posterior. ``x`` are log2 of the batch sizes.
    """
    log_s = frontier(posterior.theta, posterior.prior.points_at(x), posterior.prior)
    return np.asarray(log_s - posterior.log_budget(x))


def _metric_at_end(posterior: BudgetPosterior, ruler: Ruler, behind: Array) -> Array:
    """Convert how far points are behind the best full trial to their metric at the budget's end.

    The ruler is that trial's curve. A point that is ``behind`` it, in log steps, has at the end of
    its budget the metric that the ruler had at the share e^-``behind`` of its own.
    """
    return posterior.scale.metric(ruler.height(-behind))


def _ranked_trial(posterior: BudgetPosterior, ruler: Ruler, expected: Expected) -> RankedTrial:
    """Describe a full trial by its own metric and by that expected of a fresh seed.

    The latter is read off the ruler, the best full trial's curve.
    """
    run = expected.run
    height = np.array([run.best_height])
    return RankedTrial(
        number=run.number,
        batch_size=round(2.0**run.x),
        lr=2.0**run.z,
        metric=float(posterior.scale.metric(height)[0]),
        behind=expected.behind,
        fresh_metric=float(_metric_at_end(posterior, ruler, np.array([expected.behind]))[0]),
    )


def _best_over_sizes(
    posterior: BudgetPosterior, ruler: Ruler, x: Array, drawn: Array
) -> tuple[MetricAtSize, ...]:
    """Compute the best metric at batch sizes ``x`` (log2), and the learning rate that it takes.

    ``drawn`` is how far behind the best full trial, the ruler, each is in draws of the posterior,
    (m, n).
    """
    metrics = np.quantile(_metric_at_end(posterior, ruler, drawn), LOW_MEDIAN_HIGH, axis=0)
    log_rates = optimum(posterior.theta, posterior.prior.points_at(x), posterior.prior)
    rates = np.exp2(np.quantile(log_rates, LOW_MEDIAN_HIGH, axis=0))
    curve = list[MetricAtSize]()
    for i, size in enumerate(np.exp2(x).tolist()):
        metric_low, metric, metric_high = metrics[:, i].tolist()
        lr_low, lr, lr_high = rates[:, i].tolist()
        curve.append(
            MetricAtSize(
                batch_size=round(size),
                metric=metric,
                metric_low=metric_low,
                metric_high=metric_high,
                lr=lr,
                lr_low=lr_low,
                lr_high=lr_high,
            )
        )
    return tuple(curve)


def _sizes_as_good(x: Array, drawn: Array) -> AsGoodSizes:
    """Find the range of batch sizes around the best one that are not shown to be worse.

    In at least ``LEAST_CHANCE_AS_GOOD`` of the draws each is as good as the best one. ``drawn`` is
    how far behind the best full trial the batch sizes ``x`` (log2) are, (m, n).
    """
    best = int(np.median(drawn, axis=0).argmin())
    chance = (drawn <= drawn[:, [best]]).mean(axis=0)
    first = best
    while first > 0 and chance[first - 1] >= LEAST_CHANCE_AS_GOOD:
        first -= 1
    last = best
    while last < len(x) - 1 and chance[last + 1] >= LEAST_CHANCE_AS_GOOD:
        last += 1
    return AsGoodSizes(
        low=round(2.0 ** float(x[first])),
        high=round(2.0 ** float(x[last])),
        low_open=first == 0,
        high_open=last == len(x) - 1,
    )


def _gain_over(posterior: BudgetPosterior, ruler: Ruler, best: BudgetRun) -> GainLeft:
    """Predict by how much further points may better the metric of a fresh seed of the best run.

    The ``ruler`` is the best full trial's curve, off which metrics are read.
    """
    x = _log_size_grid(posterior, SIZES_PER_OCTAVE)
    drawn = _behind_at_points(
        posterior, np.array([best.x]), np.array([best.z]), np.array([best.other])
    )
    best_behind = drawn[:, 0]
    # The standard deviation of log S from seed to seed, in each draw.
    seed_deviation = np.exp(posterior.theta[:, NOISE])
    # No point can gain more than this: if the law were known, the best batch size of each draw
    # could be run.
    best_of_draw = _behind_at_best_rates(posterior, x).min(axis=1)
    return GainLeft(
        next_point=_gain_of_next(posterior, ruler, x, best_behind),
        at_most=_mean_gain(posterior, ruler, best_behind, best_of_draw),
        seed_scatter=_mean_gain(posterior, ruler, best_behind, best_behind - seed_deviation),
    )


def _gain_of_next(posterior: BudgetPosterior, ruler: Ruler, x: Array, best_behind: Array) -> float:
    """Compute the largest gain of the metric that is expected of one further point.

    The point has one of the batch sizes ``x`` (log2) and the best learning rate for it, by the
    median of the draws. ``best_behind`` is how far the point of the best run is behind the ruler in
    each draw, (m,): the gain is over that point.
    """
    theta = posterior.theta
    prior = posterior.prior
    z = np.median(optimum(theta, prior.points_at(x), prior), axis=0)
    other = np.zeros((x.size, prior.others))
    for j in range(prior.others):
        places = other_places(j)
        other[:, j] = np.clip(np.median(theta[:, places.best]), 0.0, 1.0)
        # ``optimum`` has the other hyper-parameters in the middle: away from it the best rate
        # moves.
        z = z + np.median(theta[:, places.rate_shift]) * (other[:, j] - 0.5)
    behind = _behind_at_points(posterior, x, z, other)
    return max(_mean_gain(posterior, ruler, best_behind, behind[:, i]) for i in range(x.size))


def _behind_at_points(posterior: BudgetPosterior, x: Array, z: Array, other: Array) -> Array:
    """Compute how far n points are behind the best full trial by the law: (m, n).

    It is the log of the steps that they need for that trial's best metric, over their budget, by m
    draws of the posterior. ``x`` and ``z`` are log2 of the batch sizes and learning rates,
    ``other`` the other hyper-parameters.
    """
    points = posterior.prior.points_at(x, z, other.reshape(x.size, posterior.prior.others))
    log_s = log_steps(posterior.theta, points, posterior.prior)
    return np.asarray(log_s - posterior.log_budget(x))


def _mean_gain(
    posterior: BudgetPosterior, ruler: Ruler, best_behind: Array, behind: Array
) -> float:
    """Average over m draws how much better a point's metric is than that of the predicted best.

    Args:
        posterior: whose m draws they are.
        ruler: the full trial with the best metric, in whose log steps lags are told.
        best_behind: how far the predicted best point lags the ruler in each draw: (m,).
        behind: how far the point does: (m,).
    """
    best_metric = _metric_at_end(posterior, ruler, best_behind)
    # In a draw in which the point lags further than the best one, it gains 0.
    metric = _metric_at_end(posterior, ruler, np.minimum(behind, best_behind))
    return float(np.abs(best_metric - metric).mean())
