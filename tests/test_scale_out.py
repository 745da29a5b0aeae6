import functools
import json
import math

import numpy as np
import pytest
from synthetic import Law, synthetic_table
from toolbox import column

from bstune.core.curve import CurveBand
from bstune.study.analysis.scale_out import plan, size_ladder

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


def rate(batch):
    return 1e-3 * batch


PLAN = functools.partial(plan, curve, tau, rate)


def devices_of(rows):
    return [row.devices for row in rows]


@pytest.mark.parametrize("ceiling", [16, 256])
def test_it_finds_what_a_search_of_every_batch_size_finds(ceiling):
    sizes = range(1, ceiling + 1, 5)
    # One device is the yardstick, though it is not listed.
    rows = PLAN([3, 8], sizes)
    assert devices_of(rows) == [3, 8]
    alone = min(law(size) * tau(size) for size in sizes)
    for row in rows:
        times = {size: law(row.devices * size) * tau(size) for size in sizes}
        assert row.seconds == pytest.approx(min(times.values()))
        assert row.device_batch_size == min(times, key=times.get)
        assert row.batch_size == row.devices * row.device_batch_size
        assert (row.steps, row.lr) == (law(row.batch_size), rate(row.batch_size))
        assert row.seconds_per_step == tau(row.device_batch_size)
        assert row.device_seconds == row.devices * row.seconds
        assert row.speed_up == pytest.approx(alone / row.seconds)
        assert row.efficiency == pytest.approx(row.speed_up / row.devices)
        assert (row.seconds_low, row.seconds_high) == pytest.approx(
            (0.9 * row.seconds, 1.2 * row.seconds)
        )


def test_no_batch_is_larger_than_the_data():
    rows = PLAN([1, 3, 8, 64], range(8, 257), max_examples=300)
    # 64 devices need 512 examples.
    assert devices_of(rows) == [1, 3, 8]
    for row in rows:
        assert row.batch_size <= 300


def test_efficiency_falls_as_the_closed_form_says():
    # The seconds of so many devices at their best batch size.
    def best(count):
        # S_min (1 + B_crit/(N b)) (o + p b) is least at b = sqrt(B_crit o/(N p)).
        return S_MIN * (math.sqrt(OVERHEAD) + math.sqrt(B_CRIT * PER_EXAMPLE / count)) ** 2

    rows = PLAN(range(1, 65), range(1, 4000))
    assert devices_of(rows) == list(range(1, 65))
    for row in rows:
        expected = best(1) / best(row.devices) / row.devices
        assert row.efficiency == pytest.approx(expected, rel=1e-3)


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


# The plan that a study ends with, against a law that is known.
LAW = Law(noise=0.08)
DEVICES = [1, 2, 8, 64]


@pytest.mark.soak
def test_a_study_plans_what_the_law_says(bstune, tmp_path, write_table):
    write_table(tmp_path / "law.jsonl", synthetic_table(LAW), "reached")
    target = (
        "workload.table=law.jsonl",
        "workload.target.metric=error",
        "workload.target.value=0.1",
    )
    status, _, err = bstune(
        "+workload=replay", "workload.name=replay", *target, "mlflow.enabled=false",
        f"hardware.scale_out.devices={DEVICES}", "search.objective=curve", "search.trials=60",
        "search.precision=null",
    )  # fmt: skip
    assert (status, err) == (0, "")
    folder = tmp_path / "outputs/replay"
    found = json.loads((folder / "curve.json").read_text())["scale_out"]

    def band(sizes):
        frontier = np.array([LAW.frontier(size) for size in sizes])
        return CurveBand(frontier, frontier, frontier, frontier)

    assert column(found, "devices") == DEVICES
    truth = plan(band, LAW.tau, LAW.best_lr, DEVICES, range(8, 4097))
    for row, true in zip(found, truth, strict=True):
        assert row["seconds"] == pytest.approx(true.seconds, rel=0.25)
        # A 90% interval, and the table's own two seeds scatter by 8%.
        assert 0.94 * row["seconds_low"] < true.seconds < 1.06 * row["seconds_high"]
        assert row["efficiency"] == pytest.approx(true.efficiency, rel=0.25)
        assert row["batch_size"] == pytest.approx(true.batch_size, rel=0.5)
        assert 0.5 < row["lr"] / LAW.best_lr(row["batch_size"]) < 2.0


def test_more_devices_are_never_slower_than_fewer():
    # Steps that rise again with the batch size: 64 devices of 50 examples would be slower than 8.
    def rising(batch_sizes):
        batch = np.array(batch_sizes, dtype=float)
        steps = law(batch) * (1.0 + (batch / 500.0) ** 2)
        return CurveBand(batch, steps, 0.9 * steps, 1.2 * steps)

    slow = plan(rising, tau, rate, [1, 2, 4, 8, 16, 64], range(50, 257))
    seconds = [row.seconds for row in slow]
    assert seconds == sorted(seconds, reverse=True)
    assert 1 < len(slow) < 6
