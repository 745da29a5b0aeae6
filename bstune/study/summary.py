"""A study's results in one mapping, the content of ``curve.json``, and in tables: the live one and the final one."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from bstune.core.console import format_count, format_number, format_seconds, plural, time_unit
from bstune.core.curve import CurveFit, FrontierPoint, frontier_points, log_slope
from bstune.core.records import STATUSES, Target, TrialResult
from bstune.search.posterior import noise_scale_row
from bstune.study.critical import CriticalBatch
from bstune.study.replicates import Merit, Winner, confirmed_row, time_order

Summary = dict[str, Any]
Row = Mapping[str, Any]


class Criterion(NamedTuple):
    """What a winner is best by, a heading, and the field of its row with the value that is expected."""

    merit: Merit
    heading: str
    field: str


STATUS_COLOURS = {"reached": "green", "censored": "yellow", "diverged": "red", "oom": "magenta", "failed": "bold red"}
WINNERS = {
    "best_by_time": Criterion("time", "least time", "time_to_target"),
    "best_by_steps": Criterion("steps", "fewest steps", "steps"),
}
SMALL_END_SPAN = 4.0  # the slope at the small end is taken over this factor of batch size, and at least three points
REGIMES = ("perfect scaling", "diminishing returns", "maximal data parallelism")
WHAT_TO_CHANGE = (
    "more trials (search.trials), a larger budget (budget.steps, budget.examples), an easier target "
    "(workload.target.value) or another reference learning rate (scaling.lr)"
)
FRESH = "median and range over runs on fresh seeds"
PREDICTED = "predicted of a fresh seed from all trials"


def summarize(
    trials: Iterable[TrialResult],
    target: Target,
    fit: CurveFit | str,
    lr_exponent: Row | None = None,
    stop_reason: str | None = None,
    critical: CriticalBatch | None = None,
    best: Mapping[Merit, Winner] | None = None,
) -> Summary:
    """Return the content of ``curve.json``: ``critical`` is the one answer that every trial informs, ``best`` wins.

    ``fit``, the curve through the frontier's points or why there is none, and the noise scale are diagnostics.
    """
    trials = sorted(trials, key=lambda trial: trial.number)
    points = frontier_points(trials)
    fitted = None if isinstance(fit, str) else fit
    last = _last_parts(trials)
    reached = any(trial.reached for trial in trials)
    rows: dict[str, Any] = dict.fromkeys(WINNERS)
    rows |= {name: winner_row(best[one.merit]) for name, one in WINNERS.items() if best and one.merit in best}
    return {
        "target": str(target),
        "devices": sorted({trial.device for trial in trials}),
        "stop_reason": stop_reason,
        "trials": len(last),
        "continued": len(trials) - len(last),
        "statuses": {status: sum(trial.status == status for trial in last) for status in STATUSES},
        "note": None if reached else _never_reached(trials, target),
        "points": [_point_row(point, trials) for point in points],
        "critical": None if critical is None else asdict(critical),
        "regimes": [] if critical is None else _regimes(critical),
        "small_end": _small_end(points),
        "fit": None if fitted is None else {k: v for k, v in asdict(fitted).items() if k != "points"},
        "fit_note": fit if isinstance(fit, str) else fit.note,
        "noise_scale": noise_scale_row(
            trials, None if critical is None else critical.b_crit, None if fitted is None else fitted.b_crit
        ),
        "lr_exponent": lr_exponent,
        **rows,
        "warnings": [text for name, row in rows.items() for text in _unreliable(WINNERS[name].heading, row)],
        "pareto": [_trial_row(trial) for trial in pareto_front(trials)],
    }


def pareto_front(trials: Iterable[TrialResult]) -> list[TrialResult]:
    """Return the trials that no other beats both in steps and in time to target, from least time to fewest steps."""
    front: list[TrialResult] = []
    for trial in sorted((trial for trial in trials if trial.time_to_target is not None), key=time_order):
        if not front or trial.steps < front[-1].steps:
            front.append(trial)
    return front


def _last_parts(trials: Sequence[TrialResult]) -> list[TrialResult]:
    """Return the trials, those that continue each other as the last one of them; a failed one continues none."""
    continued = {trial.resumed_from for trial in trials if trial.status != "failed"}
    return [trial for trial in trials if trial.number not in continued]


def _trial_row(trial: TrialResult) -> dict[str, Any]:
    names = ("number", "seed", "batch_size", "lr", "hyperparameters", "horizon", "steps", "seconds_per_step")
    return {name: getattr(trial, name) for name in (*names, "time_to_target")}


def winner_row(winner: Winner) -> dict[str, Any]:
    """Return a winner as ``curve.json`` has it: ``steps`` and ``time_to_target`` are those to expect of a fresh seed.

    They are the median over its runs on fresh seeds (null where half of these missed the target), else predicted; those
    of the trial itself, which may be lucky, are its ``single_run``.
    """
    row, tau = _trial_row(winner.trial), winner.trial.seconds_per_step
    single = {name: row[name] for name in ("steps", "time_to_target")}
    fresh = confirmed_row(winner.runs)
    expected = {"steps": winner.steps, "time_to_target": None if tau is None else winner.steps * tau}
    if fresh is not None:
        expected = {"steps": fresh["steps_median"], "time_to_target": fresh["time_median"]}
    return {**row, "horizon": winner.horizon, **expected, "confirmed": fresh, "single_run": single}


def _unreliable(heading: str, row: Row | None) -> list[str]:
    """Return a line if a winner missed the target on a fresh seed."""
    fresh = None if row is None else row["confirmed"]
    if row is None or fresh is None or fresh["reached"] == fresh["runs"]:
        return []
    place = f"B = {format_count(row['batch_size'])} at lr = {format_number(row['lr'])}"
    return [f"{heading}, {place}: reached the target on {fresh['reached']} of {plural(fresh['runs'], 'fresh seed')}"]


def _point_row(point: FrontierPoint, trials: Sequence[TrialResult]) -> dict[str, Any]:
    status, field = ("censored", "steps_low") if point.censored else ("reached", "steps")
    wanted = (point.batch_size, status, point.steps)
    # The trials are in order of their numbers, as the frontier breaks ties.
    return trial_row(next(one for one in trials if (one.batch_size, one.status, getattr(one, field)) == wanted))


def trial_row(trial: TrialResult) -> dict[str, Any]:
    """Return a trial as a row of ``curve.json``'s points: both ends of its interval, null where there is none."""
    kept = ("batch_size", "lr", "delta", "hyperparameters", "number", "steps_low", "seconds_per_step", "time_to_target")
    tau, reached = trial.seconds_per_step, trial.reached
    return {
        **{name: getattr(trial, name) for name in kept},
        "censored": not reached,
        "steps": trial.steps if reached else None,
        "time_low": None if tau is None else trial.steps_low * tau,
        "examples_low": trial.steps_low * trial.batch_size,
        "examples": trial.steps * trial.batch_size if reached else None,
    }


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


