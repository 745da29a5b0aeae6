"""Tables and figures from trial records and a fit: ``curve.json``, ``curve.png``, the live table and the final one.

Nothing here trains. Neither torch nor lightning is imported, and matplotlib only once a figure is drawn: through
``Figure`` and the Agg canvas, so that the backend and the settings of the importing program stay as they are.
"""

import math
import os
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from bstune.curve import SLOPE_RATIO, CurveFit, FrontierPoint, frontier_points, log_slope, predict_steps
from bstune.records import STATUSES, Target, TrialResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap, Normalize
    from matplotlib.figure import Figure

Summary = dict[str, Any]
Row = Mapping[str, Any]

SMALL_END_SPAN = 4.0  # the slope at the small end is taken over this factor of batch size, and at least three points
REGIMES = ("perfect scaling", "diminishing returns", "maximal data parallelism")
STATUS_STYLES = {"reached": "green", "budget": "yellow", "diverged": "red", "oom": "magenta", "failed": "bold red"}
WINNERS = {"best_by_time": "least time", "best_by_steps": "fewest steps"}

FIGURE_INCHES = (13.0, 6.5)
FIGURE_DPI = 150
# from Okabe and Ito's palette, which survives the common colour blindnesses
BLUE, VERMILION, PURPLE, INK, GREY = "#0072B2", "#D55E00", "#AA4499", "#1a1a1a", "#9a9a9a"
REGIME_TINTS = dict(zip(REGIMES, ("#e6f0f8", "#f7f7f7", "#fcf1e2"), strict=True))
CURVE_LABEL = r"$S_\mathrm{{min}}\,(1 + B_\mathrm{{crit}}/B)$ and its {:.0%} band"
COLOUR_LABELS = {"delta": "delta = log2(learning rate / rule(B)), in octaves", "lr": "learning rate"}


# --- numbers as text -----------------------------------------------------------------------------------------------


def format_number(value: float | None, digits: int = 3) -> str:
    """Return ``value`` with ``digits`` significant digits: 0.0123, 57, 4600, 12,300, 1e-05; a dash for None."""
    if value is None:
        return "-"
    rounded = float(f"{value:.{digits - 1}e}")
    return f"{rounded:,.0f}" if abs(rounded) >= 1e4 else f"{rounded:.10g}"


