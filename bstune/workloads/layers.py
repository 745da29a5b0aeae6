"""Layers and tricks of David Page's DAWNBench entry and of cifar10-airbench.

(How to Train Your ResNet, part 8.) Ghost batch normalisation, patch whitening, convolutions that
start as the identity, and views at test time. A value out of its range is a ConfigError, and so are
images that a layer cannot take.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bstune.core.errors import ConfigError, check_positive_integer

HALVES = (torch.float16, torch.bfloat16)
Model = Callable[[Tensor], Tensor]
# Images whose patches are made at a time. Patches overlap, so they take many times the images'
# memory; those of few images stay in a CPU's cache.
CHUNK_OF_IMAGES = 50


class BatchNorm(nn.BatchNorm2d):
    """Batch normalisation of images (N, C, H, W) in groups of ``ghost_size`` examples.

    Groups are "ghost batch norm" (Hoffer et al. 2017, arXiv 1705.08741). Page's network has them
    from its version of 46 s on, and frozen scales from that of 43 s. In training, G = N //
    ghost_size groups have exactly ``ghost_size`` examples: example i of the first G ghost_size is
    in group i mod G, as in Page's. The other N mod ghost_size examples are one last, smaller group;
    where that would have a single value per channel, it is merged with the last of the others. A
    batch of at most ``ghost_size`` examples is one group. Running statistics, which evaluation
    uses, move towards the groups' means and unbiased variances, weighted by the groups' sizes.

    Without ``ghost_size`` and ``scale`` it is torch's layer to the bit. Parameters and buffers stay
    float32 when the network is cast to half or bfloat16, as in cifar10-airbench; such images are
    normalised in float32.

    Args:
        channels: C.
        ghost_size: examples in a group; None for the whole batch.
        scale: of all channels, frozen, in a buffer in place of a parameter; None: learnt, from 1.
        momentum: weight of the new statistics in the running ones: 1 - m, where Page and
            cifar10-airbench call m the momentum.
        eps: added to the variance.
    """

    def __init__(
        self,
        channels: int,
        *,
        ghost_size: int | None = None,
        scale: float | None = None,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> None:
        if ghost_size is not None:
            check_positive_integer("the ghost size of batch normalisation", ghost_size)
        if scale is not None and not (math.isfinite(scale) and scale > 0):
            raise ConfigError(
                f"the frozen scale of batch normalisation must be positive, but got {scale}"
            )
        # Half precision may be the default type while a network is built.
        parameter_type = torch.promote_types(torch.get_default_dtype(), torch.float32)
        super().__init__(channels, eps=eps, momentum=momentum, dtype=parameter_type)
        self.ghost_size = ghost_size
        self.scale = scale
        # A frozen scale is no parameter: no optimizer trains it.
        if scale is not None:
            del self.weight
            self.register_buffer("weight", torch.full((channels,), scale, dtype=parameter_type))

    def check_batch(self, batch_size: int, micro_batch_size: int | None) -> None:
        """Refuse batches and micro-batches that are smaller than a group."""
        if self.ghost_size is None:
            return
        if self.ghost_size > batch_size:
            raise ConfigError(
                f"ghost size {self.ghost_size} is over the batch size {batch_size}: lower "
                "workload.module.model.norm.ghost_size, or raise the batch size "
                "(search.batch_size.low of a study, trial.batch_size of a single trial)"
            )
        if micro_batch_size is not None and micro_batch_size < self.ghost_size:
            raise ConfigError(
                f"ghost size {self.ghost_size} is over the micro-batch size {micro_batch_size}: "
                "lower workload.module.model.norm.ghost_size, or raise protocol.micro_batch_size"
            )

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's name
        """Normalise images, in their own memory format."""
        size = self.ghost_size
        if size is None or not self.training or len(input) <= size:
            return super().forward(input)
        self._check_input_dim(input)
        groups, rest = divmod(len(input), size)
        # A single value has no variance.
        if rest == 1 and input[0, 0].numel() == 1:
            groups -= 1
            rest += size
        if groups == 0:
            return super().forward(input)
        self.num_batches_tracked.add_(1)  # type: ignore[union-attr]
        # The whole input is not sliced, as the gradient of a slice takes two passes.
        if not rest:
            output, statistics = self._normalise(input, groups)
        else:
            output, statistics = self._normalise(input[: groups * size], groups)
            last, statistics_of_last = self._normalise(input[groups * size :], groups=1)
            output = torch.cat([output, last])
            # The mean over all groups, each weighed by its examples.
            statistics = statistics.lerp(statistics_of_last, rest / len(input))
        with torch.no_grad():
            running = [self.running_mean, self.running_var]
            torch._foreach_lerp_(running, list(statistics), self.momentum)  # type: ignore[arg-type]
        return output

    def extra_repr(self) -> str:
        """Describe the layer as torch does, with two more settings.

        A stored hardware survey is used again for a module of the same description, so the settings
        have to be in it.
        """
        of_torch = super().extra_repr()  # type: ignore[no-untyped-call]
        return f"{of_torch}, ghost_size={self.ghost_size}, scale={self.scale}"

    def _normalise(self, images: Tensor, groups: int) -> tuple[Tensor, Tensor]:
        """Normalise images in groups of one size.

        Gives the images, and the groups' means and unbiased variances, averaged: (2, C).

        To torch's function the channels of each group are channels of their own, so that one call
        serves all groups. Contiguous images are viewed in that shape. Others, such as channels
        last, are copied into it and back. This takes a third of the operators, and half of the
        memory traffic, of normalising them where they are.
        """
        channels = images.shape[1]
        statistics = torch.zeros(2, groups * channels, dtype=self.bias.dtype, device=images.device)
        weight = self.weight.repeat(groups)
        bias = self.bias.repeat(groups)
        # A single group is not viewed: that changes one example's strides, for which torch's
        # gradients are wrong on a CPU (2.13, channels last).
        grouped = images
        if groups > 1:
            grouped = images.reshape(-1, groups * channels, *images.shape[2:])
        # By a momentum of 1 the statistics become this batch's.
        options: dict[str, Any] = {"training": True, "momentum": 1.0, "eps": self.eps}
        output = functional.batch_norm(
            grouped, statistics[0], statistics[1], weight, bias, **options
        )
        if groups > 1:
            output = output.view(images.shape)
            # Images in channels last were copied to be grouped: their format is restored. Those of
            # one channel, for instance, are contiguous in both formats, and were not copied.
            is_channels_last = images.is_contiguous(memory_format=torch.channels_last)
            was_copied = not images.is_contiguous()
            if is_channels_last and was_copied:
                output = output.contiguous(memory_format=torch.channels_last)
        return output, statistics.view(2, groups, channels).mean(dim=1)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Convert or move the layer by torch's ``fn``, but cast nothing to half precision.

        A tensor that would be cast is only moved to the device.
        """

        def keep(tensor: Tensor) -> Tensor:
            cast = fn(tensor)
            is_halved = cast.dtype in HALVES and tensor.dtype not in HALVES
            if is_halved:
                return tensor.to(cast.device)
            return cast

        return super()._apply(keep, recurse)  # type: ignore[no-untyped-call]


