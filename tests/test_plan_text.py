"""A study's plan in words."""

import pytest

from bstune.core.records import Budget
from bstune.study.planning.plan_text import budget_text


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
