"""Gates *coverage* and *width*: how often the printed interval of B_crit holds the truth.

    python tests/benchmarks/coverage.py [--seeds 10] [--objectives time curve steps] [--names ...]

Names are tables and kinds of synthetic laws. A row is a search that has spent 40 times what the
best cell costs, and the critical batch size that a study prints then: an end that trials leave open
is null; ``quantiles`` are the posterior's, by which widths are compared. The truth is where the
slope of log S* over log B is -1/2. Old rows (bstune 0.1) are
quantiles, without open ends.
"""

import functools
import math
import statistics
from operator import itemgetter

from common import MULTIPLES, ROWS, TABLES, read_rows, run_gate, table_problem
from synthetic import KINDS, draw_law, law_table

from bstune.core.curve import slope_b_crit
from bstune.search.findings import b_crit_quantiles
from bstune.search.posterior import sample_posterior
from bstune.study.critical import critical_batch_size
from bstune.study.estimates import DRAWS, MOVES
from bstune.sweeps.search_benchmark import Problem, search

OLD = ROWS / "coverage_old.jsonl"
# The gate, with its limits.
GATED = ("time", "curve")
GATE = (
    "{} of {} intervals of `time` and `curve` hold ({:.1%}, limits 85 to 98%); widths over the old "
    "ones {:.2f} (limit 1.8) and {:.2f} (limit 1.3)"
)


def measure(name, objective, seed):
    """One search and its interval."""
    if name in KINDS:
        law = draw_law(name, seed)
        problem = Problem(law_table(law), objective)
        truth = law.half_slope
    else:
        problem = table_problem(name, objective)
        truth = truth_of_table(name)
    records = []
    for _, finished in search(problem, seed, MULTIPLES[-1]):
        records = finished
    posterior = sample_posterior(
        problem.question, problem.space, records, seed=seed, misfit=True, draws=DRAWS, moves=MOVES
    )
    ends = dict.fromkeys(("low", "value", "high"))
    if any(record.reached for record in records):
        ends = critical_batch_size(posterior, records).interval.model_dump(include=ends)
    low, *_, high = b_crit_quantiles(posterior)
    return {"truth": truth, **ends, "quantiles": [low, high], "trials": len(records)}


@functools.cache
def truth_of_table(name):
    """The batch size of slope -1/2, from the best cell of each batch size."""
    problem = table_problem(name, "steps")
    fewest = {}
    for batch_size, lr in problem.table.cells:
        steps = problem.median_cost(batch_size, lr) / batch_size
        fewest[batch_size] = min(steps, fewest.get(batch_size, math.inf))
    reached = [(batch_size, steps) for batch_size, steps in fewest.items() if math.isfinite(steps)]
    truth = slope_b_crit(reached)
    assert truth is not None, f"{name}'s cells do not determine B_crit"
    return truth


def holds(row):
    """Whether the interval holds the truth."""
    return (row["low"] or 0.0) <= row["truth"] <= (row["high"] or math.inf)


def width(row):
    """High over low, of the posterior's quantiles."""
    low, high = row.get("quantiles", (row["low"], row["high"]))
    return high / low


def figures(rows):
    """Truths held, open intervals and median width."""
    if not rows:
        return f"{'-':>20}"
    count = f"{sum(map(holds, rows))}/{len(rows)}"
    is_open = sum(row["low"] is None or row["high"] is None for row in rows)
    return f"{count:>8} {is_open:4} {statistics.median(map(width, rows)):5.2f}"


def summary(rows):
    """Each objective and name with its figures, then the gate."""
    kind = itemgetter("objective", "name")
    for one in dict.fromkeys(map(kind, rows)):
        yield f"{one}: {figures([row for row in rows if kind(row) == one])}"
    if {*GATED} <= {row["objective"] for row in rows}:
        yield GATE.format(*gate(rows))


def gate(new):
    """Held, of how many, their share, and widths over the old ones, as ``GATE`` has places."""
    held, widths = [], []
    for objective in GATED:
        sides = []
        for rows in (new, read_rows(OLD)):
            sides.append({(r["name"], r["seed"]): r for r in rows if r["objective"] == objective})
        both = sides[0].keys() & sides[1].keys()
        medians = [statistics.median(width(side[key]) for key in both) for side in sides]
        widths.append(medians[0] / medians[1])
        held += map(holds, sides[0].values())
    return sum(held), len(held), statistics.mean(held), *widths


if __name__ == "__main__":
    run_gate(
        __doc__,
        "coverage_new.jsonl",
        measure,
        summary,
        seeds=10,
        objectives=("objective", (*GATED, "steps")),
        names=("name", (*TABLES, *KINDS)),
    )
