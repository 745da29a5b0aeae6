"""What an analysis says of points that may be better than the winner."""

import pytest
from toolbox import make_result

from bstune.result import NotRunAgain
from bstune.study.analysis.analyse import as_it_ran, point_not_run_again
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
