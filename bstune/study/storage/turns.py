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

TAKEN = (
    TrialState.COMPLETE,
    TrialState.PRUNED,
    TrialState.RUNNING,
)  # states of the trials that have an index
MAX_CONTINUED = 3  # times as many continued trials as points
TRIES = 2  # of one point, if its trials fail by themselves; then the sampler suggests another


def ended_below_limit(trials: Trials) -> set[int]:
    """Return the numbers of the stopped trials that ended below their limit, as where a recorded run ends."""
    numbers = set()
    for trial in read(trials):
        if trial.state == TrialState.PRUNED and RECORD in trial.user_attrs and is_asked(trial):
            max_steps, result = spec_of(trial).max_steps, record_of(trial.user_attrs[RECORD])
            if result.status == "stopped" and max_steps is not None and result.steps < max_steps:
                numbers.add(trial.number)
    return numbers


def free_indices(trials: Trials, points: int) -> list[int]:
    """Return the indices, in rising order, that no trial has finished or runs at, of a search of so many ``points``.

    An index at which a stopped trial is continued does not count, up to ``MAX_CONTINUED`` of them a point: a search
    whose target nothing reaches could else go on for ever with the points that it has.
    """
    taken = set[int | None]()
    continued: dict[int | None, bool] = {}
    for trial in read(trials):
        trial_index = trial_index_of(trial)
        if trial.state in TAKEN:
            taken.add(trial_index)
        if is_asked(trial):  # the last one asked at an index says what the index is
            continued[trial_index] = RESUMED_FROM in trial.user_attrs
    count = points + min(sum(continued.values()), MAX_CONTINUED * points)
    return [trial_index for trial_index in range(count) if trial_index not in taken]


@dataclass(frozen=True)
class Turn:
    """An index for which this process is to ask a trial."""

    trial_index: int
    worker: str  # the id of this process's lease
    trials: Sequence[FrozenTrial]  # of the study, as they were read when the index was free


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
    found = read(trials)
    free = free_indices(found, points)
    if not free:
        return None
    others = max(other_processes, len(working(found) - {worker}))
    return Turn(free[randbelow(min(others + 1, len(free)))], worker, found)


def failed_at(trials: Trials, trial_index: int) -> list[FrozenTrial]:
    """Return the failed trials of an index, without those that were dropped."""
    failed = (trial for trial in read(trials) if trial.state == TrialState.FAIL)
    return [trial for trial in failed if is_asked(trial) and trial_index_of(trial) == trial_index]


def count_failures(failed: Sequence[FrozenTrial]) -> int:
    """Return how many trials failed by themselves: one that was cut short has no record."""
    return sum(RECORD in trial.user_attrs for trial in failed)


def attempt(turn: Turn) -> int:
    """Return how many points were given up at its index, because each of their trials failed by itself."""
    return count_failures(failed_at(turn.trials, turn.trial_index)) // TRIES
