from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from bstune.core.errors import ConfigError
from bstune.workloads.airbench import Airbench
from bstune.workloads.layers import BatchNorm, Whitening


def airbench(widths=(8, 12, 16), classes=10, logit_scale=1 / 9, **options):
    whitening = Whitening(kernel_size=2, eps=5e-4, images=6, signed=True, bias=True, padding=0)
    whitening.initialise_from(images())
    norm = partial(BatchNorm, scale=1.0, momentum=0.4, eps=1e-12)
    switches = {"identity_init": True, "unit_head": False} | options
    return Airbench(
        classes, widths, logit_scale, activation=nn.GELU, norm=norm, whitening=whitening, **switches
    )


def images(n=6, seed=0):
    return torch.randn(n, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


def test_its_parameters_in_closed_form(parameters):
    for a, b, c, classes in ((64, 256, 256, 10), (8, 12, 16, 3)):
        network = airbench((a, b, c), classes)
        # The whitening's 24 biases, filters of 3 x 3, a bias for each channel of two norms a block,
        # and the head.
        learnt = (
            24
            + 9 * (24 * a + a * a + a * b + b * b + b * c + c * c)
            + 2 * (a + b + c)
            + c * classes
        )
        assert parameters(network) == learnt
        # the source's frozen filters and scales
        frozen = sum(
            layer.weight.numel()
            for layer in network.modules()
            if isinstance(layer, BatchNorm | Whitening)
        )
        assert frozen == 24 * 3 * 2 * 2 + 2 * (a + b + c)
        assert a == 8 or (learnt, frozen) == (1_971_352, 1440)
    # The source initialises as layers.dirac_init does.
    for identity_init in (True, False):
        layer = airbench(identity_init=identity_init).features[1][0]
        x = torch.randn(2, 24, 5, 5)
        assert torch.equal(layer(x), x[:, :8]) == identity_init
    with pytest.raises(ConfigError, match=r"takes three widths, but got \[8, 8\]"):
        airbench(widths=(8, 8))


def straight_line(network, x):
    """Logits by the source's layers, one after the other, from the network's parameters in their order."""
    convolutions = iter([layer for layer in network.modules() if isinstance(layer, nn.Conv2d)])
    biases = iter([layer.bias for layer in network.modules() if isinstance(layer, BatchNorm)])

    def norm(x):
        mean = x.mean((0, 2, 3), keepdim=True)
        var = x.var((0, 2, 3), correction=0, keepdim=True)
        return (x - mean) / (var + 1e-12).sqrt() + next(biases).view(-1, 1, 1)

    x = functional.conv2d(x, network.whitening.weight, network.whitening.bias)
    x = functional.gelu(x)
    for size in (15, 7, 3):
        x = functional.conv2d(x, next(convolutions).weight, padding=1)
        x = functional.max_pool2d(x, 2)
        x = functional.gelu(norm(x))
        x = functional.conv2d(x, next(convolutions).weight, padding=1)
        x = functional.gelu(norm(x))
        assert x.shape[2:] == (size, size)
    x = functional.max_pool2d(x, 3).flatten(1)
    assert next(convolutions, None) is None
    assert next(biases, None) is None
    return x @ network.head.weight.T * network.logit_scale


@pytest.mark.parametrize(("logit_scale", "unit_head"), [(1 / 9, False), (1 / 16, True)])
def test_its_output_and_gradients_are_those_of_the_layers_written_out(logit_scale, unit_head):
    torch.manual_seed(0)
    network = airbench(logit_scale=logit_scale, unit_head=unit_head)
    if unit_head:
        torch.testing.assert_close(network.head.weight.std(), torch.tensor(1.0))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    x = images(seed=4)
    labels = torch.arange(6)
    expected = straight_line(network, x)
    output = network(x)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    losses = [functional.cross_entropy(logits, labels) for logits in (output, expected)]
    gradients = [torch.autograd.grad(loss, list(network.parameters())) for loss in losses]
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)
