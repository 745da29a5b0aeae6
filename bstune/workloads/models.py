"""A multi-layer perceptron.

A convolutional network small enough that a CPU trains it to its target in seconds.

The simple CNN of Shallue et al. 2018 (arXiv 1811.03600, appendix B).

MobileNetV3 (large) of Howard et al. 2019 (arXiv 1905.02244), as torchvision builds it, for images of any size.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

from bstune.core.errors import ConfigError


def mlp(inputs: int, hidden: Sequence[int], classes: int) -> nn.Sequential:
    """Return a perceptron with ReLU between layers: (N, ...) of ``inputs`` values to logits (N, classes)."""
    widths = [inputs, *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], classes))


def tiny_cnn(channels: int, height: int, filters: tuple[int, int], classes: int) -> nn.Sequential:
    """Return two 3x3 convolutions of stride 2 and a linear layer.

    Images (N, channels, height, height), height a multiple of 4, to logits (N, classes).
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


def simple_cnn(classes: int) -> nn.Sequential:
    """Return two 5x5 convolutions of 32 and 64 filters, each with 2x2 max-pooling, then 1024 hidden units.

    Images (N, 1, 28, 28) to logits (N, classes); "same" padding, so that 7 x 7 x 64 values reach the hidden layer.
    """
    return nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(7 * 7 * 64, 1024),
        nn.ReLU(),
        nn.Linear(1024, classes),
    )


def mobilenet_v3_large(classes: int, image_size: int) -> nn.Sequential:
    """Return the network with random weights: images (N, 3, H, W), resized to squares, to logits (N, classes).

    The resize is on the device, in the model, so that a step holds it: data sets are kept at their own size.

    Args:
        classes: number of classes.
        image_size: height and width in pixels, after a bilinear resize.

    Raises:
        ConfigError: without torchvision, which bstune does not need otherwise, or with one that is not the torch's.
    """
    try:
        from torchvision import models
    except (ImportError, RuntimeError) as error:  # the latter: its operators are built for another torch
        raise ConfigError(
            f"MobileNetV3 comes from torchvision, which cannot be imported ({error}): pip install 'bstune[vision]', "
            f"from the place that torch {torch.__version__} is from"
        ) from error
    resize = nn.Upsample(size=(image_size, image_size), mode="bilinear", align_corners=False)
    return nn.Sequential(resize, models.mobilenet_v3_large(weights=None, num_classes=classes))
