"""What trials measured of the noise scale, as a prior of B_crit."""

import math

import numpy as np
import pytest
from optuna.distributions import FloatDistribution, IntDistribution
from scipy import stats

from bstune.search.posterior import B_CRIT, measured_noise_scale, noise_scale_prior, noise_scale_row
from bstune.search.sampler import FrontierSampler

LOW, HIGH = 8, 8192
SPACE = {"batch_size": IntDistribution(LOW, HIGH, log=True), "lr": FloatDistribution(1e-3, 1.0, log=True)}


def steps_of(noise_scale, trace=10.0, count=4):
    """Return measurements whose means are ``trace`` and ``trace / noise_scale``, none of them the mean."""
    gradient, away = trace / noise_scale, np.linspace(-1, 1, count)
    return tuple((32 * (i + 1), gradient * (1 + 3 * a), trace * (1 + 0.5 * a)) for i, a in enumerate(away.tolist()))


@pytest.fixture
def trials(make_result):
    """Return a function that makes trials, each with its own noise scale and, in turn, gradients 100 times as large."""

    def make(noise_scales, **changes):
        return [
            make_result(number=n, **{"noise_scale": steps_of(scale, 10.0 * 100.0 ** (n % 2))} | changes)
            for n, scale in enumerate(noise_scales)
        ]

    return make


def prior(found, noise_scale=None):
    sampler = FrontierSampler(seed=0, search_space=SPACE, noise_scale=noise_scale)
    return sampler.posterior(found, particles=10, moves=1).prior


def b_crit(found):
    """Return the prior's B_crit and the standard deviation of its logarithm."""
    return math.sqrt(LOW * HIGH) * math.exp(found.mean[B_CRIT]), found.spread[B_CRIT]


def test_a_trial_is_a_block_in_units_of_its_own_trace(trials):
    scales = [100.0, 150.0, 200.0, 400.0, 90.0]
    inverse = 1.0 / np.array(scales)
    half = stats.t.ppf(0.95, len(scales) - 1) * inverse.std(ddof=1) / math.sqrt(len(scales))
    estimate, steps = measured_noise_scale(trials(scales))
    assert estimate.noise_scale == pytest.approx(1.0 / inverse.mean())
    assert estimate.low == pytest.approx(1.0 / (inverse.mean() + half))
    assert estimate.high == pytest.approx(1.0 / (inverse.mean() - half))
    assert (estimate.measurements, steps) == (5, 20)


def test_the_order_of_the_trials_does_not_matter(trials):
    found = trials([100.0 + 7.0 * n for n in range(40)])  # more than there are blocks
    assert measured_noise_scale(found[::-1]) == measured_noise_scale(found)


@pytest.mark.parametrize(
    "changes",
    [
        {"status": "censored"},
        {"status": "diverged"},
        {"status": "failed"},
        {"noise_scale": ()},
        {"noise_scale": steps_of(9.0)[:1]},  # a single step
        {"noise_scale": ((32, 0.0, 0.0), (64, 0.0, 0.0))},  # no gradient at all
    ],
)
def test_trials_that_say_nothing_of_the_whole_way_do_not_count(trials, changes):
    found = trials([100.0, 120.0, 140.0, 160.0])
    others = trials([1.0, 2.0, 3.0, 4.0], **changes)
    assert measured_noise_scale(others) is None
    assert noise_scale_prior(others) is None
    assert measured_noise_scale([*found, *others]) == measured_noise_scale(found)


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_few_trials_give_no_hint(trials, count):
    found = trials([100.0] * count)
    assert noise_scale_prior(found) is None
    assert b_crit(prior(found)) == (pytest.approx(math.sqrt(LOW * HIGH)), math.log(6.0))


def test_a_gradient_lost_in_the_noise_gives_no_hint(trials):
    assert noise_scale_prior(trials([100.0, -100.0, 100.0, -90.0, 80.0, -120.0])) is None


def test_a_hint_is_the_middle_of_a_wide_prior_and_the_wider_the_less_it_knows(trials):
    sure, unsure = trials([300.0, 301.0, 299.0, 300.0]), trials([150.0, 600.0, 250.0, 400.0, 280.0])
    value, spread = b_crit(prior(sure))
    assert value == pytest.approx(300.0, rel=1e-2)
    assert spread == pytest.approx(math.log(4.0), rel=1e-2)  # as a given one: it may miss by several times
    estimate = measured_noise_scale(unsure)[0]
    value, spread = b_crit(prior(unsure))
    assert value == pytest.approx(estimate.noise_scale)
    assert spread == pytest.approx(math.hypot(math.log(4.0), 0.5 * math.log(estimate.high / estimate.low)))
    assert spread > 1.05 * math.log(4.0)


def test_a_noise_scale_that_is_given_takes_precedence(trials):
    found = prior(trials([300.0] * 5), noise_scale=50.0)
    assert b_crit(found) == (pytest.approx(50.0), math.log(4.0))


def test_the_row_of_the_report(trials):
    found = trials([100.0, 100.0, 100.0, 100.0])
    row = noise_scale_row(found, (20.0, 50.0, 90.0), 200.0)
    assert row == {
        "noise_scale": pytest.approx(100.0),
        "low": pytest.approx(100.0),
        "high": pytest.approx(100.0),
        "level": 0.9,
        "trials": 4,
        "steps": 16,
        "undetermined": None,
        "ratio_to_posterior": pytest.approx(2.0),
        "ratio_to_fit": pytest.approx(0.5),
    }
    row = noise_scale_row(found, None, None)
    assert (row["ratio_to_posterior"], row["ratio_to_fit"]) == (None, None)


@pytest.mark.parametrize(
    ("scales", "reason"),
    [
        ([100.0], "4 trials that reach the target are needed"),
        ([100.0, -100.0, 100.0, -90.0], "|G|^2 does not differ from 0"),
    ],
)
def test_the_row_says_why_there_is_no_value(trials, scales, reason):
    row = noise_scale_row(trials(scales), (20.0, 50.0, 90.0), 200.0)
    assert (row["noise_scale"], row["high"], row["undetermined"]) == (None, None, reason)
    assert (row["ratio_to_posterior"], row["ratio_to_fit"]) == (None, None)


def test_there_is_no_row_where_nothing_was_measured(make_result):
    assert noise_scale_row([make_result()], (20.0, 50.0, 90.0), 200.0) is None
