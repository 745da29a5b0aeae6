"""What a sweep of a Hydra application says: its ranges, its keys and bstune's options.

``hydra.sweeper.params`` and the command line are written as for Hydra's Optuna sweeper.
"""

import math
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
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
from bstune.options import Options, differing
from bstune.own_loop import OF_TRAINING
from bstune.system.ticker import say
from bstune.trial.trial import Trial

# What each trial has that an application may take.
NAMED = ("batch_size", "lr", "seed", "max_steps", "resume_from", "save_to")
# How keys end that are taken for these, unless hydra.sweeper names them.
ENDS = {"batch_size": "batch_size", "lr": "lr|learning_rate", "seed": "seed"}
# What to write where it is missing.
RANGES = {"batch_size": "range(8,1024)", "lr": "tag(log,interval(0.0001,1))"}
# Names that Hydra's Optuna sweeper has for options, and what it has that bstune has not.
ALIASES = {"n_trials": "trials", "n_jobs": "workers", "study_name": "study"}
REFUSED = ("search_space", "custom_search_space")
DIRECTIONS = {"minimize": "min", "maximize": "max"}
Number = int | float


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
        values = {name: getattr(trial, name) for name in NAMED} | dict(trial.values)
        if not trial.worth_saving:
            values["save_to"] = None
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

    @staticmethod
    def of(override: Override) -> "Range":
        """What an override sweeps, or its one value; a range's end is included, as by Optuna.

        InputError for values that are no numbers.
        """
        swept = override.value()
        match swept:
            case IntervalSweep(start=low, end=high):
                values: list[Any] = [low, high]
            case RangeSweep(start=low, stop=high):
                values = [low, high]
            case _ if override.is_sweep_override():
                values = list(override.sweep_iterator())
            case _:
                values = [swept]
        if not all(map(_is_number, values)):
            raise InputError(
                f"{override.input_line}: bstune tunes numbers; give {override.key_or_group} a "
                f"range, as 'interval(1,9)', or one value, which all jobs have"
            )
        low, high = min(values), max(values)
        multiple = 1
        if isinstance(swept, RangeSweep) and isinstance(swept.step, int):
            multiple = math.gcd(low, swept.step) if isinstance(low, int) else 1
            high -= (high - low) % swept.step
        elif not isinstance(swept, IntervalSweep) and all(isinstance(one, int) for one in values):
            multiple = math.gcd(*values)
        return Range(low, high, multiple)

    def with_value(self, value: Number) -> "Range":
        """The range that has a value, too."""
        multiple = math.gcd(self.multiple, value) if isinstance(value, int) else 1
        return Range(min(self.low, value), max(self.high, value), multiple)


def renamed(given: Mapping[str, Any]) -> dict[str, Any]:
    """What is given below ``hydra.sweeper``, by bstune's names; null is left out.

    Raises:
        InputError: for what only Hydra's Optuna sweeper has.
    """
    known = {name: value for name, value in given.items() if value is not None}
    for name in REFUSED:
        if name in known:
            raise InputError(
                f"{name}: write ranges as hydra.sweeper.params={{KEY: 'interval(1,9)'}}"
            )
    for alias, name in ALIASES.items():
        if alias in known:
            known.setdefault(name, known.pop(alias))
    for section in ("budget", "baseline"):
        if isinstance(known.get(section), dict):
            known[section] = {key: it for key, it in known[section].items() if it is not None}
    # Three failures in a row end a study.
    known.pop("max_failure_rate", None)
    if isinstance(known.get("sampler"), dict):
        sampler = known.pop("sampler").get("_target_", "hydra.sweeper.sampler")
        say(f"bstune's own search is in the place of {sampler}")
    direction = known.pop("direction", None)
    if direction is not None:
        if str(direction) not in DIRECTIONS:
            raise InputError(f"direction must be minimize or maximize, but got {direction}")
        # Optuna's word for a number that has no name.
        known.setdefault("target", f"{DIRECTIONS[direction]} value")
    return known


