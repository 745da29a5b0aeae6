"""Thirty studies of ``digits`` as a user starts them, and a dense table of the same training."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from recorded.figure import Values, rows_of

from bstune.core.records import Target
from bstune.sweeps.search_problem import dense_b_crit
from bstune.trial.replay import Table, read_table

Row = dict[str, Any]
DIGITS = "tests/recorded/digits"
RECORDS = (f"{DIGITS}/table.jsonl", f"{DIGITS}/studies.jsonl", f"{DIGITS}/curve_studies.jsonl")
TARGET = Target("val/loss", 0.1, "min")
RESAMPLINGS = 100
# Of 100, each end of a 90% interval leaves out as many.
LEFT_OUT = 5


def b_crit_and_its_interval(table_path: Path, studies_path: Path, curve_path: Path) -> Values:
    """Give what ``b_crit_in_training`` does, and the interval of the table's B_crit."""
    low, high = resampled_interval(read_table(table_path))
    values = b_crit_in_training(table_path, studies_path, curve_path)
    return {**values, "low": low, "high": high}


@cache
def b_crit_in_training(table_path: Path, studies_path: Path, curve_path: Path) -> Values:
    """Count the studies whose interval of B_crit holds that of the table.

    ``curve_path`` has those whose objective was ``curve``.
    """
    table = read_table(table_path)
    truth = dense_b_crit(table, TARGET)
    assert truth is not None
    studies = rows_of(studies_path)
    curve_studies = rows_of(curve_path)
    return {
        "runs": len(table.runs),
        "truth": truth,
        "held": count_held(studies, truth),
        "studies": len(studies),
        "curve_held": count_held(curve_studies, truth),
        "curve_studies": len(curve_studies),
    }


def count_held(studies: Sequence[Row], truth: float) -> int:
    """Count the intervals that hold the truth; an end that is open holds all beyond."""
    held = 0
    for row in studies:
        low = row["low"] or 0.0
        high = row["high"] or math.inf
        held += low <= truth <= high
    return held


def resampled_interval(table: Table) -> tuple[float, float]:
    """Give 90% of the B_crit of tables whose cells draw their seeds anew, with replacement."""
    rng = random.Random(0)
    values = list[float]()
    for _ in range(RESAMPLINGS):
        runs = []
        for cell in table.cells.values():
            # As many seeds as the cell has, some of them twice, others not at all.
            drawn = rng.choices(cell, k=len(cell))
            # A table wants no seed of a cell twice.
            runs += [replace(run, seed=seed) for seed, run in enumerate(drawn)]
        value = dense_b_crit(replace(table, runs=tuple(runs)), TARGET)
        assert value is not None
        values.append(value)
    values.sort()
    return values[LEFT_OUT], values[-1 - LEFT_OUT]