def format_count(value: float | None) -> str:
    """Return a number of steps or examples in full: 57, 4613, 12,345; a dash for None."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.0f}"


def format_seconds(seconds: float | None) -> str:
    """Return a duration with three significant digits and its unit, ms, s, min or h; a dash for None."""
    if seconds is None:
        return "-"
    rounded = float(f"{seconds:.2e}")  # first of all, so that 0.9999 is 1.00 s, not 1000 ms
    scale, unit = _time_unit(rounded)
    value = float(f"{rounded / scale:.2e}")
    decimals = max(0, 2 - math.floor(math.log10(value))) if value > 0.0 else 0
    return f"{value:,.{decimals}f} {unit}"


def _trials_text(count: int) -> str:
    return "1 trial" if count == 1 else f"{format_count(count)} trials"


def _time_unit(seconds: float) -> tuple[float, str]:
    if 0.0 < seconds < 1.0:
        return 1e-3, "ms"
    if seconds < 120.0:
        return 1.0, "s"
    return (60.0, "min") if seconds < 7200.0 else (3600.0, "h")


# --- the summary ---------------------------------------------------------------------------------------------------


def summarize(trials: Iterable[TrialResult], target: Target, fit: CurveFit | str) -> Summary:
    """Return the content of ``curve.json``, ready for :func:`bstune.records.dump_json`.

    Args:
        trials: all trials of the study, in any order.
        target: what they had to reach.
        fit: the curve fitted to ``frontier_points(trials)``, or the sentence that says why there is none.

    Returns:
        target, devices, trials (their number), statuses (a count for each status), note (null, or that the target
        was never reached and the closest value seen), points (one a frontier point), small_end, fit, fit_note,
        regimes (only those that the fit can tell), best_by_time, best_by_steps. A point's steps to target lie in
        (steps_low, steps], its time in (time_low, time_to_target], in seconds, its examples in (examples_low,
        examples]; the upper end of a censored point is null. Without a reached trial both winners are null.

    """
    trials = sorted(trials, key=lambda trial: trial.number)
    points = frontier_points(trials)
    reached = [trial for trial in trials if trial.reached]
    timed = [trial for trial in reached if trial.time_to_target is not None]
    return {
        "target": str(target),
        "devices": sorted({trial.device for trial in trials}),
        "trials": len(trials),
        "statuses": {status: sum(trial.status == status for trial in trials) for status in STATUSES},
        "note": None if reached else _never_reached(trials, target),
        "points": [_point_row(point, trials) for point in points],
        "small_end": _small_end(points),
        "fit": None if isinstance(fit, str) else {k: v for k, v in asdict(fit).items() if k != "points"},
        "fit_note": fit if isinstance(fit, str) else fit.note,
        "regimes": [] if isinstance(fit, str) else _regimes(fit),
        "best_by_time": _winner(min(timed, key=_time_order)) if timed else None,
        "best_by_steps": _winner(min(reached, key=_steps_order)) if reached else None,
    }


def _seconds(trial: TrialResult) -> float:
    return math.inf if trial.time_to_target is None else trial.time_to_target


def _time_order(trial: TrialResult) -> tuple[float, int, int]:
    return _seconds(trial), trial.steps, trial.number


def _steps_order(trial: TrialResult) -> tuple[int, float, int]:
    return trial.steps, _seconds(trial), trial.number


def _winner(trial: TrialResult) -> dict[str, Any]:
    names = ("number", "seed", "batch_size", "lr", "steps", "seconds_per_step", "time_to_target")
    return {name: getattr(trial, name) for name in names}


def _point_row(point: FrontierPoint, trials: Sequence[TrialResult]) -> dict[str, Any]:
    return _row(next(trial for trial in trials if _stands_for(trial, point)))  # by number, as the frontier breaks ties


def _row(trial: TrialResult) -> dict[str, Any]:
    tau, reached = trial.seconds_per_step, trial.reached
    return {
        "batch_size": trial.batch_size,
        "lr": trial.lr,
        "delta": trial.delta,
        "number": trial.number,
        "censored": not reached,
        "steps_low": trial.steps_low,
        "steps": trial.steps if reached else None,
        "seconds_per_step": tau,
        "time_low": None if tau is None else trial.steps_low * tau,
        "time_to_target": trial.time_to_target,
        "examples_low": trial.steps_low * trial.batch_size,
        "examples": trial.steps * trial.batch_size if reached else None,
    }


def _stands_for(trial: TrialResult, point: FrontierPoint) -> bool:
    if trial.batch_size != point.batch_size:
        return False
    if point.censored:
        return trial.status == "budget" and trial.steps_low == point.steps
    return trial.reached and trial.steps == point.steps


def _small_end(points: Sequence[FrontierPoint]) -> dict[str, Any] | None:
    """Least squares of log S over log B over the smallest batch sizes that reached the target; None below two."""
    reached = [point for point in points if not point.censored and point.steps > 0]
    if len(reached) < 2:
        return None
    near = [point for point in reached if point.batch_size <= SMALL_END_SPAN * reached[0].batch_size]
    near = near if len(near) > 2 else reached[:3]
    slope = log_slope(near)
    x, y = (np.log(values) for values in zip(*((point.batch_size, point.steps) for point in near), strict=True))
    residual = y - y.mean() - slope * (x - x.mean())
    degrees = len(near) - 2
    error = math.sqrt(residual @ residual / degrees / ((x - x.mean()) ** 2).sum()) if degrees > 0 else None
    return {"slope": slope, "standard_error": error, "batch_sizes": [point.batch_size for point in near]}


def _regimes(fit: CurveFit) -> list[dict[str, Any]]:
    """Return the regimes and their bounds in examples, null for an open end.

    As in :func:`bstune.curve.regime`, the end of the interval that is known bounds a regime where ``b_crit`` is not.
    """
    smallest = fit.b_crit_low if fit.b_crit is None else fit.b_crit
    largest = fit.b_crit_high if fit.b_crit is None else fit.b_crit
    low = None if smallest is None else smallest / SLOPE_RATIO
    high = None if largest is None else largest * SLOPE_RATIO
    known = (low is not None, fit.b_crit is not None, high is not None)
    rows = zip(REGIMES, ((None, low), (low, high), (high, None)), known, strict=True)
    return [{"name": name, "from": start, "to": end} for name, (start, end), keep in rows if keep]


def _never_reached(trials: Sequence[TrialResult], target: Target) -> str:
    if not trials:
        return f"no trial has run, so {target} was not reached"
    count = _trials_text(len(trials))
    seen = [(value, step, trial) for trial in trials for step, value in trial.history if value is not None]
    if not seen:
        return f"{target} was never reached in {count}, and no evaluation gave a finite value"
    value, step, trial = min(seen, key=lambda entry: target.gap(entry[0]))
    return (
        f"{target} was never reached in {count}; the closest value seen was {format_number(value)}, at batch size "
        f"{format_count(trial.batch_size)} and learning rate {format_number(trial.lr)} after {format_count(step)} steps"
    )


# --- tables --------------------------------------------------------------------------------------------------------


def trials_table(trials: Sequence[TrialResult], target: Target, rows: int = 12) -> Table:
    """Return the live view: the last ``rows`` trials, newest last; it fits 80 columns."""
    reached = sum(trial.reached for trial in trials)
    title = f"target {target}: reached by {reached} of {_trials_text(len(trials))}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("trial", "batch", "lr", "status", "steps", "time", "s/step", "last value"):
        justify: Any = "left" if name == "status" else "right"
        table.add_column(name, justify=justify, no_wrap=True)
    for trial in trials[max(0, len(trials) - rows) :]:
        last = trial.history[-1][1] if trial.history else None
        table.add_row(
            str(trial.number),
            format_count(trial.batch_size),
            format_number(trial.lr),
            Text(trial.status, style=STATUS_STYLES[trial.status]),
            _steps_text(trial),
            format_seconds(trial.time_to_target),
            format_number(trial.seconds_per_step),
            format_number(last),
        )
    return table


def _steps_text(trial: TrialResult) -> str:
    if trial.reached:
        return format_count(trial.steps)
    return f"> {format_count(trial.steps_low)}" if trial.status == "budget" else "-"


def final_table(summary: Summary, test_errors: Mapping[str, float] | None = None) -> Group:
    """Return what a study found, for 80 columns: the winners side by side, then B_crit and the regimes in words.

    Args:
        summary: what :func:`summarize` returned.
        test_errors: test error under ``best_by_time`` and ``best_by_steps``; one that is absent is a dash.

    """
    facts = Table.grid(padding=(0, 2))
    facts.add_column(no_wrap=True, style="bold")
    facts.add_column(overflow="fold")
    facts.add_row("target", f"{summary['target']}: {_counts_text(summary)}")
    if summary["note"]:
        facts.add_row("note", summary["note"])
    facts.add_row("critical batch", critical_text(summary["fit"]))
    if summary["regimes"]:
        facts.add_row("regimes", regimes_text(summary["regimes"], summary["points"]))
    if summary["small_end"]:
        facts.add_row("small end", _small_end_text(summary["small_end"]))
    if summary["fit_note"]:
        facts.add_row("fit", summary["fit_note"])
    if summary["best_by_steps"] is None:
        return Group(facts)
    return Group(_winners_table(summary, test_errors), facts)


def _winners_table(summary: Summary, test_errors: Mapping[str, float] | None) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("best by")
    for heading in WINNERS.values():
        table.add_column(heading, justify="right")
    winners = [summary[key] for key in WINNERS]

    def row(label: str, name: str, text: Any) -> None:
        table.add_row(label, *("-" if winner is None else text(winner[name]) for winner in winners))

    row("batch size (examples)", "batch_size", format_count)
    row("learning rate", "lr", format_number)
    row("time to target", "time_to_target", format_seconds)
    row("steps to target", "steps", format_count)
    row("time per step", "seconds_per_step", format_seconds)
    if test_errors is not None:
        table.add_row("test error", *(format_number(test_errors.get(key)) for key in WINNERS))
    row("trial", "number", str)
    row("seed", "seed", str)
    return table


def print_final(
    console: Console,
    summary: Summary,
    test_errors: Mapping[str, float] | None,
    files: Mapping[str, Path],
    mlflow_command: str,
) -> None:
    """Print :func:`final_table`, then each file's path and the command, unbroken however long: they get copied."""
    console.print(final_table(summary, test_errors))
    for name, text in [*((name, str(path)) for name, path in files.items()), ("MLflow UI", mlflow_command)]:
        console.print(Text.assemble((f"{name:<14}", "bold"), "  ", text), soft_wrap=True)


