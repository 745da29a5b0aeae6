"""The figures of sweeps/README.md that stand on several studies of one kind, by their seeds."""

import math
import statistics
from functools import partial
from pathlib import Path

from recorded.figure import Figure, Values, rows_of
from recorded.of_sweeps import RECORDED, figure
from scipy.stats import ttest_ind

SEEDS = f"{RECORDED}/shallue_seeds.jsonl"
KILLED = f"{RECORDED}/killed_twice.jsonl"
SMOOTHING = f"{RECORDED}/smoothing.jsonl"
LEVEL = 0.9
# Batch sizes with one best smoothing.
SMALL_SIZES = (128, 256, 512)
LARGE_SIZES = (4096, 8192)


def log_sizes(path: Path, sweep: str, study: str) -> list[float]:
    """Give log B_crit of each seed of one of a sweep's studies."""
    sizes = list[float]()
    for row in rows_of(path):
        if (row["sweep"], row["study"]) == (sweep, study):
            sizes.append(math.log(row["b_crit"]))
    return sizes


def ratio_over_seeds(sweep: str, study: str, other: str, path: Path) -> Values:
    """Give the ratio of two studies' geometric means of B_crit, with Welch's interval of its log."""
    log_first = log_sizes(path, sweep, study)
    log_second = log_sizes(path, sweep, other)
    test = ttest_ind(log_first, log_second, equal_var=False)
    interval = test.confidence_interval(LEVEL)
    return {
        "seeds": min(len(log_first), len(log_second)),
        "ratio": math.exp(statistics.fmean(log_first) - statistics.fmean(log_second)),
        "low": math.exp(interval.low),
        "high": math.exp(interval.high),
    }


def best_smoothing(path: Path) -> Values:
    """Give the smoothing with the least mean error within the examples, by ranges of batch size.

    It is one for all of ``SMALL_SIZES`` and one for all of ``LARGE_SIZES``. ``most`` is the largest
    fall that the best smoothing brings over none, in points.
    """
    means = dict[int, dict[float, float]]()
    for row in rows_of(path):
        if row["budget"] == "1,000,000 examples":
            by_smoothing = means.setdefault(row["batch_size"], {})
            by_smoothing[row["smoothing"]] = statistics.fmean(row["values"])
    best = dict[int, float]()
    falls = list[float]()
    for batch_size, by_smoothing in means.items():
        best[batch_size] = min(by_smoothing, key=by_smoothing.__getitem__)
        falls.append(100.0 * (by_smoothing[0.0] - by_smoothing[best[batch_size]]))
    (small,) = {best[batch_size] for batch_size in SMALL_SIZES}
    (large,) = {best[batch_size] for batch_size in LARGE_SIZES}
    return {
        "small": small,
        "at_1024": best[1024],
        "at_2048": best[2048],
        "large": large,
        "most": max(falls),
    }


def killed_sweeps(path: Path) -> Values:
    """Count the sweeps that were killed twice and continued."""
    return {"sweeps": len({row["sweep"] for row in rows_of(path)})}


def seeds_figure(sentence: str, sweep: str, study: str, other: str) -> Figure:
    return figure("study seeds", sentence, partial(ratio_over_seeds, sweep, study, other), SEEDS)


FIGURES = [
    seeds_figure(
        "B_crit under heavy ball is {ratio:.1f} times that under plain SGD ({low:.1f} to "
        "{high:.1f})",
        "shallue_algorithms",
        "heavy_ball",
        "sgd",
    ),
    seeds_figure(
        "under Nesterov momentum {ratio:.1f} times ({low:.1f} to {high:.1f})",
        "shallue_algorithms",
        "nesterov",
        "sgd",
    ),
    seeds_figure(
        "with all images {ratio:.1f} times that with 6,000 ({low:.1f} to {high:.1f})",
        "shallue_data",
        "55000",
        "6000",
    ),
    figure(
        "smoothing",
        "{small:g} up to B = 512, {at_1024:g} at 1,024, {at_2048:g} at 2,048, then {large:g}, "
        "lowering the error by up to {most:.2f} points",
        best_smoothing,
        SMOOTHING,
    ),
    figure(
        "killed sweeps",
        "All {sweeps} were killed twice within a unit, by SIGKILL and SIGINT",
        killed_sweeps,
        KILLED,
    ),
]
