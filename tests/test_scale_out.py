import functools
import json
import math
from io import StringIO

import numpy as np
import pytest
from rich.console import Console
from synthetic import Law, synthetic_table
from toolbox import column

from bstune.core.curve import CurveBand
from bstune.study.analysis.scale_out import (
    draw_scale_out,
    half_efficient,
    plan,
    ring_all_reduce,
    scale_out_table,
    size_ladder,
)

S_MIN = 100.0
B_CRIT = 1000.0
OVERHEAD = 0.01
PER_EXAMPLE = 1e-4
SIZES = range(1, 257)


def law(batch):
    return S_MIN * (1.0 + B_CRIT / batch)


def tau(size):
    return OVERHEAD + PER_EXAMPLE * size


def curve(batch_sizes):
    batch = np.array(batch_sizes, dtype=float)
    return CurveBand(batch, law(batch), 0.9 * law(batch), 1.2 * law(batch))


def ring(count):
    return ring_all_reduce(count, 1e8, 1e10, 1e-4)


def rate(batch):
    return 1e-3 * batch


PLAN = functools.partial(plan, curve, tau, rate)


def devices_of(rows):
    return [row.devices for row in rows]


@pytest.mark.parametrize(("wait", "ceiling"), [(lambda count: 0.0, 16), (ring, 16), (ring, 256)])
def test_it_finds_what_a_search_of_every_batch_size_finds(wait, ceiling):
    sizes = range(1, ceiling + 1, 5)
    # One device is the yardstick, though it is not listed.
    rows = PLAN([3, 8], sizes, wait)
    assert devices_of(rows) == [3, 8]
    alone = min(law(size) * (tau(size) + wait(1)) for size in sizes)
    for row in rows:
        times = {size: law(row.devices * size) * (tau(size) + wait(row.devices)) for size in sizes}
        assert row.seconds == pytest.approx(min(times.values()))
        assert row.device_batch_size == min(times, key=times.get)
        assert row.batch_size == row.devices * row.device_batch_size
        assert (row.steps, row.lr) == (law(row.batch_size), rate(row.batch_size))
        assert row.seconds_per_step == pytest.approx(tau(row.device_batch_size) + wait(row.devices))
        assert row.device_seconds == row.devices * row.seconds
        assert row.speed_up == pytest.approx(alone / row.seconds)
        assert row.efficiency == pytest.approx(row.speed_up / row.devices)
        assert (row.seconds_low, row.seconds_high) == pytest.approx(
            (0.9 * row.seconds, 1.2 * row.seconds)
        )


@pytest.mark.parametrize(("overlap", "combine"), [(2.0, math.hypot), (math.inf, max)])
def test_an_all_reduce_may_run_beside_the_step(overlap, combine):
    for row in PLAN([1, 3, 8], SIZES, ring, overlap=overlap):
        assert row.seconds_per_step == pytest.approx(
            combine(tau(row.device_batch_size), ring(row.devices))
        )


def test_no_batch_is_larger_than_the_data():
    rows = PLAN([1, 3, 8, 64], range(8, 257), max_examples=300)
    # 64 devices need 512 examples.
    assert devices_of(rows) == [1, 3, 8]
    for row in rows:
        assert row.batch_size <= 300


def test_efficiency_falls_under_half_where_the_closed_form_says():
    # The seconds of so many devices at their best batch size.
    def best(count):
        # S_min (1 + B_crit/(N b)) (o + p b) is least at b = sqrt(B_crit o/(N p)).
        return S_MIN * (math.sqrt(OVERHEAD) + math.sqrt(B_CRIT * PER_EXAMPLE / count)) ** 2

    rows = PLAN(range(1, 65), range(1, 4000))
    first = next(count for count in range(1, 65) if best(1) / best(count) / count < 0.5)
    half = half_efficient(rows)
    assert half.devices == first > 2
    assert half_efficient(rows[: first - 1]) is None


@pytest.mark.parametrize("devices", [1, 2, 5])
def test_ring_by_messages(devices):
    size = 1000.0
    bandwidth = 50.0
    latency = 0.1
    clock = 0.0
    # A ring reduces and then gathers, in devices - 1 messages each.
    for _message in range(2 * (devices - 1)):
        clock += latency + size / devices / bandwidth
    assert ring_all_reduce(devices, size, bandwidth, latency) == pytest.approx(clock)