def _counts_text(summary: Summary) -> str:
    others = [f"{n} {status}" for status, n in summary["statuses"].items() if n and status != "reached"]
    tail = f" ({', '.join(others)})" if others else ""
    return f"reached by {summary['statuses']['reached']} of {_trials_text(summary['trials'])}{tail}"


def critical_text(fit: Mapping[str, Any] | None) -> str:
    """Return B_crit and its interval in words: ``520 examples (90% interval 310 to 880)``; None is not fitted."""
    if fit is None:
        return "not fitted"
    low, high = fit["b_crit_low"], fit["b_crit_high"]
    if low is None and high is None:
        interval = "interval open at both ends"
    elif high is None:
        interval = f"interval above {format_number(low, 2)}"
    else:
        interval = (
            f"interval below {format_number(high, 2)}"
            if low is None
            else f"interval {format_number(low, 2)} to {format_number(high, 2)}"
        )
    value = "undetermined" if fit["b_crit"] is None else f"{format_number(fit['b_crit'], 2)} examples"
    return f"{value} ({fit['level']:.0%} {interval})"


def regimes_text(regimes: Sequence[Row], points: Sequence[Row]) -> str:
    """Return the regimes as a sentence; bounds outside the batch sizes that were run are said to be extrapolated."""
    bounds = {row["name"]: (row["from"], row["to"]) for row in regimes}
    known = "diminishing returns" in bounds
    parts = []
    if "perfect scaling" in bounds:
        end = format_number(bounds["perfect scaling"][1], 2)
        parts.append(f"perfect scaling up to {'' if known else 'at least '}B = {end}")
    if known:
        parts.append(f"diminishing returns to {format_number(bounds['diminishing returns'][1], 2)}")
        parts.append("maximal data parallelism above")
    elif "maximal data parallelism" in bounds:
        start = format_number(bounds["maximal data parallelism"][0], 2)
        parts.append(f"maximal data parallelism from B = {start} at the latest")
    if not known:
        parts.append("the points do not tell the rest")
    sizes = [point["batch_size"] for point in points]
    edges = [edge for pair in bounds.values() for edge in pair if edge is not None]
    if sizes and not all(min(sizes) <= edge <= max(sizes) for edge in edges):
        parts.append(f"outside B = {format_count(min(sizes))} to {format_count(max(sizes))} this is extrapolated")
    return "; ".join(parts)


