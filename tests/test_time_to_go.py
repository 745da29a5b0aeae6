"""The points of a search that this command has seen end, and how fast they did."""

import pytest
from toolbox import make_result

from bstune.study.planning.duration import Pace
from bstune.study.planning.plan import SearchBudget, count_points
from bstune.study.searching.time_to_go import PointEnds, points_to_come


def test_a_continued_trial_is_one_point_and_a_replicate_is_none():
    trials = [
        make_result(number=0),
        make_result(number=1, status="stopped"),
        make_result(number=2, resumed_from=1),
        make_result(number=3, status="failed"),
        make_result(number=4, replicate_of=0),
    ]
    assert count_points(trials) == 2


def test_the_pace_is_of_the_points_that_end_here():
    ends = PointEnds()
    # Ten were done before; looks that find nothing new leave the pace as it is.
    ends.note(10, 3.0)
    assert ends.pace() is None
    ends.note(10, 4.0)
    assert ends.pace() is None
    # The first one is unlike those that follow.
    ends.note(11, 15.0)
    assert ends.pace() is None
    ends.note(12, 16.0)
    assert ends.pace() == Pace(1.0, 11.5)
    ends.note(12, 17.0)
    assert ends.pace() == Pace(1.0, 11.5)
    # Two that ended side by side.
    ends.note(14, 20.0)
    assert ends.pace() == Pace(2.0, 13.0)


@pytest.mark.parametrize(
    ("seconds", "points"),
    [
        (None, 30.0),
        # Two points trained for 8 s: 12 s more are three of them.
        (20.0, 3.0),
        (7.0, 0.0),
        (1e6, 30.0),
    ],
)
def test_points_to_come_are_those_that_the_seconds_of_training_allow(seconds, points):
    budget = SearchBudget("time", 32, seconds, None, 0.5, 0)
    trials = [
        make_result(number=0, train_seconds=6.0),
        make_result(number=1, train_seconds=2.0),
        make_result(number=2, train_seconds=50.0, replicate_of=0),
    ]
    assert points_to_come(budget, trials) == points
