"""MLflow's SQLite database, made whole or not at all.

MLflow makes its tables in 67 migrations, each of several transactions that cannot be repeated.
Of 14 processes that were killed at moments spread evenly over that, behind a file lock, 7 left a
database that no later process could use: "table _alembic_tmp_experiments already exists" and the
like (MLflow 3.17, SQLite 3.40, one kill every 0.6 s). So a lock alone is not enough: the database
is made under another name.
"""

import logging
import os
import sqlite3
import time
from contextlib import closing, suppress
from itertools import count
from pathlib import Path

from alembic.script import ScriptDirectory
from filelock import FileLock
from mlflow.store.db import utils as mlflow_database
from mlflow.store.db.base_sql_model import Base

from bstune.core.errors import ConfigError
from bstune.study.storage.connection import primary_keys, tables_text
from bstune.system.files import final_name, partial_of, put_in_place, sync_file
from bstune.system.sqlite import foreign_tables

# Tables that hold what is not to be lost, but for experiments: MLflow makes one by itself.
_CONTENTS = ("runs", "registered_models", "trace_info")
# Tables that each of MLflow's databases has.
_ALWAYS = {"experiments", "runs"}
_JOURNALS = ("-journal", "-wal", "-shm")
# Between two looks at a database that another program may be making, and of a wait for its lock.
_LOOK_SECONDS = 1.0
_log = logging.getLogger(__name__)


def make_database(path: Path) -> None:
    """Make MLflow's SQLite database under another name, then rename it; nothing if it is there.

    One that was not made to its end would break every later study: it is moved aside, if nothing is
    in it.
    """
    if path.exists() and not _half_made(path):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_name(path.name + ".lock")
    partial = partial_of(path)
    with FileLock(lock):
        # Another process may have made it while this one waited for the lock.
        broken = path.exists() and _half_made(path) and not _being_made(path)
        if broken or not path.exists():
            _remove_partials(path)
            connect = mlflow_database.create_sqlalchemy_engine_with_retry
            engine = connect(f"sqlite:///{partial}")  # type: ignore[no-untyped-call]
            mlflow_database._initialize_tables(engine)  # type: ignore[no-untyped-call]
            engine.dispose()
            aside = _free_name(path)
            # A journal by itself, too: it would be taken for the new database's.
            _rename(path, aside)
            with partial.open("rb+") as made:
                sync_file(made)
            put_in_place(partial, path)
            if broken:
                reason = "was not made to its end and holds no runs: it is now"
                _log.warning(
                    "MLflow: the database %s %s %s, and a new one was made",
                    path,
                    reason,
                    aside.name,
                )
        # A user's file of this name is not empty.
        if not lock.stat().st_size:
            # Who waits for it finds the database and makes none.
            lock.unlink(missing_ok=True)


def _free_name(path: Path) -> Path:
    """Give a name beside a database for one that is moved aside; nothing has it."""
    for i in count(1):
        name = path.with_name(f"{path.name}.incomplete-{i}")
        if not os.path.lexists(name):
            break
    return name


def _remove_partials(path: Path) -> None:
    """Remove what processes that were killed left as they made this database.

    The caller holds its lock.
    """
    for file in path.parent.iterdir():
        name = file.name
        for suffix in _JOURNALS:
            name = name.removesuffix(suffix)
        is_of_this = final_name(file.with_name(name)) == final_name(partial_of(path))
        if is_of_this and file.is_file() and not file.is_symlink():
            file.unlink(missing_ok=True)


def check_database(path: Path) -> None:
    """Refuse, as a ConfigError, no regular file, and a database that another program made."""
    then = "choose another with mlflow.uri=sqlite:///PATH, or log nothing with mlflow.enabled=false"
    if path.is_symlink() and not path.is_file():
        raise ConfigError(f"MLflow's database {path} is a link to nothing: {then}")
    if not path.is_file():
        raise ConfigError(f"MLflow's database {path} is no regular file: {then}")
    try:
        foreign = foreign_tables(path, primary_keys(Base.metadata), _ALWAYS)
    except sqlite3.Error:
        # Locked, or no database: sending says so once, and the study goes on.
        return
    if foreign:
        raise ConfigError(
            f"MLflow's database {path} is another program's, with {tables_text(foreign)}, and "
            f"nothing is added to it: {then}"
        )


def _connected(path: Path) -> sqlite3.Connection:
    # Without mode=rw SQLite would make a database that is not there.
    return sqlite3.connect(f"{path.as_uri()}?mode=rw", uri=True, timeout=_LOOK_SECONDS)


def _column(connection: sqlite3.Connection, query: str) -> list[object]:
    """Give the values of a query's first column."""
    return [row[0] for row in connection.execute(query)]


def _tables(connection: sqlite3.Connection) -> set[str]:
    names = _column(connection, "SELECT name FROM sqlite_master WHERE type = 'table'")
    return {str(name) for name in names}


def damage(path: Path) -> str | None:
    """Say what is wrong with the content of MLflow's SQLite database.

    None if nothing is, or it cannot be read.
    """
    try:
        with closing(_connected(path)) as connection:
            (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            if verdict != "ok":
                return str(verdict).splitlines()[-1]
            missing = sorted(_ALWAYS - _tables(connection))
    except sqlite3.OperationalError:
        # Locked, or away.
        return None
    except sqlite3.DatabaseError as error:
        return str(error)
    if not missing:
        return None
    return f"it lacks {tables_text(missing)}"


def _rename(path: Path, name: Path) -> None:
    """Rename what there is of a SQLite database and its journals."""
    for suffix in (*_JOURNALS, ""):
        with suppress(FileNotFoundError):
            path.with_name(path.name + suffix).rename(name.with_name(name.name + suffix))


def _being_made(path: Path) -> bool:
    """Whether another program, as ``mlflow ui``, changes the file."""
    earlier = path.stat()
    time.sleep(_LOOK_SECONDS)
    later = path.stat()
    return (earlier.st_mtime_ns, earlier.st_size) != (later.st_mtime_ns, later.st_size)


def _half_made(path: Path) -> bool:
    """Whether a SQLite file is what MLflow leaves if it is ended as it makes its tables.

    Nothing is in such a file.
    """
    try:
        with closing(_connected(path)) as connection:
            tables = _tables(connection)
            versions = set[str]()
            if "alembic_version" in tables:
                known = _column(connection, "SELECT version_num FROM alembic_version")
                versions.update(map(str, known))
            return _is_unfinished(tables, versions) and not _holds_anything(connection, tables)
    except sqlite3.Error:
        # Locked, or no database: MLflow says what is wrong with it.
        return False


def _is_unfinished(tables: set[str], versions: set[str]) -> bool:
    """Whether a database has come a part of the way of MLflow's migrations, and has no more.

    ``versions``: of the migrations that it says it has had.
    """
    if not versions:
        return tables <= {*Base.metadata.tables, "alembic_version"}
    config = mlflow_database._get_alembic_config("")  # type: ignore[no-untyped-call]
    scripts = ScriptDirectory.from_config(config)
    known = {script.revision for script in scripts.walk_revisions()}
    is_finished = bool(versions & {*scripts.get_heads()})
    return not is_finished and versions <= known


def _holds_anything(connection: sqlite3.Connection, tables: set[str]) -> bool:
    rows = [f"1 FROM {table}" for table in _CONTENTS if table in tables]
    if "experiments" in tables:
        # MLflow's own is there from the beginning.
        rows.append("1 FROM experiments WHERE experiment_id != 0")
    return any(_column(connection, f"SELECT {row} LIMIT 1") for row in rows)
