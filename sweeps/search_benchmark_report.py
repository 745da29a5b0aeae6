"""The comparison of searches: figures of merit, the rows of the table, the sentence and the figure."""

import functools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bstune.report.drawing import BLUE, VERMILION
from bstune.sweeps.baselines import FRONTIER, MAX_GP_TRIALS, SAMPLERS, Entry
from bstune.sweeps.harness import Finding
from bstune.sweeps.search_problem import (
    BUDGET_FACTOR,
    MULTIPLES,
    STOP_FACTOR,
    WITHIN,
    Benchmark,
    Objective,
    SearchRun,
    factor,
    percentile,
    ratio_after,
    spending_within,
)
from bstune.trial.replay import DEVICE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# from Okabe and Ito's palette, which survives the common colour blindnesses
COLOURS = (VERMILION, BLUE, "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#9a9a9a")
MARKERS = "osD^v<>P"
MAX_RATIO = 10.0  # of the figure
ABOVE = 2.0 * MAX_RATIO
COMMON_RULES = (
    f"The budget is {BUDGET_FACTOR:g} times what the best cell needs (times budget_factor); no trial outlives it. "
    "Only trials that finished within the spending count. tau(B) is known beforehand, at no cost.",
    "Of an Optuna sampler's two forms (a stopped trial recorded as pruned, or as complete at its bound) the better one "
    "is shown, chosen on these seeds, in its favour; values are log seconds, or log steps. The rules saturating and "
    "surge get the table's own B_crit as noise scale, in their favour.",
)
FRONTIER_RULE = (
    "bstune has the square-root rule through the reference as prior mean and no noise scale; bstune/none and "
    "bstune/linear, with another rule, are left out of the figure and the sentence. Its incumbent is the reached trial "
    "whose point is best by the posterior; that of the others is their fastest trial."
)
GP_RULE = f"Optuna's GP ends after {MAX_GP_TRIALS} trials and keeps what it has found: a trial takes it 0.1 to 0.2 s."
RULES: dict[Objective, tuple[str, ...]] = {
    "time": (
        "Cells: the incumbent's time (the table's median over seeds at its batch size and learning rate) over the best "
        "cell's, median/90th percentile over seeds, after spending so many times the best trial's cost; "
        f"'to {WITHIN:g}': median spending until it is first at most {WITHIN:g}.",
        f"All but bstune's own stop a trial once it has cost {STOP_FACTOR:g} times the fastest so far, in seconds.",
        *COMMON_RULES,
    ),
    "steps": (
        "Cells: the incumbent's steps (the table's median over seeds at its batch size and learning rate) over the "
        "fewest of all cells, median/90th percentile over seeds, after spending so many times the cost of the trial "
        f"with the fewest, in examples; 'to {WITHIN:g}': median spending until it is first at most {WITHIN:g}.",
        f"All but bstune's own stop a trial once it has taken {STOP_FACTOR:g} times the steps of the best so far.",
        *COMMON_RULES,
    ),
    "curve": (
        "Cells: B_crit over the table's own (by all cells, where the slope of log S* over log B is -1/2), as "
        "max(x, 1/x), median/90th percentile over seeds; spending is in multiples of the frontier's cost: the sum over "
        "batch sizes of the fastest cell that reached the target. A search without an estimate counts as infinitely "
        "far off.",
        f"All but bstune's own stop a trial once it has taken {STOP_FACTOR:g} times the steps of the best at no larger "
        "a batch size, or the examples of the best at no smaller.",
        *COMMON_RULES,
    ),
}

LABELS: dict[Objective, tuple[str, str]] = {  # of the figure's axes
    "time": (
        "spending / cost of the best trial",
        "incumbent's time / best time, median over seeds",
    ),
    "steps": (
        "spending / cost of the trial with the fewest steps, in examples",
        "incumbent's steps / fewest steps, median over seeds",
    ),
    "curve": (
        "spending / cost of the frontier",
        "B_crit off by a factor of, median and 10 to 90% of seeds",
    ),
}


