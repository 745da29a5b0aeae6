"""New seeds: whose run comes next, the speedup over the baseline, and the verdict.

The search's best configurations run again on seeds that took no part in it, and the baseline on the
same ones. Everything here is a function of numbers.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.stats import norm
from scipy.stats import t as student

from bstune.study.result import Improvement, Speedup, Verdict

# Configurations within this factor of the best by predicted median may take its place.
WITHIN = 1.10
# Runs on new seeds end after so many times the seeds that were asked for, take-overs included.
MOST_RUNS = 3
# The law's deviation from seed to seed counts as so many degrees of freedom beside the new seeds.
LAW_DEGREES = 4
# Intervals hold 90%: 5% lie beyond either end.
UPPER = 0.95
# Variance of the median of 1, 2, ... normal values over that of their mean; pi/2 for many
# (numerical integration of order statistics, as in Sarhan and Greenberg 1962, table 10C.1).
MEDIAN_VARIANCE = (1.0, 1.0, 1.3459, 1.1930, 1.4343, 1.2882, 1.4730)
# A run counts for the share of seeds that reach the target at another configuration by a normal
# kernel with this standard deviation, in octaves of batch size and of rate.
SIMILAR = 0.5
# Runs that reached and runs that missed, which count beside what was seen: for what is stated, and
# for the choice, in which a configuration counts as sure until a run like it misses.
JEFFREYS = (0.5, 0.5)
SURE = (1.0, 0.0)


Runs = Mapping[int, Sequence[float | None]]
"""Log value of each run on new seeds by the number of its candidate; None for a miss."""


@dataclass(frozen=True)
class Run:
    """One run on a new seed."""

    value: float
    """To the target, in what the question minimises: the middle of what its evaluations leave.
    Where it was not reached, how long the run was allowed to take. Where the best metric counts it
    is that, as its gap."""
    reached: bool
    error: float = 0.0
    """Relative standard deviation of ``value`` that the distance between evaluations leaves."""


@dataclass(frozen=True)
class SeedDeviation:
    """The standard deviation of log steps from seed to seed, with its degrees of freedom."""

    value: float
    degrees: int


@dataclass(frozen=True)
class Candidate:
    """A configuration that may be the best."""

    number: int
    """The last trial of its chain in the search."""
    log_value: float
    """Log of the predicted median of the seeds that reach, in what the question minimises."""
    deviation: float
    """Standard deviation of that prediction."""
    share: float
    """Predicted share of seeds that reach the target."""
    rank: int = 0
    """Of candidates that tie the one of the least rank leads."""
    schedule_steps: int | None = None
    """The length of its schedule on new seeds, where that ends with the trial."""


@dataclass(frozen=True)
class Outcome:
    """Whether a run reached the target, for the share of seeds that do."""

    x: float
    """log2 of the batch size."""
    z: float
    """log2 of the rate, relative to the scaling rule's."""
    reached: bool
    is_of_search: bool = False
    """A trial of the search: what is stated of a configuration that was chosen because its trial
    reached the target does not count it."""


def median_run(runs: Sequence[Run]) -> tuple[float, bool]:
    """The median value of runs, and whether it is a bound.

    A run that did not reach the target took longer than it ran. Where that leaves the median open,
    it is at least the median of what is known. ValueError without runs.
    """
    latest = statistics.median(run.value if run.reached else math.inf for run in runs)
    if math.isfinite(latest):
        return latest, False
    return statistics.median(run.value for run in runs), True


def predicted_share(
    x: float, z: float, outcomes: Sequence[Outcome], prior: tuple[float, float] = JEFFREYS
) -> float:
    """The predicted share of seeds that reach the target at a configuration.

    Runs of similar configurations count by a normal kernel: with Jeffreys' prior and without others
    it is (reached + 1/2)/(runs + 1).

    Args:
        x, z: of the configuration, as those of an outcome.
        outcomes: of the study's runs.
        prior: runs that reached and runs that missed, which count beside the outcomes.
    """
    rows = [(one.x, one.z, one.reached) for one in outcomes]
    their_x, their_z, reached = np.array(rows, dtype=float).reshape(-1, 3).T
    weights = np.exp(-0.5 * ((their_x - x) ** 2 + (their_z - z) ** 2) / SIMILAR**2)
    total = float(weights.sum()) + sum(prior)
    return (float(weights @ reached) + prior[0]) / total


