"""An answer as lines of a console, and as those that a notebook shows."""

from collections.abc import Sequence

from bstune.report.answer import Answer, Line
from bstune.system.console import WIDTH, wrapped

# Columns of a label on the console.
INDENT = 10
# The most cautions on the console and in a notebook; the page has all of them.
SHOWN_CAUTIONS = 3


def console_rows(
    study_answer: Answer, further: Sequence[Line] = (), width: int = WIDTH
) -> list[str]:
    """Give an answer as rows of the console, wrapped to ``width`` columns.

    ``further`` are lines that follow it, such as the page's path. They and the commands are not
    wrapped, so that they can be copied.
    """
    rows = [*wrapped(study_answer.title, width), ""]
    shown = shown_lines(study_answer)
    # The lines of the answer come first, then what to do, which may be a command.
    count = len(study_answer.lines)
    for label, texts in shown[:count]:
        rows += labelled_rows(label, texts, width)
    for label, texts in (*shown[count:], *further):
        rows += labelled_rows(label, texts, width=None)
    return rows


def shown_lines(study_answer: Answer) -> list[Line]:
    """Give the lines that the console and a notebook show: the answer, then what to do next.

    Only the first ``SHOWN_CAUTIONS`` cautions are among them. A further text counts the others,
    which the page has.
    """
    shown = list[Line]()
    for label, texts in study_answer.lines:
        if label == "CAUTION" and len(texts) > SHOWN_CAUTIONS:
            not_shown = len(texts) - SHOWN_CAUTIONS
            texts = (*texts[:SHOWN_CAUTIONS], f"{not_shown} more in the page")
        shown.append((label, texts))
    # The line MORE names options that would narrow the answer: it stands in the page alone.
    for label, texts in study_answer.actions:
        if label != "MORE":
            shown.append((label, texts))
    return shown


def labelled_rows(label: str, texts: Sequence[str], width: int | None) -> list[str]:
    """Lay out a line of the answer in rows: the label once, the texts beside and below it.

    ``width``: the columns at which texts are wrapped. None gives each text one row.
    """
    words = list[str]()
    for text in texts:
        if width is None:
            words.append(text)
        else:
            words += wrapped(text, width - INDENT)
    rows = list[str]()
    for row in words:
        # The label stands once, and what follows is indented below it.
        shown_label = "" if rows else label
        rows.append(f"{shown_label:<{INDENT}}{row}")
    return rows
