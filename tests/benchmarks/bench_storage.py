"""What a study costs beside its training: storage, posteriors, the report, imports.

    python tests/benchmarks/bench_storage.py [--repeats 3] [--study NAME] [--json FILE]

Each study is a fork of this process in a new folder below the working directory, whose file system
is what counts. A part's seconds are its own: what it calls of another part is counted there.
Commits are counted by SQLite's trace of the statements that it carries out, so that a transaction
that only reads counts as none. ``by caller`` names the method of Optuna's storage and who called.
"""

import builtins
import importlib
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

from common import machine, options_of, write

STUDIES = {
    "replay": ("workload=replay", "workload.table=mnist_cnn"),
    "digits": ("workload=digits", "search.trials=12"),
}
EACH = ("study=a", "output=out", "mlflow.enabled=false")
# What is timed, as it is called: module, name, part.
TIMED = (
    ("bstune.search.sampler", "infer", "posteriors"),
    ("bstune.search.sampler", "suggest", "acquisition"),
    ("bstune.study.run", "report_study", "report"),
    ("bstune.study.report", "easier_targets_of", "report: easier targets"),
    ("bstune.study.report", "draw_curve", "report: figure"),
    ("bstune.study.report", "write_page", "report: page"),
    ("bstune.study.search.Search", "_write", "files and progress"),
    ("bstune.study.run", "prepare", "preparation"),
)
STORAGE = "storage"
# These functions stand between a caller and Optuna.
PASSING = ("repeated", "set_trial_user_attr", "set_study_user_attr")
ASKED_OF_STORAGE = (
    "create_new_trial",
    "set_trial_param",
    "set_trial_state_values",
    "set_trial_intermediate_value",
    "set_trial_user_attr",
    "set_trial_system_attr",
    "set_study_user_attr",
    "set_study_system_attr",
    "get_all_trials",
    "get_trial",
    "get_study_user_attrs",
    "get_study_system_attrs",
    "get_study_id_from_name",
    "get_study_directions",
    "get_study_name_from_id",
)


