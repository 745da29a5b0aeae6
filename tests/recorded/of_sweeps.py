"""The figures of sweeps/README.md."""

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml
from recorded.figure import TOP, Figure, Values, rounded_text, row_text, rows_of
from recorded.panel import panel_curves, panel_records
from recorded.studies import Arguments, Found, asked, crossing, found, steps_at

from bstune.core.curve import CurveError
from bstune.core.records import Target, dump_json
from bstune.report.compared_pairs import compared_pairs
from bstune.sweeps.critical_batch import growth_of, too_coarse
from bstune.sweeps.critical_batch import row as critical_row
from bstune.sweeps.rule_cost import FAR_BATCH_SIZE, RuleCost, table_costs
from bstune.sweeps.search_problem import percentile, ratio_after, spending_within
from bstune.sweeps.shallue_panel import distance_from_law
from bstune.sweeps.unit_log import UNITS_FORMAT, UnitHeader, UnitRecord
from bstune.trial.replay import read_index, read_table

README = "sweeps/README.md"
RECORDED = "tests/recorded"
TABLES = "bstune/trial/tables"
CURVE = "search.objective=curve"
# Of a posterior that is sampled: another processor may round its draws otherwise.
SAMPLED = 0.1


def settings_of(sweep: str) -> dict[str, Any]:
    """Read what a sweep's file sets."""
    file = yaml.safe_load((TOP / f"sweeps/{sweep}.yaml").read_text(encoding="utf-8"))
    return file["sweep"]["experiment"]


def figure(
    topic: str,
    sentence: str,
    derive: Callable[..., Values],
    *records: str,
    tolerance: float = 0.0,
) -> Figure:
    """Give a figure of this README."""
    return Figure(topic, README, sentence, records, derive, tolerance)


def interval_text(
    value: float | None, low: float | None, high: float | None, digits: int = 2
) -> str:
    """Write a critical batch size and its interval as whole numbers, to so many digits."""
    ends = list[str]()
    for end in (value, low, high):
        ends.append("open" if end is None else f"{float(f'{end:.{digits}g}'):,.0f}")
    return f"{ends[0]} ({ends[1]} to {ends[2]})"


# The orders in which a vector is gathered.


def gathered(path: Path) -> Values:
    """Give the median seconds of each order over those in order."""
    seconds = {row["way"]: statistics.median(row["seconds"]) for row in rows_of(path)}
    return {
        "strided": seconds["in strides of 16"] / seconds["in order"],
        "random": seconds["at random"] / seconds["in order"],
    }


VECTORIZATION = [
    figure(
        "vectorization",
        "A vector of 64 MiB takes {strided:.1f} times as long to gather in strides of 64 bytes as "
        "in order, and {random:.1f} times at random",
        gathered,
        f"{RECORDED}/vectorization.jsonl",
    )
]

# Three regimes, workload by workload.


@cache
def regimes(*paths: Path) -> Values:
    curves = panel_curves()
    sizes = list[float]()
    # Largest batch sizes over B_crit, of those that do not show the flat end.
    farthest = list[float]()
    perfect = 0
    flat = 0
    for curve in curves:
        perfect += curve.shows_perfect_scaling
        flat += curve.shows_maximal_data_parallelism
        if curve.b_crit is None:
            continue
        sizes.append(curve.b_crit)
        if not curve.shows_maximal_data_parallelism:
            farthest.append(float(curve.point_sizes[-1]) / curve.b_crit)
    return {
        "workloads": len(curves),
        "distance": distance_from_law(curves),
        "least": rounded_text(min(sizes), 2),
        "most": rounded_text(max(sizes), 2),
        "perfect": perfect,
        "flat": flat,
        "nearest": min(farthest),
        "farthest": max(farthest),
    }


def b_crit_of(arguments: Arguments, path: Path) -> Values:
    critical = found(path, arguments).critical
    return {"b_crit": interval_text(critical.value, critical.low, critical.high)}


