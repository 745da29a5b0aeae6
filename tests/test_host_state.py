"""What a step may change on the host is seen in modules and in the optimizer's state, wherever it is."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from bstune.trial.fast.host_state import first_change, holds_the_same, host_random, host_state

NAN = float("nan")
TENSOR = torch.zeros(2)


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        ([1, "a"], [1, "a"], True),
        # Equal, and two objects.
        ([10**20], [10**20], True),
        ([1], [1.0], False),
        ([1], [True], False),
        ([1], [1, 2], False),
        ([None], None, False),
        # None stands for what cannot be told.
        (None, None, False),
        ([TENSOR], [TENSOR], True),
        # Equal values at another place: a graph would go on reading the first.
        ([TENSOR], [TENSOR.clone()], False),
        ([NAN], [NAN], True),
        # NaN equals nothing but the same object.
        ([NAN], [float("nan")], False),
    ],
)
def test_objects_are_the_same_and_numbers_and_texts_are_equal(before, after, same):
    assert holds_the_same(before, after) == same


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.calls = 0
        self.losses = []
        self.by_name = {"loss": 1.0}


def replace_mean(module, optimizer):
    module.inner.mean = torch.zeros(())


def count_on_the_host(module, optimizer):
    optimizer.state[module.inner.weight]["step"] = 2


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda module, optimizer: None, None),
        # A tensor's values are the device's.
        (lambda module, optimizer: module.inner.weight.data.add_(1.0), None),
        (lambda module, optimizer: setattr(module, "calls", 1), "calls"),
        (lambda module, optimizer: module.losses.append(1.0), "losses"),
        (lambda module, optimizer: module.by_name.update(loss=2.0), "by_name"),
        (replace_mean, "inner.mean"),
        (count_on_the_host, "step of the optimizer's parameter 0"),
    ],
)
def test_the_first_change_is_named(change, name):
    module = Counting()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer.state[module.inner.weight]["step"] = 1
    before = host_state(module, optimizer)
    change(module, optimizer)
    assert first_change(before, host_state(module, optimizer)) == name


@pytest.mark.parametrize(
    ("draw", "device", "seen"),
    [
        (random.random, "cpu", True),
        (np.random.rand, "cpu", True),
        (lambda: torch.rand(1), "cuda", True),
        # A step on a CPU draws them as one on a device draws the device's.
        (lambda: torch.rand(1), "cpu", False),
    ],
)
def test_random_numbers_of_the_host_are_seen(draw, device, seen):
    before = host_random(torch.device(device))
    draw()
    assert holds_the_same(before, host_random(torch.device(device))) != seen
