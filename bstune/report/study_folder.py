"""A study's output folder as it can be read: whole, or half-written by a study that was killed.

A folder is data: it may come from anybody. Its files are read as text of bounded size, parsed within bounds, and
checked against what they may hold (:mod:`bstune.report.schema`) before anything else sees a value of them. Nothing
that a folder names is imported or called here.
"""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bstune.core.errors import BstuneError, InputError, RecordError, StudyError
from bstune.core.records import TrialResult, dump_json
from bstune.report.rows import Summary
from bstune.report.schema import CurveFile, HardwareFile, checked
from bstune.system.files import Output
from bstune.system.inputs import TEXT_LIMIT, parse_json, parse_yaml, read_text

YAML_LIMIT = 500_000  # bytes of config.yaml and best.yaml, which the page shows whole


@dataclass(frozen=True)
class StudyFolder:
    """What a study left: None for each file that is missing or cannot be read, and then a line in ``notes``."""

    path: Path  # the folder
    summary: Summary  # curve.json, with all keys of bstune.report.schema.CurveFile
    trials: tuple[
        TrialResult, ...
    ]  # in order of their numbers; empty where there is no file of them
    hardware: Mapping[str, Any] | None  # None without a note: the hardware was not surveyed
    config: Mapping[str, Any] | None  # its references as such
    best: Mapping[str, Any] | None
    notes: tuple[str, ...]


def read_study(path: str | Path) -> StudyFolder:
    """Read a study from its folder, or from its ``curve.json`` alone; StudyError where neither can be read."""
    path = Path(path)
    files = Output(path.parent if path.is_file() else path)
    if path.is_file() and path != files.curve:
        # What lies beside a file of another name may be another study's.
        return StudyFolder(path, _read_summary(path), (), None, None, None, ())
    return replace(read_files(files), summary=_read_summary(files.curve))


def read_files(files: Output) -> StudyFolder:
    """Read what there is in a study's folder, which need not have a ``curve.json``: the summary is then empty."""
    notes = list[str]()
    hardware = None
    if files.survey.exists():
        hardware = _read(files.survey, _hardware, notes)
    config = _read(files.config, parse_yaml, notes)
    best = _read(files.best, parse_yaml, notes)
    summary = _read_summary(files.curve) if files.curve.exists() else completed({"points": []})
    trials = read_trials(files.trials, notes)
    return StudyFolder(files.root, summary, trials, hardware, config, best, tuple(notes))


def read_trials(path: Path, notes: list[str]) -> tuple[TrialResult, ...]:
    """Read the records of a ``trials.jsonl``; what cannot be read becomes one line in ``notes``."""
    text = _text(path, notes)
    trials = list[TrialResult]()
    taken = set[int]()
    faults = list[str]()
    for number, line in enumerate((text or "").splitlines(), start=1):
        try:
            trial = TrialResult.from_json(line)
            _check_order(trial, taken)
            trials.append(trial)
            taken.add(trial.number)
        except RecordError as error:
            faults.append(f"line {number}: {str(error).splitlines()[0]}")
    if faults:
        more = f", and {len(faults) - 1} more" if len(faults) > 1 else ""
        notes.append(f"{path.name}: {faults[0]}{more}: left out")
    return tuple(sorted(trials, key=lambda trial: trial.number))


def _check_order(trial: TrialResult, taken: Collection[int]) -> None:
    """Refuse a second record of a trial, and one that goes on from itself or from a later trial."""
    if trial.number in taken:
        raise RecordError(f"there is a record of trial {trial.number} already")
    for before in (trial.resumed_from, trial.replicate_of):
        if before is not None and before >= trial.number:
            raise RecordError(f"trial {trial.number} cannot follow on trial {before}")


def completed(values: object, what: str = "curve.json") -> Summary:
    """Give a summary as it comes back from a ``curve.json``: as JSON has it, checked, with all keys.

    StudyError, with ``what``, where it is none.
    """
    return checked(CurveFile, json.loads(dump_json(values)), what)


def _read_summary(path: Path) -> Summary:
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
        return completed(parse_json(read_text(path, "the results"), str(path)), str(path))
    except InputError as error:
        raise StudyError(str(error)) from error


def _hardware(text: str, what: str) -> Mapping[str, Any]:
    return checked(HardwareFile, parse_json(text, what), what)


def _read(
    path: Path, parse: Callable[[str, str], Any], notes: list[str]
) -> Mapping[str, Any] | None:
    """Read a file that holds a mapping; None, with a line in ``notes``, where it cannot be read."""
    text = _text(path, notes, YAML_LIMIT if path.suffix == ".yaml" else TEXT_LIMIT)
    if text is None:
        return None
    try:
        values = parse(text, path.name)
    except BstuneError as error:
        notes.append(f"{error}: left out")
        return None
    if not isinstance(values, dict):
        notes.append(f"{path.name} is empty, or no mapping: left out")
        return None
    return values


def _text(path: Path, notes: list[str], limit: int = TEXT_LIMIT) -> str | None:
    if not path.exists():
        notes.append(f"{path.name} is missing")
        return None
    try:
        return read_text(path, "the study's", limit)
    except InputError as error:
        notes.append(f"{error}: left out")
        return None
