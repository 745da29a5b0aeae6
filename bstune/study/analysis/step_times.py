"""tau(B) of a study: the survey's, or one of all trials where no survey has timed the steps.

A trial's own seconds are those of the minutes in which it ran: on a busy machine they differ by
several times at one batch size, and would choose the winner.
"""

import math
from collections.abc import Sequence

from bstune.core.records import TrialResult
from bstune.core.step_time_law import StepTimeLaw, law_of_trials
from bstune.options import ReplayedWorkload
from bstune.result import INTERVAL_QUANTILE, StepTiming
from bstune.study.planning.replicates import Winner, confirmed
from bstune.study.prepare import PreparedStudy
from bstune.trial.processes.workers import with_step_time

# Standard deviation of the log of two batch sizes' ratio of seconds: from here on timing is what blurs them.
BLURRED = 0.1


def common_law(prepared: PreparedStudy, done: Sequence[TrialResult]) -> StepTimeLaw | None:
    """Fit tau(B) to the trials' own seconds; None where they are recorded or surveyed, or too few."""
    if isinstance(prepared.options.workload, ReplayedWorkload):
        return None
    if prepared.backend.timed is not None:
        return None
    return law_of_trials(own_step_times(done))


def own_step_times(done: Sequence[TrialResult]) -> list[tuple[int, float]]:
    """Give batch size and own seconds of a step of each trial that timed its steps."""
    found = list[tuple[int, float]]()
    for trial in done:
        own = trial.measured_seconds_per_step or trial.seconds_per_step
        if own:
            found.append((trial.batch_size, own))
    return found


def with_common_step_time(
    prepared: PreparedStudy, done: Sequence[TrialResult]
) -> list[TrialResult]:
    """Give the records with the seconds per step of all trials in place of each one's own."""
    law = common_law(prepared, done)
    if law is None:
        return list(done)
    return [with_step_time(trial, law) for trial in done]


def law_of(prepared: PreparedStudy, done: Sequence[TrialResult]) -> StepTimeLaw | None:
    """Give tau(B) with its error, the survey's or that of all trials.

    None where it is recorded, or too few trials were timed.
    """
    surveyed = prepared.backend.step_time
    if not isinstance(surveyed, StepTimeLaw):
        return common_law(prepared, done)
    timed = prepared.backend.timed
    same_loop = timed is None or timed.seconds_of == "lean"
    return surveyed.seen_by_trials(own_step_times(done), same_loop)


def timing_of(
    prepared: PreparedStudy,
    law: StepTimeLaw | None,
    winner: Winner | None,
    confirmed_winners: Sequence[Winner],
) -> StepTiming | None:
    """Tell what the seconds of a step are, how well they are known at the winner, and what they do not tell."""
    if law is None:
        return None
    batch_size = prepared.options.scaling.batch_size if winner is None else winner.trial.batch_size
    timed = prepared.backend.timed
    return StepTiming(
        seconds_of="lean" if timed is None else timed.seconds_of,
        surveyed=timed is not None,
        relative_error=law.relative_error(batch_size),
        waited=0.0 if timed is None else timed.waited,
        threads=None if timed is None else timed.threads,
        not_told_apart=() if winner is None else not_told_apart(law, winner, confirmed_winners),
    )


def not_told_apart(
    law: StepTimeLaw, winner: Winner, confirmed_winners: Sequence[Winner]
) -> tuple[int, ...]:
    """Give the batch sizes that ran on fresh seeds whose times lie nearer to the winner's than steps are timed.

    Those that steps are timed well enough for, and whose seeds alone do not tell them apart, are no matter of timing.
    """
    own = confirmed(winner.runs)
    found = set[int]()
    for other in confirmed_winners:
        size = other.trial.batch_size
        error = law.ratio_error(size, winner.trial.batch_size)
        fresh = confirmed(other.runs)
        if error < BLURRED or own is None or fresh is None:
            continue
        if own.time_median is None or fresh.time_median is None:
            continue
        if abs(math.log(fresh.time_median / own.time_median)) < INTERVAL_QUANTILE * error:
            found.add(size)
    return tuple(sorted(found - {winner.trial.batch_size}))
