"""Image classifiers in one function each."""

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
    """Return two 3x3 convolutions of stride 2 and a linear layer, which a CPU trains in seconds.

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
    """Return the simple CNN of Shallue et al. 2018 (arXiv 1811.03600, appendix B): images (N, 1, 28, 28) to logits.

    Two 5x5 convolutions of 32 and 64 filters with "same" padding, each with 2x2 max-pooling, then 1024 hidden units.
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
    """Return MobileNetV3 (large) of Howard et al. 2019 (arXiv 1905.02244) as torchvision builds it, untrained.

    Images (N, 3, H, W), resized to squares in the model, so that a step's time includes it, to logits (N, classes).

    Args:
        classes: number of classes.
        image_size: height and width in pixels, after a bilinear resize.

    Raises:
        ConfigError: as of :func:`from_torchvision`.
    """
    resize = nn.Upsample(size=(image_size, image_size), mode="bilinear", align_corners=False)
    return nn.Sequential(resize, from_torchvision("mobilenet_v3_large", classes))


def from_torchvision(name: str, classes: int) -> nn.Module:
    """Return a network of torchvision's, such as ``vgg11`` or ``resnet50``, untrained: images (N, 3, H, W) to logits.

    Raises:
        ConfigError: without torchvision, with one that is built for another torch, or for a name that it has not.
    """
    try:
        from torchvision import models  # an extra, which only these models need
    except (ImportError, RuntimeError) as error:  # the latter: its operators are built for another torch
        raise ConfigError(
            f"{name} comes from torchvision, which cannot be imported ({error}): pip install 'bstune[vision]', from "
            f"the place that torch {torch.__version__} is from"
        ) from error
    build = getattr(models, name, None)
    if not callable(build):
        raise ConfigError(f"workload.module.model: torchvision has no network {name!r}")
    model: nn.Module = build(weights=None, num_classes=classes)
    return model
