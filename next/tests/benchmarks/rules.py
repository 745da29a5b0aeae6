"""The search under each scaling rule and under none, on recorded runs, in counted costs, no clock.

    python tests/benchmarks/rules.py [--seeds 10] [--rules none sqrt linear saturating surge]

A row is a search for the least time, as of search.py, whose prior follows a rule through the middle
of both ranges. The table has medians over tables and seeds of how many times the best cell's time
the choice takes, and their geometric mean over that of ``none``, paired.
"""

import math
import statistics

from common import (
    MULTIPLES,
    TABLES,
    add_rows,
    compare,
    jobs_of,
    parser,
    path_of,
    read_rows,
    table_problem,
)

RULES = ("none", "sqrt", "linear", "saturating", "surge")
# Medians of each table are shown after so many times the best cell's cost.
SHOWN = MULTIPLES.index(10.0)


def measure(table, rule, seed):
    """One search."""
    return path_of(table_problem(table, "time", None, rule), seed)


def main():
    options = parser(__doc__, "rules.jsonl", seeds=10)
    options.add_argument("--rules", nargs="+", default=RULES)
    options.add_argument("--tables", nargs="+", default=TABLES)
    given = options.parse_args()
    jobs = jobs_of(seed=range(given.seeds), rule=given.rules, table=given.tables)
    add_rows(given, jobs, measure)
    rows = [row for row in read_rows(given.rows) if row["table"] in given.tables]
    none = [row for row in rows if row["rule"] == "none"]
    short = [table[:12] for table in given.tables]
    head = " ".join(f"{name:>12}" for name in short)
    print(f"{'':10}  n   median: first 10x 20x 40x   10x over none (90%)   10x: {head}")
    for rule in given.rules:
        of_rule = [row for row in rows if row["rule"] == rule]
        lines = compare(of_rule, none)
        if not lines:
            continue
        medians = " ".join(f"{line.medians[0]:5.2f}" for line in lines if line.name != "5x")
        mean, low, high = lines[1 + SHOWN].ratio
        tables = []
        for table in given.tables:
            ratios = [row["ratios"][SHOWN] for row in of_rule if row["table"] == table]
            known = [math.inf if ratio is None else ratio for ratio in ratios]
            tables.append(statistics.median(known or [math.nan]))
        over_none = f"{mean:.3f} ({low:.3f} to {high:.3f})"
        of_tables = " ".join(f"{ratio:12.2f}" for ratio in tables)
        print(f"{rule:10} {lines[0].pairs:2}   {medians}         {over_none}        {of_tables}")


if __name__ == "__main__":
    main()
