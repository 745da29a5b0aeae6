"""Which run on a fresh seed is due, where the wall time runs out: the winner's, then the baseline's beside it."""

import math
from dataclasses import replace
from types import SimpleNamespace

import optuna
import pytest
from toolbox import make_result

from bstune.study.planning.baseline import Baseline
from bstune.study.planning.plan import FIRST_REPLICATE, SearchBudget
from bstune.study.planning.wall import REPORT_SECONDS, WallTime
from bstune.study.searching import fresh_seeds
from bstune.study.searching.fresh_seeds import due_at_budget, due_to_target

# A step takes 0.01 s, and a trial nothing besides: 4 s of the baseline, 0.5 s of the winner.
STEP_SECONDS = 0.01
OWN = Baseline(64, 0.1, {})
BUDGET = SearchBudget("time", 20, None, 1000.0, 0.5, 0, replicates=3, candidates=3, baseline=True)


def trial(number, batch_size, lr, steps, **changes):
    """A trial that reached the target; its wall time is not known, so that it teaches no cost."""
    return make_result(
        **{
            "number": number,
            "trial_index": number,
            "batch_size": batch_size,
            "lr": lr,
            "steps": steps,
            "steps_low": steps - 1,
            "seconds_per_step": STEP_SECONDS,
            "wall_seconds": 0.0,
            "seed": number,
            **changes,
        }
    )


def fresh(number, of, replicate, **changes):
    """A run of a trial on a fresh seed, which is its number."""
    index = FIRST_REPLICATE * (1 + replicate) + of.trial_index
    own = {"replicate_of": of.number, "trial_index": index, **changes}
    return trial(number, of.batch_size, of.lr, of.steps, **own)


YOURS = trial(0, 64, 0.1, 400)
FAST = trial(1, 256, 0.3, 50)
OTHER = trial(2, 1024, 1.0, 50)
SEARCHED = [YOURS, FAST, OTHER]
RUNS = [fresh(10 + place, FAST, place) for place in range(3)]
BESIDE = fresh(20, YOURS, 0, seed=10)


def found_due(trials, left, predicted, budget=BUDGET, horizons=()):
    elapsed = budget.wall_seconds - REPORT_SECONDS - left
    study = optuna.create_study()
    wall = WallTime(study, budget, lambda: elapsed, owner=True, now=lambda: 0.0)
    backend = SimpleNamespace(step_time=lambda batch_size: STEP_SECONDS, evaluation_share=0.0)
    prepared = SimpleNamespace(
        budget=budget, backend=backend, baseline=OWN, last_step=lambda batch_size: 1000
    )
    return due_to_target(prepared, wall, trials, predicted, dict(horizons))


def due(trials, left, predicted, budget=BUDGET):
    """The number of the trial that runs next, and the seed that it shares; None where there is none."""
    found = found_due(trials, left, predicted, budget)
    if found is None:
        return None
    return found.winner.trial.number, found.seed_of and found.seed_of.seed


# The other point is no better, a little better, or much better than the winner's fresh seeds.
WORSE = {2: 80.0}
CLOSE = {2: 48.0}
BETTER = {2: 30.0}


@pytest.mark.parametrize(
    ("runs", "left", "predicted", "expected"),
    [
        # The winner's first run goes before all else.
        ([], 0.6, WORSE, (1, None)),
        ([], 0.4, WORSE, None),
        # The baseline's first, on the same seed, goes before its second one.
        (RUNS[:1], 4.4, WORSE, (0, 10)),
        # The baseline has no time in any case.
        (RUNS[:1], 3.9, WORSE, (1, None)),
        # It has had its run.
        ([*RUNS[:1], BESIDE], 4.4, WORSE, (1, None)),
        (RUNS, 4.1, WORSE, (0, 10)),
        ([*RUNS, BESIDE], 4.1, WORSE, (0, 11)),
        # A point that is a little better runs only if all its runs have time.
        (RUNS, 5.6, CLOSE, (0, 10)),
        ([*RUNS, BESIDE], 1.6, CLOSE, (2, 10)),
        ([*RUNS, BESIDE], 1.4, CLOSE, None),
        # With one of its runs it is no answer yet: both others have to fit.
        ([*RUNS, BESIDE, fresh(30, OTHER, 0, seed=10)], 1.1, CLOSE, (2, 11)),
        ([*RUNS, BESIDE, fresh(30, OTHER, 0, seed=10)], 0.9, CLOSE, None),
        # One that is much better is the answer: a single run is better than none.
        (RUNS, 0.6, BETTER, (2, 10)),
        (RUNS, 0.4, BETTER, None),
        (RUNS, math.inf, CLOSE, (0, 10)),
    ],
)
def test_the_winner_and_the_baseline_have_a_fresh_seed_each_before_further_ones(
    runs, left, predicted, expected
):
    assert due([*SEARCHED, *runs], left, predicted) == expected


