"""The search beside ``sampler=tpe``, ``gp``, ``qmc``, ``random`` and ``grid``, in counted costs.

    python tests/benchmarks/samplers.py [--seeds 4] [--samplers frontier tpe] [--objectives time]

A row is a search as of search.py, without a baseline, whose trials a sampler proposes; the choice
is by the law, as in every study. The table has medians over tables and seeds of how many times the
best cell's time, or steps, the choice takes, and their geometric mean over that of ``frontier``,
paired. No clock goes into it.
"""

from functools import partial

import optuna
from common import (
    TABLES,
    add_rows,
    compare,
    jobs_of,
    parser,
    path_of,
    read_rows,
    table_problem,
)

from bstune.search.decide import propose
from bstune.search.grid import propose_of_grid
from bstune.search.other_samplers import propose_by

SAMPLERS = ("frontier", "tpe", "gp", "qmc", "random", "grid")


def of_grid(question, space, step_time, records, seed, resumable):
    """The grid, which knows no seed."""
    return propose_of_grid(question, space, step_time, records)


def measure(table, objective, sampler, seed):
    """One search."""
    own = {"frontier": propose, "grid": of_grid}
    proposer = own.get(sampler) or partial(propose_by, sampler)
    return path_of(table_problem(table, objective), seed, proposer)


def main():
    options = parser(__doc__, "samplers.jsonl", seeds=4)
    options.add_argument("--samplers", nargs="+", default=SAMPLERS)
    options.add_argument("--objectives", nargs="+", default=["time", "steps"])
    options.add_argument("--tables", nargs="+", default=TABLES)
    given = options.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    jobs = jobs_of(
        seed=range(given.seeds),
        objective=given.objectives,
        sampler=given.samplers,
        table=given.tables,
    )
    add_rows(given, jobs, measure)
    rows = read_rows(given.rows)
    for objective in given.objectives:
        print(f"{objective:10}  n   median: first 5x 10x 20x 40x   over frontier: 10x, 40x (90%)")
        sides = {}
        for sampler in SAMPLERS:
            kind = {"objective": objective, "sampler": sampler}.items()
            sides[sampler] = [row for row in rows if kind <= row.items()]
        for sampler, of_sampler in sides.items():
            lines = compare(of_sampler, sides["frontier"])
            if not lines:
                continue
            medians = " ".join(f"{line.medians[0]:5.2f}" for line in lines)
            ratios = []
            for line in (lines[2], lines[4]):
                ratios.append("{:.2f} ({:.2f} to {:.2f})".format(*line.ratio))
            print(f"{sampler:10} {lines[0].pairs:2}   {medians}         {', '.join(ratios)}")


if __name__ == "__main__":
    main()
