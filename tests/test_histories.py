import math

import numpy as np
import pytest

from bstune.core.records import Target
from bstune.search.histories import (
    USUAL_SLOWDOWN,
    History,
    extrapolate_history,
    fit_slowdown,
    ideal_value,
    log_excess,
    reached_rate,
)

ERROR = Target("error", 0.1, "min")
ACCURACY = Target("accuracy", 0.9, "max")
# All histories below reach the target at this step.
LAST = 30_000


def falling(rate, end, first=1):
    """A power law that reaches the target at LAST, evaluated up to ``end``."""
    # Each step is 1.1 times the one before, down to a step or to ``first``.
    steps = np.unique(np.round(end * 1.1 ** -np.arange(120.0))).astype(int)
    steps = steps[steps >= first].tolist()
    # The metric is the target, 0.1, at LAST.
    return log_excess([(step, 0.1 * (step / LAST) ** -rate) for step in steps], ERROR, 0.0)


def line(rate, level=1.0, steps=range(10, 1000, 10)):
    """A curve that falls at ``rate`` to ``level``, log excess over log step."""
    return [(math.log(step), level + rate * math.log(steps[-1] / step)) for step in steps]


def extrapolated(curve, steps, reached=()):
    return extrapolate_history(curve, steps, [(other, math.log(LAST)) for other in reached])


