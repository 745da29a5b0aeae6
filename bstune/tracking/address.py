"""MLflow's address: the URI that a study logs to, and how to open its pages.

It is checked before a study's first steps, and mlflow, which takes seconds to import, only after
them: the addresses that are used most are told here without it.
"""

import os
import re
import shlex
import sqlite3
import sys
from pathlib import Path
from urllib.parse import urlsplit

from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from bstune.core.errors import ConfigError
from bstune.options import MlflowOptions
from bstune.system.files import check_writable
from bstune.system.inputs import one_line
from bstune.system.secrets import redact
from bstune.system.sqlite import foreign_tables

# Where `mlflow ui` serves its pages.
UI = "http://127.0.0.1:5000"
SQLITE = "sqlite:///"
# The databases that MLflow logs to, as mlflow.store.db.db_types has them.
DATABASE_ENGINES = ("postgresql", "mysql", "sqlite", "mssql")
# Tables that each of MLflow's databases has, with the column of their primary keys.
ALWAYS = {"experiments": ("experiment_id",), "runs": ("run_uuid",)}


def tracking_uri(settings: MlflowOptions) -> str:
    """Give MLflow's URI: that of the options, else ``MLFLOW_TRACKING_URI``, else ``mlflow.db``.

    The path of a SQLite database is made absolute.
    """
    uri: str = settings.uri or os.environ.get("MLFLOW_TRACKING_URI") or f"{SQLITE}mlflow.db"
    path = uri.removeprefix(SQLITE)
    # A URI of no SQLite database stays as it is. So does that of one in memory, and of one with
    # options behind its path.
    if path in (uri, "", ":memory:") or "?" in path:
        return uri
    # mlflow's own conversion is not used: it writes a space as %20, which SQLAlchemy 2.0 takes for
    # a part of the name.
    return f"{SQLITE}{Path(path).absolute().as_posix()}"


def check_uri(uri: str) -> None:
    """Check that MLflow can log to a URI, without connecting to a server.

    mlflow, which takes seconds to import, is imported only for a database that may be another
    program's, and for a URI that names neither a server nor a database.

    Raises:
        ConfigError: where MLflow has no store for this kind of URI, or where it is the URI of
            another program's SQLite database, to which MLflow would add its tables.
        ImportError: where mlflow is needed and cannot be imported.
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
    # Only mlflow knows which other kinds it has a store for.
    from mlflow import MlflowClient
    from mlflow.tracking.registry import UnsupportedModelRegistryStoreURIException

    from bstune.tracking.exchange import FAILURES

    try:
        MlflowClient(uri)
    except UnsupportedModelRegistryStoreURIException as error:
        accepted = "the http address of an MLflow server or a database such as sqlite:///mlflow.db"
        raise ConfigError(
            f"MLFLOW_TRACKING_URI or mlflow.uri must be {accepted}, but got {uri!r}"
        ) from error
    except FAILURES:
        # MLflow knows the address, yet nothing answers now. Sending says so once, and the study
        # goes on.
        return


def _check_place(uri: str, what: str) -> None:
    """Refuse a SQLite database that is another program's, or that cannot be written to.

    MLflow itself would try for a minute. ``what``: the option and its value, for the error.
    """
    path = database_path(uri)
    if path is None:
        return
    if os.path.lexists(path) and not _is_mlflows(path):
        # MLflow's tables take seconds to import.
        from bstune.tracking.database import check_database

        check_database(path)
    check_writable(path, what)


def _is_mlflows(path: Path) -> bool:
    """Whether a file is a database that has MLflow's tables, or none.

    It may be MLflow's where this is False: only mlflow knows all its tables.
    """
    if not path.is_file():
        return False
    try:
        return not foreign_tables(path, ALWAYS, ALWAYS)
    except sqlite3.Error:
        return False


def database_path(uri: str) -> Path | None:
    """Give the path of the SQLite database at a URI. None for a server or a database in memory."""
    if not uri.startswith(SQLITE) or "?" in uri:
        return None
    database = make_url(uri).database
    if not database or database == ":memory:":
        return None
    return Path(database).absolute()


def opening_lines(uri: str, page: str = "") -> tuple[str, ...]:
    """Give the lines that say how to open a page of MLflow's UI, such as ``#/experiments/1``.

    They are the command that serves a database, if there is one, and the page's address. Neither
    shows a password.
    """
    if uri.startswith(("http://", "https://")):
        address = re.sub("//[^/]*@", "//", redact(uri)).rstrip("/")
        if page:
            address = f"{address}/{page}"
        return (address,)
    shown = shlex.quote(uri)
    # A URI with a password in it is given by the variable's name.
    if redact(uri) != uri:
        shown = '"$MLFLOW_TRACKING_URI"'
    command = f"{shlex.quote(sys.executable)} -m mlflow ui --backend-store-uri {shown}"
    if not page:
        return (command,)
    return (command, f"{UI}/{page}")
