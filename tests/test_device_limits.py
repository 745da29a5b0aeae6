import itertools
import math

import pytest
import torch

from bstune.core.errors import HardwareError
from bstune.hardware import roofline as device_limits
from bstune.hardware.roofline import DeviceLimits, arithmetic_of, measure_limits, tensor_core_multiple


class Machine:
    """A clock that only work moves: products at ``flops`` and copies at ``bandwidth`` per second."""

    def __init__(self, monkeypatch, flops, bandwidth):
        self.now = 0.0
        self.calls = []
        monkeypatch.setattr(device_limits, "_best_product", self.wrap(device_limits._best_product, flops, 3))
        monkeypatch.setattr(device_limits, "_best_copy", self.wrap(device_limits._best_copy, bandwidth, 1))
        self.real = device_limits._best_rate
        monkeypatch.setattr(device_limits, "_best_rate", self.rate)

    def wrap(self, function, rate, power):
        def run(*arguments):
            self.speed, self.power = rate, power
            return function(*arguments)

        return run

    def rate(self, prepare, work, *arguments):
        def prepared(size):
            call = prepare(size)

            def timed():
                call()
                self.now += work(size) / (self.speed * min(1.0, size / 100))  # small ones are slower
                self.calls.append((self.power, size))

            return timed

        return self.real(prepared, work, *arguments)

    def __call__(self):
        return self.now


def test_the_best_of_the_sizes_is_the_ceiling(monkeypatch):
    machine = Machine(monkeypatch, 1e6, 1e4)
    limits = measure_limits("cpu", "fp32", 1000.0, [80, 20, 40], [50, 100], clock=machine)
    assert limits.flops_per_second == pytest.approx(0.8e6)
    assert limits.bytes_per_second == pytest.approx(1e4)
    assert limits.ridge == pytest.approx(80.0)
    assert limits.misaligned_flops_per_second is None
    assert {size for power, size in machine.calls if power == 3} == {20, 40, 80}


@pytest.mark.parametrize("seconds", [0.1, 1.0, 10.0])
def test_it_takes_no_longer_than_it_may(monkeypatch, seconds):
    machine = Machine(monkeypatch, 1e6, 1e4)
    smallest = 2 * 20**3 / 0.2e6 + 2 * 50 / 0.5e4
    measure_limits("cpu", "fp32", seconds, [20, 40, 80, 160], [50, 100, 200], clock=machine)
    assert machine.now <= seconds + 2 * smallest + 1e-9
    assert machine.now >= 0.4 * seconds


def test_sizes_that_would_take_too_long_are_left_out(monkeypatch):
    machine = Machine(monkeypatch, 1e6, 1e4)
    measure_limits("cpu", "fp32", 0.5, [20, 400], [50], clock=machine)
    assert (3, 400) not in machine.calls


def test_warm_up_is_outside_the_clock():
    seconds = [0.0]

    def prepare(size):
        durations = itertools.chain([1000.0], itertools.repeat(1.0))  # the first call is slow

        def call():
            seconds[0] += next(durations)

        return call

    rate = device_limits._best_rate(prepare, lambda size: 1.0, torch.device("cpu"), 500.0, [1], lambda: seconds[0])
    assert rate == 1.0


@pytest.mark.parametrize("arithmetic", ["fp64", "fp32", "bf16"])
def test_a_real_device_has_ceilings(arithmetic):
    limits = measure_limits("cpu", arithmetic, 0.01, [32], [1000])
    assert limits.device.startswith("cpu (")
    assert limits.dtype == arithmetic
    assert limits.ridge == limits.flops_per_second / limits.bytes_per_second > 0


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        ("64-true", "fp64"),
        ("32-true", "fp32"),
        (32, "fp32"),
        ("16-mixed", "fp16"),
        (16, "fp16"),
        ("bf16-mixed", "bf16"),
        ("bf16-true", "bf16"),
        ("tf32", "tf32"),
    ],
)
def test_lightning_precisions(precision, expected):
    assert arithmetic_of(precision, "cpu") == expected


@pytest.mark.parametrize(
    ("allowed", "capability", "expected"),
    [("highest", (9, 0), "fp32"), ("high", (9, 0), "tf32"), ("medium", (8, 0), "tf32"), ("high", (7, 5), "fp32")],
)
def test_fp32_is_tf32_where_it_is_allowed(monkeypatch, allowed, capability, expected):
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: allowed)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert arithmetic_of("32-true", "cuda") == expected
    assert arithmetic_of("16-mixed", "cuda") == "fp16"


def test_unknown_precision():
    with pytest.raises(HardwareError, match=r"precision must be one of 64-true.*but got 'transformer-engine'"):
        arithmetic_of("transformer-engine", "cpu")


@pytest.mark.parametrize(
    ("arithmetic", "multiple"), [("fp16", 8), ("bf16", 8), ("tf32", 4), ("int8", 16), ("fp8", 16), ("fp32", None)]
)
def test_multiples(arithmetic, multiple):
    assert tensor_core_multiple(arithmetic, "cuda") == multiple
    assert tensor_core_multiple(arithmetic, "cpu") is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seconds": 0.0}, r"seconds must be positive and finite, but got \[0.0\]"),
        ({"seconds": math.nan}, "seconds must be"),
        ({"matrix_sizes": []}, "matrix_sizes must be"),
        ({"copy_bytes": [0]}, "copy_bytes must be"),
        ({"clock": lambda: 0.0}, "the clock does not resolve a call of size 8"),
        ({"copy_bytes": [10**15]}, "the ceilings of cpu cannot be measured in fp32: "),
    ],
)
def test_what_cannot_be_measured(changes, message):
    arguments = {"seconds": 0.01, "matrix_sizes": [8], "copy_bytes": [8], **changes}
    with pytest.raises(HardwareError, match=message):
        measure_limits("cpu", "fp32", **arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a device is at hand")
def test_a_device_that_is_not_there():
    with pytest.raises(HardwareError, match="the ceilings of cuda cannot be measured in fp32: "):
        measure_limits("cuda", "fp32", 0.01, [8], [8])


@pytest.mark.parametrize(("flops", "bandwidth"), [(0.0, 1.0), (1.0, math.inf), (math.nan, 1.0), (-1.0, 1.0)])
def test_rates_are_positive_and_finite(flops, bandwidth):
    with pytest.raises(HardwareError, match="must be positive and finite, but got"):
        DeviceLimits("x", "fp32", flops, bandwidth)


def test_dtype_is_known():
    with pytest.raises(HardwareError, match=r"dtype must be one of fp64.*but got 'fp8'"):
        DeviceLimits("x", "fp8", 1.0, 1.0)
