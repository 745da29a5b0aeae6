"""MLflow's SQLite database, made whole or not at all.

MLflow makes its tables in 67 migrations, each of several transactions that cannot be repeated.
Of 14 processes that were killed at moments spread evenly over that, behind a file lock, 7 left a
database that no later process could use: "table _alembic_tmp_experiments already exists" and the
like (MLflow 3.17, SQLite 3.40, one kill every 0.6 s). So a lock alone is not enough: the database
is made under another name.
"""

import os
import sqlite3
from itertools import count
from pathlib import Path

from filelock import FileLock
from mlflow.store.db import utils as mlflow_database
from mlflow.store.db.base_sql_model import Base
from sqlalchemy import event

from bstune.core.errors import ConfigError
from bstune.study.storage.connection import primary_keys, tables_text
from bstune.system.files import final_name, partial_of, put_in_place, sync_file
from bstune.system.sqlite import foreign_tables
from bstune.tracking.address import ALWAYS

# Suffixes of the files that SQLite writes beside a database.
_JOURNALS = ("-journal", "-wal", "-shm")


def make_database(path: Path) -> None:
    """Make MLflow's SQLite database under another name, then rename it, unless it is there."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_name(path.name + ".lock")
    partial = partial_of(path)
    with FileLock(lock):
        # Another process may have made it while this one waited for the lock.
        if not path.exists():
            _remove_partials(path)
            connect = mlflow_database.create_sqlalchemy_engine_with_retry
            engine = connect(f"sqlite:///{partial}")  # type: ignore[no-untyped-call]
            event.listen(engine, "connect", _without_syncs)
            # The pool may hold a connection from before.
            engine.dispose()
            mlflow_database._initialize_tables(engine)  # type: ignore[no-untyped-call]
            engine.dispose()
            # A journal without its database would be taken for the new one's. It may hold what the
            # database lacks that was moved away, so it stays, under another name.
            for suffix in _JOURNALS:
                journal = path.with_name(path.name + suffix)
                if journal.exists():
                    journal.rename(_free_name(journal))
            # The new file's bytes are on the disk before it gets the database's name.
            with partial.open("rb+") as made:
                sync_file(made)
            put_in_place(partial, path)
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
    """Give a path beside a file that nothing has yet, to move the file to."""
    for number in count(1):
        name = path.with_name(f"{path.name}.aside-{number}")
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
