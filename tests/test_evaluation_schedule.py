"""When evaluations are due: tables of steps, costs and past values."""

import pytest

from bstune.core.evaluation_schedule import (
    EvaluationSchedule,
    is_near,
    next_dense_evaluation,
    next_evaluation,
)
from bstune.core.records import Target

ERROR = Target("val/error", 0.1, "min")
ACCURACY = Target("val/accuracy", 0.9, "max")
RULE = EvaluationSchedule(ratio=1.05, share=0.25, cost=0.5, near=1.5)


@pytest.mark.parametrize(
    ("step", "batch_size", "evaluations", "near", "expected"),
    [
        # Of 300 examples. Far away, 1/8 of those trained may go to evaluation: 150 / (B/8) steps
        # for the first one.
        (0, 100, 0, False, 12),
        # 150 x 8 examples are exactly one step.
        (0, 1200, 0, False, 1),
        # 171.43 is rounded up.
        (0, 7, 0, False, 172),
        # Near, a quarter: step 12 is affordable, 300 / (100/4), but one step on is the least.
        (12, 100, 1, True, 13),
        (12, 100, 1, False, 24),
        # Ten evaluations so far and this one come to 1500 / 25.
        (12, 100, 9, True, 60),
        # Where it is affordable, the ratio decides, rounded down: here from 124.95.
        (119, 10_000, 3, True, 124),
        (100, 10_000, 3, False, 105),
        # The ratio gives 19.95, but it is at least one step on.
        (19, 10_000, 3, True, 20),
    ],
)
def test_next_evaluation(step, batch_size, evaluations, near, expected):
    assert next_evaluation(step, batch_size, 300, evaluations, near, RULE) == expected


@pytest.mark.parametrize(
    ("step", "evaluations", "expected"),
    [
        # Its first look is no later than where it may meet the target.
        (0, 0, 50),
        (20, 0, 50),
        # In between, 2% on, as long as all evaluations cost no more examples than are trained on.
        (50, 1, 51),
        (100, 2, 102),
        # 220 evaluations of 150 examples are 110 steps of 300.
        (100, 219, 110),
        # Beyond, as any trial.
        (160, 3, next_evaluation(160, 300, 300, 3, False, RULE)),
    ],
)
def test_a_trial_is_looked_at_closely_where_it_is_expected_to_meet_the_target(
    step, evaluations, expected
):
    found = next_dense_evaluation(step, 300, 300, evaluations, False, RULE, (50, 160))
    usual = next_evaluation(step, 300, 300, evaluations, False, RULE)
    assert found == min(expected, usual)
    assert found <= usual


@pytest.mark.parametrize(
    ("history", "target", "near"),
    [
        ([], ERROR, False),
        ([(10, 0.5)], ERROR, False),
        # The metric rises.
        ([(10, 0.5), (20, 0.6)], ERROR, False),
        # The gap falls by 0.1 with each doubling, so by 0.0585 over a factor of 1.5.
        # Values that are not finite are passed over.
        (
            [(10, 0.2584), (15, None), (20, 0.1584)],
            ERROR,
            True,
        ),
        # 0.1586 - 0.0585 is just above the target, as 0.1584 was just below.
        ([(10, 0.2586), (20, 0.1586)], ERROR, False),
        ([(10, 0.7416), (20, 0.8416)], ACCURACY, True),
        ([(10, 0.7414), (20, 0.8414)], ACCURACY, False),
        ([(10, None), (20, 0.1)], ERROR, False),
        # Step 0 has no logarithm.
        ([(0, 0.9), (20, 0.11)], ERROR, False),
        # The last value is on the target.
        ([(10, 0.2), (20, 0.1)], ERROR, True),
        # The line goes through the latest evaluation at least 1.25 times earlier, here (16, .3),
        # not (19, .15).
        ([(16, 0.3), (19, 0.15), (20, 0.149)], ERROR, True),
        ([(16, 0.15), (19, 0.3), (20, 0.149)], ERROR, False),
        # Without one that early, through the first.
        ([(18, 0.3), (19, 0.149), (20, 0.149)], ERROR, True),
    ],
)
def test_is_near(history, target, near):
    assert is_near(history, target.gap, 1.5) is near
