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
from bstune.result import AtBudget, StudyResult, WorkloadSize
from bstune.study.analysis.critical import ended_where_met
from bstune.study.folder_config import with_new_options
from bstune.system.console import format_number, listing
from bstune.system.inputs import one_line

# The scales that --at can name besides options of the workload.
SCALES = ("examples", "tokens", "parameters", "seconds")
SMALLEST_SCALE = 1e-15
LARGEST_SCALE = 1e18
# Options that begin so define what was trained.
DEFINING = ("workload", "protocol", "trainer", "precision")
ALSO_DEFINING = ("scaling.beta2_half_life", "scaling.weight_decay_half_life", "search.tune")
# Defaults of the search and of its speed: no part of the workload.
SEARCHS_OWN = (
    "workload.trials",
    "workload.budget",
    "workload.batch_size",
    "workload.reference",
    "workload.tunable",
    "workload.fast",
    "workload.evaluation_cost",
    "protocol.fast",
    "protocol.trial_seconds",
    "protocol.noise_scale_every",
    "protocol.warmup_steps",
)
# Options that end so say where the data are and what trains: no part of the workload either.
OF_THE_MACHINE = (".root", ".device")
# Studies of other tables, data or modules differ in options that begin so.
OF_A_TABLE = ("workload.name", "workload.table")
OF_DATA = ("workload.data.", "workload.given_data", "workload.name")
OF_MODULE = ("workload.module.", "workload.given_module", "workload.name")
# A best batch size within this factor of the end of what is known counts as lying at that end.
AT_END = 1.1
# An error names at most so many of the options that differ and must not.
SHOWN_OPTIONS = 8
# An open end is taken to lie so many times as far as the one that is told.
ONE_SIDED = 2.0


@dataclass(frozen=True)
class CommonScale:
    """A scale in which studies differ, and what each study tells at its scales."""

    name: str
    """As in ``--at``."""
    meaning: str
    """What is counted, in words."""
    option_prefixes: tuple[str, ...]
    """Options whose names begin with one of these set the scale: the studies may differ in them."""
    rows: tuple[tuple[ScaleRow, ...], ...]
    """For each study, in their order, a row for each scale that it tells of."""
    grows_within: bool = False
    """Whether the scale grows during a training, as the examples that it has seen do."""


def common_scale(
    name: str, studies: Sequence[StudyFolder], values: Mapping[str, float] | None
) -> CommonScale:
    """Find out what a scale means for these studies, and its value for each.

    Args:
        name: as in ``--at``.
        studies: at least one.
        values: of each study by its name, where the user gives them.

    Raises:
        ConfigError: for an unknown name.
        StudyError: where studies do not tell the scale.
    """
    if values is not None:
        return _given_scale(name, studies, values)
    if name in ("examples", "tokens"):
        return _example_scale(name, studies)
    if name == "parameters":
        return _parameter_scale(name, studies)
    if name == "seconds":
        return _seconds_scale(name, studies)
    return _option_scale(name, studies)


def _given_scale(
    name: str, studies: Sequence[StudyFolder], values: Mapping[str, float]
) -> CommonScale:
    """Make the scale whose values the user gives, by the studies' names."""
    names = [study.result.study for study in studies]
    if len(set(names)) < len(names):
        raise StudyError(f"--values go by the studies' names, and two are alike: {_names(studies)}")
    if values.keys() != set(names):
        raise ConfigError(
            f"--values takes a number for each study by its name, of {_names(studies)}, but got "
            f"{one_line(listing(sorted(values)))}"
        )
    # The options that may differ between the studies, by the name that the user gives the scale.
    option_prefixes: tuple[str, ...] = (*OF_DATA, *OF_MODULE, *OF_A_TABLE)
    if name in ("examples", "tokens"):
        option_prefixes = (*OF_DATA, *OF_A_TABLE)
    if name == "parameters":
        option_prefixes = (*OF_MODULE, *OF_A_TABLE)
    scales = [values[study] for study in names]
    return CommonScale(
        name=name,
        meaning=f"{name} as given",
        option_prefixes=option_prefixes,
        rows=_rows_at(studies, scales),
    )


