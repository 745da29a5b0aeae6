"""Tables from trial records and a fit: the content of ``curve.json``, the live table and the final one.

Nothing here trains: neither torch nor lightning is imported.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from bstune.core.console import format_count, format_number, format_seconds, plural, time_unit
from bstune.core.curve import SLOPE_RATIO, CurveFit, FrontierPoint, frontier_points, log_slope
from bstune.core.records import STATUSES, Target, TrialResult
from bstune.search.posterior import noise_scale_row
from bstune.study.model import Held, held_row
from bstune.study.replicates import confirmed, confirmed_row, steps_order, time_order

Summary = dict[str, Any]
Row = Mapping[str, Any]
Tests = Mapping[str, Mapping[str, float]]
SMALL_END_SPAN = 4.0  # the slope at the small end is taken over this factor of batch size, and at least three points
REGIMES = ("perfect scaling", "diminishing returns", "maximal data parallelism")
STATUS_STYLES = {"reached": "green", "censored": "yellow", "diverged": "red", "oom": "magenta", "failed": "bold red"}
WHAT_TO_CHANGE = (
    "a larger budget (budget.steps, budget.examples), an easier target (workload.target.value) or another reference "
    "learning rate (scaling.lr)"
)
WINNERS = {"best_by_time": "least time", "best_by_steps": "fewest steps"}
OBJECTIVES = {"best_by_time": "time", "best_by_steps": "steps"}
SINGLE_RUNS = "of single runs, not repeated on fresh seeds: optimistic"
CHOSEN_RUNS = "time and steps to target are the chosen run's own: expect those on fresh seeds"


def summarize(
    trials: Iterable[TrialResult],
    target: Target,
    fit: CurveFit | str,
    held: Held | None = None,
    ended: str | None = None,
    posterior: Sequence[float] | None = None,
) -> Summary:
    """Return the content of ``curve.json``, ready for :func:`bstune.core.records.dump_json`.

    Args:
        trials: all trials of the study, in any order.
        target: what they had to reach.
        fit: the curve fitted to ``frontier_points(trials)``, or the sentence that says why there is none.
        held: which scaling rule held; None where nothing can be said of it.
        ended: which rule ended the study, in words; None where it is not known.
        posterior: low end, median and high end of the 90% interval of B_crit from the search's model; None for none.

    Returns:
        target, devices, ended, trials (their number; one that was stopped and continued counts once, as its last part
        left it), continued (how often one was), statuses (a count for each status), note (null, or that the target
        was never reached, the closest value seen and what to change), points (one a frontier point), small_end, fit,
        fit_note, regimes (only those that the fit can tell), posterior (B_crit from the search's model, which every
        trial informs, stopped ones too; or null), noise_scale (that the trials measured, beside B_crit, see
        :func:`bstune.search.posterior.noise_scale_row`; or null), scaling (see :func:`bstune.study.model.held_row`, or null),
        best_by_time, best_by_steps, pareto (the trials that none beats in both, from least time to fewest steps). A
        point's steps lie in (steps_low, steps], its time in (time_low, time_to_target], in seconds, its examples in
        (examples_low, examples]; the upper end of a censored point is null. Without a reached trial both winners are
        null; a winner's ``confirmed`` is :func:`bstune.study.replicates.confirmed_row`, null for a single run.
    """
    trials = sorted(trials, key=lambda trial: trial.number)
    points = frontier_points(trials)
    reached = [trial for trial in trials if trial.reached]
    own = _last_parts(trials)
    return {
        "target": str(target),
        "devices": sorted({trial.device for trial in trials}),
        "ended": ended,
        "trials": len(own),
        "continued": len(trials) - len(own),
        "statuses": {status: sum(trial.status == status for trial in own) for status in STATUSES},
        "note": None if reached else _never_reached(trials, target),
        "points": [_point_row(point, trials) for point in points],
        "small_end": _small_end(points),
        "fit": None if isinstance(fit, str) else {k: v for k, v in asdict(fit).items() if k != "points"},
        "fit_note": fit if isinstance(fit, str) else fit.note,
        "regimes": [] if isinstance(fit, str) else _regimes(fit),
        "posterior": None
        if posterior is None or not reached
        else dict(zip(("b_crit_low", "b_crit", "b_crit_high"), posterior, strict=True)),
        "noise_scale": noise_scale_row(trials, posterior, None if isinstance(fit, str) else fit.b_crit),
        "scaling": None if held is None else held_row(held),
        **{name: _winner_row(trials, name) for name in WINNERS},
        "pareto": [_winner(trial) for trial in pareto_front(trials)],
    }


def winners(trials: Iterable[TrialResult]) -> dict[str, TrialResult]:
    """Return ``best_by_time`` and ``best_by_steps``, of equals the first number; empty if none reached the target.

    Each is the one with the best fresh runs where there are any (see :func:`bstune.study.replicates.confirmed`), the
    best single run elsewhere; never a fresh run itself.
    """
    trials = list(trials)
    reached = [trial for trial in trials if trial.reached and trial.replicate_of is None]
    timed = [trial for trial in reached if trial.time_to_target is not None]
    best = {"best_by_time": min(timed, key=time_order)} if timed else {}
    best |= {"best_by_steps": min(reached, key=steps_order)} if reached else {}
    found = {name: confirmed(trials, OBJECTIVES[name]) for name in best}
    return {name: trial if (stood := found[name]) is None else stood.winner for name, trial in best.items()}


def pareto_front(trials: Iterable[TrialResult]) -> list[TrialResult]:
    """Return the trials that no other one beats both in steps and in time to target, from least time to fewest steps.

    Of equals the first number stays. Trials that did not reach the target are left out.
    """
    front: list[TrialResult] = []
    for trial in sorted((trial for trial in trials if trial.time_to_target is not None), key=time_order):
        if not front or trial.steps < front[-1].steps:
            front.append(trial)
    return front


def _last_parts(trials: Sequence[TrialResult]) -> list[TrialResult]:
    """Return the trials, those that continue each other as the last one of them; a failed one continues none."""
    continued = {trial.resumed_from for trial in trials if trial.status != "failed"}
    return [trial for trial in trials if trial.number not in continued]


def _winner_row(trials: Sequence[TrialResult], name: str) -> dict[str, Any] | None:
    best, stood = winners(trials).get(name), confirmed(trials, OBJECTIVES[name])
    if best is None:
        return None
    return {**_winner(best), "confirmed": None if stood is None else confirmed_row(stood)}


def _winner(trial: TrialResult) -> dict[str, Any]:
    names = ("number", "seed", "batch_size", "lr", "hyperparameters", "steps", "seconds_per_step", "time_to_target")
    return {name: getattr(trial, name) for name in names}


def _point_row(point: FrontierPoint, trials: Sequence[TrialResult]) -> dict[str, Any]:
    # The trials are in order of their numbers, as the frontier breaks ties.
    return trial_row(next(trial for trial in trials if _stands_for(trial, point)))


def trial_row(trial: TrialResult) -> dict[str, Any]:
    """Return a trial as a row of ``curve.json``'s points: both ends of its interval, null where there is none."""
    tau, reached = trial.seconds_per_step, trial.reached
    return {
        "batch_size": trial.batch_size,
        "lr": trial.lr,
        "delta": trial.delta,
        "hyperparameters": trial.hyperparameters,
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
        return trial.status == "censored" and trial.steps_low == point.steps
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

    As in :func:`bstune.core.curve.regime`, the end of the interval that is known bounds a regime where ``b_crit`` is not.
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
    count = plural(len(_last_parts(trials)), "trial")
    seen = [(value, step, trial) for trial in trials for step, value in trial.history if value is not None]
    if not seen:
        return f"{target} was never reached in {count}, and no evaluation gave a finite value: try {WHAT_TO_CHANGE}"
    value, step, trial = min(seen, key=lambda entry: target.gap(entry[0]))
    place = f"batch size {format_count(trial.batch_size)} and learning rate {format_number(trial.lr)}"
    return (
        f"{target} was never reached in {count}; the closest value seen was {format_number(value)}, at {place} after "
        f"{format_count(step)} steps: try {WHAT_TO_CHANGE}"
    )


def trials_table(trials: Sequence[TrialResult], target: Target, rows: int = 12) -> Table:
    """Return the live view: the last ``rows`` trials, newest last; it fits 80 columns."""
    reached = sum(trial.reached for trial in trials)
    title = f"target {target}: reached by {reached} of {plural(len(_last_parts(trials)), 'trial')}"
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
    return f"> {format_count(trial.steps_low)}" if trial.status == "censored" else "-"


def final_table(summary: Summary, tests: Tests | None = None) -> Group:
    """Return what a study found, for 80 columns: the winners side by side, then B_crit and the regimes in words.

    Args:
        summary: what :func:`summarize` returned.
        tests: metrics on the test set under ``best_by_time`` and ``best_by_steps``; one that is absent is a dash.

    """
    facts = Table.grid(padding=(0, 2))
    facts.add_column(no_wrap=True, style="bold")
    facts.add_column(overflow="fold")
    facts.add_row("target", f"{summary['target']}: {counts_text(summary)}")
    if summary["ended"]:
        facts.add_row("ended", summary["ended"])
    if summary["note"]:
        facts.add_row("note", summary["note"])
    # The model's comes first: it uses every trial, and search.precision stops by it. The fit sees the figure's points.
    if summary["posterior"]:
        facts.add_row("critical batch", posterior_text(summary["posterior"]))
    facts.add_row("fit to points" if summary["posterior"] else "critical batch", critical_text(summary["fit"]))
    if summary["noise_scale"]:
        facts.add_row("noise scale", noise_scale_text(summary["noise_scale"]))
    if summary["regimes"]:
        facts.add_row("regimes", regimes_text(summary["regimes"], summary["points"]))
    if summary["scaling"]:
        facts.add_row("scaling rule", summary["scaling"]["text"])
    if summary["small_end"]:
        facts.add_row("small end", _small_end_text(summary["small_end"]))
    if summary["fit_note"]:
        facts.add_row("fit", summary["fit_note"])
    if len(summary["pareto"]) > 1:
        facts.add_row("Pareto front", _pareto_text(summary["pareto"]))
    if summary["best_by_steps"] is None:
        return Group(facts)
    return Group(_winners_table(summary, tests), facts)


def _winners_table(summary: Summary, tests: Tests | None) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("best by")
    for heading in WINNERS.values():
        table.add_column(heading, justify="right")
    winners = [summary[key] for key in WINNERS]

    def row(label: str, name: str, text: Any) -> None:
        table.add_row(label, *("-" if winner is None else text(winner[name]) for winner in winners))

    row("batch size (examples)", "batch_size", format_count)
    row("learning rate", "lr", format_number)
    for name in sorted({name for winner in winners if winner for name in winner["hyperparameters"]}):
        row(name.replace("_", " "), "hyperparameters", lambda values, name=name: format_number(values.get(name)))
    row("time to target", "time_to_target", format_seconds)
    row("steps to target", "steps", format_count)
    fresh = [(winner or {}).get("confirmed") for winner in winners]
    if any(fresh):
        _add_fresh_rows(table, fresh)
    row("time per step", "seconds_per_step", format_seconds)
    measured = [(tests or {}).get(key, {}) for key in WINNERS]
    for name in sorted({name for metrics in measured for name in metrics}):
        table.add_row(name, *(format_number(metrics.get(name)) for metrics in measured))
    row("trial", "number", str)
    row("seed", "seed", str)
    table.caption = _caption(summary)
    return table


def _add_fresh_rows(table: Table, fresh: Sequence[Row | None]) -> None:
    """Add time and steps over the fresh runs, one cell a winner; one that has none gets a dash."""
    counts = sorted({row["runs"] for row in fresh if row is not None})
    seeds = "fresh seeds" if len(counts) > 1 else f"{counts[0]} fresh seed{'s' * (counts[0] > 1)}"
    table.add_row(f"time on {seeds}", *("-" if row is None else _spread_text(row, "time") for row in fresh))
    table.add_row(f"steps on {seeds}", *("-" if row is None else _spread_text(row, "steps") for row in fresh))
    if any(row is not None and row["reached"] < row["runs"] for row in fresh) or len(counts) > 1:
        reached = ("-" if row is None else f"{row['reached']} of {row['runs']}" for row in fresh)
        table.add_row("reached on fresh seeds", *reached)


def _spread_text(row: Row, name: str) -> str:
    """Return median, least and most over fresh runs, ``410 ms (390 to 470)``; a run short of the target opens it."""
    median, low, high = (row[f"{name}_{end}"] for end in ("median", "low", "high"))
    if low is None:
        return "-"
    scale, unit = time_unit(low if median is None else median) if name == "time" else (1.0, "")

    def text(value: float) -> str:
        return format_number(value / scale) if name == "time" else format_count(value)

    middle = "over" if median is None else f"{text(median)} {unit}".rstrip()
    return f"{middle} ({text(low)} {'and more' if high is None else f'to {text(high)}'})"


def _caption(summary: Summary) -> str:
    known = {name: summary[key]["confirmed"] for key, name in WINNERS.items() if summary[key] is not None}
    single = [name for name, fresh in known.items() if fresh is None]
    if len(single) == len(known):
        return f"each the best {SINGLE_RUNS}"
    return "; ".join([CHOSEN_RUNS, *(f"{name}: the best {SINGLE_RUNS}" for name in single)])


def print_final(
    console: Console,
    summary: Summary,
    tests: Tests | None,
    files: Mapping[str, Path],
    mlflow_command: str,
) -> None:
    """Print :func:`final_table`, then each file's path and the command, unbroken however long: they get copied."""
    console.print(final_table(summary, tests))
    for name, text in [*((name, str(path)) for name, path in files.items()), ("MLflow UI", mlflow_command)]:
        console.print(Text.assemble((f"{name:<14}", "bold"), "  ", text), soft_wrap=True)


def _pareto_text(front: Sequence[Row]) -> str:
    return "; ".join(
        f"B = {format_count(row['batch_size'])} ({format_count(row['steps'])} steps, "
        f"{format_seconds(row['time_to_target'])})"
        for row in front
    )


def counts_text(summary: Summary) -> str:
    """Return how many trials reached the target, and what became of the others, in words."""
    others = [f"{n} {status}" for status, n in summary["statuses"].items() if n and status != "reached"]
    if times := summary["continued"]:
        others.append(f"a stopped one was continued {'once' if times == 1 else f'{times} times'}")
    tail = f" ({', '.join(others)})" if others else ""
    return f"reached by {summary['statuses']['reached']} of {plural(summary['trials'], 'trial')}{tail}"


def posterior_text(posterior: Mapping[str, float]) -> str:
    """Return the posterior's B_crit and its interval in words."""
    low, middle, high = (
        format_count(float(f"{posterior[name]:.2g}")) for name in ("b_crit_low", "b_crit", "b_crit_high")
    )
    return f"{middle} examples (90% interval {low} to {high}), from all trials, stopped ones too"


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


def noise_scale_text(row: Row) -> str:
    """Return the measured noise scale, its interval and its ratio to B_crit in words, the posterior's if there is one.

    ``54 examples (90% interval 31 to 235; 24 steps of 7 trials), 0.79 times the critical batch``
    """
    steps = "1 step" if row["steps"] == 1 else f"{format_count(row['steps'])} steps"
    read = f"{steps} of {plural(row['trials'], 'trial')}"
    if row["noise_scale"] is None:
        return f"undetermined: {row['undetermined']} ({read})"
    interval = f"{row['level']:.0%} interval {format_number(row['low'], 2)} to {format_number(row['high'], 2)}"
    text = f"{format_number(row['noise_scale'], 2)} examples ({interval}; {read})"
    ratios = {"critical batch": row["ratio_to_posterior"], "fit's": row["ratio_to_fit"]}
    told = [f"{format_number(ratio, 2)} times the {name}" for name, ratio in ratios.items() if ratio is not None]
    return ", ".join([text, " and ".join(told)]) if told else text


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
