"""Timings of steps with their errors: which trials tell theirs, and how well visits are known."""

import math
from dataclasses import replace

import numpy as np
import pytest
from builders import SizeTiming
from toolbox import make_result, make_trial

from bstune.core.step_timings import (
    MEDIAN_ERROR,
    UNSEEN_SCATTER,
    own_steps,
    timings_of_trials,
    with_errors,
    with_step_time,
)


def test_which_trials_tell_their_steps():
    trials = [
        make_trial(number=0, seconds_per_step=0.1, training_loop="lean"),
        replace(
            make_trial(number=1, seconds_per_step=0.1, training_loop="Lightning's: hooks"),
            measured_seconds_per_step=0.2,
        ),
        make_trial(number=2, seconds_per_step=None),
        make_trial(number=3, seconds_per_step=0.1, status="failed"),
        make_trial(number=4, seconds_per_step=0.1, ran_alone=False),
        make_trial(number=5, seconds_per_step=0.1, steps=3),
    ]
    found = [(steps.seconds, steps.of_trainer, steps.may_join) for steps in own_steps(trials)]
    assert found == [
        (0.1, False, True), (0.2, True, True), (0.1, False, False), (0.1, False, False),
    ]  # fmt: skip


@pytest.mark.parametrize("visits", [1, 4, 40])
def test_the_error_of_a_survey_s_timings_is_that_of_their_medians(visits):
    """Of visits that scatter by a fifth; a single one tells no scatter."""
    rng = np.random.default_rng(0)
    timings = []
    for size in range(8, 208):
        seconds = np.exp(rng.normal(0.0, 0.2, visits))
        low, middle, high = np.quantile(seconds, (0.25, 0.5, 0.75)).tolist()
        timings.append(SizeTiming(size, middle, low, high, visits))
    known = with_errors(timings[::-1])
    assert [timing.batch_size for timing in known] == list(range(8, 208))
    scatter = UNSEEN_SCATTER if visits == 1 else 0.2
    expected = MEDIAN_ERROR * scatter / math.sqrt(visits)
    errors = [timing.error for timing in known]
    assert np.median(errors) == pytest.approx(expected, rel=0.2)


def test_trials_near_to_each_other_are_one_place():
    """The median of five, one of which ran in a busy minute, each scaled by the line through all."""
    near = [(60, 6.0), (62, 6.2), (64, 6.4), (66, 6.6), (65, 26.0)]
    timings = timings_of_trials([*near, *[(256, 25.6)] * 5])
    assert [timing.visits for timing in timings] == [5, 5]
    assert timings[0].batch_size == pytest.approx(63.4, abs=0.1)
    assert timings[0].seconds == pytest.approx(6.34, rel=0.1)
    assert timings_of_trials([]) == []


def test_seconds_per_step_are_those_measured_alone():
    found = with_step_time(
        make_result(batch_size=64, seconds_per_step=3.0), lambda batch_size: batch_size / 6400
    )
    # 64/6400 s, and what the trial itself measured beside it.
    assert found == make_result(batch_size=64, seconds_per_step=0.01, measured_seconds_per_step=3.0)
    assert (
        with_step_time(make_result(seconds_per_step=None), lambda batch_size: 1.0).seconds_per_step
        is None
    )
