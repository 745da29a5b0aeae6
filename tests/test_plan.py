"""A search's budget: seeds, stratified batch sizes, limits in seconds; and how long a study takes."""

from functools import partial
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from toolbox import make_protocol

from bstune.core import scaling
from bstune.core.records import Budget
from bstune.core.search_space import Space
from bstune.core.step_time import StepTime
from bstune.study.planning import plan
from bstune.study.planning.plan import SearchBudget, remaining_seconds
from bstune.trial.backend import TrialBackend

SPACE = Space(8, 512, 1, 1.0, partial(scaling.none, reference_batch_size=64, reference_lr=0.1))


def budget(trials=20, seconds=None, **changes):
    values = {"objective": "time", "wall_seconds": None, "stratified": 0.5, "seed": 0, **changes}
    return SearchBudget(trials=trials, seconds=seconds, **values)


def test_every_trial_replicate_and_sampler_has_a_seed_of_its_own_from_the_studys():
    def seeds(seed):
        some = budget(seed=seed)
        replicates = []
        for trial_index, number in product(range(100), range(3)):
            replicates.append(some.replicate_index(trial_index, number))
        found = [some.trial_seed(trial_index) for trial_index in [*range(1000), *replicates]]
        found += map(some.sampler_seed, range(100))
        return found

    assert seeds(7) == seeds(7)
    assert len(set(seeds(7))) == 1000 + 300 + 100
    assert not set(seeds(7)) & set(seeds(8))


@pytest.mark.parametrize(("share", "count"), [(0.0, 0), (0.3, 6), (1.0, 20)])
def test_the_stated_share_is_stratified_and_spread_over_the_search(share, count):
    strata = []
    for trial_index in range(20):
        stratum = budget(stratified=share).stratum(trial_index, SPACE)
        assert budget(trials=90, stratified=share).stratum(trial_index, SPACE) == stratum
        strata.append(stratum)
    assert 20 - strata.count(None) == count
    # The first half of the search has half of them.
    assert abs(10 - strata[:10].count(None) - count / 2) <= 1


@pytest.mark.parametrize(
    ("limits", "limit"),
    [
        ({}, None),
        ({"seconds": 3.1}, None),
        ({"seconds": 3.0}, "search.seconds"),
    ],
)
def test_spent(make_result, limits, limit):
    done = [make_result(), make_result(), make_result()]
    # A replicate is not the search's.
    for trials in (done, [*done, make_result(replicate_of=0)]):
        spent = budget(**limits).end_if_spent(trials)
        assert (None if spent is None else spent.limit) == limit


def max_seconds(
    trials, limit, trial_budget, step_time, share=0.25, low=8, high=512, trial_seconds=None
):
    backend = TrialBackend()
    backend.step_time = step_time
    backend.evaluation_share = share
    space = SimpleNamespace(low=low, high=high)
    return plan.max_seconds(
        budget(trials, limit), space, make_protocol(budget=trial_budget), backend, trial_seconds
    )


def test_a_study_takes_at_most_trials_times_their_mean_budget_and_its_evaluation():
    """The mean is taken evenly over log B; each half of these octaves spends its steps, or its examples."""
    step_time = StepTime(0.01, 0.001)
    n = 20_000
    sizes = 8 * 64 ** ((np.arange(n) + 0.5) / n)
    exact = np.mean(np.maximum(100, 6400 / sizes) * step_time(sizes))
    assert max_seconds(12, None, Budget(100, 6400), step_time) == pytest.approx(
        12 * 1.25 * exact, rel=0.02
    )
    # A bound is no lower for small batches.
    for low in (1, 3, 8):
        by_examples = max_seconds(
            12, None, Budget(1, 100_000), StepTime(0.0, 1e-4), 0.5, low=low, high=4 * low
        )
        assert by_examples == pytest.approx(12 * 100_000 * 1e-4 * 1.5, rel=1e-3)


def test_a_budget_of_seconds_is_what_each_trial_takes():
    in_seconds = max_seconds(10, None, Budget(100, 6400), StepTime(2.0, 0.0), trial_seconds=60.0)
    assert in_seconds == pytest.approx(10 * 60.0 * 1.25)


@pytest.mark.parametrize(
    # Ten trials of 100 steps of 2 s.
    ("limit", "expected"),
    [(None, 2000.0), (1e9, 2000.0), (500.0, 500.0 + 200.0)],
)
def test_a_limit_in_seconds_binds_with_one_trial_on_top(limit, expected):
    assert max_seconds(10, limit, Budget(100, 1), StepTime(2.0, 0.0)) == pytest.approx(
        expected * 1.25
    )


@pytest.mark.parametrize(
    ("trials", "done", "expected"),
    [
        (10, [], None),
        # A failed trial says nothing of the others.
        (10, [("failed", 5.0)], None),
        (10, [("reached", 4.0), ("stopped", 6.0)], 8 * 5.0),
        (10, [("reached", 4.0), ("failed", 100.0)], 9 * 4.0),
        (10, [("diverged", 1.0), ("out of memory", 2.0), ("reached", 6.0)], 7 * 3.0),
        (2, [("reached", 4.0)] * 3, 0.0),
    ],
)
def test_remaining_seconds(trials, done, expected, make_result):
    results = [make_result(status=status, wall_seconds=seconds) for status, seconds in done]
    remaining = remaining_seconds(budget(trials), results)
    assert remaining == (None if expected is None else pytest.approx(expected))
    # A continuation is no further point, but costs.
    if done == [
        ("reached", 4.0),
        ("stopped", 6.0),
    ]:
        assert (
            remaining_seconds(
                budget(trials), [*results, make_result(resumed_from=1, wall_seconds=2.0)]
            )
            == 8 * 6.0
        )
    replicate = make_result(wall_seconds=1000.0, replicate_of=0)
    assert remaining_seconds(budget(trials), [*results, replicate]) == remaining
