"""A PostgreSQL server of a test's own, which it may stop, freeze and start again."""

import os
import random
import shutil
import signal
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

# Debian's programs are not on the path.
PROGRAMS = sorted(Path("/usr/lib/postgresql").glob("*/bin"))


def program(name: str) -> str | None:
    """The path of one of PostgreSQL's programs; None where it is not installed."""
    return shutil.which(
        name, path=os.pathsep.join([*map(str, reversed(PROGRAMS)), os.environ.get("PATH", "")])
    )


def free_port() -> int:
    """A port that no client gets by chance: one that connects to a stopped server's would take it."""
    # Below the ports from which a system gives clients theirs, 32768 on Linux.
    for port in random.sample(range(15_000, 30_000), 100):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise OSError("no port is free")


class Postgres:
    """A server on a free port of this machine, whose data lie in a folder that its user may enter."""

    def __init__(self, folder: Path) -> None:
        self._data = folder / "data"
        self._socket = folder
        # The server refuses to run as root.
        self._user = {"user": "postgres", "group": "postgres"} if os.geteuid() == 0 else {}
        if self._user:
            shutil.chown(folder, "postgres", "postgres")
        # "-N": what is written need not be waited for.
        options = ("-U", "bstune", "-A", "trust", "-N", "-E", "UTF8", "--locale=C")
        self._run("initdb", "-D", str(self._data), *options)
        self.port = free_port()
        self._database = "postgres"
        self._made = 0
        self.start()

    def _run(self, name: str, *arguments: str) -> None:
        path = program(name)
        assert path is not None
        done = subprocess.run(
            [path, *arguments], cwd="/", stdout=subprocess.DEVNULL, timeout=60, **self._user
        )
        assert done.returncode == 0, f"{name} ended with status {done.returncode}"

    @staticmethod
    def installed() -> bool:
        """Whether this machine has the server."""
        return program("initdb") is not None

    def use_new_database(self) -> None:
        """Let :meth:`url` be that of a new database."""
        self._made += 1
        self._database = f"test{self._made}"
        self.query(f"CREATE DATABASE {self._database}")

    def url(self, database: str | None = None) -> str:
        """The URL of a database, for the driver that the tests install; the server's own is empty at first."""
        return f"postgresql+psycopg2://bstune@127.0.0.1:{self.port}/{database or self._database}"

    def query(self, statement: str) -> None:
        """Run a statement by itself, such as CREATE DATABASE."""
        address = f"host=127.0.0.1 port={self.port} user=bstune dbname=postgres"
        self._run("psql", "-qX", "-v", "ON_ERROR_STOP=1", "-d", address, "-c", statement)

    def end_connections(self) -> None:
        """End all connections, as an administrator does."""
        self.query(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
        )

    def start(self) -> None:
        """Start the server and wait until it answers."""
        options = (
            f"-p {self.port} -c listen_addresses=127.0.0.1 -k {self._socket} -F -c "
            "max_connections=100"
        )
        self._run(
            "pg_ctl",
            "-D",
            str(self._data),
            "-l",
            str(self._socket / "log"),
            "-w",
            "-o",
            options,
            "start",
        )

    def stop(self, mode: str = "fast") -> None:
        """End the server: ``fast`` ends its connections, ``immediate`` is like a crash."""
        self.thaw()
        self._run("pg_ctl", "-D", str(self._data), "-m", mode, "-w", "stop")

    def _processes(self) -> list[int]:
        """The process numbers of the server and of its connections."""
        server = int((self._data / "postmaster.pid").read_text().split()[0])
        return [
            server,
            *map(int, Path(f"/proc/{server}/task/{server}/children").read_text().split()),
        ]

    def freeze(self) -> None:
        """Let it answer nothing, as where its disk hangs; connections are still taken by the system."""
        for process in self._processes():
            os.kill(process, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        with suppress(FileNotFoundError):
            for process in self._processes():
                os.kill(process, signal.SIGCONT)