def _small_end_text(small_end: Mapping[str, Any]) -> str:
    error = small_end["standard_error"]
    spread = "" if error is None else f" +- {format_number(error, 2)}"
    sizes = small_end["batch_sizes"]
    span = f"{format_count(sizes[0])} to {format_count(sizes[-1])}"
    return f"log S over log B has slope {small_end['slope']:.2f}{spread} over B = {span} (perfect scaling: -1)"


# --- the figure ----------------------------------------------------------------------------------------------------


def draw_curve(trials: Sequence[TrialResult], summary: Summary, fit: CurveFit | None, title: str, path: Path) -> None:
    """Write ``curve.png``: steps to target over batch size on the left, time to target on the right.

    Args:
        trials: all trials; those that reached nothing are marked at the foot, those stopped early as bounds.
        summary: what :func:`summarize` returned for them.
        fit: the fit with its band; None draws the points alone.
        title: names the workload; target, device and number of trials are added.
        path: written under a temporary name beside it, then renamed.

    """
    import matplotlib.style

    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with matplotlib.style.context(["default", {"font.size": 9.0}]):
        try:
            curve_figure(trials, summary, fit, title).savefig(temporary, dpi=FIGURE_DPI, format="png")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def curve_figure(trials: Sequence[TrialResult], summary: Summary, fit: CurveFit | None, title: str) -> "Figure":
    """Return the figure that :func:`draw_curve` writes, drawn with matplotlib's current settings."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=FIGURE_INCHES, dpi=FIGURE_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, gridspec_kw={"wspace": 0.06})
    rows = [_row(trial) for trial in trials if trial.reached or trial.status == "budget"]
    sizes = [float(trial.batch_size) for trial in trials] or [1.0]
    times = [row["time_to_target"] or row["time_low"] for row in rows]
    scale, unit = _time_unit(min((time for time in times if time), default=1.0))
    _draw_panel(left, rows, summary, ("steps_low", "steps", "best_by_steps"), 1.0, _with_critical(sizes, fit))
    _draw_panel(right, rows, summary, ("time_low", "time_to_target", "best_by_time"), scale, sizes)
    left.set_ylabel("steps to target S (optimizer steps)")
    right.set_ylabel(f"time to target T = S x tau(B) ({unit} of training)")
    _draw_foot(left, trials)
    _draw_fit(left, summary, fit)
    if rows:
        from matplotlib.cm import ScalarMappable

        name, norm, colours = _colours(rows)
        figure.colorbar(ScalarMappable(norm, colours), ax=right, label=COLOUR_LABELS[name], pad=0.02, aspect=40)
    pairs = [pair for axes in (left, right) for pair in zip(*axes.get_legend_handles_labels(), strict=True)]
    legend = {label: handle for handle, label in pairs}
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=4, fontsize=8.5, frameon=False)
    lines = [title, "; ".join([f"target {summary['target']}", *summary["devices"], _counts_text(summary)])]
    lines += [note for note in (summary["note"], summary["fit_note"]) if note]
    figure.suptitle("\n".join(textwrap.fill(line, 155) for line in lines), fontsize=10.5, parse_math=False)
    _label_regimes(figure, left, summary["regimes"])
    return figure


def _with_critical(sizes: list[float], fit: CurveFit | None) -> list[float]:
    """Return ``sizes`` with B_crit, where it is near enough to leave the points room."""
    if fit is None or fit.b_crit is None or not min(sizes) / 8.0 <= fit.b_crit <= max(sizes) * 8.0:
        return sizes
    return [*sizes, fit.b_crit]


def _colours(rows: Sequence[Row]) -> tuple[str, "Normalize", "Colormap"]:
    """Return what the dots' colour shows, its norm and colour map: delta where every row has one, else lr."""
    import matplotlib
    from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize

    deltas = [abs(row["delta"]) for row in rows if row["delta"] is not None]
    if len(deltas) == len(rows) > 0:
        reach = max(1.0, *deltas)
        # grey in the middle: the usual white would vanish on the background
        return "delta", Normalize(-reach, reach), LinearSegmentedColormap.from_list("delta", [BLUE, GREY, VERMILION])
    rates = [row["lr"] for row in rows] or [1.0]
    return "lr", LogNorm(min(rates) / 1.2, max(rates) * 1.2), matplotlib.colormaps["viridis"]


