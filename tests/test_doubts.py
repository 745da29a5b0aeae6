"""Targets that may not be the ones that were meant are asked about, and refused nowhere."""

import pytest

from bstune.core.records import Target
from bstune.study.planning.doubts import doubt_of_direction, doubt_of_scale
from bstune.study.prepare import compose_checked, prepare


@pytest.mark.parametrize(
    ("metric", "mode", "is_doubted"),
    [
        ("val_f1", "min", True),
        ("val_f1", "max", False),
        ("val_loss", "max", True),
        ("val_loss", "min", False),
        # The name tells no direction.
        ("val_x", "max", False),
    ],
)
def test_a_direction_that_the_metrics_name_contradicts_is_doubted(metric, mode, is_doubted):
    assert (doubt_of_direction(Target(metric, 0.5, mode)) is not None) == is_doubted


@pytest.mark.parametrize(
    ("target", "start", "meant"),
    [
        (Target("val_knn_acc", 74.0, "max"), 0.68, "0.74"),
        (Target("val_acc", 100.0, "max"), 0.01, "1"),
        # A fraction, a start that is no share, a metric that falls, and a start that is not known.
        (Target("val_acc", 0.74, "max"), 0.68, None),
        (Target("val_acc", 1.0, "max"), 0.68, None),
        (Target("val_acc", 74.0, "max"), 9.8, None),
        (Target("val_reward", 200.0, "max"), 0.5, None),
        (Target("val_loss", 2.0, "min"), 0.5, None),
        (Target("val_acc", 74.0, "max"), None, None),
        # A metric that starts beyond the share that would be meant, or at 0, is another one.
        (Target("psnr", 20.0, "max"), 0.8, None),
        (Target("bleu", 30.0, "max"), 0.0, None),
        (Target("val_acc", 0.0, "max").never_met, 0.1, None),
    ],
)
def test_a_target_in_percent_of_a_metric_that_is_a_share_is_doubted(target, start, meant):
    doubt = doubt_of_scale(target, start)
    assert (doubt is None) == (meant is None)
    if doubt is not None:
        assert f" {meant} is meant" in doubt


def test_the_first_steps_tell_the_metrics_scale(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ("device=cpu", "search.workers=0", "hardware.enabled=false", "mlflow.enabled=false")
    target = ("workload.target.metric=val/error", "workload.target.mode=max", "target=99")
    composed = compose_checked(["workload=digits", *options, *target])
    lines = []
    prepare(composed.options, composed.recipe, lines.append).close()
    assert [line for line in lines if "0.99 is meant" in line]
