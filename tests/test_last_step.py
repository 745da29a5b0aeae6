"""The step after which a trial ends."""

import pytest
from made_parts import make_state
from toolbox import FakeTime, make_protocol, make_spec

from bstune.core.errors import ConfigError
from bstune.trial.parts.last_step import LastStep, last_step_of, steps_of_trainer

# 20 steps and 1000 examples have to be spent.
PROTOCOL = make_protocol(20, examples=1000)


@pytest.mark.parametrize(
    ("batch_size", "max_steps", "last"),
    [
        (100, None, 20),
        # 1,000 examples in steps of 10.
        (10, None, 100),
        (100, 7, 7),
        # A trial that is asked for by itself may have a limit past the budget.
        (100, 50, 50),
    ],
)
def test_it_is_the_trials_own_limit_or_the_budgets(batch_size, max_steps, last):
    assert last_step_of(make_spec(batch_size, max_steps=max_steps), PROTOCOL, 0) == last


@pytest.mark.parametrize(("steps", "max_steps"), [(20, None), (7, 7), (8, 7)])
def test_a_trial_has_a_step_left(steps, max_steps):
    spec = make_spec(100, max_steps=max_steps)
    last = 20 if max_steps is None else max_steps
    text = f"a trial that has {steps} steps cannot be trained until step {last}: raise max_steps"
    with pytest.raises(ConfigError, match=text):
        last_step_of(spec, PROTOCOL, steps)
    assert last_step_of(spec, PROTOCOL, last - 1) == last


@pytest.mark.parametrize(
    ("last_step", "skipped", "horizon", "expected"),
    [
        # One that is stopped early has the schedules of one that is not.
        (7, 0, None, 20),
        (50, 0, None, 50),
        (7, 3, None, 23),
        (7, 3, 40, 40),
    ],
)
def test_the_trainers_own_end(last_step, skipped, horizon, expected):
    state = make_state(last_step=last_step, skipped=skipped)
    assert steps_of_trainer(state, make_spec(100), PROTOCOL, horizon) == expected


@pytest.mark.parametrize(
    ("steps", "elapsed", "limit", "last_step"),
    [
        (10, 5.0, None, 100),
        (10, 5.0, 5.0, 100),
        (10, 5.1, 5.0, 11),
        # At its last step it does not get another one.
        (100, 5.1, 5.0, 100),
    ],
)
def test_out_of_time_the_next_step_is_the_last_one(steps, elapsed, limit, last_step):
    fake = FakeTime(1000.0)
    state = make_state(steps)
    last = LastStep(state, limit, fake)
    fake.sleep(elapsed)
    last.bring_forward()
    assert state.last_step == last_step
