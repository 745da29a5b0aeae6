"""Begins or finds a study in Optuna's storage, and refuses one of others or other settings."""

import json
import time
import uuid
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import DuplicatedStudyError, ExperimentalWarning
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from pydantic import TypeAdapter, ValidationError

from bstune.core.errors import BstuneError, StudyError
from bstune.core.objectives import SOUGHT, Objective
from bstune.core.option_names import ARGUMENT_OPTIONS
from bstune.core.records import dump_json
from bstune.search.sampler import RECORD
from bstune.study.planning.wall import TimeTaken
from bstune.study.storage.attributes import (
    ARGUMENTS,
    BUDGET_TIMES,
    DEVICE_KIND,
    FORMAT,
    FORMAT_VERSION,
    FROZEN_SETTINGS,
    OPTIONAL_ATTRIBUTES,
    OUTPUT,
    STUDY_ATTRIBUTES,
    STUDY_ID,
    THREADS_ARE_OPEN,
    TRIAL_ATTRIBUTES,
)
from bstune.study.storage.connection import (
    RACE_SECONDS,
    check_storage,
    connect,
    database_file,
    has_studies,
    storage_errors_as_study_errors,
)
from bstune.study.storage.patience import patient
from bstune.study.storage.trials import is_asked, read_trials, record_of, spec_of
from bstune.system.inputs import one_line, parse_json
from bstune.system.secrets import redact_values

# The keys of the study's attributes begin so.
OWN_PREFIX = "bstune:"
# The frozen settings that follow from torch's number of threads; the device's name has it.
OF_THREADS = ("threads", "device", THREADS_ARE_OPEN)
# Options that are another one's value unless they are set, as conf/config.yaml has them.
FOLLOWED = {
    "budget.examples": "workload.budget.examples",
    "budget.steps": "workload.budget.steps",
    "precision": "workload.precision",
    "scaling.batch_size": "workload.reference.batch_size",
    "scaling.lr": "workload.reference.lr",
    "search.batch_size.high": "workload.batch_size.high",
    "search.batch_size.low": "workload.batch_size.low",
}
TARGET_PARTS = ("workload.target.metric", "workload.target.mode", "workload.target.value")


def open_study(
    name: str,
    url: str,
    objective: Objective,
    frozen_settings: Mapping[str, object],
    output: Path,
    device: str = "",
    arguments: Sequence[str] = (),
    maximizes: bool = False,
) -> optuna.Study:
    """Create the study, or load it if its frozen settings and its output folder are the same.

    Args:
        name: of the study.
        url: of the storage.
        objective: of the study, which says how many values a trial has.
        frozen_settings: settings that must not change while it goes on.
        output: folder of the study's files.
        device: the kind of device whose seconds count.
        arguments: of the command line, with which workers compose the options.
        maximizes: whether a larger value of a trial is better.

    Raises:
        StudyError: where it has other settings or another folder, or is not bstune's.
    """
    attributes = {
        FORMAT: FORMAT_VERSION,
        STUDY_ID: uuid.uuid4().hex,
        OUTPUT: str(output),
        DEVICE_KIND: device,
        ARGUMENTS: list(arguments),
        # This is stored last: once it is there the study is complete.
        FROZEN_SETTINGS: dump_json(frozen_settings),
    }
    with storage_errors_as_study_errors(url):
        study, is_new = _create_or_load(connect(url), name, objective, attributes, maximizes)
        if not is_new:
            _check_continued(study, frozen_settings)
            # A study that began without anybody's choice of torch's threads gets this process's.
            _freeze_open_threads(study, frozen_settings, device)
            check_same_output(study, output)
            # The folder was moved.
            if study.user_attrs[OUTPUT] != str(output):
                study.set_user_attr(OUTPUT, str(output))
    return study


