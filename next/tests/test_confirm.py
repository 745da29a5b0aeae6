"""Speedup and verdict by hand; whose run on a new seed comes next."""

import math

import numpy as np
import pytest
from scipy.stats import norm
from scipy.stats import t as student

from bstune.study.confirm import (
    MEDIAN_VARIANCE,
    SIMILAR,
    SURE,
    Candidate,
    Outcome,
    Run,
    SeedDeviation,
    best_confirmed,
    median_interval,
    median_run,
    next_confirmation,
    pooled_deviation,
    predicted_share,
    speedup_of,
    verdict_of,
)
from bstune.study.result import Speedup

DEVIATION = SeedDeviation(value=0.1, degrees=4)
# Variance of the median of n normal values over that of their mean: exact for n = 1, 2, 3.
MEDIAN_OF_3 = 1.3459


def runs(text, error=0.0):
    """``68 >434 >434``: seconds of runs, > where the target was not reached."""
    found = []
    for word in text.split():
        reached = not word.startswith(">")
        found.append(Run(float(word.lstrip(">")), reached, error if reached else 0.0))
    return found


def half_width(pairs, factor=1.0):
    """The 90% interval's half-width of paired log ratios, by hand."""
    return student.ppf(0.95, 4) * 0.1 * math.sqrt(2 * factor / pairs)


@pytest.mark.parametrize(
    "best, baseline, value, pairs, factor, at_least",
    [
        # Three pairs, all reached: the quotient of the medians, 6 / 2.
        ("1 2 3", "5 6 7", 3.0, 3, MEDIAN_OF_3, False),
        # The median of two is their mean.
        ("2 2", "4 4", 2.0, 2, 1, False),
        # It reached once of three times; 186 seconds do not stand for it.
        ("68 68 68", "186 >434 >434", 434 / 68, 3, MEDIAN_OF_3, True),
        # Half of two runs is a bound.
        ("1 1", "4 >8", 6.0, 2, 1, True),
        # One of the best's three missed: what is known of its median is the larger of two, and the
        # pair that it is in bounds nothing, as the baseline's run there is one that missed too.
        ("2 2 >9", "6 6 >9", 3.0, 2, MEDIAN_OF_3, False),
    ],
)
def test_speedup_by_hand(best, baseline, value, pairs, factor, at_least):
    of_best, of_baseline, of_step_time = 0.3, 0.1, 0.2
    speedup = speedup_of(runs(best, of_best), runs(baseline, of_baseline), DEVIATION, of_step_time)
    # Errors of evaluations and step times do not fall with the seeds; bounds alone have none.
    seen = of_baseline if any(run.reached for run in runs(baseline)) else 0.0
    of_seeds = half_width(pairs, factor)
    width = math.exp(math.hypot(of_seeds, *(1.6449 * e for e in (of_best, seen, of_step_time))))
    assert (speedup.value, speedup.low) == pytest.approx((value, value / width), rel=1e-3)
    assert speedup.at_least is at_least
    assert speedup.high == (None if at_least else pytest.approx(value * width, rel=1e-3))


def test_a_pair_in_which_one_run_missed_has_the_information_of_a_tobit_model():
    """By a numerical second derivative of the log likelihood, at its maximum."""
    best, baseline = runs("1 1 1"), runs("3 3 >3")
    of_pair = math.sqrt(2) * DEVIATION.value

    def log_likelihood(mean):
        known = 2 * norm.logpdf(math.log(3), mean, of_pair)
        return known + norm.logsf(math.log(3), mean, of_pair)

    means = np.linspace(math.log(3) - 0.1, math.log(3) + 0.3, 40_001)
    top = means[np.argmax(log_likelihood(means))]
    around = [log_likelihood(top + step) for step in (-1e-3, 0, 1e-3)]
    information = -(around[0] - 2 * around[1] + around[2]) / 1e-6
    found = speedup_of(best, baseline, DEVIATION)
    expected = student.ppf(0.95, 4) * math.sqrt(MEDIAN_OF_3 / information)
    assert math.log(found.high / found.value) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("text, is_bound", [("1 2 3", False), (">5 >5 4", True), (">5", True)])
def test_interval_of_a_median_by_hand(text, is_bound):
    of_text = runs(text, error=0.2)
    median, _ = median_run(of_text)
    count = len(of_text)
    from_seeds = student.ppf(0.95, 4) * 0.1 * math.sqrt(MEDIAN_VARIANCE[count - 1] / count)
    # Nothing but bounds has no error of evaluations; a step time has one of 0.1.
    seen = 0.2 if any(run.reached for run in of_text) else 0.0
    factor = math.exp(math.hypot(from_seeds, 1.6449 * seen, 1.6449 * 0.1))
    low, high = median_interval(of_text, DEVIATION, 0.1)
    assert low == pytest.approx(median / factor, rel=1e-3)
    assert high == (None if is_bound else pytest.approx(median * factor, rel=1e-3))


