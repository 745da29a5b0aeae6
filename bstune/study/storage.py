"""The Optuna study: ask for a trial, store its record, continue at any point.

Optuna's storage holds everything: each finished trial carries its record. A trial index of the search is done once one
of its trials has finished; a trial that was cut short is asked again with the same parameters.

Four transactions write a trial. One makes it, with its parameters and all that is known before it runs; then come its
record, from which on a killed process loses nothing of it, what Optuna's dashboard shows, and its end with its values.
"""

import copy
import inspect
import json
import logging
import math
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from secrets import randbelow
from typing import Any

import optuna
from optuna.distributions import FloatDistribution, IntDistribution
from optuna.exceptions import DuplicatedStudyError, ExperimentalWarning, UpdateFinishedTrialError
from optuna.samplers import BaseSampler, PartialFixedSampler, QMCSampler, RandomSampler
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState
from pydantic import TypeAdapter, ValidationError

from bstune.core.errors import BstuneError, ConfigError, RecordError, StudyError
from bstune.core.objectives import SOUGHT, Objective
from bstune.core.records import Target, TrialResult, TrialSpec, dump_json
from bstune.core.search_space import Space
from bstune.options import StudyOptions
from bstune.search.acquisition import MIN_STEPS
from bstune.search.sampler import RECORD, RESUMED_FROM, nearest
from bstune.study import wall
from bstune.study.baseline import Baseline, baseline_spec
from bstune.study.connection import RACE_SECONDS, answering, check_storage, connect, database_file
from bstune.study.draft import Draft
from bstune.study.lease import PREFIX
from bstune.study.patience import StorageGoneError, patient
from bstune.study.plan import FIRST_REPLICATE, SearchBudget
from bstune.study.replicates import Winner
from bstune.system.files import Output
from bstune.system.inputs import one_line, parse_json, read_bytes
from bstune.system.secrets import redact_values
from bstune.trial.backend import sampler_factory

logger = logging.getLogger(__name__)
# Attributes in the storage. Studies of another FORMAT name other fields in their specs and records.
FORMAT_VERSION = 4
FORMAT, FROZEN_SETTINGS = "bstune:format", "bstune:settings"
STUDY_ID, OUTPUT = "bstune:study_id", "bstune:output"
TESTS = "bstune:tests"  # test metrics by trial number
DEVICE, ARGUMENTS = (
    "bstune:device",
    "bstune:arguments",
)  # whose seconds count; what composes the config elsewhere
SPEC = "bstune:spec"  # what a trial is asked to do, and the process that runs it, as JSON
WORKER = "worker"  # in a trial's spec: the id of that process's lease
LOST = "bstune:lost"  # of a trial at whose index another one had been begun: it never ran
# What Optuna's dashboard shows of a trial beside its parameters and values.
LEARNING_RATE, OUTCOME = "lr", "outcome"
WINNER = "winner"  # and of the study: trial, batch size and learning rate, by what it is the best
# What those that are there must be; those of a study must be there, but for some.
STUDY_ATTRIBUTES: Mapping[str, TypeAdapter[Any]] = {
    STUDY_ID: TypeAdapter(str),
    OUTPUT: TypeAdapter(str),
    DEVICE: TypeAdapter(str),
    ARGUMENTS: TypeAdapter(list[str]),
    FROZEN_SETTINGS: TypeAdapter(str),
    TESTS: TypeAdapter(dict[str, dict[str, float]]),
    wall.BEGAN: TypeAdapter(float),
    wall.TAKEN: TypeAdapter(float),
}
OPTIONAL_ATTRIBUTES = (TESTS, wall.BEGAN, wall.TAKEN)
TRIAL_ATTRIBUTES: Mapping[str, TypeAdapter[Any]] = {
    SPEC: TypeAdapter(str),
    RECORD: TypeAdapter(str),
    RESUMED_FROM: TypeAdapter(int),
    LOST: TypeAdapter(bool),
}
TRIAL_SPEC = TypeAdapter(TrialSpec)
TAKEN = (
    TrialState.COMPLETE,
    TrialState.PRUNED,
    TrialState.RUNNING,
)  # states of the trials that have an index
MAX_CONTINUED = 3  # times as many continued trials as points
RECORD_BEGINS = '{"number": '  # of TrialResult.to_json
TRIES = 2  # of one point, if its trials fail by themselves; then the sampler suggests another
CUT_SHORT = "the process ended before the trial did; it is asked again"
REPORTED = 1  # step of the one value of a stopped trial that samplers see
# Of the steps of the trial that a replicate repeats, or that are predicted: where it is evaluated densely.
DENSE_FROM, DENSE_UNTIL = 0.5, 1.6
DENSE_FROM_UNTOLD = 0.1
REPLICATE_LIMIT = 2  # times the steps of the trial that it replicates, or those predicted
AskedTrial = tuple[int, TrialSpec]  # its id in the storage, and what it is asked to do
Trials = (
    optuna.Study | Sequence[FrozenTrial]
)  # of a study, read now; or its trials as they were read before


