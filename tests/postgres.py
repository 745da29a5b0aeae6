"""A PostgreSQL server of a test's own, which it may stop and start again."""

import os
import pwd
import random
import shutil
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

# Debian's programs are not on the path.
FOLDERS = [*sorted(map(str, Path("/usr/lib/postgresql").glob("*/bin"))), os.environ.get("PATH", "")]
INITDB = shutil.which("initdb", path=os.pathsep.join(FOLDERS))
# It does not start for a user without a name.
if os.geteuid() not in [user.pw_uid for user in pwd.getpwall()]:
    INITDB = None


def free_port():
    """A port below those that clients get by chance: one would take it while the server is down."""
    for port in random.sample(range(15_000, 30_000), 100):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise OSError("no port is free")


class Postgres:
    """A server whose data lie in a folder that its user may enter."""

    def __init__(self, folder):
        self._folder = folder
        # The server refuses to run as root.
        self._user = {"user": "postgres", "group": "postgres"} if os.geteuid() == 0 else {}
        if self._user:
            shutil.chown(folder, "postgres", "postgres")
        self._run("initdb", "-U", "bstune", "-A", "trust", "-N", "-E", "UTF8", "--locale=C")
        self.port = free_port()
        self._databases = 0
        self.start()

    def _run(self, program, *arguments):
        subprocess.run(
            [Path(INITDB).with_name(program), *arguments],
            cwd="/", env={**os.environ, "PGDATA": str(self._folder / "data")}, check=True,
            stdout=subprocess.DEVNULL, timeout=60, **self._user,
        )  # fmt: skip

    def new_url(self):
        """The URL of a new database."""
        self._databases += 1
        name = f"test{self._databases}"
        self.query(f"CREATE DATABASE {name}")
        return f"postgresql+psycopg://bstune@127.0.0.1:{self.port}/{name}"

    def query(self, statement, database="postgres"):
        address = f"host=127.0.0.1 port={self.port} user=bstune dbname={database}"
        self._run("psql", "-qX", "-v", "ON_ERROR_STOP=1", "-d", address, "-c", statement)

    def start(self):
        options = f"-p {self.port} -c listen_addresses=127.0.0.1 -k {self._folder} -F"
        self._run("pg_ctl", "-l", str(self._folder / "log"), "-w", "-o", options, "start")

    def stop(self):
        self._run("pg_ctl", "-m", "fast", "-w", "stop")
