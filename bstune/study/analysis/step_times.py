"""tau(B) of a study: the survey's, or one of all trials where no survey has timed the steps.

A trial's own seconds are those of the minutes in which it ran: on a busy machine they differ by
several times at one batch size, and would choose the winner. So they join the survey's timings only
where these were few, as :meth:`bstune.core.step_time_law.StepTimeLaw.joined_with` says.
"""

import math
from collections.abc import Callable, Sequence
from statistics import fmean

from bstune.core.records import StepsOf, TrialResult
from bstune.core.step_time_law import StepTimeLaw, law_of_trials
from bstune.core.step_timings import (
    OwnSteps,
    own_steps,
    took_trainers_steps,
    with_step_time,
)
from bstune.options import ReplayedWorkload
from bstune.result import INTERVAL_QUANTILE, StepTiming
from bstune.study.planning.replicates import Winner, summary_of_runs
from bstune.study.prepared import PreparedStudy

# From this standard deviation of the log of two batch sizes' ratio of seconds on, timing blurs
# which of them is faster.
BLURRED = 0.1
# How the name of a CPU's device begins, before its number of threads.
CPU = "cpu ("


def _own_steps(prepared: PreparedStudy, done: Sequence[TrialResult]) -> list[OwnSteps]:
    """Collect the trials' own seconds of a step, of those that had as many of torch's threads.

    A study's first trials may have run on another number, before a survey chose one.
    """
    # The name of a CPU holds the number of threads.
    device = prepared.backend.device
    is_cpu = device.startswith(CPU)
    comparable = list[TrialResult]()
    for trial in done:
        if is_cpu and trial.device.startswith(CPU) and trial.device != device:
            continue
        comparable.append(trial)
    return own_steps(comparable)


def common_law(prepared: PreparedStudy, done: Sequence[TrialResult]) -> StepTimeLaw | None:
    """Fit one law tau(B), the seconds of a step with their error, for all trials of a study.

    It is the survey's law, fitted anew with the trials' own steps where the survey had few timings.
    Without a survey it is fitted to the trials' own steps. None where too few steps were timed, and
    for recorded runs, whose table has the seconds.
    """
    if isinstance(prepared.options.workload, ReplayedWorkload):
        return None
    own = _own_steps(prepared, done)
    if prepared.backend.timed is None:
        return law_of_trials([(steps.batch_size, steps.seconds) for steps in own])
    surveyed = prepared.backend.step_time
    if not isinstance(surveyed, StepTimeLaw):
        return None
    return surveyed.joined_with(own)


def with_common_step_time(
    prepared: PreparedStudy, done: Sequence[TrialResult]
) -> list[TrialResult]:
    """Replace each record's seconds per step by those of one law tau(B), so that all compare.

    A record may have the seconds of an earlier survey. Where no law is known, the records stay as
    they are.
    """
    law = common_law(prepared, done)
    if law is None:
        return list(done)
    return [with_step_time(trial, law) for trial in done]


def law_of(prepared: PreparedStudy, done: Sequence[TrialResult]) -> StepTimeLaw | None:
    """Give tau(B), the seconds of a step, with its error.

    It is the survey's law, whose error is widened to what the trials show of it. Without a survey
    the law is fitted to the trials, and has their scatter. None where a table answers the trials,
    or too few were timed.
    """
    timed_before = step_time_of(prepared, done)
    is_of_survey = prepared.backend.timed is not None
    # Only a survey's law has an error of its own, which trials can widen. ``common_law`` fits a law
    # to the trials where they timed themselves, and gives None where a table answers them.
    if not is_of_survey or not isinstance(timed_before, StepTimeLaw):
        return common_law(prepared, done)
    return timed_before.widened_by_trials(_own_steps(prepared, done))


