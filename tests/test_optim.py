import math
import re
from functools import partial

import numpy as np
import pytest
import torch
from toolbox import column
from torch import nn

from bstune.core.errors import ConfigError
from bstune.workloads.classifier import Classifier
from bstune.workloads.layers import BatchNorm, Whitening
from bstune.workloads.models import mlp
from bstune.workloads.optim import (
    KINDS_OF_PARAMETERS,
    Muon,
    muon_and_adam,
    orthogonalised,
    parameter_groups,
)

SETTINGS = {"momentum": 0.9, "nesterov": True, "steps": 5, "normalise_weights": False}
ADAM = {
    "adam_matrices": [-1],
    "adam_rate": 0.1,
    "betas": [0.9, 0.99],
    "eps": 1e-8,
    "weight_decay": 0.1,
}
# Wide, tall, square, a single row, and a shape twice.
MATRICES = [(8, 20), (20, 8), (6, 6), (1, 9), (8, 20)]
FILTERS = [(8, 4, 3, 3), (8, 4, 3, 3), (16, 8, 3, 3), (40, 2, 2, 2)]


def random_parameters(shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def set_gradients(parameters, step):
    generator = torch.Generator().manual_seed(1000 + step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)


# Muon


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_matrices_go_as_with_torchs_muon(nesterov, weight_decay):
    """Torch's iterates in bfloat16 on every device, and scales the step by sqrt(max(1, rows/columns))."""
    ours = random_parameters(MATRICES)
    theirs = random_parameters(MATRICES)
    settings = SETTINGS | {"nesterov": nesterov, "weight_decay": weight_decay}
    mine = Muon([{"params": ours, "orthogonalise": True}], lr=0.05, **settings)
    groups = []
    for matrix in theirs:
        # torch's Muon scales no rate by a matrix's shape.
        lr = 0.05 / math.sqrt(max(1.0, matrix.shape[0] / matrix.shape[1]))
        groups.append({"params": [matrix], "lr": lr, "weight_decay": 0.0})
    reference = torch.optim.Muon(groups, momentum=0.9, nesterov=nesterov)
    for step in range(6):
        with torch.no_grad():
            # The decay goes by the group's rate, which is another here.
            for parameter in theirs:
                parameter.mul_(1 - 0.05 * weight_decay)
        for optimizer, parameters in ((mine, ours), (reference, theirs)):
            set_gradients(parameters, step)
            optimizer.step()
    for a, b, start in zip(ours, theirs, random_parameters(MATRICES), strict=True):
        # bfloat16's three digits, over six steps.
        assert (a - b).norm() < 0.02 * (b - start).norm()


@pytest.mark.parametrize("steps", [1, 3, 5])
@pytest.mark.parametrize("shape", [(3, 10, 17), (3, 17, 10)])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_the_iteration_is_its_polynomial_on_each_singular_value(steps, shape, scale):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    for matrix, result in zip(
        matrices.double(), orthogonalised(scale * matrices, steps).double(), strict=True
    ):
        left, values, right = torch.linalg.svd(matrix / matrix.norm(), full_matrices=False)
        for _ in range(steps):
            # The quintic of Muon's source.
            values = 3.4445 * values - 4.775 * values**3 + 2.0315 * values**5
        torch.testing.assert_close(result, left @ values.diag() @ right, rtol=0, atol=1e-4)
        # Five steps bring all singular values near 1, and none exactly there.
        assert steps < 5 or 0.65 < values.min() <= values.max() < 1.25


@pytest.mark.parametrize("adam_matrices", [[-1], [0, -1]])
def test_muon_leaves_vectors_and_the_matrices_that_are_named_to_adamw(adam_matrices):
    """Those go bit for bit as under torch's AdamW, the others as under Muon by itself."""
    shapes = [(8, 20), (8,), (6, 8), (6,), (4, 6)]
    ours = random_parameters(shapes)
    theirs = random_parameters(shapes)
    options = {"momentum": 0.9, "nesterov": True, "steps": 5}
    mine = muon_and_adam(ours, 0.02, **ADAM | {"adam_matrices": adam_matrices}, **options)
    left = {1, 3} | {(0, 2, 4)[place] for place in adam_matrices}
    # Vectors, and the matrices whose places are named.
    for_adam = [theirs[i] for i in sorted(left)]
    adam = torch.optim.AdamW(for_adam, lr=0.02 * 0.1, betas=(0.9, 0.99), weight_decay=0.1)
    own = [theirs[i] for i in range(5) if i not in left]
    muon = Muon(own, 0.02, orthogonalise=True, normalise_weights=False, weight_decay=0.1, **options)
    for step in range(4):
        for parameters, optimizers in ((ours, [mine]), (theirs, [adam, muon])):
            set_gradients(parameters, step)
            for optimizer in optimizers:
                optimizer.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"adam_matrices": [2]}, "adam_matrices names the place 2, but the network has 1 matrices"),
        (
            {"adam_rate": 0.0},
            "adam_rate and eps must be over 0 and betas lie in [0, 1), but got adam_rate=0.0",
        ),
        ({"betas": [0.9, 1.0]}, "betas=[0.9, 1.0]"),
        ({}, "muon has nothing to orthogonalise"),
    ],
)
def test_muon_with_adamw_refuses(changes, line):
    with pytest.raises(ConfigError, match=re.escape(line)):
        muon_and_adam(
            random_parameters([(3, 3), (3,)]),
            0.1,
            **ADAM | changes,
            momentum=0.9,
            nesterov=True,
            steps=5,
        )


