import math

import numpy as np
import pytest
from refusals import cases
from search_records import TARGET, record

from bstune.core.records import Target
from bstune.search.histories import excess_scale, extrapolate, log_curve, recent_line


def power_law(steps_to_target, rate, steps):
    """The curve of a metric that falls as a power of the steps."""
    return np.array([(math.log(step), rate * math.log(steps_to_target / step)) for step in steps])


def test_an_exact_power_law_is_read_exactly():
    history = [(step, 0.1 * (500 / step) ** 0.7) for step in (1, 50, 100, 150, 200)]
    curve = log_curve(record(status="pruned", history=history), TARGET, 0.1)
    np.testing.assert_allclose(curve, power_law(500, 0.7, (1, 50, 100, 150, 200)))
    line = recent_line(curve)
    assert (line.rate, line.level) == pytest.approx((0.7, 0.7 * math.log(2.5)))
    # Without an evaluation there is nothing to extrapolate.
    assert extrapolate(log_curve(record(history=[(0, 0.9), (10, None)]), TARGET, 0.1), []) is None


def test_two_evaluations_alone_fall_at_the_usual_rate():
    got = extrapolate(power_law(400, 0.8, (100, 200)), [])
    assert got.log_steps == pytest.approx(math.log(200) + 0.8 * math.log(2.0) / 0.4)


def test_other_trials_say_how_fast_the_rest_falls():
    slow = [power_law(400, 0.3, range(10, 401))] * 4
    fast = [power_law(400, 1.0, range(10, 401))] * 6
    got = extrapolate(power_law(400, 1.0, (100, 200)), slow + fast)
    # The latest six count, against the usual rate of 0.4.
    share_of_usual = (1 / 0.36) / (1 / 0.36 + 6 / 0.04)
    rate = math.exp(share_of_usual * math.log(0.4))
    assert got.log_steps == pytest.approx(math.log(200) + math.log(2.0) / rate, rel=2e-3)
    # Six rates that agree, 0.2 apart from trial to trial.
    deviation = math.sqrt(1 / (1 / 0.36 + 6 / 0.04) + 0.04)
    expected = math.hypot(0.15, 0.04 / rate, math.log(2.0) / rate * deviation)
    assert got.deviation == pytest.approx(expected, rel=1e-2)


@cases("""
target | first | scale
error <= 0.1 | 0.9 | 0.1
accuracy >= 0.9 | 0.5 | 0.1
loss <= 0.0 | 8.0 | 2.0
# No trial has said anything.
loss <= -3.0 | null | 1.0
""")
def test_the_scale_of_the_excess(target, first, scale):
    records = [record(history=[(1, first), (2, 0.7)])] if first is not None else []
    assert excess_scale(Target.parse(target), records) == pytest.approx(scale)
