"""A MariaDB server of a test's own, which speaks MySQL's protocol: it may be stopped, frozen and started again."""

import os
import shutil
import signal
import subprocess
import threading
from contextlib import closing, suppress
from pathlib import Path

from postgres import free_port

with suppress(ImportError):  # its tests are skipped
    import pymysql

PROGRAM = shutil.which("mariadbd", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"]))
OPTIONS = (
    "--no-defaults",
    "--skip-grant-tables",
    "--bind-address=127.0.0.1",
    "--innodb-flush-log-at-trx-commit=2",
)


class MariaDB:
    """A server on a free port of this machine, with its data in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.port = folder, free_port()
        (folder / "data").mkdir()
        self.start()
        self.query("CREATE DATABASE studies")

    @staticmethod
    def installed() -> bool:
        """Return whether this machine has the server."""
        return PROGRAM is not None

    def url(self, database: str = "studies") -> str:
        """Return the URL of a database, for the driver that the tests install; this one is empty at first."""
        return f"mysql+pymysql://root@127.0.0.1:{self.port}/{database}"

    def query(self, statement: str) -> list[tuple]:
        """Run a statement by itself, such as CREATE DATABASE, and return its rows."""
        with closing(pymysql.connect(host="127.0.0.1", port=self.port, user="root")) as connection:
            cursor = connection.cursor()
            cursor.execute(statement)
            return list(cursor.fetchall())

    def end_connections(self) -> None:
        """End all connections, as an administrator does."""
        for (number,) in self.query(
            "SELECT id FROM information_schema.processlist WHERE id <> connection_id()"
        ):
            with suppress(pymysql.err.OperationalError):  # it has ended meanwhile
                self.query(f"KILL {number}")

    def start(self) -> None:
        """Start the server and wait until it answers."""
        user = ["--user=root"] if os.geteuid() == 0 else []
        places = [
            f"--datadir={self._folder}/data",
            f"--socket={self._folder}/socket",
            f"--port={self.port}",
        ]
        with (self._folder / "log").open("a") as log:
            self._process = subprocess.Popen(
                [PROGRAM, *OPTIONS, *user, *places], stdout=log, stderr=log
            )
        for _ in range(600):
            with suppress(pymysql.err.OperationalError):
                self.query("SELECT 1")
                return
            threading.Event().wait(0.1)
        raise TimeoutError((self._folder / "log").read_text())

    def stop(self, mode: str = "fast") -> None:
        """End the server: ``fast`` ends its connections, ``immediate`` is like a crash."""
        self.thaw()
        self._process.send_signal(signal.SIGKILL if mode == "immediate" else signal.SIGTERM)
        self._process.wait(60)

    def freeze(self) -> None:
        """Let it answer nothing, as where its disk hangs; connections are still taken by the system."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self._process.send_signal(signal.SIGCONT)
