"""A convolutional network small enough that a CPU trains it to its target in seconds."""

from torch import nn


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
