"""The comparison of searches: figures of merit, rows of the table, the sentence, the figure."""

import functools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bstune.core.records import REPLAY_DEVICE
from bstune.report.drawing import BLUE, VERMILION
from bstune.sweeps.baselines import FRONTIER, MAX_GP_TRIALS, SAMPLERS, Entry
from bstune.sweeps.harness import Finding
from bstune.sweeps.search_problem import (
    BUDGET_FACTOR,
    MULTIPLES_OF_UNIT,
    STOP_FACTOR,
    WITHIN,
    Benchmark,
    SearchObjective,
    SearchRun,
    factor_off,
    percentile,
    ratio_after,
    spending_within,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which people with the common colour blindnesses can tell apart.
SEARCH_COLOURS = (
    VERMILION,
    BLUE,
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
    "#9a9a9a",
)
SEARCH_MARKERS = "osD^v<>P"
# The largest ratio in the figure.
MAX_RATIO = 10.0
# A value above the figure, which stands for infinite ones.
OVER_THE_TOP = 2.0 * MAX_RATIO
# The factor between the bars of two searches, along the axis of spending.
BAR_DISTANCE = 1.045
# A band or an error bar reaches from the lower to the upper one of these shares of the seeds.
BAND_SHARES = (0.1, 0.9)
COMMON_RULES = (
    f"The budget is {BUDGET_FACTOR:g} times what the best cell needs (times budget_factor); no "
    "trial outlives it. Only trials that finished within the spending count. tau(B) is known "
    "beforehand, at no cost.",
    "Of an Optuna sampler's two forms (a stopped trial recorded as pruned, or as complete at its "
    "bound) the better one is shown, chosen on these seeds, in its favour; values are log "
    "seconds, or log steps. The rules saturating and surge get the table's own B_crit as noise "
    "scale, in their favour.",
)
FRONTIER_RULE = (
    "bstune has the square-root rule through the reference as prior mean and no noise scale; "
    "bstune/none and bstune/linear, with another rule, are left out of the figure and the "
    "sentence. Its incumbent is the reached trial whose point is best by the posterior; that of "
    "the others is their fastest trial."
)
GP_RULE = (
    f"Optuna's GP ends after {MAX_GP_TRIALS} trials and keeps what it has found: a trial takes it "
    "0.1 to 0.2 s."
)
RULES_OF_COMPARISON: dict[SearchObjective, tuple[str, ...]] = {
    "time": (
        "Cells: the incumbent's time (the table's median over seeds at its batch size and "
        "learning rate) over the best cell's, median/90th percentile over seeds, after spending "
        f"so many times the best trial's cost; 'to {WITHIN:g}': median spending until it is first "
        f"at most {WITHIN:g}.",
        f"All but bstune's own stop a trial once it has cost {STOP_FACTOR:g} times the fastest so "
        "far, in seconds.",
        *COMMON_RULES,
    ),
    "steps": (
        "Cells: the incumbent's steps (the table's median over seeds at its batch size and "
        "learning rate) over the fewest of all cells, median/90th percentile over seeds, after "
        "spending so many times the cost of the trial with the fewest, in examples; 'to "
        f"{WITHIN:g}': median spending until it is first at most {WITHIN:g}.",
        f"All but bstune's own stop a trial once it has taken {STOP_FACTOR:g} times the steps of "
        "the best so far.",
        *COMMON_RULES,
    ),
    "curve": (
        "Cells: B_crit over the table's own (by all cells, where the slope of log S* over log B "
        "is -1/2), as max(x, 1/x), median/90th percentile over seeds; spending is in multiples of "
        "the frontier's cost: the sum over batch sizes of the fastest cell that reached the "
        "target. A search without an estimate counts as infinitely far off.",
        f"All but bstune's own stop a trial once it has taken {STOP_FACTOR:g} times the steps of "
        "the best at no larger a batch size, or the examples of the best at no smaller.",
        *COMMON_RULES,
    ),
}

# The labels of the figure's axes.
LABELS: dict[SearchObjective, tuple[str, str]] = {
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
class MeritMark:
    """A search's figure of merit after some spending, over seeds; infinite where it has none."""

    spending: float
    median: float
    p90: float


@dataclass(frozen=True)
class Standing:
    """How a search did on a table, over its seeds.

    Args:
        table: its name.
        entry: the search.
        marks: after each of the multiples, the incumbent's ratio, or the factor by which B_crit is
            off.
        within: the spending until the ratio is first at most WITHIN, as median and 90th percentile
            over seeds.
        trials: their number, the median over seeds.
        cut_short: the number of seeds that the cap on trials ended, not the spending.
        runs: one for each seed.
    """

    table: str
    entry: Entry
    marks: tuple[MeritMark, ...]
    within: tuple[float, float]
    trials: float
    cut_short: int
    runs: tuple[SearchRun, ...]

    @property
    def merit(self) -> tuple[float, ...]:
        """The key by which searches are ordered, the best first.

        The first number is the median spending until the chosen point is near the best. Then come
        the medians after each of the multiples, from the largest multiple back.
        """
        return (self.within[0], *(mark.median for mark in reversed(self.marks)))


def standing(benchmark: Benchmark, entry: Entry, runs: Sequence[SearchRun]) -> Standing:
    """Sum up the runs of a search on a benchmark, one for each seed.

    After each multiple of the spending it has the median and the 90th percentile over seeds: of the
    time of the batch size and rate that the search would use now, over that of the table's best
    pair, or, for ``curve``, of the factor that B_crit is off by.
    """
    objective = benchmark.problem.objective
    marks = list[MeritMark]()
    for index, multiple in enumerate(MULTIPLES_OF_UNIT[objective]):
        values = list[float]()
        for run in runs:
            if objective == "curve":
                values.append(factor_off(run.b_crit[index]))
            else:
                values.append(ratio_after(run.path, multiple))
        marks.append(MeritMark(multiple, statistics.median(values), percentile(values, share=0.9)))
    # The spending until the chosen point is near the best. Under ``curve`` no point is chosen.
    spending = [math.inf] * len(runs)
    if objective != "curve":
        spending = [spending_within(run.path) for run in runs]
    return Standing(
        table=benchmark.name,
        entry=entry,
        marks=tuple(marks),
        within=(statistics.median(spending), percentile(spending, share=0.9)),
        trials=statistics.median(run.trials for run in runs),
        cut_short=sum(not run.complete for run in runs),
        runs=tuple(runs),
    )


def best_by(standings: Iterable[Standing], name: Callable[[Standing], str]) -> list[Standing]:
    """Give the best standing of each name, the best of all first.

    A standing is how a search did on a table; ``name`` gives a standing's name.
    """
    best = dict[str, Standing]()
    for candidate in sorted(standings, key=lambda standing: standing.merit):
        # They come in order of merit: the first one with a name is its best.
        best.setdefault(name(candidate), candidate)
    return list(best.values())


def _in_better_form(standings: Iterable[Standing]) -> list[Standing]:
    """Keep the better form of each search and axis, the best of all first.

    A search such as ``tpe/sqrt``, name and axis, has run in two forms: a stopped trial was told to
    it as pruned, or as complete.
    """
    return best_by(standings, lambda standing: standing.entry.group)


def make_finding(
    benchmarks: Sequence[Benchmark],
    standings: Sequence[Standing],
    left_out: Sequence[str],
    origins: Sequence[Mapping[str, object]],
    seeds: int,
) -> Finding:
    """Make the finding of a comparison: a row for the better form of each search, and the figure.

    A form is a way to record a stopped trial; the better one is picked on each table by itself.

    ``result.json`` has the tables, too, with ``origins``, a mapping for each, and the numbers of
    every form. An infinite number (no trial has reached the target, no estimate) is null there.
    """
    objective = benchmarks[0].problem.objective
    shown_standings = list[Standing]()
    tables = list[dict[str, object]]()
    for benchmark, origin in zip(benchmarks, origins, strict=True):
        shown_standings += _in_better_form(_of_table(benchmark, standings))
        tables.append({**_table_result(benchmark), **origin})
    # Two forms may have equal numbers: identity tells which of them is in the table.
    are_shown = set(map(id, shown_standings))
    results = [_result(standing, id(standing) in are_shown) for standing in standings]
    notes = _notes(benchmarks, standings, shown_standings)
    return Finding(
        sentence=sentence(benchmarks, standings),
        rows=[row(standing, objective) for standing in shown_standings],
        n=seeds,
        device=REPLAY_DEVICE,
        paint=functools.partial(paint, benchmarks, standings),
        inches=(1.2 + 4.6 * len(benchmarks), 5.2),
        notes=[*notes, *left_out],
        details={"tables": tables, "results": results},
    )


def _of_table(benchmark: Benchmark, standings: Iterable[Standing]) -> list[Standing]:
    """Give the standings on a benchmark's table."""
    return [standing for standing in standings if standing.table == benchmark.name]


def _notes(
    benchmarks: Sequence[Benchmark], standings: Sequence[Standing], shown: Sequence[Standing]
) -> list[str]:
    """Give the lines below the table: the tables, and the rules of the comparison.

    Args:
        benchmarks: one for each table, all of one objective.
        standings: of all searches on all tables.
        shown: those of them that are rows of the table.
    """
    notes = list(map(title, benchmarks))
    # A row has a star at its number of trials if the cap ended the search on some seed.
    if any(standing.cut_short for standing in shown):
        notes.append("* ended by the cap on trials")
    notes += RULES_OF_COMPARISON[benchmarks[0].problem.objective]
    # Two searches have a rule of their own, which is told wherever they ran.
    names = {standing.entry.name for standing in standings}
    if FRONTIER in names:
        notes.append(FRONTIER_RULE)
    if "gp" in names:
        notes.append(GP_RULE)
    return notes


def title(benchmark: Benchmark) -> str:
    """Write a table's target, its best cell and, for ``curve``, its B_crit."""
    batch_size, lr, cost = benchmark.best
    # For ``steps`` a step costs its examples.
    unit = "examples" if benchmark.problem.objective == "steps" else "s"
    text = (
        f"{benchmark.name}: {benchmark.problem.target}; best B {batch_size}, lr {lr:.3g}, "
        f"{cost:.3g} {unit}"
    )
    if benchmark.problem.objective == "curve":
        text += (
            f"; B_crit {benchmark.b_crit:.0f}; the frontier costs {benchmark.frontier_cost:.3g} s"
        )
    return text


def row(standing: Standing, objective: SearchObjective) -> dict[str, str]:
    """Write a standing as a row of texts.

    After each multiple it has the median over seeds and the 90th percentile, ``1.22/1.53`` or
    ``none/none``, then the median spending until the best is near, ``12.3`` or ``> 60``.
    """
    cells = {
        "table": standing.table,
        "search": standing.entry.group,
        "form": standing.entry.form or "",
    }
    for mark in standing.marks:
        cells[f"{mark.spending:g}x"] = f"{_ratio_text(mark.median)}/{_ratio_text(mark.p90)}"
    if objective != "curve":
        median, _p90 = standing.within
        # Time and steps have the same multiples.
        spending = f"> {MULTIPLES_OF_UNIT['time'][-1]:g}"
        if math.isfinite(median):
            spending = f"{median:.1f}"
        cells[f"to_{WITHIN:g}"] = spending
    cells["trials"] = f"{standing.trials:g}"
    # A note says what the star means.
    if standing.cut_short:
        cells["trials"] += "*"
    return cells


def _ratio_text(value: float) -> str:
    """Write a ratio; ``none`` for an infinite one."""
    return f"{value:.2f}" if math.isfinite(value) else "none"


def _table_result(benchmark: Benchmark) -> dict[str, object]:
    """Give the values of a benchmark that go to result.json.

    The reference is where a search starts. The frontier costs what the cheapest cells, one at each
    batch size, cost together.
    """
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


def _result(standing: Standing, shown: bool) -> dict[str, object]:
    """Give the values of a standing for result.json; ``shown`` says whether it is in the table."""
    median, p90 = standing.within
    return {
        "table": standing.table,
        "search": standing.entry.group,
        "form": standing.entry.form,
        "shown": shown,
        "seeds": len(standing.runs),
        "after": [vars(mark) for mark in standing.marks],
        "within": {"ratio": WITHIN, "median": median, "p90": p90},
        "trials": standing.trials,
        "cut_short": standing.cut_short,
    }


def sentence(benchmarks: Sequence[Benchmark], standings: Sequence[Standing]) -> str:
    """Name, for each table, the best of Optuna's samplers and the best other search.

    For ``curve`` it is the best search of all, with the factor by which its B_crit is off.
    """
    is_curve = benchmarks[0].problem.objective == "curve"
    parts = list[str]()
    for benchmark in benchmarks:
        # The better form of each search on this table, the best search first.
        ordered = _in_better_form(_contenders(benchmark, standings))
        if is_curve:
            best = ordered[0]
            text = f"{best.entry.group} by {_ratio_text(best.marks[-1].median)}"
        else:
            text = _leaders(ordered)
        parts.append(f"{benchmark.name}: {text}")
    tables_text = "; ".join(parts)
    if is_curve:
        last_multiple = MULTIPLES_OF_UNIT["curve"][-1]
        return (
            f"After {last_multiple:g} times the frontier's cost B_crit is off least (median "
            f"factor) with {tables_text}."
        )
    return f"Spending until within {WITHIN:g} of the best, in its cost (median): {tables_text}."


def _leaders(ordered: Sequence[Standing]) -> str:
    """Name the best of Optuna's samplers and the best other search, for ``time`` or ``steps``.

    If there are both, the text ends with a ratio: how many times as much Optuna's best spends until
    its choice is near the best cell. ``ordered``: the best search first.
    """
    of_optuna, others = _apart(ordered)
    text = ", ".join(map(_spending_of, (*of_optuna[:1], *others[:1])))
    if not of_optuna or not others:
        return text
    optuna_spends, _p90 = of_optuna[0].within
    other_spends, _p90 = others[0].within
    if math.isfinite(other_spends):
        # A search that never came near the best has spent the largest multiple at least, so that
        # the ratio is a lower bound. Time and steps have the same multiples.
        most = MULTIPLES_OF_UNIT["time"][-1]
        ratio = min(optuna_spends, most) / other_spends
        text += f", {ratio:.1f} times as much"
        if math.isinf(optuna_spends):
            text += " or more"
    return text


def _apart(standings: Sequence[Standing]) -> tuple[list[Standing], list[Standing]]:
    """Give the standings of Optuna's samplers, and those of the other searches, in their order."""
    of_optuna = list[Standing]()
    others = list[Standing]()
    for standing in standings:
        if standing.entry.name in SAMPLERS:
            of_optuna.append(standing)
        else:
            others.append(standing)
    return of_optuna, others


def _spending_of(standing: Standing) -> str:
    """Write a search and the spending after which it comes within WITHIN of the best."""
    median, _ = standing.within
    if math.isfinite(median):
        return f"{standing.entry.group} after {median:.1f}"
    return f"{standing.entry.group} not after {MULTIPLES_OF_UNIT['time'][-1]:g}"


def _contenders(benchmark: Benchmark, standings: Iterable[Standing]) -> list[Standing]:
    """Give the standings on a table that are compared: all but bstune's with an unusual rule.

    The best of bstune's rules would be chosen on the seeds that it is compared on.
    """
    on_table = _of_table(benchmark, standings)
    keys = {standing.entry.key for standing in on_table}
    # The key of bstune with its usual rule is its name alone. If it ran with other rules alone,
    # these are compared.
    if FRONTIER not in keys:
        return on_table
    contenders = list[Standing]()
    for standing in on_table:
        if standing.entry.name != FRONTIER or standing.entry.key == FRONTIER:
            contenders.append(standing)
    return contenders


def paint(benchmarks: Sequence[Benchmark], standings: Sequence[Standing], figure: "Figure") -> None:
    """Draw a panel for each table, with a line for the best axis and form of up to eight searches.

    A search's key, such as ``tpe/sqrt/pruned``, has its name, its axis (the coordinate that it has
    for the learning rate) and its form (how a stopped trial is told to it). The best ones of a name
    are picked in each panel by itself.

    For ``time`` and ``steps`` a band shows 10 to 90% of the seeds of two lines, bstune's (or the
    best that is not Optuna's) and the best of Optuna's: eight bands would hide each other. For
    ``curve`` every search has an error bar of that width.
    """
    in_order = sorted(standings, key=_place_in_legend)
    # A name has one colour and one marker in every panel, whatever is best there.
    names = list(dict.fromkeys(standing.entry.name for standing in in_order))
    names = names[: len(SEARCH_COLOURS)]
    panels = np.atleast_1d(figure.subplots(1, len(benchmarks)))
    for axes, benchmark in zip(panels, benchmarks, strict=True):
        best = best_by(_contenders(benchmark, standings), lambda standing: standing.entry.name)
        lines = {standing.entry.name: standing for standing in best}
        banded = _names_with_band(best)
        for index, name in enumerate(names):
            if name not in lines:
                continue
            if benchmark.problem.objective == "curve":
                _draw_bars(axes, lines[name], index, len(names))
            else:
                _draw_line(axes, lines[name], SEARCH_COLOURS[index], name in banded)
        _finish(axes, benchmark)


def _names_with_band(best: Sequence[Standing]) -> set[str]:
    """Name the searches whose spread is drawn, from a table's best standings in order.

    They are bstune's, or the best that is not Optuna's, and the best of Optuna's samplers.
    """
    of_optuna, others = _apart(best)
    if any(standing.entry.name == FRONTIER for standing in others):
        names = {FRONTIER}
    else:
        names = {standing.entry.name for standing in others[:1]}
    if of_optuna:
        names.add(of_optuna[0].entry.name)
    return names


def _place_in_legend(standing: Standing) -> tuple[bool, int, str]:
    """Give the key by which a legend sorts searches.

    bstune's come first, then those that are not of Optuna by name, then Optuna's samplers in the
    order of SAMPLERS.
    """
    name = standing.entry.name
    place_in_optuna = SAMPLERS.index(name) if name in SAMPLERS else -1
    return name != FRONTIER, place_in_optuna, name


def _draw_line(axes: "Axes", standing: Standing, colour: str, with_band: bool) -> None:
    """Draw the median ratio over spending, with gaps where it is infinite, and a band if wanted."""
    # The objective steps, which is drawn like this, too, has the multiples of time.
    spending = np.geomspace(1.0, MULTIPLES_OF_UNIT["time"][-1], 400)
    ratios = list[list[float]]()
    for spent in spending.tolist():
        ratios.append([ratio_after(run.path, spent) for run in standing.runs])
    axes.plot(
        spending,
        _drawable(map(statistics.median, ratios)),
        "-",
        color=colour,
        drawstyle="steps-post",
        linewidth=1.9,
        label=standing.entry.group,
    )
    if with_band:
        low, high = _band(ratios)
        axes.fill_between(spending, low, high, step="post", color=colour, alpha=0.13, linewidth=0.0)


def _draw_bars(axes: "Axes", standing: Standing, index: int, count: int) -> None:
    """Draw the factor by which B_crit is off, over the spending, beside those of other searches.

    Each mark of the standing, at one spending, gets the median with a bar over 10 to 90% of the
    seeds. ``index`` is the search's place among ``count`` searches.
    """
    # The bars of a mark stand side by side around its spending, so that they do not hide each
    # other. On a logarithmic axis equal factors are equal distances.
    places_from_middle = index - (count - 1) / 2.0
    beside = BAR_DISTANCE**places_from_middle
    spending = list[float]()
    medians = list[float]()
    factors = list[list[float]]()
    for index_of_mark, mark in enumerate(standing.marks):
        spending.append(mark.spending * beside)
        medians.append(mark.median)
        factors.append([factor_off(run.b_crit[index_of_mark]) for run in standing.runs])
    low, high = _band(factors)
    colour = SEARCH_COLOURS[index]
    axes.vlines(spending, low, high, color=colour, linewidth=1.2, alpha=0.6)
    axes.plot(
        spending,
        _drawable(medians),
        f"{SEARCH_MARKERS[index]}-",
        color=colour,
        linewidth=1.5,
        label=standing.entry.group,
    )


def _band(values: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
    """Give both ends of a band over most seeds, from 10 to 90%, at each place of the axis.

    ``values`` has those of all seeds at each place.
    """
    low_share, high_share = BAND_SHARES
    low = list[float]()
    high = list[float]()
    for values_of_seeds in values:
        # An infinite end is drawn above the figure.
        low.append(min(percentile(values_of_seeds, low_share), OVER_THE_TOP))
        high.append(min(percentile(values_of_seeds, high_share), OVER_THE_TOP))
    return low, high


def _drawable(values: Iterable[float]) -> list[float]:
    """Replace infinite values by gaps: matplotlib would stretch its axes for them."""
    return [value if math.isfinite(value) else math.nan for value in values]


def _finish(axes: "Axes", benchmark: Benchmark) -> None:
    """Set the scales, ticks, labels and legend of a table's panel."""
    objective = benchmark.problem.objective
    axes.set_xscale("log")
    axes.set_yscale("log")
    # The axis begins a little below 1, so that a line at the best itself is seen.
    axes.set_ylim(0.97, MAX_RATIO)
    marks = MULTIPLES_OF_UNIT[objective]
    # Single marks need room at both ends. A path begins at the axis.
    if objective == "curve":
        axes.set_xlim(marks[0] / 1.3, marks[-1] * 1.3)
    else:
        axes.set_xlim(1.0, marks[-1])
    axes.set_xticks([*marks], labels=list(map("{:g}".format, marks)))
    ticks = (1.0, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
    axes.set_yticks([*ticks], labels=list(map("{:g}".format, ticks)))
    axes.minorticks_off()
    axes.grid(color="#e4e4e4", linewidth=0.6)
    axes.set_title(f"{benchmark.name}: {benchmark.problem.target}")
    xlabel, ylabel = LABELS[objective]
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    # The legend stands below the panel: searches cross every corner inside it.
    axes.legend(
        loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=4, fontsize=7.5, frameon=False
    )
