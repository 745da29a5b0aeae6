"""What ``bstune compare`` leaves: a page, a figure, and lines on the console."""

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bstune.core.console import format_seconds, plural
from bstune.core.errors import StudyError
from bstune.core.files import check_writable, write_text
from bstune.report.compare import Comparison, Pair
from bstune.report.compare_figure import draw_comparison
from bstune.report.compare_page import comparison_page

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
        console.print(Text(f"{name:<10}{path}"), soft_wrap=True)


def print_comparison(found: Comparison, console: Console) -> None:
    """Print a row for each study, how well the law holds, which critical batch sizes differ, and what to know."""
    console.print(Text(found.title), soft_wrap=True)
    console.print(_table(found))
    notes = [*found.notes, *(f"{study.name}: {note}" for study in found.studies for note in study.notes)]
    lines = {
        "LAW": [] if found.collapse is None else [f"S = S_min (1 + B_crit/B): {found.collapse}"],
        "B_CRIT": _pairs(found.pairs),
        "NOTE": notes,
    }
    for name, texts in lines.items():
        for i, text in enumerate(texts):
            console.print(Text(f"{name if i == 0 else '':<10}{text}"), soft_wrap=True)
    console.print()


def _table(found: Comparison) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("study", "target", "device", "use", "time to target", "B_crit", "lr as B^", "spent"):
        table.add_column(name, overflow="fold")
    for study in found.studies:
        use = study.use
        time = "-" if use is None else format_seconds(use.seconds)
        few = "" if use is None or use.reliable else f" ({use.reached} of {use.runs})"
        words = (study.name, study.target, study.device, str(use or "-"), time + few)
        table.add_row(*map(Text, (*words, study.critical, study.exponent_text, study.spend)))
    return table


def _pairs(pairs: Sequence[Pair]) -> list[str]:
    """Return the pairs that differ first, at most ``MOST``, and how many there are besides."""
    order = {True: 0, False: 1, None: 2}
    kept = sorted(pairs, key=lambda pair: order[pair.differ])[:MOST]
    more = [f"and {plural(len(pairs) - len(kept), 'pair')} more, in {PAGE}"] if len(pairs) > len(kept) else []
    return [*map(str, kept), *more]