def patch_moments(images: Tensor, kernel_size: int) -> tuple[Tensor, Tensor]:
    """Compute the eigenvalues and eigenvectors of the second moments of images' patches.

    Eigenvalues are descending, (C k k,); eigenvectors are (C k k, C, k, k), with k ``kernel_size``.
    """
    # The moments are about 0 and not about the mean, as in Page's code and in cifar10-airbench's:
    # images (N, C, H, W) are normalised before.
    channels = images.shape[1]
    size = channels * kernel_size**2
    total = torch.zeros(size, size, dtype=torch.float64, device=images.device)
    patches = 0
    for chunk in torch.split(images, CHUNK_OF_IMAGES):
        windows = chunk.to(torch.float64).unfold(2, kernel_size, 1).unfold(3, kernel_size, 1)
        columns = windows.permute(1, 4, 5, 0, 2, 3).reshape(size, -1)
        total += columns @ columns.T
        patches += columns.shape[1]
    # A CPU is faster at so small a matrix than an accelerator.
    values, vectors = torch.linalg.eigh((total / patches).cpu())
    return values.flip(0), vectors.T.flip(0).reshape(size, channels, kernel_size, kernel_size)


class Whitening(nn.Module):
    """A convolution of stride 1 whose filters are the eigenvectors of images' patches.

    Each is divided by sqrt(its eigenvalue + eps), so that the outputs are not correlated. Page has
    it from his version of 36 s on; the negated filters and the learnt bias are cifar10-airbench's,
    after hlb-CIFAR10. The filters are a buffer, which :meth:`initialise_from` or a state dict sets.

    Args:
        kernel_size: k, height and width of the patches.
        eps: added to the eigenvalues, so that directions of next to no variance stay small.
        images: how many images the statistics are taken from.
        signed: whether the filters are followed by their negations, so that an activation such as
            ReLU drops neither sign.
        bias: a learnt bias, from 0.
        padding: of the convolution, with zeros.
        channels: C of the images.
    """

    weight: Tensor

    def __init__(
        self,
        *,
        kernel_size: int,
        eps: float,
        images: int,
        signed: bool,
        bias: bool,
        padding: int,
        channels: int = 3,
    ) -> None:
        check_positive_integer("whitening.kernel_size", kernel_size)
        check_positive_integer("whitening.images", images)
        check_positive_integer("whitening.channels", channels)
        if not (math.isfinite(eps) and eps > 0):
            raise ConfigError(f"whitening.eps must be positive, but got {eps}")
        if padding < 0:
            raise ConfigError(f"whitening.padding must be at least 0, but got {padding}")
        super().__init__()
        self.kernel_size = kernel_size
        self.eps = eps
        self.images = images
        self.signed = signed
        self.padding = padding
        self.channels = channels
        self.out_channels = channels * kernel_size**2
        if signed:
            self.out_channels *= 2
        shape = (self.out_channels, channels, kernel_size, kernel_size)
        self.register_buffer("weight", torch.zeros(shape))
        self.bias = nn.Parameter(torch.zeros(self.out_channels)) if bias else None
        self._has_filters = False

    @torch.no_grad()
    def initialise_from(self, images: Tensor) -> None:
        """Set the filters from the first ``self.images`` of normalised images (N, C, H, W)."""
        shape = tuple(images.shape)
        if len(shape) != 4 or shape[1] != self.channels or min(shape[2:]) < self.kernel_size:
            raise ConfigError(
                f"whitening needs images of {self.channels} channel(s) and at least "
                f"{self.kernel_size} pixels a side, but got the shape {shape}"
            )
        if len(images) < self.images:
            raise ConfigError(
                f"whitening takes its statistics from {self.images} images, but there are "
                f"{len(images)}: lower whitening.images"
            )
        values, vectors = patch_moments(images[: self.images], self.kernel_size)
        # An eigenvalue that is 0 may come out below it by a rounding error.
        filters = vectors / (values.clamp(min=0.0) + self.eps).sqrt().view(-1, 1, 1, 1)
        if self.signed:
            filters = torch.cat([filters, -filters])
        self.weight.copy_(filters)
        self._has_filters = True

    def forward(self, images: Tensor) -> Tensor:
        """Compute (N, ``out_channels``, H', W') with H' = H + 2 padding - k + 1."""
        if not self._has_filters:
            raise ConfigError(
                "the whitening has no filters yet: call initialise_from with training images first"
            )
        return functional.conv2d(images, self.weight, self.bias, padding=self.padding)

    def extra_repr(self) -> str:
        """List the settings for the layer's description.

        A stored hardware survey is used again for a module of the same description, so the settings
        have to be in it.
        """
        return (
            f"{self.channels}, {self.out_channels}, kernel_size={self.kernel_size}, "
            f"padding={self.padding}, eps={self.eps}, images={self.images}, signed={self.signed}, "
            f"bias={self.bias is not None}"
        )

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *arguments: Any
    ) -> None:
        """Load the layer's state, and note whether it sets the filters."""
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        self._has_filters = self._has_filters or f"{prefix}weight" in state_dict