def regimes_figure(sentence: str) -> Figure:
    return figure("three regimes", sentence, regimes, *panel_records(), tolerance=SAMPLED)


def swept_figure(sentence: str, study: str, *arguments: str) -> Figure:
    """Make the figure of one study of the sweep ``shallue_workloads``, from its trials."""
    derive = partial(b_crit_of, (*arguments, CURVE))
    record = f"{RECORDED}/workloads/{study}.jsonl"
    return figure("three regimes", sentence, derive, record, tolerance=SAMPLED)


REGIMES = [
    regimes_figure("{workloads} recorded workloads lie on one curve"),
    regimes_figure("within {distance:.0%} (root mean square); B_crit runs from {least} to {most}."),
    regimes_figure("shows on {perfect} of them."),
    regimes_figure("shows on {flat}; the others"),
    regimes_figure("batch sizes ended at {nearest:.1f} to {farthest:.1f} B_crit."),
    swept_figure("the sweep finds {b_crit} for `mnist_mlp`", "mnist_mlp", "workload=mnist_mlp"),
    swept_figure(
        "{b_crit} for `mnist_cnn`",
        "mnist_cnn",
        "workload=mnist_simple_cnn",
        "workload.target.value=0.02",
    ),
    swept_figure(
        "{b_crit} for `fashion_cnn`",
        "fashion_cnn",
        "workload=fashion_cnn",
        "workload.target.value=0.12",
    ),
    swept_figure("{b_crit} for `cifar_mlp`", "cifar_mlp", "workload=cifar_mlp"),
]

# B_crit over the target, from tables.

CRITICAL_TABLES = ("fashion_mlp", "cifar_mlp", "mnist_cnn", "shakespeare_lstm", "mnist_mlp")


@cache
def critical_rows(name: str) -> tuple[dict[str, Any], ...]:
    """Read a table at its target and at easier ones, as the sweep does."""
    source = read_index()[name]
    table = read_table(source.path)
    settings = settings_of("critical_batch")
    rows = list[dict[str, Any]]()
    for times in settings["easier"]:
        easier = Target(source.target.metric, source.target.value * times, source.target.mode)
        if too_coarse(table, easier) is not None:
            continue
        try:
            rows.append(dict(critical_row(name, table, easier, settings["level"])))
        except CurveError:
            continue
    return tuple(rows)


def over_targets(name: str, path: Path) -> Values:
    rows = critical_rows(name)
    grown = growth_of(rows)
    # The first row is the table's own target.
    own = rows[0]
    return {
        "metric": own["metric"].removeprefix("val/"),
        "easiest": rounded_text(grown.start, 2),
        "hardest": rounded_text(grown.end, 2),
        "b_crit": interval_text(own["b_crit"], own["b_crit_low"], own["b_crit_high"], digits=3),
        "lr": f"{own['lr_exponent']:.2f} ({own['lr_low']:.2f} to {own['lr_high']:.2f})",
        "power": f"{grown.exponent:.1f} ({grown.low:.1f} to {grown.high:.1f})",
    }


CRITICAL = [
    figure(
        "B_crit over the target",
        row_text(
            [
                f"`{name}`",
                "{metric} {easiest} to {hardest}",
                "{b_crit}",
                "{power}",
            ]
        ),
        partial(over_targets, name),
        f"{TABLES}/{name}.jsonl",
    )
    for name in CRITICAL_TABLES
]

# What a rule costs.

RULES = {"linear": "linear", "sqrt": "square root", "none": "constant"}


@cache
def rule_costs() -> tuple[RuleCost, ...]:
    tuned_at = settings_of("rule_cost")["tuned_at"]
    costs = list[RuleCost]()
    for name in CRITICAL_TABLES:
        source = read_index()[name]
        table = read_table(source.path)
        costs += table_costs(name, table, source.target, list(RULES), tuned_at)
    return tuple(costs)


def far_costs(rule: str) -> list[RuleCost]:
    far = list[RuleCost]()
    for cost in rule_costs():
        if cost.rule == rule and cost.batch_size >= FAR_BATCH_SIZE * cost.tuned_at:
            far.append(cost)
    return far


