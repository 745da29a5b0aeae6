"""What trials tell of the law, by their ends and their histories, and the sampler."""

import math

import numpy as np
import pytest
from refusals import cases
from scipy.stats import norm
from search_records import BUDGET, QUESTION, SPACE, TARGET, history, record

from bstune.core.records import Target
from bstune.search import law as laws
from bstune.search.histories import excess_scale, extrapolate, log_curve, recent_line
from bstune.search.law import make_law
from bstune.search.posterior import (
    BOUND,
    DIVERGED,
    VALUE,
    Rows,
    log_likelihood,
    rows_of,
    sample_posterior,
)

LAW = make_law(SPACE, BUDGET, misfit=False)
THETA = np.array([[5.0, 0.0, 0.0, 0.0, math.log(0.45), math.log(1.2), math.log(0.2)]])


def falling(steps):
    """Evaluations that would meet the target after so many steps."""
    return tuple((step, 0.1 * (steps / step) ** 0.5) for step in (40, 60, 80, 100))


@pytest.mark.parametrize(
    "trial, kind, log_steps, deviation",
    [
        # The middle of (90, 100], and a uniform distribution's deviation.
        (record(), VALUE, math.log(95.5), math.sqrt(99 / 12) / 95.5),
        (record(status="missed", history=falling(150)), BOUND, math.log(100), 0.1),
        (record(status="diverged"), DIVERGED, 0.0, 1.0),
    ],
)
def test_what_a_trial_tells(trial, kind, log_steps, deviation):
    rows = rows_of([trial], TARGET)
    told = rows.x, rows.z, rows.kind, rows.log_steps, rows.deviation
    expected = 6.0, math.log2(0.05), kind, log_steps, deviation
    assert [column[0] for column in told] == pytest.approx(expected)


@pytest.mark.parametrize(
    "history, kind",
    # The second is wide for what is left of it, but near.
    [(falling(150), VALUE), (falling(104), VALUE), (history("40 0.4, 60 0.4, 100 0.4"), BOUND)],
)
def test_a_pruned_trial_is_extrapolated_or_a_bound(history, kind):
    trial = record(status="pruned", history=history)
    rows = rows_of([trial], TARGET)
    # A bound lies a deviation below what is extrapolated.
    extrapolated = extrapolate(log_curve(trial, TARGET, TARGET.goal), [])
    below = extrapolated.deviation if kind == BOUND else 0.0
    assert rows.kind[0] == kind
    assert rows.log_steps[0] == pytest.approx(extrapolated.log_steps - below)
    assert rows.log_steps[0] > math.log(100)


def test_only_the_last_trial_of_a_chain_that_tells_something_counts():
    records = [
        record(0, "pruned", steps=50),
        record(1, "pruned", steps=80, resumed_from=0),
        record(2, "failed", steps=80, resumed_from=1),
        record(3, "refused", steps=0),
        record(4, "out of memory", steps=0),
        record(5, "diverged", steps=10),
        record(6, role="new seed"),
    ]
    running = [record(7, batch_size=256)]
    posterior = sample_posterior(QUESTION, SPACE, records, seed=0, running=running)
    assert [chain.number for chain in posterior.chains] == [1, 5, 6]
    # Running trials count at their prediction.
    assert posterior.rows.x[3] == 8.0
    predicted = posterior.law.log_steps(posterior.theta, posterior.rows.x, posterior.rows.z)
    assert predicted[:, 3].mean() == pytest.approx(posterior.rows.log_steps[3], abs=0.3)


def one_row(log_steps, deviation, kind, lr=0.05):
    values = (6.0, math.log2(lr), log_steps, deviation)
    arrays = [np.array([value], dtype=float) for value in values]
    return Rows(*arrays, kind=np.array([kind]))


