import math

import numpy as np
import pytest
from refusals import cases
from scipy.optimize import minimize_scalar
from scipy.special import ndtr
from search_records import SPACE, TARGET, history, record

from bstune.core.question import Question
from bstune.core.records import Budget
from bstune.search.posterior import sample_posterior
from bstune.search.schedule_length import OUTLIERS, Ends, ends_of, least_cost, length_of, read_ends

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
    share = (1 - OUTLIERS) * ndtr(closed.x / 0.1)
    cost = 100 * closed.fun / (1 - OUTLIERS)
    expected = 100 * math.exp(closed.x), share, cost
    assert (found.steps, found.share, found.cost) == pytest.approx(expected, rel=0.02)
    assert found.steps == pytest.approx(117, rel=0.03)
    # A reliable length is reached by 9 of 10 seeds, outliers left out.
    safe, cheap = (
        least_cost(ALL_AT_END, LOG_100, 0.5, longest=1e6, reliable=reliable)
        for reliable in (True, False)
    )
    assert safe.share >= 0.9 * (1 - OUTLIERS) - 1e-6 > cheap.share


def test_cost_of_a_length_where_the_target_is_reached_at_a_power_of_it():
    # S^(1 - m) h^m with m/(1 - m) = share.
    share, m = 4.0, 0.8
    found = length_of(theta(share=share, waste=1e-6), LOG_100, 0.2, steps=150.0)
    chance = (1 - OUTLIERS) * ndtr(math.log(1.5) / 0.2)
    reached = 100 ** (1 - m) * 150**m
    assert found.share == pytest.approx(chance)
    assert found.cost == pytest.approx(reached + 150 * (1 - chance) / chance, rel=1e-3)


@cases("""
limits | steps
{longest: 50.0} | 50.0
# Where all is gained at the end, the step that reaches is the length.
{longest: 1000000.0, latest: 105.0} | 105.0
# Nothing is reliable that early: the longest comes closest.
{longest: 101.0, reliable: true} | 101.0
""")
def test_limits_of_a_length(limits, steps):
    found = least_cost(ALL_AT_END, LOG_100, 0.1, **limits)
    assert found.steps == pytest.approx(steps, rel=0.01)
    assert found.steps <= limits["longest"]
    assert found.share > 0.0


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
    length, step, small = math.log(1000.0), math.log(700.0), 1e-5

    def log_s(excess, log_step):
        ends = Ends(np.array([excess]), np.array([0.0 if excess else length - log_step]))
        return float(log_step + read_ends(draw, ends).log_over[0, 0])

    by_excess = log_s(0.4 + small, length) - log_s(0.4 - small, length)
    by_step = log_s(0.0, step + small) - log_s(0.0, step - small)
    reading = read_ends(draw, Ends(np.array([0.4, 0.0]), np.array([0.0, length - step])))
    expected = np.array([by_excess, by_step]) / (2 * small)
    assert np.exp(reading.log_slope[0]) == pytest.approx(expected, rel=1e-4)


def test_how_records_ended_their_schedules():
    def ended(status, length, evaluations):
        ran = history(evaluations)
        return record(0, status, steps=ran[-1][0], schedule_steps=length, history=ran)

    runs = [
        ended("missed", 10, "10 0.9"),
        ended("missed", 80, "40 0.3, 80 0.2"),
        ended("reached", 90, "80 0.12, 90 0.08"),
        ended("reached", 200, "40 0.2, 50 0.1"),
        ended("diverged", 90, "5 -"),
    ]
    ends = ends_of(runs, TARGET, scale=0.1)
    assert np.exp(ends.excess) == pytest.approx([9.0, 2.0, 0.8, 1.0, 1.0])
    assert ends.is_at_start.tolist() == [True, False, False, False, False]
    assert np.exp(ends.early) == pytest.approx([1.0, 1.0, 1.0, 4.0, 1.0])
    # A run that was stopped in its schedule tells nothing.
    stopped = ended("pruned", 400, "50 0.2")
    assert sample_posterior(QUESTION, SPACE, [stopped], seed=0).chains == ()
