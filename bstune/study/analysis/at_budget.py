"""The answer of the objective loss: what has the best metric when the budget ends, its worth.

The gain is the mean difference of the metric over the seeds on which the winner and the baseline
both ran, with Student's interval; ``share`` is the part of the budget at which the mean of the
winner's runs has what the baseline has at its end.
"""

import math
from collections.abc import Callable, Sequence
from statistics import fmean, stdev

from scipy.special import stdtrit

from bstune.core.records import TrialResult
from bstune.core.search_space import Space
from bstune.core.step_time_law import StepTimeLaw
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
    NO_DIFFERENCE,
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
from bstune.study.analysis.as_good import NEAR_OCTAVES
from bstune.study.analysis.model import REPORT_PARTICLES, budget_posteriors
from bstune.study.analysis.step_times import law_of
from bstune.study.at_budget import fresh_runs_of, is_full, known_best
from bstune.study.planning.baseline import BaselineRuns, baseline_runs
from bstune.study.planning.replicates import same_point
from bstune.study.prepared import PreparedStudy


def analyse_at_budget(prepared: PreparedStudy, done: Sequence[TrialResult]) -> AtBudget | None:
    """Analyse the trials of a study for the objective loss.

    It is None before one ran to its budget's end.
    """
    # Shares of the budget, at each of which the best batch size is estimated.
    shares: Sequence[float] = BUDGET_SHARES
    if prepared.backend.horizon:
        # A schedule that ends with its trial would have ended earlier under a shorter budget: what
        # such a trial has on the way tells nothing of that.
        shares = (1.0,)
    budget = prepared.options.budget
    posteriors = budget_posteriors(prepared, done, REPORT_PARTICLES, shares)
    findings = findings_of(posteriors)
    if findings is None:
        return None
    by_number = {trial.number: trial for trial in done}
    ranked = [by_number[entry.number] for entry in findings.ranked]
    best = known_best(done, ranked, prepared.budget.replicates)
    winner = _point(prepared, best, findings.ranked, fresh_runs_of(done, best.number))
    # A baseline that was stopped on the way has no metric at the budget's end.
    runs = baseline_runs(done, prepared.baseline)
    baseline: PointAtBudget | None = None
    if runs is not None and is_full(runs.first, prepared.last_step):
        baseline = _point(prepared, runs.first, findings.ranked, runs.again)
    gain: GainAtBudget | None = None
    if runs is not None and baseline is not None and not same_point(runs.first, best):
        gain = _gain(prepared, done, best, runs, winner, baseline, posteriors[1.0])
        # Of two that come to the same metric, the user's own is the one to use.
        if is_tie(gain, baseline):
            best = runs.first
            winner = baseline
            gain = None
    count_error: float | None = None
    if runs is not None:
        count_error = _count_error(prepared, done, best, runs.first)
    size_growth: SizeGrowthOverBudget | None = None
    if findings.growth is not None:
        size_growth = _growth(findings.growth)
    # The budget is in seconds if those are set, else in examples, else in steps.
    examples: int | None = None
    steps: int | None = None
    if budget.seconds is None:
        if budget.counts_examples:
            examples = budget.examples
        else:
            steps = budget.steps
    return AtBudget(
        seconds=budget.seconds,
        examples=examples,
        steps=steps,
        times=_times(prepared),
        winner=winner,
        baseline=baseline,
        gain=gain,
        as_good=_as_good(findings, best, ranked, prepared.space),
        curve=tuple(_size(point) for point in findings.curve),
        growth=size_growth,
        same=_same(findings.no_difference),
        gain_left=findings.gain_left.next_point,
        gain_left_at_most=findings.gain_left.at_most,
        seed_scatter=findings.gain_left.seed_scatter,
        count_error=count_error,
    )


def is_tie(gain: GainAtBudget, baseline: PointAtBudget) -> bool:
    """Whether a gain lies within the precision of the metric, so that it is none."""
    return abs(gain.difference) <= NO_DIFFERENCE * abs(baseline.expected)


def error_of_count(
    counted: Callable[[float], float], law: StepTimeLaw, first: float, second: float
) -> float:
    """Give the error of the ratio of the steps that two batch sizes get in a budget of seconds.

    A factor that the seconds of all batch sizes share has no part in it.

    Args:
        counted: gives the seconds of a step by which the budget counts.
        law: the seconds of a step by all timings and trials so far, with their error.
        first: a batch size.
        second: another one, or the same.

    Returns:
        The standard deviation of the log of the ratio, sqrt(e^2 + d^2): e is the law's own error of
        the ratio of seconds, and d the log of how far the counted ratio is off the law's.
    """
    counted_ratio = counted(first) / counted(second)
    law_ratio = law(first) / law(second)
    return math.hypot(law.ratio_error(first, second), math.log(counted_ratio / law_ratio))


