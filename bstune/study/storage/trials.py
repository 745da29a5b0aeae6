"""A study's trials in Optuna's storage: what each was asked to do, who runs it, its record."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import lru_cache

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState
from pydantic import TypeAdapter, ValidationError

from bstune.core.errors import StudyError
from bstune.core.records import CUT_SHORT, TrialResult, TrialSpec, dump_json
from bstune.search.sampler import RECORD
from bstune.study.storage.attributes import LOST, SPEC, WORKER
from bstune.study.storage.lease import LEASE, PREFIX, Lease
from bstune.study.storage.patience import patient
from bstune.system.inputs import parse_json

TRIAL_SPEC = TypeAdapter(TrialSpec)
# So many parsed records, and as many specs, are kept in memory.
PARSED_TRIALS = 2**15
AskedTrial = tuple[int, TrialSpec]
"""A trial's id in the storage, and what it is asked to do."""
Trials = optuna.Study | Sequence[FrozenTrial]
"""A study, whose trials are read when they are needed; or its trials as they were read before."""


def read_trials(trials: Trials) -> Sequence[FrozenTrial]:
    """Read a study's trials in order of their numbers.

    Trials that were read before are given as they are. Each reading of a study asks the storage for
    all trials that run.
    """
    if isinstance(trials, optuna.Study):
        return patient(trials.get_trials)(deepcopy=False)
    return trials


def running_trials(trials: Trials) -> list[FrozenTrial]:
    """Select the trials that run."""
    return [trial for trial in read_trials(trials) if trial.state == TrialState.RUNNING]


def results(trials: Trials) -> list[TrialResult]:
    """Give the records of the finished trials in order of their numbers.

    A trial that was cut short has none, and gets one with the status ``failed``.
    """
    records = []
    for trial in read_trials(trials):
        if trial.state.is_finished() and RECORD in trial.user_attrs:
            records.append(record_of(trial.user_attrs[RECORD]))
        elif trial.state == TrialState.FAIL and is_asked(trial):
            records.append(TrialResult.unmeasured(spec_of(trial), "failed", message=CUT_SHORT))
    return records


def finished_record(study: optuna.Study, number: int) -> TrialResult:
    """Read the record of a finished trial, which another process may have stored a moment ago."""
    return record_of(read_trials(study)[number].user_attrs[RECORD])


# All trials are read at each step of a search.
@lru_cache(maxsize=PARSED_TRIALS)
def record_of(text: str) -> TrialResult:
    """Parse a trial's record, as it is stored."""
    return TrialResult.from_json(text)


@lru_cache(maxsize=PARSED_TRIALS)
def _parsed_spec(text: str, number: int) -> tuple[TrialSpec, str]:
    """Parse a stored spec, and give it with the lease's id of the worker that runs the trial.

    The worker is none of the spec's fields; it is empty where it was not stored.

    ``number``: of the trial, which is not stored in the text.
    """
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
    """Read what a trial was asked to do."""
    spec, _worker = _parsed_spec(trial.user_attrs[SPEC], trial.number)
    return spec


def trial_index_of(trial: FrozenTrial) -> int | None:
    """Read a trial's index, its place in the study's plan.

    It is None for one that bstune has not asked.
    """
    if SPEC not in trial.user_attrs:
        return None
    return spec_of(trial).trial_index


def worker_of(trial: FrozenTrial) -> str:
    """Read the id of the lease of the process that was asked to run a trial; empty if none was."""
    if SPEC not in trial.user_attrs:
        return ""
    _spec, worker = _parsed_spec(trial.user_attrs[SPEC], trial.number)
    return worker


def text_of(spec: TrialSpec, worker: str) -> str:
    """Write a spec, and the id of the lease of its worker, as they are stored.

    The trial's number is left out: the storage chooses it in the transaction that stores the spec.
    """
    fields = asdict(spec)
    del fields["number"]
    return dump_json({**fields, WORKER: worker})


def is_asked(trial: FrozenTrial) -> bool:
    """Whether bstune has asked a trial and has not dropped it, as another one held its index."""
    return SPEC in trial.user_attrs and LOST not in trial.user_attrs


def running_specs(trials: Trials, worker: str | None = None) -> list[TrialSpec]:
    """List what the running trials were asked to do, in order of their numbers.

    Trials that bstune did not ask, or has dropped, are left out.

    ``worker``: the id of a process's lease: only that process's trials are listed; None: those of
    all processes.
    """
    specs = list[TrialSpec]()
    for trial in running_trials(trials):
        is_wanted = worker is None or worker_of(trial) == worker
        if is_wanted and is_asked(trial):
            specs.append(spec_of(trial))
    return specs


def lease_of(study: optuna.Study, number: int) -> Lease | None:
    """Read the lease of the process that ran a trial; None where it left none."""
    worker = worker_of(study.get_trials(deepcopy=False)[number])
    lease = study.user_attrs.get(PREFIX + worker)
    if lease is None:
        return None
    return LEASE.validate_json(lease)


def busy_workers(trials: Trials) -> set[str]:
    """Collect the ids of the leases of the processes whose trials run."""
    return {worker_of(trial) for trial in running_trials(trials)}


def end_trial(
    study: optuna.Study, trial_id: int, state: TrialState, values: Sequence[float] | None = None
) -> None:
    """End a trial in Optuna, unless another process has ended it before."""
    # study.tell() would read the trial twice in addition.
    end = patient(study._storage.set_trial_state_values)
    with suppress(UpdateFinishedTrialError):
        end(trial_id, state, values)
