"""Refuses arguments that a function or a class does not have, as options are: with a guess."""

import difflib
import inspect
from collections.abc import Callable, Collection
from functools import wraps
from typing import ParamSpec, TypeVar

from bstune.core.errors import ConfigError

Arguments = ParamSpec("Arguments")
Value = TypeVar("Value")


def without_unknown_arguments(function: Callable[Arguments, Value]) -> Callable[Arguments, Value]:
    """Let a function raise a ConfigError for arguments of unknown names, a line each."""
    known = list(inspect.signature(function).parameters)

    @wraps(function)
    def call(*arguments: Arguments.args, **options: Arguments.kwargs) -> Value:
        lines = [_line_on(name, known) for name in options if name not in known]
        if lines:
            raise ConfigError("\n".join(lines))
        return function(*arguments, **options)

    return call


def hint_on(name: str, known: Collection[str]) -> str:
    """Name the nearest of the known arguments; where none is near, list all of them."""
    meant = difflib.get_close_matches(name, known, n=1)
    if meant:
        return f"did you mean {meant[0]}?"
    return f"arguments: {', '.join(known)}"


def _line_on(name: str, known: list[str]) -> str:
    """Write the line on an unknown argument, with the nearest of the known ones."""
    meant = difflib.get_close_matches(name, known, n=1)
    if meant:
        return f"unknown argument {name}: did you mean {meant[0]}?"
    return f"unknown argument {name}; help() lists the arguments"
