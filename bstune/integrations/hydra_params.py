"""What a sweep of a Hydra application says: its ranges, its keys and bstune's options.

``hydra.sweeper.params`` and the command line are written as for Hydra's Optuna sweeper.
"""

import math
import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import (
    IntervalSweep,
    Override,
    Quote,
    QuotedString,
    RangeSweep,
)
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from bstune.config import options_from_python
from bstune.core.errors import InputError
from bstune.core.records import Target
from bstune.core.space import Number
from bstune.integrations.hydra_job import TAKEN
from bstune.options import Options
from bstune.own_loop import refuse_training
from bstune.system.ticker import say
from bstune.trial.trial import Trial

# The last names of keys that are taken for these, unless hydra.sweeper names others.
LAST_NAMES = {"batch_size": "(train_)?batch_size", "lr": "lr|learning_rate"}
RANGES = {"batch_size": "range(8,1024)", "lr": "tag(log,interval(0.0001,1))"}
# Names and values that Hydra's Optuna sweeper has.
ALIASES = {"n_trials": "trials", "n_jobs": "workers", "study_name": "study"}
MODES = {"minimize": "min", "maximize": "max"}


@dataclass(frozen=True)
class Application:
    """What the jobs of an application take.

    Args:
        keys: of what each trial has and of its further values, by name, as overrides have them.
        fixed: overrides that all jobs have.
    """

    keys: Mapping[str, str]
    fixed: tuple[str, ...]

    def overrides(self, trial: Trial) -> list[str]:
        """The overrides of a trial's job, which may run in another folder."""
        values = {name: getattr(trial, name) for name in TAKEN} | dict(trial.values)
        words = list(self.fixed)
        for name, value in values.items():
            text = repr(value)
            if isinstance(value, Path):
                text = QuotedString(str(value.absolute()), Quote.single).with_quotes()
            if name in self.keys and value is not None:
                words.append(f"{self.keys[name]}={text}")
        return words


@dataclass(frozen=True)
class Range:
    """The values of a key between both ends, included; whole ones are multiples."""

    low: Number
    high: Number
    multiple: int = 1

    def with_value(self, value: Number) -> "Range":
        """The range that has a value, too, and whole numbers only if that is one."""
        low, high = min(self.low, value), max(self.high, value)
        if isinstance(value, float):
            return Range(float(low), float(high))
        return Range(low, high, math.gcd(self.multiple, value))


def range_of(override: Override) -> Range:
    """What an override sweeps, or its one value; a range's end is included, as by Optuna.

    InputError for values that are no numbers.
    """
    swept: Any = override.value()
    values: list[Any] = [swept]
    step: Number = 0
    if isinstance(swept, IntervalSweep):
        values, step = [swept.start, swept.end], 1
    elif isinstance(swept, RangeSweep):
        values, step = [swept.start, swept.stop], abs(swept.step)
    elif override.is_sweep_override():
        values = list(override.sweep_iterator())
    if not all(map(_is_number, values)):
        raise InputError(
            f"{override.input_line}: bstune tunes numbers; give {override.key_or_group} a range, "
            f"as 'interval(1,9)', or one value, which all jobs have"
        )
    low, high = min(values), max(values)
    if not all(isinstance(one, int) for one in (*values, step)):
        return Range(float(low), float(high))
    if step == 0:
        return Range(low, high, math.gcd(*values))
    # The last value of a range with steps.
    return Range(low, high - (high - low) % step, math.gcd(low, int(step)))


def options_by_our_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """What is given below ``hydra.sweeper``, by bstune's names; null is left out.

    A line says that a sampler of Optuna's is replaced.
    """
    known: dict[str, Any] = {}
    for name, value in given.items():
        if name in ("budget", "baseline"):
            value = {key: inner for key, inner in value.items() if inner is not None}
        # Three failures in a row end a study, whatever a batch's rate.
        if value is not None and name != "max_failure_rate":
            known[ALIASES.get(name, name)] = value
    if isinstance(known.get("sampler"), dict):
        sampler = known.pop("sampler").get("_target_", "hydra.sweeper.sampler")
        say(f"bstune's own search is in the place of {sampler}")
    if "direction" in known:
        direction = known.pop("direction")
        # Optuna's word for a number that has no name.
        known.setdefault("target", f"{MODES.get(str(direction), direction)} value")
    return known


