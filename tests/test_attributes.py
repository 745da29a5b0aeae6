"""Fingerprints tell values apart by what is in them, within bounds, and read any object without a fault."""

import functools
import random
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from learners import learner, train
from lightning.pytorch import Callback
from toolbox import make_protocol, make_spec
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR
from torchmetrics import MaxMetric

from bstune.trial.checks.attributes import attributes_of, fingerprint
from bstune.workloads.classifier import Classifier


def torch_generator(draws):
    generator = torch.Generator().manual_seed(0)
    torch.rand(draws, generator=generator)
    return generator


def numpy_generator(draws):
    generator = np.random.default_rng(0)
    generator.random(draws)
    return generator


def python_generator(draws):
    generator = random.Random(0)
    for _ in range(draws):
        generator.random()
    return generator


def schedule(steps):
    optimizer = torch.optim.SGD([torch.zeros(())], lr=0.1)
    made = ExponentialLR(optimizer, 0.9)
    for _ in range(steps):
        optimizer.step()
        made.step()
    return made


def layer(weight):
    made = nn.Linear(1, 1)
    nn.init.constant_(made.weight, weight)
    nn.init.constant_(made.bias, 0.0)
    return made


def knot(value):
    made = SimpleNamespace(value=value)
    made.itself = made
    return made


def unlike_last(size):
    tensor = torch.zeros(size)
    tensor[-1] = 1.0
    return tensor


def function():
    """It counts as nothing."""


@pytest.mark.parametrize(
    ("make", "other"),
    [
        (lambda: 1, lambda: 2),
        # A type is part of a value.
        (lambda: 1, lambda: 1.0),
        (lambda: "warm", lambda: "main"),
        # NaN is the same as NaN here.
        (lambda: float("nan"), lambda: 0.0),
        (lambda: torch.tensor([1.0, float("nan")]), lambda: torch.tensor([1.0, 2.0])),
        (lambda: torch.zeros(2, 3), lambda: torch.zeros(3, 2)),
        # numpy has no bfloat16.
        (lambda: torch.zeros(2, dtype=torch.bfloat16), lambda: torch.ones(2, dtype=torch.bfloat16)),
        (lambda: torch.tensor(True), lambda: torch.tensor(False)),
        # The last of a thousand numbers counts.
        (lambda: torch.zeros(1000), lambda: unlike_last(1000)),
        (lambda: np.zeros(3), lambda: np.ones(3)),
        # Generators by their states, as training draws from them.
        (lambda: torch_generator(3), lambda: torch_generator(4)),
        (lambda: numpy_generator(3), lambda: numpy_generator(4)),
        (lambda: python_generator(3), lambda: python_generator(4)),
        (lambda: schedule(3), lambda: schedule(4)),
        (lambda: layer(1.0), lambda: layer(2.0)),
        (lambda: {"a": [1, {2}]}, lambda: {"a": [1, {3}]}),
        (lambda: {"a": 1}, lambda: {"b": 1}),
        (lambda: deque([1, 2]), lambda: deque([1])),
        (lambda: functools.partial(max, 1), lambda: functools.partial(max, 2)),
        # It holds itself.
        (lambda: knot(1), lambda: knot(2)),
        (lambda: [layer(1.0), 5], lambda: [layer(1.0), 6]),
    ],
)
def test_equal_values_share_a_fingerprint_and_others_do_not(make, other):
    assert fingerprint(make()) == fingerprint(make())
    assert fingerprint(make()) != fingerprint(other())


class Unreadable(dict):
    def items(self):
        raise OSError("gone")


@pytest.mark.parametrize(
    "value",
    [
        function,
        torch,
        Unreadable(a=1),
        # A tensor without values, and an array of references.
        torch.zeros(3, device="meta"),
        object(),
        np.array([object()]),
    ],
)
def test_what_cannot_be_read_counts_as_nothing(value):
    assert fingerprint(value) == fingerprint(value)


def test_a_value_is_read_in_parts():
    """The last of a million numbers is past what is looked at, and so is what lies deep."""
    assert fingerprint(list(range(10**6))) == fingerprint([*range(10**6 - 1), 7])
    deep = 1
    other = 2
    for _ in range(10):
        deep = [deep]
        other = [other]
    assert fingerprint(deep) == fingerprint(other)


class Keeps(Classifier):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.steps = 3
        self.best = MaxMetric()
        self.model[1].noise = torch.Generator()
        self.register_buffer("held", torch.zeros(()))
        self.register_buffer("plain", torch.zeros(()), persistent=False)


class Looks(Callback):
    looks = 5

    def on_train_start(self, trainer, pl_module):
        trainer.optimizers[0].calls = 7
        self.found = attributes_of(trainer, pl_module)


def test_what_a_checkpoint_holds_is_no_plain_attribute():
    looks = Looks()
    looks.count = 2
    train(
        make_spec(8), make_protocol(2), lambda spec: learner(spec, Keeps, callbacks=[lambda: looks])
    )
    names = ("steps", "best", "model.1.noise", "held", "plain", "Looks.count", "SGD.calls")
    kinds = {name: looks.found[name].kind for name in names if name in looks.found}
    assert kinds == {
        "steps": "int",
        "model.1.noise": "Generator",
        "plain": "Tensor",
        "Looks.count": "int",
        "SGD.calls": "int",
    }
    ranks = [looks.found[name].rank for name in ("model.1.noise", "steps", "plain")]
    # A generator is the likeliest to matter, then numbers, then tensors.
    assert ranks == sorted(ranks)
    assert not [name for name in looks.found if "weight" in name or "trainer" in name]
