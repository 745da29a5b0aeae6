"""Looks whether the loss of a batch depends on how many examples it has.

All that bstune tells of batch sizes takes the loss to be a mean over examples: then a larger batch
estimates the same loss with less noise. A loss that compares the examples of a batch with each
other, as in contrastive learning, is another one for each batch size. A batch with each of its
examples twice tells them apart: a mean stays as it is, whatever the weights of its examples are.
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

from bstune.trial.lightning.installed import LightningModule

# The loss of a batch may differ from itself by this share. If it differs by more, it depends on
# more than the batch, such as random numbers or the number of steps so far.
REPEAT_TOLERANCE = 0.005
# How often the loss of the batch is computed, so that such a difference shows.
REPEATS = 3
# By more than this share a loss that depends on the number of examples has to change.
LEAST_CHANGE = 0.05
# A sum over the batch changes by a factor of 2, and so does a sum over a given batch size, which is
# a mean of a batch of that size: nothing is told of either.
SUM_TOLERANCE = 0.02


@dataclass(frozen=True)
class DoubledLoss:
    """The loss of a batch, and with each of its examples twice, at the same weights."""

    batch_size: int
    once: float
    twice: float

    @property
    def depends_on_size(self) -> bool:
        """Whether the loss depends on the number of examples, and is no sum over them."""
        largest = max(abs(self.once), abs(self.twice))
        is_mean = abs(self.twice - self.once) <= LEAST_CHANGE * largest
        is_sum = abs(self.twice - 2.0 * self.once) <= SUM_TOLERANCE * largest
        return not is_mean and not is_sum


def doubled_notes(name: str, losses: DoubledLoss | None) -> Iterator[str]:
    """Yield a line on a loss that depends on the number of examples of a batch.

    ``name``: of the module's class. ``losses``: None where they could not be compared.
    """
    if losses is not None and losses.depends_on_size:
        yield (
            f"{name}'s loss depends on the batch's size, as in contrastive learning: of "
            f"{losses.batch_size} examples it is {losses.once:.3g}, with each of them twice "
            f"{losses.twice:.3g}. Devices or micro-batches that split a batch train another loss"
        )


def doubled_loss(module: LightningModule, batch: object, batch_size: int) -> DoubledLoss | None:
    """Compute the loss of a batch once and twice over, without dropout and batch statistics.

    It is for a module that is thrown away: its training step runs ``1 + REPEATS`` times more.

    Args:
        module: in training, on whose device the batch lies.
        batch: tensors, in containers; their first dimension counts the examples.
        batch_size: the number of examples.

    Returns:
        None where the batch is not made of such tensors, the module steps its optimizers itself or
        takes no other number of examples, a loss is not finite, or the loss of the same batch
        differs from time to time.
    """
    twice = _twice(batch, batch_size)
    if not module.automatic_optimization or twice is None:
        return None
    batches = [twice] + [batch] * REPEATS
    losses = list[float]()
    with _as_evaluated(module):
        for examples in batches:
            # A module may take no other number of examples than the batch's.
            try:
                losses.append(_loss(module, examples))
            except Exception:  # noqa: BLE001 (the user's code may raise any)
                return None
    if not all(map(math.isfinite, losses)):
        return None
    of_twice, *repeats = losses
    if max(repeats) - min(repeats) > REPEAT_TOLERANCE * abs(repeats[0]):
        return None
    return DoubledLoss(batch_size, once=repeats[0], twice=of_twice)


def _twice(batch: object, batch_size: int) -> object:
    """Give a batch with each example twice; None if it is not made of tensors of all examples."""
    leaves, structure = tree_flatten(batch)
    doubled = list[Tensor]()
    for leaf in leaves:
        if not isinstance(leaf, Tensor) or leaf.ndim == 0 or len(leaf) != batch_size:
            return None
        doubled.append(torch.cat([leaf, leaf]))
    return tree_unflatten(doubled, structure) if doubled else None


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


def _loss(module: LightningModule, batch: object) -> float:
    """Compute the loss of a training step on a batch."""
    takes_index = len(inspect.signature(module.training_step).parameters) > 1
    output: Any = module.training_step(batch, 0) if takes_index else module.training_step(batch)
    if isinstance(output, Mapping):
        output = output["loss"]
    return float(output)
