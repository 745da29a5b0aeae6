import json
import math

import pytest

from bstune.core.errors import ConfigError
from bstune.core.records import Target, TrialResult, dump_json


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
def test_records_survive_json(make_result, changes):
    result = make_result(**changes)
    assert TrialResult.from_json(result.to_json()) == result
    assert "\n" not in result.to_json()


def test_records_from_before_a_field_are_read(make_result):
    result = make_result()
    values = json.loads(result.to_json())
    for name in ("history", "message", "resumed_from", "replicate_of", "noise_scale"):
        del values[name]
    old = TrialResult.from_json(json.dumps(values))
    assert (old.history, old.message, old.resumed_from, old.replicate_of, old.noise_scale) == ((), None, None, None, ())
    assert old.versions == result.versions


def test_json_is_strict(make_result):
    text = make_result(seconds_per_step=math.inf, history=((1, math.nan),)).to_json()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    values = json.loads(text, parse_constant=refuse)
    assert values["seconds_per_step"] is None
    assert values["history"] == [[1, None]]
    assert dump_json({"a": (1.0, -math.inf), 3: None}) == '{"a": [1.0, null], "3": null}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "a trial record is a JSON object"),
        ("{}", "lacks"),
    ],
)
def test_other_json_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        TrialResult.from_json(text)


def test_an_unknown_status_is_refused(make_result):
    text = make_result().to_json().replace('"reached"', '"done"')
    with pytest.raises(ValueError, match="status must be one of"):
        TrialResult.from_json(text)


@pytest.mark.parametrize(
    ("changes", "seconds"),
    [
        ({}, 1.0),
        ({"status": "censored"}, None),
        ({"seconds_per_step": None}, None),
    ],
)
def test_time_to_target(make_result, changes, seconds):
    assert make_result(**changes).time_to_target == seconds
