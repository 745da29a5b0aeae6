"""Models: functions that build a torch module."""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional

# Channels of the convolutions of VGG-11 by groups, as multiples of the first one's.
VGG11_GROUPS = ((1,), (2,), (4, 4), (8, 8), (8, 8))


def mlp(inputs: int, hidden: Sequence[int], classes: int) -> nn.Sequential:
    """Build a perceptron with ReLU between layers, from (N, ...) to logits (N, classes).

    Args:
        inputs: values of an example.
        hidden: units of each hidden layer.
        classes: number of classes.
    """
    widths = [inputs, *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], classes))


def tiny_cnn(channels: int, height: int, filters: tuple[int, int], classes: int) -> nn.Sequential:
    """Build two 3 x 3 convolutions of stride 2 and a linear layer, to logits (N, classes).

    Args:
        channels: of the images, (N, channels, height, height).
        height: a multiple of 4.
        filters: of both convolutions.
        classes: number of classes.
    """
    first, second = filters
    return nn.Sequential(
        nn.Conv2d(channels, first, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(first, second, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(second * (height // 4) ** 2, classes),
    )


def simple_cnn(classes: int, width: int) -> nn.Sequential:
    """Build the simple CNN of Shallue et al. 2018 (arXiv 1811.03600, appendix B), without dropout.

    Args:
        classes: number of classes; images (N, 1, 28, 28) become logits (N, classes).
        width: filters of the first convolution; 32 in the source, 16 in its narrow network.
    """
    return nn.Sequential(
        nn.Conv2d(1, width, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(7 * 7 * 2 * width, 32 * width),
        nn.ReLU(),
        nn.Linear(32 * width, classes),
    )


class Residual(nn.Module):
    """x plus two convolutions of x, each after a ReLU (He et al. 2016, arXiv 1603.05027, fig. 4e).

    There is no normalisation. Where channels double, x is halved in height and width and padded by
    channels of zeros (He et al. 2015, arXiv 1512.03385, option A).

    Args:
        inputs, outputs: channels.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.stride = outputs // inputs
        self.added = outputs - inputs
        self.branch = nn.Sequential(
            nn.ReLU(),
            nn.Conv2d(inputs, outputs, 3, stride=self.stride, padding=1),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Add the branch to x, (N, inputs, height, width)."""
        branch: Tensor = self.branch(x)
        smaller = x[:, :, :: self.stride, :: self.stride]
        # Pads are counted from the last dimension.
        return branch + functional.pad(smaller, (0, 0, 0, 0, 0, self.added))


def small_resnet(classes: int, width: int, blocks: int) -> nn.Sequential:
    """Build a residual network for CIFAR-10 without normalisation, of 6 blocks + 2 layers.

    A convolution, three groups of blocks of ``width``, 2 and 4 times as many channels, the mean
    over pixels and a linear layer (He et al. 2015, arXiv 1512.03385, section 4.2). With one block a
    group it is the ResNet-8 of Shallue et al. 2018 (arXiv 1811.03600, appendix B).

    Args:
        classes: number of classes; images (N, 3, height, width) become logits (N, classes).
        width: channels of the first group; 16 in the source.
        blocks: of each group.
    """
    channels = [width, *[width] * blocks, *[2 * width] * blocks, *[4 * width] * blocks]
    network = nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        *(Residual(inputs, outputs) for inputs, outputs in pairwise(channels)),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, classes),
    )
    return network.apply(_init_for_relu)


def vgg11(classes: int, width: int) -> nn.Sequential:
    """Build VGG-11 for CIFAR-10, without normalisation.

    Eight 3 x 3 convolutions, with five poolings (Simonyan and Zisserman 2014, arXiv 1409.1556,
    table 1, column A), which leave one pixel of 32 x 32: one linear layer follows.

    Args:
        classes: number of classes; images (N, 3, 32, 32) become logits (N, classes).
        width: channels of the first group; 64 in the source.
    """
    layers: list[nn.Module] = []
    inputs = 3
    for group in VGG11_GROUPS:
        for factor in group:
            layers += [nn.Conv2d(inputs, factor * width, 3, padding=1), nn.ReLU()]
            inputs = factor * width
        layers.append(nn.MaxPool2d(2))
    network = nn.Sequential(*layers, nn.Flatten(), nn.Linear(inputs, classes))
    return network.apply(_init_for_relu)


def _init_for_relu(layer: nn.Module) -> None:
    """Draw a convolution's weights by He et al. 2015 (arXiv 1502.01852, eq. 10); biases are 0."""
    if isinstance(layer, nn.Conv2d):
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        assert layer.bias is not None  # noqa: S101 (each has one here)
        nn.init.zeros_(layer.bias)
