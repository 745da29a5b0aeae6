"""Whether all rates move with the one that is set in the optimizer."""

import pytest
import torch
from torch.optim import SGD, lr_scheduler

from bstune.trial.checks.proportion import are_in_proportion, schedule_out_of_proportion
from bstune.trial.checks.schedule_end import ScheduleCopy


class Fixed(lr_scheduler.LRScheduler):
    """Falls to a rate that is written in it, after a while."""

    def get_lr(self):
        return [0.001 if self.last_epoch > 15 else rate for rate in self.base_lrs]


def copy_of(kind, rate, done=0, **options):
    optimizer = SGD([torch.zeros(1, requires_grad=True)], lr=rate)
    schedule = kind(optimizer, **options)
    optimizer.step()
    for _ in range(done):
        schedule.step()
    return ScheduleCopy(kind.__name__, schedule, 1, done)


@pytest.mark.parametrize(
    ("own", "others", "factor", "found"),
    [
        ([0.1, 0.01], [0.2, 0.02], 2.0, True),
        ([0.1, 0.01], [0.2, 0.01], 2.0, False),
        ([0.1, 0.0], [0.2, 0.0], 2.0, True),
        # Rates of nothing, whatever their ratio is.
        ([0.1, 1e-17], [0.2, 3e-17], 2.0, True),
        ([], [], 2.0, True),
    ],
)
def test_proportion(own, others, factor, found):
    assert are_in_proportion(own, others, factor) is found


@pytest.mark.parametrize("done", [(0, 0), (4, 3), (3, 4)])
@pytest.mark.parametrize(
    ("kind", "options", "name"),
    [
        (lr_scheduler.CosineAnnealingLR, {"T_max": 30}, None),
        (lr_scheduler.CosineAnnealingLR, {"T_max": 30, "eta_min": 0.01}, "CosineAnnealingLR"),
        (lr_scheduler.StepLR, {"step_size": 3}, None),
        (Fixed, {}, "Fixed"),
    ],
)
def test_a_schedule_with_rates_of_its_own_is_named(kind, options, name, done):
    own = [copy_of(kind, 0.1, done[0], **options)]
    others = [copy_of(kind, 0.4, done[1], **options)]
    assert schedule_out_of_proportion(own, others, 4.0) == name


def test_a_schedule_that_raises_at_its_end_is_none():
    own, others = (
        [copy_of(lr_scheduler.OneCycleLR, rate, max_lr=rate, total_steps=20)] for rate in (0.1, 0.4)
    )
    assert schedule_out_of_proportion(own, others, 4.0) is None


def test_the_clock_ends_the_look_ahead():
    # Ten seconds have passed after the first look.
    times = iter([0.0, 10.0])
    own = [copy_of(Fixed, 0.1)]
    others = [copy_of(Fixed, 0.4)]
    assert schedule_out_of_proportion(own, others, 4.0, now=lambda: next(times)) is None
