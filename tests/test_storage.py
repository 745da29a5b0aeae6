"""A study in Optuna's storage: claims, records, kills, settings, and what Optuna shows."""

import json
import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from threading import Barrier

import optuna
import pytest
from optuna.trial import TrialState
from postgres import free_port
from refusals import cases, refused, text_cases

from bstune.core.errors import BstuneError, InputError, StudyError
from bstune.core.question import Question
from bstune.core.records import Budget, Record, Target
from bstune.core.space import Space
from bstune.study.plan import Ask
from bstune.study.storage import StudyStorage, database_errors

SPACE = Space(4, 1024, 1e-4, 10.0, "sqrt", (64, 0.1))
QUESTION = Question(Target("val/error", 0.1, "min"), Budget(steps=99))


def open_study(folder, name="digits", settings=None):
    storage = StudyStorage(f"sqlite:///{folder}/study.db", name)
    storage.begin(SPACE, QUESTION, settings or {"target": "a"})
    return storage


def ask(place="search/0", **changes):
    fields = {"role": "search", "batch_size": 64, "lr": 0.1, "seed": 1, "max_steps": 99}
    return Ask(place=place, **(fields | changes))


def record_of(spec, status="reached", **changes):
    fields = {"steps": 30, "seconds_per_step": 0.5, "history": ((10, 0.5), (30, 0.1))}
    return Record(**spec.model_dump(), status=status, **(fields | changes))


@cases("""
objective | status | seconds | state | value | name
time | reached | 0.5 | COMPLETE | 15.0 | seconds to val/error <= 0.1
time | reached | null | PRUNED | null | seconds to val/error <= 0.1
steps | reached | null | COMPLETE | 30.0 | steps to val/error <= 0.1
metric | finished | 0.5 | COMPLETE | 0.1 | val/error
time | pruned | 0.5 | PRUNED | null | seconds to val/error <= 0.1
time | diverged | 0.5 | PRUNED | null | seconds to val/error <= 0.1
time | refused | 0.5 | FAIL | null | seconds to val/error <= 0.1
""")
def test_optuna_shows_a_trial_in_its_own_terms(
    tmp_path, objective, status, seconds, state, value, name
):
    target = "min val/error" if objective == "metric" else "val/error <= 0.1"
    storage = StudyStorage(f"sqlite:///{tmp_path}/study.db", "digits")
    storage.begin(SPACE, Question(Target.parse(target), Budget(steps=99), objective), {})
    of_trial = {"status": status, "seconds_per_step": seconds}
    storage.finish(record_of(storage.claim(ask()), **of_trial))
    study = optuna.load_study(study_name="digits", storage=f"sqlite:///{tmp_path}/study.db")
    (trial,) = study.trials
    assert (trial.state.name, trial.value) == (state, value)
    assert study.metric_names == [name]
    assert trial.params == {"batch_size": 64, "lr": 0.1}
    assert trial.intermediate_values == {10: 0.5, 30: 0.1}
    assert storage.records()[0].status == trial.user_attrs["status"] == status


def test_of_two_processes_at_one_place_the_smaller_number_keeps_it(tmp_path):
    one, other = open_study(tmp_path), open_study(tmp_path)
    first = one.claim(ask())
    assert (first.number, other.running()) == (0, [first])
    assert other.claim(ask()) is None
    assert other.claim(ask("search/1")).number == 1
    one.finish(record_of(first))
    assert other.claim(ask()) is None
    states = [trial.state for trial in one.study.trials]
    assert states == [TrialState.COMPLETE, TrialState.RUNNING]


def test_of_claims_at_the_same_time_one_is_kept(tmp_path):
    places = [f"search/{number}" for number in range(5)]
    both = open_study(tmp_path), open_study(tmp_path)
    barrier = Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        for place in places:
            claimed = pool.map(
                lambda one, place=place: barrier.wait() < 2 and one.claim(ask(place)), both
            )
            assert sum(spec is not None for spec in claimed) == 1
    assert [spec.place for spec in both[0].running()] == places


def test_a_trial_that_another_process_took_for_dead_is_dropped(tmp_path):
    one, other = open_study(tmp_path), open_study(tmp_path)
    spec = one.claim(ask())
    other.abandon(spec)
    again = other.claim(ask())
    one.finish(record_of(spec))
    other.finish(record_of(again, "failed"))
    assert [record.number for record in one.records()] == [again.number]
    # Its place is free for another try.
    assert other.claim(ask()).number == again.number + 1


def test_a_record_that_came_through_after_its_trial_was_ended_is_none(tmp_path):
    one, other = open_study(tmp_path), open_study(tmp_path)
    spec = one.claim(ask())
    other.abandon(spec)
    row = one.study.trials[0]._trial_id, "record", json.dumps(record_of(spec).model_dump_json())
    with closing(sqlite3.connect(tmp_path / "study.db")) as database:
        database.execute(
            "INSERT INTO trial_user_attributes (trial_id, key, value_json) VALUES (?, ?, ?)", row
        )
        database.commit()
    again = other.claim(ask())
    other.finish(record_of(again))
    assert [record.number for record in open_study(tmp_path).records()] == [again.number]


def claim_and_die(folder, with_record):
    """In a process of its own: claim a place, perhaps store the record, and be killed."""
    storage = open_study(folder)
    spec = storage.claim(ask())
    if with_record:
        trial_id, text = storage.study.trials[0]._trial_id, record_of(spec).model_dump_json()
        storage.study._storage.set_trial_user_attr(trial_id, "record", text)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("with_record", [False, True])
