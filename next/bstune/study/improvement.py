"""The best metric within a budget: runs on new seeds, what they improve, and the verdict."""

import math
import statistics
from collections.abc import Sequence

from scipy.stats import t as student

from bstune.core.records import Mode, Record
from bstune.study.confirm import MEDIAN_VARIANCE, UPPER, SeedDeviation
from bstune.study.result import Improvement, Verdict

# Keep: no other configuration is shown to be better by this many standard deviations over seeds.
NOT_WORTH = 0.5


def best_metric(record: Record, mode: Mode) -> float:
    """The best value of a run's evaluations; ValueError without one."""
    values = [value for _, value in record.finite_history]
    return min(values) if mode == "min" else max(values)


def pooled_metric_deviation(groups: Sequence[Sequence[float]]) -> SeedDeviation:
    """Pool the metric's deviation over the runs of several configurations.

    Args:
        groups: the metric of each run, a list a configuration.
    """
    squares = 0.0
    degrees = 0
    for group in groups:
        if len(group) > 1:
            squares += statistics.variance(group) * (len(group) - 1)
            degrees += len(group) - 1
    return SeedDeviation(math.sqrt(squares / degrees) if degrees else 0.0, degrees)


def metric_interval(
    values: Sequence[float], deviation: SeedDeviation
) -> tuple[float | None, float | None]:
    """The ends of the 90% interval of the median over all seeds; None: seeds show no deviation."""
    if not deviation.degrees:
        return None, None
    median = statistics.median(values)
    half = _half_width(deviation.value, len(values), deviation.degrees)
    return median - half, median + half


def improvement_of(
    best: Sequence[float], baseline: Sequence[float], mode: Mode, deviation: SeedDeviation
) -> Improvement:
    """How much better the best's metric is, with its 90% interval.

    It is the difference of the two medians. The half-width is Student's t times the standard error
    of a mean of paired differences, by the pooled deviation over seeds, times that of a median over
    a mean's.

    Args:
        best, baseline: the metric of runs on the same seeds.
        mode: of the metric.
        deviation: of the metric from seed to seed.
    """
    value = statistics.median(baseline) - statistics.median(best)
    if mode == "max":
        value = -value
    if not deviation.degrees:
        return Improvement(value=value, low=None, high=None, deviation=0.0)
    pairs = min(len(best), len(baseline))
    half = _half_width(math.sqrt(2.0) * deviation.value, pairs, deviation.degrees)
    return Improvement(value=value, low=value - half, high=value + half, deviation=deviation.value)


def _half_width(deviation: float, runs: int, degrees: int) -> float:
    variance = MEDIAN_VARIANCE[runs - 1] if runs <= len(MEDIAN_VARIANCE) else math.pi / 2
    return float(student.ppf(UPPER, degrees) * deviation * math.sqrt(variance / runs))


def verdict_of_improvement(improvement: Improvement | None, has_baseline: bool) -> Verdict:
    """The word that line 1 begins with; the first rule that holds counts."""
    if not has_baseline:
        return "use"
    if improvement is None or improvement.low is None or improvement.high is None:
        return "not yet"
    if improvement.low > 0.0:
        return "switch"
    if improvement.high < NOT_WORTH * improvement.deviation:
        return "keep"
    return "not yet"


def seeds_to_settle(improvement: Improvement, seeds: int) -> int:
    """The new seeds that settle a verdict, if the medians stay as they are."""
    if improvement.high is None:
        return seeds + 1
    half = improvement.high - improvement.value
    to_switch = improvement.value
    to_keep = NOT_WORTH * improvement.deviation - improvement.value
    # A distance that is next to nothing is not settled by any number of seeds.
    room = max(to_switch, to_keep, half / 10.0)
    return max(seeds + 1, math.ceil(seeds * (half / room) ** 2))
