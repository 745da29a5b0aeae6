"""A study's output folder: whose it is, the paths in it, and files that are whole or not there.

No file is opened through a link, and none is written in its place: each is made under a random name
beside it, reaches the disk, and is then renamed. Only files that are provably bstune's own are
removed. A file that is not whole yet has a checksum in its name (:func:`partial_of`). Weights and
states end with a mark of the study and the trial that wrote them (:func:`own_mark`).
"""

import errno
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from bstune.core.errors import BstuneError, InputError, StudyError
from bstune.system.failures import with_causes
from bstune.system.inputs import parse_json, read_text
from bstune.system.secrets import redact, without_known

# Times that a file is tried, a second apart: a full disk may get room, a mount come back.
WRITE_TRIES = 11
# Error numbers of a name that is too long, or of links that lead to each other.
UNUSABLE = {errno.ENAMETOOLONG, errno.ELOOP}
# Error numbers of a full disk, or a full quota.
FULL_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT)
# Error numbers that may pass: the file is tried again.
PASSING = (*FULL_DISK_ERRORS, errno.EIO, errno.ENOENT, errno.ESTALE)
# Error numbers of file systems that cannot sync a folder by itself.
NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES)
# Flags with which files are opened: no link is followed, and no FIFO waited for.
UNFOLLOWED = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# A name of partial_of: the final name's end, a random token, and a checksum of both.
PARTIAL = re.compile(r"\.(.+)\.([0-9a-f]{16})([0-9a-f]{16})\.partial", re.DOTALL)
# Characters of the final name in it: at most 192 bytes of the 255 of a name.
PARTIAL_NAME_LENGTH = 48
# Characters of a name in a message.
SHOWN_NAME_LENGTH = 200
SQLITE_URL = re.compile(r"(?P<scheme>sqlite(?:\+\w+)?:///)?(?P<path>.*)", re.DOTALL)
logger = logging.getLogger(__name__)


def expand_home(text: str) -> str:
    """Replace a leading ``~`` or ``~user`` of a path by the home directory.

    The path may be within the URL of a SQLite database.

    Raises:
        ValueError: if there is no such home directory.
    """
    parts = SQLITE_URL.fullmatch(text)
    assert parts is not None  # noqa: S101 (any text is a path)
    path = parts["path"]
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise ValueError(f"there is no home directory {path.split('/')[0]}, but got {text!r}")
    return (parts["scheme"] or "") + expanded


class _Inside:
    """An attribute of :class:`Output` that is the path of a name inside its folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, output: "Output", owner: type | None = None) -> Path:
        """Make the path inside the folder of ``output``."""
        return output.root / self._name


@dataclass(frozen=True)
class Identity:
    """The study that an output folder belongs to."""

    study: str
    """The study's name."""
    storage: str
    """The URL of its storage, without a password."""
    id: str | None = None
    """The study's random identifier; None: it may not be begun yet, so name and storage decide."""

    @classmethod
    def of(cls, study: str, url: str, study_id: str | None = None) -> "Identity":
        """Make the identity of a study in the storage at ``url``; SQLite paths become absolute."""
        path = url.removeprefix("sqlite:///")
        if path != url:
            url = f"sqlite:///{Path(path).absolute()}"
        # It is written to study.json, without a password.
        return cls(study, redact(url), study_id)

    def of_same_study(self, other: "Identity") -> bool:
        """Whether both may be the same study's: by their identifiers, else by name and storage."""
        # Identifiers come first: one storage may have several URLs, as through a proxy.
        if self.id is not None and other.id is not None:
            return self.id == other.id
        return (self.study, self.storage) == (other.study, other.storage)


