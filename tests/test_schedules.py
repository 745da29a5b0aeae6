import copy
import math
import re
from functools import partial

import numpy as np
import pytest
import torch
from builders import options_and_recipe, options_of
from learners import factors
from toolbox import column, make_spec
from torch.optim import SGD
from torch.optim.lr_scheduler import OneCycleLR

from bstune.core.errors import ConfigError
from bstune.options import option_at
from bstune.trial.devices import distributed
from bstune.trial.workload import build_module
from bstune.workloads.averaging import RunningWeightAverage
from bstune.workloads.schedules import (
    constant,
    decay_then_constant,
    linear_decay,
    one_cycle,
    piecewise_linear,
    triangle,
)
from bstune.workloads.schedules import warmup_then_constant as warmup

LR = 0.4
TRIANGLE = {"knots": (0.0, 5 / 24, 1.0), "factors": (0.0, 1.0, 0.0)}


def optimizer():
    return SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)


def rates(build, steps):
    return [factor for (factor,) in factors(build(optimizer()), steps)]


CLOSED_FORMS = {
    "constant": (constant, [1.0] * 5),
    "no warm-up": (lambda own: warmup(own, 0, 32), [1.0] * 3),
    "a warm-up of one step": (lambda own: warmup(own, 1200, 5000), [1.0] * 3),
    # 33 examples are two steps of 32.
    "a warm-up that ends in a step": (lambda own: warmup(own, 33, 32), [0.5, 1.0, 1.0]),
    # 1,200 examples are 12 steps of 100.
    "warm-up": (lambda own: warmup(own, 1200, 100), [*(np.arange(1, 13) / 12), 1, 1, 1]),
    "warm-up, batch size 1": (
        lambda own: warmup(own, 99, 1),
        [*(np.arange(1, 100) / 99), 1, 1, 1],
    ),
    # A quarter of the 16 steps that 64 examples take at B = 4.
    "a decay": (
        lambda own: decay_then_constant(own, 9, 64, 4, 0.25, end=0.2),
        [1.0, 0.8, 0.6, 0.4, 0.2, 0.2],
    ),
    # Its 9 steps are more than the two that 64 examples take at B = 32.
    "a decay over its steps": (
        lambda own: decay_then_constant(own, 9, 64, 32, 1 / 3, end=0.1),
        [1.0, 0.7, 0.4, 0.1],
    ),
    "piecewise": (
        lambda own: piecewise_linear(own, 10, (0.3, 0.5), (0.25, 0.75)),
        [0.25] * 3 + [0.5] + [0.75] * 8,
    ),
    # A short cycle starts at its peak.
    "one-cycle, 1 step": (lambda own: one_cycle(own, 1, 0.3, start=0.5, end=0.1), [1.0, 0.1, 0.1]),
    "one-cycle, 2 steps": (lambda own: one_cycle(own, 2, 0.3, start=0.5, end=0.1), [1.0, 0.1, 0.1]),
    "one-cycle, 3 steps": (
        lambda own: one_cycle(own, 3, 0.3, start=0.5, end=0.1),
        [1.0, 0.55, 0.1, 0.1],
    ),
}


