"""How far a trial goes: tables of what its limits are."""

import math

import numpy as np
import pytest
from search_records import BUDGET, SPACE

from bstune.search.law import make_law
from bstune.search.limits import (
    affordable_length,
    limit_after_hit,
    limit_before_hit,
    schedule_length,
)


@pytest.mark.parametrize(
    ("best_steps", "predicted", "first_step", "limit"),
    [
        # A new one gets the lesser of 0.4 times 1.2 times the best's and 0.6 times its own steps.
        (100, 1000, 0, 48),
        (100, 50, 0, 30),
        # One that has run a little of that gets as much; from 3/4 of it on 1.2 times the best's.
        (100, 1000, 30, 48),
        (100, 1000, 36, 120),
        (100, 70, 40, 120),
        # It runs on by 1.3, also where it was thought to be over, and 10 steps at least.
        (100, 70, 100, 130),
        (5, 5, 0, 10),
    ],
)
def test_once_the_target_was_reached(best_steps, predicted, first_step, limit):
    assert limit_after_hit(best_steps, predicted, first_step) == pytest.approx(limit)


@pytest.mark.parametrize(
    ("spent", "last_step", "first_step", "limit"),
    [
        # A fifth of all that was spent for a new one, a quarter more for one that is resumed.
        (1000, 4000, 0, 200),
        (1000, 4000, 300, 550),
        # A 64th of the budget at least, and 10 steps; a resumed one runs on by 1.4.
        (0, 6400, 0, 100),
        (0, 100, 0, 10),
        (1000, 4000, 1000, 1400),
    ],
)
def test_before_the_target_was_reached(spent, last_step, first_step, limit):
    assert limit_before_hit(spent, last_step, first_step) == pytest.approx(limit)


@pytest.mark.parametrize(
    ("spent", "budget", "best_steps", "length"),
    [
        # All that was spent, so that costs double, and a 64th of the budget at least.
        (0, 6400, None, 100),
        (500, 6400, None, 500),
        # Then half of it, or 1.2 times the best's.
        (500, 6400, 100, 250),
        (100, 6400, 100, 120),
    ],
)
def test_the_longest_schedule_that_is_affordable(spent, budget, best_steps, length):
    assert affordable_length(spent, budget, best_steps) == pytest.approx(length)


def test_the_length_of_a_schedule():
    law = make_law(SPACE, BUDGET, misfit=False, schedule_ends=True)
    draw = law.mean[None].copy()
    free = schedule_length(draw, math.log(100.0), 4000.0, math.inf)
    # Seeds and the configuration itself differ by exp(0.2): longer than S, and not by much.
    assert 105 < free < 150
    assert schedule_length(draw, math.log(100.0), 90.0, math.inf) == pytest.approx(90.0)
    # What all is gained at the end of has to end by then.
    draw[0, -2:] = np.log([200.0, 1e-3])
    assert schedule_length(draw, math.log(100.0), 4000.0, 103.0) == pytest.approx(103.0, rel=0.01)
    assert schedule_length(draw, math.log(3.0), 4000.0, math.inf) == 10.0