@dataclass(frozen=True)
class Mark:
    """A figure of merit after some spending, over seeds; infinite where there is none."""

    spending: float
    median: float
    p90: float


@dataclass(frozen=True)
class Standing:
    """How a search did on a table, over its seeds."""

    table: str
    entry: Entry
    # after each of the multiples, the incumbent's ratio, or by what factor B_crit is off
    marks: tuple[Mark, ...]
    within: tuple[
        float, float
    ]  # spending until first within WITHIN, median and 90th percentile over seeds
    trials: float  # median over seeds
    cut_short: int  # seeds that the cap on trials ended, not the spending
    runs: tuple[SearchRun, ...]

    @property
    def merit(self) -> tuple[float, ...]:
        """What orders searches, less is better: spending to come within, then the medians from the last mark back."""
        return (self.within[0], *(mark.median for mark in reversed(self.marks)))


def standing(benchmark: Benchmark, entry: Entry, runs: Sequence[SearchRun]) -> Standing:
    """Return how a search did over its seeds, at least one."""
    objective = benchmark.problem.objective
    marks = []
    for index, multiple in enumerate(MULTIPLES[objective]):
        if objective != "curve":
            values = [ratio_after(run.path, multiple) for run in runs]
        else:
            values = [factor(run.b_crit[index]) for run in runs]
        marks.append(Mark(multiple, statistics.median(values), percentile(values, 0.9)))
    spending = [spending_within(run.path) if objective != "curve" else math.inf for run in runs]
    within = statistics.median(spending), percentile(spending, 0.9)
    trials = statistics.median(run.trials for run in runs)
    return Standing(
        benchmark.name,
        entry,
        tuple(marks),
        within,
        trials,
        sum(not run.complete for run in runs),
        tuple(runs),
    )


def best_by(standings: Iterable[Standing], name: Callable[[Standing], str]) -> list[Standing]:
    """Return the best standing of each name, the best first."""
    best: dict[str, Standing] = {}
    for one in sorted(standings, key=lambda standing: standing.merit):
        best.setdefault(name(one), one)
    return list(best.values())


def _by_group(standings: Iterable[Standing]) -> list[Standing]:
    return best_by(standings, lambda standing: standing.entry.group)


def make_finding(
    benchmarks: Sequence[Benchmark],
    standings: Sequence[Standing],
    left_out: Sequence[str],
    origins: Sequence[Mapping[str, Any]],
    seeds: int,
) -> Finding:
    """Return the comparison: a row for the better form of each search, and the figure.

    ``result.json`` has the tables (with ``origins``, one mapping each) and every form's numbers too; what is infinite
    (no trial has reached the target, no estimate) is null there.
    """
    objective = benchmarks[0].problem.objective
    shown = [
        one
        for task in benchmarks
        for one in _by_group(o for o in standings if o.table == task.name)
    ]
    notes = [title(one) for one in benchmarks]
    notes += ["* ended by the cap on trials"] if any(one.cut_short for one in shown) else []
    notes += RULES[objective]
    names = {one.entry.name for one in standings}
    notes += [rule for name, rule in ((FRONTIER, FRONTIER_RULE), ("gp", GP_RULE)) if name in names]
    tables = [{**_table(one), **origin} for one, origin in zip(benchmarks, origins, strict=True)]
    results = [_result(one, any(one is other for other in shown)) for one in standings]
    return Finding(
        sentence=sentence(benchmarks, standings),
        rows=[row(one, objective) for one in shown],
        n=seeds,
        device=DEVICE,
        paint=functools.partial(paint, benchmarks, standings),
        inches=(1.2 + 4.6 * len(benchmarks), 5.2),
        notes=[*notes, *left_out],
        details={"tables": tables, "results": results},
    )


def title(benchmark: Benchmark) -> str:
    """Return a table's target, its best cell and, for ``curve``, its B_crit."""
    batch_size, lr, cost = benchmark.best
    unit = "examples" if benchmark.problem.objective == "steps" else "s"
    text = f"{benchmark.name}: {benchmark.problem.target}; best B {batch_size}, lr {lr:.3g}, {cost:.3g} {unit}"
    if benchmark.problem.objective == "curve":
        text += (
            f"; B_crit {benchmark.b_crit:.0f}; the frontier costs {benchmark.frontier_cost:.3g} s"
        )
    return text


