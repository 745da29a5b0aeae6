"""The parameters of a sweep of anyone's Hydra application, and what a study makes of their ranges.

They are written as for Hydra's Optuna sweeper: ``interval(low, high)``,
``tag(log, interval(...))``, ``int(interval(...))``, ``choice(...)`` and ``range(...)``; what is no
sweep is the same in each job.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep, Transformer
from hydra.errors import HydraException

from bstune.core.errors import ConfigError

# The last parts of the keys that are taken for the batch size and for the learning rate.
USUAL_NAMES = {"batch_size": ("batch_size", "train_batch_size"), "lr": ("lr", "learning_rate")}
MEANINGS = {"batch_size": "batch size", "lr": "learning rate"}
EXAMPLES = {"batch_size": "int(interval(8, 512))", "lr": "tag(log, interval(0.001, 1))"}


@dataclass(frozen=True)
class Range:
    """The values of a parameter.

    Args:
        low: the smallest one.
        high: the largest one.
        is_log: whether it is searched on a log scale.
        is_integer: whether it is a whole number.
        values: what it is made of, as Hydra takes them; none of an interval.
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
        """Of which the batch sizes are multiples, by the values that they have.

        None: of an interval.
        """
        if not self.batch_sizes.values:
            return None
        return math.gcd(*(int(value) for value in self.batch_sizes.values))

    @property
    def names(self) -> dict[str, str]:
        """The name in the study of each other parameter, by its key: the last part where that is enough."""
        last = [_last_part(key) for key in self.others]
        taken = {"batch_size", "lr", "delta"}
        found = {}
        for key in self.others:
            short = _last_part(key)
            is_free = last.count(short) == 1 and short not in taken
            found[key] = short if is_free else re.sub(r"\W+", "_", bare(key))
        return found

    @property
    def tunable(self) -> dict[str, dict[str, float | bool]]:
        """The other parameters as :class:`bstune.Study` takes them: choices by their places."""
        found: dict[str, dict[str, float | bool]] = {}
        for key, name in self.names.items():
            one = self.others[key]
            ends = (0, len(one.values) - 1) if one.values else (one.low, one.high)
            found[name] = {
                "low": ends[0],
                "high": ends[1],
                "log": one.is_log,
                "integer": one.is_integer,
            }
        return found

    def values(self, hyperparameters: Mapping[str, int | float | None]) -> dict[str, str]:
        """Give the values of the other parameters by key, as an override has them."""
        found = {}
        for key, name in self.names.items():
            value, choices = hyperparameters[name], self.others[key].values
            found[key] = choices[int(value or 0)] if choices else repr(value)
        return found


def bare(key: str) -> str:
    """Give a key without what says how it is set."""
    return key.lstrip("+~")


def _last_part(key: str) -> str:
    return re.split(r"[./@:]", bare(key))[-1]


def read_params(
    lines: Sequence[str], batch_size: str | None, lr: str | None, loader: ConfigLoader
) -> Params:
    """Read the parameters of a sweep; of one key the last stands.

    Args:
        lines: ``KEY=VALUES`` each.
        batch_size: key of the batch size; None: that of such a name.
        lr: key of the learning rate; None: likewise.
        loader: finds the choices of a group.

    Raises:
        ConfigError: where they cannot be searched.
    """
    try:
        parsed = OverridesParser.create(config_loader=loader).parse_overrides(list(lines))
        overrides = {bare(one.get_key_element()): one for one in parsed}
        ranges = {one.get_key_element(): _range(one) for one in overrides.values()}
    except HydraException as error:
        raise ConfigError(f"the sweep's parameters cannot be read: {error}") from error
    searched = {key: found for key, found in ranges.items() if found is not None}
    size_key = _key_of("batch_size", batch_size, searched, overrides)
    rate_key = _key_of("lr", lr, searched, overrides)
    others = {key: one for key, one in searched.items() if key not in (size_key, rate_key)}
    # A choice of one value is none.
    single = [key for key, one in others.items() if len(one.values) == 1]
    fixed = [f"{key}={others.pop(key).values[0]}" for key in single]
    fixed += [str(one.input_line) for one in overrides.values() if _is_fixed(one)]
    return Params(
        batch_size=size_key,
        lr=rate_key,
        batch_sizes=_whole(size_key, searched[size_key]),
        rates=_positive(rate_key, searched[rate_key]),
        others=others,
        fixed=tuple(fixed),
    )


def _is_fixed(override: Override) -> bool:
    return not override.is_sweep_override()


def _range(override: Override) -> Range | None:
    """Give what an override sweeps over; None: it does not sweep."""
    if _is_fixed(override):
        return None
    value = override.value()
    if isinstance(value, IntervalSweep):
        ends = (value.start, value.end)
        whole = all(isinstance(end, int) for end in ends)
        low, high = (float(end) for end in ends if end is not None)
        return Range(low, high, "log" in value.tags, whole)
    steps_by_one = isinstance(value, RangeSweep) and value.step == 1 and not value.shuffle
    values = tuple(str(one) for one in override.sweep_iterator(transformer=Transformer.encode))
    numbers = [_as_number(one) for one in values]
    known = [one for one in numbers if one is not None]
    if len(known) < len(values):
        return Range(math.nan, math.nan, False, True, values)
    whole = all(one.is_integer() for one in known)
    low, high = min(known), max(known)
    # A range of neighbouring whole numbers is what it says; other values are searched by their
    # places.
    return Range(low, high, False, True, () if steps_by_one and whole else values)


def _as_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _key_of(
    role: str,
    named: str | None,
    searched: Mapping[str, Range],
    overrides: Mapping[str, Override],
) -> str:
    """Find the key of the batch size or of the learning rate among those that are searched."""
    usual = USUAL_NAMES[role]
    found = [key for key in searched if bare(key) == named]
    if named is None:
        found = [key for key in searched if _last_part(key) in usual]
    if len(found) == 1:
        return found[0]
    meaning, range_of_it = MEANINGS[role], EXAMPLES[role]
    shown = ", ".join(bare(key) for key in searched) or "none"
    if named is not None:
        is_fixed = named in overrides
        has = f"is {overrides[named].input_line}, one value" if is_fixed else f"is none of {shown}"
        raise ConfigError(
            f"hydra.sweeper.{role}={named} names the {meaning}, but among the sweep's parameters "
            f"it {has}: give it a range, such as '{named}={range_of_it}'"
        )
    several = "several of them may be" if found else "none of them is called"
    raise ConfigError(
        f"which of the sweep's parameters ({shown}) is the {meaning}? {several} "
        f"{' or '.join(usual)}: name it, hydra.sweeper.{role}=KEY, and give it a range, such as "
        f"'KEY={range_of_it}'"
    )


def _whole(key: str, found: Range) -> Range:
    values = [float(value) for value in found.values if _as_number(value) is not None]
    ends = values if len(values) == len(found.values) and values else [found.low, found.high]
    if not all(end >= 1 and end.is_integer() for end in ends):
        raise ConfigError(
            f"the batch size {key} must lie between whole numbers from 1 on, but got "
            f"{', '.join(found.values) or f'{found.low:g} to {found.high:g}'}"
        )
    return found


def _positive(key: str, found: Range) -> Range:
    if not 0.0 < found.low <= found.high < math.inf:
        raise ConfigError(
            f"the learning rate {key} must lie between numbers over 0, but got "
            f"{', '.join(found.values) or f'{found.low:g} to {found.high:g}'}"
        )
    return found
