import copy
import math

import pytest
import torch
from torch import nn

from bstune.core.errors import ConfigError
from bstune.workloads.optim import Muon, orthogonalised

SETTINGS = {"momentum": 0.9, "nesterov": True, "steps": 5, "normalise_weights": False}


def random_parameters(shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def set_gradients(parameters, step):
    generator = torch.Generator().manual_seed(1000 + step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)


MATRICES = [(8, 20), (20, 8), (6, 6), (1, 9), (8, 20)]
FILTERS = [(8, 4, 3, 3), (8, 4, 3, 3), (16, 8, 3, 3), (40, 2, 2, 2)]


# Against torch's own


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_matrices_go_as_with_torchs_muon(nesterov, weight_decay):
    """Torch's iterates in bfloat16 on every device, and scales the step by sqrt(max(1, rows/columns))."""
    ours, theirs = random_parameters(MATRICES), random_parameters(MATRICES)
    settings = SETTINGS | {"nesterov": nesterov, "weight_decay": weight_decay}
    mine = Muon([{"params": ours, "orthogonalise": True}], lr=0.05, **settings)
    reference = torch.optim.Muon(
        [
            {"params": [p], "lr": 0.05 / math.sqrt(max(1.0, p.shape[0] / p.shape[1])), "weight_decay": 0.0}
            for p in theirs
        ],
        momentum=0.9,
        nesterov=nesterov,
    )
    for step in range(6):
        for parameters in (ours, theirs):
            set_gradients(parameters, step)
        with torch.no_grad():
            for parameter in theirs:  # its decay is by the group's rate, which is another here
                parameter.mul_(1 - 0.05 * weight_decay)
        mine.step()
        reference.step()
    for a, b, start in zip(ours, theirs, random_parameters(MATRICES), strict=True):
        assert (a - b).norm() < 0.02 * (b - start).norm()


@pytest.mark.parametrize("shape", [(40, 24), (24, 40), (16, 8, 3, 3), (32, 2, 3, 3)])
def test_an_update_has_the_gradients_singular_vectors_and_values_near_one(shape):
    """By a direct singular value decomposition."""
    (parameter,) = random_parameters([shape])
    before = parameter.detach().clone()
    set_gradients([parameter], 0)
    Muon([parameter], lr=1.0, orthogonalise=True, **SETTINGS).step()
    update = (before - parameter.detach()).reshape(shape[0], -1).double()
    left, _, right = torch.linalg.svd(parameter.grad.reshape(shape[0], -1).double(), full_matrices=False)
    aligned = left.mT @ update @ right.mT
    values = aligned.diagonal()
    assert values.min() > 0.65
    assert values.max() < 1.25
    torch.testing.assert_close(aligned, aligned.diagonal().diag(), rtol=0, atol=1e-4)
    torch.testing.assert_close(left @ values.diag() @ right, update, rtol=0, atol=1e-4)  # and nothing beside them


@pytest.mark.parametrize("steps", [1, 3, 5])
def test_the_iteration_is_its_polynomial_on_each_singular_value(steps):
    matrices = torch.randn(3, 10, 17, generator=torch.Generator().manual_seed(2))
    result = orthogonalised(matrices, steps)
    for matrix, found in zip(matrices.double(), result.double(), strict=True):
        left, values, right = torch.linalg.svd(matrix / matrix.norm(), full_matrices=False)
        for _ in range(steps):
            values = 3.4445 * values - 4.775 * values**3 + 2.0315 * values**5
        torch.testing.assert_close(found, left @ values.diag() @ right, rtol=0, atol=1e-4)


def test_a_step_does_not_depend_on_the_gradients_scale():
    first, second = random_parameters(FILTERS), random_parameters(FILTERS)
    for parameters, scale in ((first, 1.0), (second, 1024.0)):
        optimizer = Muon(parameters, lr=0.2, orthogonalise=True, **SETTINGS)
        for step in range(3):
            set_gradients(parameters, step)
            for parameter in parameters:
                parameter.grad *= scale
            optimizer.step()
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_filters_together_are_filters_alone():
    """Those of one shape are orthogonalised in one product; each is still its own matrix."""
    together, alone = random_parameters(FILTERS), random_parameters(FILTERS)
    optimizers = [Muon(together, lr=0.2, orthogonalise=True, **SETTINGS)]
    optimizers += [Muon([parameter], lr=0.2, orthogonalise=True, **SETTINGS) for parameter in alone]
    for step in range(3):
        for parameters in (together, alone):
            set_gradients(parameters, step)
        for optimizer in optimizers:
            optimizer.step()
    for a, b in zip(together, alone, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_weights_are_normalised_before_the_step_as_in_the_source():
    """The order of airbench94_muon.py, written out; what the iteration does is for the tests above."""
    ours = random_parameters(FILTERS)
    theirs = [parameter.detach().clone() for parameter in ours]
    buffers = [torch.zeros_like(weight) for weight in theirs]
    optimizer = Muon(ours, lr=0.24, orthogonalise=True, momentum=0.6, nesterov=True, steps=3, normalise_weights=True)
    for step in range(4):
        set_gradients(ours, step)
        optimizer.step()
        for weight, buffer, parameter in zip(theirs, buffers, ours, strict=True):
            buffer.mul_(0.6).add_(parameter.grad)
            update = parameter.grad + 0.6 * buffer
            weight.mul_(len(weight) ** 0.5 / weight.norm())
            assert weight.norm().item() == pytest.approx(math.sqrt(len(weight)), rel=1e-5)
            weight.sub_(orthogonalised(update.reshape(1, len(update), -1), 3).view(weight.shape), alpha=0.24)
    for weight, parameter in zip(theirs, ours, strict=True):
        torch.testing.assert_close(parameter.detach(), weight, rtol=1e-5, atol=1e-5)


# What is not orthogonalised


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.85, False), (0.85, True)])
@pytest.mark.parametrize("weight_decay", [0.0, 5e-4])
def test_other_groups_are_torchs_sgd_bit_for_bit(momentum, nesterov, weight_decay):
    shapes = [(7,), (3, 5), (2, 3, 3, 3)]
    ours, theirs, filters = random_parameters(shapes), random_parameters(shapes), random_parameters([(4, 3)], 5)
    plain = {"lr": 0.3, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
    groups = [{"params": ours, **plain}, {"params": filters, "orthogonalise": True}]
    mine, reference = Muon(groups, lr=0.1, **SETTINGS), torch.optim.SGD(theirs, **plain)
    for step in range(7):
        for parameters in (ours, theirs, filters):
            set_gradients(parameters, step)
        if step == 3:  # one that has no gradient is left alone
            ours[0].grad = theirs[0].grad = None
        mine.step()
        reference.step()
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


# State, closures, what cannot be


def test_it_goes_on_from_its_state():
    whole = random_parameters([*FILTERS, (5,)])

    def groups(parameters):
        return [{"params": parameters[:-1], "orthogonalise": True}, {"params": parameters[-1:]}]

    optimizer = Muon(groups(whole), lr=0.1, **SETTINGS)
    for step in range(3):
        set_gradients(whole, step)
        optimizer.step()
    again = [nn.Parameter(parameter.detach().clone()) for parameter in whole]
    other = Muon(groups(again), lr=0.7, **SETTINGS)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for step in (3, 4):
        for parameters, stepped in ((whole, optimizer), (again, other)):
            set_gradients(parameters, step)
            stepped.step()
    assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))


