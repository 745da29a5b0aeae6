"""Gates *coverage* and *width*: how often the printed interval of B_crit holds the truth.

    python tests/benchmarks/coverage.py [--seeds 10] [--objectives time curve steps] [--names ...]

Names are tables and kinds of synthetic laws. A row is a search that has spent 40 times what the
best cell costs, and the critical batch size that a study prints then: an end that trials leave open
is null; ``quantiles`` are the posterior's, by which widths are compared. The truth is where the
slope of log S* over log B is -1/2. The old rows (38d319c7, tests/benchmarks/coverage.jsonl) are
quantiles, without open ends.
"""

import functools
import math
import statistics

from common import (
    MULTIPLES,
    ROWS,
    TABLES,
    Problem,
    add_rows,
    jobs_of,
    parser,
    read_rows,
    search,
    table_problem,
)
from synthetic import KINDS, draw_law, law_table

from bstune.core.curve import slope_b_crit
from bstune.search.findings import b_crit_quantiles
from bstune.search.posterior import sample_posterior
from bstune.study.critical import critical_batch_size
from bstune.study.estimates import DRAWS, MOVES

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
        problem.question,
        problem.space,
        records,
        seed=seed,
        misfit=True,
        draws=DRAWS,
        moves=MOVES,
    )
    interval = None
    if any(record.reached for record in records):
        interval = critical_batch_size(posterior, records).interval
    quantiles = b_crit_quantiles(posterior)
    ends = interval.model_dump() if interval else {}
    return {
        "truth": truth,
        "low": ends.get("low"),
        "value": ends.get("value"),
        "high": ends.get("high"),
        "quantiles": [quantiles[0], quantiles[-1]],
        "trials": len(records),
    }


@functools.cache
def truth_of_table(name):
    """The batch size of slope -1/2, from the best cell of each batch size."""
    truth = truth_of_problem(table_problem(name, "steps"))
    assert truth is not None, f"{name}'s cells do not determine B_crit"
    return truth


def truth_of_problem(problem):
    """The same of a problem of ``steps``; None where its cells do not determine it."""
    fewest = {}
    for batch_size, lr in problem.table.cells:
        examples = problem.median_cost(batch_size, lr)
        if examples is not None:
            steps = examples / batch_size
            fewest[batch_size] = min(steps, fewest.get(batch_size, math.inf))
    return slope_b_crit(list(fewest.items()))


def holds(row):
    """Whether the interval holds the truth."""
    return (row["low"] or 0.0) <= row["truth"] <= (row["high"] or math.inf)


def width(row):
    """High over low, of the posterior's quantiles."""
    low, high = row.get("quantiles", (row["low"], row["high"]))
    return high / low


def factor_off(row):
    """By what the printed value is off the truth; infinite without one."""
    return math.exp(abs(math.log(row["value"] / row["truth"]))) if row["value"] else math.inf


def figures(rows):
    """Truths held, open intervals, median width and median factor off."""
    if not rows:
        return f"{'-':>25}"
    count = f"{sum(map(holds, rows))}/{len(rows)}"
    middles = [statistics.median(map(one, rows)) for one in (width, factor_off)]
    is_open = sum(row["low"] is None or row["high"] is None for row in rows)
    return f"{count:>8} {is_open:4} {middles[0]:5.2f} {middles[1]:5.2f}"


def main():
    options = parser(__doc__, "coverage_new.jsonl", seeds=10)
    options.add_argument("--objectives", nargs="+", default=["time", "curve", "steps"])
    options.add_argument("--names", nargs="+", default=[*TABLES, *KINDS])
    given = options.parse_args()
    jobs = jobs_of(seed=range(given.seeds), objective=given.objectives, name=given.names)
    add_rows(given, jobs, measure)
    new = [row for row in read_rows(given.rows) if row["objective"] in given.objectives]
    there = {(row["name"], row["objective"], row["seed"]) for row in new}
    old = [row for row in read_rows(OLD) if (row["name"], row["objective"], row["seed"]) in there]
    print(f"{'':30} {'new: held, open, width, off':>25}   old, of the same seeds")
    for objective in given.objectives:
        sides = [[row for row in rows if row["objective"] == objective] for rows in (new, old)]
        for name in dict.fromkeys(row["name"] for row in sides[0]):
            named = [[row for row in rows if row["name"] == name] for rows in sides]
            show(f"{objective}, {name}", *named)
        show(f"{objective}, all", *sides)
    if {*GATED} <= {*given.objectives}:
        print(GATE.format(*gate(new)))


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


def show(name, new, old):
    print(f"{name:30} {figures(new)}   {figures(old)}")


if __name__ == "__main__":
    main()
