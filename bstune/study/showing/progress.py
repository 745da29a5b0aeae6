"""How far a running study has come: one live line on a terminal, a table in a notebook.

Elsewhere one plain line a trial shows it, and a line from time to time while a long one trains.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Column

from bstune.core.records import Target, TrialResult, TrialSpec
from bstune.report.words import met_between
from bstune.study.planning.plan import count_points, reruns
from bstune.study.showing.live_table import live_html
from bstune.system.console import format_number, format_seconds, plural, print_line, to_go_text
from bstune.system.watchdog import LINE_SECONDS, THREAD_LOOK_SECONDS
from bstune.trial.processes.reached import Reached

# Gives how far a trial is, as far as it is known.
HowFar = Callable[[], Reached]
# Seconds between two lines while a long trial trains.
MINUTE = 60.0
# Statuses of trials that no error ended.
WENT_ON = ("reached", "stopped")


class Progress:
    """A live line on a terminal, a live table in a notebook; one plain line a trial elsewhere.

    Args:
        total: configurations that the search may try.
        target: whose metric is shown.
        last_step: gives the step at which a trial's budget is spent, by batch size.
        console: where it is shown.
    """

    def __init__(
        self, total: int, target: Target, last_step: Callable[[float], int], console: Console
    ) -> None:
        self._total = total
        self._target = target
        self._last_step = last_step
        self.console = console
        # Numbers of the trials that need no line any more; None: not known before the first call.
        self._shown: set[int] | None = None
        # Messages of trials that have been printed.
        self._said: set[str] = set()
        # The live line, a context manager that shows it; None where there is none.
        self.live: Bar | None = None
        # The table in a notebook; None before the first one.
        self._displayed: Any = None
        # When the last line was printed, on the monotonic clock.
        self._last_line_at = time.monotonic()
        # Seconds from the last trial's end to the last line that was printed since.
        self._waited = 0.0
        # Configurations that have been tried.
        self._points = 0
        # The trials that have begun and not been shown as ended, in the order in which they began.
        self._running: dict[int, tuple[TrialSpec, HowFar]] = {}
        if console.is_interactive:
            # One line: a long one is cut at its end.
            column = Column(no_wrap=True, ratio=1)
            text = TextColumn("{task.description}", markup=False, table_column=column)
            self.live = Bar(
                MofNCompleteColumn(),
                text,
                TimeElapsedColumn(),
                console=console,
                transient=True,
                expand=True,
            )
            self._task = self.live.add_task("configurations", total=total)

    def begin(self, spec: TrialSpec, how_far: HowFar = Reached) -> None:
        """Note that a trial begins, which lines name while it takes long.

        ``how_far``: gives its steps and its last evaluation then, as far as they are known.
        """
        self._running[spec.number] = spec, how_far

    def show(self, done: Sequence[TrialResult], to_go: float | None = None) -> None:
        """Show the finished trials.

        The trials of the first call ended in earlier commands, and get no line.

        ``to_go``: the seconds that the rest of the study is predicted to take; None: not known.
        """
        time_left = to_go_text(to_go) or ""
        self._last_line_at = time.monotonic()
        self._waited = 0.0
        self._points = count_points(done)
        for trial in done:
            self._running.pop(trial.number, None)
        if self.live is None and not self.console.is_jupyter:
            self._print_new(done, time_left)
            return
        # The time comes first, as a live line is cut at its end.
        texts = (time_left, live_text(done, self._target, self._last_step))
        text = "; ".join(part for part in texts if part)
        if self.live is not None:
            self.live.update(self._task, completed=self._points, description=text)
        else:
            self._display(done, text)

    def _display(self, done: Sequence[TrialResult], text: str) -> None:
        """Show the trials in a notebook, in place of what it showed before."""
        # A notebook has IPython, which may be missing elsewhere.
        from IPython.display import display

        come_to = f"{self._points} of {plural(self._total, 'configuration')}; {text}"
        bundle = {"text/plain": text, "text/html": live_html(done, come_to)}
        if self._displayed is None:
            self._displayed = display(bundle, raw=True, display_id=True)
        else:
            self._displayed.update(bundle, raw=True)

    def _print_new(self, done: Sequence[TrialResult], time_left: str) -> None:
        """Print a line for each trial that has ended since the last call."""
        # At the first call, all that have ended did so in earlier commands.
        if self._shown is None:
            self._shown = {trial.number for trial in done}
        shown = [trial for trial in done if trial.number in self._shown]
        # Side by side, trials do not end in order of their numbers.
        new = [trial for trial in done if trial.number not in self._shown]
        for trial in new:
            shown.append(trial)
            points = count_points(shown)
            # A point that failed does not count, and is asked again.
            tried = points + 1 if trial.status == "failed" else points
            place = f"configuration {tried} of {self._total}"
            # A search may train a stopped trial again from its first step. Where such a run fails
            # it is not among the reruns: its place after the last configuration tells what it is.
            if tried > self._total or trial.number in reruns(shown):
                place = "again from its first step"
            line = trial_line(trial, self._target, self._last_step, place) + self._message(trial)
            if time_left and trial is new[-1]:
                line += f"; {time_left}"
            print_line(self.console, line)
            self._shown.add(trial.number)

    def _message(self, trial: TrialResult) -> str:
        """Give a trial's message as the end of its line; empty where nothing is to be printed.

        An error's message is printed for each trial, and what ended a trial once. What a trial went
        on without was told in a warning, and a note of the answer counts such trials.
        """
        message = trial.end_message
        if message is None or (trial.status in WENT_ON and message in self._said):
            return ""
        self._said.add(message)
        return f": {message}"

    def waiting_line(self, now: float) -> str | None:
        """Write the line to print while a trial takes long; None where none is due.

        It is due after ``LINE_SECONDS`` without a line; once a configuration has been tried, after
        a minute. A live line or a notebook's table shows progress by itself, so that it is never
        due there. A line that is given counts as printed, and the wait for the next one begins.

        ``now``: seconds of the monotonic clock.
        """
        silence = now - self._last_line_at
        limit = LINE_SECONDS if self._points == 0 else MINUTE
        if self.live is not None or self.console.is_jupyter or silence < limit:
            return None
        self._waited += silence
        self._last_line_at = now
        tried = f"{self._points} of {self._total} configurations tried"
        waited = format_seconds(self._waited)
        running = list(self._running.values())
        # What another process trains is not known here.
        if not running:
            return f"training elsewhere for {waited}; {tried}"
        if len(running) > 1:
            numbers = ", ".join(str(spec.number) for spec, _ in running)
            return f"training trials {numbers} for {waited}; {tried}"
        ((spec, how_far),) = running
        known = self._known_of(spec, how_far())
        return f"training trial {spec.number} for {waited} ({known}); {tried}"

    def _known_of(self, spec: TrialSpec, reached: Reached) -> str:
        """Say what trains, how far it is of how long it may, and what it was evaluated to last."""
        last_step = self._last_step(spec.batch_size)
        if spec.max_steps is not None:
            last_step = min(last_step, spec.max_steps)
        text = f"{_place(spec)}; "
        if reached.steps is not None:
            text += f"step {reached.steps} of "
        text += f"up to {plural(last_step, 'step')}"
        if spec.max_seconds is not None:
            text += f" or {format_seconds(spec.max_seconds)}"
        if reached.evaluation is None:
            return text
        step, value = reached.evaluation
        shown = "nan" if value is None else format_number(value)
        return f"{text}; {self._target.metric} {shown} after {plural(step, 'step')}"


@contextmanager
def lines_while_waiting(progress: Progress) -> Iterator[None]:
    """Let a thread print a line from time to time while the body trains trials."""
    ended = threading.Event()

    def keep_saying() -> None:
        while not ended.wait(THREAD_LOOK_SECONDS):
            line = progress.waiting_line(time.monotonic())
            if line is None:
                continue
            # Whoever read the output may be gone.
            with suppress(OSError, ValueError):
                print_line(progress.console, line)

    thread = threading.Thread(target=keep_saying, name="bstune-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def live_text(
    done: Sequence[TrialResult], target: Target, last_step: Callable[[float], int]
) -> str:
    """Write in one line the best trial so far, and the last one with its metric.

    ``last_step`` gives the step at which a trial's budget is spent, by batch size.
    """
    if not done:
        return "no trial yet"
    last = done[-1]
    # The comma joins the metric to what follows it in other lines; here nothing follows.
    seen = _metric_text(last, target).rstrip(",")
    texts = [f"trial {last.number}: {_place(last)}, {ending(last, last_step)}{seen}"]
    reached = [trial for trial in done if trial.reached]
    if reached:
        best = min(reached, key=lambda trial: (trial.time_to_target or math.inf, trial.steps))
        cost = plural(best.steps, "step")
        if best.time_to_target is not None:
            cost = format_seconds(best.time_to_target)
        texts.insert(0, f"best {cost} at {_place(best)}")
    return "; ".join(texts)


def _place(trial: TrialResult | TrialSpec) -> str:
    """Name a trial's batch size and learning rate."""
    return f"B {trial.batch_size}, lr {format_number(trial.lr)}"


