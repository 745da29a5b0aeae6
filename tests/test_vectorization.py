"""The four ways of a matrix product against numpy, and their measurement on a clock of the tests' own."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from toolbox import FakeTime
from unit_logs import StoppedError, log_at, units_in, unkept

from bstune.core.errors import ConfigError
from bstune.report.drawing import save_figure
from bstune.sweeps import vectorization
from bstune.sweeps.unit_log import UnfinishedError, UnitPlan
from bstune.sweeps.vectorization import (
    READ_REPEAT,
    RepeatTiming,
    by_way,
    cache_levels,
    measure,
    order_sentence,
    orders,
    read_sentence,
    sentence,
    ways,
)

# Of a sweep: a change elsewhere seldom breaks it, and CI runs it.
pytestmark = pytest.mark.slow

NAMES = ["element by element", "column by column", "blocks of 3 columns", "whole"]


@pytest.mark.parametrize("size", [1, 3, 7])
def test_each_way_is_the_product(size):
    generator = torch.Generator().manual_seed(size)
    b, c = (torch.randn(size, size, generator=generator, dtype=torch.float64) for _ in range(2))
    assert list(ways(3)) == NAMES
    for way in ways(3).values():
        a = torch.full_like(b, math.nan)
        way(a, b, c)
        np.testing.assert_allclose(a.numpy(), b.numpy() @ c.numpy(), rtol=1e-12)


def measured(seconds, seed=0, log=None, stop_after=None, **changes):
    """Return the seconds found for ways that take the given ones, and the names in the order of their calls."""
    clock = FakeTime()
    calls = []

    def call(name):
        if len(calls) == stop_after:
            raise StoppedError
        calls.append(name)
        clock.sleep(seconds[name])

    named = {name: lambda name=name: call(name) for name in seconds}
    options = {"repeats": 5, "segment_seconds": 1e-6, "limit_seconds": math.inf, **changes}
    timing = RepeatTiming(**options)
    names = [f"product/{number}" for number in range(1, timing.repeats + 1)]
    plan = UnitPlan(names=names, only=(), noun="repeat", read=READ_REPEAT.validate_python)
    log = log or unkept()
    log.begin(None, ())
    rng = np.random.default_rng(seed)
    repeats = measure(log, plan, list(named), lambda: named, timing, rng, clock)
    return by_way(repeats, named), calls


def test_repeats_that_are_kept_are_not_measured_again(tmp_path):
    """A way that has had its time is not repeated past its limit after a stop either."""
    path = tmp_path / "runs.jsonl"
    seconds = {"slow": 3.0, "fast": 1e-5, "faster": 1e-6}
    whole, _ = measured(seconds, limit_seconds=8.9)
    # Nine calls are the calibration; three a way and repeat follow.
    for stop_after in (20, 22):
        with pytest.raises(StoppedError):
            measured(seconds, log=log_at(path), stop_after=stop_after, limit_seconds=8.9)
    found, _ = measured(seconds, log=log_at(path), limit_seconds=8.9)
    assert units_in(path) == [f"product/{number}" for number in range(1, 6)]
    assert {name: len(values) for name, values in found.items()} == {
        "slow": 3,
        "fast": 5,
        "faster": 5,
    }
    assert {name: pytest.approx(values) for name, values in whole.items()} == found
    assert measured(seconds, log=log_at(path), stop_after=0, limit_seconds=8.9)[0] == found


def test_a_choice_of_repeats_measures_those_alone(tmp_path):
    path = tmp_path / "runs.jsonl"
    short = {"segment_seconds": 1e-6}
    with pytest.raises(UnfinishedError, match="2 of 9 units"):
        run(log_at(path), only=["product/2", "reading/3"], **short)
    assert units_in(path) == ["product/2", "reading/3"]
    with pytest.raises(ConfigError, match=r"only names blocks, .*units: product/1; "):
        run(log_at(path), only=["blocks"], **short)
    assert run(log_at(path), **short).n == 3
    assert run(log_at(path), now=None, **short).n == 3


@pytest.mark.parametrize(
    ("group", "expected"), [("product", []), ("reading", ["reading"]), ("order", ["gathering"])]
)
def test_vectors_are_made_for_the_chosen_groups_alone(monkeypatch, tmp_path, group, expected):
    made = []

    def noted(name, make):
        def made_now(*arguments):
            made.append(name)
            return make(*arguments)

        return made_now

    for name in ("reading", "gathering"):
        monkeypatch.setattr(vectorization, name, noted(name, getattr(vectorization, name)))
    log = log_at(tmp_path / "runs.jsonl")
    with pytest.raises(UnfinishedError):
        run(log, only=[group], gathered_kib=2, now=FakeTime())
    assert made == expected


@pytest.mark.parametrize(("once", "calls"), [(2.0, 1), (0.5, 2), (0.3, 4), (0.0, 1)])
def test_short_calls_are_repeated_between_two_readings_of_the_clock(once, calls):
    found, called = measured({"x": once}, repeats=1, segment_seconds=1.0)
    assert found["x"] == [pytest.approx(once, abs=1e-9)]
    # Warm-up and one call, warm-up and a segment.
    assert Counter(called)["x"] == 2 + 1 + 2 + calls


# A repeat takes 3 s, and another one begins while the time so far is below the limit.
@pytest.mark.parametrize(("limit", "repeats"), [(0.1, 1), (3.1, 2), (8.9, 3), (1000.0, 5)])
def test_a_slow_way_is_not_repeated_past_its_limit_and_the_order_is_shuffled(limit, repeats):
    seconds = {"slow": 3.0, "fast": 1e-5, "faster": 1e-6}
    found, calls = measured(seconds, limit_seconds=limit)
    counts = {name: len(values) for name, values in found.items()}
    assert counts == {"slow": repeats, "fast": 5, "faster": 5}
    _, same_seed = measured(seconds, limit_seconds=limit)
    _, other_seed = measured(seconds, seed=1, limit_seconds=limit)
    assert same_seed == calls != other_seed


def run(log=None, **changes):
    options = {
        "only": [],
        "device": "cpu",
        "dtype": "fp32",
        "size": 4,
        "block": 3,
        "repeats": 3,
        "working_sets": [],
        "gathered_kib": 1,
    }
    options |= {"segment_seconds": 1.0, "limit_seconds": 100.0, "seed": 0}
    return vectorization.run(log or unkept(), **{**options, **changes})


def test_gflops_in_closed_form():
    ticks = iter(range(1000))
    # Each segment takes a second, and one call is made in it.
    finding = run(now=lambda: float(next(ticks)))
    products = finding.rows[: len(NAMES)]
    assert [row["way"] for row in products] == NAMES
    for row in products:
        rates = [row[name] for name in ("gflops_low", "gflops", "gflops_high")]
        # 2 n^3 FLOPs in a second.
        assert rates == [pytest.approx(2 * 4**3 / 1e9)] * 3
        assert (row["repeats"], row["times_as_fast"], finding.n) == (3, 1.0, 3)
    # 16 GFLOP in 4 s; in 1 to 16 s, of which the quartiles are 2, 4 and 8.
    rows = vectorization._product_rows({"slow": [4.0], "fast": [1.0, 2.0, 4.0, 8.0, 16.0]}, 16e9)
    assert [(row["gflops_low"], row["gflops"], row["gflops_high"]) for row in rows] == [
        (4, 4, 4),
        (2, 4, 8),
    ]
    assert len(run(dtype="bf16", segment_seconds=1e-6, repeats=1).rows) == 4 + 3


def test_the_sentence_is_computed():
    values = [
        ("element by element", 0.05),
        ("column by column", 2.0),
        ("blocks of 64 columns", 45.0),
        ("whole", 50.0),
    ]
    rows = [
        {"way": way, "gflops": gflops, "times_as_fast": gflops / 0.05} for way, gflops in values
    ]
    assert sentence(rows, 6) == (
        "The whole product is 1000 times as fast as element by element and 25 times as fast as column by column; "
        "blocks of 64 columns reach 90% of it (medians, n = 6 or more)."
    )


@pytest.mark.usefixtures("rendered")
def test_rates_of_reading_in_closed_form(monkeypatch, tmp_path):
    monkeypatch.setattr(vectorization, "cache_levels", lambda place: {"L1": 2**15, "L2": 2**20})
    ticks = iter(range(1000))
    # A call a second.
    finding = run(now=lambda: float(next(ticks)), working_sets=[131072, 16, 1024, 64])
    rows = [row for row in finding.rows if "kib" in row]
    assert [(row["way"].removeprefix("reading "), row["fits"]) for row in rows] == [
        ("16 KiB", "L1"),
        ("64 KiB", "L2"),
        ("1 MiB", "L2"),
        ("128 MiB", "no cache"),
    ]
    # A small vector is read until 64 MiB have come.
    assert [row["gb_per_second"] for row in rows] == pytest.approx(
        [2**26 / 1e9] * 3 + [2**27 / 1e9]
    )
    assert read_sentence(rows) in finding.sentence
    save_figure(finding.paint, finding.inches, tmp_path / "figure.png")


def test_each_order_has_every_place_once():
    found = orders(64, torch.Generator().manual_seed(0))
    in_order, strided, random = found.values()
    assert in_order.tolist() == list(range(64))
    assert strided.tolist()[:5] == [0, 16, 32, 48, 1]
    assert sorted(strided.tolist()) == sorted(random.tolist()) == in_order.tolist()
    assert random.tolist() not in (in_order.tolist(), strided.tolist())


def test_orders_in_closed_form():
    ticks = iter(range(1000))
    # A call a second, of 2 KiB.
    finding = run(now=lambda: float(next(ticks)), gathered_kib=2)
    rows = finding.rows[-3:]
    names = ["in order", "in strides of 16", "at random"]
    assert [row["way"] for row in rows] == [f"gathering {name}" for name in names]
    for row in rows:
        assert row["gb_per_second"] == pytest.approx(2**11 / 1e9)
        assert row["times_as_long"] == 1.0
    seconds = dict(zip(names, ([1.0], [4.0], [16.0]), strict=True))
    rows = vectorization._order_rows(seconds, 8_000_000_000)
    assert [row["gb_per_second"] for row in rows] == [8.0, 2.0, 0.5]
    assert [row["times_as_long"] for row in rows] == [1.0, 4.0, 16.0]
    assert "strides of 16 takes 4 times as long as in order, at random 16" in order_sentence(rows)


@pytest.mark.parametrize(
    ("fits", "words"),
    [
        (
            ("L2", "no cache"),
            "64 KiB, which fits L2, is read at 80 GB/s, 5 times as fast as one of 256 MiB, which fits no",
        ),
        (
            (None, None),
            "A vector of 64 KiB is read at 80 GB/s, 5 times as fast as one of 256 MiB at 16.",
        ),
    ],
)
def test_the_sentence_on_caches(fits, words):
    rates = zip((64, 262144), (80.0, 16.0), fits, strict=True)
    rows = [{"kib": kib, "gb_per_second": rate, "fits": level} for kib, rate, level in rates]
    assert words in read_sentence(rows)
    assert read_sentence(rows[:1]) == ""


def test_cache_levels_are_those_of_the_system(tmp_path):
    found = [
        ("Instruction", 1, "32K"),
        ("Data", 1, "48K"),
        ("Unified", 3, "32768K"),
        ("Unified", 2, "1024K"),
    ]
    for number, cache in enumerate(found):
        (tmp_path / f"index{number}").mkdir()
        for name, value in zip(("type", "level", "size"), cache, strict=True):
            (tmp_path / f"index{number}" / name).write_text(f"{value}\n")
    levels = cache_levels(torch.device("cpu"), tmp_path)
    assert list(levels.items()) == [("L1", 48 * 2**10), ("L2", 2**20), ("L3", 2**25)]
    assert cache_levels(torch.device("cpu"), tmp_path / "nowhere") == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"device": "tpu"},
            "sweep.experiment.device must be auto, cpu, cuda or cuda:N, but got 'tpu'",
        ),
        (
            {"dtype": "tf32"},
            "sweep.experiment.dtype must be one of fp64, fp32, bf16, fp16, but got 'tf32'",
        ),
        (
            {"gathered_kib": 0},
            "sweep.experiment.gathered_kib must be KiB from 1 to 4194304, but got 0",
        ),
        ({"size": 0}, "sweep.experiment.size must be positive, but got 0"),
        (
            {"working_sets": [16, 0]},
            "sweep.experiment.working_sets must be KiB from 1 to 4194304, but got [16, 0]",
        ),
        (
            {"limit_seconds": math.inf},
            "sweep.experiment.limit_seconds must be positive, but got inf",
        ),
    ],
)
def test_bad_parameters_are_named(changes, message):
    with pytest.raises(ConfigError) as caught:
        run(**changes)
    assert str(caught.value) == message
