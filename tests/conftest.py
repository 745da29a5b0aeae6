"""What holds for all tests: none of the user's settings, and databases that write at once."""

import os
import sqlite3
import sys
from pathlib import Path

import matplotlib
import pytest
from sqlalchemy import Engine, event

# Nothing of the user's own settings decides a test.
os.environ.pop("MLFLOW_TRACKING_URI", None)
FILES = [one for part in (".", "benchmarks") for one in (Path(__file__).parent / part).glob("*.py")]
TESTS = {file.stem for file in FILES} - {"small"}


@event.listens_for(Engine, "connect")
def leave_flushing_to_the_system(connection, _):
    """What a killed process has written is there; a machine that loses power is not tested."""
    if isinstance(connection, sqlite3.Connection):
        connection.execute("PRAGMA synchronous = OFF")


@pytest.fixture(autouse=True)
def _other_tests_are_not_the_users(request, monkeypatch):
    """A worker imports all modules of the user's: of the tests those of one file, not of all."""
    used = {getattr(one, "__module__", None) for one in vars(request.module).values()}
    for name in TESTS.intersection(sys.modules) - used - {request.module.__name__}:
        monkeypatch.delitem(sys.modules, name)


@pytest.fixture
def own_surveys(tmp_path, monkeypatch):
    """Surveys are kept in a folder of the test's own, beside matplotlib's list of fonts."""
    monkeypatch.setenv("MPLCONFIGDIR", matplotlib.get_cachedir())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
