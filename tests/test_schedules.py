import math

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import OneCycleLR

from bstune.core.errors import ConfigError
from bstune.core.records import TrialSpec
from bstune.study.prepare import compose_checked
from bstune.trial.workload import build_module, has_horizon
from bstune.workloads.averaging import RunningWeightAverage
from bstune.workloads.schedules import (
    constant,
    linear_decay,
    one_cycle,
    piecewise_linear,
    triangle,
    warmup_then_constant,
)

LR = 0.4
TRIANGLE = {"knots": (0.0, 5 / 24, 1.0), "factors": (0.0, 1.0, 0.0)}


def optimizer():
    return SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)


def rates(build, steps):
    """Return the learning rate of each of the first steps, over the optimizer's own."""
    own = optimizer()
    schedule = build(own)
    used = []
    for _ in range(steps):
        used.append(own.param_groups[0]["lr"] / LR)
        own.step()
        schedule.step()
    return used


def test_constant():
    assert rates(constant, 5) == [1.0] * 5


@pytest.mark.parametrize(
    ("examples", "batch_size", "steps"),
    [
        (0, 32, 1),
        (32, 32, 1),
        (33, 32, 2),
        (1200, 100, 12),
        (1200, 1000, 2),
        (1200, 1, 1200),
        (1200, 5000, 1),  # warm-up shorter than a step is none
    ],
)
def test_warmup_is_linear_over_examples(examples, batch_size, steps):
    used = rates(lambda own: warmup_then_constant(own, examples, batch_size), steps + 3)
    expected = [(t + 1) / steps for t in range(steps)] + [1.0] * 3
    assert used == pytest.approx(expected, rel=1e-12)


def test_warmup_refuses_a_negative_length():
    with pytest.raises(ConfigError, match="warm-up is a number of examples, at least 0, but got -1"):
        warmup_then_constant(optimizer(), -1, 32)


def test_pages_triangle_rises_over_five_of_24_epochs_and_falls_to_zero():
    used = rates(lambda own: piecewise_linear(own, 24, **TRIANGLE), 26)
    rise = [(t + 1) / 5 for t in range(5)]
    fall = [(24 - (t + 1)) / 19 for t in range(5, 24)]
    assert used == pytest.approx([*rise, *fall, 0.0, 0.0], abs=1e-12)
    assert used[4] == pytest.approx(1.0)
    assert used[0] > 0  # the first step is not wasted


@pytest.mark.parametrize("total", [1, 7, 24, 2352])
def test_the_triangle_has_one_shape_at_every_length(total):
    used = rates(lambda own: piecewise_linear(own, total, **TRIANGLE), total)
    for t, factor in enumerate(used):
        share = (t + 1) / total
        assert factor == pytest.approx(min(share * 24 / 5, (1 - share) * 24 / 19), abs=1e-12)


def test_before_the_first_and_after_the_last_knot_the_factor_is_theirs():
    used = rates(lambda own: piecewise_linear(own, 10, (0.3, 0.5), (0.25, 0.75)), 12)
    assert used == pytest.approx([0.25, 0.25, 0.25, 0.5, 0.75, *[0.75] * 7])


@pytest.mark.parametrize(
    ("total", "knots", "factors", "text"),
    [
        (0, (0, 1), (0, 1), "a schedule with a horizon needs at least one step, but got 0"),
        (10, (0,), (1,), "knots must be two or more increasing shares of the steps, but got [0]"),
        (10, (), (), "knots must be two or more increasing shares of the steps, but got []"),
        (10, (0, 1, 1), (0, 1, 0), "knots must be two or more increasing shares of the steps, but got [0, 1, 1]"),
        (10, (1, 0), (0, 1), "knots must be two or more increasing shares of the steps, but got [1, 0]"),
        (10, (0, math.nan), (0, 1), "knots must be two or more increasing shares of the steps, but got [0, nan]"),
        (10, (0, 0.5, 1), (0, 1), "a schedule needs a factor for each knot, but got 3 knots and 2 factors"),
    ],
)
def test_piecewise_linear_refuses(total, knots, factors, text):
    with pytest.raises(ConfigError) as error:
        piecewise_linear(optimizer(), total, knots, factors)
    assert str(error.value) == text


@pytest.mark.parametrize(("total", "end"), [(1, 0.0), (10, 0.0), (10, 0.1), (200, 0.25)])
def test_linear_decay(total, end):
    used = rates(lambda own: linear_decay(own, total, end), total + 3)
    expected = [1 - (1 - end) * t / total for t in range(total)] + [end] * 3
    assert used == pytest.approx(expected, abs=1e-12)
    assert used[0] == 1.0
    assert min(used[:total]) > 0


