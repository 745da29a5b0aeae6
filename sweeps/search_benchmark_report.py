"""What the searches of the bench came to: the figures of merit, the printed tables, the JSON and the figure."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable

from bstune.core.figures import save_figure
from bstune.sweeps.baselines import MOST_GP_TRIALS, OWN, SAMPLERS, Entry
from bstune.sweeps.contest import (
    BUDGET_FACTOR,
    MULTIPLES,
    STOP_FACTOR,
    WITHIN,
    Objective,
    Played,
    Task,
    factor,
    percentile,
    ratio_after,
    spending_within,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# from Okabe and Ito's palette, which survives the common colour blindnesses
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#9a9a9a")
MARKERS = "osD^v<>P"
WIDTH = 112  # of the printed tables, also where the output goes into a file
HIGHEST_RATIO = 10.0  # of the figure
ABOVE = 2.0 * HIGHEST_RATIO
BUDGET_RULE = (
    f"First budget: {BUDGET_FACTOR:g} times what the best cell needs (times --budget-factor); no trial outlives it but "
    "bstune's own, which take it for a scale. Only trials that finished within the spending count. tau(B) is known "
    "beforehand, at no cost."
)
FORMS_RULE = (
    "Of an Optuna sampler's two forms (a stopped trial told as pruned, or as complete at its bound) the better one is "
    "shown, chosen on these seeds, in its favour; values are log seconds. The rules saturating and surge are given the "
    "table's own B_crit as noise scale, in their favour."
)
OWN_RULE = (
    "bstune has the square-root rule through the reference as prior mean and no noise scale; with another rule it is "
    "bstune/none or bstune/linear, which the figure and the line below the table leave out. Its incumbent is the "
    "reached trial whose point its posterior likes best; that of the others is their fastest."
)
GP_RULE = f"Optuna's GP is ended after {MOST_GP_TRIALS} trials and keeps what it has: it takes 0.1 to 0.2 s for each."
RULES: dict[Objective, tuple[str, ...]] = {
    "time": (
        "Incumbent's time (the table's median over seeds at its batch size and learning rate) over the best cell's, "
        f"median / 90th percentile over seeds; 'to {WITHIN:g}': median spending until it is first at most {WITHIN:g}.",
        f"All but bstune's own stop a trial once it has cost {STOP_FACTOR:g} times the fastest so far, in seconds.",
        BUDGET_RULE,
        FORMS_RULE,
    ),
    "curve": (
        "B_crit over the table's dense fit, as max(x, 1/x), median / 90th percentile over seeds; spending in multiples "
        "of the frontier's cost: the sum over batch sizes of the fastest cell that reached the target.",
        f"All but bstune's own stop a trial once it has taken {STOP_FACTOR:g} times the steps of the best at no larger "
        "a batch size, or the examples of the best at no smaller.",
        BUDGET_RULE,
        FORMS_RULE,
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
    """How a search did on a table.

    Args:
        table: its name.
        entry: the search.
        marks: after each of the multiples, the incumbent's ratio, or by what factor B_crit is off.
        within: spending until the incumbent is first within ``WITHIN``, median and 90th percentile over seeds.
        trials: median number of trials.
        cut_short: seeds that the cap on trials ended, not the spending.
        played: the seeds.
    """

    table: str
    entry: Entry
    marks: tuple[Mark, ...]
    within: tuple[float, float]
    trials: float
    cut_short: int
    played: tuple[Played, ...]

    @property
    def merit(self) -> tuple[float, ...]:
        """What orders searches, less is better: spending to come within, then the medians from the last mark back."""
        return (self.within[0], *(mark.median for mark in reversed(self.marks)))


def standing(task: Task, entry: Entry, played: Sequence[Played]) -> Standing:
    """Return how a search did over its seeds, at least one."""
    objective = task.problem.objective
    marks = []
    for index, multiple in enumerate(MULTIPLES[objective]):
        if objective == "time":
            values = [ratio_after(one.path, multiple) for one in played]
        else:
            values = [factor(one.b_crit[index]) for one in played]
        marks.append(Mark(multiple, statistics.median(values), percentile(values, 0.9)))
    spending = [spending_within(one.path) if objective == "time" else math.inf for one in played]
    return Standing(
        task.name,
        entry,
        tuple(marks),
        (statistics.median(spending), percentile(spending, 0.9)),
        statistics.median(one.trials for one in played),
        sum(not one.complete for one in played),
        tuple(played),
    )


def best_by(found: Iterable[Standing], name: Callable[[Standing], str]) -> list[Standing]:
    """Return the best standing of each name, the best first."""
    best: dict[str, Standing] = {}
    for one in sorted(found, key=lambda standing: standing.merit):
        best.setdefault(name(one), one)
    return list(best.values())


def print_tables(tasks: Sequence[Task], found: Sequence[Standing], notes: Sequence[str]) -> None:
    """Print a table for each task, with the better form of each search, and the notes."""
    console = Console(width=max(WIDTH, Console().width))
    for task in tasks:
        console.print(_title(task, found), style="bold", highlight=False)
        console.print(_table(task, [one for one in found if one.table == task.name]))
        line = leader(task, found)
        if line:
            console.print(line, highlight=False)
    for note in notes:
        console.print(f"- {note}", highlight=False)


def _title(task: Task, found: Sequence[Standing]) -> str:
    batch_size, lr, seconds = task.best
    seeds = max((len(one.played) for one in found), default=0)
    text = f"{task.name}: {task.problem.target}; {seeds} seeds; best B {batch_size}, lr {lr:.3g}, {seconds:.3g} s"
    if task.problem.objective == "curve":
        text += f"; B_crit {task.b_crit:.0f}; the frontier costs {task.frontier_seconds:.3g} s"
    return text


def _table(task: Task, found: Sequence[Standing]) -> RichTable:
    problem = task.problem
    table = RichTable(box=SIMPLE_HEAD, padding=(0, 1))
    for column in ("search", "form"):
        table.add_column(column, no_wrap=True)
    after = [f"{multiple:g}x" for multiple in MULTIPLES[problem.objective]]
    for column in (*after, *([f"to {WITHIN:g}"] if problem.objective == "time" else []), "trials"):
        table.add_column(column, justify="right", no_wrap=True)
    for one in best_by(found, lambda standing: standing.entry.group):
        cells = [f"{_number(mark.median)}/{_number(mark.p90)}" for mark in one.marks]
        if problem.objective == "time":
            median = one.within[0]
            cells.append(f"{median:.1f}" if math.isfinite(median) else f"> {MULTIPLES['time'][-1]:g}")
        table.add_row(one.entry.group, one.entry.form or "", *cells, f"{one.trials:g}{'*' if one.cut_short else ''}")
    if any(one.cut_short for one in found):
        table.caption = "* ended by the cap on trials"
    return table


def _number(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "none"


def leader(task: Task, found: Sequence[Standing]) -> str | None:
    """Return what the best of Optuna's samplers and the best other search spent to come within; None for ``curve``."""
    if task.problem.objective == "curve":
        return None
    ordered = best_by(_contenders(task, found), lambda standing: standing.entry.group)
    optunas = [one for one in ordered if _is_optuna(one)]
    others = [one for one in ordered if not _is_optuna(one)]
    last = MULTIPLES["time"][-1]
    parts = [
        f"{one[0].entry.group} after {one[0].within[0]:.1f}"
        if math.isfinite(one[0].within[0])
        else f"{one[0].entry.group} not after {last:g}"
        for one in (optunas, others)
        if one
    ]
    text = f"within {WITHIN:g} of the best (median): " + ", ".join(parts)
    if len(parts) == 2 and math.isfinite(others[0].within[0]):
        least = optunas[0].within[0]
        times = min(least, last) / others[0].within[0]
        text += f": {times:.1f} times as much{'' if math.isfinite(least) else ' or more'}"
    return text


