"""Models: functions that build a torch module."""

from collections.abc import Sequence
from itertools import pairwise

from torch import nn


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