def _regimes(critical: CriticalBatch) -> list[dict[str, Any]]:
    """Return the regimes within the batch sizes that reached the target, and their bounds in examples."""
    low, high = critical.perfect_scaling_below, critical.maximal_data_parallelism_above
    if low is None or high is None:
        return []
    start, end = float(critical.smallest), float(critical.largest)
    rows = zip(REGIMES, ((start, low), (max(start, low), min(end, high)), (high, end)), strict=True)
    return [{"name": name, "from": first, "to": last} for name, (first, last) in rows if first < last]


def _never_reached(trials: Sequence[TrialResult], target: Target) -> str:
    if not trials:
        return f"no trial has run, so {target} was not reached"
    count = plural(len(_last_parts(trials)), "trial")
    seen = [(value, step, trial) for trial in trials for step, value in trial.history if value is not None]
    if not seen:
        return f"{target} was never reached in {count}, and no evaluation gave a finite value: try {WHAT_TO_CHANGE}"
    value, step, trial = min(seen, key=lambda entry: target.gap(entry[0]))
    place = f"batch size {format_count(trial.batch_size)} and learning rate {format_number(trial.lr)}"
    closest = f"the closest value seen was {format_number(value)}, at {place} after {format_count(step)} steps"
    return f"{target} was never reached in {count}; {closest}: try {WHAT_TO_CHANGE}"


def trials_table(trials: Sequence[TrialResult], target: Target, rows: int = 12) -> Table:
    """Return the live view: the last ``rows`` trials, newest last; it fits 80 columns."""
    reached = sum(trial.reached for trial in trials)
    title = f"target {target}: reached by {reached} of {plural(len(_last_parts(trials)), 'trial')}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("trial", "batch", "lr", "status", "steps", "time", "s/step", "last value"):
        table.add_column(name, justify="left" if name == "status" else "right", no_wrap=True)
    for trial in trials[max(0, len(trials) - rows) :]:
        last = trial.history[-1][1] if trial.history else None
        bound = f"> {format_count(trial.steps_low)}" if trial.status == "censored" else "-"
        table.add_row(
            str(trial.number),
            format_count(trial.batch_size),
            format_number(trial.lr),
            Text(trial.status, style=STATUS_COLOURS[trial.status]),
            format_count(trial.steps) if trial.reached else bound,
            format_seconds(trial.time_to_target),
            format_number(trial.seconds_per_step),
            format_number(last),
        )
    return table


