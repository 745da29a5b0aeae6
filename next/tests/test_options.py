"""Every option: its name, what it takes, what it refuses and in which words of its own."""

import math
from functools import reduce

import pytest
from refusals import refused

from bstune.config import options_from_python
from bstune.core.errors import InputError
from bstune.core.records import Target
from bstune.options import (
    OPTION_NAMES,
    Options,
    options_from,
    space_of,
)

TARGET = "val/loss <= 0.1"
GIVEN = {
    "workload": "digits",
    "target": TARGET,
    "budget": {"steps": 400},
    "batch_size": (4, 1200),
    "baseline": (64, 0.4),
}

COUNT = ([1, 4096], [0, 1.5, True, "3"])
COUNT_OR_NULL = ([None, *COUNT[0]], COUNT[1])
POSITIVE_OR_NULL = ([None, 0.5, 120], [0, -1.0, math.inf, math.nan, "2 min"])
FLAG = ([True, False], ["yes", None])
TEXT = (["a"], ["", None])
TEXT_OR_NULL = ([None, "a"], [3])
NODE = ([None, {"_target_": "a.B"}], ["a.B", []])
VALUES = ([None, {"a": 1}, {"a": 0.5}], [3])
CHOICE = ([None, "sgd", {"_target_": "a.B"}], [3])
# The options of design.md, section 1: values that the model takes, and values that it refuses.
OPTIONS = {
    "workload": TEXT_OR_NULL,
    "objective": (["time", "metric"], ["loss", None]),
    "target": (
        [None, "acc >= 1", Target("val/loss", 0.1, "min")],
        ["val/loss", "val/loss < 0.1", "a <= inf"],
    ),
    "budget.steps": COUNT_OR_NULL,
    "budget.examples": COUNT,
    "budget.seconds": POSITIVE_OR_NULL,
    "batch_size.low": COUNT_OR_NULL,
    "batch_size.high": COUNT_OR_NULL,
    "batch_size.multiple": COUNT_OR_NULL,
    "lr.low": POSITIVE_OR_NULL,
    "lr.high": POSITIVE_OR_NULL,
    "baseline.batch_size": COUNT_OR_NULL,
    "baseline.lr": POSITIVE_OR_NULL,
    "baseline.values": VALUES,
    "scaling": (["none", "surge", None], ["cubic"]),
    "tune": ([None, ["dropout"], {"dropout": [0, 0.5]}], ["dropout"]),
    "trials": COUNT,
    "wall_seconds": POSITIVE_OR_NULL,
    "seeds": ([1, 100], [0, 101]),
    "workers": ([0, 3], [-1]),
    "sampler": (["frontier", "grid"], ["bohb"]),
    "seed": ([0, 2**32 - 1], [-1, 2**32]),
    "study": TEXT_OR_NULL,
    "data": NODE,
    "module": NODE,
    "trainer": NODE,
    "precision": (["auto", "bf16-true"], ["fp8"]),
    "compile": ([None, "max-autotune"], [True]),
    "micro_batch_size": COUNT_OR_NULL,
    "algorithm": CHOICE,
    "schedule": CHOICE,
    "schedule_ends": FLAG,
    "override_lr": FLAG,
    "validation_batch_size": ([None, "trial"], [8]),
    "trial_seconds": POSITIVE_OR_NULL,
    "noise_scale": FLAG,
    "device": (["auto", "cuda"], ["tpu"]),
    "devices": COUNT,
    "threads": COUNT_OR_NULL,
    "survey": (["auto", "off", "refresh", False], ["on"]),
    "survey_seconds": ([0.5], [0, None]),
    "memory_limit": COUNT_OR_NULL,
    "trial.batch_size": COUNT_OR_NULL,
    "trial.lr": POSITIVE_OR_NULL,
    "trial.values": VALUES,
    "trial.steps": COUNT_OR_NULL,
    "trial.seed": ([0, 7], [-1]),
    "output": TEXT,
    "storage": TEXT,
    "data_root": TEXT,
    "mlflow.uri": TEXT_OR_NULL,
    "mlflow.experiment": TEXT,
    "debug": FLAG,
}
BAD = [(name, value) for name, (_, bad) in OPTIONS.items() for value in bad]


SMALL = options_from_python(**GIVEN)


def values(**changes):
    """Give all options of a small study as plain values, some of them changed by dotted name."""
    nested = SMALL.model_dump(mode="json")
    for name, value in changes.items():
        section, _, key = name.rpartition(".")
        (nested[section] if section else nested)[key] = value
    return nested


def test_names_are_those_of_the_design():
    assert list(OPTION_NAMES) == list(OPTIONS)


@pytest.mark.parametrize("name", OPTIONS)
def test_takes(name):
    for value in OPTIONS[name][0]:
        Options.model_validate(values(**{name: value}))


