"""Printing: numbers and durations as text, lines within a width, other libraries kept quiet."""

import logging
import math
import re
import shutil
import textwrap
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bstune.system.lightning_package import installed_lightning
from bstune.system.terminal import safe_console

if TYPE_CHECKING:
    from rich.console import Console

# Most and fewest columns of a line.
WIDTH = 100
MIN_WIDTH = 40
NO_BREAK = "\N{NO-BREAK SPACE}"
WITH_UNIT = re.compile(r"(\d) (ms|s|min|h|steps?|trials?|times)\b")
LIGHTNING_LOGGERS = (
    "lightning.pytorch",
    "lightning.fabric",
    "pytorch_lightning",
    "lightning_fabric",
)


# From here on a number is written as a power of ten.
HUGE = 1e9


def format_number(value: float | None, digits: int = 4) -> str:
    """Write a number with ``digits`` significant digits: 0.01234, 57, 4600, 12,340, 1e-05, 3e+12.

    None is a dash.
    """
    if value is None:
        return "-"
    rounded = float(f"{value:.{digits - 1}e}")
    if abs(rounded) >= HUGE:
        return f"{rounded:.{digits}g}"
    if abs(rounded) >= 1e4:
        return f"{rounded:,.0f}"
    return f"{rounded:.10g}"


def format_count(value: float | None) -> str:
    """Write a number of steps or examples in full: 57, 4613, 12,345. None is a dash."""
    if value is None:
        return "-"
    if abs(value) >= 1e4:
        return f"{value:,.0f}"
    return f"{value:.0f}"


# The least seconds that are told of what is still to come: what a study does by itself, its next
# decision or its report, takes as long.
LEAST_TO_GO = 1.0


def format_seconds(seconds: float | None) -> str:
    """Write a duration with three significant digits, in ms, s, min or h. None is a dash."""
    if seconds is None:
        return "-"
    # It is rounded before a unit is chosen, so that 0.9999 is 1.00 s, not 1000 ms.
    rounded = float(f"{seconds:.2e}")
    scale, unit = time_unit(rounded)
    value = float(f"{rounded / scale:.2e}")
    decimals = 0
    if value > 0.0:
        decimals = max(0, 2 - math.floor(math.log10(value)))
    return f"{value:,.{decimals}f} {unit}"


def to_go_text(seconds: float | None) -> str | None:
    """Write ``about 90.0 s to go``; None where that is not known, or less than a line is worth."""
    if seconds is None or seconds < LEAST_TO_GO:
        return None
    return f"about {format_seconds(seconds)} to go"


def time_unit(seconds: float) -> tuple[float, str]:
    """Choose the unit in which a duration reads best: the unit's seconds and its name."""
    if 0.0 < seconds < 1.0:
        return 1e-3, "ms"
    if seconds < 120.0:
        return 1.0, "s"
    if seconds < 7200.0:
        return 60.0, "min"
    return 3600.0, "h"


def plural(count: int, noun: str) -> str:
    """Write a count with its noun: ``1 trial``, ``2 trials``, ``12,345 trials``."""
    return f"{format_count(count)} {noun}{'s' * (count != 1)}"


def without_numbers(text: str) -> str:
    """Replace the whole numbers in a text, so that texts which differ in these alone are equal."""
    return re.sub(r"\d+", "#", text)


def listing(names: Sequence[str]) -> str:
    """List names in words: ``a``, ``a and b``, ``a, b and c``. There must be one at least."""
    *others, last = names
    if not others:
        return last
    return f"{', '.join(others)} and {last}"


def line_width(console: "Console") -> int:
    """Choose the columns of a line: a terminal's own, from ``MIN_WIDTH`` to ``WIDTH``.

    Where the console is no terminal it is ``WIDTH``.
    """
    if not console.is_terminal:
        return WIDTH
    columns = console.width
    if console.is_dumb_terminal:
        # rich takes every dumb terminal for one of 80 columns.
        columns = shutil.get_terminal_size().columns
    return max(MIN_WIDTH, min(WIDTH, columns))


def wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """Break a text between words into rows, all but the first indented.

    A path, a URL and a number with its unit stay whole, even if they are wider.
    """
    whole = WITH_UNIT.sub(f"\\1{NO_BREAK}\\2", text)
    rows = textwrap.wrap(
        whole,
        width,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [row.replace(NO_BREAK, " ") for row in rows]


def print_line(console: "Console", line: str) -> None:
    """Print a line; a terminal gets it broken between words, with its further rows indented."""
    rows = [line]
    if console.is_terminal:
        rows = list[str]()
        for part in line.splitlines():
            rows += wrapped(part, line_width(console), indent="    ")
    console.print("\n".join(rows), soft_wrap=True)


def plain_console() -> "Console":
    """Make rich's console without markup: names may have brackets and colons in them."""
    return safe_console(markup=False, emoji=False, highlight=False)


def quieten_lightning() -> None:
    """Keep the notes of both of Lightning's packages out of the output; warnings stay."""
    for name in LIGHTNING_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)


def quieten(training: bool = True) -> None:
    """Keep the notes of optuna and lightning out of the output; warnings and errors stay.

    Without ``training``, lightning is not imported.
    """
    # Both set their loggers' levels when imported, so they come first. A command that does not
    # train must not wait for lightning and torch: 4 s (lightning 2.6, files cached, two CPU cores).
    # optuna, which belongs to a layer above this one, takes 0.1 s.
    import optuna

    if training:
        installed_lightning()

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    quieten_lightning()
    # Lightning itself uses a deprecated pytree class, once per step.
    warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
    # Who has a GPU and sees this has asked for device=cpu.
    warnings.filterwarnings("ignore", message="GPU available but not used")
