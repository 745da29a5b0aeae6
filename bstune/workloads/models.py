"""Image classifiers in one function each."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from bstune.core.errors import ConfigError, check_positive_integer

# The groups of VGG-11: channels, as a multiple of the first group's, and convolutions.
VGG11_GROUPS = ((1, 1), (2, 1), (4, 2), (8, 2), (8, 2))


def mlp(inputs: int, hidden: Sequence[int], classes: int) -> nn.Sequential:
    """Build a perceptron with ReLU between layers.

    It maps (N, ...), ``inputs`` values per example, to logits (N, classes). ``hidden`` has the
    number of units of each hidden layer, each over 0.
    """
    for width in hidden:
        check_positive_integer("the units of a hidden layer", width)
    widths = [inputs, *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], classes))


def tiny_cnn(channels: int, height: int, filters: tuple[int, int], classes: int) -> nn.Sequential:
    """Build two 3x3 convolutions of stride 2 and a linear layer, which a CPU trains in seconds.

    They map images (N, channels, height, height), ``height`` a multiple of 4, to logits (N,
    classes). ``filters`` has the number of filters of both convolutions.
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
    """Build the simple CNN of Shallue et al. 2018 (arXiv 1811.03600, appendix B).

    It maps images (N, 1, 28, 28) to logits (N, classes). Two 5x5 convolutions with "same" padding,
    each with 2x2 max-pooling, then a hidden layer, without the paper's dropout.

    Args:
        classes: number of classes.
        width: filters of the first convolution; the second has 2 and the hidden layer 32 times as
            many. 32 in the paper's base model, 16 in its narrow one.
    """
    check_positive_integer("the width of the network", width)
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


class _Residual(nn.Module):
    """x plus two convolutions of x, each after a ReLU.

    Where channels double, x is halved in size and padded with channels of zeros. (He et al. 2016,
    arXiv 1603.05027, figure 4e, without normalisation; the shortcut is option A of 1512.03385.)
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        # Where channels double, pixels are halved.
        self.stride = outputs // inputs
        # Channels of zeros that x is padded with.
        self.added_channels = outputs - inputs
        self.branch = nn.Sequential(
            nn.ReLU(),
            nn.Conv2d(inputs, outputs, 3, stride=self.stride, padding=1),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Add the branch to x, which is halved in size where channels double."""
        branch: Tensor = self.branch(x)
        if self.added_channels:
            smaller = x[:, :, :: self.stride, :: self.stride]
            # Pads count from the last dimension on: these are channels, behind x's own.
            x = nn.functional.pad(smaller, (0, 0, 0, 0, 0, self.added_channels))
        return x + branch


def small_resnet(classes: int, width: int, blocks: int) -> nn.Sequential:
    """Build a residual network for CIFAR-10 without normalisation.

    It maps images (N, 3, 32, 32) to logits (N, classes): a convolution, three groups of residual
    blocks of ``width``, 2 and 4 times as many channels, the mean over pixels and a linear layer: 6
    ``blocks`` + 2 layers with weights (He et al. 2016, arXiv 1512.03385, section 4.2). With one
    block a group it is ResNet-8 as in Shallue et al. 2018 (arXiv 1811.03600, appendix B), with the
    blocks of He et al. 2016, arXiv 1603.05027. Weights start as in He et al. 2015, arXiv
    1502.01852, eq. 10.

    Args:
        classes: number of classes.
        width: channels of the first group; 16 in the source.
        blocks: residual blocks of each group.
    """
    check_positive_integer("the width of the network", width)
    check_positive_integer("the blocks of each group", blocks)
    # The channels after the first convolution, and after each block.
    channels = [width]
    for factor in (1, 2, 4):
        channels += [factor * width] * blocks
    network = nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        *(_Residual(inputs, outputs) for inputs, outputs in pairwise(channels)),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, classes),
    )
    _start_for_relu(network)
    return network


def vgg11(classes: int, width: int) -> nn.Sequential:
    """Build VGG-11 for CIFAR-10, without normalisation.

    It maps images (N, 3, 32, 32) to logits (N, classes): eight 3x3 convolutions in five groups,
    each with 2x2 max-pooling behind it (Simonyan and Zisserman 2014, arXiv 1409.1556, table 1,
    column A). Five poolings leave one pixel of 32 x 32, so one linear layer follows in place of the
    source's three. Weights start as in :func:`small_resnet`.

    Args:
        classes: number of classes.
        width: channels of the first group, 64 in the source. The others have 2, 4, 8 and 8 times
            as many.
    """
    check_positive_integer("the width of the network", width)
    layers = list[nn.Module]()
    inputs = 3
    for factor, convolutions in VGG11_GROUPS:
        for _ in range(convolutions):
            outputs = factor * width
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
            inputs = outputs
        layers.append(nn.MaxPool2d(2))
    network = nn.Sequential(*layers, nn.Flatten(), nn.Linear(inputs, classes))
    _start_for_relu(network)
    return network


def _start_for_relu(network: nn.Module) -> None:
    """Draw the weights of a network's convolutions by He et al. 2015 (arXiv 1502.01852, eq. 10).

    Their biases become 0.
    """
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]  # it has one


def mobilenet_v3_large(classes: int, image_size: int) -> nn.Sequential:
    """Build MobileNetV3 (large), untrained, as torchvision does.

    (Howard et al. 2019, arXiv 1905.02244.) It maps images (N, 3, H, W) to logits (N, classes). They
    are resized to squares in the model, so that a step's time includes it.

    Args:
        classes: number of classes.
        image_size: height and width in pixels, after a bilinear resize.

    Raises:
        ConfigError: without a torchvision that is built for this torch.
    """
    resize = nn.Upsample(size=(image_size, image_size), mode="bilinear", align_corners=False)
    return nn.Sequential(resize, from_torchvision("mobilenet_v3_large", classes))


def from_torchvision(name: str, classes: int) -> nn.Module:
    """Build an untrained network of torchvision's, such as ``vgg11`` or ``resnet50``.

    It maps images (N, 3, H, W) to logits (N, classes).

    Raises:
        ConfigError: without torchvision, with one that is built for another torch, or for a name
            that it has not.
    """
    try:
        # It comes with an extra that only these models need.
        from torchvision import models
    # A RuntimeError says that its operators are built for another torch.
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"{name} comes from torchvision, which cannot be imported ({error}): pip install "
            f"'bstune[vision]', from the place that torch {torch.__version__} is from"
        ) from error
    build = getattr(models, name, None)
    if not callable(build):
        raise ConfigError(f"workload.module.model: torchvision has no network {name!r}")
    model: nn.Module = build(weights=None, num_classes=classes)
    return model
