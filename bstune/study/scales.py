"""Studies that differ in one scale: what it is of each, and what each tells at it.

A folder is data: its result and its config are read as such, nothing that they name is called.

The scale is found by its name in ``--at``. ``examples`` and ``tokens`` are those of the training
data where the studies differ in them; else those of the budget (of the objective loss, shorter
budgets of one study count, too); else those that a training took to its target, with a study's
easier targets. All else that defines a workload must be the same.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from bstune.core.errors import ConfigError, StudyError
from bstune.core.records import Target, TrialResult
from bstune.options import flatten
from bstune.report.extrapolation import HALF_LIFE_QUANTITIES, Quantity, Reading, ScaleRow
from bstune.report.study_folder import StudyFolder
from bstune.result import AtBudget, StudyResult
from bstune.study.analysis.critical import passing
from bstune.study.folder_config import with_new_options
from bstune.system.console import format_number, listing
from bstune.system.inputs import one_line

SCALES = ("examples", "tokens", "parameters", "seconds")
SMALLEST_SCALE = 1e-15
LARGEST_SCALE = 1e18
DEFINING = ("workload", "protocol", "trainer", "precision")
ALSO_DEFINING = ("scaling.beta2_half_life", "scaling.weight_decay_half_life", "search.tune")
# Defaults of the search and of its speed, and where the data lie: no part of the workload.
SEARCHS_OWN = (
    *("workload.trials", "workload.budget", "workload.batch_size", "workload.reference"),
    *("workload.tunable", "workload.fast", "workload.evaluation_cost"),
    *("protocol.fast", "protocol.trial_seconds", "protocol.noise_scale_every"),
    "protocol.warmup_steps",
)
OF_THE_MACHINE = (".root", ".device")
OF_A_TABLE = ("workload.name", "workload.table")
OF_DATA = ("workload.data.", "workload.given_data", "workload.name")
OF_MODULE = ("workload.module.", "workload.given_module", "workload.name")
AT_END = 1.1  # a best batch size so near to the end of what is known lies at it
ONE_SIDED = 2.0  # so many times as far as the end that is told an open one is taken to lie


@dataclass(frozen=True)
class Scale:
    """A scale, and what it is of each study."""

    name: str
    meaning: str
    own: tuple[str, ...]
    """What the options that may differ begin with."""
    rows: tuple[tuple[ScaleRow, ...], ...]
    """Of each study in their order: what it tells at which scales."""
    grows_within: bool = False
    """Whether it is of the progress within one training."""


def scale_of(
    name: str, studies: Sequence[StudyFolder], values: Mapping[str, float] | None
) -> Scale:
    """Find out what a scale is of these studies.

    Args:
        name: as in ``--at``.
        studies: at least one.
        values: of each study by its name, where the user gives them.

    Raises:
        ConfigError: for an unknown name.
        StudyError: where studies do not tell the scale.
    """
    if values is not None:
        return _given(name, studies, values)
    if name in ("examples", "tokens"):
        return _of_examples(name, studies)
    if name == "parameters":
        return _of_parameters(name, studies)
    if name == "seconds":
        return _of_seconds(name, studies)
    return _of_option(name, studies)


def _given(name: str, studies: Sequence[StudyFolder], values: Mapping[str, float]) -> Scale:
    names = [study.result.study for study in studies]
    if len(set(names)) < len(names):
        raise StudyError(f"--values go by the studies' names, and two are alike: {_names(studies)}")
    if values.keys() != set(names):
        raise ConfigError(
            f"--values takes a number for each study by its name, of {_names(studies)}, but got "
            f"{one_line(listing(sorted(values)))}"
        )
    own: tuple[str, ...] = (*OF_DATA, *OF_MODULE, *OF_A_TABLE)
    if name in ("examples", "tokens"):
        own = (*OF_DATA, *OF_A_TABLE)
    if name == "parameters":
        own = (*OF_MODULE, *OF_A_TABLE)
    scales = [values[one] for one in names]
    return Scale(name, f"{name} as given", own, _rows_at(studies, scales))


def _rows_at(
    studies: Sequence[StudyFolder], values: Sequence[float]
) -> tuple[tuple[ScaleRow, ...], ...]:
    """Give each study one row."""
    return tuple((_whole(study, value),) for study, value in zip(studies, values, strict=True))


def _of_examples(name: str, studies: Sequence[StudyFolder]) -> Scale:
    """Choose what examples are: of the data, of the budget, or to the target."""
    if name == "tokens" and any(study.result.tokens is None for study in studies):
        raise StudyError(f"examples of {_names(studies)} have no tokens: give --at examples=N")
    sizes = [study.result.size for study in studies]
    told = {size.examples for size in sizes if size is not None}
    targets = {study.result.target_value for study in studies}
    is_of_loss = all(study.result.at_budget is not None for study in studies)
    is_of_data = len(told) > 1 or (len(studies) > 1 and len(targets) == 1 and not is_of_loss)
    if is_of_data:
        _all_have_size(studies, f"the {name} of their data")
        values = [
            size.examples * _tokens_of(study, name)
            for size, study in zip(sizes, studies, strict=True)
            if size is not None
        ]
        rows = _rows_at(studies, values)
        return Scale(name, f"{name} of the training data", OF_DATA, rows)
    if is_of_loss:
        _all_are_of_budget(studies, "examples")
        budgets = list[tuple[ScaleRow, ...]]()
        for study in studies:
            whole = (_at_budget(study).examples or math.nan) * _tokens_of(study, name)
            budgets.append(_over_budgets(study, whole))
        return Scale(name, f"{name} of the budget", ("budget.",), tuple(budgets))
    by_target = tuple(_over_targets(study, name) for study in studies)
    meaning = f"{name} that a training took to its target"
    return Scale(name, meaning, ("workload.target.value",), by_target, grows_within=True)


def _of_parameters(name: str, studies: Sequence[StudyFolder]) -> Scale:
    _all_have_size(studies, "their parameters")
    sizes = [study.result.size for study in studies]
    values = [float(size.parameters) for size in sizes if size is not None]
    return Scale(name, "trained parameters", OF_MODULE, _rows_at(studies, values))


def _of_seconds(name: str, studies: Sequence[StudyFolder]) -> Scale:
    _all_are_of_budget(studies, "seconds")
    rows = tuple(_over_budgets(one, _at_budget(one).seconds or math.nan) for one in studies)
    return Scale(name, "seconds of the budget", ("budget.",), rows)


def _of_option(name: str, studies: Sequence[StudyFolder]) -> Scale:
    """Take a numeric option of the workload as the scale, by its name or the end of it."""
    settings = [defining_settings(study) for study in studies]
    keys = sorted({key for one in settings for key in one if f".{key}".endswith(f".{name}")})
    if not keys:
        raise ConfigError(
            f"the scale of --at is one of {', '.join(SCALES)}, or an option of the workload that the "
            f"studies differ in, but got {one_line(name)}"
        )
    if len(keys) > 1:
        raise ConfigError(f"--at {name}=N is one of {listing(keys)}: give it in full")
    key = keys[0]
    values = list[float]()
    for study, one in zip(studies, settings, strict=True):
        value = one.get(key)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not SMALLEST_SCALE <= value <= LARGEST_SCALE:  # type: ignore[operator]
            shown = one_line(repr(value))[:80]
            raise StudyError(
                f"{key} of {one_line(study.result.study)} is no positive number but {shown}: give the "
                "scale of each study, --values STUDY=N,STUDY=N,STUDY=N"
            )
        values.append(float(value))  # type: ignore[arg-type]
    return Scale(name, key, (key,), _rows_at(studies, values))


def _all_have_size(studies: Sequence[StudyFolder], what: str) -> None:
    """Refuse folders that do not tell how large their data and module are."""
    silent = [study for study in studies if study.result.size is None]
    if silent:
        raise StudyError(
            f"{_names(silent)} do not tell {what}, as recorded runs do not: give the scale of each study "
            "by its name, --values STUDY=N,STUDY=N,STUDY=N"
        )


def _all_are_of_budget(
    studies: Sequence[StudyFolder], unit: Literal["seconds", "examples"]
) -> None:
    """Refuse studies that are not of the objective loss, or whose budget is another one."""
    others = list[StudyFolder]()
    for study in studies:
        at_budget = study.result.at_budget
        if at_budget is None or getattr(at_budget, unit) is None:
            others.append(study)
    if others:
        raise StudyError(
            f"{_names(others)} are no studies of a budget of {unit}, as search.objective=loss "
            f"budget.{unit}=N is"
        )


def _names(studies: Sequence[StudyFolder]) -> str:
    return one_line(listing([study.result.study for study in studies]))


def _at_budget(study: StudyFolder) -> AtBudget:
    assert study.result.at_budget is not None  # noqa: S101 (the caller has looked)
    return study.result.at_budget


def _tokens_of(study: StudyFolder, name: str) -> float:
    """Give how many of the scale an example is."""
    if name == "examples":
        return 1.0
    return float(study.result.tokens or 1)


def _over_targets(study: StudyFolder, name: str) -> tuple[ScaleRow, ...]:
    """Give the rows of a study at its easier targets and at its own."""
    result = study.result
    times = _tokens_of(study, name)
    rows = list[ScaleRow]()
    for row in result.over_target:
        scale = _fewest_examples(study.files.trials, result, row.target)
        reading = _critical(row.value, row.low, row.high)
        if scale is not None and reading is not None:
            label = f"{result.study} {result.metric} {format_number(row.target)}"
            rows.append(ScaleRow(label, scale * times, {"critical_batch_size": reading}))
    if result.target_value is not None:
        scale = _fewest_examples(study.files.trials, result, result.target_value)
        if scale is not None:
            rows.append(_whole(study, scale * times))
    return tuple(rows)


def _fewest_examples(
    trials: Sequence[TrialResult], result: StudyResult, goal: float
) -> float | None:
    """Give the fewest examples after which a trial met a target; None where none did."""
    target = Target(result.metric, goal, result.mode)
    passed = [passing(trial, target) for trial in trials]
    examples = [trial.examples for trial in passed if trial.reached]
    return float(min(examples)) if examples else None


def _whole(study: StudyFolder, scale: float) -> ScaleRow:
    """Give the row of a study as a whole."""
    result = study.result
    found = dict[Quantity, Reading]()
    critical = result.critical_batch_size
    if critical is not None:
        reading = _critical(critical.value, critical.low, critical.high)
        if reading is not None:
            found["critical_batch_size"] = reading
    best = _best_size(result)
    if best is not None:
        found["batch_size"] = best
    hyperparameters = _winners_hyperparameters(result)
    for name in HALF_LIFE_QUANTITIES:
        value = hyperparameters.get(name)
        if value is not None and value > 0:
            found[name] = Reading(float(value))
    return ScaleRow(result.study, scale, found)


def _critical(value: float | None, low: float | None, high: float | None) -> Reading | None:
    """Give a critical batch size that is known to one side at least."""
    if value is None or (low is None and high is None):
        return None
    return Reading(value, low, high)


def _best_size(result: StudyResult) -> Reading | None:
    """Give the best batch size; None where it lies at an end of what is known."""
    if result.at_budget is not None:
        growth = result.at_budget.growth
        best_sizes = () if growth is None else growth.best_sizes
        for one in best_sizes:
            if one.share == 1.0:
                return None if one.is_at_end else Reading(one.batch_size, one.low, one.high)
        return Reading(float(result.at_budget.winner.batch_size))
    winner, as_good = result.winner, result.as_good
    if winner is None or as_good is None or result.objective == "steps":
        return None
    # The winner is one trial, and seeds move it: what is as good has a middle that they move less.
    low, high = float(as_good.low), float(as_good.high)
    if not as_good.is_low_open and not as_good.is_high_open:
        return Reading(math.sqrt(low * high), low, high)
    size = float(winner.batch_size)
    if as_good.is_low_open and (as_good.is_high_open or size <= low * AT_END):
        return None
    if as_good.is_high_open and size >= high / AT_END:
        return None
    if as_good.is_low_open:
        return Reading(size, None, max(high, size))
    return Reading(size, min(low, size), None)


def _winners_hyperparameters(result: StudyResult) -> Mapping[str, float | None]:
    if result.at_budget is not None:
        return result.at_budget.winner.hyperparameters
    if result.winner is None:
        return {}
    return result.winner.hyperparameters


def _over_budgets(study: StudyFolder, whole: float) -> tuple[ScaleRow, ...]:
    """Give the rows of a study of the objective loss at its budget and at shares of it."""
    rows = [_whole(study, whole)]
    growth = _at_budget(study).growth
    for one in () if growth is None else growth.best_sizes:
        if one.share == 1.0 or one.is_at_end:
            continue
        label = f"{study.result.study} {one.share:.3g} of its budget"
        reading = Reading(one.batch_size, one.low, one.high)
        rows.append(ScaleRow(label, whole * one.share, {"batch_size": reading}))
    return tuple(rows)


def rate_at(result: StudyResult, name: Quantity, reading: Reading | None) -> Reading | None:
    """Give the best learning rate at a study's own batch size of that kind; None where it is not known."""
    if reading is None:
        return None
    if result.at_budget is not None:
        is_best = name == "batch_size"
        return Reading(result.at_budget.winner.lr) if is_best else None
    curve = result.curve
    if curve is None or not curve.batch_size[0] <= reading.value <= curve.batch_size[-1]:
        return None
    log_sizes = np.log(curve.batch_size)
    ends = list[float]()
    for rates in (curve.lr_low, curve.lr, curve.lr_high):
        ends.append(math.exp(float(np.interp(math.log(reading.value), log_sizes, np.log(rates)))))
    return Reading(ends[1], ends[0], ends[2])


