import math

import numpy as np
import pytest
from builders import prepared_study

from bstune.core.step_time import StepTime, StepTimes
from bstune.result import LearningRateLaw
from bstune.search.frontier_law import B_CRIT, BEND, EXPONENT, NOISE, SHIFT, make_prior
from bstune.search.observations import Observation, likelihood_data
from bstune.search.posterior import Posterior
from bstune.study.analysis.model import (
    fit_lr_exponent,
    rule_exponents,
    seed_scatter,
    slopes,
    study_posterior,
)

# Their geometric middle is 128.
LOW, HIGH = 8, 2048
# The spread of the prior's exponent.
SIGMA = 0.35
NORMAL90 = 1.6449


def prior_of():
    options = {
        "log_budget": math.log(1000.0),
        "sigma": 1.0,
        "exponent_sigma": SIGMA,
        "noise_scale": None,
        "others": 0,
    }
    prior = make_prior(low=LOW, high=HIGH, rule=lambda x: -5.0 + 0.5 * x, **options)
    prior.mean[BEND] = 0.0
    prior.spread[BEND] = 0.0
    return prior


def draws(prior, exponents, b_crit=128.0, bend=0.0):
    theta = np.tile(prior.mean, (len(exponents), 1))
    theta[:, EXPONENT] = exponents
    theta[:, BEND] = bend
    # This parameter is of no account.
    theta[:, SHIFT] = np.linspace(-1.0, 1.0, len(exponents))
    theta[:, B_CRIT] = math.log(b_crit) - prior.log_mid * math.log(2.0)
    return theta


def posterior_of(prior, theta, sizes=(8, 16, 32, 64, 256, 1024), status="reached"):
    logs = [math.log2(size) for size in sizes]
    seen = tuple(
        Observation(i, status, 100, 99, 0.01, x, -4.0, (), None, 0.0, stuck=False)
        for i, x in enumerate(logs)
    )
    tau = StepTimes(StepTime(1.0, 1.0))
    return Posterior(seen, likelihood_data(seen, prior), theta, tau, 1.0, prior, math.inf)


def fitted(exponents, *observed, b_crit=128.0, high=HIGH):
    """The exponent's row for draws whose exponents are off the prior's by these, and what was observed."""
    prior = prior_of()
    theta = draws(prior, exponents, b_crit or 128.0)
    return fit_lr_exponent(posterior_of(prior, theta, *observed), LOW, high, b_crit)


@pytest.mark.parametrize(
    ("b_crit", "low", "high", "share"),
    [
        # The bend is over before the range begins.
        (2.0**-12, LOW, HIGH, 1.0),
        # The bend begins after the range ends.
        (2.0**40, LOW, HIGH, 0.0),
        # The bend is symmetric about B_crit: half of it lies below.
        (128.0, LOW, HIGH, 0.5),
        (32.0, 8, 128, 0.5),
    ],
)
def test_slopes_in_closed_form(b_crit, low, high, share):
    prior = prior_of()
    theta = draws(prior, [-0.2, 0.0, 0.3], b_crit, bend=-0.4)
    expected = 0.5 + np.array([-0.2, 0.0, 0.3]) - 0.4 * share
    assert slopes(theta, prior, low, high) == pytest.approx(expected, abs=1e-6)


def test_the_scatter_over_seeds_is_the_noise_of_the_draws():
    prior = prior_of()
    theta = draws(prior, np.zeros(101))
    theta[:, NOISE] = np.linspace(math.log(0.05), math.log(0.2), 101)
    # The quantiles of 5% and 95%, over a factor of 4.
    low = 0.05 * 4**0.05
    high = 0.05 * 4**0.95
    assert seed_scatter(posterior_of(prior, theta)).model_dump() == pytest.approx(
        {"scatter": 0.1, "low": low, "high": high, "level": 0.9}
    )


def test_exponent_and_interval_are_quantiles_of_the_draws():
    exponents = np.linspace(-0.1, 0.1, 101) + 0.12
    whole = fitted(exponents, b_crit=256.0)
    for row, end, reached in ((whole, HIGH, 6), (whole.below_b_crit, 256.0, 5)):
        # The rule's 0.5 and 0.12; 90% of +-0.1 are +-0.09.
        assert (row.exponent, row.low, row.high) == pytest.approx((0.62, 0.53, 0.71))
        assert (row.start, row.end) == pytest.approx((LOW, end))
        assert (row.reached, row.identified) == (reached, True)
        alone = (0.5 - NORMAL90 * SIGMA, 0.5 + NORMAL90 * SIGMA)
        assert (row.prior_low, row.prior_high) == pytest.approx(alone, abs=0.04)
    assert whole.level == 0.9
    assert fitted(exponents, b_crit=256.0) == whole
    assert LearningRateLaw.model_validate_json(whole.model_dump_json()) == whole