@pytest.mark.parametrize("total", [10, 50, 997])
@pytest.mark.parametrize("peak", [0.15, 0.3, 0.5])
def test_one_cycle_is_torchs_without_its_momentum(total, peak):
    used = rates(lambda own: one_cycle(own, total, peak, start=1 / 25, end=1 / 25e4), total)
    theirs = rates(
        lambda own: OneCycleLR(own, max_lr=LR, total_steps=total, pct_start=peak, cycle_momentum=False), total
    )
    assert used == pytest.approx(theirs, rel=1e-9)


def test_one_cycle_in_closed_form():
    used = rates(lambda own: one_cycle(own, 21, 6 / 21, start=0.2, end=0.1), 24)
    rise = [1 - 0.8 * (1 + math.cos(math.pi * t / 5)) / 2 for t in range(6)]
    fall = [0.1 + 0.9 * (1 + math.cos(math.pi * (t - 5) / 15)) / 2 for t in range(6, 21)]
    assert used == pytest.approx([*rise, *fall, 0.1, 0.1, 0.1], abs=1e-12)


@pytest.mark.parametrize(
    ("total", "expected"), [(1, [1.0, 0.1, 0.1]), (2, [1.0, 0.1, 0.1]), (3, [1.0, 0.55, 0.1, 0.1])]
)
def test_a_short_cycle_starts_at_its_peak(total, expected):
    used = rates(lambda own: one_cycle(own, total, 0.3, start=0.5, end=0.1), len(expected))
    assert used == pytest.approx(expected)


@pytest.mark.parametrize("total", [1, 13, 1300])
def test_the_triangle_ends_at_its_floor(total):
    """Page's last rung: 13 epochs, the peak after a fifth, a tenth of it for the last two."""
    used = rates(lambda own: triangle(own, total, peak=0.2, start=0.0, end=0.1, floor=2 / 13), total + 2)
    for t, factor in enumerate(used):
        share = (t + 1) / total
        fall = 1 - 0.9 * (share - 0.2) / (11 / 13 - 0.2)
        assert factor == pytest.approx(share / 0.2 if share <= 0.2 else max(0.1, fall), abs=1e-9)


def test_triangle_is_the_piecewise_linear_one():
    ours = rates(lambda own: triangle(own, 24, peak=5 / 24, start=0.0, end=0.0, floor=0.0), 26)
    assert ours == rates(lambda own: piecewise_linear(own, 24, **TRIANGLE), 26)


SCHEDULES = {
    "constant": constant,
    "warm-up": lambda own: warmup_then_constant(own, 40, 10),
    "linear": lambda own: linear_decay(own, 10, 0.0),
    "one-cycle": lambda own: one_cycle(own, 10, 0.3, 0.1, 0.0),
    "triangle": lambda own: triangle(own, 10, 0.3, 0.1, 0.0, 0.0),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_each_group_keeps_its_own_rate_and_its_own_end(name):
    groups = [{"lr": LR}, {"lr": 2 * LR}, {"lr": 4 * LR, "steps": 4}, {"lr": 8 * LR, "steps": 4, "fade": True}]
    own = SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], **group} for group in groups], lr=1.0)
    schedule, used = SCHEDULES[name](own), []
    for _ in range(8):
        used.append([group["lr"] / LR for group in own.param_groups])
        own.step()
        schedule.step()
    factors = rates(SCHEDULES[name], 8)
    assert [rate for rate, *_ in used] == pytest.approx(factors)
    assert [rate for _, rate, *_ in used] == pytest.approx([2 * factor for factor in factors])
    assert [rate for _, _, rate, _ in used] == pytest.approx([4 * factor for factor in factors[:4]] + [0.0] * 4)
    assert [rate for *_, rate in used] == pytest.approx([8.0, 6.0, 4.0, 2.0, 0.0, 0.0, 0.0, 0.0])


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda own: linear_decay(own, 0, 0.0), "a schedule with a horizon needs at least one step, but got 0"),
        (lambda own: one_cycle(own, 0, 0.3, 0.1, 0), "a schedule with a horizon needs at least one step, but got 0"),
        (lambda own: triangle(own, 0, 0.3, 0, 0, 0), "a schedule with a horizon needs at least one step, but got 0"),
        (
            lambda own: linear_decay(own, 5, -0.1),
            "a schedule's end is a factor of the learning rate, at least 0, but got -0.1",
        ),
        (
            lambda own: one_cycle(own, 5, 0.3, math.nan, 0),
            "a schedule's start is a factor of the learning rate, at least 0, but got nan",
        ),
        (
            lambda own: one_cycle(own, 5, 1.0, 0, 0),
            "a schedule's peak must lie between 0 and 1 of its steps, but got 1.0",
        ),
        (
            lambda own: triangle(own, 5, 0.8, 0, 0, 0.25),
            "a schedule's peak must lie between 0 and 0.75 of its steps, but got 0.8",
        ),
        (
            lambda own: triangle(own, 5, 0.8, 0, 0, 1.0),
            "a schedule's floor is a share of its steps from 0 to below 1, but got 1.0",
        ),
    ],
)
def test_the_others_refuse(build, text):
    with pytest.raises(ConfigError) as error:
        build(optimizer())
    assert str(error.value) == text