def _times(prepared: PreparedStudy) -> tuple[SizeSeconds, ...]:
    """Give the seconds of a step that turn a budget of seconds into steps.

    It is empty for another budget.
    """
    if prepared.options.budget.seconds is None:
        return ()
    # The times that the study stored decided its trials' steps.
    times = prepared.budget_times or prepared.measured_budget_times()
    return tuple(SizeSeconds(batch_size=size, seconds=seconds) for size, seconds in times)


def _count_error(
    prepared: PreparedStudy,
    done: Sequence[TrialResult],
    best: TrialResult,
    baseline: TrialResult,
) -> float | None:
    """Give the error of the ratio of the best trial's number of steps to the baseline's.

    In a budget of seconds the error of the timing changes how many steps each batch size gets. None
    for another budget, and where the seconds of a step are not known.
    """
    if prepared.options.budget.seconds is None:
        return None
    law = law_of(prepared, done)
    if law is None:
        return None
    return error_of_count(prepared.seconds_per_step, law, best.batch_size, baseline.batch_size)


def _point(
    prepared: PreparedStudy,
    trial: TrialResult,
    ranked: Sequence[RankedTrial],
    again: Sequence[TrialResult],
) -> PointAtBudget:
    """Describe a point for the result: what its trial and its runs on fresh seeds came to.

    Args:
        prepared: the study.
        trial: of the point.
        ranked: the points with what is predicted of a fresh seed of each.
        again: the point's runs on fresh seeds.
    """
    mode = prepared.protocol.target.mode
    # The ranking has a point once, by whichever of its runs.
    numbers = {run.number for run in (trial, *again)}
    predicted: float | None = None
    for entry in ranked:
        if entry.number in numbers:
            predicted = entry.fresh_metric
            break
    value = trial.best_value(mode)
    # NaN stands for a trial without a finite evaluation.
    if value is None:
        value = math.nan
    steps = prepared.last_step(trial.batch_size)
    seconds: float | None = None
    if trial.seconds_per_step is not None:
        seconds = steps * trial.seconds_per_step
    return PointAtBudget(
        number=trial.number,
        seed=trial.seed,
        batch_size=trial.batch_size,
        lr=trial.lr,
        hyperparameters=dict(trial.hyperparameters),
        horizon=trial.horizon,
        steps=steps,
        value=value,
        predicted=predicted,
        fresh=_fresh(prepared, again),
        seconds=seconds,
    )


def _fresh(prepared: PreparedStudy, runs: Sequence[TrialResult]) -> FreshValues | None:
    """Give what runs on fresh seeds came to, with mean and interval.

    It is None where none ran to its budget's end.
    """
    mode = prepared.protocol.target.mode
    # Those that diverged, or ended before, are counted and have no metric to compare.
    full = [run for run in runs if is_full(run, prepared.last_step)]
    values = list[float]()
    for run in full:
        value = run.best_value(mode)
        # A full trial always has one; the check is for its type.
        if value is not None:
            values.append(value)
    if not values:
        return None
    mean, half_width = _mean_and_half_width(values)
    return FreshValues(
        seeds=tuple(run.seed for run in full),
        values=tuple(values),
        mean=mean,
        low=mean - half_width,
        high=mean + half_width,
        level=INTERVAL_LEVEL,
        broken=len(runs) - len(full),
    )


def _mean_and_half_width(values: Sequence[float]) -> tuple[float, float]:
    """Give the mean of n values, and half the width of its interval.

    The half is t s/sqrt(n), with s their standard deviation and t Student's quantile at n - 1
    degrees of freedom. For one value it is 0.
    """
    # One value tells no scatter.
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
    """Tell by how much the winner's metric is better than the baseline's at the budget's end.

    They are compared on their common fresh seeds; without any, by the values expected of them.

    Args:
        prepared: the study.
        done: its trials.
        best: the winner's own trial.
        runs: the baseline's.
        winner: what the winner's point came to.
        baseline: what the baseline's point came to.
        posterior: at the whole budget.

    Returns:
        The gain, in units of the metric, positive where the winner is better. Its interval is None
        without two pairs of different runs. Its share is that of the budget at which the winner is
        as good as the baseline at the end; None where schedules end with the trial.
    """
    mode = prepared.protocol.target.mode
    # By this sign a difference of the metric is positive where the first value is the worse one.
    sign = prepared.protocol.target.sign
    pairs = _pairs_of_seeds(prepared, fresh_runs_of(done, best.number), runs.again)
    # What both runs of a pair share of their seed's luck drops out of the difference.
    differences = list[float]()
    for run, beside in pairs:
        value = run.best_value(mode)
        value_beside = beside.best_value(mode)
        if value is not None and value_beside is not None:
            differences.append(sign * (value_beside - value))
    low: float | None = None
    high: float | None = None
    difference = sign * (baseline.expected - winner.expected)
    if differences:
        difference = fmean(differences)
    # On a recorded table a fresh seed may be the same run again, and tells no scatter.
    histories = {(run.history, beside.history) for run, beside in pairs}
    if len(differences) > 1 and len(histories) > 1:
        _, half_width = _mean_and_half_width(differences)
        low = difference - half_width
        high = difference + half_width
    share: float | None = None
    if not prepared.backend.horizon:
        # Without a common seed the two are compared by their first runs.
        compared = pairs or [(best, runs.first)]
        curves = _curves(prepared, [run for run, _ in compared], posterior)
        curves_beside = _curves(prepared, [beside for _, beside in compared], posterior)
        share = share_to_match(curves, curves_beside)
    return GainAtBudget(
        difference=difference,
        low=low,
        high=high,
        level=INTERVAL_LEVEL,
        seeds=len(differences),
        share=share,
    )


