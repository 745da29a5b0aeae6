"""What the records of a study tell of its trials, whatever its plan."""

from collections.abc import Sequence
from itertools import count

from bstune.core.records import Record, Records, Spec


def record_numbered(records: Records, number: int) -> Record:
    """The record of a trial that is there."""
    return next(record for record in records if record.number == number)


def without_new_seeds(records: Records) -> list[Record]:
    """The baseline's first run and the search."""
    return [record for record in records if record.role != "new seed"]


def baseline_of(records: Records) -> Record | None:
    """The baseline's first run; where it failed and the error was mended, the one after that."""
    found = None
    for record in records:
        if record.role == "baseline":
            found = record
    return found


def new_seeds_of(records: Records, number: int) -> list[Record]:
    """The finished runs of a trial's configuration on new seeds, in the order of the seeds."""
    runs = [record for record in records if record.repeats == number]
    # The last part of a place is the number of the seed.
    return sorted(runs, key=lambda run: int(run.place.rpartition("/")[2]))


def first_free(prefix: str, records: Records, running: Sequence[Spec]) -> int:
    """The first number whose place, ``prefix/number``, no trial has."""
    taken = {spec.place for spec in (*records, *running)}
    return next(number for number in count() if f"{prefix}/{number}" not in taken)


def count_configurations(records: Records, running: Sequence[Spec] = ()) -> int:
    """How many configurations the search has tried.

    A resumption is none, and neither is a size that does not fit or that the user's code refuses.
    """
    tried = [record for record in records if not record.is_unfit]
    return sum(spec.role == "search" and spec.resumed_from is None for spec in (*tried, *running))


def took_seconds(record: Record, records: Records) -> float:
    """What a trial took, in seconds by the clock on the wall, with those that it resumes."""
    seconds = record.train_seconds + record.other_seconds
    if record.resumed_from is not None:
        seconds += took_seconds(record_numbered(records, record.resumed_from), records)
    return seconds


def least_steps(run: Record) -> float:
    """Steps to the target, or those that a run was seen not to reach it in; at least 1.

    A run that diverged or failed would not have reached it in all that it was allowed.
    """
    if run.has_trained:
        return max(run.steps_to_target, 1.0)
    return float(run.max_steps)
