"""The four ways of a matrix product against numpy, and their measurement on a clock of the tests' own."""

import math

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from rich.console import Console

from bstune.core.errors import ConfigError
from bstune.sweeps import vectorization
from bstune.sweeps.vectorization import measure, sentence, ways

NAMES = ["element by element", "column by column", "blocks of 3 columns", "whole"]


class Clock:
    """Stands still but for what is done: each call of a way takes its own seconds."""

    def __init__(self):
        self.seconds = 0.0
        self.calls = []

    def __call__(self):
        return self.seconds

    def taking(self, name, *durations):
        left = list(durations)

        def call():
            self.calls.append(name)
            self.seconds += left.pop(0) if len(left) > 1 else left[0]

        return call


def measured(named, clock, **changes):
    settings = {"repeats": 3, "segment_seconds": 1.0, "limit_seconds": math.inf, "rng": np.random.default_rng(0)}
    return measure(named, **{**settings, **changes}, wait=lambda: None, now=clock)


@pytest.mark.parametrize("way", NAMES)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 9])
def test_each_way_is_the_product(way, size):
    generator = torch.Generator().manual_seed(size)
    b, c = (torch.randn(size, size, generator=generator, dtype=torch.float64) for _ in range(2))
    a = torch.full_like(b, math.nan)
    ways(3)[way](a, b, c)
    np.testing.assert_allclose(a.numpy(), b.numpy() @ c.numpy(), rtol=1e-12)


def test_the_ways_go_from_the_smallest_pieces_to_the_largest():
    assert list(ways(3)) == NAMES


def test_warm_up_is_outside_the_clock():
    clock = Clock()
    found = measured({"x": clock.taking("x", 100.0, 2.0, 2.0)}, clock)
    assert found == {"x": [2.0, 2.0, 2.0]}


@pytest.mark.parametrize(("once", "calls"), [(2.0, 1), (1.0, 1), (0.5, 2), (0.3, 4), (0.0, 1)])
def test_short_calls_are_repeated_between_two_readings_of_the_clock(once, calls):
    clock = Clock()
    found = measured({"x": clock.taking("x", once)}, clock, repeats=1)
    assert found["x"] == [pytest.approx(once)]
    assert len(clock.calls) == 2 + calls  # warm-up, foretelling, one segment


@pytest.mark.parametrize(("limit", "repeats"), [(0.1, 1), (3.0, 1), (3.1, 2), (8.9, 3), (1000.0, 5)])
def test_what_has_taken_its_limit_is_not_repeated(limit, repeats):
    clock = Clock()
    named = {"slow": clock.taking("slow", 3.0), "fast": clock.taking("fast", 1e-6)}
    found = measured(named, clock, repeats=5, limit_seconds=limit, segment_seconds=1e-6)
    assert len(found["slow"]) == repeats
    assert len(found["fast"]) == 5


def test_the_order_is_shuffled_anew_each_time_and_by_the_seed():
    def orders(seed):
        clock = Clock()
        named = {name: clock.taking(name, 1.0) for name in "abcd"}
        measured(named, clock, repeats=8, rng=np.random.default_rng(seed))
        calls = clock.calls[8:]
        return ["".join(calls[start : start + 4]) for start in range(0, 32, 4)]

    assert all(sorted(order) == list("abcd") for order in orders(0))
    assert len(set(orders(0))) > 3
    assert orders(0) == orders(0) != orders(1)


def test_the_device_is_waited_for_before_each_reading_of_the_clock():
    events = []

    def now():
        events.append("clock")
        return float(len(events))

    measure(
        {"x": lambda: events.append("call")},
        repeats=2,
        segment_seconds=1e-9,
        limit_seconds=math.inf,
        rng=np.random.default_rng(0),
        wait=lambda: events.append("wait"),
        now=now,
    )
    assert events == ["wait", "clock", "call", "wait", "clock"] * 4


def run(**changes):
    settings = {"device": "cpu", "dtype": "fp32", "size": 4, "block": 3, "repeats": 3}
    settings |= {"segment_seconds": 1.0, "limit_seconds": 100.0, "seed": 0}
    return vectorization.run(OmegaConf.create(), Console(), **{**settings, **changes})


def test_gflops_in_closed_form(tmp_path):
    ticks = iter(range(1000))
    finding = run(now=lambda: float(next(ticks)))  # each segment takes a second, and one call is made in it
    flops = 2 * 4**3 / 1e9
    assert [row["way"] for row in finding.rows] == NAMES
    for row in finding.rows:
        assert row["gflops"] == row["gflops_low"] == row["gflops_high"] == pytest.approx(flops)
        assert (row["repeats"], row["times_as_fast"]) == (3, 1.0)
    assert finding.n == 3
    finding.draw(tmp_path / "figure")
    assert (tmp_path / "figure").read_bytes().startswith(b"\x89PNG")


def test_median_and_quartiles():
    rows = list(vectorization._rows({"slow": [4.0], "fast": [1.0, 2.0, 4.0, 8.0, 16.0]}, 16e9))
    assert [row["gflops"] for row in rows] == [4.0, 4.0]
    assert (rows[1]["gflops_low"], rows[1]["gflops_high"]) == (2.0, 8.0)


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16"])
def test_every_dtype_of_a_cpu(dtype):
    assert len(run(dtype=dtype, segment_seconds=1e-6, repeats=1).rows) == 4


def test_the_sentence_is_computed():
    values = [("element by element", 0.05), ("column by column", 2.0), ("blocks of 64 columns", 45.0), ("whole", 50.0)]
    rows = [{"way": way, "gflops": gflops, "times_as_fast": gflops / 0.05} for way, gflops in values]
    assert sentence(rows, 6) == (
        "The whole product is 1000 times as fast as element by element and 25 times as fast as column by column; "
        "blocks of 64 columns reach 90% of it (medians, n = 6 or more)."
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "tpu"}, "sweep.experiment.device must be auto, cpu, cuda or cuda:N, but got 'tpu'"),
        ({"dtype": "tf32"}, "sweep.experiment.dtype must be one of fp64, fp32, bf16, fp16, but got 'tf32'"),
        ({"size": 0}, "sweep.experiment.size must be positive, but got 0"),
        ({"block": -1}, "sweep.experiment.block must be positive, but got -1"),
        ({"repeats": 0}, "sweep.experiment.repeats must be positive, but got 0"),
        ({"segment_seconds": math.nan}, "sweep.experiment.segment_seconds must be positive, but got nan"),
        ({"limit_seconds": math.inf}, "sweep.experiment.limit_seconds must be positive, but got inf"),
    ],
)
def test_bad_parameters_are_named(changes, message):
    with pytest.raises(ConfigError) as caught:
        run(**changes)
    assert str(caught.value) == message