@pytest.mark.parametrize(
    "row, expected",
    [
        # The law says 5 at the best rate, with a deviation of 0.2 from seed to seed.
        (
            one_row(5.1, 0.15, VALUE),
            math.log(
                0.96 * math.exp(-0.5 * 0.01 / 0.0625) / 0.25
                + 0.04 * math.exp(-0.5 * 0.01 / 0.7025) / math.sqrt(0.7025)
            ),
        ),
        (one_row(5.1, 0.15, BOUND), math.log(norm.cdf(-0.1 / 0.25) + 0.01)),
        # Two octaves above the best rate cost 0.5 (2/1.2)^2 of log steps.
        (
            one_row(0.0, 1.0, DIVERGED, lr=0.2),
            math.log(norm.cdf((0.5 * (2 / 1.2) ** 2 - 1.5) / 0.4) + 0.01),
        ),
        (one_row(900.0, 0.0, VALUE), math.log(1e-30)),
    ],
)
def test_the_likelihood_of_each_kind(row, expected):
    assert log_likelihood(LAW, THETA, row)[0] == pytest.approx(expected, rel=1e-6)


def test_the_sampler_agrees_with_weighted_draws_of_the_prior():
    trials = [
        record(0, steps=300, steps_low=290),
        record(1, "missed", batch_size=16, lr=0.1, steps=400),
        record(2, "diverged", lr=0.4),
    ]
    theta = sample_posterior(QUESTION, SPACE, trials, seed=0, draws=2000, moves=4).theta
    prior = LAW.sample_prior(100_000, np.random.default_rng(1))
    weights = np.exp(log_likelihood(LAW, prior, rows_of(trials, TARGET)))
    for column in (laws.LEVEL, laws.B_CRIT, laws.SHIFT, laws.HIGH):
        order = prior[:, column].argsort()
        shares = weights[order].cumsum() / weights.sum()
        expected = np.interp((0.1, 0.5, 0.9), shares, prior[order, column])
        got = np.quantile(theta[:, column], (0.1, 0.5, 0.9))
        np.testing.assert_allclose(got, expected, atol=0.12 * LAW.spread[column])


def power_law(steps_to_target, rate, steps):
    """The curve of a metric that falls as a power of the steps."""
    return np.array([(math.log(step), rate * math.log(steps_to_target / step)) for step in steps])


def test_an_exact_power_law_is_read_exactly():
    history = [(step, 0.1 * (500 / step) ** 0.7) for step in (1, 50, 100, 150, 200)]
    curve = log_curve(record(status="pruned", history=history), TARGET, 0.1)
    np.testing.assert_allclose(curve, power_law(500, 0.7, (1, 50, 100, 150, 200)))
    line = recent_line(curve)
    assert (line.rate, line.level) == pytest.approx((0.7, 0.7 * math.log(2.5)))
    # Without an evaluation there is nothing to extrapolate.
    assert extrapolate(log_curve(record(history=[(0, 0.9), (10, None)]), TARGET, 0.1), []) is None


def test_two_evaluations_alone_fall_at_the_usual_rate():
    got = extrapolate(power_law(400, 0.8, (100, 200)), [])
    assert got.log_steps == pytest.approx(math.log(200) + 0.8 * math.log(2.0) / 0.4)


def test_other_trials_say_how_fast_the_rest_falls():
    slow = [power_law(400, 0.3, range(10, 401))] * 4
    fast = [power_law(400, 1.0, range(10, 401))] * 6
    got = extrapolate(power_law(400, 1.0, (100, 200)), slow + fast)
    # The latest six count, against the usual rate of 0.4.
    share_of_usual = (1 / 0.36) / (1 / 0.36 + 6 / 0.04)
    rate = math.exp(share_of_usual * math.log(0.4))
    assert got.log_steps == pytest.approx(math.log(200) + math.log(2.0) / rate, rel=2e-3)
    # Six rates that agree, 0.2 apart from trial to trial.
    deviation = math.sqrt(1 / (1 / 0.36 + 6 / 0.04) + 0.04)
    expected = math.hypot(0.15, 0.04 / rate, math.log(2.0) / rate * deviation)
    assert got.deviation == pytest.approx(expected, rel=1e-2)


@cases("""
target | first | scale
error <= 0.1 | 0.9 | 0.1
accuracy >= 0.9 | 0.5 | 0.1
loss <= 0.0 | 8.0 | 2.0
# No trial has said anything.
loss <= -3.0 | null | 1.0
""")
def test_the_scale_of_the_excess(target, first, scale):
    records = [record(history=[(1, first), (2, 0.7)])] if first is not None else []
    assert excess_scale(Target.parse(target), records) == pytest.approx(scale)
