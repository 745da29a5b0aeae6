"""An assumed budget is cut to the study's time, in whole epochs where there is time for one."""

import math

import pytest

from bstune.core.records import Budget
from bstune.study.planning.assumed_budget import SecondsLeft, budget_in_time

# An epoch of 800 examples takes 10 s at batch size 8.
EPOCH = 800
ASSUMED = Budget(examples=100 * EPOCH)


@pytest.mark.parametrize(
    ("training", "wall", "expected"),
    [
        # No limit, and a limit of which a quarter is 100 epochs.
        (None, None, ASSUMED),
        (None, 4000.0, ASSUMED),
        # A quarter of the time is 3.75 epochs.
        (None, 150.0, Budget(examples=3 * EPOCH)),
        # The tighter of both limits counts.
        (80.0, 150.0, Budget(examples=2 * EPOCH)),
        # A quarter is half an epoch, but there is time for one.
        (None, 20.0, Budget(examples=EPOCH)),
        # There is none, or the time is over: an epoch all the same, as it takes under 15 s.
        (None, 8.0, Budget(examples=EPOCH)),
        (None, -5.0, Budget(examples=EPOCH)),
    ],
)
def test_a_schedule_takes_a_quarter_of_the_time(training, wall, expected):
    left = SecondsLeft(training, wall, wall_per_training=1.0)
    assert budget_in_time(ASSUMED, EPOCH, 8, 0.1, left) == expected


@pytest.mark.parametrize(("wall", "examples"), [(200.0, 50 * 80), (40.0, 15 * 80), (-5.0, 15 * 80)])
def test_a_part_of_a_long_epoch_takes_15_seconds_at_least(wall, examples):
    # An epoch takes 1,000 s.
    left = SecondsLeft(None, wall, wall_per_training=1.0)
    assumed = Budget(examples=10_000_000)
    assert budget_in_time(assumed, 80_000, 8, 0.1, left) == Budget(examples=examples)


def test_evaluation_takes_its_share_of_the_wall_time():
    left = SecondsLeft(training=None, wall=150.0, wall_per_training=1.25)
    assert left.trained == 120.0
    assert budget_in_time(ASSUMED, EPOCH, 8, 0.1, left) == Budget(examples=3 * EPOCH)
    assert SecondsLeft(None, None, 1.25).trained == math.inf


def test_both_parts_shrink_in_proportion():
    assumed = Budget(steps=1250, examples=100 * EPOCH)
    left = SecondsLeft(training=None, wall=80.0, wall_per_training=1.0)
    assert budget_in_time(assumed, EPOCH, 8, 0.1, left) == Budget(steps=25, examples=2 * EPOCH)