@pytest.mark.parametrize(
    ("b_crit", "sizes", "reached"),
    [
        # These batch sizes span less than an octave.
        (15.0, (8, 9, 10, 12, 14), None),
        # B_crit lies below all batch sizes.
        (4.0, (8, 9, 10, 12, 14), None),
        # Two reached the target there.
        (128.0, (8, 16, 256, 512), None),
        (128.0, (8, 16, 128, 512), 3),
        (1e6, (8, 16, 512), 3),
    ],
)
def test_below_b_crit_it_takes_an_octave_and_three_trials(b_crit, sizes, reached):
    row = fitted([0.0, 0.01], sizes, b_crit=b_crit)
    assert (row.below_b_crit and row.below_b_crit.reached) == reached


@pytest.mark.parametrize(
    ("share", "identified"), [(0.1, True), (0.7, True), (0.9, False), (1.1, False)]
)
def test_an_interval_as_wide_as_the_priors_identifies_nothing(share, identified):
    # 90% of a uniform distribution are 0.9 of its width.
    half = NORMAL90 * SIGMA * share / 0.9
    row = fitted(np.linspace(-half, half, 1001))
    assert row.identified is identified


def test_reached_trials_at_one_end_identify_nothing():
    # Four of the range's eight octaves, and fewer.
    for sizes, identified in (((8, 16, 128), True), ((8, 16, 96), False), ((64,) * 6, False)):
        assert fitted([0.0, 0.01], sizes).identified is identified


def test_without_a_critical_batch_size_none_is_spoken_of_and_its_rules_are_left_out():
    row = fitted([0.0, 0.01], b_crit=None)
    assert row.below_b_crit is None
    assert row.rules == rule_exponents(LOW, HIGH, None) == {"none": 0.0, "sqrt": 0.5, "linear": 1.0}
    assert set(fitted([0.0, 0.01]).below_b_crit.rules) == {
        "none",
        "sqrt",
        "linear",
        "saturating",
        "surge",
    }


@pytest.mark.parametrize(
    ("noise_scale", "expected"),
    [
        (2.0**60, {"none": 0.0, "sqrt": 0.5, "surge": 0.5, "linear": 1.0, "saturating": 1.0}),
        (2.0**-60, {"surge": -0.5, "none": 0.0, "saturating": 0.0, "sqrt": 0.5, "linear": 1.0}),
        # It stands in the middle of the range.
        (
            128.0,
            {"none": 0.0, "surge": 0.0, "saturating": 0.5, "sqrt": 0.5, "linear": 1.0},
        ),
    ],
)
def test_exponents_of_the_five_rules(noise_scale, expected):
    found = rule_exponents(LOW, HIGH, noise_scale)
    assert found == pytest.approx(expected, abs=1e-9)
    assert list(found.values()) == sorted(found.values())


@pytest.mark.parametrize(("sizes", "count"), [((), 0), ((8,), 1), ((8, 64), 2)])
def test_too_few_reached_trials_identify_nothing(sizes, count):
    row = fitted([0.0, 0.01], sizes)
    assert (row.identified, row.reached) == (False, count)
    assert fitted([0.0], (8, 64, 512), "stopped").reached == 0
    assert [fitted([0.0], high=high) for high in (8, 15)] == [None, None]


@pytest.mark.parametrize("given", [None, 900.0])
def test_the_posterior_takes_the_noise_scale_given_or_measured(
    tmp_path, monkeypatch, make_result, given
):
    monkeypatch.chdir(tmp_path)
    replayed = ["+workload=replay", "workload.table=mnist_cnn", "mlflow.enabled=false"]
    noise_scale = "null" if given is None else given
    prepared = prepared_study(*replayed, f"scaling.noise_scale={noise_scale}")
    measured = tuple((32 * i, 0.1, 5.0) for i in range(1, 4))
    done = [make_result(number=n, batch_size=2 ** (4 + n), noise_scale=measured) for n in range(4)]
    posterior = study_posterior(prepared, done, 20)
    # Where a table repeats a run, trials have one history.
    np.testing.assert_allclose(posterior.data.weight, 0.25)
    # tr Sigma/|G|^2 = 5/0.1.
    prior = posterior.prior
    assert 2**prior.log_mid * math.exp(prior.mean[B_CRIT]) == pytest.approx(given or 50.0)
