"""Writes a study's page while it runs: as trials end, at most for ``SHARE`` of the study's time.

    page = LivePage(files.report, elapsed, say)
    page.show(prepared, done, to_go)

The process that owns the study writes it, each time as a whole file. What cannot be written is said
once, and the study goes on. The browser looks for a newer page every 15 s, ever more rarely once
none comes, and after a day no more.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from bstune.core.objectives import SOUGHT
from bstune.core.records import TrialResult
from bstune.report.answer import Line
from bstune.report.running_page import StudySoFar, is_running_page, running_page
from bstune.report.study_folder import StudyFiles, StudyFolder
from bstune.report.words import point_text
from bstune.study.analysis.summary import Analysis, summarize
from bstune.study.at_budget import best_full, is_full
from bstune.study.planning.baseline import baseline_runs
from bstune.study.planning.plan import count_points
from bstune.study.prepared import PreparedStudy
from bstune.study.report import asked_of
from bstune.study.showing.live_table import CURVE_HEADS, curve_rows, octave_text, octaves
from bstune.study.showing.printed import short_path
from bstune.system.console import format_number, format_seconds, plural, to_go_text
from bstune.system.failures import optional
from bstune.system.files import write_text_once

# The share of the study's time that writing the page may take.
SHARE = 0.02
# Seconds that a writing counts for at least, so that the first one comes after five seconds.
LEAST_SECONDS = 0.1


@dataclass
class PagePace:
    """When the page is written again: once its last writing is ``SHARE`` of the time since then.

    Times are seconds since the study's command began.
    """

    ended: float = 0.0
    """The end of the last writing."""
    took: float = LEAST_SECONDS
    """Seconds of the last writing. The next one is taken to need as many."""

    def is_due(self, now: float) -> bool:
        """Whether the page may be written now, so that it takes no more than its share of time."""
        return now - self.ended >= self.took / SHARE

    def wrote(self, began: float, ended: float) -> None:
        """Note when a writing began and ended; one that failed counts, too."""
        self.ended = ended
        # After a quick writing, too, the next one waits for LEAST_SECONDS / SHARE.
        self.took = max(LEAST_SECONDS, ended - began)


@dataclass(frozen=True)
class _Shown:
    """What the page is to show."""

    prepared: PreparedStudy
    done: Sequence[TrialResult]
    """The finished trials."""
    to_go: float | None
    """Predicted seconds to the study's end; None: not known."""


def local_time() -> datetime:
    """Give the present time in the local zone."""
    return datetime.now().astimezone()


class LivePage:
    """The page of a study that runs.

    Args:
        path: of the page.
        elapsed: gives the seconds since the study's command began.
        say: prints a line.
        clock: gives the time of day that the page states.
    """

    def __init__(
        self,
        path: Path,
        elapsed: Callable[[], float],
        say: Callable[[str], None],
        clock: Callable[[], datetime] = local_time,
    ) -> None:
        self._path = path
        self._elapsed = elapsed
        self._say = say
        self._clock = clock
        self._pace = PagePace()
        # What was shown last, on the page or not yet.
        self._last: _Shown | None = None
        # How many trials were on the page when this run wrote it last; None: it has written none.
        self._written: int | None = None
        # Matters on which a line has been printed.
        self._said = set[str]()

    def show(
        self, prepared: PreparedStudy, done: Sequence[TrialResult], to_go: float | None
    ) -> None:
        """Show the finished trials once the page may be written: now, or at :meth:`catch_up`.

        ``to_go``: the seconds that the rest of the study is predicted to take; None: not known.
        """
        self._last = _Shown(prepared, done, to_go)
        self.catch_up()

    def catch_up(self) -> None:
        """Write the page if trials have ended since it was written, and it may be written now.

        This is called before a trial begins. Else the page would lack the trials that ended shortly
        before a long one until that has ended.
        """
        if self._last is None or len(self._last.done) == self._written:
            return
        if self._pace.is_due(self._elapsed()):
            self._write(self._last, is_running=True)

    def leave(self) -> None:
        """Write the page once more as that of a study that was left before its end.

        Without this it would say that the study runs.
        """
        if self._last is not None and is_running_page(self._path):
            self._write(self._last, is_running=False)

    def _write(self, shown: _Shown, is_running: bool) -> None:
        """Write the page; the first failure is said in a line, and the study goes on."""
        began = self._elapsed()
        faults = list[str]()
        with optional("no page while the study runs", faults):
            study = so_far(shown.prepared, shown.done, shown.to_go, self._clock(), is_running)
            write_text_once(self._path, running_page(study))
        # A writing that failed has taken its time, too.
        self._pace.wrote(began, self._elapsed())
        self._written = len(shown.done)
        if faults:
            self._say_once("fault", f"{faults[0]}: the study goes on")
        elif is_running:
            self._say_once("place", f"its page while it runs: {short_path(self._path)}")

    def _say_once(self, what: str, line: str) -> None:
        """Print a line, unless one on the same matter, ``what``, was printed before."""
        if what not in self._said:
            self._said.add(what)
            self._say(line)