@pytest.mark.parametrize(("build", "expected"), CLOSED_FORMS.values(), ids=CLOSED_FORMS)
def test_rates_in_closed_form(build, expected):
    assert rates(build, len(expected)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("total", [1, 13, 24, 1300])
def test_straight_lines(total):
    """Page's triangle rises over 5 of 24 epochs and falls to 0; his last rung has a tenth for the last 2 of 13."""
    shares = np.arange(1, total + 3) / total
    used = rates(lambda own: piecewise_linear(own, total, **TRIANGLE), total + 2)
    triangles = np.minimum(shares * 24 / 5, (1 - shares) * 24 / 19)
    assert used == pytest.approx(np.maximum(0, triangles), abs=1e-12)
    assert used == rates(
        lambda own: triangle(own, total, peak=5 / 24, start=0.0, end=0.0, floor=0.0), total + 2
    )
    used = rates(
        lambda own: triangle(own, total, peak=0.2, start=0.0, end=0.1, floor=2 / 13), total + 2
    )
    falling = np.maximum(0.1, 1 - 0.9 * (shares - 0.2) / (11 / 13 - 0.2))
    expected = np.where(shares <= 0.2, shares / 0.2, falling)
    assert used == pytest.approx(expected, abs=1e-9)
    for end in (0.0, 0.25):
        expected = [*(1 - (1 - end) * np.arange(total) / total), end, end, end]
        used = rates(lambda own, end=end: linear_decay(own, total, end), total + 3)
        assert used == pytest.approx(expected, abs=1e-12)


def torchs_one_cycle(total, peak):
    """Torch's factors; it takes the rate that it starts from, 1/25 of the largest, for the optimizer's own."""
    build = partial(OneCycleLR, max_lr=LR, total_steps=total, pct_start=peak, cycle_momentum=False)
    return [factor / 25 for factor in rates(build, total)]


@pytest.mark.parametrize(("total", "peak"), [(10, 0.5), (50, 0.3), (997, 0.15)])
def test_one_cycle_is_torchs_without_its_momentum(total, peak):
    used = rates(lambda own: one_cycle(own, total, peak, start=1 / 25, end=1 / 25e4), total)
    assert used == pytest.approx(torchs_one_cycle(total, peak), rel=1e-9)


SCHEDULES = {
    "constant": constant,
    "warm-up": lambda own: warmup(own, 40, 10),
    "linear": lambda own: linear_decay(own, 10, 0.0),
    "one-cycle": lambda own: one_cycle(own, 10, 0.3, 0.1, 0.0),
    "triangle": lambda own: triangle(own, 10, 0.3, 0.1, 0.0, 0.0),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_each_group_keeps_its_own_rate_and_its_own_end(name):
    groups = [
        {"lr": LR},
        {"lr": 2 * LR},
        {"lr": 4 * LR, "steps": 4},
        {"lr": 8 * LR, "steps": 4, "fade": True},
    ]
    parameters = []
    for group in groups:
        parameters.append({"params": [torch.nn.Parameter(torch.zeros(1))], **group})
    own = SGD(parameters, lr=1.0)
    schedule = SCHEDULES[name](own)
    assert schedule.base_lrs == column(groups, "lr")
    for t, (factor, used) in enumerate(
        zip(rates(SCHEDULES[name], 8), factors(schedule, 8), strict=True)
    ):
        # The third ends after four steps, and the fourth fades until then.
        assert used == pytest.approx([factor, factor, factor * (t < 4), max(0, 1 - t / 4)])


def trained(freezes, steps=7, resumed_at=None):
    """The weights of two layers, the first of which has a rate for three steps, and whether it is frozen."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    first = list(layers[0].parameters())
    last = list(layers[2].parameters())
    own = SGD(
        [{"params": last}, {"params": first, "steps": 3}], lr=0.1, momentum=0.9, weight_decay=0.1
    )
    schedule = constant(own)
    for step in range(steps):
        if step == resumed_at:
            states = copy.deepcopy((own.state_dict(), schedule.state_dict()))
            for parameter in first:
                parameter.requires_grad_(True)
            schedule = constant(own)
            own.load_state_dict(states[0])
            schedule.load_state_dict(states[1])
        for parameter in first:
            assert parameter.requires_grad == (step < 3 or not freezes)
        own.zero_grad()
        layers(torch.randn(5, 3)).square().mean().backward()
        own.step()
        schedule.step()
    for parameter in first:
        assert (parameter.grad is None) == freezes
    return [parameter.detach() for parameter in layers.parameters()]


@pytest.mark.parametrize("resumed_at", [None, 2, 5])
def test_a_group_whose_steps_are_over_is_frozen_which_changes_no_weight(resumed_at, monkeypatch):
    frozen = trained(freezes=True, resumed_at=resumed_at)
    # DDP needs each gradient.
    monkeypatch.setattr(distributed, "place", lambda: "a process of several")
    assert all(map(torch.equal, frozen, trained(freezes=False)))


FACTOR = "is a factor of the learning rate, at least 0, but got"
KNOTS = "knots must be two or more increasing shares of the steps, but got"
HORIZON = "a schedule with a horizon needs at least one step, but got 0"


@pytest.mark.parametrize(
    ("build", "arguments", "text"),
    [
        (warmup, (-1, 32), "warm-up is a number of examples, at least 0, but got -1"),
        (linear_decay, (0, 0.0), HORIZON),
        (one_cycle, (0, 0.3, 0.1, 0), HORIZON),
        (triangle, (0, 0.3, 0, 0, 0), HORIZON),
        (piecewise_linear, (10, (0,), (1,)), f"{KNOTS} [0]"),
        (piecewise_linear, (10, (0, 1, 1), (0, 1, 0)), f"{KNOTS} [0, 1, 1]"),
        (piecewise_linear, (10, (0, math.nan), (0, 1)), f"{KNOTS} [0, nan]"),
        (
            piecewise_linear,
            (10, (0, 0.5, 1), (0, 1)),
            "a factor for each knot, but got 3 knots and 2 factors",
        ),
        (linear_decay, (5, -0.1), f"a schedule's end {FACTOR} -0.1"),
        (one_cycle, (5, 0.3, math.nan, 0), f"a schedule's start {FACTOR} nan"),
        (
            one_cycle,
            (5, 1.0, 0, 0),
            "a schedule's peak must lie between 0 and 1 of its steps, but got 1.0",
        ),
        (
            triangle,
            (5, 0.8, 0, 0, 0.25),
            "a schedule's peak must lie between 0 and 0.75 of its steps, but got 0.8",
        ),
        (
            triangle,
            (5, 0.8, 0, 0, 1.0),
            "a schedule's floor is a share of its steps from 0 to below 1, but got 1.0",
        ),
    ],
)
def test_refuses(build, arguments, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        build(optimizer(), *arguments)


# The config group

# Over the 50 steps that 5,000 examples take at batch size 100.
MEMBERS = {
    "constant": lambda step: 1.0,
    "warmup": lambda step: min(1.0, (step + 1) / 100),
    "linear": lambda step: 1 - step / 50,
    "one_cycle": torchs_one_cycle(50, 0.3).__getitem__,
    "triangle": lambda step: min((step + 1) / 50 / 0.2, (1 - (step + 1) / 50) / 0.8),
}


@pytest.mark.parametrize(
    "workload", ["digits", pytest.param("resnet_cifar", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", MEMBERS)
def test_each_takes_the_place_of_a_workloads_own(workload, name):
    options, recipe = options_and_recipe(
        f"+workload={workload}", f"schedule={name}", "budget={steps: 2, examples: 5_000}"
    )
    module = build_module(options, recipe, make_spec(100, LR))
    used = factors(module.configure_optimizers()["lr_scheduler"]["scheduler"], 50)
    expected = [MEMBERS[name](step) for step in range(50)]
    assert [rate for rate, *_ in used] == pytest.approx(expected, abs=1e-12)
    averages = [type(callback) for callback in module.configure_callbacks()]
    assert averages == ([RunningWeightAverage] if name == "warmup" else [])
    assert recipe.takes("total_steps") == (name in ("linear", "one_cycle", "triangle"))


@pytest.mark.parametrize("order", [1, -1])
def test_options_of_a_schedule_can_be_set(order):
    arguments = ["+workload=digits", "schedule=linear", "schedule.rate.end=0.5"][::order]
    assert option_at(options_of(*arguments), "workload.module.schedule.end") == 0.5
    own = option_at(options_of("+workload=digits"), "workload.module.schedule")
    assert own["_target_"] == "bstune.workloads.schedules.warmup_then_constant"


TRIAL = ("workload=digits", "trial.batch_size=32", "trial.lr=0.1")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ["schedule=triangle", "schedule.rate.peak=0"],
            "a schedule's peak must lie between 0 and 1 of",
        ),
        (["schedule=nothing"], "Could not find 'schedule/nothing'"),
        (["schedule=linear", "schedule.horizon=1"], "unknown option schedule.horizon"),
        (
            ["schedule=linear", "+schedule.horizon=1"],
            "a schedule has the keys rate and average, and may have tunable, but got {",
        ),
    ],
)
def test_what_a_schedule_cannot_be_ends_in_a_line(bstune, tmp_path, arguments, text):
    status, out, err = bstune(*TRIAL, *arguments)
    assert (status, err[:7]) == (2, "error: ")
    assert text in err
    assert "Traceback" not in err + out
    assert not list(tmp_path.glob("outputs/*"))
