import math
from functools import partial

import pytest

from bstune.core import scaling
from bstune.core.errors import ConfigError
from bstune.core.search_space import Space
from bstune.study.plan import SearchBudget

SPACE = Space(8, 512, 1, 1.0, partial(scaling.none, reference_batch_size=64, reference_lr=0.1))


def plan(**changes):
    values = {
        "objective": "time",
        "trials": 20,
        "seconds": None,
        "wall_seconds": None,
        "stratified": 0.5,
        "seed": 0,
    }
    return SearchBudget(**{**values, **changes})


def test_seeds_are_functions_of_seed_and_slot():
    some = plan(seed=7)
    seeds = [some.trial_seed(trial_index) for trial_index in range(100)]
    assert seeds == [plan(seed=7).trial_seed(trial_index) for trial_index in range(100)]
    assert len(set(seeds)) == 100
    assert not set(seeds) & {some.sampler_seed(trial_index) for trial_index in range(100)}
    assert not set(seeds) & {plan(seed=8).trial_seed(trial_index) for trial_index in range(100)}


def test_slots_and_seeds_of_confirmations_are_their_own_and_stay_as_their_number_grows():
    few, more = plan(confirmations=3), plan(confirmations=5)
    trial_indices = [
        few.replicate_index(trial_index, replicate) for trial_index in range(100) for replicate in range(3)
    ]
    assert trial_indices == [
        more.replicate_index(trial_index, replicate) for trial_index in range(100) for replicate in range(3)
    ]
    assert len({*trial_indices, *range(1000)}) == 300 + 1000
    assert len({few.trial_seed(trial_index) for trial_index in [*trial_indices, *range(1000)]}) == 300 + 1000


@pytest.mark.parametrize(("share", "count"), [(0.0, 0), (0.25, 5), (0.5, 10), (0.3, 6), (1.0, 20)])
def test_the_stated_share_is_stratified_and_spread_over_the_plan(share, count):
    strata = [plan(stratified=share).stratum(trial_index, SPACE) for trial_index in range(20)]
    assert sum(stratum is not None for stratum in strata) == count
    first_half = sum(stratum is not None for stratum in strata[:10])
    assert abs(first_half - count / 2) <= 1


def test_strata_do_not_depend_on_the_length_of_the_plan():
    assert [plan(trials=20).stratum(trial_index, SPACE) for trial_index in range(20)] == [
        plan(trials=90).stratum(trial_index, SPACE) for trial_index in range(20)
    ]


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({}, None),
        ({"seconds": 3.1}, None),
        ({"seconds": 3.0}, "search.seconds=3 of training are spent (3.0 s)"),
        ({"wall_seconds": 5.0}, None),
        ({"wall_seconds": 4.0}, "search.wall_seconds=4 are spent (4.2 s)"),
    ],
)
def test_spent(make_result, limits, message):
    done = [make_result(), make_result(), make_result()]
    assert plan(**limits).spent(done) == message
    assert plan(**limits).spent([*done, make_result(replicate_of=0)]) == message, "a confirmation is not the search's"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective": "speed"}, "search.objective must be one of time, steps, both, curve, but got 'speed'"),
        ({"trials": 0}, "search.trials must be at least 1, but got 0"),
        ({"seconds": 0}, "search.seconds must be positive, or null for no limit, but got 0"),
        ({"wall_seconds": -1}, "search.wall_seconds must be positive, or null for no limit, but got -1"),
        ({"stratified": 1.5}, "search.stratified must be a share from 0 to 1, but got 1.5"),
        ({"precision": 1.0}, "search.precision must be a factor over 1, or null for no such end, but got 1.0"),
        ({"precision": math.nan}, "search.precision must be a factor over 1, or null for no such end, but got nan"),
        ({"confirmations": -1}, "search.replicates must be at least 0 and search.candidates at least 1, but got -1"),
        ({"finalists": 0}, "search.candidates at least 1, but got 0 and 0"),
        ({"seed": -1}, "seed must be at least 0, but got -1"),
    ],
)
def test_impossible_plans_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        plan(**changes)
