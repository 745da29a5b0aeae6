"""A study's output folder: whose it is, the paths in it, and files that are whole or not there."""

import errno
import json
import os
import re
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from bstune.core.errors import BstuneError, InputError, StudyError
from bstune.system.inputs import parse_json, read_text
from bstune.system.secrets import redact_patterns

WRITE_TRIES = 11  # of a file, a second apart, where a full disk or a mount may come back, as after these errors:
FULL = (errno.ENOSPC, errno.EDQUOT)
PASSING = (*FULL, errno.EIO, errno.ENOENT, errno.ESTALE)


def expand_home(text: str) -> str:
    """Return a path, or the URL of a SQLite database, with its leading ``~`` or ``~user`` as a home directory."""
    prefix, path = re.fullmatch(r"(sqlite(?:\+\w+)?:///)?(.*)", text, re.DOTALL).groups("")  # type: ignore[union-attr]
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise ValueError(f"there is no home directory {path.split('/')[0]}, but got {text!r}")
    return prefix + expanded


class _Inside:
    """A path inside the output folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, output: "Output", owner: type | None = None) -> Path:
        return output.root / self._name


@dataclass(frozen=True)
class Identity:
    """Whose an output folder is."""

    study: str  # its name
    storage: str  # without a password
    id: str | None = (
        None  # the study's, random; None: of the study of this name and storage, which need not be begun
    )

    @classmethod
    def of(cls, study: str, url: str, study_id: str | None = None) -> "Identity":
        """Return the identity of a study in the storage at ``url``."""
        path = url.removeprefix("sqlite:///")
        absolute = url if path == url else f"sqlite:///{Path(path).absolute()}"
        return cls(study, redact_patterns(absolute), study_id)

    def of_same_study(self, other: "Identity") -> bool:
        """Return whether both may be the same study's."""
        if self.id is not None and other.id is not None:
            return self.id == other.id  # a server has several names, and a proxy another
        return (self.study, self.storage) == (other.study, other.storage)


@dataclass(frozen=True)
class Output:
    """The paths of one study, or of one trial that is trained by itself."""

    root: Path

    trials = _Inside("trials.jsonl")  # one record a trial, in order of their numbers
    curve = _Inside("curve.json")  # points, fit, regimes and winners
    figure = _Inside("curve.png")  # steps and time to target over batch size
    vector_figure = _Inside("curve.svg")  # the same, for print
    report = _Inside("report.html")  # the page: answer, charts, trials
    config = _Inside("config.yaml")  # the composed config
    best = _Inside("best.yaml")  # the winners, with the command that trains each again
    survey = _Inside("hardware.json")  # what the hardware allows
    roofline = _Inside("roofline.png")  # the workload's layers under the device's ceilings
    scale_out = _Inside("scale_out.png")  # time to target and efficiency over the number of devices
    identity = _Inside("study.json")  # whose the folder is
    checkpoints = _Inside("checkpoints")  # weights of the trials that may win
    states = _Inside("states")  # whole training states of stopped trials that may be continued
    unstored = _Inside(
        "unstored.jsonl"
    )  # records of trials that finished while the storage was away
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


def keep_trials(folder: Path, trials: Collection[int], keep: Callable[[], Collection[int]]) -> None:
    """Delete the files of ``trials``, by number, from ``folder``, but for those to ``keep``; nothing else."""
    matches = [
        (path, re.fullmatch(r"trial-(\d+)\.ckpt(\.partial)?", path.name))
        for path in folder.glob("trial-*")
    ]
    found = {
        path: number for path, match in matches if match and (number := int(match[1])) in trials
    }
    kept = keep() if found else ()  # takes long after many trials; replayed ones leave no files
    for path, number in found.items():
        if number not in kept:
            path.unlink(missing_ok=True)  # a trial deletes the state that it could not read


