"""The points of a search that this command has seen end, and how fast they did."""

from types import SimpleNamespace

import pytest
from toolbox import make_result, make_trial

from bstune.study.planning.duration import Pace
from bstune.study.planning.plan import FIRST_REPLICATE, SearchBudget, count_points
from bstune.study.searching import time_to_go
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


def fresh(number, of, **changes):
    """A run of a trial on a fresh seed."""
    values = {"batch_size": of.batch_size, "steps": of.steps, "steps_low": of.steps - 10}
    return make_trial(number, replicate_of=of.number, **(values | changes))


FIRST = make_trial(0, 64, steps=400)
SECOND = make_trial(1, 16, steps=600)
FASTER = make_trial(8, 256, steps=200, steps_low=190)
RUNS_OF_FIRST = [fresh(2 + place, FIRST) for place in range(3)]
ALL_OF_FIRST = [FIRST, SECOND, *RUNS_OF_FIRST]


@pytest.mark.parametrize(
    ("trials", "replicates", "predicted", "expected"),
    [
        ([make_trial(0, status="stopped")], 3, None, []),
        ([FIRST, SECOND], 3, None, [(3, 400)]),
        ([FIRST, SECOND], 0, None, [(0, 400)]),
        ([*ALL_OF_FIRST[:3]], 3, None, [(2, 400)]),
        # The baseline may run first.
        ([FIRST, SECOND, fresh(2, SECOND, trial_index=FIRST_REPLICATE)], 3, None, [(3, 400)]),
        # A second point may run again, or not.
        (ALL_OF_FIRST, 3, None, [(0, 400)]),
        # The study has gone on, and another point stands first, with no run of its own yet.
        ([*ALL_OF_FIRST, FASTER], 3, None, [(3, 200)]),
        ([*ALL_OF_FIRST, FASTER, fresh(9, FASTER)], 3, None, [(2, 200)]),
        # It has gone on, and the same point stands first.
        ([*ALL_OF_FIRST, make_trial(8, 32, steps=900)], 3, None, [(0, 400)]),
        # Once a run was chosen by predictions, they tell which point is next.
        ([*ALL_OF_FIRST, FASTER], 3, {0: 400.0, 1: 600.0, 8: 100.0}, [(3, 200)]),
        ([*ALL_OF_FIRST], 3, {0: 400.0, 1: 900.0}, [(0, 400)]),
    ],
)
def test_fresh_seeds_to_come_are_those_of_the_point_that_stands_first_now(
    trials, replicates, predicted, expected, monkeypatch
):
    budget = SearchBudget("steps", 32, None, None, 0.5, 0, replicates=replicates, candidates=4)
    prepared = SimpleNamespace(budget=budget, baseline=None)
    wall = SimpleNamespace(replicate_seconds=lambda steps, batch_size, cost: steps)
    monkeypatch.setattr(time_to_go, "trial_cost", lambda prepared, trials: None)
    found = time_to_go._fresh_runs_to_come(prepared, wall, trials, predicted)
    assert [(runs.count, runs.seconds) for runs in found] == expected
