"""What a study prints at its end: its answer, and where its results are."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from bstune.report.answer import Answer, Line
from bstune.report.block import INDENT, console_rows, labelled_rows
from bstune.system.console import line_width
from bstune.system.files import Output


def show(study_answer: Answer, console: Console, further: Sequence[Line] = ()) -> None:
    """Print the answer, with labels in bold on a terminal.

    ``further``: lines that follow it.
    """
    rows = ["", *console_rows(study_answer, further, line_width(console))]
    if not console.encoding.lower().startswith("utf"):
        # The dots between the title's parts would become question marks.
        rows = [row.replace("·", "-") for row in rows]
    lines = [Text(row) for row in rows]
    # The title, between the first two empty rows, has no label.
    first_labelled = rows.index("", 1)
    for line in lines[first_labelled:]:
        style = "bold red" if line.plain.startswith("CAUTION") else "bold"
        is_labelled = bool(line.plain[:1].strip())
        if is_labelled:
            line.stylize(style, 0, INDENT)
    console.print(Text("\n").join(lines), soft_wrap=True)


def show_places(places: Sequence[Line], missing: Sequence[str], console: Console) -> None:
    """Print where the results are, then a note for each part that is missing."""
    lines = list(places)
    for note in missing:
        lines.append(("NOTE", (note,)))
    rows = list[Text]()
    for label, texts in lines:
        for line in labelled_rows(label, texts, width=None):
            row = Text(line)
            row.stylize("bold", 0, INDENT)
            rows.append(row)
    console.print(Text("\n").join(rows), soft_wrap=True)


def places(files: Output, tracked: Line | None) -> list[Line]:
    """List where the results are, as labelled lines.

    They are the page, or the folder without one; the command that compares the studies beside this
    one, if there are any; and the tracker's page.

    ``tracked``: the tracker's name and the lines that open its page, which may be none; None
    without a tracker.
    """
    page = files.report if files.report.exists() else files.root
    lines: list[Line] = [("page", (short_path(page),))]
    beside = files.root.parent
    studies = sorted(path.parent for path in beside.glob("*/curve.json"))
    # With no other study beside this one there is nothing to compare.
    if any(folder != files.root for folder in studies):
        folders = f"{short_path(beside)}/*"
        # The working directory has much else.
        if from_here(beside) == Path():
            folders = " ".join(map(short_path, studies))
        lines.append(("compare", (f"bstune compare {folders}",)))
    if tracked is not None and tracked[1]:
        lines.append(tracked)
    return lines


def short_path(path: Path) -> str:
    """Write a path as it can be typed in a shell in the working directory."""
    return shlex.quote(str(from_here(path)))


def from_here(path: Path) -> Path:
    """Give a path as seen from the working directory, if it lies in that."""
    here = Path.cwd()
    if path.is_relative_to(here):
        return path.relative_to(here)
    return path
