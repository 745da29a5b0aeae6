"""A study's output folder as it can be read: whole, or half-written by a study that was killed.

A folder is data: it may come from anybody. Its files are read as text of bounded size, parsed
within bounds, and checked against what they may hold (:mod:`bstune.report.schema`) before anything
else sees a value of them. Nothing that a folder names is imported or called here.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bstune.core.errors import BstuneError, InputError, RecordError, StudyError
from bstune.core.records import TrialResult
from bstune.report.schema import HardwareFile, parse_checked, read_result
from bstune.result import StudyResult
from bstune.system.files import Output
from bstune.system.inputs import TEXT_LIMIT, parse_yaml, read_text

# The most bytes of config.yaml and of best.yaml, which the page shows whole.
SHOWN_YAML_LIMIT = 500_000


@dataclass(frozen=True)
class StudyFiles:
    """The files that lie beside a study's result.

    None stands for a file that is missing or cannot be read. ``notes`` has a line for each of them.
    """

    path: Path
    """The folder."""
    trials: tuple[TrialResult, ...]
    """In order of their numbers; empty where there is no file of them."""
    hardware: HardwareFile | None
    """The survey. It may be missing without a note, as a study need not have one."""
    config: Mapping[str, Any] | None
    """The content of ``config.yaml``, in which references are not resolved."""
    best: Mapping[str, Any] | None
    """The content of ``best.yaml``."""
    notes: tuple[str, ...]
    """Lines on files that are missing or cannot be read."""


@dataclass(frozen=True)
class StudyFolder:
    """A study: its result, and the files that lie beside it."""

    result: StudyResult
    files: StudyFiles


def read_study(path: str | Path) -> StudyFolder:
    """Read a study from its folder, or from a file of its result.

    Beside a file that is not called ``curve.json`` nothing is read. StudyError where the result
    cannot be read.
    """
    path = Path(path)
    files = Output(path)
    if path.is_file():
        files = Output(path.parent)
        if path != files.curve:
            # The files beside a file of another name may be another study's.
            alone = StudyFiles(path, trials=(), hardware=None, config=None, best=None, notes=())
            return StudyFolder(read_curve(path), alone)
    return StudyFolder(read_curve(files.curve), read_files(files))


def each_study(
    paths: Sequence[str],
    left_out: list[str],
    read: Callable[[str], StudyFolder] = read_study,
) -> Iterator[tuple[str, StudyFolder]]:
    """Yield each study in folders or ``curve.json`` files once, with its path as it was given.

    Args:
        paths: folders and files.
        left_out: gets a line for each study that cannot be read.
        read: gives the study of a path, as it ended or at another target.

    Raises:
        StudyError: for a path that is not there, as its name may be mistyped.
    """
    seen = set[Path]()
    for path in paths:
        if not Path(path).exists():
            raise StudyError(
                f"there is no {path}: give studies' output folders, such as outputs/digits"
            )
        # One that cannot be read does not keep the others from being compared.
        try:
            study = read(path)
        except StudyError as error:
            left_out.append(f"left out: {error}")
            continue
        file = Path(path)
        if file.is_dir():
            file = Output(file).curve
        if file.resolve() not in seen:
            yield path, study
        seen.add(file.resolve())


def read_files(files: Output) -> StudyFiles:
    """Read the files in a study's folder beside its ``curve.json``, as far as they are there."""
    notes = list[str]()
    hardware = None
    # A study may have no survey: only one that cannot be read is worth a note.
    if files.survey.exists():
        hardware = _read_hardware(files.survey, notes)
    config = _read_yaml(files.config, notes)
    best = _read_yaml(files.best, notes)
    trials = read_trials(files.trials, notes)
    return StudyFiles(
        path=files.root,
        trials=trials,
        hardware=hardware,
        config=config,
        best=best,
        notes=tuple(notes),
    )


def read_trials(path: Path, notes: list[str]) -> tuple[TrialResult, ...]:
    """Read the records of a ``trials.jsonl``, in order of the trials' numbers.

    Records that cannot be read are left out, and ``notes`` gets one line on all of them.
    """
    text = _text(path, notes)
    trials = list[TrialResult]()
    numbers = set[int]()
    faults = list[str]()
    for line_number, line in enumerate((text or "").splitlines(), start=1):
        try:
            trial = TrialResult.from_json(line)
            _check_number_and_origin(trial, numbers)
            trials.append(trial)
            numbers.add(trial.number)
        except RecordError as error:
            faults.append(f"line {line_number}: {str(error).splitlines()[0]}")
    if faults:
        # One line tells of all faults: a file of something else has one in each of its lines.
        faults_text = faults[0]
        if len(faults) > 1:
            faults_text += f", and {len(faults) - 1} more"
        notes.append(f"{path.name}: {faults_text}: left out")
    return tuple(sorted(trials, key=lambda trial: trial.number))


def _check_number_and_origin(trial: TrialResult, numbers: Collection[int]) -> None:
    """Refuse a second record of a trial, and a trial that continues itself or a later one.

    ``numbers``: the numbers of the trials before it. A refusal is a RecordError.
    """
    if trial.number in numbers:
        raise RecordError(f"there is a record of trial {trial.number} already")
    for earlier in (trial.resumed_from, trial.replicate_of):
        if earlier is not None and earlier >= trial.number:
            raise RecordError(f"trial {trial.number} cannot follow on trial {earlier}")


def read_curve(path: Path) -> StudyResult:
    """Read a ``curve.json``. Where that fails, StudyError says why and what to do."""
    # Each way in which it can be missing has a remedy of its own.
    if not path.exists():
        folder = path.parent
        why = "a study writes it at its end"
        if not folder.is_dir():
            raise StudyError(
                f"there is no folder {folder}: give a study's output folder, such as outputs/digits"
            )
        if Output(folder).trials.exists():
            why = "its study has not ended: run the command that began it again"
        raise StudyError(f"{folder} has no curve.json ({why})")
    try:
        text = read_text(path, "the results")
    except InputError as error:
        raise StudyError(str(error)) from error
    return read_result(text, str(path))


def _read_hardware(path: Path, notes: list[str]) -> HardwareFile | None:
    """Read a ``hardware.json``. None, with a line in ``notes``, where that fails."""
    text = _text(path, notes)
    if text is None:
        return None
    try:
        return parse_checked(HardwareFile, text, path.name)
    except BstuneError as error:
        notes.append(f"{error}: left out")
        return None


def _read_yaml(path: Path, notes: list[str]) -> Mapping[str, Any] | None:
    """Read a YAML file that holds a mapping. None, with a line in ``notes``, where that fails."""
    text = _text(path, notes, SHOWN_YAML_LIMIT)
    if text is None:
        return None
    try:
        values = parse_yaml(text, path.name)
    except BstuneError as error:
        notes.append(f"{error}: left out")
        return None
    if not isinstance(values, dict):
        notes.append(f"{path.name} is empty, or no mapping: left out")
        return None
    return values


def _text(path: Path, notes: list[str], limit: int = TEXT_LIMIT) -> str | None:
    """Read a file of at most ``limit`` bytes. None, with a line in ``notes``, where that fails."""
    if not path.exists():
        notes.append(f"{path.name} is missing")
        return None
    try:
        return read_text(path, "the study's", limit)
    except InputError as error:
        notes.append(f"{error}: left out")
        return None
