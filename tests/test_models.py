import sys
from types import ModuleType

import pytest
import torch
from toolbox import make_spec
from torch import nn

from bstune.core.errors import ConfigError
from bstune.study.prepare import compose_checked
from bstune.trial.workload import build_module
from bstune.workloads.models import mlp, mobilenet_v3_large, simple_cnn


def test_simple_cnn_is_that_of_shallue_et_al(parameters, shapes):
    model = simple_cnn(10)
    # Two 5x5 convolutions, 1 to 32 to 64 channels, a hidden layer of 1024 units, 10 classes; each with biases.
    first, second = 32 * (5 * 5 * 1 + 1), 64 * (5 * 5 * 32 + 1)
    assert parameters(model) == first + second + 1024 * (7 * 7 * 64 + 1) + 10 * (1024 + 1) == 3_274_634
    sizes = [*[(32, 28, 28)] * 2, (32, 14, 14), *[(64, 14, 14)] * 2, (64, 7, 7), (3136,), *[(1024,)] * 2, (10,)]
    assert shapes(model, torch.zeros(3, 1, 28, 28)) == sizes


@pytest.mark.parametrize(("hidden", "count"), [([], 65 * 10), ([128], 65 * 128 + 129 * 10), ([5, 7], 65 * 5 + 42 + 80)])
def test_mlp(hidden, count, parameters):
    model = mlp(64, hidden, 10)
    assert parameters(model) == count
    assert model(torch.zeros(3, 1, 8, 8)).shape == (3, 10)
    assert [type(layer) for layer in model] == [nn.Flatten, *[nn.Linear, nn.ReLU] * len(hidden), nn.Linear]


def replace_torchvision(monkeypatch):
    """Put a small net in place of torchvision's; return the options that it is built with."""
    asked = []

    def build(**options):
        asked.append(options)
        return nn.Sequential(nn.Conv2d(3, 2, 3, stride=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 10))

    package = ModuleType("torchvision")
    package.models = ModuleType("torchvision.models")
    package.models.mobilenet_v3_large = build
    monkeypatch.setitem(sys.modules, "torchvision", package)
    return asked


def build_workload_module():
    return build_module(compose_checked(["+workload=mobilenet_cifar"]), make_spec(4, 5e-4))


def test_mobilenet_resizes_images_and_trains_as_its_workload_says(monkeypatch, shapes):
    asked = replace_torchvision(monkeypatch)
    model = mobilenet_v3_large(10, 224)
    assert asked == [{"weights": None, "num_classes": 10}]
    assert shapes(model, torch.zeros(2, 3, 32, 32)) == [(3, 224, 224), (10,)]
    constant = torch.arange(3.0).view(1, 3, 1, 1).expand(1, 3, 32, 32)
    torch.testing.assert_close(model[0](constant), constant[..., :1, :1].expand(1, 3, 224, 224))
    module = build_workload_module()
    assert module.training_step((torch.randn(4, 3, 32, 32), torch.tensor([0, 9, 4, 4])), 0).requires_grad
    optimizer = module.configure_optimizers()
    assert (type(optimizer), optimizer.defaults["lr"]) == (torch.optim.Adam, 5e-4)


class OfAnotherTorch(ModuleType):
    def __getattr__(self, name):
        raise RuntimeError("operator torchvision::nms does not exist")


@pytest.mark.parametrize(
    ("broken", "why"),
    [(None, "import of torchvision halted"), (OfAnotherTorch("torchvision"), "operator torchvision::nms does not")],
)
def test_mobilenet_without_torchvision_says_what_to_install(broken, why, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", broken)
    text = rf"torchvision, which cannot be imported \({why}.*\): pip install 'bstune\[vision\]', from .* torch 2\."
    with pytest.raises(ConfigError, match=text):
        build_workload_module()