def rule_row(rule: str, *paths: Path) -> Values:
    far = far_costs(rule)
    # One that missed counts as infinitely dear, so that the median is over all that is known.
    ratios = list[float]()
    missed = 0
    for cost in far:
        if cost.outcome == "not recorded":
            continue
        ratios.append(math.inf if cost.ratio is None else cost.ratio)
        missed += cost.outcome == "missed"
    middle = statistics.median(ratios)
    return {
        "median": f"{middle:.2f} times the steps" if math.isfinite(middle) else "misses",
        "missed": missed,
        "known": len(ratios),
        "unknown": len(far) - len(ratios),
    }


NUMBERS = ("none", "one", "two", "three", "four", "five")


def tables_missed(*paths: Path) -> Values:
    """Count the tables on which a rule misses the target at some batch size."""
    values = dict[str, object]()
    for rule in RULES:
        missed = set[str]()
        for cost in rule_costs():
            if cost.rule == rule and cost.outcome == "missed":
                missed.add(cost.table)
        values[rule] = NUMBERS[len(missed)]
    values["tables"] = NUMBERS[len(CRITICAL_TABLES)]
    return values


ALL_TABLES = tuple(f"{TABLES}/{name}.jsonl" for name in CRITICAL_TABLES)
RULE_COST = [
    *[
        figure(
            "what a rule costs",
            row_text([shown, "{median}", "{missed} of {known}", "{unknown}"]),
            partial(rule_row, rule),
            *ALL_TABLES,
        )
        for rule, shown in RULES.items()
    ],
    figure(
        "what a rule costs",
        "linear misses the target at some batch size on {linear} of {tables} tables, the square "
        "root on {sqrt}.",
        tables_missed,
        *ALL_TABLES,
    ),
]

# What moves the critical batch size.


MNIST = ("workload=mnist_mlp", CURVE)
LOSS_ARGUMENTS = ("workload=fashion_mlp", "search.batch_size.high=2048")
# The studies of each factor: the record of each, and the arguments that tell the posterior what it
# looks for.
FACTORS: dict[str, dict[str, Arguments]] = {
    "data": {
        f"shallue_data/{images}": (
            *MNIST,
            "workload.target.value=0.06",
            f"search.batch_size.high={images}",
        )
        for images in (6000, 18000, 55000)
    },
    "regularisation": {
        f"shallue_regularisation/{name}": MNIST for name in ("none", "smoothed", "decayed")
    },
    # The momentum that was searched is not in the record.
    "algorithms": {
        f"shallue_algorithms/{name}": MNIST for name in ("sgd", "heavy_ball", "nesterov")
    },
    "widths": {f"shallue_widths/{name}": MNIST for name in ("narrow", "base", "deep", "wide")},
    "losses": {
        f"losses/{name}": LOSS_ARGUMENTS for name in ("cross-entropy", "smoothed", "squared")
    },
}
STUDIES: dict[str, Arguments] = {}
for of_factor in FACTORS.values():
    STUDIES |= of_factor


def record_of(study: str) -> str:
    return f"{RECORDED}/{study}.jsonl"


def study_row(arguments: Arguments, path: Path) -> Values:
    study = found(path, arguments)
    critical = study.critical
    small, large = study.slopes
    return {
        "b_crit": interval_text(critical.value, critical.low, critical.high),
        "small": small,
        "large": large,
    }


STUDY_NAMES = {
    "shallue_data/6000": "6,000 training images, error 0.06",
    "shallue_data/18000": "18,000",
    "shallue_data/55000": "55,000",
    "shallue_regularisation/none": "128 hidden units, error 0.03",
    "shallue_regularisation/smoothed": "labels smoothed by 0.1",
    "shallue_regularisation/decayed": "weight decay 0.001",
    "shallue_widths/base": "128 units again",
    "shallue_widths/narrow": "64 units",
    "shallue_widths/deep": "128, 128, 128 units",
    "shallue_widths/wide": "512 units",
    "shallue_algorithms/sgd": "plain SGD",
    "shallue_algorithms/heavy_ball": "heavy ball",
    "shallue_algorithms/nesterov": "Nesterov momentum",
}


