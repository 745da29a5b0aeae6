"""Gate *resume*: a trial that was pruned and resumed equals one that never stopped, bit for bit.

    python tests/benchmarks/resume.py

A row is a case of ``tests/test_resume.py`` at a batch size, with a stop after 5, 12 or 25 steps
alone, or after all three. Of a schedule that reads the epoch's mean training loss the preflight
says that its trials start afresh.
"""

import sys
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

from common import run_gate

sys.path.insert(0, str(Path(__file__).parents[1]))
from test_resume import CASES, STEPS, are_equal, resumed_at, run


def measure(case, batch_size, stops):
    """Whether weights and evaluations are equal."""
    warnings.simplefilter("ignore")
    with TemporaryDirectory() as folder:
        resumed = resumed_at(stops, case, batch_size, Path(folder))
    return {"equal": are_equal(run(case, batch_size, STEPS), resumed)}


def summary(rows):
    """How many are equal, and those that are not."""
    yield f"{sum(row['equal'] for row in rows)} of {len(rows)} bit for bit"
    for row in rows:
        if not row["equal"]:
            yield f"{row['case']} {row['batch_size']} {row['stops']}"


if __name__ == "__main__":
    run_gate(
        __doc__,
        "resume.jsonl",
        measure,
        summary,
        seeds=None,
        cases=("case", (*CASES,)),
        sizes=("batch_size", (16, 130)),
        stops=("stops", ([5], [12], [25], [5, 12, 25])),
    )