def _pairs_of_seeds(
    prepared: PreparedStudy, winners: Sequence[TrialResult], baselines: Sequence[TrialResult]
) -> list[tuple[TrialResult, TrialResult]]:
    """Pair the winner's and the baseline's runs on one seed, where both ran to the budget's end."""
    last_step = prepared.last_step
    by_seed = {run.seed: run for run in baselines if is_full(run, last_step)}
    pairs = list[tuple[TrialResult, TrialResult]]()
    for run in winners:
        if is_full(run, last_step) and run.seed in by_seed:
            pairs.append((run, by_seed[run.seed]))
    return pairs


def _curves(
    prepared: PreparedStudy, runs: Sequence[TrialResult], posterior: BudgetPosterior
) -> list[RunningBest]:
    """Give the best value so far over the steps of each trial, on the posterior's scale."""
    curves = list[RunningBest]()
    for run in runs:
        last_step = prepared.last_step(run.batch_size)
        curve = running_best(run.history, last_step, posterior.scale)
        if curve is not None:
            curves.append(curve)
    return curves


def _as_good(
    findings: BudgetFindings, winner: TrialResult, full: Sequence[TrialResult], space: Space
) -> AsGoodAtBudget:
    """Give the range of batch sizes that are not shown to be worse than the best.

    The winner, which fresh seeds have chosen, is always in it. From there it goes on to both sides
    as far as trials speak for it that ran to the budget's end.

    Args:
        findings: the range by the posterior, and the curve over batch sizes.
        winner: the trial to use.
        full: the trials that ran to the budget's end.
        space: has the scaling rule.
    """
    sizes = findings.as_good
    curve = findings.curve
    first = min(range(len(curve)), key=lambda i: _octaves(curve[i].batch_size, winner.batch_size))
    last = first
    while first > 0 and curve[first - 1].batch_size >= sizes.low:
        if not _speaks_for(full, curve[first - 1], space):
            break
        first -= 1
    while last < len(curve) - 1 and curve[last + 1].batch_size <= sizes.high:
        if not _speaks_for(full, curve[last + 1], space):
            break
        last += 1
    # Pairs of batch size and learning rate compare by the batch size.
    of_winner = (winner.batch_size, winner.lr)
    low, lr_low = min((curve[first].batch_size, curve[first].lr), of_winner)
    high, lr_high = max((curve[last].batch_size, curve[last].lr), of_winner)
    return AsGoodAtBudget(
        low=low,
        high=high,
        lr_low=lr_low,
        lr_high=lr_high,
        is_low_open=sizes.low_open or low > sizes.low,
        is_high_open=sizes.high_open or high < sizes.high,
    )


def _speaks_for(full: Sequence[TrialResult], point: MetricAtSize, space: Space) -> bool:
    """Whether a trial that ran to the budget's end lies near a point of the curve.

    It does within ``NEAR_OCTAVES`` of its batch size, and of its learning rate beside the rule's.
    """
    delta = space.delta(point.batch_size, point.lr)
    return any(
        _octaves(trial.batch_size, point.batch_size) <= NEAR_OCTAVES
        and abs(space.delta(trial.batch_size, trial.lr) - delta) <= NEAR_OCTAVES
        for trial in full
    )


def _octaves(first: float, second: float) -> float:
    """Give the distance of two batch sizes in octaves."""
    return abs(math.log2(first / second))


def _size(point: MetricAtSize) -> SizeAtBudget:
    """Convert a point of the curve of the metric over batch size to what the result holds."""
    return SizeAtBudget(
        batch_size=point.batch_size,
        value=point.metric,
        low=point.metric_low,
        high=point.metric_high,
        lr=point.lr,
    )


def _same(no_difference: NoDifference | None) -> SameAtBudget | None:
    """Turn the finding that batch sizes come to the same metric into a result's; None if none."""
    if no_difference is None:
        return None
    return SameAtBudget(value=no_difference.metric, differs_at=no_difference.differs_at)


def _growth(growth: SizeGrowth) -> SizeGrowthOverBudget:
    """Turn the growth of the best batch size with the budget into a result's."""
    sizes = list[BestSizeAtShare]()
    for best in growth.best_sizes:
        sizes.append(
            BestSizeAtShare(
                share=best.share,
                batch_size=best.batch_size,
                low=best.low,
                high=best.high,
                is_at_end=best.at_end,
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
