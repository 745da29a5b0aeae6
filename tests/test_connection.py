"""Connections to storages: refused, silent, and made by several processes at once."""

import contextlib
import multiprocessing
import socket
import sqlite3
import time
from functools import partial

import optuna
import pytest
from toolbox import entries

from bstune.core.errors import StudyError
from bstune.study.storage import patience
from bstune.study.storage.attributes import STUDY_ID
from bstune.study.storage.connection import check_storage, engine_arguments
from bstune.study.storage.opening import find_study, open_study


def url(folder, name="study"):
    return f"sqlite:///{folder}/{name}.db"


@pytest.fixture(autouse=True)
def _quiet():
    optuna.logging.set_verbosity(optuna.logging.WARNING)


def opened(folder):
    return open_study("toy", url(folder), "steps", {}, folder)


@pytest.mark.parametrize(
    ("storage", "message"),
    [
        ("sqlite:////nowhere/at/all.db", "the folder /nowhere/at does not exist"),
        ("sqlite:///{tmp}/notes.txt", "file is not a database"),
    ],
)
def test_storages_that_cannot_be_are_refused(tmp_path, storage, message):
    (tmp_path / "notes.txt").write_text("no database at all, " * 100)
    for look in (check_storage, partial(find_study, "toy")):
        with pytest.raises(StudyError, match=message):
            look(storage.format(tmp=tmp_path))
    check_storage(url(tmp_path))
    with pytest.raises(
        StudyError, match="has no study 'toy', but none at all: begin it there with"
    ):
        find_study("toy", url(tmp_path))
    assert entries(tmp_path) == ["notes.txt"], "checking writes nothing"


def test_a_storage_of_another_version_of_optuna_is_named_as_such(tmp_path):
    opened(tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / "study.db")) as connection, connection:
        # The tables of Optuna 2.6.
        connection.execute("UPDATE alembic_version SET version_num = 'v2.6.0.a'")
    for look in (lambda: opened(tmp_path), lambda: find_study("toy", url(tmp_path))):
        with pytest.raises(
            StudyError, match=r"study\.db cannot be read: The runtime optuna version .* upgrade"
        ):
            look()


def test_a_storage_that_does_not_answer_is_reported(tmp_path, monkeypatch):
    opened(tmp_path)
    # In place of two minutes.
    monkeypatch.setattr(patience, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr("bstune.study.storage.connection.ANSWER_SECONDS", 0.2)
    with contextlib.closing(sqlite3.connect(tmp_path / "study.db")) as other_process:
        other_process.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StudyError, match="database is locked"):
            check_storage(url(tmp_path))


# It waits for two seconds. That they are set is seen in
# test_what_a_url_says_of_its_connection_stands, and that no answer is reported above.
# That the seconds are given to the driver is seen below.
@pytest.mark.soak
def test_a_server_that_takes_a_connection_and_says_nothing_is_reported(monkeypatch):
    pytest.importorskip("psycopg2")
    monkeypatch.setattr(patience, "RETRY_SECONDS", 0.0)
    # The least that libpq takes; it holds for all of the greeting.
    monkeypatch.setattr("bstune.study.storage.connection.CONNECT_SECONDS", 2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"postgresql+psycopg2://me@127.0.0.1:{silent.getsockname()[1]}/studies"
        with pytest.raises(StudyError, match=r"the storage does not answer: .*timeout expired"):
            check_storage(address)


@pytest.mark.slow
def test_what_no_waiting_ends_is_reported_at_once(database_server):
    start = time.monotonic()
    with pytest.raises(StudyError, match=r"database .nowhere. does not exist; start it"):
        check_storage(database_server.url("nowhere"))
    with pytest.raises(StudyError, match=r"Can't load plugin: .*nothing"):
        check_storage("postgresql+nothing://h/x")
    assert time.monotonic() - start < 30


def test_what_a_url_says_of_its_connection_stands():
    """Such as the options of a schema, or none where a pooler of connections takes none."""
    given = engine_arguments("postgresql+psycopg2://me@host/db?options=-csearch_path%3Dours")
    assert given["pool_pre_ping"]
    assert "options" not in given["connect_args"]
    assert given["connect_args"]["connect_timeout"] == 5
    plain = engine_arguments("postgresql+psycopg2://me@host/db")
    assert "-c statement_timeout=15000" in plain["connect_args"]["options"]


@pytest.mark.parametrize("address", ["mysql+pymysql://u@h/name", "mssql+pyodbc://u@h/name"])
def test_other_databases_are_refused(address):
    with pytest.raises(StudyError, match=r"SQLite.*PostgreSQL.*gRPC"):
        check_storage(address)


@pytest.mark.slow
def test_two_processes_begin_a_study_in_a_new_database_at_once(database_server, tmp_path):
    database_server.query("CREATE DATABASE new")
    both = multiprocessing.get_context("fork")
    for new in (database_server.url("new"), url(tmp_path, "new")):
        at_once = both.Barrier(2)
        found = both.SimpleQueue()

        def begin(storage, at_once=at_once, found=found):
            at_once.wait(60)
            found.put(open_study("toy", storage, "steps", {"a": 1}, tmp_path).user_attrs[STUDY_ID])

        processes = [both.Process(target=begin, args=(new,)) for _ in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == [0, 0]
        assert found.get() == found.get()
