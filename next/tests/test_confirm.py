"""Speedup and verdict by hand; whose run on a new seed comes next."""

import math

import pytest
from scipy.stats import t as student

from bstune.core.records import Record
from bstune.study.confirm import (
    Candidate,
    Run,
    SeedDeviation,
    best_confirmed,
    median_run,
    next_confirmation,
    pooled_deviation,
    speedup_of,
    verdict_of,
)
from bstune.study.result import Speedup

DEVIATION = SeedDeviation(value=0.1, degrees=4)
# Variance of the median of n normal values over that of their mean: exact for n = 1, 2, 3.
MEDIAN_OF_3 = 1.3459


def runs(text):
    """``68 >434 >434``: seconds of runs, > where the target was not reached."""
    return [Run(float(word.lstrip(">")), not word.startswith(">")) for word in text.split()]


@pytest.mark.parametrize(
    ("text", "value", "is_bound"),
    [
        ("3", 3, False),
        ("3 1 2", 2, False),
        ("1 2", 1.5, False),
        ("1 2 >5", 2, False),  # one of three misses: the middle one is known
        ("1 >5 >5", 5, True),
        (">5 >7 >6", 6, True),
        ("1 >5", 3, True),  # half of two
        ("186 >434 >434", 434, True),
    ],
)
def test_median_of_runs(text, value, is_bound):
    assert median_run(runs(text)) == (value, is_bound)


def half_width(n_effective, degrees=4, deviation=0.1, factor=1.0):
    """The 90% interval's half-width of n paired log ratios, by hand."""
    return student.ppf(0.95, degrees) * deviation * math.sqrt(2 * factor / n_effective)


@pytest.mark.parametrize(
    ("best", "baseline", "value", "low", "high", "at_least"),
    [
        # Three pairs, all reached: the quotient of the medians, 6 / 2.
        (
            "1 2 3",
            "5 6 7",
            3.0,
            -half_width(3, factor=MEDIAN_OF_3),
            half_width(3, factor=MEDIAN_OF_3),
            False,
        ),
        # One pair.
        ("2", "4", 2.0, -half_width(1), half_width(1), False),
        # Two pairs: the median of two is their mean.
        ("2 2", "4 4", 2.0, -half_width(2), half_width(2), False),
        # The baseline never reached: its median is a bound and the upper end is open.
        ("2 2 2", ">34 >34 >34", 17.0, -half_width(3, factor=MEDIAN_OF_3), None, True),
        # It reached once of three times; 186 seconds do not stand for it.
        ("68 68 68", "186 >434 >434", 434 / 68, -half_width(3, factor=MEDIAN_OF_3), None, True),
        # The best's median is a bound: the lower end is open.
        (">8 >8 2", "4 4 4", 0.5, None, half_width(3, factor=MEDIAN_OF_3), False),
    ],
)
def test_speedup_by_hand(best, baseline, value, low, high, at_least):
    speedup = speedup_of(runs(best), runs(baseline), DEVIATION)
    assert speedup.value == pytest.approx(value)
    assert speedup.at_least is at_least
    for end, log_distance in ((speedup.low, low), (speedup.high, high)):
        if log_distance is None:
            assert end is None
        else:
            assert end == pytest.approx(value * math.exp(log_distance), rel=1e-3)


def test_a_censored_run_tells_less_than_one_that_reached():
    known = speedup_of(runs("1 1 1"), runs("3 3 3"), DEVIATION)
    censored = speedup_of(runs("1 1 1"), runs("3 3 >3"), DEVIATION)
    assert censored.value == known.value == 3
    assert censored.low < known.low
    assert censored.high > known.high


def test_errors_of_step_times_widen_the_interval():
    alone = speedup_of(runs("1 1 1"), runs("2 2 2"), DEVIATION)
    both = speedup_of(runs("1 1 1"), runs("2 2 2"), DEVIATION, step_time_error=0.2)
    seeds = math.log(alone.high / alone.value)
    assert math.log(both.high / both.value) == pytest.approx(
        math.hypot(seeds, 1.6449 * 0.2), rel=1e-3
    )


@pytest.mark.parametrize(
    ("groups", "value", "degrees"),
    [
        ([], 0.2, 4),
        ([[1.0]], 0.2, 4),  # one run has no spread
        ([[1.0, 1.2]], math.sqrt((4 * 0.04 + 0.02) / 5), 5),
        ([[1.0, 1.2], [0.0, 0.3, 0.6]], math.sqrt((4 * 0.04 + 0.02 + 0.18) / 7), 7),
    ],
)
def test_pooled_deviation(groups, value, degrees):
    pooled = pooled_deviation(groups, expected=0.2)
    assert (pooled.value, pooled.degrees) == (pytest.approx(value), degrees)


