"""Looks whether the loss of a batch is the mean of its parts' losses.

All that bstune tells of batch sizes takes the loss to be a mean over examples: then a larger batch
estimates the same loss with less noise. A sum over the batch grows with it, and the loss of
contrastive learning compares the examples of a batch with each other.
"""

import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from bstune.trial.devices.randomness import random_state, set_random_state
from bstune.trial.lightning.installed import LightningModule

# The halves' mean may differ by this share of the whole batch's loss. Means over tokens or with
# weights of classes differ a little, as the halves have other numbers of them.
MEAN_TOLERANCE = 0.05
# The loss of a batch may differ from itself by this share. If it differs by more, it depends on
# more than the batch, such as the number of steps so far.
REPEAT_TOLERANCE = 0.005
# So near to one half of the whole batch's loss the halves' mean tells a sum.
SUM_TOLERANCE = 0.02


@dataclass(frozen=True)
class LossesOfParts:
    """The losses of a batch and of its halves, at the same weights."""

    batch_size: int
    whole: float
    halves_mean: float

    @property
    def is_mean(self) -> bool:
        """Whether the batch's loss is the mean of its halves', as nearly as can be told."""
        largest = max(abs(self.whole), abs(self.halves_mean))
        return abs(self.whole - self.halves_mean) <= MEAN_TOLERANCE * largest

    @property
    def is_sum(self) -> bool:
        """Whether the batch's loss is the sum of its halves'."""
        return abs(self.halves_mean - 0.5 * self.whole) <= SUM_TOLERANCE * abs(self.whole)


def parts_notes(name: str, losses: LossesOfParts | None) -> Iterator[str]:
    """Yield a line on a loss that is no mean over the examples of a batch.

    ``name``: of the module's class. ``losses``: None where they could not be compared.
    """
    if losses is None or losses.is_mean:
        return
    if losses.is_sum:
        yield (
            f"{name}'s loss is a sum over the batch, so that gradients grow with the batch size: "
            "scaling rules expect a mean, such as reduction='mean'"
        )
        return
    yield (
        f"{name}'s loss depends on the batch's size, as in contrastive learning: of "
        f"{losses.batch_size} examples it is {losses.whole:.3g}, the mean of their halves' is "
        f"{losses.halves_mean:.3g}. Devices or micro-batches that split a batch train another loss"
    )


def losses_of_parts(
    module: LightningModule, batch: object, batch_size: int
) -> LossesOfParts | None:
    """Compute the losses of a batch and of its halves, without dropout and batch statistics.

    It is for a module that is thrown away: its training step runs four times more.

    Args:
        module: in training, on whose device the batch lies.
        batch: tensors, in containers; their first dimension counts the examples.
        batch_size: the number of examples.

    Returns:
        None where the batch is no such tensors, the module does not take a part of it, or its loss
        of the same batch differs from step to step.
    """
    middle = batch_size // 2
    first = _part(batch, batch_size, slice(0, middle))
    # With an odd number of examples the last one is left out, so that the halves count alike.
    second = _part(batch, batch_size, slice(middle, 2 * middle))
    whole = _part(batch, batch_size, slice(0, 2 * middle))
    if not module.automatic_optimization or middle == 0 or whole is None:
        return None
    with _as_evaluated(module):
        start = random_state()
        losses = list[float]()
        for part in (whole, first, second, whole):
            # Each draws the same random numbers, such as those of a random mask.
            set_random_state(start)
            # A module may take no other number of examples than the batch's.
            try:
                losses.append(_loss(module, part))
            except Exception:  # noqa: BLE001 (the user's code may raise any)
                return None
    if not all(map(math.isfinite, losses)):
        return None
    whole_loss, first_loss, second_loss, repeated = losses
    if abs(repeated - whole_loss) > REPEAT_TOLERANCE * abs(whole_loss):
        return None
    return LossesOfParts(2 * middle, whole_loss, (first_loss + second_loss) / 2.0)


def _part(batch: object, batch_size: int, examples: slice) -> object:
    """Cut a batch to some of its examples; None where it is not made of tensors of all examples."""
    leaves, structure = tree_flatten(batch)
    parts = list[Tensor]()
    for leaf in leaves:
        if not isinstance(leaf, Tensor) or leaf.ndim == 0 or len(leaf) != batch_size:
            return None
        parts.append(leaf[examples])
    return tree_unflatten(parts, structure) if parts else None


@contextmanager
def _as_evaluated(module: LightningModule) -> Iterator[None]:
    """Within the context layers act as in evaluation, and no gradient is kept."""
    was_training = {layer: layer.training for layer in module.modules()}
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for layer, training in was_training.items():
            layer.training = training


def _loss(module: LightningModule, part: object) -> float:
    """Compute the loss of a training step on a part of a batch."""
    arguments = [part]
    if "batch_idx" in inspect.signature(module.training_step).parameters:
        arguments.append(0)
    output: Any = module.training_step(*arguments)
    if isinstance(output, Mapping):
        output = output["loss"]
    return float(output)
