"""What an analysis says of points that may be better than the winner."""

import pytest
from toolbox import make_result, make_trial

from bstune.result import NotRunAgain, SeedScatter
from bstune.study.analysis import analyse
from bstune.study.analysis.analyse import as_it_ran, own_where_faster, point_not_run_again
from bstune.study.planning.baseline import BaselineRuns
from bstune.study.planning.replicates import Winner

BEYOND_LIMIT = Winner(make_result(number=3, batch_size=32, lr=0.1), steps=80.0)
PASSED_OVER = Winner(make_result(number=5, batch_size=64, lr=0.2), steps=70.0)


@pytest.mark.parametrize(
    ("beyond_limit", "passed_over", "expected"),
    [
        (None, None, None),
        (BEYOND_LIMIT, None, NotRunAgain(batch_size=32, lr=0.1, candidates=2)),
        (None, PASSED_OVER, NotRunAgain(batch_size=64, lr=0.2, candidates=None)),
        # The one that there was no time for is named first.
        (BEYOND_LIMIT, PASSED_OVER, NotRunAgain(batch_size=64, lr=0.2, candidates=None)),
    ],
)
def test_a_point_without_fresh_seeds_is_named_with_what_kept_them(
    beyond_limit, passed_over, expected
):
    assert point_not_run_again(beyond_limit, passed_over, max_candidates=2) == expected


@pytest.mark.parametrize(
    ("horizon", "expected"),
    [
        # The schedule that the trial had, and its steps, for those that are predicted to cost less.
        (688, (688, 342.0)),
        # Schedules do not end with the trial.
        (None, (None, 350.0)),
    ],
)
def test_the_users_own_configuration_is_told_as_it_ran(horizon, expected):
    trial = make_result(steps=342, horizon=horizon)
    predicted = Winner(trial, steps=350.0, predicted_horizon=horizon and 476)
    told = as_it_ran(predicted)
    assert (told.advised_horizon, told.steps) == expected


@pytest.mark.parametrize(
    ("own", "own_again", "winner_steps", "winner_again", "expected"),
    [
        # Seconds are a hundredth of the steps. The own configuration took 200 steps, the winner is
        # predicted to take 400: no user is to change to half the speed.
        ({}, [200], 400.0, [], 0),
        # By its single run, where no fresh seed of it reached the target.
        ({"steps": 300}, [], 400.0, [], 0),
        # It is slower.
        ({}, [800], 400.0, [], 1),
        # What ran on a fresh seed is no prediction.
        ({}, [200], 400.0, [420], 1),
        # Its own time to this target is not known.
        ({"status": "stopped"}, [200], 400.0, [], 1),
    ],
)
def test_the_own_configuration_is_used_where_a_predicted_winner_is_slower(
    monkeypatch, own, own_again, winner_steps, winner_again, expected
):
    scatter = SeedScatter(scatter=0.1, low=0.05, high=0.2, level=0.9)
    monkeypatch.setattr(analyse, "seed_scatter", lambda posterior: scatter)
    monkeypatch.setattr(analyse, "fresh_steps", lambda posterior: {})
    own_run = make_trial(0, batch_size=32, **own)
    winner_run = make_trial(1, batch_size=256)
    trials = [own_run, winner_run]
    for run, steps_of_runs in ((own_run, own_again), (winner_run, winner_again)):
        for steps in steps_of_runs:
            number = len(trials)
            again = {"batch_size": run.batch_size, "steps": steps, "replicate_of": run.number}
            trials.append(make_trial(number, **again))
    runs = BaselineRuns(own_run, tuple(run for run in trials if run.replicate_of == 0))
    of_winner = tuple(run for run in trials if run.replicate_of == 1)
    found = {"time": Winner(winner_run, steps=winner_steps, runs=of_winner)}
    best = own_where_faster(found, trials, runs, posterior=None, use="time")
    assert best["time"].trial.number == expected
    if expected == 0:
        assert [run.steps for run in best["time"].runs] == own_again
