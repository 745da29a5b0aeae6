"""What a step may change on the host, which a replay of the step would not change again."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from bstune.trial.devices.randomness import random_state
from bstune.trial.lightning.installed import LightningModule

# Values that are compared; all others are the same where they are the same object.
PLAIN = (bool, int, float, complex, str, bytes, type(None))


def host_state(module: LightningModule, optimizer: Optimizer) -> dict[str, list[Any]]:
    """Take what modules and the optimizer's state hold, by name, containers by their contents."""
    state = {}
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            state[f"{name}.{key}" if name else key] = _contents(value)
    for number, values in enumerate(optimizer.state.values()):
        for key, value in values.items():
            state[f"{key} of the optimizer's parameter {number}"] = _contents(value)
    return state


def _contents(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [*value, *value.values()]
    return list(value) if isinstance(value, list | tuple | set) else [value]


def first_change(before: Mapping[str, list[Any]], after: Mapping[str, list[Any]]) -> str | None:
    """Name what is the first to differ between two states; None: nothing does."""
    for name in {**before, **after}:
        if not holds_the_same(before.get(name), after.get(name)):
            return name
    return None


def holds_the_same(before: list[Any] | None, after: list[Any] | None) -> bool:
    """Return whether two lists hold the same objects, or numbers and texts that are equal; None: there is none."""
    if before is None or after is None or len(before) != len(after):
        return False
    pairs = zip(before, after, strict=True)
    return all(_is_same(one, other) for one, other in pairs)


def _is_same(value: Any, other: Any) -> bool:
    if value is other:
        return True
    return type(value) is type(other) and isinstance(value, PLAIN) and bool(value == other)


def host_random(device: torch.device) -> list[str]:
    """Take the states of the generators of Python, numpy and torch on the host, unless that is the device."""
    state = random_state()
    numpy = [part.tolist() if isinstance(part, Tensor) else part for part in state["numpy"]]
    of_torch = [] if device.type == "cpu" else state["torch"].tolist()
    return [repr(state["python"]), repr(numpy), repr(of_torch)]