def summary(tasks: Sequence[Task], found: Sequence[Standing], notes: Sequence[str]) -> dict[str, Any]:
    """Return what ``bench.json`` holds; what is infinite (no trial has reached the target, no estimate) is null."""
    chosen = {
        one.entry.key + one.table
        for task in tasks
        for one in best_by([o for o in found if o.table == task.name], lambda standing: standing.entry.group)
    }
    return {
        "tables": [
            {
                "table": task.name,
                "target": str(task.problem.target),
                "best": {"batch_size": task.best[0], "lr": task.best[1], "seconds": task.best[2]},
                "frontier_seconds": task.frontier_seconds,
                "b_crit": task.b_crit,
                "budget": {"steps": task.problem.budget.steps, "examples": task.problem.budget.examples},
                "reference": {"batch_size": task.problem.reference_batch_size, "lr": task.problem.reference_lr},
            }
            for task in tasks
        ],
        "results": [
            {
                "table": one.table,
                "search": one.entry.group,
                "form": one.entry.form,
                "shown": one.entry.key + one.table in chosen,
                "seeds": len(one.played),
                "after": [vars(mark) for mark in one.marks],
                "within": {"ratio": WITHIN, "median": one.within[0], "p90": one.within[1]},
                "trials": one.trials,
                "cut_short": one.cut_short,
            }
            for one in found
        ],
        "notes": list(notes),
    }