def open_study(
    name: str,
    url: str,
    objective: Objective,
    frozen_settings: Mapping[str, Any],
    output: Path,
    device: str = "",
    arguments: Sequence[str] = (),
) -> optuna.Study:
    """Create the study, or load it if its frozen settings and its output folder are the same.

    ``device`` is what its seconds belong to; ``arguments`` of the command line compose its config for other machines.
    """
    made = {
        FORMAT: FORMAT_VERSION,
        STUDY_ID: uuid.uuid4().hex,
        OUTPUT: str(output),
        DEVICE: device,
        ARGUMENTS: list(arguments),
        FROZEN_SETTINGS: dump_json(frozen_settings),  # the last one: it is made
    }
    with answering(url):
        study, is_new = _create_or_load(connect(url), name, objective, made)
        if not is_new:
            _check_continued(study, frozen_settings)
            _check_output(study, output)
    return study


@patient
def _create_or_load(
    storage: BaseStorage, name: str, objective: Objective, made: Mapping[str, Any]
) -> tuple[optuna.Study, bool]:
    """Return a study, and whether this process made it, with the attributes ``made``."""
    names = list(SOUGHT[objective].values)
    directions = [StudyDirection.MINIMIZE] * len(names)
    try:
        study = optuna.create_study(study_name=name, storage=storage, directions=directions)
    except DuplicatedStudyError:
        study = optuna.load_study(study_name=name, storage=storage)
        if not _being_made(study):
            return study, study.user_attrs.get(STUDY_ID) == made[STUDY_ID]
    with warnings.catch_warnings(action="ignore", category=ExperimentalWarning):
        study.set_metric_names(names)
    for key, value in made.items():
        study.set_user_attr(key, value)
    return study, True


def _being_made(study: optuna.Study) -> bool:
    """Wait for a process that is making this study; return whether it has gone before it was done."""
    for wait in (*RACE_SECONDS, 0.0):
        attributes = study.user_attrs
        foreign = study.get_trials(deepcopy=False) or any(
            not key.startswith("bstune:") for key in attributes
        )
        if FROZEN_SETTINGS in attributes or foreign:
            return False
        time.sleep(wait)
    return True


def find_study(name: str, url: str) -> optuna.Study:
    """Return a study that another process has begun; StudyError if there is none."""
    check_storage(url)
    path = database_file(url)
    names: list[str] = []
    with answering(url):
        if path is None or path.exists():  # connecting would make it
            storage = connect(url)
            names = patient(optuna.get_all_study_names)(storage)
        if name not in names:
            raise StudyError(
                f"storage={url} has no study {name!r}, but {', '.join(names) or 'none at all'}: begin it there with "
                f"bstune workload=NAME storage=... study={name}, then join it"
            )
        study = patient(optuna.load_study)(study_name=name, storage=storage)
        _check_format(study)
        return study


def stored_setting(name: str, url: str, key: str) -> object:
    """Give a frozen setting of a study; None where there is no such study yet, or none that can be read."""
    try:
        study = find_study(name, url)
        return _settings_of(study).get(key)
    except StudyError:
        return None


