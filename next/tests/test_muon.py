"""Muon: matrices as torch's Muon, the other weights as AdamW, by closed forms and references."""

import copy

import pytest
import torch
from torch import nn

from bstune.workloads.muon import Muon

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch is older than 2.9")
SETTINGS = {"lr": 0.02, "weight_decay": 0.1}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 6, 3), nn.Flatten(), nn.Linear(54, 5, bias=False))


def take_steps(model, optimizers, count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        inputs = torch.randn(4, 2, 5, 5, generator=generator)
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(inputs).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_matrices_and_other_weights_move_as_torchs_optimizers_move_them(memory_format):
    model = network().to(memory_format=memory_format)
    alone = copy.deepcopy(model)
    filters, biases, matrix = alone.parameters()
    # torch's Muon of the filters as a matrix, whose pixels are the filters'.
    flat = nn.Parameter(filters.detach().flatten(1).clone())
    alone[0].weight = None
    alone[0].forward = lambda x: nn.functional.conv2d(x, flat.view(6, 2, 3, 3), biases)
    take_steps(model, [Muon(model.parameters(), momentum=0.9, **SETTINGS)], 5)
    adamw = torch.optim.AdamW([biases], **SETTINGS)
    muon = torch.optim.Muon(
        [flat, matrix], momentum=0.9, adjust_lr_fn="match_rms_adamw", **SETTINGS
    )
    take_steps(alone, [adamw, muon], 5)
    got = [one.detach().flatten().numpy() for one in model.parameters()]
    for one, expected in zip(got, [flat, biases, matrix], strict=True):
        assert one == pytest.approx(expected.detach().flatten().numpy(), rel=1e-3, abs=1e-4)


def test_it_goes_on_from_its_state():
    model = network()
    optimizer = Muon(model.parameters(), **SETTINGS)
    take_steps(model, [optimizer], 3)
    resumed = copy.deepcopy(model)
    other = Muon(resumed.parameters(), lr=1.0)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, owner in ((model, optimizer), (resumed, other)):
        take_steps(one, [owner], 3, seed=2)
    pairs = zip(model.parameters(), resumed.parameters(), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)