def pooled_deviation(
    groups: Sequence[Sequence[float]], expected: float, degrees: int = LAW_DEGREES
) -> SeedDeviation:
    """Pool the deviation of log steps, or of a metric, over the runs of several configurations.

    Args:
        groups: log steps of the runs that reached the target, a list a configuration.
        expected: the law's own.
        degrees: of freedom that this counts as; 0: nothing is known but the runs.
    """
    squares = degrees * expected**2
    for group in groups:
        if len(group) > 1:
            squares += statistics.variance(group) * (len(group) - 1)
            degrees += len(group) - 1
    return SeedDeviation(math.sqrt(squares / max(degrees, 1)), degrees)


def median_interval(
    runs: Sequence[Run], deviation: SeedDeviation, step_time_error: float = 0.0
) -> tuple[float, float | None]:
    """The ends of the 90% interval of the median over all seeds; an end that is open is None.

    It is centred on the log of the runs' median, as in :func:`speedup_of`.

    Args:
        runs: on new seeds, one at least.
        deviation: of log steps from seed to seed.
        step_time_error: relative standard deviation of the step time.
    """
    median, is_bound = median_run(runs)
    error = deviation.value / math.sqrt(len(runs))
    if not is_bound:
        values = []
        for run in runs:
            sign = 0 if run.reached else 1
            values.append((math.log(run.value), sign))
        error = _tobit_error(values, deviation.value)
    errors = (step_time_error, _evaluation_error(runs))
    factor = math.exp(_half_width(error, len(runs), deviation.degrees, errors))
    return median / factor, None if is_bound else median * factor


def speedup_of(
    best: Sequence[Run],
    baseline: Sequence[Run],
    deviation: SeedDeviation,
    step_time_error: float = 0.0,
) -> Speedup:
    """How many times as fast the best is, with its 90% interval.

    It is the quotient of the two medians. The interval is centred on its log. The half-width is
    Student's t times the standard error of a mean of paired log ratios, in which runs that did not
    reach the target are bounds (Tobit), times that of a median over a mean's; and, in quadrature,
    the errors of evaluations and step times. Where the baseline's median is a bound, so is the
    quotient ("at least"), and the upper end is open.

    Args:
        best, baseline: runs on the same seeds, in the same order; most of the best's reached.
        deviation: of log steps from seed to seed.
        step_time_error: relative standard deviation of the quotient of both step times.
    """
    best_median, _ = median_run(best)
    baseline_median, is_bound = median_run(baseline)
    pairs = min(len(best), len(baseline))
    of_pair = math.sqrt(2.0) * deviation.value
    # A quotient that is a bound needs the error towards what is known alone: all pairs count.
    error = of_pair / math.sqrt(pairs)
    if not is_bound:
        error = _paired_error(best, baseline, of_pair)
    errors = (step_time_error, _evaluation_error(best), _evaluation_error(baseline))
    half_width = _half_width(error, pairs, deviation.degrees, errors)
    value = baseline_median / best_median
    return Speedup(
        value=value,
        low=value * math.exp(-half_width),
        high=None if is_bound else value * math.exp(half_width),
        at_least=is_bound,
    )


def _evaluation_error(runs: Sequence[Run]) -> float:
    """Relative standard deviation of a median that the distance between evaluations leaves.

    All runs of a configuration are evaluated at the same steps. Where seeds differ by less than
    these are apart, all have the same error: it does not fall with their number.
    """
    return statistics.fmean([run.error for run in runs if run.reached] or [0.0])


def variance_of_median(runs: int) -> float:
    """Variance of the median of so many normal values over that of their mean."""
    return MEDIAN_VARIANCE[runs - 1] if runs <= len(MEDIAN_VARIANCE) else math.pi / 2


