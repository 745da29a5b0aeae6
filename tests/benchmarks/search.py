"""Gate *search*: the search on recorded runs beside that of bstune 0.1, in counted costs, no clock.

    python tests/benchmarks/search.py [--seeds 20] [--objectives time steps] [--baseline false true]

A row is a search: what it had spent at the first hit, and how many times the best cell's time (or
steps) its choice takes after 5, 10, 20 and 40 times what the best cell costs, without and with the
baseline first. Old rows, of bstune 0.1, were recorded once. A limit holds where the 90% interval
of new over old does not lie wholly above it.
"""

from itertools import product

from common import ROWS, TABLES, compare, read_rows, run_gate, search_row, table_problem

# What the tables' workloads use today: batch size and learning rate of their configs.
BASELINES = {
    "fashion_mlp": (128, 0.03),
    "mnist_cnn": (64, 0.1),
    "cifar_mlp": (128, 0.001),
    "shakespeare_lstm": (32, 0.01),
    "mnist_mlp": (64, 0.2),
}
# Of new over old: ratios, the first hit, and all 90th percentiles.
LIMIT = 1.03
FIRST_LIMIT = 1.15
NINETIES_LIMIT = 1.25
KINDS = list(product(("time", "steps"), (False, True)))
OLD = ROWS / "search_old.jsonl"


def measure(table, objective, baseline, seed):
    """One search."""
    given = BASELINES[table] if baseline else None
    return search_row(table_problem(table, objective, given), seed)


def misses(compared):
    """Which limits do not hold."""
    limit = FIRST_LIMIT if compared.name == "first hit" else LIMIT
    missed = []
    if compared.ratio[1] > limit:
        missed.append(f"ratio above {limit}")
    if compared.ratio_of_nineties[1] > NINETIES_LIMIT:
        missed.append(f"90th above {NINETIES_LIMIT}")
    return ", ".join(missed) or "holds"


def beside_old(rows, *kind):
    """The rows of an objective, with a baseline or not, beside the old ones, at each place."""
    sides = []
    for one in (rows, read_rows(OLD)):
        sides.append([row for row in one if (row["objective"], row["baseline"]) == kind])
    return compare(*sides)


def summary(rows):
    """Each kind of search beside the old one."""
    for kind in KINDS:
        for one in beside_old(rows, *kind):
            ends = "{:.3f} ({:.3f} to {:.3f})".format(*one.ratio)
            yield f"{kind}, {one.name}: new/old {ends} of {one.pairs}; {misses(one)}"


if __name__ == "__main__":
    run_gate(
        __doc__,
        "search_new.jsonl",
        measure,
        summary,
        seeds=20,
        objectives=("objective", ("time", "steps")),
        baseline=("baseline", (False, True)),
        tables=("table", TABLES),
    )
