"""A study's output folder as it can be read: whole, of a former version, or half-written by a study that was killed."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from bstune.core.errors import RecordError, StudyError
from bstune.core.records import STATUSES, TrialResult
from bstune.report.rows import WINNERS, Summary
from bstune.system.files import Output

FORMER = {
    "ended": "stop_reason"
}  # keys of curve.json, and of its statuses, by the names that former versions had
FORMER_STATUSES = {"budget": "censored"}
# What stands for the keys of curve.json that a former version lacks.
UNKNOWN = "use train metric goal mode stop_reason critical fit fit_note noise_scale curve lr_exponent seed_scatter load"
UNKNOWN += " unreached search reference not_run_again arguments over_target_note over_target_growth tokens batch_growth"
EMPTY: dict[str, Any] = {
    **dict.fromkeys(("study", "workload", "target"), "?"),
    **dict.fromkeys((*UNKNOWN.split(), *WINNERS)),
    **{name: [] for name in ("devices", "points", "regimes", "notes", "pareto", "over_target")},
    **dict.fromkeys(("trials", "continued"), 0),
    "statuses": dict.fromkeys(STATUSES, 0),
    "training_loops": {},
    "test": {},
    "scale_out": {"ideal": [], "with_all_reduce": []},
}
OLDER = "an older version of bstune wrote this study: parts of its answer are missing"
EMPTY_CRITICAL: dict[str, Any] = {
    **dict.fromkeys(
        (
            "b_crit",
            "b_crit_low",
            "b_crit_high",
            "s_min",
            "e_min",
            "b_opt",
            "b_opt_low",
            "b_opt_high",
        )
    ),
    **dict.fromkeys(
        ("perfect_scaling_below", "maximal_data_parallelism_above", "smallest", "largest", "note")
    ),
    "level": 0.9,
    "next_trials": [],
}
EMPTY_WINNER: dict[str, Any] = dict.fromkeys(
    ("horizon", "confirmed", "single_run", "seconds_per_step", "time_to_target")
)


@dataclass(frozen=True)
class StudyFolder:
    """What a study left: None for each file that is missing or cannot be read, and then a line in ``notes``."""

    path: Path  # the folder
    summary: Summary  # curve.json; keys that a former version lacks are there, None or empty
    trials: tuple[
        TrialResult, ...
    ]  # in order of their numbers; empty where there is no file of them
    hardware: Mapping[str, Any] | None  # None without a note: the hardware was not surveyed
    config: Mapping[str, Any] | None  # its references as such
    best: Mapping[str, Any] | None
    notes: tuple[str, ...]


def read_study(path: str | Path) -> StudyFolder:
    """Return a study from its folder, or from its ``curve.json`` alone; StudyError where neither can be read."""
    path = Path(path)
    files = Output(path.parent if path.is_file() else path)
    if (
        path.is_file() and path != files.curve
    ):  # what lies beside a file of another name may be another study's
        return StudyFolder(path, _read_summary(path), (), None, None, None, ())
    return replace(read_files(files), summary=_read_summary(files.curve))


def read_files(files: Output) -> StudyFolder:
    """Return what there is in a study's folder, which need not have a ``curve.json``: the summary is then empty."""
    notes = list[str]()
    hardware = _read(files.survey, json.loads, notes) if files.survey.exists() else None
    if hardware is not None and not {"high", "measured", "at", "smallest"} <= {
        *hardware,
        *hardware.get("ceiling", ()),
    }:
        notes.append(f"{files.survey.name} is of another version of bstune, and is left out")
        hardware = None
    config, best = (_read(one, yaml.safe_load, notes) for one in (files.config, files.best))
    summary = _read_summary(files.curve) if files.curve.exists() else completed({})
    return StudyFolder(
        files.root, summary, read_trials(files.trials, notes), hardware, config, best, tuple(notes)
    )


def read_trials(path: Path, notes: list[str]) -> tuple[TrialResult, ...]:
    """Return the records of a ``trials.jsonl``; what cannot be read becomes one line in ``notes``."""
    text = _text(path, notes)
    trials, faults = list[TrialResult](), list[str]()
    for number, line in enumerate((text or "").splitlines(), start=1):
        try:
            trials.append(TrialResult.from_json(line))
        except (
            RecordError,
            TypeError,
            ValueError,
        ) as error:  # TypeError: of a value of another kind
            faults.append(f"line {number}: {str(error).splitlines()[0]}")
    if faults:
        more = f", and {len(faults) - 1} more" if len(faults) > 1 else ""
        notes.append(f"{path.name}: {faults[0]}{more}: left out")
    return tuple(sorted(trials, key=lambda trial: trial.number))


def completed(values: Mapping[str, Any]) -> Summary:
    """Return the content of a ``curve.json`` of any version with the keys of this one."""
    summary = {**EMPTY, **{FORMER.get(name, name): value for name, value in values.items()}}
    summary["statuses"] = {
        FORMER_STATUSES.get(name, name): count for name, count in summary["statuses"].items()
    }
    for name, empty in (("critical", EMPTY_CRITICAL), *((name, EMPTY_WINNER) for name in WINNERS)):
        if summary[name] is not None:
            summary[name] = {**empty, **summary[name]}
    for winner in (summary[name] for name in WINNERS):
        if winner is not None and winner["single_run"] is None and winner["confirmed"] is not None:
            # what is now its single run stood where the median over fresh seeds does
            winner |= {"steps": winner["confirmed"].get("steps_median", winner.get("steps"))}
            winner |= {
                "time_to_target": winner["confirmed"].get("time_median", winner["time_to_target"])
            }
    return summary


def _read_summary(path: Path) -> Summary:
    if not path.exists():
        folder, why = path.parent, "a study writes it at its end"
        if not folder.is_dir():
            raise StudyError(
                f"there is no folder {folder}: give a study's output folder, such as outputs/digits"
            )
        if Output(folder).trials.exists():
            why = "its study has not ended: run the command that began it again"
        raise StudyError(f"{folder} has no curve.json ({why})")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StudyError(f"{path} cannot be read: {_reason(error)}") from error
    if not isinstance(values, dict) or "points" not in values:
        raise StudyError(f"{path} is no curve.json of bstune: it lacks points")
    summary = completed(values)
    if not {"use", "critical", "curve"} <= values.keys():
        summary["notes"] = [*summary["notes"], OLDER]
    return summary


def _read(path: Path, parse: Callable[[str], Any], notes: list[str]) -> Mapping[str, Any] | None:
    text = _text(path, notes)
    if text is None:
        return None
    try:
        values = parse(text)
    except (ValueError, yaml.YAMLError) as error:
        notes.append(f"{path.name} cannot be read: {_reason(error)}")
        return None
    if not isinstance(values, dict):
        notes.append(f"{path.name} is empty, or no mapping")
        return None
    return values


def _text(path: Path, notes: list[str]) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        notes.append(f"{path.name} is missing")
    except (OSError, ValueError) as error:
        notes.append(f"{path.name} cannot be read: {_reason(error)}")
    return None


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())
