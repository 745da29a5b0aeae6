"""Stores how a trial ended, and ends those of processes that are gone."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.study import StudyDirection
from optuna.trial import TrialState

from bstune.core.errors import RecordError, StudyError
from bstune.core.objectives import SOUGHT, Objective
from bstune.core.records import Mode, TrialResult, TrialSpec
from bstune.search.sampler import RECORD
from bstune.study.storage.attributes import OUTCOME, SPEC
from bstune.study.storage.patience import StorageGoneError, patient
from bstune.study.storage.trials import (
    AskedTrial,
    end_trial,
    running_specs,
    running_trials,
    text_of,
    worker_of,
)
from bstune.system.files import Output
from bstune.system.inputs import read_bytes

logger = logging.getLogger(__name__)
# What TrialResult.to_json begins with.
RECORD_BEGINS = '{"number": '


def within_steps(spec: TrialSpec, max_steps: int) -> TrialSpec:
    """Limit a trial to ``max_steps``, unless it ends before."""
    if spec.max_steps is not None and spec.max_steps <= max_steps:
        return spec
    return replace(spec, max_steps=max_steps)


def shorten(study: optuna.Study, asked: AskedTrial, max_steps: int, worker: str = "") -> None:
    """Store that a running trial of ``worker`` ends after ``max_steps`` at most."""
    trial_id, spec = asked
    shortened = within_steps(spec, max_steps)
    if shortened != spec:
        text = text_of(shortened, worker)
        patient(study._storage.set_trial_user_attr)(trial_id, SPEC, text)


@contextmanager
def cut_short(study: optuna.Study, objective: Objective, worker: str) -> Iterator[None]:
    """Where the body raises, end all running trials of ``worker``, so that they are asked again."""
    try:
        yield
    except StorageGoneError:
        # No trial can be ended in a storage that is gone.
        raise
    except BaseException:
        # This includes Ctrl-C.
        for spec in running_specs(study, worker):
            _warn(
                spec, " was cut short; the finished ones are stored, the same command asks it again"
            )
        finish_abandoned(study, objective, lambda other: other == worker)
        raise


def _warn(spec: TrialSpec, what: str) -> None:
    """Log a warning that begins with the trial and ends with ``what``."""
    logger.warning("trial %d (B %d, lr %g)%s", spec.number, spec.batch_size, spec.lr, what)


def finish_abandoned(
    study: optuna.Study, objective: Objective, gone: Callable[[str], bool]
) -> None:
    """End the running trials of processes that are gone.

    One whose record was stored ends with it, any other one as failed.

    ``gone``: says whether a process is gone, by the id of its lease.
    """
    for trial in running_trials(study):
        if not gone(worker_of(trial)):
            continue
        record = trial.user_attrs.get(RECORD)
        if record is None:
            end_trial(study, trial._trial_id, TrialState.FAIL)
        else:
            _tell(study, trial._trial_id, TrialResult.from_json(record), objective)


def store_unstored(study: optuna.Study, files: Output) -> None:
    """Store the records of trials that finished while the storage was away, which a file kept.

    It comes before :func:`finish_abandoned`, which would end these trials as failed.
    """
    if not files.unstored.exists():
        return
    text = read_bytes(files.unstored, "the file").decode("utf-8", errors="replace")
    lines = text.splitlines()
    if not all(_may_be_record(line) for line in lines):
        raise StudyError(
            f"{files.unstored} holds other lines than the records of trials, which bstune keeps "
            "there while the storage is away: move it away"
        )
    by_number = {trial.number: trial for trial in running_trials(study)}
    for record in lines:
        try:
            trial = by_number.get(TrialResult.from_json(record).number)
        except RecordError:
            logger.warning(
                "%s has a record that was cut short: its trial is asked again", files.unstored
            )
            continue
        # A trial that does not run any more has been given to another process meanwhile.
        if trial is not None:
            patient(study._storage.set_trial_user_attr)(trial._trial_id, RECORD, record)
    files.unstored.unlink()


def _may_be_record(line: str) -> bool:
    """Whether a line may be a trial's record, or the beginning of one that was cut short."""
    return line.startswith(RECORD_BEGINS) or RECORD_BEGINS.startswith(line)


def tell(
    study: optuna.Study,
    asked: AskedTrial,
    result: TrialResult,
    objective: Objective,
    is_full: bool = False,
) -> None:
    """Store a trial's record, and end the trial in Optuna.

    One that reached the target is COMPLETE with its value, one that failed is FAIL, any other one
    is PRUNED.

    ``is_full``: whether a trial of the objective loss has run to its budget's end, which is
    COMPLETE as well.
    """
    trial_id, spec = asked
    try:
        # From here on a killed process loses nothing of the trial.
        patient(study._storage.set_trial_user_attr)(trial_id, RECORD, result.to_json())
    except UpdateFinishedTrialError:
        logger.warning(
            "trial %d ran out of its lease and was given to another process: it is dropped",
            spec.number,
        )
        return
    _tell(study, trial_id, result, objective, is_full)


def outcome(result: TrialResult) -> dict[str, str | int | float]:
    """Describe a trial's end for Optuna's dashboard.

    A trial that did not reach the target has ``stopped at step`` in place of ``steps``.
    """
    steps = "steps" if result.reached else "stopped at step"
    shown: dict[str, str | int | float] = {"status": result.status, steps: result.steps}
    if result.time_to_target is not None:
        shown["seconds"] = result.time_to_target
    return shown


def _tell(
    study: optuna.Study,
    trial_id: int,
    result: TrialResult,
    objective: Objective,
    is_full: bool = False,
) -> None:
    """End a trial in Optuna, whose record is stored already.

    ``is_full``: whether it ran to its budget's end, by which the objective loss has a value.
    """
    # Another process may have ended the trial before.
    with suppress(UpdateFinishedTrialError):
        patient(study._storage.set_trial_user_attr)(trial_id, OUTCOME, outcome(result))
    if result.status == "failed":
        end_trial(study, trial_id, TrialState.FAIL)
        return
    # The values that the objective has, such as steps and seconds, by name.
    sought = SOUGHT[objective].values
    mode: Mode = "max" if study.directions[0] == StudyDirection.MAXIMIZE else "min"
    values = list[float]()
    for value_of in sought.values():
        value = value_of(result, mode)
        # Seconds of another device than the study's do not count.
        if value is not None:
            values.append(value)
    # The metric at which a trial was stopped is no value of the objective.
    has_value = result.reached or is_full
    if has_value and len(values) == len(sought):
        end_trial(study, trial_id, TrialState.COMPLETE, values)
    else:
        end_trial(study, trial_id, TrialState.PRUNED)
