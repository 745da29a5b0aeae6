"""The simple CNN of Shallue et al. 2018 (arXiv 1811.03600, appendix B)."""

from torch import nn


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
