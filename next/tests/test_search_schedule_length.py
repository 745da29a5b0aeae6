import math

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.special import ndtr
from search_records import SPACE, TARGET, record

from bstune.core.question import Question
from bstune.core.records import Budget
from bstune.search.posterior import (
    sample_posterior,
)
from bstune.search.schedule_length import (
    OUTLIERS,
    Ends,
    ends_of,
    least_cost,
    length_of,
    read_ends,
)

QUESTION = Question(TARGET, Budget(steps=4000), schedule_ends=True)
LOG_100 = math.log(100.0)


def theta(scale=2.0, power=0.8, share=1.0, waste=0.2):
    """A draw whose columns before those of the schedules are of no account, (1, 11)."""
    return np.array([[*[0.0] * 7, *np.log([scale, power, share, waste])]])


ALL_AT_END = theta(share=200.0, waste=1e-3)


def test_where_all_is_gained_at_the_end_the_best_length_is_17_percent_above_s():
    found = least_cost(ALL_AT_END, LOG_100, 0.1, longest=1e6)
    # h/P, whose constant factor for outliers does not move the minimum.
    closed = minimize_scalar(lambda u: math.exp(u) / ndtr(u / 0.1), bounds=(0, 1), method="bounded")
    assert found.steps == pytest.approx(100 * math.exp(closed.x), rel=0.02)
    assert found.steps == pytest.approx(117, rel=0.03)
    assert found.share == pytest.approx((1 - OUTLIERS) * ndtr(closed.x / 0.1), abs=0.02)
    assert found.cost == pytest.approx(100 * closed.fun / (1 - OUTLIERS), rel=0.02)


def test_cost_of_a_length_where_the_target_is_reached_at_a_power_of_it():
    # S^(1 - m) h^m with m/(1 - m) = share.
    share, m = 4.0, 0.8
    found = length_of(theta(share=share, waste=1e-6), LOG_100, 0.2, steps=150.0)
    chance = (1 - OUTLIERS) * ndtr(math.log(1.5) / 0.2)
    reached = 100 ** (1 - m) * 150**m
    assert found.share == pytest.approx(chance)
    assert found.cost == pytest.approx(reached + 150 * (1 - chance) / chance, rel=1e-3)


@pytest.mark.parametrize(
    ("limits", "steps"),
    [
        ({"longest": 50.0}, 50.0),
        # Where all is gained at the end, the step that reaches is the length.
        ({"longest": 1e6, "latest": 105.0}, 105.0),
        # Nothing is reliable that early: the longest comes closest.
        ({"longest": 101.0, "reliable": True}, 101.0),
    ],
)
def test_limits_of_a_length(limits, steps):
    found = least_cost(ALL_AT_END, LOG_100, 0.1, **limits)
    assert found.steps == pytest.approx(steps, rel=0.01)
    assert found.steps <= limits["longest"]
    assert found.share > 0.0


def test_a_reliable_length_is_reached_by_9_of_10_seeds_without_outliers():
    found = least_cost(ALL_AT_END, LOG_100, 0.5, longest=1e6, reliable=True)
    assert found.share >= 0.9 * (1 - OUTLIERS) - 1e-6
    assert found.share > least_cost(ALL_AT_END, LOG_100, 0.5, longest=1e6).share


def test_runs_that_follow_the_law_are_read_exactly():
    scale, power, share, waste = 1.7, 0.9, 0.6, 0.3
    early = np.array([0.0, 0.0, 0.1, 2.0])
    excess = np.array([0.4, -0.2, 0.0, 0.0])
    reading = read_ends(theta(scale, power, share, waste), Ends(excess, early))
    reached = waste * np.tanh(early / waste) - share * early
    missed = np.array([scale * 0.4**power, -scale * 0.2**power, 0.0, 0.0])
    assert reading.log_over[0] == pytest.approx(reached + missed)


def test_the_weight_is_the_derivative_to_what_was_measured():
    draw = theta(1.7, 0.9, 0.6, 0.3)
    length, small = math.log(1000.0), 1e-5

    def log_s(excess, log_step):
        early = 0.0 if excess else length - log_step
        ends = Ends(np.array([excess]), np.array([early]))
        return float(log_step + read_ends(draw, ends).log_over[0, 0])

    by_excess = (log_s(0.4 + small, length) - log_s(0.4 - small, length)) / (2 * small)
    step = math.log(700.0)
    by_step = (log_s(0.0, step + small) - log_s(0.0, step - small)) / (2 * small)
    reading = read_ends(draw, Ends(np.array([0.4, 0.0]), np.array([0.0, length - step])))
    assert np.exp(reading.log_slope[0]) == pytest.approx([by_excess, by_step], rel=1e-4)


def test_how_records_ended_their_schedules():
    started = record(0, "missed", steps=10, schedule_steps=10, history=((10, 0.9),))
    missed = record(1, "missed", steps=80, schedule_steps=80, history=((40, 0.3), (80, 0.2)))
    at_end = record(2, steps=90, schedule_steps=90, history=((80, 0.12), (90, 0.08)))
    before = record(3, steps=50, schedule_steps=200, history=((40, 0.2), (50, 0.1)))
    diverged = record(4, "diverged", steps=5, schedule_steps=90, history=((5, None),))
    ends = ends_of([started, missed, at_end, before, diverged], TARGET, scale=0.1)
    assert ends.excess == pytest.approx([math.log(9.0), math.log(2.0), math.log(0.8), 0.0, 0.0])
    assert ends.is_at_start.tolist() == [True, False, False, False, False]
    assert ends.early == pytest.approx([0.0, 0.0, 0.0, math.log(4.0), 0.0])


def test_a_run_that_was_stopped_in_its_schedule_tells_nothing():
    stopped = record(0, "pruned", steps=50, schedule_steps=400, history=((50, 0.2),))
    assert sample_posterior(QUESTION, SPACE, [stopped], seed=0).chains == ()
