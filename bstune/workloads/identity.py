"""Convolutions that start as the identity, as far as their shapes let them."""

import torch
from torch import nn


def initialise_as_identity(network: nn.Module) -> None:
    """Set the first filters of every learnt convolution to pass one input channel on each, unchanged.

    These are as many filters as the layer has input channels; what is left of them stays as it was drawn
    (cifar10-airbench, after hlb-CIFAR10). A layer with fewer filters than input channels passes on the first of these.
    """
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d) and layer.weight.requires_grad:
            with torch.no_grad():
                nn.init.dirac_(layer.weight[: layer.weight.shape[1]])
