"""Which place of a study's plan a process is to ask a trial for.

A trial index of the search is done once one of its trials has finished; a trial that was cut short
is asked again with the same parameters.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from secrets import randbelow

import optuna
from optuna.trial import FrozenTrial, TrialState

from bstune.search.sampler import RECORD, RESUMED_FROM
from bstune.study.storage.trials import (
    Trials,
    is_asked,
    read,
    record_of,
    spec_of,
    trial_index_of,
    working,
)

# States of the trials that have an index: one that failed leaves it free.
HOLDS_INDEX = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING)
# Times as many continued trials as points.
MAX_CONTINUED = 3
# Tries of one point, if its trials fail by themselves; then the sampler suggests another.
TRIES = 2


def ended_below_limit(trials: Trials) -> set[int]:
    """Find the numbers of the stopped trials that ended below their limit, as where a recorded run ends."""
    numbers = set[int]()
    for trial in read(trials):
        is_pruned = trial.state == TrialState.PRUNED and RECORD in trial.user_attrs
        if not is_pruned or not is_asked(trial):
            continue
        max_steps = spec_of(trial).max_steps
        result = record_of(trial.user_attrs[RECORD])
        if result.status == "stopped" and max_steps is not None and result.steps < max_steps:
            numbers.add(trial.number)
    return numbers


def free_indices(trials: Trials, points: int) -> list[int]:
    """List the indices, in rising order, that no trial has finished or runs at, of a search of so many ``points``.

    An index at which a stopped trial is continued does not count, up to ``MAX_CONTINUED`` of them a
    point: a search whose target nothing reaches could else go on for ever with the points that it
    has.
    """
    taken = set[int | None]()
    continued: dict[int | None, bool] = {}
    for trial in read(trials):
        trial_index = trial_index_of(trial)
        if trial.state in HOLDS_INDEX:
            taken.add(trial_index)
        # The last one asked at an index says what the index is.
        if is_asked(trial):
            continued[trial_index] = RESUMED_FROM in trial.user_attrs
    count = points + min(sum(continued.values()), MAX_CONTINUED * points)
    return [trial_index for trial_index in range(count) if trial_index not in taken]


@dataclass(frozen=True)
class Turn:
    """An index for which this process is to ask a trial."""

    trial_index: int
    worker: str
    """The id of this process's lease."""
    trials: Sequence[FrozenTrial]
    """Those of the study, as they were read when the index was free."""


def turn_at(study: optuna.Study, trial_index: int, worker: str = "") -> Turn:
    """Read the study's trials for a trial at an index, whether or not it is free."""
    return Turn(trial_index, worker, read(study))


def free_turn(
    trials: Trials, points: int, worker: str = "", other_processes: int = 0
) -> Turn | None:
    """Choose a free index of a search of so many ``points``; None if there is none.

    It is the first one if this process is alone. Processes that look at once find the same indices
    free: each takes any of as many as there are processes.
    """
    latest = read(trials)
    free = free_indices(latest, points)
    if not free:
        return None
    others = max(other_processes, len(working(latest) - {worker}))
    # Not of the study's generator: each process has to choose by itself.
    place = randbelow(min(others + 1, len(free)))
    return Turn(free[place], worker, latest)


def failed_at(trials: Trials, trial_index: int) -> list[FrozenTrial]:
    """Find the failed trials of an index, without those that were dropped."""
    return [
        trial
        for trial in read(trials)
        if trial.state == TrialState.FAIL
        and is_asked(trial)
        and trial_index_of(trial) == trial_index
    ]


def count_failures(failed: Sequence[FrozenTrial]) -> int:
    """Count the trials that failed by themselves: one that was cut short has no record."""
    return sum(RECORD in trial.user_attrs for trial in failed)


def attempt(turn: Turn) -> int:
    """Count the points that were given up at its index, because each of their trials failed by itself."""
    return count_failures(failed_at(turn.trials, turn.trial_index)) // TRIES
