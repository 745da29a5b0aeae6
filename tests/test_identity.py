import pytest
import torch
from torch import nn

from bstune.workloads.layers import dirac_init


@pytest.mark.parametrize("kernel_size", [1, 3])
@pytest.mark.parametrize(("inputs", "outputs"), [(4, 4), (4, 9), (4, 8), (6, 3)])
def test_a_convolution_passes_its_input_on(inputs, outputs, kernel_size):
    layer = nn.Conv2d(inputs, outputs, kernel_size, padding=kernel_size // 2, bias=False)
    drawn = layer.weight.detach().clone()
    dirac_init(nn.Sequential(layer, nn.ReLU()))
    x = torch.randn(2, inputs, 5, 6)
    passed = min(inputs, outputs)
    assert torch.equal(layer(x)[:, :passed], x[:, :passed])
    assert torch.equal(layer.weight[inputs:], drawn[inputs:])
    assert layer.weight.requires_grad


def test_what_is_frozen_or_no_convolution_stays():
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2))
    network[0].weight.requires_grad_(False)
    before = [value.clone() for value in network.state_dict().values()]
    dirac_init(network)
    assert all(torch.equal(a, b) for a, b in zip(before, network.state_dict().values(), strict=True))
