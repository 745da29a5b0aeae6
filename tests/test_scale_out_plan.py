"""The plan for several devices that a study ends with, against a law that is known."""

import json

import numpy as np
import pytest
from synthetic import Law, synthetic_table

from bstune.core.curve import CurveBand
from bstune.study.scale_out import plan

LAW = Law(noise=0.08)
DEVICES = [1, 2, 8, 64]
WAIT = {2: 5e-4, 8: 5.6e-4, 64: 11.2e-4}  # on a line
SIZES = range(8, 4097)


@pytest.fixture
def study(bstune, tmp_path, write_table):
    """Run a study on a table of the law, and return its curve.json and what it printed."""
    write_table(tmp_path / "law.jsonl", synthetic_table(LAW), "reached")
    table = (
        "+workload=replay",
        "workload.table=law.jsonl",
        "workload.target.metric=error",
        "workload.target.value=0.1",
    )

    def run(*arguments):
        own = [] if any("devices" in argument for argument in arguments) else [f"hardware.scale_out.devices={DEVICES}"]
        status, out, err = bstune(*table, "mlflow.enabled=false", *own, *arguments)
        return status, out, err, tmp_path / "outputs/replay"

    return run


def true_plan(wait):
    return plan(
        lambda sizes: CurveBand(*[np.array([LAW.frontier(size) for size in sizes])] * 4),
        LAW.tau,
        DEVICES,
        SIZES,
        wait,
    )


@pytest.mark.slow
def test_a_study_plans_what_the_law_says(study):
    wait = "{" + ", ".join(f"{count}: {seconds}" for count, seconds in WAIT.items()) + "}"
    status, out, err, folder = study(
        "search.objective=curve", "search.trials=60", "search.precision=null",
        f"hardware.scale_out.all_reduce.seconds={wait}",
    )  # fmt: skip
    assert (status, err) == (0, "")
    found = json.loads((folder / "curve.json").read_text())["scale_out"]
    for rows, seconds in (
        (found["ideal"], lambda devices: 0.0),
        (found["with_all_reduce"], lambda devices: WAIT.get(devices, 0.0)),
    ):
        assert [row["devices"] for row in rows] == DEVICES
        for row, true in zip(rows, true_plan(seconds), strict=True):
            assert row["seconds"] == pytest.approx(true.seconds, rel=0.25)
            # A 90% interval, and the table's own two seeds scatter by 8%.
            assert 0.94 * row["seconds_low"] < true.seconds < 1.06 * row["seconds_high"]
            assert row["efficiency"] == pytest.approx(true.efficiency, rel=0.25)
            assert row["batch_size"] == pytest.approx(true.batch_size, rel=0.5)
            assert 0.5 < row["lr"] / LAW.best_lr(row["batch_size"]) < 2.0
    assert "several devices, each as fast as this one, with the all-reduce" in out
    assert (folder / "scale_out.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("devices=[]", "hardware.scale_out.devices must be numbers of at least 1, but got []"),
        ("devices=[0,2]", "hardware.scale_out.devices must be numbers of at least 1, but got [0, 2]"),
        ("candidate_ratio=1", "hardware.scale_out.candidate_ratio must be above 1, but got 1.0"),
        ("all_reduce.bytes_per_second=0", "bytes_per_second must be positive, but got 0"),
        ("all_reduce.latency=-1", "hardware.scale_out.all_reduce.latency must be at least 0, but got -1"),
        ("all_reduce.overlap=0.5", "hardware.scale_out.all_reduce.overlap must be at least 1, but got 0.5"),
        (
            "all_reduce.seconds={2: -1}",
            "needs positive seconds at 2 devices or more, but got [(2, -1.0)]",
        ),
        ("all_reduce.seconds={two: 1}", "Key two"),
    ],
)
def test_bad_input(study, tmp_path, argument, message):
    status, _, err, folder = study(f"hardware.scale_out.{argument}")
    assert status == 2
    assert message in err
    assert not folder.exists()


def test_a_link_and_measured_seconds_are_one_too_many(study):
    status, _, err, _ = study(
        "hardware.scale_out.all_reduce.seconds={2: 1}", "hardware.scale_out.all_reduce.bytes_per_second=1e9"
    )
    assert status == 2
    assert "give bytes_per_second or seconds, not both" in err
