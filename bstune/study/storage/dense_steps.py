"""Between which steps a trial is evaluated densely: where it is expected to meet the target."""

import math
from collections.abc import Sequence

from optuna.trial import FrozenTrial

from bstune.core.records import TrialResult
from bstune.study.storage.trials import results

# Of the steps of the trial that a replicate repeats, or that are predicted: between which it is
# evaluated densely.
DENSE_FROM = 0.5
DENSE_UNTIL = 1.6
# And where that trial met the target at its first evaluation, so that it tells no step before.
DENSE_FROM_UNTOLD = 0.1


def first_looks(trials: Sequence[FrozenTrial], batch_size: int) -> tuple[int, int] | None:
    """Give the steps between which a trial is looked at early.

    None where no trial met the target at its first look.

    When such a trial met it is not known. Another one is expected to take as many steps as the
    nearest in batch size did, or as many examples.
    """
    untold = [trial for trial in results(trials) if trial.reached and trial.steps_low == 0]
    if not untold:
        return None
    nearest = min(untold, key=lambda trial: abs(math.log(trial.batch_size / batch_size)))
    as_many_examples = nearest.steps * nearest.batch_size / batch_size
    earliest = DENSE_FROM_UNTOLD * min(nearest.steps, as_many_examples)
    return max(1, math.floor(earliest)), math.ceil(max(nearest.steps, as_many_examples))


def dense_steps_of(original: TrialResult, predicted: float) -> tuple[int, int]:
    """Give the steps between which a fresh seed is expected to meet the target."""
    earliest = min(float(original.steps), predicted) * DENSE_FROM
    # A first evaluation that met the target says only that it was met before.
    if original.steps_low == 0:
        earliest = original.steps * DENSE_FROM_UNTOLD
    latest = max(float(original.steps), predicted) * DENSE_UNTIL
    return max(1, math.floor(earliest)), math.ceil(latest)
