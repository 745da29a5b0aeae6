"""What the user's code raises, as lines: the error and where it was. What a study can do without ends in one line."""

import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bstune.core.errors import BstuneError
from bstune.system.secrets import redact

PACKAGE, STDLIB = Path(__file__).parents[1], Path(sysconfig.get_path("stdlib"))
INSTALLED = {
    "site-packages",
    "dist-packages",
}  # names of folders with what is installed, of which there may be many
FRAMEWORKS = {"torch", "lightning", "pytorch_lightning", "lightning_fabric", "hydra", "omegaconf"}


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of the user's own files; without any, the last one in an installed package of theirs."""
    own: list[traceback.FrameSummary] = []
    installed: list[traceback.FrameSummary] = []
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename)
        if path.is_relative_to(PACKAGE) or frame.filename.startswith("<"):
            continue
        if INSTALLED & {*path.parts}:
            installed += [] if FRAMEWORKS & {*path.parts} else [frame]
        elif not path.is_relative_to(STDLIB):
            own.append(frame)
    return own or installed[-1:]


def in_users_code(error: BaseException) -> bool:
    """Return whether an error came by the user's own files, or by what they typed."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        path = Path(frame.f_code.co_filename)
        installed = INSTALLED & {*path.parts} or str(path).startswith("<")
        if frame.f_globals.get("__name__") == "__main__":
            return True
        if not installed and not path.is_relative_to(PACKAGE) and not path.is_relative_to(STDLIB):
            return True
    return False


def described(error: BaseException) -> tuple[str, str]:
    """Return an error of the user's code in a line, and where it was: frames as lines; no secret is in either."""
    kind, text, own = type(error).__name__, redact(str(error).strip()), _frames(error)
    frames = "".join(
        f"  {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}\n" for frame in own
    )
    frames = redact(frames)
    where = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
    if "Original Traceback" in text:  # of a DataLoader's process, whose error ends the text
        return text.splitlines()[-1], f"{text}\n"
    return (f"{kind}: {text.splitlines()[0]}" if text else kind) + where, frames


def cause(error: BaseException) -> str:
    """Return an error in a line: bstune's own says all that there is to say."""
    if isinstance(error, BstuneError):
        return redact(str(error)).splitlines()[0]
    return described(error)[0]


@contextmanager
def optional(what: str, lines: list[str]) -> Iterator[None]:
    """Do what a study can do without: an error becomes one line, ``what`` and its cause."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 (the user's code, and what draws and sends, may raise anything)
        lines.append(f"{what}: {cause(error)}")
