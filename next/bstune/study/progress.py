"""Lines on the error stream, so that the answer alone is the output: what ended, what goes on."""

import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Self

from bstune.core.records import Record, Spec
from bstune.study.plan import Plan, count_configurations, is_of
from bstune.study.result import Phases
from bstune.system.console import number, seconds
from bstune.system.secrets import hide_in_text

_ROLES = {"baseline": "baseline", "search": "trial", "new seed": "new seed"}
# What goes on is said where nothing else was said for so many seconds.
QUIET_SECONDS = 8.0
# Studies that may take longer, in seconds, are told so before their search.
LONG_SECONDS = 86_400.0


class _Said:
    """When a line was last printed."""

    at = 0.0


def say(text: str) -> None:
    """Print a line of progress at once."""
    _Said.at = time.monotonic()
    print(hide_in_text(text), file=sys.stderr, flush=True)


class Progress:
    """Says what each trial came to, and now and then what goes on; a context manager.

    Args:
        limit: the time limit's end, by ``time.monotonic()``; None: no limit.
        write: prints a line.
    """

    def __init__(self, limit: float | None = None, write: Callable[[str], None] = say) -> None:
        self._write = write
        self._limit = limit
        self._began = time.monotonic()
        self._plan: Plan | None = None
        self._before: Sequence[Record] = ()
        self._records: list[Record] = []
        self._doing: Callable[[], str] = lambda: "starting"
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        _Said.at = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(QUIET_SECONDS / 8):
            if time.monotonic() - _Said.at > QUIET_SECONDS:
                self._write(self._doing() + self._left())

    def does(self, what: str) -> None:
        """Say what goes on from now on."""
        self._write(what)
        self._doing = lambda: what

    def plans(self, plan: Plan, records: Sequence[Record]) -> None:
        """Tell the plan, and the records that the study has already: its pace counts from here."""
        self._plan = plan
        self._before = records
        self._records = list(records)
        self._began = time.monotonic()

    def begun(self, spec: Spec, so_far: Callable[[], str]) -> None:
        """Tell that a trial begins.

        Args:
            spec: of the trial.
            so_far: gives its last evaluation.
        """
        self._doing = lambda: f"{_trial(spec)} {so_far() or 'not evaluated yet'}"

    def finished(self, record: Record) -> None:
        """Say how a trial ended."""
        self._records.append(record)
        line = f"{_trial(record)} {record.status} after {record.steps:,} steps"
        if record.message:
            line += f": {record.message}"
        self._write(line + self._left())
        if self._plan is not None and record.role == "baseline":
            takes = longest(self._plan, record.seconds_per_step)
            if takes is not None:
                self._write(takes)
        self._doing = lambda: "choosing what to run next"

    def _left(self) -> str:
        """What is left of the limit; without one what is to go by the pace."""
        now = time.monotonic()
        if self._limit is not None:
            return f"; {seconds(max(self._limit - now, 0.0))} left"
        if self._plan is None:
            return ""
        share = share_done(self._plan, self._before, self._records)
        return f"; about {seconds((now - self._began) * (1 / share - 1))} to go" if share else ""


def _trial(spec: Spec) -> str:
    """Name a trial and its configuration, in columns."""
    what = _ROLES[spec.role]
    if spec.resumed_from is not None:
        what = f"resumed {spec.resumed_from}"
    pair = f"batch size {spec.batch_size:<6} lr {number(spec.lr):<9}"
    return f"{spec.number:>4}  {what:<12}  {pair}"


def share_done(plan: Plan, before: Sequence[Record], records: Sequence[Record]) -> float:
    """The share of the runs that a command has to do which it has done; resumptions are none.

    Args:
        plan: of the study.
        before: the records when the command began.
        records: those of now.
    """

    def runs(of: Sequence[Record]) -> int:
        others = [one for one in of if one.role != "search" and one.resumed_from is None]
        return count_configurations(of) + len(others)

    new_seeds = plan.seeds if plan.question.seeks_best else 0
    total = plan.trials + new_seeds
    if plan.baseline is not None:
        total += 1 + new_seeds
    done = runs(records) - runs(before)
    return min(done / max(total - runs(before), done, 1), 1.0)


def longest(plan: Plan, step_seconds: float | None) -> str | None:
    """Say what a study without a limit may take at most, where that is days; None: it is less.

    Args:
        plan: of the study.
        step_seconds: of the baseline.
    """
    if plan.deadline is not None or plan.baseline is None or step_seconds is None:
        return None
    steps = plan.question.budget.last_step(plan.baseline.batch_size)
    runs = plan.trials + 2 * plan.seeds
    takes = step_seconds * steps * runs
    if takes < LONG_SECONDS:
        return None
    return (
        f"{runs} trials of the whole budget take {takes / LONG_SECONDS:.1f} days "
        f"({seconds(step_seconds)} a step, {steps:,} steps): wall_seconds=N limits the study, "
        f"trials=N and budget.steps=N shorten it"
    )


class Stopwatch:
    """Counts the seconds of each phase; an observer, whose trials count with what chose them."""

    def __init__(self, began: float, plan: Plan | None = None) -> None:
        self.plan = plan
        self.phases = Phases()
        self.trials = 0
        self._last = began

    def lap(self, phase: str) -> float:
        """Count the time since the last lap, which it gives, for a phase."""
        now = time.monotonic()
        took = now - self._last
        self._last = now
        before = getattr(self.phases, phase)
        self.phases = self.phases.model_copy(update={phase: before + took})
        return took

    def finished(self, record: Record) -> None:
        """Count a trial for its phase; the search may resume the baseline's."""
        self.trials += 1
        phase = {"baseline": "baseline", "search": "others", "new seed": "confirmation"}[
            record.role
        ]
        baseline = self.plan.baseline if self.plan is not None else None
        if phase == "others" and baseline is not None and is_of(record, baseline):
            phase = "baseline"
        self.lap(phase)
