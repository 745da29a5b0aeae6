"""Between which steps a trial is evaluated densely: where it is expected to meet the target."""

import math
from collections.abc import Sequence

from optuna.trial import FrozenTrial

from bstune.core.records import TrialResult
from bstune.study.storage.trials import results

# A run on a fresh seed is evaluated densely between these shares of the steps of the trial that it
# repeats, or of those predicted.
DENSE_FROM = 0.5
DENSE_UNTIL = 1.6
# It is from this share on where that trial met the target at its first evaluation: it may have met
# it much earlier.
DENSE_FROM_UNTOLD = 0.1


def dense_search_steps(trials: Sequence[FrozenTrial], batch_size: int) -> tuple[int, int] | None:
    """Give the steps between which a trial of the search is evaluated densely.

    It is None unless some trial met the target at its first evaluation, so that it is not known
    when it did. Of those trials the one nearest in batch size counts: the new one is expected to
    take as many steps as it, or as many examples.
    """
    untold = [trial for trial in results(trials) if trial.reached and trial.steps_low == 0]
    if not untold:
        return None
    nearest = min(untold, key=lambda trial: abs(math.log(trial.batch_size / batch_size)))
    as_many_examples = nearest.steps * nearest.batch_size / batch_size
    earliest = DENSE_FROM_UNTOLD * min(nearest.steps, as_many_examples)
    return max(1, math.floor(earliest)), math.ceil(max(nearest.steps, as_many_examples))


def dense_steps_of(original: TrialResult, predicted: float) -> tuple[int, int]:
    """Give the steps between which a run on a fresh seed is evaluated densely.

    Args:
        original: the trial that it repeats.
        predicted: steps that a fresh seed is predicted to take.
    """
    earliest = min(float(original.steps), predicted) * DENSE_FROM
    # A first evaluation that met the target says only that it was met before.
    if original.steps_low == 0:
        earliest = original.steps * DENSE_FROM_UNTOLD
    latest = max(float(original.steps), predicted) * DENSE_UNTIL
    return max(1, math.floor(earliest)), math.ceil(latest)