@dataclass
class Costs:
    """Seconds by part, of the wall and of this process's CPU, and the commits by what made them."""

    wall: Counter[str] = field(default_factory=Counter)
    cpu: Counter[str] = field(default_factory=Counter)
    commits: Counter[str] = field(default_factory=Counter)
    statements: int = 0
    _stack: list[str] = field(default_factory=lambda: ["the rest"])
    _since: tuple[float, float] = (0.0, 0.0)

    def _charge(self) -> None:
        wall = time.perf_counter()
        cpu = time.process_time()
        self.wall[self._stack[-1]] += wall - self._since[0]
        self.cpu[self._stack[-1]] += cpu - self._since[1]
        self._since = wall, cpu

    def begin(self) -> None:
        """Count from here on."""
        self._since = time.perf_counter(), time.process_time()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Charge what the body takes to a part."""
        self._charge()
        self._stack.append(name)
        try:
            yield
        finally:
            self._charge()
            self._stack.pop()

    def timed(self, owner: Any, name: str, part: str) -> None:
        """Charge a function to a part, where it is called in the process that runs the study."""
        call = getattr(owner, name)
        own = os.getpid()

        @wraps(call)
        def wrapped(*arguments: Any, **named: Any) -> Any:
            # A fork has inherited the function.
            if os.getpid() != own:
                return call(*arguments, **named)
            with self.part(part):
                return call(*arguments, **named)

        setattr(owner, name, wrapped)

    def trace(self, statement: str) -> None:
        """Count a statement that SQLite carries out."""
        self.statements += 1
        if statement == "COMMIT":
            self.commits[_caller()] += 1


def _caller() -> str:
    """Name the method of the storage that is at work, and the function of bstune that asked for it."""
    # Above this function and trace(): what SQLite was asked by.
    method = "none"
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        name = frame.f_code.co_name
        if "storages/_cached_storage" in file:
            method = name
        elif "/bstune/study/" in file and name not in PASSING:
            return f"{method} < {name}"
        frame = frame.f_back
    return method


def _imports(costs: Costs) -> None:
    """Charge imports to a part of their own."""
    load = builtins.__import__
    inside = False

    def timed(name: str, *arguments: Any, **named: Any) -> Any:
        # What an import imports in turn is part of it.
        nonlocal inside
        if inside or name in sys.modules:
            return load(name, *arguments, **named)
        inside = True
        try:
            with costs.part("imports"):
                return load(name, *arguments, **named)
        finally:
            inside = False

    builtins.__import__ = timed


def _owner(path: str) -> Any:
    """A module, or a class in one."""
    module, _, name = path.rpartition(".")
    if name[0].isupper():
        return getattr(importlib.import_module(module), name)
    return importlib.import_module(path)


# What the study prints is kept for an error.
def _run(arguments: tuple[str, ...]) -> None:
    output = os.open("log", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    costs = Costs()
    costs.begin()
    with costs.part("imports"):
        from optuna.storages import _CachedStorage
        from sqlalchemy import Engine, event

        from bstune.__main__ import main as command

        owners = [_owner(path) for path, _, _ in TIMED]
    _imports(costs)
    for owner, (_, name, part) in zip(owners, TIMED, strict=True):
        costs.timed(owner, name, part)
    for name in ASKED_OF_STORAGE:
        costs.timed(_CachedStorage, name, STORAGE)

    @event.listens_for(Engine, "connect")
    def connect(connection: Any, record: object) -> None:
        connection.set_trace_callback(costs.trace)

    sys.argv = ["bstune", *arguments, *EACH]
    status = command()
    with costs.part("the end"):
        # Workers' seconds are no part's of this process.
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
    costs.cpu["processes that have ended"] = children.ru_utime + children.ru_stime
    trials = len(Path("out/trials.jsonl").read_text().splitlines())
    found = {
        "trials": trials,
        "commits": costs.commits,
        "statements": costs.statements,
        "wall": costs.wall,
        "cpu": costs.cpu,
    }
    Path("found.json").write_text(json.dumps(found))
    os._exit(status)


def measured(arguments: tuple[str, ...], run: Callable[[tuple[str, ...]], None]) -> dict[str, Any]:
    """Run a study in a fork; return what it cost."""
    with tempfile.TemporaryDirectory(dir=".") as name:
        child = os.fork()
        if child == 0:
            os.chdir(name)
            run(arguments)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status:
            raise RuntimeError(f"the study ended with {status}: {Path(name, 'log').read_text()}")
        found: dict[str, Any] = json.loads(Path(name, "found.json").read_text())
        return found


def _show(study: str, runs: list[dict[str, Any]]) -> None:
    first = runs[0]
    trials = first["trials"]
    commits = sum(first["commits"].values())
    print(f"{study}: {trials} trials, {commits} commits, {commits / trials:.1f} a trial")
    for caller, count in Counter(first["commits"]).most_common():
        print(f"  {count:5d} {caller}")
    milliseconds = [1000 * run["wall"].get(STORAGE, 0.0) / run["trials"] for run in runs]
    print(f"  storage, ms a trial: {statistics.median(milliseconds):.1f} (wall)")
    for part in sorted(first["cpu"], key=lambda part: -first["cpu"][part]):
        cpu = statistics.median([run["cpu"].get(part, 0.0) for run in runs])
        wall = statistics.median([run["wall"].get(part, 0.0) for run in runs])
        print(f"  {part:<40} {cpu:6.2f} s of CPU {wall:7.2f} s")


def main() -> None:
    """Run the studies, and print what each part took."""
    options = options_of(
        __doc__,
        ("--repeats", {"type": int, "default": 3}),
        ("--study", {"choices": list(STUDIES), "help": "one of them (default: both)"}),
    )
    about = machine(options.device, options.repeats)
    rows: list[dict[str, Any]] = []
    for name in [options.study] if options.study else list(STUDIES):
        runs = [measured(STUDIES[name], _run) for _ in range(options.repeats)]
        _show(name, runs)
        rows.append({"study": name, "runs": runs})
    write(options.json, about, rows)


if __name__ == "__main__":
    main()
