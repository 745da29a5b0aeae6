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
from bstune.study.planning.plan import FIRST_REPLICATE
from bstune.study.storage.trials import (
    Trials,
    busy_workers,
    is_asked,
    read_trials,
    record_of,
    spec_of,
    trial_index_of,
)

# States of the trials that hold an index; one that failed leaves it free.
HOLDS_INDEX = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING)
# A search may have so many continued trials per point.
MAX_CONTINUED = 3
# Tries of one point, if its trials fail by themselves; then the sampler suggests another.
TRIES = 2


def ended_below_limit(trials: Trials) -> set[int]:
    """Find the stopped trials that ended before their own limit of steps; give their numbers.

    They can go no further: a recorded run, for instance, has no more steps.
    """
    numbers = set[int]()
    for trial in read_trials(trials):
        # Optuna's state of a trial that was stopped early.
        was_stopped = trial.state == TrialState.PRUNED
        has_record = RECORD in trial.user_attrs
        if not was_stopped or not has_record or not is_asked(trial):
            continue
        max_steps = spec_of(trial).max_steps
        result = record_of(trial.user_attrs[RECORD])
        if result.status == "stopped" and max_steps is not None and result.steps < max_steps:
            numbers.add(trial.number)
    return numbers


def free_indices(trials: Trials, points: int) -> list[int]:
    """List the indices of a search that no trial holds, in rising order.

    There are as many indices as ``points``, and one more for each trial that continues a stopped
    one or runs it again from its first step, up to ``MAX_CONTINUED`` per point. Without that bound
    a search whose target nothing reaches could go on for ever with the points that it has.
    """
    taken = set[int | None]()
    # Whether the last trial that was asked at an index goes on with another one.
    continues: dict[int | None, bool] = {}
    # The first index with each seed. A trial that is run again has its seed at an index of its own.
    first_with = dict[int, int]()
    for trial in read_trials(trials):
        trial_index = trial_index_of(trial)
        if trial.state in HOLDS_INDEX:
            taken.add(trial_index)
        if trial_index is not None and trial_index < FIRST_REPLICATE and is_asked(trial):
            first = first_with.setdefault(spec_of(trial).seed, trial_index)
            continues[trial_index] = RESUMED_FROM in trial.user_attrs or first != trial_index
    count = points + min(sum(continues.values()), MAX_CONTINUED * points)
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
    """Make the turn of this process at a given index, which may not be free."""
    return Turn(trial_index, worker, read_trials(study))


def free_turn(
    trials: Trials, points: int, worker: str = "", other_processes: int = 0
) -> Turn | None:
    """Choose a free index of a search; None if there is none.

    A process that is alone takes the first one. Several processes that look at once find the same
    indices free: each takes one at random of the first few, as many as there are processes.

    Args:
        trials: of the study.
        points: how many the search may try.
        worker: the id of this process's lease.
        other_processes: how many are known to work on the study; those that run trials count, too.
    """
    latest = read_trials(trials)
    free = free_indices(latest, points)
    if not free:
        return None
    others = max(other_processes, len(busy_workers(latest) - {worker}))
    # The place is not drawn from the study's seed: each process has to choose differently.
    place = randbelow(min(others + 1, len(free)))
    return Turn(free[place], worker, latest)


def failed_at(trials: Trials, trial_index: int) -> list[FrozenTrial]:
    """Select the failed trials of an index, without those that were dropped."""
    return [
        trial
        for trial in read_trials(trials)
        if trial.state == TrialState.FAIL
        and is_asked(trial)
        and trial_index_of(trial) == trial_index
    ]


def failed_by_itself(failed: FrozenTrial) -> bool:
    """Whether a failed trial was not cut short.

    A trial whose process has ended has no record; one that a user's loop has told of Ctrl-C has one
    that says so.
    """
    record = failed.user_attrs.get(RECORD)
    return record is not None and not record_of(record).was_cut_short


def count_failures(failed: Sequence[FrozenTrial]) -> int:
    """Count the trials that failed by themselves."""
    return sum(map(failed_by_itself, failed))


def points_given_up(turn: Turn) -> int:
    """Count the points that were given up at a turn's index, as their trials failed."""
    return count_failures(failed_at(turn.trials, turn.trial_index)) // TRIES