def test_what_a_killed_process_left_is_settled(tmp_path, with_record):
    process = multiprocessing.get_context("fork").Process(
        target=claim_and_die, args=(tmp_path, with_record)
    )
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    storage = open_study(tmp_path)
    assert storage.running() == []
    assert len(storage.records()) == with_record
    assert storage.study.trials[0].state == (
        TrialState.COMPLETE if with_record else TrialState.FAIL
    )
    # The place is asked again exactly where nothing was recorded.
    assert (storage.claim(ask()) is None) == with_record


def test_a_process_shows_that_it_lives_while_a_body_runs(tmp_path):
    storage = open_study(tmp_path)
    storage.claim(ask())
    with closing(sqlite3.connect(tmp_path / "study.db", isolation_level=None)) as database:
        database.execute("delete from trial_heartbeats")
        with storage.heartbeats(apart=0.01):
            for _ in range(500):
                if database.execute("select * from trial_heartbeats").fetchall():
                    return
                time.sleep(0.01)
    pytest.fail("no sign of life")


SERVER = """
import sys
from optuna.storages import get_storage, run_grpc_proxy_server
run_grpc_proxy_server(get_storage(sys.argv[1]), host="localhost", port=int(sys.argv[2]))
"""


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_over_a_proxy_the_trial_of_a_killed_machine_waits_for_who_is_at_the_database(tmp_path):
    pytest.importorskip("grpc", reason="grpcio is not installed: pip install bstune[grpc]")
    url, port = f"sqlite:///{tmp_path}/study.db", free_port()
    server = subprocess.Popen([sys.executable, "-c", SERVER, url, str(port)])
    try:
        optuna.storages.GrpcStorageProxy(host="localhost", port=port).wait_server_ready(60)
        far, other = (StudyStorage(f"grpc://localhost:{port}", "digits") for _ in range(2))
        for storage in (far, other):
            storage.begin(SPACE, QUESTION, {"target": "a"})
        kept, lost = far.claim(ask("search/0")), far.claim(ask("search/1"))
        assert far.finish(record_of(kept))
        trial_id = far.study.trials[1]._trial_id
        far.study._storage.set_trial_user_attr(trial_id, "process", "another host:1:1")
        other.settle(by_proxy=True)
        assert other.running() == [lost]
        near = open_study(tmp_path)
        assert near.running() == [lost]
        near.settle(by_proxy=True)
        assert other.claim(ask("search/1")).number == 2
        assert other.records() == near.records() == [record_of(kept)]
    finally:
        server.kill()
        server.wait()
    with refused(error=StudyError), database_errors("grpc://x", "failed"):
        other.records()


@cases("""
url
nosuch://me:s3cret@host/x
sqlite:////proc/nosuch/x
sqlite://host/x.db
""")
def test_a_storage_that_is_none_is_one_line(url):
    with pytest.raises((InputError, StudyError)) as error:
        StudyStorage(url, "x")
    assert "\n" not in str(error.value)
    assert "s3cret" not in str(error.value)


def test_the_database_of_another_program_is_left_alone(tmp_path):
    with closing(sqlite3.connect(tmp_path / "study.db")) as database:
        database.execute("CREATE TABLE alembic_version (version_num text)")
        with refused("study.db, another program", StudyError):
            open_study(tmp_path)
        assert len(database.execute("SELECT * FROM sqlite_master").fetchall()) == 1
    (tmp_path / "study.db").unlink()
    study = optuna.create_study(storage=f"sqlite:///{tmp_path}/study.db", study_name="digits")
    study.set_user_attr("by", "hand")
    with refused(error=StudyError):
        open_study(tmp_path)
    assert study.user_attrs == {"by": "hand"}


def test_nothing_is_left_of_a_study_without_trials_and_others_stay(tmp_path):
    url = f"sqlite:///{tmp_path}/study.db"
    one = open_study(tmp_path, "one")
    again = StudyStorage(url, "one")
    two = open_study(tmp_path, "two")
    assert two.discard()
    # Another process has made it.
    assert again.discard()
    assert optuna.get_all_study_names(url) == ["one"]
    spec = one.claim(ask())
    assert not one.discard()
    one.abandon(spec)
    assert one.discard()
    assert not list(tmp_path.iterdir())


def test_settings_have_no_secrets(tmp_path):
    settings = {"overrides": ["db.password=pw"], "algorithm": {"token": "pw", "lr": 1}}
    open_study(tmp_path, settings=settings)
    # Another secret is no other setting.
    storage = open_study(tmp_path, settings=settings | {"overrides": ["db.password=new"]})
    assert storage.setting("algorithm") == {"token": "***", "lr": 1}
    assert b"pw" not in (tmp_path / "study.db").read_bytes()


@text_cases("""
table | changes
alembic_version | version_num='v0.0.1'
study_user_attributes | value_json='[1]'
study_user_attributes | value_json='{'
trial_user_attributes | value_json='"{}"'
trial_user_attributes | value_json='5'
trial_user_attributes | value_json='null'
""")
def test_what_another_program_wrote_is_refused(tmp_path, table, changes):
    storage = open_study(tmp_path)
    storage.finish(record_of(storage.claim(ask())))
    with closing(sqlite3.connect(tmp_path / "study.db")) as database:
        database.execute(f"UPDATE {table} SET {changes}")  # noqa: S608 (the table above)
        database.commit()
    with refused(error=BstuneError):
        open_study(tmp_path)


def test_a_link_to_a_database_is_refused(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "study.db").symlink_to(tmp_path / "other" / "study.db")
    with refused("study.db, link", StudyError):
        open_study(tmp_path)
    assert not list((tmp_path / "other").iterdir())
