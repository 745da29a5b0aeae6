"""Errors of the user's code as lines: the error, and where it was raised.

What a study can do without ends in one line.
"""

import inspect
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import ParamSpec, TypeVar

from bstune.core.errors import BstuneError
from bstune.system.secrets import redact

Arguments = ParamSpec("Arguments")
Value = TypeVar("Value")
PACKAGE = Path(__file__).parents[1]
STDLIB = Path(sysconfig.get_path("stdlib"))
# Names of the folders that packages are installed in.
INSTALLED = {"site-packages", "dist-packages"}
# So many of a thread's innermost frames are shown where none is of the user's own files.
INNERMOST = 3
# Packages whose frames are never shown as the user's.
FRAMEWORKS = {"torch", "lightning", "pytorch_lightning", "lightning_fabric", "hydra", "omegaconf"}


def own_frames(stack: Iterable[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Choose the frames of the user's own files.

    Where there is none, it is the last frame in an installed package, frameworks left out.
    """
    users: list[traceback.FrameSummary] = []
    installed: list[traceback.FrameSummary] = []
    for frame in stack:
        path = Path(frame.filename)
        # Code without a file, such as a dataclass's __init__, has a name such as <string>.
        if path.is_relative_to(PACKAGE) or frame.filename.startswith("<"):
            continue
        if not INSTALLED.isdisjoint(path.parts):
            if FRAMEWORKS.isdisjoint(path.parts):
                installed.append(frame)
        elif not path.is_relative_to(STDLIB):
            users.append(frame)
    return users or installed[-1:]


def standing_frames(frame: FrameType | None) -> list[traceback.FrameSummary]:
    """Choose the frames that show where a running thread stands.

    They are the user's frames, else the innermost ones. Frames outside of bstune's own outermost
    frame, such as those of the script that called it, are left out.
    """
    stack = list[traceback.FrameSummary]()
    if frame is not None:
        stack += traceback.extract_stack(frame)
    inside = stack
    for position, summary in enumerate(stack):
        if Path(summary.filename).is_relative_to(PACKAGE):
            inside = stack[position:]
            break
    return own_frames(inside) or inside[-INNERMOST:]


def frame_lines(frames: Iterable[traceback.FrameSummary]) -> str:
    """Write frames as lines: file, line number, function and the line's text."""
    lines = list[str]()
    for frame in frames:
        lines.append(f"  {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}\n")
    return "".join(lines)


def note_users_code(error: BaseException) -> None:
    """Mark an error as raised by the user's code in another process: its frames are lost."""
    error.__bstune_users_code__ = True  # type: ignore[attr-defined]


def in_users_code(error: BaseException) -> bool:
    """Whether an error was raised within the user's own files, or in their ``__main__`` module.

    The latter holds what they type in a notebook.
    """
    # An error from another process has lost its frames, and is marked (note_users_code).
    if getattr(error, "__bstune_users_code__", False):
        return True
    for frame, _ in traceback.walk_tb(error.__traceback__):
        path = Path(frame.f_code.co_filename)
        if frame.f_globals.get("__name__") == "__main__":
            return True
        # Code without a file, such as a dataclass's __init__, has a name such as <string>.
        has_file = not str(path).startswith("<")
        is_installed = not INSTALLED.isdisjoint(path.parts)
        is_known = path.is_relative_to(PACKAGE) or path.is_relative_to(STDLIB)
        if has_file and not is_installed and not is_known:
            return True
    return False


def note_steps(error: BaseException, steps: int) -> None:
    """Note on an error after how many steps of its trial it came, for :func:`steps_before`."""
    error.__bstune_steps__ = steps  # type: ignore[attr-defined]


def steps_before(error: BaseException) -> int:
    """Give the step that :func:`note_steps` noted with an error or its cause; 0 where none did."""
    for cause in with_causes(error):
        steps: int | None = getattr(cause, "__bstune_steps__", None)
        if steps is not None:
            return steps
    return 0


def with_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, then its cause, that one's cause, and so on, each once."""
    # Causes may form a ring, as where an error is raised again from what it caused.
    visited = set[int]()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in visited:
        visited.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__


def described(error: BaseException) -> tuple[str, str]:
    """Describe an error of the user's code: in one line, and the frames where it was as lines.

    Secrets are left out of both.
    """
    text = redact(str(error).strip())
    # The text of an error in a DataLoader's process is its traceback, which ends with the error.
    if "Original Traceback" in text:
        return text.splitlines()[-1], f"{text}\n"
    line = type(error).__name__
    if text:
        line += f": {text.splitlines()[0]}"
    frames = own_frames(traceback.extract_tb(error.__traceback__))
    if frames:
        line += f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})"
    return line, redact(frame_lines(frames))


def place_of(thing: object) -> str:
    """Write where a class or a function of the user's is defined, as `` (model.py:12)``.

    Empty where that is not known, or within bstune.
    """
    place = _place_of_class(thing) if isinstance(thing, type) else _place_of_function(thing)
    if place is None or Path(place[0]).is_relative_to(PACKAGE):
        return ""
    file, line = place
    return f" ({Path(file).name}:{line})"


def _place_of_class(thing: type) -> tuple[str, int] | None:
    """Find the file and the line of a class; None where they are not known."""
    # A class that was sent to this process by pickle is in no file here, but its functions know
    # theirs.
    functions = list[tuple[str, int]]()
    for value in vars(thing).values():
        # A function from elsewhere may be in another file.
        if not getattr(value, "__qualname__", "").startswith(f"{thing.__qualname__}."):
            continue
        place = _place_of_function(value)
        if place is not None:
            functions.append(place)
    # inspect finds the file by the name of the class's module. In this process another file may
    # have that name: its answer counts only if the functions are in the same file.
    with suppress(OSError, TypeError):
        file = inspect.getsourcefile(thing)
        if file is not None and (not functions or functions[0][0] == file):
            return file, inspect.getsourcelines(thing)[1]
    # The function with the smallest line number is the nearest to the head of the class.
    return min(functions, default=None, key=lambda place: place[1])


def _place_of_function(thing: object) -> tuple[str, int] | None:
    """Find the file and the line of a function; None for what has no code."""
    code = getattr(inspect.unwrap(thing), "__code__", None) if callable(thing) else None
    return None if code is None else (code.co_filename, code.co_firstlineno)


def without_own_frames(function: Callable[Arguments, Value]) -> Callable[Arguments, Value]:
    """Let bstune's own errors leave a public function without the frames that they came through.

    Their messages say what to mend. An error of the user's code, and one that is the cause of
    another, keeps its frames.
    """

    @wraps(function)
    def call(*arguments: Arguments.args, **options: Arguments.kwargs) -> Value:
        try:
            return function(*arguments, **options)
        except BstuneError as error:
            raise error.with_traceback(None)  # noqa: B904 (it is the same error)

    return call


def cause(error: BaseException) -> str:
    """Describe an error in one line; bstune's own errors have their message alone."""
    if isinstance(error, BstuneError):
        return redact(str(error)).splitlines()[0]
    return described(error)[0]


@contextmanager
def optional(what: str, lines: list[str]) -> Iterator[None]:
    """Let an error of the body, which a study can do without, only add a line to ``lines``.

    ``what`` begins the line and says what is missing then, such as "no roofline".
    """
    try:
        yield
    # The user's code, and the libraries that draw figures and send results, may raise anything.
    except Exception as error:  # noqa: BLE001
        lines.append(f"{what}: {cause(error)}")
