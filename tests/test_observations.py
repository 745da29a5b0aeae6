import math

from typing import NamedTuple

import pytest

from bstune.core.records import Target
from bstune.search.observations import extrapolate, ideal_value, log_excess, reached_rate

ERROR, ACCURACY = Target("error", 0.1, "min"), Target("accuracy", 0.9, "max")
LAST = 30_000  # steps to target of the histories below


def falling(rate, end, first=1):
    """Return a power law that reaches the target at LAST, evaluated up to ``end``."""
    steps = sorted({round(end * 1.1**-k) for k in range(120) if round(end * 1.1**-k) >= first})
    return log_excess([(step, 0.1 * (step / LAST) ** -rate) for step in steps], ERROR, 0.0)


class Extrapolation(NamedTuple):
    log_factor: float
    spread: float


def extrapolated(curve, steps, reached=()):
    return Extrapolation(*extrapolate(curve, steps, [(other, math.log(LAST)) for other in reached]))


@pytest.mark.parametrize(
    ("target", "bounds", "ideal"),
    [
        (ERROR, (0.0, 1.0), 0.0),
        (ERROR, (0.05, 1.0), 0.05),
        (ERROR, None, 0.0),
        (ERROR, (), 0.0),
        (ERROR, (0.1, 1.0), 0.0),  # a bound that is no better than the target
        (ERROR, (-math.inf, math.inf), 0.0),
        (Target("log_likelihood", -3.0, "min"), None, None),
        (Target("log_likelihood", -3.0, "min"), (-5.0, 0.0), -5.0),
        (ACCURACY, (0.0, 1.0), 1.0),
        (ACCURACY, None, None),
        (ACCURACY, (0.0, math.inf), None),
    ],
)
def test_the_ideal_value(target, bounds, ideal):
    assert ideal_value(target, bounds) == ideal


@pytest.mark.parametrize(
    ("target", "ideal", "value", "excess"),
    [
        (ERROR, 0.0, 0.1, 1.0),
        (ERROR, 0.0, 0.3, 3.0),
        (ERROR, 0.05, 0.3, 5.0),
        (ACCURACY, 1.0, 0.9, 1.0),
        (ACCURACY, 1.0, 0.5, 5.0),
        (ACCURACY, 1.0, 0.95, 0.5),
        (ERROR, None, 0.5, 5.0),  # the first one: four times as far as the goal is from the best
        (ACCURACY, None, 0.1, 5.0),
    ],
)
def test_the_excess_is_one_at_the_target(target, ideal, value, excess):
    ((log_step, log_value),) = log_excess([(20, value)], target, ideal)
    assert log_step == pytest.approx(math.log(20))
    assert log_value == pytest.approx(math.log(excess), abs=1e-12)


def test_what_is_not_a_number_is_left_out():
    history = [(0, 0.9), (1, None), (2, 0.4), (3, math.nan), (4, math.inf), (5, 0.2)]
    curve = log_excess(history, ERROR, 0.0)
    assert [log_step for log_step, _ in curve] == pytest.approx([math.log(2), math.log(5)])
    assert [value for _, value in curve] == pytest.approx([math.log(4), math.log(2)])
    assert log_excess([(0, 0.9), (1, None), (3, math.nan)], ERROR, 0.0) == []


@pytest.mark.parametrize("rate", [0.2, 0.5, 1.3])
@pytest.mark.parametrize("excess", [0.5, 1.0, 2.0])
def test_the_rate_at_which_a_trial_went_on(rate, excess):
    curve = falling(rate, LAST)
    assert curve[0][1] > excess * 1.1 * rate
    assert reached_rate(curve, math.log(LAST), excess * rate) == pytest.approx(rate, rel=1e-2)


def test_no_rate_from_an_excess_that_was_never_seen():
    curve = falling(0.5, LAST, first=1000)
    assert reached_rate(curve, math.log(LAST), curve[0][1] + 0.1) is None  # it began below
    assert reached_rate(curve[:-5], math.log(LAST), 0.0) is None  # it did not get there
    assert reached_rate([], math.log(LAST), 1.0) is None


def test_a_worse_evaluation_between_better_ones_is_no_return():
    curve = [(0.0, 3.0), (1.0, 2.0), (1.5, 2.8), (2.0, 1.0), (3.0, 0.0)]
    assert reached_rate(curve, 3.0, 1.5) == pytest.approx(1.5 / (3.0 - 1.5))


