"""Augmentation of a whole batch of uint8 images on its device, without a Python loop over examples."""

import torch
from torch import Tensor

from bstune.errors import ConfigError


def random_crop_flip(
    images: Tensor,
    generator: torch.Generator,
    padding: int,
    cutout: int = 0,
    mirror: Tensor | None = None,
    mean: Tensor | None = None,
) -> Tensor:
    """Return each image padded by reflection, cropped back at a random place, mirrored, and a square of it cut out.

    Page's augmentation for CIFAR-10 (2018 and 2019, "How to train your ResNet"); with a padding of 2 the crop is the
    translation of cifar10-airbench. Every draw comes from ``generator``; nothing waits for an accelerator.

    Args:
        images: (n, channels, height, width), of any type.
        generator: a generator on the images' device.
        padding: pixels of padding on each side; 0 only mirrors.
        cutout: the side of a square, at a random place wholly inside the image, that is set to the mean; 0 for none.
            8, later 5, in the source.
        mirror: bool, (n,): which images to mirror; None mirrors each with probability 1/2.
        mean: of the pixels per channel, (1, channels, 1, 1), rounded where the images are whole numbers; needed by
            ``cutout`` alone. :class:`~bstune.data.batches.TrainBatches` gives it.

    Returns:
        A new tensor of the images' shape and type.

    Raises:
        ConfigError: if ``padding`` is negative, or not below the height and the width; or if ``cutout`` is negative,
            over the height or the width, or without a mean.
    """
    n, device = len(images), images.device
    height, width = images.shape[-2:]
    if not 0 <= padding < min(height, width):
        raise ConfigError(
            f"augment.padding must be at least 0 and below the image's {height}x{width} pixels, but got {padding}"
        )
    if not 0 <= cutout <= min(height, width):
        raise ConfigError(
            f"augment.cutout must be at least 0 and at most the image's {height}x{width} pixels, but got {cutout}"
        )
    top, left = torch.randint(2 * padding + 1, (2, n), generator=generator, device=device)
    if mirror is None:
        mirror = torch.randint(2, (n,), generator=generator, device=device).bool()
    images = crop_flip(images, top, left, mirror, padding)
    if not cutout:
        return images
    if mean is None:
        raise ConfigError(f"augment.cutout={cutout} needs the mean of the pixels: take batches from TrainBatches")
    top = torch.randint(height + 1 - cutout, (n,), generator=generator, device=device)
    left = torch.randint(width + 1 - cutout, (n,), generator=generator, device=device)
    return cut_out(images, top, left, cutout, mean)


def cut_out(images: Tensor, top: Tensor, left: Tensor, size: int, mean: Tensor) -> Tensor:
    """Return each image with a square of ``size`` pixels set to the mean.

    Args:
        images: (n, channels, height, width).
        top: int64, (n,), the square's first row.
        left: likewise its first column.
        size: of a side.
        mean: (1, channels, 1, 1), rounded where the images are whole numbers.
    """
    height, width = images.shape[-2:]
    rows = torch.arange(height, device=images.device) - top[:, None]
    columns = torch.arange(width, device=images.device) - left[:, None]
    inside = ((rows >= 0) & (rows < size))[:, None, :, None] & ((columns >= 0) & (columns < size))[:, None, None, :]
    fill = (mean if images.is_floating_point() else mean.round()).to(images.dtype)
    return torch.where(inside, fill, images)


def mirror_where(images: Tensor, mirror: Tensor) -> Tensor:
    """Return the images, mirrored left to right where ``mirror``, bool (n,), says so."""
    return torch.where(mirror.view(-1, 1, 1, 1), images.flip(-1), images)


def crop_flip(images: Tensor, top: Tensor, left: Tensor, mirror: Tensor, padding: int) -> Tensor:
    """Return each image padded by reflection (the edge itself not repeated), cropped, then mirrored where asked.

    Args:
        images: (n, channels, height, width).
        top: int64, (n,), from 0 to 2 ``padding``: the crop's first row in the padded image.
        left: likewise its first column.
        mirror: bool, (n,).
        padding: pixels of padding on each side, below the height and the width.
    """
    n, channels, height, width = images.shape
    device = images.device
    rows = _reflect(torch.arange(height, device=device) + (top - padding)[:, None], height)
    columns = torch.arange(width, device=device).expand(n, width)
    columns = torch.where(mirror[:, None], width - 1 - columns, columns)
    columns = _reflect(columns + (left - padding)[:, None], width)
    # Whole rows first, then the columns in one gather: on a CPU several times faster than indexing with four index
    # tensors, and with indices of (n, height) and (n, width) instead of one per pixel.
    planes = torch.arange(n * channels, device=device).view(n, channels, 1)
    source_rows = (planes * height + rows[:, None, :]).flatten()
    cropped = images.reshape(-1, width).index_select(0, source_rows).view(n, channels * height, width)
    return cropped.gather(2, columns[:, None, :].expand_as(cropped)).view_as(images)


def _reflect(index: Tensor, size: int) -> Tensor:
    return (size - 1) - ((size - 1) - index.abs()).abs()
