import math
from functools import partial

import pytest
import torch
from torch import nn

from bstune.core.errors import ConfigError
from bstune.workloads.classifier import Classifier
from bstune.workloads.layers import BatchNorm, Whitening
from bstune.workloads.models import mlp
from bstune.workloads.optim import KINDS, parameter_groups

ALL = {kind: {} for kind in KINDS}


def network(scale=None):
    """One of each kind; the last linear layer is the head, the other one is not."""
    return nn.Sequential(
        Whitening(kernel_size=2, eps=1e-3, images=8, signed=True, bias=True, padding=0),
        nn.Conv2d(24, 8, 3, bias=True),
        BatchNorm(8, scale=scale),
        nn.Flatten(),
        nn.Linear(8, 8),
        nn.LayerNorm(8),
        nn.Linear(8, 10),
    )


def names(module, groups):
    """Return the names of each group's parameters."""
    known = {id(parameter): name for name, parameter in module.named_parameters()}
    return [sorted(known[id(parameter)] for parameter in group["params"]) for group in groups]


def groups_of(module, kinds, lr=0.5, weight_decay=0.01, batch_size=100):
    return parameter_groups(module, lr, weight_decay, batch_size, kinds)


def test_each_kind():
    module = network()
    assert dict(zip(KINDS, names(module, groups_of(module, ALL)), strict=True)) == {
        "norm_bias": ["2.bias", "5.bias"],
        "whitening_bias": ["0.bias"],
        "head": ["6.bias", "6.weight"],
        "filters": ["1.weight"],
        "rest": ["1.bias", "2.weight", "4.bias", "4.weight", "5.weight"],
    }


@pytest.mark.parametrize(
    "kinds",
    [{}, {"norm_bias": {}}, {"filters": {}, "head": {}}, ALL, {"rest": {"rate": 2.0}}, {k: ALL[k] for k in KINDS[:4]}],
)
@pytest.mark.parametrize("scale", [None, 0.25])
def test_each_trained_parameter_is_in_exactly_one_group(kinds, scale):
    module = network(scale)
    module[4].weight.requires_grad = False
    grouped = [name for group in names(module, groups_of(module, kinds)) for name in group]
    assert sorted(grouped) == sorted(name for name, parameter in module.named_parameters() if parameter.requires_grad)
    assert ("2.weight" in grouped) == (scale is None)
    assert "4.weight" not in grouped


def test_weights_that_are_shared_are_in_one_group():
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].weight = module[0].weight
    groups = groups_of(module, {"head": {"rate": 3.0}})
    assert names(module, groups) == [["0.weight", "1.bias"], ["0.bias"]]


def test_rates_are_factors_and_the_decay_a_step_stays():
    kinds = {"norm_bias": {"rate": 64.0}, "head": {"rate": 0.5, "decay": 3.0}, "filters": {"decay": 0.0}}
    groups = groups_of(network(), kinds, lr=0.4, weight_decay=5e-4)
    assert [group["lr"] for group in groups] == pytest.approx([25.6, 0.2, 0.4, 0.4])
    assert [group["weight_decay"] for group in groups] == pytest.approx([5e-4 / 64, 3e-3, 0.0, 5e-4])
    shrinks = [group["lr"] * group["weight_decay"] for group in groups]
    assert shrinks == pytest.approx([2e-4, 6e-4, 0.0, 2e-4])


def test_one_step_without_a_gradient_shrinks_all_weights_alike():
    module = network()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(1.0)
    optimizer = torch.optim.SGD(groups_of(module, {"norm_bias": {"rate": 64.0}, "head": {"rate": 0.1}}), lr=1.0)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for parameter in module.parameters():
        torch.testing.assert_close(parameter.detach(), torch.full_like(parameter, 1 - 0.5 * 0.01))


@pytest.mark.parametrize(("examples", "steps"), [(147_456, 144), (1, 1), (1024, 1), (1025, 2)])
def test_examples_become_steps(examples, steps):
    kinds = {"whitening_bias": {"examples": examples}, "norm_bias": {}}
    first, second, rest = groups_of(network(), kinds, batch_size=1024)
    assert (first["steps"], first["fade"]) == (steps, False)
    assert "steps" not in second
    assert "steps" not in rest


