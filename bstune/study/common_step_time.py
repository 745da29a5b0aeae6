"""One tau(B) of all trials, where no survey has timed the steps.

A trial's own seconds are those of the minutes in which it ran: on a busy machine they differ by
several times at one batch size, and would choose the winner.
"""

from collections.abc import Sequence

from bstune.core.records import TrialResult
from bstune.core.step_time_law import StepTimeLaw, law_of_trials
from bstune.options import ReplayedWorkload
from bstune.study.prepare import PreparedStudy
from bstune.trial.workers import with_step_time


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
