"""The HTML that a notebook shows for a cell's last value: an answer's lines and its picture.

Every text is filtered and escaped: a folder's names and notes may come from anybody.
"""

import base64
import html
import io
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from bstune.report.answer import Answer, Line
from bstune.report.block import shown_lines
from bstune.report.compare import Comparison
from bstune.system.terminal import printable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from bstune.report.picture import Picture

PRINTED_COLUMNS = 100
# Pairs of studies that a cell shows; the page of a comparison has all of them.
SHOWN_PAIRS = 6
# A notebook centres tables and aligns their cells to the right.
TABLE_BEGINS = "<table style='margin-left:0'>"
CELL = "style='text-align:left;vertical-align:top'"


def escaped(text: str) -> str:
    """Write a text as HTML: its markup escaped, without secrets and control characters."""
    return html.escape(printable(text))


def answer_html(study_answer: Answer, picture: "Picture", alt: str) -> str:
    """Show an answer: what was asked, a row for each line of it, and its picture.

    ``alt`` says what the picture shows, for those who do not see it.
    """
    rows = "".join(_answer_row(line) for line in shown_lines(study_answer))
    return f"<p>{escaped(study_answer.title)}</p>{TABLE_BEGINS}{rows}</table>{image(picture, alt)}"


def _answer_row(line: Line) -> str:
    """Show a line of the answer as a row of a table: its label, and its texts below each other."""
    label, texts = line
    shown = "<br>".join(map(escaped, texts))
    return f"<tr><th {CELL}>{escaped(label)}</th><td {CELL}>{shown}</td></tr>"


def comparison_html(comparison: Comparison) -> str:
    """Show what each study says to use, the pairs, the notes, and the picture."""
    heads = ("study", "target", "use", "takes", "gain", "critical batch size", "spent")
    rows = list[tuple[str, ...]]()
    for study in comparison.studies:
        use = "-"
        takes = "-"
        if study.use is not None:
            use = str(study.use)
            takes = study.use.text
        cells = (study.name, study.target, use, takes, study.gain_text, study.critical, study.spend)
        rows.append(cells)
    further = [*map(str, comparison.pairs[:SHOWN_PAIRS]), *comparison.notes]
    lines = "".join(f"<p>{escaped(line)}</p>" for line in further)
    return f"{table_html(heads, rows)}{lines}{image(comparison.plot(), comparison.title)}"


def table_html(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Show rows of texts as a table, below the heads of its columns."""
    top = "".join(f"<th {CELL}>{escaped(head)}</th>" for head in heads)
    lines = list[str]()
    for row in rows:
        cells = "".join(f"<td {CELL}>{escaped(text)}</td>" for text in row)
        lines.append(f"<tr>{cells}</tr>")
    return f"{TABLE_BEGINS}<tr>{top}</tr>{''.join(lines)}</table>"


def printed_html(*printed: "RenderableType") -> str:
    """Show what rich would print on a console, as text of a fixed width."""
    # Its import takes a tenth of a second, which opening a result need not wait for.
    from rich.console import Console

    file = io.StringIO()
    # In a notebook rich displays what it prints, and a kernel asks for colours. Here it must write
    # text alone.
    console = Console(
        file=file,
        width=PRINTED_COLUMNS,
        force_jupyter=False,
        force_terminal=False,
        color_system=None,
    )
    console.print(*printed, markup=False, emoji=False, highlight=False)
    return f"<pre>{escaped(file.getvalue())}</pre>"


def image(picture: "Picture", alt: str) -> str:
    """Show a picture, at most as wide as the cell. ``alt`` says what it shows."""
    data = base64.b64encode(picture._repr_png_()).decode()
    return f"<img style='max-width:100%' alt='{escaped(alt)}' src='data:image/png;base64,{data}'>"
