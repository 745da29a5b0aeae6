"""The figures of tests/benchmarks/README.md."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from recorded.figure import Figure, Values, number_or_none, row_text, rows_of
from recorded.in_training import RECORDS, b_crit_and_its_interval
from scipy.stats import t as student

from bstune.study.searching.early_end import FEWEST_FULL

README = "tests/benchmarks/README.md"
FOLDER = "tests/benchmarks"
FIRST_ANSWER = "tests/recorded/first_answer"
Row = dict[str, Any]


def figure(topic: str, sentence: str, derive: Callable[..., Values], *records: str) -> Figure:
    """Give a figure of this README."""
    return Figure(topic, README, sentence, records, derive)


def rows_with(path: Path, **values: object) -> list[Row]:
    """Give the rows of a record whose named values are these; KeyError where a row has no such."""
    found = list[Row]()
    for row in rows_of(path):
        if all(row[name] == value for name, value in values.items()):
            found.append(row)
    return found


def off_by(value: float, truth: float) -> float:
    """Give the factor between two numbers, at least 1."""
    return max(value / truth, truth / value)


def listed(texts: Sequence[str]) -> str:
    """Join texts as a sentence does."""
    return f"{', '.join(texts[:-1])} and {texts[-1]}"


def of_median_and_p90(values: Iterable[float]) -> tuple[float, float]:
    """Give the median and the 90th percentile: the value that 90% do not exceed."""
    ordered = sorted(values)
    return statistics.median(ordered), ordered[math.ceil(0.9 * len(ordered)) - 1]


# A trial's step over a plain loop's.

OVERHEAD_ROWS = "tests/recorded/overhead.jsonl"
OVERHEAD_WORKLOADS = (
    "digits",
    "fashion_mlp",
    "cifar_mlp",
    "fashion_cnn",
    "mnist_cnn",
)
# Of least, median and most.
MEDIAN = 1


def ratios_of(workload: str, over: str, path: Path) -> list[float]:
    rows = rows_with(path, workload=workload)
    rows.sort(key=lambda row: row["batch_size"])
    return [row[over][MEDIAN] for row in rows]


def overhead_range(path: Path) -> Values:
    lean = list[float]()
    lightning = list[float]()
    for workload in OVERHEAD_WORKLOADS:
        lean += ratios_of(workload, "lean_over_loop", path)
        lightning += ratios_of(workload, "lightning_over_loop", path)
    airfoil = rows_with(path, workload="airfoil")[0]
    return {
        "workloads": listed([f"`{workload}`" for workload in OVERHEAD_WORKLOADS]),
        "least": min(lean),
        "most": max(lean),
        "lightning_least": min(lightning),
        "lightning_most": max(lightning),
        "airfoil": airfoil["lean_over_loop"][MEDIAN],
        "step": airfoil["loop_us"] / 1000.0,
        "airfoil_lightning": airfoil["lightning_over_loop"][MEDIAN],
    }


OVERHEAD = [
    figure(
        "overhead",
        "{workloads} take {least:.2f} to {most:.2f} of the loop's time, under Lightning's own loop "
        "{lightning_least:.2f} to {lightning_most:.2f}. `airfoil`, whose step takes {step:.2f} ms "
        "at B = 100, takes "
        "{airfoil:.2f} and {airfoil_lightning:.2f}.",
        overhead_range,
        OVERHEAD_ROWS,
    ),
]

# Coverage of B_crit's interval.

COVERAGE = f"{FOLDER}/coverage.jsonl"
COVERED_TABLES = ("fashion_mlp", "cifar_mlp", "mnist_cnn")
LAWS = [
    "noise 10%",
    "noise 20%",
    "noise 30%",
    "exponent 0.7",
    "exponent 1.5",
    "sharp knee",
    "u-shape",
    "lucky hits",
    "coarse cadence",
]
# Of a row's intervals: after 40 times the best trial's cost.
AFTER_40 = 1


def intervals(path: Path, objective: str, cells: Sequence[str]) -> list[tuple[float, ...]]:
    """Give truth, lower end, middle and upper end of each study's interval at its end."""
    found = list[tuple[float, ...]]()
    for row in rows_of(path):
        if row["objective"] == objective and row["cell"] in cells:
            found.append((row["truth"], *row["intervals"][AFTER_40]))
    return found


