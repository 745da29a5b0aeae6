"""How many steps were applied, where a gradient scaler skips some."""

from types import SimpleNamespace

import pytest
from made_parts import make_state, make_trainer
from torch import tensor

from bstune.trial.parts.step_count import SKIPPED_STEPS_MEAN_DIVERGED, StepCount


class Scaler:
    """Halves its scale at the steps that it skips."""

    def __init__(self):
        self.scale = 2.0**200

    def get_scale(self):
        return self.scale


def counted(skips, adds_steps=True, max_steps=-1, scaler=True):
    """Count steps, of which some are ``skips``; return the state and the Trainer."""
    scaler = Scaler() if scaler else None
    trainer = make_trainer(precision_plugin=SimpleNamespace(scaler=scaler), max_steps=max_steps)
    trainer.fit_loop.epoch_loop.max_steps = max_steps
    state = make_state(10, skipped=1, loss=tensor(1.0))
    count = StepCount(state, adds_steps)
    # Without an optimizer of its own, whether a step was skipped is read from the scale.
    count.begin(trainer, SimpleNamespace(automatic_optimization=True))
    for is_skipped in skips:
        if is_skipped and scaler is not None:
            scaler.scale /= 2
        count.end_step(trainer)
    return state, trainer


@pytest.mark.parametrize(
    ("skips", "scaler", "steps", "skipped"),
    [
        ([False, False, False], False, 13, 1),
        ([False, False, False], True, 13, 1),
        ([True, False, True], True, 11, 3),
        # Without a scaler, none is skipped.
        ([True, False, True], False, 13, 1),
    ],
)
def test_a_skipped_step_is_none(skips, scaler, steps, skipped):
    state, trainer = counted(skips, scaler=scaler)
    assert (state.steps, state.skipped, state.status) == (steps, skipped, "stopped")
    assert not trainer.should_stop


@pytest.mark.parametrize(
    ("adds_steps", "max_steps", "expected"),
    [
        (True, 40, 42),
        # A horizon ends the Trainer.
        (False, 40, 40),
        # It counts epochs alone.
        (True, -1, -1),
    ],
)
def test_the_trainer_makes_up_for_skipped_steps(adds_steps, max_steps, expected):
    _, trainer = counted([True, False, True], adds_steps, max_steps)
    assert trainer.fit_loop.epoch_loop.max_steps == expected


@pytest.mark.parametrize(
    ("skips", "diverged"),
    [
        ([True] * SKIPPED_STEPS_MEAN_DIVERGED, True),
        ([True] * (SKIPPED_STEPS_MEAN_DIVERGED - 1), False),
        ([True] * (SKIPPED_STEPS_MEAN_DIVERGED - 1) + [False] + [True] * 49, False),
    ],
)
def test_many_skipped_steps_in_a_row_are_divergence(skips, diverged):
    state, trainer = counted(skips)
    assert trainer.should_stop == diverged
    assert state.status == ("diverged" if diverged else "stopped")
    assert state.message == ("the gradients overflowed in 50 steps in a row" if diverged else None)
