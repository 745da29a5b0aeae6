import math

import pytest

from bstune.study.planning.duration import (
    FEWEST_TRIALS,
    LONG_SECONDS,
    POINT_GROWTH,
    Pace,
    Runs,
    advice_on_time,
    pace_of,
    seconds_to_go,
    trials_that_fit,
)


@pytest.mark.parametrize(
    ("seconds", "trials", "fitting"),
    [
        (2 * LONG_SECONDS, 30, 15),
        # All of the trials fit.
        (LONG_SECONDS, 30, None),
        (3 * LONG_SECONDS, 3 * FEWEST_TRIALS, FEWEST_TRIALS),
        # There are too few trials to show anything.
        (3 * LONG_SECONDS, 3 * FEWEST_TRIALS - 1, None),
    ],
)
def test_trials_that_fit_into_an_hour(seconds, trials, fitting):
    assert trials_that_fit(seconds, trials) == fitting


@pytest.mark.parametrize(
    ("seconds", "limited", "is_said"),
    [(LONG_SECONDS, False, False), (7200.0, False, True), (7200.0, True, False)],
)
def test_a_long_study_alone_is_told_what_would_make_it_fit(seconds, limited, is_said):
    assert (advice_on_time(seconds, 30, "cpu", limited) is not None) == is_said


def test_a_gpu_is_no_advice_where_there_is_one():
    of_cpu, of_cuda = (advice_on_time(7200.0, 30, device, False) for device in ("cpu", "cuda:0"))
    assert "GPU" in of_cpu
    assert "GPU" not in of_cuda
    assert "search.trials=15" in of_cuda


@pytest.mark.parametrize(
    ("ends", "before", "pace"),
    [
        ((), 0, None),
        ((3.0,), 0, None),
        # The baseline alone has ended, and the libraries have started.
        ((3.0, 15.0), 0, None),
        ((3.0, 15.0), 30, None),
        ((3.0, 15.0, 17.0), 0, Pace(2.0, 1.5)),
        ((3.0, 15.0, 18.0, 20.0, 22.0, 27.0), 0, Pace(3.0, 3.5)),
        # This study goes on after another process.
        ((3.0, 15.0, 17.0), 30, Pace(2.0, 31.5)),
        # Two trials ended side by side.
        ((3.0, 15.0, 15.0), 0, Pace(0.0, 1.5)),
    ],
)
def test_the_first_points_say_little_of_the_pace(ends, before, pace):
    assert pace_of(ends, before) == pace


@pytest.mark.parametrize(
    ("points_left", "runs", "limit", "seconds"),
    [
        # The middle of the points is point 10.
        (12, (), math.inf, 12 * 2.0 * 2**POINT_GROWTH + 1.5),
        (0, (Runs(6, 3.0), Runs(3, 7.0)), math.inf, 18.0 + 21.0 + 1.5),
        # The limit is that of search.wall_seconds.
        (1000, (), 40.0, 40.0),
        (1000, (), -1.0, 0.0),
    ],
)
def test_what_is_left_is_points_runs_and_the_report(points_left, runs, limit, seconds):
    found = seconds_to_go(Pace(2.0, 5.0), 4, points_left, runs, 1.5, limit)
    assert found == pytest.approx(seconds)
