"""A study's plan in words."""

import math
from types import SimpleNamespace

import pytest

from bstune.core.records import Budget
from bstune.study.planning.plan import SearchBudget
from bstune.study.planning.plan_text import _duration_text, _means_text, budget_text
from bstune.trial.backend import TrialBackend


@pytest.mark.parametrize(
    ("recipe", "step_seconds", "workers", "told"),
    [
        (object(), 1.0, 1, "at most about 13.3 min"),
        # Trials side by side share the time.
        (object(), 1.0, 2, "at most about 6.67 min"),
        # A long study is told what would make it fit, in the same line.
        (object(), 10.0, 1, "a study takes up to 2.22 h here: 8 configurations of up to 16.7 min"),
        (object(), 10.0, 4, "at most about 33.3 min"),
        # A replay answers at once.
        (None, 10.0, 1, "at most about 2.22 h"),
    ],
)
def test_how_long_a_study_takes_is_told_once(recipe, step_seconds, workers, told):
    backend = TrialBackend()
    backend.step_time = lambda batch_size: step_seconds
    prepared = SimpleNamespace(
        budget=SearchBudget("time", 8, None, None, 0.5, 0),
        options=SimpleNamespace(
            search=SimpleNamespace(workers=workers),
            budget=SimpleNamespace(seconds=None),
            device="cpu",
        ),
        space=SimpleNamespace(low=8, high=512),
        protocol=SimpleNamespace(last_step=lambda batch_size: 100),
        backend=backend,
        recipe=recipe,
    )
    assert _duration_text(prepared, (), math.inf).startswith(told)


@pytest.mark.parametrize(
    ("elapsed", "limit", "text"),
    [
        (5.0, 120.0, "8 configurations, 2.00 min of wall time"),
        (30.0, 120.0, "8 configurations, 2.00 min of wall time (90.0 s of it left)"),
        (
            90.0,
            120.0,
            "8 configurations, 2.00 min of wall time (60.0 s of it left: the start counts for "
            "half at most)",
        ),
        (90.0, None, "8 configurations"),
    ],
)
def test_the_wall_time_that_is_left_is_told(elapsed, limit, text):
    budget = SearchBudget("time", 8, None, limit, 0.5, 0, most_start=60.0)
    prepared = SimpleNamespace(budget=budget, elapsed=lambda: elapsed)
    assert _means_text(prepared, 120.0 - min(elapsed, 60.0)) == text


@pytest.mark.parametrize(
    ("budget", "text"),
    [
        (Budget(1, 12_000), "12,000 examples"),
        (Budget(500, 1), "500 steps"),
        (Budget(500, 12_000), "500 steps and 12,000 examples"),
    ],
)
def test_a_budget_of_one_step_is_no_budget_of_steps(budget, text):
    assert budget_text(budget) == text
