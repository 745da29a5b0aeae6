"""Several machines on one study: who may join, what ends when one of them dies or stops, and where states lie."""

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import fleet
import pytest
import yaml

from bstune.core.errors import StudyError
from bstune.study.storage import patience
from bstune.study.storage.connection import check_storage, connect
from bstune.study.storage.trials import worker_of

# Seconds that nothing here takes unless it is stuck.
GUARD = 120
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
        allowed = (
            subprocess.run([*UNSHARE, "true"], capture_output=True, timeout=20).returncode == 0
        )
    except FileNotFoundError:
        allowed = False
    if not allowed:
        pytest.skip("needs unshare and the right to use it")
    return UNSHARE


@pytest.fixture
def machine(unshare, tmp_path):
    """A function that starts a process on a machine of its own, in a folder of its own; all end with the test.

    It sees the others' folders, as on a shared file system, but for the ``hidden`` one.
    """
    started = []

    def start(role, name, *options, hidden=None, **backend):
        storage = f"storage=sqlite:///{tmp_path}/bstune.db"
        call = (
            f"fleet.work({role!r}, Path({str(tmp_path / name)!r}), {(storage, *options)!r}, "
            f"{backend!r})"
        )
        script = f"import fleet; from pathlib import Path; {call}"
        hide = f"mount -t tmpfs none {tmp_path / hidden}; " if hidden else ""
        # A machine outlives what is killed.
        shell = hide + '"$@"; status=$?; [ $status = 137 ] && sleep 1000; exit $status'
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
    """The process that works on the study there, by its number outside."""
    number = process.pid
    # The child of unshare is the shell.
    for _ in range(2):
        number = int(Path(f"/proc/{number}/task/{number}/children").read_text().split()[0])
    return number


@pytest.mark.soak
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


@pytest.mark.soak
def test_a_killed_owners_lease_runs_out_and_another_machine_goes_on(machine, watch, tmp_path):
    """Its trial, too, is asked again; the worker that is there meanwhile goes on without an owner."""
    options = (
        "search.trials=12",
        "sampler=random",
        "search.lease_seconds=3",
        f"output={tmp_path}/shared",
    )
    owner = machine("owner", "a", *options, seconds=0.4)
    wait_for(watch.finished, "trial")
    wait_for(watch.running, "trial that trains")
    os.kill(inner(owner), signal.SIGKILL)
    again = machine("owner", "b", *options, seconds=0.1)
    assert again.wait(GUARD) == 0, log(tmp_path, "b")
    assert "waiting up to 3 s for a sign of " in log(tmp_path, "b")
    assert watch.finished() == dict.fromkeys(range(12), 1)
    assert watch.running() == 0


@pytest.mark.soak
def test_an_owner_that_was_stopped_beyond_its_lease_ends_in_a_line(machine, watch, tmp_path):
    options = (
        "search.trials=14",
        "sampler=random",
        "search.lease_seconds=2",
        f"output={tmp_path}/shared",
    )
    owner = machine("owner", "a", *options, seconds=3)
    # A process stopped in a transaction would lock SQLite for all.
    wait_for(watch.running, "trial that trains")
    os.kill(inner(owner), signal.SIGSTOP)
    again = machine("owner", "b", *options, seconds=0.1)
    wait_for(watch.finished, "trial of the other's")
    os.kill(inner(owner), signal.SIGCONT)
    assert owner.wait(GUARD) == 2
    assert "gave no sign for 2 s (search.lease_seconds), so others took over its trials" in log(
        tmp_path, "a"
    )
    assert "Traceback" not in log(tmp_path, "a")
    assert again.wait(GUARD) == 0, log(tmp_path, "b")
    assert watch.finished() == dict.fromkeys(range(14), 1)