def outcome(reached, x=0.0, z=0.0):
    return Outcome(x=x, z=z, reached=reached)


@pytest.mark.parametrize(
    "outcomes, stated, chosen",
    [
        ([], 0.5, 1.0),
        # Jeffreys: (reached + 1/2)/(n + 1).
        ([outcome(True)] * 2 + [outcome(False)], 2.5 / 4, 3 / 4),
        # Those of a similar configuration count by their distance, far ones do not.
        ([outcome(True)] * 3 + [outcome(False, z=SIMILAR)], 3.5 / (4 + math.exp(-0.5)), None),
        ([outcome(True)] * 3 + [outcome(False, x=9.0)] * 9, 3.5 / 4, 1.0),
    ],
)
def test_predicted_share_of_seeds_that_reach(outcomes, stated, chosen):
    assert predicted_share(0.0, 0.0, outcomes) == pytest.approx(stated)
    if chosen is not None:
        assert predicted_share(0.0, 0.0, outcomes, prior=SURE) == pytest.approx(chosen)


@pytest.mark.parametrize(
    "groups, value, degrees",
    [
        ([], 0.2, 4),
        ([[1.0]], 0.2, 4),  # one run has no spread
        ([[1.0, 1.2], [0.0, 0.3, 0.6]], math.sqrt((4 * 0.04 + 0.02 + 0.18) / 7), 7),
    ],
)
def test_pooled_deviation(groups, value, degrees):
    pooled = pooled_deviation(groups, expected=0.2)
    assert (pooled.value, pooled.degrees) == (pytest.approx(value), degrees)


def speedup(low, high, at_least=False):
    return Speedup(value=1.5, low=low, high=high, at_least=at_least)


@pytest.mark.parametrize(
    "speedup, has_baseline, best_is_bound, verdict",
    [
        (speedup(1.01, 1.2), True, False, "switch"),  # the first row that holds
        (speedup(1.00, 1.24), True, False, "keep"),
        (speedup(0.9, 1.25), True, False, "not yet"),
        (speedup(2.0, None, at_least=True), True, False, "switch"),
        (None, True, False, "not yet"),  # no runs on new seeds yet
        (None, False, False, "use"),
        (None, False, True, "not yet"),  # most new seeds missed the target
    ],
)
def test_verdict(speedup, has_baseline, best_is_bound, verdict):
    assert verdict_of(speedup, has_baseline, best_is_bound) == verdict


def candidate(number, log_value, deviation=0.1, share=1.0, rank=0.0):
    return Candidate(number, log_value, deviation, share=share, rank=rank)


ONE_AND_ONE = (candidate(3, 0.0), candidate(5, 0.05))
MOVED = (candidate(3, 0.2), candidate(5, 0.0))
TIED = (
    candidate(3, 0.0, 0.05, rank=512),
    candidate(5, 0.08, 0.05, rank=256),
    candidate(7, 0.2, 0.05, rank=128),
)


@pytest.mark.parametrize(
    "candidates, runs_of, following, best",
    [
        # The best by prediction runs first, and is done after its two seeds.
        (ONE_AND_ONE, {}, 3, 3),
        # Another within a tenth takes over: the leader's mean is 0.15, above its 0.05.
        (ONE_AND_ONE, {3: [0.3], 5: [0.0]}, 5, 5),
        (ONE_AND_ONE, {3: [0.3], 5: [0.0, 0.0]}, None, 5),
        # What is more than a tenth behind is not run.
        ((candidate(3, 0.0), candidate(5, 0.2)), {3: [9.0]}, 3, 3),
        # What has reached on its seeds stays the best where predictions move; not what missed.
        (MOVED, {3: [0.0]}, 5, 3),
        (MOVED, {3: [0.0, None]}, 5, 5),
        # Of candidates that tie the least rank leads, until its new seeds are far behind.
        (TIED, {3: [0.0], 5: [0.08]}, 5, 5),
        (TIED, {5: [0.5]}, 3, 5),
        # What misses in 40% of seeds takes 1/0.6, 1.67 times, as long.
        ((candidate(3, 0.0, share=0.6), candidate(5, math.log(1.6))), {}, 5, 5),
        ((candidate(3, 0.0, share=0.6), candidate(5, math.log(1.9))), {}, 3, 3),
        # A miss tells nothing of the time of the others.
        (ONE_AND_ONE, {3: [0.0, None], 5: [0.0, 0.0]}, None, 3),
    ],
)
def test_whose_new_seed_comes_next_and_which_is_the_best(candidates, runs_of, following, best):
    assert next_confirmation(candidates, runs_of, seeds=2, noise=0.1) == following
    assert best_confirmed(candidates, runs_of, noise=0.1) == best
