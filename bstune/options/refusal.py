"""Writes the line on an option's value that is refused."""

import re
from collections.abc import Mapping
from typing import Any

# Lower bounds up to this one stand for 0.
TINY = 1e-6


def refusal(name: str, error: Mapping[str, Any]) -> str:
    """Write pydantic's error on a value as a line: the option, what is allowed, what it received.

    ``name`` is the dotted name of the option.
    """
    # Pydantic's "Input should be a valid integer, got a number ..." becomes "must be a valid
    # integer"; the value is quoted at the end.
    message = re.sub(r", (unable|got) .*| after validation.*", "", error["msg"])
    message = re.sub(r"^(Input|List|String) should", "must", message)
    if error["type"] == "int_parsing_size":
        message = "is too large"
    if error["type"] == "value_error":
        message = message.removeprefix("Value error, ")
        # A check of a whole section names the option itself.
        return message if message.startswith(f"{name}.") else f"{name}: {message}"
    for key, word in (
        ("ge", "at least"),
        ("le", "at most"),
        ("gt", "greater than"),
        ("lt", "less than"),
    ):
        if key in error.get("ctx", {}):
            message = f"must be {word} {error['ctx'][key]:.12g}"
    # A tiny lower bound only keeps arithmetic away from 0: to the user it means above 0.
    if 0 < error.get("ctx", {}).get("ge", 0) <= TINY and _is_at_most_0(error["input"]):
        message = "must be greater than 0"
    return f"{name} {message}, but got {shown(error['input'])}"


def _is_at_most_0(value: object) -> bool:
    """Whether a value is a number, or the text of one, of at most 0."""
    try:
        return float(value) <= 0  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False


def shown(value: object) -> str:
    """Write a value as messages quote it, cut if it is long."""
    text = "null" if value is None else repr(value)
    return text if len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)"