def check_joined(study: optuna.Study, frozen_settings: Mapping[str, Any]) -> None:
    """Refuse to join with other settings than the study's, but for the device."""
    began = _settings_of(study)
    _check_continued(study, {**frozen_settings, "device": began.get("device")})


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the settings that differ, a line each."""
    changed = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    return "\n".join(f"  {key}: was {before.get(key)!r}, now {now.get(key)!r}" for key in changed)


def _check_attributes(study: optuna.Study) -> None:
    """Refuse a study whose attributes are not those that bstune writes: another program may have written them."""
    for key, kind in STUDY_ATTRIBUTES.items():
        if key not in study.user_attrs and key not in OPTIONAL_ATTRIBUTES:
            raise StudyError(
                f"the study {study.study_name!r} lacks the attribute {key}: begin another one with study=NAME"
            )
        _check_attribute(study, "", key, study.user_attrs, kind)
    _settings_of(study)
    for trial in read(study):
        place = f"trial {trial.number} of "
        for key, kind in TRIAL_ATTRIBUTES.items():
            _check_attribute(study, place, key, trial.user_attrs, kind)
        try:
            if _is_asked(trial):
                spec_of(trial)
            if RECORD in trial.user_attrs:
                _record(trial.user_attrs[RECORD])
        except BstuneError as error:
            raise StudyError(f"{place}the study {study.study_name!r}: {error}") from error


def _check_attribute(
    study: optuna.Study, place: str, key: str, attributes: Mapping[str, Any], kind: TypeAdapter[Any]
) -> None:
    try:
        if key in attributes:
            kind.validate_python(attributes[key], strict=True)
    except ValidationError as error:
        value = one_line(repr(attributes[key]))
        raise StudyError(
            f"{place}the study {study.study_name!r} has an attribute {key} that bstune has not written, {value}: "
            "begin another one with study=NAME"
        ) from error


def _settings_of(study: optuna.Study) -> dict[str, Any]:
    """Read the frozen settings that a study began with."""
    what = f"the attribute {FROZEN_SETTINGS} of the study {study.study_name!r}"
    settings = parse_json(study.user_attrs[FROZEN_SETTINGS], what)
    if not isinstance(settings, dict):
        raise StudyError(f"{what} holds no settings: begin another one with study=NAME")
    return settings


@patient
def _check_format(study: optuna.Study) -> None:
    name, attributes = study.study_name, study.user_attrs
    if FORMAT not in attributes and FROZEN_SETTINGS not in attributes:
        raise StudyError(
            f"the storage has a study {name!r} that is not bstune's: choose another name with study=NAME"
        )
    version = attributes.get(FORMAT, 1)
    if version != FORMAT_VERSION:
        raise StudyError(
            f"the study {name!r} was begun by another version of bstune (format "
            f"{one_line(repr(version))}; this one reads {FORMAT_VERSION}): continue it with that "
            "version, or begin another one with study=NAME"
        )
    _check_attributes(study)


def _check_continued(study: optuna.Study, frozen_settings: Mapping[str, Any]) -> None:
    """Refuse another format and other settings."""
    _check_format(study)
    now = json.loads(dump_json(redact_values(frozen_settings)))  # as the storage has them
    lines = changes(_settings_of(study), now)
    if lines:
        raise StudyError(
            f"the study {study.study_name!r} began with other settings:\n{lines}\n"
            "continue it with the settings it began with, or begin another one with study=NAME"
        )


def _check_output(study: optuna.Study, output: Path) -> None:
    """Refuse a second output folder while the first one exists."""
    first = Path(study.user_attrs[OUTPUT])
    if first == output:
        return
    if first.exists():
        raise StudyError(
            f"the study {study.study_name!r} writes to {first}: continue it with output={first}, "
            "or begin another one with study=NAME"
        )
    study.set_user_attr(OUTPUT, str(output))  # the folder was moved


def read(trials: Trials) -> Sequence[FrozenTrial]:
    """Return a study's trials in order of their numbers; each reading asks the storage for all that run."""
    if isinstance(trials, optuna.Study):
        return patient(trials.get_trials)(deepcopy=False)
    return trials


def _running(trials: Trials) -> list[FrozenTrial]:
    return [trial for trial in read(trials) if trial.state == TrialState.RUNNING]


def results(trials: Trials) -> list[TrialResult]:
    """Return the records of the finished trials in order of their numbers; one that was cut short is ``failed``."""
    records = []
    for trial in read(trials):
        if trial.state.is_finished() and RECORD in trial.user_attrs:
            records.append(_record(trial.user_attrs[RECORD]))
        elif trial.state == TrialState.FAIL and _is_asked(trial):
            records.append(TrialResult.unmeasured(spec_of(trial), "failed", message=CUT_SHORT))
    return records


def finished(study: optuna.Study, number: int) -> TrialResult:
    """Return the record of a trial, which may have finished a moment ago in another process."""
    return _record(read(study)[number].user_attrs[RECORD])


@lru_cache(maxsize=2**15)  # all trials are read at each step of a search
def _record(text: str) -> TrialResult:
    return TrialResult.from_json(text)


@lru_cache(maxsize=2**15)
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
    """Return what a trial was asked to do."""
    return _parsed_spec(trial.user_attrs[SPEC], trial.number)[0]


def trial_index_of(trial: FrozenTrial) -> int | None:
    """Return a trial's place in the study's plan; None for one that bstune has not asked."""
    return spec_of(trial).trial_index if SPEC in trial.user_attrs else None