def of_pair(larger: str, smaller: str, factor: str, *paths: Path) -> Values:
    """Give the ratio of two studies' B_crit; its interval holds together with those of the
    factor's other pairs."""
    studies = FACTORS[factor]
    compared = list[Any]()
    for (name, arguments), path in zip(studies.items(), paths, strict=True):
        critical = found(path, arguments).critical
        compared.append(
            SimpleNamespace(
                name=name,
                b_crit=critical.value,
                b_crit_low=critical.low,
                b_crit_high=critical.high,
                level=critical.level,
                workload=factor,
                target=asked(arguments).target,
            )
        )
    for pair in compared_pairs(compared):
        if {pair.larger, pair.smaller} == {larger, smaller}:
            return {"ratio": pair.ratio, "low": pair.low, "high": pair.high}
    raise LookupError(f"{larger} and {smaller} are no pair of {factor}")


def pair_figure(sentence: str, larger: str, smaller: str, factor: str) -> Figure:
    records = [record_of(study) for study in FACTORS[factor]]
    derive = partial(of_pair, larger, smaller, factor)
    return figure("what moves B_crit", sentence, derive, *records, tolerance=SAMPLED)


MOVES = [
    *[
        figure(
            "what moves B_crit",
            row_text(
                [
                    shown,
                    "{b_crit}",
                    "{small:.2f}, {large:.2f}",
                ]
            ),
            partial(study_row, STUDIES[study]),
            record_of(study),
            tolerance=SAMPLED,
        )
        for study, shown in STUDY_NAMES.items()
    ],
]

# Width and depth of further networks: the records, each with its place in the sentence.
ON_TEXT = (
    "workload=shakespeare_transformer",
    CURVE,
    "search.batch_size.low=8",
    "search.batch_size.high=512",
)
TRANSFORMERS = {
    "base": "studies/shakespeare_transformer",
    "narrow": "widths/transformer_64",
    "shallow": "widths/transformer_2_layers",
}
ON_CIFAR = (
    "workload=cifar_resnet8",
    "workload.target.value=0.5",
    CURVE,
    "prior.level_sigma=0.7",
    "search.batch_size.high=2048",
)
RESNETS = {"narrow": "widths/resnet8_8", "base": "widths/resnet8_16"}


def of_widths(names: tuple[str, ...], arguments: Arguments, *paths: Path) -> Values:
    """Give the critical batch size of each study, by its place in the sentence."""
    values = dict[str, object]()
    for name, path in zip(names, paths, strict=True):
        critical = found(path, arguments).critical
        values[name] = interval_text(critical.value, critical.low, critical.high)
    return values


def widths_figure(sentence: str, studies: dict[str, str], arguments: Arguments) -> Figure:
    return figure(
        "what moves B_crit",
        sentence,
        partial(of_widths, tuple(studies), arguments),
        *map(record_of, studies.values()),
        tolerance=SAMPLED,
    )


MOVES += [
    widths_figure(
        "the Transformer's B_crit is {base}, {narrow} at half its width, {shallow} at half its depth",
        TRANSFORMERS,
        ON_TEXT,
    ),
    widths_figure(
        "that of ResNet-8 is {base}, {narrow} at half its width",
        RESNETS,
        ON_CIFAR,
    ),
]

# Optimizers over batch size.

