"""Numbers, durations and rows as text."""

import difflib
import textwrap
from collections.abc import Iterable, Sequence

# Columns of a row's label, and of a line.
LABEL_WIDTH = 11
LINE_WIDTH = 80
# Sizes between which a number is written without an exponent.
SMALLEST = 1e-4
LARGEST = 1e6
# The codes of characters that steer a terminal; tab and line feed are text.
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(9), *range(11, 32), *range(127, 160))}


def number(value: float, digits: int = 3) -> str:
    """Write a number with so many significant digits: 0.4, 1.18, 118, 12,300, 1e-05.

    A whole number that must be exact, such as a batch size or a count, does not belong here.
    """
    rounded = float(f"{value:.{digits - 1}e}")
    size = abs(rounded)
    if 1000 <= size <= LARGEST:
        return f"{rounded:,.0f}"
    if size == 0 or SMALLEST <= size < 1000:
        return f"{rounded:.10g}"
    return f"{rounded:.{digits}g}"


def exact(value: float) -> str:
    """Write a number that has been rounded where it was made: 0.9985, 1536."""
    return f"{value:.10g}"


def seconds(value: float) -> str:
    """Write a duration with two significant digits: 33 ms, 1.2 s, 4 min, 2.1 h."""
    # It is rounded before its unit is chosen: 0.999 is 1 s, not 1,000 ms.
    rounded = float(f"{value:.1e}")
    if rounded < 1:
        return f"{number(rounded * 1000, 2)} ms"
    if rounded < 120:
        return f"{number(rounded, 2)} s"
    if rounded < 7200:
        return f"{number(rounded / 60, 2)} min"
    return f"{number(rounded / 3600, 2)} h"


def speedup(value: float) -> str:
    """Write a quotient of two times with two significant digits: 2.9x, 17x."""
    return f"{number(value, 2)}x"


def count(n: int, noun: str) -> str:
    """Write a count with its noun: 1 trial, 2 trials, 12,345 steps."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def sizes(batch_sizes: Sequence[int]) -> str:
    """Write batch sizes: batch size 64; batch sizes 64, 90 and 1,024."""
    *before, last = (f"{size:,}" for size in batch_sizes)
    return f"batch sizes {', '.join(before)} and {last}" if before else f"batch size {last}"


def wrap(label: str, text: str, width: int = LINE_WIDTH) -> str:
    """Write a row: its label, then its text broken between words, all lines of it indented."""
    return textwrap.fill(
        text,
        width,
        initial_indent=label.ljust(LABEL_WIDTH),
        subsequent_indent=" " * LABEL_WIDTH,
        break_long_words=False,
        break_on_hyphens=False,
    )


def plain(text: str) -> str:
    """Write characters that steer a terminal as their codes: names may come from other people."""
    return text.translate(_CONTROL)


def guess(word: str, known: Iterable[str]) -> str | None:
    """Choose the known name that a misspelled one is most like; None where none is like it."""
    matches = difflib.get_close_matches(word, list(known), n=1)
    return matches[0] if matches else None
