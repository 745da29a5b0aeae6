"""Connections to a study's storage: a database, or Optuna's gRPC proxy in front of one."""

import os
import sqlite3
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.storages import BaseStorage
from optuna.storages._rdb.models import BaseModel
from sqlalchemy import Dialect, Engine, MetaData, create_engine, event, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from bstune.core.errors import StudyError
from bstune.study.storage.patience import STORAGE_ERRORS, StorageGoneError, patient, reason_of
from bstune.system.files import check_writable
from bstune.system.secrets import redact_values
from bstune.system.sqlite import foreign_tables, has_table

# Seconds that a server may take to let a client in.
CONNECT_SECONDS = 5
# Seconds that a lock, a statement, or a server that is gone may delay a call.
ANSWER_SECONDS = 15
# Tables that each of Optuna's databases has.
OPTUNA_TABLES = {"studies", "trials", "version_info"}
# Tables of a foreign database that an error names.
NAMED_TABLES = 3
# Optuna's proxy: many workers on few connections to a database.
GRPC = "grpc"
# Where Optuna's proxy listens unless told otherwise.
PROXY_HOST = "localhost"
PROXY_PORT = 13000
BACKENDS = ("sqlite", "postgresql", GRPC)
# Seconds between looks at a study that another process is making.
RACE_SECONDS = (0.1, 0.3, 1.0, 2.0)


def engine_arguments(url: str) -> dict[str, Any]:
    """Give SQLAlchemy's arguments for a storage, with which one that is away is noticed in seconds.

    Settings that the URL has itself are left to it. A server that is frozen, rather than gone, is
    waited for: no driver's time-out covers an answer that does not come.

    Raises:
        StudyError: for a URL that is none, or of a database that is not supported.
    """
    try:
        location = make_url(url)
    except ArgumentError as error:
        raise StudyError(
            f"storage={url} is no database URL: use one such as sqlite:///bstune.db or "
            "postgresql+psycopg2://user@host/name"
        ) from error
    backend = location.get_backend_name()
    if backend not in BACKENDS:
        raise StudyError(
            f"storage={url}: studies are kept in SQLite, PostgreSQL or behind Optuna's gRPC proxy, "
            f"not in {backend}: use storage=sqlite:///bstune.db, "
            "postgresql+psycopg2://user@host/name or grpc://host:port"
        )
    if backend == "sqlite":
        return {"connect_args": {"timeout": ANSWER_SECONDS}}
    milliseconds = 1000 * ANSWER_SECONDS
    # A client that stops in the middle of a transaction would lock the study for all others.
    limits = ("statement_timeout", "idle_in_transaction_session_timeout")
    # A connection that is silent ends after the idle time and two probes, ANSWER_SECONDS in all.
    settings: dict[str, Any] = {
        "connect_timeout": CONNECT_SECONDS,
        "options": " ".join(f"-c {limit}={milliseconds}" for limit in limits),
        "keepalives_idle": ANSWER_SECONDS // 3,
        "keepalives_interval": ANSWER_SECONDS // 3,
        "keepalives_count": 2,
        "tcp_user_timeout": milliseconds,
    }
    unstated = {name: value for name, value in settings.items() if name not in location.query}
    return {"connect_args": unstated, "pool_pre_ping": True}


def database_file(url: str) -> Path | None:
    """Find the file of a SQLite database.

    It is None where a server, or this process's memory, holds it.
    """
    place = make_url(url)
    if place.get_backend_name() != "sqlite" or place.database in (None, "", ":memory:"):
        return None
    return Path(str(place.database))


def check_storage(url: str) -> None:
    """Connect to the storage and disconnect, writing nothing.

    Raises:
        StudyError: where it is no database of Optuna's, does not answer, or its file cannot be
            made.
    """
    arguments = engine_arguments(url)
    path = database_file(url)
    if path is not None:
        _check_place(path, url)
        # Connecting would create it.
        if not path.exists():
            return
    try:
        patient(_look_once, (*STORAGE_ERRORS, ConnectionError))(url, arguments)
    except (StorageGoneError, ImportError) as error:
        reason = str(error).splitlines()[0]
        if isinstance(error, StorageGoneError):
            reason = error.reason
        raise StudyError(
            f"the storage does not answer: storage={url}: {reason}; "
            "start it, install its driver (psycopg2-binary for postgresql+psycopg2://, grpcio for "
            "grpc://), or use another one, such as storage=sqlite:///bstune.db"
        ) from error
    if path is not None:
        _check_tables(path, url)


def _check_place(path: Path, url: str) -> None:
    """Refuse a place where no database's file can be made."""
    check_writable(path, f"storage={url}")
    if not path.absolute().parent.is_dir():
        raise StudyError(
            f"storage={url}: the folder {path.parent} does not exist: make it, or choose another"
        )
    if path.is_symlink() and not path.exists():
        raise StudyError(
            f"storage={url}: {path} is a link to {path.readlink()}, which does not exist: "
            "make it an empty file, or choose another storage"
        )


def _look_once(url: str, arguments: dict[str, object]) -> None:
    """Connect to the storage and read once; an error of the driver says why that fails.

    ``arguments``: of SQLAlchemy's engine, such as time-outs; Optuna's proxy takes none.
    """
    if make_url(url).get_backend_name() == GRPC:
        open_proxy(url).wait_server_ready(timeout=CONNECT_SECONDS)
        return
    engine = create_engine(url, **arguments)
    # SQLite reads nothing of its file for SELECT 1.
    is_sqlite = engine.dialect.name == "sqlite"
    query = "SELECT count(*) FROM sqlite_master" if is_sqlite else "SELECT 1"
    with engine.connect() as connection:
        connection.execute(text(query))
    engine.dispose()


