"""What a study shows while it runs: the plan, then a live table on a terminal or plain lines elsewhere."""

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from bstune.preflight import Job
from bstune.records import Target, TrialResult
from bstune.report import format_count, format_number, format_seconds, trials_table
from bstune.search.study import is_own
from bstune.tunable import Tunable


def plan_text(job: Job, done: Sequence[TrialResult], estimate: tuple[float, bool]) -> str:
    """Return the plan in a few lines.

    Args:
        job: the checked job.
        done: trials that an earlier run of the study finished.
        estimate: seconds, and whether they bound a study in which every trial runs to its budget.
    """
    plan, space = job.plan, job.space
    seconds, bound = estimate
    rule = job.config.scaling.rule["_target_"].rpartition(".")[2]
    limits = [f"{plan.trials} trials"]
    if plan.seconds is not None:
        limits.append(f"{format_seconds(plan.seconds)} of training")
    if plan.wall_seconds is not None:
        limits.append(f"{format_seconds(plan.wall_seconds)} of wall time")
    lines = [
        f"study {job.config.study}: {job.protocol.target}, objective {plan.objective}, on {job.runner.place}",
        f"  batch sizes {format_count(space.low)} to {format_count(space.high)}, "
        f"learning rates within a factor of {format_number(2**space.delta_bound)} of rule {rule} "
        f"through B = {format_count(job.config.scaling.batch_size)}, lr = {format_number(job.config.scaling.lr)}"
        + (f", within {format_number(space.lr_low)} to {format_number(space.lr_high)}" if space.lr_low > 0 else ""),
        f"  {', '.join(limits)}{_ends(job)}",
    ]
    if space.tunables:
        lines.append(f"  searches {', '.join(_range_text(one) for one in space.tunables)} as well")
    if done:
        lines.append(f"  continues after {len(done)} trials; about {format_seconds(seconds)} to go")
    else:
        kind = "at most about" if bound else "about"
        lines.append(f"  {kind} {format_seconds(seconds)} if every trial ran to its budget")
    lines += [f"  {note}" for note in job.runner.notes]
    return "\n".join(lines)


def _range_text(tunable: Tunable) -> str:
    return f"{tunable.name} ({format_number(tunable.low)} to {format_number(tunable.high)})"


def _ends(job: Job) -> str:
    budget = job.protocol.budget
    spent = f"{format_count(budget.steps)} steps and {format_count(budget.examples)} examples"
    if is_own(job.config.sampler) and job.runner.stops:
        return "; each ends at the target or once it cannot matter, and may be continued; winners run again"
    if is_own(job.config.sampler):
        return f"; each ends at the target or after {spent}"
    return f", {job.plan.stratified:.0%} of them spread evenly over log B; each ends at the target or after {spent}"


class Progress:
    """A live table with a progress bar on a terminal; one plain line a trial elsewhere."""

    def __init__(self, total: int, target: Target, console: Console) -> None:
        self._total, self._target, self._console = total, target, console
        self._shown: set[int] | None = None
        self._live: Live | None = None
        if console.is_terminal:
            columns = (
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
            )
            self._bar = Bar(*columns, console=console)
            self._task = self._bar.add_task("trials", total=total)
            self._live = Live(console=console, refresh_per_second=2, transient=True)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, done: Sequence[TrialResult]) -> None:
        """Show the trials that are done; those of an earlier run are not repeated as lines."""
        if self._live is not None:
            finished = sum(result.status != "failed" and result.confirms is None for result in done)
            self._bar.update(self._task, completed=finished)
            self._live.update(Group(trials_table(done, self._target), self._bar))
            return
        if self._shown is not None:
            for result in done:
                if result.number not in self._shown:  # side by side, trials do not end in order of their numbers
                    self._console.print(self.line(result, self._total), soft_wrap=True, highlight=False)
        self._shown = {result.number for result in done}

    @staticmethod
    def line(result: TrialResult, total: int | None) -> str:
        """Return one trial as a plain line."""
        place = f"trial {result.slot + 1}/{total}" if total is not None else "trial"
        if result.confirms is not None:
            place = f"confirms trial {result.confirms} on a fresh seed"
        elif result.parent is not None:
            place += f" (continues number {result.parent})"
        last = result.history[-1][1] if result.history else None
        time = f", {format_seconds(result.time_to_target)} to target" if result.reached else ""
        reason = f": {result.message}" if result.message else ""
        settings = "".join(f"  {name} {format_number(value)}" for name, value in result.settings.items())
        return (
            f"{place}  B {result.batch_size}  lr {format_number(result.lr)}{settings}  {result.status}"
            f" at step {result.steps} ({format_number(last)}){time}, {format_seconds(result.wall_seconds)} in all"
            f"{reason}"
        )