def _metric_text(trial: TrialResult, target: Target) -> str:
    """Write the metric's last finite value, such as `` at val_loss 0.3``; empty without one.

    Of a trial that reached the target it is the value with which it did.

    A target that has no value yet is open. Then the best value is written as well if it is another
    one: `` at val_loss 0.3, best 0.2,``. The comma at the end closes the insertion.
    """
    # The run that has set the target went on beyond the step at which it counts as reached.
    until = trial.steps if trial.reached else math.inf
    values = [value for step, value in trial.history if value is not None and step <= until]
    if not values:
        return ""
    last = values[-1]
    text = f" at {target.metric} {format_number(last)}"
    best = trial.best_value(target.mode)
    # No value meets an open target: the best one counts.
    if target.is_open and best is not None and best != last:
        text += f", best {format_number(best)},"
    return text


def _count_evaluations(trial: TrialResult) -> int:
    """Count the evaluations of a trial after its training began."""
    return sum(step > 0 for step, _ in trial.history)


def ending(trial: TrialResult, last_step: Callable[[float], int]) -> str:
    """Say in a few words how a trial ended, which its status alone may not tell.

    ``last_step`` gives the step at which a trial's budget is spent, by batch size.
    """
    if trial.reached and trial.horizon is None and _count_evaluations(trial) == 1:
        # It may have met the target at any step before.
        return "reached by its first evaluation"
    if trial.status != "stopped":
        return trial.outcome
    if trial.steps >= last_step(trial.batch_size):
        return "spent its budget"
    if trial.horizon is not None and trial.steps >= trial.horizon:
        return "ended with its schedule"
    return "stopped"


