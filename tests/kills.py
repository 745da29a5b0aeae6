"""Runs replayed studies that are killed at their n-th commit, rename or unlink: ``kills.py POINTS SEED ARGUMENT...``.

Each run is a fork of this process, which has imported what a study needs. It prints a line of JSON for each point.
"""

import json
import os
import random
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich import console  # noqa: F401 (before the forks, as the next ones)
from sqlalchemy.engine.default import DefaultDialect

from bstune.__main__ import main
from bstune.study import report, run  # noqa: F401


class Killer:
    """Counts the calls that make something durable, and kills this process just before or just after one."""

    def __init__(self, at: int, after: bool) -> None:
        self.at, self.after, self.calls = at, after, 0
        for owner, name in ((DefaultDialect, "do_commit"), (os, "replace"), (os, "rename"), (os, "unlink")):
            setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            self.calls += 1
            mine = self.calls == self.at
            if mine and not self.after:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return call(*arguments, **named)
            finally:
                if mine:
                    os.kill(os.getpid(), signal.SIGKILL)

        return counted


def run_in(folder: Path, arguments: list[str], at: int = 0, after: bool = False) -> int:
    """Run the command in a folder, killed at a call; return its status as a shell does."""
    child = os.fork()
    if child == 0:
        os.chdir(folder)
        output = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        killer = Killer(at, after)
        sys.argv = ["bstune", *arguments]
        status = 1
        try:
            status = main()
        finally:
            Path("calls").write_text(str(killer.calls))
            sys.stdout.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def history(folder: Path) -> dict[int, Any]:
    """Return what came of each trial index; numbers count the trials that were cut short, too."""
    trials = [json.loads(line) for line in next(folder.glob("outputs/*/trials.jsonl")).read_text().splitlines()]
    index = {trial["number"]: trial["trial_index"] for trial in trials}
    links = ("resumed_from", "replicate_of")
    fields = ("batch_size", "lr", "seed", "status", "steps", "history")
    return {
        trial["trial_index"]: [*(trial[name] for name in fields), *(index.get(trial[name]) for name in links)]
        for trial in trials
        if trial["status"] != "failed"
    }


def left(folder: Path) -> list[str]:
    """Return the names of the files below a folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def check(points: int, seed: int, arguments: list[str]) -> None:
    """Kill studies at sampled points, continue each with the same command, and print what differs from a whole one."""
    with tempfile.TemporaryDirectory() as name:
        whole = Path(name)
        assert run_in(whole, arguments) == 0, (whole / "log").read_text()
        calls, expected, files = int((whole / "calls").read_text()), history(whole), left(whole)
        for at in sorted(random.Random(seed).sample(range(1, calls + 1), min(points, calls))):
            for after in (False, True):
                with tempfile.TemporaryDirectory() as again:
                    folder = Path(again)
                    killed = run_in(folder, arguments, at, after)
                    status = run_in(folder, arguments)
                    same = status == 0 and history(folder) == expected and left(folder) == files
                    log = "" if same else (folder / "log").read_text()[-2000:]
                    line = {"at": at, "after": after, "of": calls, "killed": killed, "status": status, "same": same}
                    extra = [] if status else sorted(set(left(folder)) ^ set(files))
                    print(json.dumps({**line, "files": extra, "log": log}), flush=True)


if __name__ == "__main__":
    check(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
