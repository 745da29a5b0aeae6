"""The READMEs' figures, each written from its rows: ``python tests/benchmarks/figures.py``.

A figure is a text with places for values, a file of rows, and a function that takes the rows and
gives the values, for each text once. So written, it has to stand in its README, whatever the line
breaks. One of a sweep is an entry more in ``FIGURES``.
"""

import math
import shutil
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

import coverage
import further_values
import metric
import schedule_lengths
import search
from common import ROWS, read_rows
from pandas import Series, read_csv
from pandas import json_normalize as flat

from bstune.sweeps.command import command
from bstune.sweeps.search_benchmark import ratio_after

ROOT = Path(__file__).parents[2]
# Picks that take at most so many times as long are as fast, as in race.py.
TIE = 1.05
SHALLUE = ("algorithms", "data", "widths", "regularisation", "workloads")
# Where the recorded runs have the slope -1/2.
TRUTHS = {"mnist_mlp": 209, "digits": 58}


def written(text, rows, values):
    """A figure's texts with their values.

    Args:
        text: with places for the values.
        rows: a file of ``rows/``, or the path of a sweep's from the root, without its settings.
        values: a function that takes the rows.
    """
    path = ROOT / rows if "/" in rows else ROWS / rows
    measured = []
    if path.suffix == ".jsonl":
        measured = [row for row in read_rows(path) if "settings" not in row]
    return [text.format(*one) for one in values(measured)]


def stands(text, readme):
    """Whether a README has a text, whatever its line breaks; what is infinite or nan is none."""
    wanted = " ".join(text.replace("inf", "none").replace("nan", "none").split())
    return wanted in " ".join((ROOT / readme).read_text().split())


def searched(rows):
    """Each kind of search with medians, new and old, at each place, then the ratios."""
    for objective, baseline in search.KINDS:
        lines = search.beside_old(rows, objective, baseline)
        ends = [end for part in ("medians", "ratio") for one in lines for end in getattr(one, part)]
        yield objective, ", the baseline first" if baseline else "", *ends


def limits(rows):
    """How many limits of the search hold, of how many."""
    lines = [line for kind in search.KINDS for line in search.beside_old(rows, *kind)]
    return [([search.misses(line) for line in lines].count("holds"), len(lines))]


def covered(rows):
    """Each table and kind of curves, then all, with held, open and width by objective."""
    for name in (*dict.fromkeys(row["name"] for row in rows), "in all"):
        cells = []
        for objective in ("time", "curve", "steps"):
            of = [row for row in rows if row["objective"] == objective]
            of = [row for row in of if name in (row["name"], "in all")]
            cells += coverage.figures(of).split()[:3]
        yield name, *cells


def as_fast(rows):
    """In how many races bstune's pick is as fast as TPE's, of how many: busy, then quiet."""
    races = flat(rows)
    limits = TIE * races["plain.tpe.seconds"].fillna(math.inf)
    fast = (races["plain.bstune.seconds"] <= limits).groupby(races["load"])
    return [fast.agg(["sum", "count"]).to_numpy().ravel()]


def held(table, part, by):
    """For each group in how many rows the interval holds the truth, of all; an open end does."""
    low, high = table[f"{part}.low"].fillna(0.0), table[f"{part}.high"].fillna(math.inf)
    holds = low.le(table["truth"]) & high.ge(table["truth"])
    return holds.groupby(table[by]).agg(["sum", "count"]).itertuples()


def swept(name, recorded, *settings):
    """The table that a sweep makes of its recorded rows, which leave it nothing to measure."""
    with TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        shutil.copy(ROOT / "sweeps/recorded" / recorded, f"{folder}/rows.jsonl")
        command([name, f"output={folder}", *settings])
        return read_csv(f"{folder}/table.csv")


def pieces(rows):
    """How many times as long as the fastest way others take: of a product, then of gathering."""
    seconds = flat(rows).groupby(["group", "way"]).seconds.median()
    times = (seconds / seconds.groupby("group").transform("min")).droplevel("group")
    return [times[["elements", "columns", "64 columns", "in strides of 64 bytes", "at random"]]]


def descents(*settings):
    """Milliseconds to the loss by gradient descent, SGD, mini-batches of 100 and of 10."""
    name = "minibatch_sgd_row_by_row" if settings else "minibatch_sgd"
    return [1e3 * swept("minibatch_sgd", f"{name}.jsonl", *settings)["seconds to 0.25"]]


