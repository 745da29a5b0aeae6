"""Several studies side by side: which studies they are, and how they differ."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bstune.core.errors import StudyError
from bstune.report.compared_pairs import RATIO_LEVEL, Pair, compared_pairs
from bstune.report.compared_study import Compared, compared_study
from bstune.report.one_law import Collapse, collapse
from bstune.report.study_folder import StudyFolder, each_study, read_study
from bstune.system.console import format_count, plural

if TYPE_CHECKING:
    from bstune.report.picture import Picture


@dataclass(frozen=True, repr=False)
class Comparison:
    """Several studies side by side, and which of their critical batch sizes differ."""

    studies: tuple[Compared, ...]
    """The studies, at least one."""
    collapse: Collapse | None
    """How well one law fits all of them; None where no study has a critical batch size."""
    pairs: tuple[Pair, ...]
    """Each two studies, in the order of ``studies``."""
    notes: tuple[str, ...]
    """Sentences that say how the studies differ, and which ones were left out."""

    def plot(self) -> "Picture":
        """Draw ``comparison.png`` as a figure that a notebook shows as a cell's value."""
        # That module imports this one. Only what draws needs it.
        from bstune.report.compare_figure import comparison_figure

        return comparison_figure(self)

    def _repr_html_(self) -> str:
        """Give what a notebook shows: a row for each study, the pairs, the notes, the picture."""
        # That module imports this one, too.
        from bstune.report.notebook import comparison_html

        return comparison_html(self)

    def __repr__(self) -> str:
        return f"Comparison({self.title})"

    @property
    def title(self) -> str:
        """How many studies there are, and of how many workloads, targets and devices."""
        count = len(self.studies)
        studies = f"{count} studies"
        if count == 1:
            studies = "1 study"
        workloads = {study.workload for study in self.studies}
        targets = {study.target for study in self.studies}
        devices = _known_devices(self.studies)
        parts = [
            studies,
            plural(len(workloads), "workload"),
            plural(len(targets), "target"),
            plural(len(devices), "device"),
        ]
        return " · ".join(parts)

    @property
    def judged(self) -> str:
        """The rule by which pairs were judged to differ or not, in words."""
        interval = f"the {RATIO_LEVEL:.0%} interval of their ratio"
        if len(self.pairs) > 1:
            interval += f", of all {len(self.pairs)} pairs together (Bonferroni),"
        return (
            f"Two critical batch sizes differ where {interval} leaves out 1: studies are "
            "independent, and log B_crit is normal on either side of its median, as wide as its "
            "interval says. Where an interval is open, two differ if the intervals do not overlap."
        )


def compare(studies: Sequence[Compared], left_out: Sequence[str] = ()) -> Comparison:
    """Compare studies: how well one law fits them, and which critical batch sizes differ.

    ``left_out`` are lines on studies that could not be read, which become notes. Where no study is
    left, these lines are the text of a StudyError.
    """
    if not studies:
        raise StudyError("\n".join(["there is no study to compare", *left_out]))
    named = _with_unique_names(studies)
    return Comparison(
        studies=tuple(named),
        collapse=collapse(named),
        pairs=tuple(compared_pairs(named)),
        notes=(*_differences(named), *left_out),
    )


def read_studies(
    paths: Sequence[str], read: Callable[[str], StudyFolder] = read_study
) -> tuple[list[Compared], list[str]]:
    """Read the studies in folders or ``curve.json`` files.

    Args:
        paths: folders and files. One that is given twice counts once.
        read: gives the study of a path, as it ended or at another target.

    Returns:
        The studies, and a line for each path that holds none.

    Raises:
        StudyError: for a path that is not there, as its name may be mistyped.
    """
    left_out = list[str]()
    studies = [
        compared_study(study.result, path) for path, study in each_study(paths, left_out, read)
    ]
    return studies, left_out


def _with_unique_names(studies: Sequence[Compared]) -> list[Compared]:
    """Give the studies under names of their own.

    Studies that share a name get the folder that they were read from behind it.
    """
    # A comparison's lines tell the studies apart by their names alone.
    count = Counter(study.name for study in studies)
    named = list[Compared]()
    for study in studies:
        if count[study.name] == 1:
            named.append(study)
        else:
            named.append(replace(study, name=f"{study.name} ({study.source})"))
    return named


def _known_devices(studies: Sequence[Compared]) -> set[tuple[str, ...]]:
    """Collect the devices that trained the studies, by their names.

    A study that has trained nothing has no other device, and threads make none.
    """
    return {study.device_names for study in studies if study.device_names}


def _differences(studies: Sequence[Compared]) -> list[str]:
    """Give a sentence for each way in which the studies differ, and what that means for numbers."""
    lines = list[str]()
    workloads = sorted({study.workload for study in studies})
    targets = {study.target for study in studies}
    # The reference is the pair of batch size and learning rate that gains are over.
    references = {study.reference for study in studies}
    tokens = sorted({study.tokens for study in studies if study.tokens is not None})
    if len(workloads) > 1:
        lines.append(
            f"the workloads differ ({', '.join(workloads)}): what is compared are critical batch "
            "sizes, in examples of a step; seconds, steps and gains are each workload's own, and "
            "rank none of them"
        )
        if len(targets) > 1:
            lines.append("the targets differ: each stands beside its study")
    elif len(targets) > 1:
        lines.append(
            "the targets differ: each stands beside its study, and a critical batch size may be "
            "larger for its harder target alone"
        )
    if len(tokens) > 1:
        counts = ", ".join(map(format_count, tokens))
        lines.append(
            f"an example has not the same number of tokens in all studies ({counts}): critical "
            "batch sizes are compared in examples, and their ratio in tokens is another one"
        )
    if len(references) > 1 and len(workloads) == 1:
        lines.append("the references differ: each gain is over its own study's")
    devices = _known_devices(studies)
    threads = sorted({study.threads for study in studies if study.threads is not None})
    if len(devices) > 1:
        lines.append(
            "the devices differ: seconds are each device's own, steps and B_crit do not depend on "
            "it"
        )
    elif len(threads) > 1:
        counts = ", ".join(map(str, threads))
        lines.append(
            f"the threads differ ({counts}): seconds are of each study's own number, steps and "
            "B_crit do not depend on it"
        )
    return lines
