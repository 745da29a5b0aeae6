"""Shared by all tests: what they must not depend on, and records to work with."""

import base64
import gc
import gzip
import os

# Before torch is imported: on batches of a few examples two threads only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What one process has compiled the others read: each of a dozen took 8 s to compile the libraries anew,
# where an installer had left that to the first import and the environment forbade it.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Before mlflow is imported: it writes to the home directory and tries the network otherwise.
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"

import importlib
import logging
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

# The process that hands out the tests imports this module too, before it starts the others: what
# takes seconds is imported where it is used.
if TYPE_CHECKING:
    from postgres import Postgres
    from torch import Tensor, nn

    from bstune.core.records import TrialResult
    from bstune.trial.replay import Table

sys.dont_write_bytecode = False
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)

# What the modules imported stays until the end: looking through it again and again took a tenth of
# the tests' time.
gc.set_threshold(5_000, 20, 50)


# What trains in processes of its own, for which multiprocessing's fork server imports for 5 s.
FORK_SERVER = (
    *("test_command", "test_failures", "test_fork_server", "test_probe", "test_survey"),
    *("test_training", "test_watchdog", "test_workers"),
)
# Its tests need no fork server, and run while that imports.
MEANWHILE = "test_config"
needs_fork_server = pytest.StashKey[bool]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put first what needs a fork server: of several processes that run tests, one then starts it."""
    first = (MEANWHILE, *FORK_SERVER)
    places = {name: place for place, name in enumerate(first)}
    items.sort(key=lambda item: places.get(item.path.stem, len(first)))
    config.stash[needs_fork_server] = any(item.path.stem in FORK_SERVER for item in items)


def pytest_collection_finish() -> None:
    """Prepare a process that runs tests for what all of them do, and leave to itself what it has imported."""
    import once

    once.keep()
    gc.freeze()


@pytest.fixture(autouse=True)
def _own_places(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("BSTUNE_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(autouse=True)
def _fork_server(request: pytest.FixtureRequest, _own_places: None) -> None:
    """Start the fork server ahead of the tests that would wait for it.

    Its processes have the places of this test, too.
    """
    if request.path.stem == MEANWHILE and request.config.stash[needs_fork_server]:
        from bstune.trial.processes.fork_server import start_server

        start_server()


@pytest.fixture(autouse=True)
def _own_signals() -> Iterator[None]:
    """Refuse a test that leaves other handlers than it found: with SIGINT ignored, a later one waited for ever."""
    before = [signal.getsignal(number) for number in SIGNALS]
    yield
    after = [signal.getsignal(number) for number in SIGNALS]
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)
    assert after == before, "the test leaves other handlers of signals than it found"


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let SIGINT be Python's own, and afterwards each signal what it was.

    Lightning leaves its own handlers where an error ends a training, and ignores SIGINT once a
    training was interrupted.
    """
    before = [signal.getsignal(number) for number in SIGNALS]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


def marked(request: pytest.FixtureRequest, *names: str) -> bool:
    """Whether a test has one of these marks."""
    markers = {marker.name for marker in request.node.iter_markers()}
    return not markers.isdisjoint(names)


def is_whole(request: pytest.FixtureRequest) -> bool:
    """Whether a test's reports are those of a user's study: in the soak, and where a test says so."""
    return marked(request, "soak") or "whole_reports" in request.fixturenames


@pytest.fixture(autouse=True)
def _pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write no pictures, and paint no study's curve: both are half of a small study's time.

    Pages hold a word in plotly's place, whose two megabytes took a sixth of the rest.
    ``painted`` is for tests of what depends on a study's trials, ``rendered`` for those of pictures,
    ``whole_pages`` for what looks at pages in a browser.
    What fixtures of a module run is painted and rendered.
    """
    if not is_whole(request) and "whole_pages" not in request.fixturenames:
        script = b"plotly"
        packed = base64.b64encode(gzip.compress(script, mtime=0)).decode()
        monkeypatch.setattr("bstune.report.html._plotly", lambda: (script, packed))
    if "rendered" in request.fixturenames:
        return
    monkeypatch.setattr(
        "bstune.report.drawing.render", lambda figure, file, suffix: file.write(b"not rendered")
    )
    if "painted" not in request.fixturenames and "bstune.study.report" in sys.modules:
        from toolbox import leave_blank

        leave_blank(monkeypatch)


@pytest.fixture(autouse=True)
def _moves(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let some tests' reports sample their posterior as a user's study does; once.py has the rest."""
    if is_whole(request) or "precise" in request.fixturenames:
        import once

        monkeypatch.setattr("bstune.study.analysis.model.MOVES", once.MOVES_OF_A_REPORT)