def final_table(summary: Summary) -> Group:
    """Return a study's results for 80 columns: the winners side by side, then B_crit and the regimes in words."""
    noise_scale, exponent, critical = (summary[name] for name in ("noise_scale", "lr_exponent", "critical"))
    front = [
        f"B = {format_count(row['batch_size'])} ({plural(row['steps'], 'step')}, "
        f"{format_seconds(row['time_to_target'])})"
        for row in summary["pareto"]
    ]
    rows = {
        "target": f"{summary['target']}: {counts_text(summary)}",
        "stop reason": summary["stop_reason"],
        "note": summary["note"],
        "warning": "; ".join(summary["warnings"]),
        "critical batch": critical_text(critical) if critical else "not known, as no trial reached the target",
        "narrow it": critical and next_text(critical),
        "fewest examples": critical and _fewest_text(critical),
        "regimes": critical and regimes_text(summary["regimes"], critical),
        "noise scale": noise_scale and noise_scale_text(noise_scale),
        "scaling rule": exponent and exponent["text"],
        "not run again": summary.get("not_run_again"),
        "over seeds": seed_scatter_text(summary["seed_scatter"]) if summary.get("seed_scatter") else None,
        "Pareto front": f"of single runs: {'; '.join(front)}" if len(front) > 1 else None,
    }
    facts = Table.grid(padding=(0, 2))
    facts.add_column(no_wrap=True, style="bold")
    facts.add_column(overflow="fold")
    for label, text in rows.items():
        if text:
            facts.add_row(label, text)
    return Group(facts) if summary["best_by_steps"] is None else Group(_winners_table(summary), facts)


def _winners_table(summary: Summary) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption=_caption(summary))
    table.add_column("best by")
    for criterion in WINNERS.values():
        table.add_column(criterion.heading, justify="right")
    winners = [summary[name] for name in WINNERS]

    def row(label: str, values: Iterable[Any], text: Callable[[Any], str]) -> None:
        table.add_row(label, *("-" if value is None else text(value) for value in values))

    def field(name: str) -> list[Any]:
        return [winner and winner[name] for winner in winners]

    row("batch size (examples)", field("batch_size"), format_count)
    row("learning rate", field("lr"), format_number)
    hyperparameters = [winner["hyperparameters"] if winner else {} for winner in winners]
    for name in sorted({name for values in hyperparameters for name in values}):
        row(name.replace("_", " "), [values.get(name) for values in hyperparameters], format_number)
    if any(value is not None for value in field("horizon")):
        row("horizon (steps)", field("horizon"), format_count)
    for name in ("time", "steps"):
        row(f"{name} to target", winners, partial(expected_text, name))
    if any(fresh := field("confirmed")):
        row("reached on fresh seeds", fresh, lambda runs: f"{runs['reached']} of {runs['runs']}")
    row("time per step", field("seconds_per_step"), format_seconds)
    tests = [summary.get("test", {}).get(name, {}) for name in WINNERS]
    for name in sorted({name for metrics in tests for name in metrics}):
        row(name, [metrics.get(name) for metrics in tests], format_number)
    row("trial", field("number"), str)
    row("seed", field("seed"), str)
    return table


def expected_text(name: str, winner: Row) -> str:
    """Return a winner's time or steps: median and range over fresh runs, ``410 ms (390 to 470)``, else as predicted."""
    fresh, value = winner["confirmed"], winner["steps" if name == "steps" else "time_to_target"]
    low, high = (value, value) if fresh is None else (fresh[f"{name}_low"], fresh[f"{name}_high"])
    if low is None:
        return "-"
    scale, unit, text = (1.0, "", format_count)
    if name == "time":
        (scale, unit), text = time_unit(low if value is None else value), format_number
    else:
        value = None if value is None else round(value)
    middle = "over" if value is None else f"{text(value / scale)} {unit}".rstrip()
    if fresh is None:
        return f"{middle} (predicted)"
    return f"{middle} ({text(low / scale)} {'and more' if high is None else f'to {text(high / scale)}'})"


def _caption(summary: Summary) -> str:
    fresh = [summary[name]["confirmed"] is not None for name in WINNERS if summary[name] is not None]
    how = FRESH if all(fresh) else f"{FRESH}, or {PREDICTED}" if any(fresh) else f"{PREDICTED}, not run again"
    return f"time and steps to target: {how}"


