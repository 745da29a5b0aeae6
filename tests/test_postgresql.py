"""A study on a real PostgreSQL server: several processes, restarts, frozen processes."""

import os
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path

import optuna
import pytest
from postgres import INITDB, Postgres
from processes import FORK, started
from test_storage import QUESTION, SPACE, ask, record_of

from bstune.__main__ import main
from bstune.study.storage import StudyStorage

pytest.importorskip("psycopg", reason="psycopg is not installed: pip install bstune[postgresql]")
pytestmark = pytest.mark.skipif(
    INITDB is None, reason="no PostgreSQL server (apt-get install postgresql), or no name"
)


@pytest.fixture(scope="module")
def server():
    # pytest's own folders are closed to the server's user.
    with tempfile.TemporaryDirectory() as folder:
        made = Postgres(Path(folder))
        yield made
        made.stop()


def open_study(url):
    storage = StudyStorage(url, "study")
    storage.begin(SPACE, QUESTION, {})
    return storage


@pytest.mark.slow
def test_two_processes_share_a_study_while_the_server_restarts(server, tmp_path, capsys):
    url = server.new_url()
    name = "replay-fashion_mlp"
    own = ["table=fashion_mlp", f"storage={url}", f"output={tmp_path}/out"]
    tune = ["+workload=replay", "trials=40", "seeds=2", "mlflow.uri=null", *own]
    join = ["worker", f"study={name}", *own]
    first = started(tmp_path / "first.txt", main, tune)
    study, deadline = None, time.monotonic() + 90
    while study is None and time.monotonic() < deadline:
        time.sleep(0.05)
        if name in optuna.get_all_study_names(url):
            study = optuna.load_study(study_name=name, storage=url)
    second = started(tmp_path / "second.txt", main, join)
    while len({trial.user_attrs.get("process") for trial in study.trials}) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    before = {trial.number: trial.user_attrs.get("record") for trial in study.trials}
    server.stop()
    # What begins meanwhile ends with one line.
    assert main(tune) == 2
    assert "Traceback" not in capsys.readouterr().err
    server.start()
    # One that has ended is dead for the other once it is waited for.
    while any([first.is_alive(), second.is_alive()]):
        time.sleep(0.05)
    # What the restart has cut in the middle ends with one line, and the command goes on.
    for process, command in ((second, join), (first, tune)):
        if process.exitcode:
            assert process.exitcode == 2
            assert main(command) == 0
    for log in tmp_path.glob("*.txt"):
        assert "Traceback" not in log.read_text()
    trials = optuna.load_study(study_name=name, storage=url).trials
    for number, record in before.items():
        assert record in (None, trials[number].user_attrs.get("record"))
    assert all(trial.state.is_finished() for trial in trials)
    records = StudyStorage(url, name).records()
    assert max(Counter(record.place for record in records).values()) == 1
    assert sum(record.role == "new seed" for record in records) >= 4
    assert (tmp_path / "out" / "curve.json").exists()


def freeze(url, stored):
    """Claim a place, be frozen, and tell the record of it much later."""
    storage = open_study(url)
    spec = storage.claim(ask())
    os.kill(os.getpid(), signal.SIGSTOP)
    stored.put(storage.finish(record_of(spec)))


def test_the_trial_of_a_frozen_process_is_asked_again_and_its_record_is_refused(server):
    url = server.new_url()
    stored = FORK.Queue()
    process = FORK.Process(target=freeze, args=(url, stored))
    process.start()
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    storage = open_study(url)
    assert len(storage.running()) == 1
    server.query("UPDATE trial_heartbeats SET heartbeat = heartbeat - interval '61 s'",
                 url.rpartition("/")[2])  # fmt: skip
    storage.settle()
    again = storage.claim(ask())
    assert again.number == 1
    os.kill(process.pid, signal.SIGCONT)
    assert stored.get(timeout=60) is False
    process.join()
    assert storage.finish(record_of(again))
    assert [record.number for record in storage.records()] == [1]