def log_error(reading: Reading, quantile: float) -> float | None:
    """Give the standard deviation of a reading's logarithm; None where it tells no interval.

    An open end is taken to lie ``ONE_SIDED`` times as far as the other one.
    """
    below = above = None
    if reading.low is not None:
        below = math.log(reading.value / reading.low)
    if reading.high is not None:
        above = math.log(reading.high / reading.value)
    if below is None and above is None:
        return None
    if below is None:
        below = ONE_SIDED * (above or 0.0)
    if above is None:
        above = ONE_SIDED * below
    return max(below + above, 0.0) / 2.0 / quantile


def defining_settings(study: StudyFolder) -> dict[str, object]:
    """Collect what of a study's config defines what was trained, by dotted key; StudyError without one."""
    config = study.files.config
    if config is None:
        raise StudyError(
            f"{study.files.path} does not tell its study's options: {'; '.join(study.files.notes)}"
        )
    kept = dict[str, object]()
    is_loss = study.result.objective == "loss"
    # Folders of before and after an option came differ in nothing while it has its default.
    for key, value in flatten(with_new_options(config)).items():
        is_defining = key.startswith(DEFINING) or key in ALSO_DEFINING
        if is_loss and key.startswith("budget."):
            is_defining = True
        if key.startswith(SEARCHS_OWN) or key.endswith(OF_THE_MACHINE):
            is_defining = False
        if is_loss and key == "workload.target.value":
            is_defining = False
        if is_defining:
            kept[key] = value
    if is_loss:
        kept["search.objective"] = "loss"
    return kept


def check_alike(scale: Scale, studies: Sequence[StudyFolder]) -> list[str]:
    """Refuse studies that differ in more than the scale; give the options in which they differ.

    StudyError names the others.
    """
    settings = [defining_settings(study) for study in studies]
    keys = sorted({key for one in settings for key in one})
    differ = [key for key in keys if len({repr(one.get(key)) for one in settings}) > 1]
    metrics = {(study.result.metric, study.result.mode) for study in studies}
    if len(metrics) > 1 and "workload.target.metric" not in differ:
        differ.append("workload.target.metric")
    others = [one_line(key) for key in differ if not key.startswith(scale.own)]
    if others:
        shown = ", ".join(others[:8])
        more = f" and {len(others) - 8} more" if len(others) > 8 else ""
        raise StudyError(
            f"the studies differ in more than {scale.meaning}: in {shown}{more}; leave out those of "
            "other options"
        )
    return [one_line(key) for key in differ]
