"""A study's trials as Optuna's storage has them: their records, what each was asked to do, and who runs it."""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import lru_cache

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState
from pydantic import TypeAdapter, ValidationError

from bstune.core.errors import StudyError
from bstune.core.records import TrialResult, TrialSpec, dump_json
from bstune.search.sampler import RECORD
from bstune.study.storage.attributes import LOST, SPEC, WORKER
from bstune.study.storage.lease import PREFIX
from bstune.study.storage.patience import patient
from bstune.system.inputs import parse_json

TRIAL_SPEC = TypeAdapter(TrialSpec)
# Trials whose records and specs are kept as they were read.
PARSED_TRIALS = 2**15
CUT_SHORT = "the process ended before the trial did; it is asked again"
AskedTrial = tuple[int, TrialSpec]
"""A trial's id in the storage, and what it is asked to do."""
Trials = optuna.Study | Sequence[FrozenTrial]
"""Those of a study, read now; or its trials as they were read before."""


def read(trials: Trials) -> Sequence[FrozenTrial]:
    """Read a study's trials in order of their numbers.

    Each reading asks the storage for all that run.
    """
    if isinstance(trials, optuna.Study):
        return patient(trials.get_trials)(deepcopy=False)
    return trials


def running_trials(trials: Trials) -> list[FrozenTrial]:
    """Give the trials that run now."""
    return [trial for trial in read(trials) if trial.state == TrialState.RUNNING]


def results(trials: Trials) -> list[TrialResult]:
    """Give the records of the finished trials in order of their numbers.

    One that was cut short is ``failed``.
    """
    records = []
    for trial in read(trials):
        if trial.state.is_finished() and RECORD in trial.user_attrs:
            records.append(record_of(trial.user_attrs[RECORD]))
        elif trial.state == TrialState.FAIL and is_asked(trial):
            records.append(TrialResult.unmeasured(spec_of(trial), "failed", message=CUT_SHORT))
    return records


def finished(study: optuna.Study, number: int) -> TrialResult:
    """Give the record of a trial, which may have finished a moment ago in another process."""
    return record_of(read(study)[number].user_attrs[RECORD])


# All trials are read at each step of a search.
@lru_cache(maxsize=PARSED_TRIALS)
def record_of(text: str) -> TrialResult:
    """Read a trial's record."""
    return TrialResult.from_json(text)


@lru_cache(maxsize=PARSED_TRIALS)
def _parsed_spec(text: str, number: int) -> tuple[TrialSpec, str]:
    """Read a spec and the worker that was asked; the trial's number is not stored in it."""
    fields = parse_json(text, f"the attribute {SPEC}")
    if not isinstance(fields, dict) or not isinstance(fields.get(WORKER, ""), str):
        raise StudyError(f"the attribute {SPEC} is no trial's")
    try:
        spec = TRIAL_SPEC.validate_python({**fields, "number": number})
    except ValidationError as error:
        reason = error.errors()[0]
        name = ".".join(map(str, reason["loc"]))
        raise StudyError(f"the attribute {SPEC} is no trial's: {name} {reason['msg']}") from error
    return spec, fields.get(WORKER, "")


def spec_of(trial: FrozenTrial) -> TrialSpec:
    """Give what a trial was asked to do."""
    return _parsed_spec(trial.user_attrs[SPEC], trial.number)[0]


def trial_index_of(trial: FrozenTrial) -> int | None:
    """Give a trial's place in the study's plan; None for one that bstune has not asked."""
    if SPEC not in trial.user_attrs:
        return None
    return spec_of(trial).trial_index


def worker_of(trial: FrozenTrial) -> str:
    """Give the id of the lease of the process that was asked to run a trial; empty if none was."""
    if SPEC not in trial.user_attrs:
        return ""
    return _parsed_spec(trial.user_attrs[SPEC], trial.number)[1]


def text_of(spec: TrialSpec, worker: str) -> str:
    """Write a spec and who runs it as they are stored.

    The storage gives a trial its number in the transaction that stores its spec: the number is
    the trial's alone.
    """
    fields = asdict(spec)
    del fields["number"]
    return dump_json({**fields, WORKER: worker})


def is_asked(trial: FrozenTrial) -> bool:
    """Tell whether bstune has asked a trial, and has not dropped it at once."""
    return SPEC in trial.user_attrs and LOST not in trial.user_attrs


def running(trials: Trials, worker: str | None = None) -> list[TrialSpec]:
    """List what the trials that run now were asked to do.

    Only those of ``worker`` if it is given.
    """
    specs = list[TrialSpec]()
    for trial in running_trials(trials):
        is_wanted = worker is None or worker_of(trial) == worker
        if is_wanted and is_asked(trial):
            specs.append(spec_of(trial))
    return specs


def trained_by(study: optuna.Study, number: int) -> str:
    """Say whose process ran a trial, for people."""
    worker = worker_of(study.get_trials(deepcopy=False)[number])
    lease = study.user_attrs.get(PREFIX + worker)
    if lease is None:
        return "a process that left no lease"
    return str(json.loads(lease)["name"])


def working(trials: Trials) -> set[str]:
    """Collect the ids of the processes whose trials run."""
    return {worker_of(trial) for trial in running_trials(trials)}


def end_trial(
    study: optuna.Study, trial_id: int, state: TrialState, values: Sequence[float] | None = None
) -> None:
    """End a trial, unless another process has: both may have found that its own is gone."""
    # study.tell() reads the trial twice besides.
    end = patient(study._storage.set_trial_state_values)
    with suppress(UpdateFinishedTrialError):
        end(trial_id, state, values)
