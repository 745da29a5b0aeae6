"""A figure of a README: the sentence that states it, its records, and the derivation.

A record is a file of rows in the repository; ``records.yaml`` says of each when, where and how it
was measured. A README is compared unit by unit: a paragraph, an item of a list, or a row of a
table, each with its white space normalised.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from string import Formatter
from typing import Any

import yaml
from pydantic import ValidationError

TOP = Path(__file__).parents[2]
Values = Mapping[str, object]
# Of a posterior's slope or exponent, whose share says nothing near 0.
SLOPE_TOLERANCE = 0.03
NUMBER = r"-?\d[\d,]*(?:\.\d+)?"


class RecordFormatError(ValueError):
    """The rows of a record do not have what its figure is derived from."""


@dataclass(frozen=True)
class Figure:
    """One statement with numbers, and where they come from.

    Args:
        topic: short, for the list.
        readme: from the top of the repository.
        sentence: as it stands there, with a place such as ``{ratio:.2f}`` for each number. It is
            a whole row of a table, or a part of a paragraph.
        records: files of rows, from the top of the repository.
        derive: gives the values of the places, from the records' paths in this order.
        tolerance: of each number, as a share of it; for a posterior, whose draws another
            processor may round otherwise.
    """

    topic: str
    readme: str
    sentence: str
    records: tuple[str, ...]
    derive: Callable[..., Values]
    tolerance: float = 0.0

    @property
    def derivation(self) -> str:
        """The name of the function that derives it."""
        function = getattr(self.derive, "func", self.derive)
        return f"{function.__module__.rpartition('.')[2]}.{function.__name__}"

    @property
    def text(self) -> str:
        """The sentence with its values, white space normalised.

        Raises:
            RecordFormatError: where the rows have another format, as another commit wrote them.
        """
        paths = [TOP / record for record in self.records]
        try:
            values = self.derive(*paths)
        except (KeyError, json.JSONDecodeError, ValidationError) as error:
            again = [how_to_measure(record) for record in self.records]
            raise RecordFormatError(
                f"{self.derivation} cannot read {', '.join(self.records)}: {error!r}; measure "
                f"again: {'; '.join(again)}"
            ) from error
        return normal(self.sentence.format_map(values))

    @property
    def shape(self) -> str:
        """A regular expression of the sentence with any values."""
        parts = list[str]()
        for literal, place, _, _ in Formatter().parse(normal(self.sentence)):
            parts.append(re.escape(literal))
            if place is None:
                continue
            # At the beginning a word, or it would reach back to the paragraph's; a point between
            # digits ends no sentence.
            parts.append(r"(?:[^.]|\.(?=\d))*?" if "".join(parts) else r"\S*")
        return "".join(parts) + r"(?!\d)"

    def unit_that_states_it(self, units: Iterable["Unit"]) -> "Unit | None":
        """Find the unit that says what the records say."""
        text = self.text
        for unit in units:
            if self._is_stated(text, unit.text):
                return unit
        return None

    def _is_stated(self, text: str, stated: str) -> bool:
        if self.tolerance == 0.0:
            # Not as a part of a longer number.
            return re.search(rf"(?<![\d.,]){re.escape(text)}(?!\d)", stated) is not None
        literals = [re.escape(literal) for literal in re.split(NUMBER, text)]
        match = re.search(f"({NUMBER})".join(literals), stated)
        if match is None:
            return False
        expected = re.findall(NUMBER, text)
        return all(map(self._agree, match.groups(), expected))

    def _agree(self, stated: str, derived: str) -> bool:
        return math.isclose(
            as_float(stated), as_float(derived), rel_tol=self.tolerance, abs_tol=SLOPE_TOLERANCE
        )


def how_to_measure(record: str) -> str:
    """Give the command and the commit that a record is noted with in ``records.yaml``."""
    known = yaml.safe_load((TOP / "tests/recorded/records.yaml").read_text(encoding="utf-8"))
    for pattern, entry in known.items():
        if fnmatch(record, pattern):
            return f"{entry['command']} (last measured with commit {entry['commit']})"
    return f"{record} is not in tests/recorded/records.yaml"


def as_float(text: str) -> float:
    return float(text.replace(",", ""))


@cache
def rows_of(path: Path) -> tuple[dict[str, Any], ...]:
    """Read the rows of a file of JSON lines; lines that say how they were measured are left out."""
    rows = list[dict[str, Any]]()
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if not {"machine", "command"} & row.keys():
            rows.append(row)
    return tuple(rows)


def normal(text: str) -> str:
    """Give a text with each run of white space as one space."""
    return " ".join(text.split())


@dataclass(frozen=True)
class Unit:
    """A paragraph, an item of a list or a row of a table.

    Args:
        heading: of the section that it stands in.
        text: white space normalised.
        says: the paragraph that it belongs to; of a row, the one above its table.
    """

    heading: str
    text: str
    says: str


def units_of(markdown: str) -> Iterator[Unit]:
    """Take a README apart; headings, names of columns and blocks of code are left out."""
    without_code = re.sub(r"^```.*?^```\n?", "", markdown, flags=re.MULTILINE | re.DOTALL)
    heading = ""
    says = ""
    for part in re.split(r"\n\s*\n", without_code):
        block = part.strip()
        if block.startswith("#"):
            first, _, block = block.partition("\n")
            heading = first.lstrip("# ")
        if not block:
            continue
        if block.startswith("|"):
            rows = block.splitlines()
            # Names of columns are no rows.
            if len(rows) > 1 and set(rows[1]) <= set("|- "):
                rows = rows[2:]
            for row in rows:
                yield Unit(heading, normal(row), says)
            continue
        # An item goes on until the next one begins.
        for item in re.split(r"\n(?=[*-] )", block):
            says = normal(item)
            yield Unit(heading, says, says)


def units_in(readme: str) -> list[Unit]:
    """Read a README of the repository."""
    return list(units_of((TOP / readme).read_text(encoding="utf-8")))


def row_text(cells: list[str]) -> str:
    """Join the cells of a row of a table."""
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


def rounded_text(value: float, digits: int) -> str:
    """Write a number with so many significant digits."""
    return f"{float(f'{value:.{digits}g}'):,g}"


def number_or_none(value: float | None, digits: int) -> str:
    """Write a number; ``none`` for one that there is not, or that is infinite."""
    if value is None or math.isinf(value):
        return "none"
    return f"{value:.{digits}f}"