def _half_width(mean_error: float, runs: int, degrees: int, errors: Sequence[float] = ()) -> float:
    """Half the 90% interval of the log of a median, or of a quotient of medians.

    Args:
        mean_error: standard error of a mean, from seed to seed.
        runs: how many, or how many pairs.
        degrees: of freedom of ``mean_error``.
        errors: further relative standard deviations.
    """
    from_seeds = student.ppf(UPPER, degrees) * mean_error * math.sqrt(variance_of_median(runs))
    return float(math.hypot(from_seeds, norm.ppf(UPPER) * math.hypot(*errors)))


def metric_half_width(runs: int, deviation: SeedDeviation) -> float | None:
    """Half the 90% interval of a median of so many metrics; None: seeds show no deviation."""
    if not deviation.degrees:
        return None
    return _half_width(deviation.value / math.sqrt(runs), runs, deviation.degrees)


def improvement_of(
    best: Sequence[Run], baseline: Sequence[Run], deviation: SeedDeviation
) -> Improvement | None:
    """How much better the best's metric is, with its 90% interval; None: one has no median.

    It is the difference of the two medians. The half-width is Student's t times the standard error
    of a mean of paired differences, by the pooled deviation over seeds, times that of a median over
    a mean's.

    Args:
        best, baseline: runs on the same seeds.
        deviation: of the metric from seed to seed.
    """
    best_median, is_bound = median_run(best)
    baseline_median, baseline_is_bound = median_run(baseline)
    if is_bound or baseline_is_bound:
        return None
    value = baseline_median - best_median
    pairs = min(sum(run.reached for run in runs) for runs in (best, baseline))
    half = metric_half_width(
        pairs, SeedDeviation(math.sqrt(2.0) * deviation.value, deviation.degrees)
    )
    return Improvement(
        value=value,
        low=None if half is None else value - half,
        high=None if half is None else value + half,
        deviation=deviation.value,
    )


def _paired_error(best: Sequence[Run], baseline: Sequence[Run], deviation: float) -> float:
    """Standard error of the mean paired log ratio.

    A pair in which one run missed the target bounds its ratio.
    """
    ratios = []
    for one, other in zip(best, baseline, strict=False):
        # Where both missed it the pair tells nothing.
        if one.reached or other.reached:
            sign = int(one.reached) - int(other.reached)
            ratios.append((math.log(other.value / one.value), sign))
    return _tobit_error(ratios, deviation)


def _tobit_error(values: Sequence[tuple[float, int]], deviation: float) -> float:
    """Standard error of a mean, by the Fisher information of a Tobit model.

    Args:
        values: (value, sign): the sign is 0 where the value is known, as it is of one at least; 1
            where it lies above the one that is given, and -1 below.
        deviation: standard deviation of a value.
    """
    known = [value for value, sign in values if sign == 0]
    bounds = [(bound, sign) for bound, sign in values if sign != 0]

    def minus_log_likelihood(mean: float) -> float:
        squares = sum(((value - mean) / deviation) ** 2 for value in known)
        tails = sum(norm.logcdf(sign * (mean - bound) / deviation) for bound, sign in bounds)
        return float(0.5 * squares - tails)

    centre = statistics.fmean(known)
    reach = 10.0 * deviation
    mean = minimize_scalar(minus_log_likelihood, bounds=(centre - reach, centre + reach)).x
    information = float(len(known))
    for bound, sign in bounds:
        z = sign * (mean - bound) / deviation
        hazard = math.exp(norm.logpdf(z) - norm.logcdf(z))
        information += hazard * (hazard + z)
    return deviation / math.sqrt(information)


def verdict_of(
    comparison: Speedup | Improvement | None, has_baseline: bool, best_is_bound: bool
) -> Verdict:
    """The word that line 1 begins with; the first rule that holds counts.

    Args:
        comparison: with the baseline on new seeds; None: it is not known.
        has_baseline: whether there is one.
        best_is_bound: whether half of the best's new seeds or more missed the target.
    """
    if not has_baseline:
        return "not yet" if best_is_bound else "use"
    if comparison is None:
        return "not yet"
    if comparison.is_better:
        return "switch"
    return "keep" if comparison.is_not_worth else "not yet"