def read_sweep(
    known: Mapping[str, Any],
    arguments: Sequence[str],
    config: DictConfig,
    loader: ConfigLoader,
    command: Sequence[str],
) -> tuple[Application, Options]:
    """Read a sweep: what its jobs take, and the options of its study.

    Args:
        known: what is given below ``hydra.sweeper``, as of :func:`renamed`.
        arguments: the command line's overrides; they replace those of ``params``.
        config: of the application, with Hydra's own.
        loader: composes a job's config.
        command: that began the sweep.

    Raises:
        InputError: one line for all that is missing, or for what cannot be used.
    """
    lines = [f"{key}={value}" for key, value in known.get("params", {}).items()]
    try:
        parsed = OverridesParser.create(config_loader=loader).parse_overrides([*lines, *arguments])
    except HydraException as error:
        raise InputError(f"hydra.sweeper.params: {_in_line(error)}") from error
    overrides = {one.key_or_group: one for one in parsed}
    swept = {key: one for key, one in overrides.items() if one.is_sweep_override()}
    fixed = {key: str(one.input_line) for key, one in overrides.items() if key not in swept}
    job = composed(loader, config, list(fixed.values()))
    keys = _keys(known, swept, job)
    seed = keys.get("seed", "")
    if seed in swept:
        raise InputError(f"{swept[seed].input_line}: each trial has its own seed; leave it out")
    ranges = {}
    absent: dict[str, list[str]] = {}
    for name, example in RANGES.items():
        key = keys.get(name, "KEY")
        # One batch size is a range, too.
        if key in swept or (key in fixed and name == "batch_size"):
            ranges[name] = Range.of(overrides[key])
        else:
            naming = [] if name in keys else [f"hydra.sweeper.{name}=KEY"]
            absent[f"a range of {name}"] = [f"{key}={example}", *naming]
    sizes = ranges.get("batch_size")
    if sizes is not None and not (isinstance(sizes.low, int) and isinstance(sizes.high, int)):
        line = overrides[keys["batch_size"]].input_line
        raise InputError(f"{line}: a batch size is a whole number, as {RANGES['batch_size']}")
    further = {key: Range.of(one) for key, one in swept.items() if key not in keys.values()}
    spelled = {key: one.get_key_element() for key, one in swept.items()}
    taken = {
        name: spelled.get(key, key) for name, key in {**keys, **{it: it for it in further}}.items()
    }
    own = tuple(line for key, line in fixed.items() if key not in keys.values())
    # A key that the application has not is told before a job begins.
    composed(loader, config, [*own, *(f"{key}=1" for key in taken.values())])
    values = {name: value for name, value in known.items() if name not in (*NAMED, "params")}
    _fill_question(values, keys, job, absent)
    _fill_baseline(values, keys, list(further), job, absent)
    if absent:
        words = shlex.join([*command, *(word for words in absent.values() for word in words)])
        raise InputError(f"{', '.join(absent)} must be given, as {words}")
    if seed in fixed:
        # The seed of the study, from which those of its trials follow.
        values["seed"] = overrides[seed].value()
    options = _options(values, ranges, further)
    return Application(taken, own), options