def coverage_row(cells: Sequence[str], objectives: Sequence[str], path: Path) -> Values:
    values = dict[str, object]()
    for objective in objectives:
        found = intervals(path, objective, cells)
        held = 0
        widths = list[float]()
        factors_off = list[float]()
        for truth, low, middle, high in found:
            held += low <= truth <= high
            # Open below is as wide as can be.
            widths.append(high / low if low > 0 else math.inf)
            factors_off.append(off_by(middle, truth))
        values[f"{objective}_held"] = held
        values[f"{objective}_studies"] = len(found)
        values[f"{objective}_width"] = statistics.median(widths)
        values[f"{objective}_off"] = statistics.median(factors_off)
    return values


# Of the kinds of laws the one that is held least, and all.
SHOWN_LAWS = {
    "law: u-shape": ["u-shape"],
    "all nine kinds of law": LAWS,
}


def coverage_rows() -> list[Figure]:
    figures = list[Figure]()
    cells_of = dict[str, list[str]]()
    for table in COVERED_TABLES:
        cells_of[f"`{table}`"] = [table]
    for name, cells in (cells_of | SHOWN_LAWS).items():
        # Of laws hardly any study has the objective steps.
        objectives = ["time", "steps", "curve"] if cells[0] in COVERED_TABLES else ["time", "curve"]
        texts = [name]
        for objective in ("time", "steps", "curve"):
            text = ""
            if objective in objectives:
                text = (
                    f"{{{objective}_held}} of {{{objective}_studies}}, "
                    f"{{{objective}_width:.1f}}, {{{objective}_off:.2f}}"
                )
            texts.append(text)
        derive = partial(coverage_row, cells, objectives)
        figures.append(figure("coverage", row_text(texts), derive, COVERAGE))
    return figures


def u_shape(path: Path) -> Values:
    values = coverage_row(["u-shape"], ["curve"], path)
    return {"share": values["curve_held"] / values["curve_studies"]}


COVERED = [
    *coverage_rows(),
    figure(
        "in training",
        "{held} of {studies} studies of `digits` held the B_crit of a table of {runs} runs, "
        "{truth:.0f} ({low:.0f} to {high:.0f} where its seeds are drawn anew), and under `curve` "
        "{curve_held} of {curve_studies}",
        b_crit_and_its_interval,
        *RECORDS,
    ),
    figure("coverage", "but in {share:.0%} where the law is U-shaped", u_shape, COVERAGE),
]

# The fit to points alone.

FIT = "tests/recorded/fit_to_points.jsonl"
NO_TERM = 0.0


def fit_coverage(path: Path) -> Values:
    """Give how often B_crit is held, over the kinds of points: their number, noise and waste."""
    covered = [row["covered"] for row in rows_of(path)]
    return {"least": min(covered), "most": max(covered), "kinds": len(covered)}


def false_alarms(path: Path) -> Values:
    claimed = [row["three_terms"] for row in rows_with(path, waste=NO_TERM)]
    return {"most": max(claimed)}


FITTED = [
    figure(
        "fit to points",
        "On {kinds} kinds of made points its 90% interval held B_crit in {least:.0%} to {most:.0%}",
        fit_coverage,
        FIT,
    ),
    figure("fit to points", "a third one is claimed in at most {most:.0%}.", false_alarms, FIT),
]

# Seconds as a study states them.