def test_further_options_are_the_optimizers():
    groups = groups_of(network(), {"filters": {"momentum": 0.6, "nesterov": False}})
    optimizer = torch.optim.SGD(groups, lr=1.0, momentum=0.9, nesterov=True)
    assert [(group["momentum"], group["nesterov"]) for group in optimizer.param_groups] == [(0.6, False), (0.9, True)]


def classifier(**options):
    torch.manual_seed(0)
    own = torch.optim.SGD
    return Classifier(mlp(4, [5], 3), nn.CrossEntropyLoss(), own, lr=0.5, **options)


def test_a_classifier_trains_its_groups():
    def grouped(module, lr):
        return groups_of(module, {"head": {"rate": 3.0, "examples": 200}}, lr=lr)

    module = classifier(groups=grouped)
    configured = module.configure_optimizers()
    optimizer, schedule = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    assert [group["lr"] for group in optimizer.param_groups] == [1.5, 0.5]
    head, other = module.model[-1].weight, next(module.model.parameters())
    seen = []
    for _ in range(4):  # 200 examples are two steps
        before = head.detach().clone(), other.detach().clone()
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        schedule.step()
        seen.append((not torch.equal(head, before[0]), not torch.equal(other, before[1])))
    assert seen == [(True, True), (True, True), (False, True), (False, True)]


def test_without_groups_there_is_one_of_all():
    optimizer = classifier().configure_optimizers()
    assert [len(group["params"]) for group in optimizer.param_groups] == [4]


@pytest.mark.parametrize(
    ("kinds", "text"),
    [
        (
            {"bias": {}},
            "there is no kind of parameter 'bias': the kinds are norm_bias, whitening_bias, head, filters, rest",
        ),
        ({"filters": {}}, "the network has no parameters of the kind filters: leave its group out"),
        ({"whitening_bias": {}}, "the network has no parameters of the kind whitening_bias: leave its group out"),
        ({"head": {"rate": 0.0}}, "groups.kinds.head.rate is a factor of the learning rate, over 0, but got 0.0"),
        ({"head": {"rate": math.inf}}, "groups.kinds.head.rate is a factor of the learning rate, over 0, but got inf"),
        (
            {"head": {"decay": -1.0}},
            "groups.kinds.head.decay is a factor of the weight decay, at least 0, but got -1.0",
        ),
        ({"head": {"examples": 0}}, "groups.kinds.head.examples must be a positive integer, but got 0"),
        ({"head": {"fade": True}}, "groups.kinds.head.fade needs head.examples, over which its rate falls"),
    ],
)
def test_refuses(kinds, text):
    with pytest.raises(ConfigError) as error:
        groups_of(mlp(4, [5], 3), kinds)
    assert str(error.value) == text


def test_refuses_a_negative_weight_decay():
    with pytest.raises(ConfigError, match="weight decay must be at least 0, but got -1"):
        groups_of(mlp(4, [5], 3), {}, weight_decay=-1)


def test_an_option_that_the_optimizer_does_not_know_is_refused():
    """Torch keeps it in the group and never reads it."""
    groups = partial(parameter_groups, weight_decay=0.0, batch_size=8, kinds={"head": {"rates": 64.0}})
    module = Classifier(
        mlp(4, [8], 2), nn.CrossEntropyLoss(), partial(torch.optim.SGD, momentum=0.5), 0.1, groups=groups
    )
    with pytest.raises(ConfigError, match="SGD knows no option 'rates' of a group of parameters"):
        module.configure_optimizers()
    known = {"head": {"momentum": 0.9, "examples": 64, "fade": True}}
    module.make_groups = partial(parameter_groups, weight_decay=0.0, batch_size=8, kinds=known)
    assert module.configure_optimizers()["optimizer"].param_groups[0]["momentum"] == 0.9
