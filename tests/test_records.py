import json
import math
import random
from itertools import pairwise

import pytest
from toolbox import make_result

from bstune.core.errors import ConfigError, RecordError
from bstune.core.records import EvaluationSchedule, Target, TrialResult, dump_json, is_near, next_evaluation

ERROR, ACCURACY = Target("val/error", 0.1, "min"), Target("val/accuracy", 0.9, "max")
RULE = EvaluationSchedule(ratio=1.05, share=0.25, cost=0.5, near=1.5)


@pytest.mark.parametrize(
    ("mode", "value", "reached", "gap"),
    [
        ("min", 0.11, False, 0.01),
        ("min", 0.10, True, 0.0),
        ("min", 0.09, True, -0.01),
        ("max", 0.09, False, 0.01),
        ("max", 0.10, True, 0.0),
        ("max", 0.11, True, -0.01),
        ("min", math.nan, False, math.nan),
        ("max", math.nan, False, math.nan),
    ],
)
def test_target(mode, value, reached, gap):
    target = Target("val/error", 0.10, mode)
    assert target.reached(value) is reached
    assert target.gap(value) == pytest.approx(gap, nan_ok=True)


def test_target_as_text():
    assert str(Target("val/error", 0.1, "min")) == "val/error <= 0.1"
    assert str(Target("val/accuracy", 0.94, "max")) == "val/accuracy >= 0.94"


@pytest.mark.parametrize(
    ("value", "mode", "message"),
    [
        (0.1, "down", "target.mode must be min or max, but got 'down'"),
        (math.nan, "min", "target.value must be a finite number, but got nan"),
        (math.inf, "min", "target.value must be a finite number, but got inf"),
    ],
)
def test_impossible_targets_are_refused(value, mode, message):
    with pytest.raises(ConfigError, match=message):
        Target("val/error", value, mode)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"status": "censored", "history": ((10, None), (20, 0.5))},
        {"status": "oom", "steps": 0, "seconds_per_step": None, "history": (), "message": "CUDA out of memory"},
        {"delta": None},
        {"noise_scale": ((32, 0.5, 12.0), (64, -0.25, 1e-30))},
    ],
)
def test_records_survive_json(changes):
    result = make_result(**changes)
    assert TrialResult.from_json(result.to_json()) == result
    assert "\n" not in result.to_json()


def test_records_from_before_a_field_are_read():
    result = make_result()
    values = json.loads(result.to_json())
    for name in ("history", "message", "resumed_from", "replicate_of", "noise_scale"):
        del values[name]
    old = TrialResult.from_json(json.dumps(values))
    assert (old.history, old.message, old.resumed_from, old.replicate_of, old.noise_scale) == ((), None, None, None, ())
    assert old.versions == result.versions


def test_json_is_strict():
    text = make_result(seconds_per_step=math.inf, history=((1, math.nan),)).to_json()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    values = json.loads(text, parse_constant=refuse)
    assert values["seconds_per_step"] is None
    assert values["history"] == [[1, None]]
    assert dump_json({"a": (1.0, -math.inf), 3: None}) == '{"a": [1.0, null], "3": null}'


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (None, r"a trial record is a JSON object, but got '\[\]'"),
        ({"status": "done"}, "status must be one of"),
        ({"lr": ...}, r"lacks \['lr'\] and has unknown fields \[\]"),
        ({"colour": 3}, r"lacks \[\] and has unknown fields \['colour'\]"),
        ({"slot": 3, "trial_index": ...}, r"former version of bstune, with slot \(now trial_index\): rename"),
        ({"parent": 3, "settings": {}}, r"parent \(now resumed_from\), settings \(now hyperparameters\)"),
        ({"confirms": None}, r"confirms \(now replicate_of\)"),
        ({"status": "budget"}, r"status budget \(now censored\): .* another name, study=NAME"),
    ],
)
def test_other_json_is_refused(changes, message):
    values = json.loads(make_result().to_json()) | (changes or {})
    values = {name: value for name, value in values.items() if value is not ...}
    with pytest.raises(RecordError, match=message):
        TrialResult.from_json("[]" if changes is None else json.dumps(values))


@pytest.mark.parametrize(
    ("changes", "seconds"),
    [
        ({}, 1.0),
        ({"status": "censored"}, None),
        ({"seconds_per_step": None}, None),
    ],
)
def test_time_to_target(changes, seconds):
    assert make_result(**changes).time_to_target == seconds


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
