"""Where MLflow is: the address that counts, and what opens its pages."""

import shlex
import sys

import pytest

from bstune.config import mlflow_options
from bstune.tracking.address import opening_lines, tracking_uri

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
