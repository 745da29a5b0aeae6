"""MLflow's SQLite database, made whole or not at all.

MLflow makes its tables in 67 migrations, each of several transactions that cannot be repeated.
Of 14 processes that were killed at moments spread evenly over that, behind a file lock, 7 left a
database that no later process could use: "table _alembic_tmp_experiments already exists" and the
like (MLflow 3.17, SQLite 3.40, one kill every 0.6 s). So a lock alone is not enough: the database is
made under another name.
"""

import logging
import os
import sqlite3
import time
from contextlib import closing, suppress
from itertools import count
from pathlib import Path
from typing import Any

from alembic.script import ScriptDirectory
from filelock import FileLock
from mlflow.store.db import utils as mlflow_database
from mlflow.store.db.base_sql_model import Base

from bstune.core.errors import ConfigError
from bstune.study.storage.connection import primary_keys, tables_text
from bstune.system.files import final_name, partial_of, put_in_place, sync_file
from bstune.system.sqlite import foreign_tables

_CONTENTS = (
    "runs",
    "registered_models",
    "trace_info",
)  # tables that hold what is not to be lost, but for experiments
_ALWAYS = {"experiments", "runs"}  # tables that each of MLflow's databases has
_JOURNALS = ("-journal", "-wal", "-shm")
_LOOK_SECONDS = 1.0  # between two looks at a database that another program may be making
_log = logging.getLogger(__name__)


def make_database(path: Path) -> None:
    """Make MLflow's SQLite database under another name, then rename it; nothing if it is there.

    One that was not made to its end would break every later study: it is moved aside, if nothing is in it.
    """
    if path.exists() and not _half_made(path):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    lock, partial = path.with_name(path.name + ".lock"), partial_of(path)
    with FileLock(lock):
        broken = path.exists() and _half_made(path) and not _being_made(path)
        if broken or not path.exists():
            _remove_partials(path)
            engine = mlflow_database.create_sqlalchemy_engine_with_retry(f"sqlite:///{partial}")  # type: ignore[no-untyped-call]
            mlflow_database._initialize_tables(engine)  # type: ignore[no-untyped-call]
            engine.dispose()
            aside = next(
                one
                for i in count(1)
                if not os.path.lexists(one := path.with_name(f"{path.name}.incomplete-{i}"))
            )
            _rename(
                path, aside
            )  # a journal by itself, too: it would be taken for the new database's
            with partial.open("rb+") as made:
                sync_file(made)
            put_in_place(partial, path)
            if broken:
                what = "was not made to its end and holds no runs: it is now"
                _log.warning(
                    "MLflow: the database %s %s %s, and a new one was made", path, what, aside.name
                )
        if not lock.stat().st_size:  # a user's file of this name is not empty
            lock.unlink(missing_ok=True)  # who waits for it finds the database and makes none


def _remove_partials(path: Path) -> None:
    """Remove what processes that were killed left as they made this database; the caller holds its lock."""
    for found in path.parent.iterdir():
        name = found.name
        for end in _JOURNALS:
            name = name.removesuffix(end)
        of_this = final_name(found.with_name(name)) == final_name(partial_of(path))
        if of_this and found.is_file() and not found.is_symlink():
            found.unlink(missing_ok=True)


def check_database(path: Path) -> None:
    """Refuse, as a ConfigError, what is no regular file, and a database that another program made."""
    then = "choose another with mlflow.uri=sqlite:///PATH, or log nothing with mlflow.enabled=false"
    if not path.is_file():
        found = "a link to nothing" if path.is_symlink() else "no regular file"
        raise ConfigError(f"MLflow's database {path} is {found}: {then}")
    try:
        foreign = foreign_tables(path, primary_keys(Base.metadata), _ALWAYS)
    except sqlite3.Error:  # locked, or no database: sending says so once, and the study goes on
        return
    if foreign:
        raise ConfigError(
            f"MLflow's database {path} is another program's, with {tables_text(foreign)}, and nothing is added to it: "
            f"{then}"
        )


def damage(path: Path) -> str | None:
    """Return what is wrong with the content of MLflow's SQLite database; None if nothing is, or it cannot be read."""
    try:
        with closing(
            sqlite3.connect(f"{path.as_uri()}?mode=rw", uri=True, timeout=_LOOK_SECONDS)
        ) as connection:
            (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            if found != "ok":
                return str(found).splitlines()[-1]
            rows = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            missing = sorted({*_ALWAYS} - {name for (name,) in rows})
            return f"it lacks {tables_text(missing)}" if missing else None
    except sqlite3.OperationalError:  # locked, or away
        return None
    except sqlite3.DatabaseError as error:
        return str(error)


def _rename(path: Path, name: Path) -> None:
    """Rename what there is of a SQLite database and its journals."""
    for end in (*_JOURNALS, ""):
        with suppress(FileNotFoundError):
            path.with_name(path.name + end).rename(name.with_name(name.name + end))


def _being_made(path: Path) -> bool:
    """Return whether another program, as ``mlflow ui``, changes the file."""
    before = path.stat()
    time.sleep(_LOOK_SECONDS)
    after = path.stat()
    return (before.st_mtime_ns, before.st_size) != (after.st_mtime_ns, after.st_size)


def _half_made(path: Path) -> bool:
    """Return whether a SQLite file is what MLflow leaves if it is ended as it makes its tables, with nothing in it."""
    try:
        with closing(
            sqlite3.connect(f"{path.as_uri()}?mode=rw", uri=True, timeout=_LOOK_SECONDS)
        ) as connection:

            def rows(what: str) -> list[Any]:
                return [row[0] for row in connection.execute(f"SELECT {what}")]

            tables = set(rows("name FROM sqlite_master WHERE type = 'table'"))
            versions = (
                rows("version_num FROM alembic_version") if "alembic_version" in tables else []
            )
            config = mlflow_database._get_alembic_config("")  # type: ignore[no-untyped-call]
            scripts = ScriptDirectory.from_config(config)
            if versions:
                known = {script.revision for script in scripts.walk_revisions()}
                own = not {*versions} & {*scripts.get_heads()} and {*versions} <= known
            else:
                own = tables <= {*Base.metadata.tables, "alembic_version"}
            contents = [f"1 FROM {table}" for table in _CONTENTS if table in tables]
            contents += (
                ["1 FROM experiments WHERE experiment_id != 0"] if "experiments" in tables else []
            )
            return own and not any(rows(what + " LIMIT 1") for what in contents)
    except sqlite3.Error:  # locked, or no database: MLflow says what is wrong with it
        return False
