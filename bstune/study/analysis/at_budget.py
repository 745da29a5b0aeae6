"""The answer of the objective loss: what has the best metric when the budget ends, and what that is worth.

The gain is the mean difference of the metric over the seeds on which the winner and the baseline both ran, with
Student's interval; ``share`` is the part of the budget at which the mean of the winner's runs has what the baseline
has at its end.
"""

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from scipy.special import stdtrit

from bstune.core.records import TrialResult
from bstune.result import (
    INTERVAL_LEVEL,
    AsGoodAtBudget,
    AtBudget,
    BestSizeAtShare,
    BestSizeLater,
    FreshValues,
    GainAtBudget,
    PointAtBudget,
    SameAtBudget,
    SizeAtBudget,
    SizeGrowthOverBudget,
    SizeSeconds,
)
from bstune.search.budget_findings import (
    BUDGET_SHARES,
    BudgetFindings,
    MetricAtSize,
    NoDifference,
    RankedTrial,
    SizeGrowth,
    findings_of,
    share_to_match,
)
from bstune.search.fixed_budget import BudgetPosterior
from bstune.search.ruler import RunningBest, running_best
from bstune.study.analysis.model import REPORT_PARTICLES, budget_posteriors
from bstune.study.at_budget import fresh_runs_of, is_full, known_best
from bstune.study.planning.baseline import BaselineRuns, baseline_runs
from bstune.study.planning.replicates import same_point
from bstune.study.prepare import PreparedStudy


def analyse_at_budget(prepared: PreparedStudy, done: Sequence[TrialResult]) -> AtBudget | None:
    """Tell what the trials of a study for the objective loss say; None before one ran to its budget's end."""
    # What a schedule that ends with its trial has on the way is none of a shorter budget's.
    shares = (1.0,) if prepared.backend.horizon else BUDGET_SHARES
    posteriors = budget_posteriors(prepared, done, REPORT_PARTICLES, shares)
    found = findings_of(posteriors)
    if found is None:
        return None
    by_number = {trial.number: trial for trial in done}
    ranked = [by_number[one.number] for one in found.ranked]
    best = known_best(done, ranked, prepared.budget.replicates)
    winner = _point(prepared, done, best, found.ranked, fresh_runs_of(done, best.number))
    runs = baseline_runs(done, prepared.baseline)
    baseline: PointAtBudget | None = None
    if runs is not None and is_full(runs.first, prepared.last_step):
        baseline = _point(prepared, done, runs.first, found.ranked, runs.again)
    gain: GainAtBudget | None = None
    if runs is not None and baseline is not None and not same_point(runs.first, best):
        gain = _gain(prepared, done, best, runs, winner, baseline, posteriors[1.0])
    budget = prepared.options.budget
    is_of_examples = budget.seconds is None and budget.examples > 1
    is_of_steps = budget.seconds is None and not is_of_examples
    return AtBudget(
        seconds=budget.seconds,
        examples=budget.examples if is_of_examples else None,
        steps=budget.steps if is_of_steps else None,
        times=_times(prepared),
        winner=winner,
        baseline=baseline,
        gain=gain,
        as_good=_as_good(found, best),
        curve=tuple(_size(one) for one in found.curve),
        growth=None if found.growth is None else _growth(found.growth),
        same=_same(found.no_difference),
        gain_left=found.gain_left.next_point,
        gain_left_at_most=found.gain_left.at_most,
        seed_scatter=found.gain_left.seed_scatter,
    )


def _times(prepared: PreparedStudy) -> tuple[SizeSeconds, ...]:
    """Give the seconds of a step by which the budget is counted; empty where it is not of seconds."""
    if prepared.options.budget.seconds is None:
        return ()
    times = prepared.budget_times or prepared.measured_budget_times()
    return tuple(SizeSeconds(batch_size=size, seconds=seconds) for size, seconds in times)


def _point(
    prepared: PreparedStudy,
    done: Sequence[TrialResult],
    trial: TrialResult,
    ranked: Sequence[RankedTrial],
    again: Sequence[TrialResult],
) -> PointAtBudget:
    """Give a point with what its trial and its runs on fresh seeds came to."""
    mode = prepared.protocol.target.mode
    numbers = {trial.number, *(run.number for run in again)}
    predicted = next((one.fresh_metric for one in ranked if one.number in numbers), None)
    value = trial.best_value(mode)
    return PointAtBudget(
        number=trial.number,
        seed=trial.seed,
        batch_size=trial.batch_size,
        lr=trial.lr,
        hyperparameters=dict(trial.hyperparameters),
        horizon=trial.horizon,
        steps=prepared.last_step(trial.batch_size),
        value=math.nan if value is None else value,
        predicted=predicted,
        fresh=_fresh(prepared, again),
    )


def _fresh(prepared: PreparedStudy, runs: Sequence[TrialResult]) -> FreshValues | None:
    """Give what runs on fresh seeds came to; None where none ran to its budget's end."""
    mode = prepared.protocol.target.mode
    full = [run for run in runs if is_full(run, prepared.last_step)]
    values = list[float]()
    for run in full:
        value = run.best_value(mode)
        # A full trial has one.
        if value is not None:
            values.append(value)
    if not values:
        return None
    mean, half = _mean_and_half(values)
    return FreshValues(
        seeds=tuple(run.seed for run in full),
        values=tuple(values),
        mean=mean,
        low=mean - half,
        high=mean + half,
        level=INTERVAL_LEVEL,
        broken=len(runs) - len(full),
    )


