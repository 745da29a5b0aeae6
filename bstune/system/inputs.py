"""Reads text files that a user names, or that others wrote, within bounds whatever they hold.

    text = read_text(Path("points.csv"), "the CSV file")
    values = parse_json(text, "points.csv, line 3")
    config = parse_yaml(text, "config.yaml")

A FIFO would wait for ever, a device never ends, a file nested 100,000 deep ends in a
RecursionError, and a few lines of YAML can stand for a billion values. Each is an
:class:`InputError` of one line here.
"""

import json
import math
import os
import re
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import yaml

from bstune.core.errors import InputError

# Most bytes of a text file.
TEXT_LIMIT = 100_000_000
# Most characters of a YAML document: PyYAML may read 100,000 a second.
YAML_CHARACTERS = 2_000_000
# Deepest nesting of lists and mappings.
MAX_DEPTH = 64
# Most values of a YAML document, with each alias counted as what it stands for.
MAX_NODES = 1_000_000
# The path that stands for standard input.
STANDARD_INPUT = Path("-")

# Characters of a name or a reason in a message.
_SHOWN_LENGTH = 200
_CHUNK_BYTES = 1_000_000

# What is no regular file: how it is told by its mode, and called in messages.
_NOT_REGULAR: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISDIR, "is a folder"),
    (stat.S_ISFIFO, "is a pipe"),
    (stat.S_ISCHR, "is a device"),
    (stat.S_ISBLK, "is a device"),
    (stat.S_ISSOCK, "is a socket"),
)

# A string of JSON, which may lack its end: every quote so begins a match, and looking takes linear
# time.
_JSON_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)
_NO_BRACKETS = re.compile(r"[^\[\]{}]+")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")

# What PyYAML raises besides YAMLError where a scalar is not of the type that its tag or its form
# says, such as 2001-99-99, !!int '' and !!timestamp x.
_BAD_SCALAR = (ValueError, LookupError, AttributeError, TypeError, OverflowError)
_YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_text(path: Path, what: str, limit: int = TEXT_LIMIT) -> str:
    """Read a regular file of UTF-8 text, with or without a byte order mark.

    Args:
        path: the file; ``-`` is standard input.
        what: the kind of file in messages, such as "the table".
        limit: the most bytes that it may have.

    Raises:
        InputError: if the file is missing, not regular, too large or not UTF-8, or holds NUL
            characters.
    """
    name = f"{what} {one_line(str(path))}"
    data = read_bytes(path, what, limit)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name} is not UTF-8 text (byte {error.start}): give a text file"
        ) from error
    if "\0" in text:
        raise InputError(f"{name} holds NUL characters: give a text file")
    return text


def read_bytes(path: Path, what: str, limit: int = TEXT_LIMIT) -> bytes:
    """Read the bytes of a regular file, or of standard input for ``-``.

    Args:
        path: the file; ``-`` is standard input.
        what: the kind of file in messages, such as "the table".
        limit: the most bytes that it may have.

    Raises:
        InputError: if the file is missing, not regular, or has more than ``limit`` bytes.
    """
    name = f"{what} {one_line(str(path))}"
    try:
        if path == STANDARD_INPUT:
            name = f"{what} on standard input"
            data = _read_descriptor(_standard_input(name), limit)
        else:
            descriptor = open_regular(path, what)
            try:
                if os.fstat(descriptor).st_size > limit:
                    _refuse_size(name, limit)
                data = _read_descriptor(descriptor, limit)
            finally:
                os.close(descriptor)
    except OSError as error:
        raise InputError(f"{name} cannot be read: {error.strerror or error}") from error
    # Standard input tells no size beforehand, and a file may grow while it is read.
    if len(data) > limit:
        _refuse_size(name, limit)
    return data


def open_regular(path: Path, what: str) -> int:
    """Open a regular file for reading, and give its descriptor.

    It does not wait for the other end of a pipe, and never opens a device: opening one may already
    do something. ``what`` is the kind of file in messages.

    Raises:
        InputError: for what is no regular file, or cannot be opened.
    """
    name = f"{what} {one_line(str(path))}"
    try:
        _check_regular(os.stat(path).st_mode, name)
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError as error:
        raise InputError(f"{name} cannot be read: {error.strerror or error}") from error
    # The name has a NUL character, or a lone surrogate, which no encoding can write.
    except ValueError as error:
        raise InputError(f"{name} cannot be read: {error}") from error
    try:
        # The name may lead elsewhere since it was looked at; the descriptor does not.
        _check_regular(os.fstat(descriptor).st_mode, name)
    except (InputError, OSError):
        os.close(descriptor)
        raise
    return descriptor


def _check_regular(mode: int, name: str) -> None:
    """Raise InputError unless a mode, as ``os.stat`` gives it, is a regular file's."""
    if stat.S_ISREG(mode):
        return
    kind = next((kind for is_kind, kind in _NOT_REGULAR if is_kind(mode)), "is no file")
    hint = ", or - for standard input"
    if kind == "is a folder":
        hint = ""
    raise InputError(f"{name} {kind}: give a regular file{hint}")


def _standard_input(name: str) -> int:
    """Find the descriptor of standard input; InputError if it is closed or a folder."""
    try:
        descriptor = sys.stdin.fileno()
        mode = os.fstat(descriptor).st_mode
    # The stream is closed, or a caller has replaced it.
    except (AttributeError, ValueError, OSError) as error:
        raise InputError(f"{name} cannot be read: it is closed") from error
    if stat.S_ISDIR(mode):
        raise InputError(f"{name} is a folder: give a file")
    return descriptor


