"""What is printed: numbers and durations as text, the notes of other libraries kept quiet."""

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

# Columns of a line, at most and at least.
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


def format_number(value: float | None, digits: int = 4) -> str:
    """Write ``value`` with ``digits`` significant digits: 0.01234, 57, 4600, 12,340, 1e-05.

    A dash for None.
    """
    if value is None:
        return "-"
    rounded = float(f"{value:.{digits - 1}e}")
    if abs(rounded) >= 1e4:
        return f"{rounded:,.0f}"
    return f"{rounded:.10g}"


def format_count(value: float | None) -> str:
    """Write a number of steps or examples in full: 57, 4613, 12,345; a dash for None."""
    if value is None:
        return "-"
    if abs(value) >= 1e4:
        return f"{value:,.0f}"
    return f"{value:.0f}"


def format_seconds(seconds: float | None) -> str:
    """Write a duration with three significant digits and its unit, ms, s, min or h.

    A dash for None.
    """
    if seconds is None:
        return "-"
    # Before a unit is chosen, so that 0.9999 is 1.00 s, not 1000 ms.
    rounded = float(f"{seconds:.2e}")
    scale, unit = time_unit(rounded)
    value = float(f"{rounded / scale:.2e}")
    decimals = 0
    if value > 0.0:
        decimals = max(0, 2 - math.floor(math.log10(value)))
    return f"{value:,.{decimals}f} {unit}"


def time_unit(seconds: float) -> tuple[float, str]:
    """Choose the unit in which a duration reads best: its length in seconds and its name."""
    if 0.0 < seconds < 1.0:
        return 1e-3, "ms"
    if seconds < 120.0:
        return 1.0, "s"
    if seconds < 7200.0:
        return 60.0, "min"
    return 3600.0, "h"


def plural(count: int, noun: str) -> str:
    """Write ``1 trial``, ``2 trials``, ``12,345 trials``."""
    return f"{format_count(count)} {noun}{'s' * (count != 1)}"


def listing(names: Sequence[str]) -> str:
    """Write ``a``, ``a and b``, ``a, b and c``; names must be one at least."""
    *others, last = names
    if not others:
        return last
    return f"{', '.join(others)} and {last}"


def line_width(console: "Console") -> int:
    """Give the columns of a line: those of a terminal, at most and elsewhere ``WIDTH``."""
    if not console.is_terminal:
        return WIDTH
    columns = console.width
    if console.is_dumb_terminal:
        # rich takes 80 for each of them.
        columns = shutil.get_terminal_size().columns
    return max(MIN_WIDTH, min(WIDTH, columns))


def wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """Break a text between words, further rows indented.

    A path, a URL, a number with its unit stay whole.
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
    """Print a line, on a terminal broken between words, further rows of it indented."""
    rows = [line]
    if console.is_terminal:
        rows = list[str]()
        for part in line.splitlines():
            rows += wrapped(part, line_width(console), indent="    ")
    console.print("\n".join(rows), soft_wrap=True)


def plain_console() -> "Console":
    """Make rich's console, which prints text as it is: names may have brackets and colons in them."""
    return safe_console(markup=False, emoji=False, highlight=False)


def quieten_lightning() -> None:
    """Keep Lightning's notes out of the output, also of the package of former name that a user's module may import."""
    for name in LIGHTNING_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)


def quieten(training: bool = True) -> None:
    """Keep the notes of optuna, and of lightning if it is used, out of the output.

    Warnings and errors stay.
    """
    # Both set their loggers' levels when imported, so they come first. A command that does not
    # train must not wait for lightning and torch: 4 s (lightning 2.6, files cached, two CPU cores).
    # optuna is above this layer: 0.1 s.
    import optuna

    if training:
        installed_lightning()

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    quieten_lightning()
    # Lightning's own use of a deprecated pytree class, once a step.
    warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
    # device=cpu was asked for.
    warnings.filterwarnings("ignore", message="GPU available but not used")
