"""What gates share: searches on recorded runs, rows, and old beside new.

Searches and their costs are those of :mod:`bstune.sweeps.search_benchmark`; no clock goes in.
"""

import argparse
import functools
import json
from collections import defaultdict
from itertools import product
from pathlib import Path
from typing import NamedTuple, get_args

import numpy as np

import bstune
from bstune.sweeps.search_benchmark import Problem, TableName, by_bstune, path_of, ratio_after
from bstune.trial.table import find_table

ROWS = Path(__file__).parent / "rows"
TABLES = get_args(TableName)
# Spendings at which searches are compared, in costs of the best cell.
MULTIPLES = (5.0, 10.0, 20.0, 40.0)
# Ratios count as at most this in comparisons: a search without a choice has none.
WORST = 10.0
RESAMPLES = 2000
# Quantiles at the ends of intervals.
ENDS = (0.05, 0.95)


@functools.cache
def table_problem(name, *given):
    """The problem of a shipped table; ``given`` are the further arguments of a problem."""
    return Problem(find_table(name), *given)


def search_row(problem, seed, asks=by_bstune):
    """Trials of a search, spending at the first hit, and the ratio after each of ``MULTIPLES``."""
    found = path_of(problem, seed, MULTIPLES[-1], asks)
    path = found["path"]
    return {
        "trials": found["trials"],
        "first": path[0][0] if path else None,
        "ratios": [ratio_after(path, multiple) for multiple in MULTIPLES],
    }


def read_rows(path):
    """The rows of a file; none where there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def run_gate(description, file, measure, summary, seeds, **options):
    """A gate's command: add the rows that its file lacks, and print a summary of all.

    Args:
        description: of the gate.
        file: of ``rows/``; ``--rows`` gives another one.
        measure: gives a row's other fields; its arguments are ``seed`` and those of the options.
        summary: gives lines, of all rows.
        seeds: how many, unless ``--seeds`` says; 0: only sum up; None: rows have no seed.
        options: each with the field that it sets, and its values.
    """

    command = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.add_argument("--rows", type=Path, default=ROWS / file)
    command.add_argument("--seeds", type=int, default=seeds)
    for name, (field, values) in options.items():
        kind = str if isinstance(values[-1], str) else json.loads
        command.add_argument(f"--{name}", dest=field, nargs="+", type=kind, default=values)
    given = command.parse_args()
    fields = {} if given.seeds is None else {"seed": range(given.seeds)}
    fields |= {field: getattr(given, field) for field, _ in options.values()}
    jobs = [dict(zip(fields, values, strict=True)) for values in product(*fields.values())]
    given.rows.parent.mkdir(parents=True, exist_ok=True)
    for job in jobs:
        done = [{field: row.get(field) for field in job} for row in read_rows(given.rows)]
        if job not in done:
            row = {
                **job,
                "bstune": bstune.__file__,
                "version": bstune.__version__,
                **measure(**job),
            }
            # One write: processes may add to one file.
            with given.rows.open("a") as rows:
                rows.write(json.dumps(row) + "\n")
    print(*summary(read_rows(given.rows)), sep="\n")


class Compared(NamedTuple):
    """New beside old at one place of their paths, over pairs of the same table and seed."""

    name: str
    pairs: int
    medians: tuple[float, float]
    """New and old."""
    ratio: tuple[float, float, float]
    """Geometric mean of new over old, and the ends of its 90% interval."""
    ratio_of_nineties: tuple[float, float, float]


def compare(new, old):
    """Compare the first hit and the ratio after each of ``MULTIPLES``.

    Intervals are by bootstrap over pairs within their tables; no ratio counts as more than
    ``WORST``, nor a first hit as later than the last of ``MULTIPLES``.
    """
    olds = {(row["table"], row["seed"]): _values(row) for row in old}
    pairs = defaultdict(list)
    for row in new:
        if (row["table"], row["seed"]) in olds:
            pairs[row["table"]].append((_values(row), olds[row["table"], row["seed"]]))
    groups = [np.array(group) for group in pairs.values()]
    rng = np.random.default_rng(0)
    compared = []
    names = ["first hit", *(f"{multiple:g}x" for multiple in MULTIPLES)]
    for place, name in enumerate(names if pairs else []):
        both = np.concatenate(groups)[:, :, place]
        worst = MULTIPLES[-1] if place == 0 else WORST
        capped = [np.minimum(group[:, :, place], worst) for group in groups]
        draw = lambda of: rng.integers(len(of), size=len(of))  # noqa: E731
        picks = [[draw(group) for group in capped] for _ in range(RESAMPLES)]
        of_groups = zip(capped, zip(*picks, strict=True), strict=True)
        drawn = np.concatenate([group[np.array(rows)] for group, rows in of_groups], axis=1)
        ends = np.quantile(_ratios(drawn), ENDS, axis=0)
        ratios = np.vstack([_ratios(np.concatenate(capped)), ends])
        compared.append(Compared(name, len(both), tuple(np.median(both, axis=0)), *ratios.T))
    return compared


def _values(row):
    """First hit and the ratios, infinite where there is none."""
    return np.nan_to_num(np.array([row["first"], *row["ratios"]], float), nan=np.inf)


def _ratios(both):
    """New over old, of columns new and old: the geometric mean, and of the 90th percentiles.

    ``both`` is (..., pairs, 2), and the result (..., 2).
    """
    logs = np.log(both)
    mean = np.exp((logs[..., 0] - logs[..., 1]).mean(axis=-1))
    ninety = np.quantile(both, 0.9, axis=-2, method="inverted_cdf")
    return np.stack([mean, ninety[..., 0] / ninety[..., 1]], axis=-1)
