"""Batch normalisation over groups of a batch that do not grow with it, with scales that may be frozen.

Groups ("ghost batch norm", Hoffer et al. 2017, arXiv 1705.08741) and frozen scales are rungs of David Page's DAWNBench
entry (How to Train Your ResNet, part 8: 46 s and 43 s); that the layer stays float32 in a network of half precision is
from cifar10-airbench.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bstune.data.batches import check_size
from bstune.errors import ConfigError

HALVES = (torch.float16, torch.bfloat16)
OF_A_GROUP = (0, 3, 4)  # of (examples of a group, groups, channels, height, width)


class BatchNorm(nn.BatchNorm2d):
    """Batch normalisation of images (N, C, H, W) in groups of ``ghost_size`` examples.

    In training, G = N // ghost_size groups have exactly ``ghost_size`` examples: example i of the first G ghost_size is
    in group i mod G, as in the source, since these groups are a view of the batch. The other N mod ghost_size examples
    are one last, smaller group; where that would have a single value per channel (one example of one pixel), it is
    joined by as many of the last examples as make one group more of it and the last of the others. A batch of at most
    ``ghost_size`` examples is one group. Running statistics move towards the groups' means and unbiased variances,
    weighted by the groups' sizes. Evaluation uses running statistics.

    Without ``ghost_size`` and ``scale`` it is torch's layer to the bit. Parameters and buffers stay float32 when the
    network is cast to half or bfloat16; images of these types are normalised in float32 and keep their type.

    Args:
        channels: C.
        ghost_size: examples in a group; None for the whole batch.
        scale: of all channels, frozen, in a buffer in place of a parameter; None: learnt, from 1.
        momentum: weight of the new statistics in the running ones (1 less what the sources call so).
        eps: added to the variance.

    Raises:
        ConfigError: for a ghost size that is no positive integer, or a scale that is not positive and finite.
    """

    scale: float | None = None  # the constructor of torch's layer fills the weights before ours can set it

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
            check_size("the ghost size of batch normalisation", ghost_size)
        if scale is not None and not (math.isfinite(scale) and scale > 0):
            raise ConfigError(f"the frozen scale of batch normalisation must be positive, but got {scale}")
        # A network that is built in half precision from the start has the default type set so.
        kind = torch.promote_types(torch.get_default_dtype(), torch.float32)
        super().__init__(channels, eps=eps, momentum=momentum, dtype=kind)
        self.ghost_size, self.scale = ghost_size, scale
        if scale is not None:
            del self.weight
            self.register_buffer("weight", torch.full((channels,), scale, dtype=kind))

    def reset_parameters(self) -> None:
        """Set scales to 1, or to what they are frozen at, and biases to 0; forget the running statistics."""
        super().reset_parameters()
        if self.scale is not None:
            nn.init.constant_(self.weight, self.scale)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's name
        """Return the images normalised, in their own memory format."""
        size = self.ghost_size
        if size is None or not self.training or len(input) <= size:
            return super().forward(input)
        self._check_input_dim(input)
        groups, rest = divmod(len(input), size)
        if rest == 1 and input[0, 0].numel() == 1:
            groups, rest = groups - 1, rest + size
        if groups == 0:
            return super().forward(input)
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        whole = groups * size
        output, mean, var = self._normalise(input[:whole], groups)
        if rest:
            last, last_mean, last_var = self._normalise(input[whole:], 1)
            output = torch.cat([output, last])
            share = rest / len(input)
            mean, var = mean.lerp(last_mean, share), var.lerp(last_var, share)
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)  # type: ignore[union-attr,arg-type]
            self.running_var.lerp_(var, self.momentum)  # type: ignore[union-attr,arg-type]
        return output

    def extra_repr(self) -> str:
        """Return torch's description with our two settings."""
        own = super().extra_repr()  # type: ignore[no-untyped-call]
        return f"{own}, ghost_size={self.ghost_size}, scale={self.scale}"

    def _normalise(self, images: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return images normalised in groups of one size, and the groups' mean and unbiased variance, averaged (C,)."""
        assert self.running_mean is not None  # noqa: S101  # it is always tracked
        kind = self.running_mean.dtype
        channels = images.shape[1]
        if groups > 1 and not images.is_contiguous():
            output, mean, var = _GroupedNorm.apply(  # type: ignore[no-untyped-call]
                images, self.weight, self.bias, groups, self.eps
            )
            return output, mean, var
        # One channel for each group and channel. That is a view for contiguous images alone, and torch's fastest way.
        # A single group is not viewed: one example's strides would change, for which torch's gradients are wrong on a
        # CPU (2.13, channels last).
        viewed = images if groups == 1 else images.view(-1, groups * channels, *images.shape[2:])
        mean = torch.zeros(groups * channels, dtype=kind, device=images.device)
        var = torch.zeros_like(mean)
        output = functional.batch_norm(
            viewed,
            mean,
            var,
            self.weight.repeat(groups),
            self.bias.repeat(groups),
            training=True,
            momentum=1.0,  # so that mean and var become this batch's
            eps=self.eps,
        )
        output = output if groups == 1 else output.view(images.shape)
        return output, mean.view(groups, -1).mean(dim=0), var.view(groups, -1).mean(dim=0)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        def keep(tensor: Tensor) -> Tensor:
            cast = fn(tensor)
            halved = cast.dtype in HALVES and tensor.dtype not in HALVES
            return tensor.to(cast.device) if halved else cast

        return super()._apply(keep, recurse)  # type: ignore[no-untyped-call]


def largest_ghost_size(model: nn.Module) -> int:
    """Return the most examples that a normalisation of the model wants in a group; 0 if none has a ghost size."""
    return max((part.ghost_size or 0 for part in model.modules() if isinstance(part, BatchNorm)), default=0)


class _GroupedNorm(torch.autograd.Function):
    """Normalises groups without moving images, whatever their memory format; they are all of its size that it keeps.

    With xhat = (x - mean) r and m values in a group and channel, the gradient of the images is
    w r (dy - sum(dy)/m - xhat sum(dy xhat)/m) (Ioffe and Szegedy 2015, arXiv 1502.03167, section 3).
    """

    @staticmethod
    def forward(
        ctx: Any, images: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        x = images.to(weight.dtype)
        grouped = x.reshape(-1, groups, *images.shape[1:])
        var, mean = torch.var_mean(grouped, dim=OF_A_GROUP, correction=0, keepdim=True)
        inverse = (var + eps).rsqrt()
        factor = weight.view(-1, 1, 1) * inverse
        shift = bias.view(-1, 1, 1) - mean * factor
        output = torch.addcmul(_each(shift, grouped), x, _each(factor, grouped)).to(images.dtype)
        values = x.numel() // mean.numel()
        ctx.save_for_backward(images, weight, mean, inverse)
        ctx.groups = groups
        averaged = mean.mean(dim=1).flatten(), var.mean(dim=1).flatten() * (values / (values - 1))
        ctx.mark_non_differentiable(*averaged)
        return output, *averaged

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        images, weight, mean, inverse = ctx.saved_tensors
        x, dy = images.to(weight.dtype), gradients[0].to(weight.dtype)
        shape = (-1, ctx.groups, *images.shape[1:])
        grouped = dy.reshape(shape)
        values = x.numel() // mean.numel()
        of_bias = grouped.sum(OF_A_GROUP, keepdim=True)
        products = (dy * x).reshape(shape).sum(OF_A_GROUP, keepdim=True)
        of_scale = inverse * (products - mean * of_bias)  # sum(dy xhat)
        factor = weight.view(-1, 1, 1) * inverse
        slope = -factor * inverse * of_scale / values
        shift = -factor * of_bias / values - slope * mean
        of_images = torch.addcmul(_each(shift, grouped), dy, _each(factor, grouped))
        of_images = of_images.addcmul_(x, _each(slope, grouped)).to(images.dtype)
        summed = [gradient.sum(dim=1).flatten() for gradient in (of_scale, of_bias)]
        return of_images, summed[0], summed[1], None, None


def _each(values: Tensor, grouped: Tensor) -> Tensor:
    """Return values (1, groups, C, 1, 1) for each example of (examples of a group, groups, C, H, W): (N, C, 1, 1)."""
    return values.expand(len(grouped), -1, -1, -1, -1).flatten(0, 1)