# Algorithm and schedule of each.
OPTIMIZERS = {
    "adamw": ("adamw", "constant"),
    "schedule_free": ("schedule_free_adamw", "schedule_free"),
    "soap": ("soap", "constant"),
    "muon": ("muon", "constant"),
}
OPTIMIZER_NAMES = {
    "adamw": "AdamW",
    "schedule_free": "schedule-free AdamW",
    "soap": "SOAP",
    "muon": "Muon",
}
# The arguments of each folder's studies, and the batch sizes shown: each study reached the target
# there.
OF_OPTIMIZERS: dict[str, Arguments] = {
    "optimizers": (*MNIST, "search.batch_size.high=8192"),
    "optimizers_lstm": ("workload=shakespeare_lstm", CURVE),
}
SHOWN_SIZES = {"optimizers": (64, 256, 1024, 3072), "optimizers_lstm": (16, 32, 64, 128)}


def with_optimizer(folder: str, name: str, path: Path) -> Found:
    """Infer one optimizer's study from its recorded trials."""
    algorithm, schedule = OPTIMIZERS[name]
    arguments = (*OF_OPTIMIZERS[folder], f"algorithm={algorithm}", f"schedule={schedule}")
    return found(path, arguments)


def optimizer_row(folder: str, name: str, path: Path) -> Values:
    study = with_optimizer(folder, name, path)
    critical = study.critical
    values: dict[str, object] = {
        "b_crit": interval_text(critical.value, critical.low, critical.high),
        "reached": study.reached,
        "trials": study.trials,
    }
    for size in SHOWN_SIZES[folder]:
        values[f"at_{size}"] = steps_at(study, size)
    return values


def optimizer_crossing(folder: str, first: str, second: str, *paths: Path) -> Values:
    low, middle, high = crossing(
        with_optimizer(folder, first, paths[0]), with_optimizer(folder, second, paths[1])
    )
    return {"size": interval_text(middle, low, high)}


def crossing_figure(sentence: str, folder: str, first: str, second: str) -> Figure:
    return figure(
        "optimizers",
        sentence,
        partial(optimizer_crossing, folder, first, second),
        record_of(f"{folder}/{first}"),
        record_of(f"{folder}/{second}"),
        tolerance=SAMPLED,
    )


def optimizer_rows(folder: str) -> list[Figure]:
    """Give the rows of the table of optimizers: B_crit, and the steps at some batch sizes."""
    figures = list[Figure]()
    for name, shown in OPTIMIZER_NAMES.items():
        cells = [shown, "{b_crit}"]
        for size in SHOWN_SIZES[folder]:
            cells.append(f"{{at_{size}:,.0f}}")
        cells.append("{reached} of {trials}")
        derive = partial(optimizer_row, folder, name)
        record = record_of(f"{folder}/{name}")
        text = row_text(cells)
        figures.append(figure("optimizers", text, derive, record, tolerance=SAMPLED))
    return figures


def optimizer_sizes(folder: str) -> list[Figure]:
    """Give the parts of a sentence that have each optimizer's B_crit."""
    figures = list[Figure]()
    for name, shown in OPTIMIZER_NAMES.items():
        # The first one is named with the verb.
        verb = ""
        if not figures:
            verb = "is "
        text = f"of {shown} {verb}{{b_crit}}"
        derive = partial(optimizer_row, folder, name)
        record = record_of(f"{folder}/{name}")
        figures.append(figure("optimizers", text, derive, record, tolerance=SAMPLED))
    return figures


OPTIMIZERS_COMPARED = [
    *optimizer_rows("optimizers"),
    *optimizer_sizes("optimizers_lstm"),
    crossing_figure("than AdamW up to B = {size},", "optimizers", "schedule_free", "adamw"),
    crossing_figure("than Muon up to B = {size}.", "optimizers", "soap", "muon"),
    crossing_figure("than Muon up to B = {size},", "optimizers_lstm", "schedule_free", "muon"),
    crossing_figure("SOAP up to B = {size}.", "optimizers_lstm", "soap", "muon"),
]

# Three losses.


def runs_of_winner(path: Path, target: Target) -> list[dict[str, Any]]:
    """Give the runs of the point that ran on further seeds and took the least time, by its
    median."""
    points = defaultdict[tuple[int, float], list[dict[str, Any]]](list)
    for row in rows_of(path):
        points[row["batch_size"], row["lr"]].append(row)
    repeated = list[list[dict[str, Any]]]()
    for runs in points.values():
        seeds = {run["seed"] for run in runs}
        if len(seeds) > 2:
            repeated.append(runs)

    def seconds(runs: list[dict[str, Any]]) -> float:
        return statistics.median(steps_to(run, target) * run["seconds_per_step"] for run in runs)

    return min(repeated, key=seconds)


