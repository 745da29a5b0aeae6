"""What a step may change on the host, which a replay of the step would not change again."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from bstune.trial.devices.randomness import random_state
from bstune.trial.lightning.installed import LightningModule

# Values that are compared; all others are the same where they are the same object.
PLAIN = (bool, int, float, complex, str, bytes, type(None))


def host_state(module: LightningModule, optimizer: Optimizer) -> dict[str, list[object]]:
    """Take what modules and the optimizer's state hold, by name, containers by their contents."""
    state = {}
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            # The module that is trained has no name.
            place = f"{name}.{key}" if name else key
            state[place] = _contents(value)
    for number, values in enumerate(optimizer.state.values()):
        for key, value in values.items():
            state[f"{key} of the optimizer's parameter {number}"] = _contents(value)
    return state


def _contents(value: object) -> list[object]:
    if isinstance(value, Mapping):
        return [*value, *value.values()]
    if isinstance(value, list | tuple | set):
        return list(value)
    return [value]


def first_change(
    before: Mapping[str, list[object]], after: Mapping[str, list[object]]
) -> str | None:
    """Name what is the first to differ between two states; None: nothing does."""
    for name in {**before, **after}:
        if not holds_the_same(before.get(name), after.get(name)):
            return name
    return None


def holds_the_same(before: Sequence[object] | None, after: Sequence[object] | None) -> bool:
    """Tell whether two lists hold the same objects, or numbers and texts that are equal.

    None: there is none.
    """
    if before is None or after is None or len(before) != len(after):
        return False
    return all(map(_is_same, before, after))


def _is_same(value: object, other: object) -> bool:
    if value is other:
        return True
    return type(value) is type(other) and isinstance(value, PLAIN) and bool(value == other)


def host_random(device: torch.device) -> list[str]:
    """Take the states of the generators on the host, unless that is the device.

    They are those of Python, numpy and torch.
    """
    state = random_state()
    of_numpy = list[object]()
    for part in state["numpy"]:
        of_numpy.append(part.tolist() if isinstance(part, Tensor) else part)
    of_torch = list[int]()
    if device.type != "cpu":
        of_torch = state["torch"].tolist()
    return [repr(state["python"]), repr(of_numpy), repr(of_torch)]
