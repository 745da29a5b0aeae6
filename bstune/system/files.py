"""A study's folder and its files: written whole or not at all, read within limits.

A file is made under a random name beside its place, reaches the disk, and is then renamed, so that
a reader never sees half of it. A link in its place is neither followed nor replaced.
"""

import errno
import json
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import yaml
from pydantic import ValidationError

from bstune.core.errors import InputError, StudyError
from bstune.core.records import Frozen
from bstune.system.secrets import hide

TEXT_LIMIT_BYTES = 100_000_000
# A result of 1,000 trials has some 40 kB.
JSON_LIMIT_BYTES = 5_000_000
# PyYAML reads some 100 kB a second.
YAML_LIMIT_BYTES = 200_000
# Values of a YAML file; one behind an alias counts wherever the alias stands.
YAML_LIMIT_VALUES = 100_000
NUMBERS = {"tag:yaml.org,2002:int", "tag:yaml.org,2002:float"}
# Characters of a number in YAML; one of base 60 takes the square of its length to read.
YAML_LIMIT_NUMBER = 300
# Tags of values that JSON does not have.
NOT_IN_JSON = {
    f"tag:yaml.org,2002:{name}" for name in ("timestamp", "set", "binary", "omap", "pairs")
}
# The end of the names of files that are not whole yet; a process that was killed leaves them.
PARTIAL = ".partial"


class Owner(Frozen):
    """The study that a folder belongs to, as its study.json says."""

    schema_number: Literal[1] = 1
    study: str
    storage: str


def ensure_home() -> None:
    """Give a user who has no home, such as one without a name, a temporary one.

    Caches, data and MLflow lie there.
    """
    if os.path.expanduser("~") == "~":
        os.environ["HOME"] = tempfile.gettempdir()


@dataclass(frozen=True)
class StudyFolder:
    """The paths in a study's folder, which lies at ``root``."""

    root: Path

    @property
    def owner(self) -> Path:
        """The study that the folder belongs to."""
        return self.root / "study.json"

    @property
    def result(self) -> Path:
        """The typed result."""
        return self.root / "curve.json"

    @property
    def trials(self) -> Path:
        """One record a line, in order of their numbers."""
        return self.root / "trials.jsonl"

    @property
    def best(self) -> Path:
        """The configuration to train, as options."""
        return self.root / "best.yaml"

    @property
    def figure(self) -> Path:
        """The steps-to-target curve."""
        return self.root / "curve.png"

    @property
    def page(self) -> Path:
        """Answer, figure and trials in one file."""
        return self.root / "report.html"

    @property
    def config(self) -> Path:
        """The composed config, without secrets."""
        return self.root / "config.yaml"

    @property
    def hardware(self) -> Path:
        """The machine, with the survey of memory and step times."""
        return self.root / "hardware.json"

    @property
    def roofline(self) -> Path:
        """What bounds a step, over FLOPs per byte."""
        return self.root / "roofline.png"

    @property
    def log(self) -> Path:
        """What the processes of trials print."""
        return self.root / "trials.log"

    @property
    def checkpoints(self) -> Path:
        """The folder of the trials' saved states."""
        return self.root / "checkpoints"

    def checkpoint(self, number: int) -> Path:
        """Give the path of one trial's saved state."""
        return self.checkpoints / f"trial-{number}.ckpt"


def refuse_link(path: Path) -> None:
    """StudyError for a link: what is written there would be elsewhere."""
    if path.is_symlink():
        raise StudyError(f"{path} is a link, which bstune does not follow: remove it")


def _check_entries(folder: StudyFolder) -> None:
    """StudyError for a link in a folder, at any depth, that leads out of it, and for a pipe."""
    inside = os.path.realpath(folder.root)
    for parent, folders, names in os.walk(folder.root):
        for name in (*folders, *names):
            path = Path(parent, name)
            if not Path(os.path.realpath(path)).is_relative_to(inside) or path.is_fifo():
                raise StudyError(f"{path} leads out of output={folder.root}: remove it")


def claim_folder(folder: StudyFolder, study: str, storage: str) -> None:
    """Make a folder that is missing or empty a study's own, or see that it already is.

    The study is known by its name and the URL of its storage, from which a password is left out.

    Raises:
        StudyError: if the folder cannot be written to, holds other files or links to such, or is of
            another study.
    """
    owner = Owner(study=study, storage=hide(storage))
    try:
        folder.root.mkdir(parents=True, exist_ok=True)
        is_empty = all(path.suffix == PARTIAL for path in folder.root.iterdir())
    except OSError as error:
        raise StudyError(
            f"output={folder.root} is no folder to write to ({error.strerror}): "
            f"choose another with output=DIR"
        ) from error
    _check_entries(folder)
    if is_empty:
        write_text(folder.owner, owner.model_dump_json() + "\n")
    # It is read also where it was just written: another study may have claimed the folder as well.
    try:
        found = Owner.model_validate_json(read_text(folder.owner))
    except (InputError, ValidationError) as error:
        raise StudyError(
            f"output={folder.root} holds files, but no study.json of this version: "
            f"choose another folder with output=DIR"
        ) from error
    if found != owner:
        raise StudyError(
            f"output={folder.root} is of study {found.study} in {found.storage}, not of "
            f"{study} in {owner.storage}: choose another folder with output=DIR"
        )


