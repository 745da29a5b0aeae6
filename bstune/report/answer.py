"""What a study answers, in words: all of them, from its result.

    answer(result).headline

Each line of the answer is a function of the result, in the table ``LINES``, ``ACTIONS`` or
``DETAILS``. The console, the figure's title, the pages, comparisons and MLflow's note take their
words from here. What a study does not know is left out. Options are written as whoever ran the study
takes them (:mod:`bstune.report.spelling`).

* USE has the median over fresh seeds with the 90% interval of that median: the seeds' scatter, the
  evaluations' grid and, of seconds, the error of tau(B). A machine's speed changes from minute to
  minute, which that error holds.
* GAIN is the mean ratio over the fresh seeds that both ran on. Its interval pools their scatter with
  that of all trials (:mod:`bstune.study.planning.baseline`). One that holds 1 says so. Where there
  are fewer seeds than planned, or none, it says on which runs it stands.
* AS GOOD takes each batch size at its best learning rate (:mod:`bstune.study.analysis.as_good`).
* DEVICES takes each device to be as fast as this one. Above the critical batch size a larger batch
  saves few steps, yet on one device it can still be the fastest.
* CAUTION names fresh seeds that missed the target, that USE or the baseline had none, a
  configuration that may be better and had none, a target that is met at the first look, a noisy
  machine, an open interval.

``--json`` writes the result's JSON to standard output, and all else to standard error.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from bstune.report.lines import at_budget
from bstune.report.lines.as_good import as_good
from bstune.report.lines.cautions import cautions
from bstune.report.lines.critical import critical_lines
from bstune.report.lines.devices import devices
from bstune.report.lines.gain import gain
from bstune.report.lines.learning_rate import lr_growth
from bstune.report.lines.next_steps import more, next_steps
from bstune.report.lines.other_winner import fastest, fewest
from bstune.report.lines.trials import notes, trials
from bstune.report.lines.unreached import unreached_text
from bstune.report.lines.use import metrics_on_test_set, use
from bstune.report.spelling import spelled
from bstune.report.words import device_text, interval_text, trials_text
from bstune.result import StudyResult
from bstune.system.console import format_count, format_number

Line = tuple[str, tuple[str, ...]]
"""A label, and texts: the second one and further ones stand below the first."""


@dataclass(frozen=True)
class Answer:
    """A study's answer.

    Args:
        title: what was asked: workload, target, device, and how many configurations were tried.
        headline: the answer as one sentence.
        lines: label and texts of the answer, in the order in which it is read.
        actions: label and texts of what to do next: a command, or what to change.
        details: label and texts of what the page has besides.
    """

    title: str
    headline: str
    lines: tuple[Line, ...]
    actions: tuple[Line, ...]
    details: tuple[Line, ...]


def answer(result: StudyResult) -> Answer:
    """Put into words what a study answers."""
    title = f"{question(result)} · {trials_text(result)}"
    headline = _headline(result)
    # Within a budget there is no target, and so no steps or seconds to one.
    if result.objective == "loss":
        return Answer(
            title,
            headline,
            lines=_told_lines(BUDGET_LINES, result),
            actions=_told_lines(BUDGET_ACTIONS, result),
            details=_told_lines(BUDGET_DETAILS, result),
        )
    return Answer(
        title,
        headline,
        lines=_told_lines(LINES, result),
        actions=_told_lines(ACTIONS, result),
        details=_told_lines(DETAILS, result),
    )


def question(result: StudyResult) -> str:
    """Say what was asked: the workload, the target and the devices."""
    parts = [result.workload, result.target, *map(device_text, result.devices)]
    if result.study != result.workload:
        parts.insert(0, f"study {result.study}")
    return " · ".join(part for part in parts if part)


def _told_lines(lines: "Lines", result: StudyResult) -> tuple[Line, ...]:
    """Give the lines that have a text."""
    told = list[Line]()
    for label, tell in lines:
        texts = tuple(spelled(result, text) for text in tell(result) if text)
        if texts:
            told.append((label, texts))
    return tuple(told)


def _headline(result: StudyResult) -> str:
    if result.at_budget is not None:
        point = result.at_budget.winner
        value = format_number(point.expected, 3)
        size = format_count(point.batch_size)
        return f"{result.workload}: use B = {size}, {result.metric} {value}"
    winner = result.winner
    if winner is None:
        return f"{result.workload}: {unreached_text(result)}"
    text = f"{result.workload}: use B = {format_count(winner.batch_size)}"
    critical = result.critical_batch_size
    if critical is None or critical.is_of_one_size:
        return f"{text}; critical batch size not known"
    # A headline has no room for the interval's level.
    span = interval_text(critical).partition(": ")[2] or "open at both ends"
    if critical.value is None:
        return f"{text}; critical batch size undetermined ({span})"
    return f"{text}; critical batch size {format_number(critical.value, 2)} ({span})"


Lines = Sequence[tuple[str, Callable[[StudyResult], Iterable[str | None]]]]
# The lines of the answer, in the order in which they are read; one without a text is left out.
LINES: Lines = (
    ("USE", use),
    ("GAIN", gain),
    ("AS GOOD", as_good),
    ("DEVICES", devices),
    ("CAUTION", cautions),
)
# What to do with the answer.
ACTIONS: Lines = (("NEXT", next_steps), ("MORE", more))
# The tables of the objective loss.
BUDGET_LINES: Lines = (
    ("USE", at_budget.use),
    ("GAIN", at_budget.gain),
    ("AS GOOD", at_budget.as_good),
    ("BUDGET", at_budget.growth),
    ("LEFT", at_budget.left),
    ("CAUTION", at_budget.cautions),
)
BUDGET_ACTIONS: Lines = (("NEXT", at_budget.next_steps),)
BUDGET_DETAILS: Lines = (("TRIALS", trials), ("NOTE", notes))
# What the page has besides.
DETAILS: Lines = (
    ("CRITICAL", critical_lines),
    ("TEST", metrics_on_test_set),
    ("FEWEST", fewest),
    ("FASTEST", fastest),
    ("LR", lr_growth),
    ("TRIALS", trials),
    ("NOTE", notes),
)
