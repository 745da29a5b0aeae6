from collections import OrderedDict
from functools import partial

import pytest
import torch
from builders import options_of
from torch import nn

from bstune.core.errors import ConfigError
from bstune.hydra_recipe import instantiate
from bstune.options import option_at
from bstune.workloads.layers import BatchNorm, Whitening
from bstune.workloads.resnet9 import ResNet9, _GlobalMax


def resnet9(classes=10, width=4, logit_scale=1.0, **switches):
    shipped = {"pool": "after_activation", "activation": nn.ReLU, "norm": BatchNorm}
    return ResNet9(
        classes,
        width,
        logit_scale,
        **{**shipped, "whitening": None, "identity_init": False, **switches},
    )


def seeded(build, seed=0):
    torch.manual_seed(seed)
    return build()


def images(n=6, seed=1):
    return torch.randn(n, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


# The network of part 4


def _conv(inputs, outputs, pool=False):
    layers = [
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    ]
    return nn.Sequential(*layers, *([nn.MaxPool2d(2)] if pool else []))


class _Branch(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.branch = nn.Sequential(_conv(width, width), _conv(width, width))

    def forward(self, x):
        return x + self.branch(x)


def without_switches(width):
    """The network as it was before it had switches: states of then are still to be read."""
    features = nn.Sequential(
        _conv(3, width),
        _conv(width, 2 * width, pool=True),
        _Branch(2 * width),
        _conv(2 * width, 4 * width, pool=True),
        _conv(4 * width, 8 * width, pool=True),
        _Branch(8 * width),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
    )
    return nn.Sequential(OrderedDict(features=features, head=nn.Linear(8 * width, 10, bias=False)))


def test_what_ships_is_the_network_without_switches_bit_for_bit():
    options = options_of("+workload=resnet_cifar", "workload.module.model.width=4")
    node = option_at(options, "workload.module.model")
    model = seeded(lambda: instantiate(node, "workload.module.model"))
    drawn = torch.get_rng_state()
    before = seeded(lambda: without_switches(4))
    assert torch.equal(torch.get_rng_state(), drawn)
    for step in range(2):
        # What ships multiplies its logits by an eighth.
        outputs = [model(images(seed=step)), 0.125 * before(images(seed=step))]
        for network, output in zip((model, before), outputs, strict=True):
            network.zero_grad()
            nn.functional.cross_entropy(output, torch.arange(6)).backward()
        gradients = []
        for network in (model, before):
            gradients.append({name: p.grad for name, p in network.named_parameters()})
        for pair in (outputs, gradients, [model.state_dict(), before.state_dict()]):
            torch.testing.assert_close(*pair, rtol=0, atol=0)
    assert list(model.state_dict()) == list(before.state_dict())
    assert torch.equal(model.eval()(images()), 0.125 * before.eval()(images()))


# Switches


@pytest.mark.parametrize(
    ("pool", "order", "same"),
    [
        ("after_activation", [nn.Conv2d, BatchNorm, nn.CELU, nn.MaxPool2d], True),
        ("before_activation", [nn.Conv2d, BatchNorm, nn.MaxPool2d, nn.CELU], True),
        # Its statistics are those of the largest values.
        ("before_norm", [nn.Conv2d, nn.MaxPool2d, BatchNorm, nn.CELU], False),
    ],
)
def test_where_it_pools(pool, order, same):
    """Pooling before an activation that never falls is the same function."""
    build = partial(resnet9, activation=partial(nn.CELU, alpha=0.075))
    network = seeded(partial(build, pool="after_activation"))
    pooled = seeded(partial(build, pool=pool))
    features = pooled.features
    for place in (1, 3, 4):
        assert list(map(type, features[place])) == order
    without = [kind for kind in order if kind is not nn.MaxPool2d]
    assert list(map(type, features[0])) == without
    assert list(map(type, features[2].branch[1])) == without
    assert torch.allclose(network(images()), pooled(images()), rtol=1e-5, atol=1e-6) == same
    with pytest.raises(
        ConfigError, match="must be one of after_activation, before_activation, before_norm, but"
    ):
        resnet9(pool="before")


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_the_largest_value_of_each_channel_has_a_deterministic_gradient(memory):
    x = torch.randn(4, 5, 4, 4, generator=torch.Generator().manual_seed(0)).contiguous(
        memory_format=memory
    )
    weights = torch.arange(20.0).view(4, 5)
    found = []
    for pool in (_GlobalMax(), nn.Sequential(nn.AdaptiveMaxPool2d(1), nn.Flatten())):
        own = x.clone().requires_grad_()
        output = pool(own)
        (output * weights).sum().backward()
        found.append((output, own.grad))
    torch.testing.assert_close(*found, rtol=0, atol=0)
    # On CUDA torch refuses AdaptiveMaxPool2d under Trainer(deterministic=True).
    for layer in resnet9().modules():
        assert not isinstance(layer, nn.AdaptiveMaxPool2d)


def test_whitening_takes_the_place_of_the_first_convolution_and_the_others_start_as_identities(
    parameters,
):
    whitening = Whitening(kernel_size=3, eps=1e-2, images=6, signed=False, bias=False, padding=1)
    model = seeded(partial(resnet9, width=8, whitening=whitening, identity_init=True))
    whitening.initialise_from(images())
    first = model.features[0]
    # The number is David Page's.
    assert parameters(resnet9(10, 64, 0.125)) == 6_573_120
    assert list(map(type, first)) == [Whitening, nn.Conv2d, BatchNorm, nn.ReLU]
    assert first[1].weight.shape == (8, 27, 1, 1)
    # A filter has 27 weights, in the one convolution or the other.
    assert parameters(model) == parameters(resnet9(width=8))
    x = images()
    expected = nn.functional.conv2d(
        nn.functional.conv2d(x, whitening.weight, padding=1), first[1].weight
    )
    torch.testing.assert_close(first(x), nn.BatchNorm2d(8)(expected).relu())
    x = torch.randn(2, 64, 5, 5)
    assert torch.equal(model.features[5].branch[1][0](x), x)
    model(images()).sum().backward()
    assert "features.0.0.weight" in model.state_dict()
    for parameter in model.parameters():
        assert parameter.grad is not None