def _draw_panel(
    axes: "Axes", rows: Sequence[Row], summary: Summary, names: tuple[str, str, str], scale: float, sizes: list[float]
) -> None:
    """Draw trials as faint dots, frontier points with (last miss, first hit], bounds as triangles, and the winner."""
    low, high, best = names

    def draw(some: Sequence[Row], censored: bool, label: str, **style: Any) -> None:
        end = low if censored else high
        kept = [row for row in some if row["censored"] == censored and row[end]]
        if kept:
            y = [row[end] / scale for row in kept]
            colour: dict[str, Any] = (
                {"c": [row[name] for row in kept], "norm": norm, "cmap": colours} if some is rows else {}
            )
            marker = "^" if censored else "o"
            axes.scatter([row["batch_size"] for row in kept], y, marker=marker, label=label, **colour, **style)

    name, norm, colours = _colours(rows)
    ends = [row[high] or row[low] for row in rows]
    _set_scale(axes, "x", sizes, (0.06, 0.06))
    _set_scale(axes, "y", [end / scale for end in ends if end] or [1.0], (0.27, 0.07))
    axes.set_xlabel("batch size B (examples per optimizer step)")
    axes.grid(color=INK, alpha=0.07, linewidth=0.6)
    draw(rows, False, "trial that reached the target", s=16, alpha=0.65, linewidths=0)
    draw(rows, True, "trial stopped before the target", s=16, alpha=0.65, linewidths=0)
    hit = [row for row in summary["points"] if row[high]]
    starts, stops = [row[low] / scale for row in hit], [row[high] / scale for row in hit]
    axes.vlines([row["batch_size"] for row in hit], starts, stops, colors=INK, linewidth=1.6, zorder=5.5)
    point: dict[str, Any] = {"s": 42, "facecolor": INK, "edgecolor": "white", "linewidths": 0.9, "zorder": 5}
    draw(hit, False, "frontier point, (last miss, first hit]", **point)
    draw(summary["points"], True, "frontier bound: target not reached by then", **{**point, "s": 70})
    if summary[best] is not None and summary[best][high]:
        _draw_winner(axes, summary[best], summary[best][high] / scale, best)


