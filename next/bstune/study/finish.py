"""The files of a study: config and machine, its records, and at its end the result and the best."""

import yaml

from bstune.core.records import Record, Records
from bstune.core.space import Configuration
from bstune.study.machine import Machine
from bstune.study.result import StudyResult
from bstune.system.files import StudyFolder, append_line, write_text


def write_asked(folder: StudyFolder, config: str, machine: Machine) -> None:
    """Write what a study asks, and where it runs: with its trials they answer other questions.

    Args:
        folder: of the study.
        config: the config as YAML, without secrets and with what was found.
        machine: on which it runs.
    """
    write_text(folder.config, config)
    write_text(folder.hardware, machine.model_dump_json(indent=1) + "\n")


def write_study(folder: StudyFolder, result: StudyResult, records: Records) -> None:
    """Write a study's answer; each file is whole or as it was.

    Args:
        folder: of the study.
        result: which becomes curve.json.
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


class TrialsFile:
    """An observer that appends each record to trials.jsonl while a study runs."""

    def __init__(self, folder: StudyFolder) -> None:
        self._folder = folder

    def finished(self, record: Record) -> None:
        """Append a record."""
        append_line(self._folder.trials, record.model_dump_json())
