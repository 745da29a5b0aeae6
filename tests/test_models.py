import sys
from types import ModuleType

import pytest
import torch
from builders import options_and_recipe
from toolbox import make_spec
from torch import nn

from bstune.core.errors import ConfigError
from bstune.trial.workload import build_module
from bstune.workloads.models import mlp, mobilenet_v3_large, simple_cnn, small_resnet, vgg11


def test_simple_cnn_is_that_of_shallue_et_al(parameters, shapes):
    model = simple_cnn(10, 32)
    # Two 5x5 convolutions, 1 to 32 to 64 channels, a hidden layer of 1024 units, 10 classes; each
    # with biases.
    first = 32 * (5 * 5 * 1 + 1)
    second = 64 * (5 * 5 * 32 + 1)
    assert (
        parameters(model) == first + second + 1024 * (7 * 7 * 64 + 1) + 10 * (1024 + 1) == 3_274_634
    )
    sizes = [
        *[(32, 28, 28)] * 2,
        (32, 14, 14),
        *[(64, 14, 14)] * 2,
        (64, 7, 7),
        (3136,),
        *[(1024,)] * 2,
        (10,),
    ]
    assert shapes(model, torch.zeros(3, 1, 28, 28)) == sizes
    # The paper's narrow one has half of each: 16 and 32 filters, 512 units.
    assert (
        parameters(simple_cnn(10, 16))
        == 16 * 26 + 32 * (25 * 16 + 1) + 512 * (7 * 7 * 32 + 1) + 10 * 513
    )


@pytest.mark.parametrize(("width", "blocks", "layers"), [(16, 1, 8), (4, 3, 20)])
def test_small_resnet_is_that_of_he_et_al_without_normalisation(
    width, blocks, layers, parameters, shapes
):
    # The variance of 144 random weights is compared below.
    torch.manual_seed(0)
    model = small_resnet(10, width, blocks)
    weights = [one.weight for one in model.modules() if isinstance(one, nn.Conv2d | nn.Linear)]
    assert len(weights) == layers
    assert not [one for one in model.modules() if isinstance(one, nn.BatchNorm2d)]
    # The 3x3 convolutions lead from 3 to 16 channels, then to 16, 32 and 64 twice each.
    if layers == 8:
        pairs = [(3, 16), (16, 16), (16, 16), (16, 32), (32, 32), (32, 64), (64, 64)]
        assert (
            parameters(model)
            == sum((9 * inputs + 1) * outputs for inputs, outputs in pairs) + 650
            == 75_050
        )
    sides = [
        (width * 2**group, 32 // 2**group, 32 // 2**group)
        for group in range(3)
        for _ in range(blocks)
    ]
    ends = [sides[-1], (4 * width, 1, 1), (4 * width,), (10,)]
    assert shapes(model, torch.zeros(2, 3, 32, 32)) == [(width, 32, 32), *sides, *ends]
    # He et al. 2015, eq. 10: the variance is 2 over the inputs.
    variance = weights[1].var().item() * 9 * width / 2
    assert variance == pytest.approx(1.0, rel=0.3)


def test_vgg11_is_that_of_simonyan_and_zisserman_on_small_images(parameters, shapes):
    # Column A of their table 1, with biases, and one linear layer.
    pairs = [(3, 64), (64, 128), (128, 256), (256, 256), (256, 512), *[(512, 512)] * 3]
    of_convolutions = sum((9 * inputs + 1) * outputs for inputs, outputs in pairs)
    assert parameters(vgg11(10, 64)) == of_convolutions + 10 * 513 == 9_225_610
    model = vgg11(10, 4)
    pooled = [
        shape
        for layer, shape in zip(model, shapes(model, torch.zeros(2, 3, 32, 32)), strict=True)
        if isinstance(layer, nn.MaxPool2d)
    ]
    assert pooled == [(4, 16, 16), (8, 8, 8), (16, 4, 4), (32, 2, 2), (32, 1, 1)]
    # He et al. 2015, eq. 10: the variance is 2 over the inputs.
    variance = vgg11(10, 16)[3].weight.var().item() * 9 * 16 / 2
    assert variance == pytest.approx(1.0, rel=0.3)


def test_a_shortcut_keeps_every_second_pixel_and_pads_channels_with_zeros():
    block = small_resnet(10, 2, 1)[2]
    for parameter in block.parameters():
        nn.init.zeros_(parameter)
    x = torch.randn(1, 2, 6, 6)
    torch.testing.assert_close(
        block(x), torch.cat([x[:, :, ::2, ::2], torch.zeros(1, 2, 3, 3)], dim=1)
    )


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (
            lambda: mlp(64, [8, 0], 10),
            "the units of a hidden layer must be a positive integer, but got 0",
        ),
        (
            lambda: simple_cnn(10, 0),
            "the width of the network must be a positive integer, but got 0",
        ),
        (
            lambda: vgg11(10, 0),
            "the width of the network must be a positive integer, but got 0",
        ),
        (
            lambda: small_resnet(10, 16, 0),
            "the blocks of each group must be a positive integer, but got 0",
        ),
        (
            lambda: small_resnet(10, 1.5, 1),
            "the width of the network must be a positive integer, but got 1.5",
        ),
    ],
)
def test_a_network_of_no_size_is_refused(build, text):
    with pytest.raises(ConfigError, match=text):
        build()


