"""Folders that somebody else has crafted: report and compare run nothing of them and write nowhere else."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from audited import CRAFTS
from toolbox import column, json_rows

TESTS = Path(__file__).parent
# One of each kind that is refused before anything is computed. The others are looked at with the
# soak tests.
REFUSED = (
    "rule unpickles",
    "rule with code for an argument",
    "rule by class path",
    "sampler imports",
    "module and data run",
    "references in a circle",
    "YAML with objects",
    "YAML of a billion",
    "table that is a FIFO",
    "curve nested deep",
)
# These statuses a report or a comparison may end with.
LISTED = (0, 2)


def run_audited(folder, verbs, names):
    """The row of each command on each crafted folder, and the events on an honest folder."""
    command = [sys.executable, TESTS / "audited.py", folder, verbs, "honest", *names]
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    rows = json_rows(ran.stdout)
    honest = {event for row in rows if row["craft"] == "honest" for event in row["events"]}
    return [row for row in rows if row["craft"] != "honest"], honest


def check_nothing_was_run(rows, honest):
    for row in rows:
        what = f"{row['craft']}: {row['command']}: {row['output'][-500:]}"
        assert row["status"] in LISTED, what
        assert not row["marked"], what
        assert row["victim kept"], what
        assert [event for event in row["events"] if event not in honest] == [], what
        assert "Traceback" not in row["output"], what
        assert "\x1b" not in row["output"], what
        if row["status"] == 2:
            # Below why there is no law stands a line for each folder that was left out.
            most = 2 if row["command"].startswith("extrapolate") else 1
            assert 1 <= row["output"].count("\n") <= most, what


@pytest.mark.slow
def test_a_folder_that_names_code_is_refused_and_nothing_is_run(tmp_path):
    rows, honest = run_audited(tmp_path, "report", REFUSED)
    check_nothing_was_run(rows, honest)
    refused = {row["craft"] for row in rows if row["status"] == 2}
    assert refused == set(REFUSED)


@pytest.mark.soak
def test_no_crafted_folder_has_anything_run_or_written_elsewhere(tmp_path):
    rows, honest = run_audited(
        tmp_path, "report,compare,extrapolate", [name for name in CRAFTS if name != "honest"]
    )
    assert len(set(column(rows, "craft"))) >= 30
    check_nothing_was_run(rows, honest)
