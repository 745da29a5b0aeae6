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


def line(rate, level=1.0, steps=range(10, 1000, 10)):
    """Return a curve that falls at ``rate`` to ``level``, log excess over log step."""
    return [(math.log(step), level + rate * math.log(steps[-1] / step)) for step in steps]


class Extrapolation(NamedTuple):
    log_factor: float
    spread: float


def extrapolated(curve, steps, reached=()):
    return Extrapolation(*extrapolate(curve, steps, [(other, math.log(LAST)) for other in reached]))


@pytest.mark.parametrize(
    ("target", "bounds", "ideal"),
    [
        (ERROR, (0.05, 1.0), 0.05),
        (ERROR, None, 0.0),
        (ERROR, (), 0.0),
        (ERROR, (0.1, 1.0), 0.0),  # a bound that is no better than the target
        (ERROR, (-math.inf, math.inf), 0.0),
        (Target("log_likelihood", -3.0, "min"), None, None),
        (Target("log_likelihood", -3.0, "min"), (-5.0, 0.0), -5.0),
        (ACCURACY, (0.0, 1.0), 1.0),
        (ACCURACY, (0.0, math.inf), None),
    ],
)
def test_the_ideal_value(target, bounds, ideal):
    assert ideal_value(target, bounds) == ideal


@pytest.mark.parametrize(
    ("target", "ideal", "value", "excess"),
    [
        (ERROR, 0.0, 0.1, 1.0),
        (ERROR, 0.05, 0.3, 5.0),
        (ACCURACY, 1.0, 0.5, 5.0),
        (ACCURACY, 1.0, 0.95, 0.5),
        (ERROR, None, 0.5, 5.0),  # the first one: four times as far as the goal is from the best
        (ACCURACY, None, 0.1, 5.0),
    ],
)
def test_the_excess_is_one_at_the_target(target, ideal, value, excess):
    ((log_step, log_value),) = log_excess([(20, value)], target, ideal)
    assert (log_step, log_value) == (pytest.approx(math.log(20)), pytest.approx(math.log(excess), abs=1e-12))


def test_what_is_not_a_number_is_left_out():
    curve = log_excess([(0, 0.9), (1, None), (2, 0.4), (3, math.nan), (4, math.inf), (5, 0.2)], ERROR, 0.0)
    assert [log_step for log_step, _ in curve] == pytest.approx([math.log(2), math.log(5)])
    assert [value for _, value in curve] == pytest.approx([math.log(4), math.log(2)])
    assert log_excess([(0, 0.9), (1, None), (3, math.nan)], ERROR, 0.0) == []


def test_the_rate_at_which_a_trial_went_on():
    for rate, excess in ((0.2, 0.5), (0.5, 1.0), (1.3, 2.0)):
        assert reached_rate(falling(rate, LAST), math.log(LAST), excess * rate) == pytest.approx(rate, rel=1e-2)
    curve = falling(0.5, LAST, first=1000)
    assert reached_rate(curve, math.log(LAST), curve[0][1] + 0.1) is None  # it began below
    assert reached_rate(curve[:-5], math.log(LAST), 0.0) is None  # it did not get there
    assert reached_rate([], math.log(LAST), 1.0) is None
    # A worse evaluation between better ones is no return.
    curve = [(0.0, 3.0), (1.0, 2.0), (1.5, 2.8), (2.0, 1.0), (3.0, 0.0)]
    assert reached_rate(curve, 3.0, 1.5) == pytest.approx(1.5 / (3.0 - 1.5))


@pytest.mark.parametrize("rate", [0.1, 0.4, 1.5])
@pytest.mark.parametrize("times", [1.5, 3.0, 30.0])
def test_a_power_law_is_extrapolated_within_the_spread_and_surer_beside_others(rate, times):
    end = round(LAST / times)
    alone = extrapolated(falling(rate, end), end)
    assert abs(alone.log_factor - math.log(LAST / end)) < 1.5 * alone.spread
    assert 0.0 < alone.spread < 1.0 + math.log(times)
    if times > 1.5:
        found = extrapolated(falling(rate, end), end, [falling(rate, LAST)] * 4)
        assert found.log_factor == pytest.approx(math.log(LAST / end), rel=0.1)
        assert abs(found.log_factor - math.log(times)) < abs(alone.log_factor - math.log(times))
        assert found.spread < max(alone.spread, 0.5)


@pytest.mark.parametrize("rate", [0.15, 2.0])
def test_one_evaluation_takes_the_rate_of_the_trials_that_reached_the_target(rate):
    end = LAST // 10
    point = falling(rate, end)[-1:]
    found, alone = extrapolated(point, end, [falling(rate, LAST)] * 8), extrapolated(point, end)
    assert found.log_factor == pytest.approx(math.log(10), rel=0.12)
    assert alone.spread / alone.log_factor > found.spread / found.log_factor
    assert alone.log_factor == pytest.approx(point[0][1] / 0.4, rel=0.01)  # the prior's rate


def test_trials_far_from_this_ones_excess_do_not_count():
    curve, late = falling(0.4, 300), falling(2.0, LAST, first=20_000)  # it began nearer to the target than this one is
    assert extrapolated(curve, 300, [late]) == extrapolated(curve, 300)


def test_the_higher_and_the_slower_the_farther():
    levels = [extrapolated(line(0.5, level), 990).log_factor for level in (0.1, 0.3, 1.0, 2.0)]
    rates = [extrapolated(line(rate), 990).log_factor for rate in (2.0, 1.0, 0.5, 0.2, 0.0, -0.3)]
    assert levels == sorted(set(levels))
    assert rates[:5] == sorted(set(rates[:5]))
    assert rates[5] == pytest.approx(rates[4])  # one that gets worse is extrapolated as a flat one
    reached = [falling(0.7, LAST)] * 4
    assert extrapolated(line(0.0), 990, reached).log_factor > extrapolated(line(0.7), 990, reached).log_factor


def test_steps_since_the_last_evaluation_count_as_done():
    curve = falling(0.5, 3000)
    there, on = extrapolated(curve, 3000), extrapolated(curve, 4000)
    assert there.log_factor - on.log_factor == pytest.approx(math.log(4 / 3))
    assert on.spread == there.spread
    below = log_excess([(step, 0.05) for step in range(1, 30)], ERROR, 0.0)
    assert min(extrapolated(below, 1000)) > 0  # something is always left to go


def test_a_noisy_history_is_less_sure():
    curve = falling(0.5, LAST // 3)
    noisy = [(s, e + 0.3 * (-1) ** i) for i, (s, e) in enumerate(curve)]
    assert extrapolated(noisy, LAST // 3).spread > 1.1 * extrapolated(curve, LAST // 3).spread
