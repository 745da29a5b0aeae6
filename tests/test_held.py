import json
import math
from dataclasses import replace

import numpy as np
import pytest

from bstune.core.records import dump_json
from bstune.core.step_time import StepTime, StepTimes
from bstune.search.observations import Observation, Posterior, likelihood_data
from bstune.search.posterior import B_CRIT, BEND, EXPONENT, SHIFT, make_prior
from bstune.study.model import held_row, slopes, verdict, which_rule_held

LOW, HIGH = 8, 2048  # B_mid is 128
NORMAL90 = 1.6449


def prior_of(slope=0.5, exponent_sigma=0.35, bends=False):
    prior = make_prior(
        low=LOW,
        high=HIGH,
        rule=lambda x: -5.0 + slope * x,
        log_budget=math.log(1000.0),
        sigma=1.0,
        exponent_sigma=exponent_sigma,
        noise_scale=None,
        others=0,
    )
    if bends:
        return prior
    mean, spread = prior.mean.copy(), prior.spread.copy()
    mean[BEND], spread[BEND] = 0.0, 0.0
    return replace(prior, mean=mean, spread=spread)


def draws(prior, exponents, b_crit=128.0, bend=0.0):
    theta = np.tile(prior.mean, (len(exponents), 1))
    theta[:, EXPONENT], theta[:, BEND] = exponents, bend
    theta[:, SHIFT] = np.linspace(-1.0, 1.0, len(exponents))  # of no account
    theta[:, B_CRIT] = math.log(b_crit) - prior.log_mid * math.log(2.0)
    return theta


def known_of(prior, theta, sizes=(8, 16, 32, 64, 256, 1024), status="reached"):
    observations = tuple(
        Observation(i, status, 100, 0.01, math.log2(size), -4.0, (), None, 0.0, stuck=False)
        for i, size in enumerate(sizes)
    )
    return Posterior(observations, likelihood_data(observations, 0), theta, StepTimes(StepTime(1.0, 1.0)), 1.0, prior, math.inf)


def asked(known, low=LOW, high=HIGH, level=0.9):
    b_crit = 2.0**known.prior.log_mid * math.exp(float(np.median(known.theta[:, B_CRIT])))
    return which_rule_held(known, low, high, b_crit, level)


@pytest.mark.parametrize(
    ("b_crit", "low", "high", "share"),
    [
        (2.0**-12, LOW, HIGH, 1.0),  # the bend is over before the range begins
        (2.0**40, LOW, HIGH, 0.0),  # and after it ends
        (128.0, LOW, HIGH, 0.5),  # symmetric about B_crit: half of it
        (32.0, 8, 128, 0.5),
    ],
)
def test_slopes_in_closed_form(b_crit, low, high, share):
    prior = prior_of(slope=0.5)
    theta = draws(prior, [-0.2, 0.0, 0.3], b_crit, bend=-0.4)
    expected = 0.5 + np.array([-0.2, 0.0, 0.3]) - 0.4 * share
    assert slopes(theta, prior, low, high) == pytest.approx(expected, abs=1e-6)


def test_exponent_and_interval_are_quantiles_of_the_draws():
    prior = prior_of(slope=0.5)
    exponents = np.linspace(-0.1, 0.1, 101) + 0.12
    held = asked(known_of(prior, draws(prior, exponents, b_crit=256.0)))
    for found, end, reached in ((held.whole, HIGH, 6), (held.below_b_crit, 256.0, 5)):
        assert (found.exponent, found.low, found.high) == pytest.approx((0.62, 0.53, 0.71))
        assert (found.start, found.end) == pytest.approx((LOW, end))
        assert found.reached == reached
        assert found.told
        assert (found.prior_low, found.prior_high) == pytest.approx(
            (0.5 - NORMAL90 * 0.35, 0.5 + NORMAL90 * 0.35), abs=0.04
        )
    assert held.level == 0.9
    wide = asked(known_of(prior, draws(prior, exponents)), level=0.5)
    assert (wide.whole.low, wide.whole.high) == pytest.approx((0.57, 0.67))


def test_the_bend_counts_above_b_crit_only():
    prior = prior_of(slope=1.0, bends=True)
    theta = draws(prior, np.linspace(-0.05, 0.05, 11), b_crit=128.0, bend=-0.8)
    held = asked(known_of(prior, theta))
    assert held.whole.exponent == pytest.approx(1.0 - 0.8 * 0.5)
    assert held.below_b_crit.exponent == pytest.approx(1.0, abs=0.15)
    assert held.below_b_crit.exponent > 0.85