def step_time_of(prepared: PreparedStudy, done: Sequence[TrialResult]) -> Callable[[float], float]:
    """Give tau(B), the seconds of a step, as timed before the trials or fitted anew with these.

    A law that was timed well enough takes no steps of the trials. None where a study's folder tells
    nothing of tau(B).
    """
    surveyed = prepared.backend.step_time
    if not isinstance(surveyed, StepTimeLaw):
        return surveyed
    return surveyed.joined_with(_own_steps(prepared, done))


def timing_of(
    prepared: PreparedStudy,
    law: StepTimeLaw | None,
    winner: Winner | None,
    confirmed_winners: Sequence[Winner],
) -> StepTiming | None:
    """Tell where the seconds of a step come from, and how well they are known at the winner.

    Without a winner it is at the reference.

    Args:
        prepared: the study.
        law: tau(B) with its error; None: not known, and then nothing is told.
        winner: of the study, if any.
        confirmed_winners: the points that ran on fresh seeds.
    """
    if law is None:
        return None
    batch_size = prepared.options.scaling.batch_size
    # Batch sizes whose times to target differ from the winner's by less than the timing's error.
    not_distinct: tuple[int, ...] = ()
    if winner is not None:
        batch_size = winner.trial.batch_size
        not_distinct = not_told_apart(law, winner, confirmed_winners)
    relative_error = law.relative_error(batch_size)
    surveyed = prepared.backend.timed
    # Without a survey the seconds are those of the trials themselves. Whether the Trainer or the
    # lean loop took them is not known: "lean" stands for either.
    if surveyed is None:
        return StepTiming(
            seconds_of="lean",
            surveyed=False,
            relative_error=relative_error,
            waited=0.0,
            threads=None,
            not_told_apart=not_distinct,
        )
    return StepTiming(
        seconds_of=surveyed.seconds_of,
        surveyed=True,
        relative_error=relative_error,
        waited=surveyed.waited,
        threads=surveyed.threads,
        not_told_apart=not_distinct,
        own_over_timed=None if winner is None else own_over_timed(winner, surveyed.seconds_of),
    )


def own_over_timed(winner: Winner, seconds_of: StepsOf) -> float | None:
    """Compare the seconds of a step in a winner's own runs with those that a survey timed.

    Give the geometric mean of their ratios over its fresh seeds, else that of its trial. None where
    no run can be compared: each needs the survey's kind of loop, as a step of the Trainer's may
    take several times the lean loop's, and no other trial beside it.

    Args:
        winner: of the study.
        seconds_of: whose steps the survey timed.
    """
    log_ratios = list[float]()
    for run in winner.runs or (winner.trial,):
        own = run.measured_seconds_per_step
        timed = run.seconds_per_step
        is_of_same_loop = took_trainers_steps(run) == (seconds_of == "trainer")
        if own and timed and is_of_same_loop and run.ran_alone:
            log_ratios.append(math.log(own / timed))
    if not log_ratios:
        return None
    return math.exp(fmean(log_ratios))


def not_told_apart(
    law: StepTimeLaw, winner: Winner, confirmed_winners: Sequence[Winner]
) -> tuple[int, ...]:
    """List the batch sizes with fresh seeds that timing does not tell from the winner's.

    Their times to target lie nearer to the winner's than the error of timing. A batch size whose
    error of timing is below ``BLURRED`` is left out: if it is not told apart, seeds are the reason.
    """
    of_winner = summary_of_runs(winner.runs)
    if of_winner is None or of_winner.time_median is None:
        return ()
    not_distinct = set[int]()
    for other_winner in confirmed_winners:
        size = other_winner.trial.batch_size
        error = law.ratio_error(size, winner.trial.batch_size)
        fresh = summary_of_runs(other_winner.runs)
        if error < BLURRED or fresh is None or fresh.time_median is None:
            continue
        distance = abs(math.log(fresh.time_median / of_winner.time_median))
        if distance < INTERVAL_QUANTILE * error:
            not_distinct.add(size)
    return tuple(sorted(not_distinct - {winner.trial.batch_size}))
