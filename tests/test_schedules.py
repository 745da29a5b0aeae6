import math

import pytest
import torch
from torch.optim import SGD

from bstune.errors import ConfigError
from bstune.schedules import constant, piecewise_linear, warmup_then_constant

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