SECONDS = f"{FOLDER}/seconds.jsonl"
# By the name in the README: a word of the command, its last argument, and what kept the machine
# busy.
SECONDS_CELLS: dict[str, tuple[str, str, tuple[object, ...]]] = {
    "`digits`, quiet": ("digits", "search.trials=32", (0,)),
    "`digits`, busy": ("digits", "search.trials=32", (2,)),
    "`fashion_mlp`, quiet": ("fashion_mlp", "search.trials=24", (0,)),
    "`fashion_mlp`, busy": ("fashion_mlp", "search.trials=24", ("other", 2)),
    "own module, quiet": ("no_test_split", "search.trials=24", (0,)),
    "own module, busy": ("no_test_split", "search.trials=24", (2,)),
}


def seconds_studies(path: Path, cell: str) -> list[Row]:
    word, last, busy = SECONDS_CELLS[cell]
    found = list[Row]()
    for row in rows_of(path):
        arguments = row["arguments"]
        named = word in " ".join(arguments) and arguments[-1] == last
        if "seed" in row and named and row["busy"] in busy:
            found.append(row)
    return found


def seconds_in_all(path: Path) -> Values:
    values = dict[str, object]()
    for machine in ("quiet", "busy"):
        studies = list[Row]()
        for cell in SECONDS_CELLS:
            if machine in cell:
                studies += seconds_studies(path, cell)
        held = 0
        half_widths = list[float]()
        for row in studies:
            # An interval that is open has no half-width.
            held += row["holds"]
            if row["high"] is not None:
                half_widths.append(math.sqrt(row["high"] / row["low"]))
        values[f"{machine}_holds"] = held
        values[f"{machine}_n"] = len(studies)
        values[f"{machine}_open"] = len(studies) - len(half_widths)
        values[f"{machine}_narrowest"] = min(half_widths)
        values[f"{machine}_widest"] = max(half_widths)
        middle, high = of_median_and_p90(row["over_best"] for row in studies)
        values[f"{machine}_over"] = middle
        values[f"{machine}_high"] = high
    return values


STATED_SECONDS = [
    figure(
        "stated seconds",
        "in {quiet_holds} of {quiet_n} studies on a quiet machine and in {busy_holds} of {busy_n} on "
        "a busy one. Its half-width is a factor of {quiet_narrowest:.1f} to {quiet_widest:.1f} "
        "({quiet_open} is open), on a busy machine {busy_narrowest:.1f} to {busy_widest:.1f}. The "
        "winner takes {quiet_over:.2f} times the best point's seconds (90th percentile "
        "{quiet_high:.2f}), on a busy machine {busy_over:.2f} times ({busy_high:.2f})",
        seconds_in_all,
        SECONDS,
    ),
]

# GAIN and AS GOOD of studies of made laws.

GAIN = f"{FOLDER}/gain.jsonl"


def gain_and_as_good(path: Path) -> Values:
    """Count the intervals of GAIN that hold the truth; judge its estimate and the ends of AS GOOD."""
    held = 0
    log_errors = list[float]()
    over_least = list[float]()
    for row in rows_of(path):
        over_least += [excess for _, excess in row["as_good"] or []]
        # Where every run of the reference was stopped, the gain is a bound without an interval.
        if row["gain"] is None or row["gain"][1] is None:
            continue
        ratio, low, high = row["gain"]
        held += low <= row["truth"] <= high
        log_errors.append(math.log(ratio / row["truth"]))
    middle, ninety = of_median_and_p90(over_least)
    least, medium, most = sorted({100.0 * row["noise"] for row in rows_of(path)})
    return {
        "least": least,
        "medium": medium,
        "most": most,
        "held": held,
        "n": len(log_errors),
        "over": math.exp(statistics.fmean(log_errors)),
        "middle": middle,
        "high": ninety,
    }