@pytest.mark.soak
def test_states_stay_with_their_machine_and_the_report_says_who_has_a_checkpoint(
    machine, watch, tmp_path
):
    """A continuation without its state in its own folder would fail."""
    options = ("search.trials=24", "search.lease_seconds=20", "search.seconds=null")
    owner = machine("owner", "a", *options, seconds=1, states=True)
    wait_for(watch.finished, "trial")
    worker = machine("worker", "b", *options[2:], seconds=0.1, states=True, hidden="a")
    assert owner.wait(GUARD) == 0, log(tmp_path, "a")
    assert worker.wait(GUARD) == 0, log(tmp_path, "b")
    trials = watch.trials(*fleet.DONE)
    continued = [trial for trial in trials if "bstune:resumed_from" in trial.user_attrs]
    assert continued
    for trial in watch.trials(fleet.FAIL):
        assert "bstune:record" not in trial.user_attrs
    winners = yaml.safe_load((tmp_path / "a" / "outputs" / "s" / "best.yaml").read_text())
    worked = {trial.number: worker_of(trial) for trial in trials}
    for winner in winners.values():
        here = worked[winner["number"]] == worked[0]
        assert (winner["checkpoint"] is not None) == here
        assert (
            f"the checkpoint of trial {winner['number']} is not in " in log(tmp_path, "a")
        ) != here


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@pytest.mark.soak
def test_optunas_proxy_is_a_storage(watch, tmp_path, monkeypatch):
    pytest.importorskip("grpc")
    port = free_port()
    url = f"grpc://127.0.0.1:{port}"
    code = "import sys; from optuna.storages import get_storage as g, run_grpc_proxy_server as r; "
    code += "r(g(sys.argv[1]), host='127.0.0.1', port=int(sys.argv[2]))"
    server = subprocess.Popen(
        [sys.executable, "-c", code, f"sqlite:///{tmp_path}/bstune.db", str(port)]
    )
    try:
        connect(url).wait_server_ready(GUARD)
        options = (f"storage={url}", "search.trials=12", "sampler=random")
        owner = fleet.start("owner", tmp_path / "a", *options, seconds=0.2)
        wait_for(watch.finished, "trial")
        worker = fleet.start("worker", tmp_path / "b", *options, seconds=0.2)
        owner.join(GUARD)
        worker.join(GUARD)
        assert (owner.exitcode, worker.exitcode) == (0, 0), log(tmp_path, "a") + log(tmp_path, "b")
        assert watch.finished() == dict.fromkeys(range(12), 1)
    finally:
        server.kill()
        server.wait()
    monkeypatch.setattr(patience, "RETRY_SECONDS", 0.0)
    with pytest.raises(
        StudyError,
        match=r"the storage does not answer: storage=grpc://127.0.0.1:\d+: GRPC connection",
    ):
        check_storage(url)


def workers_of(kind, tmp_path, options):
    """Start two workers as a cluster's library does, and return what waits for them."""
    calls = [("worker", tmp_path / f"{kind}-{i}", options, {"seconds": 0.2}) for i in range(2)]
    if kind == "submitit":
        executor = pytest.importorskip("submitit").LocalExecutor(folder=tmp_path / "jobs")
        executor.update_parameters(timeout_min=5)
        jobs = [executor.submit(fleet.work, *call) for call in calls]
        return lambda: [job.result() for job in jobs]
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    tasks = [ray.remote(max_calls=1)(fleet.work).remote(*call) for call in calls]
    return lambda: (ray.get(tasks, timeout=GUARD), ray.shutdown())


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["submitit", "ray"])
# The clusters' libraries warn of things of their own.
@pytest.mark.filterwarnings("ignore")
def test_a_clusters_library_starts_workers(kind, watch, tmp_path, monkeypatch):
    pytest.importorskip(kind)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    options = (f"storage=sqlite:///{tmp_path}/bstune.db", "search.trials=40", "sampler=random")
    owner = fleet.start("owner", tmp_path / "owner", *options, seconds=2)
    wait_for(watch.finished, "trial")
    wait = workers_of(kind, tmp_path, options)
    owner.join(GUARD)
    assert owner.exitcode == 0
    wait()
    # The owner and two workers.
    assert len(set(map(worker_of, watch.trials(*fleet.DONE)))) == 3
    assert watch.finished() == dict.fromkeys(range(40), 1)
