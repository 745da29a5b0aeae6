"""Shared by all tests: what they must not depend on, and records to work with."""

import gc
import os

# Before torch is imported: on batches of a few examples two threads only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Before mlflow is imported: it writes to the home directory and tries the network otherwise.
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"

import sqlite3
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
import toolbox
from postgres import Postgres
from torch import Tensor, nn

from bstune.__main__ import main
from bstune.core.records import TrialResult
from bstune.trial.replay import Table

# What the modules imported stays until the end: looking through it again and again took a tenth of
# the tests' time.
gc.set_threshold(700, 10, 200)


@sqlalchemy.event.listens_for(sqlalchemy.Engine, "connect")
def _without_waiting_for_the_disk(connection: Any, _: Any) -> None:
    """A test's SQLite database need not outlive the machine: half the time of what writes to one was waiting."""
    if isinstance(connection, sqlite3.Connection):
        connection.execute("PRAGMA synchronous=OFF")


@pytest.fixture(autouse=True)
def _own_places(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("BSTUNE_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(autouse=True)
def _pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paint figures, but write no picture of them, which is a quarter of a small study's time.

    What depends on a study's trials is in the painting; ``rendered`` is for tests of pictures.
    """
    if "rendered" not in request.fixturenames:
        monkeypatch.setattr(
            "bstune.report.drawing.render", lambda figure, file, suffix: file.write(b"not rendered")
        )


@pytest.fixture
def rendered() -> None:
    """Write figures as pictures."""


@pytest.fixture
def run_verb(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[object, str, str]]:
    """Run a verb with just these arguments; return its exit status and what it printed."""

    def run(*arguments: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["bstune", *arguments])
        status = main()
        printed = capfd.readouterr()
        return status, printed.out, printed.err

    return run


@pytest.fixture
def bstune(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[object, str, str]]:
    """Run the command in an empty folder; return its exit status and what it printed.

    The hardware is surveyed only for a test that says so: it takes seconds.
    """
    monkeypatch.chdir(tmp_path)

    def run(*given: object) -> tuple[object, str, str]:
        arguments = [str(argument) for argument in given]
        surveys = any(argument.startswith("hardware.") for argument in arguments)
        own = (
            []
            if surveys or not any("=" in argument for argument in arguments)
            else ["hardware.enabled=false"]
        )
        monkeypatch.setattr(sys, "argv", ["bstune", *arguments, *own])
        status: object
        try:
            status = main()
        except SystemExit as exit_:
            status = exit_.code
        printed = capfd.readouterr()
        # What the command says that it begins with, before it knows more, is looked at in
        # test_early.py.
        lines = printed.out.splitlines(keepends=True)
        out = "".join(line for line in lines if not line.startswith("bstune: "))
        return status, out, printed.err

    return run


@pytest.fixture
def database_server() -> Iterator[Postgres]:
    """Start a server of the test's own; its ``url()`` is that of an empty database."""
    pytest.importorskip("psycopg2")
    if not Postgres.installed():
        pytest.skip("needs a PostgreSQL server")
    # Below tmp_path another user could not enter.
    with tempfile.TemporaryDirectory(prefix="bstune-server-") as folder:
        server = Postgres(Path(folder))
        try:
            yield server
        finally:
            server.stop("immediate")


@pytest.fixture
def write_table() -> Callable[[Path, Table, str], Path]:
    """Write a table as JSON lines; what did not diverge gets the given status."""

    def write(path: Path, table: Table, status: str) -> Path:
        names = ("batch_size", "lr", "seed", "steps", "metric", "seconds_per_step")
        runs = [({name: getattr(run, name) for name in names}, run.diverged) for run in table.runs]
        return toolbox.write_rows(
            path, (row | {"status": "diverged" if ended else status} for row, ended in runs)
        )

    return write


@pytest.fixture
def make_result() -> Callable[..., TrialResult]:
    return toolbox.make_result


@pytest.fixture
def parameters() -> Callable[[nn.Module], int]:
    """Count a model's parameters."""
    return lambda model: sum(parameter.numel() for parameter in model.parameters())


@pytest.fixture
def shapes() -> Callable[[nn.Module, Tensor], list[tuple[int, ...]]]:
    """The shape of what each direct child of a model returns, without the batch's dimension."""

    def seen_by(model: nn.Module, images: Tensor) -> list[tuple[int, ...]]:
        seen: list[tuple[int, ...]] = []
        for child in model.children():
            child.register_forward_hook(
                lambda child, inputs, output: seen.append(tuple(output.shape[1:]))
            )
        model(images)
        return seen

    return seen_by


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The warnings of trials; one that was given before the test is given again."""
    # The import takes seconds, which few tests need.
    from bstune.trial.devices.errors import warn_once

    warn_once.cache_clear()
    return lambda: [
        record.getMessage()
        for record in caplog.records
        if record.name == "bstune.trial.devices.errors"
    ]