def speedup(low, high, at_least=False):
    return Speedup(value=1.5, low=low, high=high, at_least=at_least)


@pytest.mark.parametrize(
    ("speedup", "has_baseline", "best_is_bound", "verdict"),
    [
        (speedup(1.01, 2.0), True, False, "switch"),
        (speedup(1.01, 1.2), True, False, "switch"),  # the first row that holds
        (speedup(1.00, 1.24), True, False, "keep"),
        (speedup(0.5, 1.24), True, False, "keep"),
        (speedup(None, 0.9), True, True, "keep"),
        (speedup(0.9, 1.25), True, False, "not yet"),
        (speedup(0.9, 2.0), True, False, "not yet"),
        (speedup(2.0, None, at_least=True), True, False, "switch"),
        (speedup(0.9, None, at_least=True), True, False, "not yet"),
        (None, True, False, "not yet"),  # no runs on new seeds yet
        (None, False, False, "use"),
        (None, False, True, "not yet"),  # most new seeds missed the target
    ],
)
def test_verdict(speedup, has_baseline, best_is_bound, verdict):
    assert verdict_of(speedup, has_baseline, best_is_bound) == verdict


def candidate(number, log_value, deviation=0.1):
    return Candidate(number=number, log_value=log_value, deviation=deviation)


def test_the_best_by_prediction_runs_first_and_is_done_after_its_seeds():
    candidates = [candidate(3, 0.0), candidate(5, 0.05)]
    assert next_confirmation(candidates, {}, seeds=2, noise=0.1) == 3
    assert next_confirmation(candidates, {3: [0.0]}, seeds=2, noise=0.1) == 3
    assert next_confirmation(candidates, {3: [0.0, 0.0]}, seeds=2, noise=0.1) is None
    assert best_confirmed(candidates, {3: [0.0, 0.0]}, noise=0.1) == 3


def test_another_within_a_tenth_takes_over_when_its_mean_falls_below():
    candidates = [candidate(3, 0.0), candidate(5, 0.05)]
    # The leader's mean is now 0.15, above the 0.05 of the other one.
    assert next_confirmation(candidates, {3: [0.3]}, seeds=2, noise=0.1) == 5
    assert next_confirmation(candidates, {3: [0.3], 5: [0.0]}, seeds=2, noise=0.1) == 5
    assert best_confirmed(candidates, {3: [0.3], 5: [0.0, 0.0]}, noise=0.1) == 5


def test_what_is_more_than_a_tenth_behind_is_not_run():
    candidates = [candidate(3, 0.0), candidate(5, 0.2)]
    assert next_confirmation(candidates, {3: [9.0]}, seeds=2, noise=0.1) == 3


def test_of_candidates_that_tie_the_least_rank_leads():
    candidates = [
        Candidate(3, 0.0, 0.05, rank=512),
        Candidate(5, 0.08, 0.05, rank=256),
        Candidate(7, 0.2, 0.05, rank=128),
    ]
    assert next_confirmation(candidates, {}, seeds=2, noise=0.1) == 5
    assert best_confirmed(candidates, {3: [0.0], 5: [0.08]}, noise=0.1) == 5
    # Its new seeds are far behind: it ties no more.
    assert next_confirmation(candidates, {5: [0.5]}, seeds=2, noise=0.1) == 3


def test_take_overs_end():
    """Whatever comes, new seeds end after three times as many runs as were asked for."""
    candidates = [candidate(number, 0.01 * number) for number in range(9)]
    runs_of = {}
    count = 0
    while (number := next_confirmation(candidates, runs_of, seeds=2, noise=0.1)) is not None:
        runs_of.setdefault(number, []).append(1.0 + 0.1 * count)
        count += 1
    assert count <= 6


def test_nothing_reached_has_nothing_to_confirm():
    assert next_confirmation([], {}, seeds=3, noise=0.1) is None


def test_a_record_is_one_json_line():
    record = Record(
        number=3,
        place="search/3",
        role="search",
        batch_size=64,
        lr=0.1,
        seed=7,
        max_steps=100,
        status="diverged",
        steps=20,
        history=((10, 0.5), (20, math.nan)),
    )
    line = record.model_dump_json()
    assert "\n" not in line
    assert "NaN" not in line
    again = Record.model_validate_json(line)
    assert again == record
    assert again.history == ((10, 0.5), (20, None))
