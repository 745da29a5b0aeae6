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
# Up to this batch size smoothing lowers the best error within the examples.
LARGEST_HELPED = 2048


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


def smoothing_points(path: Path) -> Values:
    """Give by how many points smoothing moves the best error within the examples, at most.

    It is the difference of the means over seeds, at each batch size: the largest fall up to
    ``LARGEST_HELPED``, and the largest rise above.
    """
    means = dict[tuple[float, int], float]()
    for row in rows_of(path):
        if row["budget"] == "1,000,000 examples":
            means[row["smoothing"], row["batch_size"]] = statistics.fmean(row["values"])
    falls = list[float]()
    rises = list[float]()
    for smoothing, batch_size in means:
        if smoothing == 0.0:
            continue
        rise = means[smoothing, batch_size] - means[0.0, batch_size]
        if batch_size <= LARGEST_HELPED:
            falls.append(-100.0 * rise)
        else:
            rises.append(100.0 * rise)
    assert min(*falls, *rises) > 0.0
    return {"fall": max(falls), "rise": max(rises)}


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
        "by up to {fall:.2f} points at B = 128 to 2,048, and raises it by up to {rise:.2f} at 4,096 "
        "and 8,192",
        smoothing_points,
        SMOOTHING,
    ),
    figure(
        "killed sweeps",
        "All {sweeps} were killed twice within a unit, by SIGKILL and SIGINT",
        killed_sweeps,
        KILLED,
    ),
]