def contrasts(rows):
    """By how many percent more some batch sizes take an example than others."""
    table = swept("powers_of_two", "powers_of_two.jsonl")
    percents = table[table.unit == "%"]
    return percents[["batch_size", "against", "value", "low", "high"]].itertuples(index=False)


def of_studies(table):
    """B_crit of each study, then the ratios over the first value of the factor."""
    factor = table.columns[0]
    for name, group in table.groupby(factor, sort=False):
        sizes = ", ".join(f"{size:.0f}" for size in group.b_crit)
        yield f"{name}: {sizes}"
        if "ratio_low" in group and math.isfinite(group.ratio_low.iloc[0]):
            ratio = group[["ratio_mean", "ratio_low", "ratio_high"]].iloc[0]
            yield "{:.1f} times ({:.1f} to {:.1f})".format(*ratio)


def studies(name):
    """A figure of a sweep of studies, whose table is recorded."""
    path = f"sweeps/recorded/shallue_{name}.csv"
    return "{}", path, lambda rows: [[text] for text in of_studies(read_csv(ROOT / path))]


def best_sizes(rows):
    """The best batch size and the near-optimal range of each loss."""
    table = read_csv(ROOT / "sweeps/recorded/losses.csv")
    for loss, size, near in table[["loss", "batch_size", "near_optimal"]].itertuples(index=False):
        yield loss, size, *near.strip("()").split(", ")


def regimes(rows):
    """Mean distance from the law in percent, and studies with the outer regimes, of all."""
    table = read_csv(ROOT / "sweeps/recorded/shallue_panel.csv")
    off = 100 * math.expm1(math.sqrt((table.off_law**2).mean()))
    return [(off, table.perfect.sum(), table.maximal.sum(), len(table))]


def beside_others(rows):
    """Median ratios after 10 and 40 times of bstune, then the least of all others."""
    for objective in ("time", "steps"):
        medians = []
        for spending in (10, 40):
            table = flat([row for row in rows if row["objective"] == objective], max_level=0)
            # Tables and seeds on which all have searched.
            searches = table.groupby(["table", "seed"]).search.transform("nunique")
            table = table[searches == table.search.nunique()].copy()
            table["ratio"] = [ratio_after(path, spending) or math.inf for path in table["path"]]
            by_search = table.groupby("search").ratio.median()
            medians += [by_search.pop("bstune"), by_search.min()]
        yield objective, *medians


def by(index, columns, values):
    """For each index the median of each column."""
    return lambda rows: flat(rows).pivot_table(values, index, columns, "median").itertuples()


def raced(rows):
    """Each project with the picks' speedups over the baseline: two seeds busy, then two quiet."""
    races = flat(rows)
    for name in ("bstune", "tpe"):
        races[name] = races["plain.baseline.seconds"] / races[f"plain.{name}.seconds"]
    table = races.pivot(index="project", columns=["load", "seed"], values=["bstune", "tpe"])
    return table.sort_index(axis=1).itertuples()


def claimed(rows):
    """How many intervals hold the plain runs' value, read at bstune's evaluations and at all."""
    holds = []
    for name in ("speedup", "other.seconds", "baseline.seconds"):
        holds += [*flat(rows)[f"claims.{name}.holds"].apply(Series).sum()]
    return [holds]


def killed(rows):
    """Sums for each number of processes."""
    kinds = flat(rows).assign(studies=1).groupby(["workers", "failed"], dropna=False)
    return kinds[["kills", "studies", "records", "lost", "doubled"]].sum().to_numpy()


