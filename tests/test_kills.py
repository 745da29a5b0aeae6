"""A study that is killed at any commit, rename or unlink goes on with the same command as if it had not been."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from toolbox import table_rows, write_rows

POINTS = 12  # each before and after; all of them are some hundreds


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["random", "frontier"])
def test_a_study_killed_at_any_durable_step_goes_on(tmp_path, sampler):
    write_rows(tmp_path / "t.jsonl", table_rows())
    arguments = ("workload=replay", f"workload.table={tmp_path}/t.jsonl", "workload.target.value=0.14")
    arguments += ("mlflow.enabled=false", "search.objective=steps", "search.trials=5", "search.replicates=1")
    if sampler != "frontier":
        arguments += (f"sampler={sampler}",)
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("kills.py"), str(POINTS), "0", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    points = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(points) == 2 * POINTS
    assert {point["killed"] for point in points} == {-9}
    assert [point for point in points if not point["same"]] == []
