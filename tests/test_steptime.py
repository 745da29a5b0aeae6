import math

import numpy as np
import pytest

from bstune.search.steptime import StepTimes, fit_step_times


def test_overhead_and_throughput_are_recovered() -> None:
    sizes = (8, 64, 512, 4096)
    tau = fit_step_times([(size, 2e-3 + 3e-6 * size) for size in sizes], 128.0)
    assert tau.overhead == pytest.approx(2e-3)
    assert tau.per_example == pytest.approx(3e-6)
    at = np.array([1.0, 8.0, 100.0, 1e5])
    np.testing.assert_allclose(tau(at), 2e-3 + 3e-6 * at, rtol=1e-9)


@pytest.mark.parametrize("given", [None, lambda size: 1e-3 * math.sqrt(size)])
def test_measured_batch_sizes_get_what_was_measured(given) -> None:
    measured = {16: 1e-3, 100: 5e-3, 128: 2e-3, 1024: 9e-3}
    tau = fit_step_times(measured.items(), 128.0, given)
    np.testing.assert_allclose(tau(np.array([16.0, 100.0, 128.0, 1024.0])), list(measured.values()), rtol=1e-9)


def test_a_batch_size_measured_more_than_once_gets_the_median() -> None:
    tau = fit_step_times([(64, 1.0), (8, 0.5), (64, 9.0), (64, 2.0)], 32.0)
    np.testing.assert_allclose(tau(np.array([64.0, 8.0])), [2.0, 0.5], rtol=1e-9)


def test_between_measured_ones_the_correction_is_linear_in_log_batch_size_and_beyond_it_is_the_last() -> None:
    tau = fit_step_times([(10, 2.0), (1000, 8.0)], 100.0, lambda size: 1.0)
    np.testing.assert_allclose(tau(np.array([1.0, 10.0, 100.0, 1000.0, 1e6])), [2.0, 2.0, 4.0, 8.0, 8.0], rtol=1e-9)


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
    np.testing.assert_allclose(tau(np.array([[1.0, 10.0], [100.0, 0.0]])), [[0.11, 0.2], [1.1, 0.1]], rtol=1e-12)


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
