"""New seeds: whose run comes next, the speedup over the baseline, and the verdict.

The search's best configurations run again on seeds that took no part in it, and the baseline on the
same ones. Everything here is a function of numbers.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy.optimize import minimize_scalar
from scipy.stats import norm
from scipy.stats import t as student

from bstune.study.result import Speedup, Verdict

# Configurations within this factor of the best by predicted median may take its place.
WITHIN = 1.10
# Runs on new seeds end after so many times the seeds that were asked for, take-overs included.
MOST_RUNS = 3
# The law's deviation from seed to seed counts as so many degrees of freedom beside the new seeds.
LAW_DEGREES = 4
# Keep: the best other configuration is shown to be less than so many times as fast.
NOT_WORTH = 1.25
# Intervals hold 90%: 5% lie beyond either end.
UPPER = 0.95
# Variance of the median of 1, 2, ... normal values over that of their mean; pi/2 for many
# (numerical integration of order statistics, as in Sarhan and Greenberg 1962, table 10C.1).
MEDIAN_VARIANCE = (1.0, 1.0, 1.3459, 1.1930, 1.4343, 1.2882, 1.4730)


@dataclass(frozen=True)
class Run:
    """One run on a new seed."""

    seconds: float
    """To the target; where it was not reached, how long the run was allowed to take."""
    reached: bool


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
    """Log of the predicted median, in what the question minimises."""
    deviation: float
    """Standard deviation of that prediction."""
    schedule_steps: int | None = None
    """The length of its schedule on new seeds, where that ends with the trial."""


def median_run(runs: Sequence[Run]) -> tuple[float, bool]:
    """The median of runs in seconds, and whether it is a bound.

    A run that did not reach the target took longer than it ran. Where that leaves the median open,
    it is at least the median of what is known. ValueError without runs.
    """
    latest = statistics.median(run.seconds if run.reached else math.inf for run in runs)
    if math.isfinite(latest):
        return latest, False
    return statistics.median(run.seconds for run in runs), True


def pooled_deviation(groups: Sequence[Sequence[float]], expected: float) -> SeedDeviation:
    """Pool the deviation of log steps over the runs of several configurations.

    Args:
        groups: log steps of the runs that reached the target, a list a configuration.
        expected: the law's own, which counts as ``LAW_DEGREES`` degrees of freedom.
    """
    squares = LAW_DEGREES * expected**2
    degrees = LAW_DEGREES
    for group in groups:
        if len(group) > 1:
            squares += statistics.variance(group) * (len(group) - 1)
            degrees += len(group) - 1
    return SeedDeviation(math.sqrt(squares / degrees), degrees)


def speedup_of(
    best: Sequence[Run],
    baseline: Sequence[Run],
    deviation: SeedDeviation,
    step_time_error: float = 0.0,
) -> Speedup:
    """How many times as fast the best is, with its 90% interval.

    It is the quotient of the two medians. The interval is centred on its log. The half-width is
    Student's t times the standard error of a mean of paired log ratios, in which runs that did not
    reach the target are bounds (Tobit), times that of a median over a mean's. Where the baseline's
    median is a bound, so is the quotient ("at least"), and the upper end is open; where the best's
    is, the lower end is.

    Args:
        best, baseline: runs on the same seeds, in the same order.
        deviation: of log steps from seed to seed.
        step_time_error: relative standard deviation of the quotient of both step times.
    """
    best_median, best_is_bound = median_run(best)
    baseline_median, baseline_is_bound = median_run(baseline)
    n = min(len(best), len(baseline))
    variance_of_median = MEDIAN_VARIANCE[n - 1] if n <= len(MEDIAN_VARIANCE) else math.pi / 2
    of_pair = math.sqrt(2.0) * deviation.value
    # A quotient that is a bound needs the error towards what is known alone: all pairs count.
    error = of_pair / math.sqrt(n)
    if not (best_is_bound or baseline_is_bound):
        error = _paired_error(best, baseline, of_pair)
    from_seeds = student.ppf(UPPER, deviation.degrees) * error * math.sqrt(variance_of_median)
    half_width = math.hypot(from_seeds, norm.ppf(UPPER) * step_time_error)
    value = baseline_median / best_median
    return Speedup(
        value=value,
        low=None if best_is_bound else value * math.exp(-half_width),
        high=None if baseline_is_bound else value * math.exp(half_width),
        at_least=baseline_is_bound,
        at_most=best_is_bound,
    )


def _paired_error(best: Sequence[Run], baseline: Sequence[Run], deviation: float) -> float:
    """Standard error of the mean paired log ratio, by the Fisher information of a Tobit model.

    A pair in which one run missed the target bounds its ratio.
    """
    known: list[float] = []
    # (bound, sign): the ratio lies above the bound for the sign 1, below it for -1.
    bounds: list[tuple[float, int]] = []
    for one, other in zip(best, baseline, strict=False):
        ratio = math.log(other.seconds / one.seconds)
        if one.reached and other.reached:
            known.append(ratio)
        elif one.reached != other.reached:
            bounds.append((ratio, 1 if one.reached else -1))

    def minus_log_likelihood(mean: float) -> float:
        squares = sum(((ratio - mean) / deviation) ** 2 for ratio in known)
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


def verdict_of(speedup: Speedup | None, has_baseline: bool, best_is_bound: bool) -> Verdict:
    """The word that line 1 begins with; the first rule that holds counts.

    Args:
        speedup: over the baseline on new seeds; None: not both have run there.
        has_baseline: whether there is one.
        best_is_bound: whether half of the best's new seeds or more missed the target.
    """
    if not has_baseline:
        return "not yet" if best_is_bound else "use"
    if speedup is None:
        return "not yet"
    if speedup.low is not None and speedup.low > 1.0:
        return "switch"
    if speedup.high is not None and speedup.high < NOT_WORTH:
        return "keep"
    return "not yet"


def _estimates(
    candidates: Sequence[Candidate], runs: Mapping[int, Sequence[float]], noise: float
) -> dict[int, float]:
    """Each candidate's log value: its prediction and its new seeds, weighted by precision."""
    estimates = {}
    for candidate in candidates:
        precision = 1.0 / candidate.deviation**2
        total = precision * candidate.log_value
        for log_value in runs.get(candidate.number, ()):
            total += log_value / noise**2
            precision += 1.0 / noise**2
        estimates[candidate.number] = total / precision
    return estimates