def row(one: Standing, objective: Objective) -> dict[str, Any]:
    """Return a standing as a line of the table, of text: ``1.22/1.53``, ``none/none``, ``> 60``."""
    cells: dict[str, Any] = {
        "table": one.table,
        "search": one.entry.group,
        "form": one.entry.form or "",
    }
    for mark in one.marks:
        cells[f"{mark.spending:g}x"] = f"{_number(mark.median)}/{_number(mark.p90)}"
    if objective != "curve":
        median = one.within[0]
        cells[f"to_{WITHIN:g}"] = (
            f"{median:.1f}" if math.isfinite(median) else f"> {MULTIPLES['time'][-1]:g}"
        )
    return cells | {"trials": f"{one.trials:g}{'*' if one.cut_short else ''}"}


def _number(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "none"


def _table(benchmark: Benchmark) -> dict[str, Any]:
    problem = benchmark.problem
    return {
        "table": benchmark.name,
        "target": str(problem.target),
        "best": dict(zip(("batch_size", "lr", "cost"), benchmark.best, strict=True)),
        "frontier_cost": benchmark.frontier_cost,
        "b_crit": benchmark.b_crit,
        "budget": {"steps": problem.budget.steps, "examples": problem.budget.examples},
        "reference": {"batch_size": problem.reference_batch_size, "lr": problem.reference_lr},
    }


def _result(one: Standing, shown: bool) -> dict[str, Any]:
    return {
        "table": one.table,
        "search": one.entry.group,
        "form": one.entry.form,
        "shown": shown,
        "seeds": len(one.runs),
        "after": [vars(mark) for mark in one.marks],
        "within": {"ratio": WITHIN, "median": one.within[0], "p90": one.within[1]},
        "trials": one.trials,
        "cut_short": one.cut_short,
    }


def sentence(benchmarks: Sequence[Benchmark], standings: Sequence[Standing]) -> str:
    """Return the finding in words: of each table, the best of Optuna's samplers and the best other search."""
    parts = []
    for benchmark in benchmarks:
        ordered = _by_group(_contenders(benchmark, standings))
        if benchmark.problem.objective == "curve":
            best = ordered[0]
            parts.append(
                f"{benchmark.name}: {best.entry.group} by {_number(best.marks[-1].median)}"
            )
        else:
            parts.append(f"{benchmark.name}: {_leaders(ordered)}")
    if benchmarks[0].problem.objective == "curve":
        last = MULTIPLES["curve"][-1]
        return f"After {last:g} times the frontier's cost B_crit is off least (median factor) with {'; '.join(parts)}."
    return (
        f"Spending until within {WITHIN:g} of the best, in its cost (median): {'; '.join(parts)}."
    )


def _leaders(ordered: Sequence[Standing]) -> str:
    optunas = [one for one in ordered if one.entry.name in SAMPLERS]
    others = [one for one in ordered if one.entry.name not in SAMPLERS]
    last = MULTIPLES["time"][-1]
    text = ", ".join(
        f"{one[0].entry.group} after {one[0].within[0]:.1f}"
        if math.isfinite(one[0].within[0])
        else f"{one[0].entry.group} not after {last:g}"
        for one in (optunas, others)
        if one
    )
    if optunas and others and math.isfinite(others[0].within[0]):
        least = optunas[0].within[0]
        times = min(least, last) / others[0].within[0]
        text += f", {times:.1f} times as much{'' if math.isfinite(least) else ' or more'}"
    return text


def _contenders(benchmark: Benchmark, standings: Iterable[Standing]) -> list[Standing]:
    """Return a table's standings; bstune's only with its usual rule, which was not chosen on these seeds."""
    here = [one for one in standings if one.table == benchmark.name]
    usual = any(one.entry.key == FRONTIER for one in here)
    return [
        one for one in here if not usual or one.entry.name != FRONTIER or one.entry.key == FRONTIER
    ]


def paint(benchmarks: Sequence[Benchmark], standings: Sequence[Standing], figure: "Figure") -> None:
    """Draw a panel a table, a line for the best axis and form of each search, at most eight.

    For ``time`` and ``steps`` a band shows 10 to 90% of the seeds of two lines, bstune's (or the best that is not
    Optuna's) and the best of Optuna's: eight bands would hide each other. For ``curve`` every search has an error bar
    of that width.
    """

    def order(one: Standing) -> tuple[bool, int, str]:
        name = one.entry.name
        return name != FRONTIER, SAMPLERS.index(name) if name in SAMPLERS else -1, name

    names = list(dict.fromkeys(one.entry.name for one in sorted(standings, key=order)))[
        : len(COLOURS)
    ]
    for axes, benchmark in zip(
        np.atleast_1d(figure.subplots(1, len(benchmarks))), benchmarks, strict=True
    ):
        best = best_by(_contenders(benchmark, standings), lambda standing: standing.entry.name)
        lines = {one.entry.name: one for one in best}
        optunas, others = (
            [name for name in lines if name in SAMPLERS],
            [n for n in lines if n not in SAMPLERS],
        )
        banded = optunas[:1] + ([FRONTIER] if FRONTIER in lines else others[:1])
        for index, name in enumerate(names):
            if name not in lines:
                continue
            if benchmark.problem.objective != "curve":
                _draw_line(axes, lines[name], COLOURS[index], name in banded)
            else:
                _draw_bars(axes, lines[name], index, len(names))
        _finish(axes, benchmark)


def _draw_line(axes: "Axes", one: Standing, colour: str, with_band: bool) -> None:
    """Draw the median; where it is infinite there is no line, and a band that is infinite above is open there."""
    x = np.geomspace(1.0, MULTIPLES["time"][-1], 400)
    values = [[ratio_after(run.path, float(at)) for run in one.runs] for at in x]
    middle = [_finite(statistics.median(at)) for at in values]
    axes.plot(
        x, middle, "-", color=colour, drawstyle="steps-post", linewidth=1.9, label=one.entry.group
    )
    if with_band:
        low, high = ([min(percentile(at, share), ABOVE) for at in values] for share in (0.1, 0.9))
        axes.fill_between(x, low, high, step="post", color=colour, alpha=0.13, linewidth=0.0)


def _draw_bars(axes: "Axes", one: Standing, index: int, count: int) -> None:
    """Draw the medians with 10 to 90% of the seeds, beside those of the other searches."""
    x = [mark.spending * 1.045 ** (index - (count - 1) / 2.0) for mark in one.marks]
    values = [[factor(run.b_crit[at]) for run in one.runs] for at in range(len(one.marks))]
    low, high = ([min(percentile(at, share), ABOVE) for at in values] for share in (0.1, 0.9))
    axes.vlines(x, low, high, color=COLOURS[index], linewidth=1.2, alpha=0.6)
    middle = [_finite(mark.median) for mark in one.marks]
    axes.plot(
        x, middle, f"{MARKERS[index]}-", color=COLOURS[index], linewidth=1.5, label=one.entry.group
    )


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.nan


def _finish(axes: "Axes", benchmark: Benchmark) -> None:
    objective = benchmark.problem.objective
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(0.97, MAX_RATIO)
    marks = MULTIPLES[objective]
    axes.set_xlim(
        *((marks[0] / 1.3, marks[-1] * 1.3) if objective == "curve" else (1.0, marks[-1]))
    )
    axes.set_xticks([*marks], labels=[f"{mark:g}" for mark in marks])
    ticks = (1.0, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
    axes.set_yticks([*ticks], labels=[f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.grid(color="#e4e4e4", linewidth=0.6)
    axes.set_title(f"{benchmark.name}: {benchmark.problem.target}")
    xlabel, ylabel = LABELS[objective]
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    # Below the panel: searches cross every corner inside it.
    axes.legend(
        loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=4, fontsize=7.5, frameon=False
    )
