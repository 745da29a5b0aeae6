"""Which numbers of a README have no figure, and which of them say that they were not recorded."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from recorded.figure import Figure, Unit

# Pages whose every number is accounted for.
HELD = ("sweeps/README.md", "tests/benchmarks/README.md")
# A number that is not part of a name such as CIFAR-10, H100 or tests/x_60.
FREE_NUMBER = r"(?<![\w.,/^-])-?\d[\d,]*(?:\.\d+)?"
DATE = r"\d{1,2}(?: (?:and|to) \d{1,2})? November 2026"
NOT_RECORDED = re.compile(rf"commits? [0-9a-f]{{7}}\b[^:;]*{DATE}[^:;]*; not recorded")
SETTINGS = Path(__file__).parent / "settings.txt"


def not_recorded(units: Iterable[Unit]) -> list[str]:
    """Give the paragraphs that say that their numbers were not recorded, at which commit and
    when."""
    paragraphs = dict.fromkeys(unit.says for unit in units)
    return [text for text in paragraphs if NOT_RECORDED.search(text)]


def settings() -> list[str]:
    """Read the numbers that nobody measured: settings, definitions, names, as regular
    expressions."""
    lines = SETTINGS.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def unaccounted(units: Iterable[Unit], figures: Sequence[Figure]) -> list[tuple[str, str]]:
    """List numbers that no figure covers, that are no settings, and that do not say "not recorded".

    Each with the text that it stands in. Inline code and the targets of links are left out.
    """
    covered = [figure.shape for figure in figures] + settings()
    missing = list[tuple[str, str]]()
    for unit in units:
        if NOT_RECORDED.search(unit.says):
            continue
        text = unit.text
        for shape in covered:
            text = re.sub(shape, " ", text)
        text = re.sub(r"\]\([^)]*\)", "]", text)
        text = re.sub(r"`[^`]*`", " ", text)
        missing += [(number, unit.text) for number in re.findall(FREE_NUMBER, text)]
    return missing