def _rows_at(
    studies: Sequence[StudyFolder], values: Sequence[float]
) -> tuple[tuple[ScaleRow, ...], ...]:
    """Give each study one row, at its value of the scale."""
    rows = list[tuple[ScaleRow, ...]]()
    for study, value in zip(studies, values, strict=True):
        rows.append((_row_at_own_target(study, value),))
    return tuple(rows)


def _example_scale(name: str, studies: Sequence[StudyFolder]) -> CommonScale:
    """Make the scale ``examples`` or ``tokens``, which counts what the studies differ in.

    These are the examples of the training data, if the data differ. Otherwise they are the examples
    of the trials' budget, if all studies are of the objective loss, and the examples that a
    training takes to its target, if not.
    """
    if name == "tokens" and any(study.result.tokens is None for study in studies):
        raise StudyError(f"examples of {_names(studies)} have no tokens: give --at examples=N")
    is_of_loss = all(study.result.at_budget is not None for study in studies)
    if _is_of_data(studies, is_of_loss):
        return _data_scale(name, studies)
    if is_of_loss:
        return _example_budget_scale(name, studies)
    return CommonScale(
        name=name,
        meaning=f"{name} that a training took to its target",
        option_prefixes=("workload.target.value",),
        rows=tuple(_over_targets(study, name) for study in studies),
        # A harder target takes more examples of the same training.
        grows_within=True,
    )


def _data_scale(name: str, studies: Sequence[StudyFolder]) -> CommonScale:
    """Make the scale of the examples, or their tokens, in the studies' training data."""
    sizes = _sizes_of(studies, f"the {name} of their data")
    values = list[float]()
    for size, study in zip(sizes, studies, strict=True):
        values.append(size.examples * _tokens_of(study, name))
    rows = _rows_at(studies, values)
    return CommonScale(
        name=name, meaning=f"{name} of the training data", option_prefixes=OF_DATA, rows=rows
    )


def _example_budget_scale(name: str, studies: Sequence[StudyFolder]) -> CommonScale:
    """Make the scale of the examples, or their tokens, in the budgets of studies for the loss."""
    _all_are_of_budget(studies, "examples")
    rows = list[tuple[ScaleRow, ...]]()
    for study in studies:
        # The check above leaves no study without examples; nan is for its type alone.
        whole = (_at_budget(study).examples or math.nan) * _tokens_of(study, name)
        rows.append(_over_budgets(study, whole))
    return CommonScale(
        name=name,
        meaning=f"{name} of the budget",
        option_prefixes=("budget.",),
        rows=tuple(rows),
    )


def _is_of_data(studies: Sequence[StudyFolder], is_of_loss: bool) -> bool:
    """Whether the amount of training data is what differs from study to study.

    The studies' results say so where the amounts in them differ. Otherwise, several studies with
    the same target are taken to differ in it, as neither their targets nor their budgets do.

    ``is_of_loss``: whether all are studies of the objective loss.
    """
    sizes = [study.result.size for study in studies]
    different_sizes = {size.examples for size in sizes if size is not None}
    if len(different_sizes) > 1:
        return True
    targets = {study.result.target_value for study in studies}
    return len(studies) > 1 and len(targets) == 1 and not is_of_loss


def _parameter_scale(name: str, studies: Sequence[StudyFolder]) -> CommonScale:
    """Make the scale of the modules' trained parameters."""
    sizes = _sizes_of(studies, "their parameters")
    values = [float(size.parameters) for size in sizes]
    return CommonScale(
        name=name,
        meaning="trained parameters",
        option_prefixes=OF_MODULE,
        rows=_rows_at(studies, values),
    )


def _seconds_scale(name: str, studies: Sequence[StudyFolder]) -> CommonScale:
    """Make the scale of the budgets' seconds, for studies of the objective loss."""
    _all_are_of_budget(studies, "seconds")
    rows = list[tuple[ScaleRow, ...]]()
    for study in studies:
        # The check above leaves no study without seconds: NaN is there for the type alone.
        whole = _at_budget(study).seconds or math.nan
        rows.append(_over_budgets(study, whole))
    return CommonScale(
        name=name, meaning="seconds of the budget", option_prefixes=("budget.",), rows=tuple(rows)
    )


