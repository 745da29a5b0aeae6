"""Points of S*(B) from a CSV file, such as a user has from elsewhere."""

import csv
import io
from collections.abc import Iterator

from bstune.core.curve import USABLE_VALUE, CurveError, FrontierPoint, usable

# What a cell of the column ``stopped`` may hold, in small letters.
FLAGS = {"0": False, "false": False, "1": True, "true": True}
# Characters of a cell or a line that a message repeats.
MAX_REPEATED = 80


def parse_points(text: str, file: str) -> list[FrontierPoint]:
    """Parse a CSV file's text with the columns batch_size, steps and optionally stopped.

    Other columns are ignored. Messages name the file by ``file``.

    Raises:
        CurveError: for text that cannot be used, with the line.
    """
    lines = io.StringIO(text, newline="")
    try:
        return list(_parse_rows(csv.DictReader(lines, strict=True), file))
    except csv.Error as error:
        raise CurveError(
            f"{file} is not a CSV file ({error}); export the points as plain CSV"
        ) from error


def _parse_rows(reader: "csv.DictReader[str]", file: str) -> Iterator[FrontierPoint]:
    """Yield the point of each line; CurveError for a header or a line that cannot be used."""
    header = [name.strip() for name in reader.fieldnames or ()]
    if header.count("batch_size") != 1 or header.count("steps") != 1 or header.count("stopped") > 1:
        needs = "needs the columns batch_size and steps, and may have stopped, each once, but got"
        got = repr(",".join(header)[:MAX_REPEATED])
        raise CurveError(f"{file}, line 1: {needs} {got}: name the columns in the first line")
    reader.fieldnames = header
    for row in reader:
        place = f"{file}, line {reader.line_num}"
        # The reader keeps surplus values under None, and fills up with None what a line lacks.
        if None in row or None in row.values():
            raise CurveError(
                f"{place}: needs {len(header)} values, as line 1 has columns: fix or drop the line"
            )
        batch_size: float = _number(row["batch_size"], "batch_size", place)
        steps = _number(row["steps"], "steps", place)
        flag = row.get("stopped", "0").strip().lower()
        if flag not in FLAGS:
            got = repr(flag[:MAX_REPEATED])
            raise CurveError(f"{place}: stopped must be 0, 1, true or false, but got {got}")
        if batch_size.is_integer():
            batch_size = int(batch_size)
        stopped = FLAGS[flag]
        # A file does not say where a trial that reached the target missed it last.
        steps_low = steps if stopped else None
        yield FrontierPoint(batch_size, steps, stopped=stopped, steps_low=steps_low)


def _number(cell: str, name: str, place: str) -> float:
    """Read the number of a cell; CurveError, with the column's name and the place, if unusable."""
    try:
        return usable(float(cell), name)
    except (ValueError, CurveError):
        got = repr(cell[:MAX_REPEATED])
        raise CurveError(
            f"{place}: {name} must be {USABLE_VALUE}, but got {got}: fix or drop the line"
        ) from None
