"""The best metric within a budget: runs on new seeds, what they improve, and the verdict."""

import math
import statistics
from collections.abc import Sequence

from scipy.stats import t as student

from bstune.core.records import Mode, Record, Target
from bstune.study.confirm import UPPER, SeedDeviation, variance_of_median
from bstune.study.result import Improvement, Verdict

# Keep: no other configuration is shown to be better by this many standard deviations over seeds.
NOT_WORTH = 0.5

Metrics = Sequence[float | None]
"""The best metric of each run within its budget; None: it did not train to its end."""


def metrics_of(runs: Sequence[Record], target: Target) -> tuple[float | None, ...]:
    """The best metric of each run."""
    metrics = []
    for run in runs:
        is_whole = run.status == "finished"
        metrics.append(target.best(run.finite_values) if is_whole else None)
    return tuple(metrics)


def median_metric(metrics: Metrics, target: Target) -> float | None:
    """The median, for which a run that did not train to its end is the worst; None: that is it."""
    worst = math.inf if target.mode == "min" else -math.inf
    median = statistics.median(worst if metric is None else metric for metric in metrics)
    return median if math.isfinite(median) else None


def pooled_metric_deviation(groups: Sequence[Metrics]) -> SeedDeviation:
    """Pool the metric's deviation from seed to seed over several configurations.

    Args:
        groups: the metrics of each one's runs.
    """
    squares = 0.0
    degrees = 0
    for group in groups:
        known = [metric for metric in group if metric is not None]
        if len(known) > 1:
            squares += statistics.variance(known) * (len(known) - 1)
            degrees += len(known) - 1
    return SeedDeviation(math.sqrt(squares / degrees) if degrees else 0.0, degrees)


def metric_interval(
    median: float, runs: int, deviation: SeedDeviation
) -> tuple[float | None, float | None]:
    """The ends of the 90% interval of the median over all seeds; None: seeds show no deviation."""
    if not deviation.degrees:
        return None, None
    half = _half_width(deviation.value, runs, deviation.degrees)
    return median - half, median + half


def improvement_of(
    best: float, baseline: float, mode: Mode, pairs: int, deviation: SeedDeviation
) -> Improvement:
    """How much better the best's metric is, with its 90% interval.

    It is the difference of the two medians. The half-width is Student's t times the standard error
    of a mean of paired differences, by the pooled deviation over seeds, times that of a median over
    a mean's.

    Args:
        best, baseline: the medians of runs on the same seeds.
        mode: of the metric.
        pairs: of runs.
        deviation: of the metric from seed to seed.
    """
    value = baseline - best if mode == "min" else best - baseline
    if not deviation.degrees:
        return Improvement(value=value, low=None, high=None, deviation=0.0)
    half = _half_width(math.sqrt(2.0) * deviation.value, pairs, deviation.degrees)
    return Improvement(value=value, low=value - half, high=value + half, deviation=deviation.value)


def _half_width(deviation: float, runs: int, degrees: int) -> float:
    mean_error = deviation * math.sqrt(variance_of_median(runs) / runs)
    return float(student.ppf(UPPER, degrees) * mean_error)


def verdict_of_improvement(improvement: Improvement | None, has_baseline: bool) -> Verdict:
    """The word that line 1 begins with; the first rule that holds counts."""
    if not has_baseline:
        return "use"
    if improvement is None or improvement.low is None or improvement.high is None:
        return "not yet"
    if improvement.low > 0.0:
        return "switch"
    if improvement.high <= NOT_WORTH * improvement.deviation:
        return "keep"
    return "not yet"
