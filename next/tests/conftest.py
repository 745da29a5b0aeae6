"""What holds for all tests: none of the user's settings, and databases that write at once."""

import os
import sqlite3

from sqlalchemy import Engine, event

# Nothing of the user's own settings decides a test.
os.environ.pop("MLFLOW_TRACKING_URI", None)


@event.listens_for(Engine, "connect")
def leave_flushing_to_the_system(connection, _):
    """What a killed process has written is there; a machine that loses power is not tested."""
    if isinstance(connection, sqlite3.Connection):
        connection.execute("PRAGMA synchronous = OFF")