@patient
def _create_or_load(
    storage: BaseStorage,
    name: str,
    objective: Objective,
    attributes: Mapping[str, object],
    maximizes: bool,
) -> tuple[optuna.Study, bool]:
    """Create a study with ``attributes``, or load it; say whether this process created it.

    ``maximizes``: whether a larger value of a trial is better.
    """
    names = list(SOUGHT[objective].values)
    direction = StudyDirection.MINIMIZE
    if maximizes:
        direction = StudyDirection.MAXIMIZE
    directions = [direction] * len(names)
    try:
        study = optuna.create_study(study_name=name, storage=storage, directions=directions)
    except DuplicatedStudyError:
        study = optuna.load_study(study_name=name, storage=storage)
        if not _is_left_incomplete(study):
            # It is this process's own if the storage made it without answering and was asked again.
            return study, study.user_attrs.get(STUDY_ID) == attributes[STUDY_ID]
        # The process that made it was killed meanwhile: this one stores the rest.
    # Optuna warns that names of values are experimental.
    with warnings.catch_warnings(action="ignore", category=ExperimentalWarning):
        study.set_metric_names(names)
    for key, value in attributes.items():
        study.set_user_attr(key, value)
    return study, True


def _is_left_incomplete(study: optuna.Study) -> bool:
    """Wait while another process makes this study; say whether it left the study incomplete.

    One that has trials or attributes of another program is no study of bstune's in the making.
    """
    # One look after the last wait: the other process may have come to its end in it.
    for wait in (*RACE_SECONDS, 0.0):
        if not _may_be_in_the_making(study):
            return False
        time.sleep(wait)
    return True


def _may_be_in_the_making(study: optuna.Study) -> bool:
    """Whether a study has nothing yet but what bstune stores before its frozen settings."""
    attributes = study.user_attrs
    has_trials = bool(study.get_trials(deepcopy=False))
    is_foreign = any(not key.startswith(OWN_PREFIX) for key in attributes)
    return FROZEN_SETTINGS not in attributes and not has_trials and not is_foreign


def find_study(name: str, url: str) -> optuna.Study:
    """Load a study that another process has begun; StudyError if there is none."""
    check_storage(url)
    path = database_file(url)
    names: list[str] = []
    with storage_errors_as_study_errors(url):
        # Connecting would make a database's file that is not there. Without one there are no
        # names, which is refused below.
        if path is None or path.exists():
            storage = connect(url)
            names = patient(optuna.get_all_study_names)(storage)
        if name not in names:
            others = ", ".join(names) or "none at all"
            raise StudyError(
                f"storage={url} has no study {name!r}, but {others}: begin it there with "
                f"bstune workload=NAME storage=... study={name}, then join it"
            )
        study = patient(optuna.load_study)(study_name=name, storage=storage)
        _check_format(study)
        return study


def begun_study(name: str, url: str) -> optuna.Study | None:
    """Load a study that has begun; None where there is none, or it is still in the making.

    Nothing is written: neither a SQLite database's file, nor Optuna's tables in one without.

    Raises:
        StudyError: where the storage does not answer, or the study is not one of this version.
    """
    check_storage(url)
    # Connecting would make the file, and the tables.
    if not has_studies(url):
        return None
    with storage_errors_as_study_errors(url):
        storage = connect(url)
        if name not in patient(optuna.get_all_study_names)(storage):
            return None
        study = patient(optuna.load_study)(study_name=name, storage=storage)
        if patient(_may_be_in_the_making)(study):
            return None
        _check_format(study)
        return study


def stored_settings(name: str, url: str) -> Mapping[str, object]:
    """Read the frozen settings of a study; empty where there is no study that can be read."""
    try:
        return settings_of(find_study(name, url))
    except StudyError:
        return {}


def stored_time_taken(name: str, url: str) -> TimeTaken:
    """Read the wall time that a study has taken; 0 s where there is no study to be read."""
    try:
        return TimeTaken.of(find_study(name, url))
    except StudyError:
        return TimeTaken()


def stored_budget_times(name: str, url: str) -> tuple[tuple[int, float], ...] | None:
    """Read :func:`budget_times_of` a study by its name.

    It is None where there is no study that can be read.
    """
    try:
        return budget_times_of(find_study(name, url))
    except StudyError:
        return None


