"""The model between step times, on synthetic numbers whose truth is known."""

import math

import pytest

from bstune.core.errors import HardwareError
from bstune.core.step_time import fit_step_model, fit_sync, iteration_seconds, leave_one_out, sync_seconds

SIZES = (8, 32, 128, 500)


def line(size: float) -> float:
    return 2e-3 + 3e-5 * size


def test_a_line_is_recovered_and_foretold():
    model = fit_step_model([(size, line(size)) for size in SIZES])
    assert (model.overhead, model.per_example) == (pytest.approx(2e-3), pytest.approx(3e-5))
    assert model.residual < 1e-9
    assert model(1) == pytest.approx(line(1))
    assert model(5000) == pytest.approx(line(5000))
    assert max(leave_one_out([(size, line(size)) for size in (8, 16, 32, 64, 128, 256)])) < 0.05


def test_noise_does_not_make_it_fall():
    model = fit_step_model([(8, 1.0), (16, 0.9), (32, 1.5), (64, 1.4), (128, 3.0)])
    values = [model(2 ** (i / 10)) for i in range(10, 90)]
    assert values == sorted(values)


@pytest.mark.parametrize(
    "pairs", [[], [(8, 1.0)], [(8, 1.0), (8, 2.0)], [(8, 1.0), (9, 0.0)], [(8, 1.0), (9, math.nan)]]
)
def test_what_cannot_be_fitted_is_refused(pairs):
    with pytest.raises(HardwareError, match="needs positive seconds at two or more batch sizes"):
        fit_step_model(pairs)


@pytest.mark.parametrize(("gamma", "seconds"), [(1.0, 7.0), (2.0, 5.0), (math.inf, 4.0)])
def test_iteration(gamma, seconds):
    assert iteration_seconds(3.0, 4.0, gamma) == pytest.approx(seconds)
    assert iteration_seconds(3.0, 0.0, gamma) == pytest.approx(3.0)


def test_sync():
    assert [sync_seconds(k, 2.0, 0.5) for k in (1, 2, 4)] == [0.0, 2.0, 3.0]
    with pytest.raises(HardwareError, match="gamma of at least 1"):
        iteration_seconds(1.0, 1.0, 0.5)


@pytest.mark.parametrize(
    ("measured", "alpha", "beta"),
    [
        ([(2, 0.01), (4, 0.014), (8, 0.022)], 0.01, 0.002),
        ([(1, 0.0), (4, 0.014)], 0.014, 0.0),
        ([(2, 0.02), (8, 0.01)], None, 0.0),  # falls: a constant
    ],
)
def test_a_line_through_all_reduces(measured, alpha, beta):
    found = fit_sync(measured)
    assert found[1] == pytest.approx(beta, abs=1e-12)
    assert alpha is None or found[0] == pytest.approx(alpha)
    if alpha is not None:
        assert [sync_seconds(count, *found) for count, _ in measured] == pytest.approx([s for _, s in measured])


@pytest.mark.parametrize("measured", [[], [(1, 0.1)], [(2, 0.0)], [(2, -1.0)], [(2, math.nan)]])
def test_no_all_reduce_to_fit(measured):
    with pytest.raises(HardwareError, match="an all-reduce needs positive seconds at 2 devices or more"):
        fit_sync(measured)
