import json
import math

import numpy as np
import pytest
import torch
from toolbox import make_result

from bstune.core.errors import ConfigError, RecordError
from bstune.core.evaluation_schedule import (
    EvaluationSchedule,
)
from bstune.core.records import Target, TrialResult, dump_json

ERROR = Target("val/error", 0.1, "min")
ACCURACY = Target("val/accuracy", 0.9, "max")
RULE = EvaluationSchedule(ratio=1.05, share=0.25, cost=0.5, near=1.5)


def test_target():
    for target, missed, met in ((ERROR, 0.11, 0.09), (ACCURACY, 0.89, 0.91)):
        assert [target.reached(value) for value in (missed, target.value, met, math.nan)] == [
            False,
            True,
            True,
            False,
        ]
        gaps = [target.gap(value) for value in (missed, target.value, met, math.nan)]
        assert gaps == pytest.approx([0.01, 0.0, -0.01, math.nan], nan_ok=True)
    assert (str(ERROR), str(ACCURACY)) == ("val/error <= 0.1", "val/accuracy >= 0.9")


@pytest.mark.parametrize(("mode", "best"), [("min", 0.2), ("max", 1.0)])
def test_the_better_bound_of_a_metric(mode, best):
    assert Target("m", 0.5, mode).best_bound((0.2, 1.0)) == best


def test_a_target_without_a_mode_has_that_of_its_metrics_name():
    assert Target("val_f1", 0.7) == Target("val_f1", 0.7, "max")
    assert Target("val_loss", 0.1) == Target("val_loss", 0.1, "min")
    with pytest.raises(ConfigError, match="give mode='min' or mode='max'"):
        Target("reward", 3)


def test_impossible_targets_are_refused():
    with pytest.raises(ConfigError, match=r"target\.mode must be min or max, but got 'down'"):
        Target("val/error", 0.1, "down")
    with pytest.raises(ConfigError, match=r"target\.value must be a finite number, but got nan"):
        Target("val/error", math.nan, "min")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("err", "0.05", "min"), r"target\.value must be a finite number, but got '0\.05'"),
        (("err", "0.05"), r"target\.value must be a finite number, but got '0\.05'"),
        (("err", None), r"target\.value must be a finite number, but got None"),
        (("err", True, "min"), r"target\.value must be a finite number, but got True"),
        (("err", [0.05], "min"), r"target\.value must be a finite number, but got \[0\.05\]"),
        (("err", 10**400, "min"), r"target\.value must be a finite number, but got 1000"),
        ((0.05, "err"), r"target\.metric must be a metric's name, but got 0\.05"),
        ((None, 0.05, "min"), r"target\.metric must be a metric's name, but got None"),
        (("", 0.05, "min"), r"target\.metric must be a metric's name, but got ''"),
        (("err", 0.05, ["min"]), r"target\.mode must be min or max, but got \['min'\]"),
    ],
)
def test_a_target_of_other_types_is_refused_in_a_line(arguments, message):
    with pytest.raises(ConfigError, match=message):
        Target(*arguments)


@pytest.mark.parametrize("value", [np.float32(0.5), np.array([0.5]), torch.tensor(0.5)])
def test_a_targets_value_may_be_any_number(value):
    target = Target("val/error", value, "min")
    assert (target.value, type(target.value)) == (0.5, float)
    # The user's own whole number stays one.
    assert type(Target("val/error", 1, "min").value) is int


@pytest.mark.parametrize(
    "changes",
    [
        {},
        # The first value was not finite.
        {"status": "stopped", "history": ((10, None), (20, 0.5)), "delta": None},
        {
            "status": "out of memory",
            "steps": 0,
            "seconds_per_step": None,
            "history": (),
            "message": "CUDA out of memory",
        },
        {
            "noise_scale": ((32, 0.5, 12.0), (64, -0.25, 1e-30)),
            "hyperparameters": {"momentum": 0.5, "width": 16},
        },
    ],
)
def test_records_survive_json(changes):
    result = make_result(**changes)
    read = TrialResult.from_json(result.to_json())
    assert read == result
    # The texts tell 16 from 16.0.
    assert repr(read) == repr(result)
    assert "\n" not in result.to_json()


def test_records_from_before_a_field_are_read():
    values = json.loads(make_result(history=()).to_json())
    for name in (
        "history",
        "message",
        "resumed_from",
        "replicate_of",
        "noise_scale",
        "hyperparameters",
    ):
        del values[name]
    assert TrialResult.from_json(json.dumps(values)) == make_result(history=())


def test_json_is_strict():
    values = json.loads(make_result(seconds_per_step=math.inf, history=((1, math.nan),)).to_json())
    assert (values["seconds_per_step"], values["history"]) == (None, [[1, None]])
    assert dump_json({"a": (1.0, -math.inf), 3: None}) == '{"a": [1.0, null], "3": null}'


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (None, r"a trial record is a JSON object, but got '\[\]'"),
        ({"status": "done"}, "status of a trial record must be one of"),
        # An ellipsis takes the field away.
        ({"lr": ...}, "a trial record lacks lr$"),
        ({"colour": 3}, "a trial record has unknown colour$"),
        ({"batch_size": 0}, "batch_size of a trial record must be a whole number of at least 1"),
        # To Python True is 1, and 8.0 equals 8.
        ({"batch_size": True}, "batch_size of"),
        ({"batch_size": 8.0}, "batch_size of"),
        ({"batch_size": 10**16}, "batch_size of"),
        ({"steps": -1}, "steps of"),
        ({"lr": 0.0}, "lr of"),
        ({"lr": "0.1"}, "lr of"),
        ({"lr": math.nan}, "lr of"),
        ({"seconds_per_step": -0.1}, "seconds_per_step of"),
        ({"status": ["reached"]}, "status of"),
        ({"history": 3}, "history of"),
        ({"history": [[1]]}, "history of"),
        ({"history": [[1, "x"]]}, "history of"),
        ({"history": [[1, math.inf]]}, "history of"),
        ({"noise_scale": [[1, None, 2.0]]}, "noise_scale of"),
        ({"hyperparameters": {"momentum": "big"}}, "hyperparameters of"),
        ({"versions": []}, "versions of"),
        ({"device": None}, "device of"),
        ({"message": 5}, "message of"),
        ({"resumed_from": -2}, "resumed_from of"),
    ],
)
def test_other_json_is_refused(changes, message):
    values = json.loads(make_result().to_json()) | (changes or {})
    values = {name: value for name, value in values.items() if value is not ...}
    with pytest.raises(RecordError, match=message):
        TrialResult.from_json("[]" if changes is None else json.dumps(values))


@pytest.mark.parametrize(
    # Deeper than Python's reader goes, and more digits than it takes, 4300.
    "text",
    ["", "{", "null", "3", "[" * 100_000, '{"lr": ' + "9" * 5000 + "}"],
)
def test_what_is_no_json_object_is_refused(text):
    with pytest.raises(RecordError):
        TrialResult.from_json(text)


def test_time_to_target():
    assert make_result().time_to_target == 1.0
    assert (
        make_result(status="stopped").time_to_target
        is make_result(seconds_per_step=None).time_to_target
        is None
    )