def print_final(console: Console, summary: Summary, files: Mapping[str, Path], mlflow_command: str) -> None:
    """Print :func:`final_table`, then each file's path and the command, unbroken however long: they get copied."""
    console.print(final_table(summary))
    for name, text in [*((name, str(path)) for name, path in files.items()), ("MLflow UI", mlflow_command)]:
        console.print(Text.assemble((f"{name:<14}", "bold"), "  ", text), soft_wrap=True)


def counts_text(summary: Summary) -> str:
    """Return how many trials reached the target, and what became of the others, in words."""
    others = [f"{n} {status}" for status, n in summary["statuses"].items() if n and status != "reached"]
    if times := summary["continued"]:
        others.append(f"a stopped one was continued {'once' if times == 1 else f'{times} times'}")
    tail = f" ({', '.join(others)})" if others else ""
    return f"reached by {summary['statuses']['reached']} of {plural(summary['trials'], 'trial')}{tail}"


def critical_text(fit: Row) -> str:
    """Return B_crit: ``520 examples (90% interval 310 to 880)``."""
    value = "undetermined" if fit["b_crit"] is None else f"{format_number(fit['b_crit'], 2)} examples"
    return f"{value} ({_interval_text(fit, 'b_crit')})"


def _interval_text(fit: Row, name: str) -> str:
    low, high = (format_number(fit[f"{name}_{end}"], 2) for end in ("low", "high"))
    match low, high:
        case "-", "-":
            interval = "open at both ends"
        case _, "-":
            interval = f"above {low}"
        case "-", _:
            interval = f"below {high}"
        case _:
            interval = f"{low} to {high}"
    return f"{fit['level']:.0%} interval {interval}"


def seed_scatter_text(row: Row) -> str:
    """Return ``steps to target scatter by 9% (90% interval 6% to 13%)``, one standard deviation."""
    interval = f"{row['level']:.0%} interval {row['low']:.0%} to {row['high']:.0%}"
    return f"steps to target scatter by {row['scatter']:.0%} ({interval})"


def noise_scale_text(row: Row) -> str:
    """Return ``54 examples (90% interval 31 to 235; 24 steps of 7 trials), 0.79 times the critical batch``."""
    measured = f"{plural(row['steps'], 'step')} of {plural(row['trials'], 'trial')}"
    if row["noise_scale"] is None:
        return f"undetermined: {row['undetermined']} ({measured})"
    interval = f"{row['level']:.0%} interval {format_number(row['low'], 2)} to {format_number(row['high'], 2)}"
    text = f"{format_number(row['noise_scale'], 2)} examples ({interval}; {measured})"
    ratio = row["ratio_to_critical"]
    return text if ratio is None else f"{text}, {format_number(ratio, 2)} times the critical batch"


def regimes_text(regimes: Sequence[Row], critical: Row) -> str:
    """Return the regimes as a sentence; one beyond the batch sizes that were run is said not to be seen."""
    if critical["b_crit"] is None:
        return "not known, as B_crit is not"
    words = {
        REGIMES[0]: "perfect scaling up to B = {1}",
        REGIMES[1]: "diminishing returns from {0} to {1}",
        REGIMES[2]: "maximal data parallelism above {0}",
    }
    seen = {row["name"]: [format_number(row[end], 2) for end in ("from", "to")] for row in regimes}
    parts = [words[name].format(*bounds) for name, bounds in seen.items()]
    missing = [name for name in REGIMES if name not in seen]
    if missing:
        span = f"B = {format_count(critical['smallest'])} to {format_count(critical['largest'])}"
        parts.append(f"{' and '.join(missing)} not seen within {span}")
    return "; ".join(parts)


def next_text(critical: Row) -> str | None:
    """Return what would narrow the interval, in words; None where it is narrow."""
    texts = []
    for row in critical["next_trials"]:
        seconds = "" if row["seconds"] is None else f", {format_seconds(row['seconds'])}"
        steps = format_number(row["steps"], 2)
        texts.append(f"B = {format_count(row['batch_size'])} at {format_number(row['lr'], 2)} ({steps} steps{seconds})")
    trials = f"trials at {'; '.join(texts)}" if texts else None
    return "; ".join(text for text in (trials, critical["note"]) if text) or None


def _fewest_text(critical: Row) -> str | None:
    if critical["b_opt"] is None:
        return None
    middle, interval = format_number(critical["b_opt"], 2), _interval_text(critical, "b_opt")
    return f"at B = {middle} ({interval}): smaller batches need more examples"