GAINED = [
    figure(
        "gain",
        "where a run scatters by {least:.0f}, {medium:.0f} or {most:.0f}%, GAIN's 90% interval held "
        "the true gain in {held} of {n} studies, and its estimate was "
        "{over:.2f} times the true one. An end of AS GOOD took {middle:.2f} times the least seconds "
        "(90th percentile {high:.2f})",
        gain_and_as_good,
        GAIN,
    ),
]

# A first study of two minutes beside a script with TPE.

QUICK = f"{FIRST_ANSWER}/quick.jsonl"


def median_seconds(runs: Sequence[float | None]) -> float:
    """Give the median over fresh runs, of which one that missed the target took for ever."""
    return statistics.median(math.inf if run is None else run for run in runs)


def who_is_faster(path: Path) -> Values:
    """Count the studies whose pick is faster by medians of fresh runs; without an answer it is not."""
    faster = {"bstune": 0, "script": 0}
    rows = rows_of(path)
    for row in rows:
        seconds = dict[str, float]()
        for pick in faster:
            has_answer = row["picks"][pick] is not None
            seconds[pick] = median_seconds(row["fresh"][pick]) if has_answer else math.inf
        faster["bstune"] += seconds["bstune"] < seconds["script"]
        faster["script"] += seconds["script"] < seconds["bstune"]
    return {**faster, "studies": len(rows)}


def missed_runs(path: Path) -> Values:
    values = dict[str, object]()
    rows = rows_of(path)
    for pick in ("bstune", "script"):
        runs = list[float | None]()
        without_pick = 0
        for row in rows:
            if row["picks"][pick] is None:
                without_pick += 1
            else:
                runs += row["fresh"][pick]
        values[f"{pick}_missed"] = runs.count(None)
        values[f"{pick}_runs"] = len(runs)
        values[f"{pick}_none"] = without_pick
    return values


WALLS = f"{FIRST_ANSWER}/walls.jsonl"


def other_walls(path: Path) -> Values:
    """Count the studies of other budgets of seconds in which bstune's pick is the faster, or a
    pick misses."""
    seconds = dict[str, list[float]]()
    rows = rows_of(path)
    for pick in ("bstune", "script"):
        seconds[pick] = [median_seconds(row["fresh"][pick]) for row in rows]
    pairs_of_seconds = zip(seconds["bstune"], seconds["script"], strict=True)
    return {
        "faster": sum(ours < theirs for ours, theirs in pairs_of_seconds),
        "studies": len(rows),
        "ours_missed": sum(map(math.isinf, seconds["bstune"])),
        "theirs_missed": sum(map(math.isinf, seconds["script"])),
    }


FIRST_STUDY = [
    figure(
        "first study",
        "bstune's is the faster one in {bstune} of {studies} studies, the script's in {script}.",
        who_is_faster,
        QUICK,
    ),
    figure(
        "first study",
        "With 60, 120 or 300 s for each, bstune's pick is the faster in {faster} of {studies} "
        "studies; its median run "
        "misses the target in {ours_missed}, the script's in {theirs_missed}.",
        other_walls,
        WALLS,
    ),
    figure(
        "first study",
        "bstune's picks missed the target in {bstune_missed} of {bstune_runs} fresh runs, the "
        "script's in {script_missed} of {script_runs}. The script had no pick in {script_none} studies.",
        missed_runs,
        QUICK,
    ),
]

# Hydra's sweepers.

SWEEPERS = f"{FOLDER}/hydra_sweepers.jsonl"


def sweeper_values(sweeper: str, path: Path) -> Values:
    seconds = list[float]()
    best_losses = list[float]()
    fresh_losses = list[float]()
    for row in rows_with(path, sweeper=sweeper):
        seconds.append(sum(job["seconds"] for job in row["jobs"]))
        best_losses.append(min(job["val_loss"] for job in row["jobs"]))
        fresh_losses += row["fresh"]
    return {
        "seconds": statistics.median(seconds),
        "best": statistics.median(best_losses),
        "fresh": statistics.fmean(fresh_losses),
    }


