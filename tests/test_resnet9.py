from functools import partial

import pytest
import torch
from hydra.utils import instantiate
from torch import nn

from bstune.core.errors import ConfigError
from bstune.study.prepare import compose_checked
from bstune.workloads.layers import BatchNorm, Whitening
from bstune.workloads.resnet9 import ResNet9

DEFAULT = {
    "pool": "after_activation",
    "activation": partial(nn.ReLU, inplace=True),
    "norm": BatchNorm,
    "whitening": None,
    "identity_init": False,
}


def resnet9(classes=10, width=4, logit_scale=1.0, **switches):
    return ResNet9(classes, width, logit_scale, **(DEFAULT | switches))


def images(n=6, seed=1):
    return torch.randn(n, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


# The network of part 4


def _conv(inputs, outputs, pool=False):
    layers = [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, *([nn.MaxPool2d(2)] if pool else []))


class _Branch(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.branch = nn.Sequential(_conv(width, width), _conv(width, width))

    def forward(self, x):
        return x + self.branch(x)


class WithoutSwitches(nn.Module):
    """The network as it was before it had switches: states of then are still to be read."""

    def __init__(self, classes, width, logit_scale):
        super().__init__()
        self.features = nn.Sequential(
            _conv(3, width),
            _conv(width, 2 * width, pool=True),
            _Branch(2 * width),
            _conv(2 * width, 4 * width, pool=True),
            _conv(4 * width, 8 * width, pool=True),
            _Branch(8 * width),
            nn.AdaptiveMaxPool2d(1),
            nn.Flatten(),
        )
        self.head = nn.Linear(8 * width, classes, bias=False)
        self.logit_scale = logit_scale

    def forward(self, x):
        return self.head(self.features(x)) * self.logit_scale


def test_what_ships_is_the_network_without_switches_bit_for_bit():
    torch.manual_seed(3)
    shipped = instantiate(compose_checked(["+workload=resnet_cifar", "workload.module.model.width=4"]).workload.module)
    model, drawn = shipped.model, torch.get_rng_state()
    torch.manual_seed(3)
    before = WithoutSwitches(10, 4, 0.125)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert list(model.state_dict()) == list(before.state_dict())
    for step in range(2):
        losses = []
        for network in (model, before):
            network.zero_grad()
            losses.append(nn.functional.cross_entropy(network(images(seed=step)), torch.arange(6)))
            losses[-1].backward()
        assert torch.equal(*losses)
        for (name, mine), its in zip(model.named_parameters(), before.parameters(), strict=True):
            assert torch.equal(mine.grad, its.grad), name
        assert all(torch.equal(value, before.state_dict()[name]) for name, value in model.state_dict().items())
    assert torch.equal(model.eval()(images()), before.eval()(images()))


# Switches


@pytest.mark.parametrize(
    ("pool", "order", "same"),
    [
        ("after_activation", [nn.Conv2d, BatchNorm, nn.CELU, nn.MaxPool2d], True),
        ("before_activation", [nn.Conv2d, BatchNorm, nn.MaxPool2d, nn.CELU], True),
        ("before_norm", [nn.Conv2d, nn.MaxPool2d, BatchNorm, nn.CELU], False),  # statistics of the largest values
    ],
)
def test_where_it_pools(pool, order, same):
    """Pooling before an activation that never falls is the same function."""
    networks = []
    for where in ("after_activation", pool):
        torch.manual_seed(0)
        networks.append(resnet9(pool=where, activation=partial(nn.CELU, alpha=0.075)))
    features = networks[1].features
    for place in (1, 3, 4):
        assert [type(layer) for layer in features[place]] == order
    without = [kind for kind in order if kind is not nn.MaxPool2d]
    assert [type(layer) for layer in features[0]] == without
    assert [type(layer) for layer in features[2].branch[1]] == without
    outputs = [network(images()) for network in networks]
    assert torch.allclose(*outputs, rtol=1e-5, atol=1e-6) == same
    with pytest.raises(ConfigError, match="must be one of after_activation, before_activation, before_norm, but"):
        resnet9(pool="before")


def test_scales_of_a_quarter_are_scales_of_one_with_another_activation():
    """CELU_a(z) = c CELU_(a/c)(z/c), so a factor 1/4 can go through each layer and out at the head.

    Page, part 8 (43 s): scales of 1/4 with CELU of alpha 0.075 and logits over 4 are scales of 1 with alpha 0.3 and
    logits over 16. The biases are those of 1/4 times 4.
    """
    networks = []
    for scale, alpha, logit_scale in ((0.25, 0.075, 0.25), (1.0, 0.3, 0.0625)):
        torch.manual_seed(0)
        norm = partial(BatchNorm, ghost_size=4, scale=scale, eps=1e-12)
        networks.append(
            resnet9(logit_scale=logit_scale, pool="before_norm", norm=norm, activation=partial(nn.CELU, alpha=alpha))
        )
    quarter, one = networks
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for (name, mine), its in zip(quarter.named_parameters(), one.parameters(), strict=True):
            if name.endswith("bias"):
                mine.copy_(0.1 * torch.randn(mine.shape, generator=generator))
                its.copy_(4.0 * mine)
    x = images(10)
    torch.testing.assert_close(quarter(x), one(x), rtol=1e-4, atol=1e-5)
    losses = [nn.functional.cross_entropy(network(x), torch.arange(10)) for network in networks]
    for loss in losses:
        loss.backward()
    for (name, mine), its in zip(quarter.named_parameters(), one.parameters(), strict=True):
        # So the biases' rate has to be 4 squared times as large for the same step of the function.
        factor = 4.0 if name.endswith("bias") else 1.0
        torch.testing.assert_close(mine.grad, its.grad * factor, rtol=1e-3, atol=1e-5)


def test_whitening_takes_the_place_of_the_first_convolution_and_the_others_start_as_identities(parameters):
    torch.manual_seed(0)
    whitening = Whitening(kernel_size=3, eps=1e-2, images=6, signed=False, bias=False, padding=1)
    model = resnet9(width=8, whitening=whitening, identity_init=True)
    whitening.initialise_from(images())
    first = model.features[0]
    assert parameters(resnet9(10, 64, 0.125)) == 6_573_120  # David Page's
    assert [type(layer) for layer in first] == [Whitening, nn.Conv2d, BatchNorm, nn.ReLU]
    assert first[1].weight.shape == (8, 27, 1, 1)
    assert parameters(model) == parameters(resnet9(width=8))  # 27 weights a filter, in the one convolution or the other
    x = images()
    expected = nn.functional.conv2d(nn.functional.conv2d(x, whitening.weight, padding=1), first[1].weight)
    torch.testing.assert_close(first(x), nn.BatchNorm2d(8)(expected).relu())
    x = torch.randn(2, 64, 5, 5)
    assert torch.equal(model.features[5].branch[1][0](x), x)
    model(images()).sum().backward()
    assert "features.0.0.weight" in model.state_dict()
    assert all(parameter.grad is not None for parameter in model.parameters())
