"""Image data: split, kept on the device as uint8, augmented and normalised there batch by batch."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, Trainer
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader

from bstune.core.errors import InputError
from bstune.workloads.batches import Batch, WholeBatches, as_it_is
from bstune.workloads.datasets import LabelledImages


@dataclass(frozen=True, eq=False)
class Split:
    """A data set's parts as uint8 images and labels; scale and shift normalise pixels.

    Both are of shape (channels, 1, 1).
    """

    train: WholeBatches
    validation: WholeBatches
    scale: Tensor
    shift: Tensor


class ImageData(LightningDataModule):
    """Batches (images, labels) of a data set; images are float32 (N, channels, height, width).

    Pixels are normalised by mean and standard deviation, per channel, of the images left to train
    on. The loaders give uint8 images, which lie on the Trainer's device; it has this data module
    normalise and augment them.

    Args:
        images: the data set.
        batch_size: examples of a training batch.
        validation: how many images are held out for the target; or "test": train on all, and
            measure the target on the test images.
        validation_batch_size: examples of a validation batch.
        test: how many images are held out from both.
        split_seed: of the draw of the images that are held out.
        train_examples: how many of the images left are trained on, so that a smaller set is a part
            of a larger one; None: all.
        augment: of normalised training images, such as :func:`random_crop_flip`; its random numbers
            are torch's of their device.
    """

    def __init__(
        self,
        images: LabelledImages,
        batch_size: int,
        validation: int | Literal["test"],
        validation_batch_size: int,
        test: int = 0,
        split_seed: int = 0,
        train_examples: int | None = None,
        augment: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.validation_batch_size = validation_batch_size
        self.split = split_images(images, validation, test, split_seed, train_examples)
        self.augment = augment
        self.trainer: Trainer

    def setup(self, stage: str) -> None:
        """Put the images on the Trainer's device."""
        self.split = on_device(self.split, self.trainer.strategy.root_device)

    def train_dataloader(self) -> DataLoader[Batch]:
        """Make the loader of the images trained on, in a new order each epoch."""
        return DataLoader(self.split.train, self.batch_size, shuffle=True, collate_fn=as_it_is)

    def val_dataloader(self) -> DataLoader[Batch]:
        """Make the loader of the images that the target is measured on."""
        return DataLoader(self.split.validation, self.validation_batch_size, collate_fn=as_it_is)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Batch:
        """Normalise a batch, and augment it where it is trained on."""
        images, labels = batch
        images = images.float().mul_(self.split.scale).add_(self.split.shift)
        if self.augment is not None and self.trainer.training:
            images = self.augment(images)
        return images, labels


@lru_cache
def split_images(
    images: LabelledImages,
    validation: int | Literal["test"],
    test: int,
    seed: int,
    train_examples: int | None = None,
) -> Split:
    """Split a data set at random, whatever its labels, once a process.

    Args:
        images: the data set.
        validation: how many images are held out for the target; or "test": the data set's own.
        test: how many more are held out; the others are trained on.
        seed: of the draw.
        train_examples: how many of these are trained on; None: all.

    Raises:
        InputError: nothing is left to train on.
    """
    held_out = 0 if validation == "test" else validation
    # numpy never changes RandomState's streams (NEP 19).
    order = np.random.RandomState(seed).permutation(len(images.labels))
    for_validation, for_training = order[:held_out], order[held_out + test :]
    if not len(for_training):
        raise InputError(
            f"data.validation and data.test must leave images to train on, but got {validation} "
            f"and {test} of {len(order):,}"
        )
    # A smaller set is normalised alike.
    scale, shift = normalisation(images.images[for_training])
    of_train = for_training[:train_examples]
    train = WholeBatches(images.images[of_train], images.labels[of_train])
    measured = WholeBatches(images.images[for_validation], images.labels[for_validation])
    if validation == "test":
        measured = WholeBatches(*images.test)
    return Split(train, measured, scale, shift)


@lru_cache
def on_device(split: Split, device: torch.device) -> Split:
    """Copy a split to a device, once a process."""
    train, validation = (
        WholeBatches(*(tensor.to(device) for tensor in part.tensors))
        for part in (split.train, split.validation)
    )
    return Split(train, validation, split.scale.to(device), split.shift.to(device))


def normalisation(images: Tensor) -> tuple[Tensor, Tensor]:
    """Compute scale and shift, each (channels, 1, 1), that give pixels mean 0 and deviation 1.

    Args:
        images: uint8 (n, channels, height, width).
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
        mean = total / n
        std = math.sqrt(n * squares - total**2) / n
        scales.append(1 / std)
        shifts.append(-mean / std)
    return torch.tensor(scales).view(-1, 1, 1), torch.tensor(shifts).view(-1, 1, 1)


def random_crop_flip(
    images: Tensor, padding: int, cutout: int = 0, mirror: Tensor | None = None
) -> Tensor:
    """Pad each image by reflection, crop it at random, mirror every other one, cut a square out.

    As Page (2018 and 2019, "How to train your ResNet"); with a padding of 2 the crop is the
    translation of cifar10-airbench. Random numbers are torch's of the images' device.

    Args:
        images: normalised, (n, channels, height, width).
        padding: pixels on each side, fewer than the image has.
        cutout: side of a square, wholly inside, that becomes 0, the mean; 8 and 5 in the source.
        mirror: (n, 1), which images to mirror; None: each with a probability of a half.

    Returns:
        As many images, of the same size, in the memory format channels_last.
    """
    n, _, height, width = images.shape
    device = images.device

    def draw(high: int) -> Tensor:
        return torch.randint(high, (n, 1), device=device)

    rows = draw(2 * padding + 1) + torch.arange(height, device=device)
    columns = draw(2 * padding + 1) + torch.arange(width, device=device)
    mirror = draw(2).bool() if mirror is None else mirror
    columns = torch.where(mirror, columns.flip(1), columns)
    padded = functional.pad(images, [padding] * 4, mode="reflect").permute(0, 2, 3, 1)
    index = torch.arange(n, device=device)[:, None, None]
    # Pixels are taken with all their channels: one index in place of one a channel.
    cropped = padded[index, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
    if cutout == 0:
        return cropped
    from_top = torch.arange(height, device=device) - draw(height + 1 - cutout)
    from_left = torch.arange(width, device=device) - draw(width + 1 - cutout)
    is_row = (from_top >= 0) & (from_top < cutout)
    is_column = (from_left >= 0) & (from_left < cutout)
    return cropped.masked_fill(is_row[:, None, :, None] & is_column[:, None, None, :], 0.0)
