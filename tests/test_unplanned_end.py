"""How a trial has ended that no evaluation ended."""

import math
from types import SimpleNamespace

import pytest
import torch
from made_parts import make_state, make_trainer
from torch import nn, tensor

from bstune.trial.parts.unplanned_end import explain_end, what_is_not_finite

# As Lightning's EarlyStopping has it.
EARLY = SimpleNamespace(stopping_reason_message="Monitored metric did not improve.\nBest: 0.3")
SILENT = SimpleNamespace(stopping_reason_message=None)
OTHER = SimpleNamespace()


@pytest.mark.parametrize(
    ("changes", "trainer", "message"),
    [
        ({"ended": True}, {"should_stop": True}, None),
        ({"status": "diverged"}, {"should_stop": True}, None),
        ({}, {"should_stop": True}, "by the module or a call-back"),
        ({}, {"should_stop": True, "callbacks": [OTHER, SILENT]}, "by the module or a call-back"),
        (
            {},
            {"should_stop": True, "callbacks": [SILENT, EARLY]},
            "Monitored metric did not improve.",
        ),
        ({}, {"max_epochs": 3}, "by itself"),
    ],
)
def test_what_stopped_a_trial_is_told(changes, trainer, message):
    state = make_state(5, **changes)
    explain_end(state, make_trainer(**trainer))
    expected = None if message is None else f"the training was stopped at step 5: {message}"
    assert state.message == expected


@pytest.mark.parametrize(
    ("first_step", "max_epochs"),
    [
        # An endless epoch has no end.
        (0, 1),
        # No epoch is without a step.
        (5, 3),
    ],
)
def test_a_training_that_ends_by_itself_is_an_error(first_step, max_epochs):
    state = make_state(5, first_step=first_step)
    with pytest.raises(RuntimeError, match="the training ended by itself at step 5"):
        explain_end(state, make_trainer(max_epochs=max_epochs))


def layer(weight=1.0, bias=0.0):
    made = nn.Linear(1, 1)
    with torch.no_grad():
        made.weight.fill_(weight)
        made.bias.fill_(bias)
    return made


@pytest.mark.parametrize(
    ("loss", "module", "lost"),
    [
        (tensor(1.0), layer(), None),
        (None, None, None),
        (tensor(math.inf), layer(), "the training loss is inf"),
        # The loss comes first, then the first parameter.
        (tensor([1.0, math.nan]), layer(math.nan), "the training loss is nan"),
        (None, layer(math.nan, math.inf), "weight is not finite"),
        (tensor(1.0), layer(bias=-math.inf), "bias is not finite"),
    ],
)
def test_a_loss_or_a_weight_may_be_lost(loss, module, lost):
    assert what_is_not_finite(make_state(loss=loss), module) == lost


def test_a_device_that_does_not_compute_any_more_tells_nothing():
    class Broken(torch.Tensor):
        def isfinite(self):
            raise RuntimeError("CUDA error: device-side assert triggered")

    assert what_is_not_finite(make_state(loss=torch.ones(1).as_subclass(Broken)), None) is None
