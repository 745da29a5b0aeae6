"""A study's output folder: the paths in it, its lock, and files that are whole or not there."""

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from bstune.core.errors import StudyError


class _Inside:
    """A path inside the output folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, output: "Output", owner: type | None = None) -> Path:
        return output.root / self._name


@dataclass(frozen=True)
class Output:
    """The paths of one study, or of one trial that is trained by itself."""

    root: Path

    trials = _Inside("trials.jsonl")  # one record a trial, in order of their numbers
    curve = _Inside("curve.json")  # points, fit, regimes and winners
    figure = _Inside("curve.png")  # steps and time to target over batch size
    config = _Inside("config.yaml")  # the composed config
    best = _Inside("best.yaml")  # the winners, with the command that trains each again
    survey = _Inside("hardware.json")  # what the hardware allows
    roofline = _Inside("roofline.png")  # the workload's layers under the device's ceilings
    scale_out = _Inside("scale_out.png")  # time to target and efficiency over the number of devices
    lock = _Inside(".lock")  # held by the one process that runs the study
    checkpoints = _Inside("checkpoints")  # weights of the winners
    states = _Inside("states")  # whole training states of stopped trials that may be continued
    record = _Inside("trial.json")  # the record of a trial that is trained by itself

    def checkpoint(self, number: int) -> Path:
        """Return the file of the weights of trial ``number`` at the target."""
        return self.checkpoints / f"trial-{number}.ckpt"

    def state(self, number: int) -> Path:
        """Return the file of the state of stopped trial ``number``."""
        return self.states / f"trial-{number}.ckpt"

    def single_trial(self, batch_size: int, lr: float, seed: int) -> "Output":
        """Return the folder of a trial that is trained by itself."""
        return Output(self.root / f"trial-B{batch_size}-lr{lr:.6g}-seed{seed}")


def keep_trials(folder: Path, numbers: Collection[int], running: Collection[int] = ()) -> None:
    """Delete the files of all trials but these from ``folder``, and keep whatever the ``running`` ones write."""
    kept = {f"trial-{number}.ckpt" for number in numbers}
    theirs = tuple(f"trial-{number}." for number in running)  # under a temporary name, too
    for path in folder.glob("trial-*"):
        if path.name not in kept and not path.name.startswith(theirs):
            path.unlink(missing_ok=True)  # a trial beside this process deletes the state that it could not read


def write_text(path: Path, text: str) -> None:
    """Write a file under a temporary name, then rename it: a reader sees the old one or the new one."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def check_writable(path: Path, what: str) -> None:
    """Refuse, without writing, a ``path`` that cannot be created or written, or is below no folder."""
    if path.exists() and not os.access(path, os.W_OK):
        raise StudyError(f"{what}: {path} is not writable: choose another place, or run from another folder")
    parent = path.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise StudyError(f"{what}: {parent} is not a folder: choose another place")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise StudyError(f"{what}: folder {parent} is not writable: choose another place, or run from another folder")


@contextmanager
def locked(output: Output) -> Iterator[None]:
    """Create the output folder and hold its lock: one process a study. A body that fails at once leaves nothing."""
    created = [path for path in (output.root, *output.root.parents) if not path.exists()]
    try:
        output.root.mkdir(parents=True, exist_ok=True)
        lock = FileLock(output.lock, timeout=0)
        lock.acquire()
    except Timeout as error:
        busy = f"another process runs this study and holds {output.lock}"
        raise StudyError(f"{busy}: wait for it, or begin another with study=NAME") from error
    except OSError as error:
        what = f"output={output.root} cannot be written: {error.strerror}"
        raise StudyError(f"{what}; choose another with output=DIR") from error
    try:
        yield
    finally:
        lock.release()
        if [path.name for path in output.root.iterdir()] == [output.lock.name] and created:
            output.lock.unlink()
            for path in created:
                path.rmdir()