def _mean_and_half(values: Sequence[float]) -> tuple[float, float]:
    """Give a mean and half of its interval: t s/sqrt(n), Student's at n - 1 degrees of freedom; 0 of one value."""
    count = len(values)
    if count < 2:
        return fmean(values), 0.0
    quantile = float(stdtrit(count - 1, 0.5 + 0.5 * INTERVAL_LEVEL))
    return fmean(values), quantile * stdev(values) / math.sqrt(count)


def _gain(
    prepared: PreparedStudy,
    done: Sequence[TrialResult],
    best: TrialResult,
    runs: BaselineRuns,
    winner: PointAtBudget,
    baseline: PointAtBudget,
    posterior: BudgetPosterior,
) -> GainAtBudget:
    """Give by how much the winner is better, on the seeds on which both ran where there are some."""
    mode = prepared.protocol.target.mode
    worse = prepared.protocol.target.sign
    last_step = prepared.last_step
    own = [run for run in fresh_runs_of(done, best.number) if is_full(run, last_step)]
    of_baseline = {run.seed: run for run in runs.again if is_full(run, last_step)}
    pairs = [(run, of_baseline[run.seed]) for run in own if run.seed in of_baseline]
    differences = list[float]()
    # On a recorded table a fresh seed may be the same run again.
    histories = {(run.history, beside.history) for run, beside in pairs}
    for run, beside in pairs:
        mine, theirs = run.best_value(mode), beside.best_value(mode)
        if mine is not None and theirs is not None:
            differences.append(worse * (theirs - mine))
    low: float | None = None
    high: float | None = None
    difference = worse * (baseline.expected - winner.expected)
    if differences:
        difference = fmean(differences)
    if len(differences) > 1 and len(histories) > 1:
        _, half = _mean_and_half(differences)
        low, high = difference - half, difference + half
    share: float | None = None
    if not prepared.backend.horizon:
        winners = [run for run, _ in pairs] or [best]
        baselines = [beside for _, beside in pairs] or [runs.first]
        share = share_to_match(
            _curves(prepared, winners, posterior), _curves(prepared, baselines, posterior)
        )
    return GainAtBudget(
        difference=difference,
        low=low,
        high=high,
        level=INTERVAL_LEVEL,
        seeds=len(differences),
        share=share,
    )


def _curves(
    prepared: PreparedStudy, runs: Sequence[TrialResult], posterior: BudgetPosterior
) -> list[RunningBest]:
    """Give the running bests of trials on the posterior's own scale."""
    curves = list[RunningBest]()
    for run in runs:
        last_step = prepared.last_step(run.batch_size)
        curve = running_best(run.history, last_step, posterior.scale)
        if curve is not None:
            curves.append(curve)
    return curves


def _as_good(found: BudgetFindings, winner: TrialResult) -> AsGoodAtBudget:
    """Give the batch sizes that are not shown to be worse; the winner, chosen by fresh seeds, is one of them."""
    sizes = found.as_good
    own = (winner.batch_size, winner.lr)
    low, lr_low = min((sizes.low, _rate_at(found.curve, sizes.low)), own)
    high, lr_high = max((sizes.high, _rate_at(found.curve, sizes.high)), own)
    return AsGoodAtBudget(
        low=low,
        high=high,
        lr_low=lr_low,
        lr_high=lr_high,
        is_low_open=sizes.low_open,
        is_high_open=sizes.high_open,
    )


def _rate_at(curve: Sequence[MetricAtSize], batch_size: int) -> float:
    """Give the best learning rate at the nearest batch size of the curve."""
    nearest = min(curve, key=lambda one: abs(math.log(one.batch_size / batch_size)))
    return nearest.lr


def _size(one: MetricAtSize) -> SizeAtBudget:
    return SizeAtBudget(
        batch_size=one.batch_size,
        value=one.metric,
        low=min(one.metric_low, one.metric_high),
        high=max(one.metric_low, one.metric_high),
        lr=one.lr,
    )


def _same(found: NoDifference | None) -> SameAtBudget | None:
    if found is None:
        return None
    return SameAtBudget(value=found.metric, differs_at=found.differs_at)


def _growth(growth: SizeGrowth) -> SizeGrowthOverBudget:
    sizes = list[BestSizeAtShare]()
    for one in growth.best_sizes:
        sizes.append(
            BestSizeAtShare(
                share=one.share,
                batch_size=one.batch_size,
                low=one.low,
                high=one.high,
                is_at_end=one.at_end,
            )
        )
    return SizeGrowthOverBudget(
        exponent=growth.exponent,
        low=growth.low,
        high=growth.high,
        level=INTERVAL_LEVEL,
        best_sizes=tuple(sizes),
        later=BestSizeLater(
            times=growth.longer.share,
            batch_size=growth.longer.batch_size,
            low=growth.longer.low,
            high=growth.longer.high,
        ),
    )
