import math
import random
from itertools import pairwise

import pytest

from bstune.core.errors import ConfigError
from bstune.core.records import LOOK_BACK, EvaluationSchedule, Target, is_near, next_evaluation

ERROR = Target("val/error", 0.1, "min")
ACCURACY = Target("val/accuracy", 0.9, "max")
RULE = EvaluationSchedule(ratio=1.05, share=0.25, cost=0.5, near=1.5)


@pytest.mark.parametrize(
    ("ratio", "share", "cost", "near"),
    [
        (1.0, 0.25, 0.5, 1.5),
        (1.05, 0.0, 0.5, 1.5),
        (1.05, 1.1, 0.5, 1.5),
        (1.05, 0.25, 0.0, 1.5),
        (1.05, 0.25, 0.5, 1.0),
        (math.nan, 0.25, 0.5, 1.5),
    ],
)
def test_refuses_settings_out_of_range(ratio, share, cost, near):
    with pytest.raises(ConfigError, match="ratio > 1, 0 < share <= 1, cost > 0 and near > 1, but got") as error:
        EvaluationSchedule(ratio, share, cost, near)
    assert f"ratio={ratio}, share={share}, cost={cost}, near={near}" in str(error.value)


@pytest.mark.parametrize(
    ("step", "batch_size", "validation", "evaluations", "near", "expected"),
    [
        # Far away, 1/8 of the examples trained may go to evaluation: 150 / (B/8) steps for the first one.
        (0, 100, 300, 0, False, 12),
        (0, 1200, 300, 0, False, 1),
        (0, 1, 300, 0, False, 1200),
        (0, 7, 300, 0, False, 172),  # 171.43, rounded up
        # Near, a quarter.
        (12, 100, 300, 1, True, 13),  # 12.0 is affordable, one step on is least
        (12, 100, 300, 1, False, 24),
        (12, 100, 300, 9, True, 60),  # ten evaluations so far and this one: 1500 / 25
        # Where it is affordable, the ratio decides, rounded down.
        (100, 10_000, 300, 3, True, 105),
        (119, 10_000, 300, 3, True, 124),  # 124.95
        (100, 10_000, 300, 3, False, 105),
        (19, 10_000, 300, 3, True, 20),  # 19.95, but at least one step on
    ],
)
def test_next_evaluation(step, batch_size, validation, evaluations, near, expected):
    assert next_evaluation(step, batch_size, validation, evaluations, near, RULE) == expected


@pytest.mark.parametrize(
    ("history", "target", "near"),
    [
        ([], ERROR, False),
        ([(10, 0.5)], ERROR, False),
        ([(10, 0.5), (20, 0.5)], ERROR, False),  # flat
        ([(10, 0.5), (20, 0.6)], ERROR, False),  # rising
        # The gap falls by 0.1 with each doubling, so by 0.0585 over a factor of 1.5.
        ([(10, 0.2584), (20, 0.1584)], ERROR, True),
        ([(10, 0.2586), (20, 0.1586)], ERROR, False),
        ([(10, 0.7416), (20, 0.8416)], ACCURACY, True),
        ([(10, 0.7414), (20, 0.8414)], ACCURACY, False),
        ([(10, 0.2584), (15, None), (20, 0.1584)], ERROR, True),  # values that are not finite are passed over
        ([(10, 0.2586), (15, None), (20, 0.1586)], ERROR, False),
        ([(10, None), (20, 0.1)], ERROR, False),
        ([(0, 0.9), (20, 0.11)], ERROR, False),  # step 0 has no logarithm
        ([(10, 0.2), (20, 0.1)], ERROR, True),  # on the target
        # The line goes through the latest evaluation at least 1.25 times earlier, here (16, .3), not (19, .15).
        ([(16, 0.3), (19, 0.15), (20, 0.149)], ERROR, True),
        ([(16, 0.15), (19, 0.3), (20, 0.149)], ERROR, False),
        # Without one that early, through the first.
        ([(18, 0.3), (19, 0.149), (20, 0.149)], ERROR, True),
    ],
)
def test_is_near(history, target, near):
    assert is_near(history, target, 1.5) is near


def test_look_back_is_to_the_latest_evaluation_that_is_early_enough():
    assert LOOK_BACK == 1.25
    # From (10, .2) the line falls steeply enough, from (4, .11) it does not.
    history = [(4, 0.11), (10, 0.2), (12, 0.13)]
    assert not is_near(history, ERROR, 1.5)
    assert is_near([(4, 0.11), (9, 0.2), (12, 0.13)], ERROR, 1.5)


def _run(batch_size, validation, last_step, rate, rule):
    """Follow the rule along an error that falls in log steps; return (step, near before it, evaluations before it)."""
    history, seen = [], []
    step, near = 0, False
    while step < last_step:
        near = near or is_near(history, ERROR, rule.near)
        due = next_evaluation(step, batch_size, validation, len(history), near, rule)
        seen.append((due, near))
        step = min(due, last_step)
        history.append((step, 0.1 + rate * math.log(last_step / step)))
    return history, seen


def _settings():
    generator = random.Random(0)
    for _ in range(60):
        yield (
            round(2 ** generator.uniform(0, 13)),
            generator.choice([1, 100, 300, 5000]),
            generator.randint(1, 3000),
            generator.choice([0.0, 0.05, 0.2]),
            EvaluationSchedule(generator.choice([1.01, 1.05, 1.5]), generator.choice([0.05, 0.25, 1.0]), 0.5, 1.5),
        )


@pytest.mark.parametrize(("batch_size", "validation", "last_step", "rate", "rule"), list(_settings()))
def test_evaluation_keeps_its_share_and_its_resolution(batch_size, validation, last_step, rate, rule):
    history, seen = _run(batch_size, validation, last_step, rate, rule)
    before = 0
    for number, ((step, _), (due, near)) in enumerate(zip(history, seen, strict=True), 1):
        cost = number * rule.cost * validation
        assert step > before
        if step == due:  # all but the last one, which the budget forces
            assert cost <= rule.share * step * batch_size
            assert near or cost <= rule.share / 2 * step * batch_size
        else:
            assert step == last_step
        earliest = max(before + 1, math.floor(rule.ratio * before))
        if near and cost <= rule.share * earliest * batch_size:  # affordable
            assert step <= earliest
            assert step <= max(before + 1, rule.ratio * before)
        before = step


def test_close_to_the_target_the_saved_share_pays_for_dense_evaluations():
    history, seen = _run(batch_size=512, validation=5000, last_step=400, rate=0.2, rule=RULE)
    near = [step for (step, _), (_, is_close) in zip(history, seen, strict=True) if is_close]
    ratios = [b / a for a, b in pairwise(near)]
    assert len(near) > 4
    assert max(ratios[:4]) <= 1.05
