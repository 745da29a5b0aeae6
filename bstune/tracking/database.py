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
from sqlalchemy import event

from bstune.core.errors import ConfigError
from bstune.study.storage.connection import primary_keys, tables_text
from bstune.system.files import final_name, partial_of, put_in_place, sync_file
from bstune.system.sqlite import foreign_tables
from bstune.tracking.address import ALWAYS

# A database with a row in one of these tables must not be lost. Experiments are looked at apart, as
# MLflow makes one by itself.
_CONTENTS = ("runs", "registered_models", "trace_info")
# Suffixes of the files that SQLite writes beside a database.
_JOURNALS = ("-journal", "-wal", "-shm")
# Seconds between two looks at a database that another program may be making, and the most that a
# look waits for its lock.
_LOOK_SECONDS = 1.0
_log = logging.getLogger(__name__)


def make_database(path: Path) -> None:
    """Make MLflow's SQLite database under another name, then rename it, unless it is there.

    Where a process was killed as it made the database, MLflow cannot use what is left. If that has
    no runs, it is moved aside, and a new database takes its place.
    """
    if path.exists() and not _is_half_made(path):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_name(path.name + ".lock")
    partial = partial_of(path)
    with FileLock(lock):
        # Another process may have made it while this one waited for the lock. A program without
        # the lock, such as ``mlflow ui``, may still be making it.
        is_broken = path.exists() and _is_half_made(path) and not _is_being_made(path)
        if is_broken or not path.exists():
            _remove_partials(path)
            connect = mlflow_database.create_sqlalchemy_engine_with_retry
            engine = connect(f"sqlite:///{partial}")  # type: ignore[no-untyped-call]
            event.listen(engine, "connect", _without_syncs)
            # The pool may hold a connection from before.
            engine.dispose()
            mlflow_database._initialize_tables(engine)  # type: ignore[no-untyped-call]
            engine.dispose()
            aside = _free_name(path)
            # A journal without its database is moved, too: it would be taken for the new one's.
            _rename_with_journals(path, aside)
            # The new file's bytes are on the disk before it gets the database's name.
            with partial.open("rb+") as made:
                sync_file(made)
            put_in_place(partial, path)
            if is_broken:
                _log.warning(
                    "MLflow: the database %s was not made to its end and holds no runs: it is now "
                    "%s, and a new one was made",
                    path,
                    aside.name,
                )
        # A lock file is empty: one with bytes in it is a file of the user's and stays. Another
        # process that waits for the lock finds the database when it gets it, and makes none.
        if not lock.stat().st_size:
            lock.unlink(missing_ok=True)


def _without_syncs(connection: sqlite3.Connection, record: object) -> None:
    """Let a connection's transactions wait for no disk.

    With their syncs MLflow's migrations took 7 s on a busy disk, for 1.2 s of a processor. A
    partial file is of no use after a crash, and is synced once it is whole.
    """
    connection.execute("PRAGMA synchronous=OFF")
    connection.execute("PRAGMA journal_mode=MEMORY")


def _free_name(path: Path) -> Path:
    """Give a path beside a database that nothing has yet, to move the database to."""
    for i in count(1):
        name = path.with_name(f"{path.name}.incomplete-{i}")
        if not os.path.lexists(name):
            break
    return name


def _remove_partials(path: Path) -> None:
    """Remove the partial files of processes that were killed as they made this database.

    The caller must hold the database's lock.
    """
    # A partial file's name has in it the name of the database that it was to become, or the end of
    # a long one. This database's name is cut in the same way.
    name_in_partials = final_name(partial_of(path))
    for file in path.parent.iterdir():
        # SQLite's journals have the name of their file, and a suffix.
        name = file.name
        for suffix in _JOURNALS:
            name = name.removesuffix(suffix)
        # For a file that is not partial, final_name gives None.
        is_of_this = final_name(file.with_name(name)) == name_in_partials
        if is_of_this and file.is_file() and not file.is_symlink():
            file.unlink(missing_ok=True)


def check_database(path: Path) -> None:
    """Refuse a path that is not a regular file, and a database that another program made.

    A refusal is a ConfigError. A database that cannot be read now is not refused.
    """
    then = "choose another with mlflow.uri=sqlite:///PATH, or log nothing with mlflow.enabled=false"
    if path.is_symlink() and not path.is_file():
        raise ConfigError(f"MLflow's database {path} is a link to nothing: {then}")
    if not path.is_file():
        raise ConfigError(f"MLflow's database {path} is no regular file: {then}")
    try:
        foreign = foreign_tables(path, primary_keys(Base.metadata), ALWAYS)
    except sqlite3.Error:
        # The file is locked, or not a database. Sending says so once, and the study goes on.
        return
    if foreign:
        raise ConfigError(
            f"MLflow's database {path} is another program's, with {tables_text(foreign)}, and "
            f"nothing is added to it: {then}"
        )


