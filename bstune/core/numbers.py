"""Numbers from other people's code: Python's, numpy's, or in a tensor."""

import operator
import sys
from typing import TypeGuard


def as_float(value: object) -> float | None:
    """Convert a number to a float: Python's, numpy's, a Decimal, a Fraction, a tensor of one value.

    None for anything else, such as a bool, a text, several values or an integer too large for a
    float. NaN and infinity are numbers.
    """
    try:
        number = value.item() if hasattr(value, "item") else value
        if isinstance(number, bool | str | bytes) or not hasattr(number, "__float__"):
            return None
        return float(number)
    except (OverflowError, RuntimeError, ValueError, TypeError):
        return None


def as_int(value: object) -> int | None:
    """Convert a whole number to an int: Python's, numpy's, or a tensor of one value.

    A float may be one too, such as 2.0. None for anything else, bools too.
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except (RuntimeError, ValueError, TypeError):
        real = as_float(value)
        return int(real) if real is not None and real.is_integer() else None
    # Bools have an index, too, and so has a tensor of one.
    is_bool = isinstance(value, bool) or str(getattr(value, "dtype", "")) == "torch.bool"
    return None if is_bool else number


def is_finite_number(value: object) -> TypeGuard[float]:
    """Whether a value of a parsed file is a number that a float holds; bools and NaN are none."""
    # To Python true and false are whole numbers.
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    # NaN compares false; an integer may be too large for a float.
    return abs(value) <= sys.float_info.max


def shown(value: object) -> str:
    """Write a value for a message: its first 60 characters, or its type if it has no text."""
    try:
        return f"{value!r:.60}"
    # Python writes no integer of more than 4,300 digits.
    except ValueError:
        return f"one of type {type(value).__name__}"