FIGURES = {
    "sweeps/README.md": [
        *map(studies, SHALLUE),
        ("{} {} ({} to {})", "sweeps/recorded/losses.csv", best_sizes),
        (
            "off the law by {:.0f}%, perfect scaling in {} and maximal data parallelism in {} of "
            "{} studies",
            "sweeps/recorded/shallue_panel.csv",
            regimes,
        ),
        (
            "from {0[accuracy]:.1%} at the start",
            "sweeps/recorded/dawnbench_width8.jsonl",
            lambda rows: [rows[:1]],
        ),
        (
            "{}: {:.2f} after 10 times, the best of the others {:.2f}; after 40 {:.2f} and {:.2f}",
            "sweeps/recorded/search_benchmark.jsonl",
            beside_others,
        ),
        (
            "{:.0f} times as fast as elements and {:.0f} times as columns; blocks take "
            "{:.2f} times as long; strides {:.1f} and random order {:.1f} times",
            "sweeps/recorded/vectorization.jsonl",
            pieces,
        ),
        (
            "{:.2f} ms by gradient descent, {:.0f} at B = 1, {:.2f} at 100, {:.1f} at 10",
            "sweeps/recorded/minibatch_sgd.jsonl",
            lambda rows: descents(),
        ),
        (
            "row by row {0:.1f} ms and B = 100 {2:.2f}",
            "sweeps/recorded/minibatch_sgd_row_by_row.jsonl",
            lambda rows: descents("row_by_row=true"),
        ),
        (
            "{} against {} {:.1f}% ({:.1f} to {:.1f})",
            "sweeps/recorded/powers_of_two.jsonl",
            lambda rows: list(contrasts(rows))[1:6],
        ),
    ],
    "README.md": [
        (
            "{:.2f} times the best's time once trials have cost 10 times the best's own training, "
            "{:.2f} times after 20, and {:.2f} times after 40",
            "search_new.jsonl",
            lambda rows: [[line.medians[0] for line in search.beside_old(rows, "time", False)[2:]]],
        ),
        ("in {2} of {3} races, and in {0} of {1} beside two busy processes", "race.jsonl", as_fast),
    ],
    "tests/benchmarks/README.md": [
        ("{} kills over {} studies of {} records: {} lost, {} doubled", "kills.jsonl", killed),
        ("{} of {} limits hold", "search_new.jsonl", limits),
        (
            "| {}{} |"
            + 5 * " {:.2f}; {:.2f} |"
            + " | new over old |"
            + 5 * " {:.3f} ({:.3f} to {:.3f}) |",
            "search_new.jsonl",
            searched,
        ),
        (coverage.GATE, "coverage_new.jsonl", lambda rows: [coverage.gate(rows)]),
        ("| {} |" + 3 * " {}, {}, {} |", "coverage_new.jsonl", covered),
        (
            "old intervals {1}, {4} and {7} hold",
            "coverage_old.jsonl",
            lambda rows: [[*covered(rows)][-1]],
        ),
        ("| {} | {} | {} |", "further_values.jsonl", further_values.summary),
        ("| {} | {} | {} | {} | {} |", "metric.jsonl", metric.summary),
        (
            "{0:.0f} s: {2:.3f} for the best, {1:.3f} for the baseline",
            "shakespeare_budget.jsonl",
            by("budget_seconds", "what", "metric"),
        ),
        (
            "{}",
            "schedule_lengths_new.jsonl",
            lambda rows: [[line] for line in schedule_lengths.summary(rows)],
        ),
        (
            "speedups {} ({}), times of the best {} ({}), times of the baseline {} ({})",
            "claims.jsonl",
            claimed,
        ),
        (
            "{} Switch, {} Not yet",
            "twenty_projects.jsonl",
            lambda rows: [flat(rows)["answer.verdict"].value_counts()],
        ),
        (
            "{} studies, {} refused rightly: {:.0f} contradict",
            "one_answer.jsonl",
            lambda rows: [
                (len(rows), flat(rows).status.gt(0).sum(), flat(rows).wrong.str.len().sum())
            ],
        ),
        ("| {} |" + 2 * " {:.1f}, {:.1f}; {:.1f}, {:.1f} |", "race.jsonl", raced),
        ("in {} of {} busy and {} of {} quiet races", "race.jsonl", as_fast),
        (
            "{} of {} bit for bit",
            "resume.jsonl",
            lambda rows: [(sum(row["equal"] for row in rows), len(rows))],
        ),
        ("`{}` {:.3f}, {:.3f}, {:.3f}", "speed.jsonl", by("objective", "trials", "seconds")),
        ("{} engineers", "readers.jsonl", lambda rows: [[flat(rows).reader.nunique()]]),
        (
            "`{}` {} of {}",
            "critical.jsonl",
            lambda rows: held(
                flat([row | {"truth": TRUTHS[row["workload"]]} for row in rows]),
                "critical.interval",
                "workload",
            ),
        ),
    ],
}


def main():
    for readme, figures in FIGURES.items():
        for text, rows, values in figures:
            for one in written(text, rows, values):
                print(f"{readme}: {one} ({rows}){'' if stands(one, readme) else ' IS MISSING'}")


if __name__ == "__main__":
    main()
