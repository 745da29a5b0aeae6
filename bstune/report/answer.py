"""A study's answer in words, made from its result.

    answer(result).headline

Each line of the answer is a function of the result, in the table ``LINES``, ``ACTIONS`` or
``DETAILS``. The console, the figure's title, the pages, comparisons and MLflow's note take their
words from here. A line of which the study knows nothing is left out. Options are written as whoever
ran the study takes them (:mod:`bstune.report.spelling`).

* USE has the median over fresh seeds with the 90% interval of that median. The interval holds the
  scatter over seeds, the distance between evaluations and, of seconds, the error of tau(B). A
  machine's speed changes from minute to minute: that error holds this, too.
* GAIN is the mean ratio over the fresh seeds that both ran on, less the luck that a winner among
  several has. Its interval pools their scatter with that of all trials, and holds the error of
  tau(B) and of a first evaluation (:mod:`bstune.study.planning.baseline`). Both count by one
  tau(B), that of the last survey, so that what slows all batch sizes alike has no part in it. Where
  the interval holds 1, the line says so. Where there are fewer seeds than planned, or none, the
  line says which runs GAIN uses.
* AS GOOD takes each batch size at its best learning rate, and USE's at USE's own
  (:mod:`bstune.study.analysis.as_good`).
* DEVICES takes each device to be as fast as this one. Above the critical batch size a larger batch
  saves few steps, yet on one device it can still be the fastest.
* CAUTION names what weakens the answer: fresh seeds that missed the target, a USE or a baseline
  without fresh seeds, a configuration without them that may be better, a target that is met at the
  first evaluation, a USE of few steps that takes more seconds, a noisy machine, an open interval.

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
from bstune.report.spelling import with_options_as_called
from bstune.report.words import device_text, interval_text, trials_text
from bstune.result import StudyResult
from bstune.system.console import format_count, format_number

Line = tuple[str, tuple[str, ...]]
"""A line of the answer: its label, and its texts, which stand below each other."""


@dataclass(frozen=True)
class Answer:
    """A study's answer in words.

    Args:
        title: what was asked: workload, target, device, and how many configurations were tried.
        headline: the answer as one sentence.
        lines: the lines of the answer, in the order in which they are read.
        actions: lines that say what to do next: a command, or what to change.
        details: further lines, which the page alone shows.
    """

    title: str
    headline: str
    lines: tuple[Line, ...]
    actions: tuple[Line, ...]
    details: tuple[Line, ...]


def answer(result: StudyResult) -> Answer:
    """Give a study's answer in words: its title, headline, lines, actions and details."""
    title = f"{question(result)} · {trials_text(result)}"
    headline = _headline(result)
    # Within a budget there is no target, and so no steps or seconds to one.
    if result.objective == "loss":
        return Answer(
            title,
            headline,
            lines=_lines_with_text(BUDGET_LINES, result),
            actions=_lines_with_text(BUDGET_ACTIONS, result),
            details=_lines_with_text(BUDGET_DETAILS, result),
        )
    return Answer(
        title,
        headline,
        lines=_lines_with_text(LINES, result),
        actions=_lines_with_text(ACTIONS, result),
        details=_lines_with_text(DETAILS, result),
    )


def question(result: StudyResult) -> str:
    """Write what a study was asked: its name, the workload, the target and the devices."""
    parts = [result.workload, result.target, *map(device_text, result.devices)]
    if result.study != result.workload:
        parts.insert(0, f"study {result.study}")
    return " · ".join(part for part in parts if part)


def _lines_with_text(table: "Lines", result: StudyResult) -> tuple[Line, ...]:
    """Give the lines of a table for a result. A line that has no text is left out."""
    lines = list[Line]()
    for label, texts_of in table:
        texts = tuple(with_options_as_called(result, text) for text in texts_of(result) if text)
        if texts:
            lines.append((label, texts))
    return tuple(lines)


def figure_titles(result: StudyResult) -> tuple[str, str]:
    """Give the title of a figure, which is the answer's headline, and the line below it.

    That line says what was asked, without the workload, as the headline begins with it.
    """
    told = answer(result)
    return told.headline, told.title.replace(f"{result.workload} · ", "", 1)


def _headline(result: StudyResult) -> str:
    """Give the answer as one sentence: the batch size to use, and the critical batch size.

    Under the objective loss it has the metric in place of the critical batch size. Without a winner
    it says that the target was not reached.
    """
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
"""A table of lines: the label of each, and the function that gives its texts (None is no text)."""
# The lines of the answer, in the order in which they are read; one without a text is left out.
LINES: Lines = (
    ("USE", use),
    ("GAIN", gain),
    ("AS GOOD", as_good),
    ("DEVICES", devices),
    ("CAUTION", cautions),
)
# The lines that say what to do with the answer.
ACTIONS: Lines = (("NEXT", next_steps), ("MORE", more))
# The tables of the objective loss.
BUDGET_LINES: Lines = (
    ("USE", at_budget.use),
    ("GAIN", at_budget.gain),
    ("AS GOOD", at_budget.as_good),
    ("BUDGET", at_budget.growth),
    ("LEFT", at_budget.gain_left),
    ("CAUTION", at_budget.cautions),
)
BUDGET_ACTIONS: Lines = (("NEXT", at_budget.next_steps),)
BUDGET_DETAILS: Lines = (("TRIALS", trials), ("NOTE", notes))
# The lines that the page alone has.
DETAILS: Lines = (
    ("CRITICAL", critical_lines),
    ("TEST", metrics_on_test_set),
    ("FEWEST", fewest),
    ("FASTEST", fastest),
    ("LR", lr_growth),
    ("TRIALS", trials),
    ("NOTE", notes),
)
