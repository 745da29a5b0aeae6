"""Sets the trial's learning rate in optimizers that a module has built with rates of its own.

The option ``scaling.override_lr`` asks for it. The rate is set once, after
``configure_optimizers``. A stopped trial's checkpoint holds the rates that were set, so one that
goes on has the same.
"""

import math
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from bstune.core.errors import ConfigError
from bstune.trial.batches.half_lives import optimizers_in

# Keys of a parameter group that may hold the rate which the user gave, before any schedule: the
# first one that is there does.
GIVEN_RATES = ("max_lr", "initial_lr", "lr")
# The name of a rate has one of these words.
RATE_WORDS = frozenset({"lr", "lrs", "eta"})
# And it has no other words than these: base_lrs, min_lr, eta_min and warmup_start_lr are rates, but
# lr_decay is none.
WORDS = RATE_WORDS | {
    *("base", "end", "final", "init", "initial", "last", "max", "min", "peak", "start", "swa"),
    *("default", "target", "warmup"),
}

# A dict or a list of more values is taken for data, and not searched for schedules.
MOST_VALUES = 1000


def own_rate_of(configured: object) -> float | None:
    """Give the learning rate that a module's ``configure_optimizers`` has set itself.

    It is the largest rate of all parameter groups before any schedule; with OneCycleLR, the largest
    of the cycle. None where no group has a rate over 0.

    Args:
        configured: whatever ``configure_optimizers`` has returned.
    """
    rates = list[float]()
    for optimizer in optimizers_in(configured):
        for group in optimizer.param_groups:
            # Of several, the first is the rate that the user gave: the others come from schedules.
            given = [group[name] for name in GIVEN_RATES if group.get(name) is not None]
            if given:
                rates.append(float(given[0]))
    largest = max(rates, default=0.0)
    return largest if 0.0 < largest < math.inf else None


def override_rate(configured: object, module: object, lr: float) -> None:
    """Set a learning rate in place of a module's own.

    All rates of optimizers and schedules are multiplied by the same factor.

    Args:
        configured: whatever ``configure_optimizers`` has returned.
        module: that built it, which may hold further schedules.
        lr: the new rate of the parameter group with the largest one, before any schedule.

    Raises:
        ConfigError: where no optimizer has a rate over 0.
    """
    own_rate = own_rate_of(configured)
    if own_rate is None:
        kinds = ", ".join(type(optimizer).__name__ for optimizer in optimizers_in(configured))
        raise ConfigError(
            "override_lr sets the learning rate of the module's optimizers, but none of them "
            f"({kinds or 'none'}) has a rate over 0: let configure_optimizers give it one, such as "
            "lr=0.001"
        )
    factor = lr / own_rate
    if factor == 1.0:
        return
    for optimizer in optimizers_in(configured):
        for values in (optimizer.defaults, *optimizer.param_groups):
            _scale(values, factor)
    # Schedules keep rates of their own, such as base_lrs and max_lrs.
    for schedule in _schedules_in([configured, *vars(module).values()]):
        _scale(vars(schedule), factor)


def is_rate(name: str) -> bool:
    """Whether a number of an optimizer or a schedule is a learning rate, by its name.

    All words of the name must be known: ``base_lrs`` and ``eta_min`` are rates, but ``lr_decay``,
    a factor that multiplies one, is none.
    """
    words = {word for word in name.split("_") if word}
    return bool(words & RATE_WORDS) and words <= WORDS


def _scale(values: MutableMapping[str, Any], factor: float) -> None:
    """Multiply those of some values in place that are learning rates by their names."""
    for name, value in list(values.items()):
        if is_rate(name):
            values[name] = _times(value, factor)


def _times(value: object, factor: float) -> object:
    """Give a rate, or a list or tuple of rates, times a factor; anything else as it is."""
    if isinstance(value, Tensor):
        return value * factor
    if isinstance(value, list | tuple):
        return type(value)([_times(rate, factor) for rate in value])
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value * factor
    return value


def _schedules_in(values: Iterable[object]) -> Iterator[LRScheduler]:
    """Yield each of torch's schedules among some values, and in dicts and lists among them.

    Schedules in a schedule are yielded, too.
    """
    left = list(values)
    # The values that were looked at, by their ids. They are kept, so that no other object gets the
    # id of one.
    seen = dict[int, object]()
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, LRScheduler):
            yield value
            left += vars(value).values()
        elif isinstance(value, dict) and len(value) <= MOST_VALUES:
            left += value.values()
        elif isinstance(value, list | tuple) and len(value) <= MOST_VALUES:
            left += value
