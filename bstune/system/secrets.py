"""Passwords and tokens: left out of what is printed or written, and moved from the command line to the environment.

A text that is not whole, as a driver's message, may show a password without its URL. So those that the command line or
the config gave are remembered, as they were given, decoded and encoded, and left out of such texts too.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote, quote_plus, unquote, unquote_plus

HIDDEN = "***"
_SHORTEST = 4  # of the passwords that are looked for without a URL around them
_KEY = r"(?:api|access|secret|private|account)_?key"
_WORD = rf"(?:password|passwd|pwd|passphrase|secret|token|credentials?|signature|{_KEY})"
_NAME = rf"[\w.\-]*{_WORD}"
_REFERENCE = r"\$\{[^{}]*\}"
_USER = rf"(?:{_REFERENCE}|[^\s:/\"'])*"
# Up to the last @: SQLAlchemy takes a password's own @ for its end and shows the rest as a host. What follows a colon
# in http://host:80/x@y is a port.
_PASSWORD = re.compile(
    rf"((?:https?://(?!{_USER}:\d+/)|\b(?!https?:)[a-z][\w+.\-]{{0,30}}://){_USER}:)([^\s\"']*)(?=@)",
    re.I,
)
_WHOLE = re.compile(
    r"([a-z][\w+.\-]*://[^:/]*:)(.*)(?=@)", re.I
)  # where the text is one URL: spaces too
_USER_ALONE = re.compile(r"(\bhttps?://)([^\s:/@\"']+)(?=@)", re.I)  # a token, as a rule
_VALUE = rf"{_REFERENCE}|" r"\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|[^\s&,;\"')\]}]+"
_PAIRS = (
    re.compile(rf"((?<![\w.\-]){_NAME}(?:\s?=\s?|%3D))({_VALUE})", re.I),
    re.compile(rf"([{{,]\s*[\"']?{_NAME}[\"']?\s*:\s*)({_VALUE})", re.I),
    re.compile(rf"(^[ \t]*(?:- )?[\"']?{_NAME}[\"']?:[ \t]+)(\S.*)", re.I | re.M),
)
_SHOWN = re.compile(
    rf"[\"']?(?:{_REFERENCE}|null|none|true|false|yes|no|{re.escape(HIDDEN)})?[\"']?", re.I
)
_PREFIX = "BSTUNE_"  # of the environment variables
_known: set[str] = set()


def _patterns(text: str) -> tuple[re.Pattern[str], ...]:
    """Return what finds the secrets in a text; each has what stands before it in a group, and itself in another."""
    whole = re.fullmatch(r"[a-z][\w+.\-]*://(?![^:/]*:\d+/)[^@\n]*@\S*", text, re.I)
    return (*((_WHOLE,) if whole else ()), _PASSWORD, _USER_ALONE, *_PAIRS)


def _hide(match: re.Match[str]) -> str:
    if _SHOWN.fullmatch(match[2]):
        return match[0]
    mark = match[2][0] if match[2][0] in "\"'" and match[2][-1] == match[2][0] else ""
    return f"{match[1]}{mark}{HIDDEN}{mark}"


def redact_patterns(text: str) -> str:
    """Return ``text`` without the passwords in its URLs and the values of what is called a password or a token."""
    for pattern in _patterns(text):
        text = pattern.sub(_hide, text)
    return text


def redact(text: str) -> str:
    """Return a message without passwords, in URLs or not: also without those that were given and remembered."""
    for secret in sorted(_known, key=len, reverse=True):
        left, right = (
            r"(?<!\w)" if secret[0].isalnum() else "",
            r"(?!\w)" if secret[-1].isalnum() else "",
        )
        text = re.sub(f"{left}{re.escape(secret)}{right}", HIDDEN, text)
    return redact_patterns(text)


def redact_values(values: Any, name: str = "") -> Any:
    """Return nested options without secrets, by their names and in their texts; references stay."""
    if isinstance(values, Mapping):
        return {key: redact_values(value, str(key)) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [redact_values(value, name) for value in values]
    if (
        re.fullmatch(_NAME, name, re.I)
        and not isinstance(values, bool | None)
        and not _SHOWN.fullmatch(str(values))
    ):
        return HIDDEN
    return redact_patterns(values) if isinstance(values, str) else values


def remember(values: Any, name: str = "") -> None:
    """Remember the secrets among nested options, so that :func:`redact` finds them in messages."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            remember(value, str(key))
    elif isinstance(values, list | tuple):
        for value in values:
            remember(value, name)
    elif values is not None and not isinstance(values, bool):
        text = str(values)
        found = [
            match[2].strip("\"'") for pattern in _patterns(text) for match in pattern.finditer(text)
        ]
        found += [text] if re.fullmatch(_NAME, name, re.I) else []
        found += [
            f"{one.split('@', 1)[1]}@" for one in found if "@" in one
        ]  # SQLAlchemy takes it for the host's
        for one in found:
            forms = {one, unquote(one), unquote_plus(one)}
            forms |= {
                written
                for form in forms
                for written in (quote(form, ""), quote_plus(form), repr(form)[1:-1])
            }
            _known.update(
                form for form in forms if len(form) >= _SHORTEST and not _SHOWN.fullmatch(form)
            )


@contextmanager
def secrets_in_environment(arguments: Sequence[str]) -> Iterator[list[str]]:
    """Yield the arguments with references to environment variables for values that hold a secret.

    So no file, no worker and no message of Hydra's sees them, and what is written of the command can be run again.
    """
    before = {name: value for name, value in os.environ.items() if name.startswith(_PREFIX)}
    try:
        yield [_moved(argument) for argument in arguments]
    finally:
        for name in [name for name in os.environ if name.startswith(_PREFIX)]:
            del os.environ[name]
        os.environ.update(before)


def reference(option: str) -> str:
    """Return the reference to the environment variable for a secret option: ``${oc.env:BSTUNE_STORAGE}``."""
    return f"${{oc.env:{_variable(option)}}}"


def _variable(option: str) -> str:
    return _PREFIX + re.sub(r"\W+", "_", option.strip("+~")).upper()


def _moved(argument: str) -> str:
    option, equals, text = argument.partition("=")
    name = option.lstrip("+~")
    if not equals or option.startswith("-") or not re.search(f"://|{_WORD}", argument, re.I):
        return argument
    # hydra: only where there may be something to move
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    remember(text, name)
    value: Any = text
    try:
        override = OverridesParser.create().parse_override(argument)
        value = text if override.is_sweep_override() else override.value()
        usable = not override.is_sweep_override()
    except HydraException:
        usable = False
    # A URL need not be quoted, as Hydra's grammar has it of one with a comma, or with = in its query.
    if not usable and not re.fullmatch(r"[a-z][\w+.\-]*://(?!.*://)[^\"']*", text, re.I):
        return argument
    remember(value, name)
    return (
        argument if redact_values(value, name) == value else f"{option}={_referring(value, name)}"
    )


def _referring(value: Any, option: str) -> str:
    """Return a value as Hydra reads it, with its secrets in environment variables."""
    # as above
    from hydra.core.override_parser.types import Override

    if redact_values(value, option) == value:
        return str(Override._get_value_element_as_str(value))
    if isinstance(value, dict):
        return (
            "{"
            + ",".join(f"{key}:{_referring(one, f'{option}.{key}')}" for key, one in value.items())
            + "}"
        )
    if isinstance(value, list):
        return "[" + ",".join(_referring(one, f"{option}.{i}") for i, one in enumerate(value)) + "]"
    os.environ[_variable(option)] = str(value)
    return reference(option) if isinstance(value, str) else f"${{oc.decode:{reference(option)}}}"