def test_the_users_own_configuration_keeps_its_schedule_on_fresh_seeds():
    horizons = {0: 200, 1: 40}
    # The other trial reached the target as well, so the baseline is compared with something.
    slower = trial(1, 256, 0.3, 900)
    for trials, expected in (([YOURS, FAST], (1, 40)), ([YOURS, slower], (0, None))):
        found = found_due(trials, 100.0, {}, horizons=horizons)
        assert (found.winner.trial.number, found.horizon) == expected


@pytest.mark.parametrize(
    ("trials", "configurations", "expected"),
    [
        ([YOURS], 20, None),
        # A trial that failed tells nothing of its configuration.
        ([YOURS, trial(1, 256, 0.3, 50, status="failed")], 20, None),
        ([YOURS, trial(1, 256, 0.3, 50, status="stopped")], 20, (0, None)),
        # It is all that was asked for.
        ([YOURS], 1, (0, None)),
    ],
)
def test_a_configuration_that_is_compared_with_nothing_does_not_run_again(
    monkeypatch, trials, configurations, expected
):
    budget = replace(BUDGET, trials=configurations)
    assert due(trials, 100.0, {}, budget) == expected
    best = SimpleNamespace(run=SimpleNamespace(number=0))
    monkeypatch.setattr(fresh_seeds, "rank_full_trials", lambda posterior: [best])
    prepared = SimpleNamespace(
        budget=budget,
        backend=SimpleNamespace(step_time=lambda batch_size: STEP_SECONDS, evaluation_share=0.0),
        baseline=OWN,
        last_step=lambda batch_size: 100,
    )
    wall = WallTime(optuna.create_study(), budget, lambda: 0.0, owner=True, now=lambda: 0.0)
    assert (due_at_budget(prepared, wall, trials, None) is None) == (expected is None)


# Runs of the baseline as a finalist, on new seeds.
OWN_RUNS = [fresh(30 + place, YOURS, place) for place in range(3)]


@pytest.mark.parametrize(
    ("runs", "predicted", "expected"),
    [
        # The baseline ran beside the winner, and is then predicted to be the better one.
        ([*RUNS, BESIDE], {0: 30.0, 2: 80.0}, (0, 11)),
        ([*RUNS, BESIDE, fresh(21, YOURS, 1, seed=11)], {0: 30.0, 2: 80.0}, (0, 12)),
        # The baseline ran first, and another point is found later.
        (OWN_RUNS, {1: 30.0, 2: 80.0}, (1, 30)),
        ([*OWN_RUNS, fresh(40, FAST, 0, seed=30)], {1: 30.0, 2: 80.0}, (1, 31)),
    ],
)
def test_the_baseline_as_a_finalist_shares_its_seeds_with_the_others(runs, predicted, expected):
    assert due([*SEARCHED, *runs], math.inf, predicted) == expected


@pytest.mark.parametrize(
    ("runs", "left", "expected"),
    [
        # Each run takes 1 s: the winner's first, the baseline's on the same seed, then all others.
        ([], 1.1, (1, None)),
        (RUNS[:1], 2.1, (1, None)),
        (RUNS[:1], 1.9, (0, 10)),
        ([*RUNS[:1], BESIDE], 1.9, (1, None)),
        (RUNS, 1.9, (0, 10)),
        (RUNS[:1], 0.9, None),
    ],
)
def test_within_a_budget_it_is_the_same(monkeypatch, runs, left, expected):
    best = SimpleNamespace(run=SimpleNamespace(number=1))
    monkeypatch.setattr(fresh_seeds, "rank_full_trials", lambda posterior: [best])
    wall = WallTime(
        optuna.create_study(),
        BUDGET,
        lambda: BUDGET.wall_seconds - REPORT_SECONDS - left,
        owner=True,
        now=lambda: 0.0,
    )
    backend = SimpleNamespace(step_time=lambda batch_size: STEP_SECONDS, evaluation_share=0.0)
    prepared = SimpleNamespace(
        budget=BUDGET, backend=backend, baseline=OWN, last_step=lambda batch_size: 100
    )
    found = due_at_budget(prepared, wall, [YOURS, FAST, *runs], None)
    if found is None:
        assert expected is None
    else:
        seed = found.seed_of and found.seed_of.seed
        assert (found.winner.trial.number, seed) == expected