def steps_to(run: dict[str, Any], target: Target) -> float:
    for step, value in zip(run["steps"], run["metric"], strict=True):
        if target.reached(value):
            return float(step)
    return math.inf


def loss_row(study: str, path: Path) -> Values:
    arguments = STUDIES[study]
    target = asked(arguments).target
    critical = found(path, arguments).critical
    runs = runs_of_winner(path, target)
    steps = [steps_to(run, target) for run in runs]
    return {
        "batch_size": runs[0]["batch_size"],
        "lr": runs[0]["lr"],
        "n": len(runs),
        "steps": statistics.median(steps),
        "least": min(steps),
        "most": max(steps),
        "seconds": statistics.median(steps) * runs[0]["seconds_per_step"],
        "b_crit": interval_text(critical.value, critical.low, critical.high),
        "reached": found(path, arguments).reached,
        "trials": found(path, arguments).trials,
    }


LOSSES = [
    *[
        figure(
            "losses",
            row_text(
                [
                    shown,
                    "{batch_size}, {lr:.2g}",
                    "{steps:.0f} ({least:.0f} to {most:.0f})",
                    "{seconds:.2f} s",
                    "{b_crit}",
                    "{reached} of {trials}",
                ]
            ),
            partial(loss_row, study),
            record_of(study),
            tolerance=SAMPLED,
        )
        for study, shown in (
            ("losses/cross-entropy", "cross-entropy"),
            ("losses/smoothed", "smoothed by 0.1"),
            ("losses/squared", "squared error"),
        )
    ],
    pair_figure(
        "cross-entropy's critical batch size is {ratio:.1f} times that of squared error ({low:.1f} "
        "to {high:.1f}, all",
        "losses/cross-entropy",
        "losses/squared",
        "losses",
    ),
]

# Searches compared.

SEARCH_SWEEP = "search_benchmark"
RUNS = f"{RECORDED}/search_benchmark.jsonl"
SEARCH_TABLES = ("fashion_mlp", "mnist_cnn", "cifar_mlp")
SEARCHES = {
    "bstune": "**bstune**",
    "tpe": "Optuna TPE",
    "qmc": "Optuna QMC",
    "shallue": "each batch size tuned by itself",
    "zeus": "Zeus",
}
OPTUNA = ("tpe", "qmc")
# With their axes.
RECORDED_SEARCHES = ("bstune", "tpe/lr", "tpe/sqrt", "qmc/lr", "qmc/sqrt", "shallue", "zeus")
RECORDED_SEEDS = 10
SPENDINGS = (10.0, 20.0, 40.0)
SHOWN_SPENDING = 20.0
# Recorded searches end at so many times the best trial's cost.
MOST_SPENT = 60.0
PATH_OF_NOTHING = "none"


@cache
def recorded_searches(path: Path) -> tuple[dict[str, Any], ...]:
    """Read the lines of a record of searches: what each run depends on, ``key``, and ``run``."""
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return tuple(row for row in rows if "key" in row)


@cache
def search_runs(path: Path, objective: str = "time") -> dict[tuple[str, str], list[Any]]:
    """Give the paths of each search, with axis and form, on each table: one a seed."""
    runs = defaultdict[tuple[str, str], list[Any]](list)
    for row in recorded_searches(path):
        key = row["key"]
        if key["objective"] == objective:
            runs[key["search"], key["table"]].append(row["run"]["path"])
    return dict(runs)


