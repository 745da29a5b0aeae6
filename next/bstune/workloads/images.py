"""Image data: split, kept in memory as uint8, and normalised batch by batch."""

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader

from bstune.workloads.batches import Batch, WholeBatches
from bstune.workloads.datasets import LabelledImages


class Split(NamedTuple):
    """A data set's parts, and the function that makes batches of them float32."""

    train: WholeBatches
    validation: WholeBatches
    test: WholeBatches
    normalise: Callable[[Any], Batch]


class ImageData(LightningDataModule):
    """Batches (images, labels) of a data set; images are float32 (N, channels, height, width).

    Pixels are normalised by mean and standard deviation, per channel, of the images trained on.

    Args:
        images: the data set.
        batch_size: examples of a training batch.
        validation: how many images are held out for the target.
        validation_batch_size: examples of a validation batch.
        test: how many images are held out from both.
        split_seed: of the draw of the images that are held out.
    """

    def __init__(
        self,
        images: LabelledImages,
        batch_size: int,
        validation: int,
        validation_batch_size: int,
        test: int = 0,
        split_seed: int = 0,
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.validation_batch_size = validation_batch_size
        self.split = split_images(images, validation, test, split_seed)

    def train_dataloader(self) -> DataLoader[Batch]:
        """Make the loader of the images trained on, in a new order each epoch."""
        return DataLoader(
            self.split.train, self.batch_size, shuffle=True, collate_fn=self.split.normalise
        )

    def val_dataloader(self) -> DataLoader[Batch]:
        """Make the loader of the images that the target is measured on."""
        return DataLoader(
            self.split.validation, self.validation_batch_size, collate_fn=self.split.normalise
        )


@lru_cache
def split_images(images: LabelledImages, validation: int, test: int, seed: int) -> Split:
    """Split a data set at random, whatever its labels, once a process.

    Args:
        images: the data set.
        validation: how many images are held out for the target.
        test: how many more are held out; the others are trained on.
        seed: of the draw.
    """
    # numpy never changes RandomState's streams (NEP 19).
    order = np.random.RandomState(seed).permutation(len(images.labels))
    places = np.split(order, [validation, validation + test])
    held_out, unused, train = (
        WholeBatches(images.images[place], images.labels[place]) for place in places
    )
    scale, shift = normalisation(train.tensors[0], images.white)
    return Split(train, held_out, unused, partial(_normalise, scale=scale, shift=shift))


def normalisation(images: Tensor, white: int) -> tuple[Tensor, Tensor]:
    """Compute scale and shift, each (channels, 1, 1), that give pixels mean 0 and deviation 1.

    Args:
        images: uint8 (n, channels, height, width).
        white: the largest value that a pixel can have.
    """
    scales = []
    shifts = []
    values = torch.arange(256)
    for pixels in images.unbind(1):
        # Whole numbers add up to the same mean on every machine.
        counts = torch.bincount(pixels.flatten(), minlength=256)
        n = int(counts.sum())
        total = int(counts @ values)
        squares = int(counts @ values**2)
        mean = total / n / white
        std = math.sqrt(n * squares - total**2) / n / white
        scales.append(1 / (white * std))
        shifts.append(-mean / std)
    return torch.tensor(scales).view(-1, 1, 1), torch.tensor(shifts).view(-1, 1, 1)


def _normalise(batch: Any, scale: Tensor, shift: Tensor) -> Batch:
    images, labels = batch
    return images.float().mul_(scale).add_(shift), labels
