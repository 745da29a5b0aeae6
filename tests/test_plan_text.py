"""A study's plan in words."""

from types import SimpleNamespace

import pytest

from bstune.core.records import Budget
from bstune.study.planning.plan import SearchBudget
from bstune.study.planning.plan_text import _means_text, budget_text


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
