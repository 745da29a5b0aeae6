"""The state that a step changes on the device, copied, put back and compared.

That is tensors and the states of random number generators.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from bstune.trial.lightning.installed import LightningModule

# A replay may differ from its step by this share of the step's change of a tensor. Kernels that add
# up in no fixed order differ by some tenths of a percent in half precision, which Muon's
# orthogonalisation may turn into some percent.
TOLERANCE = 0.05
# In addition it may differ by this share of the tensor itself.
ROUNDING = 1e-6


class Copy:
    """Copies of tensors, and the states of generators, at one time."""

    def __init__(self, tensors: Sequence[Tensor], generators: Sequence[torch.Generator]) -> None:
        self.tensors = [tensor.detach().clone() for tensor in tensors]
        self.generators = [generator.get_state() for generator in generators]


class DeviceState:
    """The tensors and generators of a module and its optimizer that a step may change.

    Attributes:
        names: of the tensors, for messages.
        tensors: weights, buffers and the optimizer's state: the live ones, not copies.
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

    def copy(self) -> Copy:
        """Copy all tensors' values and generators' states."""
        return Copy(self.tensors, self.generators)

    @torch.no_grad()
    def restore(self, copy: Copy) -> None:
        """Put tensors and generators back as they were when the copy was made."""
        copy_values(self.tensors, copy.tensors)
        for generator, state in zip(self.generators, copy.generators, strict=True):
            generator.set_state(state)


def copy_values(to: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy ``values`` into the tensors ``to``, in as few kernels as possible."""
    if to:
        torch._foreach_copy_(list(to), list(values))


def generators_of(module: LightningModule) -> list[torch.Generator]:
    """Find the random generators on the module's device that a step may draw from.

    They are torch's default one, and those that are attributes of the module or a module in it.
    """
    device = module.device
    default = torch.default_generator
    if device.type != "cpu":
        default = torch.cuda.default_generators[device.index or 0]
    # A dict has each generator once, in the order of the modules.
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
    """Name the first tensor that a replay has changed otherwise than the step; None if none.

    Floating-point tensors may differ by rounding. The device is waited for.

    Args:
        names: of the tensors.
        replayed: their values after the replay.
        taken: their values after the step itself.
        before: their values before either.
    """
    for name, by_replay, by_step, start in zip(names, replayed, taken, before, strict=True):
        if by_step.is_floating_point():
            is_same = _is_near(
                _in_float32_at_least(by_replay),
                _in_float32_at_least(by_step),
                _in_float32_at_least(start),
            )
        else:
            is_same = torch.equal(by_replay, by_step)
        if not is_same:
            return name
    return None


def _is_near(by_replay: Tensor, by_step: Tensor, start: Tensor) -> bool:
    """Whether two values of a tensor differ by no more than kernels' rounding, by their norms.

    That is a share of the step's change, and the rounding of the values themselves.
    Values that are not finite after the step are taken as near: the training is lost either way.
    """
    error: float = (by_replay - by_step).norm().item()
    change: float = (by_step - start).norm().item()
    size: float = by_step.norm().item()
    if not math.isfinite(size):
        return True
    return error <= TOLERANCE * change + ROUNDING * size


def _in_float32_at_least(tensor: Tensor) -> Tensor:
    """Give a tensor in float32 at least, so that its norm does not overflow."""
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))