def composed(loader: ConfigLoader, config: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """The config of a job, with Hydra's own; InputError where it cannot be composed."""
    try:
        return loader.load_sweep_config(config, list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise InputError(f"no job can have this: {_in_line(error)}") from error


def _in_line(error: Exception) -> str:
    """Write an error of Hydra without its keys and its advice on tracebacks."""
    return " ".join(re.split(r"\n\s*full_key:", f"{error} {error.__cause__ or ''}")[0].split())


def _keys(known: Mapping[str, Any], swept: Collection[str], job: DictConfig) -> dict[str, str]:
    """The keys of what each trial has: named ones, else the only one with such an end.

    Args:
        known: what is given below ``hydra.sweeper``.
        swept: keys that have ranges.
        job: the config of a job.
    """
    keys = {name: str(known[name]) for name in NAMED if name in known}
    own = [key for key in _dotted(OmegaConf.to_container(job)) if not key.startswith("hydra.")]
    for name, end in ENDS.items():
        # A batch size or a rate that has a range is meant, before others.
        for among in (swept, own):
            found = [key for key in among if re.search(rf"(^|[._@:/])({end})$", key)]
            if name not in keys and len(found) == 1:
                keys[name] = found[0]
    return keys


def _dotted(value: Any, name: str = "") -> Iterator[str]:
    """The dotted keys of all plain values in nested mappings."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _dotted(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name


def _number(job: DictConfig, key: str) -> Number | None:
    """The application's own number at a key; None where it has none."""
    value = OmegaConf.select(job, key.lstrip("+"))
    return value if _is_number(value) else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _fill_question(
    values: dict[str, Any], keys: Mapping[str, str], job: DictConfig, absent: dict[str, list[str]]
) -> None:
    """Fill the objective and the budget, or add to what is absent.

    Args:
        values: of options.
        keys: of what each trial has.
        job: the config of a job.
        absent: what to write, by what is missing.
    """
    needed = {"max_steps"} if values.get("schedule_ends") else set()
    if {"resume_from", "save_to"} & keys.keys():
        needed = {"max_steps", "resume_from", "save_to"}
    for name in sorted(needed - keys.keys()):
        absent[name] = [f"hydra.sweeper.{name}=KEY"]
    if "target" not in values:
        absent["target"] = ['hydra.sweeper.target="min val/loss"']
        return
    seeks_best = Target.parse(str(values["target"])).goal is None
    if seeks_best:
        values.setdefault("objective", "metric")
    budget = values.setdefault("budget", {})
    is_known = budget.get("steps") or budget.get("examples")
    length = _number(job, keys["max_steps"]) if "max_steps" in keys else None
    if not is_known and length is not None:
        budget["steps"] = length
    elif not is_known and seeks_best and "max_steps" not in keys:
        # A job that ends by itself has spent its budget.
        budget["steps"] = 1
    elif not is_known:
        absent["budget.steps"] = ["hydra.sweeper.budget.steps=2000"]


def _fill_baseline(
    values: dict[str, Any],
    keys: Mapping[str, str],
    further: Sequence[str],
    job: DictConfig,
    absent: dict[str, list[str]],
) -> None:
    """Fill the baseline by the application's own values; there is none where it has none."""
    baseline = values.setdefault("baseline", {})
    for name in RANGES:
        if name in keys:
            baseline.setdefault(name, _number(job, keys[name]))
    if None in (baseline.get("batch_size"), baseline.get("lr")):
        return
    own = {key: _number(job, key) for key in further} | baseline.get("values", {})
    unknown = [key for key, value in own.items() if value is None]
    if unknown:
        examples = ",".join(f"{key}:1" for key in unknown)
        absent["baseline.values"] = [f"hydra.sweeper.baseline.values={{{examples}}}"]
    baseline["values"] = own


def _options(
    values: dict[str, Any], ranges: Mapping[str, Range], further: Mapping[str, Range]
) -> Options:
    """Check the options of a study; the baseline belongs to its ranges.

    Args:
        values: all that is no range.
        ranges: of batch size and rate.
        further: of further values.
    """
    baseline = values["baseline"]
    sizes, rates = ranges["batch_size"], ranges["lr"]
    if baseline.get("batch_size"):
        sizes = sizes.with_value(baseline["batch_size"])
    if baseline.get("lr"):
        rates = rates.with_value(baseline["lr"])
    tune = {}
    for name, one in further.items():
        # Where the application has 0.5, an interval from 0 to 1 is not one of whole numbers.
        as_own = float if isinstance(baseline.get("values", {}).get(name), float) else type(one.low)
        tune[name] = [as_own(one.low), as_own(one.high)]
    values |= {
        "batch_size": {"low": sizes.low, "high": sizes.high, "multiple": sizes.multiple},
        "lr": {"low": rates.low, "high": rates.high},
        "tune": tune or None,
    }
    options = options_from_python(**values)
    defaults = options_from_python(study=options.study)
    useless = [name for name in OF_TRAINING if name in differing(defaults, options)]
    if useless:
        raise InputError(f"{', '.join(useless)}: the application decides that; leave it out")
    return options
