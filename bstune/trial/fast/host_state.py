"""The state on the host that a step may change, and that a replay would not change again."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from bstune.trial.devices.randomness import random_state
from bstune.trial.lightning.installed import LightningModule

# Types of values that are compared. Values of other types are the same if they are one object.
PLAIN = (bool, int, float, complex, str, bytes, type(None))


def host_state(module: LightningModule, optimizer: Optimizer) -> dict[str, list[object]]:
    """Give the values of modules' attributes and of the optimizer's state, by name.

    Each is a list: the contents of a container, or the single value.
    """
    state = {}
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            # The outermost module has an empty name.
            path = f"{name}.{key}" if name else key
            state[path] = _contents(value)
    for number, values in enumerate(optimizer.state.values()):
        for key, value in values.items():
            state[f"{key} of the optimizer's parameter {number}"] = _contents(value)
    return state


def _contents(value: object) -> list[object]:
    """List the contents of a container (keys first of a mapping), or a single value itself."""
    if isinstance(value, Mapping):
        return [*value, *value.values()]
    if isinstance(value, list | tuple | set):
        return list(value)
    return [value]


def first_change(
    before: Mapping[str, list[object]], after: Mapping[str, list[object]]
) -> str | None:
    """Name the first value that differs between two states of :func:`host_state`; None if none."""
    for name in {**before, **after}:
        if not holds_the_same(before.get(name), after.get(name)):
            return name
    return None


def holds_the_same(before: Sequence[object] | None, after: Sequence[object] | None) -> bool:
    """Whether two lists hold the same objects, or equal plain values, in the same order.

    A missing list (None) differs from any other.
    """
    if before is None or after is None or len(before) != len(after):
        return False
    return all(map(_is_same, before, after))


def _is_same(value: object, other: object) -> bool:
    """Whether two values are one object, or equal plain values of one type."""
    if value is other:
        return True
    return type(value) is type(other) and isinstance(value, PLAIN) and bool(value == other)


def host_random(device: torch.device) -> list[str]:
    """Give the states of Python's, numpy's and torch's random generators on the host, as texts.

    Torch's is left empty where ``device`` is the CPU: a step may draw from it there, as a replayed
    step draws from it too.
    """
    state = random_state()
    of_numpy = list[object]()
    # The text of a long tensor leaves out its middle, that of a list does not.
    for part in state["numpy"]:
        of_numpy.append(part.tolist() if isinstance(part, Tensor) else part)
    of_torch = list[int]()
    if device.type != "cpu":
        of_torch = state["torch"].tolist()
    return [repr(state["python"]), repr(of_numpy), repr(of_torch)]