def worker_of(trial: FrozenTrial) -> str:
    """Return the id of the lease of the process that was asked to run a trial; empty if none was."""
    if SPEC not in trial.user_attrs:
        return ""
    return _parsed_spec(trial.user_attrs[SPEC], trial.number)[1]


def _text_of(spec: TrialSpec, worker: str) -> str:
    """Return a spec and who runs it as they are stored.

    The storage gives a trial its number in the transaction that stores its spec: the number is
    the trial's alone.
    """
    fields = asdict(spec)
    del fields["number"]
    return dump_json({**fields, WORKER: worker})


def _is_asked(trial: FrozenTrial) -> bool:
    """Tell whether bstune has asked a trial, and has not dropped it at once."""
    return SPEC in trial.user_attrs and LOST not in trial.user_attrs


def ended_below_limit(trials: Trials) -> set[int]:
    """Return the numbers of the stopped trials that ended below their limit, as where a recorded run ends."""
    numbers = set()
    for trial in read(trials):
        if trial.state == TrialState.PRUNED and RECORD in trial.user_attrs and _is_asked(trial):
            max_steps, result = spec_of(trial).max_steps, _record(trial.user_attrs[RECORD])
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
        if _is_asked(trial):  # the last one asked at an index says what the index is
            continued[trial_index] = RESUMED_FROM in trial.user_attrs
    count = points + min(sum(continued.values()), MAX_CONTINUED * points)
    return [trial_index for trial_index in range(count) if trial_index not in taken]


def running(trials: Trials, worker: str | None = None) -> list[TrialSpec]:
    """Return the trials that run now; only those of ``worker`` if it is given."""
    mine = (trial for trial in _running(trials) if worker is None or worker_of(trial) == worker)
    return [spec_of(trial) for trial in mine if _is_asked(trial)]


def trained_by(study: optuna.Study, number: int) -> str:
    """Return whose process ran a trial, for people."""
    worker = worker_of(study.get_trials(deepcopy=False)[number])
    lease = study.user_attrs.get(PREFIX + worker)
    return "a process that left no lease" if lease is None else str(json.loads(lease)["name"])


def working(trials: Trials) -> set[str]:
    """Return the ids of the processes whose trials run."""
    return {worker_of(trial) for trial in _running(trials)}


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


def _begin(
    study: optuna.Study, turn: Turn, template: FrozenTrial, spec: TrialSpec
) -> AskedTrial | None:
    """Store a trial that was suggested; None if another process has begun one at its index before.

    All of it is stored in one transaction, and numbers count up: of two trials at one index the one with the smaller
    number stays.
    """
    if any(_has_begun(trial, turn.trial_index) for trial in turn.trials):
        return None
    storage, study_id = study._storage, study._study_id
    expected = len(turn.trials)
    # Optuna's ask() cannot store parameters and attributes in the transaction that makes the trial.
    trial_id = patient(storage.create_new_trial)(study_id, template)
    find = patient(storage.get_trial_id_from_study_id_trial_number)
    if find(study_id, expected) == trial_id:  # no trial was begun since the index was found free
        return trial_id, replace(spec, number=expected)
    trials = read(study)
    own = next(trial for trial in trials if trial._trial_id == trial_id)
    earlier = (trial for trial in trials if trial.number < own.number)
    for first in earlier:
        if not _has_begun(first, turn.trial_index):
            continue
        if worker_of(first) != turn.worker:
            _drop(study, trial_id)
            return None
        # The storage made it without answering, and was asked again.
        _drop(study, first._trial_id)
    return trial_id, replace(spec, number=own.number)


def _has_begun(trial: FrozenTrial, trial_index: int) -> bool:
    """Tell whether a trial runs, or has run to its end, at an index."""
    return trial.state in TAKEN and trial_index_of(trial) == trial_index


def _drop(study: optuna.Study, trial_id: int) -> None:
    """End a trial that was stored in vain and never runs."""
    with suppress(UpdateFinishedTrialError):
        patient(study._storage.set_trial_user_attr)(trial_id, LOST, True)
    _end(study, trial_id, TrialState.FAIL)


def _failed(trials: Trials, trial_index: int) -> list[FrozenTrial]:
    """Return the failed trials of an index, without those that were dropped."""
    failed = (trial for trial in read(trials) if trial.state == TrialState.FAIL)
    return [trial for trial in failed if _is_asked(trial) and trial_index_of(trial) == trial_index]


def _failures(failed: Sequence[FrozenTrial]) -> int:
    """Return how many trials failed by themselves: one that was cut short has no record."""
    return sum(RECORD in trial.user_attrs for trial in failed)


