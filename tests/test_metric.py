"""The target's metric, as it was logged in this evaluation or in an earlier one."""

import math
from types import SimpleNamespace

import pytest
import torch
from made_parts import make_trainer
from torch import tensor
from torch.utils.data import DataLoader

from bstune.core.errors import ConfigError
from bstune.trial.parts.metric import LoggedMetric, checks_all_data, mean_loss, metric

NAME = "val/error"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (tensor(0.25), 0.25),
        # Read as a double, it would be 0.10000000149.
        (tensor(0.1), 0.1),
        (tensor(0.1, dtype=torch.float64), 0.1),
        # The nearest number of a bfloat16.
        (tensor(0.1, dtype=torch.bfloat16), 0.10009765625),
        (tensor(3), 3.0),
        (tensor(math.nan), None),
        (tensor(math.inf), None),
        (tensor(-math.inf, dtype=torch.float64), None),
    ],
)
def test_a_value_is_the_shortest_decimal_of_its_type(value, expected):
    trainer = make_trainer(callback_metrics={NAME: value})
    assert metric(trainer, NAME) == expected
    assert LoggedMetric(NAME).value(trainer) == expected


@pytest.mark.parametrize(
    ("logged", "text"),
    [({}, "logs nothing in"), ({"b": tensor(1), "a": tensor(1)}, "logs a, b in")],
)
def test_a_metric_that_is_not_logged_is_named(logged, text):
    with pytest.raises(
        ConfigError, match=f"the target's metric is '{NAME}', but the module {text}"
    ):
        metric(make_trainer(callback_metrics=logged), NAME)


@pytest.mark.parametrize(
    # A value of the evaluation before, and one of this, which may be equal.
    ("before", "after", "is_from_before"),
    [
        (None, tensor(0.5), False),
        (tensor(0.5), tensor(0.5), False),
        (tensor(0.5), None, True),
    ],
)
def test_a_value_that_is_still_there_is_from_before(before, after, is_from_before):
    trainer = make_trainer()
    logged = LoggedMetric(NAME)
    if before is not None:
        trainer.callback_metrics[NAME] = before
    assert logged.is_logged(trainer) == (before is not None)
    logged.before_evaluation(trainer)
    if after is not None:
        trainer.callback_metrics[NAME] = after
    assert logged.is_logged(trainer)
    assert logged.is_from_before(trainer) == is_from_before


@pytest.mark.parametrize(
    ("loss", "mean"),
    [
        (None, 0.0),
        ("no tensor", 0.0),
        (tensor(2.0, requires_grad=True), 2.0),
        (tensor([1, 2]), 1.5),
        (tensor([1.0, math.inf]), math.inf),
    ],
)
def test_the_mean_of_a_loss(loss, mean):
    assert mean_loss(loss) == mean


@pytest.mark.parametrize(
    ("lengths", "checked", "expected"),
    [
        ([10], [10], True),
        ([10], [9], False),
        ([10, 5], [10, 5], True),
        ([10, 5], [10, 4], False),
        # A loader without a length has been looked at whole only where all of it is asked for.
        ([None], [2], False),
        ([None], [math.inf], True),
        # There was nothing to look at.
        ([0], [0], False),
    ],
)
def test_the_sanity_check_may_take_all_data(lengths, checked, expected):
    loaders = [iter(()) if n is None else DataLoader(range(n)) for n in lengths]
    trainer = SimpleNamespace(val_dataloaders=loaders, num_sanity_val_batches=checked)
    assert checks_all_data(trainer) == expected
