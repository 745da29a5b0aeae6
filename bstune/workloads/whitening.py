"""A frozen first convolution that takes out the correlations within patches of the images.

A rung of David Page's DAWNBench entry (How to Train Your ResNet, part 8: 36 s); filters with both signs and a learnt
bias are cifar10-airbench's, after hlb-CIFAR10.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bstune.data.batches import check_size
from bstune.errors import ConfigError

CHUNK = 50  # images at a time: patches overlap, so they take many times the images' memory; few stay in a CPU's cache


def patch_moments(images: Tensor, kernel_size: int) -> tuple[Tensor, Tensor]:
    """Return eigenvalues and eigenvectors of the second moments of the images' patches, the largest first.

    The moments are about 0 rather than about the mean, as in both sources: images are normalised before. All patches
    that lie within the images count.

    Args:
        images: (N, C, H, W), of any kind of number.
        kernel_size: k, height and width of a patch.

    Returns:
        (C k k,) and (C k k, C, k, k), float64 on the CPU; the second's first axis numbers the vectors.
    """
    channels = images.shape[1]
    size = channels * kernel_size**2
    total = torch.zeros(size, size, dtype=torch.float64, device=images.device)
    patches = 0
    for chunk in torch.split(images, CHUNK):
        windows = chunk.to(torch.float64).unfold(2, kernel_size, 1).unfold(3, kernel_size, 1)
        columns = windows.permute(1, 4, 5, 0, 2, 3).reshape(size, -1)
        total += columns @ columns.T
        patches += columns.shape[1]
    values, vectors = torch.linalg.eigh((total / patches).cpu())  # a few numbers: the CPU has them at once
    return values.flip(0), vectors.T.flip(0).reshape(size, channels, kernel_size, kernel_size)


class Whitening(nn.Module):
    """A convolution of stride 1 whose filters are the eigenvectors of patches, each over sqrt(its eigenvalue + eps).

    The filters are a buffer: they are not learnt, and go with the state dict. Until :meth:`initialise_from` or a state
    dict sets them, the layer refuses to run.

    Args:
        kernel_size: k, height and width of the patches.
        eps: added to the eigenvalues, so that directions in which next to nothing happens stay small.
        images: how many images the statistics are taken from.
        signed: each filter is followed, after all the others, by its negation: twice as many channels, of which an
            activation that cuts off one side keeps all there is.
        bias: a learnt bias, from 0.
        padding: of the convolution, with zeros.
        channels: C of the images.

    Raises:
        ConfigError: for a number that cannot be.
    """

    weight: Tensor

    def __init__(
        self, *, kernel_size: int, eps: float, images: int, signed: bool, bias: bool, padding: int, channels: int = 3
    ) -> None:
        for name, value in (("kernel_size", kernel_size), ("images", images), ("channels", channels)):
            check_size(f"whitening.{name}", value)
        if not (math.isfinite(eps) and eps > 0):
            raise ConfigError(f"whitening.eps must be positive, but got {eps}")
        if padding < 0:
            raise ConfigError(f"whitening.padding must be at least 0, but got {padding}")
        super().__init__()
        self.kernel_size, self.eps, self.images, self.signed, self.padding = kernel_size, eps, images, signed, padding
        self.channels = channels
        self.out_channels = channels * kernel_size**2 * (2 if signed else 1)
        self.register_buffer("weight", torch.zeros(self.out_channels, channels, kernel_size, kernel_size))
        self.bias = nn.Parameter(torch.zeros(self.out_channels)) if bias else None
        self._set = False

    @torch.no_grad()
    def initialise_from(self, images: Tensor) -> None:
        """Set the filters from the first of some images, normalised as the network sees them: (N, C, H, W).

        Raises:
            ConfigError: for fewer images than are asked for, images of other channels, or smaller than a patch.
        """
        shape = tuple(images.shape)
        if len(shape) != 4 or shape[1] != self.channels or min(shape[2:]) < self.kernel_size:
            raise ConfigError(
                f"whitening needs images of {self.channels} channel(s) and at least {self.kernel_size} pixels a side, "
                f"but got the shape {shape}"
            )
        if len(images) < self.images:
            raise ConfigError(
                f"whitening takes its statistics from {self.images} images, but there are {len(images)}: "
                "lower whitening.images"
            )
        values, vectors = patch_moments(images[: self.images], self.kernel_size)
        # An eigenvalue that is 0 may come out below it by a rounding error.
        filters = vectors / (values.clamp(min=0.0) + self.eps).sqrt().view(-1, 1, 1, 1)
        self.weight.copy_(torch.cat([filters, -filters]) if self.signed else filters)
        self._set = True

    def forward(self, images: Tensor) -> Tensor:
        """Return (N, ``out_channels``, H', W') with H' = H + 2 padding - k + 1.

        Raises:
            ConfigError: as long as there are no filters.
        """
        if not self._set:
            raise ConfigError("the whitening has no filters yet: call initialise_from with training images first")
        return functional.conv2d(images, self.weight, self.bias, padding=self.padding)

    def extra_repr(self) -> str:
        """Return the settings."""
        return (
            f"{self.channels}, {self.out_channels}, kernel_size={self.kernel_size}, eps={self.eps}, "
            f"images={self.images}, signed={self.signed}, bias={self.bias is not None}, padding={self.padding}"
        )

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *arguments: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        self._set = self._set or f"{prefix}weight" in state_dict