def read_sweep(
    known: Mapping[str, Any], arguments: Sequence[str], config: DictConfig, loader: ConfigLoader
) -> tuple[Application, Options]:
    """Read a sweep: what its jobs take, and the options of its study.

    Args:
        known: what is given below ``hydra.sweeper``, as of :func:`options_by_our_names`.
        arguments: the command line's overrides; they replace those of ``params``.
        config: of the application, with Hydra's own.
        loader: composes a job's config.

    Raises:
        InputError: one line for all that is missing, or for what cannot be used.
    """
    overrides = _parsed_overrides(known, arguments, loader)
    swept = [key for key, one in overrides.items() if one.is_sweep_override()]
    fixed = {key: str(one.input_line) for key, one in overrides.items() if key not in swept}
    job = _compose_job(loader, config, fixed.values())
    keys = _keys_by_name(known, swept, fixed, job)
    application = Application(
        # As an override has it: with its package, or a plus.
        keys={
            name: overrides[key].get_key_element() if key in swept else key
            for name, key in keys.items()
        },
        fixed=tuple(line for key, line in fixed.items() if key not in keys.values()),
    )
    ranges = {name: range_of(overrides[key]) for name, key in keys.items() if key in swept}
    size = overrides.get(keys.get("batch_size", ""))
    if size is not None:
        # One batch size is a range, too.
        ranges["batch_size"] = range_of(size)
    today = {name: _number_in_job(job, keys[name]) for name in ranges}
    # A key that the application has not is told before a job begins.
    of_trial = [f"{key}=1" for key in application.keys.values()]
    _compose_job(loader, config, [*application.fixed, *of_trial])

    values = {name: value for name, value in known.items() if name not in (*TAKEN, "params")}
    seed = keys.get("seed")
    if seed in fixed:
        # The seed of the study, from which those of its trials follow.
        values["seed"] = overrides[seed].value()
    _fill_question(values, keys, ranges, length=_number_in_job(job, keys.get("max_steps", "")))
    return application, _options_of_sweep(values, ranges, today)


def _parsed_overrides(
    known: Mapping[str, Any], arguments: Sequence[str], loader: ConfigLoader
) -> dict[str, Override]:
    """The overrides of ``params`` and of the command line by their keys; the last of each counts.

    InputError for what Hydra does not read.
    """
    lines = [f"{key}={value}" for key, value in known.get("params", {}).items()]
    try:
        parsed = OverridesParser.create(config_loader=loader).parse_overrides([*lines, *arguments])
    except HydraException as error:
        raise InputError(f"hydra.sweeper.params: {_in_line(error)}") from error
    return {one.key_or_group: one for one in parsed}


def _keys_by_name(
    known: Mapping[str, Any], swept: Collection[str], fixed: Collection[str], job: DictConfig
) -> dict[str, str]:
    """The keys of what each trial has, by name; those of further values are called by themselves.

    Args:
        known: what is given below ``hydra.sweeper``.
        swept, fixed: keys that have a range, and one value.
        job: the config of a job.

    Raises:
        InputError: seeds have a range, or a further value is called as what each trial has.
    """
    keys = {name: str(known[name]) for name in TAKEN if name in known}
    for name, last in LAST_NAMES.items():
        for among in (swept, fixed):
            found = [key for key in among if re.search(rf"(^|[.@:/])({last})$", key)]
            if len(found) == 1:
                keys.setdefault(name, found[0])
    if "seed" in job:
        keys.setdefault("seed", "seed")
    if keys.get("seed") in swept:
        raise InputError(f"{keys['seed']}: each trial has a seed of its own, so give it no range")
    for key in swept:
        if key in keys and key not in keys.values():
            raise InputError(
                f"{key} has a range, but hydra.sweeper.{key}={keys[key]}: give one of both a range"
            )
    return keys | {key: key for key in swept if key not in keys.values()}