@pytest.mark.parametrize("rate", [0.1, 0.2, 0.4, 0.8, 1.5])
@pytest.mark.parametrize("times", [1.5, 3.0, 10.0, 30.0])
def test_a_power_law_is_extrapolated_within_the_spread(rate, times):
    end = round(LAST / times)
    found = extrapolated(falling(rate, end), end)
    assert abs(found.log_factor - math.log(LAST / end)) < 1.5 * found.spread
    assert 0.0 < found.spread < 1.0 + math.log(times)


@pytest.mark.parametrize("rate", [0.1, 0.4, 1.5])
@pytest.mark.parametrize("times", [3.0, 30.0])
def test_trials_that_reached_the_target_make_it_surer(rate, times):
    end = round(LAST / times)
    alone = extrapolated(falling(rate, end), end)
    found = extrapolated(falling(rate, end), end, [falling(rate, LAST)] * 4)
    assert found.log_factor == pytest.approx(math.log(LAST / end), rel=0.1)
    assert abs(found.log_factor - math.log(times)) < abs(alone.log_factor - math.log(times))
    assert found.spread < max(alone.spread, 0.5)


@pytest.mark.parametrize("rate", [0.15, 0.6, 2.0])
def test_one_evaluation_takes_the_rate_of_the_trials_that_reached_the_target(rate):
    end = LAST // 10
    point = falling(rate, end)[-1:]
    found = extrapolated(point, end, [falling(rate, LAST)] * 8)
    assert found.log_factor == pytest.approx(math.log(10), rel=0.12)
    alone = extrapolated(point, end)
    assert alone.spread / alone.log_factor > found.spread / found.log_factor
    assert alone.log_factor == pytest.approx(point[0][1] / 0.4, rel=0.01)  # the prior's rate


def test_trials_far_from_this_ones_excess_say_nothing():
    end = 300
    curve = falling(0.4, end)
    late = falling(2.0, LAST, first=20_000)  # its first evaluation was nearer to the target than this one is
    assert extrapolated(curve, end, [late]) == extrapolated(curve, end)


def test_a_flat_history_is_extrapolated_as_far():
    flat = [(math.log(step), math.log(2.0)) for step in range(10, 1000, 10)]
    steep = [(log_step, math.log(2.0) + 0.7 * (math.log(990) - log_step)) for log_step, _ in flat]
    far, near = extrapolated(flat, 990), extrapolated(steep, 990)
    assert far.log_factor > 2.0 * near.log_factor
    assert far.log_factor > math.log(10.0)
    reached = [falling(0.7, LAST)] * 4
    assert extrapolated(flat, 990, reached).log_factor > extrapolated(steep, 990, reached).log_factor


def test_the_higher_and_the_slower_the_farther():
    log_steps = [math.log(step) for step in range(10, 1000, 10)]
    levels = [
        extrapolated([(s, level + 0.5 * (log_steps[-1] - s)) for s in log_steps], 990).log_factor
        for level in (0.1, 0.3, 1.0, 2.0)
    ]
    rates = [
        extrapolated([(s, 1.0 + rate * (log_steps[-1] - s)) for s in log_steps], 990).log_factor
        for rate in (2.0, 1.0, 0.5, 0.2, 0.0, -0.3)
    ]
    assert levels == sorted(levels)
    assert rates[:5] == sorted(rates[:5])
    assert len(set(levels)) == 4
    assert len(set(rates[:5])) == 5
    assert rates[5] == pytest.approx(rates[4])  # one that gets worse is extrapolated as a flat one


def test_steps_since_the_last_evaluation_count_as_done():
    curve = falling(0.5, 3000)
    there, on = extrapolated(curve, 3000), extrapolated(curve, 4000)
    assert there.log_factor - on.log_factor == pytest.approx(math.log(4 / 3))
    assert on.spread == there.spread


def test_something_is_always_left_to_go():
    below = log_excess([(step, 0.05) for step in range(1, 30)], ERROR, 0.0)
    found = extrapolated(below, 1000)
    assert found.log_factor > 0
    assert found.spread > 0


def test_a_noisy_history_is_less_sure():
    end = LAST // 3
    curve = falling(0.5, end)
    noisy = [(s, e + 0.3 * (-1) ** i) for i, (s, e) in enumerate(curve)]
    assert extrapolated(noisy, end).spread > 1.1 * extrapolated(curve, end).spread


def test_a_metric_that_rises_is_extrapolated_as_its_error_is():
    end = LAST // 5
    values = [(step, 0.1 * (step / LAST) ** -0.4) for step in range(200, end, 200)]
    error = extrapolated(log_excess(values, ERROR, 0.0), end)
    accuracy = extrapolated(log_excess([(step, 1.0 - value) for step, value in values], ACCURACY, 1.0), end)
    assert accuracy.log_factor == pytest.approx(error.log_factor)
    assert accuracy.spread == pytest.approx(error.spread)
