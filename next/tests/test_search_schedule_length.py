import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.special import ndtr
from search_records import BUDGET, SPACE, TARGET, record, step_time

from bstune.core.question import Question
from bstune.core.records import Budget
from bstune.search.decide import MISFIT_DRAWS, MISFIT_MOVES, propose
from bstune.search.findings import OWN_DEVIATION, predictions, share_reaching
from bstune.search.law import NOISE, make_law
from bstune.search.posterior import (
    BOUND,
    VALUE,
    Posterior,
    Rows,
    log_likelihood,
    rows_of,
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
NOTHING_AT_END = theta(share=1e-6, waste=1e-6)


def test_where_all_is_gained_at_the_end_the_best_length_is_17_percent_above_s():
    found = least_cost(ALL_AT_END, LOG_100, 0.1, longest=1e6)
    # h/P, whose constant factor for outliers does not move the minimum.
    closed = minimize_scalar(lambda u: math.exp(u) / ndtr(u / 0.1), bounds=(0, 1), method="bounded")
    assert found.steps == pytest.approx(100 * math.exp(closed.x), rel=0.02)
    assert found.steps == pytest.approx(117, rel=0.03)
    assert found.share == pytest.approx((1 - OUTLIERS) * ndtr(closed.x / 0.1), abs=0.02)
    assert found.cost == pytest.approx(100 * closed.fun / (1 - OUTLIERS), rel=0.02)


@pytest.mark.parametrize("share", [0.25, 1.0, 4.0])
def test_cost_of_a_length_where_the_target_is_reached_at_a_power_of_it(share):
    # S^(1 - m) h^m with m/(1 - m) = share.
    m = share / (1 + share)
    found = length_of(theta(share=share, waste=1e-6), LOG_100, 0.2, steps=150.0)
    chance = (1 - OUTLIERS) * ndtr(math.log(1.5) / 0.2)
    reached = 100 ** (1 - m) * 150**m
    assert found.share == pytest.approx(chance)
    assert found.cost == pytest.approx(reached + 150 * (1 - chance) / chance, rel=1e-3)


@pytest.mark.parametrize(
    ("limits", "steps"),
    [
        ({"longest": 110.0}, 110.0),
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


def test_no_length_reaches_before_a_very_early_step():
    found = least_cost(ALL_AT_END, LOG_100, 0.1, longest=1e6, latest=50.0)
    assert (found.steps, found.cost, found.share) == (50.0, math.inf, 0.0)


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


def test_a_run_that_missed_by_next_to_nothing_still_missed():
    missed = record(0, "missed", steps=80, schedule_steps=80, history=((80, 0.1 + 1e-9),))
    assert ends_of([missed], TARGET, scale=0.1).excess == pytest.approx([0.003])


def test_the_likelihood_is_that_of_what_was_measured():
    missed = record(1, "missed", steps=80, schedule_steps=80, history=((40, 0.3), (80, 0.2)))
    worse = record(0, "missed", steps=10, schedule_steps=10, history=((10, 0.9),))
    law = make_law(SPACE, BUDGET, misfit=False, schedule_ends=True)
    rows = rows_of([worse, missed], TARGET, schedule_ends=True)
    draw = law.mean[None].copy()
    seen, variance, log_weight = rows.seen(law, draw)
    # The bound is at least what is read; the value has the density of its metric.
    assert rows.kind.tolist() == [BOUND, VALUE]
    as_steps = Rows(rows.x, rows.z, seen[0], np.sqrt(variance[0]), rows.kind)
    of_steps = replace(law, schedule_ends=False)
    expected = log_likelihood(of_steps, draw, as_steps)[0] + log_weight[0, 1]
    assert log_likelihood(law, draw, rows)[0] == pytest.approx(expected)


def test_predictions_of_one_draw():
    """They lie between law and trial by the share of the configuration's own deviation."""
    at_end = record(0, steps=90, schedule_steps=90, history=((80, 0.12), (90, 0.08)))
    new_seed = record(1, role="new seed", steps=90, schedule_steps=90, history=((90, 0.08),))
    law = make_law(SPACE, BUDGET, misfit=False, schedule_ends=True)
    draw = law.mean[None].copy()
    chains = (at_end, new_seed)
    posterior = Posterior(law, draw, rows_of(chains, TARGET, schedule_ends=True), chains)
    (found,) = predictions(posterior, QUESTION, step_time)
    assert found.record is at_end
    seed_variance = math.exp(2 * law.mean[NOISE]) + posterior.rows.seen(law, draw)[1][0, 0]
    share_of_law = seed_variance / (OWN_DEVIATION**2 + seed_variance)
    assert found.deviation == pytest.approx(OWN_DEVIATION * math.sqrt(share_of_law))
    of_law = law.log_steps(draw, np.array([6.0]), np.log2([0.05]))[0, 0]
    seen = posterior.rows.seen(law, draw)[0][0, 0]
    between = share_of_law * of_law + (1 - share_of_law) * seen
    deviation = math.hypot(found.deviation, posterior.noise)
    expected = length_of(draw, between, deviation, found.length.steps)
    assert found.length.share == pytest.approx(expected.share, abs=1e-3)
    share = share_reaching(posterior, 0, math.ceil(found.length.steps))
    assert share == pytest.approx(expected.share, abs=0.01)


def test_a_run_that_was_stopped_in_its_schedule_tells_nothing():
    stopped = record(0, "pruned", steps=50, schedule_steps=400, history=((50, 0.2),))
    assert sample_posterior(QUESTION, SPACE, [stopped], seed=0).chains == ()


@pytest.mark.parametrize("seed", range(8))
def test_for_the_curve_no_schedule_is_longer_than_what_it_tells_is_worth(seed):
    question = replace(QUESTION, objective="curve")
    records = [record(steps=447, steps_low=425, schedule_steps=1000, history=((447, 0.1),))]
    proposal = propose(question, SPACE, step_time, records, seed)
    posterior = sample_posterior(
        question, SPACE, records, seed=seed, misfit=True, draws=MISFIT_DRAWS, moves=MISFIT_MOVES
    )
    x, z = np.log2([proposal.batch_size]), np.log2([proposal.lr])
    steps = np.exp(np.median(posterior.law.log_steps(posterior.theta, x, z)))
    assert proposal.max_steps <= math.ceil(1.61 * steps)
