"""Augmentation of a whole batch of uint8 images on its device, without a Python loop over examples."""

import torch
from torch import Tensor

from bstune.errors import ConfigError


def random_crop_flip(images: Tensor, generator: torch.Generator, padding: int) -> Tensor:
    """Return each image padded by reflection, cropped back at a random place, and mirrored with probability 1/2.

    Page's augmentation for CIFAR-10 (2018, "How to train your ResNet") without its cutout. Every draw comes from
    ``generator``; nothing waits for an accelerator.

    Args:
        images: (n, channels, height, width), of any type.
        generator: a generator on the images' device.
        padding: pixels of padding on each side; 0 only mirrors.

    Returns:
        A new tensor of the images' shape and type.

    Raises:
        ConfigError: if ``padding`` is negative, or not below the height and the width.
    """
    n, device = len(images), images.device
    if not 0 <= padding < min(images.shape[-2:]):
        size = "x".join(str(s) for s in images.shape[-2:])
        raise ConfigError(f"augment.padding must be at least 0 and below the image's {size} pixels, but got {padding}")
    top, left = torch.randint(2 * padding + 1, (2, n), generator=generator, device=device)
    mirror = torch.randint(2, (n,), generator=generator, device=device).bool()
    return crop_flip(images, top, left, mirror, padding)


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
