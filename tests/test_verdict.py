"""What an evaluation says of a trial, in a table of values, losses and steps."""

import math

import pytest
from made_parts import make_state

from bstune.core.errors import ConfigError
from bstune.core.records import Target
from bstune.trial.parts.verdict import Verdict, refuse_met_target

ERROR = Target("val/error", 0.1, "min")
ACCURACY = Target("val/accuracy", 0.9, "max")


@pytest.mark.parametrize(
    ("target", "value", "loss", "steps", "status", "ended", "low", "message"),
    [
        # Missed on its way: the target lies beyond step 40.
        (ERROR, 0.5, 1.0, 40, "stopped", False, 40, None),
        # Met: somewhere after the miss at step 30.
        (ERROR, 0.1, 1.0, 40, "reached", True, 30, None),
        (ERROR, 0.1, 1.0, 100, "reached", True, 30, None),
        # At 100 the budget ends.
        (ERROR, 0.5, 1.0, 100, "stopped", True, 100, None),
        (ACCURACY, 0.9, 1.0, 40, "reached", True, 30, None),
        (ACCURACY, 0.89, 1.0, 40, "stopped", False, 40, None),
        # Even where the metric would do.
        (ERROR, 0.1, math.nan, 40, "diverged", True, 40, "the training loss is nan at step 40"),
        (ERROR, 0.5, math.inf, 40, "diverged", True, 40, "the training loss is inf at step 40"),
        (ERROR, None, 1.0, 40, "diverged", True, 40, "val/error is not finite at step 40"),
        # Twice the 0.8 that it was away at its start are 1.6.
        (ERROR, 1.69, 1.0, 40, "stopped", False, 40, None),
        (
            ERROR,
            1.71,
            1.0,
            40,
            "diverged",
            True,
            40,
            "val/error is 1.71 at step 40, far past its start",
        ),
        # 0.9 + 0.75 = 1.65.
        (
            ACCURACY,
            -0.75,
            1.0,
            40,
            "diverged",
            True,
            40,
            "val/accuracy is -0.75 at step 40, far past its start",
        ),
    ],
)
def test_an_evaluation_is_judged(target, value, loss, steps, status, ended, low, message):
    state = make_state(steps, steps_low=30, history=[(30, 0.6)])
    Verdict(state, target, divergence=2.0, start_gap=0.8).judge(value, loss)
    assert (state.status, state.ended, state.steps_low) == (status, ended, low)
    assert state.message == message
    assert state.history == [(30, 0.6), (steps, value)]


def test_without_a_start_no_value_is_far_past_it():
    state = make_state(40)
    Verdict(state, ERROR, divergence=2.0).judge(1e9, 1.0)
    assert (state.status, state.ended) == ("stopped", False)


@pytest.mark.parametrize(
    ("loss", "steps", "status", "ended"),
    [
        (1.0, 40, "stopped", False),
        (1.0, 100, "stopped", True),
        (math.nan, 40, "diverged", True),
        (math.nan, 100, "diverged", True),
    ],
)
def test_an_evaluation_without_the_metric_tells_nothing_of_it(loss, steps, status, ended):
    state = make_state(steps, steps_low=30)
    Verdict(state, ERROR, divergence=2.0, start_gap=0.8).judge_by_loss(loss)
    assert (state.status, state.ended) == (status, ended)
    assert (state.steps_low, state.history) == (30, [])
    assert state.message == (
        f"the training loss is nan at step {steps}" if math.isnan(loss) else None
    )


def test_the_start_is_a_distance_from_the_target():
    for target, value, gap in ((ERROR, 0.9, 0.8), (ACCURACY, 0.2, 0.7)):
        verdict = Verdict(make_state(), target, divergence=2.0)
        assert verdict.start_gap is None
        verdict.begin(value)
        assert verdict.start_gap == pytest.approx(gap)


@pytest.mark.parametrize(("target", "value"), [(ERROR, 0.1), (ERROR, 0.0), (ACCURACY, 0.95)])
def test_a_target_that_is_met_before_training_is_refused(target, value):
    text = f"is met before training \\({target.metric} starts at {value:g}\\)"
    with pytest.raises(ConfigError, match=text):
        refuse_met_target(target, value)
    verdict = Verdict(make_state(), target, divergence=2.0)
    with pytest.raises(ConfigError, match=text):
        verdict.begin(value)
    assert verdict.start_gap is None


@pytest.mark.parametrize(("sets_goal", "kept"), [(True, ((0, 0.68),)), (False, ())])
def test_a_trial_that_sets_the_goal_keeps_the_metric_before_training(sets_goal, kept):
    state = make_state()
    Verdict(state, ACCURACY.never_met, divergence=2.0, sets_goal=sets_goal).begin(0.68)
    assert state.recorded_history == kept
    # What evaluations the trial has is not changed by it.
    assert state.history == []
