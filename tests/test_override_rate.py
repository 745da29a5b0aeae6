"""A learning rate that is set in optimizers of other rates: groups and schedules stay in proportion."""

import copy
from types import SimpleNamespace

import pytest
import torch
from toolbox import column
from torch import nn
from torch.optim import SGD, Adam, AdamW, lr_scheduler

from bstune.core.errors import ConfigError
from bstune.trial.own_project.override_rate import is_rate, override_rate, own_rate_of

OWN = 0.05
FACTOR = 3.7
STEPS = 40


class OwnSchedule(lr_scheduler.LRScheduler):
    """A warm-up to a highest rate and a fall to a lowest one, both its own numbers."""

    def __init__(self, optimizer, max_lr, min_lr):
        self.max_lr = max_lr
        self.min_lr = min_lr
        super().__init__(optimizer)

    def get_lr(self):
        share = min(1.0, self.last_epoch / 10)
        peak = self.min_lr + (self.max_lr - self.min_lr) * share
        return [peak for _ in self.base_lrs]


def warm_up_and_cosine(optimizer, rate):
    warm_up = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, 20, eta_min=rate / 50)
    return lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], [5])


def chained(optimizer, rate):
    constant = lr_scheduler.ConstantLR(optimizer, 0.5, total_iters=3)
    return lr_scheduler.ChainedScheduler([constant, lr_scheduler.ExponentialLR(optimizer, 0.9)])


SCHEDULES = {
    "none": lambda optimizer, rate: None,
    "lambda": lambda optimizer, rate: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "step": lambda optimizer, rate: lr_scheduler.StepLR(optimizer, 7),
    "one cycle": lambda optimizer, rate: lr_scheduler.OneCycleLR(
        optimizer, column(optimizer.param_groups, "lr"), STEPS
    ),
    "cyclic": lambda optimizer, rate: lr_scheduler.CyclicLR(
        optimizer, rate / 4, rate, 5, cycle_momentum=False
    ),
    "cosine": lambda optimizer, rate: lr_scheduler.CosineAnnealingLR(optimizer, 20, rate / 9),
    "restarts": lambda optimizer, rate: lr_scheduler.CosineAnnealingWarmRestarts(
        optimizer, 9, eta_min=rate / 9
    ),
    "polynomial": lambda optimizer, rate: lr_scheduler.PolynomialLR(optimizer, 30, 2.0),
    "warm-up": warm_up_and_cosine,
    "chained": chained,
    "of a project": lambda optimizer, rate: OwnSchedule(optimizer, rate, rate / 20),
}


def built(name, rate, groups=1):
    """An optimizer of groups whose rates halve from one to the next, and its schedule."""
    weights = [nn.Parameter(torch.ones(2)) for _ in range(groups)]
    parameters = [
        {"params": [weight], "lr": rate / 2**place} for place, weight in enumerate(weights)
    ]
    optimizer = SGD(parameters, lr=rate, momentum=0.9)
    return optimizer, SCHEDULES[name](optimizer, rate)


def rates_over(optimizer, schedule, steps=STEPS - 1):
    rates = []
    for _ in range(steps):
        rates.append(column(optimizer.param_groups, "lr"))
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return rates


def configured_of(optimizer, schedule):
    if schedule is None:
        return optimizer
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_keeps_its_shape(name, groups):
    # What it would be if all of its numbers were higher.
    expected = rates_over(*built(name, FACTOR * OWN, groups))
    optimizer, schedule = built(name, OWN, groups)
    own = own_rate_of(optimizer)
    override_rate(configured_of(optimizer, schedule), nn.Linear(1, 1), FACTOR * own)
    found = rates_over(optimizer, schedule)
    assert found == [pytest.approx(rates, rel=1e-9, abs=1e-12) for rates in expected]


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_a_checkpoint_holds_goes_on_at_the_rate_that_was_set(name):
    optimizer, schedule = built(name, OWN)
    own = own_rate_of(optimizer)
    override_rate(configured_of(optimizer, schedule), nn.Linear(1, 1), FACTOR * own)
    rates_over(optimizer, schedule, 9)
    saved = copy.deepcopy((optimizer.state_dict(), schedule and schedule.state_dict()))
    rest = rates_over(optimizer, schedule, 20)
    again, its_schedule = built(name, OWN)
    override_rate(configured_of(again, its_schedule), nn.Linear(1, 1), FACTOR * own)
    again.load_state_dict(saved[0])
    if its_schedule is not None:
        its_schedule.load_state_dict(saved[1])
    assert rates_over(again, its_schedule, 20) == rest