@pytest.mark.parametrize(
    ("hidden", "count"), [([], 65 * 10), ([128], 65 * 128 + 129 * 10), ([5, 7], 65 * 5 + 42 + 80)]
)
def test_mlp(hidden, count, parameters):
    model = mlp(64, hidden, 10)
    assert parameters(model) == count
    assert model(torch.zeros(3, 1, 8, 8)).shape == (3, 10)
    assert [type(layer) for layer in model] == [
        nn.Flatten,
        *[nn.Linear, nn.ReLU] * len(hidden),
        nn.Linear,
    ]


def replace_torchvision(monkeypatch):
    """Put a small net in place of torchvision's; return the options that it is built with."""
    asked = []

    def build(**options):
        asked.append(options)
        return nn.Sequential(
            nn.Conv2d(3, 2, 3, stride=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 10)
        )

    package = ModuleType("torchvision")
    package.models = ModuleType("torchvision.models")
    package.models.mobilenet_v3_large = build
    monkeypatch.setitem(sys.modules, "torchvision", package)
    return asked


def build_workload_module():
    return build_module(*options_and_recipe("+workload=mobilenet_cifar"), make_spec(4, 5e-4))


def test_mobilenet_resizes_images_and_trains_as_its_workload_says(monkeypatch, shapes):
    asked = replace_torchvision(monkeypatch)
    model = mobilenet_v3_large(10, 224)
    assert asked == [{"weights": None, "num_classes": 10}]
    assert shapes(model, torch.zeros(2, 3, 32, 32)) == [(3, 224, 224), (10,)]
    constant = torch.arange(3.0).view(1, 3, 1, 1).expand(1, 3, 32, 32)
    torch.testing.assert_close(model[0](constant), constant[..., :1, :1].expand(1, 3, 224, 224))
    module = build_workload_module()
    assert module.training_step(
        (torch.randn(4, 3, 32, 32), torch.tensor([0, 9, 4, 4])), 0
    ).requires_grad
    optimizer = module.configure_optimizers()
    assert (type(optimizer), optimizer.defaults["lr"]) == (torch.optim.Adam, 5e-4)


class OfAnotherTorch(ModuleType):
    def __getattr__(self, name):
        raise RuntimeError("operator torchvision::nms does not exist")


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (None, "import of torchvision halted"),
        (OfAnotherTorch("torchvision"), "operator torchvision::nms does not"),
    ],
)
def test_mobilenet_without_torchvision_says_what_to_install(broken, why, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", broken)
    text = (
        rf"torchvision, which cannot be imported \({why}.*\): pip install 'bstune\[vision\]', "
        rf"from .* torch 2\."
    )
    with pytest.raises(ConfigError, match=text):
        build_workload_module()