def _set_scale(axes: "Axes", name: str, values: Sequence[float], pads: tuple[float, float]) -> None:
    """Make the axis logarithmic around ``values``, its lower and upper pad in lengths of their span, plain numbers."""
    low, high = math.log(min(values)), math.log(max(values))
    span = max(high - low, math.log(4.0))
    middle = (low + high) / 2.0
    limits = math.exp(middle - (0.5 + pads[0]) * span), math.exp(middle + (0.5 + pads[1]) * span)
    every, ticks = _batch_ticks(*limits) if name == "x" else _decimal_ticks(*limits)
    axes.set(**{f"{name}scale": "log", f"{name}lim": limits})
    axis = axes.xaxis if name == "x" else axes.yaxis
    axis.set_ticks(ticks, [format_number(tick, 6) for tick in ticks])
    axis.set_ticks(every, [""] * len(every), minor=True)


def _batch_ticks(low: float, high: float) -> tuple[list[float], list[float]]:
    """Return the powers of two from ``low`` to ``high``, and the batch sizes, at most eight, that get a label."""
    powers = range(max(0, math.ceil(math.log2(low))), math.floor(math.log2(high)) + 1)
    every = [2.0**power for power in powers]
    if len(every) > 3:
        return every, every[:: math.ceil(len(every) / 8)]
    halves = [3.0 * size for size in (2.0**power for power in range(powers.stop)) if low <= 3.0 * size <= high]
    return every, sorted([*every, *halves])


def _decimal_ticks(low: float, high: float) -> tuple[list[float], list[float]]:
    """Return the round numbers from ``low`` to ``high``, and those that get a label: 1-3, 1-2-5, or finer."""
    decades = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1)

    def within(digits: Iterable[float]) -> list[float]:
        return [digit * 10.0**decade for decade in decades for digit in digits if low <= digit * 10.0**decade <= high]

    choices = [within(digits) for digits in ((1.0, 3.0), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0))]
    return within(range(1, 10)), next((ticks for ticks in choices if len(ticks) >= 5), choices[-1])


