"""The output of ``bstune compare``: a page, a figure, and lines on the console.

It takes studies' folders or ``curve.json`` files, and writes ``comparison.html`` and
``comparison.png``. Where workloads, targets, references or devices differ, a note says what that
means for the numbers.
"""

import textwrap
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from bstune.core.errors import StudyError
from bstune.report.block import INDENT
from bstune.report.compare import Comparison
from bstune.report.compare_figure import draw_comparison
from bstune.report.compare_page import comparison_page
from bstune.report.compared_pairs import Pair
from bstune.report.compared_study import Compared
from bstune.system.console import WIDTH, plural
from bstune.system.files import check_writable, write_text

PAGE_NAME = "comparison.html"
FIGURE_NAME = "comparison.png"
# Pairs that are printed; all are in the page.
PRINTED_PAIRS = 6


def write_comparison(comparison: Comparison, folder: Path, console: Console) -> None:
    """Write ``comparison.html`` and ``comparison.png`` to a folder, and print the comparison.

    The folder is made if it is not there. StudyError where that fails, or it cannot be written to.
    """
    page = folder / PAGE_NAME
    figure = folder / FIGURE_NAME
    # Both paths are checked before anything is drawn, so that nothing is half-written.
    for path in (page, figure):
        check_writable(path, f"--output {folder}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StudyError(f"--output {folder} cannot be made: {error.strerror}") from error
    draw_comparison(comparison, figure)
    write_text(page, comparison_page(comparison, figure.read_bytes()))
    print_comparison(comparison, console)
    for name, path in (("page", page), ("figure", figure)):
        console.print(Text(f"{name:<{INDENT}}{path}"), soft_wrap=True)


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print each study's rows, how well the law holds, which pairs differ, and the notes."""
    rows = [comparison.title]
    for study in comparison.studies:
        rows += ["", *_study_rows(study)]
    rows.append("")
    # How near the studies' curves lie to one law, once each is scaled by its S_min and B_crit.
    if comparison.collapse is not None:
        rows += _labelled("LAW", [f"S = S_min (1 + B_crit/B): {comparison.collapse}"])
    rows += _labelled("CRITICAL", _pair_lines(comparison.pairs))
    rows += _labelled("NOTE", comparison.notes)
    rows.append("")
    for row in rows:
        console.print(Text(row), soft_wrap=True)


def _study_rows(study: Compared) -> list[str]:
    """Give the rows of a study: what it was asked, its USE, its numbers, and its notes."""
    asked = [study.name, study.target, study.device]
    if study.workload != study.name:
        asked.insert(1, study.workload)
    texts = list[str]()
    if study.use is not None:
        texts.append(f"use {study.use}: {study.use.text}")
    texts.append(
        f"gain {study.gain_text}; critical batch size {study.critical}; "
        f"exponent of the learning rate {study.exponent_text}; spent {study.spend}"
    )
    return [" · ".join(asked), *_labelled("", [*texts, *study.notes])]


def _labelled(label: str, texts: Sequence[str]) -> list[str]:
    """Lay texts out below each other, wrapped, with the label beside the first row.

    Without a text there is no row, and so no label.
    """
    rows = list[str]()
    for text in texts:
        for row in textwrap.wrap(text, WIDTH - INDENT):
            shown_label = "" if rows else label
            rows.append(f"{shown_label:<{INDENT}}{row}")
    return rows


def _pair_lines(pairs: Sequence[Pair]) -> list[str]:
    """Give a line for each of the first ``PRINTED_PAIRS`` pairs, those that differ first.

    A last line counts the pairs that are left out.
    """
    order = {True: 0, False: 1, None: 2}
    by_verdict = sorted(pairs, key=lambda pair: order[pair.differ])
    lines = [str(pair) for pair in by_verdict[:PRINTED_PAIRS]]
    more = len(pairs) - len(lines)
    if more > 0:
        lines.append(f"and {plural(more, 'pair')} more, in {PAGE_NAME}")
    return lines
