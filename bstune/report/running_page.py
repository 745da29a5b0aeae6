"""``report.html`` while its study runs: how far it has come, the best trial and the curve so far, and no answer.

    write_text_once(path, running_page(so_far))

The page looks for a newer one by itself; that of a study which was left does not. Its charts are
pictures, so that a look costs the study and the browser little. The answer and all charts stand in
:mod:`bstune.report.page`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from bstune.report.answer import Line, question
from bstune.report.charts.frontier import frontier_charts
from bstune.report.charts.learning_curves import learning_curves
from bstune.report.charts.progress import progress
from bstune.report.html import Section, paragraph, resource, still_page, table, text
from bstune.report.page import labelled, trials_table
from bstune.report.study_folder import StudyFolder
from bstune.system.files import first_bytes

# Between two looks for a newer page.
REFRESH_SECONDS = 15
# The same where no script runs, and nothing makes looks rarer.
NOSCRIPT_SECONDS = 60
MARK = '<meta name="bstune" content="a running study">\n'
# Of a page's beginning, within which the mark stands.
HEAD_BYTES = 1024
NO_ANSWER = "This study is running. What to use, and how sure that is, is said at its end."
STUDY_LEFT = "This study was left before its end: the command that began it goes on with it."
ONE_RUN_EACH = "Each is one run: a fresh seed may differ."


@dataclass(frozen=True)
class StudySoFar:
    """A study that has not ended."""

    study: StudyFolder
    """Its trials, and a result without an answer."""
    lines: Sequence[Line]
    """How far it has come, and the best trial: labels with their texts."""
    curve_heads: Sequence[str]
    curve_rows: Sequence[Sequence[str]]
    """The best of each octave of batch sizes, as it was measured."""
    written: datetime
    """When, with a time zone."""
    is_running: bool
    """Whether it runs on; else it was left."""


def running_page(so_far: StudySoFar) -> str:
    """Give the page as HTML."""
    study = so_far.study
    heading = f"{question(study.result)} · left"
    scripts = list[str]()
    head = ""
    if so_far.is_running:
        heading = f"{question(study.result)} · running"
        scripts = [resource("running.js")]
        refresh = f'<meta http-equiv="refresh" content="{NOSCRIPT_SECONDS}">'
        head = f"{MARK}<noscript>{refresh}</noscript>\n"
    sections = [
        Section("", _state(so_far)),
        Section("The curve so far", _curve(so_far)),
        Section("Learning curves", learning_curves(study)),
        Section("Progress of the search", progress(study)),
        Section("Trials", trials_table(study.files.trials)),
    ]
    shown = [section for section in sections if section.body]
    return still_page(heading, shown, scripts, head)


def is_running_page(path: Path) -> bool:
    """Say whether a file is the page of a study that runs, or was killed.

    False where it cannot be read.
    """
    return MARK.strip().encode() in first_bytes(path, HEAD_BYTES)


def _state(so_far: StudySoFar) -> str:
    """Show that there is no answer yet, how far the study has come, and when that was."""
    words = NO_ANSWER if so_far.is_running else STUDY_LEFT
    state = paragraph(words, "warning")
    stamp = text(so_far.written.isoformat(timespec="seconds"))
    shown = text(so_far.written.strftime("%Y-%m-%d %H:%M:%S %z"))
    time = f'<time datetime="{stamp}" data-seconds="{REFRESH_SECONDS}">{shown}</time>'
    written = f'<p class="faint">Written at {time}<span id="age"></span>.</p>'
    return f"{state}{labelled(so_far.lines)}{written}"


def _curve(so_far: StudySoFar) -> str:
    """Show the trials over batch size, and the best of each octave of it."""
    if not so_far.curve_rows:
        return ""
    drawn = ""
    if so_far.study.result.objective != "loss":
        drawn = frontier_charts(so_far.study)
    rows = table(so_far.curve_heads, so_far.curve_rows, sortable=False, name="the curve so far")
    return f"{drawn}{rows}{paragraph(ONE_RUN_EACH, 'faint')}"