def _draw_winner(axes: "Axes", winner: Row, y: float, key: str) -> None:
    """Mark the winner and write its batch size and learning rate below it, where nothing can be: it is the least."""
    x = winner["batch_size"]
    axes.scatter([x], [y], marker="*", s=190, facecolor=VERMILION, edgecolor="white", zorder=6, label="best trial")
    position = axes.transLimits.transform(axes.transScale.transform((x, y)))[0]
    value = format_seconds(winner["time_to_target"]) if key == "best_by_time" else format_count(winner["steps"])
    axes.annotate(
        f"{WINNERS[key]}: {value}\nB = {format_count(x)}, lr = {format_number(winner['lr'])}",
        (x, y),
        xytext=(0.0, -11.0),
        textcoords="offset points",
        ha="left" if position < 0.2 else "right" if position > 0.8 else "center",
        va="top",
        color=VERMILION,
        fontsize=8.5,
        zorder=7,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 1.0},
    )


def _draw_foot(axes: "Axes", trials: Sequence[TrialResult]) -> None:
    """Mark at the axis's foot the batch sizes of trials that say nothing about steps to target."""
    for status, marker in (("diverged", "x"), ("oom", "s"), ("failed", "P")):
        sizes = [trial.batch_size for trial in trials if trial.status == status]
        if sizes:
            label = f"{'out of memory' if status == 'oom' else status} (at the foot)"
            style: dict[str, Any] = {
                "color": GREY,
                "s": 18,
                "linewidths": 1.0,
                "zorder": 4,
                "transform": axes.get_xaxis_transform(),
            }
            axes.scatter(sizes, [0.025] * len(sizes), marker=marker, label=label, **style)


def _draw_fit(axes: "Axes", summary: Summary, fit: CurveFit | None) -> None:
    """Draw the regimes, B_crit with its interval, the curve with its band, and the slope of perfect scaling."""
    limits = {"xlim": axes.get_xlim(), "ylim": axes.get_ylim()}
    low, high = limits["xlim"]
    x = np.geomspace(low, high, 200)
    examples = next((row["examples"] for row in summary["points"] if row["examples"]), None)
    if fit is not None:
        for regime in summary["regimes"]:
            tint = REGIME_TINTS[regime["name"]]
            axes.axvspan(regime["from"] or low, regime["to"] or high, color=tint, linewidth=0, zorder=-2)
        label = f"critical batch size {critical_text(asdict(fit))}"
        if fit.b_crit is not None:
            off = "" if low <= fit.b_crit <= high else ", beyond this plot"
            axes.axvline(fit.b_crit, color=PURPLE, linewidth=1.5, zorder=3, label=label + off)
        if fit.b_crit_low is not None or fit.b_crit_high is not None:
            span: dict[str, Any] = {"color": PURPLE, "alpha": 0.1, "linewidth": 0, "zorder": -1}
            name = label if fit.b_crit is None else "_interval"  # matplotlib's legend leaves out a leading underscore
            axes.axvspan(fit.b_crit_low or low, fit.b_crit_high or high, label=name, **span)
        band = predict_steps(fit, x)
        axes.fill_between(x, band.low, band.high, color=BLUE, alpha=0.2, linewidth=0, zorder=1.5)
        axes.plot(x, band.steps, color=BLUE, linewidth=1.8, zorder=3, label=CURVE_LABEL.format(fit.level))
        examples = fit.e_min or examples
    if examples is not None:
        label = "perfect scaling: slope -1"
        axes.plot(x, examples / x, color=INK, linewidth=0.8, linestyle="--", label=label, zorder=1.6)
    axes.set(**limits)


def _label_regimes(figure: "Figure", axes: "Axes", regimes: Sequence[Row]) -> None:
    """Write each regime's name above its span; a name wider than the visible span is left out."""
    low, high = axes.get_xlim()
    spans = [(row["name"], max(row["from"] or low, low), min(row["to"] or high, high)) for row in regimes]
    labels = [
        (axes.text(math.sqrt(start * end), 1.01, name.replace(" ", "\n", 1), transform=axes.get_xaxis_transform(),
                   ha="center", va="bottom", fontsize=8.5, color="#555555"), start, end)
        for name, start, end in spans if start < end
    ]  # fmt: skip
    figure.draw_without_rendering()
    for label, start, end in labels:
        left, right = (axes.transData.transform((edge, 1.0))[0] for edge in (start, end))
        if label.get_window_extent().width > right - left:
            label.remove()
