"""Read a study's folder back: it is data, read within limits, and nothing in it is run."""

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bstune.core.errors import InputError
from bstune.core.records import Record
from bstune.options import Options, options_from
from bstune.study.machine import Machine
from bstune.study.result import SCHEMA, StudyResult
from bstune.system.files import StudyFolder, read_json, read_text, read_yaml

# An answer from so many takes two minutes.
MOST_RECORDS = 5_000


def read_result(folder: Path) -> StudyResult:
    """Read the result in a study's folder.

    Raises:
        InputError: if curve.json is missing, too large, broken or of another schema.
    """
    path = StudyFolder(folder).curve
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
        raise InputError(f"{path} is no study's result: {_first(error)}") from error


def read_records(folder: Path) -> list[Record]:
    """Read the records in a study's folder, in the order of its lines.

    Raises:
        InputError: if trials.jsonl is missing, too large or broken.
    """
    path = StudyFolder(folder).trials
    lines = [line for line in read_text(path).split("\n") if line]
    if len(lines) > MOST_RECORDS:
        raise InputError(f"{path} must have at most {MOST_RECORDS:,} trials, but has more")
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(Record.model_validate_json(line))
        except ValidationError as error:
            raise InputError(f"{path}, line {number}, is no trial: {_first(error)}") from error
    return records


def read_asked(folder: Path) -> tuple[Options, Machine, dict[str, Any]]:
    """Read what a study asks, which its folder has from its beginning on.

    Returns:
        Its options, its machine, and what config.yaml has beside options: ``command``, which runs
        the study, ``schedule_follows``, and ``table``, where recorded runs answer its trials.

    Raises:
        InputError: if config.yaml or hardware.json is missing, too large or broken.
    """
    files = StudyFolder(folder)
    config = read_yaml(files.config)
    if not isinstance(config, dict) or "command" not in config:
        raise InputError(f"{files.config} does not tell what its study asks: run its study again")
    values = {name: config.pop(name) for name in Options.model_fields if name in config}
    try:
        machine = Machine.model_validate(read_json(files.hardware))
    except ValidationError as error:
        raise InputError(f"{files.hardware} is no machine: {_first(error)}") from error
    return options_from(values), machine, config


def _first(error: ValidationError) -> str:
    """Write the first of a value's errors in one line."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}" if where else first["msg"]