def _option_scale(name: str, studies: Sequence[StudyFolder]) -> CommonScale:
    """Make the scale of a numeric option; ``name`` is its dotted name or the end of that."""
    settings = [defining_settings(study) for study in studies]
    keys = [key for key in _all_keys(settings) if f".{key}".endswith(f".{name}")]
    if not keys:
        raise ConfigError(
            f"the scale of --at is one of {', '.join(SCALES)}, or an option of the workload that "
            f"the studies differ in, but got {one_line(name)}"
        )
    if len(keys) > 1:
        raise ConfigError(f"--at {name}=N is one of {listing(keys)}: give it in full")
    key = keys[0]
    values = list[float]()
    for study, of_study in zip(studies, settings, strict=True):
        value = number_of(of_study.get(key))
        if value is None or not SMALLEST_SCALE <= value <= LARGEST_SCALE:
            shown = one_line(repr(of_study.get(key)))[:80]
            raise StudyError(
                f"{key} of {one_line(study.result.study)} is no positive number but {shown}: give "
                "the scale of each study, --values STUDY=N,STUDY=N,STUDY=N"
            )
        values.append(float(value))
    return CommonScale(
        name=name, meaning=key, option_prefixes=(key,), rows=_rows_at(studies, values)
    )


def _all_keys(settings: Sequence[Mapping[str, object]]) -> list[str]:
    """Collect the keys of all studies' settings, sorted."""
    keys = set[str]()
    for of_study in settings:
        keys.update(of_study)
    return sorted(keys)


def number_of(value: object) -> int | float | None:
    """Give a setting if it is a number; None otherwise."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    return None


def _sizes_of(studies: Sequence[StudyFolder], meaning: str) -> list[WorkloadSize]:
    """Read how large each study's data and module are.

    StudyError names the folders that do not tell.

    ``meaning``: what they do not tell, in words.
    """
    sizes = list[WorkloadSize]()
    silent = list[StudyFolder]()
    for study in studies:
        if study.result.size is None:
            silent.append(study)
        else:
            sizes.append(study.result.size)
    if silent:
        raise StudyError(
            f"{_names(silent)} do not tell {meaning}, as recorded runs do not: give the scale of "
            "each study by its name, --values STUDY=N,STUDY=N,STUDY=N"
        )
    return sizes


def _all_are_of_budget(
    studies: Sequence[StudyFolder], unit: Literal["seconds", "examples"]
) -> None:
    """Refuse studies that are not of the objective loss, or whose budget is not in ``unit``."""
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
    """List the studies' names in a line."""
    return one_line(listing([study.result.study for study in studies]))


def _at_budget(study: StudyFolder) -> AtBudget:
    """Give the answer at the budget's end, of a study that is known to have one."""
    assert study.result.at_budget is not None  # noqa: S101 (the caller has looked)
    return study.result.at_budget


def _tokens_of(study: StudyFolder, name: str) -> float:
    """Give how many tokens an example of a study counts for; 1 where the scale is ``examples``."""
    if name == "examples":
        return 1.0
    return float(study.result.tokens or 1)


def _over_targets(study: StudyFolder, name: str) -> tuple[ScaleRow, ...]:
    """Give the rows of a study at its easier targets and at its own.

    The scale of a row is the fewest examples, or their tokens, after which a trial met its target.
    """
    result = study.result
    per_example = _tokens_of(study, name)
    rows = list[ScaleRow]()
    for row in result.over_target:
        scale = _fewest_examples(study.files.trials, result, row.target)
        reading = _critical(row.value, row.low, row.high)
        if scale is not None and reading is not None:
            label = f"{result.study} {result.metric} {format_number(row.target)}"
            rows.append(ScaleRow(label, scale * per_example, {"critical_batch_size": reading}))
    if result.target_value is not None:
        scale = _fewest_examples(study.files.trials, result, result.target_value)
        if scale is not None:
            rows.append(_row_at_own_target(study, scale * per_example))
    return tuple(rows)