def trial_line(
    trial: TrialResult, target: Target, last_step: Callable[[float], int], place: str = ""
) -> str:
    """Write one trial as a plain line, without its message.

    Args:
        trial: that has ended.
        target: whose metric is named. Where the target has no value yet, the best value is named,
            too.
        last_step: gives the step at which a trial's budget is spent, by batch size.
        place: which of the search's points it is; empty where it is none.
    """
    if trial.replicate_of is not None:
        place = f"repeats {trial.replicate_of} on a fresh seed"
    elif trial.resumed_from is not None:
        place = f"continues {trial.resumed_from}"
    point = f"B {trial.batch_size}  lr {format_number(trial.lr)}"
    for name, value in trial.hyperparameters.items():
        point += f"  {name} {format_number(value)}"
    outcome = f"{ending(trial, last_step)}{_metric_text(trial, target)}"
    # The steps of a trial whose process has died are not known.
    if trial.steps or trial.status != "failed":
        after: str | None = None
        # A schedule that ends with its trial is evaluated at its end.
        if trial.reached and trial.horizon is None:
            after = met_between(trial.steps_low, trial.steps)
        outcome += f" after {after or plural(trial.steps, 'step')}"
    # The horizon: the steps of a schedule that ends with the trial.
    if trial.horizon is not None:
        outcome += f" of {trial.horizon}"
    # The law of a step's seconds is fitted anew as trials end: the answer may have others.
    if trial.time_to_target is not None:
        outcome += f", about {format_seconds(trial.time_to_target)}"
    parts = (f"trial {trial.number}", place, point, outcome)
    return "  ".join(part for part in parts if part)