@pytest.mark.parametrize(("name", "value"), BAD)
def test_refuses(name, value):
    with pytest.raises(InputError, match=rf"\A{name}.*must.*\Z") as error:
        options_from(values(**{name: value}))
    assert repr(value) in str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"trails": 3}, "trails, trials"),
        ({"budget.step": 3}, "budget.step, budget.steps"),
        ({"budget": 400}, "budget, 400, steps"),
        ({"batch_size.low": 2000}, "batch_size.low, 2000, batch_size.high, 1200"),
        ({"batch_size.high": 63}, "baseline.batch_size, 64, 4, 63"),
        ({"batch_size.multiple": 8}, "batch_size.low, 4, 8"),
        ({"batch_size.multiple": 8, "batch_size.low": 8, "batch_size.high": 99}, "high, 99"),
        ({"lr.high": 0.3}, "baseline.lr, 0.4, 0.3"),
        ({"lr.low": 0.4, "lr.high": 0.4}, "lr.low, 0.4, lr.high"),
        ({"micro_batch_size": 1201}, "micro_batch_size, 1200, 1201"),
        ({"devices": 3}, "baseline.batch_size, devices=3, 64"),
        ({"devices": 2, "workers": 0}, "devices=2, workers=0"),
        ({"devices": 2, "noise_scale": True}, "devices=2, noise_scale=true"),
        ({"objective": "curve", "batch_size.low": 64, "batch_size.high": 64}, "curve, 64"),
        ({"sampler": "grid", "schedule_ends": True}, "sampler=grid, schedule_ends"),
        ({"trial.batch_size": 8}, "trial.lr"),
        # A budget of 400 steps.
        (
            {"trial.batch_size": 100, "trial.lr": 0.1, "trial.steps": 401},
            "trial.steps, 400, 401, budget.steps",
        ),
    ],
)
def test_relations(changes, words):
    with refused(words):
        options_from(values(**changes))


def test_two_mistakes_are_two_lines():
    with pytest.raises(InputError) as error:
        options_from(values(trials=0, seeds=0))
    assert [line.split()[0] for line in str(error.value).splitlines()] == ["trials", "seeds"]


def test_a_password_is_not_shown():
    with pytest.raises(InputError) as error:
        options_from(values(storage=["postgresql://me:s3cret@host/db"]))
    assert "s3cret" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ({}, "baseline.lr", 0.4),
        ({}, "study", "digits"),
        ({}, "output", "outputs/digits"),
        ({"seed": 3}, "trial.seed", 3),
        ({"budget": 50}, "budget.steps", 50),
        ({"budget": {"examples": 9000}}, "budget.steps", 1),
        ({"lr": (1e-4, 1)}, "lr.high", 1),
        ({"batch_size": {"low": 8, "high": 64, "multiple": 8}}, "batch_size.multiple", 8),
        ({"baseline": None, "lr": (1e-4, 1)}, "baseline.batch_size", None),
        # A goal keeps all its digits.
        ({"target": Target("a", 1 / 3, "max")}, "target", Target("a", 1 / 3, "max")),
    ],
)
def test_spelling_of_python(given, name, value):
    options = options_from_python(**{**GIVEN, **given})
    assert reduce(getattr, name.split("."), options) == value


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"batch_size": 64}, "batch_size, 64, low"),
        ({"batch_size": (1, 2, 3)}, "batch_size, (1, 2, 3), low"),
        ({"baseline": "64"}, "baseline, 64, lr"),
    ],
)
def test_python_mistakes(given, words):
    with refused(words):
        options_from_python(**{**GIVEN, **given})


@pytest.mark.parametrize(
    ("changes", "lr_low", "lr_high"),
    [
        # sqrt: 0.4 (4/64)^0.5 = 0.1 and 0.4 (1024/64)^0.5 = 1.6, ten octaves beyond.
        ({"batch_size.high": 1024}, 0.1 / 1024, 1.6 * 1024),
        ({"lr.low": 0.01, "scaling": "none"}, 0.01, 0.4 * 1024),
    ],
)
def test_the_rates_of_a_space(changes, lr_low, lr_high):
    space = space_of(options_from(values(**changes)), "cpu")
    assert (space.lr_low, space.lr_high) == pytest.approx((lr_low, lr_high))
    assert space.anchor == (64, 0.4)


@pytest.mark.parametrize(
    ("changes", "device", "low", "multiple"),
    [
        # Tensor cores like multiples of 8.
        ({"precision": "bf16-mixed"}, "cuda", 8, 8),
        ({"precision": "bf16-mixed"}, "cpu", 4, 1),
        ({"batch_size.multiple": 4}, "cuda", 4, 4),
        # Devices share each batch equally.
        ({"devices": 16}, "cpu", 16, 16),
    ],
)
def test_the_sizes_of_a_space(changes, device, low, multiple):
    space = space_of(options_from(values(**changes)), device)
    assert (space.low, space.high, space.multiple) == (low, 1200, multiple)


def test_space_without_a_baseline_is_anchored_in_the_middle():
    given = {**GIVEN, "baseline": None, "batch_size": (4, 1024), "lr": (1e-4, 1)}
    assert space_of(options_from_python(**given), "cpu").anchor == pytest.approx((64, 0.01))


def test_no_baseline_and_no_range_of_rates():
    options = options_from_python(**{**GIVEN, "baseline": None})
    with pytest.raises(InputError, match=r"lr\.low.*baseline"):
        space_of(options, "cpu")