def both_sweepers(path: Path) -> Values:
    values = dict[str, object]()
    for sweeper in ("optuna", "bstune"):
        for name, value in sweeper_values(sweeper, path).items():
            values[f"{sweeper}_{name}"] = value
    return values


HYDRA = [
    figure(
        "Hydra's sweepers",
        "{bstune_seconds:.0f} s and a best validation loss of {bstune_best:.4f}, on further seeds "
        "{bstune_fresh:.4f}, beside "
        "{optuna_seconds:.0f} s, {optuna_best:.4f} and {optuna_fresh:.4f} of Optuna's.",
        both_sweepers,
        SWEEPERS,
    )
]

# From small to large.

EXTRAPOLATED = f"{FOLDER}/extrapolate.jsonl"
DISTANCES = (4.0, 16.0, 64.0)


def made_curves(path: Path) -> Values:
    """Count the intervals that hold a made curve, at each distance beyond its largest scale."""
    rows = [row for row in rows_of(path) if "family" in row]
    values: dict[str, object] = {"curves": len({row["seed"] for row in rows})}
    for distance in DISTANCES:
        there = [row for row in rows if row["distance"] == distance]
        values[f"held_{distance:.0f}"] = sum(row["holds"] for row in there)
        values[f"width_{distance:.0f}"] = statistics.median(row["width"] for row in there)
    return values


def measured_series(whose: str, path: Path) -> Values:
    """Count the intervals that hold a measured series, by its quantity."""
    values = dict[str, object]()
    for quantity in ("critical_batch_size", "batch_size", "lr"):
        rows = list[Row]()
        for row in rows_of(path):
            of_source = "source" in row and row["source"].startswith(whose)
            if of_source and row["quantity"] == quantity:
                rows.append(row)
        if rows:
            values[f"{quantity}_held"] = sum(row["holds"] for row in rows)
            values[f"{quantity}_n"] = len(rows)
            values[f"{quantity}_width"] = statistics.median(row["width"] for row in rows)
            values[f"{quantity}_farthest"] = max(row["distance"] for row in rows)
    return values


SMALL_TO_LARGE = [
    figure(
        "extrapolation",
        "Of {curves} made curves {held_4}, {held_16} and {held_64} are held 4, 16 and 64 times beyond, "
        "to within factors of {width_4:.1f}, {width_16:.1f} and {width_64:.1f}.",
        made_curves,
        EXTRAPOLATED,
    ),
    figure(
        "extrapolation",
        "Of the Step Law's best batch sizes {batch_size_held} of {batch_size_n} are held, up to "
        "{batch_size_farthest:.1f} times beyond, of its learning rates {lr_held} of {lr_n}.",
        partial(measured_series, "Li et al."),
        EXTRAPOLATED,
    ),
    figure(
        "extrapolation",
        "Of bstune's own, B_crit is held in {critical_batch_size_held} of {critical_batch_size_n}, to a "
        "factor of {critical_batch_size_width:.1f}. The best batch size is held in {batch_size_held} of "
        "{batch_size_n}, the best rate in {lr_held} of {lr_n}.",
        partial(measured_series, "tests/"),
        EXTRAPOLATED,
    ),
]

# The best metric within a budget.

FIXED_BUDGET = f"{FOLDER}/fixed_budget.jsonl"
BUDGET_SEARCHES = {
    "bstune": "**bstune**",
    "TPE": "TPE",
    "TPE, Hyperband": "TPE with Hyperband",
    "GP": "GP (n = {n})",
}
# Full trials' cost, in the order of a row's values, and those that are shown.
BUDGET_SPENDINGS = (3, 5, 10, 20, 40)
SHOWN_SPENDINGS = (3, 5, 10, 40)


