"""USE, the winner and its time to the target, and TEST, its metrics on the test set."""

from collections.abc import Iterator

from bstune.report.lines.unreached import closest_texts
from bstune.report.words import expected_text, winner_text
from bstune.result import StudyResult
from bstune.system.console import format_number


def use(result: StudyResult) -> Iterator[str | None]:
    """Give the winner with its time and steps to the target. Without one, the closest point.

    A text that is None is left out.
    """
    winner = result.winner
    if winner is None:
        yield from closest_texts(result)
        return
    yield f"{winner_text(winner, result.tokens)}: {expected_text(winner)}"
    yield overridden_text(result, winner.lr)


def overridden_text(result: StudyResult, lr: float) -> str | None:
    """Say where to write the learning rate, if bstune set it in the optimizer. Else None."""
    if not result.overrides_lr:
        return None
    return (
        "the rate was set in the optimizer (override_lr), the largest of its groups and all others "
        f"in proportion: write {format_number(lr)} in configure_optimizers"
    )


def metrics_on_test_set(result: StudyResult) -> Iterator[str]:
    """Give the metrics of the winner to use on the test set."""
    if result.use is None:
        return
    metrics = result.test.get(result.use, {})
    values = [f"{name} {format_number(value)}" for name, value in metrics.items()]
    if values:
        yield f"{', '.join(values)} of one run, on data that took no part in the choice"
