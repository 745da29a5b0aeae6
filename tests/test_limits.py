"""What is kept of a study's wall time for what follows its search, over what has been tried."""

from dataclasses import replace
from types import SimpleNamespace

import optuna
import pytest
from toolbox import make_result

from bstune.study.planning.baseline import Baseline
from bstune.study.planning.plan import RESCUE_SHARE, SearchBudget
from bstune.study.planning.wall import REPORT_SECONDS, WallTime
from bstune.study.searching.limits import reserved_seconds, trial_cost

# A step takes 0.01 s, and a trial as long as its steps.
STEP_SECONDS = 0.01
LIMIT = 40.0
YOURS = make_result(
    number=0,
    trial_index=0,
    batch_size=64,
    lr=0.1,
    steps=400,
    steps_low=399,
    seconds_per_step=STEP_SECONDS,
    wall_seconds=4.0,
    history=((400, 0.1),),
)
SPENT = replace(YOURS, status="stopped")
MISSED = replace(SPENT, steps=300, steps_low=300)
CONTINUED = replace(SPENT, number=1, trial_index=1, resumed_from=0)
OTHER = replace(SPENT, number=1, trial_index=1, batch_size=128)
AGAIN = [
    replace(YOURS, number=10 + number, trial_index=10 + number, replicate_of=number % 2)
    for number in range(6)
]


def prepared_for(objective):
    budget = SearchBudget(objective, 20, None, LIMIT, 0.5, 0, replicates=3, baseline=True)
    return SimpleNamespace(
        budget=budget,
        backend=SimpleNamespace(step_time=lambda batch_size: STEP_SECONDS, evaluation_share=0.0),
        baseline=Baseline(64, 0.1, {}),
        last_step=lambda batch_size: 400,
        options=SimpleNamespace(
            scaling=SimpleNamespace(batch_size=64), hardware=SimpleNamespace(enabled=False)
        ),
        survey_seconds=0.0,
    )


@pytest.mark.parametrize(
    ("objective", "trials", "left", "kept"),
    [
        # Two runs of 4 s are kept, where a second configuration has twice the 4 s of the first.
        ("time", [YOURS], 30.0, 8.0),
        ("time", [YOURS], 14.0, 6.0),
        ("time", [YOURS], 7.0, 0.0),
        ("time", [YOURS, OTHER], 7.0, 8.0),
        # A share is kept for a first trial that may reach the target yet.
        ("time", [MISSED], 7.0, RESCUE_SHARE * LIMIT),
        # Where none can go on, as its budget is spent, nothing is kept for that.
        ("time", [SPENT], 7.0, 0.0),
        ("time", [MISSED, CONTINUED], 7.0, 0.0),
        ("time", [SPENT, replace(MISSED, number=1)], 7.0, RESCUE_SHARE * LIMIT),
        # Within a budget it is three runs of each point, up to that share.
        ("loss", [YOURS], 30.0, RESCUE_SHARE * LIMIT),
        ("loss", [YOURS], 14.0, 6.0),
        ("loss", [YOURS, OTHER], 14.0, RESCUE_SHARE * LIMIT),
        # Runs that have ended are kept for no more: one of six is left, and none.
        ("loss", [YOURS, OTHER, *AGAIN[:5]], 14.0, 4.0),
        ("loss", [YOURS, OTHER, *AGAIN], 14.0, 0.0),
    ],
)
def test_a_second_configuration_goes_before_fresh_seeds_of_the_first(objective, trials, left, kept):
    prepared = prepared_for(objective)
    wall = WallTime(
        optuna.create_study(),
        prepared.budget,
        lambda: LIMIT - REPORT_SECONDS - left,
        owner=True,
        now=lambda: 0.0,
    )
    cost = trial_cost(prepared, trials)
    found = reserved_seconds(prepared, wall, True, trials, cost)
    assert found == pytest.approx(kept)
