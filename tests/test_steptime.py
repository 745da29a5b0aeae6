import math
from collections.abc import Callable

import numpy as np
import pytest

from bstune.core.step_time import BANDWIDTH, DOUBT, StepTimes, fit_step_times


def test_overhead_and_throughput_are_recovered() -> None:
    sizes = (8, 64, 512, 4096)
    tau = fit_step_times([(size, 2e-3 + 3e-6 * size) for size in sizes], 128.0)
    assert tau.overhead == pytest.approx(2e-3)
    assert tau.per_example == pytest.approx(3e-6)
    at = np.array([1.0, 8.0, 100.0, 1e5])
    np.testing.assert_allclose(tau(at), 2e-3 + 3e-6 * at, rtol=1e-9)


@pytest.mark.parametrize("count", [1, 5, 200])
def test_what_was_measured_corrects_what_was_given(count: int) -> None:
    tau = fit_step_times([(64, 3.0)] * count, 128.0, lambda size: 1.5)
    octaves = np.array([0.0, 0.5 * BANDWIDTH, BANDWIDTH, 20.0 * BANDWIDTH])
    weight = count * np.exp(-0.5 * (octaves / BANDWIDTH) ** 2)
    expected = 1.5 * 2.0 ** (weight / (weight + DOUBT))  # a normal kernel, shrunk to no correction
    np.testing.assert_allclose(tau(64.0 * 2.0**octaves), expected, rtol=1e-9)
    np.testing.assert_allclose(tau(64.0 * 2.0**-octaves), expected, rtol=1e-9)


@pytest.mark.parametrize("given", [None, lambda size: 1e-3 * math.sqrt(size)])
def test_batch_sizes_measured_many_times_get_what_was_measured(given: Callable[[float], float] | None) -> None:
    measured = {8: 1e-3, 100: 5e-3, 400: 2e-3, 4096: 9e-3}
    tau = fit_step_times([pair for pair in measured.items() for _ in range(300)], 128.0, given)
    np.testing.assert_allclose(tau(np.array([8.0, 100.0, 400.0, 4096.0])), list(measured.values()), rtol=0.01)


def test_what_was_measured_at_one_batch_size_is_averaged() -> None:
    tau = fit_step_times([(64, 1.0), (64, 4.0)] * 100, 32.0, lambda size: 1.0)
    assert tau(np.array(64.0)) == pytest.approx(2.0, rel=0.01)


@pytest.mark.parametrize(("measured", "size", "seconds"), [([(64, 0.2)], 64.0, 0.2), ([], 128.0, 256.0)])
def test_with_one_or_none_half_of_a_step_is_overhead(
    measured: list[tuple[float, float]], size: float, seconds: float
) -> None:
    tau = fit_step_times(measured, 128.0)
    assert tau(np.array(size)) == pytest.approx(seconds)
    assert tau(np.array(1e-9)) == pytest.approx(seconds / 2)
    assert tau(np.array(2 * size)) == pytest.approx(1.5 * seconds)


def test_what_was_given_holds_where_nothing_was_measured() -> None:
    tau = fit_step_times([], 128.0, lambda size: 0.1 + 0.01 * size)
    np.testing.assert_allclose(tau(np.array([[1.0, 10.0], [100.0, 2.0]])), [[0.11, 0.2], [1.1, 0.12]], rtol=1e-12)


@pytest.mark.parametrize("shape", [(), (1,), (2, 3)])
def test_the_shape_is_that_of_the_batch_sizes(shape: tuple[int, ...]) -> None:
    for tau in (
        StepTimes(1.0, 2.0),
        fit_step_times([(8, 1.0)], 8.0),
        fit_step_times([(8, 1.0)], 8.0, lambda size: 2.0),
    ):
        assert tau(np.full(shape, 4.0)).shape == shape


def test_neither_overhead_nor_throughput_is_negative() -> None:
    falling = fit_step_times([(8, 1.0), (64, 0.5), (512, 0.4)], 64.0)
    assert falling.per_example == 0.0
    steep = fit_step_times([(8, 0.01), (64, 1.0), (512, 100.0)], 64.0)
    assert steep.overhead == 0.0
    for tau in (falling, steep):
        assert (tau(np.array([1.0, 30.0, 1e4])) > 0).all()
