"""Speedup and verdict by hand; whose run on a new seed comes next."""

import math

import numpy as np
import pytest
import yaml
from refusals import cases
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
from bstune.study.result import Improvement, Speedup

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


@cases("""
best | baseline | value | pairs | factor | at_least
# Three pairs, all reached: the quotient of the medians, 6 / 2.
1 2 3 | 5 6 7 | 3.0 | 3 | 1.3459 | false
# The median of two is their mean.
2 2 | 4 4 | 2.0 | 2 | 1 | false
# It reached once of three times; 186 seconds do not stand for it.
68 68 68 | 186 >434 >434 | 6.382353 | 3 | 1.3459 | true
# Half of two runs is a bound.
1 1 | 4 >8 | 6.0 | 2 | 1 | true
# One of the best's three missed: what is known of its median is the larger of two, and the pair
# that it is in bounds nothing, as the baseline's run there is one that missed too.
2 2 >9 | 6 6 >9 | 3.0 | 2 | 1.3459 | false
""")
def test_speedup_by_hand(best, baseline, value, pairs, factor, at_least):
    of_best, of_baseline, of_step_time = 0.3, 0.1, 0.2
    speedup = speedup_of(runs(best, of_best), runs(baseline, of_baseline), DEVIATION, of_step_time)
    # Errors of evaluations and step times do not fall with the seeds; bounds alone have none.
    seen = of_baseline if any(run.reached for run in runs(baseline)) else 0.0
    of_seeds = student.ppf(0.95, 4) * 0.1 * math.sqrt(2 * factor / pairs)
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


@cases("""
text | is_bound
1 2 3 | false
'>5 >5 4' | true
'>5' | true
""")
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


@cases("""
groups | value | degrees
[] | 0.2 | 4
# One run has no spread.
[[1.0]] | 0.2 | 4
# Of squares 4 times 0.04, 0.02 and 0.18.
[[1.0, 1.2], [0.0, 0.3, 0.6]] | 0.2267787 | 7
""")
def test_pooled_deviation(groups, value, degrees):
    pooled = pooled_deviation(groups, expected=0.2)
    assert (pooled.value, pooled.degrees) == (pytest.approx(value), degrees)


@cases("""
ends | deviation | has_baseline | best_is_bound | verdict
# The first row that holds.
[1.01, 1.2] | null | true | false | switch
[1.00, 1.24] | null | true | false | keep
[0.9, 1.25] | null | true | false | not yet
[2.0, null] | null | true | false | switch
# No runs on new seeds yet.
null | null | true | false | not yet
null | null | false | false | use
# Most new seeds missed the target.
null | null | false | true | not yet
# Of a metric, with its deviation over seeds.
[0.05, 0.13] | 0.01 | true | false | switch
[-0.01, 0.07] | 0.01 | true | false | not yet
[-0.04, 0.0] | 0.01 | true | false | keep
# All runs are equal.
[0.0, 0.0] | 0.0 | true | false | keep
""")
def test_verdict(ends, deviation, has_baseline, best_is_bound, verdict):
    found = None
    if ends:
        of = {"value": 1.5, "low": ends[0], "high": ends[1]}
        found = Speedup(**of, at_least=ends[1] is None)
        if deviation is not None:
            found = Improvement(**of, deviation=deviation)
    assert verdict_of(found, has_baseline, best_is_bound) == verdict


def candidate(number, log_value, deviation=0.1, share=1.0, rank=0.0):
    return Candidate(number, log_value, deviation, share=share, rank=rank)


# By number: log of the predicted value, its deviation, the share of seeds that reach, the rank.
CANDIDATES = yaml.safe_load("""
near: {3: [0.0], 5: [0.05]}
far: {3: [0.0], 5: [0.2]}
moved: {3: [0.2], 5: [0.0]}
tied: {3: [0.0, 0.05, 1.0, 512], 5: [0.08, 0.05, 1.0, 256], 7: [0.2, 0.05, 1.0, 128]}
# What misses in 40% of seeds takes 1/0.6, 1.67 times, as long: 1.6 and 1.9 times here.
less: {3: [0.0, 0.1, 0.6], 5: [0.4700]}
more: {3: [0.0, 0.1, 0.6], 5: [0.6419]}
""")


# The runs of each that were made, null for a miss -> whose comes next, and the best.
@cases("""
candidates | runs_of | following | best
# The best by prediction runs first, and is done after its two seeds.
near | {} | 3 | 3
# Another within a tenth takes over: the leader's mean is 0.15, above its 0.05.
near | {3: [0.3], 5: [0.0]} | 5 | 5
near | {3: [0.3], 5: [0.0, 0.0]} | null | 5
# What is more than a tenth behind is not run.
far | {3: [9.0]} | 3 | 3
# What has reached on its seeds stays the best where predictions move; not what missed.
moved | {3: [0.0]} | 5 | 3
moved | {3: [0.0, null]} | 5 | 5
# Of candidates that tie the least rank leads, until its new seeds are far behind.
tied | {3: [0.0], 5: [0.08]} | 5 | 5
tied | {5: [0.5]} | 3 | 5
less | {} | 5 | 5
more | {} | 3 | 3
# A miss tells nothing of the time of the others.
near | {3: [0.0, null], 5: [0.0, 0.0]} | null | 3
""")
def test_whose_new_seed_comes_next_and_which_is_the_best(candidates, runs_of, following, best):
    known = [candidate(number, *of) for number, of in CANDIDATES[candidates].items()]
    assert next_confirmation(known, runs_of, seeds=2, noise=0.1) == following
    assert best_confirmed(known, runs_of, noise=0.1) == best