def _connect(path: Path) -> sqlite3.Connection:
    """Open a SQLite database that is there."""
    # Without mode=rw SQLite would make a database that is not there.
    return sqlite3.connect(f"{path.as_uri()}?mode=rw", uri=True, timeout=_LOOK_SECONDS)


def _column(connection: sqlite3.Connection, query: str) -> list[object]:
    """Give the values of a query's first column."""
    return [row[0] for row in connection.execute(query)]


def _tables(connection: sqlite3.Connection) -> set[str]:
    """Give the names of a database's tables."""
    names = _column(connection, "SELECT name FROM sqlite_master WHERE type = 'table'")
    return {str(name) for name in names}


def damage(path: Path) -> str | None:
    """Say in words how MLflow's SQLite database is damaged.

    None where it is whole, and where it cannot be looked at because it is locked or away.
    """
    try:
        with closing(_connect(path)) as connection:
            (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            if verdict != "ok":
                # A line that names the database may come before the one on the damage.
                return str(verdict).splitlines()[-1]
            # Each of MLflow's databases has these tables, whatever its version.
            missing = sorted(ALWAYS.keys() - _tables(connection))
    except sqlite3.OperationalError:
        # The database is locked, or away.
        return None
    except sqlite3.DatabaseError as error:
        return str(error)
    if not missing:
        return None
    return f"it lacks {tables_text(missing)}"


def _rename_with_journals(path: Path, name: Path) -> None:
    """Rename a SQLite database and its journals to ``name``, as far as they are there."""
    # The database goes last: if the process ends before, the next one finds it and goes on.
    for suffix in (*_JOURNALS, ""):
        with suppress(FileNotFoundError):
            path.with_name(path.name + suffix).rename(name.with_name(name.name + suffix))


def _is_being_made(path: Path) -> bool:
    """Whether another program, such as ``mlflow ui``, changes the file within ``_LOOK_SECONDS``."""
    earlier = path.stat()
    time.sleep(_LOOK_SECONDS)
    later = path.stat()
    return (earlier.st_mtime_ns, earlier.st_size) != (later.st_mtime_ns, later.st_size)


def _is_half_made(path: Path) -> bool:
    """Whether a SQLite file is the one that MLflow leaves if it is killed as it makes its tables.

    Such a file has a part of the tables, and no runs.
    """
    try:
        with closing(_connect(path)) as connection:
            tables = _tables(connection)
            versions = set[str]()
            # In this table a database notes the migrations that it has had.
            if "alembic_version" in tables:
                known = _column(connection, "SELECT version_num FROM alembic_version")
                versions.update(map(str, known))
            return _is_unfinished(tables, versions) and not _holds_anything(connection, tables)
    except sqlite3.Error:
        # The file is locked, or not a database: MLflow will say so.
        return False


def _is_unfinished(tables: set[str], versions: set[str]) -> bool:
    """Whether a database has had only a part of MLflow's migrations.

    ``tables``: the names of its tables. ``versions``: the migrations that it says it has had. False
    for a database with anything that is not MLflow's.
    """
    # MLflow makes its first tables before it writes down any migration.
    if not versions:
        return tables <= {*Base.metadata.tables, "alembic_version"}
    config = mlflow_database._get_alembic_config("")  # type: ignore[no-untyped-call]
    scripts = ScriptDirectory.from_config(config)
    known = {script.revision for script in scripts.walk_revisions()}
    is_finished = bool(versions & {*scripts.get_heads()})
    return not is_finished and versions <= known


def _holds_anything(connection: sqlite3.Connection, tables: set[str]) -> bool:
    """Whether MLflow's database holds a run, a model, a trace or an experiment of somebody."""
    rows = [f"1 FROM {table}" for table in _CONTENTS if table in tables]
    if "experiments" in tables:
        # MLflow's own experiment, number 0, is there from the beginning.
        rows.append("1 FROM experiments WHERE experiment_id != 0")
    return any(_column(connection, f"SELECT {row} LIMIT 1") for row in rows)