def budget_times_of(study: optuna.Study) -> tuple[tuple[int, float], ...] | None:
    """Read the seconds of a step, by batch size, that turn a study's budget of seconds into steps.

    It is None where its budget is another one.
    """
    pairs = study.user_attrs.get(BUDGET_TIMES)
    if pairs is None:
        return None
    return tuple((int(batch_size), float(seconds)) for batch_size, seconds in pairs)


def settings_of(study: optuna.Study) -> dict[str, object]:
    """Read the frozen settings that a study began with."""
    what = f"the attribute {FROZEN_SETTINGS} of the study {study.study_name!r}"
    settings = parse_json(study.user_attrs[FROZEN_SETTINGS], what)
    if not isinstance(settings, dict):
        raise StudyError(f"{what} holds no settings: begin another one with study=NAME")
    return settings


def check_joined(study: optuna.Study, frozen_settings: Mapping[str, object]) -> None:
    """Refuse a worker whose settings are not the study's; its device may be another one."""
    # A worker on another device adds steps alone, which do not depend on the device.
    began = settings_of(study)
    _check_continued(study, {**frozen_settings, "device": began.get("device")})


def changed_settings(before: Mapping[str, object], now: Mapping[str, object]) -> str:
    """List the settings that differ, a line each; empty where none does.

    A setting that only follows another one, as the reference follows the workload's, has no line. A
    target of which more than one part differs is one line.
    """
    lines = list[str]()
    keys = before.keys() | now.keys()
    changed_parts = [key for key in TARGET_PARTS if before.get(key) != now.get(key)]
    if len(changed_parts) > 1:
        lines.append(f"  target: was {_target_text(before)}, now {_target_text(now)}")
        keys = keys.difference(TARGET_PARTS)
    for key in sorted(keys):
        was = before.get(key)
        is_now = now.get(key)
        followed = FOLLOWED.get(key)
        follows = False
        if followed is not None:
            follows = was == before.get(followed) and is_now == now.get(followed)
        if was != is_now and not follows:
            lines.append(f"  {key}: was {was!r}, now {is_now!r}")
    return "\n".join(lines)


def _target_text(settings: Mapping[str, object]) -> str:
    """Write the target that settings have, with ``?`` for a part that they lack."""
    metric, mode, value = (settings.get(key, "?") for key in TARGET_PARTS)
    sign = {"min": "<=", "max": ">="}.get(str(mode), "?")
    return f"{metric} {sign} {value}"


def _check_attributes(study: optuna.Study) -> None:
    """Refuse a study whose attributes are not those that bstune writes."""
    for key, kind in STUDY_ATTRIBUTES.items():
        if key not in study.user_attrs and key not in OPTIONAL_ATTRIBUTES:
            raise StudyError(
                f"the study {study.study_name!r} lacks the attribute {key}: "
                "begin another one with study=NAME"
            )
        _check_attribute(study, "", key, study.user_attrs, kind)
    # Settings, specs and records are JSON, which anybody may have written: reading refuses others.
    settings_of(study)
    for trial in read_trials(study):
        place = f"trial {trial.number} of "
        for key, kind in TRIAL_ATTRIBUTES.items():
            _check_attribute(study, place, key, trial.user_attrs, kind)
        try:
            if is_asked(trial):
                spec_of(trial)
            if RECORD in trial.user_attrs:
                record_of(trial.user_attrs[RECORD])
        except BstuneError as error:
            raise StudyError(f"{place}the study {study.study_name!r}: {error}") from error


def _check_attribute(
    study: optuna.Study,
    place: str,
    key: str,
    attributes: Mapping[str, object],
    kind: TypeAdapter[Any],
) -> None:
    """Refuse an attribute that is not of its kind.

    ``place``: the start of the message where it is a trial's, such as ``trial 3 of ``; else empty.
    """
    try:
        if key in attributes:
            kind.validate_python(attributes[key], strict=True)
    except ValidationError as error:
        value = one_line(repr(attributes[key]))
        raise StudyError(
            f"{place}the study {study.study_name!r} has an attribute {key} that bstune has not "
            f"written, {value}: begin another one with study=NAME"
        ) from error


