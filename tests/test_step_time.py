"""tau(B) of bstune.core.step_time, on synthetic numbers whose truth is known."""

import math
from itertools import product

import numpy as np
import pytest
from builders import SizeTiming

from bstune.core.errors import HardwareError
from bstune.core.step_time import (
    BANDWIDTH,
    SHRINKAGE,
    StepTime,
    StepTimes,
    fit_line,
    fit_step_times,
)
from bstune.core.step_time_law import fit_step_time_law, leave_one_out

LINE = StepTime(2e-3, 3e-5)


def law_of_pairs(pairs, visits=4):
    return fit_step_time_law([SizeTiming(size, tau, tau, tau, visits) for size, tau in pairs])


PAIRS = [(size, LINE(size)) for size in (8, 32, 128, 256, 500)]


def test_a_line_is_recovered_and_predicted_beyond_its_ends():
    model = law_of_pairs(PAIRS)
    for line in (model, fit_line(PAIRS)):
        assert (line.overhead, line.per_example) == (pytest.approx(2e-3), pytest.approx(3e-5))
    assert (model(1), model(5000)) == (pytest.approx(LINE(1)), pytest.approx(LINE(5000)))
    assert model.residual < 1e-9
    assert max(leave_one_out([SizeTiming(size, tau, tau, tau, 4) for size, tau in PAIRS])) < 0.05
    at = np.array([[1.0, 8.0], [100.0, 1e5]])
    np.testing.assert_allclose(fit_step_times(PAIRS, 128.0)(at), 2e-3 + 3e-5 * at, rtol=1e-9)


@pytest.mark.parametrize("count", [1, 200])
def test_what_was_measured_corrects_what_was_given(count):
    tau = fit_step_times([(64, 3.0)] * count, 128.0, lambda size: 1.5)
    octaves = np.array([0.0, 0.5 * BANDWIDTH, BANDWIDTH, 20.0 * BANDWIDTH])
    weight = count * np.exp(-0.5 * (octaves / BANDWIDTH) ** 2)
    # A normal kernel shrinks to no correction.
    expected = 1.5 * 2.0 ** (weight / (weight + SHRINKAGE))
    np.testing.assert_allclose(tau(64.0 * 2.0**octaves), expected, rtol=1e-9)
    np.testing.assert_allclose(tau(64.0 * 2.0**-octaves), expected, rtol=1e-9)


@pytest.mark.parametrize("given", [None, lambda size: 1e-3 * math.sqrt(size)])
def test_many_measurements_outweigh_the_smooth_function_and_are_averaged(given):
    measured = {8: (1e-3, 1e-3), 100: (5e-3, 5e-3), 400: (1e-3, 4e-3), 4096: (9e-3, 9e-3)}
    pairs = []
    for size, values in measured.items():
        pairs += product((size,), values * 200)
    tau = fit_step_times(pairs, 128.0, given)
    # 1e-3 and 4e-3 have the geometric mean 2e-3.
    np.testing.assert_allclose(
        tau(np.array([8.0, 100.0, 400.0, 4096.0])), [1e-3, 5e-3, 2e-3, 9e-3], rtol=0.01
    )


@pytest.mark.parametrize(
    ("measured", "size", "seconds"), [([(64, 0.2)], 64.0, 0.2), ([], 128.0, 256.0)]
)
def test_with_one_or_none_half_of_a_step_is_overhead(measured, size, seconds):
    tau = fit_step_times(measured, 128.0)
    np.testing.assert_allclose(
        tau(size * np.array([1e-9, 1.0, 2.0])), seconds * np.array([0.5, 1.0, 1.5])
    )
    assert tau(np.full((), 4.0)).shape == ()
    assert tau(np.full((2, 3), 4.0)).shape == (2, 3)


def test_neither_overhead_nor_throughput_is_negative_and_tau_does_not_fall():
    assert fit_line([(8, 1.0), (64, 0.5), (512, 0.4)]).per_example == 0.0
    assert fit_line([(8, 0.01), (64, 1.0), (512, 100.0)]).overhead == 0.0
    model = law_of_pairs([(8, 1.0), (16, 0.9), (32, 1.5), (64, 1.4), (128, 3.0)], visits=1)
    values = [model(2 ** (i / 10)) for i in range(10, 90)]
    assert np.diff(values).min() > -1e-12


@pytest.mark.parametrize(
    "pairs", [[], [(8, 1.0)], [(8, 1.0), (8, 2.0)], [(8, 1.0), (9, 0.0)], [(8, 1), (9, math.nan)]]
)
def test_what_cannot_be_fitted_is_refused(pairs):
    with pytest.raises(HardwareError, match="needs positive seconds at two or more batch sizes"):
        law_of_pairs(pairs)


@pytest.mark.parametrize("count", [0, 1, 33, 600])
def test_step_times_that_are_prepared_are_the_same_to_the_bit(count):
    rng = np.random.default_rng(0)
    x = rng.uniform(2.0, 12.0, count)
    log_ratio = rng.normal(0.0, 0.2, count)
    alone = StepTimes(LINE, tuple(x), tuple(log_ratio))
    at_once = StepTimes(LINE, tuple(x), tuple(log_ratio))
    sizes = np.exp2(np.log2(rng.integers(4, 5000, 600)))
    at_once.prepare(sizes)
    for size in sizes:
        assert np.array_equal(at_once(np.array(size)), alone(np.array(size)))