def attempt(turn: Turn) -> int:
    """Return how many points were given up at its index, because each of their trials failed by itself."""
    return _failures(_failed(turn.trials, turn.trial_index)) // TRIES


@dataclass(frozen=True)
class Ranking:
    """How a sampler that ranks pruned trials by what they reported, as TPE does, sees a stopped one."""

    target: Target

    def seen(self, trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
        """Return the trials, those that missed the target with their gap to it.

        TPE ranks pruned trials by their last reported step, then by the value there. Steps mean
        different things at different batch sizes, so all get the same one: the gap ranks them.
        """
        return [self._with_gap(trial) for trial in trials]

    def _with_gap(self, trial: FrozenTrial) -> FrozenTrial:
        if trial.state != TrialState.PRUNED or RECORD not in trial.user_attrs:
            return trial
        result = _record(trial.user_attrs[RECORD])
        values = [value for _, value in result.history if value is not None]
        if result.reached or not values:
            return trial
        seen = copy.copy(trial)
        seen.intermediate_values = {REPORTED: self.target.gap(values[-1])}
        return seen


def _unlimited(spec: TrialSpec) -> TrialSpec:
    return spec


def ask(
    study: optuna.Study,
    turn: Turn,
    budget: SearchBudget,
    space: Space,
    sampler: BaseSampler,
    stops: bool,
    baseline: tuple[Baseline, int | None] | None = None,
    ranking: Ranking | None = None,
    limited: Callable[[TrialSpec], TrialSpec | None] = _unlimited,
) -> AskedTrial | None:
    """Ask a trial at an index, as the sampler suggests it or as it was asked before it was cut short.

    ``stops``: whether a trial can be stopped early and continued; else the sampler's limits count only as horizons.
    ``baseline``: what the first index runs in place of a suggestion, and for how many steps at most.
    ``ranking``: of trials without a value, where the sampler ranks them by what they reported.
    ``limited``: the trial within the time that is left; None where that is too short, and then nothing is stored.

    Returns:
        None as well if another process has begun a trial at the index meanwhile.
    """
    draft, spec = _draft(study, turn, budget, space, sampler, stops, baseline, ranking)
    within = limited(spec)
    return None if within is None else _begin(study, turn, _template(draft, turn, within), within)


def _draft(
    study: optuna.Study,
    turn: Turn,
    budget: SearchBudget,
    space: Space,
    sampler: BaseSampler,
    stops: bool,
    baseline: tuple[Baseline, int | None] | None,
    ranking: Ranking | None,
) -> tuple[Draft, TrialSpec]:
    """Suggest a trial that is not stored yet; the arguments are those of :func:`ask`."""
    trial_index = turn.trial_index
    stopping: Any = sampler if hasattr(sampler, "max_steps") else None
    failed = _failed(turn.trials, trial_index)
    earlier = failed[-1] if failed else None
    if earlier is not None and not (
        RECORD in earlier.user_attrs and _failures(failed) % TRIES == 0
    ):
        draft, trial = _suggested(study, turn, space, sampler, dict(earlier.params), ranking)
        return draft, replace(spec_of(earlier), number=trial.number)
    if trial_index == 0 and baseline is not None and not failed:
        return _draft_baseline(study, turn, space, budget, *baseline)
    chooses = stopping is not None or getattr(sampler, "chooses_batch_sizes", False)
    stratum = None if chooses else budget.stratum(trial_index, space)
    fixed = {} if stratum is None else {"batch_size": stratum}
    draft, trial = _suggested(study, turn, space, sampler, fixed, ranking)
    batch_size = space.snap(trial.params["batch_size"])
    lr, seed = space.lr(batch_size, trial.params["delta"]), budget.trial_seed(trial_index)
    max_steps, resumed_from = None, None
    if stopping is not None and (stops or getattr(sampler, "horizon", False)):
        max_steps, resumed_from = (
            stopping.max_steps(trial.number),
            stopping.resumed_from(trial.number),
        )
        if resumed_from is not None:
            continued = _record(turn.trials[resumed_from].user_attrs[RECORD])
            lr, seed = continued.lr, continued.seed
    delta = space.delta(batch_size, lr)
    values = space.searched(trial.params)  # and back
    dense_steps = None
    if resumed_from is None:
        dense_steps = _first_looks(turn.trials, batch_size)
    return draft, TrialSpec(
        trial.number,
        trial_index,
        batch_size,
        lr,
        delta,
        seed,
        max_steps,
        resumed_from,
        hyperparameters=values,
        dense_steps=dense_steps,
    )


def _first_looks(trials: Sequence[FrozenTrial], batch_size: int) -> tuple[int, int] | None:
    """Give the steps between which a trial is looked at early; None where no trial met the target at its first look.

    When such a trial met it is not known. Another one is expected to take as many steps as the
    nearest in batch size did, or as many examples.
    """
    ended = [_record(one.user_attrs[RECORD]) for one in trials if RECORD in one.user_attrs]
    untold = [one for one in ended if one.reached and one.steps_low == 0]
    if not untold:
        return None
    nearest = min(untold, key=lambda one: abs(math.log(one.batch_size / batch_size)))
    as_many_examples = nearest.steps * nearest.batch_size / batch_size
    earliest = DENSE_FROM_UNTOLD * min(nearest.steps, as_many_examples)
    return max(1, math.floor(earliest)), math.ceil(max(nearest.steps, as_many_examples))


def _draft_baseline(
    study: optuna.Study,
    turn: Turn,
    space: Space,
    budget: SearchBudget,
    baseline: Baseline,
    max_steps: int | None,
) -> tuple[Draft, TrialSpec]:
    """Ask the user's own configuration, which Optuna has at the nearest place within its ranges."""
    delta = space.delta(baseline.batch_size, baseline.lr)
    searched = space.searched(baseline.hyperparameters)
    params = {"batch_size": baseline.batch_size, "delta": delta, **searched}
    within = {
        name: nearest(params[name], distribution)
        for name, distribution in distributions(space).items()
    }
    draft, trial = _suggested(study, turn, space, RandomSampler(seed=0), within)
    seed = budget.trial_seed(turn.trial_index)
    return draft, baseline_spec(baseline, trial.number, space, seed, max_steps)


def ask_replicate(
    study: optuna.Study,
    winner: Winner,
    replicate: int,
    budget: SearchBudget,
    space: Space,
    stops: bool,
    worker: str = "",
    horizon: int | None = None,
    seed_of: TrialResult | None = None,
) -> AskedTrial | None:
    """Ask a trial with all of another's hyperparameters, on a fresh seed; None if another process runs it.

    ``seed_of``: a winner's replicate, on whose seed the baseline runs.

    Where trials stop it takes at most twice the steps that the other took, or that a fresh seed is predicted to take,
    and no fewer than any trial; elsewhere it has this horizon, or that of the replicates before, where the other's was
    chosen too.
    """
    original = winner.trial
    place = original.trial_index if seed_of is None else 0
    trial_index = budget.replicate_index(place, replicate)
    turn = turn_at(study, trial_index, worker)
    first = turn.trials[original.number]
    max_steps = spec_of(first).max_steps
    if stops:
        max_steps = math.ceil(max(REPLICATE_LIMIT * max(original.steps, winner.steps), MIN_STEPS))
    elif max_steps is not None:
        max_steps = winner.horizon if winner.runs else horizon or max_steps
    spec = replace(
        spec_of(first),
        trial_index=trial_index,
        seed=budget.trial_seed(trial_index) if seed_of is None else seed_of.seed,
        max_steps=max_steps,
        resumed_from=None,
        replicate_of=original.number,
        dense_steps=_dense_steps(original, winner.steps),
    )
    return _ask_again(study, turn, space, first, spec)


def _dense_steps(original: TrialResult, predicted: float) -> tuple[int, int]:
    """Give the steps between which a fresh seed is expected to meet the target."""
    earliest = min(float(original.steps), predicted) * DENSE_FROM
    # A first evaluation that met the target says only that it was met before.
    if original.steps_low == 0:
        earliest = original.steps * DENSE_FROM_UNTOLD
    latest = max(float(original.steps), predicted) * DENSE_UNTIL
    return max(1, math.floor(earliest)), math.ceil(latest)


def ask_continuation(
    study: optuna.Study,
    stopped: TrialResult,
    max_steps: int,
    space: Space,
    worker: str = "",
    *,
    afresh: bool = False,
) -> AskedTrial | None:
    """Ask a trial that continues a stopped one, at an index of its own; None if another process has taken that.

    ``afresh``: it is trained again from its first step, as nothing can be continued.
    """
    trials = read(study)
    indices = [trial_index_of(trial) or 0 for trial in trials]
    last = max(index for index in indices if index < FIRST_REPLICATE)
    turn = Turn(last + 1, worker, trials)
    parent = trials[stopped.number]
    spec = replace(
        spec_of(parent),
        trial_index=turn.trial_index,
        max_steps=max_steps,
        resumed_from=None if afresh else stopped.number,
    )
    return _ask_again(study, turn, space, parent, spec)


def _ask_again(
    study: optuna.Study, turn: Turn, space: Space, earlier: FrozenTrial, spec: TrialSpec
) -> AskedTrial | None:
    """Ask a trial with the parameters of an earlier one."""
    draft, _ = _suggested(study, turn, space, RandomSampler(seed=0), dict(earlier.params))
    return _begin(study, turn, _template(draft, turn, spec), spec)


def _suggested(
    study: optuna.Study,
    turn: Turn,
    space: Space,
    sampler: BaseSampler,
    fixed: dict[str, Any],
    ranking: Ranking | None = None,
) -> tuple[Draft, optuna.Trial]:
    seen = turn.trials if ranking is None else ranking.seen(turn.trials)
    draft = Draft(study, seen)
    with warnings.catch_warnings(action="ignore", category=ExperimentalWarning):
        chosen = PartialFixedSampler(fixed, sampler) if fixed else sampler
        # A sampler may store what it has to remember of the study.
        trial = patient(optuna.Trial)(draft.study(chosen), draft.trial_id)
        for name, one in distributions(space).items():
            if isinstance(one, IntDistribution):
                patient(trial.suggest_int)(name, one.low, one.high, log=one.log)
            else:
                patient(trial.suggest_float)(name, one.low, one.high, log=one.log)
    return draft, trial


def _template(draft: Draft, turn: Turn, spec: TrialSpec) -> FrozenTrial:
    """Return a suggested trial with all that its storage is given before it runs."""
    attributes = {LEARNING_RATE: spec.lr, SPEC: _text_of(spec, turn.worker)}
    if spec.resumed_from is not None:
        attributes[RESUMED_FROM] = spec.resumed_from
    return draft.template(redact_values(attributes))


def within_steps(spec: TrialSpec, max_steps: int) -> TrialSpec:
    """Return what a trial is asked to do, to end after ``max_steps`` at most."""
    if spec.max_steps is not None and spec.max_steps <= max_steps:
        return spec
    return replace(spec, max_steps=max_steps)


def shorten(study: optuna.Study, asked: AskedTrial, max_steps: int, worker: str = "") -> None:
    """Store that a trial which ``worker`` runs ends after ``max_steps`` at most."""
    trial_id, spec = asked
    shortened = within_steps(spec, max_steps)
    if shortened != spec:
        text = _text_of(shortened, worker)
        patient(study._storage.set_trial_user_attr)(trial_id, SPEC, text)


@contextmanager
def cut_short(study: optuna.Study, objective: Objective, worker: str) -> Iterator[None]:
    """End all running trials of ``worker`` if the body, which runs them, raises: they are asked again later."""
    try:
        yield
    except StorageGoneError:  # nothing can be ended in it
        raise
    except BaseException:  # Ctrl-C too; it goes on up
        for spec in running(study, worker):
            _warn(
                spec, " was cut short; the finished ones are stored, the same command asks it again"
            )
        finish_abandoned(study, objective, lambda other: other == worker)
        raise


def _warn(spec: TrialSpec, what: str) -> None:
    logger.warning("trial %d (B %d, lr %g)%s", spec.number, spec.batch_size, spec.lr, what)


def finish_abandoned(
    study: optuna.Study, objective: Objective, gone: Callable[[str], bool]
) -> None:
    """End the running trials of processes that are gone: with their record if it was stored, as failed otherwise."""
    for trial in _running(study):
        if not gone(worker_of(trial)):
            continue
        record = trial.user_attrs.get(RECORD)
        if record is None:
            _end(study, trial._trial_id, TrialState.FAIL)
        else:
            _tell(study, trial._trial_id, TrialResult.from_json(record), objective)


def store_unstored(study: optuna.Study, files: Output) -> None:
    """Store the records of trials that finished while the storage was away, before :func:`finish_abandoned`."""
    if not files.unstored.exists():
        return
    text = read_bytes(files.unstored, "the file").decode("utf-8", errors="replace")
    lines = text.splitlines()
    if not all(_may_be_record(line) for line in lines):
        raise StudyError(
            f"{files.unstored} holds other lines than the records of trials, which bstune keeps there while the "
            "storage is away: move it away"
        )
    by_number = {trial.number: trial for trial in _running(study)}
    for record in lines:
        try:
            trial = by_number.get(TrialResult.from_json(record).number)
        except RecordError:
            logger.warning(
                "%s has a record that was cut short: its trial is asked again", files.unstored
            )
            continue
        if trial is not None:  # nobody has given it to another process meanwhile
            patient(study._storage.set_trial_user_attr)(trial._trial_id, RECORD, record)
    files.unstored.unlink()


def _may_be_record(line: str) -> bool:
    """Return whether a line begins as a trial's record does; it may have been cut short."""
    return line.startswith(RECORD_BEGINS) or RECORD_BEGINS.startswith(line)


def tell(study: optuna.Study, asked: AskedTrial, result: TrialResult, objective: Objective) -> None:
    """Store a trial's record, and tell Optuna its value: reached is COMPLETE, failed is FAIL, the others are PRUNED."""
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
    _tell(study, trial_id, result, objective)


def outcome(result: TrialResult) -> dict[str, Any]:
    """Give a trial's end as Optuna's dashboard shows it; a stopped trial has no steps to target."""
    steps = "steps" if result.reached else "stopped at step"
    shown: dict[str, Any] = {"status": result.status, steps: result.steps}
    if result.time_to_target is not None:
        shown["seconds"] = result.time_to_target
    return shown


def _end(
    study: optuna.Study, trial_id: int, state: TrialState, values: Sequence[float] | None = None
) -> None:
    """End a trial, unless another process has: both may have found that its own is gone."""
    # study.tell() reads the trial twice besides.
    end = patient(study._storage.set_trial_state_values)
    with suppress(UpdateFinishedTrialError):
        end(trial_id, state, values)


def _tell(study: optuna.Study, trial_id: int, result: TrialResult, objective: Objective) -> None:
    with suppress(UpdateFinishedTrialError):
        patient(study._storage.set_trial_user_attr)(trial_id, OUTCOME, outcome(result))
    if result.status == "failed":
        _end(study, trial_id, TrialState.FAIL)
        return
    sought = SOUGHT[objective].values
    values = list[float]()
    for value_of in sought.values():
        value = value_of(result)
        # Seconds of another device than the study's do not count.
        if value is not None:
            values.append(value)
    if result.reached and len(values) == len(sought):
        _end(study, trial_id, TrialState.COMPLETE, values)
    else:  # it has no value: what it was stopped at is not one
        _end(study, trial_id, TrialState.PRUNED)


def distributions(space: Space) -> dict[str, IntDistribution | FloatDistribution]:
    """Return the parameters of a study, as :func:`ask` suggests them."""
    searched: dict[str, IntDistribution | FloatDistribution] = {
        "batch_size": IntDistribution(space.low, space.high, log=True),
        "delta": FloatDistribution(-space.delta_bound, space.delta_bound),
    }
    for one in space.tunables:
        if one.integer:
            searched[one.name] = IntDistribution(round(one.low), round(one.high), log=one.log)
        else:
            low, high = sorted((one.searched(one.low), one.searched(one.high)))
            searched[one.name] = FloatDistribution(low, high, log=one.log)
    return searched


def build_sampler(
    options: StudyOptions,
    budget: SearchBudget,
    trial_index: int,
    context: Mapping[str, Any] | None = None,
    attempt: int = 0,
    factory: partial[BaseSampler] | None = None,
) -> BaseSampler:
    """Build the sampler of one trial, with its own seed and the entries of ``context`` that its class asks for.

    ``factory`` is what ``sampler_factory`` makes of the options, where that is at hand: Hydra takes longer over it than
    a sampler over a suggestion.
    """
    # What a sampler is given, such as another sampler, is its own: no trial finds it as used.
    factory = sampler_factory(options) if factory is None else copy.deepcopy(factory)
    sampler = getattr(factory, "func", None)
    if not (inspect.isclass(sampler) and issubclass(sampler, BaseSampler)):
        raise ConfigError(
            f"sampler must name an optuna.samplers.BaseSampler in _target_, but got {options.sampler}"
        )
    seed, wanted = budget.sampler_seed(trial_index, attempt), getattr(sampler, "context", ())
    place = {"trial_index": trial_index, "attempt": attempt, "study_seed": budget.seed}
    arguments = {
        name: value for name, value in {**(context or {}), **place}.items() if name in wanted
    }
    if issubclass(
        sampler, QMCSampler
    ):  # keeps one seed: its place in the sequence is kept in the storage
        arguments |= {"seed": budget.seed, "independent_sampler": RandomSampler(seed=seed)}
    elif "seed" in inspect.signature(sampler).parameters:
        arguments["seed"] = seed
    try:
        with warnings.catch_warnings(action="ignore", category=ExperimentalWarning):
            built: BaseSampler = factory(**arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"sampler cannot be built: {error}") from error
    return built