@dataclass(frozen=True)
class Output:
    """The paths of one study, or of one trial that is trained by itself."""

    root: Path

    trials = _Inside("trials.jsonl")
    """One record a trial, in order of their numbers."""
    trials_log = _Inside("trials.log")
    """What trials' processes print, and warn of."""
    curve = _Inside("curve.json")
    """Points, fit, regimes and winners."""
    figure = _Inside("curve.png")
    """Steps and time to target over batch size."""
    vector_figure = _Inside("curve.svg")
    """The same, for print."""
    report = _Inside("report.html")
    """The page: answer, charts, trials."""
    config = _Inside("config.yaml")
    """The composed config."""
    best = _Inside("best.yaml")
    """The winners, with the command that trains each again."""
    survey = _Inside("hardware.json")
    """What the hardware allows."""
    roofline = _Inside("roofline.png")
    """The workload's layers under the device's ceilings."""
    identity = _Inside("study.json")
    """The study that the folder belongs to."""
    checkpoints = _Inside("checkpoints")
    """Weights of the trials that may win."""
    states = _Inside("states")
    """Whole training states of stopped trials that may be continued."""
    unstored = _Inside("unstored.jsonl")
    """Records of trials that finished while the storage was away."""
    record = _Inside("trial.json")
    """The record of a trial that is trained by itself."""

    def checkpoint(self, number: int) -> Path:
        """Make the path of the weights that trial ``number`` had at the target."""
        return self.checkpoints / f"trial-{number}.ckpt"

    def state(self, number: int) -> Path:
        """Make the path of the state of stopped trial ``number``."""
        return self.states / f"trial-{number}.ckpt"

    def single_trial(self, batch_size: int, lr: float, seed: int) -> "Output":
        """Make the paths of a trial that is trained by itself."""
        return Output(self.root / f"trial-B{batch_size}-lr{lr:.6g}-seed{seed}")


def partial_of(path: Path) -> Path:
    """Make a random name, with a checksum, for a file that is to be renamed to ``path``."""
    name = path.name[-PARTIAL_NAME_LENGTH:]
    token = secrets.token_hex(8)
    return path.with_name(f".{name}.{token}{_checksum(name, token)}.partial")


def _checksum(name: str, token: str) -> str:
    """Compute the checksum in a name of :func:`partial_of`, by which bstune knows its own files."""
    text = f"bstune {name} {token}".encode("utf-8", "surrogateescape")
    return hashlib.sha256(text).hexdigest()[:16]


def final_name(path: Path) -> str | None:
    """Read from the name of a half-written file which name it was to get; None for other files.

    Such a file is named by :func:`partial_of`, which shortens a long name to its end.
    """
    match = PARTIAL.fullmatch(path.name)
    if match is None:
        return None
    name, token, checksum = match.groups()
    if _checksum(name, token) != checksum:
        return None
    return name


def create_partial(path: Path) -> BinaryIO:
    """Create a new file under a name of :func:`partial_of`; FileExistsError if it is taken."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | UNFOLLOWED
    return os.fdopen(os.open(path, flags, 0o666), "wb")


def sync_file(file: BinaryIO) -> None:
    """Bring what was written to a file to the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Bring a folder's names to the disk, where its file system can do that."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NO_FOLDER_SYNC:
            raise
    finally:
        os.close(descriptor)


def put_in_place(partial: Path, path: Path) -> None:
    """Rename a file that is on the disk to ``path``; a link there is replaced, not followed."""
    os.replace(partial, path)
    sync_folder(path.parent)


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file for bytes, which readers see as a whole once the body has ended.

    A body that fails leaves the file that was there before. An OSError names ``path``.
    """
    partial = partial_of(path)
    try:
        with create_partial(partial) as file:
            yield file
            sync_file(file)
        put_in_place(partial, path)
    except BaseException as error:
        # Half a file is of no use, and takes room on a full disk.
        with suppress(OSError):
            partial.unlink()
        # The user knows the file by its own name. An error on another file keeps that one's.
        if isinstance(error, OSError) and error.filename in (None, partial, str(partial)):
            error.filename = str(path)
            # An error of the renaming names two files.
            error.filename2 = None
        raise


def _without_secrets(path: Path, text: str) -> str:
    """Leave the remembered secrets out of a file's text."""
    # YAML is dumped from values that are filtered already, and ``*`` has a meaning in it.
    if path.suffix == ".yaml":
        return text
    return without_known(text)


