"""What a notebook shows while a study runs: its last trials, the best, and the curve so far."""

import math
from collections.abc import Sequence

from bstune.core.records import TrialResult
from bstune.report.notebook import escaped, table_html
from bstune.system.console import format_count, format_number, format_seconds

LAST_TRIALS = 8
TRIAL_HEADS = ("trial", "batch size", "learning rate", "ended", "value", "steps", "time to target")
CURVE_HEADS = ("batch sizes", "trials", "reached", "fewest steps", "least time to target")
ONE_RUN_UNTIL_THE_ANSWER = (
    "Each is one run: a fresh seed may take more. The answer at the end says what to expect."
)


def live_html(done: Sequence[TrialResult], line: str) -> str:
    """Make the HTML of a line, of the last trials, newest first, and of each octave's best."""
    if not done:
        return f"<p>{escaped(line)}</p>"
    newest = sorted(done, key=lambda trial: trial.number, reverse=True)[:LAST_TRIALS]
    trials = table_html(TRIAL_HEADS, map(_trial_row, newest))
    curve = table_html(CURVE_HEADS, curve_rows(done))
    return f"<p>{escaped(line)}</p>{trials}<p>{escaped(ONE_RUN_UNTIL_THE_ANSWER)}</p>{curve}"


def _trial_row(trial: TrialResult) -> tuple[str, ...]:
    """Give the texts of a trial's row, by the columns of ``TRIAL_HEADS``."""
    number = str(trial.number)
    if trial.resumed_from is not None:
        number += f", continues {trial.resumed_from}"
    if trial.replicate_of is not None:
        number += f", repeats {trial.replicate_of}"
    value = trial.history[-1][1] if trial.history else None
    return (
        number,
        format_count(trial.batch_size),
        format_number(trial.lr),
        trial.outcome,
        format_number(value),
        format_count(trial.steps),
        format_seconds(trial.time_to_target),
    )


def curve_rows(done: Sequence[TrialResult]) -> list[tuple[str, ...]]:
    """Give a row for each octave of batch sizes that was tried, by the columns of ``CURVE_HEADS``.

    They are the curve so far, as single runs measured it.
    """
    rows = list[tuple[str, ...]]()
    for octave, trials in octaves(done):
        reached = [trial for trial in trials if trial.reached]
        steps = min((trial.steps for trial in reached), default=None)
        times = [trial.time_to_target for trial in reached if trial.time_to_target is not None]
        least = min(times, default=None)
        counts = (str(len(trials)), str(len(reached)))
        rows.append((octave_text(octave), *counts, format_count(steps), format_seconds(least)))
    return rows


def octaves(done: Sequence[TrialResult]) -> list[tuple[int, list[TrialResult]]]:
    """Divide trials by the octaves of their batch sizes; octave i is from 2^i to below 2^(i + 1).

    Each octave stands with its trials, the smallest batch sizes first.
    """
    by_octave = dict[int, list[TrialResult]]()
    for trial in done:
        by_octave.setdefault(math.floor(math.log2(trial.batch_size)), []).append(trial)
    return sorted(by_octave.items())


def octave_text(octave: int) -> str:
    """Name the batch sizes of an octave, such as ``64 to 127``."""
    return f"{format_count(2**octave)} to {format_count(2 ** (octave + 1) - 1)}"
