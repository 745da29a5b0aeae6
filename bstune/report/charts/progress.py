"""The best time, or steps, so far over what the search has spent."""

from collections.abc import Sequence
from dataclasses import dataclass

from bstune.core.records import Merit, TrialResult
from bstune.report.charts.traces import Trace, dots_trace, line_trace, merit_text
from bstune.report.html import axis, chart
from bstune.report.study_folder import StudyFolder
from bstune.system.console import format_seconds, plural


@dataclass(frozen=True)
class _Spent:
    """A trial, and how far the search had come at its end."""

    trial: TrialResult
    seconds: float
    """Seconds that the search had spent at its end."""
    value: float | None
    """Seconds of training, or steps, that it took to the target. None where it missed that."""
    best: float | None
    """The least value so far, without runs on fresh seeds. None before there is one."""


def _spent_rows(trials: Sequence[TrialResult], in_seconds: bool) -> list[_Spent]:
    """Follow the search: a row for each trial, in the order in which trials ended.

    ``in_seconds``: whether values are seconds of training. Else they are steps.
    """
    rows = list[_Spent]()
    total = 0.0
    best: float | None = None
    for trial in trials:
        total += trial.train_seconds + trial.eval_seconds + trial.startup_seconds
        value: float | None = None
        if in_seconds:
            value = trial.time_to_target
        elif trial.reached:
            value = float(trial.steps)
        # A run on a fresh seed repeats a configuration that the search had found before.
        if value is not None and trial.replicate_of is None:
            best = value if best is None else min(best, value)
        rows.append(_Spent(trial=trial, seconds=total, value=value, best=best))
    return rows


def progress(study: StudyFolder) -> str:
    """Draw the best time so far over the seconds that the search has spent.

    It is in steps where no trial was timed, and empty where none reached the target.
    """
    trials = study.files.trials
    if not any(trial.reached for trial in trials):
        return ""
    in_seconds = any(trial.time_to_target is not None for trial in trials)
    rows = _spent_rows(trials, in_seconds)
    seconds_spent = [row.seconds for row in rows]
    best_so_far = [row.best for row in rows]
    best_line = line_trace(seconds_spent, best_so_far, "best run so far", color="--vermilion")
    # The line is drawn as stairs, as it falls where a trial ends.
    best_line["line"] |= {"shape": "hv"}
    searched = list[_Spent]()
    repeated = list[_Spent]()
    for row in rows:
        if row.value is None:
            continue
        if row.trial.replicate_of is None:
            searched.append(row)
        else:
            repeated.append(row)
    traces = [
        best_line,
        _spent_dots(searched, "trial that reached the target", "circle"),
        _spent_dots(repeated, "on a fresh seed", "diamond-open"),
    ]
    merit: Merit = "steps"
    title = "steps to target"
    if in_seconds:
        merit = "time"
        title = "time to target (seconds)"
    layout = {
        "xaxis": axis("seconds spent in trials", log=False, rangemode="tozero"),
        "yaxis": axis(title),
    }
    alt = f"Best {title} so far over seconds spent."
    last_row = rows[-1]
    if last_row.best is not None:
        seconds = format_seconds(last_row.seconds)
        best = merit_text(merit, last_row.best)
        alt += f" {plural(len(rows), 'trial')} took {seconds}; best {best}."
    return chart(traces, layout, height=360, alt=alt)


def _spent_dots(rows: Sequence[_Spent], name: str, symbol: str) -> Trace:
    """Give the trials of ``rows`` as dots over the seconds that the search had spent."""
    trials = [row.trial for row in rows]
    values = [row.value for row in rows]
    trace = dots_trace(trials, values, name, "--blue", symbol)
    trace["x"] = [row.seconds for row in rows]
    return trace