def test_a_closure_is_called_with_gradients_on():
    (weight,) = random_parameters([(3, 4)])
    optimizer = Muon([weight], lr=0.1, orthogonalise=True, **SETTINGS)

    def closure():
        optimizer.zero_grad()
        loss = (weight**2).sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(5)]
    assert losses[-1] < losses[0]


def test_filters_and_gradients_of_zeros_stay_finite():
    parameter = nn.Parameter(torch.zeros(4, 2, 3, 3))
    parameter.grad = torch.zeros_like(parameter)
    Muon([parameter], lr=0.1, orthogonalise=True, **SETTINGS | {"normalise_weights": True}).step()
    assert torch.equal(parameter, torch.zeros_like(parameter))


def test_nothing_waits_for_the_device():
    """Tensors of the device meta have no values: whatever would read one on the host is an error there."""
    parameters = [nn.Parameter(torch.zeros(shape, device="meta")) for shape in FILTERS]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    Muon(parameters, lr=0.1, orthogonalise=True, **SETTINGS | {"normalise_weights": True}).step()


@pytest.mark.parametrize(
    ("shape", "changes", "text"),
    [
        ((3, 4), {"orthogonalise": False}, "muon has nothing to orthogonalise: give a group of filters or matrices"),
        ((3,), {}, "but a group with orthogonalise: true holds a parameter of the shape (3,): leave it to a group"),
        ((3, 4), {"steps": 0}, "the steps of muon's iteration must be a positive integer, but got 0"),
        ((3, 4), {"momentum": 1.0}, "momentum must lie in [0, 1), but got 1.0"),
        ((3, 4), {"momentum": 0.0}, "nesterov=true needs a momentum over 0"),
        ((3, 4), {"lr": -0.1}, "a learning rate must be at least 0, but got -0.1"),
    ],
)
def test_refuses(shape, changes, text):
    with pytest.raises(ConfigError) as error:
        Muon([nn.Parameter(torch.zeros(shape))], **{"lr": 0.1, "orthogonalise": True, **SETTINGS, **changes})
    assert text in str(error.value)
