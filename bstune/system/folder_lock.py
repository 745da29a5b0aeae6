"""A folder in which one command works at a time: a second one is told whose it is.

The lock is the system's own, on a file in the folder. So it ends with its process, however that
ends, and no process that was forked from it holds it on.
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
# Bytes of the holder's name that a message shows.
NAME_BYTES = 200
# Error numbers of a lock that another process holds (fcntl(2)).
HELD_BY_ANOTHER = (errno.EACCES, errno.EAGAIN)
# Times that a folder is made and locked at most, as holders that end take it away in between.
MAKE_TRIES = 100


@contextmanager
def held_alone(folder: Path, option: str) -> Iterator[None]:
    """Hold a folder for this process while the body runs.

    The folder is made where it is not there. Afterwards the lock's file is removed, and so are the
    folders that were made, if they are empty.

    Args:
        folder: to be held.
        option: the option that chooses the folder, such as ``sweep.output``; messages name it.

    Raises:
        StudyError: if another process holds the folder, which is named, or if it cannot be written.
    """
    try:
        descriptor, created = _made_and_locked(folder, option)
    except OSError as error:
        raise StudyError(
            f"{option}={folder} cannot be written: {error.strerror}; choose another with "
            f"{option}=DIR"
        ) from error
    try:
        yield
    finally:
        # The file goes while it is still locked: after that it may be another process's new one.
        (folder / LOCK_NAME).unlink(missing_ok=True)
        os.close(descriptor)
        # rmdir refuses folders that are not empty: they stay.
        with suppress(OSError):
            for created_folder in created:
                created_folder.rmdir()


def _made_and_locked(folder: Path, option: str) -> tuple[int, list[Path]]:
    """Make the folder and lock it. If its last holder removes it in between, it is made again.

    Returns:
        The descriptor of the locked file, and the folders that were made, innermost first.
    """
    paths = (folder, *folder.parents)
    created = list[Path]()
    tries = 0
    while True:
        # A folder that was made in an earlier try counts, even if it is there now.
        created = [path for path in paths if path in created or not path.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return _locked(folder / LOCK_NAME, f"{option}={folder}", option), created
        except FileNotFoundError:
            tries += 1
            if tries == MAKE_TRIES:
                raise


def _locked(path: Path, folder: str, option: str) -> int:
    """Lock the file at ``path``, write this process's name into it, and give its descriptor."""
    while True:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o666)
        try:
            _lock(descriptor, folder, option)
            # The former holder may have removed the file meanwhile. Then nobody else sees this
            # lock, and it is tried again.
            if _is_at(descriptor, path):
                os.ftruncate(descriptor, 0)
                os.write(descriptor, process_name().encode())
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _lock(descriptor: int, folder: str, option: str) -> None:
    """Lock an open file; StudyError if another process has locked it."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # The file system has no locks: the folder is used without one.
        if error.errno not in HELD_BY_ANOTHER:
            return
        holder = os.read(descriptor, NAME_BYTES).decode("utf-8", "replace") or "another process"
        raise StudyError(
            f"{folder} is in use by {holder}: wait for it, or choose another folder with "
            f"{option}=DIR"
        ) from error


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is the one at a path, which may have been removed or replaced since."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False
