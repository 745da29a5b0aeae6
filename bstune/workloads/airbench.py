"""The eight-layer convolutional network of cifar10-airbench's airbench94.

(Jordan 2024, arXiv 2404.00498.)
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from bstune.core.errors import ConfigError
from bstune.workloads.layers import Whitening, dirac_init


class Airbench(nn.Module):
    """The network of airbench94 (Jordan 2024): images (N, 3, 32, 32) to logits (N, classes).

    Whitening and an activation, then for each width a group: convolution, max-pooling of 2, norm,
    activation, convolution, norm, activation; max-pooling of 3 and a linear layer without bias.
    Convolutions are 3x3, of stride 1, keep the size and have no bias.

    Args:
        classes: number of classes.
        widths: channels of the three groups; 64, 256 and 256 in the source.
        logit_scale: of the output; 1/9 in the source, and 1/256, one over the last width, in its
            variant with Muon.
        activation: called without arguments for each activation; GELU in the source.
        norm: called with a number of channels; in the source of momentum 0.4 (torch's sense), eps
            1e-12 and scale 1.
        whitening: the first layer; in the source of 2x2 pixels, signed, with a bias and without
            padding.
        identity_init: whether convolutions start as the identity, as in the source.
        unit_head: whether the linear layer's weights start with a standard deviation of 1, as in
            the variant with Muon.
        first_activation: the one after the whitening; None: as the others.

    Raises:
        ConfigError: unless there are three widths.
    """

    def __init__(
        self,
        classes: int,
        widths: Sequence[int],
        logit_scale: float,
        *,
        activation: Callable[[], nn.Module],
        norm: Callable[[int], nn.Module],
        whitening: Whitening,
        identity_init: bool,
        unit_head: bool,
        first_activation: Callable[[], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        if len(widths) != 3:
            raise ConfigError(
                f"the network has three groups, so it takes three widths, but got {list(widths)}"
            )

        convolution = partial(nn.Conv2d, kernel_size=3, padding=1, bias=False)

        def group(inputs: int, outputs: int) -> nn.Sequential:
            return nn.Sequential(
                convolution(inputs, outputs),
                nn.MaxPool2d(2),
                norm(outputs),
                activation(),
                convolution(outputs, outputs),
                norm(outputs),
                activation(),
            )

        first, second, third = widths
        self.whitening = whitening
        self.features = nn.Sequential(
            (first_activation or activation)(),
            group(whitening.out_channels, first),
            group(first, second),
            group(second, third),
            nn.MaxPool2d(3),
            nn.Flatten(),
        )
        self.head = nn.Linear(third, classes, bias=False)
        self.logit_scale = logit_scale
        if identity_init:
            dirac_init(self)
        if unit_head:
            with torch.no_grad():
                self.head.weight.div_(self.head.weight.std())

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits (N, classes) of images (N, 3, 32, 32)."""
        logits: Tensor = self.head(self.features(self.whitening(x))) * self.logit_scale
        return logits