@pytest.fixture(autouse=True)
def _no_wait_for_signals(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the end of a trial's process announce no signal, which would be waited for."""
    if not marked(request, "slow", "soak"):
        for module in ("process", "workers"):
            monkeypatch.setattr(f"bstune.trial.processes.{module}.SIGNAL_SECONDS", 0.0)


@pytest.fixture
def whole_reports() -> None:
    """Write pages that hold plotly, and sample the posterior of a report as a user's study does."""


@pytest.fixture
def whole_pages() -> None:
    """Write pages that hold plotly."""


@pytest.fixture
def precise() -> None:
    """Sample the posterior of a report as a user's study does, for a test that reads its intervals."""


@pytest.fixture
def painted() -> None:
    """Paint figures, and write no picture of them."""


@pytest.fixture
def rendered() -> None:
    """Paint figures and write them as pictures."""


@pytest.fixture
def run_verb(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[object, str, str]]:
    """Run a verb with just these arguments; return its exit status and what it printed."""

    def run(*arguments: str) -> tuple[object, str, str]:
        from bstune.__main__ import main

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
    from bstune.__main__ import main

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
        # test_early_checks.py.
        lines = printed.out.splitlines(keepends=True)
        out = "".join(line for line in lines if not line.startswith("bstune: "))
        return status, out, printed.err

    return run


@pytest.fixture
def hydra_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an application of Hydra sweep in this process, by this checkout's sweeper."""
    from hydra.core.plugins import Plugins

    from bstune import integrations

    # A checkout may have been installed before it had the plugin.
    monkeypatch.syspath_prepend(Path(integrations.__file__).parent)
    plugin = importlib.import_module("hydra_plugins.bstune_sweeper.sweeper")
    Plugins.instance().register(plugin.BstuneSweeper)
    monkeypatch.setattr("hydra.core.utils.configure_log", lambda *arguments: None)
    monkeypatch.setattr("hydra._internal.hydra.configure_log", lambda *arguments: None)
    # Hydra's launcher sets up the root logger of the process.
    root = logging.getLogger()
    monkeypatch.setattr(root, "level", root.level)
    monkeypatch.setattr(root, "handlers", list(root.handlers))


@pytest.fixture
def database_server(one_server: "Postgres") -> "Postgres":
    """A server; its ``url()`` is that of an empty database of the test's own."""
    one_server.use_new_database()
    return one_server


@pytest.fixture(scope="session")
def one_server() -> "Iterator[Postgres]":
    """Start a server for all tests of this process: to make and to start one takes 2 s."""
    from postgres import Postgres

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
def write_table() -> "Callable[[Path, Table, str], Path]":
    """Write a table as JSON lines; what did not diverge gets the given status."""

    from toolbox import write_rows

    def write(path: Path, table: "Table", status: str) -> Path:
        names = ("batch_size", "lr", "seed", "steps", "metric", "seconds_per_step")
        runs = [({name: getattr(run, name) for name in names}, run.diverged) for run in table.runs]
        return write_rows(
            path, (row | {"status": "diverged" if ended else status} for row, ended in runs)
        )

    return write


@pytest.fixture
def make_result() -> "Callable[..., TrialResult]":
    from toolbox import make_result

    return make_result


@pytest.fixture
def parameters() -> "Callable[[nn.Module], int]":
    """Count a model's parameters."""
    return lambda model: sum(parameter.numel() for parameter in model.parameters())


@pytest.fixture
def shapes() -> "Callable[[nn.Module, Tensor], list[tuple[int, ...]]]":
    """The shape of what each direct child of a model returns, without the batch's dimension."""

    def seen_by(model: "nn.Module", images: "Tensor") -> list[tuple[int, ...]]:
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
    from bstune.trial.devices.errors import WARNED

    WARNED.clear()
    return lambda: [
        record.getMessage()
        for record in caplog.records
        if record.name == "bstune.trial.devices.errors"
    ]
