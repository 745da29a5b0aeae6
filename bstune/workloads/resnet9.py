"""The nine-layer residual network of David Page's DAWNBench entry for CIFAR-10, and its tricks.

(How to Train Your ResNet, part 4 of 2018 and part 8 of 2019, whose versions are named here by the
seconds that they train.)
"""

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD

from bstune.workloads.datasets import LabelledImages
from bstune.workloads.images import normalisation

# The place of the pooling among convolution, norm and activation. The first two are one function
# for an activation that never falls.
POOL_AT = {"after_activation": 3, "before_activation": 2, "before_norm": 1}
# Images whose patches are in memory at a time.
CHUNK = 500


class BatchNorm(nn.BatchNorm2d):
    """Batch normalisation of images (N, C, H, W) in groups of ``ghost_size`` examples.

    Groups are "ghost batch norm" (Hoffer et al. 2017, arXiv 1705.08741), here from the version of
    46 s on: example i of a batch is in group i mod (N/ghost_size). Running statistics move towards
    the mean of the groups' means and unbiased variances.

    Args:
        channels: C.
        ghost_size: of which a training batch has a multiple; one that has fewer examples is one
            group. None: the batch is.
        scale: of all channels, frozen (43 s); None: learnt, from 1.
        options: of torch's layer.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(
        self, channels: int, ghost_size: int | None, scale: float | None, **options: Any
    ) -> None:
        super().__init__(channels, **options)
        self.ghost_size = ghost_size
        if scale is not None:
            nn.init.constant_(self.weight, scale).requires_grad_(False)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name)
        """Normalise images; ValueError for a batch of another size."""
        size = self.ghost_size
        if size is None or not self.training or len(input) <= size:
            return super().forward(input)
        groups, rest = divmod(len(input), size)
        if rest:
            raise ValueError(
                f"batch sizes must be multiples of the ghost size {size}, but got {len(input)}: "
                f"set batch_size.multiple={size}"
            )
        # The channels of each group are channels of their own, so that one call serves all.
        channels = self.num_features
        grouped = input.reshape(-1, groups * channels, *input.shape[2:])
        statistics = torch.zeros(2, groups * channels, device=input.device)
        weight, bias = self.weight.repeat(groups), self.bias.repeat(groups)
        # By a momentum of 1 the statistics become this batch's.
        output = functional.batch_norm(
            grouped, statistics[0], statistics[1], weight, bias, True, 1.0, self.eps
        )
        running = [self.running_mean, self.running_var]
        averaged = statistics.view(2, groups, channels).mean(dim=1)
        torch._foreach_lerp_(running, list(averaged), self.momentum)  # type: ignore[arg-type]
        return output.view(input.shape).contiguous(memory_format=torch.channels_last)


def whitening_filters(images: Tensor, kernel_size: int, eps: float) -> Tensor:
    """Compute filters (C k k, C, k, k) whose outputs on images (n, C, H, W) are not correlated.

    They are the eigenvectors of the second moments of patches of k x k pixels, about 0 as images
    are normalised, each divided by sqrt(its eigenvalue + eps), from the largest eigenvalue on.
    """
    size = images.shape[1] * kernel_size**2
    moments = torch.zeros(size, size, dtype=torch.float64, device=images.device)
    for chunk in torch.split(images.float(), CHUNK):
        patches = functional.unfold(chunk, kernel_size)
        moments += (patches @ patches.mT).double().sum(dim=0)
    moments /= len(images) * patches.shape[2]
    # A CPU is faster at so small a matrix.
    values, vectors = torch.linalg.eigh(moments.cpu())
    filters = vectors / (values.clamp(min=0.0) + eps).sqrt()
    of_largest_first: Tensor = filters.T.flip(0)
    return of_largest_first.view(size, -1, kernel_size, kernel_size).to(images)


@lru_cache
def whitening(data: LabelledImages, images: int, kernel_size: int, eps: float) -> Tensor:
    """Compute :func:`whitening_filters` of the first training images, once a process."""
    scale, shift = normalisation(data.images)
    return whitening_filters(data.images[:images] * scale + shift, kernel_size, eps)


class ResNet9(nn.Module):
    """Images (N, 3, 32, 32) to logits (N, 10).

    A convolution, three convolutions with pooling of which the first and the third carry a residual
    branch of two convolutions, max-pooling of all pixels and a linear layer without bias.

    Args:
        width: channels of the first layer; the others are 2, 4 and 8 times as wide.
        logit_scale: of the output.
        pool: where three convolutions are pooled, a key of ``POOL_AT``.
        activation: called without arguments.
        norm: called with a number of channels, such as a partial :class:`BatchNorm`.
        whitening: filters (F, 3, k, k) of a frozen convolution before a first one of one pixel
            (36 s); None: the first one has 3 x 3 pixels.
        mirrored: evaluate the mean of the logits of an image and of its mirror image (26 s).
    """

    def __init__(
        self,
        width: int,
        logit_scale: float,
        *,
        pool: str,
        activation: Callable[[], nn.Module],
        norm: Callable[[int], nn.Module],
        whitening: Tensor | None,
        mirrored: bool,
    ) -> None:
        super().__init__()

        def block(inputs: int, outputs: int, *, pooled: bool = False, size: int = 3) -> list[Any]:
            """A convolution, its norm and activation, with the pooling where it belongs."""
            convolution = nn.Conv2d(inputs, outputs, size, padding=size // 2, bias=False)
            layers = [convolution, norm(outputs), activation()]
            if pooled:
                layers.insert(POOL_AT[pool], nn.MaxPool2d(2))
            return layers

        def residual(channels: int) -> nn.Module:
            return _Residual(*block(channels, channels), *block(channels, channels))

        first = block(3, width)
        if whitening is not None:
            frozen = nn.Conv2d(3, len(whitening), whitening.shape[-1], padding="same", bias=False)
            frozen.weight = nn.Parameter(whitening.clone(), requires_grad=False)
            first = [frozen, *block(len(whitening), width, size=1)]
        self.features = nn.Sequential(
            *first,
            *block(width, 2 * width, pooled=True),
            residual(2 * width),
            *block(2 * width, 4 * width, pooled=True),
            *block(4 * width, 8 * width, pooled=True),
            residual(8 * width),
            nn.MaxPool2d(4),
            nn.Flatten(),
            nn.Linear(8 * width, 10, bias=False),
        )
        # 0.70 s for 0.87 a step of 64 images on a CPU, where the images are in this format, too.
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.logit_scale = logit_scale
        self.mirrored = mirrored

    def forward(self, images: Tensor) -> Tensor:
        """Compute logits (N, 10)."""
        images = images.contiguous(memory_format=torch.channels_last)
        logits: Tensor = self.features(images) * self.logit_scale
        if self.mirrored and not self.training:
            logits = 0.5 * logits + 0.5 * self.features(images.flip(-1)) * self.logit_scale
        return logits


class _Residual(nn.Module):
    """x plus what the layers make of x."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.branch = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.branch(x)
        return out


def sgd(
    parameters: Iterable[nn.Parameter],
    lr: float,
    bias_rate: float,
    weight_decay: float,
    **options: Any,
) -> SGD:
    """Make SGD in which vectors, here the norms' biases, learn ``bias_rate`` times as fast (43 s).

    Their weight decay is as much smaller, so that all weights shrink alike.
    """
    groups: list[dict[str, Any]] = [
        {"params": [], "lr": lr, "weight_decay": weight_decay},
        {"params": [], "lr": lr * bias_rate, "weight_decay": weight_decay / bias_rate},
    ]
    for parameter in parameters:
        groups[parameter.ndim == 1]["params"].append(parameter)
    return SGD(groups, **options)