@pytest.mark.parametrize(
    ("target", "bounds", "ideal"),
    [
        (ERROR, (0.05, 1.0), 0.05),
        (ERROR, None, 0.0),
        (ERROR, (), 0.0),
        # A bound that is no better than the target tells no ideal value.
        (ERROR, (0.1, 1.0), 0.0),
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
    ("target", "ideal", "history", "expected"),
    [
        # (0.3 - 0.05)/(0.1 - 0.05) = 5.
        (ERROR, 0.05, [(20, 0.3)], [(20, 5.0)]),
        (ACCURACY, 1.0, [(1, 0.5), (20, 0.95)], [(1, 5.0), (20, 0.5)]),
        # No ideal value is known: the first gap counts as four times the goal's distance from it,
        # 1 + 4.
        (ERROR, None, [(20, 0.5)], [(20, 5.0)]),
        (ACCURACY, None, [(20, 0.1)], [(20, 5.0)]),
        (
            ERROR,
            0.0,
            [(0, 0.9), (1, None), (2, 0.4), (3, math.nan), (4, math.inf), (5, 0.1)],
            [(2, 4.0), (5, 1.0)],
        ),
        # Nothing is left.
        (ERROR, 0.0, [(0, 0.9), (1, None), (3, math.nan)], []),
    ],
)
def test_the_excess_is_one_at_the_target_and_what_is_not_a_number_is_left_out(
    target, ideal, history, expected
):
    seen = log_excess(history, target, ideal)
    assert np.exp(seen).tolist() == [pytest.approx(pair) for pair in expected]


def test_the_rate_at_which_a_trial_went_on():
    # It is the slope of a power law, from whichever excess on.
    for rate, excess in ((0.2, 0.5), (0.5, 1.0), (1.3, 2.0)):
        assert reached_rate(
            tuple(falling(rate, LAST)), math.log(LAST), excess * rate
        ) == pytest.approx(rate, rel=1e-2)
    curve = tuple(falling(0.5, LAST, first=1000))
    # This curve began below.
    assert reached_rate(curve, math.log(LAST), curve[0][1] + 0.1) is None
    # This one did not get there.
    assert reached_rate(curve[:-5], math.log(LAST), 0.0) is None
    assert reached_rate((), math.log(LAST), 1.0) is None
    # A worse evaluation between better ones is no return.
    curve = ((0.0, 3.0), (1.0, 2.0), (1.5, 2.8), (2.0, 1.0), (3.0, 0.0))
    assert reached_rate(curve, 3.0, 1.5) == pytest.approx(1.5 / (3.0 - 1.5))


@pytest.mark.parametrize("rate", [0.1, 0.4, 1.5])
@pytest.mark.parametrize("times", [1.5, 3.0, 30.0])
def test_a_power_law_is_extrapolated_within_the_spread_and_surer_beside_others(rate, times):
    end = round(LAST / times)
    alone, sigma = extrapolated(falling(rate, end), end)
    assert abs(alone - math.log(LAST / end)) < 1.5 * sigma
    assert 0.0 < sigma < 1.0 + math.log(times)
    # Four others that reached the target have the same rate, and are believed.
    if times > 1.5:
        found, spread = extrapolated(falling(rate, end), end, [falling(rate, LAST)] * 4)
        assert found == pytest.approx(math.log(LAST / end), rel=0.1)
        assert abs(found - math.log(times)) < abs(alone - math.log(times))
        assert spread < max(sigma, 0.5)


@pytest.mark.parametrize("rate", [0.15, 2.0])
def test_one_evaluation_takes_the_rate_of_the_trials_that_reached_the_target(rate):
    end = LAST // 10
    point = falling(rate, end)[-1:]
    found, spread = extrapolated(point, end, [falling(rate, LAST)] * 8)
    assert found == pytest.approx(math.log(10), rel=0.12)
    alone, sigma = extrapolated(point, end)
    # What is left of the log excess over USUAL_RATE, which is all that is known.
    assert alone == pytest.approx(point[0][1] / 0.4, rel=0.01)
    assert sigma / alone > spread / found
    # Evaluated from 25,000 steps on, it began nearer to the target than this one is: it does not
    # count.
    late = falling(0.5, LAST, first=25_000)
    assert extrapolated(point, end, [late]) == (alone, sigma)


def test_the_higher_and_the_slower_the_farther():
    # The rate is the same and the level rises; then the other way round.
    levels = [extrapolated(line(0.5, level), 990)[0] for level in (0.1, 0.3, 1.0, 2.0)]
    rates = [extrapolated(line(rate), 990)[0] for rate in (2.0, 1.0, 0.5, 0.2, 0.0, -0.3)]
    assert levels == sorted(set(levels))
    assert rates[:5] == sorted(set(rates[:5]))
    # A curve that gets worse is extrapolated as a flat one.
    assert rates[5] == pytest.approx(rates[4])
    reached = [falling(0.7, LAST)] * 4
    # Others that reached the target do not make the two the same.
    assert extrapolated(line(0.0), 990, reached) > extrapolated(line(0.7), 990, reached)


def test_the_slowdown_is_learned_from_the_trials_that_reached_the_target():
    assert (
        fit_slowdown([])
        == USUAL_SLOWDOWN
        == fit_slowdown([(falling(0.5, LAST)[-2:], math.log(LAST))])
    )
    # A power law has no slowdown.
    power, spread = fit_slowdown([(falling(0.5, LAST), math.log(LAST))] * 20)
    assert abs(power) < 0.03
    assert spread < 0.12
    # One whose rate is 2 up to half of its steps, then 1/2: from a quarter on 5/4, from a half on
    # 1/2.
    steps = range(300, LAST, 90)
    bent = []
    for step in steps:
        left = math.log(LAST / step)
        bent.append((math.log(step), 0.5 * left + 1.5 * max(left - math.log(2.0), 0.0)))
    slowed = fit_slowdown([(bent, math.log(LAST))] * 20)
    # Over the recent rate of 2 these are slowdowns of 5/8 and 1/4.
    shown = 0.5 * (math.log(5 / 8) + math.log(1 / 4))
    # What is usual counts as two trials (USUAL_TRIALS) beside the twenty.
    assert slowed[0] == pytest.approx((2 * USUAL_SLOWDOWN[0] + 20 * shown) / 22, abs=0.03)
    # At a third of its steps a trial shows nothing of the bend yet.
    start = [(log_step, excess) for log_step, excess in bent if log_step < math.log(LAST / 3)]
    end = math.exp(start[-1][0])
    near, _ = extrapolate_history(start, round(end), [], USUAL_SLOWDOWN)
    far, sure = extrapolate_history(start, round(end), [], slowed)
    assert near < far
    assert abs(far - math.log(LAST / end)) < 1.5 * sure


def test_steps_since_the_last_evaluation_count_as_done():
    curve = falling(0.5, 3000)
    # The last evaluation is at 3000 either way.
    (there, spread) = extrapolated(curve, 3000)
    (on, same) = extrapolated(curve, 4000)
    assert (there - on, same) == (pytest.approx(math.log(4 / 3)), spread)
    # An error of 0.05 is better than the target.
    below = log_excess([(step, 0.05) for step in range(1, 30)], ERROR, 0.0)
    # Something is always left to go.
    assert min(extrapolated(below, 1000)) > 0
    noisy = []
    for i, (log_step, excess) in enumerate(curve):
        noisy.append((log_step, excess + 0.3 * (-1) ** i))
    # A noisy history is less sure.
    assert extrapolated(noisy, 3000)[1] > 1.1 * spread


def test_a_target_next_to_the_ideal_value_has_a_finite_excess():
    history = [(1, 2.0), (10, 1.0), (100, 0.5)]
    # Less than the least normal float, 2.2e-308.
    seen = log_excess(history, Target("loss", 1e-320, "min"), 0.0)
    assert np.isfinite(seen).all()


def test_a_history_is_found_by_a_plain_tuple_of_its_points():
    points = ((0.0, 1.0), (1.0, 0.5))
    history = History(points)
    # The second hash is the one that was kept.
    assert (history, hash(history), hash(history)) == (points, hash(points), hash(points))
    assert {points: 1}[history] == 1
