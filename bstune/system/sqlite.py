"""Whose a SQLite database is, found by its tables before a program that would add its own opens it."""

import sqlite3
from collections.abc import Collection, Mapping
from contextlib import closing
from pathlib import Path

# For which a database that another process has locked is waited for.
LOCKED_SECONDS = 1.0
# The tables and views that a database's owner made.
NAMES_QUERY = (
    "SELECT name FROM sqlite_master WHERE type IN ('table', 'view') "
    "AND name NOT LIKE 'sqlite@_%' ESCAPE '@'"
)

# Columns of the primary keys, by table.
Keys = Mapping[str, Collection[str]]


def foreign_tables(
    path: Path, keys: Keys, required: Collection[str], seconds: float = LOCKED_SECONDS
) -> list[str]:
    """Name the tables of a database that a program did not make.

    None where it made the database, or may make it.

    A program made what has its ``required`` tables, whatever others are beside them, and what has
    no table but some of its own, as where it was killed meanwhile. Nothing is written.

    Args:
        path: a regular file; an empty one is a database without tables.
        keys: of all tables that the program makes: a table of the same name with another key is
            another's.
        required: the tables that each of its databases has.
        seconds: for which a locked database is waited for.

    Raises:
        sqlite3.Error: if the file is no database, or is locked.
    """
    # mode=rw: what a killed process left of a transaction is rolled back, and no file is made.
    uri = f"{path.absolute().as_uri()}?mode=rw"
    with closing(sqlite3.connect(uri, uri=True, timeout=seconds)) as connection:
        tables = {str(row[0]) for row in connection.execute(NAMES_QUERY)}
        made = set[str]()
        for table in tables:
            rows = connection.execute("SELECT name FROM pragma_table_info(?)", (table,))
            columns = {str(row[0]) for row in rows}
            if table in keys and columns.issuperset(keys[table]):
                made.add(table)
    if made.issuperset(required):
        return []
    return sorted(tables - made)