def write_search_units(path: Path, units: Path) -> None:
    """Write the recorded runs as a file of the sweep's units; how long each took is not recorded."""
    header = UnitHeader(
        format=UNITS_FORMAT,
        sweep=SEARCH_SWEEP,
        settings={},
        device=None,
        versions={},
        commit=None,
    )
    lines = [dump_json(asdict(header))]
    for row in recorded_searches(path):
        key = row["key"]
        name = f"{key['table']}/{key['search']}/{key['seed']}"
        inputs = {label: key[label] for label in ("search", "digest", "target")}
        record = UnitRecord(unit=name, inputs=inputs, seconds=0.0, value=row["run"])
        lines.append(dump_json(asdict(record)))
    units.write_text("\n".join(lines) + "\n")


def merits(paths: Sequence[Any]) -> tuple[float, ...]:
    """Order searches, less is better: spending to come within 1.25, then the ratios from the last
    spending back."""
    marks = [median_within(paths)]
    for spending in SPENDINGS[::-1]:
        marks.append(statistics.median(ratio_after(path, spending) for path in paths))
    return tuple(marks)


def median_within(paths: Sequence[Any]) -> float:
    """Give the median spending until within 1.25 of the best."""
    return statistics.median(map(spending_within, paths))


def best_form(name: str, table: str, path: Path) -> list[Any]:
    """Give the paths of a search's best axis and form on a table, chosen on these seeds."""
    forms = list[list[Any]]()
    for (search, on), paths in search_runs(path).items():
        if on == table and search.split("/")[0] == name:
            forms.append(paths)
    return min(forms, key=merits)