def append_text(path: Path, text: str) -> None:
    """Append text to a regular file, which is made if it is missing.

    Remembered secrets are left out.

    Raises:
        StudyError: if it is a link or a device, or cannot be written.
    """
    text = _without_secrets(path, text)
    try:
        descriptor = _open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        with os.fdopen(descriptor, "wb") as file:
            file.write(text.encode())
            sync_file(file)
        sync_folder(path.parent)
    except OSError as error:
        raise StudyError(f"{path} cannot be written: {_strerror(error)}") from error


def _open_regular(path: Path, flags: int) -> int:
    """Open a regular file, and give its descriptor; OSError for anything else, a link too."""
    descriptor = os.open(path, flags | UNFOLLOWED, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return descriptor


def first_bytes(path: Path, count: int) -> bytes:
    """Read at most ``count`` bytes from a regular file's start; empty if it cannot be read."""
    try:
        with os.fdopen(_open_regular(path, os.O_RDONLY), "rb") as file:
            return file.read(count)
    except OSError:
        return b""


def _strerror(error: OSError) -> str:
    """Tell why a file could not be opened, in words that a user understands."""
    if error.errno == errno.ELOOP:
        return "it is a link, and bstune follows none there"
    return error.strerror or str(error)


def own_mark(path: Path) -> bytes:
    """Make the mark with which a file of weights or a state ends: its study and its name.

    The study is the one that the folder's study.json names.
    """
    # The file lies in the folder checkpoints or states of the study's folder.
    identity = _identity(Output(path.parent.parent))
    study = "of no study"
    if identity is not None and identity.id is not None:
        study = identity.id
    return f"bstune {study} {path.parent.name}/{path.name}".encode("utf-8", "surrogateescape")


def is_own(path: Path) -> bool:
    """Whether the folder's own study wrote this file of weights or a state under this name."""
    mark = own_mark(path)
    try:
        descriptor = _open_regular(path, os.O_RDONLY)
        with os.fdopen(descriptor, "rb") as file:
            file.seek(max(0, os.fstat(descriptor).st_size - len(mark)))
            return file.read() == mark
    # The file is missing or may not be read, so it counts as not this study's.
    except OSError:
        return False


def may_take(path: Path) -> bool:
    """Whether a trial's weights or state may be written at a path.

    If a file is there that this study did not write, they may not, and a warning says so.
    """
    if not os.path.lexists(path) or is_own(path):
        return True
    logger.warning(
        "%s is not this study's and stays as it is: what the trial would have kept there is not "
        "kept",
        path,
    )
    return False


def saved_beside(state: Path) -> Path:
    """Make the path, beside a trial's state, of what the user's own loop saves of the trial.

    That may be a file or a folder.
    """
    return state.with_suffix(".saved")


def remove_own(path: Path) -> None:
    """Remove a trial's weights or state, and what the user's loop saved beside it.

    A file that this study did not write stays, with what is beside it.
    """
    if is_own(path):
        _remove_saved(saved_beside(path))
        # The trial itself may have deleted a state that it could not read.
        path.unlink(missing_ok=True)


def _remove_saved(saved: Path) -> None:
    """Remove the file or folder that a user's loop saved; of a link, the link alone."""
    if saved.is_dir() and not saved.is_symlink():
        shutil.rmtree(saved, ignore_errors=True)
    else:
        saved.unlink(missing_ok=True)


def keep_trials(folder: Path, trials: Collection[int], keep: Callable[[], Collection[int]]) -> None:
    """Delete from a folder the files of some trials, but for those to keep.

    Files that this study did not write stay.

    Args:
        folder: of weights or states.
        trials: the numbers of the trials whose files may be deleted.
        keep: tells the numbers of those whose files stay; it is called only if there is any file.
    """
    if folder.is_symlink() or not folder.is_dir():
        return
    number_of: dict[Path, int] = {}
    for path in folder.iterdir():
        # A file that a writer left behind half-written counts by the name that it was to get.
        intended_name = final_name(path)
        match = re.fullmatch(r"trial-([0-9]{1,18})\.ckpt", intended_name or path.name)
        if match is None or int(match[1]) not in trials:
            continue
        if intended_name is not None:
            _remove_partial(path)
        elif is_own(path):
            number_of[path] = int(match[1])
    # What to keep takes long to tell after many trials, and replayed ones leave no files.
    if not number_of:
        return
    kept_numbers = keep()
    for path, number in number_of.items():
        if number not in kept_numbers:
            remove_own(path)


def remove_partials(folder: Path, names: Collection[str] | None = None) -> None:
    """Remove the half-written files that killed processes left in a folder.

    It is to be called by the one process that may write there, as it would remove another's.

    Args:
        folder: in which they are.
        names: the names that the removed files were to get; None: any.
    """
    for path in folder.iterdir():
        name = final_name(path)
        if name is not None and (names is None or name in names):
            _remove_partial(path)


def _remove_partial(path: Path) -> None:
    """Remove a file that bstune wrote in part; a link or a folder of its name is not bstune's."""
    if path.is_file() and not path.is_symlink():
        path.unlink(missing_ok=True)


def write_text_once(path: Path, text: str) -> None:
    """Write a file of text as a whole, without the remembered secrets; OSError if it cannot be."""
    content = _without_secrets(path, text).encode()
    with whole_file(path) as file:
        file.write(content)


def write_text(path: Path, text: str, sleep: Callable[[float], None] = time.sleep) -> None:
    """Write a file of text as a whole: a reader sees the old one or the new one.

    Remembered secrets are left out.

    Args:
        path: the file's.
        text: its new content.
        sleep: waits for some seconds; tests give their own.

    Raises:
        StudyError: if it cannot be written. A full disk or a folder that is away is tried again for
            ten seconds.
    """
    for tries_left in reversed(range(WRITE_TRIES)):
        try:
            write_text_once(path, text)
        except OSError as error:
            # Of errors that may pass, only the last one is raised.
            if error.errno not in PASSING or not tries_left:
                tried = "" if tries_left else f"; tried {WRITE_TRIES} times in {WRITE_TRIES - 1} s"
                raise StudyError(
                    f"{path} cannot be written: {error.strerror}{tried}; what has finished is "
                    "stored: mend it, and run the same command again"
                ) from error
            sleep(1.0)
        else:
            return


def unusable_name(error: BaseException) -> StudyError | None:
    """Make a plain error of the system's for a name that is too long, or links in a ring.

    None for other errors.
    """
    if not isinstance(error, OSError) or error.errno not in UNUSABLE:
        return None
    shown = str(error.filename)
    if len(shown) > SHOWN_NAME_LENGTH:
        shown = f"{shown[:SHOWN_NAME_LENGTH]}..."
    return StudyError(f"{shown}: {error.strerror}: choose another name")


def full_disk(error: BaseException) -> StudyError | None:
    """Make a plain error of one that a full disk or quota has caused; None for other errors."""
    if isinstance(error, BstuneError):
        return None
    for reason in with_causes(error):
        if isinstance(reason, OSError) and reason.errno in FULL_DISK_ERRORS:
            return StudyError(
                f"{reason.filename or 'a file'} cannot be written: {reason.strerror}; what has "
                "finished is stored: make room, and run the same command again"
            )
    return None


def check_writable(path: Path, what: str) -> None:
    """Check that a file at ``path`` could be created or written, and leave nothing there.

    ``what`` names the path in messages, such as an option.

    Raises:
        StudyError: if it could not.
    """
    try:
        exists = path.exists()
        parent = path.absolute().parent
        while not parent.exists():
            parent = parent.parent
    # The name is too long, or the folder may not be read.
    except OSError as error:
        raise StudyError(f"{what}: {error.strerror}: choose another place") from error
    if exists and not path.is_file():
        raise StudyError(f"{what}: {path} is there and no regular file: choose another place")
    if exists and not os.access(path, os.W_OK):
        raise StudyError(
            f"{what}: {path} is not writable: choose another place, or run from another folder"
        )
    if not parent.is_dir():
        raise StudyError(f"{what}: {parent} is not a folder: choose another place")
    # os.access allows root everything, below /proc too.
    try:
        _try_file(parent, path.name)
    except OSError as error:
        raise StudyError(
            f"{what}: folder {parent} is not writable ({error.strerror}): choose another place, or "
            "run from another folder"
        ) from error


def _try_file(folder: Path, name: str) -> None:
    """Try to make a file in a folder, and leave nothing; OSError if that fails.

    The file has no name where the file system can make such files: then a process that is killed
    here leaves nothing either.
    """
    try:
        os.close(os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    # An AttributeError is raised on a system that has no such files.
    except (OSError, AttributeError):
        partial = partial_of(folder / name)
        create_partial(partial).close()
        # The process that owns the folder removes half-written files, and may have been faster.
        partial.unlink(missing_ok=True)


def _identity(output: Output) -> Identity | None:
    """Read from its study.json which study a folder belongs to; None where it cannot be read."""
    try:
        text = read_text(output.identity, "the file")
        return Identity(**parse_json(text, output.identity.name))  # type: ignore[arg-type]
    except (InputError, TypeError):
        return None


def check_owner(output: Output, identity: Identity) -> Identity | None:
    """Check that the folder is this study's or empty.

    Returns:
        The identity that it has; None if it is missing or empty.

    Raises:
        StudyError: if it holds anything, and is not this study's.
    """
    if not output.root.is_dir():
        return None
    # Half-written files do not count: a killed process may have left them before it could say whose
    # the folder is.
    half_written = [final_name(path) is not None for path in output.root.iterdir()]
    if all(half_written):
        return None
    owner = _identity(output)
    if owner is None:
        problem = "is not empty and no study's"
    elif owner.of_same_study(identity):
        _check_inside(output)
        return owner
    else:
        problem = f"is of the study {owner.study!r} in {owner.storage}"
        if (owner.study, owner.storage) == (identity.study, identity.storage):
            problem += ", but of an earlier one of this name"
    raise StudyError(
        f"output={output.root} {problem}: choose another with output=DIR or study=NAME, or move "
        "the folder away"
    )


def _check_inside(output: Output) -> None:
    """Raise StudyError for a link in the place of a folder or file that trials write to.

    The study's own folder may be a link.
    """
    for folder in (output.checkpoints, output.states):
        if os.path.lexists(folder) and (folder.is_symlink() or not folder.is_dir()):
            raise _not_inside(folder, "folder")
    file = output.unstored
    if os.path.lexists(file) and (file.is_symlink() or not file.is_file()):
        raise _not_inside(file, "regular file")


def make_inside(folder: Path) -> None:
    """Make a folder inside a study's own, if it is missing.

    Raises:
        StudyError: if a link or a file has its name.
    """
    with suppress(FileExistsError):
        folder.mkdir()
    if folder.is_symlink() or not folder.is_dir():
        raise _not_inside(folder, "folder")


def _not_inside(path: Path, kind: str) -> StudyError:
    """Make the error of a path that is a link, or not of the kind that it should be."""
    problem = f"is no {kind}"
    if path.is_symlink():
        problem = "is a link"
    return StudyError(
        f"{path} {problem}, and nothing in a study's folder is written through a link: move it "
        "away; output=DIR itself may be a link"
    )


@contextmanager
def owned(output: Output, identity: Identity) -> Iterator[None]:
    """Make the output folder this study's while the body runs, or check that it is.

    If the body leaves nothing in a folder that was made for it, the folder is removed again.

    Raises:
        StudyError: if the folder is another's, or cannot be written.
    """
    owner = check_owner(output, identity)
    created = [path for path in (output.root, *output.root.parents) if not path.exists()]
    try:
        output.root.mkdir(parents=True, exist_ok=True)
        # A folder that was taken before the study began gets the study's identifier here.
        if owner is None or (owner.id is None and identity.id is not None):
            write_text(output.identity, json.dumps(asdict(identity)) + "\n")
    except OSError as error:
        problem = f"output={output.root} cannot be written: {error.strerror}"
        raise StudyError(f"{problem}; choose another with output=DIR") from error
    try:
        yield
    finally:
        # The folder is removed if it holds only the file that says whose it is.
        if created and output.root.is_dir():
            names = [path.name for path in output.root.iterdir()]
            if names == [output.identity.name]:
                output.identity.unlink()
                for path in created:
                    path.rmdir()
