"""What is stored of a trial that has ended, and the failures that end a study."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from bstune.core.errors import StudyError, UserCodeError
from bstune.core.records import OUT_OF_TIME, TrialResult, TrialSpec
from bstune.core.step_timings import with_step_time
from bstune.report.spelling import with_options_as_called
from bstune.result import StudyResult
from bstune.study.at_budget import held_to_end
from bstune.study.prepared import PreparedStudy
from bstune.study.searching.limits import is_for_loss
from bstune.trial.processes.messages import Finished

# Trials in a row that failed end the study.
MAX_FAILURES = 3


def record_to_store(
    prepared: PreparedStudy,
    finished: Finished,
    counts_seconds: bool,
    revise: Callable[[TrialResult], TrialResult] | None,
) -> TrialResult:
    """Make the record that the study stores of a finished trial.

    The survey's seconds of a step replace the trial's own, if there is a survey.

    Args:
        prepared: the study.
        finished: the trial.
        counts_seconds: whether it ran on the kind of device whose seconds count. If not the record
            has no seconds of its own.
        revise: makes another record of it, unless it has failed; None: it stays as it is.

    Raises:
        BstuneError: the one with which the trial ended the study.
    """
    result = finished.result()
    if not counts_seconds:
        result = replace(result, seconds_per_step=None)
    survey = prepared.survey
    if survey is not None and survey.step_time is not None:
        result = with_step_time(result, survey.step_time)
    if revise is not None and result.status != "failed":
        result = revise(result)
    # The objective loss compares trials at their budgets' ends, which this one did not get to.
    if is_for_loss(prepared) and _ended_by_itself(finished, result):
        result = held_to_end(result, prepared.last_step(result.batch_size))
    if _was_cut_by_time(prepared, finished.spec, result):
        result = replace(result, status="failed", message=OUT_OF_TIME)
    return result


def _was_cut_by_time(prepared: PreparedStudy, spec: TrialSpec, result: TrialResult) -> bool:
    """Whether a run on a fresh seed had no time for all its steps: it has missed no target."""
    if spec.replicate_of is None or not is_out_of_time(spec, result):
        return False
    last_step = prepared.last_step(result.batch_size)
    if spec.max_steps is not None:
        last_step = min(spec.max_steps, last_step)
    return result.steps < last_step


def _ended_by_itself(finished: Finished, result: TrialResult) -> bool:
    """Whether a trial stopped by itself, as by EarlyStopping, before the study would end it."""
    spec = finished.spec
    return (
        result.status == "stopped"
        and spec.max_steps is not None
        and result.steps < spec.max_steps
        and not is_out_of_time(spec, result)
        # A trial of a user's loop that ended between two reports may have come further.
        and not finished.is_cut
    )


def is_out_of_time(spec: TrialSpec, result: TrialResult) -> bool:
    """Whether the limit of its wall time ended a trial. Then it can go on.

    A trial that something else stopped has a message.
    """
    return (
        spec.max_seconds is not None
        and result.status == "stopped"
        and result.end_message is None
        and result.wall_seconds > spec.max_seconds
    )


def check_failures(
    trials: Sequence[TrialResult], frames: str = "", cause: Exception | None = None
) -> None:
    """Raise the error that ends a study if its last ``MAX_FAILURES`` trials have all failed.

    Trials that were cut short, as by an interruption, do not count.

    Args:
        trials: that have ended.
        frames: where in the user's own files the last one failed; empty: in none of them.
        cause: the error with which the last one failed; None where it is not at hand.

    Raises:
        UserCodeError: where the last one failed in the user's code.
        StudyError: where it failed elsewhere.
    """
    ran = [trial for trial in trials if not trial.was_cut_short]
    failures = 0
    for trial in reversed(ran):
        if trial.status != "failed":
            break
        failures += 1
    if failures < MAX_FAILURES:
        return
    which = f"the first {failures} trials all failed"
    # Where every trial has failed, there is no finished one to tell of.
    stored = ""
    if failures < len(ran):
        which = f"the last {failures} trials failed"
        stored = "the finished trials are stored: "
    kind = UserCodeError if frames else StudyError
    raise kind(
        f"{which}, the last one with {ran[-1].message}\n{frames}"
        f"{stored}mend it, and the same command continues the study"
    ) from cause


def check_baseline(result: StudyResult, failed: Finished | None) -> None:
    """Raise the error of the user's own configuration at the end of a study without an answer.

    A study with an answer ends well, whatever failed: its cautions name that.

    Args:
        result: of the study, which has been shown.
        failed: the run of the user's own configuration that failed in this command; None without.

    Raises:
        UserCodeError: where it failed in the user's code, and nothing reached the target.
    """
    has_answer = result.winner is not None or result.at_budget is not None
    if failed is None or not failed.frames or has_answer:
        return
    raise UserCodeError(
        f"your own configuration failed with {failed.result().message}\n{failed.frames}"
        "the finished trials are stored: mend it, and the same command continues the study"
    ) from failed.cause


def check_any_trial(result: StudyResult) -> None:
    """Raise StudyError at the end of a study that had no time left for any trial.

    ``result``: of the study, which has been shown.
    """
    if result.trials == 0:
        raise StudyError(with_options_as_called(result, f"no trial has run: {result.stop_reason}"))
