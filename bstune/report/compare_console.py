"""What ``bstune compare`` leaves: a page, a figure, and lines on the console."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from bstune.core.errors import StudyError
from bstune.report.answer import INDENT
from bstune.report.compare import Comparison, Pair
from bstune.report.compare_figure import draw_comparison
from bstune.report.compare_page import comparison_page
from bstune.system.console import WIDTH, plural
from bstune.system.files import check_writable, write_text

PAGE, FIGURE = "comparison.html", "comparison.png"
MOST = 6  # pairs that are printed; all are in the page


def write_comparison(found: Comparison, folder: Path, console: Console) -> None:
    """Write ``comparison.html`` and ``comparison.png`` into a folder, which is made, and print what they say."""
    page, figure = folder / PAGE, folder / FIGURE
    for path in (page, figure):
        check_writable(path, f"--output {folder}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StudyError(f"--output {folder} cannot be made: {error.strerror}") from error
    write_text(page, comparison_page(found))
    draw_comparison(found, figure)
    print_comparison(found, console)
    for name, path in (("page", page), ("figure", figure)):
        console.print(Text(f"{name:<{INDENT}}{path}"), soft_wrap=True)


def print_comparison(found: Comparison, console: Console) -> None:
    """Print what each study says, how well the law holds, which critical batch sizes differ, and what to know."""
    lines: list[tuple[str, list[str]]] = [(found.title, [])]
    for one in found.studies:
        asked = [one.target, one.device]
        if one.workload != one.name:
            asked.insert(0, one.workload)
        use = [] if one.use is None else [f"use {one.use}: {one.use.text}"]
        numbers = (
            f"gain {one.gain_text}; critical batch size {one.critical}; "
            f"exponent of the learning rate {one.exponent_text}; spent {one.spend}"
        )
        lines += [("", []), (" · ".join([one.name, *asked]), []), ("", [*use, numbers, *one.notes])]
    law = [] if found.collapse is None else [f"S = S_min (1 + B_crit/B): {found.collapse}"]
    labelled = {"LAW": law, "CRITICAL": _pairs(found.pairs), "NOTE": list(found.notes)}
    lines += [("", []), *((name, texts) for name, texts in labelled.items() if texts), ("", [])]
    for name, texts in lines:
        wrapped = [row for text in texts for row in textwrap.wrap(text, WIDTH - INDENT)]
        for i, row in enumerate(wrapped or [""]):
            console.print(
                Text(f"{name if i == 0 else '':<{INDENT if wrapped else 0}}{row}"), soft_wrap=True
            )


def _pairs(pairs: Sequence[Pair]) -> list[str]:
    """Return the pairs that differ first, at most ``MOST``, and how many there are besides."""
    order = {True: 0, False: 1, None: 2}
    kept = sorted(pairs, key=lambda pair: order[pair.differ])[:MOST]
    more = (
        [f"and {plural(len(pairs) - len(kept), 'pair')} more, in {PAGE}"]
        if len(pairs) > len(kept)
        else []
    )
    return [*map(str, kept), *more]