# The config group

MEMBERS = {
    "constant": lambda step, total, warmup: 1.0,
    "warmup": lambda step, total, warmup: min(1.0, (step + 1) / warmup),
    "linear": lambda step, total, warmup: 1 - step / total,
    "one_cycle": lambda step, total, warmup: None,
    "triangle": lambda step, total, warmup: min((step + 1) / total / 0.2, (1 - (step + 1) / total) / 0.8),
}


@pytest.mark.parametrize("workload", ["digits", "fashion_mlp", "resnet_cifar"])
@pytest.mark.parametrize("name", MEMBERS)
def test_each_takes_the_place_of_a_workloads_own(workload, name):
    size = 100
    config = compose_checked([f"+workload={workload}", f"schedule={name}", "budget={steps: 2, examples: 5_000}"])
    module = build_module(config, TrialSpec(0, 0, size, LR, None, 0))
    configured = module.configure_optimizers()
    own, schedule = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    used = []
    for _ in range(50):
        used.append(own.param_groups[0]["lr"] / LR)
        own.step()
        schedule.step()
    expected = [MEMBERS[name](step, 50, 100) for step in range(50)]
    if name == "one_cycle":
        expected = rates(lambda own: OneCycleLR(own, LR, 50, cycle_momentum=False), 50)
    assert used == pytest.approx(expected, abs=1e-12)
    averages = [type(callback) for callback in module.configure_callbacks()]
    assert averages == ([RunningWeightAverage] if name == "warmup" else [])
    assert has_horizon(config) == (name in ("linear", "one_cycle", "triangle"))


def test_without_one_a_workload_keeps_its_own():
    config = compose_checked(["+workload=digits"])
    assert config.workload.module.schedule._target_ == "bstune.workloads.schedules.warmup_then_constant"
    assert "schedule" not in config


@pytest.mark.parametrize("order", [1, -1])
def test_options_of_a_schedule_can_be_set(order):
    arguments = ["+workload=digits", "schedule=linear", "schedule.rate.end=0.5"][::order]
    assert compose_checked(arguments).workload.module.schedule.end == 0.5


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["schedule=triangle", "budget.examples=0"], "budget.steps and budget.examples must be at least 1, but got"),
        (["schedule=linear", "budget={steps: 0, examples: -1}"], "budget.steps and budget.examples must be at least 1"),
        (["schedule=triangle", "schedule.rate.peak=0"], "a schedule's peak must lie between 0 and 1 of its steps, but"),
        (["schedule=nothing"], "Could not find 'schedule/nothing'"),
        (["schedule=linear", "schedule.horizon=1"], "unknown option schedule.horizon"),
        (["schedule=linear", "+schedule.horizon=1"], "a schedule has the two keys rate and average, but 'horizon'"),
    ],
)
def test_what_a_schedule_cannot_be_ends_in_a_line(bstune, tmp_path, arguments, text):
    status, out, err = bstune("+workload=digits", *arguments, "trial.batch_size=32", "trial.lr=0.1")
    assert status == 2
    assert err.startswith("error: ")
    assert text in err
    assert "Traceback" not in err + out
    assert not list(tmp_path.glob("outputs/*"))


def test_a_replayed_workload_has_no_schedule(bstune):
    status, _, err = bstune("+workload=replay", "workload.table=t.jsonl", "schedule=linear")
    assert status == 2
    assert err == "error: a replayed workload is not trained, so it has no schedule: leave out schedule=...\n"
