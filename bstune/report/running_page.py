"""``report.html`` while its study runs: how far it has come, and the curve so far, but no answer.

    write_text_once(path, running_page(so_far))

The page looks for a newer one by itself, unless the study was left before its end. Its charts are
pictures, so that it costs the study and the browser little. The answer and all charts stand in
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
from bstune.report.page import lines_html, trials_table
from bstune.report.study_folder import StudyFolder
from bstune.system.files import first_bytes

# Seconds between two looks for a newer page, with a script and without one. The script looks ever
# more rarely for the page of a study that was killed; without it nothing does.
REFRESH_SECONDS = 15
NOSCRIPT_SECONDS = 60
# This tag tells the page of a running study from the final one.
RUNNING_PAGE_TAG = '<meta name="bstune" content="a running study">\n'
# The mark stands within so many bytes of a page's beginning.
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
    """How far it has come, and the best trial."""
    curve_heads: Sequence[str]
    """Heads of the columns of ``curve_rows``."""
    curve_rows: Sequence[Sequence[str]]
    """The best trial of each octave of batch sizes, a row each."""
    written: datetime
    """The moment at which the page is written, with a time zone."""
    is_running: bool
    """Whether the study still runs. Else it was left before its end."""


def running_page(so_far: StudySoFar) -> str:
    """Give the page of a study that has not ended, as HTML."""
    study = so_far.study
    # A study that does not run was left before its end.
    heading = f"{question(study.result)} · left"
    scripts = list[str]()
    head = ""
    if so_far.is_running:
        heading = f"{question(study.result)} · running"
        scripts = [resource("running.js")]
        # Where scripts are off, the browser itself loads the page again.
        refresh = f'<meta http-equiv="refresh" content="{NOSCRIPT_SECONDS}">'
        head = f"{RUNNING_PAGE_TAG}<noscript>{refresh}</noscript>\n"
    sections = [
        Section("", _state_html(so_far)),
        Section("The curve so far", _curve_html(so_far)),
        Section("Learning curves", learning_curves(study)),
        Section("Progress of the search", progress(study)),
        Section("Trials", trials_table(study.files.trials)),
    ]
    shown = [section for section in sections if section.body]
    return still_page(heading, shown, scripts, head)


def is_running_page(path: Path) -> bool:
    """Whether a file is the page of a study that runs, or that was killed as it ran.

    False where the file cannot be read.
    """
    return RUNNING_PAGE_TAG.strip().encode() in first_bytes(path, HEAD_BYTES)


def _state_html(so_far: StudySoFar) -> str:
    """Say that there is no answer yet, how far the study has come, and how old the page is."""
    words = NO_ANSWER if so_far.is_running else STUDY_LEFT
    state = paragraph(words, "warning")
    stamp = text(so_far.written.isoformat(timespec="seconds"))
    shown = text(so_far.written.strftime("%Y-%m-%d %H:%M:%S %z"))
    time = f'<time datetime="{stamp}" data-seconds="{REFRESH_SECONDS}">{shown}</time>'
    written = f'<p class="faint">Written at {time}<span id="age"></span>.</p>'
    return f"{state}{lines_html(so_far.lines)}{written}"


def _curve_html(so_far: StudySoFar) -> str:
    """Show charts of the trials over batch size, and a table of the best trial of each octave."""
    if not so_far.curve_rows:
        return ""
    drawn = ""
    # Under the objective loss there are no steps and no time to a target.
    if so_far.study.result.objective != "loss":
        drawn = frontier_charts(so_far.study)
    rows = table(so_far.curve_heads, so_far.curve_rows, sortable=False, name="the curve so far")
    return f"{drawn}{rows}{paragraph(ONE_RUN_EACH, 'faint')}"
