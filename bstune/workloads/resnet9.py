"""The nine-layer residual network of David Page's DAWNBench entry for CIFAR-10."""

from collections.abc import Callable

from torch import Tensor, nn

from bstune.core.errors import ConfigError
from bstune.workloads.layers import Whitening, dirac_init

# The place of the pooling among convolution, norm and activation.
POOL_AT = {"after_activation": 3, "before_activation": 2, "before_norm": 1}


class _GlobalMax(nn.Module):
    """The largest value of each channel, (N, C, H, W) to (N, C).

    AdaptiveMaxPool2d has no deterministic gradient.
    """

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(2).max(dim=2).values


class _Residual(nn.Module):
    """x plus two layers of x, one after the other."""

    def __init__(self, first: nn.Sequential, second: nn.Sequential) -> None:
        super().__init__()
        self.branch = nn.Sequential(first, second)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.branch(x)
        return out


class ResNet9(nn.Module):
    """Images (N, 3, 32, 32) to logits (N, classes).

    (Page's How to Train Your ResNet, part 4; the options are from part 8, whose versions are named
    here by the seconds that they train.) A convolution, three convolutions with pooling of which
    the first and the third carry a residual branch of two convolutions, global max-pooling and a
    linear layer without bias.

    Args:
        classes: number of classes.
        width: channels of the first layer; the others are 2, 4 and 8 times as wide. 64 in part 4.
        logit_scale: of the output; 0.125 in part 4, 0.0625 with norms' scales frozen at 1 (43 s).
        pool: where the three convolutions are pooled: ``after_activation``, as in part 4;
            ``before_activation``, the same function for an activation that never falls; or
            ``before_norm`` (64 s).
        activation: called without arguments for each activation; ReLU in part 4, CELU of alpha
            0.075 later (52 s).
        norm: called with a number of channels for each normalisation.
        whitening: a frozen convolution in place of the first layer's, followed by a learnt one of
            one pixel, its norm and its activation (36 s); None for the convolution that is learnt.
        identity_init: whether learnt convolutions start as the identity.

    Raises:
        ConfigError: for another place to pool.
    """

    def __init__(
        self,
        classes: int,
        width: int,
        logit_scale: float,
        *,
        pool: str,
        activation: Callable[[], nn.Module],
        norm: Callable[[int], nn.Module],
        whitening: Whitening | None,
        identity_init: bool,
    ) -> None:
        super().__init__()
        if pool not in POOL_AT:
            raise ConfigError(
                f"the network's pool must be one of {', '.join(POOL_AT)}, but got {pool!r}"
            )

        def block(
            inputs: int, outputs: int, *, pooled: bool = False, kernel_size: int = 3
        ) -> nn.Sequential:
            convolution = nn.Conv2d(
                inputs, outputs, kernel_size, padding=kernel_size // 2, bias=False
            )
            layers = [convolution, norm(outputs), activation()]
            if pooled:
                layers.insert(POOL_AT[pool], nn.MaxPool2d(2))
            return nn.Sequential(*layers)

        def residual(channels: int) -> _Residual:
            return _Residual(block(channels, channels), block(channels, channels))

        if whitening is None:
            first = block(3, width)
        else:
            first = nn.Sequential(whitening, *block(whitening.out_channels, width, kernel_size=1))
        self.features = nn.Sequential(
            first,
            block(width, 2 * width, pooled=True),
            residual(2 * width),
            block(2 * width, 4 * width, pooled=True),
            block(4 * width, 8 * width, pooled=True),
            residual(8 * width),
            _GlobalMax(),
        )
        self.head = nn.Linear(8 * width, classes, bias=False)
        self.logit_scale = logit_scale
        if identity_init:
            dirac_init(self)

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits (N, classes) of images (N, 3, 32, 32)."""
        logits: Tensor = self.head(self.features(x)) * self.logit_scale
        return logits
