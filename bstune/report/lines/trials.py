"""TRIALS, how they ended, and NOTE, further facts beside the answer."""

from collections.abc import Iterator

from bstune.core.records import LIGHTNINGS_LOOP
from bstune.report.words import trials_text
from bstune.result import StudyResult
from bstune.system.console import format_count

# The name of a loop whose steps were to be captured as a graph, and were not, begins so.
LOOP_NOT_CAPTURED = "lean, not graph: "


def counts_text(result: StudyResult) -> str:
    """Write how trials ended: ``37 reached, 26 stopped, 4 diverged``."""
    counts = list[str]()
    for status, count in result.statuses.items():
        if count:
            counts.append(f"{format_count(count)} {status}")
    return ", ".join(counts)


def trials(result: StudyResult) -> Iterator[str]:
    """Tell how the trials ended, and what ended the search."""
    counts = counts_text(result)
    if counts:
        counts = f"{trials_text(result)}: {counts}"
    texts = (counts, result.stop_reason)
    yield "; ".join(text for text in texts if text)


def notes(result: StudyResult) -> Iterator[str]:
    """Give the result's notes, and why steps were not taken by the loop that is asked for."""
    yield from result.notes
    for name in result.training_loops:
        # Where the option itself asks for Lightning's loop there is nothing to explain.
        if name.startswith(LIGHTNINGS_LOOP) and "protocol.fast" not in name:
            why = name.removeprefix(LIGHTNINGS_LOOP)
            yield f"Lightning's own loop took the steps, not the lean one: {why}"
        elif name.startswith(LOOP_NOT_CAPTURED):
            yield f"steps were not captured as a CUDA graph: {name.removeprefix(LOOP_NOT_CAPTURED)}"
