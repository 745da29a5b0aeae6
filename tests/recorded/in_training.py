"""Twenty studies of ``digits`` as a user starts them, and a dense table of the same training."""

import random
from dataclasses import replace
from functools import cache
from pathlib import Path

from recorded.figure import Values, rows_of

from bstune.core.records import Target
from bstune.sweeps.search_problem import dense_b_crit
from bstune.trial.replay import Table, read_table

TARGET = Target("val/loss", 0.1, "min")
RESAMPLINGS = 100
# Of 100, each end of a 90% interval leaves out as many.
LEFT_OUT = 5


@cache
def b_crit_in_training(table_path: Path, studies_path: Path) -> Values:
    """Count the studies whose interval of B_crit holds that of the table."""
    table = read_table(table_path)
    truth = dense_b_crit(table, TARGET)
    assert truth is not None
    low, high = resampled_interval(table)
    studies = rows_of(studies_path)
    held = [row for row in studies if row["low"] <= truth <= row["high"]]
    return {
        "runs": len(table.runs),
        "truth": truth,
        "low": low,
        "high": high,
        "held": len(held),
        "studies": len(studies),
    }


def resampled_interval(table: Table) -> tuple[float, float]:
    """Give 90% of the B_crit of tables whose cells draw their seeds anew, with replacement."""
    rng = random.Random(0)
    values = list[float]()
    for _ in range(RESAMPLINGS):
        runs = []
        for cell in table.cells.values():
            drawn = rng.choices(cell, k=len(cell))
            runs += [replace(run, seed=seed) for seed, run in enumerate(drawn)]
        value = dense_b_crit(replace(table, runs=tuple(runs)), TARGET)
        assert value is not None
        values.append(value)
    values.sort()
    return values[LEFT_OUT], values[-1 - LEFT_OUT]
