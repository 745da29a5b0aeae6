"""Half-lives in examples: in closed form, by taking steps, on every shape of what configure_optimizers returns."""

import math
import re

import pytest
import torch
from builders import options_and_recipe
from toolbox import column, make_spec
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from bstune.core.errors import ConfigError
from bstune.core.scaling import beta2_of, effective_lr_of, shrinkage_of
from bstune.trial.batches.half_lives import effective_lr, follow_batch_size, optimizers_in
from bstune.trial.workload import build_module, build_workload
from bstune.workloads.optim import muon_and_adam

# Of a sweep: a change elsewhere seldom breaks it, and CI runs it.
pytestmark = pytest.mark.slow

SGD = torch.optim.SGD
ADAM = torch.optim.Adam
ADAMW = torch.optim.AdamW


def parameter(value=1.0):
    return nn.Parameter(torch.full((2, 2), value))


def test_closed_forms():
    for batch_size in (1, 64, 4096):
        assert beta2_of(batch_size, 1000) ** (1000 / batch_size) == pytest.approx(0.5)
        assert (1 - shrinkage_of(batch_size, 1000)) ** (1000 / batch_size) == pytest.approx(0.5)
    # No digits are lost.
    assert shrinkage_of(1, 1e12) == pytest.approx(math.log(2) * 1e-12, rel=1e-9)
    # This is the usual beta2.
    assert beta2_of(128, 88_657) == pytest.approx(0.999, abs=1e-6)
    assert effective_lr_of(0.1, 0.9) == pytest.approx(1.0)
    assert effective_lr_of(0.1, 0.9, dampening=0.9) == pytest.approx(0.1)
    assert effective_lr_of(0.1, 0.0) == 0.1


@pytest.mark.parametrize("batch_size", [16, 128])
@pytest.mark.parametrize(
    "make",
    [
        lambda own: ADAMW(own, lr=0.01),
        lambda own: SGD(own, lr=0.02),
        lambda own: SGD(own, lr=0.02, momentum=0.5),
        lambda own: muon_and_adam(
            [*own, parameter()], 0.02, adam_matrices=[-1], adam_rate=0.1, betas=(0.9, 0.99), eps=1e-8,
            weight_decay=0.1, momentum=0.9, nesterov=True, steps=5,
        ),
    ],
)  # fmt: skip
def test_a_weight_without_gradient_halves_in_as_many_examples(make, batch_size):
    """Under every optimizer whose weight decay has a half-life, whatever the batch size."""
    weight = parameter()
    optimizer = make([weight])
    follow_batch_size(optimizer, batch_size, None, 12_800.0)
    for _ in range(12_800 // batch_size):
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
    assert weight.mean().item() == pytest.approx(0.5, rel=0.02)


def test_beta2_follows_and_beta1_stays():
    optimizer = ADAM(
        [{"params": [parameter()]}, {"params": [parameter()], "betas": (0.8, 0.9)}], lr=0.1
    )
    follow_batch_size([optimizer, SGD([parameter()], lr=0.1)], 100, 1000.0, None)
    # 100 of 1,000 examples are a tenth of the half-life.
    assert column(optimizer.param_groups, "betas") == [(0.9, 2**-0.1), (0.8, 2**-0.1)]


def test_groups_keep_their_ratios_and_a_schedules_first_factor_is_left_out():
    groups = [
        {"params": [parameter()], "weight_decay": decay, "lr": lr}
        for decay, lr in ((0.1, 0.2), (0, 0.2), (0.1, 0.1))
    ]
    optimizer = ADAMW(groups, lr=0.1)
    LambdaLR(optimizer, lambda step: 0.01)
    follow_batch_size(optimizer, 64, None, 6400.0)
    # 64 of 6,400 examples are a hundredth of it.
    share = 1 - 2**-0.01
    # Rate times decay of the third group is half that of the first.
    assert column(optimizer.param_groups, "weight_decay") == pytest.approx(
        [share / 0.2, 0, share / 2 / 0.1]
    )
    none = SGD([parameter()], lr=0.5)
    follow_batch_size(none, 64, None, 6400.0)
    assert none.param_groups[0]["weight_decay"] == pytest.approx(share / 0.5)


def test_what_configure_optimizers_may_return():
    first = SGD([parameter()], lr=0.1)
    second = ADAM([parameter()], lr=0.1)
    schedule = LambdaLR(first, lambda step: 1.0)
    shapes = [
        first,
        [first],
        ([first], [schedule]),
        {"optimizer": first, "lr_scheduler": schedule},
        None,
    ]
    assert [list(optimizers_in(shape)) for shape in shapes] == [[first]] * 4 + [[]]
    assert list(optimizers_in(({"optimizer": first}, {"optimizer": second}))) == [first, second]


@pytest.mark.parametrize(
    ("optimizer", "half_lives", "line"),
    [
        (
            SGD([parameter()], lr=0.1),
            (1e3, None),
            "is of optimizers with betas, such as Adam, but the module's are SGD",
        ),
        (
            torch.optim.LBFGS([parameter()]),
            (None, 1e3),
            "with a weight_decay, but the module's are LBFGS: leave it out",
        ),
        (
            ADAM([parameter()], lr=0.1),
            (None, 1e3),
            "the weight decay of Adam goes through its averages of gradients",
        ),
        (None, (1e3, None), "but the module's are none"),
    ],
)
def test_where_it_cannot_it_says_so(optimizer, half_lives, line):
    with pytest.raises(ConfigError, match=re.escape(line)):
        follow_batch_size(optimizer, 64, *half_lives)


def test_the_effective_learning_rate():
    assert effective_lr([SGD([parameter()], lr=0.1, momentum=0.9)]) == pytest.approx(1.0)
    scheduled = SGD([parameter()], lr=0.1, momentum=0.9)
    LambdaLR(scheduled, lambda step: 0.0)
    assert effective_lr([scheduled]) == pytest.approx(1.0)
    rising = SGD([parameter()], lr=0.1, momentum=0.9)
    OneCycleLR(rising, 0.2, 10, cycle_momentum=False)
    # Its highest rate, 0.2, over 1 - 0.9.
    assert effective_lr([rising]) == pytest.approx(2.0)
    assert effective_lr([SGD([parameter()], lr=0.1), ADAM([parameter()], lr=0.1)]) is None
    with pytest.raises(ConfigError, match=r"the momentum of SGD must be less than 1, but got 1.5"):
        effective_lr([SGD([parameter()], lr=0.1, momentum=1.5)])


def test_a_trials_module_has_them_at_its_own_batch_size_and_value():
    tuned = "search.tune=[beta2_half_life]"
    workload = build_workload(
        *options_and_recipe(
            "workload=digits", "algorithm=adamw", "scaling.weight_decay_half_life=1e5", tuned
        )
    )
    for batch_size, half_life in ((10, 2e4), (200, 1e4)):
        module = workload.build_module(
            make_spec(batch_size, 0.5, hyperparameters={"beta2_half_life": half_life})
        )
        (group,) = module.configure_optimizers()["optimizer"].param_groups
        assert group["betas"][1] == beta2_of(batch_size, half_life)
        assert group["weight_decay"] == pytest.approx(shrinkage_of(batch_size, 1e5) / 0.5)
    without_betas = options_and_recipe("workload=digits", "scaling.beta2_half_life=1e4")
    with pytest.raises(ConfigError, match="is of optimizers with betas"):
        build_module(*without_betas, make_spec()).configure_optimizers()
