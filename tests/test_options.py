"""Every option: its name, what it takes, what it refuses and in which words of its own."""

from functools import reduce

import pytest
import yaml
from refusals import as_yaml, cases, refused, rows, text_cases

from bstune.config import options_from_python
from bstune.core.errors import InputError
from bstune.core.records import Target
from bstune.options import OPTION_NAMES, Options, options_from, space_of
from bstune.study.machine import RECORDED

GIVEN = {
    "workload": "digits",
    "target": "val/loss <= 0.1",
    "budget": {"steps": 400},
    "batch_size": (4, 1200),
    "baseline": (64, 0.4),
}

# All options: values that the model takes, and values that it refuses.
OPTIONS = rows("""
workload study mlflow.uri | null, a | 3
output storage data_root mlflow.experiment | a | '', null, "a\\0b"
objective | time, metric | loss, null
target | null, acc >= 1 | val/loss, val/loss < 0.1, a <= inf
budget.examples devices | 1, 64 | 0, 1.5, true, '3', null
trials | 1, 4096 | 0, 1.5, true, '3', 9223372036854775808
budget.steps threads memory_limit trial.batch_size | null, 1, 4096 | 0, 1.5, true, '3'
batch_size.low batch_size.multiple | null, 4 | 0, 1.5, true, '3'
batch_size.high micro_batch_size | null, 1200 | 0, 1.5, true, '3'
baseline.batch_size trial.steps | null, 8 | 0, 1.5, true, '3'
budget.seconds wall_seconds trial_seconds trial.lr | null, 0.5, 120 | 0, -1.0, .inf, .nan, 2 min
lr.low baseline.lr | null, 0.4 | 0, -1.0, .inf, .nan, 2 min
lr.high | null, 9 | 0, -1.0, .inf, .nan, 2 min
baseline.values trial.values | null, {a: 1}, {a: 0.5} | 3
scaling | none, surge, null | cubic
tune | null, [dropout], {dropout: [0, 0.5]} | dropout
seeds | 1, 100 | 0, 101
workers | 0, 3 | -1, 1001
sampler | frontier, grid | bohb
seed | 0, 4294967295 | -1, 4294967296
data module trainer | null, {_target_: a.B} | a.B, []
precision | auto, bf16-true | fp8
compile | null, max-autotune | true
algorithm schedule | null, sgd, {_target_: a.B} | 3
schedule_ends override_lr noise_scale debug | true, false | 'yes', null
validation_batch_size | null, trial | 8
device | auto, cuda | tpu
survey | auto, off, refresh, false | on
survey_seconds | 0.5 | 0, null
trial.seed | 0, 7 | -1
""")


SMALL = options_from_python(**GIVEN)


def values(**changes):
    """Give all options of a small study as plain values, some of them changed by dotted name."""
    nested = SMALL.model_dump(mode="json")
    for name, value in changes.items():
        section, _, key = name.rpartition(".")
        (nested[section] if section else nested)[key] = value
    return nested


def test_all_options_are_tried():
    assert sorted(OPTION_NAMES) == sorted(" ".join(names for names, *_ in OPTIONS).split())


@pytest.mark.parametrize("names, taken, refuses", OPTIONS)
def test_takes_and_refuses(names, taken, refuses):
    for name in names.split():
        for value in yaml.safe_load(f"[{taken}]"):
            Options.model_validate(values(**{name: value}))
        for value in yaml.safe_load(f"[{refuses}]"):
            with refused(f"{name}, must, {value!r}"):
                options_from(values(**{name: value}))