def test_a_schedule_by_a_metric_keeps_its_least_rate_in_proportion():
    optimizer, _ = built("none", OWN)
    schedule = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0, min_lr=OWN / 50)
    override_rate(([optimizer], [{"scheduler": schedule}]), nn.Linear(1, 1), FACTOR * OWN)
    for _ in range(5):
        schedule.step(1.0)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(FACTOR * OWN / 50)


def test_schedules_that_a_module_holds_follow():
    optimizer, schedule = built("lambda", OWN)
    module = nn.Linear(1, 1)
    module.schedules = {"main": [schedule]}
    override_rate(optimizer, module, FACTOR * OWN)
    assert schedule.base_lrs == [pytest.approx(FACTOR * OWN)]


def test_several_optimizers_keep_their_proportion_to_the_largest_rate():
    weight = nn.Parameter(torch.ones(1))
    one = Adam([weight], lr=0.001)
    other = AdamW([weight], lr=torch.tensor(0.004))
    override_rate([one, other], nn.Linear(1, 1), 0.4)
    # The smaller rate is a quarter of the larger one, before and after.
    assert one.param_groups[0]["lr"] == pytest.approx(0.1)
    assert one.defaults["lr"] == pytest.approx(0.1)
    assert isinstance(other.param_groups[0]["lr"], torch.Tensor)
    assert float(other.param_groups[0]["lr"]) == pytest.approx(0.4)


def test_at_a_modules_own_rate_nothing_is_touched():
    optimizer, schedule = built("warm-up", OWN)
    before = copy.deepcopy(optimizer.state_dict())
    override_rate(configured_of(optimizer, schedule), nn.Linear(1, 1), OWN)
    assert optimizer.state_dict() == before


@pytest.mark.parametrize(
    ("name", "rate"), [("none", OWN), ("one cycle", OWN), ("warm-up", OWN), ("cosine", OWN)]
)
def test_a_modules_own_rate_is_the_one_before_its_schedule(name, rate):
    optimizer, schedule = built(name, rate, groups=2)
    assert own_rate_of(configured_of(optimizer, schedule)) == pytest.approx(rate)


@pytest.mark.parametrize(
    "configured",
    [
        None,
        [],
        SGD([torch.ones(1, requires_grad=True)], lr=0.0),
        SimpleNamespace(),
    ],
)
def test_optimizers_without_a_rate_are_refused(configured):
    assert own_rate_of(configured) is None
    with pytest.raises(ConfigError, match=r"override_lr sets .* has a rate over 0"):
        override_rate(configured, nn.Linear(1, 1), 0.1)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("lr", True),
        ("base_lrs", True),
        ("_last_lr", True),
        ("eta_min", True),
        # Names of lightning-bolts' schedule and of torch's swa_utils.
        ("warmup_start_lr", True),
        ("swa_lr", True),
        # Shares and functions of a rate, not rates.
        ("lr_decay", False),
        ("lr_lambdas", False),
        ("lr_mult", False),
        ("last_epoch", False),
        # Rprop's factors.
        ("etas", False),
        ("max_momentum", False),
        ("warmup", False),
    ],
)
def test_names_of_rates(name, found):
    assert is_rate(name) is found