def dirac_init(network: nn.Module) -> None:
    """Make the first filters of each learnt convolution the identity (cifar10-airbench).

    The others stay as drawn.
    """
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d) and layer.weight.requires_grad:
            with torch.no_grad():
                nn.init.dirac_(layer.weight[: layer.weight.shape[1]])


def mirrored(model: Model, images: Tensor) -> Tensor:
    """Average the logits (N, classes) of images (N, C, H, W) and of their mirror images.

    Page's version of 26 s evaluates like this.
    """
    if images.dim() != 4:
        raise ConfigError(
            "workload.module.test_time mirrors images (N, C, H, W), but got the shape "
            f"{tuple(images.shape)}: set workload.module.test_time=null"
        )
    return 0.5 * model(images) + 0.5 * model(images.flip(-1))


def mirrored_and_shifted(model: Model, images: Tensor) -> Tensor:
    """Average the logits of six views of each image, weighted (cifar10-airbench, its level 2).

    The image itself counts for half; the image moved by one pixel down and to the right, and up and
    to the left, padded by reflection, for a quarter each. Each is averaged with its mirror image,
    as in :func:`mirrored`.
    """
    still = mirrored(model, images)
    padded = functional.pad(images, (1, 1, 1, 1), mode="reflect")
    down_right = mirrored(model, padded[:, :, :-2, :-2])
    up_left = mirrored(model, padded[:, :, 2:, 2:])
    return 0.5 * still + 0.25 * down_right + 0.25 * up_left