def _contenders(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates whose prediction lies within ``WITHIN`` of the best."""
    limit = min(candidate.log_value for candidate in candidates) + math.log(WITHIN)
    return [candidate for candidate in candidates if candidate.log_value <= limit]


def best_confirmed(
    candidates: Sequence[Candidate], runs: Mapping[int, Sequence[float]], noise: float
) -> int | None:
    """The best configuration by its new seeds, as a trial's number; None without candidates.

    Of those with the most runs (none, before the first one) it is the one of the least estimated
    cost.

    Args:
        candidates: the configurations other than the baseline that reached the target.
        runs: log value of the runs on new seeds, by the number of the candidate.
        noise: standard deviation of log steps from seed to seed.
    """
    if not candidates:
        return None
    estimates = _estimates(_contenders(candidates), runs, noise)
    most = max(len(runs.get(number, ())) for number in estimates)
    with_most = [number for number in estimates if len(runs.get(number, ())) == most]
    return min(with_most, key=lambda number: estimates[number])


def next_confirmation(
    candidates: Sequence[Candidate],
    runs: Mapping[int, Sequence[float]],
    seeds: int,
    noise: float,
) -> int | None:
    """The configuration to run on its next new seed, as a trial's number; None: there is enough.

    It is the one of the least estimate, until that one has had all ``seeds``.

    Args:
        candidates: the configurations other than the baseline that reached the target.
        runs: log value of the runs on new seeds, by the number of the candidate.
        seeds: how many the leader runs on.
        noise: standard deviation of log steps from seed to seed.
    """
    if not candidates:
        return None
    estimates = _estimates(_contenders(candidates), runs, noise)
    if sum(len(runs.get(number, ())) for number in estimates) >= MOST_RUNS * seeds:
        return None
    leader = min(estimates, key=lambda number: estimates[number])
    return leader if len(runs.get(leader, ())) < seeds else None
