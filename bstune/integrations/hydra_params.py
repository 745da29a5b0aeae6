"""The parameters of a sweep of anyone's Hydra application, as ranges that a study can search.

They are written as for Hydra's Optuna sweeper: ``interval(low, high)``,
``tag(log, interval(...))``, ``int(interval(...))``, ``choice(...)`` and ``range(...)``. An override
with one value is the same in each job.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep, Transformer
from hydra.errors import HydraException

from bstune.core.errors import ConfigError

# Names that a study has of its own.
OWN_NAMES = frozenset({"batch_size", "lr", "delta"})
# The last parts of the keys that are taken for the batch size and for the learning rate.
USUAL_NAMES = {"batch_size": ("batch_size", "train_batch_size"), "lr": ("lr", "learning_rate")}
MEANINGS = {"batch_size": "batch size", "lr": "learning rate"}
EXAMPLES = {"batch_size": "int(interval(8, 512))", "lr": "tag(log, interval(0.001, 1))"}


@dataclass(frozen=True)
class Range:
    """The values of a parameter.

    Args:
        low: the smallest one; NaN if some values are no numbers.
        high: the largest one; NaN likewise.
        is_log: whether it is searched on a log scale.
        is_integer: whether it is a whole number, or is searched by the place among ``values``.
        values: all values, as Hydra takes them; empty for an interval.
    """

    low: float
    high: float
    is_log: bool
    is_integer: bool
    values: tuple[str, ...] = ()


@dataclass(frozen=True)
class Params:
    """The parameters of a sweep.

    Args:
        batch_size: key of the batch size, as an override has it.
        lr: key of the learning rate.
        batch_sizes: its range.
        rates: its range.
        others: the ranges of all other parameters that are searched, by key.
        fixed: the overrides that all jobs have.
    """

    batch_size: str
    lr: str
    batch_sizes: Range
    rates: Range
    others: Mapping[str, Range]
    fixed: tuple[str, ...]

    @property
    def multiple(self) -> int | None:
        """The greatest common divisor of the batch sizes; None if they are an interval."""
        if not self.batch_sizes.values:
            return None
        return math.gcd(*(int(value) for value in self.batch_sizes.values))

    @property
    def names(self) -> dict[str, str]:
        """The name in the study of each other parameter, by its key.

        It is the last part of the key, unless another parameter or the study has that name.
        """
        uses = Counter(_last_part(key) for key in self.others)
        names = dict[str, str]()
        for key in self.others:
            short = _last_part(key)
            is_free = uses[short] == 1 and short not in OWN_NAMES
            names[key] = short if is_free else re.sub(r"\W+", "_", bare(key))
        return names

    @property
    def tunable(self) -> dict[str, dict[str, float | bool]]:
        """The other parameters as :class:`bstune.Study` takes them, by name.

        A choice is searched by the places of its values.
        """
        tunable: dict[str, dict[str, float | bool]] = {}
        for key, name in self.names.items():
            searched = self.others[key]
            low = searched.low
            high = searched.high
            if searched.values:
                low = 0
                high = len(searched.values) - 1
            tunable[name] = {
                "low": low,
                "high": high,
                "log": searched.is_log,
                "integer": searched.is_integer,
            }
        return tunable

    def values(self, hyperparameters: Mapping[str, int | float | None]) -> dict[str, str]:
        """Give the values of the other parameters by key, as an override has them.

        ``hyperparameters`` are those of a trial, by their names in the study.
        """
        values = dict[str, str]()
        for key, name in self.names.items():
            value = hyperparameters[name]
            choices = self.others[key].values
            # A choice is searched by the place of its value. Only the type allows a value of None:
            # each trial has a value of every parameter.
            values[key] = choices[int(value or 0)] if choices else repr(value)
        return values


def bare(key: str) -> str:
    """Give a key without the + or ~ that says how it is set."""
    return key.lstrip("+~")


def _last_part(key: str) -> str:
    """Give the last name of a key: ``lr`` of ``optimizer.lr``."""
    return re.split(r"[./@:]", bare(key))[-1]


def read_params(
    lines: Sequence[str], batch_size: str | None, lr: str | None, loader: ConfigLoader
) -> Params:
    """Read the parameters of a sweep.

    Args:
        lines: ``KEY=VALUES`` each; of several with one key the last one counts.
        batch_size: key of the batch size; None: it has one of USUAL_NAMES.
        lr: key of the learning rate; None: it has one of USUAL_NAMES.
        loader: finds the choices of a group.

    Raises:
        ConfigError: if the parameters cannot be searched.
    """
    try:
        parsed = OverridesParser.create(config_loader=loader).parse_overrides(list(lines))
        overrides = {bare(override.get_key_element()): override for override in parsed}
        searched = dict[str, Range]()
        for override in overrides.values():
            values = _range(override)
            if values is not None:
                searched[override.get_key_element()] = values
    except HydraException as error:
        raise ConfigError(f"the sweep's parameters cannot be read: {error}") from error
    size_key = _key_of("batch_size", batch_size, searched, overrides)
    rate_key = _key_of("lr", lr, searched, overrides)
    others = dict[str, Range]()
    fixed = list[str]()
    for key, values in searched.items():
        if key in (size_key, rate_key):
            continue
        # A choice of one value is fixed.
        if len(values.values) == 1:
            fixed.append(f"{key}={values.values[0]}")
        else:
            others[key] = values
    for override in overrides.values():
        if _is_fixed(override):
            fixed.append(str(override.input_line))
    return Params(
        batch_size=size_key,
        lr=rate_key,
        batch_sizes=_checked_sizes(size_key, searched[size_key]),
        rates=_checked_rates(rate_key, searched[rate_key]),
        others=others,
        fixed=tuple(fixed),
    )


def _is_fixed(override: Override) -> bool:
    """Tell whether an override has one value."""
    return not override.is_sweep_override()


def _range(override: Override) -> Range | None:
    """Give the range of values that an override sweeps over; None if it has one value."""
    if _is_fixed(override):
        return None
    swept = override.value()
    if isinstance(swept, IntervalSweep):
        start = swept.start
        end = swept.end
        assert start is not None  # noqa: S101 (Hydra's parser has set it)
        assert end is not None  # noqa: S101 (Hydra's parser has set it)
        is_whole = isinstance(start, int) and isinstance(end, int)
        return Range(
            low=float(start), high=float(end), is_log="log" in swept.tags, is_integer=is_whole
        )
    encoded = override.sweep_iterator(transformer=Transformer.encode)
    values = tuple(str(value) for value in encoded)
    numbers = _numbers(values)
    # Values that are not numbers, such as names of optimizers, are searched by their places.
    if len(numbers) < len(values):
        return Range(math.nan, math.nan, is_log=False, is_integer=True, values=values)
    low = min(numbers)
    high = max(numbers)
    # Whole numbers one apart are searched as an integer, other values by their places.
    steps_by_one = isinstance(swept, RangeSweep) and swept.step == 1 and not swept.shuffle
    if steps_by_one and all(number.is_integer() for number in numbers):
        return Range(low, high, is_log=False, is_integer=True)
    return Range(low, high, is_log=False, is_integer=True, values=values)


def _numbers(texts: Sequence[str]) -> list[float]:
    """Give the numbers among some texts; other texts are left out."""
    numbers = list[float]()
    for text in texts:
        with suppress(ValueError):
            numbers.append(float(text))
    return numbers


def _key_of(
    role: str,
    named: str | None,
    searched: Mapping[str, Range],
    overrides: Mapping[str, Override],
) -> str:
    """Find the key of the batch size or of the learning rate among the searched ones.

    Args:
        role: ``batch_size`` or ``lr``.
        named: the key that the settings name; None: it is found by USUAL_NAMES.
        searched: the ranges of all searched parameters, by key.
        overrides: all overrides, for the message.

    Raises:
        ConfigError: if there is not exactly one.
    """
    usual = USUAL_NAMES[role]
    keys = [key for key in searched if bare(key) == named]
    if named is None:
        keys = [key for key in searched if _last_part(key) in usual]
    if len(keys) == 1:
        return keys[0]
    meaning = MEANINGS[role]
    range_of_it = EXAMPLES[role]
    searched_text = ", ".join(bare(key) for key in searched) or "none"
    if named is not None:
        has = f"is none of {searched_text}"
        if named in overrides:
            has = f"is {overrides[named].input_line}, one value"
        raise ConfigError(
            f"hydra.sweeper.{role}={named} names the {meaning}, but among the sweep's parameters "
            f"it {has}: give it a range, such as '{named}={range_of_it}'"
        )
    several = "several of them may be" if keys else "none of them is called"
    raise ConfigError(
        f"which of the sweep's parameters ({searched_text}) is the {meaning}? {several} "
        f"{' or '.join(usual)}: name it, hydra.sweeper.{role}=KEY, and give it a range, such as "
        f"'KEY={range_of_it}'"
    )


def _checked_sizes(key: str, sizes: Range) -> Range:
    """Give the range as it is. ConfigError if its batch sizes are no whole numbers from 1 on."""
    values = _numbers(sizes.values)
    # The range of other values than numbers has NaN ends, which the check below refuses.
    if not values or len(values) < len(sizes.values):
        values = [sizes.low, sizes.high]
    if not all(value >= 1 and value.is_integer() for value in values):
        raise ConfigError(
            f"the batch size {key} must lie between whole numbers from 1 on, but got "
            f"{_range_text(sizes)}"
        )
    return sizes


def _checked_rates(key: str, rates: Range) -> Range:
    """Give the range as it is. ConfigError if its learning rates are no numbers over 0."""
    if not 0.0 < rates.low <= rates.high < math.inf:
        raise ConfigError(
            f"the learning rate {key} must lie between numbers over 0, but got {_range_text(rates)}"
        )
    return rates


def _range_text(values: Range) -> str:
    """Write a range's values, or its ends."""
    return ", ".join(values.values) or f"{values.low:g} to {values.high:g}"
