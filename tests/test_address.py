"""Where MLflow is: the address that counts, and what opens its pages."""

import shlex
import sqlite3
import subprocess
import sys
from contextlib import closing

import pytest
from builders import mlflow_options
from mlflow.store.db import db_types

from bstune.core.errors import ConfigError
from bstune.study.storage.connection import primary_keys
from bstune.tracking import database
from bstune.tracking.address import (
    ALWAYS,
    DATABASE_ENGINES,
    check_uri,
    opening_lines,
    tracking_uri,
)

PYTHON = shlex.quote(sys.executable)


@pytest.mark.parametrize(
    ("configured", "environment", "expected"),
    [
        # Without an address the database lies in the working directory.
        (None, None, "sqlite:///{here}/mlflow.db"),
        # A variable that is set to nothing counts as none.
        (None, "", "sqlite:///{here}/mlflow.db"),
        # A relative path would change its meaning with the working directory.
        (None, "sqlite:///runs/a.db", "sqlite:///{here}/runs/a.db"),
        (None, "sqlite:////srv/a.db", "sqlite:////srv/a.db"),
        (None, "postgresql://host/db", "postgresql://host/db"),
        # The option goes before the environment.
        ("http://localhost:5000", "sqlite:///a.db", "http://localhost:5000"),
    ],
)
def test_tracking_uri(configured, environment, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if environment is not None:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", environment)
    assert tracking_uri(mlflow_options(configured)) == expected.format(here=tmp_path)


def test_the_databases_are_mlflows():
    assert set(DATABASE_ENGINES) == set(db_types.DATABASE_ENGINES)
    keys = primary_keys(database.Base.metadata)
    assert {name: keys[name] for name in ALWAYS} == {name: set(key) for name, key in ALWAYS.items()}


def database_of(tables, path):
    """Write a database of these tables, each with the column of its primary key."""
    with closing(sqlite3.connect(path)) as connection:
        for name, (key,) in tables.items():
            connection.execute(f"CREATE TABLE {name} ({key} INTEGER PRIMARY KEY)")


def test_the_usual_addresses_are_checked_without_mlflow(tmp_path):
    database_of({}, tmp_path / "empty.db")
    database_of({**ALWAYS, "of_a_later_version": ("id",)}, tmp_path / "later.db")
    # There is no file of the first one yet.
    uris = [
        *(f"sqlite:///{name}.db" for name in ("new", "empty", "later")),
        "http://localhost:5000",
    ]
    code = (
        "import sys\nfrom bstune.tracking.address import check_uri\n"
        f"for uri in {uris}:\n    check_uri(uri)\n"
        "print('mlflow' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert told.stdout == "False\n"


@pytest.mark.parametrize(
    ("tables", "uri"),
    [
        # Whose it is only the keys of all of MLflow's tables tell.
        ({"tags": ("key",)}, "sqlite:///mlflow.db"),
        ({**ALWAYS, "runs": ("id",)}, "sqlite:///mlflow.db"),
        (None, "file:///x"),
    ],
)
def test_of_another_address_mlflow_is_asked(tables, uri, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if tables is not None:
        database_of(tables, tmp_path / "mlflow.db")
    # With these in their place an import fails.
    for module in ("mlflow", "bstune.tracking.database"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises((ImportError, ConfigError), match=r"import of .* halted"):
        check_uri(uri)


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        # A database needs a command that serves its pages; a server has its own.
        (
            "sqlite:////srv/mlflow.db",
            f"{PYTHON} -m mlflow ui --backend-store-uri sqlite:////srv/mlflow.db",
        ),
        (
            "sqlite:////my runs/mlflow.db",
            f"{PYTHON} -m mlflow ui --backend-store-uri 'sqlite:////my runs/mlflow.db'",
        ),
        # An address with a password is read from the environment, not written into a command.
        (
            "postgresql://me:secret@host/db",
            f'{PYTHON} -m mlflow ui --backend-store-uri "$MLFLOW_TRACKING_URI"',
        ),
        ("http://localhost:5000", "http://localhost:5000"),
        # A server's address is shown without user, password and the slash at its end.
        ("https://me:secret@host/mlflow/", "https://host/mlflow"),
    ],
)
def test_what_opens_a_page(uri, expected):
    assert opening_lines(uri) == (expected,)
    served = (
        (f"{expected}/#/",) if uri.startswith("http") else (expected, "http://127.0.0.1:5000/#/")
    )
    assert opening_lines(uri, "#/") == served