def _compose_job(loader: ConfigLoader, config: DictConfig, overrides: Iterable[str]) -> DictConfig:
    """The config of a job; InputError where it cannot be composed."""
    try:
        return loader.load_sweep_config(config, list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise InputError(f"no job can have this: {_in_line(error)}") from error


def _in_line(error: Exception) -> str:
    """Write an error of Hydra in one line, without OmegaConf's keys."""
    return " ".join(re.split(r"\n\s*full_key:", f"{error} {error.__cause__ or ''}")[0].split())


def _number_in_job(job: DictConfig, key: str) -> Number | None:
    """The application's own number at a key; None where it has none."""
    value = OmegaConf.select(job, key.lstrip("+"))
    return value if _is_number(value) else None


def _is_number(value: object) -> bool:
    """Whether it is one; True is none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _fill_question(
    values: dict[str, Any], keys: Mapping[str, str], ranges: Collection[str], length: Number | None
) -> None:
    """Fill the objective and the budget.

    Args:
        values: of options.
        keys: of what each trial has.
        ranges: the names that have one.
        length: the application's own ``max_steps``.

    Raises:
        InputError: one line for all that is missing.
    """
    absent = []
    for name, example in RANGES.items():
        if name not in ranges:
            absent.append(f"{keys.get(name, 'KEY')}={example}")
            absent += [] if name in keys else [f"hydra.sweeper.{name}=KEY"]
    needed = {"max_steps"} if values.get("schedule_ends") else set()
    if {"resume_from", "save_to"} & keys.keys():
        needed = {"max_steps", "resume_from", "save_to"}
    absent += [f"hydra.sweeper.{name}=KEY" for name in sorted(needed - keys.keys())]
    seeks_best = False
    if "target" not in values:
        absent.append('hydra.sweeper.target="min val/loss"')
    else:
        seeks_best = Target.parse(str(values["target"])).goal is None
        # A job that ends by itself has spent its budget.
        steps = 1 if seeks_best and "max_steps" not in keys else length
        values["budget"] = values.get("budget") or {"steps": steps}
        if values["budget"] == {"steps": None}:
            absent.append("hydra.sweeper.budget.steps=2000")
    if absent:
        raise InputError(f"something is missing: add {shlex.join(absent)}")
    if seeks_best:
        values.setdefault("objective", "metric")


def _options_of_sweep(
    values: dict[str, Any], ranges: Mapping[str, Range], today: Mapping[str, Number | None]
) -> Options:
    """Check the options of a study.

    Args:
        values: all but the ranges.
        ranges: of batch size, rate and further values, by name.
        today: the application's own values likewise, None where it has none. They are the baseline
            where ``hydra.sweeper.baseline`` gives no others; without a value of each there is none.

    Raises:
        InputError: a baseline is given, and a value is neither in it nor in the application; or
            what :func:`bstune.options.options_from` refuses.
    """
    given = dict(values.get("baseline", {}))
    used = today | given.pop("values", {}) | given
    absent = [name for name, value in used.items() if not _is_number(value)]
    if absent and values.get("baseline"):
        raise InputError(
            f"hydra.sweeper.baseline={values['baseline']} leaves {', '.join(absent)} without a "
            f"number: give one (of a further value in baseline.values={{NAME: NUMBER}}), or leave "
            f"out the baseline"
        )
    baseline = {}
    if not absent:
        # The baseline belongs to the ranges.
        ranges = {name: one.with_value(used[name]) for name, one in ranges.items()}
        baseline = {name: used.pop(name) for name in RANGES} | {"values": used}
    tune = {name: [one.low, one.high] for name, one in ranges.items() if name not in RANGES}
    sizes, rates = ranges["batch_size"], ranges["lr"]
    of_ranges = {
        "baseline": baseline,
        "batch_size": {"low": sizes.low, "high": sizes.high, "multiple": sizes.multiple},
        "lr": {"low": rates.low, "high": rates.high},
        "tune": tune or None,
    }
    options = options_from_python(**values | of_ranges)
    refuse_training(options, "the application")
    return options
