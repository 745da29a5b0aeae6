"""Where MLflow is: the URI that a study logs to, and the command and the address that open its pages."""

import os
import re
import shlex
import sys
from pathlib import Path
from urllib.parse import urlsplit

from mlflow import MlflowClient
from mlflow.store.db.db_types import DATABASE_ENGINES
from mlflow.tracking.registry import UnsupportedModelRegistryStoreURIException
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from bstune.core.errors import ConfigError
from bstune.options import MlflowOptions
from bstune.system.files import check_writable
from bstune.system.inputs import one_line
from bstune.system.secrets import redact
from bstune.tracking.exchange import FAILURES

UI = "http://127.0.0.1:5000"  # of `mlflow ui`


def tracking_uri(settings: MlflowOptions) -> str:
    """Return the URI in the options, of ``MLFLOW_TRACKING_URI`` or of ``mlflow.db``; SQLite paths are made absolute."""
    uri: str = settings.uri or os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
    path = uri.removeprefix("sqlite:///")
    if path in (uri, "", ":memory:") or "?" in path:
        return uri
    # Not mlflow's own conversion: it writes a space as %20, which SQLAlchemy 2.0 takes for a part of the name.
    return f"sqlite:///{Path(path).absolute().as_posix()}"


def check_uri(uri: str) -> None:
    """Check that MLflow has a store for this kind of URI, without connecting; ConfigError if it has none.

    Nor may the URI be of a SQLite database that another program made, as MLflow would add its tables.
    """
    what = f"MLFLOW_TRACKING_URI or mlflow.uri={uri}"
    try:
        scheme = urlsplit(uri).scheme.partition("+")[0]
        if scheme in DATABASE_ENGINES:
            make_url(uri).get_dialect().import_dbapi()
            _check_place(uri, what)
        if scheme in ("http", "https", *DATABASE_ENGINES):
            return
    except (ArgumentError, ValueError) as error:
        raise ConfigError(f"{what} is no address: {one_line(str(error))}") from error
    except ImportError as error:
        raise ConfigError(f"{what} needs a driver that is not installed: {error}") from error
    try:
        MlflowClient(uri)
    except UnsupportedModelRegistryStoreURIException as error:
        accepted = "the http address of an MLflow server or a database such as sqlite:///mlflow.db"
        raise ConfigError(
            f"MLFLOW_TRACKING_URI or mlflow.uri must be {accepted}, but got {uri!r}"
        ) from error
    except FAILURES:
        return  # known, but not there now: sending says so once, and the study goes on


def _check_place(uri: str, what: str) -> None:
    """Refuse a SQLite database that is another program's, or whose place cannot be written: MLflow tries a minute."""
    path = database_path(uri)
    if path is None:
        return
    if os.path.lexists(path):
        # MLflow's tables take a second to import
        from bstune.tracking.database import check_database

        check_database(path)
    check_writable(path, what)


def database_path(uri: str) -> Path | None:
    """Return the path of a SQLite database; None for a server, or a database in memory."""
    database = make_url(uri).database if uri.startswith("sqlite:///") and "?" not in uri else None
    return Path(database).absolute() if database and database != ":memory:" else None


def opening(uri: str, page: str = "") -> tuple[str, ...]:
    """Return what opens a page of MLflow's UI, such as ``#/experiments/1``, in a line or two; none shows a password.

    That is the command that serves a database, and the address.
    """
    if uri.startswith(("http://", "https://")):
        return (f"{re.sub('//[^/]*@', '//', redact(uri)).rstrip('/')}{'/' if page else ''}{page}",)
    shown = shlex.quote(uri) if redact(uri) == uri else '"$MLFLOW_TRACKING_URI"'
    command = f"{shlex.quote(sys.executable)} -m mlflow ui --backend-store-uri {shown}"
    return (command, f"{UI}/{page}") if page else (command,)
