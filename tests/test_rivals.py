"""The rivals of the comparison of searches: what a promoted trial costs, and what a method is told."""

import math
from pathlib import Path

import pytest
from searches import TABLE, first_trials, posed

from bstune.core.records import TrialResult

pytestmark = pytest.mark.slow
# Of the table: 800, 200 and 200 steps or seconds are the budget at batch sizes 10, 20 and 40.
DEAREST = 800.0


@pytest.fixture
def rivals(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "benchmarks"))
    return pytest.importorskip("rivals")


class ScriptedMethod:
    """Asks for the given requests in turn, and keeps what it is told."""

    def __init__(self, *requests):
        self.requests = list(requests)
        self.told = []

    def ask(self):
        return self.requests.pop(0)

    def tell(self, cost, *, is_final):
        self.told.append((cost, is_final))


def test_a_promoted_trial_pays_the_steps_that_it_adds(rivals):
    misses = (10, 1.0, None)
    method = ScriptedMethod(
        rivals.Request(*misses, 1 / 9),
        rivals.Request(*misses, 1 / 3),
        rivals.Request(40, 0.1, None, 0.1),
        rivals.Request(40, 0.1, None, 1.0),
        # It has met the target: the method is told again, and nothing is run.
        rivals.Request(40, 0.1, None, 1.0),
        rivals.Request(*misses, 1.0),
        # Twice the seconds of the best are spent: it is told, and nothing is run.
        rivals.Request(*misses, 1.0),
        rivals.Request(40, 1.0, None, 1.0),
        rivals.Request(10, 0.1, None, 1.0),
    )
    search = rivals.MultiFidelitySearch(posed().problem, 0, method)
    trials = first_trials(search, posed(), 6)
    paid = [(trial.batch_size, trial.steps, trial.train_seconds) for trial in trials]
    # 800/9 and 800/3 steps, of which the second pays what it adds.
    assert paid == [
        (10, 89, 89.0),
        (10, 267, 178.0),
        (40, 20, 20.0),
        (40, 50, 30.0),
        (40, 80, 80.0),
        (10, 100, 100.0),
    ]
    # The table's runs have no evaluation by then.
    still_missed = rivals.WORST_COST
    met = math.log(50.0 / DEAREST)
    assert [cost for cost, _ in method.told] == pytest.approx(
        [
            still_missed,
            still_missed,
            still_missed,
            met,
            met,
            still_missed,
            still_missed,
            math.log(80.0 / DEAREST),
        ]
    )
    assert [is_final for _, is_final in method.told] == [
        False,
        False,
        False,
        True,
        True,
        False,
        False,
        True,
    ]


@pytest.mark.parametrize("objective", ["time", "steps"])
def test_a_run_that_met_the_target_costs_less_than_any_that_missed_it(rivals, objective):
    problem = posed(TABLE, objective).problem
    met = first_trials(
        rivals.MultiFidelitySearch(problem, 0, ScriptedMethod(rivals.Request(10, 0.1, None, 1.0))),
        posed(TABLE, objective),
        1,
    )[0]
    assert met.reached
    assert rivals.cost_of(problem, met) < 0.0
    missed = changed(met, status="stopped", history=((50, 0.4), (100, 0.2), (150, 0.3)))
    # The best metric, 0.2, is twice the target.
    assert rivals.cost_of(problem, missed) == pytest.approx(math.log(2.0))
    assert rivals.cost_of(problem, changed(met, status="diverged")) == rivals.WORST_COST


def changed(trial, **values):
    return TrialResult(**{**vars(trial), **values})


@pytest.mark.parametrize("name", ["tpe_hyperband", "tpe_hyperband_sqrt"])
def test_the_same_seed_proposes_the_same_trials(rivals, name):
    def proposed(seed):
        search = getattr(rivals, name)(posed().problem, seed)
        trials = first_trials(search, posed(), 12)
        return [(trial.batch_size, trial.lr, trial.steps) for trial in trials]

    first = proposed(0)
    assert first == proposed(0)
    assert first != proposed(1)
    # A pruned trial ends at the first share of the budget.
    assert min(steps for _, _, steps in first) <= math.ceil(DEAREST / 27)
