"""The page ``comparison.html``: the figure ``comparison.png``, and tables of what it shows."""

from collections.abc import Sequence

from bstune.report.compare import Comparison
from bstune.report.compared_pairs import Pair
from bstune.report.compared_study import Compared, Use
from bstune.report.html import Cell, Section, page, paragraph, picture, table
from bstune.report.one_law import Collapse
from bstune.system.console import format_count, format_number, format_seconds

ALT = (
    "Steps to target over batch size, the same as S/S_min over B/B_crit, and each study's critical "
    "batch size and time to target. The tables have the numbers."
)
CAPTION = (
    "Lines: S*(B) by all of a study's trials. Dots: single runs, above the lines where their "
    "learning rate was not the best. Hollow time to target: a fresh seed missed the target, or "
    "none ran."
)


def comparison_page(comparison: Comparison, figure: bytes) -> str:
    """Make the page of a comparison, as HTML. ``figure``: the content of ``comparison.png``."""
    studies = comparison.studies
    notes = list(comparison.notes)
    for study in studies:
        notes += [f"{study.name}: {note}" for note in study.notes]
    sections = [
        Section("", "\n".join(paragraph(line, "warning") for line in notes)),
        Section("Studies", _studies_table(studies)),
        Section("Curves, critical batch sizes and times", picture(figure, ALT, CAPTION)),
    ]
    if comparison.collapse is not None:
        sections.append(Section("Does one law fit all?", _law_text(comparison.collapse)))
    if comparison.pairs:
        judged = paragraph(comparison.judged, "faint")
        pairs = _pairs_table(comparison.pairs)
        sections.append(Section("Which critical batch sizes differ?", pairs + judged))
    return page(comparison.title, sections)


def _law_text(collapse: Collapse) -> str:
    """Say how near the studies' curves lie to one law, each scaled by its S_min and B_crit."""
    law = "If S(B) = S_min (1 + B_crit/B) holds, then the curves of all studies are one."
    # Written out, the collapse says at what share of the batch sizes the intervals hold the law.
    against = f"Well below {collapse.level:.0%}, the trials speak against the law."
    return paragraph(f"{law} {collapse}. {against}")


def _studies_table(studies: Sequence[Compared]) -> str:
    """Show the studies as a table: what each says to use, its time and gain, and what it found."""
    names = list[str]()
    for study in studies:
        if study.use is not None:
            names += study.use.hyperparameters
    # Studies may search the same hyper-parameters: each is one column, in the order they come in.
    names = list(dict.fromkeys(names))
    heads = ["study", "batch size", "learning rate", *names, "time to target", "gain"]
    heads += ["critical batch size", "exponent of lr*(B)", "fresh seeds"]
    heads += ["workload", "target", "device", "spent"]
    rows = list[list[Cell | str]]()
    for study in studies:
        fresh = "-"
        if study.use is not None:
            fresh = study.use.fresh_seeds_text
        rows.append(
            [
                study.name,
                *_use_cells(study.use, names),
                Cell(study.gain_text, study.gain),
                Cell(study.critical, study.b_crit),
                Cell(study.exponent_text, study.exponent),
                fresh,
                study.workload,
                study.target,
                study.device,
                Cell(study.spend, study.spend_seconds),
            ]
        )
    return table(heads, rows, name="studies", wrapped=True)


def _use_cells(use: Use | None, names: Sequence[str]) -> list[Cell]:
    """Give the cells of a row that show a study's USE: its hyper-parameters and time to target.

    ``names`` are the further hyper-parameters that any of the studies searches. Where ``use`` is
    None, each cell is a dash.
    """
    # Batch size, learning rate and time stand beside the further hyper-parameters.
    if use is None:
        return [Cell("-", None)] * (3 + len(names))
    cells = [
        Cell(format_count(use.batch_size), use.batch_size),
        Cell(format_number(use.lr), use.lr),
    ]
    for name in names:
        value = use.hyperparameters.get(name)
        cells.append(Cell(format_number(value), value))
    cells.append(Cell(format_seconds(use.seconds), use.seconds))
    return cells


def _pairs_table(compared_pairs: Sequence[Pair]) -> str:
    """Show the ratio of the critical batch sizes of each two studies, and whether they differ."""
    heads = ("larger", "smaller", "B_crit over B_crit", "its interval", "judged", "not alike in")
    cells = list[list[Cell | str]]()
    for pair in compared_pairs:
        ratio = Cell(format_number(pair.ratio, 2), pair.ratio)
        unlike = ", ".join(pair.unlike) or "-"
        cells.append([pair.larger, pair.smaller, ratio, pair.interval, pair.verdict, unlike])
    return table(heads, cells, name="pairs of critical batch sizes", wrapped=True)
