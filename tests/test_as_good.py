"""The range of batch sizes that are as good as the best one."""

from functools import partial

import numpy as np
import pytest
from toolbox import make_trial

from bstune.core import scaling
from bstune.core.search_space import Space
from bstune.study.analysis.as_good import AS_GOOD_WITHIN, KnownRates, known_rates, sizes_as_good

SIZES = (16, 32, 64, 128, 256, 512)
# tau(B) = 1 + B/64 seconds, S(B) = 100 (1 + 64/B): T = 100 (2 + B/64 + 64/B) is least at B = 64.
STEPS = [100.0 * (1.0 + 64.0 / size) for size in SIZES]
TAU = tuple(1.0 + size / 64.0 for size in SIZES)
WINNER = make_trial(0, 64, 0.1)
ALL_KNOWN = KnownRates((0.1,) * len(SIZES), np.ones(len(SIZES), dtype=bool))


def logs(steps=STEPS, tau=TAU):
    """One draw of the logarithm of each batch size's cost."""
    return np.log(np.array(steps) * np.array(tau))[None]


def found_for(drawn, winner, merit="time"):
    return sizes_as_good(SIZES, ALL_KNOWN, drawn, winner, merit)


@pytest.mark.parametrize(
    ("tau", "merit", "low", "high"),
    [
        (TAU, "time", 64, 64),
        # Within 10% of a least that is flat.
        ((1.0, 1.0, 1.0, 4 / 3, 1.6, 16 / 9), "time", 64, 512),
        # Steps fall to the end: 112.5 at 512 and 125 at 256.
        ((1.0,) * 6, "steps", 512, 512),
    ],
)
def test_the_range_is_where_at_most_a_tenth_more_is_taken(tau, merit, low, high):
    winner = make_trial(0, low, 0.1)
    found = found_for(logs(tau=tau), winner, merit)
    assert (found.low, found.high, found.within) == (low, high, AS_GOOD_WITHIN)


def test_the_winner_is_one_of_them_and_so_is_its_rate():
    found = found_for(logs(), make_trial(0, 300, 7.0))
    assert (found.low, found.high) == (64, 300)
    assert (found.lr_low, found.lr_high) == (0.1, 7.0)


@pytest.mark.parametrize(
    ("winner", "low", "middle", "high"),
    [
        # The law's range is 64 to 512, at a rate of 0.1. At an end the winner's rate is its own.
        ((512, 0.05), (64, 0.1), (128, 0.1), (512, 0.05)),
        ((512, 0.2), (64, 0.1), (128, 0.1), (512, 0.2)),
        ((64, 0.05), (64, 0.05), (128, 0.1), (512, 0.1)),
        # An end beside it is told as the winner, on either side.
        ((500, 0.05), (64, 0.1), (128, 0.1), (500, 0.05)),
        ((530, 0.05), (64, 0.1), (128, 0.1), (530, 0.05)),
        ((66, 0.05), (66, 0.05), (128, 0.1), (512, 0.1)),
        ((62, 0.05), (62, 0.05), (128, 0.1), (512, 0.1)),
        # Elsewhere it lies within.
        ((450, 0.05), (64, 0.1), (450, 0.05), (512, 0.1)),
    ],
)
def test_a_batch_size_has_one_rate_and_the_winners_is_its_own(winner, low, middle, high):
    tau = (1.0, 1.0, 1.0, 4 / 3, 1.6, 16 / 9)
    found = found_for(logs(tau=tau), make_trial(0, *winner))
    assert (found.low, found.lr_low) == low
    assert (found.middle, found.lr_middle) == middle
    assert (found.high, found.lr_high) == high


def test_a_second_least_beyond_a_hill_is_not_joined():
    steps = [100.0, 150.0, 99.0, 100.0, 150.0, 99.5]
    found = found_for(logs(steps, (1.0,) * 6), WINNER)
    assert (found.low, found.high) == (64, 128)


@pytest.mark.parametrize(
    ("chance", "last"), [(0.4, 64), (0.6, 128), (1.0, 128)], ids=["unlikely", "likely", "sure"]
)
def test_what_is_probably_as_good_is_one_of_them(chance, last):
    """In a share of the draws T(128) is 5% over the least, else 50%."""
    drawn = np.repeat(logs([100.0, 100.0, 50.0, 75.0, 100.0, 100.0], (1.0,) * 6), 10, axis=0)
    drawn[: round(10 * chance), 3] = np.log(52.5)
    found = found_for(drawn, WINNER)
    assert (found.low, found.high) == (64, last)
    assert (found.is_low_open, found.is_high_open) == (False, False)


SPACE = Space(16, 512, 1, 1.0, partial(scaling.sqrt, reference_batch_size=64, reference_lr=0.1))


@pytest.mark.parametrize(
    ("reached", "rates", "are_near"),
    [
        # The square-root rule gives 0.05, 0.1 and 0.2 at batch sizes 16, 64 and 256. One trial at
        # the rule's rate holds each rate to the rule's.
        ([(64, 0.1)], (0.05, 0.1, 0.2), (False, True, True)),
        # The posterior's rates lie 2, 0 and 1 octaves above the rule's: what lies between two
        # trials stays.
        ([(64, 0.1), (256, 0.8)], (0.2, 0.1, 0.4), (True, True, True)),
        ([(64, 0.1), (256, 0.4)], (0.1, 0.1, 0.4), (True, True, True)),
        # All that reached the target lie 2 octaves below the rule.
        ([(16, 0.0125)], (0.0125, 0.025, 0.05), (False, False, False)),
    ],
)
def test_rates_are_told_as_far_as_trials_have_shown_them(reached, rates, are_near):
    trials = [make_trial(number, *pair) for number, pair in enumerate(reached)]
    known = known_rates((16, 64, 256), (0.2, 0.1, 0.4), trials, SPACE)
    assert known.rates == pytest.approx(rates)
    assert tuple(known.is_near) == are_near


def test_the_range_ends_where_no_trial_speaks_for_a_rate():
    """All sizes are as good, but rates are known at 64 and 128 alone."""
    # The least is at 64.
    flat = np.array([[0.0, 0.0, -0.01, 0.0, 0.0, 0.0]])
    known = KnownRates((0.1,) * 6, np.array([True, False, True, True, False, True]))
    found = sizes_as_good(SIZES, known, flat, WINNER, "time")
    assert (found.low, found.high) == (64, 128)
    assert (found.is_low_open, found.is_high_open) == (True, True)


def test_without_a_known_rate_the_winner_alone_is_told():
    flat = np.zeros((1, len(SIZES)))
    known = KnownRates((0.1,) * 6, np.zeros(6, dtype=bool))
    found = sizes_as_good(SIZES, known, flat, make_trial(0, 62, 0.3), "time")
    assert (found.low, found.middle, found.high) == (62, 62, 62)
    assert (found.lr_low, found.lr_middle, found.lr_high) == (0.3, 0.3, 0.3)
