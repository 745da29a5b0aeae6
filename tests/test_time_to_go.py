"""The points of a search that this command has seen end, and how fast they did."""

from toolbox import make_result

from bstune.study.planning.duration import Pace
from bstune.study.planning.plan import count_points
from bstune.study.searching.time_to_go import PointEnds


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
    assert ends.pace(10, 3.0) is None
    assert ends.pace(10, 4.0) is None
    assert ends.pace(11, 15.0) == Pace(12.0, 10.5)
    assert ends.pace(11, 16.0) == Pace(12.0, 10.5)
    # Two that ended side by side: the first one is unlike those that follow.
    assert ends.pace(13, 19.0) == Pace(2.0, 12.0)
