"""A study's output folder: the paths in it, its lock, and files that are whole or not there."""

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from bstune.core.errors import StudyError


@dataclass(frozen=True)
class Output:
    """The paths of one study."""

    root: Path

    @property
    def trials(self) -> Path:
        """One record a trial, in order of their numbers."""
        return self.root / "trials.jsonl"

    @property
    def curve(self) -> Path:
        """Points, fit, regimes and winners."""
        return self.root / "curve.json"

    @property
    def figure(self) -> Path:
        """Steps and time to target over batch size."""
        return self.root / "curve.png"

    @property
    def config(self) -> Path:
        """The composed config."""
        return self.root / "config.yaml"

    @property
    def best(self) -> Path:
        """The winners, with the command that trains each again."""
        return self.root / "best.yaml"

    @property
    def survey(self) -> Path:
        """What the hardware allows."""
        return self.root / "hardware.json"

    @property
    def roofline(self) -> Path:
        """The workload's layers under the device's ceilings."""
        return self.root / "roofline.png"

    @property
    def scale_out(self) -> Path:
        """Time to target and efficiency over the number of devices."""
        return self.root / "scale_out.png"

    @property
    def lock(self) -> Path:
        """Held by the one process that runs the study."""
        return self.root / ".lock"

    @property
    def checkpoints(self) -> Path:
        """Weights of the winners."""
        return self.root / "checkpoints"

    def checkpoint(self, number: int) -> Path:
        """Weights of trial ``number`` at the target."""
        return self.checkpoints / f"trial-{number}.ckpt"

    @property
    def states(self) -> Path:
        """Whole training states of stopped trials that may be continued."""
        return self.root / "states"

    def state(self, number: int) -> Path:
        """State of stopped trial ``number``."""
        return self.states / f"trial-{number}.ckpt"

    def keep_states(self, numbers: set[int], running: Collection[int] = ()) -> None:
        """Delete the states of all trials but these, and but what the ``running`` ones write."""
        _keep(self.states, {self.state(number) for number in numbers}, running)

    def single_trial(self, batch_size: int, lr: float, seed: int) -> "Output":
        """Return the folder of a trial that is trained by itself."""
        return Output(self.root / f"trial-B{batch_size}-lr{lr:.6g}-seed{seed}")

    @property
    def record(self) -> Path:
        """The record of a trial that is trained by itself."""
        return self.root / "trial.json"

    def keep_checkpoints(self, numbers: set[int], running: Collection[int] = ()) -> None:
        """Delete the checkpoints of all trials but these, and but what the ``running`` ones write."""
        _keep(self.checkpoints, {self.checkpoint(number) for number in numbers}, running)


def _keep(folder: Path, kept: set[Path], running: Collection[int]) -> None:
    theirs = tuple(f"trial-{number}." for number in running)  # under a temporary name, too
    for path in folder.glob("trial-*"):
        if path not in kept and not path.name.startswith(theirs):
            path.unlink(missing_ok=True)  # a trial beside this process deletes the state that it could not read


def write_text(path: Path, text: str) -> None:
    """Write a file under a temporary name, then rename it: a reader sees the old one or the new one."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def check_writable(path: Path, what: str) -> None:
    """Check, without writing, that ``path`` can be created or written.

    Raises:
        StudyError: if it, or the nearest folder above it that exists, is not writable or is no folder.
    """
    if path.exists() and not os.access(path, os.W_OK):
        raise StudyError(f"{what}: {path} is not writable: choose another place, or run from another folder")
    parent = path.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise StudyError(f"{what}: {parent} is not a folder: choose another place")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise StudyError(
            f"{what}: the folder {parent} is not writable: choose another place, or run from another folder"
        )


@contextmanager
def locked(output: Output) -> Iterator[None]:
    """Create the output folder and hold its lock: one process a study. A body that fails at once leaves nothing.

    Raises:
        StudyError: if the folder cannot be made, or another process holds the lock.
    """
    created = [path for path in (output.root, *output.root.parents) if not path.exists()]
    try:
        output.root.mkdir(parents=True, exist_ok=True)
        lock = FileLock(output.lock, timeout=0)
        lock.acquire()
    except Timeout as error:
        raise StudyError(
            f"another process runs this study and holds {output.lock}: wait for it, or begin another with study=NAME"
        ) from error
    except OSError as error:
        raise StudyError(
            f"output={output.root} cannot be written: {error.strerror}; choose another with output=DIR"
        ) from error
    try:
        yield
    finally:
        lock.release()
        if [path.name for path in output.root.iterdir()] == [output.lock.name] and created:
            output.lock.unlink()
            for path in created:
                path.rmdir()