def ratio_text(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else PATH_OF_NOTHING


def spread_text(paths: Sequence[Any], spending: float) -> str:
    """Write median and 90th percentile of the ratio after some spending."""
    ratios = [ratio_after(one, spending) for one in paths]
    return f"{ratio_text(statistics.median(ratios))}/{ratio_text(percentile(ratios, 0.9))}"


def search_row(name: str, path: Path) -> Values:
    values = dict[str, object]()
    for table in SEARCH_TABLES:
        paths = best_form(name, table, path)
        values[f"{table}_ratio"] = spread_text(paths, SHOWN_SPENDING)
        within = median_within(paths)
        values[f"{table}_within"] = (
            f"{within:.1f}" if math.isfinite(within) else f"> {MOST_SPENT:.0f}"
        )
    return values


def search_figures() -> list[Figure]:
    figures = list[Figure]()
    for name, shown in SEARCHES.items():
        cells = [shown]
        for table in SEARCH_TABLES:
            cells.append(f"{{{table}_ratio}}; {{{table}_within}}")
        figures.append(
            figure("searches compared", row_text(cells), partial(search_row, name), RUNS)
        )
    return figures


# Beside methods with several fidelities: each search's runs on all tables and seeds together.
RIVAL_RUNS = f"{RECORDED}/rivals.jsonl"
RIVALS = {
    "bstune": "**bstune**",
    "tpe_hyperband": "Optuna TPE, Hyperband",
    "tpe_hyperband_sqrt": "the same, axis sqrt",
    "smac": "SMAC3 MultiFidelityFacade",
    "smac_sqrt": "the same, axis sqrt",
    "tpe/lr/pruned": "Optuna TPE",
    "tpe/sqrt/pruned": "the same, axis sqrt",
    "gp/lr/pruned": "Optuna GP",
    "gp/sqrt/pruned": "the same, axis sqrt",
}


RIVAL_OBJECTIVES = ("time", "steps")
RIVAL_SPENDINGS = (10.0, 40.0)


def rival_paths(name: str, objective: str, path: Path) -> list[Any]:
    """Give the paths of a search over all tables and seeds of the record."""
    paths = list[Any]()
    for (search, _), of_table in search_runs(path, objective).items():
        if search == name:
            paths += of_table
    return paths


def rival_row(name: str, path: Path) -> Values:
    """Give what a search came to by each objective over all tables and seeds of the record."""
    values = dict[str, object]()
    for objective in RIVAL_OBJECTIVES:
        paths = rival_paths(name, objective, path)
        for spending in RIVAL_SPENDINGS:
            values[f"{objective}_{spending:.0f}"] = spread_text(paths, spending)
        within = median_within(paths)
        values[f"{objective}_within"] = f"> {MOST_SPENT:.0f}"
        if math.isfinite(within):
            values[f"{objective}_within"] = f"{within:.1f}"
    return values


def rivals_compared(path: Path) -> Values:
    """Give how many searches a cell of the table of rivals has, and how many bstune's were late."""
    numbers = set[int]()
    for name in RIVALS:
        for objective in RIVAL_OBJECTIVES:
            numbers.add(len(rival_paths(name, objective, path)))
    # One n stands for all cells of the table.
    (n,) = numbers
    early, _ = RIVAL_SPENDINGS
    late = 0
    for search_path in rival_paths("bstune", "time", path):
        late += ratio_after(search_path, early) == math.inf
    return {"n": n, "late": late}


def dyhpo_reached(path: Path) -> Values:
    """Count DyHPO's searches by time, over either axis, and those that reached the target."""
    paths = [*rival_paths("dyhpo", "time", path), *rival_paths("dyhpo_sqrt", "time", path)]
    reached = 0
    for search_path in paths:
        reached += math.isfinite(ratio_after(search_path, MOST_SPENT))
    return {"n": len(paths), "reached": reached}


def rival_figures() -> list[Figure]:
    """Give the rows of the table of rivals."""
    figures = list[Figure]()
    for name, shown in RIVALS.items():
        cells = [shown]
        for objective in RIVAL_OBJECTIVES:
            cells += [f"{{{objective}_{spending:.0f}}}" for spending in RIVAL_SPENDINGS]
            cells.append(f"{{{objective}_within}}")
        figures.append(
            figure("searches compared", row_text(cells), partial(rival_row, name), RIVAL_RUNS)
        )
    return figures


def span_text(spendings: Sequence[float]) -> str:
    """Write the least and the most of some spendings, which end at 60 times the best trial's
    cost."""
    most = max(spendings)
    if math.isinf(most):
        return f"{min(spendings):.0f} to more than {MOST_SPENT:.0f}"
    return f"{min(spendings):.1f} to {most:.1f}"


def within_a_quarter(path: Path) -> Values:
    """Give the range over the tables of the median spendings until within a quarter of the best."""
    spendings = defaultdict[str, list[float]](list)
    for table in SEARCH_TABLES:
        for name in ("bstune", *OPTUNA):
            paths = best_form(name, table, path)
            spendings[name].append(median_within(paths))
    optuna = list[float]()
    for name in OPTUNA:
        optuna += spendings[name]
    return {"ours": span_text(spendings["bstune"]), "optuna": span_text(optuna)}


COMPARED = [
    *search_figures(),
    *rival_figures(),
    figure(
        "searches compared",
        "on the five tables that ship without horizons (n = {n};",
        rivals_compared,
        RIVAL_RUNS,
    ),
    figure(
        "searches compared",
        "By time, {late} of bstune's {n} searches had reached nothing after 10 times.",
        rivals_compared,
        RIVAL_RUNS,
    ),
    figure(
        "searches compared",
        "DyHPO, by time on `fashion_mlp` and `cifar_mlp` alone, reached the target in {reached} of "
        "{n} searches.",
        dyhpo_reached,
        RIVAL_RUNS,
    ),
    figure(
        "searches compared",
        "bstune comes within a quarter of the best point's time after {ours} times the best "
        "trial's cost, "
        "Optuna's TPE and QMC after {optuna}.",
        within_a_quarter,
        RUNS,
    ),
]

GROUPS = {
    "VECTORIZATION": VECTORIZATION,
    "REGIMES": REGIMES,
    "CRITICAL": CRITICAL,
    "RULE_COST": RULE_COST,
    "MOVES": MOVES,
    "OPTIMIZERS_COMPARED": OPTIMIZERS_COMPARED,
    "LOSSES": LOSSES,
    "COMPARED": COMPARED,
}
FIGURES = [one for group in GROUPS.values() for one in group]