def test_weights_are_normalised_before_the_step_as_in_the_source():
    """The order of airbench94_muon.py, written out, one filter bank at a time."""
    ours = random_parameters(FILTERS)
    theirs = [parameter.detach().clone() for parameter in ours]
    buffers = [torch.zeros_like(weight) for weight in theirs]
    optimizer = Muon(
        ours,
        lr=0.24,
        orthogonalise=True,
        momentum=0.6,
        nesterov=True,
        steps=3,
        normalise_weights=True,
    )
    for step in range(4):
        set_gradients(ours, step)
        optimizer.step()
        for weight, buffer, parameter in zip(theirs, buffers, ours, strict=True):
            buffer.mul_(0.6).add_(parameter.grad)
            update = parameter.grad + 0.6 * buffer
            # Normalised, then stepped: the other order would change both.
            weight.mul_(len(weight) ** 0.5 / weight.norm())
            weight.sub_(
                orthogonalised(update.reshape(1, len(update), -1), 3).view(weight.shape), alpha=0.24
            )
    for parameter, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.85, False), (0.85, True)])
@pytest.mark.parametrize("weight_decay", [0.0, 5e-4])
def test_other_groups_are_torchs_sgd_bit_for_bit(momentum, nesterov, weight_decay):
    shapes = [(7,), (3, 5), (2, 3, 3, 3)]
    ours = random_parameters(shapes)
    theirs = random_parameters(shapes)
    filters = random_parameters([(4, 3)], 5)
    plain = {"lr": 0.3, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
    groups = [{"params": ours, **plain}, {"params": filters, "orthogonalise": True}]
    mine = Muon(groups, lr=0.1, **SETTINGS)
    reference = torch.optim.SGD(theirs, **plain)
    for step in range(7):
        for parameters in (ours, theirs, filters):
            set_gradients(parameters, step)
        # A parameter without a gradient is left alone.
        if step == 3:
            ours[0].grad = theirs[0].grad = None
        mine.step()
        # Equal after every step, not only at the end.
        reference.step()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_zeros_stay_finite_and_nothing_waits_for_the_device(device):
    """Tensors of the device meta have no values: to read one on the host is an error there."""
    parameters = [nn.Parameter(torch.zeros(shape, device=device)) for shape in FILTERS]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    Muon(parameters, lr=0.1, orthogonalise=True, **SETTINGS | {"normalise_weights": True}).step()
    if device != "meta":
        for parameter in parameters:
            assert not parameter.any()


# Groups of parameters


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
    """The names of each group's parameters."""
    name_of = {id(parameter): name for name, parameter in module.named_parameters()}
    named = []
    for group in groups:
        named.append(sorted(name_of[id(parameter)] for parameter in group["params"]))
    return named


def groups_of(module, kinds, lr=0.5, weight_decay=0.01, batch_size=100):
    return parameter_groups(module, lr, weight_decay, batch_size, kinds)


@pytest.mark.parametrize(
    "kinds", [KINDS_OF_PARAMETERS, KINDS_OF_PARAMETERS[:4], (), ("filters", "head"), ("rest",)]
)
@pytest.mark.parametrize("scale", [None, 0.25])
def test_each_trained_parameter_is_in_the_group_of_its_kind_or_in_the_rest(kinds, scale):
    module = network(scale)
    # Frozen weights belong to no group.
    module[4].weight.requires_grad = False
    members = {
        "norm_bias": ["2.bias", "5.bias"],
        "whitening_bias": ["0.bias"],
        "head": ["6.bias", "6.weight"],
        "filters": ["1.weight"],
        "rest": ["1.bias", *(["2.weight"] if scale is None else []), "4.bias", "5.weight"],
    }
    named = [kind for kind in kinds if kind != "rest"]
    rest = []
    for kind in KINDS_OF_PARAMETERS:
        if kind not in named:
            rest += members[kind]
    groups = groups_of(module, {kind: {} for kind in kinds})
    assert names(module, groups) == [*(members[kind] for kind in named), sorted(rest)]


def test_a_shared_parameter_is_in_one_group():
    shared = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    shared[1].weight = shared[0].weight
    assert names(shared, groups_of(shared, {"head": {"rate": 3.0}})) == [
        ["0.weight", "1.bias"],
        ["0.bias"],
    ]


def test_rates_are_factors_and_the_decay_a_step_stays_and_examples_become_steps():
    kinds = {
        "norm_bias": {"rate": 64.0},
        "head": {"rate": 0.5, "decay": 3.0},
        "filters": {"decay": 0.0},
    }
    groups = groups_of(network(), kinds, lr=0.4, weight_decay=5e-4)
    # 0.4 x 64, 0.4 x 0.5, and the rate itself.
    assert column(groups, "lr") == pytest.approx([25.6, 0.2, 0.4, 0.4])
    assert column(groups, "weight_decay") == pytest.approx([5e-4 / 64, 3e-3, 0.0, 5e-4])
    # Rate times decay is what a step takes off: only decay's own factor changes it.
    shrinks = np.multiply(column(groups, "lr"), column(groups, "weight_decay"))
    assert shrinks == pytest.approx([2e-4, 6e-4, 0.0, 2e-4])
    # Rounded up to whole steps of 1,024 examples.
    for examples, steps in ((147_456, 144), (1, 1), (1024, 1), (1025, 2)):
        kinds = {"whitening_bias": {"examples": examples}, "norm_bias": {}}
        first, *others = groups_of(network(), kinds, batch_size=1024)
        assert (first["steps"], first["fade"]) == (steps, False)
        for group in others:
            assert "steps" not in group


def test_a_classifier_trains_its_groups():
    kinds = {"head": {"rate": 3.0, "examples": 200, "momentum": 0.9}}
    groups = partial(parameter_groups, weight_decay=0.0, batch_size=100, kinds=kinds)
    module = Classifier(
        mlp(4, [5], 3), nn.CrossEntropyLoss(), torch.optim.SGD, lr=0.5, groups=groups
    )
    configured = module.configure_optimizers()
    optimizer = configured["optimizer"]
    schedule = configured["lr_scheduler"]["scheduler"]
    assert column(optimizer.param_groups, "lr") == [1.5, 0.5]
    assert column(optimizer.param_groups, "momentum") == [0.9, 0]
    head = module.model[-1].weight
    other = next(module.model.parameters())
    # 200 examples are two steps.
    for head_moves in (True, True, False, False):
        before = head.detach().clone(), other.detach().clone()
        set_gradients(module.parameters(), 0)
        optimizer.step()
        schedule.step()
        assert torch.equal(head, before[0]) != head_moves
        assert not torch.equal(other, before[1])


# Bad input


def muon(shape=(3, 4), **changes):
    return lambda: Muon(
        [nn.Parameter(torch.zeros(shape))],
        **{"lr": 0.1, "orthogonalise": True, **SETTINGS, **changes},
    )


def grouped(weight_decay=0.01, **kinds):
    return lambda: groups_of(mlp(4, [5], 3), kinds, weight_decay=weight_decay)


def unread():
    """Torch keeps an option that it does not know in the group, and never reads it."""
    groups = partial(
        parameter_groups, weight_decay=0.0, batch_size=8, kinds={"head": {"rates": 64.0}}
    )
    Classifier(
        mlp(4, [8], 2), nn.CrossEntropyLoss(), torch.optim.SGD, 0.1, groups=groups
    ).configure_optimizers()


RATE = "groups.kinds.head.rate is a factor of the learning rate, over 0, but got"


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            muon(orthogonalise=False),
            "muon has nothing to orthogonalise: give a group of filters or matrices",
        ),
        (
            muon((3,)),
            (
                "but a group with orthogonalise: true holds a parameter of the shape (3,): leave it "
                "to a group"
            ),
        ),
        (muon(steps=0), "the steps of muon's iteration must be a positive integer, but got 0"),
        (muon(momentum=1.0), "momentum must lie in [0, 1), but got 1.0"),
        (muon(momentum=0.0), "nesterov=true needs a momentum over 0"),
        (muon(lr=-0.1), "a learning rate must be at least 0, but got -0.1"),
        (unread, "SGD knows no option 'rates' of a group of parameters"),
        (grouped(-1), "weight decay must be at least 0, but got -1"),
        (
            grouped(b={}),
            (
                "no kind of parameter 'b': the kinds are norm_bias, whitening_bias, head, filters, "
                "rest"
            ),
        ),
        (
            grouped(filters={}),
            "the network has no parameters of the kind filters: leave its group out",
        ),
        (grouped(head={"rate": 0.0}), f"{RATE} 0.0"),
        (grouped(head={"rate": math.inf}), f"{RATE} inf"),
        (
            grouped(head={"decay": -1.0}),
            "head.decay is a factor of the weight decay, at least 0, but got -1.0",
        ),
        (
            grouped(head={"examples": 0}),
            "groups.kinds.head.examples must be a positive integer, but got 0",
        ),
        (
            grouped(head={"fade": True}),
            "groups.kinds.head.fade needs head.examples, over which its rate falls",
        ),
    ],
)
def test_refuses(call, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        call()