@pytest.mark.parametrize(
    ("ceiling", "multiple", "ratio", "expected"),
    [
        (1, 1, 1.02, [1]),
        (5, 1, 1.02, [1, 2, 3, 4, 5]),
        (30, 8, 1.02, [8, 16, 24, 30]),
        (5, 8, 1.02, [5]),
        (20, 1, 2.0, [1, 2, 4, 8, 16, 20]),
    ],
)
def test_candidates(ceiling, multiple, ratio, expected):
    assert size_ladder(ceiling, multiple, ratio) == expected


def test_table_says_where_efficiency_falls_under_half():
    console = Console(record=True, width=160, file=StringIO())
    rows = PLAN([1, 2, 4, 8, 16], SIZES, ring)
    console.print(scale_out_table(rows, "digits"), scale_out_table(rows[:1], "digits"))
    half = half_efficient(rows)
    text = console.export_text()
    assert (
        f"efficiency falls under 50% at {half.devices} devices (batch size {half.batch_size}, "
        "learning rate" in text
    )
    assert f"{rows[1].efficiency:.0%}" in text
    assert "efficiency stays at 50% or above" in text


@pytest.mark.parametrize("real", [True, False])
@pytest.mark.usefixtures("rendered")
def test_figure(tmp_path, real):
    path = tmp_path / "plan.png"
    draw_scale_out(
        PLAN(range(1, 33), SIZES), PLAN(range(1, 33), SIZES, ring) if real else [], "digits", path
    )
    assert path.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [path]


# The plan that a study ends with, against a law that is known.
LAW = Law(noise=0.08)
DEVICES = [1, 2, 8, 64]
# The seconds lie on a line.
WAIT = {2: 5e-4, 8: 5.6e-4, 64: 11.2e-4}


@pytest.mark.soak
@pytest.mark.usefixtures("rendered")
def test_a_study_plans_what_the_law_says(bstune, tmp_path, write_table):
    write_table(tmp_path / "law.jsonl", synthetic_table(LAW), "reached")
    target = (
        "workload.table=law.jsonl",
        "workload.target.metric=error",
        "workload.target.value=0.1",
    )
    wait = "{" + ", ".join(f"{count}: {seconds}" for count, seconds in WAIT.items()) + "}"
    status, out, err = bstune(
        "+workload=replay", "workload.name=replay", *target, "mlflow.enabled=false",
        f"hardware.scale_out.devices={DEVICES}", "hardware.scale_out.show=true",
        "search.objective=curve", "search.trials=60", "search.precision=null",
        f"hardware.scale_out.all_reduce.seconds={wait}",
    )  # fmt: skip
    assert (status, err) == (0, "")
    folder = tmp_path / "outputs/replay"
    found = json.loads((folder / "curve.json").read_text())["scale_out"]

    def band(sizes):
        frontier = np.array([LAW.frontier(size) for size in sizes])
        return CurveBand(frontier, frontier, frontier, frontier)

    for name, waits in (("ideal", {}), ("with_all_reduce", WAIT)):
        assert column(found[name], "devices") == DEVICES
        seconds = dict.fromkeys(DEVICES, 0.0) | waits
        truth = plan(band, LAW.tau, LAW.best_lr, DEVICES, range(8, 4097), seconds.__getitem__)
        for row, true in zip(found[name], truth, strict=True):
            assert row["seconds"] == pytest.approx(true.seconds, rel=0.25)
            # A 90% interval, and the table's own two seeds scatter by 8%.
            assert 0.94 * row["seconds_low"] < true.seconds < 1.06 * row["seconds_high"]
            assert row["efficiency"] == pytest.approx(true.efficiency, rel=0.25)
            assert row["batch_size"] == pytest.approx(true.batch_size, rel=0.5)
            assert 0.5 < row["lr"] / LAW.best_lr(row["batch_size"]) < 2.0
    assert "several devices, each as fast as this one, with the all-reduce" in out
    assert (folder / "scale_out.png").read_bytes()[:4] == b"\x89PNG"


def test_more_devices_are_never_slower_than_fewer():
    slow = PLAN([1, 2, 4, 8, 16, 64], SIZES, lambda count: 1e-3 * count**2)
    seconds = [row.seconds for row in slow]
    assert seconds == sorted(seconds, reverse=True)
    assert 1 < len(slow) < 6