def _estimates(candidates: Sequence[Candidate], runs: Runs, noise: float) -> dict[int, float]:
    """Log of what each contender takes until a seed reaches, value/share: a miss costs as much.

    The value is its prediction's and its new seeds', weighted by precision; the share counts those
    that missed. All predictions are wrong by what new seeds were off on average: the search's
    winners were lucky together. Contenders are those whose prediction lies within ``WITHIN`` of the
    best, and those that reached on most of their new seeds: where predictions move, these count.
    """
    # One 0 counts beside them: of a single new seed half is taken for luck.
    off = [0.0]
    for candidate in candidates:
        for log_value in _reached_values(candidate, runs):
            off.append(log_value - candidate.log_value)
    luck = statistics.fmean(off)
    predicted = {one.number: one.log_value - math.log(one.share) for one in candidates}
    limit = min(predicted.values()) + math.log(WITHIN)
    estimates = {}
    for candidate in candidates:
        reached = _reached_values(candidate, runs)
        most_reached = 2 * len(reached) > len(runs.get(candidate.number, ()))
        if predicted[candidate.number] > limit and not most_reached:
            continue
        precision = 1.0 / candidate.deviation**2
        total = precision * (candidate.log_value + luck)
        for log_value in reached:
            total += log_value / noise**2
            precision += 1.0 / noise**2
        estimates[candidate.number] = total / precision - math.log(candidate.share)
    return estimates


def _reached_values(candidate: Candidate, runs: Runs) -> list[float]:
    """Log values of a candidate's new seeds that reached the target."""
    return [value for value in runs.get(candidate.number, ()) if value is not None]


def _leader(candidates: Sequence[Candidate], estimates: Mapping[int, float]) -> int:
    """The candidate of the least estimate; of those within ``WITHIN`` of it the least rank."""
    limit = min(estimates.values()) + math.log(WITHIN)
    tied = [one for one in candidates if estimates.get(one.number, math.inf) <= limit]
    return min(tied, key=lambda one: (one.rank, estimates[one.number])).number


def best_confirmed(candidates: Sequence[Candidate], runs: Runs, noise: float) -> int | None:
    """The best configuration by its new seeds, as a trial's number; None without candidates.

    Of the contenders with the most runs (none, before the first one) it is the one of the least
    estimate.

    Args:
        candidates: the configurations other than the baseline that reached the target.
        runs: log value of the runs on new seeds, by the number of the candidate; None for a miss.
        noise: standard deviation of log steps from seed to seed.
    """
    if not candidates:
        return None
    estimates = _estimates(candidates, runs, noise)
    counts = {number: len(runs.get(number, ())) for number in estimates}
    most = max(counts.values())
    for number, count in counts.items():
        if count < most:
            del estimates[number]
    return _leader(candidates, estimates)


def next_confirmation(
    candidates: Sequence[Candidate], runs: Runs, seeds: int, noise: float, runs_before: int = 0
) -> int | None:
    """The configuration to run on its next new seed, as a trial's number; None: there is enough.

    It is the one of the least estimate, until that one has had all ``seeds``.

    Args:
        candidates: the configurations other than the baseline that reached the target.
        runs: log value of the runs on new seeds, by the number of the candidate; None for a miss.
        seeds: how many the leader runs on.
        noise: standard deviation of log steps from seed to seed.
        runs_before: how many of them were made before the search went on: they are not counted
            among the ``MOST_RUNS`` times ``seeds`` that end the confirmation.
    """
    if not candidates:
        return None
    estimates = _estimates(candidates, runs, noise)
    if sum(map(len, runs.values())) - runs_before >= MOST_RUNS * seeds:
        return None
    leader = _leader(candidates, estimates)
    return leader if len(runs.get(leader, ())) < seeds else None