def _fewest_examples(
    trials: Sequence[TrialResult], result: StudyResult, goal: float
) -> float | None:
    """Give the fewest examples after which a trial met the target's value ``goal``.

    It is None if none did.
    """
    target = Target(result.metric, goal, result.mode)
    passed = [ended_where_met(trial, target) for trial in trials]
    examples = [trial.examples for trial in passed if trial.reached]
    if not examples:
        return None
    return float(min(examples))


def _row_at_own_target(study: StudyFolder, scale: float) -> ScaleRow:
    """Give the row of a study at its own target or budget, with all quantities that it tells."""
    result = study.result
    readings = dict[Quantity, Reading]()
    critical = result.critical_batch_size
    if critical is not None:
        reading = _critical(critical.value, critical.low, critical.high)
        if reading is not None:
            readings["critical_batch_size"] = reading
    best_size = _best_size(result)
    if best_size is not None:
        readings["batch_size"] = best_size
    hyperparameters = _winners_hyperparameters(result)
    for name in HALF_LIFE_QUANTITIES:
        value = hyperparameters.get(name)
        if value is not None and value > 0:
            readings[name] = Reading(float(value))
    return ScaleRow(result.study, scale, readings)


def _critical(value: float | None, low: float | None, high: float | None) -> Reading | None:
    """Make the reading of a critical batch size.

    It is None without a value or any end of its interval.
    """
    if value is None or (low is None and high is None):
        return None
    return Reading(value=value, low=low, high=high)


def _best_size(result: StudyResult) -> Reading | None:
    """Read a study's best batch size.

    It is None where it lies at an open end of those that are as good.
    """
    if result.at_budget is not None:
        return _best_size_at(result.at_budget)
    winner = result.winner
    as_good = result.as_good
    # By steps alone a larger batch size is always better.
    if winner is None or as_good is None or result.objective == "steps":
        return None
    low = float(as_good.low)
    high = float(as_good.high)
    # The winner is one trial, which seeds move. They move the middle of the range of batch sizes
    # that are as good less.
    if not as_good.is_low_open and not as_good.is_high_open:
        return Reading(value=math.sqrt(low * high), low=low, high=high)
    size = float(winner.batch_size)
    # A winner at an open end says only that the best one lies there or beyond. Between two open
    # ends it has no bound on either side.
    if as_good.is_low_open and (as_good.is_high_open or size <= low * AT_END):
        return None
    if as_good.is_high_open and size >= high / AT_END:
        return None
    if as_good.is_low_open:
        return Reading(value=size, low=None, high=max(high, size))
    return Reading(value=size, low=min(low, size), high=None)


def _best_size_at(at_budget: AtBudget) -> Reading | None:
    """Read the best batch size of a budget; None where it lies at an end of the range searched."""
    growth = at_budget.growth
    best_sizes = () if growth is None else growth.best_sizes
    for best in best_sizes:
        # Those for parts of the budget tell nothing of the whole one.
        if best.share != 1.0:
            continue
        if best.is_at_end:
            return None
        return Reading(value=best.batch_size, low=best.low, high=best.high)
    return Reading(float(at_budget.winner.batch_size))


def _winners_hyperparameters(result: StudyResult) -> Mapping[str, float | None]:
    """Read the winner's further hyper-parameters; empty without a winner."""
    if result.at_budget is not None:
        return result.at_budget.winner.hyperparameters
    if result.winner is None:
        return {}
    return result.winner.hyperparameters


def _over_budgets(study: StudyFolder, whole: float) -> tuple[ScaleRow, ...]:
    """Give the rows of a study of the objective loss at its budget and at shares of it.

    ``whole``: its budget, on the scale.
    """
    rows = [_row_at_own_target(study, whole)]
    growth = _at_budget(study).growth
    best_sizes = () if growth is None else growth.best_sizes
    for best in best_sizes:
        # The whole budget has its row already. A best size at an end of the range searched may lie
        # beyond it.
        if best.share == 1.0 or best.is_at_end:
            continue
        label = f"{study.result.study} {best.share:.3g} of its budget"
        reading = Reading(value=best.batch_size, low=best.low, high=best.high)
        rows.append(ScaleRow(label, whole * best.share, {"batch_size": reading}))
    return tuple(rows)


