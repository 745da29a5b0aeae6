"""What a study's folder is written and read by: what it asks, its records, its result and the best.

What is read is data, within limits, and nothing in it is run.
"""

from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from bstune.core.errors import InputError
from bstune.core.records import Frozen, Record, Records
from bstune.core.space import Configuration
from bstune.options import Options, options_from
from bstune.study.commands import Way
from bstune.study.machine import Machine
from bstune.study.prepare import OfProject
from bstune.study.result import SCHEMA, StudyResult
from bstune.study.workload import Workload
from bstune.system.files import (
    StudyFolder,
    append_line,
    read_json,
    read_text,
    read_yaml,
    write_text,
)
from bstune.system.secrets import hide

# An answer from so many takes two minutes.
MOST_RECORDS = 5_000


class Origin(Frozen, extra="ignore"):
    """How a study was begun, of its config.yaml, which has its options, too."""

    way: Way
    command: str
    """That runs it."""
    of_project: OfProject
    table: str | None = None
    """Of recorded runs, which answer its trials."""


def config_text(options: Options, workload: Workload, project: OfProject) -> str:
    """A workload's config with all options as they were found, as YAML, without secrets."""
    commands = workload.commands
    origin = Origin(way=commands.way, command=commands.study({}), of_project=project)
    # hardware.json has the survey.
    beside = origin.model_dump(
        mode="json", exclude={"of_project": {"survey"}}, exclude_defaults=True
    )
    config = yaml.safe_load(workload.config) | options.model_dump(mode="json") | beside
    return yaml.safe_dump(hide(config | {"target": str(options.target)}), sort_keys=False)


def write_asked(folder: StudyFolder, config: str, machine: Machine) -> None:
    """Write what a study asks, and where it runs.

    Args:
        folder: of the study.
        config: of :func:`config_text`.
        machine: on which it runs.
    """
    write_text(folder.config, config)
    write_text(folder.hardware, machine.model_dump_json(indent=1) + "\n")


def read_asked(folder: Path) -> tuple[Options, Machine, Origin]:
    """Read what a study asks, which its folder has from its beginning on.

    Raises:
        InputError: if config.yaml or hardware.json is missing, too large or broken.
    """
    files = StudyFolder(folder)
    config = read_yaml(files.config)
    try:
        origin = Origin.model_validate(config)
    except ValidationError as error:
        raise InputError(
            f"{files.config} does not tell what its study asks, {_first_error(error)}: run it again"
        ) from error
    values = {name: config[name] for name in Options.model_fields if name in config}
    try:
        machine = Machine.model_validate(read_json(files.hardware))
    except ValidationError as error:
        raise InputError(f"{files.hardware} is no machine: {_first_error(error)}") from error
    return options_from(values), machine, origin


class TrialsFile:
    """An observer that appends each record to trials.jsonl while a study runs."""

    def __init__(self, folder: StudyFolder) -> None:
        self._folder = folder

    def finished(self, record: Record) -> None:
        """Append a record."""
        append_line(self._folder.trials, record.model_dump_json())


def read_records(folder: Path) -> list[Record]:
    """Read the records in a study's folder, in the order of its lines.

    The study may still run: its last line may be half written, which is an InputError.

    Raises:
        InputError: if trials.jsonl is missing, too large or broken.
    """
    path = StudyFolder(folder).trials
    records = []
    # Texts of trials may have line separators of their own, at which splitlines cuts.
    lines = [line for line in read_text(path).split("\n") if line]
    if len(lines) > MOST_RECORDS:
        raise InputError(f"{path} must have at most {MOST_RECORDS:,} trials, but has more")
    for number, line in enumerate(lines, start=1):
        try:
            records.append(Record.model_validate_json(line))
        except ValidationError as error:
            raise InputError(
                f"{path}, line {number}, is no trial: {_first_error(error)}"
            ) from error
    return records


def write_study(folder: StudyFolder, result: StudyResult, records: Records) -> None:
    """Write a study's answer; each file is whole or as it was.

    Args:
        folder: of the study.
        result: which becomes curve.json, and its best best.yaml.
        records: of all trials, in order of their numbers; they become trials.jsonl.
    """
    write_text(folder.result, result.model_dump_json(indent=1) + "\n")
    lines = [record.model_dump_json() + "\n" for record in records]
    write_text(folder.trials, "".join(lines))
    if result.best is not None:
        fields = set(Configuration.model_fields)
        best = result.best.model_dump(include=fields, exclude_defaults=True)
        if result.best.train_steps is not None:
            best["steps"] = result.best.train_steps
        write_text(folder.best, yaml.safe_dump({"trial": best}))


def read_result(folder: Path) -> StudyResult:
    """Read the result in a study's folder.

    Raises:
        InputError: if curve.json is missing, too large, broken or of another schema.
    """
    path = StudyFolder(folder).result
    values = read_json(path)
    if not isinstance(values, dict):
        raise InputError(f"{path} must be a study's result, but is no mapping")
    schema = values.get("schema_number")
    if schema != SCHEMA:
        raise InputError(
            f"{path} must have the schema number {SCHEMA}, but has {schema!r}: run its study again"
        )
    try:
        return StudyResult.model_validate(values)
    except ValidationError as error:
        raise InputError(f"{path} is no study's result: {_first_error(error)}") from error


def read_best(file: Path) -> Any:
    """Read the options of ``trial`` in a study's best.yaml; InputError for another file."""
    best = read_yaml(file)
    if not isinstance(best, dict) or not isinstance(best.get("trial"), dict):
        raise InputError(f"trial={file} must be the best.yaml of a study, which has a trial")
    return best["trial"]


def _first_error(error: ValidationError) -> str:
    """Write the first of a value's errors in one line."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}" if where else first["msg"]
