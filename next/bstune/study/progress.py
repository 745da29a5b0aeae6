"""What each trial came to and what goes on, in lines; and where the seconds of a command go."""

import time
from collections.abc import Callable

from bstune.core.records import Record, Records, Spec
from bstune.study.plan import Plan
from bstune.study.result import Phases
from bstune.study.trials import count_configurations
from bstune.system.console import exact, number, seconds
from bstune.system.ticker import Ticker, say

_ROLES = {"baseline": "baseline", "search": "trial", "new seed": "new seed"}


class Progress:
    """An observer that says how each trial ended, and gives the ticker what goes on.

    Args:
        ticker: that says it now and then.
        plan: of the study.
        records: that the study has already: its pace counts from here.
        write: prints a line.
    """

    def __init__(
        self,
        ticker: Ticker,
        plan: Plan,
        records: Records,
        write: Callable[[str], None] = say,
    ) -> None:
        self._ticker = ticker
        self._plan = plan
        self._before = records
        self._records = list(records)
        self._began = time.monotonic()
        self._write = write

    def begun(self, spec: Spec, so_far: Callable[[], str]) -> None:
        """Tell that a trial begins.

        Args:
            spec: of the trial.
            so_far: gives its last evaluation.
        """
        name = _trial(spec)
        self._ticker.doing = lambda: f"{name} {so_far() or 'not evaluated yet'}{self._left()}"

    def finished(self, record: Record) -> None:
        """Say how a trial ended."""
        self._records.append(record)
        line = f"{_trial(record)} {record.status} after {record.steps:,} steps"
        if record.message:
            line += f": {record.message}"
        elif record.status == "finished":
            target = self._plan.question.target
            line += f": {target.metric} {number(target.best(record.finite_values), 4)}"
        self._write(line + self._left())
        self._ticker.doing = lambda: f"choosing what to run next{self._left()}"

    def _left(self) -> str:
        """What is left of the limit; without one what is to go by the pace."""
        now = time.monotonic()
        limit = self._plan.deadline
        if limit is not None:
            return f"; {seconds(max(limit.began + limit.seconds - now, 0.0))} left"
        share = share_done(self._plan, self._before, self._records)
        return f"; about {seconds((now - self._began) * (1 / share - 1))} to go" if share else ""


def _trial(spec: Spec) -> str:
    """Name a trial and its configuration, in columns."""
    what = _ROLES[spec.role]
    if spec.resumed_from is not None:
        what = f"resumed {spec.resumed_from}"
    pair = f"batch size {spec.batch_size:<6} lr {number(spec.lr):<9}"
    for name, value in spec.values.items():
        pair += f" {name} {exact(value):<9}"
    return f"{spec.number:>4}  {what:<12}  {pair}"


def share_done(plan: Plan, before: Records, records: Records) -> float:
    """The share of the runs that a command has to do which it has done; resumptions are none.

    Args:
        plan: of the study.
        before: the records when the command began.
        records: those of now.
    """

    def runs(of: Records) -> int:
        return count_configurations(of) + sum(one.role != "search" for one in of)

    new_seeds = plan.seeds if plan.question.seeks_best else 0
    total = plan.trials + new_seeds
    if plan.baseline is not None:
        total += 1 + new_seeds
    done = runs(records) - runs(before)
    return min(done / max(total - runs(before), done, 1), 1.0)


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
        if phase == "others" and self.plan is not None and self.plan.is_baseline(record):
            phase = "baseline"
        self.lap(phase)