@text_cases("""
changes | words
trails: 3 | trails, trials
budget.step: 3 | budget.step, budget.steps
budget: 400 | budget, 400, steps
batch_size.low: 2000 | batch_size.low, 2000, batch_size.high, 1200
batch_size.high: 63 | baseline.batch_size, 64, 4, 63
batch_size.multiple: 8 | batch_size.low, 4, 8
batch_size.multiple: 8, batch_size.low: 8, batch_size.high: 99 | high, 99
lr.high: 0.3 | baseline.lr, 0.4, 0.3
lr.low: 0.4, lr.high: 0.4 | lr.low, 0.4, lr.high
micro_batch_size: 1201 | micro_batch_size, 1200, 1201
devices: 3 | baseline.batch_size, devices=3, 64
devices: 2, workers: 0 | devices=2, workers=0
devices: 2, noise_scale: true | devices=2, noise_scale=true
objective: curve, batch_size.low: 64, batch_size.high: 64 | curve, 64
sampler: grid, schedule_ends: true | sampler=grid, schedule_ends
trial.batch_size: 8 | trial.lr
trial.batch_size: 100, trial.lr: 0.1, trial.steps: 401 | trial.steps, 400, 401, budget.steps
""")
def test_relations(changes, words):
    with refused(words):
        options_from(values(**as_yaml(changes)))


def test_two_mistakes_are_two_lines_without_passwords():
    with pytest.raises(InputError) as error:
        options_from(values(trials=0, storage=["postgresql://me:s3cret@host/db"]))
    assert [line.split()[0] for line in str(error.value).splitlines()] == ["trials", "storage"]
    assert "s3cret" not in str(error.value)


@text_cases("""
given | name | value
- | baseline.lr | 0.4
- | output | outputs/digits
seed: 3 | trial.seed | 3
budget: 50 | budget.steps | 50
budget: {examples: 9000} | budget.steps | 1
lr: [0.0001, 1.5] | lr.high | 1.5
batch_size: {low: 8, high: 64, multiple: 8} | batch_size.multiple | 8
""")
def test_spelling_of_python(given, name, value):
    options = options_from_python(**GIVEN | as_yaml(given))
    assert str(reduce(getattr, name.split("."), options)) == value
    # A goal keeps all its digits.
    target = Target("a", 1 / 3, "max")
    assert options_from_python(**GIVEN | {"target": target}).target == target


@text_cases("""
given | words
batch_size: 64 | batch_size, 64, low
batch_size: [1, 2, 3] | batch_size, [1, 2, 3], low
baseline: '64' | baseline, '64', lr
""")
def test_python_mistakes(given, words):
    with refused(words):
        options_from_python(**GIVEN | as_yaml(given))


@pytest.mark.parametrize(
    "changes, lr_low, lr_high",
    [
        # sqrt: 0.4 (4/64)^0.5 = 0.1 and 0.4 (1024/64)^0.5 = 1.6, ten octaves beyond.
        ({"batch_size.high": 1024}, 0.1 / 1024, 1.6 * 1024),
        ({"lr.low": 0.01, "scaling": "none"}, 0.01, 0.4 * 1024),
    ],
)
def test_the_rates_of_a_space(changes, lr_low, lr_high):
    space = space_of(options_from(values(**changes)), False)
    assert (space.lr_low, space.lr_high) == pytest.approx((lr_low, lr_high))
    assert space.anchor == (64, 0.4)


@cases("""
changes | device | precision | low | multiple
# Tensor cores like multiples of 8.
{} | 2 x NVIDIA H200 | bf16-mixed | 8 | 8
{} | NVIDIA H200 | 32-true | 4 | 1
# Of a loop nobody tells the precision.
{} | NVIDIA H200 | '' | 4 | 1
{} | cpu | bf16-mixed | 4 | 1
{batch_size.multiple: 4} | NVIDIA H200 | bf16-mixed | 4 | 4
# Devices share each batch equally.
{devices: 16} | cpu | 32-true | 16 | 16
""")
def test_the_sizes_of_a_space(changes, device, precision, low, multiple):
    machine = RECORDED.model_copy(update={"device": device, "precision": precision})
    space = space_of(options_from(values(**changes)), machine.fills_tensor_cores)
    assert (space.low, space.high, space.multiple) == (low, 1200, multiple)


def test_without_a_baseline_a_space_needs_a_range_of_rates_and_is_anchored_in_its_middle():
    given = GIVEN | {"baseline": None, "batch_size": (4, 1024)}
    with refused("lr.low, baseline"):
        space_of(options_from_python(**given), False)
    space = space_of(options_from_python(**given, lr=(1e-4, 1)), False)
    assert space.anchor == pytest.approx((64, 0.01))
