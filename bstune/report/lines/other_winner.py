"""FEWEST and FASTEST: the winner by the other merit than the study's."""

from collections.abc import Iterator

from bstune.core.records import Merit
from bstune.report.words import fresh_text, winner_text
from bstune.result import StudyResult, WinnerResult
from bstune.system.console import format_seconds, plural


def fewest(result: StudyResult) -> Iterator[str]:
    """Name the point with the fewest steps, where USE has the least time and takes more steps.

    Its steps are left out where they are not known.
    """
    winner = result.other_winner
    use_is_by_steps = result.use == "best_by_steps"
    if winner is None or use_is_by_steps or not _is_less(result, "steps"):
        return
    value: str | None = None
    if winner.steps is not None:
        value = plural(round(winner.steps), "step")
    yield _other_text(winner, value)


def fastest(result: StudyResult) -> Iterator[str]:
    """Name the point with the least time, where USE has the fewest steps and takes more time.

    Its seconds are left out where steps were not timed.
    """
    winner = result.other_winner
    use_is_by_steps = result.use == "best_by_steps"
    if winner is None or not use_is_by_steps or not _is_less(result, "time"):
        return
    value: str | None = None
    if winner.time_to_target is not None:
        value = format_seconds(winner.time_to_target)
    yield _other_text(winner, value)


def _is_less(result: StudyResult, merit: Merit) -> bool:
    """Whether the other winner takes less than the one to use, by a merit.

    Where one of the two is not known it counts as less, so that it is shown.
    """
    if result.winner is None or result.other_winner is None:
        return False
    of_use = result.winner.expected(merit)
    of_other = result.other_winner.expected(merit)
    return of_other is None or of_use is None or of_other < of_use


def _other_text(winner: WinnerResult, value: str | None) -> str:
    """Write ``46 steps at batch size 660, learning rate 1.34 (3 of 3 fresh seeds)``.

    ``value``: its steps or time in words; None where they are not known.
    """
    how = "predicted"
    if winner.confirmed is not None:
        how = fresh_text(winner.confirmed)
    if value is None:
        return f"{winner_text(winner)} ({how})"
    return f"{value} at {winner_text(winner)} ({how})"