def rate_at(result: StudyResult, name: Quantity, reading: Reading | None) -> Reading | None:
    """Give the best learning rate of a study at one of its batch sizes; None where it is not known.

    Args:
        result: of the study.
        name: which batch size it is: the best one, or the critical one.
        reading: that batch size; None where the study does not tell it.
    """
    if reading is None:
        return None
    if result.at_budget is not None:
        # A study of a budget has no curve: only the rate of its winner is known.
        if name != "batch_size":
            return None
        return Reading(result.at_budget.winner.lr)
    curve = result.curve
    if curve is None or not curve.batch_size[0] <= reading.value <= curve.batch_size[-1]:
        return None
    log_size = math.log(reading.value)
    log_sizes = np.log(curve.batch_size)

    def rate(rates: Sequence[float]) -> float:
        """Interpolate one of the curve's rates between its batch sizes, in logarithms."""
        return math.exp(float(np.interp(log_size, log_sizes, np.log(rates))))

    return Reading(value=rate(curve.lr), low=rate(curve.lr_low), high=rate(curve.lr_high))


def log_error(reading: Reading, quantile: float) -> float | None:
    """Give the standard deviation of a reading's logarithm; None where it has no interval.

    An open end is taken to lie ``ONE_SIDED`` times as far as the other one.

    ``quantile``: how many standard deviations half the interval is.
    """
    # How far the ends lie from the value, in logarithms.
    distances = list[float]()
    if reading.low is not None:
        distances.append(math.log(reading.value / reading.low))
    if reading.high is not None:
        distances.append(math.log(reading.high / reading.value))
    if not distances:
        return None
    if len(distances) == 1:
        distances.append(ONE_SIDED * distances[0])
    # It is 0 where the value lies beyond the one end that it has.
    half_width = max(sum(distances), 0.0) / 2.0
    return half_width / quantile


def defining_settings(study: StudyFolder) -> dict[str, object]:
    """Collect the options of a study that define what was trained, by dotted name.

    Raises:
        StudyError: where its folder has no config.
    """
    config = study.files.config
    if config is None:
        raise StudyError(
            f"{study.files.path} does not tell its study's options: {'; '.join(study.files.notes)}"
        )
    settings = dict[str, object]()
    # Studies of the objective loss compare metrics at the end of their budget. So the budget
    # defines such a study, and a value of the target does not.
    is_loss = study.result.objective == "loss"
    # A folder gets the defaults of options that came after it was written, so that it does not
    # differ in them from a later one.
    for key, value in flatten(with_new_options(config)).items():
        is_defining = key.startswith(DEFINING) or key in ALSO_DEFINING
        if is_loss and key.startswith("budget."):
            is_defining = True
        if key.startswith(SEARCHS_OWN) or key.endswith(OF_THE_MACHINE):
            is_defining = False
        if is_loss and key == "workload.target.value":
            is_defining = False
        if is_defining:
            settings[key] = value
    if is_loss:
        settings["search.objective"] = "loss"
    return settings


def check_alike(scale: CommonScale, studies: Sequence[StudyFolder]) -> list[str]:
    """Refuse studies that differ in more than the scale; give the options in which they differ.

    Raises:
        StudyError: where they differ in others, too; it names them.
    """
    settings = [defining_settings(study) for study in studies]
    differ = list[str]()
    for key in _all_keys(settings):
        values = {repr(of_study.get(key)) for of_study in settings}
        if len(values) > 1:
            differ.append(key)
    metrics = {(study.result.metric, study.result.mode) for study in studies}
    if len(metrics) > 1 and "workload.target.metric" not in differ:
        differ.append("workload.target.metric")
    others = [one_line(key) for key in differ if not key.startswith(scale.option_prefixes)]
    if others:
        shown = ", ".join(others[:SHOWN_OPTIONS])
        more = ""
        if len(others) > SHOWN_OPTIONS:
            more = f" and {len(others) - SHOWN_OPTIONS} more"
        raise StudyError(
            f"the studies differ in more than {scale.meaning}: in {shown}{more}; leave out those "
            "of other options"
        )
    return [one_line(key) for key in differ]