def _check_tables(path: Path, url: str) -> None:
    """Refuse a SQLite database that Optuna did not make, to which it would add its tables."""
    keys = primary_keys(BaseModel.metadata)
    try:
        foreign = foreign_tables(path, keys, OPTUNA_TABLES, CONNECT_SECONDS)
    except sqlite3.Error as error:
        raise StudyError(f"the storage does not answer: storage={url}: {error}") from error
    if foreign:
        raise StudyError(
            f"storage={url}: {path} is another program's database, with {tables_text(foreign)}, "
            "and bstune adds nothing to it: choose another file, such as "
            "storage=sqlite:///studies.db"
        )


def has_studies(url: str) -> bool:
    """Whether a database may hold studies: not where its file is missing, or without tables.

    Nothing is written. A server's database is not looked at.

    Raises:
        StudyError: where the file is no database, or is locked for long.
    """
    path = database_file(url)
    if path is None:
        return True
    try:
        return path.exists() and has_table(path, "studies", CONNECT_SECONDS)
    except sqlite3.Error as error:
        raise StudyError(f"the storage does not answer: storage={url}: {error}") from error


def primary_keys(tables: MetaData) -> dict[str, set[str]]:
    """Give the columns of each table's primary key, by the table's name.

    Alembic's table is among them, which stands in each of Optuna's databases.
    """
    keys = {name: set(table.primary_key.columns.keys()) for name, table in tables.tables.items()}
    return {**keys, "alembic_version": {"version_num"}}


def tables_text(tables: Sequence[str]) -> str:
    """Name the first tables of a database in a line."""
    named = ", ".join(tables[:NAMED_TABLES])
    word = "tables" if len(tables) > 1 else "table"
    more = len(tables) - NAMED_TABLES
    if more > 0:
        named += f" and {more} more"
    return f"the {word} {named}"


class _Filtered(BaseStorage):
    """A storage that removes secrets from the attributes it stores, such as a study's arguments."""

    def set_study_user_attr(self, study_id: int, key: str, value: Any) -> None:
        super().set_study_user_attr(study_id, key, redact_values(value))  # type: ignore[safe-super]

    def set_trial_user_attr(self, trial_id: int, key: str, value: Any) -> None:
        super().set_trial_user_attr(trial_id, key, redact_values(value))  # type: ignore[safe-super]


class _Database(_Filtered, optuna.storages.RDBStorage):
    """A database."""


class _Proxy(_Filtered, optuna.storages.GrpcStorageProxy):
    """Optuna's gRPC proxy in front of a database."""


def open_proxy(url: str) -> _Proxy:
    """Make the client of Optuna's gRPC proxy at ``grpc://host:port``."""
    where = make_url(url)
    with warnings.catch_warnings(action="ignore", category=ExperimentalWarning):
        return _Proxy(host=where.host or PROXY_HOST, port=where.port or PROXY_PORT)


def connect(url: str) -> BaseStorage:
    """Open the storage at a URL of a database, or of Optuna's gRPC proxy (``grpc://host:port``)."""
    if make_url(url).get_backend_name() == GRPC:
        return open_proxy(url)
    return _open_database(url)


def _open_database(url: str) -> BaseStorage:
    """Open a database and make its tables.

    StudyError where they are of another version of Optuna.
    """
    try:
        # Another process may be making the tables of the same new database: then it fails once.
        storage = patient(_Database)(url, engine_kwargs=engine_arguments(url))
    except RuntimeError as error:
        # The tables are of another version of Optuna.
        raise StudyError(f"storage={url} cannot be read: {error}") from error
    path = database_file(url)
    # A server may go away later: then each call waits for it. A file may be removed: then each call
    # fails.
    if make_url(url).get_backend_name() != "sqlite":
        _wait_for_server(storage.engine)
    # SQLite may be given a URI of its own, which is no path.
    elif path is not None and not str(path).startswith("file:"):
        _check_file(storage.engine, path.absolute())
    return storage


def _wait_for_server(engine: Engine) -> None:
    """Let each new connection wait while the server is away.

    Each of Optuna's calls begins with a connection, which ``pool_pre_ping`` makes anew if the old
    one has ended.
    """

    @event.listens_for(engine, "do_connect")
    def connect(
        dialect: Dialect, record: object, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        errors_while_away = (dialect.loaded_dbapi.OperationalError,)
        return patient(dialect.connect, errors_while_away)(*arguments, **named)


def _check_file(engine: Engine, path: Path) -> None:
    """Let each call raise StorageGoneError if the database's file was removed or replaced.

    An open connection would go on writing to a file that has no name any more, and a new one would
    make an empty file.
    """
    first = os.stat(path)

    def check(*_: object) -> None:
        try:
            now = os.stat(path)
        except OSError as error:
            raise StorageGoneError(str(error)) from error
        if (now.st_dev, now.st_ino) != (first.st_dev, first.st_ino):
            raise StorageGoneError(f"{path} was replaced by another file")

    event.listen(engine, "do_connect", check)
    event.listen(engine, "checkout", check)


@contextmanager
def storage_errors_as_study_errors(url: str) -> Iterator[None]:
    """Turn an error of the storage at ``url`` in the body into a StudyError that names it.

    The storage may not answer, or its content may be unreadable.
    """
    try:
        yield
    except StorageGoneError as error:
        raise StorageGoneError(f"storage={url}: {error.reason}") from error
    except STORAGE_ERRORS as error:
        raise StudyError(
            f"the storage does not answer: storage={url}: {reason_of(error)}"
        ) from error
    # The JSON that Optuna reads is damaged, or not its own.
    except (ValueError, RecursionError) as error:
        raise StudyError(
            f"storage={url} holds what cannot be read: {str(error).splitlines()[0]}"
        ) from error