@pytest.mark.parametrize(
    ("b_crit", "sizes", "reached"),
    [
        (15.0, (8, 9, 10, 12, 14), None),  # less than an octave
        (4.0, (8, 9, 10, 12, 14), None),  # below all batch sizes
        (128.0, (8, 16, 256, 512), None),  # two reached there
        (128.0, (8, 16, 128, 512), 3),
        (1e6, (8, 16, 512), 3),
    ],
)
def test_below_b_crit_it_takes_an_octave_and_three_trials(b_crit, sizes, reached):
    prior = prior_of()
    held = asked(known_of(prior, draws(prior, [0.0, 0.01], b_crit), sizes))
    assert (None if held.below_b_crit is None else held.below_b_crit.reached) == reached
    assert ("there are too few batch sizes or reached trials to tell" in held.text) == (reached is None)


@pytest.mark.parametrize(("share", "told"), [(0.1, True), (0.7, True), (0.9, False), (1.1, False)])
def test_an_interval_as_wide_as_the_priors_tells_nothing(share, told):
    prior = prior_of()
    half = NORMAL90 * 0.35 * share / 0.9
    held = asked(known_of(prior, draws(prior, np.linspace(-half, half, 1001))))
    assert held.whole.told is told
    assert ("the trials hardly tell" in held.text) != told
    assert "(the prior alone: [-0." in held.text


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (-0.1, 0.2, "no scaling, as none says"),
        (0.4, 0.6, "as sqrt says"),
        (0.5, 0.5, "as sqrt says"),
        (0.9, 1.4, "as linear says"),
        (0.48, 1.02, "sqrt and linear both fit"),
        (-0.1, 0.6, "none and sqrt both fit"),
        (-0.1, 1.1, "none, sqrt and linear all fit"),
        (0.55, 0.75, "between sqrt and linear"),
        (0.1, 0.3, "between none and sqrt"),
        (1.1, 1.3, "faster than linear"),
        (-0.5, -0.1, "against all of none, sqrt and linear"),
    ],
)
def test_what_an_interval_says_of_the_rules(low, high, text):
    assert verdict(low, high) == text


@pytest.mark.parametrize(
    ("exponents", "b_crit", "start"),
    [
        (
            (0.03, 0.12, 0.21),
            912.0,
            "lr grew as B^0.62 [0.54, 0.70] up to B = 910, the posterior's B_crit: between sqrt and linear (the prior",
        ),
        (
            (-0.2, -0.1, -0.06),
            1e5,
            "lr grew as B^0.40 [0.31, 0.44] up to B = 2048, all of it below the posterior's B_crit: between none and",
        ),
        (
            (-0.8, -0.7, -0.6),
            3.0,
            "lr fell as B^-0.20 [-0.29, -0.11] from B = 8 to 2048: against all of none, sqrt and linear (the prior",
        ),
        ((-0.5, -0.5, -0.5), 3.0, "lr grew as B^0.00 [0.00, 0.00] from B = 8 to 2048: no scaling, as none says (the"),
    ],
)
def test_in_words(exponents, b_crit, start):
    prior = prior_of()
    text = asked(known_of(prior, draws(prior, exponents, b_crit))).text
    assert text.startswith(start)
    both = "; lr grew as B^0.62 [0.54, 0.70] from B = 8 to 2048: between sqrt and linear (the prior alone: ["
    assert (both in text) == (b_crit == 912.0)


@pytest.mark.parametrize(
    ("sizes", "start"),
    [
        ((), "not told: no trials reached the target, and it takes 3; the prior alone says an exponent of [-0."),
        ((8,), "not told: 1 trial reached the target, and it takes 3"),
        ((8, 64), "not told: 2 trials reached the target, and it takes 3"),
    ],
)
def test_too_few_reached_trials_are_said_to_be(sizes, start):
    prior = prior_of()
    held = asked(known_of(prior, draws(prior, [0.0, 0.01]), sizes))
    assert held.text.startswith(start)
    assert not held.whole.told
    stopped = asked(known_of(prior, draws(prior, [0.0]), (8, 64, 512), status="censored"))
    assert stopped.whole.reached == 0


@pytest.mark.parametrize("high", [8, 15])
def test_a_range_under_an_octave_has_no_exponent(high):
    prior = prior_of()
    assert asked(known_of(prior, draws(prior, [0.0])), 8, high) is None


def test_as_plain_data():
    prior = prior_of()
    held = asked(known_of(prior, draws(prior, [0.0, 0.1], b_crit=256.0)))
    row = json.loads(dump_json(held_row(held)))
    assert list(row) == [
        *("exponent", "low", "high", "prior_low", "prior_high", "from", "to", "reached", "told"),
        *("below_b_crit", "level", "text"),
    ]
    assert (row["from"], row["to"], row["level"]) == (8, 2048, 0.9)
    assert (row["below_b_crit"]["from"], row["below_b_crit"]["to"]) == pytest.approx((8, 256))
    assert row["text"] == held.text


def test_the_same_trials_give_the_same_answer():
    prior = prior_of(bends=True)
    known = known_of(prior, draws(prior, [0.0, 0.1]))
    assert asked(known) == asked(known)
