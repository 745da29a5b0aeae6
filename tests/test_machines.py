"""Several machines on one study: who may join, what ends when one of them dies or stops, and where states lie."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import fleet
import pytest

pytestmark = pytest.mark.slow
GUARD = 120  # seconds, which nothing here takes unless it is stuck
UNSHARE = ("unshare", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc")


def wait_for(condition, what):
    for _ in range(10 * GUARD):
        if condition():
            return
        threading.Event().wait(0.1)
    pytest.fail(f"no {what} within {GUARD} s")


@pytest.fixture(scope="module")
def unshare():
    """The start of a command on a machine of its own, which sees no other's processes."""
    try:
        allowed = subprocess.run([*UNSHARE, "true"], capture_output=True, timeout=20).returncode == 0
    except FileNotFoundError:
        allowed = False
    if not allowed:
        pytest.skip("needs unshare and the right to use it")
    return UNSHARE


@pytest.fixture
def machine(unshare, tmp_path):
    """Return what starts a process on a machine of its own, in a folder of its own; all end with the test."""
    started = []

    def start(role, name, *options, **backend):
        storage = f"storage=sqlite:///{tmp_path}/bstune.db"
        call = f"fleet.work({role!r}, Path({str(tmp_path / name)!r}), {(storage, *options)!r}, {backend!r})"
        script = f"import fleet; from pathlib import Path; {call}"
        shell = '"$@"; status=$?; [ $status = 137 ] && sleep 1000; exit $status'  # a machine outlives what is killed
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
        process = subprocess.Popen(
            [*unshare, "sh", "-c", shell, "machine", sys.executable, "-c", script], env=environment
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def watch(tmp_path):
    return fleet.Watch(f"sqlite:///{tmp_path}/bstune.db")


def log(tmp_path, name):
    return (tmp_path / name / "log").read_text()


def inner(process):
    """Return the process that works on the study there, by its number outside."""
    number = process.pid
    for _ in range(2):  # unshare's child is the shell
        number = int(Path(f"/proc/{number}/task/{number}/children").read_text().split()[0])
    return number


def test_a_second_owner_is_refused_and_a_worker_joins(machine, watch, tmp_path):
    options = ("search.trials=20", "sampler=random", "search.lease_seconds=4")
    owner = machine("owner", "a", *options, seconds=0.3)
    wait_for(watch.finished, "trial")
    second = machine("owner", "b", *options, f"output={tmp_path}/a/outputs/s")
    worker = machine("worker", "c", *options[2:], seconds=0.3)
    assert second.wait(GUARD) == 2
    assert "error: the study 's' is run by " in log(tmp_path, "b")
    assert "join it with bstune worker study=s" in log(tmp_path, "b")
    assert owner.wait(GUARD) == 0
    assert worker.wait(GUARD) == 0
    assert "joins study s, run by " in log(tmp_path, "c")
    assert " trials run here" in log(tmp_path, "c")
    assert watch.finished() == dict.fromkeys(range(20), 1)


def test_a_killed_owners_lease_runs_out_and_another_machine_goes_on(machine, watch, tmp_path):
    """Its trial, too, is asked again; the worker that is there meanwhile goes on without an owner."""
    options = ("search.trials=12", "sampler=random", "search.lease_seconds=3", f"output={tmp_path}/shared")
    owner = machine("owner", "a", *options, seconds=0.4)
    wait_for(watch.finished, "trial")
    wait_for(watch.running, "trial that runs")
    os.kill(inner(owner), signal.SIGKILL)
    again = machine("owner", "b", *options, seconds=0.1)
    assert again.wait(GUARD) == 0, log(tmp_path, "b")
    assert "waiting up to 3 s for a sign of " in log(tmp_path, "b")
    assert watch.finished() == dict.fromkeys(range(12), 1)
    assert watch.running() == 0


def test_an_owner_that_was_stopped_beyond_its_lease_ends_in_a_line(machine, watch, tmp_path):
    options = ("search.trials=14", "sampler=random", "search.lease_seconds=2", f"output={tmp_path}/shared")
    owner = machine("owner", "a", *options, seconds=0.5)
    wait_for(watch.finished, "trial")
    os.kill(inner(owner), signal.SIGSTOP)
    again = machine("owner", "b", *options, seconds=0.1)
    wait_for(lambda: "trial " in log(tmp_path, "b") if (tmp_path / "b" / "log").exists() else False, "trial of b's")
    os.kill(inner(owner), signal.SIGCONT)
    assert owner.wait(GUARD) == 2
    assert "gave no sign for 2 s (search.lease_seconds), so others took over its trials" in log(tmp_path, "a")
    assert "Traceback" not in log(tmp_path, "a")
    assert again.wait(GUARD) == 0, log(tmp_path, "b")
    assert watch.finished() == dict.fromkeys(range(14), 1)


def test_a_killed_workers_trial_is_asked_again(machine, watch, tmp_path):
    options = ("search.trials=10", "sampler=random", "search.lease_seconds=2")
    owner = machine("owner", "a", *options, seconds=0.5)
    wait_for(watch.finished, "trial")
    worker = machine("worker", "b", *options[2:], seconds=60)
    wait_for(lambda: watch.running() == 2, "trial of the worker's")
    os.kill(inner(worker), signal.SIGKILL)
    assert owner.wait(GUARD) == 0
    assert watch.finished() == dict.fromkeys(range(10), 1)
    failed = [trial for trial in watch.trials(fleet.FAIL) if "bstune:spec" in trial.user_attrs]
    assert len(failed) == 1, "the worker's, which had been asked to the end"