def budget_row(search: str, path: Path) -> Values:
    rows = list[Row]()
    # Rows of made laws have no scatter.
    for row in rows_of(path):
        if row["search"] == search and "of_scatter" in row:
            rows.append(row)
    values: dict[str, object] = {"n": len(rows)}
    for i, spending in enumerate(BUDGET_SPENDINGS):
        above = [row["above"][i] for row in rows]
        values[f"m{spending}"] = float(np.nanmedian(above))
        values[f"p{spending}"] = float(np.nanquantile(above, 0.9))
    return values


ENDS = f"{FOLDER}/budget_ends.jsonl"
# Of a look: full trials' cost, full trials, what is left in scatters, and scatters above the best.
LOOK_COST, LOOK_FULL, LOOK_LEFT, LOOK_ABOVE = 1, 2, 3, 4


def end_of(looks: Sequence[Sequence[float]], least_gain: float) -> Sequence[float]:
    """Give the look at which a search ends, or its last one."""
    for look in looks:
        if look[LOOK_FULL] >= FEWEST_FULL and look[LOOK_LEFT] <= least_gain:
            return look
    return looks[-1]


def least_gain_saves(least_gain: float, path: Path) -> Values:
    costs = list[float]()
    whole_costs = list[float]()
    lost = list[float]()
    for row in rows_of(path):
        end = end_of(row["looks"], least_gain)
        last = row["looks"][-1]
        costs.append(end[LOOK_COST])
        whole_costs.append(last[LOOK_COST])
        lost.append(end[LOOK_ABOVE] - last[LOOK_ABOVE])
    return {
        "ends": statistics.fmean(costs),
        "whole": statistics.fmean(whole_costs),
        "lost": statistics.fmean(lost),
    }


BUDGET_COVERAGE = f"{FOLDER}/budget_coverage.jsonl"


def holds(interval: Sequence[float], size: float) -> bool:
    """Tell whether the outer two hold a batch size, to 5%."""
    return interval[0] <= 1.05 * size and size <= 1.05 * interval[-1]


def budget_intervals(path: Path) -> Values:
    studies = 0
    good = 0
    for row in rows_with(path, growth=1.0, spend=20.0):
        if "as_good" in row:
            studies += 1
            good += holds(row["as_good"], row["best_size"])
    return {"n": studies, "good": good}


# Trained: any file of such rows takes part.
OTHER_ROLES = ("baseline", "an octave below", "an octave above")


def trained_values(path: Path) -> Values:
    """Compare the runs of each role with the winner's on the same seeds."""
    by_role = dict[str, dict[int, Row]]()
    for row in rows_of(path):
        by_role.setdefault(row["role"], {})[row["seed"]] = row
    winner = by_role["winner"]
    first = next(iter(winner.values()))
    values: dict[str, object] = {
        "batch_size": first["batch_size"],
        "lr": first["lr"],
        "seeds": len(winner),
        "mean": statistics.fmean(row["value"] for row in winner.values()),
    }
    for role in OTHER_ROLES:
        above = [row["value"] - winner[seed]["value"] for seed, row in by_role[role].items()]
        values[role.replace(" ", "_")] = mean_and_interval(above)
    return values


def mean_and_interval(values: Sequence[float]) -> str:
    """Write the mean with Student's 90% interval."""
    middle = statistics.fmean(values)
    error = statistics.stdev(values) / math.sqrt(len(values))
    half = float(student.ppf(0.95, len(values) - 1)) * error
    return f"{middle:.3f} ({middle - half:.3f} to {middle + half:.3f})"


def trained_row(record: str) -> Figure:
    """Give the row of one record, such as ``shakespeare_lstm_60.jsonl``."""
    workload, _, seconds = Path(record).stem.rpartition("_")
    cells = [f"`{workload}`, {seconds} s", "{batch_size}, {lr:.2g}", "{mean:.3f}"]
    for role in OTHER_ROLES:
        cells.append(f"{{{role.replace(' ', '_')}}}")
    return figure("trained", row_text(cells), trained_values, record)


