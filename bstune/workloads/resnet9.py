"""The nine-layer residual network of David Page's DAWNBench entry for CIFAR-10 (How to Train Your ResNet, part 4)."""

from torch import Tensor, nn


def _conv(inputs: int, outputs: int, pool: bool = False) -> nn.Sequential:
    layers: list[nn.Module] = [
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    ]
    return nn.Sequential(*layers, *([nn.MaxPool2d(2)] if pool else []))


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(_conv(width, width), _conv(width, width))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.branch(x)
        return out


class ResNet9(nn.Module):
    """Images (N, 3, 32, 32) to logits (N, classes).

    A convolution, three convolutions with pooling of which the first and the third carry a residual branch of two
    convolutions, global max-pooling and a linear layer without bias.

    Args:
        classes: number of classes.
        width: channels of the first layer; the others are 2, 4 and 8 times as wide. 64 in the source.
        logit_scale: of the output; 0.125 in the source.
    """

    def __init__(self, classes: int, width: int, logit_scale: float) -> None:
        super().__init__()
        self.features = nn.Sequential(
            _conv(3, width),
            _conv(width, 2 * width, pool=True),
            _Residual(2 * width),
            _conv(2 * width, 4 * width, pool=True),
            _conv(4 * width, 8 * width, pool=True),
            _Residual(8 * width),
            nn.AdaptiveMaxPool2d(1),
            nn.Flatten(),
        )
        self.head = nn.Linear(8 * width, classes, bias=False)
        self.logit_scale = logit_scale

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        logits: Tensor = self.head(self.features(x)) * self.logit_scale
        return logits
