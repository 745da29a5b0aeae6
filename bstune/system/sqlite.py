"""Whether a SQLite database is another program's, by its tables, before one adds its own."""

import sqlite3
from collections.abc import Collection, Mapping
from contextlib import closing
from pathlib import Path

# Seconds for which a database that another process has locked is waited for.
LOCKED_SECONDS = 1.0
# The tables and views that a database's owner made.
NAMES_QUERY = (
    "SELECT name FROM sqlite_master WHERE type IN ('table', 'view') "
    "AND name NOT LIKE 'sqlite@_%' ESCAPE '@'"
)

# The columns of the primary key of each table, by the table's name.
Keys = Mapping[str, Collection[str]]


def foreign_tables(
    path: Path, keys: Keys, required: Collection[str], seconds: float = LOCKED_SECONDS
) -> list[str]:
    """List the tables by which a database is not a program's own; empty if the program may use it.

    A program may use a database that has the ``required`` tables, whatever others are beside them.
    It may also use one without any table of others: an empty one, or one in which the program was
    killed before it had made all its tables. Nothing is written.

    Args:
        path: a regular file; an empty one is a database without tables.
        keys: the primary keys of all tables that the program makes. A table of the same name with
            another key is not the program's.
        required: the tables that each of its databases has.
        seconds: for which a locked database is waited for.

    Raises:
        sqlite3.Error: if the file is no database, or is locked.
    """
    with closing(_opened(path, seconds)) as connection:
        tables = {str(row[0]) for row in connection.execute(NAMES_QUERY)}
        own_tables = set[str]()
        for table in tables:
            rows = connection.execute("SELECT name FROM pragma_table_info(?)", (table,))
            columns = {str(row[0]) for row in rows}
            if table in keys and columns.issuperset(keys[table]):
                own_tables.add(table)
    if own_tables.issuperset(required):
        return []
    return sorted(tables - own_tables)


def has_table(path: Path, name: str, seconds: float = LOCKED_SECONDS) -> bool:
    """Whether a database has a table of that name.

    Args:
        path: a regular file; an empty one is a database without tables.
        name: the table's.
        seconds: for which a locked database is waited for.

    Raises:
        sqlite3.Error: if the file is no database, or is locked.
    """
    with closing(_opened(path, seconds)) as connection:
        return any(row[0] == name for row in connection.execute(NAMES_QUERY))


def _opened(path: Path, seconds: float) -> sqlite3.Connection:
    """Open a database that is there.

    ``seconds`` is how long a locked one is waited for.
    """
    # mode=rw makes no file. Unlike mode=ro it rolls back the transaction of a killed process.
    uri = f"{path.absolute().as_uri()}?mode=rw"
    return sqlite3.connect(uri, uri=True, timeout=seconds)
