"""A folder in which one command works at a time: a second one is told whose it is.

The lock is the system's own, on a file in the folder. So it ends with its process, however that ends, and no
process that was forked from it holds it on.
"""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bstune.core.errors import StudyError
from bstune.system.user import process_name

LOCK_NAME = ".running"
# Of the holder's name that is shown.
NAME_BYTES = 200
HELD_BY_ANOTHER = (errno.EACCES, errno.EAGAIN)


@contextmanager
def held_alone(folder: Path, option: str) -> Iterator[None]:
    """Hold a folder for this process; what it makes for that is gone afterwards.

    Args:
        folder: which is made where it is not there.
        option: that chooses the folder, such as ``sweep.output``.

    Raises:
        StudyError: where another process holds it, whose name it has, or it cannot be written.
    """
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    path = folder / LOCK_NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = _locked(path, f"{option}={folder}", option)
    except OSError as error:
        raise StudyError(
            f"{option}={folder} cannot be written: {error.strerror}; choose another with "
            f"{option}=DIR"
        ) from error
    try:
        yield
    finally:
        # Before it is let go: else another's new file might be taken away.
        path.unlink(missing_ok=True)
        os.close(descriptor)
        # Those that are not empty stay.
        with suppress(OSError):
            for made in created:
                made.rmdir()


def _locked(path: Path, folder: str, option: str) -> int:
    """Lock the file, write this process's name into it, and give its descriptor."""
    while True:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o666)
        try:
            _lock(descriptor, folder, option)
            # Whoever held it may have taken the file away meanwhile: then this one locks nothing.
            if _is_at(descriptor, path):
                os.ftruncate(descriptor, 0)
                os.write(descriptor, process_name().encode())
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _lock(descriptor: int, folder: str, option: str) -> None:
    """Lock an open file; StudyError where another process has."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # A file system without locks holds nobody off.
        if error.errno not in HELD_BY_ANOTHER:
            return
        holder = os.read(descriptor, NAME_BYTES).decode("utf-8", "replace") or "another process"
        raise StudyError(
            f"{folder} is in use by {holder}: wait for it, or choose another folder with "
            f"{option}=DIR"
        ) from error


def _is_at(descriptor: int, path: Path) -> bool:
    """Say whether an open file is the one at a path."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False