def _read_descriptor(descriptor: int, limit: int) -> bytes:
    """Read to the end, or until there is one byte more than ``limit``.

    That byte tells the caller that the file is too large.
    """
    chunks = []
    left = limit + 1
    while left > 0:
        chunk = os.read(descriptor, min(left, _CHUNK_BYTES))
        if not chunk:
            break
        chunks.append(chunk)
        left -= len(chunk)
    return b"".join(chunks)


def _refuse_size(name: str, limit: int) -> NoReturn:
    """Raise the InputError of a file that is too large."""
    raise InputError(f"{name} has more than {limit / 1e6:.10g} MB: give a smaller file")


def parse_json(text: str, what: str, finite: bool = False) -> object:
    """Parse a JSON document whose lists and mappings are nested at most 64 deep.

    Args:
        text: the document.
        what: its name in messages.
        finite: whether NaN, infinities and numbers that no float holds are refused.

    Raises:
        InputError: for anything else.
    """
    _check_json_depth(text, what)
    try:
        if finite:
            value: object = json.loads(
                text, parse_constant=_not_finite, parse_float=_finite_float, parse_int=_finite_int
            )
        else:
            value = json.loads(text)
        # Half of a surrogate pair parses, but no UTF-8 holds it: to encode it is a ValueError.
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, OverflowError) as error:
        raise InputError(f"{what} is not JSON ({one_line(str(error))})") from error
    return value


def _check_json_depth(text: str, what: str) -> None:
    """Raise InputError if brackets are nested too deep, without parsing the text."""
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return
    depth = 0
    for bracket in _NO_BRACKETS.sub("", _JSON_STRING.sub("", text)):
        depth += 1 if bracket in "[{" else -1
        if depth > MAX_DEPTH:
            _refuse_depth(what)


def _not_finite(constant: str) -> NoReturn:
    """Refuse NaN and infinities as numbers of JSON."""
    raise ValueError(f"{constant} is no number of JSON")


def _finite_float(digits: str) -> float:
    """Parse a number of JSON; ValueError for one beyond a float."""
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits[:_SHOWN_LENGTH]} is beyond a float")
    return value


def _finite_int(digits: str) -> int:
    """Parse a whole number of JSON; OverflowError for one beyond a float."""
    value = int(digits)
    float(value)
    return value


def parse_yaml(text: str, what: str) -> object:
    """Parse a YAML document of plain values: strings, numbers, dates, lists and mappings.

    ``what`` names the document in messages.

    Raises:
        InputError: for anything that is not YAML, is nested more than 64 deep, or has more than 2
            MB; and for aliases that stand for what they are part of, or for more than a million
            values in all.
    """
    try:
        check_yaml(text, what)
        # The loader is a safe one, in C where there is one.
        return yaml.load(text, Loader=_YAML_LOADER)  # noqa: S506
    except (yaml.YAMLError, *_BAD_SCALAR) as error:
        raise InputError(f"{what} is not YAML: {one_line(str(error))}") from error


def check_yaml(text: str, what: str) -> None:
    """Check that YAML is not too large to be built, without building it.

    An alias stands for all that its anchor holds, so a few lines may stand for a billion values.
    :func:`parse_yaml` calls it; it is also for documents that another library reads.

    Raises:
        InputError: for more than 2 MB, a million values or 64 levels, and for an alias that stands
            for what it is part of.
        yaml.YAMLError, ValueError: for what is not YAML.
    """
    if len(text) > YAML_CHARACTERS:
        raise InputError(
            f"{what} has more than {YAML_CHARACTERS / 1e6:.10g} MB: give a smaller file"
        )
    nodes = 0
    # How many nodes each finished anchor stands for.
    anchored: dict[str, int] = {}
    # The anchor of each open list or mapping, and how many nodes came before it.
    open_collections: list[tuple[str | None, int]] = []
    for event in yaml.parse(text, Loader=_YAML_LOADER):
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in anchored:
                raise InputError(
                    f"{what} is not YAML: *{event.anchor} stands within what it refers to, or "
                    "before it"
                )
            nodes += anchored[event.anchor]
        elif isinstance(event, yaml.CollectionStartEvent):
            open_collections.append((event.anchor, nodes))
            nodes += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, nodes_before = open_collections.pop()
            if anchor is not None:
                anchored[anchor] = nodes - nodes_before
        elif isinstance(event, yaml.ScalarEvent):
            nodes += 1
            if event.anchor is not None:
                anchored[event.anchor] = 1
            # Half a character, as "\\ud800" stands for, is a ValueError.
            event.value.encode("utf-8")
        if len(open_collections) > MAX_DEPTH:
            _refuse_depth(what)
        if nodes > MAX_NODES:
            raise InputError(
                f"{what} stands for more than {MAX_NODES:,} values: give a smaller file"
            )


def _refuse_depth(what: str) -> NoReturn:
    """Raise the InputError of a document that is nested too deep."""
    raise InputError(f"{what} is nested more than {MAX_DEPTH} deep: give a flatter file")


def one_line(text: str) -> str:
    """Write a text as one printable line of about 200 characters at most, for a message."""
    joined = " ".join(text.split())
    # ascii() writes an escape such as \x1b, in quotes, which are cut off.
    letters = [letter if letter.isprintable() else ascii(letter)[1:-1] for letter in joined]
    line = "".join(letters)
    if len(line) <= _SHOWN_LENGTH:
        return line
    return f"{line[:_SHOWN_LENGTH]}..."
