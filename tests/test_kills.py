"""A study that is killed at any commit, sync, rename or unlink goes on with the same command as if it had not been."""

import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest
from toolbox import json_rows

# The figures in benchmarks/README.md are of 20 and 10.
STUDIES, KILLS = 2, 6


@pytest.mark.soak
def test_studies_killed_at_any_durable_step_go_on_and_mlflow_is_complete():
    command = [sys.executable, Path(__file__).with_name("kills.py"), str(STUDIES), str(KILLS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    studies = json_rows(done.stdout)
    assert [[study[name] for name in ("kills", "equal", "mlflow")] for study in studies] == [
        [KILLS] * 3
    ] * STUDIES, studies


MARK = b"BSTUNE_TEST_INTERRUPTED=1"


def started(folder, *arguments, **pipes):
    """Start the command in a folder, with the mark that its processes inherit."""
    name, value = MARK.decode().split("=")
    environment = {
        **os.environ,
        name: value,
        "BSTUNE_CACHE": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-u", "-m", "bstune", *arguments]
    pipes = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True, **pipes}
    return subprocess.Popen(command, cwd=folder, env=environment, **pipes)


def marked():
    """The processes of the test's command, by the environment that they have inherited."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            found += [path.parent.name] * (MARK in path.read_bytes().split(b"\0"))
    return found


def handles_sigterm(process):
    caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{process}/status").read_text())
    return int(caught[1], 16) >> (signal.SIGTERM - 1) & 1


REPLAY = (
    "workload=replay",
    "workload.table=fashion_mlp",
    "mlflow.enabled=false",
    "search.trials=8",
)
DIGITS = ("workload=digits", "mlflow.enabled=false", "search.objective=steps")


@pytest.mark.soak
# A terminal's Ctrl-C goes to the whole group.
@pytest.mark.parametrize("send", [os.kill, os.killpg])
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        # The kill comes at the first import.
        (REPLAY, ""),
        (REPLAY, "trial 1  point"),
        # The kill comes in the report.
        (REPLAY, "the plan is done"),
        # The kill comes at a survey's probes.
        (DIGITS, "fits"),
        ((*DIGITS, "hardware.enabled=false"), "trial 0  configuration"),
        ((*DIGITS, "hardware.enabled=false", "search.workers=0"), "trial 0  configuration"),
    ],
)
def test_a_signal_ends_the_command_in_time_with_a_line(
    tmp_path, send, number, status, arguments, line
):
    process = started(tmp_path, *arguments, stderr=subprocess.PIPE)
    if line:
        assert any(line in printed for printed in process.stdout)
    else:
        while not handles_sigterm(process.pid):
            assert process.poll() is None
    start = time.monotonic()
    send(process.pid, number)
    # Impatience changes nothing.
    send(process.pid, number)
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - start < 5
    assert process.returncode == status
    assert "Traceback" not in errors
    assert "interrupted" in errors.splitlines()[-1]
    assert marked() == []
    # The trial that ran was ended in the database as well.
    if "trial" in line:
        with closing(sqlite3.connect(tmp_path / "bstune.db")) as database:
            assert database.execute(
                "SELECT count(*) FROM trials WHERE state = 'RUNNING'"
            ).fetchone() == (0,)
    # The same command goes on with what is there.
    if arguments is REPLAY:
        again = started(tmp_path, *arguments, stderr=subprocess.PIPE)
        assert again.communicate(timeout=60)[1] == ""
        assert again.returncode == 0


@pytest.mark.soak
def test_probes_end_with_a_survey_that_is_killed(tmp_path):
    process = started(tmp_path, *DIGITS)
    assert any("fits" in printed for printed in process.stdout)
    # It has no time to end its probes itself.
    process.kill()
    process.communicate(timeout=60)
    end = time.monotonic() + 30
    while marked() and time.monotonic() < end:
        time.sleep(0.1)
    assert marked() == []