def trained_records() -> list[str]:
    """List the records of trained budgets that there are, the shorter budget first."""
    folder = Path(__file__).parents[1] / "benchmarks"
    found = folder.glob("shakespeare_*_*.jsonl")
    ordered = sorted(found, key=lambda path: (int(path.stem.rpartition("_")[2]), path.stem))
    return [f"{FOLDER}/{path.name}" for path in ordered]


def budget_rows() -> list[Figure]:
    """Give the rows of the table of searches within a budget: median and 90th percentile."""
    figures = list[Figure]()
    for search, shown in BUDGET_SEARCHES.items():
        cells = [shown]
        for spending in SHOWN_SPENDINGS:
            cells.append(f"{{m{spending}:.1f}}, {{p{spending}:.1f}}")
        derive = partial(budget_row, search)
        figures.append(figure("fixed budget", row_text(cells), derive, FIXED_BUDGET))
    return figures


WITHIN_BUDGET = [
    *budget_rows(),
    figure(
        "fixed budget",
        "ends a search after {ends:.1f} full trials' cost in place of {whole:.1f}, {lost:.2f} of a "
        "seed's scatter above its end",
        partial(least_gain_saves, 0.3),
        ENDS,
    ),
    figure(
        "fixed budget",
        "AS GOOD holds the best batch size in {good} of {n}",
        budget_intervals,
        BUDGET_COVERAGE,
    ),
    *[trained_row(record) for record in trained_records()],
]

# Schedules that end with the trial.

HORIZON = f"{FOLDER}/horizon.jsonl"
HORIZON_SPENDINGS = (10, 20, 40)
HORIZON_SEARCHES = {
    "bstune": "bstune",
    "bstune, reference first": "bstune, a user's own pair first",
    "TPE": "TPE over batch size, learning rate and horizon",
}
# The commits of the rows that count; "now" stands for the one that the record entered with.
NOW = ("now", "1407b8e")
HORIZON_TABLES = {
    None: "laws",
    "digits_linear": "`digits_linear`",
    "mnist_mlp_linear": "`mnist_mlp_linear`",
}


def horizon_row(search: str, path: Path) -> Values:
    values = dict[str, object]()
    for table, name in HORIZON_TABLES.items():
        rows = list[Row]()
        for row in rows_of(path):
            of_search = row["search"] == search and row["code"] in NOW
            if of_search and row.get("table") == table:
                rows.append(row)
        medians = list[str]()
        for i, _ in enumerate(HORIZON_SPENDINGS):
            ratios = list[float]()
            for row in rows:
                ratio = row["fresh"][i]
                ratios.append(math.inf if ratio == "none" else ratio)
            medians.append(number_or_none(statistics.median(ratios), 2))
        values[name.strip("`")] = ", ".join(medians)
    return values


def horizon_sentence(shown: str) -> str:
    cells = [shown]
    for name in HORIZON_TABLES.values():
        cells.append(f"{{{name.strip('`')}}}")
    return row_text(cells)


def horizon_rows() -> list[Figure]:
    """Give the rows of the table of searches over horizons."""
    figures = list[Figure]()
    for search, shown in HORIZON_SEARCHES.items():
        derive = partial(horizon_row, search)
        figures.append(figure("horizons", horizon_sentence(shown), derive, HORIZON))
    return figures


HORIZONS = horizon_rows()

GROUPS = {
    "OVERHEAD": OVERHEAD,
    "COVERED": COVERED,
    "FITTED": FITTED,
    "STATED_SECONDS": STATED_SECONDS,
    "GAINED": GAINED,
    "FIRST_STUDY": FIRST_STUDY,
    "HYDRA": HYDRA,
    "SMALL_TO_LARGE": SMALL_TO_LARGE,
    "WITHIN_BUDGET": WITHIN_BUDGET,
    "HORIZONS": HORIZONS,
}
FIGURES = [one for group in GROUPS.values() for one in group]
