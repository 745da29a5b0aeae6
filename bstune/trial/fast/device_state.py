"""What a step changes on the device, to be put back and compared: tensors, random numbers."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from bstune.trial.lightning.installed import LightningModule

# A replay may differ from its step by this share of the step's change of a tensor: kernels that add
# up in no fixed order do by some tenths of a percent in half precision, of which Muon's
# orthogonalisation may make some percent.
TOLERANCE = 0.05
# And by this share of the tensor itself.
ROUNDING = 1e-6


class Copy:
    """The values of a state at one time."""

    def __init__(self, tensors: Sequence[Tensor], generators: Sequence[torch.Generator]) -> None:
        self.tensors = [tensor.detach().clone() for tensor in tensors]
        self.generators = [generator.get_state() for generator in generators]


class DeviceState:
    """Weights, buffers, the optimizer's state and generators, from one step to the next.

    Attributes:
        names: of the tensors, for a reader.
        tensors: as the module and the optimizer hold them.
        generators: that a step may draw from.
    """

    def __init__(self, module: LightningModule, optimizer: Optimizer) -> None:
        tensors: dict[str, Tensor] = dict(module.named_parameters())
        tensors |= dict(module.named_buffers())
        for number, values in enumerate(optimizer.state.values()):
            for key, value in values.items():
                if isinstance(value, Tensor):
                    tensors[f"{key} of the optimizer's parameter {number}"] = value
        self.names = list(tensors)
        self.tensors = [tensor.detach() for tensor in tensors.values()]
        self.generators = generators_of(module)

    def copied(self) -> Copy:
        """Copy all of it."""
        return Copy(self.tensors, self.generators)

    @torch.no_grad()
    def restore(self, copy: Copy) -> None:
        """Let it be as it was when the copy was made."""
        copy_values(self.tensors, copy.tensors)
        for generator, state in zip(self.generators, copy.generators, strict=True):
            generator.set_state(state)


def copy_values(to: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy tensors' values in as few kernels as possible."""
    if to:
        torch._foreach_copy_(list(to), list(values))


def generators_of(module: LightningModule) -> list[torch.Generator]:
    """Find the generators of the module's device that a step may draw from.

    They are torch's own, and the module's.
    """
    device = module.device
    default = torch.default_generator
    if device.type != "cpu":
        default = torch.cuda.default_generators[device.index or 0]
    # Each once, in the order of the modules.
    of_module: dict[torch.Generator, None] = {}
    for part in module.modules():
        for value in vars(part).values():
            if isinstance(value, torch.Generator) and value.device.type == device.type:
                of_module[value] = None
    return [default, *of_module]


def first_difference(
    names: Sequence[str],
    replayed: Sequence[Tensor],
    taken: Sequence[Tensor],
    before: Sequence[Tensor],
) -> str | None:
    """Name the first tensor that a replay changed otherwise than the step.

    The device is waited for.

    Args:
        names: of the tensors.
        replayed: their values after the replay.
        taken: after the step itself.
        before: ahead of either.
    """
    for name, by_replay, by_step, start in zip(names, replayed, taken, before, strict=True):
        if by_step.is_floating_point():
            is_same = _is_near(_wide(by_replay), _wide(by_step), _wide(start))
        else:
            is_same = torch.equal(by_replay, by_step)
        if not is_same:
            return name
    return None


def _is_near(by_replay: Tensor, by_step: Tensor, start: Tensor) -> bool:
    error: float = (by_replay - by_step).norm().item()
    change: float = (by_step - start).norm().item()
    size: float = by_step.norm().item()
    if not math.isfinite(size):
        return True
    return error <= TOLERANCE * change + ROUNDING * size


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))