def draw(tasks: Sequence[Task], found: Sequence[Standing], path: Path) -> None:
    """Write the figure: a panel a table, a line for the best axis and form of each search, at most eight.

    For ``time`` a band shows 10 to 90% of the seeds of two lines, bstune's (or the best that is not Optuna's) and the
    best of Optuna's: eight bands would hide each other. For ``curve`` every search has an error bar of that width.
    """
    names = list(dict.fromkeys(one.entry.name for one in sorted(found, key=_own_first)))[: len(COLOURS)]

    def paint(figure: "Figure") -> None:
        for axes, task in zip(np.atleast_1d(figure.subplots(1, len(tasks))), tasks, strict=True):
            best = best_by(_contenders(task, found), lambda standing: standing.entry.name)
            lines = {one.entry.name: one for one in best}
            optunas, others = [name for name in lines if name in SAMPLERS], [n for n in lines if n not in SAMPLERS]
            banded = optunas[:1] + ([OWN] if OWN in lines else others[:1])
            for index, name in enumerate(names):
                if name not in lines:
                    continue
                if task.problem.objective == "time":
                    _draw_line(axes, lines[name], COLOURS[index], name in banded)
                else:
                    _draw_bars(axes, lines[name], index, len(names))
            _finish(axes, task)

    save_figure(paint, (1.2 + 4.6 * len(tasks), 5.2), path)


def _contenders(task: Task, found: Iterable[Standing]) -> list[Standing]:
    """Return the standings on a table; bstune's own only with its usual rule, which was not chosen on these seeds."""
    here = [one for one in found if one.table == task.name]
    usual = any(one.entry.key == OWN for one in here)
    return [one for one in here if not usual or one.entry.name != OWN or one.entry.key == OWN]


def _is_optuna(one: Standing) -> bool:
    return one.entry.name in SAMPLERS


def _own_first(one: Standing) -> tuple[bool, int, str]:
    return one.entry.name != OWN, SAMPLERS.index(one.entry.name) if _is_optuna(one) else -1, one.entry.name


def _draw_line(axes: "Axes", one: Standing, colour: str, with_band: bool) -> None:
    """Draw the median; where it is infinite there is no line, and a band that is infinite above is open there."""
    x = np.geomspace(1.0, MULTIPLES["time"][-1], 400)
    values = [[ratio_after(played.path, float(at)) for played in one.played] for at in x]
    middle = [_finite(statistics.median(at)) for at in values]
    axes.plot(x, middle, "-", color=colour, drawstyle="steps-post", linewidth=1.9, label=one.entry.group)
    if with_band:
        low, high = ([min(percentile(at, share), ABOVE) for at in values] for share in (0.1, 0.9))
        axes.fill_between(x, low, high, step="post", color=colour, alpha=0.13, linewidth=0.0)


def _draw_bars(axes: "Axes", one: Standing, index: int, count: int) -> None:
    """Draw the medians with 10 to 90% of the seeds, beside those of the other searches."""
    x = [mark.spending * 1.045 ** (index - (count - 1) / 2.0) for mark in one.marks]
    values = [[factor(played.b_crit[at]) for played in one.played] for at in range(len(one.marks))]
    low, high = ([min(percentile(at, share), ABOVE) for at in values] for share in (0.1, 0.9))
    axes.vlines(x, low, high, color=COLOURS[index], linewidth=1.2, alpha=0.6)
    middle = [_finite(mark.median) for mark in one.marks]
    axes.plot(x, middle, f"{MARKERS[index]}-", color=COLOURS[index], linewidth=1.5, label=one.entry.group)


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.nan


def _finish(axes: "Axes", task: Task) -> None:
    objective = task.problem.objective
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(0.97, HIGHEST_RATIO)
    marks = MULTIPLES[objective]
    axes.set_xlim(*((marks[0] / 1.3, marks[-1] * 1.3) if objective == "curve" else (1.0, marks[-1])))
    axes.set_xticks([*marks], labels=[f"{mark:g}" for mark in marks])
    ticks = (1.0, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
    axes.set_yticks([*ticks], labels=[f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.grid(color="#e4e4e4", linewidth=0.6)
    axes.set_title(f"{task.name}: {task.problem.target}")
    if objective == "time":
        axes.set_xlabel("spending / cost of the best trial")
        axes.set_ylabel("incumbent's time / best time, median over seeds")
    else:
        axes.set_xlabel("spending / cost of the frontier")
        axes.set_ylabel("B_crit off by a factor of, median and 10 to 90% of seeds")
    # Below the panel: inside it there is no corner that no search crosses.
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=4, fontsize=7.5, frameon=False)
