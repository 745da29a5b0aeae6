"""What a study answers, in words: from ``curve.json``'s mapping, for the console, the figure, the pages and MLflow."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from bstune.core.console import format_count, format_number, format_seconds, plural, time_unit
from bstune.report.rows import REGIMES, WINNERS, Row, Summary

FRESH = "median and range over runs on fresh seeds"
PREDICTED = "predicted of a fresh seed from all trials"


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
