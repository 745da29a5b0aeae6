"""What a sweep has measured: one JSON line a unit, so that the same command goes on."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from pandas import DataFrame

from bstune.core.errors import InputError
from bstune.system.files import append_line, read_text, write_text
from bstune.system.secrets import hide

Unit = Mapping[str, str | int | float]


def measure_units(
    path: Path,
    settings: Mapping[str, Any],
    units: Iterable[Unit],
    measure: Callable[[Unit], Mapping[str, Any]],
) -> DataFrame:
    """Measure each unit that has no row yet; the rows of all units, in their order.

    A row is kept as soon as it is measured. The half of a line that a kill has left is dropped.

    Args:
        path: of the rows; its first line has the settings.
        settings: what all rows depend on, such as a data set's size, as JSON has it.
        units: what is measured, each named by values that JSON has, such as
            ``{"batch_size": 128, "round": 3}``.
        measure: of a unit, such as ``{"seconds": 0.4}``.

    Raises:
        InputError: the rows are of other settings.
    """
    settings = hide(settings)
    lines = read_text(path).split("\n") if path.exists() else [""]
    if lines.pop():
        write_text(path, "".join(line + "\n" for line in lines))
    if not lines:
        path.parent.mkdir(parents=True, exist_ok=True)
        append_line(path, json.dumps({"settings": settings}))
    try:
        kept = [dict(json.loads(line)) for line in lines]
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{path} has lines that are no rows: give another output") from error
    if kept and kept.pop(0) != {"settings": settings}:
        raise InputError(f"{path} has rows of other settings: give another output, or delete it")
    rows = []
    for unit in units:
        row = next((row for row in kept if unit.items() <= row.items()), None)
        if row is None:
            row = {**unit, **measure(unit)}
            append_line(path, json.dumps(row))
        rows.append(row)
    return DataFrame(rows)