@contextmanager
def _writing_errors(path: Path) -> Iterator[None]:
    """Refuse a link, and let what the system refuses be a StudyError that names the file."""
    try:
        refuse_link(path)
        yield
    except OSError as error:
        raise StudyError(f"{path} cannot be written: {error.strerror or error}") from error


def discard_folder(folder: StudyFolder) -> None:
    """Remove a study's folder in which nothing was stored yet; one that holds more stays."""
    logs = folder.root.glob("trials*.log")
    without_trials = (folder.owner, *logs, folder.config, folder.hardware)
    there = {*without_trials, folder.checkpoints}
    if folder.root.is_dir() and set(folder.root.iterdir()) <= there:
        for path in without_trials:
            path.unlink(missing_ok=True)
        # A folder that is not empty stays.
        for place in (folder.checkpoints, folder.root):
            with suppress(OSError):
                place.rmdir()


def discard(path: Path) -> None:
    """Remove a file or a folder of bstune's own, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file for bytes; it is in its place once the body has ended without an error.

    The folder that it lies in is made if it is missing. A body that fails leaves what was there.

    Raises:
        StudyError: if it cannot be written, or a link is in its place.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}{PARTIAL}")
    try:
        with _writing_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            # "x" makes a new file (O_EXCL): it opens none that is there, nor follows a link.
            with partial.open("xb") as file:
                yield file
                _flush_to_disk(file)
            partial.replace(path)
    finally:
        with suppress(OSError):
            partial.unlink()


def _flush_to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def write_text(path: Path, text: str) -> None:
    """Write a file of text, as :func:`whole_file` does."""
    with whole_file(path) as file:
        file.write(text.encode())


def _open_regular(path: str, flags: int) -> int:
    """Open a regular file, as ``opener`` of ``open``, without waiting for a pipe's other end."""
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file")
    return descriptor


@contextmanager
def appending(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file, which is made if it is missing, for what is added at its end.

    Raises:
        StudyError: if it cannot be written, or is a link or no regular file.
    """
    with _writing_errors(path), open(path, "ab", opener=_open_regular) as file:
        yield file


def append_line(path: Path, text: str) -> None:
    """Append one line to a file, as :func:`appending` does."""
    with appending(path) as file:
        file.write(f"{text}\n".encode())
        _flush_to_disk(file)


def read_text(path: Path, limit_bytes: int = TEXT_LIMIT_BYTES) -> str:
    """Read a regular file of UTF-8 text, with or without a byte order mark.

    Raises:
        InputError: if it is missing, no regular file, too large or not UTF-8.
    """
    try:
        with open(path, "rb", opener=_open_regular) as file:
            data = file.read(limit_bytes + 1)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(data) > limit_bytes:
        raise InputError(f"{path} must have at most {limit_bytes:,} bytes, but has more")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} must be UTF-8 text, but byte {error.start} is not") from error


def read_json(path: Path, limit_bytes: int = JSON_LIMIT_BYTES) -> Any:
    """Read a file of JSON; InputError as by :func:`read_text`, and for another text."""
    text = read_text(path, limit_bytes)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} must be JSON: {error}") from error


class _PlainLoader(yaml.SafeLoader):
    """Reads the values that JSON has, too: a date is a text, and a tag such as !!set is refused."""


_PlainLoader.yaml_constructors = {
    tag: make for tag, make in yaml.SafeLoader.yaml_constructors.items() if tag not in NOT_IN_JSON
}
_PlainLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag not in NOT_IN_JSON]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def read_yaml(path: Path, limit_bytes: int = YAML_LIMIT_BYTES) -> Any:
    """Read a file of YAML: plain values alone, no Python objects.

    Raises:
        InputError: as by :func:`read_text`; for another text; for one that is nested too deep for
            Python, or that stands for more than 100,000 values by its aliases.
    """
    text = read_text(path, limit_bytes)
    try:
        loader = _PlainLoader(text)
        root = loader.get_single_node()
        if not _is_small(root):
            raise InputError(
                f"{path} must stand for at most {YAML_LIMIT_VALUES:,} values, with numbers of at "
                f"most {YAML_LIMIT_NUMBER} characters"
            )
        return None if root is None else loader.construct_document(root)
    # A ValueError is that of a number such as !!int x.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{path} must be YAML: {reason}") from error


def _is_small(root: yaml.Node | None) -> bool:
    """Whether YAML is within the limits, an alias counted as often as what it stands for."""
    nodes = [root]
    # The list grows while it is walked.
    for node in nodes:
        if len(nodes) > YAML_LIMIT_VALUES:
            return False
        if isinstance(node, yaml.MappingNode):
            for pair in node.value:
                nodes += pair
        elif isinstance(node, yaml.SequenceNode):
            nodes += node.value
        elif node is not None and len(node.value) > YAML_LIMIT_NUMBER and node.tag in NUMBERS:
            return False
    return True