def so_far(
    prepared: PreparedStudy,
    done: Sequence[TrialResult],
    to_go: float | None,
    now: datetime,
    is_running: bool,
) -> StudySoFar:
    """Collect what the page of a study that has not ended shows.

    Args:
        prepared: the study.
        done: its finished trials.
        to_go: predicted seconds to its end; None: not known.
        now: the time that the page states.
        is_running: whether the study runs; else it was left.
    """
    result = summarize(done, asked_of(prepared, end=None), Analysis())
    files = StudyFiles(
        prepared.files.root, trials=tuple(done), hardware=None, config=None, best=None, notes=()
    )
    # The end of a study that was left cannot be predicted.
    if not is_running:
        to_go = None
    lines: list[Line] = [("SO FAR", (_progress(prepared, done, to_go),))]
    if done:
        lines.append(("BEST", (_best(prepared, done),)))
    runs = baseline_runs(done, prepared.baseline)
    if runs is not None:
        lines.append(("YOURS", (_yours(prepared, runs.first),)))
    heads: Sequence[str] = CURVE_HEADS
    rows = curve_rows(done)
    if prepared.budget.objective == "loss":
        heads, rows = _budget_curve(prepared, done)
    study = StudyFolder(result, files)
    return StudySoFar(
        study=study,
        lines=lines,
        curve_heads=heads,
        curve_rows=rows,
        written=now,
        is_running=is_running,
    )


def _progress(prepared: PreparedStudy, done: Sequence[TrialResult], to_go: float | None) -> str:
    """Say how many configurations were tried, in how many runs, and how long the rest takes."""
    points = count_points(done)
    told = f"{points} of {plural(prepared.budget.trials, 'configuration')} tried"
    if len(done) > points:
        told += f", in {plural(len(done), 'run')}"
    time_left = to_go_text(to_go)
    return told if time_left is None else f"{told}; {time_left}"


def _best(prepared: PreparedStudy, done: Sequence[TrialResult]) -> str:
    """Say which single run is the best, or how close to the target the trials came."""
    objective = prepared.budget.objective
    target = prepared.protocol.target
    if objective == "loss":
        full = best_full(done, prepared.last_step, target)
        if full is None:
            return "no trial has come to its budget's end yet"
        shown = format_number(full.best_value(target.mode))
        return f"{target.metric} {shown} at {_place(full)}"
    reached = [trial for trial in done if trial.reached]
    if reached:
        # The answer will be the winner by the objective's first merit.
        in_steps = SOUGHT[objective].merits[0] == "steps"
        return _run_text(min(reached, key=lambda trial: _cost(trial, in_steps)))
    seen = list[tuple[float, TrialResult]]()
    for trial in done:
        value = trial.best_value(target.mode)
        if value is not None:
            seen.append((value, trial))
    if not seen:
        return "no trial has a metric yet"
    best, closest = min(seen, key=lambda pair: target.gap(pair[0]))
    return (
        f"none has reached the target yet; the closest came to {format_number(best)}, "
        f"at {_place(closest)}"
    )


def _yours(prepared: PreparedStudy, first: TrialResult) -> str:
    """Say what the user's own configuration took.

    For the objective loss: which metric it came to.
    """
    target = prepared.protocol.target
    if prepared.budget.objective != "loss":
        return _run_text(first)
    value = format_number(first.best_value(target.mode))
    return f"{target.metric} {value} after {plural(first.steps, 'step')} at {_place(first)}"


def _cost(trial: TrialResult, in_steps: bool) -> tuple[float, int]:
    """Key that sorts trials that reached the target, the best first: by steps, or by seconds."""
    if in_steps:
        return 0.0, trial.steps
    # A trial without seconds comes after any that has them.
    seconds = trial.time_to_target
    if seconds is None:
        seconds = math.inf
    return seconds, trial.steps


def _run_text(trial: TrialResult) -> str:
    """Say what one run took, how it ended if not at the target, and at which configuration."""
    taken = [plural(trial.steps, "step")]
    if trial.time_to_target is not None:
        taken.insert(0, format_seconds(trial.time_to_target))
    ended = "" if trial.reached else f"{trial.status} after "
    return f"{ended}{', '.join(taken)} at {_place(trial)}"


def _place(trial: TrialResult) -> str:
    """Name a trial's configuration and number."""
    where = point_text(trial.batch_size, trial.lr, trial.hyperparameters, trial.horizon)
    return f"{where} (trial {trial.number})"


def _budget_curve(
    prepared: PreparedStudy, done: Sequence[TrialResult]
) -> tuple[Sequence[str], list[tuple[str, ...]]]:
    """Make the table of the best metric at the budget's end over octaves of batch sizes.

    It gives the heads of the columns, and the rows.
    """
    target = prepared.protocol.target
    heads = ("batch sizes", "trials", "to the budget's end", f"best {target.metric}")
    rows = list[tuple[str, ...]]()
    for octave, trials in octaves(done):
        full = [trial for trial in trials if is_full(trial, prepared.last_step)]
        best = best_full(trials, prepared.last_step, target)
        value: float | None = None
        if best is not None:
            value = best.best_value(target.mode)
        counts = (str(len(trials)), str(len(full)))
        rows.append((octave_text(octave), *counts, format_number(value)))
    return heads, rows
