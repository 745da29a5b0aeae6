"""A study's plan in words."""

from types import SimpleNamespace

import pytest
from builders import SizeTiming
from toolbox import make_result

from bstune.core.records import LIGHTNINGS_LOOP, Budget
from bstune.core.step_time_law import fit_step_time_law
from bstune.core.step_timings import own_steps, with_step_time
from bstune.study.planning.plan_text import budget_text, retimed_text


@pytest.mark.parametrize(
    ("budget", "text"),
    [
        (Budget(1, 12_000), "12,000 examples"),
        (Budget(500, 1), "500 steps"),
        (Budget(500, 12_000), "500 steps and 12,000 examples"),
    ],
)
def test_a_budget_of_one_step_is_no_budget_of_steps(budget, text):
    assert budget_text(budget) == text


def timed(number, seconds, before, batch_size=64):
    """A trial whose record has an earlier survey's seconds, in place of its own 0.05 s."""
    return make_result(
        number=number,
        batch_size=batch_size,
        seconds_per_step=before,
        measured_seconds_per_step=seconds,
    )


@pytest.mark.parametrize(
    ("done", "surveyed", "words"),
    [
        ([], True, None),
        # The survey of now has 0.02 s at batch size 64, and 0.04 s at 128.
        ([timed(0, 0.05, 0.0201)], True, None),
        (
            [timed(0, 0.05, 0.03)],
            True,
            "64 one takes 20.0 ms, not 30.0 ms as in the line of trial 0",
        ),
        (
            [timed(0, 0.05, 0.02), timed(1, 0.05, 0.03, 128)],
            True,
            "128 one takes 40.0 ms, not 30.0 ms as in the line of trial 1",
        ),
        # The seconds are the trial's own, or no survey's.
        ([timed(0, None, 0.03)], True, None),
        ([timed(0, 0.05, 0.03)], False, None),
        ([timed(0, 0.05, None)], True, None),
    ],
)
def test_steps_that_a_survey_timed_anew_are_told(done, surveyed, words):
    backend = SimpleNamespace(
        timed=object() if surveyed else None, step_time=lambda size: size / 3200
    )
    found = retimed_text(SimpleNamespace(backend=backend), done)
    assert (found is None) == (words is None)
    assert words is None or words in found


def test_steps_of_trials_that_join_a_short_survey_are_not_timed_anew():
    sizes = {16: 0.010, 64: 0.014, 256: 0.030}
    timings = [SizeTiming(size, tau, tau, tau, visits=1) for size, tau in sizes.items()]
    law = fit_step_time_law(timings, of_trainer=True)
    device = "cpu (2 threads)"
    done = []
    for number, seconds in enumerate((0.020, 0.021, 0.020)):
        trial = make_result(
            number=number,
            batch_size=64,
            steps=200,
            seconds_per_step=seconds,
            training_loop=LIGHTNINGS_LOOP,
            ran_alone=True,
            device=device,
        )
        # As the study stores it.
        done.append(with_step_time(trial, law))
    joined = law.joined_with(own_steps(done))
    assert joined(64) > 1.2 * law(64), "they would be told"
    backend = SimpleNamespace(timed=object(), step_time=law, device=device)
    assert retimed_text(SimpleNamespace(backend=backend), done) is None