def write_text(path: Path, text: str, sleep: Callable[[float], None] = time.sleep) -> None:
    """Write a file under a temporary name, then rename it: a reader sees the old one or the new one."""
    partial = path.with_name(path.name + ".partial")
    for tries_left in reversed(range(WRITE_TRIES)):
        try:
            partial.write_text(text, encoding="utf-8")
            partial.replace(path)
        except OSError as error:
            if error.errno not in PASSING or not tries_left:
                with suppress(OSError):  # it takes room on a full disk
                    partial.unlink()
                tried = "" if tries_left else f"; tried {WRITE_TRIES} times in {WRITE_TRIES - 1} s"
                raise StudyError(
                    f"{path} cannot be written: {error.strerror}{tried}; what has finished is stored: mend it, and run "
                    "the same command again"
                ) from error
            sleep(1.0)
        else:
            return


def full_disk(error: BaseException) -> StudyError | None:
    """Return the plain error that a full disk, or quota, ends the command with; None for any other error."""
    reason = None if isinstance(error, BstuneError) else error
    seen: set[int] = (
        set()
    )  # causes may form a ring, as where an error is raised again from what it caused
    while reason is not None and not (isinstance(reason, OSError) and reason.errno in FULL):
        seen.add(id(reason))
        reason = reason.__cause__ or reason.__context__
        if id(reason) in seen:
            reason = None
    if not isinstance(reason, OSError):
        return None
    what = f"{reason.filename or 'a file'} cannot be written: {reason.strerror}"
    return StudyError(
        f"{what}; what has finished is stored: make room, and run the same command again"
    )


def check_writable(path: Path, what: str) -> None:
    """Refuse, without writing, a ``path`` that cannot be created or written, or is below no folder."""
    try:
        taken, parent = path.exists(), path.absolute().parent
        while not parent.exists():
            parent = parent.parent
    except OSError as error:  # a name that is too long, a folder that may not be read
        raise StudyError(f"{what}: {error.strerror}: choose another place") from error
    if taken and not os.access(path, os.W_OK):
        raise StudyError(
            f"{what}: {path} is not writable: choose another place, or run from another folder"
        )
    if not parent.is_dir():
        raise StudyError(f"{what}: {parent} is not a folder: choose another place")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise StudyError(
            f"{what}: folder {parent} is not writable: choose another place, or run from another folder"
        )


def check_owner(output: Output, identity: Identity) -> Identity | None:
    """Return whose the folder is, None if it is empty; refuse one with something in it that is not this study's."""
    if not output.root.is_dir() or not any(output.root.iterdir()):
        return None
    try:
        text = read_text(output.identity, "the file")
        found = Identity(**parse_json(text, output.identity.name))  # type: ignore[arg-type]
    except (InputError, TypeError):
        what = "is not empty and no study's"
    else:
        if found.of_same_study(identity):
            return found
        what = f"is of the study {found.study!r} in {found.storage}"
        if (found.study, found.storage) == (identity.study, identity.storage):
            what += ", but of an earlier one of this name"
    raise StudyError(
        f"output={output.root} {what}: choose another with output=DIR or study=NAME, or move the folder away"
    )


@contextmanager
def owned(output: Output, identity: Identity) -> Iterator[None]:
    """Make the output folder this study's, or check that it is. A body that leaves nothing in it takes it away."""
    found = check_owner(output, identity)
    created = [path for path in (output.root, *output.root.parents) if not path.exists()]
    try:
        output.root.mkdir(parents=True, exist_ok=True)
        if found is None or (found.id is None and identity.id is not None):
            write_text(output.identity, json.dumps(asdict(identity)) + "\n")
    except OSError as error:
        what = f"output={output.root} cannot be written: {error.strerror}"
        raise StudyError(f"{what}; choose another with output=DIR") from error
    try:
        yield
    finally:
        if (
            created
            and output.root.is_dir()
            and [path.name for path in output.root.iterdir()] == [output.identity.name]
        ):
            output.identity.unlink()
            for path in created:
                path.rmdir()