@patient
def _check_format(study: optuna.Study) -> None:
    """Refuse a study that is not bstune's, or has the format of another version."""
    name = study.study_name
    attributes = study.user_attrs
    if FORMAT not in attributes and FROZEN_SETTINGS not in attributes:
        raise StudyError(
            f"the storage has a study {name!r} that is not bstune's: "
            "choose another name with study=NAME"
        )
    # The first format has no attribute for its version.
    version = attributes.get(FORMAT, 1)
    if version != FORMAT_VERSION:
        raise StudyError(
            f"the study {name!r} was begun by another version of bstune (format "
            f"{one_line(repr(version))}; this one reads {FORMAT_VERSION}): continue it with that "
            "version, or begin another one with study=NAME"
        )
    _check_attributes(study)


def _check_continued(study: optuna.Study, frozen_settings: Mapping[str, object]) -> None:
    """Refuse to go on with a study of another format, or with other settings."""
    _check_format(study)
    began = settings_of(study)
    now = dict(frozen_settings)
    # Where nobody has chosen the number of threads, another one is no change. Without a number this
    # process trains on CUDA or several devices: that device is refused below.
    if began.get(THREADS_ARE_OPEN) and now.get("threads") is not None:
        now = _without_threads(now)
        began = _without_threads(began)
    refuse_changes(study, began, now)


def _without_threads(settings: Mapping[str, object]) -> dict[str, object]:
    """Leave out the settings that follow from torch's number of threads."""
    return {key: value for key, value in settings.items() if key not in OF_THREADS}


def _freeze_open_threads(
    study: optuna.Study, frozen_settings: Mapping[str, object], device: str
) -> None:
    """Freeze torch's number of threads where a study began without anybody's choice of it.

    From now on its seconds are those of this number.

    Args:
        study: that goes on.
        frozen_settings: of the process that goes on with it.
        device: the kind of its device.
    """
    began = settings_of(study)
    was_open = bool(began.get(THREADS_ARE_OPEN))
    is_still_open = bool(frozen_settings.get(THREADS_ARE_OPEN))
    if not was_open or is_still_open:
        return
    chosen = {key: frozen_settings[key] for key in OF_THREADS if key in frozen_settings}
    settings = {**_without_threads(began), **chosen}
    # The kind of device is stored first: a process that is killed between the two leaves the number
    # open, and the next one comes here again.
    patient(study.set_user_attr)(DEVICE_KIND, device)
    patient(study.set_user_attr)(FROZEN_SETTINGS, dump_json(settings))


def change_objective(study: optuna.Study, objective: Objective) -> None:
    """Let a study seek another objective from now on, of one value that is minimized too.

    Its trials keep their records. In Optuna, those that have ended keep the value that they have,
    or that they have none.
    """
    settings = {**settings_of(study), ARGUMENT_OPTIONS["objective"]: objective}
    # Optuna warns that names of values are experimental.
    with warnings.catch_warnings(action="ignore", category=ExperimentalWarning):
        patient(study.set_metric_names)(list(SOUGHT[objective].values))
    patient(study.set_user_attr)(FROZEN_SETTINGS, dump_json(settings))


def refuse_changes(
    study: optuna.Study, began: Mapping[str, object], settings: Mapping[str, object]
) -> None:
    """Raise StudyError where settings of a study are others than those that it began with."""
    # They are compared in the form that the storage keeps.
    now = json.loads(dump_json(redact_values(settings)))
    lines = changed_settings(began, now)
    if lines:
        raise StudyError(
            f"the study {study.study_name!r} began with other settings:\n{lines}\n"
            "continue it with the settings it began with, or begin another one with study=NAME"
        )


def check_same_output(study: optuna.Study, output: Path) -> None:
    """Refuse a second output folder while the first one exists."""
    first = Path(study.user_attrs[OUTPUT])
    if first != output and first.exists():
        raise StudyError(
            f"the study {study.study_name!r} writes to {first}: continue it with output={first}, "
            "or begin another one with study=NAME"
        )
