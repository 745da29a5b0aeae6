"""What follows from what a project tells: metric and direction, options, a target that is found."""

import pytest
import yaml
from refusals import as_yaml, cases, refused, text_cases

from bstune.config import options_from_python
from bstune.recipe.found import (
    Found,
    chosen_metric,
    fill_by_found,
    fill_by_pilot,
    fill_by_stored,
    mode_by_name,
    target_of,
)

TOLD = Found(
    batch_size=64,
    lr=0.1,
    examples=1500,
    epochs=None,
    steps=None,
    limit_train_batches=1.0,
    metrics=("val_loss",),
    metric="val_loss",
    untrained=2.3,
    mode="min",
    rule="linear",
    sources=dict.fromkeys(("batch_size", "lr", "steps", "epochs", "metric"), "there"),
)


@cases("""
metric | mode
valLoss | min
val.mAP | max
val_f1_loss | min
glossary | null
neg_log_loss | null
""")
def test_direction_by_name(metric, mode):
    assert mode_by_name(metric) == mode


@text_cases("""
metrics | monitors | expected
val_acc val_loss | - | val_loss min
val_acc val_loss | val_acc: min | val_acc max
a b | b: max | b max
val_acc val_loss | train_loss: min | val_loss min
score | - | score None
- | val_loss: min | None None
""")
def test_the_metric_that_is_meant(metrics, monitors, expected):
    found = chosen_metric(metrics.strip("-").split(), as_yaml(monitors))
    assert " ".join(map(str, found[:2])) == expected


def complete(found=TOLD, given=None, **changes):
    options = options_from_python(workload="own", **(given or {}))
    return fill_by_found(options, found.model_copy(update=changes), lambda options: repr(options))


@text_cases("""
given | changes | sizes | pair | lasts
# A sixteenth and 32 times 64, but no more than the training set.
- | - | 4, 1500 | 64, 0.1 | null
budget: 90 | epochs: 10 | 4, 1500 | 64, 0.1 | 90, 90, 90
# Ten epochs of 1500 examples are 235 steps of 64, 3760 of 4, and half as many at least.
- | epochs: 10 | 4, 1500 | 64, 0.1 | 3760, 235, 117
- | epochs: 10, steps: 200 | 4, 1500 | 64, 0.1 | 3200, 200, 100
# Ranges say which rates to try.
batch_size: [8, 64], lr: [0.1, 1] | lr: null | 8, 64 | null | null
""")
def test_what_nobody_gave_is_filled(given, changes, sizes, pair, lasts):
    options, _ = complete(given=as_yaml(given), **as_yaml(changes))
    of_budget = None
    if not options.is_open("budget.steps"):
        of_budget = [options.budget.last_step(size) for size in (4, 64, 1500)]
    filled = [options.batch_size.low, options.batch_size.high], options.baseline.pair, of_budget
    for found, expected in zip(filled, (sizes, pair, lasts), strict=True):
        assert list(found or [None]) == yaml.safe_load(f"[{expected}]")
    assert options.scaling == "linear"
    assert options.is_open("target")


@text_cases("""
given | changes | words
- | batch_size: null, lr: null, metrics: [], metric: null | baseline.batch_size, baseline.lr, target
- | metrics: [a, b], metric: null | a, b, target
- | metric: score, mode: null | score, target
baseline: [4096, 0.1] | - | 1500, 4096
""")
def test_all_that_is_missing_is_one_line(given, changes, words):
    with refused(words):
        complete(given=as_yaml(given), **as_yaml(changes))


@cases("""
mode | untrained | values | goal
# 0.5 + 5% of 1.8, and a quarter of 0.4.
min | 2.3 | [0.9, 0.5, 0.6] | 0.59
min | 1000000 | [0.9, 0.4] | 0.5
max | 0.1 | [0.5, 0.9] | 0.86
max | -9.0 | [-2.0, -1.0] | -1.3
""")
def test_a_target_that_is_found(mode, untrained, values, goal):
    target = target_of("m", mode, untrained, list(enumerate(values)))
    assert target.goal == pytest.approx(goal, rel=1e-9)
    assert target.reached(target.best(values))
    assert not target.reached(untrained)


@pytest.mark.parametrize("history", [[], [(5, 3.0), (9, 2.4)]])
def test_a_metric_that_does_not_improve(history):
    with refused("did not improve"):
        target_of("val_loss", "min", 2.3, history)


def test_a_begun_study_goes_on_with_what_was_found():
    options, _ = complete(given={"batch_size": {"high": 9000}})
    options, _ = fill_by_pilot(options, TOLD, [(100, 0.9), (200, 0.5), (300, 0.45)])
    assert options.budget.last_step(64) == 600
    stored = options.model_dump(mode="json") | {"target": str(options.target), "examples": 1500}
    again = options_from_python(workload="own", batch_size={"high": 9000})
    assert fill_by_stored(again, stored.get) == options
    assert fill_by_stored(again, {}.get) == again
