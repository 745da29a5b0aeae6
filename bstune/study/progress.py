"""What each trial came to and what goes on, in lines; and where the seconds of a command go."""

import time
from collections.abc import Callable, Sequence

from bstune.core.records import Record, Records, Spec
from bstune.study.plan import Plan
from bstune.study.result import Phases
from bstune.study.trials import count_configurations
from bstune.system.console import count, exact, number, seconds
from bstune.system.ticker import Ticker, say

_ROLES = {"baseline": "baseline", "search": "trial", "new seed": "new seed"}
# The columns of a line, with their alignments and widths.
HEADS = {
    "trial": ">5",
    "": "<10",
    "batch size": ">10",
    "lr": "<8",
    "ended": "<8",
    "steps": ">8",
    "best run": ">8",
    "to go": ">7",
}


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
        self._has_no_head = True

    def trial_begins(self, spec: Spec, so_far: Callable[[], str]) -> None:
        """Tell that a trial begins.

        Args:
            spec: of the trial.
            so_far: gives its last evaluation.
        """
        what = f"{_ROLES[spec.role]} {spec.number}"
        pair = f"batch size {spec.batch_size:,}, lr {number(spec.lr)}"
        self._ticker.doing = lambda: self._doing_line(
            f"{what}, {pair}, {so_far() or 'not evaluated'}"
        )

    def finished(self, record: Record) -> None:
        """Say how a trial ended."""
        self._records.append(record)
        what = _ROLES[record.role]
        if record.resumed_from is not None:
            what = f"resumed {record.resumed_from}"
        cells = (
            str(record.number),
            what,
            f"{record.batch_size:,}",
            number(record.lr),
            record.status,
            f"{record.steps:,}",
            self._best_text(),
            self._time_left(),
        )
        if self._has_no_head:
            self._write(_line(list(HEADS)))
            self._has_no_head = False
        values = [f"{name} {exact(value)}" for name, value in record.values.items()]
        self._write(f"{_line(cells)}  {' '.join([*values, record.message])}".rstrip())
        self._ticker.doing = lambda: self._doing_line("choosing what to run next")

    def _doing_line(self, what: str) -> str:
        """What goes on, between what was tried and what is left."""
        left = self._time_left()
        to_go = f"; {left} to go" if left else ""
        return f"{self._configurations_text()}: {what}{to_go}"

    def _configurations_text(self) -> str:
        """The configurations that the answer will count."""
        tried = count_configurations(self._records)
        if self._plan.deadline is not None:
            return count(tried, "configuration")
        return f"{tried} of {count(self._plan.trials, 'configuration')}"

    def _best_text(self) -> str:
        """The best run so far, whatever new seeds will say of it."""
        question = self._plan.question
        if question.seeks_metric:
            ends = [one for one in self._records if one.status == "finished"]
            values = [question.target.best(one.finite_values) for one in ends]
            return number(question.target.best(values), 4) if values else ""
        if question.counts_steps:
            steps = [one.steps_to_target for one in self._records if one.reached]
            return number(min(steps)) if steps else ""
        times = [
            one.steps_to_target * one.seconds_per_step
            for one in self._records
            if one.reached and one.seconds_per_step is not None
        ]
        return seconds(min(times)) if times and question.seeks_best else ""

    def _time_left(self) -> str:
        """What is left of the limit; without one what is to go by the pace."""
        now = time.monotonic()
        limit = self._plan.deadline
        if limit is not None:
            return seconds(max(limit.began + limit.seconds - now, 0.0))
        share = share_done(self._plan, self._before, self._records)
        return f"{seconds((now - self._began) * (1 / share - 1))}" if share else ""


def _line(cells: Sequence[str]) -> str:
    """Write the cells below their heads."""
    aligned = zip(HEADS.items(), cells, strict=True)
    return "  ".join(f"{cell:{align}}" for (_, align), cell in aligned)


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
