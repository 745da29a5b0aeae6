"""A container's user: a number without a name, and a home that is small, or none."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from bstune.system import user

NAMELESS = 123456
# It may read what root may, as the interpreter may lie in root's home, and write nothing of others.
AS_NAMELESS = ("setpriv", "--reuid", str(NAMELESS), "--regid", str(NAMELESS), "--clear-groups")
AS_NAMELESS += tuple(
    f"--{kind}={caps}"
    for kind, caps in (
        ("inh-caps", "-all,+dac_read_search"),
        ("ambient-caps", "-all,+dac_read_search"),
        ("bounding-set", "-all,+dac_read_search"),
    )
)


@pytest.mark.parametrize("error", [KeyError, OSError, ImportError])
def test_a_user_without_a_name_has_a_number(monkeypatch, error):
    def getuser():
        raise error

    monkeypatch.setattr(user.getpass, "getuser", getuser)
    environment = {}
    user.name_user(environment)
    assert user.user_name() == environment["LOGNAME"] == f"uid-{os.getuid()}"


def test_a_user_with_a_name_keeps_it(monkeypatch):
    monkeypatch.setattr(user.getpass, "getuser", lambda: "me")
    environment = {}
    user.name_user(environment)
    assert (user.user_name(), environment) == ("me", {})


@pytest.fixture
def home():
    """A home on a tmpfs of a megabyte, or one that is not there where none can be mounted."""
    with tempfile.TemporaryDirectory(prefix="bstune-home-") as folder:
        os.chmod(folder, 0o711)  # noqa: S103 (another user is to reach what is in it)
        path = Path(folder, "home")
        path.mkdir()
        options = f"size=1m,uid={NAMELESS}"
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", path], capture_output=True, check=False
        )
        if mounted.returncode != 0:
            path.rmdir()
        yield path
        if mounted.returncode == 0:
            subprocess.run(["umount", "-l", path], check=True)


@pytest.mark.soak
def test_the_quick_start_runs_for_a_user_without_a_name(home):
    if os.getuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root and setpriv to become a user without a name")
    with tempfile.TemporaryDirectory(prefix="bstune-nameless-") as folder:
        os.chown(folder, NAMELESS, NAMELESS)
        environment = {"PATH": os.environ["PATH"], "HOME": str(home)}
        options = ("+workload=digits", "search.trials=6", "hardware.seconds=2")
        run = subprocess.run(
            [*AS_NAMELESS, sys.executable, "-m", "bstune", *options],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, run.stderr
        assert "Traceback" not in run.stdout + run.stderr
        assert Path(folder, "outputs", "digits", "report.html").exists()
